"""Reference cases of the graphs of generating models: a prompt, and the calls that follow it with the same KV cache."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family_registry import family_of
from ..interfaces.wrapper import Tensors
from ..upstream.cache_names import CACHE_NAME
from ..upstream.library_output import quiet
from .generation_graphs import (
    ENCODER_MASK,
    CrossAttention,
    CrossDecoder,
    Encoder,
    split,
    vision_language,
)
from .graph_names import graph_name
from .reference_cases import Case, max_difference, reference_cases, tolerance
from .samples import pad_id
from .source import Source
from .tracer import first_lines


def cases_by_part(source: Source) -> dict[str, list[Case]]:
    """Return reference cases of every graph of a source, by the graph's name."""
    return {
        part.name: decoder_cases(source, part) if part.stateful else reference_cases(part) for part in split(source)
    }


def decoder_cases(source: Source, part: Source) -> list[Case]:
    """Return reference cases of a decoder graph: prefill, several tokens after a past, and one token.

    The expected logits come from one call of the PyTorch model on the whole sequence without a cache, so the comparison detects
    a cache that loses or shifts tokens. `_stepwise` describes the one exception.
    """
    cases = []
    plans: list[tuple[int, tuple[int, ...]]] = [(1, (4, 3, 1)), (3, (9, 1, 1)), (2, (1, 1)), (1, (40, 1))]
    image = _Image.of(source, part)
    if image is not None:
        plans.append((1, (len(image.features) + 5, 1)))
    for seed, (batch, lengths) in enumerate(plans, start=1):
        total = sum(lengths)
        limit = part.max_sizes.get("total", total)
        if total > limit:
            continue
        generator = torch.Generator().manual_seed(seed)
        vocabulary = int(source.config.get_text_config(decoder=True).vocab_size)
        ids = torch.randint(0, vocabulary, (batch, total), generator=generator)
        if isinstance(part.model, CrossDecoder):
            # M2M100 counts non-padding tokens: a padding token inside the text would shift the following positions.
            ids[ids == pad_id(source.config)] = (pad_id(source.config) + 1) % vocabulary
        mask = torch.ones_like(ids)
        # Left padding in every second row, as in batched generation.
        padding = min(2, lengths[0] - 1)
        mask[1::2, :padding] = 0
        ids[mask == 0] = pad_id(source.config)
        if image is not None:
            image.place(ids)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        try:
            fixed, whole = _whole(source, part, ids, mask, positions, seed, image, lengths)
        # The model's own code may raise any exception.
        except Exception as error:
            raise ExportError(
                f"The PyTorch model {source.architecture} failed on an input of {batch} rows and {total} tokens: "
                f"{type(error).__name__}: {first_lines(error)}",
                fix="check that the model runs in transformers with an input of this size, then export it again.",
            ) from error
        following: Case | None = None
        end = total
        for length in reversed(lengths):
            start = end - length
            read = {"input_ids": ids} if image is None else {"inputs_embeds": image.embedded(ids)}
            feeds: Tensors = {name: value[:, start:end] for name, value in read.items()}
            feeds |= {"attention_mask": mask[:, :end], **fixed}
            if "position_ids" in part.example:
                feeds["position_ids"] = positions[:, start:end]
            # Logits at padding positions are not used, so they are not compared.
            first = max(padding - start, 0)
            expected = whole[:, start + first : end]
            if "logits_to_keep" in part.example:
                feeds["logits_to_keep"] = torch.arange(first, length)
            skip = 0 if "logits_to_keep" in feeds else first
            sizes = {"batch": batch, "sequence": length, "total": end}
            following = Case(sizes, feeds, {"logits": expected}, stateful=True, skip=skip, then=following)
            end = start
        assert following is not None
        cases.append(following)
    return cases


class _Image:
    """An image in prompts: image tokens in the token ids, and the image's embeddings at their positions."""

    def __init__(self, source: Source) -> None:
        vision, embedding, _ = vision_language(source, None)
        self.token = int(source.config.image_token_id)
        self.around = family_of(source.config).tokens_around_images(source.config)
        pixels = vision.example["pixel_values"]
        # The whole model takes pixels with an additional axis for tiles.
        self.pixels = pixels[:, None] if family_of(source.config).tiles else pixels
        self._embedding = embedding.model
        with torch.inference_mode(), quiet():
            self.features = vision.model(pixel_values=pixels)["image_features"].clone()

    @classmethod
    def of(cls, source: Source, part: Source) -> _Image | None:
        """Return an image for a decoder that reads embeddings, else `None`."""
        return cls(source) if "inputs_embeds" in part.example else None

    def place(self, ids: torch.Tensor) -> None:
        """Replace random image tokens, and insert the image's tokens after the first token if the rows are long enough."""
        special = {self.token, *self.around}
        ids[torch.isin(ids, torch.tensor(sorted(special)))] = next(
            i for i in range(len(special) + 1) if i not in special
        )
        if ids.shape[1] > len(self.features) + 2:
            ids[:, 1 : 1 + len(self.features)] = self.token
            if self.around:
                ids[:, 0], ids[:, 1 + len(self.features)] = self.around[0], self.around[-1]

    @torch.inference_mode()
    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the token embeddings, with the image's embeddings at the positions of the image tokens."""
        found: torch.Tensor = self._embedding(input_ids=ids)["inputs_embeds"].clone()
        found[ids == self.token] = self.features.repeat(int((ids == self.token).sum()) // len(self.features), 1)
        return found


@torch.inference_mode()
def _whole(
    source: Source,
    part: Source,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    seed: int,
    image: _Image | None,
    lengths: tuple[int, ...],
) -> tuple[Tensors, torch.Tensor]:
    """Return the inputs that are the same in all calls, and the logits of the whole sequence."""
    model: Any = source.model
    with quiet():
        if not isinstance(part.model, CrossDecoder):
            optional = {"position_ids": positions} if "position_ids" in part.example else {}
            if image is not None and bool((ids == image.token).any()):
                optional["pixel_values"] = image.pixels.repeat_interleave(ids.shape[0], 0)
            return {}, model(input_ids=ids, attention_mask=mask, **optional).logits
        sizes = {"batch": ids.shape[0], "sequence": 6}
        inputs = source.sample(sizes, seed=seed)
        inputs = {name: tensor for name, tensor in inputs.items() if name != "decoder_input_ids"}
        fixed: Tensors = {}
        encoded = Encoder(model, None)(**inputs)
        hidden = encoded["last_hidden_state"]
        cross = CrossAttention(model, None)(encoder_hidden_states=hidden)
        fixed.update({graph_name(name): value for name, value in cross.items()})
        # Decoder graphs exported by other tools read the encoder's hidden states directly.
        fixed["encoder_hidden_states"] = hidden
        if ENCODER_MASK in part.example:
            fixed[ENCODER_MASK] = encoded.get(ENCODER_MASK, inputs["attention_mask"])
        optional = {"decoder_position_ids": positions} if "position_ids" in part.example else {}
        logits = model(**inputs, decoder_input_ids=ids, decoder_attention_mask=mask, **optional).logits
        padded = (mask == 0).any(1)
        if not optional and bool(padded.any()):
            # With one token per call, LED ignores the mask, but the graph does not. So this compares two calls of several tokens.
            two = _stepwise(model, inputs, ids, mask, (lengths[0], sum(lengths[1:])))
            read = padded[:, None] & mask.bool()
            difference, scale = max_difference({"logits": two[read]}, {"logits": logits[read]})
            if difference > tolerance(None, source.dtype, scale):
                logits = logits.clone()
                logits[padded] = _stepwise(model, inputs, ids, mask, lengths)[padded]
        return fixed, logits


def _stepwise(
    model: Any, inputs: Tensors, ids: torch.Tensor, mask: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Compute the logits of an encoder-decoder in calls of the given lengths, with transformers' cache, as `generate` does.

    These are the expected logits of rows with a padded prompt if the decoder has no position input and its results differ with
    and without a cache: M2M100 counts the non-padding tokens of the call, but all cached tokens. Rows without padding are always
    compared with the call on the whole sequence.
    """
    cache, start, found = None, 0, []
    for length in lengths:
        end = start + length
        output = model(
            **inputs,
            decoder_input_ids=ids[:, start:end],
            decoder_attention_mask=mask[:, :end],
            use_cache=True,
            **{CACHE_NAME: cache},
        )
        cache, start = getattr(output, CACHE_NAME), end
        found.append(output.logits)
    return torch.cat(found, dim=1)
