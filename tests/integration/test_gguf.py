"""Tests of GGUF files: export and loading from files, folders and the Hub, tokenizers, and errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

import accel
from accel.artifact import cache
from accel.artifact.hub import HubOptions
from accel.capture import gguf_models
from accel.cli import app
from accel.errors import ArtifactNotFoundError, ConfigError, ExportError
from accel.stages.resolution import original, resolve
from tests.fake_hub import SHA, FakeHub, serving, use
from tests.gguf_files import gguf_model, write_gguf

pytest.importorskip("gguf")

IDS = torch.arange(20, 36).reshape(2, 8)
TEXTS = ["hello world.", "  hello\n<s> w\u00f6rld ", "<pad>hello</s>"]
TEMPLATE = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a GGUF file into the folder `models`."""
    (tmp_path / "models").mkdir()

    def write(
        family: str = "llama", kind: str = "Q8_0", *, name: str = "tiny.gguf", seed: int = 0, **arguments: Any
    ) -> Path:
        return write_gguf(tmp_path / "models" / name, gguf_model(family, seed), kind, **arguments)

    return write


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def expected_logits(file: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return logits(model.eval())


@pytest.mark.parametrize(
    ("family", "kind", "tokenizer"),
    [("llama", "Q4_0", "llama"), ("qwen2", "Q8_0", "gpt2"), ("gemma2", "F16", "llama"), ("gemma3", "F32", "llama")],
)
def test_exported_file_gives_the_answers_of_transformers(
    family: str, kind: str, tokenizer: str, file: Callable[..., Path], tmp_path: Path
) -> None:
    path = file(family, kind, tokenizer=tokenizer)
    artifact = accel.export(path, tmp_path / "out")
    assert artifact.task == "text-generation"
    assert artifact.manifest.source is not None
    assert artifact.manifest.source.id == str(path)
    assert not list(artifact.path.glob("*.gguf"))
    with accel.ORTModelForCausalLM.from_pretrained(artifact) as model:
        torch.testing.assert_close(logits(model), expected_logits(path), atol=1e-4, rtol=1e-4)
    saved = transformers.AutoTokenizer.from_pretrained(artifact.path)
    read = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert saved(TEXTS).input_ids == read(TEXTS).input_ids
    assert saved.decode(saved(TEXTS[0]).input_ids) == read.decode(read(TEXTS[0]).input_ids)
    assert saved.special_tokens_map == read.special_tokens_map
    assert saved.apply_chat_template(TEMPLATE, tokenize=False) == "hello"


def test_command_exports_a_file(file: Callable[..., Path], tmp_path: Path) -> None:
    path = file("qwen2", "Q4_0")
    result = CliRunner().invoke(app, ["export", str(path), str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    assert accel.validate(tmp_path / "out").passed


def test_every_way_to_name_a_file_opens_it(file: Callable[..., Path]) -> None:
    path = file()
    expected = expected_logits(path)
    for name, arguments in ((path, {}), (path.parent, {}), (path.parent, {"gguf_file": path.name})):
        with accel.ORTModelForCausalLM.from_pretrained(name, backend="pytorch", **arguments) as model:
            torch.testing.assert_close(logits(model), expected)
            assert model.artifact.manifest.source.id == str(path)


def test_file_is_exported_again_after_a_change(file: Callable[..., Path]) -> None:
    for seed in (0, 1):
        path = file(seed=seed)
        with accel.ORTModelForCausalLM.from_pretrained(path) as model:
            torch.testing.assert_close(logits(model), expected_logits(path), atol=1e-4, rtol=1e-4)


def test_moved_file_opens(file: Callable[..., Path], tmp_path: Path) -> None:
    path = file()
    first = resolve(path)
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / path.name)
    second = resolve(moved)
    assert second.folder == first.folder
    assert second.has_weights
    assert second.id == str(moved)


def test_cache_lists_and_removes_configs_of_files(file: Callable[..., Path]) -> None:
    path = file()
    folder = resolve(path).folder
    (entry,) = cache.entries()
    assert entry.path == folder
    assert entry.bytes < path.stat().st_size
    cache.clear()
    assert not cache.entries()
    assert path.is_file()


def test_graphs_and_weights_have_priority_over_a_file(
    file: Callable[..., Path], tiny_artifact: Callable[..., Any], tiny_folder: Callable[..., Path]
) -> None:
    import shutil

    path = file()
    for folder, kind in (
        (tiny_artifact("bert", "text-classification").path, "artifact"),
        (tiny_folder("bert"), "weights"),
    ):
        other = path.parent.parent / kind
        shutil.copytree(folder, other)
        shutil.copy(path, other)
        resolved = resolve(other)
        assert (resolved.kind, resolved.folder) == (kind, other)


# Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    with serving(server) as address:
        use(address, str(tmp_path / "cache"), monkeypatch)
        yield server


@pytest.mark.parametrize("inside", ["", "small/"])
def test_file_in_a_repository_opens(inside: str, file: Callable[..., Path], hub: FakeHub) -> None:
    path = file()
    name = f"{inside}tiny.gguf"
    others = {f"{inside}big.gguf": b"", "README.md": b"", "config.json": b"{}"}
    hub.repositories["org/model"] = {name: path.read_bytes(), **others}
    options = HubOptions(gguf_file="tiny.gguf", subfolder=inside.strip("/"))
    for resolved in (resolve("org/model", hub=options), resolve(f"org/model/{name}")):
        assert (resolved.id, resolved.revision) == (f"org/model/{name}", SHA)
        assert hub.fetched == [name]
    with accel.ORTModelForCausalLM.from_pretrained(
        "org/model", gguf_file="tiny.gguf", subfolder=options.subfolder, backend="pytorch"
    ) as model:
        torch.testing.assert_close(logits(model), expected_logits(path))


def test_artifact_leads_back_to_the_repository(file: Callable[..., Path], hub: FakeHub, tmp_path: Path) -> None:
    hub.repositories["org/model"] = {"tiny.gguf": file().read_bytes()}
    artifact = accel.export("org/model", tmp_path / "out", gguf_file="tiny.gguf", backend="pytorch")
    resolved = original(resolve(artifact))
    assert (resolved.kind, resolved.id, resolved.revision) == ("weights", "org/model/tiny.gguf", SHA)


def test_only_file_of_a_repository_needs_no_name(file: Callable[..., Path], hub: FakeHub) -> None:
    hub.repositories["org/model"] = {"tiny.gguf": file().read_bytes(), "README.md": b""}
    assert resolve("org/model").id == "org/model/tiny.gguf"


def test_misspelled_file_in_a_repository_is_an_error(hub: FakeHub) -> None:
    hub.repositories["org/model"] = {"tiny.gguf": b""}
    with pytest.raises(ArtifactNotFoundError, match=r"org/model has no GGUF file 'tini\.gguf'"):
        resolve("org/model", hub=HubOptions(gguf_file="tini.gguf"))


# Rotary position embeddings


def _llama_3(**overrides: Any) -> Any:
    scaling = {
        "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return gguf_model("llama", rope_parameters={**scaling, **overrides})


def _factors(model: Any) -> Callable[[Any], None]:
    """Return a function that adds the tensor with which llama.cpp's converter stores the scaling of Llama 3."""
    rotation = model.model.rotary_emb
    head = model.config.head_dim
    plain = model.config.rope_parameters["rope_theta"] ** -(np.arange(0, head, 2) / head)
    factors = (plain / rotation.inv_freq.double().numpy()).astype(np.float32)
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors)


def test_scaling_of_llama_3_is_read(tmp_path: Path) -> None:
    model = _llama_3()
    path = write_gguf(tmp_path / "tiny.gguf", model, more=_factors(model))
    with accel.ORTModelForCausalLM.from_pretrained(path, backend="pytorch") as opened:
        torch.testing.assert_close(logits(opened), logits(model), atol=1e-4, rtol=1e-4)
    assert (expected_logits(path) - logits(model)).abs().max() > 1e-2, "transformers now reads the scaling"


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    model = gguf_model("qwen2", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})

    def scaled(writer: Any) -> None:
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    path = write_gguf(tmp_path / "tiny.gguf", model, more=scaled)
    with accel.ORTModelForCausalLM.from_pretrained(path, backend="pytorch") as opened:
        torch.testing.assert_close(logits(opened), logits(model), atol=1e-4, rtol=1e-4)


def test_unknown_scaling_is_an_error(tmp_path: Path) -> None:
    model = _llama_3(low_freq_factor=2.0)
    path = write_gguf(tmp_path / "tiny.gguf", model, more=_factors(model))
    with pytest.raises(ExportError, match=r"scaling that accel cannot set .*rope_freqs"):
        resolve(path)


# Errors


def test_missing_package_is_named(file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf_models, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ExportError, match="gguf is not installed") as error:
        resolve(file())
    assert error.value.fix == "pip install gguf"


def test_unsupported_architecture_is_an_error(file: Callable[..., Path]) -> None:
    path = file()
    path.write_bytes(path.read_bytes().replace(b"llama", b"grok2"))
    with pytest.raises(ExportError, match=r"architecture is 'grok2'.*not supported"):
        resolve(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_damaged_file_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(ExportError, match="is not a GGUF file, or is damaged"):
        resolve(path)


def test_truncated_file_is_an_error(file: Callable[..., Path]) -> None:
    path = file()
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ExportError, match="is not a GGUF file, or is damaged"):
        resolve(path)


def test_part_of_a_split_file_is_an_error(file: Callable[..., Path]) -> None:
    path = file(more=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(ExportError, match="one of 3 parts"):
        resolve(path)


def test_several_files_need_a_name(file: Callable[..., Path]) -> None:
    path = file(name="a.gguf")
    file(name="b.gguf")
    with pytest.raises(ConfigError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        resolve(path.parent)
    assert resolve(path.parent, hub=HubOptions(gguf_file="b.gguf")).id == str(path.with_name("b.gguf"))


def test_graph_and_file_cannot_both_be_named(file: Callable[..., Path]) -> None:
    path = file()
    with pytest.raises(ConfigError, match="file_name='model.onnx'"):
        accel.ORTModelForCausalLM.from_pretrained(path, file_name="model.onnx")
    with pytest.raises(ArtifactNotFoundError, match="export=False"):
        accel.ORTModelForCausalLM.from_pretrained(path, export=False)
    with pytest.raises(ArtifactNotFoundError):
        resolve(path.with_name("missing.gguf"))
    with pytest.raises(ArtifactNotFoundError, match=r"Did you mean 'tiny\.gguf'"):
        resolve(path.parent, hub=HubOptions(gguf_file="tinny.gguf"))
