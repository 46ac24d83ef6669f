"""Tests of questions about documents and tables: pipeline outputs compared with PyTorch, accuracy, and calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.artifact import Artifact
from accel.errors import ExportError, InputError
from accel.tasks.document_question_answering import ANLS
from accel.testing.table_model import TAPAS

TOLERANCE = 1e-3
DOCUMENTS, TABLES = "document-question-answering", "table-question-answering"
BACKENDS = ("cpu", "openvino", "pytorch")
FAMILIES = ["layoutlm", pytest.param("layoutlmv3", marks=pytest.mark.thorough)]
PAGE = [
    (word, [40 * place, 100 * (place // 4), 40 * place + 35, 100 * (place // 4) + 20])
    for place, word in enumerate("the lost card was old bank paid a fee for new phone in london please help".split())
]
ASKED = ["what was paid?", "where is my card", "how can i pay for a new phone"]
TABLE = {"bank": ["london bank", "paris bank", "my bank"], "fee": ["12", "3", "45"], "card": ["old", "new", "lost"]}


def original(folder: Path, task: str) -> Any:
    auto = {
        DOCUMENTS: transformers.AutoModelForDocumentQuestionAnswering,
        TABLES: transformers.AutoModelForTableQuestionAnswering,
    }[task]
    return auto.from_pretrained(folder).eval()


def opened(family: str, task: str, backend: str, folder: Path, tiny_artifact: Callable[..., Artifact]) -> Any:
    return accel.ORTModel.from_pretrained(
        folder if backend == "pytorch" else tiny_artifact(family, task), backend=backend, task=task
    )


def alike(answers: Any, expected: Any) -> None:
    assert [answer["answer"] for answer in answers] == [answer["answer"] for answer in expected]
    assert [(answer["start"], answer["end"]) for answer in answers] == [
        (answer["start"], answer["end"]) for answer in expected
    ]
    assert max(abs(a["score"] - b["score"]) for a, b in zip(answers, expected, strict=True)) <= TOLERANCE


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=pytest.mark.thorough), *BACKENDS[1:]])
@pytest.mark.parametrize("family", FAMILIES)
def test_document_questions_in_transformers_pipeline(
    family: str, backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder(family, DOCUMENTS)
    ours = opened(family, DOCUMENTS, backend, folder, tiny_artifact)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.pipeline(DOCUMENTS, model=original(folder, DOCUMENTS), tokenizer=tokenizer)
    # The second set of options splits the page into windows.
    options: tuple[dict[str, Any], ...] = ({"top_k": 3}, {"top_k": 2, "max_seq_len": 24, "doc_stride": 4})
    if family == "layoutlmv3":
        # The tokenizer in this case has one token for each letter, so the windows are longer.
        options = ({"top_k": 3}, {"top_k": 2, "max_seq_len": 60, "doc_stride": 10})
    for stock in (
        transformers.pipeline(DOCUMENTS, model=ours, tokenizer=tokenizer),
        accel.pipeline(DOCUMENTS, model=ours),
    ):
        for question in ASKED:
            for option in options:
                inputs = {"question": question, "word_boxes": PAGE}
                expected = reference(inputs, **option)
                assert expected
                alike(stock(inputs, **option), expected)


def test_unused_image_is_ignored_as_in_transformers(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder("layoutlm", DOCUMENTS)
    model = opened("layoutlm", DOCUMENTS, "cpu", folder, tiny_artifact)
    ids = torch.randint(6, 100, (1, 7), generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([0, 0, 10, 10]).expand(1, 7, 4)
    inputs = {"input_ids": ids, "bbox": boxes, "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(model(**inputs, image=torch.zeros(1, 3, 8, 8)).start_logits, model(**inputs).start_logits)


@pytest.mark.parametrize("box", [[-1, 0, 10, 10], [0, 0, 10, 5000], [20, 0, 10, 10], [0, 30, 10, 10]])
def test_invalid_boxes_are_refused(
    box: list[int], tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    """ONNX Runtime would read some invalid box values from the end of the embedding table, so accel checks the boxes."""
    folder = tiny_folder("layoutlm", DOCUMENTS)
    model = opened("layoutlm", DOCUMENTS, "cpu", folder, tiny_artifact)
    ids = torch.full((1, 3), 7)
    boxes = torch.tensor([[[0, 0, 10, 10], box, [5, 5, 6, 6]]])
    with pytest.raises(IndexError):
        original(folder, DOCUMENTS)(input_ids=ids, bbox=boxes)
    with pytest.raises(InputError, match="bbox has coordinates"):
        model(input_ids=ids, bbox=boxes)


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
@pytest.mark.thorough
def test_token_classification_reads_bounding_boxes(backend: str, tmp_path: Path) -> None:
    """LayoutLM heads for other tasks than question answering also read bounding boxes. If boxes are missing, the heads
    use zeros. The heads reject the same invalid boxes.
    """
    torch.manual_seed(0)
    config = transformers.LayoutLMConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
        initializer_range=0.5, max_position_embeddings=64, max_2d_position_embeddings=200,
    )  # fmt: skip
    model = transformers.LayoutLMForTokenClassification(config).eval()
    accel.export(model, tmp_path / "exported", task="token-classification", backend=backend)
    ours = accel.ORTModelForTokenClassification.from_pretrained(tmp_path / "exported", backend=backend)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (2, 9), generator=draw)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([7, 8]), 0)
    corners = torch.randint(0, 90, (2, 9, 2), generator=draw)
    texts = {"input_ids": ids, "attention_mask": mask}
    placed = {**texts, "bbox": torch.cat([corners, corners + 60], -1)}
    for inputs in (placed, texts):
        with torch.no_grad():
            torch.testing.assert_close(ours(**inputs).logits, model(**inputs).logits, rtol=0, atol=1e-5)
    assert not torch.allclose(ours(**placed).logits, ours(**texts).logits, atol=1e-2)
    with pytest.raises(InputError, match="bbox has coordinates"):
        ours(**texts, bbox=placed["bbox"] + 60)


@pytest.mark.parametrize("place", [-1, 5000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_session_refuses_invalid_boxes(
    backend: str, place: int, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    session = opened("layoutlm", DOCUMENTS, backend, tiny_folder("layoutlm", DOCUMENTS), tiny_artifact).sessions[
        "model"
    ]
    feeds = {name: torch.ones(1, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    boxes = torch.tensor([[[0, 0, 10, 10], [5, 5, 6, 6], [5, 5, 6, 6]]])
    before = session.run({**feeds, "bbox": boxes})
    with pytest.raises(InputError, match="'bbox' contains the value"):
        session.run({**feeds, "bbox": boxes.index_fill(2, torch.tensor([2]), place)})
    for name, tensor in session.run({**feeds, "bbox": boxes}).items():
        assert torch.equal(tensor, before[name])


def rows_answered_by(folder: Path) -> list[dict[str, Any]]:
    ask = transformers.pipeline(
        DOCUMENTS, model=original(folder, DOCUMENTS), tokenizer=transformers.AutoTokenizer.from_pretrained(folder)
    )
    words, boxes = [word for word, _ in PAGE], [box for _, box in PAGE]
    return [
        {
            "question": question, "words": words, "boxes": boxes,
            "answers": [ask({"question": question, "word_boxes": PAGE})[0]["answer"]],
        }
        for question in ASKED
    ]  # fmt: skip


def test_accuracy_of_document_questions(
    tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder("layoutlm", DOCUMENTS)
    rows = rows_answered_by(folder)
    artifact = tiny_artifact("layoutlm", DOCUMENTS)
    evaluation = accel.evaluate(artifact.path, rows)
    assert (evaluation.metric, evaluation.value) == ("anls", 1.0)
    rows[0] = {**rows[0], "answers": ["zzz", "qqqqqqqqqqqqqq"]}
    assert accel.evaluate(artifact.path, rows).value == pytest.approx(2 / 3)
    for wrong, message in (
        ({"boxes": rows[0]["boxes"][1:]}, "has 16 words, but 15 bounding boxes"),
        ({"boxes": [[0, 0, 2000, 1]] * 16}, r"\[0, 0, 2000, 1\]"),
        ({"answers": []}, "has no answer"),
    ):
        with pytest.raises(InputError, match=message):
            accel.evaluate(artifact.path, [{**rows[1], **wrong}, rows[1]])


def test_anls_of_nearly_correct_answers() -> None:
    metric = ANLS
    scores = metric.compute(["London ", "londn", "paris", ""], [["london"], ["x", "London"], ["rome"], ["a"]])
    assert scores["anls"] == pytest.approx((1 + 5 / 6) / 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_document_models_are_calibrated(
    family: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact], tmp_path: Path
) -> None:
    folder, artifact = tiny_folder(family, DOCUMENTS), tiny_artifact(family, DOCUMENTS)
    rows = rows_answered_by(folder)
    quantized = accel.quantize(artifact, tmp_path / "int8", scheme="static-int8", calibration=rows)
    ids = torch.randint(6, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    corners = torch.randint(0, 400, (2, 9, 2), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "bbox": torch.cat([corners, corners + 30], -1), "attention_mask": torch.ones_like(ids)}
    if family == "layoutlm":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    plain, small = (accel.ORTModel.from_pretrained(variant)(**inputs).start_logits for variant in (artifact, quantized))
    assert 0 < (small - plain).abs().mean() <= 0.3 * plain.abs().mean()


def test_layoutlmv2_is_refused() -> None:
    model: Any = torch.nn.Module()
    model.forward = lambda input_ids=None, bbox=None, image=None: None
    model.config = transformers.LayoutLMConfig()
    from accel.capture.document_samples import document_sample

    with pytest.raises(ExportError, match="detectron2"):
        document_sample(model, None)


@pytest.mark.parametrize(
    "backend", [*(pytest.param(backend, marks=pytest.mark.thorough) for backend in ("cpu", "openvino")), "pytorch"]
)
def test_table_questions_in_transformers_pipeline(
    backend: str, tiny_folder: Callable[..., Path], tiny_artifact: Callable[..., Artifact]
) -> None:
    folder = tiny_folder(TAPAS, TABLES)
    ours, theirs = opened(TAPAS, TABLES, backend, folder, tiny_artifact), original(folder, TABLES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.pipeline(TABLES, model=theirs, tokenizer=tokenizer)
    questions = ["which bank has a fee", "what is the old card", "how lost"]
    for stock in (transformers.pipeline(TABLES, model=ours, tokenizer=tokenizer), accel.pipeline(TABLES, model=ours)):
        for options in ({"sequential": True}, {"padding": True}):
            expected = reference(table=TABLE, query=questions, **options)
            assert any(answer["cells"] for answer in expected)
            assert stock(table=TABLE, query=questions, **options) == expected
    import pandas as pd

    inputs = tokenizer(table=pd.DataFrame(TABLE), queries=questions, padding=True, return_tensors="pt")
    with torch.inference_mode():
        expected = theirs(**inputs)
    outputs = ours(**inputs)
    # The model sets the logits of unselected columns to about -10,000, so these logits are not compared.
    chosen = inputs["attention_mask"].bool() & (expected.logits > -1000)
    assert chosen.any()
    assert (outputs.logits - expected.logits)[chosen].abs().max() <= TOLERANCE * 10
    assert (outputs.logits_aggregation - expected.logits_aggregation).abs().max() <= TOLERANCE * 10
    inputs["token_type_ids"][0, 3, 1] = 256
    with pytest.raises(InputError, match=r"token_type_ids\[\.\.\., 1\] contains values from 0 to 256"):
        ours(**inputs)
