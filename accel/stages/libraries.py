"""Errors for folders of unsupported libraries, and for parts of models that accel does not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..artifact.writing import checkpoint_weights
from ..errors import ArtifactNotFoundError, TaskError
from ..interfaces.task_registry import missing_config, task_spec

_CUSTOM = "ORTModelForCustomTasks.from_pretrained(FOLDER) runs any ONNX graph, with its own input names"
_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "gliner_config.json": (
        "GLiNER",
        f"export it with GLiNER (`model.export_to_onnx(FOLDER)`); {_CUSTOM}. GLiNER still makes its inputs and reads its outputs.",
    ),
    "model_index.json": ("Diffusers", "use diffusers, or name one of its folders (subfolder='text_encoder')."),
    "open_clip_config.json": ("OpenCLIP", "use the same model in transformers' format (CLIPModel)."),
    "hyperparams.yaml": ("SpeechBrain", f"export its graph with torch.onnx; {_CUSTOM}."),
    "config.cfg": ("spaCy", "use spaCy; a transformer that it was trained over can be named by its own id."),
    "consolidated*.safetensors": ("mistral-common or Llama", "use the same model in transformers' format."),
    "consolidated*.pth": ("mistral-common or Llama", "use the same model in transformers' format."),
    "*.gguf": ("llama.cpp", "use the repository that the GGUF file was made from."),
    "*.nemo": ("NeMo", f"export its graph with NeMo (`model.export(...)`); {_CUSTOM}."),
}
"""File name patterns that identify the folders of a library, with the library's name and a remedy."""
_SETFIT, _HEAD = "config_setfit.json", "model_head.pkl"


def no_model(folder: Path) -> ArtifactNotFoundError:
    """Return the error for a folder without graphs and without a transformers config."""
    for pattern, (library, fix) in _LIBRARIES.items():
        if name := next((path.name for path in sorted(folder.glob(pattern)) if path.is_file()), None):
            return ArtifactNotFoundError(
                f"{folder} holds a model of {library} ({name}) and no config.json: transformers does not have such models.",
                fix=fix,
            )
    if checkpoint_weights(folder):
        return missing_config(folder)
    return ArtifactNotFoundError(
        f"{folder} holds no model: it has neither config.json nor adapter_config.json.", fix="check the path."
    )


def check_heads(folder: Path, task: str | None) -> None:
    """Raise for a SetFit classifier if the task needs its head, which is a pickle. Its embedding model can be used.

    Args:
        folder: The model's folder.
        task: The requested task; when `None`, the classification task of the folder.

    Raises:
        TaskError: The task needs the head.
    """
    if not (folder / _SETFIT).is_file() or not (folder / _HEAD).is_file():
        return
    if task is None or (not (spec := task_spec(task)).embeds and not spec.any_graph):
        raise TaskError(
            f"{folder} is a classifier of SetFit. Its labels come from {_HEAD}, a pickle: accel does not read pickles, because reading "
            "one runs code.",
            fix="load its embedder alone with task='sentence-similarity', and pass the vectors of `encode` to the head, which SetFit "
            "loads: SetFitModel.from_pretrained(FOLDER).model_head.predict(vectors).",
        )
