"""Tests of the memory that an export needs in addition to the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from accel.artifact import Artifact
from accel.interfaces.protocols import OpenRequest
from accel.stages.export import export
from accel_plugins.cpu.backend import CpuBackend
from tests.memory_pages import TELLS, resident


@pytest.mark.skipif(not TELLS, reason="this system does not report which memory pages are resident")
def test_validation_does_not_keep_model_weights_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export computes PyTorch's outputs before it opens the session for validation. Memory pages of weights that
    are mapped from a file are released before the session opens.
    """
    config = transformers.BertConfig(
        vocab_size=8000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model")
    table = model.bert.embeddings.word_embeddings.weight
    requests: list[tuple[bool, int]] = []
    open_ = CpuBackend.open

    def noted(self: CpuBackend, artifact: Artifact, request: OpenRequest) -> Any:
        requests.append((request.few_calls, resident(table)))
        return open_(self, artifact, request)

    monkeypatch.setattr(CpuBackend, "open", noted)
    assert float(table.detach().sum()) != 0
    assert resident(table) > 400
    export(model, tmp_path / "out")
    [(few, pages)] = requests
    # Reading neighboring parts of the file loads up to 16 pages on either side, so up to 32 pages are resident.
    assert few
    assert pages <= 32


_PEAK = """
import sys, torch, transformers
from pathlib import Path
from accel.stages.export import export
size = {size}
config = transformers.BertConfig(hidden_size=size, num_attention_heads=8, intermediate_size=4 * size, num_labels=2, {rest})
model = transformers.BertForSequenceClassification(config)
if {mapped}:
    model.save_pretrained(sys.argv[1] + "-model")
    del model
    Path("/proc/self/clear_refs").write_text("5")
    model = transformers.BertForSequenceClassification.from_pretrained(sys.argv[1] + "-model")
weights = sum(p.numel() * 4 for p in model.parameters())
export(model, sys.argv[1])
# Not `ru_maxrss`, which begins with that of the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
print(weights, 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mapped", "size", "rest", "times", "extra"),
    [
        pytest.param(False, 512, "vocab_size=72000, num_hidden_layers=1", 2, 1 << 30, id="160 MB in memory"),
        pytest.param(True, 1536, "vocab_size=500, num_hidden_layers=5", 1, 800 << 20, id="570 MB mapped from a file"),
    ],
)
def test_peak_memory_of_export(mapped: bool, size: int, rest: str, times: int, extra: int, tmp_path: Path) -> None:
    """Check the peak memory of the export process.

    Weights mapped from a file count once. Weights in the model's own memory count twice, because ONNX Runtime also maps
    the weights of the exported graph.
    """
    script = _PEAK.format(mapped=mapped, size=size, rest=rest)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    weights, peak = map(int, done.stdout.split())
    assert weights > 150e6
    assert peak < times * weights + extra
