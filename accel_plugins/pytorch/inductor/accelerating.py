"""Accelerates a PyTorch model where it is: its `forward` goes through compiled code until it is restored."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from accel.backends.interfaces import Batches
from accel.config import AccelerateConfig, PrepareConfig
from accel.errors import ConfigError, InputError, PrepareError

from .engine import Engine
from .sizes import MASK

logger = logging.getLogger(__name__)

_METHODS = ("forward", "warmup", "restore", "acceleration", "_prepare_static_cache")
_VERSION = operator.attrgetter("_version")
# Static caches are as long as the longest answer so far, in steps of this: each length is compiled for.
_CACHE_STEP = 128
_NEW_TOKENS = 6


class Acceleration:
    """What runs an accelerated model, in place of its `forward`.

    Args:
        model: The model.
        config: How.
    """

    def __init__(self, model: Any, config: AccelerateConfig) -> None:
        self._model = model
        self._attention = _set_attention(model, config.attention)
        try:
            # Looked up before it is replaced: a bound method, or what somebody put there.
            self._forward: Callable[..., Any] = model.forward
            self._own = {name: model.__dict__[name] for name in _METHODS if name in model.__dict__}
            self.engine = Engine(model, self._forward, config)
        except BaseException:
            _set_attention(model, self._attention)
            raise
        functools.update_wrapper(self, self._forward)
        self.__signature__ = self.engine.signature
        self._generation: dict[str, Any] = {}
        self._weights = [*model.parameters(), *model.buffers()]
        self._seen = self._state()

    def _state(self) -> tuple[object, ...]:
        """What changes when weights are written to, replaced or moved."""
        ends = self._weights[:1] + self._weights[-1:]
        try:
            versions = sum(map(_VERSION, self._weights))
        except RuntimeError:
            # Made inside `inference_mode`, where PyTorch counts no changes.
            versions = -1
        return (versions, *((tensor.data_ptr(), tensor.device, tensor.dtype) for tensor in ends))

    def install(self) -> None:
        """Put it in the model's place."""
        model = self._model
        for name, value in {
            "forward": self, "warmup": self.warmup, "restore": self.restore, "acceleration": self,
        }.items():  # fmt: skip
            object.__setattr__(model, name, value)
        if callable(getattr(model, "can_generate", None)) and model.can_generate():
            self._use_static_cache()

    def _use_static_cache(self) -> None:
        """Let `generate` keep keys and values in tensors of a fixed size, as transformers does it itself, and leave
        compiling to us.
        """
        model = self._model
        settings = model.generation_config
        if settings.cache_implementation is not None or not getattr(model, "_can_compile_fullgraph", False):
            return
        for name, value in (("cache_implementation", "static"), ("disable_compile", True)):
            self._generation[name] = getattr(settings, name)
            setattr(settings, name, value)
        prepare = getattr(model, "_prepare_static_cache", None)
        if prepare is not None:

            @functools.wraps(prepare)
            def in_steps(*args: Any, **kwargs: Any) -> Any:
                if "max_cache_len" in kwargs:
                    kwargs["max_cache_len"] = -(-kwargs["max_cache_len"] // _CACHE_STEP) * _CACHE_STEP
                return prepare(*args, **kwargs)

            object.__setattr__(model, "_prepare_static_cache", in_steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, by compiled code.

        Raises:
            PrepareError: The model is being trained, or its weights are others than those it was compiled with.
        """
        if self._model.training:
            raise PrepareError(
                "An accelerated model is for inference, and this one is in training mode.",
                fix="call model.eval(), or model.restore() to train it.",
            )
        if self._state() != self._seen:
            raise PrepareError(
                "The weights were changed or moved since the model was accelerated, and compiled code has the old ones.",
                fix="call model.restore(), then accel.accelerate again.",
            )
        return self.engine(*args, **kwargs)

    def warmup(self, shapes: Iterable[Sequence[int] | Mapping[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Compile for these shapes now, check the answers and measure.

        Args:
            shapes: `(rows, tokens)` of texts, or example inputs by name. Of a model that generates, `(rows, tokens)` is the
                shape of a prompt.

        Returns:
            What was compiled: for each form its times in milliseconds, its difference, and what answers.

        Raises:
            PrepareError: On these shapes it is not faster than the model was, which is restored, or it differs.
        """
        engine = self.engine
        for shape in shapes:
            if isinstance(shape, Mapping):
                with torch.no_grad():
                    self(**shape)
                continue
            batch, length = _text_shape(shape)
            ids = self._tokens(batch, length)
            if self._generation:
                self._model.generate(
                    **ids, max_new_tokens=_NEW_TOKENS, min_new_tokens=_NEW_TOKENS, do_sample=False, num_beams=1
                )
                continue
            self(**ids)
        measured = [form for form in engine.forms.values() if form.ms is not None]
        slower = [form for form in measured if form.call is None]
        if slower and len(slower) == len(measured) and not engine.config.keep_slower:
            self.restore()
            raise PrepareError(
                "It is not faster than before: " + "; ".join(f"for {form.name} {form.why}" for form in slower) + ".",
                fix="try dtype= or quantization=, or pass keep_slower=True. The model is as it was.",
            )
        return engine.report()

    def _tokens(self, batch: int, length: int) -> dict[str, torch.Tensor]:
        vocabulary = getattr(self._model.config.get_text_config(), "vocab_size", None)
        if self._model.main_input_name != "input_ids" or vocabulary is None:
            raise ConfigError(
                f"{type(self._model).__name__} reads {self._model.main_input_name}, not texts of so many tokens.",
                fix="pass example inputs: warmup([{'pixel_values': images}]).",
            )
        first = min(10, vocabulary - 1)
        ids = torch.randint(first, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        return {name: t.to(self.engine.device) for name, t in (("input_ids", ids), (MASK, torch.ones_like(ids)))}

    def report(self) -> list[dict[str, Any]]:
        """Every form so far; as `warmup` returns it."""
        return self.engine.report()

    @property
    def compilations(self) -> int:
        """How many sizes were compiled for so far."""
        return self.engine.compilations

    def restore(self) -> torch.nn.Module:
        """The model as it was: its `forward`, its settings; its weights were never touched."""
        model: torch.nn.Module = self._model
        if model.__dict__.get("acceleration") is self:
            for name in _METHODS:
                if name in self._own:
                    object.__setattr__(model, name, self._own[name])
                else:
                    model.__dict__.pop(name, None)
            for name, value in self._generation.items():
                setattr(self._model.generation_config, name, value)
            _set_attention(model, self._attention)
        return model

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _no_copy()

    def __reduce__(self) -> NoReturn:
        raise _no_copy()


def _no_copy() -> PrepareError:
    return PrepareError(
        "An accelerated model is not copied: its compiled code belongs to this one in this process.",
        fix="call model.restore() first; model.save_pretrained() works as it is.",
    )


def _text_shape(shape: Sequence[int]) -> tuple[int, int]:
    numbers = tuple(shape)
    if len(numbers) != 2 or not all(isinstance(n, int) and n > 0 for n in numbers):
        raise ConfigError(f"{shape!r} is no shape to warm up.", fix="use (rows, tokens), such as (1, 128).")
    return numbers[0], numbers[1]


def _set_attention(model: Any, wanted: str | None) -> str | None:
    """Have the model use another of transformers' attention functions; which it used before."""
    if wanted is None or not hasattr(model, "set_attn_implementation"):
        return None
    before: str = model.config._attn_implementation
    if before == wanted:
        return None
    try:
        model.set_attn_implementation(wanted)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} has no attention {wanted!r}: {error}", fix="leave attention out."
        ) from error
    return before


class Accelerator:
    """Accelerates models with PyTorch's compiler."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """The same model; see `accel.backends.interfaces.Preparer`."""
        if config.scheme != "accelerate" or not isinstance(config, AccelerateConfig):
            raise ConfigError(
                f"The backend 'inductor' prepares by 'accelerate' with AccelerateConfig, not by {config.scheme!r}.",
                fix="use accel.accelerate(model).",
            )
        if calibration is not None:
            raise ConfigError("Accelerating a model reads no calibration data.", fix="leave it out.")
        if isinstance(model.__dict__.get("acceleration"), Acceleration):
            raise InputError("The model is accelerated already.", fix="call model.restore() first.")
        if model.training:
            raise ConfigError("Only a model in evaluation mode is accelerated.", fix="call model.eval() first.")
        Acceleration(model, config).install()
        return model
