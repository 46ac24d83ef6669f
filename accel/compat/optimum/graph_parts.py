"""Objects for the single graphs of an encoder-decoder model, with the attributes of Optimum, such as `model.encoder.session`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...artifact.home_folder import accel_home
from ...artifact.manifest import Artifact
from ...backends import registry
from ...errors import ArtifactNotFoundError, ConfigError, InputError
from ...interfaces.folder_reader import Part
from ...interfaces.protocols import Session
from ...models.encoder_decoder import GenerateEncoder
from .constants import (
    ONNX_DECODER_MERGED_NAME,
    ONNX_DECODER_NAME,
    ONNX_DECODER_WITH_PAST_NAME,
    ONNX_ENCODER_NAME,
)

if TYPE_CHECKING:
    from .models import OptimumModelMixin

PART_NAMES = {
    "encoder_file_name": ONNX_ENCODER_NAME,
    "decoder_file_name": ONNX_DECODER_NAME,
    "decoder_with_past_file_name": ONNX_DECODER_WITH_PAST_NAME,
}
"""Names of Optimum's arguments for the graph files of an encoder-decoder model, with the default file names."""


def file_name_of(arguments: Mapping[str, str | None]) -> str | None:
    """Return one file name from which accel can find all graph files of a model. Return `None` if all file names are the defaults.

    Raises:
        ConfigError: The file names have different endings, so they belong to different variants of the model.
    """
    names = [
        arguments.get(name) or usual for name, usual in PART_NAMES.items() if arguments.get(name) or "past" not in name
    ]
    if set(names) <= {*PART_NAMES.values(), ONNX_DECODER_MERGED_NAME}:
        return arguments.get("decoder_file_name")
    if len({_ending(name) for name in names}) > 1:
        raise ConfigError(
            f"The files {', '.join(names)} belong to different variants of the model, because their names have different endings.",
            fix="pass file names with the same ending, such as encoder_model_quantized.onnx and decoder_model_quantized.onnx.",
        )
    return names[1]


def files_before(
    artifact: Artifact, file_name: str | None, subfolder: str, variant: str | None = None
) -> dict[Part, Path]:
    """Return the original files of another tool from which accel converted an artifact, by part.

    Args:
        artifact: The artifact.
        file_name, subfolder, variant: The arguments of `from_pretrained`.

    Returns:
        The paths of the files. Empty if accel did not convert the artifact from files of another tool.
    """
    source = artifact.manifest.source
    if artifact.manifest.steps or source is None or artifact.path.parent != accel_home() / "exports":
        return {}
    folder = Path(source.id)
    requested = [f"{subfolder}/{file_name}", file_name] if file_name else []
    inside = next((name for name in requested if (folder / name).is_file()), None)
    if inside is None and subfolder and (folder / subfolder).is_dir():
        folder /= subfolder
    encoder = any(component.name == "encoder" for component in artifact.components)
    reader = registry.folder_reader([Path(inside or artifact.components[0].file).name])
    try:
        parts = {} if reader is None else reader.parts(folder, file_name=inside, variant=variant, encoder=encoder)
    except ArtifactNotFoundError:  # The original files were deleted after the conversion.
        return {}
    only = None if encoder else inside
    return {part: folder / file for part, file in parts.items() if only in (None, file)}


def _ending(name: str) -> str:
    """Return the part of a file name after Optimum's standard name of a graph, such as `_quantized.onnx`."""
    stems = (usual.removesuffix(".onnx") for usual in (ONNX_DECODER_MERGED_NAME, *PART_NAMES.values()))
    matching = [stem for stem in stems if name.startswith(stem)]
    return name.removeprefix(max(matching, key=len)) if matching else name


def runtime_of(session: Session, backend: str) -> Any:
    """Return the session object of the runtime, such as an `onnxruntime.InferenceSession`, for a session of accel.

    Raises:
        InputError: The backend does not provide its runtime's session.
    """
    native = getattr(session, "runtime", None)
    if native is None:
        raise InputError(
            f"The backend {backend!r} does not provide access to the session of its runtime.",
            fix="call the model instead of its session.",
        )
    return native


class ORTPart:
    """One graph of a model, with its file, the session of the runtime, and the names of its inputs and outputs.

    Args:
        model: The model that contains the graph.
        name: Name of the graph's component in the artifact.
        reads: Names of graphs in the other tool's folder (`encoder`, `decoder`, ...) that `path` may return. It returns the path of
            the first graph that exists.
    """

    def __init__(self, model: OptimumModelMixin, name: str, reads: tuple[Part, ...] = ()) -> None:
        self._of, self._name, self._reads = model, name, reads

    @property
    def _ours(self) -> Session:
        return self._of.sessions[self._name]

    @property
    def path(self) -> Path:
        """Path of the graph's file. If accel converted the graph from a file of another tool, path of that file."""
        before = self._of.files_before()
        if (part := next((part for part in self._reads if part in before), None)) is not None:
            return before[part]
        artifact = self._of.artifact
        return artifact.path / artifact.component(self._name).file

    @property
    def session(self) -> Any:
        """The session object of the runtime for this graph."""
        return runtime_of(self._ours, self._of.backend)

    @property
    def input_names(self) -> dict[str, int]:
        """Indices of the inputs, by input name."""
        return {spec.name: place for place, spec in enumerate(self._ours.inputs)}

    @property
    def output_names(self) -> dict[str, int]:
        """Indices of the outputs, by output name."""
        return {spec.name: place for place, spec in enumerate(self._ours.outputs)}

    @property
    def providers(self) -> list[str]:
        """The execution providers of the model."""
        return self._of.providers

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._of.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the model."""
        return self._of.dtype

    @property
    def use_io_binding(self) -> bool:
        """The setting `use_io_binding` of the model, which has no effect."""
        return self._of.use_io_binding


class ORTEncoder(ORTPart, GenerateEncoder):
    """Encoder of an encoder-decoder model, which can be called."""

    def __init__(self, model: OptimumModelMixin, session: Session, main_input_name: str) -> None:
        ORTPart.__init__(self, model, "encoder", ("encoder",))
        GenerateEncoder.__init__(self, session, main_input_name)


class ORTDecoderForSeq2Seq(ORTPart):
    """Decoder of an encoder-decoder model, which can be called with or without a KV cache. Both calls use the same graph.

    Attributes:
        is_merged: Whether the model uses Optimum's merged decoder (`use_merged`).
    """

    def __init__(self, model: OptimumModelMixin, *, is_merged: bool, with_past: bool = False) -> None:
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
        """Run one step of the decoder.

        Args:
            input_ids: New tokens after the cached tokens, `(batch, new)`.
            encoder_hidden_states: Output of the encoder, `(batch, encoder_sequence, hidden)`. It is not required if `past_key_values` is
                passed.
            encoder_attention_mask: Padding mask of the encoder, `(batch, encoder_sequence)`.
            attention_mask: Padding mask of cached and new tokens, `(batch, cached + new)`.
            position_ids: Position ids, `(batch, new)`, for models with this input.
            past_key_values: The KV cache of an earlier call, which is updated in place.
            use_cache: Whether the output contains the KV cache. `None` means True.
            cache: The same argument as `past_key_values`, under its name in transformers 5.24.
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
