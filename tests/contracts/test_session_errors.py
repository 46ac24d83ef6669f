"""Check that an invalid call raises the same error on every backend, with and without buckets, and that the next valid
call works.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.sessions import open_plan
from accel.config import SessionOptions
from accel.errors import AccelError, InputError
from accel.stages.foreign_folders import weights_of
from accel.stages.resolution import resolve
from accel.testing.image_models import tiny_picture_model
from accel.testing.models import rescale

Feeds = dict[str, torch.Tensor]
OfPictures = Callable[[str], tuple[Any, Any, Any]]


def right(batch: int = 2, sequence: int = 6) -> Feeds:
    ids = torch.randint(4, 100, (batch, sequence), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


@dataclass(frozen=True)
class Wrong:
    """An invalid call. The function `feeds` changes valid inputs, and `more` contains further arguments of `run`."""

    feeds: Callable[[Feeds], Feeds] = lambda feeds: feeds
    more: Mapping[str, Any] | None = None


WRONG = {
    "missing": Wrong(lambda f: {k: v for k, v in f.items() if k != "attention_mask"}),
    "extra": Wrong(lambda f: {**f, "pixel_values": torch.zeros(1)}),
    "renamed": Wrong(lambda f: {"ids": f["input_ids"], **{k: v for k, v in f.items() if k != "input_ids"}}),
    "one axis": Wrong(lambda f: {k: v[0] for k, v in f.items()}),
    "three axes": Wrong(lambda f: {k: v[None] for k, v in f.items()}),
    "scalar": Wrong(lambda f: {**f, "input_ids": torch.tensor(5)}),
    "float ids": Wrong(lambda f: {**f, "input_ids": f["input_ids"].float()}),
    "short mask": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"][:, :4]}),
    "long mask": Wrong(lambda f: {**f, "attention_mask": torch.ones(2, 8, dtype=torch.int64)}),
    "mask of one row": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"][:1]}),
    "ids of one row": Wrong(lambda f: {**f, "input_ids": f["input_ids"][:1]}),
    "no rows": Wrong(lambda f: {k: v[:0] for k, v in f.items()}),
    "no tokens": Wrong(lambda f: {k: v[:, :0] for k, v in f.items()}),
    "-100 among the ids": Wrong(lambda f: {**f, "input_ids": f["input_ids"].index_fill(1, torch.tensor([2]), -100)}),
    "ids that nobody has": Wrong(lambda f: {**f, "input_ids": f["input_ids"] + 100}),
    "types that nobody has": Wrong(lambda f: {**f, "token_type_ids": f["token_type_ids"] + 2}),
    "negative types": Wrong(lambda f: {**f, "token_type_ids": f["token_type_ids"] - 1}),
    "float mask": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"] * float("nan")}),
    "sparse ids": Wrong(lambda f: {**f, "input_ids": f["input_ids"].to_sparse()}),
    "a sparse mask": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"].to_sparse()}),
    "ids without values": Wrong(lambda f: {**f, "input_ids": f["input_ids"].to("meta")}),
    "a mask without values": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"].to("meta")}),
    "lists": Wrong(lambda f: {**f, "input_ids": f["input_ids"].tolist()}),
    "complex ids": Wrong(lambda f: {**f, "input_ids": f["input_ids"].to(torch.complex64)}),
    "unknown output": Wrong(more={"outputs": ["logit"]}),
    "state without cache": Wrong(more={"state": object()}),
    "a row without tokens": Wrong(lambda f: {**f, "attention_mask": f["attention_mask"] * torch.tensor([[1], [0]])}),
}


ODD: dict[str, Callable[[Feeds], Feeds]] = {
    "padding on the left": lambda f: {
        **f,
        "attention_mask": f["attention_mask"].index_fill(1, torch.tensor([0, 1]), 0),
    },
    "a hole in the mask": lambda f: {**f, "attention_mask": f["attention_mask"].index_fill(1, torch.tensor([3]), 0)},
    "a mask of booleans": lambda f: {**f, "attention_mask": f["attention_mask"].bool()},
    "integers of 16 bits": lambda f: {name: tensor.short() for name, tensor in f.items()},
    "every second column": lambda f: {name: tensor.repeat_interleave(2, 1)[:, ::2] for name, tensor in f.items()},
}


@pytest.fixture(scope="module")
def sessions(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tiny_ir: Callable[..., Artifact]
) -> Iterator[dict[str, Any]]:
    """Yield sessions of one model on every installed backend, with and without buckets."""
    onnx, weights = tiny_artifact(), weights_of(resolve(tiny_folder()))
    ways = {
        "cpu": (onnx, RunPreferences(backend="cpu")),
        "openvino": (onnx, RunPreferences(backend="openvino")),
        "openvino's own format": (tiny_ir(), RunPreferences(backend="openvino")),
        "pytorch": (weights, RunPreferences(backend="pytorch")),
        "cpu with buckets": (onnx, RunPreferences(backend="cpu", options=SessionOptions(buckets=(8, 16)))),
        "openvino with buckets": (onnx, RunPreferences(backend="openvino", options=SessionOptions(buckets=(8, 16)))),
        "openvino in steps": (onnx, RunPreferences(backend="openvino", options=SessionOptions(pad_to_multiple_of=8))),
    }
    opened = {name: open_plan(make_plan(artifact, settings)) for name, (artifact, settings) in ways.items()}
    yield {name: plan.sessions["model"] for name, plan in opened.items()}
    for plan in opened.values():
        plan.close()


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_equal_on_every_backend(sessions: dict[str, Any], name: str) -> None:
    wrong = WRONG[name]
    expected = {who: session.run(right())["logits"] for who, session in sessions.items()}
    errors = {}
    for who, session in sessions.items():
        with pytest.raises(AccelError) as caught:
            session.run(wrong.feeds(right()), **(wrong.more or {}))
        errors[who] = (type(caught.value), str(caught.value))
        assert caught.value.fix
        assert torch.equal(session.run(right())["logits"], expected[who]), "a refused call leaves nothing behind"
    assert len(set(errors.values())) == 1, errors


@pytest.mark.parametrize("name", ODD)
def test_unusual_inputs_are_refused_or_equal_pytorch(sessions: dict[str, Any], name: str) -> None:
    feeds = ODD[name](right())
    expected = sessions["pytorch"].run(feeds)["logits"]
    answered = 0
    for who, session in sessions.items():
        before = session.run(right())["logits"]
        try:
            logits = session.run(feeds)["logits"]
        except AccelError:
            pass
        else:
            answered += 1
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4, msg=who)
        assert torch.equal(session.run(right())["logits"], before), who
    assert answered >= 4, "only what a runtime cannot answer is refused"


def test_closed_sessions_raise_the_same_error(tiny_artifact: Callable[..., Artifact], tiny_folder: Any) -> None:
    messages = set()
    for artifact, backend in (
        (tiny_artifact(), "cpu"),
        (tiny_artifact(), "openvino"),
        (weights_of(resolve(tiny_folder())), "pytorch"),
    ):
        opened = open_plan(make_plan(artifact, RunPreferences(backend=backend)))
        opened.close()
        with pytest.raises(accel.AccelError) as caught:
            opened.sessions["model"].run(right())
        messages.add(str(caught.value))
    assert len(messages) == 1


# The tests below use image models.


def picture(side: int = 64, batch: int = 2) -> Feeds:
    return {"pixel_values": torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(side))}


def with_value(value: float) -> Feeds:
    feeds = picture()
    feeds["pixel_values"][0, 0, 2, 3] = value
    return feeds


def convolutions() -> Any:
    """Return a small ConvNeXt with random weights."""
    config = transformers.ConvNextConfig(depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_labels=3, image_size=64)
    return rescale(transformers.ConvNextForImageClassification(config)).eval()


@pytest.fixture(scope="module")
def of_pictures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfPictures]:
    """Yield a function that returns an image model for any image size, and its sessions on ONNX Runtime and OpenVINO."""
    opened = []

    @functools.cache
    def get(name: str) -> tuple[Any, Any, Any]:
        model = convolutions() if name == "convnext" else tiny_picture_model(name)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder / "weights")
        sessions = []
        for backend, format in (("cpu", "onnx"), ("openvino", "openvino_ir")):
            artifact = accel.export(folder / "weights", folder / backend, format=format)
            opened.append(open_plan(make_plan(artifact, RunPreferences(backend=backend))))
            sessions.append(opened[-1].sessions["model"])
        return model, sessions[0], sessions[1]

    yield get
    for plan in opened:
        plan.close()


@pytest.mark.thorough
@pytest.mark.parametrize("sides", [(64,), (64, 96), (96, 64, 96)])
@pytest.mark.parametrize("outputs", [None, ("logits",)])
def test_session_works_after_a_too_small_image(
    of_pictures: OfPictures, sides: tuple[int, ...], outputs: tuple[str, ...] | None
) -> None:
    model, *sessions = of_pictures("convnext")
    for session in sessions:
        for side in sides:
            session.run(picture(side), outputs=outputs)
        with pytest.raises(AccelError):
            session.run(picture(1), outputs=outputs)
        for side in (*reversed(sides), *sides):
            with torch.inference_mode():
                expected = model(**picture(side)).logits
            torch.testing.assert_close(
                session.run(picture(side), outputs=outputs)["logits"], expected, atol=1e-5, rtol=1e-4
            )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["convnext", pytest.param("segformer", marks=pytest.mark.thorough)])
def test_non_finite_pixels_are_refused_or_equal_pytorch(of_pictures: OfPictures, name: str, value: float) -> None:
    model, *sessions = of_pictures(name)
    with torch.inference_mode():
        expected, right_one = model(**with_value(value)).logits, model(**picture()).logits
    for session in sessions:
        for outputs in (None, ("logits",)):
            try:
                logits = session.run(with_value(value), outputs=outputs)["logits"]
            except InputError:
                pass
            else:
                torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4, equal_nan=True)
            torch.testing.assert_close(
                session.run(picture(), outputs=outputs)["logits"], right_one, atol=1e-4, rtol=1e-4
            )


def test_large_pixels_whose_sum_overflows_are_accepted(of_pictures: OfPictures) -> None:
    _, _, session = of_pictures("convnext")
    large = {"pixel_values": torch.full((2, 3, 64, 64), 3e38)}
    assert session.run(large)["logits"].shape == (2, 3)


# The tests below pass encoder outputs to a decoder.

WRONG_BESIDE: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "of one row": lambda name, tensor: tensor[:1],
    "of a row more": lambda name, tensor: torch.cat([tensor, tensor[:1]]),
    "of one token": lambda name, tensor: tensor.narrow(tensor.ndim - 2 if tensor.ndim > 2 else 1, 0, 1),
    "of another rank": lambda name, tensor: tensor[None],
}


@pytest.fixture(scope="module")
def decoders(generator: Callable[..., Artifact]) -> Iterator[Callable[[str], Any]]:
    """Yield a function that opens BART's decoder on a backend. The session of the decoder has a KV cache."""

    @functools.cache
    def opened(backend: str) -> Any:
        plan = open_plan(make_plan(generator("bart", backend), RunPreferences(backend=backend)))
        closing.callback(plan.close)
        return plan.sessions["decoder"]

    with contextlib.ExitStack() as closing:
        yield opened


@pytest.mark.parametrize("wrong", WRONG_BESIDE)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("openvino", marks=pytest.mark.thorough)])
def test_encoder_outputs_must_fit_the_decoder(backend: str, wrong: str, decoders: Callable[[str], Any]) -> None:
    session = decoders(backend)
    sizes = {"batch": 2, "sequence": 3, "total": 3, "encoder_sequence": 5}
    feeds: Feeds = {}
    for spec in session.inputs:
        if spec.pair is None:
            shape = [sizes[axis] if isinstance(axis, str) else axis for axis in spec.shape if axis != "kept"]
            draw = torch.Generator().manual_seed(0)
            floats = spec.dtype == "float32"
            feeds[spec.name] = torch.randn(shape, generator=draw) if floats else torch.ones(shape, dtype=torch.int64)
            if spec.shape == ("kept",):
                feeds[spec.name] = torch.tensor([2])
    expected = session.run(feeds, state=session.new_state(2))["logits"]
    tried = [name for name in feeds if name.startswith(("encoder", "cross"))]
    assert tried
    for name in tried:
        with pytest.raises(InputError) as caught:
            session.run({**feeds, name: WRONG_BESIDE[wrong](name, feeds[name])}, state=session.new_state(2))
        # If two inputs have different sizes for the same axis, the error may name either input.
        assert name in str(caught.value) or "'encoder_sequence'" in str(caught.value)
        assert caught.value.fix
        assert torch.equal(session.run(feeds, state=session.new_state(2))["logits"], expected)
