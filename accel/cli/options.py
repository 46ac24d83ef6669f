"""Options that several commands share: one definition each, so that a flag means and says the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# What a command works on
Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or transformers folder.")]
Artifact = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Folder made by `accel export`.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.")]
Task = Annotated[str | None, typer.Option("--task", help="Task; inferred when left out.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]

# Who runs it, and where
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
BatchSize = Annotated[int, typer.Option("--batch-size", help="Rows a call when measuring.")]
Calibration = Annotated[
    str | None,
    typer.Option("--calibration", help="Rows for static schemes, not those that accuracy is measured on."),
]
CalibrationSplit = Annotated[str | None, typer.Option("--calibration-split", help="Its split.")]
Atol = Annotated[float | None, typer.Option("--atol", help="Accepted absolute difference from PyTorch.")]

# Calls to time
Batches = Annotated[
    list[int] | None, typer.Option("--batch", "-b", help="Rows a call; repeat for a grid. [default: 1]")
]
Sequences = Annotated[
    list[int] | None, typer.Option("--sequence", "-s", help="Tokens a row; repeat for a grid. [default: 128]")
]
Texts = Annotated[
    Path | None, typer.Option("--texts", help="Real texts instead of --sequence: a line each, or a table.")
]

# What is said
Report = Annotated[Path | None, typer.Option("--report", help="Write one self-contained HTML page here.")]
Png = Annotated[Path | None, typer.Option("--png", help="Write a picture here (needs the extra `report`).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what upstream libraries say.")]
