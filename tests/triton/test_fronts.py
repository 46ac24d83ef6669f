"""Tests of the code that runs inside Triton: it returns the same results as the local pipelines, for any batching of
requests.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import transformers

import accel
from accel.artifact import Artifact

from .small_artifacts import make_artifact

pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")

from accel.deploying.triton import deploy
from accel.deploying.triton.served.call_costs import CallCosts
from accel.deploying.triton.served.text_batches import Request, TextRequestHandler
from accel.deploying.triton.served.tokens import InvalidRequestError, NonFiniteOutputError

TEXTS = [
    "Where is my new card?",
    "wolfgang is not here",
    "pay",
    "How can I transfer cash from my account to the bank in Paris, please?",
    "the fee is zzz",
]
ATOL = 1e-5
"""Tolerance for the same graph in the same runtime: only the order of additions over padding differs."""


def texts(*values: str) -> np.ndarray[Any, Any]:
    """Return texts as the array that Triton passes for one request."""
    return np.array([[value.encode() for value in values]], dtype=object)


@dataclass
class Front:
    """Front model of a repository (the model that accepts texts). Its graph runs in this process."""

    folder: Path
    artifact: Path
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batches = TextRequestHandler(self.folder)
        self.session = onnxruntime.InferenceSession(
            str(self.artifact / "model.onnx"), providers=["CPUExecutionProvider"]
        )

    def call(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        self.calls.append(feeds["input_ids"].shape)
        names = list(self.batches.settings["outputs"])
        return dict(zip(names, self.session.run(names, dict(feeds)), strict=True))

    def ask(self, inputs: Mapping[str, Sequence[str]], **options: Any) -> dict[str, Any]:
        (answer,) = self.ask_all([inputs], **options)
        if isinstance(answer, InvalidRequestError):
            raise answer
        return answer

    def ask_all(self, requests: Sequence[Mapping[str, Sequence[str]]], **options: Any) -> list[Any]:
        batch = [Request({name: texts(*values) for name, values in request.items()}, options) for request in requests]
        return self.batches.answer(batch, self.call)


Fronts = Callable[..., Front]
Local = Callable[..., Any]


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Front]:
    """Return a function that creates the front model of a task (the model that accepts texts)."""
    fronts: dict[Any, Front] = {}

    def get(task: str, of: str | None = None, **settings: Any) -> Front:
        key = (task, json.dumps(settings))
        if key not in fronts:
            root = tmp_path_factory.mktemp("front")
            artifact = make_artifact(root / "artifact", of or task)
            repository = deploy(artifact, root / "out", task=task, name="front", **settings)
            fronts[key] = Front(repository.path / "front" / "1", artifact.path)
        fronts[key].calls.clear()
        # Reset the measured call costs, so that earlier tests do not influence this test.
        fronts[key].batches._calls = CallCosts()
        return fronts[key]

    return get


@pytest.fixture(scope="session")
def local(front: Fronts) -> Callable[..., Any]:
    """Return a function that creates the local pipeline for the artifact that the front model (the model that accepts
    texts) runs.
    """
    pipelines: dict[str, Any] = {}

    def get(task: str, of: str | None = None) -> Any:
        if task not in pipelines:
            pipelines[task] = accel.pipeline(task, str(front(task, of).artifact))
        return pipelines[task]

    return get


def test_labels_and_scores_equal_the_pipelines(front: Fronts, local: Local) -> None:
    answers = front("text-classification").ask_all([{"TEXT": [text]} for text in TEXTS])
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = local("text-classification")(text)[0]
        assert answer["LABEL"].tolist() == [[expected["label"].encode()]]
        np.testing.assert_allclose(answer["SCORE"], [[expected["score"]]], atol=ATOL)
        everything = {entry["label"]: entry["score"] for entry in local("text-classification")(text, top_k=None)}
        labels = front("text-classification").batches.settings["options"]["labels"]
        np.testing.assert_allclose(answer["SCORES"][0], [everything[label] for label in labels], atol=ATOL)


def test_only_the_text_without_a_required_token_is_refused(tmp_path: Path) -> None:
    artifact = make_artifact(tmp_path / "artifact", "text-classification")
    tokenizer = transformers.AutoTokenizer.from_pretrained(artifact.path)
    (component,) = artifact.components
    ids, *others = component.inputs
    # Require a token that only one of the texts contains.
    ids = replace(ids, required=tokenizer.convert_tokens_to_ids("card"))
    component = replace(component, inputs=(ids, *others))
    artifact = Artifact(artifact.path, replace(artifact.manifest, components=(component,)))
    repository = deploy(artifact, tmp_path / "out", task="text-classification", name="front")
    front = Front(repository.path / "front" / "1", artifact.path)
    right, refused = front.ask_all([{"TEXT": [TEXTS[0]]}, {"TEXT": [TEXTS[1]]}])
    assert right["LABEL"].shape == (1, 1)
    assert isinstance(refused, InvalidRequestError)
    assert "does not contain the token id" in str(refused)


@pytest.mark.parametrize("function", ["none", "sigmoid", "softmax"])
def test_text_pairs_and_functions_to_apply(front: Fronts, local: Local, function: str) -> None:
    answer = front("text-classification").ask({"TEXT": [TEXTS[0]], "TEXT_PAIR": [TEXTS[1]]}, function_to_apply=function)
    expected = local("text-classification")({"text": TEXTS[0], "text_pair": TEXTS[1]}, function_to_apply=function)
    np.testing.assert_allclose(answer["SCORE"], [[expected["score"]]], atol=ATOL)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_equal_the_pipelines(front: Fronts, local: Local, strategy: str) -> None:
    answers = front("token-classification").ask_all([{"TEXT": [text]} for text in TEXTS], aggregation_strategy=strategy)
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = local("token-classification")(text, aggregation_strategy=strategy)
        same_entities(json.loads(answer["ENTITIES"][0, 0]), expected)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_long_texts_are_tagged_in_windows(front: Fronts, local: Local) -> None:
    long = " ".join(TEXTS * 3)
    answer = front("token-classification").ask({"TEXT": [long]}, aggregation_strategy="first", stride=8)
    expected = local("token-classification")(long, aggregation_strategy="first", stride=8)
    same_entities(json.loads(answer["ENTITIES"][0, 0]), expected)
    assert front("token-classification").batches is not None


def same_entities(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [{k: v for k, v in entity.items() if k != "score"} for entity in actual] == [
        {k: v for k, v in entity.items() if k != "score"} for entity in expected
    ]
    np.testing.assert_allclose(
        [entity["score"] for entity in actual], [entity["score"] for entity in expected], atol=ATOL
    )


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"max_seq_len": 24, "doc_stride": 4}, {"max_answer_len": 2}])
def test_answers_equal_the_pipelines(front: Fronts, local: Local, options: dict[str, Any]) -> None:
    context = " ".join(TEXTS * 2)
    answer = front("question-answering").ask({"QUESTION": ["where?"], "CONTEXT": [context]}, **options)
    expected = local("question-answering")(question="where?", context=context, **options)
    expected = expected if isinstance(expected, list) else [expected]
    assert [text.decode() for text in answer["ANSWER"][0]] == [item["answer"] for item in expected]
    assert answer["START"].tolist() == [[item["start"] for item in expected]]
    assert answer["END"].tolist() == [[item["end"] for item in expected]]
    np.testing.assert_allclose(answer["SCORE"][0], [item["score"] for item in expected], atol=ATOL)


def test_impossible_answer_equals_the_pipelines(front: Fronts, local: Local) -> None:
    settings = {"handle_impossible_answer": True, "top_k": 50}
    answer = front("question-answering").ask({"QUESTION": ["where?"], "CONTEXT": ["pay the fee"]}, **settings)
    expected = local("question-answering")(question="where?", context="pay the fee", **settings)
    assert b"" in answer["ANSWER"][0].tolist()
    np.testing.assert_allclose(answer["SCORE"][0], [item["score"] for item in expected], atol=ATOL)


@pytest.mark.parametrize("task", ["sentence-similarity", "feature-extraction"])
@pytest.mark.parametrize("normalize", [False, True])
def test_embeddings_equal_the_models(front: Fronts, task: str, normalize: bool) -> None:
    served = front(task)
    embeddings = np.concatenate(
        [a["EMBEDDING"] for a in served.ask_all([{"TEXT": [t]} for t in TEXTS], normalize=normalize)]
    )
    model = accel.ORTModelForFeatureExtraction.from_pretrained(served.artifact)
    np.testing.assert_allclose(embeddings, model.encode(TEXTS, normalize_embeddings=normalize), atol=ATOL)


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("labels", [["bank", "phone", "fee"], ["bank"]])
def test_candidate_labels_equal_the_pipelines(
    front: Fronts, local: Local, labels: list[str], multi_label: bool
) -> None:
    zero_shot = front("zero-shot-classification", "text-classification")
    answer = zero_shot.ask({"TEXT": [TEXTS[3]], "CANDIDATE_LABELS": labels}, multi_label=multi_label)
    expected = local("zero-shot-classification", "text-classification")(TEXTS[3], labels, multi_label=multi_label)
    assert [label.decode() for label in answer["LABELS"][0]] == expected["labels"]
    np.testing.assert_allclose(answer["SCORES"][0], expected["scores"], atol=ATOL)


def test_rankings_equal_the_models(front: Fronts) -> None:
    served = front("text-ranking")
    answer = served.ask({"QUERY": [TEXTS[0]], "DOCUMENTS": TEXTS[1:]})
    model = accel.ORTModelForSequenceClassification.from_pretrained(served.artifact)
    expected = model.rank(TEXTS[0], TEXTS[1:])
    assert answer["RANKING"][0].tolist() == [served["corpus_id"] for served in expected]
    np.testing.assert_allclose(
        answer["SCORES"][0][answer["RANKING"][0]], [served["score"] for served in expected], atol=ATOL
    )


def test_requests_of_a_batch_share_one_call(front: Fronts) -> None:
    served = front("text-classification")
    served.ask_all([{"TEXT": [text]} for text in TEXTS])
    assert [shape[0] for shape in served.calls] == [len(TEXTS)]


def test_large_batches_are_divided_by_length(front: Fronts) -> None:
    small_batches, large_batches = front("text-classification", max_batch_size=2), front("text-classification")
    requests = [{"TEXT": [text]} for text in TEXTS]
    expected = large_batches.ask_all(requests)
    answers = small_batches.ask_all(requests)
    assert [shape[0] for shape in small_batches.calls] == [2, 2, 1]
    assert [shape[1] for shape in small_batches.calls] == sorted(shape[1] for shape in small_batches.calls)
    for a, b in zip(answers, expected, strict=True):
        np.testing.assert_allclose(a["SCORES"], b["SCORES"], atol=ATOL)


def taught(call_s: float, token_s: float, count: int = 40) -> CallCosts:
    """Return call costs that were measured with calls of many sizes. `call_s` and `token_s` are the costs of a call and
    of a token in seconds.
    """
    calls = CallCosts()
    for tokens in np.random.default_rng(0).integers(8, 600, size=count).tolist():
        calls.note(tokens, call_s + tokens * token_s)
    return calls


LENGTHS = [4, 5, 5, 6, 40, 42, 90]


@pytest.mark.parametrize(
    ("calls", "parts"),
    [
        (CallCosts(), [(0, 7)]),
        (taught(1e-3, 1e-3, count=7), [(0, 7)]),
        (taught(8e-3, 0.0), [(0, 7)]),
        (taught(1.0, 1e-4), [(0, 7)]),
        (taught(10e-3, 1e-3), [(0, 4), (4, 6), (6, 7)]),
        (taught(120e-3, 1e-3), [(0, 4), (4, 7)]),
    ],
    ids=["nothing known", "too little known", "an accelerator", "dear calls", "dear tokens", "in between"],
)
def test_rows_are_divided_by_costs(calls: CallCosts, parts: list[tuple[int, int]]) -> None:
    assert calls.divide(LENGTHS, 32) == parts


def test_division_has_the_lowest_cost() -> None:
    """No other division of the six rows has a lower cost."""
    lengths, call, most = [3, 4, 9, 11, 30, 31], 12.0, 3
    calls = taught(call * 1e-3, 1e-3)

    def cost(parts: Sequence[tuple[int, int]]) -> float:
        return sum(call + (end - start) * lengths[end - 1] for start, end in parts)

    every = []
    for bits in range(1 << (len(lengths) - 1)):
        ends = [i + 1 for i in range(len(lengths) - 1) if bits >> i & 1] + [len(lengths)]
        parts = list(zip([0, *ends[:-1]], ends, strict=True))
        if all(end - start <= most for start, end in parts):
            every.append(cost(parts))
    assert cost(calls.divide(lengths, most)) == pytest.approx(min(every))


def test_divided_rows_give_equal_results(front: Fronts) -> None:
    served = front("text-classification")
    requests = [{"TEXT": [text]} for text in TEXTS]
    undivided = served.ask_all(requests)
    served.batches._calls = taught(1e-3, 1e-3)
    served.calls.clear()
    divided = served.ask_all(requests)
    assert len(served.calls) > 1
    for a, b in zip(divided, undivided, strict=True):
        np.testing.assert_allclose(a["SCORES"], b["SCORES"], atol=ATOL)


def test_batches_are_padded_to_buckets(front: Fronts) -> None:
    bucketed = front("text-classification", buckets=(16, 40))
    answers = bucketed.ask_all([{"TEXT": [text]} for text in TEXTS])
    assert {shape[1] for shape in bucketed.calls} <= {16, 40}
    np.testing.assert_allclose(
        answers[0]["SCORES"], front("text-classification").ask({"TEXT": [TEXTS[0]]})["SCORES"], atol=ATOL
    )


def test_left_padding_does_not_change_results(front: Fronts, tmp_path: Path) -> None:
    plain = front("token-classification")
    left = Front(plain.folder, plain.artifact)
    left.batches.tokens._left = True
    requests = [{"TEXT": [text]} for text in TEXTS]
    for a, b in zip(left.ask_all(requests), plain.ask_all(requests), strict=True):
        assert [entity["entity"] for entity in json.loads(a["ENTITIES"][0, 0])] == [
            entity["entity"] for entity in json.loads(b["ENTITIES"][0, 0])
        ]


def test_refused_request_does_not_affect_other_requests(front: Fronts) -> None:
    served = front("text-classification")
    expected = served.ask({"TEXT": [TEXTS[0]]})
    answers = served.ask_all([{"TEXT": [TEXTS[0]]}, {"TEXT": ["pay " * 100]}])
    np.testing.assert_allclose(answers[0]["SCORES"], expected["SCORES"], atol=ATOL)
    assert isinstance(answers[1], InvalidRequestError)
    assert "102 tokens" in str(answers[1])


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("task", ["text-classification", "token-classification", "feature-extraction"])
def test_nan_fails_only_its_request(front: Fronts, task: str, spread: bool) -> None:
    """One row of the batch is NaN. With `spread`, all rows of the batch become NaN, as with dynamic int8 quantization.
    Only the request of this row fails.
    """
    served = front(task)
    first = int(served.batches.tokens.encode(TEXTS[1], cut="longest_first")[0].ids[1])

    def call(feeds: Mapping[str, Any]) -> dict[str, Any]:
        outputs = served.call(feeds)
        wrong = (feeds["input_ids"] == first).any(axis=1)
        for values in outputs.values():
            values[wrong | (spread & wrong.any())] = np.nan
        return outputs

    requests = [Request({"TEXT": texts(text)}, {}) for text in TEXTS[:3]]
    answers = served.batches.answer(requests, call)
    assert isinstance(answers[1], NonFiniteOutputError)
    assert "NaN" in str(answers[1])
    expected = served.ask_all([{"TEXT": [text]} for text in TEXTS[:3]])
    for i in (0, 2):
        for name, values in answers[i].items():
            if values.dtype != object:
                np.testing.assert_allclose(values, expected[i][name], atol=ATOL)


def test_infinity_in_the_output_raises(front: Fronts) -> None:
    served = front("feature-extraction")

    def call(feeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values + np.inf for name, values in served.call(feeds).items()}

    (answer,) = served.batches.answer([Request({"TEXT": texts("pay")}, {})], call)
    assert isinstance(answer, NonFiniteOutputError)


def test_long_text_can_be_truncated(front: Fronts, local: Local) -> None:
    answer = front("text-classification").ask({"TEXT": ["pay " * 100]}, truncation=True)
    expected = local("text-classification")("pay " * 100, truncation=True)[0]
    np.testing.assert_allclose(answer["SCORE"], [[expected["score"]]], atol=ATOL)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "an unknown parameter": ("text-classification", {"TEXT": ["a"]}, {"topk": 1}, "topk"),
    "a function that is none": ("text-classification", {"TEXT": ["a"]}, {"function_to_apply": "tanh"}, "tanh"),
    "a number that is a text": ("question-answering", {"QUESTION": ["a"], "CONTEXT": ["b"]}, {"top_k": "2"}, "top_k"),
    "no answers": ("question-answering", {"QUESTION": ["a"], "CONTEXT": ["b"]}, {"top_k": 0}, "top_k"),
    "no question": ("question-answering", {"QUESTION": [" "], "CONTEXT": ["b"]}, {}, "question"),
    "a stride beyond the window": (
        "question-answering", {"QUESTION": ["a"], "CONTEXT": ["b " * 60]}, {"max_seq_len": 12, "doc_stride": 12}, "stride",
    ),
    "a question that leaves no more room than the stride": (
        "question-answering", {"QUESTION": ["a " * 13], "CONTEXT": ["b " * 60]}, {"max_seq_len": 24, "doc_stride": 8}, "stride",
    ),
    "a text that is empty": ("zero-shot-classification", {"TEXT": [""], "CANDIDATE_LABELS": ["a"]}, {}, "empty"),
    "a stride without a strategy": ("token-classification", {"TEXT": ["a"]}, {"stride": 2}, "aggregation_strategy"),
    "no documents": ("text-ranking", {"QUERY": ["a"], "DOCUMENTS": []}, {}, "documents"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_requests_name_the_reason(front: Fronts, case: str) -> None:
    task, inputs, options, words = REFUSED[case]
    of = {"zero-shot-classification": "text-classification"}.get(task)
    with pytest.raises(InvalidRequestError, match=words):
        front(task, of).ask(inputs, **options)


def test_invalid_utf8_is_refused(front: Fronts) -> None:
    served = front("text-classification")
    (answer,) = served.batches.answer([Request({"TEXT": np.array([[b"\xff\xfe"]], dtype=object)}, {})], served.call)
    assert isinstance(answer, InvalidRequestError)


# The classes below replace the classes that Triton passes to Python models. They have only the parts that the models
# use.


@dataclass
class Tensor:
    name: str
    values: Any

    def as_numpy(self) -> Any:
        return self.values


@dataclass
class Response:
    tensors: list[Tensor]
    error: Any = None

    def has_error(self) -> bool:
        return self.error is not None


@dataclass
class Asked:
    tensors: list[Tensor]
    options: str = ""

    def parameters(self) -> str:
        return self.options


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Replace the module `triton_python_backend_utils`, which exists only inside Triton."""
    module: Any = ModuleType("triton_python_backend_utils")

    def find(holder: Any, name: str) -> Tensor | None:
        return next((tensor for tensor in holder.tensors if tensor.name == name), None)

    class TritonError(Exception):
        INVALID_ARG = 3

    module.Tensor, module.TritonError, module.InferenceResponse = Tensor, TritonError, Response
    module.get_input_tensor_by_name = module.get_output_tensor_by_name = find
    module.PreferredMemory, module.TRITONSERVER_MEMORY_CPU = (lambda *_: None), 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    for name in [name for name in sys.modules if name.startswith("accel.deploying.triton.served.")]:
        if hasattr(sys.modules[name], "pb_utils"):
            del sys.modules[name]


def model(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the Triton model of a module in `served`. The given folder is the folder of the model's version."""
    module = importlib.import_module(f"accel.deploying.triton.served.{name}")
    monkeypatch.setattr(module, "__file__", str(folder / "model.py"))
    return module.TritonPythonModel()


def test_front_model_handles_triton_requests(front: Fronts, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served_front = front("text-classification")

    class InferenceRequest:
        def __init__(self, model_name: str, inputs: Any, requested_output_names: Any, preferred_memory: Any) -> None:
            self.feeds = {tensor.name: tensor.values for tensor in inputs}
            assert model_name == "front_graph"

        def exec(self) -> Response:
            return Response([Tensor(name, values) for name, values in served_front.call(self.feeds).items()])

    backend.InferenceRequest = InferenceRequest
    served = model("text_model", served_front.folder, monkeypatch)
    served.initialize({"model_config": json.dumps({"input": [{"name": "TEXT"}, {"name": "TEXT_PAIR"}]})})
    responses = served.execute([Asked([Tensor("TEXT", texts(TEXTS[0]))]), Asked([Tensor("TEXT", texts("pay " * 99))])])
    expected = served_front.ask({"TEXT": [TEXTS[0]]})
    np.testing.assert_allclose(responses[0].tensors[2].values, expected["SCORES"], atol=ATOL)
    assert responses[1].error.args[1] == 3


def test_ensembles_equal_the_front_model(front: Fronts, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served_front = front("token-classification")
    tokenizer, last = (model("ensemble_step", served_front.folder, monkeypatch) for _ in range(2))
    for step, names in ((tokenizer, ["TEXT"]), (last, ["TEXT", "logits"])):
        step.initialize({"model_config": json.dumps({"input": [{"name": name} for name in names]})})
    text = Tensor("TEXT", texts(TEXTS[0]))
    (ids,) = tokenizer.execute([Asked([text])])
    outputs = served_front.call({tensor.name: tensor.values for tensor in ids.tensors})
    (answer,) = last.execute([Asked([text, *(Tensor(name, values) for name, values in outputs.items())])])
    assert answer.tensors[0].values.tolist() == served_front.ask({"TEXT": [TEXTS[0]]})["ENTITIES"].tolist()


def test_python_graph_model_splits_merged_requests(
    tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make_artifact(tmp_path / "artifact")
    repository = deploy(artifact, tmp_path / "out", layout="graph", name="graph", backend="python")
    folder = repository.path / "graph" / "1"
    served = model("graph", folder, monkeypatch)
    names = ["input_ids", "attention_mask", "token_type_ids"]
    served.initialize(
        {"model_config": json.dumps({"input": [{"name": n} for n in names], "output": [{"name": "logits"}]})}
    )
    rows = [np.full((n, 5), 7 + n, dtype="int64") for n in (1, 3)]
    requests = [
        Asked([Tensor("input_ids", r), Tensor("attention_mask", r * 0 + 1), Tensor("token_type_ids", r * 0)])
        for r in rows
    ]
    together = served.execute(requests)
    assert [response.tensors[0].values.shape for response in together] == [(1, 3), (3, 3)]
    for response, alone in zip(together, [served.execute([response])[0] for response in requests], strict=True):
        np.testing.assert_allclose(response.tensors[0].values, alone.tensors[0].values, atol=ATOL)
