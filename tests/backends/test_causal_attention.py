"""Tests of decoder graphs that take row lengths instead of an attention mask, computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from accel import capture, optimize
from accel.artifact import Artifact
from accel.backends import registry
from accel.errors import SessionError
from accel.interfaces.protocols import OpenRequest
from accel.interfaces.specs import DeviceSpec
from accel.testing.generative_models import tiny_generator
from accel.testing.models import VOCABULARY
from accel_plugins.ortkit.graph.editing import load_graph, nodes
from accel_plugins.ortkit.optimization.maskless_decoder import LENGTHS, TOTAL, causal_form, take_lengths

Artifacts = Callable[[str], Artifact]
LENGTHS_OF_ROWS = (5, 9, 2)


def open_form(artifact: Artifact) -> tuple[ort.InferenceSession, bool]:
    path = artifact.path / artifact.component("model").file
    form = causal_form(path)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    session = ort.InferenceSession(
        form.model, options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
    )
    return session, form.windowed


def logits_of(artifact: Artifact, ids: torch.Tensor) -> np.ndarray:
    """Return the logits of rows with `LENGTHS_OF_ROWS` tokens, which are padded on the right."""
    session, _ = open_form(artifact)
    batch, longest = ids.shape
    feeds = {
        "input_ids": ids.numpy(),
        "position_ids": np.arange(longest)[None].repeat(batch, 0),
        "logits_to_keep": np.arange(longest),
        LENGTHS: np.array(LENGTHS_OF_ROWS, np.int32) - 1,
        TOTAL: np.array([longest], np.int32),
    }
    for spec in artifact.component("model").inputs:
        if spec.pair is not None:
            feeds[spec.name] = np.zeros((batch, spec.shape[1], 32, spec.shape[3]), np.float32)
    logits: np.ndarray = session.run(["logits"], feeds)[0]
    return logits


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "windowed"), [("qwen3", False), ("gemma3", True), ("gpt2", False), ("mistral", True)]
)
def test_lengths_replace_the_mask(generator: Artifacts, family: str, windowed: bool) -> None:
    artifact, original = generator(family), tiny_generator(family)
    assert open_form(artifact)[1] is windowed
    ids = torch.randint(4, VOCABULARY, (3, max(LENGTHS_OF_ROWS)), generator=torch.Generator().manual_seed(3))
    logits = logits_of(artifact, ids)
    for row, length in enumerate(LENGTHS_OF_ROWS):
        with torch.inference_mode():
            expected = original(ids[row : row + 1, :length]).logits[0].numpy()
        assert np.abs(logits[row, :length] - expected).max() < 1e-3, row


@pytest.mark.thorough
def test_sliding_windows_become_operator_attributes(generator: Artifacts) -> None:
    artifact = generator("gemma3")
    model = load_graph(artifact, artifact.component("model"))
    assert take_lengths(model, "gemma3")
    attentions = nodes(model, "GroupQueryAttention", domain="com.microsoft")
    assert [node.attributes.get_int("local_window_size", 0) for node in attentions] == [8, 0]
    assert "attention_mask" not in [value.name for value in model.graph.inputs]


@pytest.mark.thorough
def test_other_attention_biases_are_refused(generator: Artifacts) -> None:
    artifact = generator("t5")
    with pytest.raises(SessionError, match="bias that does not only hide") as caught:
        causal_form(artifact.path / artifact.component("decoder").file)
    assert "backend='cpu'" in str(caught.value)


def changed(artifact: Artifact, change: Callable[[ir.Model], None]) -> ir.Model:
    model = load_graph(artifact, artifact.component("model"))
    change(model)
    return model


def test_noncausal_mask_is_refused(generator: Artifacts) -> None:
    def see_everything(model: ir.Model) -> None:
        for node in nodes(model, "LessOrEqual"):
            node.replace_input_with(0, node.inputs[1])

    with pytest.raises(SessionError, match="does not only hide"):
        take_lengths(changed(generator("llama"), see_everything), "changed")


def test_shifted_causal_mask_is_refused(generator: Artifacts) -> None:
    def see_the_next_token(model: ir.Model) -> None:
        for node in nodes(model, "LessOrEqual"):
            node.op_type = "Less"

    with pytest.raises(SessionError, match="does not only hide"):
        take_lengths(changed(generator("qwen3"), see_the_next_token), "changed")


def test_mask_with_another_consumer_is_refused(generator: Artifacts) -> None:
    def add_the_mask(model: ir.Model) -> None:
        mask = next(value for value in model.graph.inputs if value.name == "attention_mask")
        sized = ir.node("Cast", [mask], {"to": ir.DataType.FLOAT})
        model.graph.append(sized)
        sized.outputs[0].name = "extra"
        model.graph.outputs.append(sized.outputs[0])

    with pytest.raises(SessionError, match="depends on attention_mask outside"):
        take_lengths(changed(generator("qwen3"), add_the_mask), "changed")


# The tests below use decoders that are optimized for CUDA.


@pytest.fixture(scope="module")
def halved(generator: Artifacts, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return optimize(generator("qwen3"), tmp_path_factory.mktemp("halved") / "qwen3", backend="cuda", level="O4")


def test_float16_decoder_has_float16_cache(halved: Artifact) -> None:
    component = halved.component("model")
    cache = [spec for spec in (*component.inputs, *component.outputs) if spec.pair is not None]
    assert {spec.dtype for spec in cache} == {"float16"}
    assert next(spec for spec in component.outputs if spec.name == "logits").dtype == "float32"
    assert not open_form(halved)[1]


def test_rotary_angles_stay_in_float32(halved: Artifact) -> None:
    model = load_graph(halved, halved.component("model"))
    trigonometric = list(nodes(model, "Sin", "Cos"))
    assert len(trigonometric) == 2
    for node in trigonometric:
        assert node.inputs[0] is not None
        assert node.inputs[0].dtype == ir.DataType.FLOAT
    frequencies = [value for name, value in model.graph.initializers.items() if name.endswith("inv_freq")]
    assert [value.dtype for value in frequencies] == [ir.DataType.FLOAT]


def test_decoder_layers_are_fused(halved: Artifact) -> None:
    fused = halved.manifest.steps[-1].report["fused"]
    assert (fused["rms-norm"], fused["skip-rms-norm"], fused["rotary"]) == (9, 4, 4)
    model = load_graph(halved, halved.component("model"))
    assert fused["merged-products"] == 2 * (3 + 2)
    # The two remaining `Transpose` nodes select the tokens whose logits the caller requests.
    assert len(list(nodes(model, "Transpose"))) == 2


@pytest.mark.thorough
def test_gemma3_in_float16_opens_on_the_cpu(generator: Artifacts, tmp_path: Path) -> None:
    """Opening the float16 graph on the CPU succeeds, although one of ONNX Runtime's own optimizers crashed the process
    on Gemma 3.
    """
    halved = optimize(generator("gemma3"), tmp_path / "fp16", backend="cuda", level="O4")
    assert open_form(halved)[1]


@pytest.mark.thorough
def test_late_positions_give_different_logits(generator: Artifacts, tmp_path: Path) -> None:
    """The float16 decoder computes rotary angles in float32. Float16 cannot represent odd positions above 2048, so two
    neighboring positions would have the same angle.
    """
    halved = optimize(generator("llama"), tmp_path / "fp16", backend="cuda", level="O4")
    backend = registry.load(registry.describe("cpu"))
    session = backend.open(halved, OpenRequest(device=DeviceSpec("cpu")))["model"]
    sizes = {"batch": 1, "sequence": 3, "total": 3, "kept": 1}
    stateless = [spec for spec in session.inputs if spec.pair is None]
    feeds = dict(capture.feeds_for(stateless, sizes, seed=0, folder=halved.path))
    feeds |= {"attention_mask": torch.ones(1, 3).long(), "logits_to_keep": torch.tensor([2])}
    logits = []
    for places in ([3000, 3001, 3002], [3000, 3000, 3002]):
        feeds["position_ids"] = torch.tensor([places])
        logits.append(session.run(feeds, outputs=("logits",), state=session.new_state(1))["logits"])
    assert (logits[0] - logits[1]).abs().max() > 0.05
