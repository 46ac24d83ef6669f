"""Model cards: how an artifact was made and what was measured, from the numbers in its manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ..artifact.manifest import Artifact
from ..artifact.provenance import measured_numbers
from ..interfaces.task_registry import task_spec

CARD = "README.md"
"""Name of the file with the model card."""
_MARK = "<!-- written by accel; accel replaces this file -->"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(artifact: Artifact, name: str, *, code: str, language: str = "python") -> str:
    """Return a model card in Markdown: the source model, each step, the measured numbers, the versions, and an example.

    The card contains no path of this machine.

    Args:
        artifact: The artifact.
        name: Title of the card.
        code: Example of use.
        language: Language of the example.
    """
    from huggingface_hub import ModelCardData

    manifest = artifact.manifest
    source = manifest.source.id if manifest.source else "unknown"
    base = source if _HUB_ID.fullmatch(source) else None
    revision = f" (revision {manifest.source.revision})" if manifest.source and manifest.source.revision else ""
    data = ModelCardData(
        library_name="accel",
        pipeline_tag=None if task_spec(manifest.task).any_graph else manifest.task,
        base_model=base,
        tags=[manifest.format, *([manifest.quantization.scheme] if manifest.quantization else [])],
    )
    steps = [
        (step.stage, step.backend, str(step.validation.get("max_abs_difference", "not measured")))
        for step in manifest.steps
    ]
    numbers = [(number.name, str(number), number.conditions) for number in measured_numbers(manifest)]
    quantization = manifest.quantization
    words = []
    if quantization is not None:
        excluded = f", without {', '.join(quantization.excluded)}" if quantization.excluded else ""
        words.append(f"Quantized with {quantization.scheme}{excluded}.")
    if manifest.run is not None:
        run = manifest.run
        words.append(f"Measured as fastest with the backend {run.backend} on {run.device or 'any device'}.")
    measured = manifest.run.measured if manifest.run is not None else {}
    if "value" not in measured and not any("accuracy" in step.validation for step in manifest.steps):
        words.append("The accuracy was not measured.")
    versions: dict[str, str] = {}
    for step in manifest.steps:
        versions |= step.versions
    return (
        f"---\n{data.to_yaml()}\n---\n{_MARK}\n\n# {name}\n\n"
        f"{manifest.architecture or 'A model'} for {manifest.task}, made from `{base or Path(source).name}`{revision}"
        f" with accel {manifest.accel} ({manifest.format}, {manifest.dtype}). {' '.join(words)}\n\n"
        f"{_table(('step', 'backend', 'largest difference from its parent'), steps)}"
        f"{_table(('measured', 'value', 'conditions'), numbers)}"
        f"Versions: {', '.join(f'{library} {version}' for library, version in versions.items())}. "
        f"Digest: `{artifact.digest}`.\n\n"
        f"```{language}\n{code.rstrip()}\n```\n"
    )


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def is_replaceable(path: Path) -> bool:
    """Return whether a model card may be written to a path: there is no file, or it is a card that accel wrote."""
    try:
        return _MARK in path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    except (OSError, UnicodeDecodeError):
        return False
