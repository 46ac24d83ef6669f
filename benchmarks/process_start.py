"""Measure how long a new process takes to load an artifact and to classify one text, with accel and with ONNX Runtime alone.

    python benchmarks/process_start.py [OUT.json] [--rounds 15]

ONNX Runtime is measured with the tokenizer of transformers and with the package tokenizers. Every run is a new process, and the variants
take turns. In the result, `processor` is the processor time of the process, which other programs hardly change, and `wall` is the time that
a caller waits. The model is the exported model of `accel demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VARIANTS = {
    "onnxruntime and tokenizers": """
import sys
import numpy as np, onnxruntime as ort
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1] + "/tokenizer.json")
session = ort.InferenceSession(sys.argv[1] + "/model.onnx")
found = tokenizer.encode("I lost my card")
feeds = {"input_ids": np.array([found.ids]), "attention_mask": np.array([found.attention_mask])}
names = [one.name for one in session.get_inputs()]
print(session.run(None, {name: feeds.get(name, np.zeros_like(feeds["input_ids"])) for name in names})[0].argmax())
""",
    "onnxruntime and AutoTokenizer": """
import sys
import onnxruntime as ort
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
session = ort.InferenceSession(sys.argv[1] + "/model.onnx")
found = tokenizer("I lost my card", return_tensors="np", return_token_type_ids=True)
print(session.run(None, {one.name: found[one.name] for one in session.get_inputs()})[0].argmax())
""",
    "accel": """
import sys
from accel import ORTModelForSequenceClassification
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
print(int(model(**tokenizer("I lost my card", return_tensors="pt")).logits.argmax()))
""",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "process_start.json")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    times: dict[str, dict[str, list[float]]] = {name: {"wall_s": [], "processor_s": []} for name in VARIANTS}
    answers = set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        model = Path(__file__).parents[1] / "accel" / "demo" / "model"
        subprocess.run([sys.executable, "-m", "accel", "export", str(model), str(folder), "--json"], check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        for turn in range(arguments.rounds + 1):
            for name, code in VARIANTS.items():
                before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True
                )
                wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
                answers.add(done.stdout.strip())
                if turn:  # The first round does not count, because it reads files that are not in memory yet.
                    times[name]["wall_s"].append(wall)
                    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                    times[name]["processor_s"].append(spent)
    assert len(answers) == 1, answers
    base = times["onnxruntime and AutoTokenizer"]
    report = {
        "rounds": arguments.rounds,
        "processors": len(os.sched_getaffinity(0)),
        "variants": {
            name: {
                kind: {"median": round(statistics.median(durations), 3), "fastest": round(min(durations), 3)}
                for kind, durations in kinds.items()
            }
            for name, kinds in times.items()
        },
        "accel against onnxruntime and AutoTokenizer": {
            kind: {
                "median": round(statistics.median(times["accel"][kind]) / statistics.median(base[kind]), 3),
                "fastest": round(min(times["accel"][kind]) / min(base[kind]), 3),
            }
            for kind in base
        },
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
