"""Compare `accel serve` with a model in the caller's process, and with a server of FastAPI and PyTorch without batching.

    python benchmarks/serving.py OUT.json [MODEL_FOLDER] [--callers 16] [--rounds 3] [--seconds 6]
    python benchmarks/serving.py OUT.json --infinity ENVIRONMENT/bin/infinity_emb
    python benchmarks/serving.py OUT.json --classify [MODEL_FOLDER] --callers 1
    python benchmarks/serving.py OUT.json --int8 FOLDER [--backend openvino] --callers 1

The script uses the test queries of BANKING77. Every server runs in a separate process, and the clients run in another process on the same
machine. The servers take turns, and their answers are compared before the measurement. With one caller, the script also measures the
model in the caller's process. The script needs the extra `serve` and FastAPI. Without a folder, it uses the model that ships with
`accel`: as an embedding model, or with `--classify` as a classifier.

With `--infinity`, the script also measures infinity with its torch engine in float32. infinity needs a separate environment
(`pip install torch "transformers<5" "infinity_emb[torch,server]"`).

With `--int8`, both servers classify texts of 128 tokens with a model in the shape of DistilBERT: accel in static int8, and FastAPI with
PyTorch in float32. The script creates the model in the given folder. The weights are random, so only the format of the answers is compared.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from accel.demo import MODEL, read_test_set

EMBED, CLASSIFY = "/v1/embeddings", "/classify"
FIELD = {EMBED: "input", CLASSIFY: "inputs"}


def fastapi(folder: str, path: str, port: int) -> None:
    """Run a server of FastAPI and PyTorch, which tokenizes and computes each request separately."""
    import torch
    import transformers
    import uvicorn
    from fastapi import FastAPI

    app = FastAPI()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    kind = transformers.AutoModel if path == EMBED else transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    @app.post(CLASSIFY)
    def classify(body: dict[str, str]) -> Any:
        inputs = tokenizer(body["inputs"], return_tensors="pt", truncation=True, return_token_type_ids=False)
        with torch.inference_mode():
            scores = model(**inputs).logits.softmax(-1)[0]
        best = int(scores.argmax())
        return [{"label": model.config.id2label[best], "score": float(scores[best])}]

    @app.post(EMBED)
    def embed(body: dict[str, str]) -> Any:
        inputs = tokenizer(body["input"], return_tensors="pt", truncation=True)
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        embeddings = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        return {"data": [{"embedding": embeddings[0].tolist()}]}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


class Connection:
    """HTTP connection of one caller. It uses `http.client`, which needs little processor time."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        self._connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()


def processor_s(process: int) -> float:
    """Return the processor time of all threads of a process, which other programs change less than the elapsed time."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(*command: str, port: int, ready: str) -> Iterator[tuple[int, int]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(1500):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended.")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", ready)
                if connection.getresponse().status < 500:
                    break
            except OSError:
                time.sleep(0.2)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def load(port: int, process: int, path: str, texts: list[str], callers: int, seconds: float) -> dict[str, Any]:
    """Send requests from `callers` callers. Each caller waits for its answer before the next request (a closed loop)."""
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    lock = threading.Lock()
    end = time.perf_counter() + seconds

    def call(which: int) -> None:
        connection, caller_latencies, counts = Connection(port), [], {}
        i = which
        while time.perf_counter() < end:
            start = time.perf_counter()
            status, _ = connection.post(path, {FIELD[path]: texts[i % len(texts)]})
            caller_latencies.append(time.perf_counter() - start)
            counts[status] = counts.get(status, 0) + 1
            i += callers
        with lock:
            latencies.extend(caller_latencies)
            for status, count in counts.items():
                statuses[status] = statuses.get(status, 0) + count

    threads = [threading.Thread(target=call, args=(which,)) for which in range(callers)]
    start, used = time.perf_counter(), processor_s(process)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - start
    return {
        "requests_per_s": len(latencies) / spent,
        "processor_ms": (processor_s(process) - used) / len(latencies) * 1e3,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "statuses": statuses,
    }


def infinity(program: str, folder: str, copy: Path) -> tuple[str, ...]:
    """Return the command that starts infinity, and write a copy of the model that infinity's version of transformers can load."""
    shutil.copytree(folder, copy)
    for name, ours, theirs in (
        ("tokenizer_config.json", "TokenizersBackend", "PreTrainedTokenizerFast"),
        ("config.json", "BertForSequenceClassification", "BertModel"),
    ):
        file = copy / name
        file.write_text(file.read_text(encoding="utf-8").replace(ours, theirs), encoding="utf-8")
    return (program, "v2", "--model-id", str(copy), "--engine", "torch", "--device", "cpu", "--dtype", "float32",
            "--no-bettertransformer", "--url-prefix", "/v1", "--host", "127.0.0.1", "--port", "8463", "--log-level", "error")  # fmt: skip


def in_process(folder: str, path: str) -> None:
    """Call the model in this process. For each line of texts on the standard input, print a line with the seconds of each call."""
    import accel

    if path == CLASSIFY:
        call: Any = accel.pipeline("text-classification", model=folder)
    else:
        model: Any = accel.ORTModelForFeatureExtraction.from_pretrained(folder, task="sentence-similarity")

        def call(text: str) -> Any:
            # As in the HTTP endpoint, the vectors have length 1 and consist of Python numbers.
            return model.encode(text, normalize_embeddings=True).tolist()

    for line in sys.stdin:
        print(json.dumps(seconds_of(call, json.loads(line))), flush=True)


def seconds_of(call: Any, texts: list[str]) -> list[float]:
    """Return the seconds of each call."""
    durations = []
    for text in texts:
        start = time.perf_counter()
        call(text)
        durations.append(time.perf_counter() - start)
    return durations


def overhead(port: int, path: str, folder: str, texts: list[str], rounds: int) -> dict[str, float]:
    """Compare one caller over HTTP with calls of the same model without HTTP, in turns of 40 calls.

    The model without HTTP runs in a separate process. In the process of the HTTP client, the threads of the model would wait actively
    between calls and take processor time from the server.
    """
    connection = Connection(port)
    words = [sys.executable, __file__, "-", folder, "--path", path, "--in-process"]
    durations: dict[str, list[float]] = {"http": [], "in_process": []}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for turn in range(4 * rounds + 1):
            process.stdin.write(json.dumps(texts[:40]) + "\n")
            process.stdin.flush()
            measured = {"in_process": json.loads(process.stdout.readline())}
            time.sleep(0.1)
            measured["http"] = seconds_of(lambda text: connection.post(path, {FIELD[path]: text}), texts[:40])
            for name, seconds in measured.items():
                durations[name] += seconds if turn else []
        process.stdin.close()
    medians = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in durations.items()}
    return {**medians, "overhead_ms": medians["http_ms"] - medians["in_process_ms"]}


def classifiers(folder: Path, backend: str) -> tuple[str, str]:
    """Create a classifier in the shape of DistilBERT with the tokenizer of the demo model, and its artifact in static int8."""
    import transformers
    from quantization import feeds_for, random_model

    from accel.stages.export import export
    from accel.stages.quantize import quantize

    original, exported, quantized = (folder / name for name in ("float32", f"{backend}-float32", f"{backend}-int8"))
    if not quantized.is_dir():
        random_model(original)
        transformers.AutoTokenizer.from_pretrained(MODEL, model_max_length=128).save_pretrained(original)
        artifact = export(original, exported, backend=backend, task="text-classification")
        calibration = [feeds_for(artifact, 1, 128, seed) for seed in range(16)]
        quantize(artifact, quantized, scheme="static-int8", backend=backend, calibration=calibration)
    return str(original), str(quantized)


def long_texts(folder: str, texts: list[str]) -> list[str]:
    """Return texts of 128 tokens, made from the queries."""
    import transformers

    tokenizer, cut_texts = transformers.AutoTokenizer.from_pretrained(folder), []
    for start in range(0, 640, 20):
        joined = " ".join(texts[start : start + 20])
        end = tokenizer(joined, truncation=True, return_offsets_mapping=True)["offset_mapping"][-2][1]
        cut_texts.append(joined[:end])
    return cut_texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("model", nargs="?", default=str(MODEL))
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--workers", default="1")
    parser.add_argument("--classify", action="store_true")
    parser.add_argument("--int8", type=Path)
    parser.add_argument("--infinity", help="its program")
    parser.add_argument("--backend", default="openvino")
    parser.add_argument("--fastapi-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--path", default=EMBED)
    args = parser.parse_args()
    if args.fastapi_port:
        fastapi(args.model, args.path, args.fastapi_port)
        return
    if args.in_process:
        in_process(args.model, args.path)
        return
    texts, path, folders = read_test_set()[0], EMBED, (args.model, args.model)
    task = "sentence-similarity"
    if args.classify:
        path, task = CLASSIFY, "text-classification"
    if args.int8 is not None:
        folders, path, task = classifiers(args.int8, args.backend), CLASSIFY, "text-classification"
        texts = long_texts(folders[0], texts)
    ours = (sys.executable, "-m", "accel", "serve", f"model={folders[1]}", "--task", task, "--port", "8461",
            "--workers", args.workers)  # fmt: skip
    theirs = (sys.executable, __file__, "-", folders[0], "--path", path, "--fastapi-port", "8462")
    with ExitStack() as stack:
        servers = {
            "accel": stack.enter_context(server(*ours, port=8461, ready="/ready")),
            "fastapi": stack.enter_context(server(*theirs, port=8462, ready="/docs")),
        }
        if args.infinity is not None:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            command = infinity(args.infinity, folders[0], copy)
            servers["infinity"] = stack.enter_context(server(*command, port=8463, ready="/health"))
        for text in texts[:20]:
            rows = [json.loads(Connection(port).post(path, {FIELD[path]: text})[1]) for port, _ in servers.values()]
            if path == CLASSIFY:
                assert all(set(row[0]) == {"label", "score"} for row in rows), "the servers answer otherwise"
                continue
            first, *others = (np.array(row["data"][0]["embedding"]) for row in rows)
            assert all(np.allclose(first, other, atol=1e-4) for other in others), "the servers answer otherwise"
        loads: dict[str, Any] = {name: [] for name in servers}
        for turn in range(args.rounds + 1):
            for name, (port, process) in servers.items():
                result = load(port, process, path, texts, args.callers, args.seconds if turn else 2)
                if turn:
                    loads[name].append(result)
        one_caller = overhead(servers["accel"][0], path, folders[1], texts, args.rounds)
    medians = {
        name: {key: statistics.median(result[key] for result in results) for key in results[0] if key != "statuses"}
        for name, results in loads.items()
    }
    result = {
        "processors": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "callers": args.callers,
        "medians": medians,
        "ratios": {
            name: {
                "requests": medians["accel"]["requests_per_s"] / other["requests_per_s"],
                "processor": other["processor_ms"] / medians["accel"]["processor_ms"],
            }
            for name, other in medians.items()
            if name != "accel"
        },
        "one_caller": one_caller,
        "rounds": loads,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
