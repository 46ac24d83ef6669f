"""Compare the throughput of the layouts of `accel deploy triton` on a real Triton server, with many callers and texts of different lengths.

python benchmarks/triton_layouts.py ARTIFACT TEXTS [OUT.json] [--callers 16] [--seconds 8] [--rounds 3] [--call-ms 8]

TEXTS is a CSV file with a column `text`, or a file with one text on each line. One server loads all layouts. The layouts take turns with
the same texts, and every answer is compared with the answer of the first layout.

`ACCEL_TRITONSERVER` selects the server, for example from the package nvidia-pytriton. If the server has only the Python backend, it runs a
modified copy of the repository (the shadow), in which ONNX Runtime for Python runs the graphs on the CPU. In this case, `--call-ms 8` makes
each call of a graph take 8 ms for any number of rows, like calls with small batches on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import itertools
import json
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from accel.config import available_processors
from accel.deploying.triton import deploy

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.triton.server import TritonServer, find_server, shadow

LAYOUTS: dict[str, dict[str, Any]] = {
    "text": {"layout": "text"},
    "ensemble": {"layout": "ensemble"},
    "ensemble_buckets": {"layout": "ensemble", "buckets": (16, 32, 64)},
}


def read_texts(path: Path) -> list[str]:
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as stream:
            return [row["text"] for row in csv.DictReader(stream)]
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def scores(content: bytes) -> Any:
    return np.array(next(output["data"] for output in json.loads(content)["outputs"] if output["name"] == "SCORES"))


def slow_down(shadowed: Path, milliseconds: float) -> None:
    """Change the repository so that each call of a graph takes at least this time, like small batches on an accelerator."""
    for path in shadowed.glob("*_graph/1/model.py"):
        code = path.read_text(encoding="utf-8")
        plain = "        returned = self._session.run(self._outputs, feeds)\n"
        assert plain in code
        wait = f"        time.sleep(max(0.0, {milliseconds / 1e3} - (time.perf_counter() - began)))\n"
        slow = f"        began = time.perf_counter()\n{plain}{wait}"
        path.write_text(
            code.replace(plain, slow).replace("import json\n", "import json\nimport time\n", 1), encoding="utf-8"
        )


def load(server: TritonServer, name: str, texts: list[str], callers: int, seconds: float) -> dict[str, Any]:
    """Send texts from several callers. Each caller waits for its answer before it sends the next text."""
    bodies = [
        json.dumps(
            {
                "inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": [text]}],
                "parameters": {"truncation": True},
            }
        ).encode()
        for text in texts
    ]
    answers: dict[int, Any] = {}
    times: list[float] = []
    numbers = itertools.count()
    before = server.statistics(f"{name}_graph")
    end = time.perf_counter() + seconds

    def work() -> None:
        # The HTTP client of the standard library needs little processor time. A slower client would limit the measured throughput.
        client = http.client.HTTPConnection("127.0.0.1", server.http)
        while (started := time.perf_counter()) < end:
            i = next(numbers) % len(bodies)
            client.request("POST", f"/v2/models/{name}/infer", bodies[i])
            answer = client.getresponse()
            content = answer.read()
            times.append(time.perf_counter() - started)
            if answer.status != 200:
                raise RuntimeError(content.decode())
            answers[i] = content
        client.close()

    threads = [threading.Thread(target=work) for _ in range(callers)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    after = server.statistics(f"{name}_graph")
    rows = after["inference_count"] - before["inference_count"]
    calls = after["execution_count"] - before["execution_count"]
    return {
        "requests_per_s": len(times) / wall,
        "p50_ms": 1e3 * statistics.median(times),
        "p95_ms": 1e3 * statistics.quantiles(times, n=20)[-1],
        "rows_a_call": rows / max(calls, 1),
        "answers": {i: scores(content) for i, content in answers.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--call-ms",
        type=float,
        help="smallest time of a graph call in milliseconds, to simulate an accelerator; only for a server with only the Python backend",
    )
    parser.add_argument("--threads", type=int, default=available_processors())
    args = parser.parse_args()
    installation = find_server()
    if installation is None:
        print(
            "No Triton server was found. Fix: set ACCEL_TRITONSERVER to the path of tritonserver; see docs/guides/triton.md."
        )
        return 1
    texts = read_texts(args.texts)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "whole"
        repository.mkdir()
        for name, settings in LAYOUTS.items():
            deployed = deploy(args.artifact, Path(folder) / name, name=name, **settings)
            for model in deployed.models:
                shutil.move(deployed.path / model, repository / model)
        if not installation.has("onnxruntime"):
            shadow(repository, Path(folder) / "shadow", threads=args.threads)
            repository = Path(folder) / "shadow"
            if args.call_ms:
                slow_down(repository, args.call_ms)
        with TritonServer(repository, installation) as server:
            version = server.ask("v2")["version"]
            for name in LAYOUTS:
                load(server, name, texts, args.callers, 1.0)
            for number in range(args.rounds):
                order = list(LAYOUTS)[number % len(LAYOUTS) :] + list(LAYOUTS)[: number % len(LAYOUTS)]
                for name in order:
                    rounds[name].append(load(server, name, texts, args.callers, args.seconds))
    worst = 0.0
    first = {i: answer for run in rounds["text"] for i, answer in run.pop("answers").items()}
    for name in list(LAYOUTS)[1:]:
        for run in rounds[name]:
            for i, answer in run.pop("answers").items():
                if i in first:
                    worst = max(worst, float(np.abs(answer - first[i]).max()))
    table = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in rounds.items()
    }
    report = {
        "machine": f"{platform.processor() or platform.machine()}, {available_processors()} processors",
        "triton": version,
        "callers": args.callers,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "texts": len(texts),
        "call_ms": args.call_ms,
        "layouts": table,
        "text_over_ensemble": table["text"]["requests_per_s"] / table["ensemble"]["requests_per_s"],
        "max_abs_difference": worst,
    }
    print(f"Triton {version}, {args.callers} callers, {report['machine']}; medians of {args.rounds} rounds")
    for name, row in table.items():
        print(
            f"{name:<18} {row['requests_per_s']:8.1f} requests/s   p50 {row['p50_ms']:7.1f} ms   p95 {row['p95_ms']:7.1f} ms   "
            f"{row['rows_a_call']:5.2f} rows a call of the graph"
        )
    print(f"text over ensemble: {report['text_over_ensemble']:.2f}; answers differ by {worst:.1e} at most")
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
