"""Check the targets of `accel benchmark` and `accel tune` for speed and precision.

    python benchmarks/tune.py MODEL TEST.csv TRAIN.csv OUT.json [--parts cost,tune,resume,winner,aa] [--tuned FOLDER]
    python benchmarks/tune.py MODEL TEST.csv TRAIN.csv OUT.json --parts page       # writes OUT.md from OUT.json

The parts are:

- cost: time that the benchmark loop adds to a call;
- tune: duration and result of a search;
- resume: duration of the same search with saved measurements;
- winner: new measurement of the selected variant;
- aa: comparison of two copies of one variant.

Run the script on a quiet machine. Set `ACCEL_HOME` to a folder that does not exist yet. Each part adds its numbers to OUT.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import accel
from accel.artifact.manifest import Artifact
from accel.backends import registry
from accel.backends.machine import machine
from accel.measuring.latency.benchmark import benchmark
from accel.measuring.latency.variants import Variant
from accel.measuring.latency.worker import timed
from accel.tuning.trials import render


def cost() -> dict[str, float]:
    """Return the time that the benchmark loop adds to a call, in microseconds. It is measured with an empty call."""
    runs = [statistics.median(timed(lambda **_: None, [{"a": 1}] * 20_000)) * 1000 for _ in range(5)]
    started = time.perf_counter()
    timed(lambda **_: None, [{"a": 1}] * 200_000)
    return {"inside_us": min(runs), "per_call_us": (time.perf_counter() - started) / 0.2}


def a_a(folder: Path, runs: int) -> dict[str, object]:
    """Compare two copies of one variant, several times."""
    ratios = []
    for _ in range(runs):
        pair = [Variant(name=name, path=folder, task="text-classification") for name in ("A", "A again")]
        ratio = benchmark(pair, sequence=[32]).variants[1].cells[0].ratio
        assert ratio is not None
        ratios.append([ratio.value, ratio.low, ratio.high])
    return {
        "runs": runs,
        "covers_one": sum(low <= 1 <= high for _, low, high in ratios),
        "largest_difference": max(abs(value - 1) for value, _, _ in ratios),
        "median_difference": statistics.median(abs(value - 1) for value, _, _ in ratios),
        "ratios": ratios,
    }


def winner(folder: Path, data: str) -> dict[str, object]:
    """Measure the selected variant of a search again in new processes: its latency in turns with PyTorch, and its accuracy."""
    artifact = Artifact.load(folder)
    run = artifact.manifest.run
    assert run is not None
    report = benchmark(artifact, sequence=[32, 128])
    base, tuned = report.variants
    evaluation = accel.evaluate(folder, data)
    return {
        "name": json.loads((folder / "tune.json").read_text())["winner"],
        "recorded_ms": dict(run.measured["median_ms"]),
        "recorded_pytorch_ms": dict(run.measured["pytorch_float32_ms"]),
        "measured_ms": {cell.workload: cell.latency.median for cell in tuned.cells},
        "measured_pytorch_ms": {cell.workload: cell.latency.median for cell in base.cells},
        "ratio": {
            cell.workload: [cell.ratio.value, cell.ratio.low, cell.ratio.high] for cell in tuned.cells if cell.ratio
        },
        "recorded_accuracy": run.measured["value"],
        "measured_accuracy": evaluation.value,
        "drop": run.measured["drop"],
        "rows": evaluation.rows,
    }


def page(values: dict[str, Any]) -> str:
    """Return the page about OUT.json, a table with each result and its target."""
    rows: list[tuple[str, str, str]] = []
    if "cost" in values:
        cost = values["cost"]
        result = (
            f"{cost['per_call_us']:.2f} microseconds, of which {cost['inside_us']:.2f} are part of the measured time"
        )
        rows.append(("cost of the benchmark loop for one call", "at most 5 microseconds", result))
    if "tune" in values:
        tuned = values["tune"]
        rows += [
            (
                "duration of the search with an empty cache",
                "at most 600 s",
                f"{tuned['seconds']:.0f} s: {tuned['candidates']} candidates, of which {tuned['timed']} were timed",
            ),
            (
                "speed-up of the selected variant over PyTorch float32",
                "at least 4.2",
                f"{tuned.get('speedup') or round(tuned['speed'], 2)}, with {tuned['winner']}",
            ),
            (
                "accuracy that the selected variant loses, percentage points",
                "at most 0.28",
                f"{tuned['drop']:.2f} on {tuned['rows']} rows",
            ),
        ]
    if "resume" in values:
        rows.append(
            ("duration of the same search with a full cache", "at most 60 s", f"{values['resume']['seconds']:.1f} s")
        )
    if "winner" in values:
        won = values["winner"]
        for name, recorded in won["recorded_ms"].items():
            measured = won["measured_ms"][name]
            change = (
                f"{recorded:.2f} ms in the search, {measured:.2f} ms in a new process ({measured / recorded - 1:+.1%})"
            )
            rows.append(
                (f"latency of the selected variant in a new process, {name} tokens", "differs by at most 10 %", change)
            )
        equal = f"{won['recorded_accuracy']:.4f} in the search, {won['measured_accuracy']:.4f} in a new process"
        rows.append(("accuracy of the selected variant in a new process", "equal", equal))
    if "aa" in values:
        aa = values["aa"]
        middle, largest = aa["median_difference"], aa["largest_difference"]
        rows += [
            (
                "difference in latency between two copies of the same model",
                "at most 2 %",
                f"{middle:.1%} (median of {aa['runs']} runs); the largest difference is {largest:.1%}",
            ),
            (
                "runs in which the confidence interval of the ratio of two copies contains 1",
                "at least 18 of 20",
                f"{aa['covers_one']} of {aa['runs']}",
            ),
        ]
    table = "\n".join(f"| {quantity} | {bar} | {result} |" for quantity, bar, result in rows)
    machine = values["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    front = "\n".join(
        f"| {n} | {s if isinstance(s, str) else round(s, 2)} | {d:.2f} |"
        for n, s, d in values.get("tune", {}).get("front", [])
    )
    stages = "\n".join(f"| {name} | {took} |" for name, took in values.get("tune", {}).get("stages", {}).items())
    return f"""# Targets of benchmark and tune

This page compares measurements of `accel benchmark` and `accel tune` with their targets. The model is MiniLM, fine-tuned on BANKING77.
The accuracy is measured on the 3,080 test queries, and the latency with 1 row of 32 tokens and 1 row of 128 tokens.
`benchmarks/tune.py` writes this page from `benchmarks/tune.json`.

The machine has {machine["processors"]} processor cores with {machine.get("processor", "").replace("+", ", ")}. The versions are Python
{machine["python"]}, {versions}.

| measurement | target | result |
|---|---|---|
{table}

The table shows the duration of each stage of the search with an empty cache. "screen" measures all candidates for a short time.
"compose" combines the changes of the fastest candidates. "time survivors" measures the candidates that are accurate enough for a
longer time.

| stage | seconds |
|---|---|
{stages}

The last table shows the Pareto front: the candidates for which no other candidate is both faster and more accurate. Their accuracy was
measured on all test queries.

| candidate | speed-up over PyTorch float32 | accuracy loss, percentage points |
|---|---|---|
{front}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "data", "calibration", "out"):
        parser.add_argument(name)
    parser.add_argument("--parts", default="cost,tune,winner,aa")
    parser.add_argument("--tuned", default="tuned")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=600.0)
    args = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("accel.tuning").setLevel(logging.INFO)
    out, tuned = Path(args.out), Path(args.tuned)
    values = json.loads(out.read_text()) if out.is_file() else {}
    if args.parts != "page":
        facts = machine()
        values["machine"] = {key: facts[key] for key in ("accel", "python", "processors", "libraries")}
        values["machine"]["processor"] = registry.probe(registry.describe("cpu")).devices[0].arch
    for part in args.parts.split(","):
        if part == "cost":
            values["cost"] = cost()
        elif part == "tune":
            how = {"data": args.data, "calibration": args.calibration, "max_drop": 0.28, "sequence": [32, 128]}
            outcome = accel.tune(args.model, tuned, time_limit_s=args.time_limit, **how)
            values["tune"] = {
                "seconds": outcome.seconds, "stages": dict(outcome.stages), "winner": outcome.winner.name,
                "speed": outcome.winner.speed, "speedup": str(outcome.winner.speedup), "disturbed": list(outcome.disturbance.signs),
                "drop": outcome.winner.drop, "rows": outcome.rows,
                "candidates": len(outcome.trials), "timed": sum(trial.speed is not None for trial in outcome.trials),
                "front": [[trial.name, str(trial.speedup), trial.drop] for trial in outcome.front],
            }  # fmt: skip
            print(render(outcome))
        elif part == "resume":
            how = {"data": args.data, "calibration": args.calibration, "max_drop": 0.28, "sequence": [32, 128]}
            again = accel.tune(args.model, tuned.with_name(f"{tuned.name}-again"), time_limit_s=args.time_limit, **how)
            values["resume"] = {"seconds": again.seconds, "winner": again.winner.name, "resumed": again.resumed}
        elif part == "winner":
            values["winner"] = winner(tuned, args.data)
        elif part == "aa":
            values["aa"] = a_a(tuned, args.runs)
        elif part == "page":
            out.with_suffix(".md").write_text(page(values), encoding="utf-8")
            continue
        out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
