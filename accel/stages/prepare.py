"""Prepare a PyTorch model in memory: accelerate it, or make it ready for quantization-aware training.

Each scheme has a public function. It creates the settings, a subclass of `PrepareConfig`, and passes them to `prepare`,
which finds the backend that declares the scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..backends import registry
from ..backends.stage_backend_selection import StagePlan, plan_stage
from ..config import AccelerateConfig, Dtype, PrepareConfig, QatConfig, QatPreset, checked_arguments
from ..errors import BackendUnavailableError, ConfigError, PrepareError
from ..interfaces.protocols import Preparer
from ..interfaces.specs import WEIGHTS

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
    """Make a PyTorch model faster in place. Nothing is exported; pipelines and `generate` work as before.

    Calls run compiled code, with one compiled form for each input size. Inputs are padded to that size, and outputs are
    cut. The first call of a form is compared with the original model, and both are timed. A different result raises an
    error. A slower form is not used, with a warning. Compiling takes seconds to minutes for each form. The forms of
    `shapes` are compiled before this function returns.

    The model gets three methods: `warmup(shapes)` compiles and measures, `restore()` undoes everything, and
    `acceleration.report()` lists the compiled forms. The model's own weights never change. With `dtype` or
    `quantization`, a copy is used for computation, which takes memory.

    Args:
        model: A transformers model in evaluation mode, or another module, on the device where it runs.
        backend: The backend that accelerates the model; chosen automatically when `None`.
        dtype: Data type used for computation; inputs and outputs keep their types. The model's own dtype when `None`.
        shapes: Shapes to compile in advance: `(rows, tokens)` of texts or, for models that generate, of prompts; or
            example inputs by name.
        config: Further settings; its fields may also be passed as keyword arguments (`quantization="int8"`).
        **settings: Fields of `AccelerateConfig`.

    Returns:
        The same model.

    Raises:
        BackendUnavailableError: No backend can accelerate models on this device. The message has the reasons.
        ConfigError: Settings do not fit the model or the backend.
        PrepareError: The model cannot be compiled, its outputs differ, or it is not faster on `shapes`. The message has
            the numbers, and the model is unchanged.
    """
    if dtype is not None:
        settings["dtype"] = dtype
    prepared: Any = prepare(model, AccelerateConfig.merged(config, settings), backend=backend)
    if shapes is not None:
        try:
            prepared.warmup(shapes)
        except BaseException:
            # If the compiled code is not faster, `warmup` has already restored the model and removed the method `restore`.
            if hasattr(prepared, "restore"):
                prepared.restore()
            raise
    return cast("Model", prepared)


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
    """Make the linear layers of a PyTorch model round their values as integers would, so that training compensates for
    the rounding.

    The model is changed in place and keeps its class. Train it with your own loop or `transformers.Trainer`, save and
    resume checkpoints as before, and pass it to `accel.export`, which writes the integers. The preparation takes
    seconds. A training step takes 1.2 to 2 times as long as before; distillation also runs the float model.

    Args:
        model: A trained model in float32.
        calibration: Batches of inputs by name (such as a `DataLoader`; `labels` are ignored) for the initial ranges of
            activations. Required by all presets except `int4`.
        preset: `int8`: unsigned activations, signed weights with one scale per channel; fast on CPUs. `int8-symmetric`:
            activations and weights signed and symmetric, as TensorRT requires. `int8-per-tensor`: one scale for all weights
            of a layer. `int4-int8` and `int4-per-tensor`: like `int8` and `int8-per-tensor`, with 15 levels for weights,
            computed in 8 bits. `int4`: weights in 4 bits in blocks, activations in floating point.
        exclude: Layers that stay in floating point: names, or `re:` and a regular expression.
        block_size: For `int4`: number of weights that share a scale.
        samples: Largest number of calibration rows.
        distillation: Fraction (0 to 1) of the loss that compares with the float model's outputs; the rest is the loss
            from `labels`.
        temperature: Temperature of the distillation.
        backend: The backend that prepares the model; chosen automatically when `None`.

    Raises:
        ConfigError: Settings do not fit the model.
        PrepareError: The model cannot be prepared; it is unchanged.
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
    """Prepare a model with a backend.

    Args:
        model: A PyTorch model.
        config: The scheme and its settings.
        backend: The name of the backend; when `None`, a backend that declares the scheme.
        calibration: Batches of inputs by name, for schemes that need ranges of activations.

    Raises:
        BackendUnavailableError: No installed backend supports this scheme, or not on the model's device.
        ConfigError: The argument is not a PyTorch model, or settings do not fit.
        PrepareError: The preparation failed; the model is unchanged.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"The model is a {type(model).__name__}, but it must be a PyTorch model (torch.nn.Module).",
            fix="load the model with transformers, for example with AutoModelForSequenceClassification.from_pretrained.",
        )
    plan = plan_stage("prepare", WEIGHTS, backend, scheme=config.scheme)
    _check_device(plan, config.scheme, model)
    preparer: Preparer = plan.worker()
    return preparer.prepare(model, config=config, calibration=calibration)


def _check_device(plan: StagePlan, scheme: str, model: torch.nn.Module) -> None:
    """Raise if the backend does not support the model's device, or cannot use it on this machine.

    Raises:
        PrepareError: The model is spread over several devices.
        BackendUnavailableError: The device cannot be used. The message has the reasons.
    """
    device_names = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    if len({name.partition(":")[0] for name in device_names}) > 1:
        raise PrepareError(
            f"The parameters of the model are on several devices: {', '.join(device_names)}.",
            fix="move the model to one device with model.to(...).",
        )
    kind = device_names[0].partition(":")[0] if device_names else "cpu"
    declared = plan.capability.devices
    probe = registry.probe(plan.backend)
    if kind in declared and any(device.type == kind for device in probe.devices):
        return
    why = "; ".join(str(reason) for reason in probe.reasons)
    remedy = next((reason.remedy for reason in probe.reasons if reason.remedy), "")
    raise BackendUnavailableError(
        f"The backend {plan.backend.name!r} cannot run the scheme {scheme!r} for a model on the device {kind!r} of this machine. "
        f"The scheme supports the devices {', '.join(declared)}." + (f" {why}." if why else ""),
        fix=f"{remedy}." if remedy else f"move the model to {' or '.join(declared)}.",
    )
