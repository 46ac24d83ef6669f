"""Errors for folders of unsupported libraries, and for parts of models that accel does not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..artifact.atomic_folder_writing import checkpoint_weights
from ..errors import ArtifactNotFoundError, TaskError
from ..interfaces.task_registry import missing_config, task_spec

_CUSTOM = (
    "Then load the graph with ORTModelForCustomTasks.from_pretrained(FOLDER), and pass inputs by the names in the graph"
)
_LIBRARIES: Mapping[str, tuple[str, str]] = {
    "gliner_config.json": (
        "GLiNER",
        f"export the model with GLiNER (`model.export_to_onnx(FOLDER)`). {_CUSTOM}. Use GLiNER to make the inputs and to read the "
        "outputs.",
    ),
    "model_index.json": (
        "Diffusers",
        "use diffusers, or load one of the transformers models in the folder, for example with subfolder='text_encoder'.",
    ),
    "open_clip_config.json": ("OpenCLIP", "use the same model in the format of transformers (CLIPModel)."),
    "hyperparams.yaml": ("SpeechBrain", f"export the model with torch.onnx. {_CUSTOM}."),
    "config.cfg": ("spaCy", "use spaCy, or load the transformer that the spaCy model contains by its own Hub id."),
    "consolidated*.safetensors": ("mistral-common or Llama", "use the same model in the format of transformers."),
    "consolidated*.pth": ("mistral-common or Llama", "use the same model in the format of transformers."),
    "*.nemo": ("NeMo", f"export the model with NeMo (`model.export(...)`). {_CUSTOM}."),
}
"""File name patterns of models of other libraries, with the name of the library and the fix for the error message."""
_SETFIT, _HEAD = "config_setfit.json", "model_head.pkl"


def no_model(folder: Path) -> ArtifactNotFoundError:
    """Return the error for a folder without graphs and without a transformers config."""
    for pattern, (library, fix) in _LIBRARIES.items():
        if name := next((path.name for path in sorted(folder.glob(pattern)) if path.is_file()), None):
            return ArtifactNotFoundError(
                f"{folder} contains a model of {library} ({name}), which transformers cannot load: the folder has no config.json.",
                fix=fix,
            )
    if checkpoint_weights(folder):
        return missing_config(folder)
    return ArtifactNotFoundError(
        f"{folder} contains no model: it has neither config.json nor adapter_config.json.",
        fix="check the path. For a GGUF file in a Hub repository, pass gguf_file=...",
    )


def check_heads(folder: Path, task: str | None) -> None:
    """Raise for a SetFit classifier if the task needs its classification head, which is a pickle file. accel can use only the
    embedding model.

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
            f"{folder} is a SetFit classifier, whose classification head is in the pickle file {_HEAD}. accel does not read pickle "
            "files, because reading a pickle file can run any code.",
            fix="load only the embedding model with task='sentence-similarity', and compute embeddings with `encode`. Then "
            "classify them with SetFit: SetFitModel.from_pretrained(FOLDER).model_head.predict(embeddings).",
        )
