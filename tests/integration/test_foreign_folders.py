"""Tests of folders that other tools exported: the folders load, and outputs and generated tokens equal PyTorch's.

The folders contain tiny models that the other tools wrote (tests/fixtures/foreign).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.backends import registry
from accel.errors import (
    AccelError,
    ArtifactNotFoundError,
    BackendUnavailableError,
    InputError,
    IntegrityError,
    SessionError,
    TaskError,
)
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.stages.foreign_folders import adopt
from accel.stages.optimize import optimize
from accel.testing.copies_without_manifest import as_foreign

# The logits are up to 5. PyTorch and ONNX Runtime compute them with different float32 kernels, which round differently.
CLOSE = 1e-4
TEXT, TEXT2TEXT = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
AUTO = {
    "bert": "AutoModelForSequenceClassification", "gpt2": TEXT, "llama": TEXT, "mistral": TEXT, "bloom": TEXT, "opt": TEXT,
    "t5": TEXT2TEXT, "bart": TEXT2TEXT, "marian": TEXT2TEXT, "whisper": "AutoModelForSpeechSeq2Seq",
    "trocr": "AutoModelForImageTextToText",
}  # fmt: skip
OURS = {
    "AutoModelForSequenceClassification": accel.ORTModelForSequenceClassification,
    TEXT: accel.ORTModelForCausalLM,
    TEXT2TEXT: accel.ORTModelForSeq2SeqLM,
    "AutoModelForSpeechSeq2Seq": accel.ORTModelForSpeechSeq2Seq,
    "AutoModelForImageTextToText": accel.ORTModelForVision2Seq,
}
THOROUGH = pytest.mark.thorough
PAIR = {"file_name": "decoder_with_past_model.onnx"}
DECODERS: list[Any] = [
    ("optimum/gpt2-past", {}),
    ("optimum/gpt2-nocache", {}),
    ("optimum/gpt2-pair", {}),
    ("optimum/gpt2-pair", PAIR),
    ("optimum/llama-external", {}),
    ("genai/mistral-fp32", {}),
    ("exported/llama-single-onnx", {}),
    ("exported/llama-multi-openvino", {}),
    ("intel/gpt2-ir", {}),
    ("intel/gpt2-nocache", {}),
    ("intel/llama-stateless", {}),
    pytest.param("optimum/gpt2-web", {}, marks=THOROUGH),
    pytest.param("optimum/bloom-past", {}, marks=THOROUGH),
    pytest.param("optimum/bloom-pair", {}, marks=THOROUGH),
    pytest.param("optimum/opt-past", {}, marks=THOROUGH),
    pytest.param("exported/llama-multi-onnx", {}, marks=THOROUGH),
]
ENCODER_DECODERS: list[Any] = [
    ("optimum/t5-past", {}),
    ("optimum/t5-past", PAIR),
    ("optimum/t5-nocache", {}),
    ("optimum/whisper-past", {}),
    ("optimum/trocr-past", {}),
    ("intel/t5-ir", {}),
    ("intel/whisper-ir", {}),
    pytest.param("intel/trocr-ir", {}, marks=THOROUGH),
    pytest.param("intel/t5-stateless", {}, marks=THOROUGH),
    pytest.param("intel/t5-nocache", {}, marks=THOROUGH),
    pytest.param("optimum/t5-web", {}, marks=THOROUGH),
    pytest.param("optimum/bart-past", {}, marks=THOROUGH),
    pytest.param("optimum/bart-past", PAIR, marks=THOROUGH),
    pytest.param("optimum/marian-past", {}, marks=THOROUGH),
]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "without a cache": {"use_cache": False},
}


@pytest.fixture(scope="session")
def original(folders: Path) -> Callable[[str], Any]:
    """Return a function that loads the PyTorch model from which a given folder was exported."""
    models: dict[str, Any] = {}

    def get(folder: str) -> Any:
        name = Path(folder).name.split("-")[0]
        if name not in models:
            models[name] = getattr(transformers, AUTO[name]).from_pretrained(folders / "models" / name).eval()
        return models[name]

    return get


@pytest.fixture(scope="session")
def opened(folders: Path) -> Callable[..., Any]:
    """Return a function that opens a folder with the model class of its task. The function opens each folder once."""
    models: dict[str, Any] = {}

    def get(folder: str, **words: Any) -> Any:
        key = f"{folder} {sorted(words.items())}"
        if key not in models:
            models[key] = OURS[AUTO[Path(folder).name.split("-")[0]]].from_pretrained(folders / folder, **words)
        return models[key]

    return get


def inputs_of(folder: str) -> dict[str, torch.Tensor]:
    """Return a batch of inputs: three prompts, which are padded on the left for decoders and on the right for
    encoder-decoders, or unpadded audio or images.
    """
    random = torch.Generator().manual_seed(3)
    name = Path(folder).name.split("-")[0]
    if name == "whisper":
        return {"input_features": torch.randn(2, 4, 3000, generator=random)}
    if name == "trocr":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=random)}
    ids = torch.randint(3, 99, (3, 7), generator=random)
    mask = torch.ones_like(ids)
    if AUTO[name] == TEXT:
        mask[1, :3], mask[2, :1] = 0, 0
    else:
        mask[1, 4:], mask[2, 6:] = 0, 0
    ids[mask == 0] = 0
    return {"input_ids": ids, "attention_mask": mask}


def prompts_of(folder: str, model: Any) -> dict[str, torch.Tensor]:
    """Return the inputs of a call that computes logits. For an encoder-decoder, the decoder input has four tokens."""
    inputs = inputs_of(folder)
    if model.config.is_encoder_decoder:
        return {**inputs, "decoder_input_ids": torch.tensor([[1, 5, 7, 9]]).repeat(len(next(iter(inputs.values()))), 1)}
    if "position_ids" in {spec.name for spec in model.artifact.components[0].inputs}:
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return inputs


def on_its_own(graph: Path) -> Any:
    """Open a graph file directly with ONNX Runtime, without accel.

    The session option makes products with 8-bit weights exact, also on CPUs whose 8-bit kernels would saturate. accel's
    sessions set the same option.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(graph, options)


def difference(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    assert outputs.shape == expected.shape
    return float((outputs - expected).detach().abs().max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("folder", "words"), [*DECODERS, *ENCODER_DECODERS])
def test_generated_tokens_equal_pytorchs(
    folder: str, words: dict[str, str], mode: str, opened: Any, original: Any
) -> None:
    how = {**MODES[mode], "do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "eos_token_id": 2}
    if "whisper" in folder:
        # `generate` in transformers sets `min_new_tokens` of Whisper itself.
        how.pop("min_new_tokens")
    tokens = opened(folder, **words).generate(**inputs_of(folder), **how)
    assert torch.equal(tokens, original(folder).generate(**inputs_of(folder), **how))


@pytest.mark.parametrize(("folder", "words"), DECODERS)
def test_several_tokens_after_cached_tokens(folder: str, words: dict[str, str], opened: Any, original: Any) -> None:
    model, ids = opened(folder, **words), inputs_of(folder)["input_ids"][:1]
    with torch.no_grad():
        expected = original(folder)(ids).logits
    cache = model.new_cache()
    model(ids[:, :3], past_key_values=cache)
    assert difference(model(ids[:, 3:], past_key_values=cache).logits, expected[:, 3:]) < CLOSE
    cache.crop(-2)
    assert cache.get_seq_length() == 5
    assert difference(model(ids[:, 5:], past_key_values=cache).logits, expected[:, 5:]) < CLOSE


@pytest.mark.parametrize(("folder", "words"), ENCODER_DECODERS)
def test_cache_rows_are_reordered(folder: str, words: dict[str, str], opened: Any, original: Any) -> None:
    model, prompts = opened(folder, **words), prompts_of(folder, opened(folder, **words))
    # OpenVINO's variables for encoder keys and values keep their number of rows. OpenVINO folders are therefore tested
    # with reversed rows, and other folders with repeated rows.
    tokens = prompts.pop("decoder_input_ids")
    order = torch.arange(len(tokens)).flip(0) if folder.startswith("intel") else torch.tensor([1, 0, 1])
    cache = model.new_cache()
    model(**prompts, decoder_input_ids=tokens[:, :1], past_key_values=cache)
    model(**prompts, decoder_input_ids=tokens[:, 1:], past_key_values=cache)
    cache.reorder_cache(order)
    last = torch.full((len(order), 1), 4)
    moved = {name: tensor[order] for name, tensor in prompts.items()}
    logits = model(**moved, decoder_input_ids=last, past_key_values=cache).logits
    with torch.no_grad():
        expected = original(folder)(**moved, decoder_input_ids=torch.cat([tokens[order], last], dim=1)).logits
    assert difference(logits, expected[:, -1:]) < CLOSE


def test_number_of_encoder_rows_in_openvino_ir_is_fixed(opened: Any) -> None:
    model = opened("intel/whisper-ir")
    features, tokens = inputs_of("intel/whisper-ir"), torch.tensor([[1, 5, 7]] * 2)
    expected = model(**features, decoder_input_ids=tokens).logits
    cache = model.new_cache()
    model(**features, decoder_input_ids=tokens[:, :2], past_key_values=cache)
    with pytest.raises(InputError, match="has 2 rows, which cannot be changed to 3"):
        cache.reorder_cache(torch.tensor([1, 0, 1]))
    model(**features, decoder_input_ids=tokens[:, 2:], past_key_values=cache)
    assert torch.equal(model(**features, decoder_input_ids=tokens).logits, expected)


@pytest.mark.parametrize("folder", ["optimum/bert-external", "optimum/bert-web", "intel/bert-ir"])
@pytest.mark.parametrize("name", ["input_ids", "token_type_ids"])
def test_ids_above_the_range_of_one_graph_are_refused(folder: str, name: str, opened: Any) -> None:
    inputs, model = inputs_of(folder), opened(folder)
    inputs = {"token_type_ids": torch.zeros_like(inputs["input_ids"]), **inputs}
    rows = model.config.vocab_size if name == "input_ids" else model.config.type_vocab_size
    for value in (rows, -1, -100, 2**40):
        ids = inputs[name].clone()
        ids[0, 1] = value
        with pytest.raises(
            InputError, match=f"{name}' contains the value {value}, but the model allows only 0 to {rows - 1}"
        ):
            model(**{**inputs, name: ids})
    model(**inputs)


@pytest.mark.parametrize("words", [{"variant": "quantized"}, {"file_name": "onnx/model_quantized.onnx"}])
def test_variant_selects_the_graph_file(words: dict[str, str], opened: Any, folders: Path) -> None:
    inputs = inputs_of("optimum/bert-web")
    session = on_its_own(folders / "optimum/bert-web/onnx/model_quantized.onnx")
    feeds = {
        spec.name: inputs.get(spec.name, torch.zeros_like(inputs["input_ids"])).numpy() for spec in session.get_inputs()
    }
    (expected,) = session.run(["logits"], feeds)
    model = opened("optimum/bert-web", **words)
    assert difference(model(**inputs).logits, torch.from_numpy(expected)) < CLOSE
    assert model.artifact.manifest.quantization.scheme == "int8"


def with_ending(path: Path, ending: str) -> Any:
    """Convert a graph to the data types that a file name ending such as `_q4f16` means, as the tools of transformers.js
    do.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(path)
    if ending in ("int8", "uint8"):
        quantized = path.with_name("made.onnx")
        quantize_dynamic(path, quantized, weight_type=QuantType.QInt8 if ending == "int8" else QuantType.QUInt8)
        return onnx.load(quantized)
    if ending.startswith("q4"):
        blocks = MatMulNBitsQuantizer(model, block_size=16, is_symmetric=True)
        blocks.process()
        model = blocks.model.model
    if ending == "bnb4":
        four = MatMulBnb4Quantizer(model, 1, 64)
        four.process()
        return four.model.model
    # Keys and values become float16. The logits stay float32, because callers read them.
    return (
        convert_float_to_float16(model, keep_io_types=["logits"])
        if ending.endswith("f16") or ending == "fp16"
        else model
    )


@pytest.mark.parametrize("ending", ["fp16", "q4", "q4f16", "bnb4", "int8", "uint8"])
def test_decoders_with_every_file_name_ending(ending: str, folders: Path, tmp_path: Path) -> None:
    """The outputs equal ONNX Runtime's outputs for the same file, with and without a KV cache."""
    source = folders / "optimum/gpt2-past"
    for file in ("config.json", "generation_config.json"):
        shutil.copyfile(source / file, tmp_path / file)
    (tmp_path / "onnx").mkdir()
    name = "decoder_model_merged" if ending == "fp16" else "model"
    graph = tmp_path / "onnx" / f"{name}_{ending}.onnx"
    onnx.save(with_ending(source / "model.onnx", ending), graph)
    model = accel.ORTModelForCausalLM.from_pretrained(tmp_path, variant=ending)
    inputs = inputs_of("optimum/gpt2-past")
    session = on_its_own(graph)
    all_inputs = {"position_ids": (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0), **inputs}
    feeds = {
        name: all_inputs[name].numpy() for name in all_inputs if name in [spec.name for spec in session.get_inputs()]
    }
    for spec in session.get_inputs():
        if spec.name.startswith("past"):
            kind = np.float16 if spec.type == "tensor(float16)" else np.float32
            feeds[spec.name] = np.zeros((3, spec.shape[1], 0, spec.shape[3]), kind)
    (expected,) = session.run(["logits"], feeds)
    logits = model(**inputs, position_ids=all_inputs["position_ids"]).logits
    assert difference(logits, torch.from_numpy(expected)) < CLOSE
    tokens = [model.generate(**inputs, max_new_tokens=6, use_cache=cached) for cached in (True, False)]
    assert torch.equal(*tokens) or ending in ("int8", "uint8", "q4f16", "fp16"), "scales and sums are of other tokens"


@pytest.mark.skipif(
    adds_in_16_bits(cpu_flags()),
    reason="on this CPU, 8-bit sums overflow, and the merged graph overflows at other values than the separate graphs",
)
def test_variant_of_encoder_and_decoder(opened: Any, folders: Path) -> None:
    model = opened("optimum/t5-web", variant="quantized")
    same = opened("optimum/t5-web", subfolder="onnx", file_name="decoder_model_merged_quantized.onnx")
    assert model.artifact.component("encoder").files[0].sha256 == same.artifact.component("encoder").files[0].sha256
    inputs = prompts_of("optimum/t5-web", model)
    graphs = folders / "optimum/t5-web/onnx"
    encoder = on_its_own(graphs / "encoder_model_quantized.onnx")
    decoder = on_its_own(graphs / "decoder_model_quantized.onnx")
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    (hidden,) = encoder.run(None, {name: arrays[name] for name in ("input_ids", "attention_mask")})
    feeds = {"input_ids": arrays["decoder_input_ids"], "encoder_hidden_states": hidden}
    expected = decoder.run(["logits"], {**feeds, "encoder_attention_mask": arrays["attention_mask"]})[0]
    assert difference(model(**inputs).logits, torch.from_numpy(expected)) < CLOSE


def test_weights_of_two_decoder_graphs_are_stored_once(opened: Any, folders: Path) -> None:
    model = opened("optimum/gpt2-pair", **PAIR)
    sizes = {
        path.name: path.stat().st_size for path in model.artifact.path.iterdir() if path.suffix in (".onnx", ".data")
    }
    weight_bytes = (folders / "models/gpt2/model.safetensors").stat().st_size
    assert sizes["model.onnx.data"] < 1.5 * weight_bytes


def test_external_weights_are_copied_without_hard_link(opened: Any, folders: Path) -> None:
    # onnx rejects weight files with more than one hard link. A hard link to the cached copy would therefore break the
    # user's own folder.
    artifact = opened("genai/mistral-fp32").artifact
    source = folders / "genai/mistral-fp32"
    weights_file = next(
        artifact.path / file.name for file in artifact.component().files if file.name.endswith(".onnx.data")
    )
    assert {path.stat().st_nlink for path in (weights_file, source / "model.onnx.data")} == {1}
    onnx.load(source / "model.onnx")
    onnx.load(artifact.path / artifact.component().file)


def test_converted_folder_is_found_again(opened: Any, folders: Path) -> None:
    first = opened("optimum/gpt2-pair").artifact
    changed = first.path.stat().st_mtime_ns
    assert adopt(folders / "optimum/gpt2-pair", task="text-generation").path == first.path
    assert first.path.stat().st_mtime_ns == changed


# The tests below check invalid folders.


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies a folder. Tests may damage the copy."""
    return lambda folder: Path(shutil.copytree(folders / folder, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("folder", "missing", "kind"),
    [
        ("optimum/t5-past", "encoder_model.onnx", ArtifactNotFoundError),
        ("optimum/gpt2-pair", "decoder_model*.onnx", ArtifactNotFoundError),
        ("optimum/llama-external", "model.onnx.data", IntegrityError),
        ("genai/mistral-fp32", "model.onnx", ArtifactNotFoundError),
        ("exported/llama-single-onnx", "prefill.onnx", ArtifactNotFoundError),
        ("intel/t5-ir", "openvino_decoder_model.xml", ArtifactNotFoundError),
        ("intel/t5-ir", "openvino_decoder_model.bin", IntegrityError),
    ],
)
def test_missing_file_is_named(folder: str, missing: str, kind: type[AccelError], copied: Any) -> None:
    path = copied(folder)
    for file in path.glob(missing):
        file.unlink()
    with pytest.raises(kind) as error:
        accel.ORTModel.from_pretrained(path)
    assert missing.replace("*", "") in str(error.value)


def edited(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)


def _outside(model: onnx.ModelProto) -> None:
    tensor = next(
        initializer for initializer in model.graph.initializer if initializer.data_location == initializer.EXTERNAL
    )
    next(entry for entry in tensor.external_data if entry.key == "location").value = "../secret"


def _no_number(model: onnx.ModelProto) -> None:
    tensor = next(
        initializer for initializer in model.graph.initializer if initializer.data_location == initializer.EXTERNAL
    )
    tensor.external_data.add(key="length", value="__import__('os').abort()")


def _beyond(model: onnx.ModelProto) -> None:
    tensor = next(
        initializer for initializer in model.graph.initializer if initializer.data_location == initializer.EXTERNAL
    )
    for entry in [entry for entry in tensor.external_data if entry.key == "length"]:
        entry.value = str(1 << 40)


@pytest.mark.parametrize(
    ("change", "word"),
    [(_outside, "outside of the graph"), (_no_number, "must be whole numbers"), (_beyond, "truncated")],
)
def test_missing_external_weights_raise(change: Any, word: str, copied: Any) -> None:
    path = copied("optimum/llama-external")
    edited(path / "model.onnx", change)
    with pytest.raises(IntegrityError, match=word):
        accel.ORTModelForCausalLM.from_pretrained(path)


@pytest.fixture
def foreign(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> Path:
    """Return a foreign folder that contains a config and a graph with its weights."""
    return as_foreign(tiny_artifact().path, tmp_path / "folder" / "model")


def _external(tensor: onnx.TensorProto, place: str) -> onnx.TensorProto:
    tensor.data_type, tensor.data_location = tensor.FLOAT, tensor.EXTERNAL
    tensor.dims[:] = [1]
    del tensor.external_data[:]
    tensor.ClearField("raw_data")
    tensor.external_data.add(key="location", value=place)
    tensor.external_data.add(key="length", value="4")
    return tensor


def _initializer(model: onnx.ModelProto, place: str) -> None:
    _external(model.graph.initializer.add(name="more"), place)


def _sparse(model: onnx.ModelProto, place: str) -> None:
    _external(model.graph.sparse_initializer.add(dims=[8]).values, place)


def _constant(place: str) -> onnx.NodeProto:
    node = onnx.helper.make_node("Constant", [], ["more"])
    value = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    _external(value.t, place)
    return node


def _attribute(model: onnx.ModelProto, place: str) -> None:
    model.graph.node.append(_constant(place))


def _inner_attribute(model: onnx.ModelProto, place: str) -> None:
    inner = onnx.helper.make_graph([_constant(place)], "inner", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["input_ids"], ["more"], then_branch=inner, else_branch=inner))


def _function(model: onnx.ModelProto, place: str) -> None:
    model.functions.append(onnx.helper.make_function("own", "More", [], ["more"], [_constant(place)], []))


PLACES = [_initializer, _sparse, _attribute, _inner_attribute, _function]


@pytest.mark.parametrize("put", PLACES)
@pytest.mark.parametrize(
    "name", ["absent.data", "../secret.data", "linked.data", "pipe.data", "a\0b", "x" * 5000],
    ids=["absent", "above", "linked", "pipe", "no name", "long name"],
)  # fmt: skip
def test_weights_outside_of_the_folder_are_refused(put: Any, name: str, foreign: Path) -> None:
    (foreign.parent / "secret.data").write_bytes(b"1234")
    if name == "linked.data":
        (foreign / name).symlink_to(foreign.parent / "secret.data")
    if name == "pipe.data":
        os.mkfifo(foreign / name)
    edited(foreign / "model.onnx", lambda model: put(model, name))
    for act in (adopt, functools.partial(optimize, out=foreign.parent / "out")):
        with pytest.raises(IntegrityError, match="stores weights in|The weights of .* are in") as error:
            act(foreign)
        assert error.value.fix
        assert len(str(error.value)) < 2000
    assert not (foreign.parent / "out").exists()


def test_weights_in_node_attributes_are_kept(copied: Any) -> None:
    """A rewritten graph keeps the external weights that are stored in node attributes of functions."""
    path = copied("optimum/gpt2-pair")
    (path / "one.data").write_bytes(np.float32(7).tobytes())
    for graph in path.glob("*.onnx"):
        edited(graph, lambda model: model.functions.append(
            onnx.helper.make_function("own", "More", [], ["more"], [_constant("one.data")], [])
        ))  # fmt: skip
    artifact = adopt(path)
    assert artifact.path != path
    (function,) = onnx.load(artifact.path / artifact.component().file).functions
    assert onnx.numpy_helper.to_array(function.node[0].attribute[0].t) == 7


def test_external_weights_of_any_size_are_optimized(foreign: Path) -> None:
    graph = foreign / "model.onnx"
    model = onnx.load(graph)
    for path in foreign.glob("*.data"):
        path.unlink()
    onnx.save(model, graph, save_as_external_data=True, location="own.data", size_threshold=64)
    (foreign / "one.data").write_bytes(np.float32(7).tobytes())
    edited(graph, lambda model: model.graph.node.append(_constant("one.data")))
    optimized = optimize(foreign, foreign.parent / "out")
    assert not [path.name for path in optimized.path.iterdir() if path.name in ("own.data", "one.data")]


@pytest.mark.parametrize("tensor", [{"dims": [10**12]}, {"dims": [-1]}, {"data_type": 99}], ids=str)
@pytest.mark.parametrize("external", [False, True])
def test_invalid_tensors_raise(tensor: dict[str, Any], external: bool, foreign: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        first = next(initializer for initializer in model.graph.initializer if initializer.dims)
        first.dims[0] = tensor.get("dims", first.dims)[0]
        first.data_type = tensor.get("data_type", first.data_type)

    graph = foreign / "model.onnx"
    onnx.save(onnx.load(graph), graph, save_as_external_data=external, location="own.data", size_threshold=0)
    edited(graph, change)
    for act in (adopt, functools.partial(optimize, out=foreign.parent / "out")):
        with pytest.raises(IntegrityError) as error:
            act(foreign)
        assert error.value.fix


@pytest.mark.parametrize("values", ["input", "output"])
def test_unknown_element_types_raise(values: str, foreign: Path) -> None:
    edited(foreign / "model.onnx", lambda model: _retyped(getattr(model.graph, values)[0], 71))
    with pytest.raises(IntegrityError, match="elements of the type 71"):
        adopt(foreign)


def _retyped(value: onnx.ValueInfoProto, kind: int) -> None:
    value.type.tensor_type.elem_type = kind


@pytest.mark.parametrize("name", ["model.onnx", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_special_files_are_not_read(name: str, make: Callable[[Path], None], foreign: Path) -> None:
    (foreign / name).unlink()
    make(foreign / name)
    started = time.monotonic()
    with pytest.raises(AccelError) as error:
        accel.pipeline("text-classification", foreign)
    assert error.value.fix
    assert time.monotonic() - started < 10
    if name != "tokenizer.json":
        assert "not a regular file" in error.value.message


@pytest.mark.parametrize("name", ["model.onnx", "config.json", "export.json", "genai_config.json"])
def test_configs_outside_of_the_folder_are_refused(name: str, foreign: Path) -> None:
    other = foreign.parent / name
    (foreign / name).rename(other) if (foreign / name).exists() else other.write_text("{}")
    (foreign / name).symlink_to(other)
    with pytest.raises(IntegrityError, match="outside the folder") as error:
        accel.ORTModelForSequenceClassification.from_pretrained(foreign)
    assert str(other) in error.value.message
    assert error.value.fix


def test_openvino_weights_outside_of_the_folder_are_refused(copied: Any) -> None:
    path = copied("intel/gpt2-ir")
    weights = path / "openvino_model.bin"
    weights.rename(path.parent / "secret.bin")
    weights.symlink_to(path.parent / "secret.bin")
    with pytest.raises(IntegrityError, match="outside the folder"):
        accel.ORTModel.from_pretrained(path)


@pytest.mark.parametrize("name", [b"input_ids", b"past_key_values.0.key", b"logits", b"MatMul", b"batch_size"])
def test_names_that_are_not_utf8_raise(name: bytes, copied: Any) -> None:
    graph = copied("optimum/gpt2-past") / "model.onnx"
    content = graph.read_bytes()
    assert name in content
    graph.write_bytes(content.replace(name, b"\xff" + name[1:]))
    with pytest.raises(IntegrityError, match="not valid UTF-8 text"):
        accel.ORTModelForCausalLM.from_pretrained(graph.parent)


def test_dimension_names_are_not_evaluated(copied: Any) -> None:
    path = copied("optimum/gpt2-past")

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = f"__import__('os').abort() + {dim.dim_param}"

    edited(path / "model.onnx", change)
    with accel.ORTModelForCausalLM.from_pretrained(path) as model:
        assert model.artifact.component().inputs[0].shape == ("batch", "sequence")


@pytest.mark.parametrize(
    ("folder", "changes", "word"),
    [
        ("optimum/gpt2-past", {"vocab_size": 98}, "98"),
        ("optimum/gpt2-past", {"n_layer": 3}, "layers"),
        ("optimum/t5-past", {"num_decoder_layers": 3}, "layers"),
        ("intel/gpt2-ir", {"vocab_size": 98}, "98"),
    ],
)
def test_config_of_another_model_raises(folder: str, changes: dict[str, int], word: str, copied: Any) -> None:
    path = copied(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
    with pytest.raises(IntegrityError, match=word):
        accel.ORTModel.from_pretrained(path.parent)


def test_newer_onnx_format_is_refused(copied: Any) -> None:
    path = copied("optimum/gpt2-past")

    def change(model: onnx.ModelProto) -> None:
        model.ir_version = 99

    edited(path / "model.onnx", change)
    with pytest.raises(SessionError, match="99"):
        accel.ORTModelForCausalLM.from_pretrained(path)


def test_decoder_with_past_alone_is_refused(copied: Any) -> None:
    path = copied("optimum/gpt2-pair")
    for name in ("decoder_model.onnx", "decoder_model_merged.onnx"):
        (path / name).unlink()
    with pytest.raises(ArtifactNotFoundError, match="the decoder that reads the prompt"):
        accel.ORTModelForCausalLM.from_pretrained(path)


def test_export_without_encoder_is_refused(folders: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="encoder"):
        accel.ORTModelForSeq2SeqLM.from_pretrained(folders / "exported/t5-single-onnx")


def test_decoder_with_single_token_steps_in_openvino_ir_is_refused(folders: Path) -> None:
    with pytest.raises(IntegrityError, match="multi_token_decode"):
        accel.ORTModelForCausalLM.from_pretrained(folders / "exported/llama-single-openvino")


def test_unknown_variant_lists_the_known_variants(folders: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="fp32, quantized, uint8"):
        accel.ORTModelForSequenceClassification.from_pretrained(folders / "optimum/bert-web", variant="q5")


def test_padding_in_the_decoder_mask_is_refused(opened: Any) -> None:
    inputs = prompts_of("optimum/t5-past", opened("optimum/t5-past"))
    mask = torch.tensor([[0, 1, 1, 1]]).repeat(3, 1)
    with pytest.raises(InputError, match="decoder contains padding"):
        opened("optimum/t5-past")(**inputs, decoder_attention_mask=mask)


def test_backend_without_the_operators_raises(folders: Path) -> None:
    with pytest.raises(AccelError, match="openvino"):
        accel.ORTModelForCausalLM.from_pretrained(folders / "genai/mistral-fp32", backend="openvino")


def test_saved_folder_without_manifest_is_refused(opened: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    opened("optimum/gpt2-pair").save_pretrained(saved)
    assert Artifact.load(saved).component().continues == "one"
    (saved / "accel.json").unlink()
    with pytest.raises(IntegrityError, match=r"accel\.json is missing"):
        accel.ORTModelForCausalLM.from_pretrained(saved)


def test_tensorrt_refuses_a_growing_cache(folders: Path) -> None:
    artifact = adopt(folders / "optimum/gpt2-past", task="text-generation")
    try:
        backend = registry.load(registry.describe("tensorrt"))
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with pytest.raises(SessionError, match="cache"):
        backend.open(artifact, OpenRequest(device=DeviceSpec("cuda")))


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_generation_graph_for_another_task_raises(task: str, copied: Any) -> None:
    """Opening a generation graph for another task raises an error. Decoders for embeddings are often published with a
    generation graph, whose cache inputs no tokenizer provides.
    """
    with pytest.raises(TaskError, match="takes the keys and values of earlier tokens") as error:
        adopt(copied("optimum/gpt2-past"), task=task)
    assert f"--task {task}" in str(error.value.fix)


def test_position_ids_of_an_embedding_decoder(tmp_path: Path) -> None:
    """A decoder for embeddings runs without the caller's `position_ids`. Optimum's graphs of such decoders have the
    input `position_ids`, which tokenizers do not return. Attention depends only on the distances between positions.
    """
    transformers.Qwen3Config(vocab_size=120, hidden_size=2).save_pretrained(tmp_path)
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["" : 18]>
        positions (int64[batch_size, sequence_length] input_ids, int64[batch_size, sequence_length] position_ids)
        => (float[batch_size, sequence_length, 2] last_hidden_state)
        <float[120, 2] table = {{{", ".join(["0.0"] * 240)}}}, int64[1] last = {{-1}}>
        {{
            words = Gather <axis = 0> (table, input_ids)
            places = Cast <to = 1> (position_ids)
            columns = Unsqueeze (places, last)
            last_hidden_state = Add (words, columns)
        }}
    """)
    onnx.save(model, tmp_path / "model.onnx")
    opened = accel.ORTModelForFeatureExtraction.from_pretrained(tmp_path)
    hidden = opened(input_ids=torch.tensor([[2, 5, 6], [0, 2, 3]])).last_hidden_state
    assert torch.equal(hidden[..., 0], torch.tensor([[0.0, 1.0, 2.0]] * 2))
