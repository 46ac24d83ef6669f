"""Writers of folders for transformers.js and Optimum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from accel.artifact import Artifact
from accel.artifact.atomic_folder_writing import copy_companions
from accel.artifact.json_reading import read_json
from accel.artifact.json_writing import json_text
from accel.artifact.probe_file import PROBES
from accel.interfaces.folder_writer import LayoutVariant

from ..foreign.reader import OnnxFolderReader
from .graph_files import write_graph_file
from .library_graphs import check_components, library_graphs

_CONFIG, _PREPROCESSOR, _PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
# The WebAssembly build has no kernel for embeddings in blocks (`GatherBlockQuantized`; onnxruntime-web 1.31).
_MATRICES = ("MatMul", "Gemm")
_LIBRARY_CONFIG, _DATA_FILES = "transformers.js_config", "use_external_data_format"


class OnnxFolderWriter:
    """A `FolderWriter` for folders with graphs named as in Optimum. Subclasses set the class attributes.

    Attributes:
        name: Name of the layout.
        variants: Variants by name.
        suffixes: Endings of the graphs' file names by variant.
        subfolder: Folder of the graphs.
        logits: Whether decoders have the input `num_logits_to_keep`.
    """

    name: ClassVar[str]
    variants: ClassVar[Mapping[str, LayoutVariant]]
    suffixes: ClassVar[Mapping[str, str]]
    subfolder: ClassVar[str] = ""
    logits: ClassVar[bool] = False

    def check(self, artifact: Artifact) -> None:
        """Raise `TaskError` if the layout has no file names for the graphs of this model."""
        check_components(artifact, self.name)

    def write(self, artifact: Artifact, name: str, out: Path) -> list[str]:
        """Write the graphs of one variant; see `FolderWriter.write`."""
        files: list[Path] = []
        for stem, model in library_graphs(artifact, logits=self.logits).items():
            files += write_graph_file(model, out / self.subfolder / f"{stem}{self.suffixes[name]}.onnx")
        return [path.relative_to(out).as_posix() for path in files]

    def finish(self, artifact: Artifact, files: Mapping[str, list[str]], out: Path) -> None:
        """Write configs, tokenizer and processor files."""
        copy_companions(artifact.path, out)
        (out / PROBES).unlink(missing_ok=True)

    def read(self, artifact: Artifact, name: str, files: list[str], out: Path) -> Artifact:
        """Read one variant as a folder of another tool; decoders are converted to accel's form."""
        if not (out / _CONFIG).is_file():
            copy_companions(artifact.path, out)
            (out / PROBES).unlink(missing_ok=True)
        variant = self.suffixes[name].removeprefix("_") or "fp32"
        reader = OnnxFolderReader()
        if not self.suffixes[name]:
            return reader.adopt(out, task=artifact.manifest.task, file_name=files[0])
        return reader.adopt(out, task=artifact.manifest.task, variant=variant)


class TransformersJsWriter(OnnxFolderWriter):
    """Folders for npm's `@huggingface/transformers` 4: graphs in `onnx/`, with the suffixes of the library's dtypes.

    The 8-bit variant keeps 7 bits of each weight, because browsers run on CPUs whose 8-bit products saturate.
    """

    name = "transformers.js"
    variants: ClassVar[Mapping[str, LayoutVariant]] = {
        "fp32": LayoutVariant(),
        "fp16": LayoutVariant(level="O1", enable=("float16",), tolerance=2e-2),
        "q8": LayoutVariant(scheme="dynamic-int8", tolerance=0.35),
        "q4": LayoutVariant(scheme="weight-int4", operators=_MATRICES, tolerance=0.5),
        "q4f16": LayoutVariant(
            level="O1", enable=("float16",), scheme="weight-int4", operators=_MATRICES, tolerance=0.5
        ),
    }
    suffixes: ClassVar[Mapping[str, str]] = {
        "fp32": "",
        "fp16": "_fp16",
        "q8": "_quantized",
        "q4": "_q4",
        "q4f16": "_q4f16",
    }
    subfolder = "onnx"
    logits = True

    def finish(self, artifact: Artifact, files: Mapping[str, list[str]], out: Path) -> None:
        """Write configs, tokenizer and processor files in the form that the library reads.

        `config.json` lists the graphs with data files. `preprocessor_config.json` is taken from `processor_config.json`, in which
        transformers 5 stores it.
        """
        super().finish(artifact, files, out)
        config = read_json(out / _CONFIG)
        counts: dict[str, int] = {}
        for name in (Path(file).name for some in files.values() for file in some):
            graph, ending, _ = name.partition(".onnx_data")
            if ending:
                counts[f"{graph}.onnx"] = counts.get(f"{graph}.onnx", 0) + 1
        if counts:
            config[_LIBRARY_CONFIG] = {**config.get(_LIBRARY_CONFIG, {}), _DATA_FILES: counts}
            (out / _CONFIG).write_text(json_text(config) + "\n", encoding="utf-8")
        settings = _preprocessor(out)
        if settings is not None:
            (out / _PREPROCESSOR).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _preprocessor(out: Path) -> dict[str, Any] | None:
    """Return the settings of the image processor or feature extractor; `None` if the model has none."""
    settings: dict[str, Any] | None
    if (out / _PREPROCESSOR).is_file():
        settings = read_json(out / _PREPROCESSOR)
    elif (out / _PROCESSOR).is_file():
        processor = read_json(out / _PROCESSOR)
        settings = processor.get("image_processor", processor.get("feature_extractor"))
    else:
        settings = None
    if settings is None:
        return None
    # The library knows the classes by their name without the name of the implementation.
    kind = settings.get("image_processor_type")
    if isinstance(kind, str):
        settings["image_processor_type"] = kind.removesuffix("Pil").removesuffix("Fast")
    return dict(settings)


class OptimumWriter(OnnxFolderWriter):
    """Folders with Optimum's file names, next to the config."""

    name = "optimum"
    variants: ClassVar[Mapping[str, LayoutVariant]] = {
        "fp32": LayoutVariant(),
        "optimized": LayoutVariant(level="O2"),
        "quantized": LayoutVariant(scheme="dynamic-int8", tolerance=0.35),
    }
    suffixes: ClassVar[Mapping[str, str]] = {"fp32": "", "optimized": "_optimized", "quantized": "_quantized"}
