"""Send texts over HTTP to a Triton server that runs a classifier from `accel deploy triton`.

python examples/triton_client/client.py localhost:8000 text_classification "Where is my card?" "I was charged twice."
"""

import sys

import numpy as np
import tritonclient.http as triton


def classify(address: str, name: str, texts: list[str]) -> list[tuple[str, float]]:
    """Return the most likely label of each text, and its score."""
    client = triton.InferenceServerClient(address)
    text_input = triton.InferInput("TEXT", [len(texts), 1], "BYTES")
    text_input.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=object))
    answer = client.infer(name, [text_input], parameters={"function_to_apply": "softmax"})
    labels, scores = answer.as_numpy("LABEL")[:, 0], answer.as_numpy("SCORE")[:, 0]
    client.close()
    return [(label.decode(), float(score)) for label, score in zip(labels, scores, strict=True)]


if __name__ == "__main__":
    for label, score in classify(sys.argv[1], sys.argv[2], sys.argv[3:]):
        print(f"{label} {score:.3f}")
