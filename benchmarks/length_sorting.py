"""Compare the throughput of `accel.pipeline`, which sorts inputs by length, with `transformers.pipeline` for the same model.

    python benchmarks/length_sorting.py [MODEL_FOLDER] [--rows 3080] [--rounds 3]

The script uses the test queries of BANKING77 and batch size 32. Both pipelines take turns in one process and use the same session. The
script prints the median number of texts per second, and checks that both pipelines return the same results in the same order. Without a
folder, it uses the model that ships with `accel`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import transformers

import accel
from accel import ORTModelForSequenceClassification
from accel.demo import MODEL, read_test_set

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=MODEL)
parser.add_argument("--rows", type=int, default=3080)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()

texts = read_test_set()[0][: args.rows]
model = ORTModelForSequenceClassification.from_pretrained(args.model)
tokenizer = transformers.AutoTokenizer.from_pretrained(model.artifact.path)
variants = {
    "stock": transformers.pipeline("text-classification", model=model, tokenizer=tokenizer),
    "sorted": accel.pipeline("text-classification", model=model, tokenizer=tokenizer),
}
rates: dict[str, list[float]] = {name: [] for name in variants}
results = {}
for _ in range(args.rounds):
    for name, classify in variants.items():
        started = time.perf_counter()
        results[name] = classify(texts, batch_size=32)
        rates[name].append(len(texts) / (time.perf_counter() - started))
labels = {name: [result["label"] for result in answers] for name, answers in results.items()}
assert labels["stock"] == labels["sorted"], "sorting changed the results"
medians = {name: statistics.median(values) for name, values in rates.items()}
print(
    json.dumps(
        {
            "model": Path(args.model).name,
            "rows": len(texts),
            "texts_per_s": medians,
            "all": rates,
            "ratio": medians["sorted"] / medians["stock"],
        }
    )
)
