"""Tests of the generation loop inside Triton: it returns the same tokens as the local pipeline, with any other rows in
the batch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import ConfigError, TaskError

pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from tokenizers import Tokenizer

from accel.artifact.json_reading import read_json
from accel.deploying.triton import deploy
from accel.deploying.triton.served.text_decoder import TextDecoder
from accel.deploying.triton.served.tokens import InvalidRequestError, NonFiniteOutputError

from .families import FAMILIES, LONG, SHORT, save_family
from .families import PROMPTS as BYTE_PROMPTS

QUICK = ("bloom",)
PROMPTS = ["the card", "where is my new bank account in paris", "pay", "i can not transfer cash", "a"]


class Text:
    """Result of one request: pieces of text, and errors."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ended: list[Exception | None] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def decoder_of(artifact: Artifact, folder: Path) -> TextDecoder:
    """Deploy an artifact and return the `TextDecoder` of its repository."""
    repository = deploy(artifact.path, folder / "out", name="decoder")
    version = repository.path / "decoder" / "1"
    settings = read_json(version / "settings.json")
    session = onnxruntime.InferenceSession(str(version / settings["graph"]), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Any) -> dict[str, Any]:
        return dict(zip(names, session.run(names, dict(feeds)), strict=True))

    return TextDecoder(run, Tokenizer.from_file(str(version / "tokenizer.json")), settings)


@pytest.fixture(scope="session")
def decoders(
    generator: Callable[..., Artifact], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TextDecoder]:
    """Return a function that creates the decoder of a model family."""
    return lambda family="llama": decoder_of(generator(family), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="session")
def exported(shared: Callable[..., Path]) -> Callable[[str], Artifact]:
    """Return a function that returns the export of a decoder in `FAMILIES`. The first call for a family exports its
    decoder.
    """

    def get(family: str) -> Artifact:
        name = f"decoder-{family}"
        source = shared(f"{name}-source", lambda folder: save_family(folder, family))
        return Artifact.load(shared(name, lambda folder: accel.export(source, folder, task="text-generation")))

    return get


@pytest.fixture(scope="session")
def decoder(decoders: Callable[..., TextDecoder]) -> TextDecoder:
    return decoders()


def start(decoder: TextDecoder, prompt: str, cancelled: Callable[[], bool] = lambda: False, **options: Any) -> Text:
    """Add a request to the running batch and return its result object."""
    text = Text()
    row = decoder.read(prompt, options, send=text.pieces.append, done=text.ended.append, cancelled=cancelled)
    decoder.add(row)
    return text


def finish(decoder: TextDecoder) -> None:
    while decoder.rows:
        decoder.step()


def expected_text(artifact: Artifact, prompt: str, new: int) -> str:
    pipe = accel.pipeline("text-generation", str(artifact.path))
    generated = pipe(prompt, max_new_tokens=new, do_sample=False, return_full_text=False)
    return str(generated[0]["generated_text"])


def test_nan_ends_only_its_row(decoder: TextDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    good = start(decoder, "pay", max_new_tokens=4)
    run = decoder._run

    def spoiled(feeds: Any) -> dict[str, Any]:
        outputs = run(feeds)
        outputs["logits"][-1] = np.nan
        return outputs

    monkeypatch.setattr(decoder, "_run", spoiled)
    bad = start(decoder, "a", max_new_tokens=4)
    assert isinstance(bad.ended[0], NonFiniteOutputError)
    monkeypatch.undo()
    finish(decoder)
    assert (good.ended, bad.pieces) == ([None], [])


def check_family(decoder: TextDecoder, artifact: Artifact, prompts: Sequence[str] = PROMPTS) -> None:
    texts = [start(decoder, prompt, max_new_tokens=6 + i) for i, prompt in enumerate(prompts[:3])]
    decoder.step()
    decoder.step()
    texts += [start(decoder, prompt, max_new_tokens=9 + i) for i, prompt in enumerate(prompts[3:])]
    finish(decoder)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text.ended == [None]
        assert text.text == expected_text(artifact, prompt, 6 + i)


def test_joining_rows_equal_single_generations(decoder: TextDecoder, generator: Callable[..., Artifact]) -> None:
    check_family(decoder, generator("llama"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "family", ["gpt2", "gpt-neox", "mistral", "opt", "phi3", "qwen3", "mixtral", "gemma3", "olmo3"]
)
def test_other_decoder_families(
    decoders: Callable[..., TextDecoder], generator: Callable[..., Artifact], family: str
) -> None:
    check_family(decoders(family), generator(family))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.thorough)
        for family in FAMILIES
        if family != LONG
    ],
)
def test_decoders_with_byte_tokenizers(exported: Callable[[str], Artifact], tmp_path: Path, family: str) -> None:
    check_family(decoder_of(exported(family), tmp_path), exported(family), BYTE_PROMPTS)


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["weight-int4", "weight-int8", "dynamic-int8"])
@pytest.mark.parametrize("family", ["bloom", "gpt-neo", "qwen 2"])
def test_quantized_decoders(exported: Callable[[str], Artifact], tmp_path: Path, family: str, scheme: str) -> None:
    """With dynamic-int8, each prompt runs alone, because rows of a batch share quantization scales. With other schemes,
    the prompts run in one batch.
    """
    quantized = accel.quantize(exported(family), tmp_path / "quantized", scheme=scheme)
    decoder = decoder_of(quantized, tmp_path)
    for prompts in [[prompt] for prompt in BYTE_PROMPTS] if scheme == "dynamic-int8" else [BYTE_PROMPTS]:
        check_family(decoder, quantized, prompts)


@pytest.mark.thorough
def test_texts_end_before_longrope_changes_its_angles(
    exported: Callable[[str], Artifact], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = exported(LONG)
    decoder = decoder_of(artifact, tmp_path)
    assert "LongRoPE" in caplog.text
    texts = [start(decoder, prompt, max_new_tokens=100) for prompt in BYTE_PROMPTS]
    with pytest.raises(InvalidRequestError, match=f"at most {SHORT} tokens"):
        start(decoder, "dog " * SHORT)
    finish(decoder)
    for prompt, text in zip(BYTE_PROMPTS, texts, strict=True):
        room = SHORT - len(decoder._tokenizer.encode(prompt).ids)
        assert text.text == expected_text(artifact, prompt, room)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mamba", "t5"])
def test_decoders_with_other_states_are_refused(
    generator: Callable[..., Artifact], tmp_path: Path, family: str
) -> None:
    with pytest.raises(TaskError) as caught:
        deploy(generator(family).path, tmp_path / "out")
    assert caught.value.fix


def test_sampled_tokens_depend_only_on_the_seed(decoder: TextDecoder) -> None:
    options = {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9, "max_new_tokens": 8}
    alone = start(decoder, PROMPTS[0], seed=7, **options)
    finish(decoder)
    others = [start(decoder, prompt, seed=seed, **options) for seed, prompt in enumerate(PROMPTS[1:])]
    again = start(decoder, PROMPTS[0], seed=7, **options)
    different = start(decoder, PROMPTS[0], seed=8, **options)
    finish(decoder)
    assert again.text == alone.text != different.text
    assert all(text.ended == [None] for text in others)


def test_default_top_k_equals_transformers(decoder: TextDecoder) -> None:
    """The default `top_k` equals the default of `generate` in transformers."""
    row = decoder.read(PROMPTS[0], {"do_sample": True}, send=lambda _: None, done=lambda _: None)
    assert row.options["top_k"] == transformers.GenerationConfig._get_default_generation_params()["top_k"]


def test_stop_text_ends_the_text_before_it(decoder: TextDecoder) -> None:
    uncut = start(decoder, PROMPTS[0], max_new_tokens=12)
    finish(decoder)
    words = uncut.text.split()
    stop = " " + next(word for i, word in enumerate(words) if i > 1)
    cut = start(decoder, PROMPTS[0], max_new_tokens=12, stop=stop)
    finish(decoder)
    assert cut.text == uncut.text[: uncut.text.index(stop)]
    assert cut.ended == [None]


def test_disconnected_client_frees_its_row(decoder: TextDecoder) -> None:
    checks: list[int] = []
    alone = start(decoder, PROMPTS[1], max_new_tokens=6)
    finish(decoder)
    disconnected = start(decoder, PROMPTS[0], lambda: not checks.append(1) and len(checks) > 2, max_new_tokens=50)
    other = start(decoder, PROMPTS[1], max_new_tokens=6)
    finish(decoder)
    assert len(checks) == 3
    assert disconnected.ended == [None]
    assert other.text == alone.text


def test_failure_ends_all_rows_but_not_the_loop(decoder: TextDecoder) -> None:
    texts = [start(decoder, prompt) for prompt in PROMPTS[:2]]
    decoder.fail(RuntimeError("no memory"))
    assert [str(text.ended[0]) for text in texts] == ["no memory"] * 2
    after = start(decoder, PROMPTS[0], max_new_tokens=3)
    finish(decoder)
    assert after.ended == [None]


@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 0}, {"temperature": -1}, {"top_p": 2.0}, {"stop": ""}, {"beams": 2}, {"do_sample": 1}],
    ids=str,
)
def test_invalid_parameters_are_refused(decoder: TextDecoder, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        start(decoder, PROMPTS[0], **options)


def test_unused_padding_columns_are_dropped(decoder: TextDecoder) -> None:
    start(decoder, " ".join(PROMPTS), max_new_tokens=1 + 1)
    start(decoder, PROMPTS[2], max_new_tokens=8)
    width = decoder._mask.shape[1]
    decoder.step()
    assert decoder._mask.shape[1] < width
    assert {values.shape[2] for values in decoder._past.values()} == {decoder._mask.shape[1]}
    finish(decoder)


@pytest.mark.parametrize(
    ("file", "change", "field"),
    [
        ("generation_config.json", {"num_beams": 4}, "num_beams"),
        ("tokenizer_config.json", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
    ],
)
def test_unsupported_settings_are_refused(
    generator: Callable[..., Artifact], tmp_path: Path, file: str, change: dict[str, Any], field: str
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(generator("llama").path, folder)
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    Artifact.accept_files(folder)
    with pytest.raises(ConfigError, match=field):
        deploy(folder, tmp_path / "out")
