"""Tests of other tools that open, check or rewrite the graphs that `accel export` writes. The outputs of the graphs do
not change.

There is one function for each tool. It receives a graph file, and returns the rewritten graph file, or `None` if the
tool only checks the graph. Tests of tools that are not installed are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from accel import capture
from accel.artifact import Artifact, Component

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Reader = Callable[[Path, Path, Component], "Path | None"]
# The tolerance is for float32 logits of up to 5, other kernels and other orders of addition.
CLOSE = 1e-4
# The tolerance is for 8-bit graphs of tiny random models in ONNX Runtime, relative to the norm of the outputs.
# Unrelated outputs would differ by 1.4.
INTEGERS = 0.35
MODELS = {
    "bert": "text-classification",
    "vit": "image-classification",
    "gpt2": "text-generation",
    "t5": "text2text-generation",
    "whisper": "automatic-speech-recognition",
}
# These are the names of the architectures in ONNX Runtime's optimizer, which selects its fusions by the name.
OPTIMIZER_TYPES = {"bert": "bert", "vit": "vit", "t5": "t5", "whisper": "bart"}
COMPONENTS = [
    ("bert", "model"), ("vit", "model"), ("gpt2", "model"), ("t5", "encoder"), ("t5", "cross_attention"), ("t5", "decoder"),
    ("whisper", "encoder"), ("whisper", "cross_attention"), ("whisper", "decoder"),
]  # fmt: skip
THOROUGH = {("t5", "cross_attention"), ("whisper", "cross_attention"), ("whisper", "decoder")}


@pytest.fixture(scope="module")
def exported(tiny_artifact: Callable[..., Artifact], generator: Callable[..., Artifact]) -> Callable[[str], Artifact]:
    """Return a function that returns the export of a model. Each model is exported once."""
    return lambda name: tiny_artifact(name, MODELS[name]) if name in ("bert", "vit") else generator(name)


@pytest.fixture(autouse=True)
def _no_files_left(tmp_path: Path) -> Iterator[None]:
    """Run each test in a temporary working folder, because some tools write files to the working folder."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


def inputs_of(artifact: Artifact, component: Component) -> dict[str, np.ndarray]:
    """Return inputs with two rows, and an empty KV cache with enough capacity for the tokens."""
    sizes = {"batch": 2, "sequence": 6, "total": 6, "past": 0, "capacity": 6, "kept": 1, "encoder_sequence": 5}
    feeds = capture.feeds_for(component.inputs, sizes, seed=0, folder=artifact.path)
    for spec in component.inputs:
        if spec.pair is not None:
            feeds[spec.name] = torch.zeros_like(feeds[spec.name])
        elif spec.name == "attention_mask" and component.stateful:
            feeds[spec.name] = torch.ones_like(feeds[spec.name])
        elif spec.name == "position_ids":
            feeds[spec.name] = torch.arange(6).expand(2, 6).contiguous()
        elif spec.name == "logits_to_keep":
            feeds[spec.name] = torch.tensor([5])
    return {name: tensor.numpy() for name, tensor in feeds.items()}


def answers(graph: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Compute exact 8-bit products, also on processors whose 8-bit instructions saturate.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs() if not value.name.startswith("present")]
    outputs: list[np.ndarray] = session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})
    return outputs


def check(graph: Path, out: Path, component: Component) -> None:
    """Check a graph with onnx's checker, including shape inference."""
    onnx.checker.check_model(str(graph), full_check=True)


def infer_shapes(graph: Path, out: Path, component: Component) -> Path:
    """Run onnx's shape inference in strict mode."""
    inferred = onnx.shape_inference.infer_shapes(onnx.load(graph), check_type=True, strict_mode=True, data_prop=True)
    onnx.save(inferred, out)
    return out


def preprocess(graph: Path, out: Path, component: Component) -> Path:
    """Run ONNX Runtime's preprocessing for quantization."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Allow ONNX Runtime to merge axes, because its symbolic inference cannot derive that the attention mask is as long
    # as the row.
    quant_pre_process(str(graph), str(out), auto_merge=True)
    return out


def quantize_dynamic(graph: Path, out: Path, component: Component) -> Path:
    """Quantize a graph with ONNX Runtime's dynamic quantizer."""
    from onnxruntime.quantization import quantize_dynamic as run

    run(graph, out)
    return out


def quantize_static(graph: Path, out: Path, component: Component) -> Path:
    """Quantize a graph with ONNX Runtime's static quantizer."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat
    from onnxruntime.quantization import quantize_static as run

    class Rows(CalibrationDataReader):  # type: ignore[misc]  # ONNX Runtime has no types
        def __init__(self) -> None:
            artifact = Artifact.load(graph.parent)
            self._left = [inputs_of(artifact, component)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self._left.pop() if self._left else None

    run(str(graph), str(out), Rows(), quant_format=QuantFormat.QDQ, op_types_to_quantize=["MatMul", "Gemm"])
    return out


def optimize(graph: Path, out: Path, component: Component, *, kind: str) -> Path:
    """Optimize a graph with ONNX Runtime's transformer optimizer."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(str(graph), model_type=kind, num_heads=2, hidden_size=32, opt_level=0).save_model_to_file(str(out))
    return out


def slim(graph: Path, out: Path, component: Component) -> Path:
    """Simplify a graph with onnxslim."""
    onnxslim = pytest.importorskip("onnxslim")
    onnx.save(onnxslim.slim(str(graph)), out)
    return out


def extend(graph: Path, out: Path, component: Component) -> Path:
    """Add an operator of onnxruntime-extensions to a graph, and run the operator in the same session as the graph's own
    operators.
    """
    extensions = pytest.importorskip("onnxruntime_extensions")
    model = onnx.load(graph)
    # Add a text input, and an operator that converts the text to lower case. The rest of the graph does not read the
    # result.
    text = onnx.helper.make_tensor_value_info("text", onnx.TensorProto.STRING, ["texts"])
    low = onnx.helper.make_tensor_value_info("lowered", onnx.TensorProto.STRING, ["texts"])
    model.graph.node.append(onnx.helper.make_node("StringLower", ["text"], ["lowered"], domain="ai.onnx.contrib"))
    model.graph.input.append(text)
    model.graph.output.append(low)
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.contrib", 1))
    onnx.save(model, out)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(extensions.get_library_path())
    session = onnxruntime.InferenceSession(out, options, providers=["CPUExecutionProvider"])
    feeds = {**inputs_of(Artifact.load(graph.parent), component), "text": np.array(["ÉTÉ", "Abc"], object)}
    names = [value.name for value in session.get_inputs()]
    assert list(session.run(["lowered"], {name: feeds[name] for name in names})[0]) == ["été", "abc"]
    return graph


READERS: dict[str, tuple[Reader, float]] = {
    "onnx.checker": (check, 0.0),
    "onnx.shape_inference": (infer_shapes, 0.0),
    "onnxruntime quant_pre_process": (preprocess, CLOSE),
    "onnxruntime quantize_dynamic": (quantize_dynamic, INTEGERS),
    "onnxruntime quantize_static": (quantize_static, INTEGERS),
    "onnxslim": (slim, CLOSE),
    "onnxruntime-extensions": (extend, 0.0),
}
CASES = [
    pytest.param(name, part, marks=pytest.mark.thorough if (name, part) in THOROUGH else ())
    for name, part in COMPONENTS
]


def compared(read: Reader, atol: float, artifact: Artifact, part: str, out: Path) -> None:
    component = artifact.component(part)
    graph = artifact.path / component.file
    rewritten = read(graph, out, component)
    if rewritten is None:
        return
    feeds = inputs_of(artifact, component)
    for output, expected in zip(answers(rewritten, feeds), answers(graph, feeds), strict=True):
        assert output.shape == expected.shape
        if atol == INTEGERS:
            assert np.linalg.norm(output - expected) <= atol * np.linalg.norm(expected)
        else:
            assert np.abs(output - expected).max() <= atol


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("name", "part"), CASES)
def test_tool_keeps_outputs(
    reader: str, name: str, part: str, exported: Callable[[str], Artifact], tmp_path: Path
) -> None:
    read, atol = READERS[reader]
    compared(read, atol, exported(name), part, tmp_path / "read.onnx")


@pytest.mark.parametrize(("name", "part"), [case for case in CASES if case.values[0] in OPTIMIZER_TYPES])
def test_transformer_optimizer_keeps_outputs(
    name: str, part: str, exported: Callable[[str], Artifact], tmp_path: Path
) -> None:
    read = functools.partial(optimize, kind=OPTIMIZER_TYPES[name])
    compared(read, CLOSE, exported(name), part, tmp_path / "read.onnx")


@pytest.mark.parametrize(("name", "part"), CASES)
def test_initializers_have_no_value_info(name: str, part: str, exported: Callable[[str], Artifact]) -> None:
    artifact = exported(name)
    graph = onnx.load(artifact.path / artifact.component(part).file, load_external_data=False).graph
    assert not {tensor.name for tensor in graph.initializer} & {value.name for value in graph.value_info}


# The tests below run transformers.js.

SCRIPT = """
import { env, AutoModelForSequenceClassification, AutoModelForImageClassification, Tensor } from '@huggingface/transformers';
import fs from 'node:fs';
const [folder, kind] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = folder;
const given = JSON.parse(fs.readFileSync(`${folder}/feeds.json`));
const loaders = { bert: AutoModelForSequenceClassification, vit: AutoModelForImageClassification };
const model = await loaders[kind].from_pretrained('model', { dtype: 'fp32', use_external_data_format: true });
const feeds = {};
for (const [name, one] of Object.entries(given)) {
  const values = one.type === 'int64' ? BigInt64Array.from(one.data, BigInt) : Float32Array.from(one.data);
  feeds[name] = new Tensor(one.type, values, one.dims);
}
const { logits } = await model(feeds);
console.log(JSON.stringify([...logits.data]));
"""


def node_modules() -> Path | None:
    """Return the folder that contains transformers.js (`ACCEL_NODE_MODULES`), or `None` if transformers.js or Node is
    not installed.
    """
    folder = Path(os.environ.get("ACCEL_NODE_MODULES", "node_modules")).absolute()
    installed = (folder / "@huggingface" / "transformers" / "package.json").is_file()
    return folder if shutil.which("node") and installed else None


@pytest.mark.skipif(
    node_modules() is None, reason="Node or @huggingface/transformers is not installed (ACCEL_NODE_MODULES)"
)
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_transformers_js(name: str, exported: Callable[[str], Artifact], tmp_path: Path) -> None:
    artifact = exported(name)
    modules = node_modules()
    assert modules is not None
    shutil.copytree(artifact.path, tmp_path / "model")
    # transformers.js expects the graphs in the subfolder `onnx`, and the weights next to the graphs in
    # `model.onnx_data`.
    (tmp_path / "model" / "onnx").mkdir()
    model = onnx.load(artifact.file())
    onnx.save(model, tmp_path / "model" / "onnx" / "model.onnx", save_as_external_data=True, location="model.onnx_data")
    feeds = inputs_of(artifact, artifact.component())
    written = {
        key: {"type": str(value.dtype), "dims": value.shape, "data": value.ravel().tolist()}
        for key, value in feeds.items()
    }
    (tmp_path / "feeds.json").write_text(json.dumps(written))
    (tmp_path / "read.mjs").write_text(SCRIPT)
    (tmp_path / "node_modules").symlink_to(modules)
    done = subprocess.run(
        ["node", "read.mjs", str(tmp_path), name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (expected,) = answers(artifact.file(), feeds)
    output = np.array(json.loads(done.stdout.strip().splitlines()[-1]), np.float32)
    # The WebAssembly kernels add numbers in a different order.
    assert np.abs(output.reshape(expected.shape) - expected).max() < CLOSE
