"""`accel.accelerate`: a PyTorch model made faster where it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...config import AccelerateConfig, Dtype, checked_arguments
from .dispatching import prepare

if TYPE_CHECKING:
    import torch

    Model = TypeVar("Model", bound=torch.nn.Module)


@checked_arguments(config=AccelerateConfig, shapes=Iterable)
def accelerate(
    model: Model,
    *,
    backend: str | None = None,
    dtype: Dtype | None = None,
    shapes: Iterable[Sequence[int] | Mapping[str, torch.Tensor]] | None = None,
    config: AccelerateConfig | None = None,
    **settings: Any,
) -> Model:
    """Make a PyTorch model faster where it is: nothing is exported, and it stays the object that pipelines and `generate` take.

    Calls run through compiled code, one compiled form for each size, to which inputs are padded and from which answers are cut.
    At the first call of a form its answer is compared with that of the model as it was, and both are timed: what differs is an
    error, what is slower runs as before and is warned of. Compiling takes from seconds to minutes for a form; shapes that are
    given are compiled before this returns.

    The model gets three methods: `warmup(shapes)` compiles and measures, `restore()` puts everything back, and `acceleration.report()`
    says what was compiled. Its own weights are never changed: with `dtype` or `quantization` a copy computes, which takes
    its own memory.

    Args:
        model: A transformers model in evaluation mode, or another module, on the device where it runs.
        backend: Who accelerates; whoever can when `None`.
        dtype: What it computes in; inputs and outputs keep their types. `None`: its own.
        shapes: What to warm up: `(rows, tokens)` of texts, of prompts for models that generate, or example inputs by name.
        config: Everything else; its fields may also be given as keyword arguments (`quantization="int8"`).
        **settings: Fields of `AccelerateConfig`.

    Returns:
        The same model.

    Raises:
        BackendUnavailableError: Nothing here accelerates models on this device; with the reasons.
        ConfigError: Settings that do not fit.
        PrepareError: It cannot be compiled, its answers differ, or it is not faster on `shapes`; the message has the figures, and
            the model is as it was.
    """
    given = {**({} if config is None else config.to_dict()), **({} if dtype is None else {"dtype": dtype}), **settings}
    made: Any = prepare(model, AccelerateConfig.from_dict(given), backend=backend)
    if shapes is not None:
        try:
            made.warmup(shapes)
        except BaseException:
            if hasattr(made, "restore"):
                made.restore()
            raise
    return cast("Model", made)
