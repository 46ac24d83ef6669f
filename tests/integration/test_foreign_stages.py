"""Tests of every stage on every folder that other tools wrote. The result of the stage is correct, or the stage raises
the error that the function `refusal` returns.

The folders are in tests/fixtures/foreign. Results are compared with the PyTorch model from which the folder was
exported.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.deploying.triton import deploy
from accel.errors import AccelError
from accel.stages.resolution import artifact_of
from accel.stages.validate import validate

# Each stage runs on these folders in every test run. The other folders are more examples of the same layouts, and run
# only in thorough tests.
QUICK = (
    "exported/bert-plain-onnx", "exported/llama-single-onnx", "genai/mistral-fp32", "intel/llama-stateless", "intel/t5-ir",
    "optimum/bart-past", "optimum/bert-web", "optimum/gpt2-nocache", "optimum/gpt2-pair", "optimum/t5-nocache", "optimum/trocr-past",
)  # fmt: skip
THOROUGH = (
    "exported/bert-plain-openvino", "exported/llama-multi-onnx", "exported/llama-multi-openvino", "intel/bert-ir",
    "intel/gpt2-ir", "intel/gpt2-nocache", "intel/t5-nocache", "intel/t5-stateless", "intel/trocr-ir", "intel/whisper-ir",
    "optimum/bert-external", "optimum/bloom-pair", "optimum/bloom-past", "optimum/gpt2-past", "optimum/gpt2-web",
    "optimum/llama-external", "optimum/marian-past", "optimum/opt-past", "optimum/t5-past", "optimum/t5-web",
    "optimum/whisper-past",
)  # fmt: skip
FOLDERS = [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in THOROUGH)]
UNREADABLE = {
    "exported/llama-single-openvino": "accepts only one token per call",
    "exported/t5-single-onnx": "has no graph of the encoder",
}
# These OpenVINO IR decoders have their KV cache as inputs and outputs.
OUTER_CACHES = ("llama-stateless",)
ENCODER_DECODERS = ("t5", "bart", "marian", "whisper", "trocr")
DECODERS = ("gpt2", "llama", "mistral", "bloom", "opt")
# These decoders have their layers in the branches of an If node.
BRANCHED = ("gpt2-pair", "gpt2-web", "bloom-pair", "llama-single-onnx", "llama-multi-onnx")
# The tolerances are for tiny random models with logits of up to 8. The logits of a wrong model would differ by
# several units. With random weights, 4-bit quantization is inaccurate, and three calibration rows give poor activation
# ranges.
ATOL = {"dynamic-int8": 0.5, "weight-int8": 0.5, "static-int8": 2.5, "weight-int4": 3.0}
HALF_ATOL = 0.05


def kind_of(folder: str) -> str:
    return Path(folder).name.split("-")[0]


def is_ir(folder: str) -> bool:
    return folder.startswith("intel") or folder.endswith("openvino")


def calibration(folder: str) -> list[dict[str, torch.Tensor]]:
    """Return calibration batches as a tokenizer or a feature extractor returns them."""
    random = torch.Generator().manual_seed(3)
    if kind_of(folder) == "whisper":
        return [{"input_features": torch.randn(2, 4, 3000, generator=random)}]
    if kind_of(folder) == "trocr":
        return [{"pixel_values": torch.randn(2, 3, 16, 16, generator=random)}]
    ids = torch.randint(3, 99, (3, 7), generator=random)
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]


def refusal(folder: str, stage: str) -> str | None:
    """Return the error message with which a stage rejects a folder, or `None` if the stage accepts the folder."""
    kind, name = kind_of(folder), Path(folder).name
    table: dict[str, list[tuple[bool, str]]] = {
        "optimize": [(is_ir(folder), "No installed backend can optimize a model in the format 'openvino_ir'")],
        "dynamic-int8": [(is_ir(folder), "can quantize a model in the format 'openvino_ir' with the scheme 'dynamic-int8'")],
        "static-int8": [
            (name in OUTER_CACHES, "has its KV cache as graph inputs and outputs"),
            (not is_ir(folder) and name in BRANCHED, "All layers of the graph are in the branches of an If"),
        ],
        "weight-int8": [(name in OUTER_CACHES, "has its KV cache as graph inputs and outputs")],
        "weight-int4": [
            (name in OUTER_CACHES, "has its KV cache as graph inputs and outputs"),
            (is_ir(folder), "does not divide the number of input channels"),
        ],
        "evaluate": [
            # The IR folders contain their tokenizers, but the Optimum folders do not.
            (kind in ENCODER_DECODERS, r"accel cannot measure the accuracy|[a-z ]+ in .* cannot be loaded"),
        ],
        "deploy text": [
            (kind in ENCODER_DECODERS, "cannot deploy the task"),
            (is_ir(folder) and kind in DECODERS, "needs an artifact with exactly one ONNX graph"),
            ("nocache" in name, "has no KV cache with an attention mask"),
        ],
        "deploy graph": [
            (kind in ENCODER_DECODERS, "Triton's backends cannot run the artifact"),
            (kind in DECODERS and "nocache" not in name, "Triton's backends cannot run the artifact"),
        ],
        "benchmark a call": [(kind in ENCODER_DECODERS, "needs new_tokens")],
    }  # fmt: skip
    return next((reason for applies, reason in table.get(stage, ()) if applies), None)


class Expected:
    """Context manager that checks that a stage succeeds, or that it raises the error that `refusal` returns, with a
    `Fix:`.
    """

    def __init__(self, folder: str, stage: str) -> None:
        self._reason = refusal(folder, stage)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if self._reason is None:
            return False
        assert isinstance(error, AccelError), f"not refused: {self._reason}"
        assert re.search(self._reason, error.message)
        assert error.fix
        return True


@pytest.fixture
def source(folders: Path) -> Callable[[str], Path]:
    """Return a function that returns, for a folder, the folder of the PyTorch model from which it was exported."""
    return lambda folder: folders / "models" / kind_of(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return a tokenizer with one token for each word. Its vocabulary has 99 tokens, like the vocabulary of the tiny
    models.
    """
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(99)}, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.fixture
def with_tokenizer(folders: Path, tokenizer: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a folder and adds a tokenizer, because the folders have no tokenizer."""

    def make(folder: str) -> Path:
        copy = Path(shutil.copytree(folders / folder, tmp_path / "folder"))
        tokenizer.save_pretrained(copy)
        return copy

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("folder", UNREADABLE)
def test_unreadable_folders_are_refused_by_every_stage(folder: str, folders: Path) -> None:
    with pytest.raises(AccelError, match=UNREADABLE[folder]) as error:
        artifact_of(folders / folder)
    assert error.value.fix


@pytest.mark.parametrize("folder", FOLDERS)
def test_export_false_opens_the_graph_of_another_tool(folder: str, folders: Path) -> None:
    with accel.ORTModel.from_pretrained(folders / folder, export=False) as model:
        assert not any(step.stage == "export" for step in model.artifact.manifest.steps)


@pytest.mark.parametrize("folder", FOLDERS)
def test_validate(folder: str, folders: Path, source: Any) -> None:
    assert validate(folders / folder, against=source(folder)).passed


@pytest.mark.parametrize(
    "level", ["O2", "O4", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("O1", "O3"))]
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_optimize(folder: str, level: str, folders: Path, tmp_path: Path, source: Any) -> None:
    with Expected(folder, "optimize"):
        optimized = accel.optimize(folders / folder, tmp_path / "out", level=level)
        assert optimized.dtype == ("float16" if level == "O4" else "float32")
        # Level O3 approximates GELU with tanh, so it needs a larger tolerance.
        atol = {"O3": 1e-2, "O4": HALF_ATOL}.get(level)
        assert validate(Artifact.load(optimized.path), against=source(folder), atol=atol).passed


@pytest.mark.parametrize("scheme", ["dynamic-int8", "static-int8", "weight-int8", "weight-int4"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_quantize(folder: str, scheme: str, folders: Path, tmp_path: Path, source: Any) -> None:
    with Expected(folder, scheme):
        data = calibration(folder) if scheme == "static-int8" else None
        quantized = accel.quantize(folders / folder, tmp_path / "out", scheme=scheme, calibration=data)
        assert validate(Artifact.load(quantized.path), against=source(folder), atol=ATOL[scheme]).passed


@pytest.mark.parametrize("folder", FOLDERS)
def test_save_and_load(folder: str, folders: Path, tmp_path: Path, source: Any) -> None:
    with accel.ORTModel.from_pretrained(folders / folder) as model:
        model.save_pretrained(tmp_path / "saved")
    assert validate(Artifact.load(tmp_path / "saved"), against=source(folder)).passed


@pytest.mark.parametrize("folder", FOLDERS)
def test_evaluate(folder: str, folders: Path, tokenizer: Any) -> None:
    rows: Any = [{"text": f"w{n} w8 w9 w7", "label": n % 2} for n in range(4)]
    if kind_of(folder) in ENCODER_DECODERS:
        rows = [{"text": "w5", "target": "w6"}]
    if kind_of(folder) == "whisper":
        rows = [{"audio": {"array": np.zeros(16_000, np.float32), "sampling_rate": 16_000}, "text": "w5"}]
    if kind_of(folder) == "trocr":
        rows = [{"image": np.zeros((16, 16, 3), np.uint8), "text": "w5"}]
    processor = tokenizer if kind_of(folder) not in ("whisper", "trocr") else None
    with Expected(folder, "evaluate"):
        report = accel.evaluate(folders / folder, rows, processor=processor)
        assert report.rows == len(rows)


@pytest.mark.parametrize("layout", ["text", "graph"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_deploy_triton(folder: str, layout: str, with_tokenizer: Any, tmp_path: Path) -> None:
    with Expected(folder, f"deploy {layout}"):
        deployed = deploy(with_tokenizer(folder), tmp_path / "repository", layout=layout)
        assert list(deployed.path.rglob("config.pbtxt"))


def test_detailed_outputs_of_whisper_with_other_state_names(folders: Path) -> None:
    """Detailed outputs of `generate` work for a Whisper folder whose states have other names. For detailed outputs,
    transformers splits Whisper's cache into layers and rows.
    """
    model = accel.ORTModelForSpeechSeq2Seq.from_pretrained(folders / "intel" / "whisper-ir")
    sound = torch.randn(2, 4, 3000, generator=torch.Generator().manual_seed(0))
    plain = model.generate(sound, max_new_tokens=3)
    detailed = model.generate(sound, max_new_tokens=3, return_dict_in_generate=True)
    assert torch.equal(detailed.sequences[:, -plain.shape[1] :], plain)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param(name, marks=() if name in ("optimum/gpt2-pair", "optimum/bart-past") else pytest.mark.thorough)
        for name in (*QUICK, *THOROUGH)
    ],
)
def test_benchmark(folder: str, folders: Path) -> None:
    effort: Any = {"rounds": 1, "calls": 1, "processes": 1, "warmup": 1, "sequence": 8, "pytorch": ()}
    with Expected(folder, "benchmark a call"):
        report = accel.benchmark(folders / folder, **effort)
        assert report.variants
    if kind_of(folder) in ENCODER_DECODERS:
        assert accel.benchmark(folders / folder, **effort, new_tokens=2).variants
