"""Options that several commands share, so that a flag has the same meaning and help text everywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..artifact.signatures import REQUIREMENT
from ..errors import ConfigError

# Arguments and options for models and folders.
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or transformers folder.")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder made by `accel export`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Output folder.")]
Task = Annotated[str | None, typer.Option("--task", help="Task of the model; inferred if omitted.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow Python code of the model repository to run.")]

# Options for backends and devices.
Backend = Annotated[str | None, typer.Option("--backend", help="Name of a backend; `accel doctor` lists the names.")]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="Use only this backend. Repeat the flag for several backends.")
]
Device = Annotated[str | None, typer.Option("--device", help="Device: cpu, cuda:0, ...")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Number of threads; all available processors if omitted.")
]

# Options for data sets and their rows.
Split = Annotated[str | None, typer.Option("--split", help="Split of the data set, such as test.")]
Column = Annotated[
    list[str] | None,
    typer.Option("--column", help="Data column for a use, such as text=query. Repeat the flag for several columns."),
]
Metric = Annotated[
    str | None, typer.Option("--metric", help="Metric: accuracy, f1, ...; the task's default if omitted.")
]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="Maximum tokens per row; longer rows are truncated.")
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size", help="Rows per call when accuracy and speed are measured. Use the batch size of production."
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="File or Hub data set with rows for static quantization. Use other rows than for the accuracy.",
    ),
]
CalibrationSplit = Annotated[
    str | None, typer.Option("--calibration-split", help="Split of the --calibration data set.")
]
Atol = Annotated[float | None, typer.Option("--atol", help="Accepted absolute difference from the outputs of PyTorch.")]

# Options for the size of timed calls.
Batches = Annotated[
    list[int] | None,
    typer.Option("--batch", "-b", help="Rows per call. Repeat the flag for several sizes. [default: 1]"),
]
Sequences = Annotated[
    list[int] | None,
    typer.Option("--sequence", "-s", help="Tokens per row. Repeat the flag for several lengths. [default: 128]"),
]
Texts = Annotated[
    Path | None,
    typer.Option("--texts", help="File with texts, one per line or as a table. Their lengths replace --sequence."),
]

ExplainedTexts = Annotated[
    Path | None,
    typer.Option("--texts", help="File with texts to compare on; sample inputs of the export if omitted."),
]

# Options for running several processes on Ray.
Ray = Annotated[bool, typer.Option("--ray", help="Run on Ray, on this machine or on a cluster.")]
Address = Annotated[
    str | None,
    typer.Option("--address", help="With --ray: address of the cluster: auto, HOST:PORT or ray://HOST:PORT."),
]
ReplicaCount = Annotated[
    str, typer.Option("--replicas", help="With --ray: number of processes, such as 4, or 1:4 to scale with the load.")
]
Cpus = Annotated[float, typer.Option("--cpus", min=0, help="With --ray: processors per process.")]
Gpus = Annotated[
    float, typer.Option("--gpus", min=0, help="With --ray: GPUs per process; with 0.5, two processes share a GPU.")
]
REPLICAS, CPUS, GPUS = "1", 1.0, 0.0

# Options for the output of a command.
Report = Annotated[
    Path | None, typer.Option("--report", help="Write the results to this file as a self-contained HTML page.")
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Write the results to this file as an image (needs the extra `report`).")
]
Json = Annotated[bool, typer.Option("--json", help="Print only one JSON object on standard output.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show log messages and the warnings of other libraries.")
]


def wants_ray(ray: bool, address: str | None, replicas: str, cpus: float, gpus: float) -> bool:
    """Return whether a command runs on Ray.

    Raises:
        ConfigError: An option for Ray is set without `--ray`.
    """
    if ray or address is not None:
        return True
    chosen = {"--replicas": replicas != REPLICAS, "--cpus": cpus != CPUS, "--gpus": gpus != GPUS}
    if any(chosen.values()):
        names = ", ".join(name for name, is_set in chosen.items() if is_set)
        raise ConfigError(
            f"{names} can be used only with --ray. Without --ray, the command runs in one process.",
            fix=f"add --ray, or remove {names}.",
        )
    return False


RequireSignature = Annotated[
    Path | None,
    typer.Option(
        "--require-signature",
        metavar="PUBLIC_KEY",
        help="Open only models that are signed with the private key of this public key.",
    ),
]


def require_signatures(public_key: Path | None) -> None:
    """Require signatures in this process and in the processes that it starts."""
    if public_key is not None:
        os.environ[REQUIREMENT] = str(public_key.expanduser().absolute())
