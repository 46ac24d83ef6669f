"""Tests of invalid and unusual inputs for all tasks, backends and buckets.

Each input raises an `InputError`, or the outputs equal PyTorch's outputs. In both cases, the next valid call works. If
PyTorch also rejects an input, the model must raise an error, because there is no correct output.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.config import SessionOptions
from accel.errors import InputError
from accel.testing.models import rescale, tiny_tokenizer
from accel_plugins.pytorch.upstream import cpp_compiler

Inputs = dict[str, Any]
Spoil = Callable[[Inputs], Inputs | None]
# The tolerance is for float32 outputs of order 1. Inputs that are rejected here gave differences from 0.7 to 7.8, or
# values that are not finite.
TOLERANCE = 1e-3
BUCKETS = (4, 16)
SOUNDS, PIXELS = "input_values", "pixel_values"


# Each kind of input is a function that changes valid inputs to invalid inputs. It returns `None` if the model has no
# input that it changes.


def change(name: str, how: Callable[[torch.Tensor], object]) -> Spoil:
    """Return a function that replaces the input `name` by the result of `how`."""
    return lambda inputs: {**inputs, name: how(inputs[name])} if name in inputs else None


def put(name: str, value: float, *places: Any) -> Spoil:
    """Return a function that writes `value` into the input `name` at `places`."""

    def spoil(inputs: Inputs) -> Inputs | None:
        if name not in inputs:
            return None
        changed = inputs[name].clone()
        changed[places] = value
        return {**inputs, name: changed}

    return spoil


def every(how: Callable[[torch.Tensor], object]) -> Spoil:
    """Return a function that replaces all inputs by the results of `how`."""
    return lambda inputs: {name: how(tensor) for name, tensor in inputs.items()}


def longer(inputs: Inputs) -> Inputs | None:
    """Repeat the inputs until they are longer than the model's number of positions."""
    if "input_ids" not in inputs:
        return None
    return {
        name: tensor.repeat_interleave(60, dim=1) if name in (*TEXTS, "bbox") else tensor
        for name, tensor in inputs.items()
    }


def without(name: str) -> Spoil:
    """Return a function that removes the input `name`."""
    return lambda inputs: (
        {other: tensor for other, tensor in inputs.items() if other != name} if name in inputs else None
    )


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values whose memory is not contiguous."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


TEXTS = ("input_ids", "attention_mask", "token_type_ids")
ROW = 1
KINDS: Mapping[str, Spoil] = {
    # The following wrong inputs are changed text inputs.
    "mask of fewer tokens": change("attention_mask", lambda mask: mask[:, :-2]),
    "mask of more tokens": change("attention_mask", lambda mask: torch.cat([mask, mask], 1)),
    "mask of one row": change("attention_mask", lambda mask: mask[:1]),
    "mask of more rows": change("attention_mask", lambda mask: torch.cat([mask, mask])),
    "one-dimensional mask": change("attention_mask", lambda mask: mask[0]),
    "mask hides a row": put("attention_mask", 0, ROW),
    "mask hides all rows": put("attention_mask", 0),
    "mask hides the first tokens": put("attention_mask", 0, ROW, slice(0, 3)),
    "mask hides tokens inside": put("attention_mask", 0, ROW, slice(2, 4)),
    "mask of twos": put("attention_mask", 2),
    "mask with a two": put("attention_mask", 2, ROW, slice(0, 3)),
    "mask with a negative number": put("attention_mask", -1, ROW, slice(0, 3)),
    "mask with a large number": put("attention_mask", 2**40, ROW, 2),
    "mask of booleans": change("attention_mask", lambda mask: mask.bool()),
    "mask of small integers": change("attention_mask", lambda mask: mask.to(torch.int8)),
    "mask of floats": change("attention_mask", lambda mask: mask.float()),
    "mask of NaN": change("attention_mask", lambda mask: mask.float() * math.nan),
    "ids below": put("input_ids", -1, ROW, 2),
    "ids of labels": put("input_ids", -100, ROW, 2),
    "ids beyond the vocabulary": put("input_ids", 5000, ROW, 2),
    "ids beyond 32 bits": put("input_ids", 2**40, ROW, 2),
    "ids of floats": change("input_ids", lambda ids: ids.float()),
    "ids of NaN": change("input_ids", lambda ids: ids.float() * math.nan),
    "ids of complex numbers": change("input_ids", lambda ids: ids.to(torch.complex64)),
    "ids of 32 bits": change("input_ids", lambda ids: ids.int()),
    "ids of 8 bits": change("input_ids", lambda ids: ids.to(torch.uint8)),
    "one-dimensional ids": change("input_ids", lambda ids: ids[0]),
    "three-dimensional ids": change("input_ids", lambda ids: ids[None]),
    "ids without tokens": change("input_ids", lambda ids: ids[:, :0]),
    "ids as ragged lists": change("input_ids", lambda ids: [[5, 6, 7], [5]]),
    "ids as text": change("input_ids", lambda ids: "where is my card"),
    "ids as an array of objects": change("input_ids", lambda ids: np.array([[5, 6], [7, None]], dtype=object)),
    "ids without values": change("input_ids", lambda ids: ids.to("meta")),
    "sparse ids": change("input_ids", lambda ids: ids.to_sparse()),
    "types beyond the model's": put("token_type_ids", 7, ROW, 2),
    "negative types": put("token_type_ids", -1, ROW, 2),
    "types of fewer tokens": change("token_type_ids", lambda types: types[:, :-2]),
    "boxes beyond the page": put("bbox", 5000, ROW, 2),
    "more tokens than positions": longer,
    # The following kinds change images and audio.
    "images of one channel": change(PIXELS, lambda images: images[:, :1]),
    "images of another size": change(PIXELS, lambda images: images[..., :-8]),
    "images without a batch": change(PIXELS, lambda images: images[0]),
    "images without columns": change(PIXELS, lambda images: images[..., :0]),
    "images of bytes": change(PIXELS, lambda images: images.clamp(0, 1).mul(255).to(torch.uint8)),
    "images of half precision": change(PIXELS, lambda images: images.half().float().half()),
    "images with NaN": put(PIXELS, math.nan, ROW, 0, 3, 3),
    "images with infinity": put(PIXELS, math.inf, ROW, 0, 3, 3),
    "sounds without a batch": change(SOUNDS, lambda sounds: sounds[0]),
    "sounds of three axes": change(SOUNDS, lambda sounds: sounds[:, None]),
    "sounds of no samples": change(SOUNDS, lambda sounds: sounds[:, :0]),
    "sounds of two samples": every(lambda tensor: tensor[:, :2]),
    "sounds with NaN": put(SOUNDS, math.nan, ROW, 40),
    "sounds with infinity": put(SOUNDS, math.inf, ROW, 40),
    "sounds of complex numbers": change(SOUNDS, lambda sounds: sounds.to(torch.complex64)),
    # The following kinds change all inputs.
    "no rows": every(lambda tensor: tensor[:0]),
    "one number": every(lambda tensor: tensor.reshape(-1)[0]),
    "strided tensors": every(strided),
    "nothing": lambda inputs: {},
    "no ids": without("input_ids"),
    "no images": without(PIXELS),
    "no sounds": without(SOUNDS),
    "an unknown input": lambda inputs: {**inputs, "input_idz": torch.ones(2, 3)},
}


# The code below describes the tested models.


@dataclass(frozen=True, slots=True)
class Subject:
    """Model on which all kinds of inputs are tested.

    Attributes:
        model: Model class of accel.
        original: Model class of transformers.
        family: Name of the tiny model (see the fixture `saved_folder`).
        task: Name of the task.
        inputs: Function that creates valid inputs with two rows. The second row is padded.
        answer: Name of the output that is compared.
        padded: Whether buckets can pad the model's sequences.
    """

    model: str
    original: str
    family: str
    task: str
    inputs: Callable[[], Inputs]
    answer: str = "logits"
    padded: bool = True


def texts(*names: str) -> Callable[[], Inputs]:
    def make() -> Inputs:
        ids = torch.randint(6, 110, (2, 8), generator=torch.Generator().manual_seed(1))
        # Put the end token at position 5, because CLIP's text embedding uses the position of the end token.
        ids[:, 5] = 3
        mask = torch.ones_like(ids)
        mask[ROW, 6:] = 0
        boxes = torch.arange(64).reshape(2, 8, 4)
        tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids), "bbox": boxes}
        tensors["decoder_input_ids"] = ids[:, :3]
        return {name: tensors[name] for name in names}

    return make


def pictures(rows: int = 2, size: int = 32) -> torch.Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(2))


def sounds(samples: int = 400) -> Inputs:
    values = torch.randn(2, samples, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, samples, dtype=torch.int64)
    mask[ROW, samples * 3 // 4 :] = 0
    return {SOUNDS: values, "attention_mask": mask}


SUBJECTS: Mapping[str, Subject] = {
    "text-classification": Subject(
        "ORTModelForSequenceClassification", "AutoModelForSequenceClassification", "bert", "text-classification",
        texts("input_ids", "attention_mask", "token_type_ids"),
    ),
    "token-classification": Subject(
        "ORTModelForTokenClassification", "AutoModelForTokenClassification", "t5-encoder", "token-classification",
        texts("input_ids", "attention_mask"),
    ),
    "documents": Subject(
        "ORTModelForDocumentQuestionAnswering", "AutoModelForDocumentQuestionAnswering", "layoutlm", "document-question-answering",
        texts("input_ids", "attention_mask", "token_type_ids", "bbox"), "start_logits",
    ),
    "image-classification": Subject(
        "ORTModelForImageClassification", "AutoModelForImageClassification", "vit", "image-classification",
        lambda: {PIXELS: pictures()}, padded=False,
    ),
    "ctc": Subject("ORTModelForCTC", "AutoModelForCTC", "wav2vec2-layer", "ctc", sounds, padded=False),
    "text-generation": Subject(
        "ORTModelForCausalLM", "AutoModelForCausalLM", "llama", "text-generation", texts("input_ids", "attention_mask"),
        padded=False,
    ),
    "text2text-generation": Subject(
        "ORTModelForSeq2SeqLM", "AutoModelForSeq2SeqLM", "t5", "text2text-generation",
        texts("input_ids", "attention_mask", "decoder_input_ids"), padded=False,
    ),
    "image-text": Subject(
        "ORTModelForZeroShotImageClassification", "CLIPModel", "clip", "zero-shot-image-classification",
        lambda: {**texts("input_ids", "attention_mask")(), PIXELS: pictures()}, "logits_per_image", padded=False,
    ),
}  # fmt: skip

_GENERATORS = ("llama", "t5")


def save_t5_encoder(folder: Path) -> None:
    """Save a T5 encoder with a token classification head. T5 adds its mask to the attention scores, so a fully masked
    row attends to all tokens.
    """
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, num_labels=3, use_cache=False,
        bos_token_id=2, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    model: Any = rescale(transformers.T5ForTokenClassification(config)).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


_OWN: Mapping[str, Callable[[Path], None]] = {"t5-encoder": save_t5_encoder}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread in PyTorch, because tiny models would wait for threads on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved_folder(
    shared: Callable[..., Path],
    tiny_folder: Callable[..., Path],
    tiny_artifact: Callable[..., Artifact],
    tiny_ir: Callable[..., Artifact],
    generator: Callable[..., Artifact],
) -> Callable[[Subject, str], Path]:
    """Return a function that returns the folder of a subject as a transformers folder (`torch`), an ONNX artifact or an
    OpenVINO artifact.
    """

    def get(subject: Subject, form: str) -> Path:
        family, task = subject.family, subject.task
        if family in _GENERATORS:
            artifact = generator(family, "openvino" if form == "openvino" else "cpu")
            return artifact.path if form != "torch" else artifact.path.parent / f"generator-{family}"
        if family in _OWN:
            source = shared(family, _OWN[family])
            if form == "torch":
                return source
            backend = "openvino" if form == "openvino" else "cpu"
            return shared(f"{family}-{form}", lambda out: accel.export(source, out, task=task, backend=backend))
        if form == "torch":
            return tiny_folder(family, task)
        return (tiny_ir if form == "openvino" else tiny_artifact)(family, task).path

    return get


def answers(subject: Subject, original: Any, inputs: Inputs) -> torch.Tensor | None:
    """Return PyTorch's output, or `None` if PyTorch raises an error. Integers are first converted to int64, because
    accel accepts every integer type.
    """
    widened = {
        name: value.long()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.uint8, torch.int8, torch.int32) and name in TEXTS
        else value
        for name, value in inputs.items()
    }
    try:
        with torch.inference_mode():
            values: torch.Tensor = original(**widened)[subject.answer]
    # The model's own code may raise any exception.
    except Exception:  # noqa: BLE001
        return None
    return values


def difference(inputs: Inputs, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference at tokens that are not padding, divided by the largest absolute value if that value
    is above 1.

    NaN counts as equal to NaN.
    """
    if actual.shape != expected.shape:
        return math.inf
    mask = inputs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == expected.shape[:2] and mask.any():
        actual, expected = actual[mask != 0], expected[mask != 0]
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    gap = torch.where(same, torch.zeros_like(actual), (actual - expected).abs()).nan_to_num(nan=math.inf)
    finite = expected[expected.isfinite()]
    # Divide by the largest value, because T5's logits are of order 10.
    scale = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    return float(gap.max()) / scale if gap.numel() else 0.0


def outcome(subject: Subject, model: Any, original: Any, inputs: Inputs) -> str:
    """Return the outcome of a call as a short text. A text that begins with `wrong:` is a failure."""
    try:
        answer = model(**copy.copy(inputs))[subject.answer]
    except InputError:
        return "refused"
    # Any exception that is not an `InputError` is a failure.
    except Exception as error:  # noqa: BLE001
        return f"wrong: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
    expected = answers(subject, original, inputs)
    if expected is None:
        return "wrong: answered, and PyTorch refuses it"
    gap = difference(inputs, torch.as_tensor(answer), expected)
    return "as PyTorch" if gap <= TOLERANCE else f"wrong: off by {gap:.2g}"


def tried(subject: Subject, model: Any, original: Any) -> dict[str, str]:
    """Return the outcome of each kind of input. Each outcome includes the outcome of a valid call after the invalid
    call.
    """
    right = subject.inputs()
    outcomes = {"right": outcome(subject, model, original, right)}
    for kind, spoil in KINDS.items():
        spoiled = spoil(right)
        # Skip kinds of audio inputs if the model reads no audio.
        if spoiled is None or (kind.startswith("sounds") and SOUNDS not in right):
            continue
        outcomes[kind] = outcome(subject, model, original, spoiled)
        after = outcome(subject, model, original, right)
        if after != "as PyTorch":
            outcomes[kind] += f"; and then the right call is wrong: {after}"
    return outcomes


def check(saved_folder: Callable[[Subject, str], Path], task: str, backend: str, form: str, *, buckets: bool) -> None:
    subject = SUBJECTS[task]
    options = SessionOptions(buckets=BUCKETS if buckets else (), threads=1)
    original = getattr(transformers, subject.original).from_pretrained(saved_folder(subject, "torch")).eval()
    model = getattr(accel, subject.model).from_pretrained(
        saved_folder(subject, form), backend=backend, session_options=options
    )
    outcomes = tried(subject, model, original)
    model.close()
    wrong = [f"{kind}: {word}" for kind, word in outcomes.items() if "wrong" in word]
    assert not wrong, "\n".join(wrong)
    assert outcomes["right"] == "as PyTorch"
    assert sum(word == "refused" for word in outcomes.values()) >= 5


@pytest.mark.parametrize("buckets", [False, True], ids=["plain", "buckets"])
@pytest.mark.parametrize("backend", ["cpu", "openvino", "pytorch"])
def test_text_classification(saved_folder: Callable[[Subject, str], Path], backend: str, buckets: bool) -> None:
    """Test text classification with an ONNX artifact and a transformers folder. This test runs in every test run,
    because it is fast.
    """
    check(saved_folder, "text-classification", backend, "torch" if backend == "pytorch" else "onnx", buckets=buckets)


@pytest.mark.thorough
@pytest.mark.parametrize("buckets", [False, True], ids=["plain", "buckets"])
@pytest.mark.parametrize(
    ("backend", "form"),
    [("cpu", "onnx"), ("openvino", "onnx"), ("openvino", "openvino"), ("pytorch", "torch")],
    ids=["cpu", "openvino-onnx", "openvino-ir", "pytorch"],
)
@pytest.mark.parametrize("task", list(SUBJECTS))
def test_every_task(
    saved_folder: Callable[[Subject, str], Path], task: str, backend: str, form: str, buckets: bool
) -> None:
    if buckets and not SUBJECTS[task].padded:
        pytest.skip("inputs of this task cannot be padded to buckets")
    if SUBJECTS[task].family in _GENERATORS and (backend, form) == ("openvino", "onnx"):
        pytest.skip("OpenVINO generates text only with graphs in the format openvino_ir")
    check(saved_folder, task, backend, form, buckets=buckets)


@pytest.mark.thorough
@pytest.mark.skipif(cpp_compiler() is None, reason="no C++ compiler is installed")
@pytest.mark.parametrize("task", ["text-classification", "image-classification"])
def test_compiled_models(saved_folder: Callable[[Subject, str], Path], task: str) -> None:
    check(saved_folder, task, "inductor", "torch", buckets=False)


def save_conformer(folder: Path) -> None:
    """Save a Wav2Vec2-Conformer with relative positions for 700 frames, which is longer than the inputs that an export
    is validated with.
    """
    torch.manual_seed(0)
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 3), conv_stride=(5, 4, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=20,
        max_source_positions=700, feat_extract_norm="layer", conv_depthwise_kernel_size=7,
    )  # fmt: skip
    model: Any = rescale(transformers.Wav2Vec2ConformerForCTC(config)).eval()
    model.save_pretrained(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(("backend", "form"), [("cpu", "onnx"), ("openvino", "openvino"), ("pytorch", "torch")])
def test_audio_longer_than_positions(shared: Callable[..., Path], backend: str, form: str) -> None:
    source = shared("conformer", save_conformer)
    folder = source
    if form != "torch":
        folder = shared(f"conformer-{form}", lambda out: accel.export(source, out, task="ctc", backend=backend))
    model = accel.ORTModelForCTC.from_pretrained(folder, backend=backend)
    original = transformers.AutoModelForCTC.from_pretrained(source).eval()
    longest = model.artifact.component().max_sizes["samples"]
    assert int(original._get_feat_extract_output_lengths(longest)) == 700
    for samples, expected_outcome in ((longest, "as PyTorch"), (longest + 1, "refused"), (3 * longest, "refused")):
        inputs = sounds(samples)
        assert outcome(SUBJECTS["ctc"], model, original, inputs) == expected_outcome
    assert outcome(SUBJECTS["ctc"], model, original, sounds()) == "as PyTorch"


def test_prompts_without_a_token(generator: Callable[..., Artifact]) -> None:
    """A prompt without any token raises an error. If a prompt is read in chunks, the first chunk may contain only
    padding.
    """
    model = accel.ORTModelForCausalLM.from_pretrained(
        generator("llama").path, session_options=SessionOptions(threads=1)
    )
    inputs = texts("input_ids", "attention_mask")()
    inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    inputs["attention_mask"][ROW, :5] = 0
    full = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    parts = model.generate(**inputs, max_new_tokens=4, do_sample=False, prefill_chunk_size=4)
    assert torch.equal(full, parts)
    inputs["attention_mask"][ROW] = 0
    for settings in ({}, {"prefill_chunk_size": 4}):
        with pytest.raises(InputError, match="Row 1 of the input 'attention_mask' contains only zeros"):
            model.generate(**inputs, max_new_tokens=4, **settings)
    with pytest.raises(InputError, match="Row 1 of the input 'attention_mask' contains only zeros"):
        model(**inputs)
    unchecked = accel.ORTModelForCausalLM.from_pretrained(
        model.artifact.path, session_options=SessionOptions(threads=1, check_inputs=False)
    )
    assert unchecked(**inputs).logits.shape[:2] == inputs["input_ids"].shape
