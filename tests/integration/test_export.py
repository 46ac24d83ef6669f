"""Tests of the files that `export` writes, of the errors that it raises, and of its cleanup."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import accel
from accel import ORTModelForSequenceClassification, capture
from accel.artifact import Artifact
from accel.errors import (
    ArtifactNotFoundError,
    ConfigError,
    ExportError,
    InputError,
    IntegrityError,
    OutputFolderError,
    TaskError,
    UnknownBackendError,
    ValidationError,
)
from accel.models import processors
from accel.stages.export import export
from accel.stages.optimize import optimize
from accel.testing.models import rescale, save_tiny, tiny_config, tiny_model


def test_folder_is_complete(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact()
    names = {path.name for path in artifact.path.iterdir()}
    assert {"accel.json", "export.json", "config.json", "model.onnx", "model.onnx.data", "tokenizer.json"} <= names
    component = artifact.component()
    assert [spec.shape for spec in component.inputs] == [("batch", "sequence")] * 3
    assert component.outputs[0].shape == ("batch", 3)
    assert component.max_sizes == {"sequence": 96}
    step = artifact.manifest.steps[0]
    assert step.stage == "export"
    assert step.validation["max_abs_difference"] <= 1e-4
    assert len(step.validation["shapes"]) >= 4
    assert {"torch", "transformers", "onnx"} <= set(step.versions)


def test_transformers_reads_the_folder(tiny_artifact: Callable[..., Artifact]) -> None:
    from transformers.exporters import ExportedModel

    artifact = tiny_artifact()
    with capture.quiet():
        exported = ExportedModel.from_pretrained(artifact.path)
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    expected = accel.ORTModelForSequenceClassification(artifact)(**inputs).logits
    # The outputs are not bit-identical, because accel's CPU sessions disable one of ONNX Runtime's fusions.
    assert (exported(**inputs).logits - expected).abs().max() < 1e-5


def test_roberta_positions_start_after_the_padding_id(tiny_artifact: Callable[..., Artifact]) -> None:
    component = tiny_artifact("roberta").component()
    assert component.max_sizes == {"sequence": 94}
    assert component.unused_inputs == ("token_type_ids",)
    assert component.inputs[0].pad_value == 1


_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 120,
    "pad_token_id": 3,
}


@pytest.mark.thorough
def test_decoder_classifier_keeps_epsilon_and_has_no_cache_outputs(tmp_path: Path) -> None:
    """The norm's epsilon of 1e-8 is not rounded to 0. Otherwise padding, whose embeddings are zero, would become NaN."""
    config = transformers.HeliumConfig(**_SMALL, num_key_value_heads=2, intermediate_size=64, head_dim=16, num_labels=3)
    model = transformers.HeliumForSequenceClassification(config).eval()
    artifact = export(model, tmp_path / "helium", task="text-classification")
    assert [spec.name for spec in artifact.component().outputs] == ["logits"]
    assert model.config.use_cache
    again = optimize(artifact, tmp_path / "again", level="O1")
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 3, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 3).long()}
    with torch.inference_mode():
        expected = model(**inputs).logits
    for exported in (artifact, again):
        logits = ORTModelForSequenceClassification(exported)(**inputs).logits
        assert (logits - expected).abs().max() < 1e-5


@pytest.mark.thorough
def test_missing_token_types_are_not_zeros(tmp_path: Path) -> None:
    """GPT-2 adds the embedding of token 0 if the token type is 0, but adds nothing if `token_type_ids` are missing. The
    exported graph computes the result for missing token types, which is the usual case.
    """
    config = transformers.GPT2Config(vocab_size=120, n_embd=32, n_layer=1, n_head=2, pad_token_id=0, num_labels=3)
    model = rescale(transformers.GPT2ForSequenceClassification(config)).eval()
    artifact = export(model, tmp_path / "gpt2", task="text-classification")
    assert [spec.name for spec in artifact.component().inputs] == ["input_ids", "attention_mask"]
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = model(ids).logits
    assert (ORTModelForSequenceClassification(artifact)(ids).logits - expected).abs().max() < 1e-4


def test_missing_weights_raise(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "bert", "bert")
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "layer.1." not in n}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=r"lacks 16 weights of a BertForSequenceClassification .*layer\.1\."):
        export(folder, tmp_path / "out")


@pytest.mark.thorough
def test_missing_pooler_is_left_out(tmp_path: Path) -> None:
    artifact = export(
        save_tiny(tmp_path / "roberta", "roberta", "fill-mask"), tmp_path / "out", task="feature-extraction"
    )
    assert [spec.name for spec in artifact.component().outputs] == ["last_hidden_state"]


def test_graph_contains_no_stack_traces(tiny_artifact: Callable[..., Artifact]) -> None:
    text = tiny_artifact().file().read_bytes()
    assert b"site-packages" not in text
    assert b"stack_trace" not in text


def test_weights_inside_the_graph_file(tmp_path: Path) -> None:
    artifact = export(tiny_model("bert", num_hidden_layers=1), tmp_path / "out", external_data=False)
    assert [record.name for record in artifact.component().files] == ["model.onnx"]
    assert not (tmp_path / "out" / "model.onnx.data").exists()
    accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "out")


def test_axis_fixed_by_the_trace_is_refused(tmp_path: Path) -> None:
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.reshape(2, -1) if x.shape[0] == 2 else x * 2

    with pytest.raises(ExportError, match="batch|cannot be traced"):
        export(Fixed(), tmp_path / "out", task="custom", sample={"x": torch.ones(2, 3)}, axes={"x": {0: "batch"}})
    assert not (tmp_path / "out").exists()


def test_two_axes_merged_by_the_trace_are_refused(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    axes = {"a": {0: "rows"}, "b": {0: "columns"}}
    sample = {"a": torch.ones(3), "b": torch.ones(3)}
    with pytest.raises(ExportError, match="failed on sample inputs with the axis sizes.*rows.*columns"):
        export(Tied(), tmp_path / "out", task="custom", sample=sample, axes=axes)


def test_wrong_graph_is_not_written(tmp_path: Path) -> None:
    """The model computes a different result for inputs longer than the sample. The trace does not contain this
    difference, so validation must detect it.
    """

    class LengthDependent(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 2.0 if torch.compiler.is_exporting() else 1.0
            return x * scale

    with pytest.raises(ValidationError, match="differs"):
        export(
            LengthDependent(), tmp_path / "out", task="custom", sample={"x": torch.ones(2, 3)}, axes={"x": {0: "batch"}}
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["[{", "{}", "3", "[3]", '[{"idx": 0}]', '[{"type": 3, "path": ""}]', "", "[" * 100_000]
)
def test_damaged_sentence_transformers_modules_raise(text: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "st", "bert", "feature-extraction")
    (folder / "modules.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"modules\.json") as error:
        accel.export(folder, tmp_path / "out", task="sentence-similarity")
    assert error.value.fix


def test_encoding_single_texts_opens_the_tokenizer_once_per_thread(
    tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    opens = processors.open_companion

    def counted(*args: Any, **kwargs: Any) -> Any:
        opened.append(threading.get_ident())
        return opens(*args, **kwargs)

    monkeypatch.setattr(processors, "open_companion", counted)
    model = accel.ORTModelForFeatureExtraction.from_pretrained(tiny_artifact(task="feature-extraction").path)
    texts = ["where is my card", "a bank account"]
    alone = [model.encode(text) for text in texts]
    with ThreadPoolExecutor(1) as other:
        for embedding, text in zip(alone, texts, strict=True):
            assert (other.submit(model.encode, text).result() == embedding).all()
    # The model opens the tokenizer once in each thread, because a tokenizer stores settings between calls.
    assert len(opened) == len(set(opened)) == 2


# The tests below check invalid inputs.


def test_unknown_task(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="Did you mean 'text-classification'") as info:
        export(tiny_folder(), tmp_path / "out", task="text-clasification")
    assert "Fix:" in str(info.value)
    assert list(tmp_path.iterdir()) == []


def test_task_that_does_not_fit_the_model_raises(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="BertForSequenceClassification.*no head"):
        export(tiny_folder(), tmp_path / "out", task="question-answering")
    with pytest.raises(TaskError, match="does not support the task 'image-classification'"):
        export(tiny_folder(), tmp_path / "out", task="image-classification")
    assert list(tmp_path.iterdir()) == []


def test_outputs_not_declared_by_the_task_raise(tmp_path: Path) -> None:
    """The export fails, because no model class of the task could open the exported graph."""
    with pytest.raises(
        TaskError, match="returns 'logits' with 3 axes, but a model for the task 'text-classification' returns"
    ) as info:
        export(tiny_model("bert", "token-classification"), tmp_path / "out", task="text-classification")
    assert "TaskSpec.outputs" in info.value.fix
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_with_several_heads_supports_the_task_of_its_weights(tmp_path: Path) -> None:
    """`BertForPreTraining` has a masked-language head and a second head. `from_pretrained` loads such a checkpoint as a
    masked language model, even if the config names another class.
    """
    config = tiny_config("bert")
    model = rescale(transformers.BertForPreTraining(config)).eval()
    model.save_pretrained(tmp_path / "model")
    words = {"input_ids": torch.tensor([[2, 9, 4, 8, 3]]), "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
    expected = model(**words).prediction_logits.detach()
    for name in ("BertForPreTraining", "OursForProteins"):
        file = tmp_path / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [name]}))
        opened = accel.ORTModelForMaskedLM.from_pretrained(tmp_path / "model")
        # The exported graph may add float32 numbers in a different order, so results differ slightly.
        assert torch.allclose(opened(**words).logits, expected, atol=1e-5)


def test_checkpoint_without_the_requested_head_raises(tmp_path: Path) -> None:
    config = tiny_config("electra")
    transformers.ElectraForPreTraining(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ExportError, match="lacks . weights of a ElectraForMaskedLM"):
        export(tmp_path / "model", tmp_path / "out", task="fill-mask")


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="does not exist"):
        export(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactNotFoundError, match="contains no model"):
        export(tmp_path / "empty", tmp_path / "out")


def test_missing_and_truncated_weights(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny_folder() / "config.json").read_bytes())
    with pytest.raises(ExportError, match="cannot load"):
        export(folder, tmp_path / "out")
    (folder / "model.safetensors").write_bytes((tiny_folder() / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ExportError, match="cannot load"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def _change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def _truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _pickle_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weight": _RunsCode()}, folder / "pytorch_model.bin")


def _save_garbage(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"garbage" * 30)


def _remove_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _remove_the_model_type(folder: Path) -> None:
    _change_config(folder, lambda config: config.pop("model_type"))


def _change_the_size(folder: Path) -> None:
    _change_config(folder, lambda config: config.update(vocab_size=7))


@pytest.mark.parametrize(
    ("change", "reason", "fix"),
    [
        (_truncate, r"model\.safetensors is damaged", "download it again"),
        (
            _pickle_code,
            r"pytorch_model\.bin contains a Python object \(\w+\.system\)",
            "convert the weights to safetensors",
        ),
        (_save_garbage, r"pytorch_model\.bin is damaged", "download it again"),
        (_remove_a_shard, r"model-00001-of-00001\.safetensors, which is missing", "download the missing weights"),
        (_remove_the_model_type, "has no model_type", 'add "model_type": "bert" to config.json'),
        (_change_the_size, "do not have the shapes", "config.json that belongs to the weights"),
    ],
)
def test_errors_of_models_that_cannot_be_loaded(
    change: Callable[[Path], None], reason: str, fix: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    change(folder)
    with pytest.raises(ExportError, match=reason) as info:
        export(folder, tmp_path / "out", task="text-classification")
    assert fix in str(info.value.fix)
    assert "weights_only" not in str(info.value)


def test_artifact_is_not_accepted_as_source(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="exported artifact without PyTorch weights"):
        export(tiny_artifact().path, tmp_path / "out")
    with pytest.raises(ConfigError, match="which accel cannot load"):
        export(42, tmp_path / "out")  # type: ignore[arg-type]


def test_output_folder_that_is_input_or_not_empty_raises(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OutputFolderError, match="the same as the input folder"):
        export(tiny_folder(), tiny_folder())
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match="not empty"):
        export(tiny_folder(), tmp_path)
    assert (tmp_path / "keep.txt").read_text() == "mine"


def test_unknown_backend_and_settings_raise(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnknownBackendError, match="Did you mean"):
        export(tiny_folder(), tmp_path / "out", backend="cpuu")
    with pytest.raises(ConfigError, match="Did you mean 'opset'"):
        export(tiny_folder(), tmp_path / "out", opsett=18)
    with pytest.raises(ConfigError, match="float64"):
        export(tiny_folder(), tmp_path / "out", dtype="float64")
    with pytest.raises(TaskError, match="apply only to embedding tasks"):
        export(tiny_folder(), tmp_path / "out", pooling="mean")


def test_custom_sample_requires_axes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="axes"):
        export(torch.nn.Linear(2, 2), tmp_path / "out", task="custom", sample={"input": torch.ones(2, 2)})
    with pytest.raises(ExportError, match="cannot make sample inputs"):
        export(torch.nn.Linear(2, 2), tmp_path / "out", task="custom")


# The tests below interrupt an export.

# Export the smallest model with a weight file. The export writes files in the same order for all models.
_EXPORT = """
import sys, torch
from accel.stages.export import export
sample, axes = {"input": torch.ones(3, 64)}, {"input": {0: "batch"}}
export(torch.nn.Linear(64, 64), sys.argv[1], task="custom", sample=sample, axes=axes)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("pattern", [".accel-staging-*", ".accel-staging-*/**/*.onnx*", "*/accel.json"])
def test_killed_export_leaves_no_partial_folder(pattern: str, tmp_path: Path) -> None:
    """Kill the export as soon as the temporary folder, the graph file or the manifest exists. Afterwards the output
    folder is complete or missing.
    """
    target = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", _EXPORT, str(target)], stdout=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not any(tmp_path.glob(pattern)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    if target.exists():
        assert Artifact.load(target).component().file == "model.onnx"
    # The next export in the same parent folder removes the temporary files and succeeds.
    sample, axes = {"input": torch.ones(3, 64)}, {"input": {0: "batch"}}
    export(torch.nn.Linear(64, 64), tmp_path / "next", task="custom", sample=sample, axes=axes)
    assert not list(tmp_path.glob(".accel-staging-*"))


_NO_SOCKETS = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"a socket was opened: {args}")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import accel
model = accel.ORTModelForSequenceClassification.from_pretrained(sys.argv[1])
pipe = accel.pipeline("text-classification", model=model)
print(pipe("where is my card")[0]["label"])
"""


@pytest.mark.thorough
def test_local_path_opens_no_socket(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "bert", num_hidden_layers=1)
    environment = {**os.environ, "ACCEL_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_OFFLINE")
    done = subprocess.run(
        [sys.executable, "-c", _NO_SOCKETS, str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "LABEL" in done.stdout


def test_model_in_memory_is_unchanged(tmp_path: Path) -> None:
    """The export does not change the model's weights, dtype or training mode."""
    model = tiny_model("bert").train()
    model.bert.pooler.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for dtype in ("float16", "float32"):
        export(model, tmp_path / dtype, dtype=dtype)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert (model.dtype, model.training, model.bert.encoder.training) == (torch.float32, True, True)
        assert not model.bert.pooler.training
    mixed = tiny_model("bert")
    mixed.classifier.half()
    parameters = {name: (tensor, tensor.clone()) for name, tensor in mixed.state_dict(keep_vars=True).items()}
    export(mixed, tmp_path / "mixed", dtype="float16")
    assert all(
        mixed.get_parameter(name) is tensor
        for name, (tensor, _) in parameters.items()
        if isinstance(tensor, torch.nn.Parameter)
    )
    assert all(tensor.dtype is old.dtype and torch.equal(tensor, old) for tensor, old in parameters.values())
    with torch.no_grad():
        inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
        logits = ORTModelForSequenceClassification.from_pretrained(tmp_path / "float32")(**inputs).logits
        assert (logits - model.eval()(**inputs).logits).abs().max() < 1e-5


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = tiny_model("bert")
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[3, 4] = float("nan")
    with pytest.raises(ExportError, match=r"1 of its weights contain NaN.*encoder\.layer\.1\.output\.dense\.weight"):
        export(model, tmp_path / "onnx", task="text-classification")
    assert not (tmp_path / "onnx").exists()
