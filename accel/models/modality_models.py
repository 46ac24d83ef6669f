"""Base classes of models of texts, images and sounds; each class defines the signature of `forward`, which pipelines inspect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..capture.sound_samples import samples_for
from ..errors import InputError, TaskError
from ..interfaces.protocols import Session
from .base import ORTModel


class TextModel(ORTModel):
    """A model with text inputs."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, token_type_ids: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on integer inputs `(batch, sequence)`."""
        if token_type_ids is None:
            # Leave out an input that is `None`: `_run` would check all inputs again, which takes 1.3 microseconds with warm caches.
            return self._run({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        return self._run(
            {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids, **inputs}
        )


class ImageModel(ORTModel):
    """A model with image inputs."""

    def forward(self, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on floating-point images, `(batch, channels, height, width)` unless the task defines another shape."""
        return self._run({"pixel_values": pixel_values, **inputs})


class ImageTextSimilarityModel(ORTModel):
    """A model that compares images with texts."""

    def forward(self, input_ids: Any = None, pixel_values: Any = None, **inputs: Any) -> Any:
        """Run the graph on `input_ids: (texts, sequence)` and `pixel_values: (batch, channels, height, width)`."""
        return self._run({"input_ids": input_ids, "pixel_values": pixel_values, **inputs})


class SoundModel(ORTModel):
    """A model of sounds, which are waveforms (`input_values: (batch, samples)`) or spectrograms (`input_features`).

    `attention_mask` has the shape `(batch, samples)` or `(batch, frames)`. If it is left out, the model assumes that no row is padded, as
    in transformers.
    """

    def _open(self) -> None:
        super()._open()
        self._least = samples_for(1, self.config) or 0

    def forward(
        self, input_values: Any = None, attention_mask: Any = None, input_features: Any = None, **inputs: Any
    ) -> Any:
        """Run the graph on waveforms or spectrograms, depending on the graph; the first positional argument can be either of them.

        Raises:
            InputError: The inputs are not sounds, or the waveforms are too short for the model's convolutions.
        """
        sounds = input_values if input_features is None else input_features
        shape = sounds.shape if hasattr(sounds, "shape") else ()
        if shape and shape[-1] < max(self._least, 1):
            raise InputError(
                f"The sound has {shape[-1]} samples per row, but the model needs at least {max(self._least, 1)}.",
                fix="leave out sounds that are too short, or pad them with zeros: "
                f"feature_extractor(..., padding='max_length', max_length={max(self._least, 1)}).",
            )
        feeds = {self.main_input_name: sounds, "attention_mask": attention_mask, **inputs}
        if input_values is not None and input_features is not None:
            feeds["input_values"] = input_values
        return self._run({name: value for name, value in feeds.items() if value is not None})


class TwoGraphModel(ORTModel):
    """A model with two graphs; the second graph reads the outputs of the first.

    Attributes:
        components: Component names of the two graphs.
    """

    components: ClassVar[tuple[str, str]]

    def _open(self) -> None:
        super()._open()
        self._decoder = self._opened.sessions[self.components[1]]

    def watch(self, around: Callable[[str, Session], Session]) -> None:
        """Wrap the session of each component with `around(name, session)`, until the model is opened again."""
        first, second = self.components
        self._session = around(first, self._session)
        self._decoder = around(second, self._decoder)

    def _choose_output(self, names: Sequence[str]) -> Any:
        missing = set(self.components) - set(self._opened.sessions)
        if missing:
            raise TaskError(
                f"{self.artifact.path} contains the graphs {sorted(self._opened.sessions)}, but {type(self).__name__} also needs a graph "
                f"named {min(missing)!r}.",
                fix="load the folder with the ORTModelFor... class of the task that the model was exported for.",
            )
        return super()._choose_output(names)
