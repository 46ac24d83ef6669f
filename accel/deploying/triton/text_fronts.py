"""What serves a task as text: the tensors that a client sends and gets, and what the module inside Triton must know.

A task names its service (`Task.fronts`); the module of that name in `served` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...artifact.manifest import Artifact
from ...artifact.sentence_settings import embedding_roles, sentence_settings
from ...capture.sentence_embeddings import Normalize, sentence_layers
from ...errors import ConfigError, TaskError
from ...models.texts import activation_path, prompt_length
from ...stages.resolution import recorded_export

TEXT = "string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor of a model's interface.

    Attributes:
        name: Its name.
        dtype: `string`, or torch's name of a type.
        dims: Sizes without the batch; -1 for one that varies.
        optional: Whether a request may leave it out.
        ragged: Whether requests of one batch may have several sizes of it.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What a service is made from: an artifact, its transformers config, its tokenizer and what its graph returns."""

    artifact: Artifact
    config: Any
    tokenizer: Any

    @property
    def labels(self) -> list[str]:
        """In the order of the outputs."""
        return [str(self.config.id2label[i]) for i in range(self.config.num_labels)]

    def sizes(self, name: str) -> tuple[int | str, ...]:
        """The shape of one of the graph's outputs.

        Raises:
            TaskError: It has no such output.
        """
        for spec in self.artifact.component().outputs:
            if spec.name == name:
                return spec.shape
        raise TaskError(
            f"The graph of {self.artifact.path} has no output {name!r}.", fix="deploy it with layout='graph'."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextService:
    """One way to serve a model as text.

    Attributes:
        module: In `served`.
        inputs: What a request brings.
        outputs: What a response holds.
        reads: Outputs of the graph that it needs.
        options: What the module is told.
        limit: Tokens of a text at most, where something besides the model and its tokenizer says it.
        sample: A request, by which the server is tried out.
        one_row: Whether each text is one row of the graph, so that it can be a step of an ensemble.
        labels: The output whose places are the model's labels, for Triton's classification extension; empty for none.
        generates: Whether it answers in pieces, by a loop of its own around the graph.
    """

    module: str
    inputs: tuple[Tensor, ...]
    outputs: Callable[[Facts], tuple[Tensor, ...]]
    reads: Callable[[Facts], tuple[str, ...]] = lambda _: ("logits",)
    options: Callable[[Facts], dict[str, Any]] = lambda _: {}
    limit: Callable[[Facts], int | None] = lambda _: None
    sample: Mapping[str, list[str]] = field(default_factory=dict)
    one_row: bool = False
    labels: str = ""
    generates: bool = False


def _function(facts: Facts) -> str:
    """What makes scores of a classifier's outputs, as transformers' pipeline decides it."""
    kind = facts.config.problem_type
    if kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" or facts.config.num_labels == 1 else "softmax"


def _entailment(facts: Facts) -> dict[str, Any]:
    found = next((i for i, label in enumerate(facts.labels) if label.lower().startswith("entail")), None)
    if found is None:
        raise TaskError(
            f"Zero-shot classification needs a model of entailment; the labels of this one are {facts.labels}.",
            fix="deploy it for text-classification, or name the label 'entailment' in its config.",
        )
    return {"entailment": found}


def _ranking(facts: Facts) -> dict[str, Any]:
    if facts.config.num_labels != 1:
        raise TaskError(
            f"A model that ranks has one output, and this one has {facts.config.num_labels}.",
            fix="deploy it for text-classification.",
        )
    settings = sentence_settings(facts.artifact.path)
    path = activation_path(facts.config, settings)
    function = _FUNCTIONS.get(path.rpartition(".")[2])
    if function is None:
        raise TaskError(
            f"The model makes scores by {path}, which the front model does not compute.",
            fix="deploy it with layout='graph', and apply it outside.",
        )
    return {"function": function, "prompt": settings.prompt(), "lower": settings.lower}


_FUNCTIONS = {"Sigmoid": "sigmoid", "Identity": "none"}


def _embedding(facts: Facts) -> dict[str, Any]:
    settings = sentence_settings(facts.artifact.path)
    component = facts.artifact.component()
    roles = embedding_roles(component.inputs, component.outputs)
    names = {roles.get(spec.name, spec.name): spec.name for spec in component.outputs}
    prompt = settings.prompt()
    text = prompt.lower() if settings.lower else prompt
    excluded = 0 if settings.include_prompt else prompt_length(facts.tokenizer, text)
    made = {"prompt": prompt, "lower": settings.lower, "size": settings.truncate_dim}
    if "sentence_embedding" in names and not excluded:
        return {**made, "output": names["sentence_embedding"], "pooled": True}
    if "last_hidden_state" not in names:
        raise TaskError(
            f"The graph of {facts.artifact.path} returns {', '.join(names)}: no sentence embeddings, and no hidden states to pool.",
            fix="export it with task='sentence-similarity'.",
        )
    recorded = recorded_export(facts.artifact)
    layers = sentence_layers(settings, pooling=recorded.pooling, normalize=recorded.normalize)
    others = [type(layer).__name__ for layer in layers.after if not isinstance(layer, Normalize)]
    if others:
        raise TaskError(
            f"The modules {', '.join(others)} of {facts.artifact.path} are not in its graph, and the front model does not compute them.",
            fix="export the model's weights by accel, which puts them into the graph: `accel export MODEL OUT`.",
        )
    return {
        **made,
        "output": names["last_hidden_state"],
        "pooled": False,
        "modes": list(layers.pooling.modes),
        "excluded": excluded,
        "normalize": len(layers.after) > 0,
    }


def _hidden_size(facts: Facts) -> int:
    settings = _embedding(facts)
    size = facts.sizes(settings["output"])[-1]
    if not isinstance(size, int):
        return settings["size"] or -1
    size *= len(settings.get("modes", "1"))
    return min(size, settings["size"] or size)


def _windows(facts: Facts) -> dict[str, Any]:
    if facts.artifact.component().max_sizes.get("sequence", 384) < 16:
        raise ConfigError("The model reads fewer than 16 tokens.", fix="deploy it with layout='graph'.")
    return {"longest": 384, "no_answer": facts.tokenizer.cls_token_id}


CLASSIFICATION = TextService(
    module="classification",
    inputs=(Tensor(name="TEXT", dtype=TEXT), Tensor(name="TEXT_PAIR", dtype=TEXT, optional=True)),
    outputs=lambda facts: (
        Tensor(name="LABEL", dtype=TEXT),
        Tensor(name="SCORE", dtype="float32"),
        Tensor(name="SCORES", dtype="float32", dims=(facts.config.num_labels,)),
    ),
    options=lambda facts: {"labels": facts.labels, "function": _function(facts)},
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
    labels="SCORES",
)
ZERO_SHOT = TextService(
    module="zero_shot",
    inputs=(
        Tensor(name="TEXT", dtype=TEXT),
        Tensor(name="CANDIDATE_LABELS", dtype=TEXT, dims=(-1,), ragged=True),
    ),
    outputs=lambda _: (
        Tensor(name="LABELS", dtype=TEXT, dims=(-1,)),
        Tensor(name="SCORES", dtype="float32", dims=(-1,)),
    ),
    options=_entailment,
    sample={"TEXT": ["The card has not arrived."], "CANDIDATE_LABELS": ["delivery", "fees"]},
)
TAGS = TextService(
    module="tags",
    inputs=(Tensor(name="TEXT", dtype=TEXT),),
    outputs=lambda _: (Tensor(name="ENTITIES", dtype=TEXT),),
    options=lambda facts: {"labels": facts.labels, "unknown": facts.tokenizer.unk_token_id},
    sample={"TEXT": ["Wolfgang lives in Berlin."]},
    one_row=True,
)
ANSWERS = TextService(
    module="answer_spans",
    inputs=(Tensor(name="QUESTION", dtype=TEXT), Tensor(name="CONTEXT", dtype=TEXT)),
    outputs=lambda _: (
        Tensor(name="ANSWER", dtype=TEXT, dims=(-1,)),
        Tensor(name="SCORE", dtype="float32", dims=(-1,)),
        Tensor(name="START", dtype="int64", dims=(-1,)),
        Tensor(name="END", dtype="int64", dims=(-1,)),
    ),
    reads=lambda _: ("start_logits", "end_logits"),
    options=_windows,
    sample={"QUESTION": ["Where does he live?"], "CONTEXT": ["Wolfgang lives in Berlin."]},
)
EMBEDDINGS = TextService(
    module="embeddings",
    inputs=(Tensor(name="TEXT", dtype=TEXT),),
    outputs=lambda facts: (Tensor(name="EMBEDDING", dtype="float32", dims=(_hidden_size(facts),)),),
    reads=lambda facts: (_embedding(facts)["output"],),
    options=_embedding,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"TEXT": ["The card has not arrived."]},
    one_row=True,
)
RANKING = TextService(
    module="document_scores",
    inputs=(Tensor(name="QUERY", dtype=TEXT), Tensor(name="DOCUMENTS", dtype=TEXT, dims=(-1,), ragged=True)),
    outputs=lambda _: (
        Tensor(name="SCORES", dtype="float32", dims=(-1,)),
        Tensor(name="RANKING", dtype="int64", dims=(-1,)),
    ),
    options=_ranking,
    limit=lambda facts: sentence_settings(facts.artifact.path).max_length,
    sample={"QUERY": ["Where is my card?"], "DOCUMENTS": ["It was sent on Monday.", "The fee is low."]},
)
GENERATION = TextService(
    module="text_decoder",
    inputs=(Tensor(name="PROMPT", dtype=TEXT),),
    outputs=lambda _: (Tensor(name="TEXT", dtype=TEXT),),
    sample={"PROMPT": ["The card"]},
    generates=True,
)
