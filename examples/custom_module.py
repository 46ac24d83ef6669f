"""Export a PyTorch module that is not a transformers model, and run it with its own input names.

    python examples/custom_module.py [OUT]

The module computes a score for each pair of a query vector and a candidate vector. The sample inputs have one row; `accel` extends them, so
that the batch size and the number of candidates stay dynamic. The example runs without a network.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from accel import ORTModelForCustomTasks, export


class Scorer(torch.nn.Module):
    """Map `query: (batch, 16)` and `candidates: (batch, candidates, 16)` to `scores: (batch, candidates)`."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(16, 16)

    def forward(self, query: torch.Tensor, candidates: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": (candidates @ self.project(query).unsqueeze(-1)).squeeze(-1)}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", nargs="?", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
scorer = Scorer().eval()
with tempfile.TemporaryDirectory() as temporary:
    artifact = export(
        scorer,
        args.out or Path(temporary) / "scorer",
        sample={"query": torch.randn(1, 16), "candidates": torch.randn(1, 5, 16)},
        axes={"query": {0: "batch"}, "candidates": {0: "batch", 1: "candidates"}},
    )
    model = ORTModelForCustomTasks.from_pretrained(artifact.path)
    query, candidates = torch.randn(3, 16), torch.randn(3, 7, 16)
    actual = model(query=query, candidates=candidates).scores
    with torch.inference_mode():
        expected = scorer(query, candidates)["scores"]
    for spec in (*artifact.components[0].inputs, *artifact.components[0].outputs):
        print(spec.name, spec.shape)
    print(f"differs from PyTorch by {(actual - expected).abs().max():.1e} on {tuple(actual.shape)} scores")
