"""Classify texts with a stock transformers pipeline over an accelerated model.

    python examples/text_classification.py [MODEL] [TEXT ...]

MODEL is a Hub id or a folder; without one it takes the intent classifier that ships with accel. Runs offline.
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
for text, found in zip(args.texts, classify(args.texts), strict=True):
    print(f"{found['score']:.3f}  {found['label']:<28} {text}")
print(f"run by {model.backend} on {model.device} in {model.compute_dtype}")
