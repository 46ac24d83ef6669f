"""A PyTorch model in, a prepared PyTorch model out: accelerated where it is, or made ready to be trained.

A way to prepare is a public function: it makes its settings, a subclass of `PrepareConfig`, and hands them to `prepare`, which
finds the backend that declares the scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..backends import registry
from ..config import AccelerateConfig, Dtype, PrepareConfig, QatConfig, QatPreset, checked_arguments
from ..errors import BackendUnavailableError, ConfigError, PrepareError
from ..interfaces.protocols import Preparer
from ..interfaces.specs import WEIGHTS, BackendSpec

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


@checked_arguments(calibration=Iterable)
def prepare_qat(
    model: torch.nn.Module,
    *,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
    preset: QatPreset = "int8",
    exclude: Sequence[str] = (),
    block_size: int = 32,
    samples: int = 256,
    distillation: float = 0.0,
    temperature: float = 2.0,
    backend: str | None = None,
) -> torch.nn.Module:
    """Make the linear layers of a PyTorch model round as integers do, so that training makes up for it.

    The model is changed in place and stays one of its class: train it with your own loop or `transformers.Trainer`, save and resume
    its checkpoints as ever, and hand it to `accel.export`, which writes the integers. Takes seconds. A training step takes 1.2 to 2
    times what it took before; with distillation the float model's answers come on top.

    Args:
        model: In float32, already trained.
        calibration: Batches of inputs by name (a `DataLoader` will do; `labels` are left out), which give the ranges that activations
            are rounded in at first. For all presets but `int4`.
        preset: `int8`: unsigned activations, signed weights with a step for each channel, which CPUs multiply fast.
            `int8-symmetric`: both signed around zero, as TensorRT wants it. `int8-per-tensor`: one step for all of a layer's weights.
            `int4-int8`, `int4-per-tensor`: the first and the last with 15 steps for weights, computed in 8 bits. `int4`: weights in 4
            bits in blocks, activations in floating point.
        exclude: Layers that stay in float: names, or `re:` and a regular expression.
        block_size: For `int4`: weights that share a step.
        samples: Rows of the calibration data that are read at most.
        distillation: Share, 0 to 1, that the float model's answers have in the loss which the model computes from `labels`.
        temperature: Of the distillation.
        backend: Who prepares; whoever does this when `None`.

    Raises:
        ConfigError: Settings that do not fit the model.
        PrepareError: The model cannot be prepared; it is as it was.
    """
    config = QatConfig(
        preset=preset,
        exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
        block_size=block_size,
        samples=samples,
        distillation=distillation,
        temperature=temperature,
    )
    return prepare(model, config, backend=backend, calibration=calibration)


def prepare(
    model: torch.nn.Module,
    config: PrepareConfig,
    *,
    backend: str | None = None,
    calibration: Iterable[Mapping[str, torch.Tensor]] | None = None,
) -> torch.nn.Module:
    """The model as a backend prepares it.

    Args:
        model: A PyTorch model.
        config: Which scheme, and its settings.
        backend: Who prepares; whoever declares the scheme when `None`.
        calibration: Batches of inputs by name, for schemes that need activation ranges.

    Raises:
        BackendUnavailableError: Nobody does this here, or not on the device where the model is.
        ConfigError: What is no PyTorch model, or settings that do not fit.
        PrepareError: It failed; the model is as it was.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"Only a PyTorch model can be prepared, not a {type(model).__name__}.",
            fix="load it with transformers (AutoModelFor....from_pretrained).",
        )
    spec = registry.owner("prepare", WEIGHTS, backend, scheme=config.scheme)
    _check_device(spec, config.scheme, model)
    preparer: Preparer = registry.worker(spec, "prepare")
    return preparer.prepare(model, config=config, calibration=calibration)


def _check_device(spec: BackendSpec, scheme: str, model: torch.nn.Module) -> None:
    """Refuse a model on a device that the backend does not prepare models for, or cannot use here.

    Raises:
        PrepareError: Parts of the model are on several devices.
        BackendUnavailableError: With the probe's reasons.
    """
    found = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    if len({name.partition(":")[0] for name in found}) > 1:
        raise PrepareError(
            f"The model is spread over {', '.join(found)}.", fix="move it to one device first (model.to(...))."
        )
    kind = found[0].partition(":")[0] if found else "cpu"
    declared = sorted({d for c in spec.capabilities if c.stage == "prepare" and scheme in c.schemes for d in c.devices})
    probe = registry.probe(spec)
    if kind in declared and any(device.type == kind for device in probe.devices):
        return
    why = "; ".join(str(reason) for reason in probe.reasons)
    remedy = next((reason.remedy for reason in probe.reasons if reason.remedy), "")
    raise BackendUnavailableError(
        f"The backend {spec.name!r} cannot do {scheme!r} on {kind} here; it is for {', '.join(declared)}."
        + (f" {why}." if why else ""),
        fix=f"{remedy}." if remedy else f"move the model to {' or '.join(declared)}.",
    )
