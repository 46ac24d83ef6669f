"""Small artifacts that are created without an export. Their graphs have embeddings, an attention mask, and a head for
each task.

The outputs of these graphs depend on the words, their positions, the token types and the attention mask. Therefore the
outputs change if a front model (the model that accepts texts in Triton) makes an error in token ids, token types,
padding or rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import transformers
from onnx import TensorProto, helper, numpy_helper

from accel.artifact import Artifact, Component, Manifest, Quantization, Step, TensorSpec, with_files
from accel.testing.models import VOCABULARY, tiny_tokenizer

HIDDEN = 8
POSITIONS = 48
LABELS = {
    "text-classification": ["contradiction", "neutral", "entailment"],
    "token-classification": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
    "question-answering": ["0", "1"],
    "sentence-similarity": ["0"],
    "feature-extraction": ["0"],
    "text-ranking": ["0"],
}
HEADS = {
    "text-classification": "BertForSequenceClassification",
    "token-classification": "BertForTokenClassification",
    "question-answering": "BertForQuestionAnswering",
    "sentence-similarity": "BertModel",
    "feature-extraction": "BertModel",
    "text-ranking": "BertForSequenceClassification",
}
IDS = tuple(
    TensorSpec(name, "int64", ("batch", "sequence"), role="mask" if name == "attention_mask" else "data")
    for name in ("input_ids", "attention_mask", "token_type_ids")
)


def outputs(task: str) -> tuple[TensorSpec, ...]:
    """Return the outputs of the graph for a task."""
    count = len(LABELS[task])
    return {
        "token-classification": (TensorSpec("logits", "float32", ("batch", "sequence", count)),),
        "question-answering": tuple(
            TensorSpec(f"{end}_logits", "float32", ("batch", "sequence")) for end in ("start", "end")
        ),
        "feature-extraction": (TensorSpec("last_hidden_state", "float32", ("batch", "sequence", HIDDEN)),),
        "sentence-similarity": (
            TensorSpec("last_hidden_state", "float32", ("batch", "sequence", HIDDEN)),
            TensorSpec("sentence_embedding", "float32", ("batch", HIDDEN)),
        ),
    }.get(task, (TensorSpec("logits", "float32", ("batch", count)),))


def make_artifact(folder: Path, task: str = "text-classification", *, format: str = "onnx", **changes: Any) -> Artifact:
    """Create an artifact for a task. For formats other than ONNX, the graph is an empty file with the file name of the
    format.

    Args:
        folder: Folder of the artifact.
        task: One of the tasks in `LABELS`.
        format: `onnx`, `openvino_ir` or `tensorrt`.
        **changes: Values for the manifest: `dtype`, `quantized`, `profile`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labels = LABELS[task]
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=POSITIONS,
        id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)},
        architectures=[HEADS[task]],
    )
    config.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = POSITIONS
    tokenizer.save_pretrained(folder)
    names = {"onnx": ["model.onnx"], "openvino_ir": ["model.xml", "model.bin"], "tensorrt": ["model.plan"]}[format]
    for name in names:
        (folder / name).write_bytes(b"")
    if format == "onnx":
        onnx.save(graph(task), str(folder / "model.onnx"))
    component = Component(
        name="model",
        file=names[0],
        files=(),
        inputs=IDS,
        outputs=outputs(task),
        max_sizes={"sequence": POSITIONS},
        domains=("",) if format == "onnx" else None,
    )
    profile = changes.pop("profile", None)
    # A TensorRT engine is built after an export, so the manifest has a second step with the profile.
    built = (Step(stage="export", backend="made", config={"profile": {"model": profile}}),) if profile else ()
    steps = (Step(stage="export", backend="made", config={}), *built)
    manifest = Manifest(
        format=format,
        task=task,
        architecture=HEADS[task],
        dtype=changes.pop("dtype", "float32"),
        quantization=Quantization(scheme="static-int8") if changes.pop("quantized", False) else None,
        components=with_files(folder, (component,), [names]),
        steps=steps,
    )
    assert not changes
    return Artifact.create(folder, manifest)


def graph(task: str) -> onnx.ModelProto:
    """Return the ONNX graph for a task. It weights word embeddings by their position, and averages them over the tokens
    that are not masked.
    """
    random = np.random.default_rng(0)
    count = {"question-answering": 2}.get(task, len(LABELS[task]))
    constants = {
        "words": random.normal(size=(VOCABULARY, HIDDEN)).astype("float32"),
        "kinds": random.normal(size=(2, HIDDEN)).astype("float32"),
        "head": random.normal(size=(HIDDEN, count)).astype("float32"),
        "one": np.array(1, dtype="int64"),
        "axis": np.array([1], dtype="int64"),
        "last": np.array([2], dtype="int64"),
    }
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["by_word"]),
        helper.make_node("Gather", ["kinds", "token_type_ids"], ["by_kind"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("CumSum", ["mask", "one"], ["place"]),
        helper.make_node("Sqrt", ["place"], ["weight"]),
        helper.make_node("Unsqueeze", ["weight", "last"], ["weights"]),
        helper.make_node("Unsqueeze", ["mask", "last"], ["masks"]),
        helper.make_node("Add", ["by_word", "by_kind"], ["summed"]),
        helper.make_node("Mul", ["summed", "weights"], ["weighed"]),
        helper.make_node("Tanh", ["weighed"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "masks"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axis"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["masks", "axis"], ["count"], keepdims=0),
        helper.make_node("Div", ["total", "count"], ["pooled"]),
    ]
    tail = {
        "token-classification": [helper.make_node("MatMul", ["hidden", "head"], ["logits"])],
        "question-answering": [
            helper.make_node("MatMul", ["hidden", "head"], ["both"]),
            helper.make_node("Split", ["both"], ["starts", "ends"], axis=2, num_outputs=2),
            helper.make_node("Squeeze", ["starts", "last"], ["start_logits"]),
            helper.make_node("Squeeze", ["ends", "last"], ["end_logits"]),
        ],
        "feature-extraction": [helper.make_node("Identity", ["hidden"], ["last_hidden_state"])],
        "sentence-similarity": [
            helper.make_node("Identity", ["hidden"], ["last_hidden_state"]),
            helper.make_node("Identity", ["pooled"], ["sentence_embedding"]),
        ],
    }.get(task, [helper.make_node("MatMul", ["pooled", "head"], ["logits"])])
    types = {"int64": TensorProto.INT64, "float32": TensorProto.FLOAT}
    inputs, returned = (
        [helper.make_tensor_value_info(spec.name, types[spec.dtype], list(spec.shape)) for spec in specs]
        for specs in (IDS, outputs(task))
    )
    built_graph = helper.make_graph(
        [*nodes, *tail],
        "made",
        inputs,
        returned,
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(built_graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
