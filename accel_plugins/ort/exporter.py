"""PyTorch model to ONNX artifact."""

from __future__ import annotations

from pathlib import Path

from accel.artifact import Artifact, Component, Manifest, Step, record_files, tool_versions
from accel.capture import Source, capture_onnx, drop_unused_inputs, graph_specs, quiet
from accel.config import ExportConfig
from accel.errors import ExportError

GRAPH = "model.onnx"
_INLINE_LIMIT_BYTES = 1 << 30


class OnnxExporter:
    """Writes `model.onnx` with its weights in `model.onnx.data`, and transformers' own manifest beside ours."""

    def __init__(self, backend: str) -> None:
        self._backend = backend

    def export(self, source: Source, *, task: str, config: ExportConfig, out: Path) -> Artifact:
        """Trace, convert and write; see `accel.interfaces.Exporter`."""
        model, exported = capture_onnx(source, config)
        unused = drop_unused_inputs(model)
        inputs = graph_specs(model.graph.inputs, source.config)
        outputs = graph_specs(model.graph.outputs)
        with quiet():
            exported.save_pretrained(out)
            if not config.external_data:
                self._inline(model, out)
        files = [name for name in (GRAPH, f"{GRAPH}.data") if (out / name).exists()]
        component = Component(
            name="model",
            file=GRAPH,
            files=record_files(out, files),
            inputs=inputs,
            outputs=outputs,
            max_sizes=source.max_sizes,
            unused_inputs=tuple(dict.fromkeys((*source.unused_inputs, *unused))),
        )
        step = Step(
            stage="export",
            backend=self._backend,
            config=config.to_dict(),
            versions=tool_versions("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime"),
        )
        manifest = Manifest(
            format="onnx",
            task=task,
            architecture=source.architecture,
            dtype=source.dtype,
            opset=model.opset_imports.get(""),
            source=source.origin,
            components=(component,),
            steps=(step,),
        )
        return Artifact.create(out, manifest)

    def _inline(self, model: object, out: Path) -> None:
        """Put the weights into the graph file.

        Raises:
            ExportError: They are too large for one protobuf file.
        """
        import onnx_ir

        assert isinstance(model, onnx_ir.Model)
        size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
        if size > _INLINE_LIMIT_BYTES:
            raise ExportError(
                f"{size} bytes of weights do not fit into one file.", fix="leave external_data=False out."
            )
        (out / f"{GRAPH}.data").unlink(missing_ok=True)
        onnx_ir.save(model, out / GRAPH)
