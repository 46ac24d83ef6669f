"""Options that several commands share, so that a flag has the same meaning and help text everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError

# Models and folders
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or transformers folder.")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder made by `accel export`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")]
Task = Annotated[str | None, typer.Option("--task", help="Task; inferred when left out.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]

# Backends and devices
Backend = Annotated[str | None, typer.Option("--backend", help="Backend by name; see `accel doctor`.")]
Backends = Annotated[list[str] | None, typer.Option("--backend", help="Only these backends; repeat.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu, cuda:0, ...")]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Threads of each variant; all processors when left out.")
]

# Rows
Split = Annotated[str | None, typer.Option("--split", help="Split of the data.")]
Column = Annotated[
    list[str] | None, typer.Option("--column", help="USE=COLUMN, such as text=query; repeat it for more.")
]
Metric = Annotated[str | None, typer.Option("--metric", help="accuracy, f1, ...; the task's default when left out.")]
MaxLength = Annotated[int | None, typer.Option("--max-length", help="Tokens that longer rows are cut to.")]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size", help="Rows a call when accuracy and speed are measured: as many as the model will get."
    ),
]
Calibration = Annotated[
    str | None,
    typer.Option("--calibration", help="Rows for static schemes, not those that accuracy is measured on."),
]
CalibrationSplit = Annotated[str | None, typer.Option("--calibration-split", help="Its split.")]
Atol = Annotated[float | None, typer.Option("--atol", help="Accepted absolute difference from PyTorch.")]

# Measured calls
Batches = Annotated[
    list[int] | None, typer.Option("--batch", "-b", help="Rows a call; repeat for a grid. [default: 1]")
]
Sequences = Annotated[
    list[int] | None, typer.Option("--sequence", "-s", help="Tokens a row; repeat for a grid. [default: 128]")
]
Texts = Annotated[
    Path | None, typer.Option("--texts", help="Real texts instead of --sequence: a line each, or a table.")
]

# Several processes
Ray = Annotated[bool, typer.Option("--ray", help="On Ray, of this machine or a cluster.")]
Address = Annotated[
    str | None, typer.Option("--address", help="With --ray, a cluster: auto, HOST:PORT or ray://HOST:PORT.")
]
ReplicaCount = Annotated[str, typer.Option("--replicas", help="With --ray, processes: 4, or 1:4 to follow the load.")]
Cpus = Annotated[float, typer.Option("--cpus", min=0, help="With --ray, processors of each.")]
Gpus = Annotated[float, typer.Option("--gpus", min=0, help="With --ray, GPUs of each; 0.5 shares one.")]
REPLICAS, CPUS, GPUS = "1", 1.0, 0.0

# Output
Report = Annotated[Path | None, typer.Option("--report", help="Write one self-contained HTML page here.")]
Png = Annotated[Path | None, typer.Option("--png", help="Write a picture here (needs the extra `report`).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what upstream libraries say.")]


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
        raise ConfigError(f"{names}: for Ray alone, and this would be one process.", fix="add --ray, or leave it out.")
    return False
