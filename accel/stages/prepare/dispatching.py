"""Finds who prepares a PyTorch model, and has it done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ...backends import registry
from ...config import PrepareConfig
from ...errors import BackendUnavailableError, ConfigError, PluginError, PrepareError
from ...interfaces.protocols import Preparer
from ...interfaces.specs import WEIGHTS, BackendSpec

if TYPE_CHECKING:
    import torch


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
    return _preparer(spec).prepare(model, config=config, calibration=calibration)


def _preparer(spec: BackendSpec) -> Preparer:
    make = getattr(registry.load(spec), "preparer", None)
    preparer: Preparer | None = None if make is None else make()
    if preparer is None:
        raise PluginError(f"The backend {spec.name!r} declares the stage 'prepare' and offers no preparer.")
    return preparer


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
