"""Acceleration of a PyTorch model in place: the model's `forward` runs compiled code until `restore` is called."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers.generation import GenerationMode

from accel.capture import CACHE_NAMES
from accel.config import AccelerateConfig, PrepareConfig
from accel.errors import ConfigError, InputError, PrepareError
from accel.interfaces.protocols import Batches

from .compiled_model import CompiledModel
from .model_changes import ModelSnapshot
from .sizes import MASK

logger = logging.getLogger(__name__)

_METHODS = ("forward", "warmup", "restore", "acceleration", "_prepare_static_cache", "_prepare_cache_for_generation")
# Lengths of static KV caches are rounded up to multiples of this number of tokens, because each cache length needs its
# own compilation.
_CACHE_STEP = 128
# Number of tokens that `warmup` generates for a prompt, so that decoding steps are compiled, compared and timed.
_NEW_TOKENS = 6


class Acceleration:
    """Replaces the `forward` method of a model with compiled code.

    Args:
        model: The model.
        config: Settings for compilation.
    """

    def __init__(self, model: Any, config: AccelerateConfig) -> None:
        self._model = model
        self._attention = _set_attention(model, config.attention)
        try:
            # Use `model.forward`, not the method of the class, because other code may have set `forward` on the
            # instance.
            self._forward: Callable[..., Any] = model.forward
            self._own = {name: model.__dict__[name] for name in _METHODS if name in model.__dict__}
            self.engine = CompiledModel(model, self._forward, config)
        except BaseException:
            _set_attention(model, self._attention)
            raise
        functools.update_wrapper(self, self._forward)
        self.__signature__ = self.engine.signature
        self._generates = False
        self._watch = ModelSnapshot(model)

    def install(self) -> None:
        """Replace the model's `forward`, and add `warmup`, `restore` and `acceleration`."""
        model = self._model
        for name, value in {
            "forward": self, "warmup": self.warmup, "restore": self.restore, "acceleration": self,
        }.items():  # fmt: skip
            object.__setattr__(model, name, value)
        if callable(getattr(model, "can_generate", None)) and model.can_generate():
            self._use_static_cache()

    def _use_static_cache(self) -> None:
        """Make `generate` use the static KV cache of transformers, and turn off the compilation of `generate` itself."""
        model = self._model
        if not getattr(model, "_can_compile_fullgraph", False):
            return
        self._generates = True
        prepare, prepare_static = model._prepare_cache_for_generation, getattr(model, "_prepare_static_cache", None)

        @functools.wraps(prepare)
        def with_static(settings: Any, inputs: dict[str, Any], mode: Any, *args: Any, **kwargs: Any) -> Any:
            # Assisted generation crops the KV cache. A static cache cannot be cropped, so no static cache is used.
            is_assisted = settings.is_assistant or mode == GenerationMode.ASSISTED_GENERATION
            has_cache = any(inputs.get(name) is not None for name in CACHE_NAMES)
            if (
                settings.cache_implementation is None
                and settings.use_cache is not False
                and not (is_assisted or has_cache)
            ):
                settings.cache_implementation = "static"
            settings.disable_compile = True
            return prepare(settings, inputs, mode, *args, **kwargs)

        object.__setattr__(model, "_prepare_cache_for_generation", with_static)
        if prepare_static is not None:

            @functools.wraps(prepare_static)
            def in_steps(*args: Any, **kwargs: Any) -> Any:
                if "max_cache_len" in kwargs:
                    kwargs["max_cache_len"] = -(-kwargs["max_cache_len"] // _CACHE_STEP) * _CACHE_STEP
                return prepare_static(*args, **kwargs)

            object.__setattr__(model, "_prepare_static_cache", in_steps)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with compiled code.

        Raises:
            PrepareError: The model is in training mode, or its weights, modules, settings or hooks have changed.
            InputError: The call has labels, or inputs that require gradients.
        """
        if self._model.training:
            raise PrepareError(
                f"{type(self._model).__name__} is accelerated for inference, but the model is in training mode.",
                fix="call model.eval(), or call model.restore() to train the model.",
            )
        if torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            raise InputError(
                "An accelerated model computes no gradients, but an input of this call has requires_grad=True.",
                fix="call the model under torch.no_grad(), or call model.restore() to compute gradients.",
            )
        # On a GPU, check the model for changes after the call was launched, so that the check runs while the GPU
        # computes.
        on_gpu = self.engine.device.type == "cuda"
        if not on_gpu:
            self._check()
        answer = self.engine(*args, **kwargs)
        if on_gpu:
            self._check()
        return answer

    def _check(self) -> None:
        """Raise if the model has changed since it was accelerated.

        Raises:
            PrepareError: The model has changed; the message describes the change.
        """
        if change := self._watch.changed():
            raise PrepareError(
                f"The model was changed after accel.accelerate: {change}. The compiled code would ignore this change.",
                fix="call model.restore(), and then accel.accelerate(model) again.",
            )

    def warmup(self, shapes: Iterable[Sequence[int] | Mapping[str, torch.Tensor]]) -> list[dict[str, Any]]:
        """Compile the model for the given shapes now. Each compiled form is compared with the original model and timed.

        Args:
            shapes: `(rows, tokens)` of text inputs, or example inputs by name. For a model that generates, `(rows,
                tokens)` is the shape of a prompt.

        Returns:
            One dictionary for each compiled form (code for one set of input sizes). It contains times in milliseconds,
            the difference of the outputs, and whether calls use the compiled code.

        Raises:
            PrepareError: Compiled code is slower for all shapes (the model is restored), or its outputs differ.
        """
        engine = self.engine
        for shape in _shape_list(shapes):
            if isinstance(shape, Mapping):
                with torch.no_grad():
                    self(**shape)
                continue
            batch, length = _text_shape(shape)
            if engine.longest is not None and length > engine.longest:
                raise ConfigError(
                    f"{type(self._model).__name__} supports at most {engine.longest} tokens per row, but the shape {(batch, length)} has "
                    f"{length} tokens per row.",
                    fix=f"pass shapes with at most {engine.longest} tokens per row.",
                )
            ids = self._tokens(batch, length)
            if self._generates:
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
                f"The compiled {type(self._model).__name__} is not faster than the original model: "
                + "; ".join(f"for {form.name}, {form.why}" for form in slower)
                + ". The model is restored and runs without compiled code.",
                fix="pass a different dtype=... or quantization=..., or pass keep_slower=True to use the compiled code.",
            )
        return engine.report()

    def _tokens(self, batch: int, length: int) -> dict[str, torch.Tensor]:
        vocabulary = getattr(self._model.config.get_text_config(), "vocab_size", None)
        if self._model.main_input_name != "input_ids" or vocabulary is None:
            raise ConfigError(
                f"accel cannot create an input of the shape {(batch, length)} (rows, tokens) for {type(self._model).__name__}: the main "
                f"input of the model is {self._model.main_input_name!r}, and vocab_size in its config is {vocabulary}.",
                fix="pass example inputs by name, such as warmup([{'pixel_values': images}]).",
            )
        first = min(10, vocabulary - 1)
        ids = torch.randint(first, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
        return {name: t.to(self.engine.device) for name, t in (("input_ids", ids), (MASK, torch.ones_like(ids)))}

    def report(self) -> list[dict[str, Any]]:
        """Return one dictionary for each compiled form (code for one set of input sizes) so far, as `warmup` does."""
        return self.engine.report()

    @property
    def compilations(self) -> int:
        """Number of compiled forms (sets of input sizes) so far."""
        return self.engine.compilations

    def restore(self) -> torch.nn.Module:
        """Restore the model's own `forward` and settings, and return the model. Its weights were never changed."""
        model: torch.nn.Module = self._model
        if model.__dict__.get("acceleration") is self:
            for name in _METHODS:
                if name in self._own:
                    object.__setattr__(model, name, self._own[name])
                else:
                    model.__dict__.pop(name, None)
            _set_attention(model, self._attention)
        return model

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise _no_copy()

    def __reduce__(self) -> NoReturn:
        raise _no_copy()


def _no_copy() -> PrepareError:
    return PrepareError(
        "An accelerated model cannot be copied or pickled, because its compiled code works only for this object in this process.",
        fix="call model.restore() first. To save the model, call model.save_pretrained(), which needs no restore.",
    )


def _shape_list(shapes: object) -> list[Any]:
    if isinstance(shapes, Iterable) and not isinstance(shapes, (str, Mapping, torch.Tensor)):
        return list(shapes)
    raise ConfigError(
        f"Expected a list of shapes to compile for, not {shapes!r}.",
        fix="pass [(rows, tokens), ...], such as [(1, 128)], or a list of example inputs.",
    )


def _text_shape(shape: object) -> tuple[int, int]:
    numbers = tuple(shape) if isinstance(shape, Iterable) else ()
    if len(numbers) != 2 or not all(type(n) is int and n > 0 for n in numbers):
        raise ConfigError(
            f"{shape!r} is not a valid shape to compile for: expected two positive integers (rows, tokens).",
            fix="pass (rows, tokens), such as (1, 128), or example inputs by name.",
        )
    return numbers[0], numbers[1]


def _set_attention(model: Any, attention: str | None) -> str | None:
    """Set the attention implementation of a transformers model. Return the previous one, or `None` if nothing was
    changed.
    """
    if attention is None or not hasattr(model, "set_attn_implementation"):
        return None
    before: str = model.config._attn_implementation
    if before == attention:
        return None
    try:
        model.set_attn_implementation(attention)
    except ValueError as error:
        raise ConfigError(
            f"{type(model).__name__} does not support attention={attention!r}: {error}", fix="leave attention=... out."
        ) from error
    return before


class Accelerator:
    """Preparer that accelerates models with PyTorch's compiler."""

    def prepare(
        self, model: torch.nn.Module, *, config: PrepareConfig, calibration: Batches | None = None
    ) -> torch.nn.Module:
        """Accelerate a model in place and return it; see `accel.interfaces.protocols.Preparer`."""
        if config.scheme != "accelerate" or not isinstance(config, AccelerateConfig):
            raise ConfigError(
                f"The backend 'inductor' prepares models only with the scheme 'accelerate' and an AccelerateConfig. It does not "
                f"support the scheme {config.scheme!r}.",
                fix="use accel.accelerate(model).",
            )
        if calibration is not None:
            raise ConfigError(
                "Calibration data was passed, but the acceleration of a model uses no calibration data.",
                fix="leave calibration=... out.",
            )
        inside = next(
            (n for n, m in model.named_modules() if isinstance(vars(m).get("acceleration"), Acceleration)), None
        )
        if inside is not None:
            raise InputError(
                f"{f'The submodule {inside} of the model' if inside else 'The model'} is already accelerated.",
                fix=f"call model.{f'{inside}.' if inside else ''}restore() first.",
            )
        if model.training:
            raise ConfigError(
                "The model is in training mode, but accel.accelerate needs a model in evaluation mode.",
                fix="call model.eval() first.",
            )
        Acceleration(model, config).install()
        return model
