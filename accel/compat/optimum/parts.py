"""The graphs of a model with an encoder, as Optimum's scripts read them: `model.encoder.session`, `model.parts`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...artifact.home import accel_home
from ...artifact.manifest import Artifact
from ...backends import registry
from ...errors import ArtifactNotFoundError, ConfigError, InputError
from ...interfaces.folder_reader import Part
from ...interfaces.protocols import Session
from ...models.encoder_decoder import EncoderOf
from .constants import (
    ONNX_DECODER_MERGED_NAME,
    ONNX_DECODER_NAME,
    ONNX_DECODER_WITH_PAST_NAME,
    ONNX_ENCODER_NAME,
)

if TYPE_CHECKING:
    from .models import Words

PART_NAMES = {
    "encoder_file_name": ONNX_ENCODER_NAME,
    "decoder_file_name": ONNX_DECODER_NAME,
    "decoder_with_past_file_name": ONNX_DECODER_WITH_PAST_NAME,
}
"""Optimum's arguments that name the graphs of a model with an encoder, with their usual values."""


def file_name_of(given: Mapping[str, str | None]) -> str | None:
    """One graph's name for those of all parts, which are found by it; nothing where all are the usual ones.

    Raises:
        ConfigError: They are of different variants.
    """
    names = [given.get(name) or usual for name, usual in PART_NAMES.items() if given.get(name) or "past" not in name]
    if set(names) <= {*PART_NAMES.values(), ONNX_DECODER_MERGED_NAME}:
        return given.get("decoder_file_name")
    if len({_ending(name) for name in names}) > 1:
        raise ConfigError(
            f"{', '.join(names)} are graphs of different variants.",
            fix="name graphs with one ending, as encoder_model_quantized.onnx and decoder_model_quantized.onnx.",
        )
    return names[1]


def files_before(
    artifact: Artifact, file_name: str | None, subfolder: str, variant: str | None = None
) -> dict[Part, Path]:
    """Another tool's files that an artifact was brought to our form from, by what each holds.

    Args:
        artifact: The artifact.
        file_name, subfolder, variant: What was asked for when it was loaded.

    Returns:
        Nothing for an artifact whose graphs are its own files.
    """
    source = artifact.manifest.source
    if artifact.manifest.steps or source is None or artifact.path.parent != accel_home() / "exports":
        return {}
    folder = Path(source.id)
    asked = [f"{subfolder}/{file_name}", file_name] if file_name else []
    inside = next((name for name in asked if (folder / name).is_file()), None)
    encoder = any(component.name == "encoder" for component in artifact.components)
    reader = registry.folder_reader([inside or artifact.components[0].file])
    try:
        parts = {} if reader is None else reader.parts(folder, file_name=inside, variant=variant, encoder=encoder)
    except ArtifactNotFoundError:  # the folder has changed since
        return {}
    only = None if encoder else inside
    return {part: folder / file for part, file in parts.items() if only in (None, file)}


def _ending(name: str) -> str:
    """What follows Optimum's name of a part: `_quantized.onnx`."""
    stems = (usual.removesuffix(".onnx") for usual in (ONNX_DECODER_MERGED_NAME, *PART_NAMES.values()))
    known = [stem for stem in stems if name.startswith(stem)]
    return name.removeprefix(max(known, key=len)) if known else name


def runtime_of(session: Session, backend: str) -> Any:
    """The runtime's own session.

    Raises:
        InputError: This backend shows none.
    """
    native = getattr(session, "runtime", None)
    if native is None:
        raise InputError(f"The backend {backend!r} shows no session.", fix="call the model itself.")
    return native


class ORTPart:
    """One graph of a model: its file, its runtime's session, its inputs and outputs by name.

    Args:
        model: The model that it is a part of.
        name: The component's name.
        reads: What another tool's file for it may hold, the likeliest first.
    """

    def __init__(self, model: Words, name: str, reads: tuple[Part, ...] = ()) -> None:
        self._of, self._name, self._reads = model, name, reads

    @property
    def _ours(self) -> Session:
        return self._of.sessions[self._name]

    @property
    def path(self) -> Path:
        """The graph's file; of a graph that was brought to our form, the file that it was."""
        before = self._of.files_before()
        if (part := next((part for part in self._reads if part in before), None)) is not None:
            return before[part]
        artifact = self._of.artifact
        return artifact.path / artifact.component(self._name).file

    @property
    def session(self) -> Any:
        """The runtime's own session."""
        return runtime_of(self._ours, self._of.backend)

    @property
    def input_names(self) -> dict[str, int]:
        """Inputs, with their positions."""
        return {spec.name: place for place, spec in enumerate(self._ours.inputs)}

    @property
    def output_names(self) -> dict[str, int]:
        """Outputs, with their positions."""
        return {spec.name: place for place, spec in enumerate(self._ours.outputs)}

    @property
    def providers(self) -> list[str]:
        """The model's."""
        return self._of.providers

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._of.device

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return self._of.dtype

    @property
    def use_io_binding(self) -> bool:
        """The model's."""
        return self._of.use_io_binding


class ORTEncoder(ORTPart, EncoderOf):
    """The encoder, which may be called."""

    def __init__(self, model: Words, session: Session, main_input_name: str) -> None:
        ORTPart.__init__(self, model, "encoder", ("encoder",))
        EncoderOf.__init__(self, session, main_input_name)


class ORTDecoderForSeq2Seq(ORTPart):
    """The decoder: one graph with and without keys and values of earlier tokens.

    Attributes:
        is_merged: What was asked for as `use_merged` when the model was loaded, or what another tool wrote.
    """

    def __init__(self, model: Words, *, is_merged: bool, with_past: bool = False) -> None:
        super().__init__(model, "decoder", ("merged", "following" if with_past else "first"))
        self.is_merged = is_merged

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        cache: Any = None,
    ) -> Any:
        """Run the decoder once.

        Args:
            input_ids: `(batch, new)` tokens behind those in the cache.
            encoder_hidden_states: `(batch, encoder_sequence, hidden)`; not needed behind a cache.
            encoder_attention_mask: `(batch, encoder_sequence)`.
            attention_mask: `(batch, cached + new)`.
            position_ids: `(batch, new)`, for models that have them.
            past_key_values: What an earlier call returned; continued in place.
            use_cache: Whether to return the cache (default).
            cache: `past_key_values` by its name in transformers 5.24.
        """
        return self._of.forward(
            decoder_input_ids=input_ids,
            encoder_outputs=None if encoder_hidden_states is None else (encoder_hidden_states,),
            attention_mask=encoder_attention_mask,
            decoder_attention_mask=attention_mask,
            decoder_position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            cache=cache,
        )

    __call__ = forward
