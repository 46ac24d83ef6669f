"""Pipelines of transformers and of accel return the same outputs with accel's models as with PyTorch models."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import AccelError, ArtifactNotFoundError, ConfigError, InputError, TaskError
from accel.models.log_filter import FILTER
from accel.models.pipelines.length_sorted_batches import WINDOW_BATCHES
from accel.models.pipelines.pipeline import pipeline_class
from accel.models.pipelines.pipeline_arguments import check_known_arguments, loading_arguments
from accel.testing.models import tiny_model, tiny_tokenizer

TEXTS = [
    "where is my card",
    "help",
    "i lost my card in paris and i can not pay with my phone app please help me now",
    "the bank",
    "why is the transfer so slow",
    "top up",
    "wolfgang is in london",
]


def close(actual: Any, expected: Any) -> bool:
    """Return whether two outputs have equal structure and labels, and numbers that differ by at most 1e-4."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(close(actual[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(close(a, b) for a, b in zip(actual, expected, strict=True))
    if isinstance(expected, float | np.floating | np.ndarray | torch.Tensor):
        return bool(np.allclose(actual, expected, atol=1e-4))
    return bool(actual == expected)


CASES = [
    ("text-classification", "AutoModelForSequenceClassification", "ORTModelForSequenceClassification", {}),
    ("text-classification", "AutoModelForSequenceClassification", "ORTModelForSequenceClassification", {"top_k": None}),
    ("token-classification", "AutoModelForTokenClassification", "ORTModelForTokenClassification", {}),
    ("feature-extraction", "AutoModel", "ORTModelForFeatureExtraction", {}),
]


def pipelines(
    task: str, auto: str, ours: str, folder: Path, artifact: Artifact, make: Any = transformers.pipeline
) -> tuple[Any, Any]:
    """Return transformers' pipeline with the PyTorch model, and the pipeline that `make` creates with accel's model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = getattr(transformers, auto).from_pretrained(folder)
    model = getattr(accel, ours).from_pretrained(artifact.path)
    return (
        transformers.pipeline(task, model=original, tokenizer=tokenizer),
        make(task, model=model, tokenizer=tokenizer),
    )


@pytest.mark.parametrize("make", [transformers.pipeline, accel.pipeline], ids=["stock", "accel"])
@pytest.mark.parametrize(("task", "auto", "ours", "options"), CASES)
def test_text(
    task: str, auto: str, ours: str, options: dict[str, Any], make: Any,
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="transformers.pipelines.base"):
        theirs, ours_ = pipelines(task, auto, ours, tiny_folder("bert", task), tiny_artifact("bert", task), make)
    assert "not supported" not in caplog.text
    assert ours_.model.__class__.__name__ in repr(ours_)
    assert close(ours_(TEXTS[0], **options), theirs(TEXTS[0], **options))
    assert close(ours_(TEXTS, **options), theirs(TEXTS, **options))
    expected, results = theirs(TEXTS, **options), ours_(TEXTS, batch_size=2, **options)
    if task == "feature-extraction":
        # The features of a batch contain rows for padding tokens, also in transformers' pipeline. The number of these
        # rows depends on the batch, so only the rows of real tokens are compared.
        results = [[features[0][: len(alone[0])]] for features, alone in zip(results, expected, strict=True)]
    assert close(results, expected)


def test_fill_mask(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    folder, artifact = tiny_folder("bert", "fill-mask"), tiny_artifact("bert", "fill-mask")
    theirs, ours = pipelines("fill-mask", "AutoModelForMaskedLM", "ORTModelForMaskedLM", folder, artifact)
    assert close(ours("where is my [MASK]"), theirs("where is my [MASK]"))
    sorted_ = accel.pipeline("fill-mask", model=artifact.path)
    texts = [f"{text} [MASK]" for text in TEXTS]
    assert close(sorted_(texts, batch_size=2), theirs(texts))


def test_zero_shot(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    folder, artifact = tiny_folder(), tiny_artifact()
    auto = "AutoModelForSequenceClassification"
    theirs, ours = pipelines(
        "zero-shot-classification", auto, "ORTModelForSequenceClassification", folder, artifact, accel.pipeline
    )
    labels = ["card", "money"]
    assert close(ours(TEXTS[0], candidate_labels=labels), theirs(TEXTS[0], candidate_labels=labels))
    assert close(ours(TEXTS, candidate_labels=labels, batch_size=2), theirs(TEXTS, candidate_labels=labels))


def test_image_classification(tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]) -> None:
    image_module = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    folder, artifact = tiny_folder("vit", "image-classification"), tiny_artifact("vit", "image-classification")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 48, 3), dtype=np.uint8)
    image = image_module.fromarray(pixels)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    original = transformers.AutoModelForImageClassification.from_pretrained(folder)
    theirs = transformers.pipeline("image-classification", model=original, image_processor=processor)
    ours = accel.pipeline("image-classification", model=artifact.path)
    assert close(ours(image), theirs(image))
    assert close(ours([image] * 3, batch_size=2), theirs([image] * 3))


# The tests below check batches that are sorted by length.


def test_given_tokenizer_is_not_searched(tiny_artifact: Callable[..., Artifact], tmp_path: Path) -> None:
    shutil.copytree(tiny_artifact().path, tmp_path / "artifact")
    model = accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "artifact")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "artifact")
    for path in (tmp_path / "artifact").glob("tokenizer*"):
        path.unlink()
    assert accel.pipeline("text-classification", model=model, tokenizer=tokenizer)("my card")[0]["score"] > 0


def test_other_kinds_of_lists(tiny_artifact: Callable[..., Artifact]) -> None:
    import datasets

    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    assert classify([], batch_size=2) == []
    expected = classify(TEXTS)
    assert close(classify(tuple(TEXTS), batch_size=2), expected)
    assert close(classify(datasets.Dataset.from_dict({"text": TEXTS})["text"], batch_size=2), expected)


def test_batches_contain_similar_lengths(
    tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    shapes: list[tuple[int, ...]] = []
    run = classify.model._session.run
    monkeypatch.setattr(
        classify.model._session, "run", lambda feeds: shapes.append(tuple(feeds["input_ids"].shape)) or run(feeds)
    )
    classify(["card", "card " * 30] * 8, batch_size=4)
    assert [shape[1] for shape in shapes] == [3, 3, 32, 32]


MANY = [f"{TEXTS[i % 7]} {'card ' * (i * 7 % 11)}".strip() for i in range(70)]
PAIRS = [{"text": text, "text_pair": text[::3]} for text in MANY]


@pytest.mark.parametrize(
    ("inputs", "settings"),
    [
        (MANY, {}),
        (MANY, {"top_k": 1}),
        (MANY, {"top_k": 2}),
        (MANY, {"top_k": None}),
        (MANY, {"top_k": None, "function_to_apply": "sigmoid"}),
        (MANY, {"function_to_apply": "none"}),
        (MANY, {"truncation": True, "max_length": 6}),
        (MANY, {"add_special_tokens": False}),
        (MANY, {"padding": True}),
        (MANY, {"padding": "max_length", "max_length": 20, "truncation": True}),
        (MANY, {"num_workers": 1}),
        (PAIRS, {}),
        (PAIRS, {"truncation": "only_first", "max_length": 24}),
        ([*MANY, *PAIRS], {}),
        ([*MANY, "", " "], {}),
        ([*PAIRS, {"text": "my card", "text_pair": ""}], {}),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_batched_windows_equal_single_texts(
    inputs: list[Any],
    settings: dict[str, Any],
    tiny_folder: Callable[..., Path],
    tiny_artifact: Callable[..., Artifact],
) -> None:
    ours = accel.pipeline("text-classification", model=tiny_artifact().path)
    theirs = transformers.pipeline("text-classification", model=str(tiny_folder()))
    assert close(ours(inputs, batch_size=4, **settings), theirs(inputs, **settings))
    assert close(list(ours((text for text in inputs), batch_size=4, **settings)), theirs(inputs, **settings))


@pytest.mark.parametrize(
    "config",
    [
        {"problem_type": "regression", "num_labels": 1},
        {"num_labels": 1},
        {"problem_type": "multi_label_classification"},
    ],
    ids=str,
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_batched_windows_with_other_heads(config: dict[str, Any], side: str) -> None:
    model, tokenizer = tiny_model("bert", **config), tiny_tokenizer()
    tokenizer.padding_side = side
    ours = accel.pipeline("text-classification", model=model, tokenizer=tokenizer)
    theirs = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    assert type(theirs.model) is type(ours.model)
    # Use the same batches in both pipelines, because padding changes these outputs: with left padding, BERT's first
    # token is masked.
    assert close(ours(MANY, batch_size=len(MANY)), theirs(MANY, batch_size=len(MANY)))


def test_batched_windows_with_single_texts(tiny_artifact: Callable[..., Artifact]) -> None:
    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    many = [*MANY, *PAIRS][: 2 * WINDOW_BATCHES + 1]
    expected = [classify(text) for text in many]
    assert close(
        classify(many, batch_size=2), [result[0] if isinstance(result, list) else result for result in expected]
    )
    assert close(classify(many[:-1] + many[:1], batch_size=2)[-1:], classify(many[0]))


class Numbered(torch.utils.data.Dataset[str]):
    """Data set with a length, whose `__getitem__` never raises `IndexError`."""

    def __len__(self) -> int:
        return len(MANY)

    def __getitem__(self, i: int) -> str:
        return MANY[i % len(MANY)]


@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
def test_data_sets_end_at_their_length(task: str, tiny_artifact: Callable[..., Artifact]) -> None:
    results = list(accel.pipeline(task, model=tiny_artifact("bert", task).path)(Numbered(), batch_size=4))
    assert len(results) == len(MANY)


def test_results_before_a_generator_error_are_returned(tiny_artifact: Callable[..., Artifact]) -> None:
    def failing() -> Any:
        yield from MANY[:5]
        raise OSError("the disk is gone")

    for task in ("text-classification", "token-classification"):
        results = []
        with pytest.raises(OSError, match="the disk is gone"):
            for result in accel.pipeline(task, model=tiny_artifact("bert", task).path)(failing(), batch_size=2):
                results.append(result)  # noqa: PERF402  # results before the error
        assert len(results) == 5


def test_replaced_methods_are_called(tiny_artifact: Callable[..., Artifact]) -> None:
    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    classify.postprocess = lambda *_, **__: "mine"
    assert classify(MANY, batch_size=4) == ["mine"] * len(MANY)


def test_overridden_model_call_is_used(tiny_artifact: Callable[..., Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    labels = classify.model.config.num_labels
    monkeypatch.setattr(
        transformers.TextClassificationPipeline,
        "_forward",
        lambda self, inputs: {"logits": torch.eye(labels)[[1]].expand(len(inputs["input_ids"]), -1)},
    )
    assert {result["label"] for result in classify(MANY, batch_size=4)} == {classify.model.config.id2label[1]}


def test_batch_of_empty_texts() -> None:
    classify = accel.pipeline("text-classification", model=tiny_model("bert"), tokenizer=tiny_tokenizer())
    results = classify([*MANY, "", "", "", ""], batch_size=4, add_special_tokens=False)
    assert [entry["label"] in classify.model.config.label2id for entry in results] == [True] * (len(MANY) + 4)


def test_errors_of_batched_texts_equal_transformers(tiny_artifact: Callable[..., Artifact]) -> None:
    classify = accel.pipeline("text-classification", model=tiny_artifact().path)
    with pytest.raises(ValueError, match="text pairs"):
        classify([["a", "b"], ["c", "d"]], batch_size=2)
    with pytest.raises(ValueError, match="Unrecognized"):
        classify(MANY, batch_size=4, function_to_apply=7)
    classify.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="without pad_token"):
        classify(MANY, batch_size=4)


# The tests below check the question answering pipeline, which transformers 5 removed.


@pytest.fixture(scope="module")
def answer(tiny_artifact: Callable[..., Artifact]) -> Any:
    return accel.pipeline("question-answering", model=tiny_artifact("bert", "question-answering").path)


CONTEXT = "i lost my card in paris . the bank can open a new account in london ."


def test_several_questions_and_top_k(answer: Any) -> None:
    questions = ["where is my card", "what can the bank open"]
    expected = [answer(question=question, context=CONTEXT) for question in questions]
    assert close(answer(question=questions, context=CONTEXT), expected)
    assert close(answer([{"question": q, "context": CONTEXT} for q in questions], batch_size=2), expected)
    top = answer(question=questions[0], context=CONTEXT, top_k=3)
    assert [entry["score"] for entry in top] == sorted((entry["score"] for entry in top), reverse=True)
    assert len({(entry["start"], entry["end"]) for entry in top}) == 3
    impossible = answer(question=questions[0], context=CONTEXT, top_k=1000, handle_impossible_answer=True)
    assert any(entry["answer"] == "" for entry in impossible)


def test_invalid_questions_are_refused(answer: Any) -> None:
    with pytest.raises(InputError, match="argument context is missing"):
        answer(question="what")
    with pytest.raises(InputError, match="'context' of an example is missing"):
        answer(question="what", context=" ")
    with pytest.raises(InputError, match="2 questions were passed with 1 contexts"):
        answer(question=["a", "b"], context=["c"])
    with pytest.raises(ConfigError, match="no option"):
        answer(question="what", context=CONTEXT, topk=2)


@pytest.mark.parametrize("words", [13, 30], ids=["no more than the stride", "nothing"])
def test_question_longer_than_a_window_is_refused(answer: Any, words: int) -> None:
    with pytest.raises(InputError, match="cannot be split into windows"):
        answer(question="card " * words, context=CONTEXT * 4, max_seq_len=24, doc_stride=8)


# The tests below check the arguments of `accel.pipeline`.


def test_task_is_read_from_the_model(tiny_artifact: Callable[..., Artifact], tiny_folder: Callable[..., Path]) -> None:
    assert accel.pipeline(model=tiny_artifact().path).task == "text-classification"
    assert accel.pipeline(model=tiny_folder(), backend="pytorch").task == "text-classification"
    assert accel.pipeline("sentiment-analysis", model=tiny_artifact().path)("help")[0]["label"].startswith("LABEL")


@pytest.mark.parametrize(
    ("task", "logged"), [("text-classification", False), ("sentiment-analysis", False), ("summarization", True)]
)
def test_unsupported_model_log_of_transformers_is_filtered(task: str, logged: bool) -> None:
    words = f"The model 'ORTModelForSequenceClassification' is not supported for {task}. Supported models are ['A']."
    record = logging.LogRecord("transformers.pipelines.base", logging.ERROR, "", 0, words, None, None)
    assert FILTER.filter(record) is logged


def test_invalid_arguments_raise(tiny_artifact: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match="transformers has no default model for the task 'feature-extractionn'"):
        accel.pipeline("feature-extractionn")
    with pytest.raises(TaskError, match="not a task|does not exist"):
        accel.pipeline("text-clasification", model=tiny_artifact().path)
    with pytest.raises(TaskError, match="cannot use the model"):
        accel.pipeline("fill-mask", model=accel.ORTModelForSequenceClassification(tiny_artifact()))
    with pytest.raises(TaskError, match="use ORTModelForSequenceClassification"):
        accel.pipeline("fill-mask", model=tiny_artifact().path)


def test_loading_arguments_are_passed_and_unknown_ones_refused(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: dict[str, Any] = {}

    def read(**arguments: Any) -> Any:
        passed.update(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr("accel.models.pipelines.pipeline.read_arguments", read)
    words = {name: object() for name in loading_arguments() - {"task", "backend", "device", "revision", "token"}}
    words |= {"trust_remote_code": False, "subfolder": "inner"}
    for name in ("subfolder", "file_name", "variant", "provider", "session_options", "export", "cache_dir", "config"):
        assert name in words
    with pytest.raises(ConfigError, match="enough"):
        accel.pipeline("text-classification", tiny_folder(), **words)
    assert words.items() <= passed.items()
    with pytest.raises(ConfigError, match=r"no argument 'subfoldr'. Did you mean 'subfolder'"):
        accel.pipeline("text-classification", tiny_folder(), subfoldr="onnx")


@pytest.mark.parametrize(
    "task", ["text-classification", "object-detection", "zero-shot-classification", "feature-extraction"]
)  # fmt: skip
def test_every_pipeline_refuses_unknown_arguments(task: str) -> None:
    with pytest.raises(ConfigError, match="no argument 'nobodys_word'"):
        check_known_arguments(task, pipeline_class(task), ["top_k", "nobodys_word"])


def test_ignored_arguments_of_transformers_4(tiny_artifact: Callable[..., Artifact]) -> None:
    expected = accel.pipeline("text-classification", tiny_artifact().path)("card")
    assert accel.pipeline("text-classification", tiny_artifact().path, framework="pt")("card") == expected
    for words in ({"framework": "tf"}, {"pipeline_class": transformers.TextClassificationPipeline}):
        with pytest.raises(ConfigError, match="no argument"):
            accel.pipeline("text-classification", tiny_artifact().path, **words)


@pytest.mark.parametrize("word", ["load_in_8bit", "quantization_config"])
def test_quantization_while_loading_is_refused(tiny_folder: Callable[..., Path], word: str) -> None:
    with pytest.raises(ConfigError, match="accel quantize"):
        accel.pipeline("text-classification", tiny_folder(), **{word: True})


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        ({"batch_size": "a"}, ConfigError, "batch_size is 'a'"),
        ({"batch_size": 0}, ConfigError, "at least 1"),
        ({"batch_size": -1}, ConfigError, "at least 1"),
        ({"batch_size": True}, ConfigError, "batch_size is True"),
        ({"batch_size": 1.5}, ConfigError, "whole number"),
        ({"num_workers": "a"}, ConfigError, "num_workers is 'a'"),
        ({"task": 5}, ConfigError, "task is 5"),
        ({"task": b"x"}, ConfigError, "task is b.x."),
        ({"model": 5}, ConfigError, "model is 5|5 is not a model"),
        ({"model_kwargs": 5}, ConfigError, "model_kwargs is 5"),
        ({"tokenizer": 5}, ConfigError, "tokenizer is 5, which is neither"),
        ({"tokenizer": []}, ConfigError, "neither a loaded tokenizer"),
        ({"tokenizer": "/nope"}, ArtifactNotFoundError, "/nope contains no tokenizer"),
        ({"tokenizer": Path("/nope")}, ArtifactNotFoundError, "/nope contains no tokenizer"),
        ({"tokenizer": "no/such"}, ArtifactNotFoundError, "no/such contains no tokenizer"),
        ({"feature_extractor": 5}, ConfigError, "neither a loaded feature extractor"),
    ],
)
def test_invalid_argument_values_raise(
    arguments: dict[str, Any], kind: type[AccelError], word: str, tiny_artifact: Callable[..., Artifact]
) -> None:
    with pytest.raises(kind, match=word) as error:
        accel.pipeline(**{"task": "text-classification", "model": tiny_artifact().path, **arguments})
    assert error.value.fix


def test_tokenizer_given_by_its_folder(tiny_artifact: Callable[..., Artifact]) -> None:
    folder = tiny_artifact().path
    answers = [
        accel.pipeline("text-classification", folder, tokenizer=source)("words") for source in (folder, str(folder))
    ]
    assert answers[0] == answers[1] == accel.pipeline("text-classification", folder)("words")


@pytest.mark.parametrize("size", ["a", 0, -1, 1.5, True])
def test_invalid_batch_sizes_of_a_call_are_refused(size: Any, tiny_artifact: Callable[..., Artifact]) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        accel.pipeline("text-classification", tiny_artifact().path)(["a", "b"], batch_size=size)


@pytest.mark.parametrize("odd", [None, 5, b"x", [None], ["a", 5], [["a"]], [[]], object(), {"x": 1}, {"a"}])
def test_unusual_inputs_behave_as_in_transformers(
    odd: Any, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    stock = transformers.pipeline("text-classification", model=str(tiny_folder()))
    with pytest.raises(Exception) as theirs:  # noqa: PT011  # transformers may raise any exception
        stock(odd)
    with pytest.raises(theirs.type) as ours:
        accel.pipeline("text-classification", tiny_artifact().path)(odd)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("odd", [None, 5, b"x", [None], ["a", 5], [["a"]], {"x": 1}, ""])
def test_invalid_inputs_of_removed_pipelines_are_refused(odd: Any, generator: Callable[..., Artifact]) -> None:
    with pytest.raises(InputError) as error:
        accel.pipeline("text2text-generation", generator("bart").path)(odd)
    assert error.value.fix


@pytest.mark.parametrize("odd", [5, b"x", [5], [["a"]], [None], [{}]])
def test_invalid_inputs_of_question_answering_are_refused(odd: Any, answer: Any) -> None:
    for call in (lambda: answer(odd), lambda: answer(question=odd, context="a"), lambda: answer("a", odd)):
        with pytest.raises(InputError) as error:
            call()
        assert error.value.fix
