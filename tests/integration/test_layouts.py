"""`accel convert --layout`: folders for other libraries. `tests/javascript` runs them with transformers.js."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import accel
from accel.backends import registry
from accel.errors import ConfigError, TaskError
from accel.stages.folder_layouts import REPORT, write_layout
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny
from accel_plugins.ortkit.layouts.graph_files import write_graph_file


def test_merged_decoder_continues_from_its_cache(tmp_path: Path) -> None:
    """The first call ignores the cache and computes the cross-attention; the second call reads both from the first call."""
    source = save_generator(tmp_path / "t5", "t5", initializer_factor=1.0)
    folder = write_layout(source, tmp_path / "out", layout="transformers.js", variants=["fp32"])
    assert list(folder.variants) == ["fp32"]
    assert not folder.failed
    encoder, decoder = (
        onnxruntime.InferenceSession(folder.path / "onnx" / f"{name}.onnx")
        for name in ("encoder_model", "decoder_model_merged")
    )
    ids, mask = np.array([[5, 6, 7], [8, 9, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    fixed = {"encoder_hidden_states": encoder.run(None, {"input_ids": ids, "attention_mask": mask})[0]}
    fixed["encoder_attention_mask"] = mask
    names = [value.name for value in decoder.get_outputs()]
    assert {"use_cache_branch", "past_key_values.1.encoder.key"} <= {value.name for value in decoder.get_inputs()}
    caches = [value for value in decoder.get_inputs() if value.name.startswith("past_key_values")]
    assert all(value.shape[0] == "batch_size" for value in caches)

    def run(tokens: list[list[int]], past: dict[str, np.ndarray], branch: bool) -> dict[str, np.ndarray]:
        feeds = {**fixed, **past, "input_ids": np.array(tokens), "use_cache_branch": np.array([branch])}
        return dict(zip(names, decoder.run(None, feeds), strict=True))

    # Optimum passes a cache of one token to the first call; its values must not be read.
    unread = {value.name: np.full((2, value.shape[1], 1, value.shape[3]), 7, np.float32) for value in caches}
    complete, first = run([[0, 7, 8]] * 2, unread, False), run([[0, 7]] * 2, unread, False)
    past = {value.name: first[value.name.replace("past_key_values", "present")] for value in caches}
    second = run([[8]] * 2, past, True)
    assert np.abs(second["logits"][:, 0] - complete["logits"][:, 2]).max() < 1e-4


def test_decoder_computes_the_last_logits(tmp_path: Path) -> None:
    source = save_generator(tmp_path / "llama", "llama")
    folder = write_layout(source, tmp_path / "out", layout="transformers.js", variants=["fp32"])
    session = onnxruntime.InferenceSession(folder.path / "onnx" / "model.onnx")
    ids = np.array([[5, 6, 7, 8]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(4)[None]}
    for value in session.get_inputs():
        if value.name.startswith("past_key_values"):
            feeds[value.name] = np.zeros((1, value.shape[1], 0, value.shape[3]), np.float32)
    logits = [session.run(["logits"], {**feeds, "num_logits_to_keep": np.array(count)})[0] for count in (0, 1, 9)]
    assert [value.shape[1] for value in logits] == [4, 1, 4]
    assert np.array_equal(logits[0][:, -1:], logits[1])
    model = accel.ORTModelForCausalLM.from_pretrained(folder.path)
    assert model.generate(accel_ids(ids), max_new_tokens=2, do_sample=False).shape == (1, 6)


def accel_ids(ids: np.ndarray) -> object:
    """Return token ids as a tensor."""
    import torch

    return torch.from_numpy(ids)


def test_report_has_the_differences_of_each_variant(tmp_path: Path) -> None:
    folder = write_layout(save_tiny(tmp_path / "bert", "bert"), tmp_path / "out", layout="transformers.js")
    report = json.loads((folder.path / REPORT).read_text())
    assert list(report["variants"]) == ["fp32", "fp16", "q8", "q4", "q4f16"]
    for variant in report["variants"].values():
        assert variant["max_abs_difference"] <= variant["tolerance"]
        assert all((folder.path / file).is_file() for file in variant["files"])
    assert report["variants"]["fp32"]["max_abs_difference"] < report["variants"]["q8"]["max_abs_difference"]


def test_model_package_follows_the_specification(tmp_path: Path) -> None:
    folder = write_layout(save_tiny(tmp_path / "bert", "bert"), tmp_path / "out", layout="model-package")
    manifest = json.loads((folder.path / "manifest.json").read_text())
    assert manifest["schema_version"] == "1.0"
    assert manifest["components"] == {"model": "model"}
    component = json.loads((folder.path / "model" / "component.json").read_text())
    assert {name: body["ep"] for name, body in component["variants"].items()} == {
        "cpu": "CPUExecutionProvider",
        "cuda": "CUDAExecutionProvider",
    }
    for name, body in component["variants"].items():
        onnxruntime.InferenceSession(folder.path / "model" / name / body["executor_info"]["ort"]["model_file"])
    (asset,) = (folder.path / "shared_assets").iterdir()
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(asset.iterdir())]
    assert asset.name == f"sha256-{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    assert (asset / "tokenizer.json").is_file()


def test_optimum_folder_is_read_by_suffix(tmp_path: Path) -> None:
    folder = write_layout(save_tiny(tmp_path / "bert", "bert"), tmp_path / "out", layout="optimum")
    for variant in ("fp32", "optimized", "quantized"):
        with accel.ORTModelForSequenceClassification.from_pretrained(folder.path, variant=variant) as model:
            assert "input_ids" in model.input_names


def test_large_weights_go_to_numbered_data_files(tmp_path: Path, tiny_artifact: Callable[..., accel.Artifact]) -> None:
    artifact = tiny_artifact("bert")
    files = write_graph_file(ir.load(artifact.file()), tmp_path / "model.onnx", single_bytes=0, data_bytes=20_000)
    names = [path.name for path in files]
    assert names[:3] == ["model.onnx", "model.onnx_data", "model.onnx_data_1"]
    ids = np.array([[5, 6, 7]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    outputs = [onnxruntime.InferenceSession(path).run(None, feeds)[0] for path in (artifact.file(), files[0])]
    assert np.array_equal(*outputs)


def test_unknown_layout_lists_the_layouts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'transformers.js'") as error:
        write_layout(tmp_path, tmp_path / "out", layout="transformersjs")
    assert all(name in str(error.value.fix) for name in registry.written_layouts())


def test_model_without_file_names_is_refused(tmp_path: Path) -> None:
    source = save_generator(tmp_path / "mamba", "mamba")
    with pytest.raises(TaskError, match="the state"):
        write_layout(source, tmp_path / "out", layout="transformers.js", variants=["fp32"])
    assert not (tmp_path / "out").exists()
