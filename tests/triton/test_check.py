"""Broken repositories: each thing that is wrong is found, named, and has a remedy; and nothing else is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from accel.artifact import Artifact
from accel.errors import ArtifactNotFoundError

from .made import make_artifact

pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from typer.testing import CliRunner

from accel.cli import app
from accel.deploying.triton import check, deploy
from accel.deploying.triton.checking.contents import read_graph
from accel.deploying.triton.messages import CONFIG, read, write

FRONT, GRAPH, DECODER = "text_classification", "text_classification_graph", "decoder"
Change = Callable[[Path], Any]


@pytest.fixture(scope="session")
def repositories(shared: Callable[..., Path], generator: Callable[..., Artifact]) -> Callable[..., Path]:
    """Good repositories by layout."""

    def make(folder: Path) -> None:
        artifact = make_artifact(folder / "artifact")
        deploy(artifact, folder / "text")
        deploy(artifact, folder / "ensemble", layout="ensemble")
        deploy(artifact, folder / "trt", layout="graph", name=GRAPH, device="cuda", accelerator="tensorrt")
        engine = make_artifact(folder / "engine", format="tensorrt", profile={"batch": "1:8:32", "sequence": "1:8:48"})
        deploy(engine, folder / "engines", layout="graph", name=GRAPH, device="cuda")
        deploy(artifact, folder / "python", backend="python")
        deploy(generator("llama"), folder / "generator", name=DECODER)

    root = shared("triton-repositories", make)
    return lambda name, target: Path(shutil.copytree(root / name, target))


def config(name: str, change: Callable[[Any], Any]) -> Change:
    """A change of one model's configuration."""

    def edit(root: Path) -> None:
        found = read(root / name / CONFIG)
        change(found)
        write(found, root / name)

    return edit


def text(name: str, before: str, after: str) -> Change:
    """A change of the text of one model's configuration, or of another file."""

    def edit(root: Path) -> None:
        path = root / name / CONFIG if (root / name).is_dir() else root / name
        content = path.read_text(encoding="utf-8")
        assert before in content
        path.write_text(content.replace(before, after, 1), encoding="utf-8")

    return edit


def told(name: str, **changes: Any) -> Change:
    """A change of what one model's code is told."""

    def edit(root: Path) -> None:
        path = root / name / "1" / "settings.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def without(name: str, *keys: str) -> Change:
    """What one model's code is told, but for one thing."""

    def edit(root: Path) -> None:
        path = root / name / "1" / "settings.json"
        told = json.loads(path.read_text())
        inner = told
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        path.write_text(json.dumps(told))

    return edit


def cache(change: Callable[[dict[str, Any]], Any]) -> Change:
    """A change of what a decoder's code is told of its first cache."""

    def edit(root: Path) -> None:
        path = root / DECODER / "1" / "settings.json"
        told = json.loads(path.read_text())
        change(next(iter(told["caches"].values())))
        path.write_text(json.dumps(told))

    return edit


def fixed_batch(root: Path) -> None:
    path = root / GRAPH / "1" / "model.onnx"
    model = onnx.load(str(path))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, str(path))


def external_weights(root: Path) -> None:
    path = root / GRAPH / "1" / "model.onnx"
    model = onnx.load(str(path))
    onnx.save(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (path.parent / "weights.bin").unlink()


def short_weights(root: Path) -> None:
    path = root / GRAPH / "1" / "model.onnx"
    onnx.save(onnx.load(str(path)), str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    weights = path.parent / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:100])


def warmup(change: Callable[[Any], Any]) -> Change:
    return config(GRAPH, lambda found: change(found.model_warmup[0].inputs))


def shape(word: str, value: str) -> Change:
    def change(found: Any) -> None:
        chosen = found.optimization.execution_accelerators.gpu_execution_accelerator[0]
        chosen.parameters[f"trt_profile_{word}_shapes"] = value

    return config(GRAPH, change)


def steps(change: Callable[[Any], Any]) -> Change:
    return config(FRONT, lambda found: change(found.ensemble_scheduling.step))


ANSWERS = f"{FRONT}_answers"
LONG = ",".join(f"{name}:{{}}" for name in ("input_ids", "attention_mask", "token_type_ids"))
# The layout, what is broken, the model that it is found at, the word for it, and what the message names.
BROKEN: dict[str, tuple[str, Change, str, str, str]] = {
    "no configuration": ("text", lambda r: (r / GRAPH / CONFIG).unlink(), GRAPH, "config-missing", CONFIG),
    "an unknown field": ("text", text(GRAPH, "max_batch_size", "max_batch"), GRAPH, "config-unreadable", "max_batch"),
    "an unknown value": ("text", text(GRAPH, "KIND_CPU", "KIND_TPU"), GRAPH, "config-unreadable", "KIND_TPU"),
    "another name": ("text", text(GRAPH, f'"{GRAPH}"', '"other"'), GRAPH, "name", "other"),
    "no version": ("text", lambda r: shutil.rmtree(r / GRAPH / "1"), GRAPH, "version-missing", "version"),
    "a version that is no number": (
        "text", lambda r: (r / GRAPH / "v2").mkdir(), GRAPH, "version-name", "'v2'",
    ),
    "a version that is not there": (
        "text", config(GRAPH, lambda c: c.version_policy.specific.versions.extend([1, 7])), GRAPH, "version-missing", "7",
    ),
    "no graph": ("text", lambda r: (r / GRAPH / "1" / "model.onnx").unlink(), GRAPH, "file-missing", "model.onnx"),
    "a graph that is none": (
        "text", lambda r: (r / GRAPH / "1" / "model.onnx").write_bytes(b"no graph"), GRAPH, "file-unreadable", "model.onnx",
    ),
    "no weights": ("text", external_weights, GRAPH, "file-missing", "weights.bin"),
    "no code": ("text", lambda r: (r / FRONT / "1" / "batches.py").unlink(), FRONT, "file-missing", "batches.py"),
    "no tokenizer": (
        "text", lambda r: (r / FRONT / "1" / "tokenizer.json").unlink(), FRONT, "file-missing", "tokenizer.json",
    ),
    "wrong sizes": ("text", config(GRAPH, lambda c: c.output[0].dims.__setitem__(0, 7)), GRAPH, "dims", "[7]"),
    "a wrong rank": ("text", config(GRAPH, lambda c: c.input[0].dims.append(-1)), GRAPH, "dims", "input_ids"),
    "a wrong type": ("text", text(GRAPH, "TYPE_FP32", "TYPE_FP16"), GRAPH, "dtype", "TYPE_FP32"),
    "an input that is not named": ("text", config(GRAPH, lambda c: c.input.pop()), GRAPH, "input-missing", "token_type_ids"),
    "an input that is not there": (
        "text", config(GRAPH, lambda c: setattr(c.input[0], "name", "ids")), GRAPH, "input-unknown", "'ids'",
    ),
    "a fixed batch": ("text", fixed_batch, GRAPH, "batch", "batch of 1"),
    "no labels": ("text", lambda r: (r / FRONT / "labels.txt").unlink(), FRONT, "labels-missing", "labels.txt"),
    "too few labels": (
        "text", lambda r: (r / FRONT / "labels.txt").write_text("one\ntwo\n"), FRONT, "labels", "2 labels",
    ),
    "a preferred size above the largest": (
        "text", config(GRAPH, lambda c: c.dynamic_batching.preferred_batch_size.append(64)), GRAPH, "batching", "64",
    ),
    "a queue policy": (
        "text", config(GRAPH, lambda c: setattr(c.dynamic_batching.default_queue_policy, "max_queue_size", 8)),
        GRAPH, "queue-policy", "8870",
    ),
    "Python on a GPU": ("text", text(FRONT, "KIND_CPU", "KIND_GPU"), FRONT, "instances", "python"),
    "the graph's model is gone": ("text", lambda r: shutil.rmtree(r / GRAPH), FRONT, "member-missing", GRAPH),
    "more rows than the graph takes": ("text", told(FRONT, max_rows=64), FRONT, "batch", "64"),
    "another output": ("text", told(FRONT, outputs=["scores"]), FRONT, "settings", "scores"),
    "an unknown backend": ("text", text(GRAPH, '"onnxruntime"', '"onnx"'), GRAPH, "backend", "'onnx'"),
    "a step is gone": ("ensemble", lambda r: shutil.rmtree(r / ANSWERS), FRONT, "member-missing", ANSWERS),
    "a step reads what nothing makes": (
        "ensemble", steps(lambda s: s[1].input_map.__setitem__("input_ids", "nothing")), FRONT, "ensemble", "nothing",
    ),
    "a step has no such output": (
        "ensemble", steps(lambda s: s[2].output_map.__setitem__("MOOD", "MOOD")), FRONT, "ensemble", "MOOD",
    ),
    "an input of a step is not mapped": (
        "ensemble", steps(lambda s: s[1].input_map.pop("attention_mask")), FRONT, "ensemble", "attention_mask",
    ),
    "steps disagree about a type": (
        "ensemble", text(ANSWERS, "TYPE_FP32", "TYPE_FP16"), FRONT, "dtype", "TYPE_FP16",
    ),
    "a step takes fewer rows": ("ensemble", text(ANSWERS, "max_batch_size: 32", "max_batch_size: 8"), FRONT, "batch", "8"),
    "a profile of too few rows": ("trt", shape("max", LONG.format("8x48", "8x48", "8x48")), GRAPH, "profile", "8 rows"),
    "a profile without an input": ("trt", shape("max", "input_ids:32x48"), GRAPH, "profile", "attention_mask"),
    "a profile that falls": ("trt", shape("opt", LONG.format(*["64x48"] * 3)), GRAPH, "profile", "do not rise"),
    "a letter too few in a key": ("text", text(f"{FRONT}/1/settings.json", '"service"', '"servce"'), FRONT, "settings", "'service'"),
    "a key that is missing": ("text", without(FRONT, "graph"), FRONT, "settings", "graph as str"),
    "no settings": ("text", lambda r: (r / FRONT / "1" / "settings.json").unlink(), FRONT, "file-missing", "settings.json"),
    "settings that are a list": (
        "text", lambda r: (r / FRONT / "1" / "settings.json").write_text("[]"), FRONT, "settings-unreadable", "list",
    ),
    "rows as a text": ("text", told(FRONT, max_rows="32"), FRONT, "settings", "max_rows as int"),
    "a type with swapped digits": ("text", text(f"{FRONT}/1/settings.json", "int64", "int46"), FRONT, "dtype", "int46"),
    "a function with a letter too few": (
        "text", text(f"{FRONT}/1/settings.json", '"softmax"', '"softmx"'), FRONT, "settings", "softmx",
    ),
    "a side with swapped letters": (
        "text", text(f"{FRONT}/1/settings.json", '"side": "right"', '"side": "rigth"'), FRONT, "settings", "rigth",
    ),
    "no padding for an input": (
        "text", without(FRONT, "padding", "values", "token_type_ids"), FRONT, "settings", "token_type_ids",
    ),
    "half a tokenizer": (
        "text", text(f"{FRONT}/1/tokenizer.json", '"model"', '"model'), FRONT, "file-unreadable", "tokenizer.json",
    ),
    "another tokenizer": (
        "text", text(f"{FRONT}/1/tokenizer.json", '"[CLS]"', '"[SEP]"'), FRONT, "changed", "tokenizer.json",
    ),
    "a changed letter of code": (
        "text", text(f"{FRONT}/1/batches.py", "max_rows", "max_row"), FRONT, "changed", "batches.py",
    ),
    "an output with swapped letters": ("text", text(FRONT, '"LABEL"', '"LABLE"'), FRONT, "output-unknown", "'LABLE'"),
    "an input with swapped letters": ("text", text(FRONT, '"TEXT"', '"TXET"'), FRONT, "input-unknown", "'TXET'"),
    "texts as numbers": ("text", text(FRONT, "TYPE_STRING", "TYPE_INT64"), FRONT, "dtype", "TYPE_INT64"),
    "half the precision of scores": ("text", text(FRONT, "TYPE_FP32", "TYPE_FP16"), FRONT, "dtype", "TYPE_FP16"),
    "a pair in every request": ("text", text(FRONT, "optional: true", "optional: false"), FRONT, "optional", "TEXT_PAIR"),
    "a label with a letter too few": ("text", text(f"{FRONT}/labels.txt", "neutral", "neutrl"), FRONT, "labels", "neutrl"),
    "a front in pieces": (
        "text", config(FRONT, lambda c: setattr(c.model_transaction_policy, "decoupled", True)), FRONT, "decoupled", "once",
    ),
    "an input that is named twice": (
        "text", config(GRAPH, lambda c: c.input.add().CopyFrom(c.input[0])), GRAPH, "twice", "input_ids",
    ),
    "a size of zero": ("text", config(GRAPH, lambda c: c.input[0].dims.__setitem__(0, 0)), GRAPH, "dims", "[0]"),
    "half the weights": ("text", short_weights, GRAPH, "file-unreadable", "100 bytes"),
    "a warm-up of another type": ("text", warmup(lambda i: setattr(i["input_ids"], "data_type", 11)), GRAPH, "warmup", "TYPE_FP32"),
    "a warm-up of another rank": ("text", warmup(lambda i: i["input_ids"].dims.append(3)), GRAPH, "warmup", "[48, 3]"),
    "a warm-up of nothing": ("text", warmup(lambda i: i["input_ids"].ClearField("zero_data")), GRAPH, "warmup", "no data"),
    "a warm-up without its file": (
        "text", warmup(lambda i: setattr(i["input_ids"], "input_data_file", "ids.bin")), GRAPH, "warmup", "warmup/ids.bin",
    ),
    "a warm-up of an unknown input": (
        "text", warmup(lambda i: i["ids"].CopyFrom(i["input_ids"])), GRAPH, "warmup", "'ids'",
    ),
    "fewer instances than none": (
        "text", config(GRAPH, lambda c: setattr(c.instance_group[0], "count", -1)), GRAPH, "instances", "-1",
    ),
    "a version that only looks like a number": (
        "text", lambda r: (r / GRAPH / "1").rename(r / GRAPH / "²"), GRAPH, "version-name", "'²'",
    ),
    "a graph that waits for sequences": (
        "text", config(GRAPH, lambda c: c.sequence_batching.SetInParent()), FRONT, "batching", "sequence_batching",
    ),
    "steps in a circle": (
        "ensemble", steps(lambda s: s[0].input_map.__setitem__("TEXT", "LABEL")), FRONT, "ensemble", "wait for what they make",
    ),
    "a step of a version that is not there": (
        "ensemble", steps(lambda s: setattr(s[1], "model_version", 7)), FRONT, "member-missing", "version 7",
    ),
    "a step twice": ("ensemble", steps(lambda s: s.add().CopyFrom(s[0])), FRONT, "ensemble", "more than once"),
    "an input that nothing reads": (
        "ensemble", config(FRONT, lambda c: c.input.add(name="MOOD", data_type=13, dims=[1])), FRONT, "ensemble", "'MOOD'",
    ),
    "instances of an ensemble": (
        "ensemble", config(FRONT, lambda c: c.instance_group.add(count=1)), FRONT, "instances", "ensemble",
    ),
    "a letter too few in an accelerator": ("trt", text(GRAPH, '"tensorrt"', '"tensort"'), GRAPH, "accelerator", "'tensort'"),
    "a precision with swapped digits": ("trt", text(GRAPH, '"FP32"', '"FP23"'), GRAPH, "accelerator", "FP23"),
    "TensorRT where there is no GPU": ("trt", text(GRAPH, "KIND_GPU", "KIND_CPU"), GRAPH, "accelerator", "GPUs"),
    "a letter for a digit in a profile": ("trt", text(GRAPH, "input_ids:1x1", "input_ids:1xl"), GRAPH, "profile", "input_ids"),
    "a graph beside code by another name": (
        "python", text(f"{GRAPH}/1/settings.json", '"model.onnx"', '"model.onx"'), GRAPH, "file-missing", "model.onx",
    ),
    "a decoder without a tokenizer": (
        "generator", lambda r: (r / DECODER / "1" / "tokenizer.json").unlink(), DECODER, "file-missing", "tokenizer.json",
    ),
    "a decoder that answers at once": (
        "generator", config(DECODER, lambda c: c.ClearField("model_transaction_policy")), DECODER, "decoupled", "pieces",
    ),
    "a decoder in batches": ("generator", config(DECODER, lambda c: setattr(c, "max_batch_size", 8)), DECODER, "batch", "8"),
    "a prompt with another letter": ("generator", text(DECODER, '"PROMPT"', '"PRONPT"'), DECODER, "input-unknown", "PRONPT"),
    "a cache that nothing returns": (
        "generator", cache(lambda one: one.__setitem__("present", "nope")), DECODER, "settings", "nope",
    ),
    "a cache of another size": (
        "generator", cache(lambda one: one["shape"].__setitem__(0, 7)), DECODER, "settings", "7",
    ),
    "a decoder that gives what the graph does not take": (
        "generator", told(DECODER, takes=["input_ids", "attention_mask", "position_ids", "imput_ids"]), DECODER, "settings", "imput_ids",
    ),
    "an engine for fewer rows": ("engines", text(GRAPH, "max_batch_size: 32", "max_batch_size: 64"), GRAPH, "profile", "32"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found_and_named(repositories: Callable[..., Path], tmp_path: Path, case: str) -> None:
    layout, change, model, code, words = BROKEN[case]
    root = repositories(layout, tmp_path / "out")
    assert check(root) == ()
    change(root)
    found = check(root)
    fitting = [one for one in found if (one.model, one.code) == (model, code) and words in one.message]
    assert fitting, found
    assert all(one.fix for one in found)


def test_all_findings_come_at_once(repositories: Callable[..., Path], tmp_path: Path) -> None:
    root = repositories("text", tmp_path / "out")
    kinds = ["another name", "wrong sizes", "too few labels", "no tokenizer", "a queue policy"]
    for kind in kinds:
        BROKEN[kind][1](root)
    assert {BROKEN[kind][3] for kind in kinds} <= {one.code for one in check(root)}


def test_a_folder_that_is_none_or_empty(tmp_path: Path) -> None:
    with pytest.raises(ArtifactNotFoundError):
        check(tmp_path / "nowhere")
    assert [one.code for one in check(tmp_path)] == ["empty"]


def test_tensors_of_openvino_are_read_without_openvino(tmp_path: Path) -> None:
    import openvino

    artifact = make_artifact(tmp_path / "artifact")
    openvino.save_model(openvino.convert_model(artifact.file()), tmp_path / "model.xml", compress_to_fp16=False)
    inputs, outputs, beside = read_graph(tmp_path / "model.xml")
    assert {name: one.dtype for name, one in inputs.items()} == {s.name: s.dtype for s in artifact.component().inputs}
    assert {name: (one.dtype, one.dims) for name, one in outputs.items()} == {"logits": ("float32", (-1, 3))}
    assert beside == ("model.bin",)


def test_the_commands_write_check_and_say_what_is_wrong(tmp_path: Path) -> None:
    artifact, out = make_artifact(tmp_path / "artifact").path, tmp_path / "out"
    runner = CliRunner()
    done = runner.invoke(
        app, ["deploy", "triton", str(artifact), str(out), "--json", "--bucket", "16", "--threads", "2"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["models"] == {FRONT: "python", GRAPH: "onnxruntime"}
    assert runner.invoke(app, ["deploy", "check", str(out)]).exit_code == 0
    (out / FRONT / "labels.txt").unlink()
    done = runner.invoke(app, ["deploy", "check", str(out), "--json"])
    assert done.exit_code == 1
    assert [one["code"] for one in json.loads(done.stdout)["findings"]] == ["labels-missing"]
    assert (
        runner.invoke(app, ["deploy", "triton", str(artifact), str(tmp_path / "b"), "--device", "tpu!"]).exit_code == 2
    )
