"""Measure `accel batch` in one process and with Ray Data on the same machine: seconds, processor seconds, memory.

    python benchmarks/batch.py OUT.json [--rows 1024] [--rounds 2]

The script uses the model and the test queries that ship with `accel`, and repeats the queries up to `--rows` rows. Each run is a separate
process, and the numbers include all of its child processes. The variants take turns, and their answers are compared. The script needs the
extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from pyarrow import parquet

from accel.demo import MODEL, read_test_set

VARIANTS = {
    "one process": [],
    "Ray Data, one actor": [
        "--ray",
        "--replicas",
        "1",
        "--cpus",
        str(os.cpu_count()),
        "--threads",
        str(os.cpu_count()),
    ],
    "Ray Data, two actors": ["--ray", "--replicas", "2", "--cpus", "1", "--threads", "1"],
}


def measured(command: list[str]) -> dict[str, float]:
    """Run a command, and return the measurements of its process and of all child processes."""
    start = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    used: dict[int, float] = {}
    peak = 0
    while process.poll() is None:
        memory = 0
        for child in [process, *process.children(recursive=True)]:
            try:
                times = child.cpu_times()
                used[child.pid] = times.user + times.system
                memory += child.memory_full_info().pss
            except (psutil.Error, OSError):
                continue
        peak = max(peak, memory)
        time.sleep(0.25)
    out, error = process.communicate()
    if process.returncode:
        raise SystemExit(error)
    inner = json.loads(out)
    return {
        "seconds": time.perf_counter() - start,
        "processor_s": sum(used.values()),
        "peak_mb": peak / 1e6,
        "rows_s": inner["computed"] / inner["seconds"],
        "inner_s": inner["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    texts = read_test_set()[0]
    folder = Path(tempfile.mkdtemp())
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"text": texts[i % len(texts)]}) + "\n" for i in range(args.rows))
    )
    measurements: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    labels: dict[str, Any] = {}
    for turn in range(args.rounds):
        for name, options in VARIANTS.items():
            out = folder / f"{name}-{turn}"
            command = [sys.executable, "-m", "accel", "batch", str(MODEL), "--data", str(folder / "rows.jsonl")]
            command += ["--out", str(out), "--rows-a-part", "128", "--json", *options]
            measurements[name].append(measured(command))
            labels[name] = parquet.read_table(out).to_pydict()["label"]
            print(name, {key: round(value, 1) for key, value in measurements[name][-1].items()}, flush=True)
    assert all(column == labels["one process"] for column in labels.values()), "the answers differ"
    shutil.rmtree(folder)
    result = {
        "machine": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "rows": args.rows,
        "medians": {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in measurements.items()
        },
        "runs": measurements,
    }
    print(json.dumps(result["medians"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
