"""Reference cases for the graphs of generating models. A case is a prompt and the following calls with the same KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import ExportError
from ..interfaces.family_registry import family_of
from ..interfaces.tracing_wrapper import Tensors
from ..upstream.cache_names import CACHE_NAME
from ..upstream.output_silencing import quiet
from .export_source import Source
from .generation_graphs import (
    ENCODER_MASK,
    CrossAttentionKeyValueProjection,
    CrossDecoder,
    Encoder,
    split,
    vision_language,
)
from .graph_names import graph_name
from .noise import MOST_STORED, Noise
from .patch_samples import PATCHES
from .reference_cases import Case, max_difference, reference_cases, tolerance
from .samples import pad_id
from .tracer import first_lines


def cases_by_part(source: Source, *, parts: Sequence[Source] | None = None, few: bool = False) -> dict[str, list[Case]]:
    """Return the reference cases of all graphs of a model, by the name of the graph.

    Args:
        source: The model.
        parts: The result of `split(source)`, if it is available.
        few: Whether a decoder gets two cases instead of four. If weights are streamed, each case reads all of them.
    """
    return {
        part.name: decoder_cases(source, part, few=few) if part.stateful else reference_cases(part)
        for part in (split(source) if parts is None else parts)
    }


def decoder_cases(source: Source, part: Source, *, few: bool = False) -> list[Case]:
    """Return reference cases of a decoder graph: a prefill, a call with several new tokens, and a call with one new token.

    The expected logits are computed in one call of the PyTorch model on the complete sequence, without a KV cache. So the comparison
    detects an error of the cache, such as lost or shifted tokens. `_stepwise` describes the only exception.
    """
    cases = []
    plans: list[tuple[int, tuple[int, ...]]] = [(1, (4, 3, 1)), (3, (9, 1, 1)), (2, (1, 1)), (1, (40, 1))]
    plans = [(2, (9, 3, 1)), (1, (20, 1))] if few else plans
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
            # M2M100 counts only tokens other than the padding token, so a padding token inside the text would shift all later positions.
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
            fixed, logits, encoder_inputs = _complete_sequence(source, part, ids, mask, positions, seed, image, lengths)
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
            sources: dict[str, Mapping[str, torch.Tensor | Noise]] = {"encoder": encoder_inputs}
            if image is not None:
                sources = {"embedding": {"input_ids": ids[:, start:end]}}
            feeds |= {"attention_mask": mask[:, :end], **fixed}
            if "position_ids" in part.example:
                feeds["position_ids"] = positions[:, start:end]
            # Logits at padding positions are not used, so they are not compared.
            first = max(padding - start, 0)
            expected = logits[:, start + first : end]
            if "logits_to_keep" in part.example:
                feeds["logits_to_keep"] = torch.arange(first, length)
            skip = 0 if "logits_to_keep" in feeds else first
            sizes = {"batch": batch, "sequence": length, "total": end}
            following = Case(
                sizes, feeds, {"logits": expected}, stateful=True, skip=skip, then=following, sources=sources
            )
            end = start
        assert following is not None
        cases.append(following)
    return cases


class _Image:
    """An image for reference cases. It writes image tokens into token ids, and returns embeddings with the image's embeddings."""

    def __init__(self, source: Source) -> None:
        vision, embedding, _ = vision_language(source, None)
        self.token = int(source.config.image_token_id)
        self.around = family_of(source.config).tokens_around_images(source.config)
        pixels = vision.example["pixel_values"]
        # If the processor splits images into tiles, the PyTorch model reads pixels with an additional axis for the tiles.
        self.pixels = pixels[:, None] if family_of(source.config).tiles else pixels
        self._embedding = embedding.model
        with torch.inference_mode(), quiet():
            self.features = vision.model(pixel_values=pixels)["image_features"].clone()

    @classmethod
    def of(cls, source: Source, part: Source) -> _Image | None:
        """Return an image for a decoder that reads embeddings, else `None`."""
        return cls(source) if "inputs_embeds" in part.example else None

    def place(self, ids: torch.Tensor) -> None:
        """Replace image tokens that were drawn at random, and write the image's tokens after the first token of each row.

        If the rows are too short for the image, only the random image tokens are replaced.
        """
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
        embedded: torch.Tensor = self._embedding(input_ids=ids)["inputs_embeds"].clone()
        embedded[ids == self.token] = self.features.repeat(int((ids == self.token).sum()) // len(self.features), 1)
        return embedded


@torch.inference_mode()
def _complete_sequence(
    source: Source,
    part: Source,
    ids: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    seed: int,
    image: _Image | None,
    lengths: tuple[int, ...],
) -> tuple[Tensors, torch.Tensor, Mapping[str, torch.Tensor | Noise]]:
    """Return the decoder inputs that are the same in all calls, the PyTorch model's logits of the complete sequence, and the inputs of
    the encoder.
    """
    model: Any = source.model
    with quiet():
        if not isinstance(part.model, CrossDecoder):
            optional = {"position_ids": positions} if "position_ids" in part.example else {}
            if image is not None and bool((ids == image.token).any()):
                optional["pixel_values"] = image.pixels.repeat_interleave(ids.shape[0], 0)
            return {}, model(input_ids=ids, attention_mask=mask, **optional).logits, {}
        sizes = {"batch": ids.shape[0], "sequence": 6}
        inputs = source.sample(sizes, seed=seed)
        encoder_inputs = {
            # Images and audio are too large to store in the probes of an artifact.
            name: Noise.like(tensor, seed)
            if tensor.is_floating_point() and tensor.numel() > MOST_STORED and name != PATCHES
            else tensor
            for name, tensor in inputs.items()
            if name != "decoder_input_ids"
        }
        inputs = {name: value.tensor() if isinstance(value, Noise) else value for name, value in encoder_inputs.items()}
        fixed: Tensors = {}
        encoded = Encoder(model, None)(**inputs)
        hidden = encoded["last_hidden_state"]
        cross = CrossAttentionKeyValueProjection(model, None)(encoder_hidden_states=hidden)
        fixed.update({graph_name(name): value for name, value in cross.items()})
        # Decoder graphs exported by other tools read the encoder's hidden states directly.
        fixed["encoder_hidden_states"] = hidden
        if ENCODER_MASK in part.example:
            fixed[ENCODER_MASK] = encoded.get(ENCODER_MASK, inputs["attention_mask"])
        optional = {"decoder_position_ids": positions} if "position_ids" in part.example else {}
        logits = model(**inputs, decoder_input_ids=ids, decoder_attention_mask=mask, **optional).logits
        padded = (mask == 0).any(1)
        if not optional and bool(padded.any()):
            # In a call with one token, LED ignores the mask, but the graph uses the mask. So both calls of this comparison have several
            # tokens.
            two = _stepwise(model, inputs, ids, mask, (lengths[0], sum(lengths[1:])))
            read = padded[:, None] & mask.bool()
            difference, scale = max_difference({"logits": two[read]}, {"logits": logits[read]})
            if difference > tolerance(None, source.dtype, scale):
                logits = logits.clone()
                logits[padded] = _stepwise(model, inputs, ids, mask, lengths)[padded]
        return fixed, logits, encoder_inputs


def _stepwise(
    model: Any, inputs: Tensors, ids: torch.Tensor, mask: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """Compute the logits of an encoder-decoder in several calls with transformers' KV cache, as `generate` does.

    Some decoders without a position input give other results with a KV cache than without it, if the prompt has padding. For example,
    M2M100 counts cached padding tokens as positions, but does not count padding tokens of the current call. For rows with padding of
    such models, the logits of this function are the expected logits. Rows without padding are always compared with one call on the
    complete sequence.
    """
    cache, start, logits = None, 0, []
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
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
