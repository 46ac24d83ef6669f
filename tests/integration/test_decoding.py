"""Tests of accel's own loop for greedy decoding and sampling: it generates the same tokens as transformers, without
transformers' loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import InputError
from accel.models.base import model_class
from accel.testing.generative_models import tiny_generator
from accel.testing.models import VOCABULARY

Artifacts = Callable[..., Artifact]
ROWS = {"input_ids": torch.tensor([[0, 0, 11, 12], [13, 14, 15, 16], [0, 17, 18, 19]])}
ROWS["attention_mask"] = (ROWS["input_ids"] > 0).long()
ONE = {name: rows[1:2] for name, rows in ROWS.items()}
ALIKE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95},
    "drawn of all": {"do_sample": True, "top_k": 0},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "many a row": {"do_sample": True, "num_return_sequences": 2},
    "in parts": {"prefill_chunk_size": 3},
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers' own decoding loop raise an error for accel models, so that a test fails if the loop is used."""
    theirs = transformers.GenerationMixin._sample

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not isinstance(self, accel.ORTModel), "transformers' loop ran"
        return theirs(self, *args, **kwargs)

    monkeypatch.setattr(transformers.GenerationMixin, "_sample", refuse)


def model_of(artifact: Artifact) -> Any:
    return model_class(artifact.task)(artifact)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        *(("llama", name) for name in ALIKE),
        ("bart", "greedy"),
        *(pytest.param("bart", name, marks=pytest.mark.thorough) for name in ALIKE if name != "greedy"),
        *(pytest.param("t5", name, marks=pytest.mark.thorough) for name in ALIKE),
    ],
)
@pytest.mark.usefixtures("alone")
def test_tokens_equal_transformers(family: str, chosen: str, generator: Artifacts) -> None:
    choices = ALIKE[chosen]
    if family != "llama" and "prefill_chunk_size" in choices:
        pytest.skip("transformers supports prefill in chunks only for decoders")
    original, model = tiny_generator(family), model_of(generator(family))
    for inputs in (ONE, ROWS, {"input_ids": ONE["input_ids"]}):
        torch.manual_seed(7)
        free = original.generate(**inputs, max_new_tokens=12, **choices)
        # Choose an end token that some rows generate early, and other rows generate late or never.
        end = int(free[0, -6])
        for ends in (None, end, [end, int(free[-1, -3])]):
            torch.manual_seed(7)
            expected = original.generate(**inputs, max_new_tokens=12, eos_token_id=ends, pad_token_id=3, **choices)
            torch.manual_seed(7)
            tokens = model.generate(**inputs, max_new_tokens=12, eos_token_id=ends, pad_token_id=3, **choices)
            assert torch.equal(tokens, expected)


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.usefixtures("alone")
def test_later_tokens_use_prepared_steps(backend: str, generator: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens after the first token use `Session.steps`, also when buffers grow, rows are padded, or rows have ended.

    The KV cache is correct for later calls.
    """
    if backend == "openvino":
        pytest.importorskip("openvino")
    monkeypatch.setattr("accel_plugins.ortkit.runtime.state._MIN_CAPACITY", 64)
    original, model = tiny_generator("llama"), model_of(generator("llama", backend))
    calls, run = [], type(model.decoder_step.session).run
    monkeypatch.setattr(
        type(model.decoder_step.session), "run", lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs)
    )
    cache, settings = model.new_cache(), {"max_new_tokens": 150, "pad_token_id": 3}
    free = original.generate(**ROWS, eos_token_id=None, **settings)
    end = int(free[1, 40])
    tokens = model.generate(**ROWS, past_key_values=cache, eos_token_id=end, **settings)
    assert torch.equal(tokens, original.generate(**ROWS, eos_token_id=end, **settings))
    assert len(calls) == 2
    assert cache.get_seq_length() == tokens.shape[1] - 1
    mask = torch.cat([ROWS["attention_mask"], torch.ones((3, tokens.shape[1] - 4), dtype=torch.int64)], dim=1)
    with torch.inference_mode():
        expected = original(
            input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    after = model(
        input_ids=tokens[:, -1:], attention_mask=mask, position_ids=mask.sum(1, keepdim=True) - 1, past_key_values=cache
    )
    torch.testing.assert_close(after.logits[:, -1], expected[:, -1], atol=1e-4, rtol=1e-3)


def test_invalid_pad_token_is_refused_at_each_step(generator: Artifacts) -> None:
    model = model_of(generator("llama"))
    free = model.generate(**ROWS, max_new_tokens=12, eos_token_id=None)
    end = next(int(token) for token in free[1, 6:] if (free[0, 4:] != token).any())
    with pytest.raises(InputError, match="contains the value -1"):
        model.generate(**ROWS, max_new_tokens=12, eos_token_id=end, pad_token_id=-1)


@pytest.mark.usefixtures("alone")
def test_streamer_receives_each_token_and_may_keep_it(generator: Artifacts) -> None:
    model, streamed, ended = model_of(generator("llama")), [], []

    class Streamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
        def put(self, value: torch.Tensor) -> None:
            streamed.append(value)

        def end(self) -> None:
            ended.append(len(streamed))

    # Generate more tokens than the session prepares at once.
    tokens = model.generate(**ONE, max_new_tokens=70, eos_token_id=None, streamer=Streamer())
    assert [value.shape for value in streamed] == [(1, 4), *[(1,)] * 70]
    assert torch.cat([value.flatten() for value in streamed]).tolist() == tokens[0].tolist()
    assert ended == [71]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("do_sample", [False, True])
def test_streamer_may_change_its_tokens(do_sample: bool, generator: Artifacts) -> None:
    class Streamer(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]  # transformers is untyped here
        calls = 0

        def put(self, value: torch.Tensor) -> None:
            # The first call of `put` passes the prompt.
            self.calls += 1
            if self.calls > 1:
                value.fill_(6)

        def end(self) -> None:
            pass

    model, streamed = model_of(generator("llama")), []
    for streamer in (None, Streamer()):
        torch.manual_seed(0)
        streamed.append(
            model.generate(**ONE, max_new_tokens=6, eos_token_id=None, do_sample=do_sample, streamer=streamer).tolist()
        )
    assert streamed[0] == streamed[1]


def test_unlimited_output_length_allocates_no_mask(generator: Artifacts) -> None:
    """Generation with an unlimited output length uses transformers' own loop, because accel's loop would allocate an
    attention mask for the whole length.
    """
    model = model_of(generator("llama"))
    expected = model.generate(**ONE, max_new_tokens=6, eos_token_id=None)
    end = int(expected[0, -1])
    tokens = model.generate(**ONE, max_new_tokens=10**9, eos_token_id=end)
    assert torch.equal(tokens, expected[:, : tokens.shape[1]])


@pytest.mark.usefixtures("alone")
def test_conversation_continues_with_the_cache(generator: Artifacts) -> None:
    model, original = model_of(generator("llama")), tiny_generator("llama")
    cache = model.new_cache()
    ids = ONE["input_ids"]
    for _ in range(3):
        tokens = model.generate(ids, past_key_values=cache, max_new_tokens=4, eos_token_id=None)
        assert torch.equal(tokens, original.generate(ids, max_new_tokens=4, eos_token_id=None))
        assert cache.get_seq_length() == tokens.shape[1] - 1
        ids = torch.cat([tokens, torch.randint(4, VOCABULARY, (1, 3))], dim=1)


class _After(transformers.StoppingCriteria):  # type: ignore[misc]  # transformers is untyped here
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 8)


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"use_cache": False},
        {"stopping_criteria": transformers.StoppingCriteriaList([_After()])},
    ],
    ids=["scores", "no cache", "criteria"],
)
def test_other_generation_settings_use_transformers_loop(options: dict[str, Any], generator: Artifacts) -> None:
    model, original = model_of(generator("llama")), tiny_generator("llama")
    outputs, expected = (variant.generate(**ROWS, max_new_tokens=9, **options) for variant in (model, original))
    if isinstance(outputs, torch.Tensor):
        assert torch.equal(outputs, expected)
    else:
        assert torch.equal(outputs.sequences, expected.sequences)
        assert len(outputs.scores) == 9
        torch.testing.assert_close(outputs.scores, expected.scores, atol=1e-4, rtol=1e-4)


def test_overridden_prepare_inputs_is_called_at_each_step(generator: Artifacts) -> None:
    calls = []

    class Own(accel.ORTModelForCausalLM):
        def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model = Own(generator("llama"))
    expected = tiny_generator("llama").generate(**ONE, max_new_tokens=5, eos_token_id=None)
    assert torch.equal(model.generate(**ONE, max_new_tokens=5, eos_token_id=None), expected)
    assert len(calls) == 5
