"""Tests of the Hub with a local server: only the needed files are downloaded, and an unreachable Hub raises one error
within seconds.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel.artifact import Artifact
from accel.artifact.hub import HubOptions, locate
from accel.errors import ArtifactError, ArtifactNotFoundError
from accel.stages.foreign_folders import graphs_to_fetch
from tests.fake_hub import FakeHub, serving, use

NAME = "org/model"
SECONDS = 8.0
"""Longest accepted time until an error, in seconds. The timeout of a request is 5 s."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.chdir(tmp_path)
    with serving(server) as address:
        use(address, str(tmp_path / "cache"), monkeypatch)
        yield server


def fetch(
    hub: FakeHub, files: tuple[str, ...], *, want_graph: bool | None = None, subfolder: str = "", **options: Any
) -> set[str]:
    hub.repositories[NAME] = {file: file.encode() for file in files}
    choose = partial(graphs_to_fetch, NAME, **options)
    location = locate(NAME, HubOptions(subfolder=subfolder), want_graph=want_graph, choose_graphs=choose)
    assert location.root is not None
    downloaded = {path.relative_to(location.root).as_posix() for path in location.root.rglob("*") if path.is_file()}
    assert downloaded == set(hub.fetched)
    return downloaded


CONFIGS = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
OTHERS = ("README.md", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.gguf", "train.py")
VARIANTS = ("", "_O1", "_O2", "_O3", "_O4", "_qint8_arm64", "_qint8_avx512", "_qint8_avx512_vnni", "_quint8_avx2")
EMBEDDER = (
    *CONFIGS, *OTHERS, "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
    "2_Dense/config.json", "2_Dense/model.safetensors", "2_Dense/pytorch_model.bin", "model.safetensors", "pytorch_model.bin",
    *(f"onnx/model{variant}.onnx" for variant in VARIANTS), "openvino/openvino_model.xml", "openvino/openvino_model.bin",
)  # fmt: skip
EMBEDDER_SMALL = {
    *CONFIGS, "train.py", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
    "2_Dense/config.json", "2_Dense/model.safetensors",
}  # fmt: skip
DECODER = (
    *CONFIGS, "generation_config.json", "chat_template.jinja", "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx_data_1",
    "onnx/model_q4.onnx", "onnx/model_q4.onnx_data", "onnx/model_fp16.onnx", "onnx/model_fp16.onnx_data", "onnx/model_q4f16.onnx",
)  # fmt: skip
DECODER_SMALL = {*CONFIGS, "generation_config.json", "chat_template.jinja"}
PARTS = ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")
SEQ2SEQ = (
    *CONFIGS,
    "spiece.model",
    "source.spm",
    *(f"onnx/{part}{v}.onnx" for part in PARTS for v in ("", "_quantized")),
)
SEQ2SEQ_SMALL = {*CONFIGS, "spiece.model", "source.spm"}
OPTIMUM = (
    *CONFIGS,
    "ort_config.json",
    *(f"{part}.onnx" for part in PARTS[:3]),
    "decoder_model.onnx_data",
    "encoder.data",
)
OPENVINO = ("openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
CHECKPOINT = (
    *CONFIGS, *OTHERS, *SHARDS, "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "model.fp16.safetensors",
    "original/params.json", "checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt", "training_args.bin",
)  # fmt: skip


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        pytest.param(EMBEDDER, {}, {*EMBEDDER_SMALL, "onnx/model.onnx"}, id="sentence-transformers"),
        pytest.param(EMBEDDER, {"variant": "O3"}, {*EMBEDDER_SMALL, "onnx/model_O3.onnx"}, id="variant"),
        pytest.param(
            EMBEDDER, {"file_name": "onnx/model_qint8_avx512.onnx"}, {*EMBEDDER_SMALL, "onnx/model_qint8_avx512.onnx"}, id="file-name"
        ),
        pytest.param(EMBEDDER, {"want_graph": False}, {*EMBEDDER_SMALL, "model.safetensors"}, id="weights-beside-graphs"),
        pytest.param(
            EMBEDDER, {"subfolder": "openvino"},
            {*(file for file in EMBEDDER_SMALL if "/" not in file), "openvino/openvino_model.xml", "openvino/openvino_model.bin"},
            id="openvino-subfolder",
        ),
        pytest.param(
            DECODER, {}, {*DECODER_SMALL, "onnx/model.onnx", "onnx/model.onnx_data", "onnx/model.onnx_data_1"}, id="external-data"
        ),
        pytest.param(DECODER, {"variant": "q4"}, {*DECODER_SMALL, "onnx/model_q4.onnx", "onnx/model_q4.onnx_data"}, id="decoder-variant"),
        pytest.param(
            SEQ2SEQ, {}, {*SEQ2SEQ_SMALL, "onnx/encoder_model.onnx", "onnx/decoder_model_merged.onnx"}, id="merged-decoder"
        ),
        pytest.param(
            SEQ2SEQ, {"variant": "quantized"},
            {*SEQ2SEQ_SMALL, "onnx/encoder_model_quantized.onnx", "onnx/decoder_model_merged_quantized.onnx"}, id="merged-variant",
        ),
        pytest.param(OPTIMUM, {}, {*OPTIMUM}, id="optimum-encoder-decoder"),
        pytest.param(CHECKPOINT, {}, {*CONFIGS, "train.py", *SHARDS}, id="safetensors"),
        pytest.param((*CONFIGS, *OTHERS, "pytorch_model.bin", "optimizer.bin"), {}, {*CONFIGS, "train.py", "pytorch_model.bin"}, id="bin"),
        pytest.param(
            ("adapter_config.json", "adapter_model.safetensors", "training_args.bin", "tokenizer.json"), {"want_graph": False},
            {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}, id="adapter",
        ),
        pytest.param(
            (*CONFIGS, *(f"openvino/{file}" for file in OPENVINO)), {}, {*CONFIGS, *(f"openvino/{file}" for file in OPENVINO)},
            id="openvino-alone",
        ),
        pytest.param(CHECKPOINT, {"want_graph": True}, {*CONFIGS, "train.py", SHARDS[-1]}, id="no-graph-is-no-download"),
        pytest.param(
            (*CONFIGS, *OPENVINO, "model.safetensors"), {}, {*CONFIGS, *OPENVINO}, id="openvino",
        ),
    ],
)  # fmt: skip
def test_only_needed_files_are_downloaded(
    files: tuple[str, ...], options: Any, expected: set[str], hub: FakeHub
) -> None:
    assert fetch(hub, files, **options) == expected


@pytest.mark.parametrize(
    ("options", "near"), [({"variant": "q5"}, "q4"), ({"file_name": "onnx/model_q5.onnx"}, "model_q4.onnx")]
)
def test_missing_graph_downloads_nothing(options: dict[str, str], near: str, hub: FakeHub) -> None:
    with pytest.raises(ArtifactNotFoundError, match=near):
        fetch(hub, DECODER, **options)
    assert not hub.fetched


def test_accel_artifact_is_downloaded_by_its_manifest(hub: FakeHub, tiny_artifact: Callable[..., Artifact]) -> None:
    folder = tiny_artifact().path
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.repositories[NAME] = {
        **files,
        "pytorch_model.bin": b"weights",
        "int8/model.onnx": b"another one",
        "README.md": b"text",
    }
    model = accel.ORTModelForSequenceClassification.from_pretrained(NAME)
    ids = torch.tensor([[5, 6, 7]])
    expected = accel.ORTModelForSequenceClassification(tiny_artifact())
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)
    assert set(hub.fetched) == set(files)


def test_partial_download_opens_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    before = fetch(hub, EMBEDDER)
    hub.fetched.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    location = locate(NAME, HubOptions(), choose_graphs=partial(graphs_to_fetch, NAME))
    assert (location.folder / "onnx" / "model.onnx").is_file()
    assert not hub.fetched
    with pytest.raises(ArtifactNotFoundError, match="are missing in the local cache") as caught:
        locate(NAME, HubOptions(), choose_graphs=partial(graphs_to_fetch, NAME, variant="O3"))
    assert "network" in caught.value.fix
    assert before


@pytest.mark.parametrize(
    ("answer", "message", "fix"),
    [
        ((401, ""), "refuses access", "token"),
        ((404, "RepoNotFound"), "no model 'org/model', or the model is private", "token"),
        ((403, "GatedRepo"), "is gated", "request access"),
        ((404, "RevisionNotFound"), "no revision 'v9'", "revision"),
        ((403, ""), "refuses access", "token"),
        ((429, ""), "too many requests", "HF_HUB_OFFLINE=1"),
        ((503, ""), "HTTP status 503", "HF_HUB_OFFLINE=1"),
    ],
)
def test_hub_errors_are_reported_within_seconds(answer: tuple[int, str], message: str, fix: str, hub: FakeHub) -> None:
    hub.refuses = answer
    started = time.monotonic()
    with pytest.raises(ArtifactNotFoundError, match=message) as caught:
        accel.ORTModelForSequenceClassification.from_pretrained(NAME, revision="v9")
    assert fix in caught.value.fix
    assert time.monotonic() - started < SECONDS


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("how", ["refuses", "hangs", "no-name", "proxy"])
def test_unreachable_hub_raises(how: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.hangs = how == "hangs"
    if how in ("refuses", "no-name"):
        use(closed_port() if how == "refuses" else "http://hub.invalid", str(tmp_path / "cache"), monkeypatch)
    if how == "proxy":
        from huggingface_hub import close_session

        use("http://hub.invalid", str(tmp_path / "cache"), monkeypatch)
        monkeypatch.setenv("HTTP_PROXY", closed_port())
        close_session()
    started = time.monotonic()
    with pytest.raises(ArtifactNotFoundError, match="cannot be reached") as caught:
        accel.ORTModelForSequenceClassification.from_pretrained(NAME)
    assert time.monotonic() - started < SECONDS
    assert "HF_HUB_OFFLINE=1" in caught.value.fix
    if how == "proxy":
        assert "HTTP_PROXY" in str(caught.value)
        close_session()


def test_cached_files_are_used_if_the_hub_is_down(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(hub, EMBEDDER)
    use(closed_port(), str(tmp_path / "cache"), monkeypatch)
    location = locate(NAME, HubOptions(), choose_graphs=partial(graphs_to_fetch, NAME))
    assert (location.folder / "onnx" / "model.onnx").is_file()
    assert "uses the cached copy" in caplog.text


def test_misspelled_model_id_gets_a_suggestion(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "minilm-int8").mkdir()
    with pytest.raises(ArtifactNotFoundError, match="Did you mean 'minilm-int8'"):
        accel.pipeline("text-classification", model="minilm-int9")
    fetch(hub, CHECKPOINT)
    with pytest.raises(ArtifactNotFoundError, match="Did you mean 'org/model'"):
        accel.pipeline("text-classification", model="org/modle")


def test_full_disk_raises(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def full(*args: Any, **kwargs: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    hub.repositories[NAME] = dict.fromkeys(CHECKPOINT, b"")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(ArtifactNotFoundError, match="disk of the Hugging Face cache is full") as caught:
        accel.export(NAME, "out")
    assert "free some space" in caught.value.fix


@pytest.mark.parametrize("how", ["refuses", "hangs", 401, 403])
@pytest.mark.parametrize("request_of", ["an upload", "a data set"])
def test_other_failing_requests_raise(
    request_of: str, how: str | int, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_artifact: Any
) -> None:
    model = accel.ORTModelForSequenceClassification(tiny_artifact())
    hub.hangs = how == "hangs"
    if how == "refuses":
        use(closed_port(), str(tmp_path / "cache"), monkeypatch)
    elif isinstance(how, int):
        hub.refuses = (how, "")
    started = time.monotonic()
    if request_of == "an upload":
        with pytest.raises(ArtifactError, match="could not be uploaded to the Hub repository 'org/new'"):
            model.push_to_hub("org/new", token="hf_x")
    else:
        with pytest.raises(ArtifactNotFoundError) as caught:
            accel.evaluate(model.artifact, "org/data", split="test")
        assert caught.value.fix
    assert time.monotonic() - started < SECONDS
