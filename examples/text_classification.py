"""Classify texts with the pipeline of transformers and a model of `accel`.

    python examples/text_classification.py [MODEL] [TEXT ...]

MODEL is a Hub id or a folder. Without MODEL, the example uses the intent classifier that ships with `accel` and needs no network.
"""

from __future__ import annotations

import argparse

from transformers import AutoTokenizer, pipeline

from accel import ORTModelForSequenceClassification
from accel.demo import MODEL

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=str(MODEL))
parser.add_argument("texts", nargs="*", default=["the machine kept my card", "how do I change my pin?"])
args = parser.parse_args()

model = ORTModelForSequenceClassification.from_pretrained(args.model)
classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(args.model))
for text, prediction in zip(args.texts, classify(args.texts), strict=True):
    print(f"{prediction['score']:.3f}  {prediction['label']:<28} {text}")
print(f"run by {model.backend} on {model.device} in {model.compute_dtype}")
