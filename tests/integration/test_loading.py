"""Tests of `from_pretrained` and `save_pretrained`, and of the errors that they raise."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.loss.loss_utils import LOSS_MAPPING

import accel
from accel import ORTModelForSequenceClassification as Classifier
from accel.artifact import Artifact, accel_home
from accel.artifact.checksums import sha256
from accel.backends import registry
from accel.backends.plan import Plan
from accel.config import SessionOptions
from accel.errors import (
    ArtifactNotFoundError,
    BackendUnavailableError,
    ConfigError,
    InputError,
    IntegrityError,
    OutputFolderError,
    SessionClosedError,
    SessionError,
    TaskError,
    UnknownBackendError,
)
from accel.interfaces.task_registry import task_spec
from accel.models.base import model_class
from accel.models.losses import loss_of
from accel.stages.foreign_folders import weights_of
from accel.stages.resolution import resolve
from accel.testing.copies_without_manifest import unmark
from accel.testing.models import rescale, save_tiny

IDS = torch.tensor([[2, 5, 6, 7, 3], [2, 8, 3, 0, 0]])
INPUTS = {"input_ids": IDS, "attention_mask": (IDS != 0).long(), "token_type_ids": torch.zeros_like(IDS)}


@pytest.fixture
def artifact(tiny_artifact: Callable[..., Artifact]) -> Artifact:
    return tiny_artifact()


@pytest.fixture
def copy(artifact: Artifact, tmp_path: Path) -> Path:
    """Return a copy of an artifact. Tests may damage the copy."""
    return Path(shutil.copytree(artifact.path, tmp_path / "copy"))


@pytest.fixture
def small_folder(shared: Callable[..., Path]) -> Path:
    """Return a transformers folder that is exported quickly, for tests of the code that starts an export."""
    return shared("distilbert-of-one-layer", lambda folder: save_tiny(folder, "distilbert", n_layers=1))


def plain_onnx(artifact: Artifact, folder: Path, name: str = "model.onnx") -> Path:
    """Write the graph to `folder` without accel's manifest, in the layout of Optimum and transformers.js. Return the
    folder.
    """
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(artifact.file(), target)
    unmark(target)
    shutil.copyfile(artifact.path / "model.onnx.data", target.parent / "model.onnx.data")
    shutil.copyfile(artifact.path / "config.json", folder / "config.json")
    return folder


def test_transformers_folder_is_exported_once(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        first = Classifier.from_pretrained(small_folder)
    assert "accel exported it" in caplog.text
    caplog.clear()
    second = Classifier.from_pretrained(small_folder)
    assert caplog.text == ""
    assert second.artifact.path == first.artifact.path
    assert accel_home() in first.artifact.path.parents


@pytest.mark.parametrize("name", ["model.onnx", "onnx/model.onnx", "only_one.onnx"])
def test_plain_onnx_folders(name: str, artifact: Artifact, tmp_path: Path) -> None:
    model = Classifier.from_pretrained(plain_onnx(artifact, tmp_path, name))
    assert torch.allclose(model(**INPUTS).logits, Classifier(artifact)(**INPUTS).logits)
    assert model.artifact.component().inputs[0].shape == ("batch", "sequence")
    model.save_pretrained(tmp_path / "saved")
    saved = Artifact.load(tmp_path / "saved")
    assert all(len(record.sha256) == 64 for record in saved.component().files)


@pytest.mark.parametrize("file_name", [None, "model.onnx"])
def test_subfolder_uses_the_config_in_the_root_folder(
    file_name: str | None, artifact: Artifact, tmp_path: Path
) -> None:
    folder = plain_onnx(artifact, tmp_path, "onnx/model.onnx")
    model = Classifier.from_pretrained(folder, subfolder="onnx", file_name=file_name)
    assert model.config.to_dict() == Classifier.from_pretrained(folder).config.to_dict()
    assert model.artifact.component().max_sizes == artifact.component().max_sizes
    assert torch.allclose(model(**INPUTS).logits, Classifier(artifact)(**INPUTS).logits)


def test_missing_config_raises(artifact: Artifact, tmp_path: Path) -> None:
    folder = plain_onnx(artifact, tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ArtifactNotFoundError, match=r"contains no config\.json"):
        Classifier.from_pretrained(folder)
    assert Classifier.from_pretrained(folder, config=config).config is config


def test_custom_graph_next_to_files_of_other_libraries(artifact: Artifact, tmp_path: Path) -> None:
    """A custom graph opens from a folder whose config.json has an unknown model type and whose export.json was written
    by another library.
    """
    folder = plain_onnx(artifact, tmp_path / "folder")
    inputs = {"input_ids": torch.tensor([[2, 8, 9, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    expected = accel.ORTModelForSequenceClassification.from_pretrained(folder)(**inputs).logits
    (folder / "export.json").write_text('{"exporter": "another", "config_sha256": "0"}')
    for settings in ({"chars": {"a": 1}}, {"model_type": "of_another_library"}):
        (folder / "config.json").write_text(json.dumps(settings))
        assert torch.equal(accel.ORTModelForCustomTasks.from_pretrained(folder)(**inputs)["logits"], expected)
    (folder / "config.json").write_text('{"architectures": ["OurTagger"]}')
    with pytest.raises(IntegrityError) as error:
        accel.ORTModelForSequenceClassification.from_pretrained(folder)
    assert "task='custom'" in str(error.value.fix)


def test_config_without_padding_token(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    """The config has `"pad_token_id": null`. RoBERTa's positions start after the padding token's id, which is 1 in all
    RoBERTa checkpoints.
    """
    folder = plain_onnx(tiny_artifact("roberta"), tmp_path / "folder")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": None}))
    opened = Classifier.from_pretrained(folder)
    assert opened.artifact.component().max_sizes == {"sequence": settings["max_position_embeddings"] - 2}


def test_weight_variant_is_not_a_graph_variant(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "distilbert", n_layers=1)
    (folder / "model.safetensors").rename(folder / "model.fp16.safetensors")
    with pytest.raises(ArtifactNotFoundError, match="no graph in .* has a variant in its name") as error:
        Classifier.from_pretrained(folder, variant="fp16")
    assert "leave variant=... out" in str(error.value.fix)


def test_stages_accept_a_graph_without_config(artifact: Artifact, tmp_path: Path) -> None:
    folder = plain_onnx(artifact, tmp_path / "folder")
    (folder / "config.json").unlink()
    with pytest.raises(ArtifactNotFoundError, match="contains no config.json") as error:
        accel.optimize(folder, tmp_path / "out", level="O1")
    assert "ORTModelForCustomTasks.from_pretrained" in str(error.value.fix)
    opened = accel.ORTModelForCustomTasks.from_pretrained(folder)
    assert accel.optimize(opened.artifact, tmp_path / "out", level="O1").task == "custom"


def test_plain_folder_with_wrong_class_raises(artifact: Artifact, tmp_path: Path) -> None:
    folder = plain_onnx(artifact, tmp_path)
    with pytest.raises(
        TaskError, match="'logits' with 2 axes, but a model for the task 'token-classification' returns 'logits' with 3"
    ):
        accel.ORTModelForTokenClassification.from_pretrained(folder)
    with pytest.raises(
        TaskError, match=r"\['logits'\] and no output 'start_logits', but a model for the task 'question-answering'"
    ):
        accel.ORTModelForQuestionAnswering.from_pretrained(folder)
    with pytest.raises(TaskError, match="returns logits and no hidden states"):
        accel.ORTModelForFeatureExtraction.from_pretrained(folder)


def test_config_with_wrong_number_of_labels_raises(artifact: Artifact, tmp_path: Path) -> None:
    folder = plain_onnx(artifact, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "yes", "1": "no"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"scores of 3 labels, but the config\.json has 2"):
        Classifier.from_pretrained(folder)


def test_unavailable_backend_gives_its_reasons(tiny_folder: Callable[..., Path]) -> None:
    reasons = registry.probe(registry.describe("cuda")).reasons
    if not reasons:
        pytest.skip("this test needs a machine without CUDA")
    with pytest.raises(BackendUnavailableError) as caught:
        Classifier.from_pretrained(tiny_folder(), backend="cuda")
    assert all(reason.message in str(caught.value) for reason in reasons)


def test_file_name_selects_a_graph(artifact: Artifact, tmp_path: Path) -> None:
    plain_onnx(artifact, tmp_path, "a.onnx")
    shutil.copyfile(tmp_path / "a.onnx", tmp_path / "b.onnx")
    with pytest.raises(ArtifactNotFoundError, match=r"not clear: a\.onnx, b\.onnx"):
        Classifier.from_pretrained(tmp_path)
    assert Classifier.from_pretrained(tmp_path, file_name="b.onnx").artifact.component().file == "b.onnx"
    with pytest.raises(ArtifactNotFoundError, match=r"no graph 'bb\.onnx'.*It has: a\.onnx, b\.onnx"):
        Classifier.from_pretrained(tmp_path, file_name="bb.onnx")


def test_save_and_load_without_the_source(copy: Path, tmp_path: Path) -> None:
    model = Classifier.from_pretrained(copy)
    expected = model(**INPUTS).logits
    model.config.id2label = {0: "x", 1: "y", 2: "z"}
    model.save_pretrained(tmp_path / "saved")
    shutil.rmtree(copy)
    loaded = Classifier.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded(**INPUTS).logits, expected)
    assert loaded.config.id2label[1] == "y"
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    with pytest.raises(OutputFolderError):
        loaded.save_pretrained(tmp_path / "saved")


def test_saving_next_to_a_tokenizer(artifact: Artifact, tmp_path: Path) -> None:
    """The tokenizer and the model can be saved to one folder in any order. If a file would overwrite the user's file,
    nothing is written.
    """
    model = Classifier(artifact)
    folder = tmp_path / "both"
    tokenizer = transformers.AutoTokenizer.from_pretrained(artifact.path)
    tokenizer.model_max_length = 17
    tokenizer.save_pretrained(folder)
    (folder / "notes.md").write_text("mine")
    before = (folder / "tokenizer_config.json").read_bytes()
    model.save_pretrained(folder)
    assert (folder / "tokenizer_config.json").read_bytes() == before
    assert (folder / "notes.md").read_text() == "mine"
    assert torch.equal(Classifier.from_pretrained(folder)(**INPUTS).logits, model(**INPUTS).logits)
    with pytest.raises(OutputFolderError, match="already contains an artifact"):
        model.save_pretrained(folder)
    model.config.id2label = {0: "x", 1: "y", 2: "z"}
    model.save_pretrained(folder, overwrite=True)
    assert Classifier.from_pretrained(folder).config.id2label[1] == "y"
    assert (folder / "notes.md").read_text() == "mine"

    weights = accel.ORTModel.from_pretrained(weights_of(resolve(artifact.manifest.source.id)))
    assert (folder / "model.onnx").exists()
    weights.save_pretrained(folder, overwrite=True)
    assert not (folder / "model.onnx").exists(), "graphs of what was replaced go"
    assert torch.allclose(Classifier.from_pretrained(folder)(**INPUTS).logits, model(**INPUTS).logits, atol=1e-5)

    (folder / "accel.json").unlink()
    (folder / "config.json").write_text("{}")
    with pytest.raises(OutputFolderError, match=r"other contents: config\.json"):
        model.save_pretrained(folder)
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["both"]


def test_artifact_is_not_saved_next_to_a_checkpoint(
    artifact: Artifact, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An artifact is not saved next to a checkpoint. After further training, `from_pretrained` would open the old graph
    instead of the new weights.
    """
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for overwrite in (False, True):
        with pytest.raises(
            OutputFolderError, match=r"contains the weights of a PyTorch checkpoint \(model\.safetensors\)"
        ):
            Classifier(artifact).save_pretrained(tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    Classifier(artifact).save_pretrained(tmp_path / "onnx")
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "onnx" / "model.safetensors")
    Classifier.from_pretrained(tmp_path / "onnx")
    assert "Pass export=True to use the PyTorch weights" in caplog.text


def test_backend_that_cannot_run_the_format_raises(copy: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"(?s)cannot run this model.*Fix: .*cpu.*export=True"):
        Classifier.from_pretrained(copy, backend="pytorch")


def test_interrupted_save_leaves_no_loadable_folder(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes.md").write_text("mine")
    moved: list[Path] = []
    replace = Path.replace

    def interrupted(self: Path, target: Path) -> Path:
        if Path(target).parent == tmp_path:
            moved.append(Path(target))
            if Path(target).name == "accel.json":
                raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Classifier(artifact).save_pretrained(tmp_path)
    assert moved[-1].name == "accel.json"
    assert len(moved) > 3
    with pytest.raises(IntegrityError, match=r"accel\.json is missing"):
        Classifier.from_pretrained(tmp_path)
    assert (tmp_path / "notes.md").read_text() == "mine"


def test_push_to_hub(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload a model to a fake Hub client. The upload is a complete artifact with a model card, and contains no local
    paths.
    """
    uploaded: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None = None) -> None:
            uploaded["token"] = token

        def model_info(self, repo_id: str, **_: Any) -> None: ...

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id: str, folder_path: Path, **_: Any) -> str:
            uploaded["files"] = {path.name for path in folder_path.iterdir()}
            uploaded["texts"] = {p.name: p.read_text() for p in folder_path.iterdir() if p.suffix in (".md", ".json")}
            Artifact.load(folder_path)
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert Classifier(artifact).push_to_hub("org/name", token="t").endswith("org/name")
    assert {"accel.json", "model.onnx", "config.json", "tokenizer.json", "README.md"} <= uploaded["files"]
    card = uploaded["texts"]["README.md"]
    assert "pipeline_tag: text-classification" in card
    assert 'ORTModelForSequenceClassification.from_pretrained("org/name")' in card
    assert artifact.manifest.source is not None
    source = Path(artifact.manifest.source.id)
    assert source.is_absolute(), "a path of this machine, which is not published"
    assert not [name for name, text in uploaded["texts"].items() if str(source.parent) in text]


# The tests below check the inputs that a call accepts.


def test_default_inputs_equal_transformers(artifact: Artifact) -> None:
    model = Classifier(artifact)
    full = torch.tensor([[2, 5, 6, 3]])
    expected = model(full, torch.ones_like(full), torch.zeros_like(full)).logits
    assert torch.equal(model(input_ids=full).logits, expected)
    assert torch.equal(model(full, return_dict=False)[0], expected)


def test_unknown_inputs_are_refused(tiny_artifact: Callable[..., Artifact]) -> None:
    model = Classifier(tiny_artifact())
    for extra in ({"positions": torch.zeros(2)}, {"inputs_embeds": torch.zeros(2, 5, 32)}, {"output_attentions": True}):
        with pytest.raises(InputError, match=next(iter(extra))):
            model(**INPUTS, **extra)
    model(**INPUTS, output_attentions=False, output_hidden_states=None)
    with pytest.raises(InputError, match="'input_ids'.* are missing"):
        model(attention_mask=INPUTS["attention_mask"])
    roberta = Classifier(tiny_artifact("roberta"))
    plain = roberta(input_ids=IDS + 1)
    # RoBERTa has one token type, so zeros change nothing. Some tokenizers return token types.
    assert torch.equal(roberta(input_ids=IDS + 1, token_type_ids=torch.zeros_like(IDS)).logits, plain.logits)
    with pytest.raises(InputError, match="has only the token type 0"):
        roberta(input_ids=IDS + 1, token_type_ids=torch.ones_like(IDS))


def test_input_longer_than_the_positions_raises(artifact: Artifact) -> None:
    with pytest.raises(InputError, match="97 tokens per row, but the model has position embeddings for only 96"):
        Classifier(artifact)(input_ids=torch.full((1, 97), 5))


def test_session_options_reach_onnx_runtime(artifact: Artifact) -> None:
    options = SessionOptions(
        threads=1, graph_optimization="basic", native={"enable_mem_pattern": False, "session.disable_prepacking": "1"}
    )
    used = Classifier(artifact, session_options=options).sessions["model"].runtime.get_session_options()  # type: ignore[attr-defined]
    assert used.intra_op_num_threads == 1
    assert used.enable_mem_pattern is False
    assert used.get_session_config_entry("session.disable_prepacking") == "1"


def test_buckets_give_equal_outputs(artifact: Artifact) -> None:
    plain = Classifier(artifact)
    model = Classifier(artifact, session_options=SessionOptions(buckets=(4, 8)))
    for length in (1, 4, 5, 8, 11):
        ids = torch.arange(5, 5 + length).repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[1, (length + 1) // 2 :] = 0
        expected = plain(input_ids=ids, attention_mask=mask).logits
        assert (model(input_ids=ids, attention_mask=mask).logits - expected).abs().max() < 1e-5
    with pytest.raises(ConfigError, match="larger than the 96 positions of the model"):
        Classifier(artifact, session_options=SessionOptions(buckets=(128,)))


def test_pad_to_multiple_of_gives_equal_outputs(artifact: Artifact) -> None:
    """A padded length never exceeds the model's 96 positions. The caller's output buffers receive the outputs without
    padding.
    """
    plain = Classifier(artifact)
    model = Classifier(artifact, session_options=SessionOptions(pad_to_multiple_of=7))
    lengths: list[int] = []
    run = model.sessions["model"]._plain.run  # type: ignore[attr-defined]
    model.sessions["model"]._plain.run = lambda feeds, **rest: (  # type: ignore[attr-defined]
        lengths.append(feeds["input_ids"].shape[1]), run(feeds, **rest))[1]  # fmt: skip
    for length in (1, 7, 8, 90, 95):
        ids = torch.arange(5, 5 + length).repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[1, (length + 1) // 2 :] = 0
        expected = plain(input_ids=ids, attention_mask=mask).logits
        assert (model(input_ids=ids, attention_mask=mask).logits - expected).abs().max() < 1e-5
    assert lengths[-5:] == [7, 7, 14, 91, 95]
    feeds = {spec.name: INPUTS[spec.name] for spec in artifact.components[0].inputs if spec.name in INPUTS}
    out = {"logits": torch.zeros_like(plain(**feeds).logits)}
    model.sessions["model"].run(feeds, out=out)
    assert (out["logits"] - plain(**feeds).logits).abs().max() < 1e-5
    assert lengths[-1] == INPUTS["input_ids"].shape[1]


def test_preferred_padding_of_a_backend(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SessionOptions(pad_to_multiple_of=None)
    assert Classifier(artifact, session_options=options).session_options.pad_to_multiple_of == 1
    spec = registry.describe("cpu")
    wishes = tuple(replace(c, preferred_multiple=16) if c.stage == "run" else c for c in spec.capabilities)
    wishing = replace(spec, capabilities=wishes)
    monkeypatch.setattr(registry, "describe_all", lambda: ((wishing,), {}))
    assert Classifier(artifact, session_options=options).session_options.pad_to_multiple_of == 16
    with_buckets = SessionOptions(pad_to_multiple_of=None, buckets=(8,))
    assert Classifier(artifact, session_options=with_buckets).session_options.pad_to_multiple_of == 1


@pytest.mark.thorough
def test_buckets_are_refused_if_padding_changes_outputs(artifact: Artifact, tmp_path: Path) -> None:
    assert artifact.manifest.steps[0].validation["padding_difference"] == 0
    config = transformers.NystromformerConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    model = rescale(transformers.NystromformerForSequenceClassification(config)).eval()
    exported = accel.export(model, tmp_path / "onnx", task="text-classification")
    with pytest.raises(ConfigError, match="padding changes the outputs of this model"):
        Classifier(exported, session_options=SessionOptions(buckets=(16,)))
    with pytest.raises(ConfigError, match="padding changes the outputs of this model"):
        Classifier(exported, session_options=SessionOptions(pad_to_multiple_of=16))


def test_buckets_cut_token_outputs(tiny_artifact: Callable[..., Artifact]) -> None:
    artifact = tiny_artifact("bert", "token-classification")
    model = accel.ORTModelForTokenClassification(artifact, session_options=SessionOptions(buckets=(8,)))
    logits = model(**INPUTS).logits
    assert logits.shape == (2, 5, 3)
    assert (logits - accel.ORTModelForTokenClassification(artifact)(**INPUTS).logits)[0].abs().max() < 1e-5
    model = accel.ORTModelForTokenClassification(artifact, session_options=SessionOptions(pad_to_multiple_of=8))
    assert torch.equal(model(**INPUTS).logits, logits)


def test_closed_model_raises(artifact: Artifact) -> None:
    with Classifier(artifact) as model:
        assert model(**INPUTS).logits.shape[0] == 2
    with pytest.raises(SessionClosedError):
        model(**INPUTS)
    model.close()


# The tests below check invalid inputs.


def test_backend_is_checked_before_the_export(tiny_folder: Callable[..., Path]) -> None:
    before = set((accel_home() / "exports").glob("*"))
    with pytest.raises(UnknownBackendError, match="Did you mean 'cpu'"):
        Classifier.from_pretrained(tiny_folder("electra"), backend="cpuu")
    with pytest.raises(UnknownBackendError, match="Did you mean 'CPUExecutionProvider'"):
        Classifier.from_pretrained(tiny_folder("electra"), provider="CPUExecutionProvidr")
    with pytest.raises(BackendUnavailableError, match="no device cuda:0"):
        Classifier.from_pretrained(tiny_folder("electra"), device="cuda")
    assert set((accel_home() / "exports").glob("*")) == before


def test_folder_without_graph_and_export_false_raises(tiny_folder: Callable[..., Path]) -> None:
    with pytest.raises(ArtifactNotFoundError, match="export=False") as info:
        Classifier.from_pretrained(tiny_folder(), export=False)
    assert "accel export" in str(info.value)


def test_export_settings_for_an_artifact_raise(artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match="cannot change"):
        Classifier.from_pretrained(artifact.path, dtype="float16")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"provider_options": {"arena": 1}}, "accepts no provider options, but the call passes ..arena"),
        ({"session_options": 42}, "session_options is an object of type int"),
        ({"bakend": "cpu"}, "no argument 'bakend'. Did you mean 'backend'"),
        ({"provider_options": [{}, {}]}, "needs one dictionary of options"),
        ({"session_options": SessionOptions(native={"mem_pattern": 1})}, "no setting 'mem_pattern'"),
        ({"session_options": {"thread": 1}}, "Did you mean 'threads'"),
        ({"session_options": SessionOptions(compute_dtype="bfloat16")}, "compute in float32"),
        ({"device": "gpu 1"}, "not the name of a device"),
    ],
)
def test_unknown_options_raise(options: dict[str, Any], message: str, artifact: Artifact) -> None:
    with pytest.raises(ConfigError, match=message):
        Classifier.from_pretrained(artifact.path, **options)


def test_damaged_graphs_raise(copy: Path, artifact: Artifact, tmp_path: Path) -> None:
    graph = copy / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=r"model\.onnx is truncated"):
        Classifier.from_pretrained(copy)
    plain = plain_onnx(artifact, tmp_path / "plain")
    (plain / "model.onnx").write_bytes(b"\x00garbage" * 50)
    with pytest.raises((IntegrityError, SessionError), match="model.onnx"):
        Classifier.from_pretrained(plain)
    plain = plain_onnx(artifact, tmp_path / "plain2")
    (plain / "model.onnx.data").unlink()
    with pytest.raises(IntegrityError, match=r"model\.onnx\.data"):
        Classifier.from_pretrained(plain)


def test_missing_paths_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactNotFoundError, match="does not exist"):
        Classifier.from_pretrained(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactNotFoundError, match="a model folder is required"):
        Classifier.from_pretrained(tmp_path / "file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactNotFoundError, match="There is no local folder"):
        Classifier.from_pretrained("org/not-in-the-cache", local_files_only=True)


def _in_hub_cache(folder: Path, cache: Path) -> Path:
    """Create a Hub cache with a snapshot of the repository `org/name`, whose files are links to blobs. Return the
    snapshot's folder.
    """
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder)
        blob = repo / "blobs" / sha256(path)
        shutil.copyfile(path, blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_hub_cache_layout(artifact: Artifact, tmp_path: Path) -> None:
    """A model in a Hub cache opens by its id. The snapshot contains symbolic links to blobs, and accel reads the commit
    from the snapshot's path.
    """
    snapshot = _in_hub_cache(artifact.path, tmp_path)
    model = Classifier.from_pretrained("org/name", cache_dir=tmp_path, local_files_only=True)
    expected = Classifier(artifact)(**INPUTS).logits
    assert torch.allclose(model(**INPUTS).logits, expected)
    # onnx_ir and OpenVINO reject weights behind a symbolic link to a path outside of the folder, so accel must resolve
    # these links.
    optimized = accel.optimize(snapshot, tmp_path / "optimized", level="O2")
    assert torch.allclose(Classifier.from_pretrained(optimized.path)(**INPUTS).logits, expected, atol=1e-5)
    assert accel.quantize(snapshot, tmp_path / "int8", scheme="dynamic-int8").manifest.quantization is not None
    on_openvino = Classifier.from_pretrained(snapshot, backend="openvino")
    assert torch.allclose(on_openvino(**INPUTS).logits, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generators_in_the_hub_cache(family: str, generator: Callable[..., Artifact], tmp_path: Path) -> None:
    """Graphs that accel changes in memory still refer to weight files. ONNX Runtime rejects weight files that are links
    to files outside of the folder.
    """
    artifact = generator(family)
    kind: Any = accel.ORTModelForCausalLM if family == "llama" else accel.ORTModelForSeq2SeqLM
    rows = {"input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    expected = kind.from_pretrained(artifact.path).generate(**rows, max_new_tokens=4)
    _in_hub_cache(artifact.path, tmp_path)
    model = kind.from_pretrained("org/name", cache_dir=tmp_path, local_files_only=True)
    assert torch.equal(model.generate(**rows, max_new_tokens=4), expected)


@pytest.mark.thorough
def test_damaged_cached_export_is_exported_again(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    first = Classifier.from_pretrained(small_folder)
    (first.artifact.path / "model.onnx").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        again = Classifier.from_pretrained(small_folder)
    assert "will be exported again" in caplog.text
    assert again.artifact.bytes == first.artifact.bytes


@pytest.mark.thorough
def test_export_removed_while_it_is_opened(small_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If another process deletes a cached export while it is being opened (`accel cache clear`), the model is exported
    again. Other errors that occur while the export is opened are raised.
    """
    from accel.models import base

    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    right, left = base.open_plan, [2]

    def removing(plan: Plan) -> Any:
        if left[0]:
            left[0] -= 1
            assert plan.artifact is not None
            shutil.rmtree(plan.artifact.path)
        return right(plan)

    monkeypatch.setattr(base, "open_plan", removing)
    assert Classifier.from_pretrained(small_folder)(**INPUTS).logits.shape[0] == 2

    def refusing(*_: Any, **__: Any) -> Any:
        left[0] += 1
        raise SessionError("no")

    monkeypatch.setattr(base, "open_plan", refusing)
    with pytest.raises(SessionError):
        Classifier.from_pretrained(small_folder)
    assert left == [1]


@pytest.mark.thorough
def test_two_simultaneous_exports_of_one_model(
    small_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two processes export the same model. The slower process detects the folder of the faster process and uses it."""
    from accel.stages import export as exporting

    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    real = exporting.export_resolved

    def raced(resolved: Any, out: Path, **kwargs: Any) -> Artifact:
        monkeypatch.setattr(exporting, "export_resolved", real)
        real(resolved, out, **kwargs)
        return real(resolved, out, **kwargs)

    monkeypatch.setattr(exporting, "export_resolved", raced)
    model = Classifier.from_pretrained(small_folder)
    assert model.artifact.path.parent == tmp_path / "exports"


def test_other_accepted_argument_types(artifact: Artifact, small_folder: Path) -> None:
    assert Classifier.from_pretrained(artifact).artifact == artifact
    assert str(Classifier.from_pretrained(artifact, device=-1).device) == "cpu"
    half = Classifier.from_pretrained(small_folder, dtype=torch.float16)
    assert half.dtype == torch.float16
    with pytest.raises(ConfigError, match="accepts only a loaded Artifact"):
        Classifier(str(artifact.path))  # type: ignore[arg-type]
    # The error depends on the installed plugins: either no backend runs bfloat16, or the exporter does not support it.
    with pytest.raises((BackendUnavailableError, ConfigError), match="bfloat16"):
        Classifier.from_pretrained(small_folder, dtype="bfloat16")


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering", "fill-mask"])
def test_labels_give_transformers_loss(
    task: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder, artifact = tiny_folder("bert", task), tiny_artifact("bert", task)
    reference = getattr(transformers, task_spec(task).auto_model).from_pretrained(folder).eval()
    shape = {"text-classification": (2,), "question-answering": (2,)}.get(task, tuple(IDS.shape))
    labels = torch.ones(shape, dtype=torch.int64)
    if labels.ndim == 2:
        labels[0, 0] = -100
    label_inputs = (
        {"start_positions": labels, "end_positions": labels} if task == "question-answering" else {"labels": labels}
    )
    model = model_class(task)(artifact)
    with torch.no_grad():
        expected = reference(input_ids=IDS, **label_inputs)
    outputs = model(input_ids=IDS, **label_inputs)
    assert torch.allclose(outputs.loss, expected.loss, atol=1e-4)
    assert list(outputs) == list(expected)
    assert model(input_ids=IDS).loss is None
    assert isinstance(model(input_ids=IDS.numpy(), **label_inputs).loss, np.ndarray)


@pytest.mark.parametrize(
    ("problem", "classes", "labels", "wrong"),
    [
        ("multi_label_classification", 3, torch.tensor([[0.0, 1, 1], [1, 0, 0]]), torch.tensor([[0, 1, 1], [1, 0, 0]])),
        (None, 1, torch.tensor([0.5, 1.5]), torch.tensor([0.5])),
        ("regression", 3, torch.rand((2, 3)), torch.rand((2, 2))),
        (None, 3, torch.tensor([[1], [2]], dtype=torch.int16), torch.tensor([3, 1], dtype=torch.int16)),
    ],
)
def test_loss_of_every_problem_type(
    problem: str | None, classes: int, labels: torch.Tensor, wrong: torch.Tensor
) -> None:
    """The loss equals transformers' loss for valid labels, and invalid labels raise an error."""
    config = transformers.BertConfig(num_labels=classes, problem_type=problem)
    logits = torch.randn((2, classes), generator=torch.Generator().manual_seed(0))
    exact = labels.long() if labels.dtype is torch.int16 else labels
    loss = loss_of("ForSequenceClassification", {"logits": logits}, {"labels": labels}, config)
    expected = LOSS_MAPPING["ForSequenceClassification"](exact, pooled_logits=logits, config=config)
    assert torch.equal(loss, expected)
    with pytest.raises(InputError, match="labels"):
        loss_of("ForSequenceClassification", {"logits": logits}, {"labels": wrong}, config)


def test_loss_of_sliced_logits() -> None:
    """Logits that were cut from a padded bucket are not contiguous in memory. Their loss is correct."""
    config = transformers.BertConfig(num_labels=3)
    logits, labels = torch.randn((2, 8, 3))[:, :5], torch.randint(0, 3, (2, 8))[:, :5]
    for kind in ("ForMaskedLM", "ForTokenClassification"):
        cut, full = (
            loss_of(kind, {"logits": a}, {"labels": b}, config)
            for a, b in ((logits, labels), (logits.clone(), labels.clone()))
        )
        assert torch.equal(cut, full)


def test_ignored_transformers_arguments_are_accepted(artifact: Artifact) -> None:
    for words in (
        {"device_map": "auto"}, {"device_map": {"": "cpu"}}, {"dtype": "auto"}, {"torch_dtype": "auto"}, {"attn_implementation": "sdpa"},
    ):  # fmt: skip
        assert Classifier.from_pretrained(artifact.path, **words).device == torch.device("cpu")
        if "attn_implementation" not in words:
            assert accel.pipeline("text-classification", str(artifact.path), **words)("Hello.")
    with pytest.raises(ConfigError, match="one device"):
        Classifier.from_pretrained(artifact.path, device_map={"a": 0, "b": 1})
    with pytest.raises(ConfigError, match="attention implementation is fixed"):
        Classifier.from_pretrained(artifact.path, attn_implementation="quick")
    with pytest.raises(ConfigError, match="contains an exported graph"):
        accel.pipeline("text-classification", str(artifact.path), dtype="float16")
    with pytest.raises(ConfigError, match="already loaded"):
        accel.pipeline("text-classification", Classifier(artifact), dtype="float16")


def test_trainer_raises_with_an_alternative(artifact: Artifact) -> None:
    with pytest.raises(InputError, match=r"accel\.evaluate"):
        transformers.Trainer(model=Classifier(artifact))


@pytest.mark.parametrize(
    "labels",
    [torch.tensor([99, 0]), torch.tensor([-5, 0]), torch.tensor([0]), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0.5, 0.1]), ["a", "b"],
     {"a": 1}],
)  # fmt: skip
def test_invalid_labels_are_refused(labels: Any, tiny_artifact: Callable[..., Artifact]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_artifact())
    ids = torch.tensor([[5, 6, 7], [7, 6, 5]])
    with pytest.raises(InputError, match="^labels (is|has|contains)") as error:
        model(input_ids=ids, labels=labels)
    assert error.value.fix
    assert torch.isfinite(model(input_ids=ids, labels=torch.tensor([1, -100])).loss)
