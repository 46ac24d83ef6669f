"""Embed sentences with pooling and normalization inside the graph, and find the most similar sentence.

    python examples/embeddings.py [MODEL] [--pooling mean]

MODEL is the Hub id or the folder of an encoder or of a sentence-transformers model. Without MODEL, the example runs without a network:
it uses the encoder of the intent classifier that ships with `accel`. This classifier was trained on bank queries, so similar bank
queries have similar embeddings.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import transformers

from accel import ORTModelForFeatureExtraction, export
from accel.demo import MODEL

QUERY = "my card got stuck in the cash machine"
TEXTS = [
    "the ATM swallowed my card",
    "how do I change my pin?",
    "which currencies can I exchange?",
    "when does my new card arrive?",
]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?")
parser.add_argument("--pooling", choices=["mean", "cls", "max", "last"])
args = parser.parse_args()

with tempfile.TemporaryDirectory() as temporary:
    if args.model is None:
        source = transformers.AutoModel.from_pretrained(MODEL, dtype="float32")
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    else:
        source, tokenizer = args.model, None
    folder = Path(temporary) / "embedder"
    export(source, folder, task="sentence-similarity", pooling=args.pooling, normalize=True, processor=tokenizer)
    model = ORTModelForFeatureExtraction.from_pretrained(folder)
    similarities = model.encode(TEXTS) @ model.encode(QUERY)

print(QUERY)
for similarity, text in sorted(zip(similarities, TEXTS, strict=True), reverse=True):
    print(f"{similarity:.3f}  {text}")
