"""Check the cost of imports: torch, transformers and vendor libraries are imported only when they are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from accel.artifact import Artifact

HEAVY = (
    "torch",
    "transformers",
    "onnxruntime",
    "openvino",
    "nncf",
    "onnx",
    "onnx_ir",
    "numpy",
    "datasets",
    "tritonclient",
    "grpc",
    "tokenizers",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus_client",
)

SNIPPETS = {
    "import": "import accel",
    "listing": "from accel.backends import registry; assert registry.installed()",
    "specs": "from accel.backends import registry; assert registry.describe_all()[0]",
    "backends": "import accel; assert [b.capabilities for b in accel.list_backends()]",
    "help": "import sys; sys.argv = ['accel', '--help']\nfrom accel.cli import main\ntry: main()\nexcept SystemExit: pass",
    "config": "from accel import ExportConfig, SessionOptions, AccelError; ExportConfig()",
}


@pytest.mark.parametrize("snippet", SNIPPETS.values(), ids=SNIPPETS.keys())
def test_import_loads_no_heavy_library(snippet: str) -> None:
    script = f"{snippet}\nimport json, sys\nprint('\\n' + json.dumps(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert loaded.isdisjoint(HEAVY), loaded & set(HEAVY)


_LOADS = """
import sys
from collections.abc import Callable
from accel import ORTModelForSequenceClassification
model = ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
import torch
model(input_ids=torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([[1, 1, 1]]))
import json
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def test_loading_a_model_imports_only_its_runtime(tiny_artifact: Callable[..., Artifact]) -> None:
    words = [sys.executable, "-c", _LOADS, str(tiny_artifact("bert").path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    # Only exporting, rewriting, evaluation, training or other runtimes need these libraries.
    needless = {
        "openvino",
        "nncf",
        "onnx",
        "onnx_ir",
        "datasets",
        "scipy",
        "sklearn",
        "torch._dynamo",
        "transformers.generation.utils",
    }
    assert loaded.isdisjoint(needless), loaded & needless
