"""Tests that models in folders of other tools give the same outputs as in those tools, through every entry point of
accel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from starlette.testclient import TestClient

import accel
from accel.errors import ArtifactNotFoundError, IntegrityError, TaskError
from accel.serving.batch.batch_run import batch
from accel.serving.http.app import create_app

from .folders import FOREIGN, questions, same, stored

# The tolerance is for float32 kernels that add numbers in a different order.
CLOSE = 1e-4
# The tolerance is for dynamic 8-bit activations. If a value is rounded differently, it changes by one step of its
# scale.
INT8 = 2e-2
GENERATING = {
    "write": accel.ORTModelForCausalLM,
    "rewrite": accel.ORTModelForSeq2SeqLM,
    "answer": accel.ORTModelForSeq2SeqLM,
}
OPTIMUM = (
    "labels", "score", "tags", "spans", "mask", "features", "entail", "write", "rewrite", "answer", "hear", "letters", "noise",
    "pictures",
)  # fmt: skip
INTEL = ("labels", "features", "write", "rewrite", "noise", "pictures")
MORE_INTEL = ("score", "tags", "mask", "entail", "answer")
WEB = ("labels", "tags", "features", "write", "pictures")
ADAPTERS = ("labels-lora", "tags-ia3", "write-tokens")
MORE_ADAPTERS = ("tags-rslora", "write-lora")
QUICK_WEIGHTS = ("labels", "write")


def answered(name: str, folder: Path, **loading: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each question about a folder's model, together with accel's outputs."""
    for question in questions.CASES[name]:
        if question.task == "generate":
            with GENERATING[name].from_pretrained(folder, **loading) as model:
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
                yield question, questions.answers(SimpleNamespace(model=model, tokenizer=tokenizer), question)
        else:
            pipeline = accel.pipeline(question.task, str(folder), model_kwargs=loading or None)
            yield question, questions.answers(pipeline, question)


def compare(name: str, folder: Path, expected: list[Any], tolerance: float = CLOSE, **loading: Any) -> None:
    for (question, answer), expected_answer in zip(answered(name, folder, **loading), expected, strict=True):
        # The stored output is `None` if the tool's version of transformers has no pipeline for the question.
        if expected_answer is not None:
            assert same(answer, expected_answer, tolerance), f"{question.task}: {answer} instead of {expected_answer}"


@pytest.mark.parametrize("name", OPTIMUM)
def test_optimum_onnx(name: str, folders: Path) -> None:
    compare(name, folders / "optimum" / name, stored(folders, "optimum", name))


@pytest.mark.parametrize("name", [*INTEL, *(pytest.param(n, marks=pytest.mark.thorough) for n in MORE_INTEL)])
def test_optimum_intel(name: str, folders: Path) -> None:
    compare(name, folders / "intel" / name, stored(folders, "intel", name))


@pytest.mark.parametrize("name", WEB)
@pytest.mark.parametrize("variant", [pytest.param(None, marks=pytest.mark.thorough), "quantized"])
def test_transformers_js_layouts(name: str, variant: str | None, folders: Path) -> None:
    expected = stored(folders, "optimum" if variant is None else "web", name)
    loading = {} if variant is None else {"variant": variant}
    compare(name, folders / "web" / name, expected, CLOSE if variant is None else INT8, **loading)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_WEIGHTS else pytest.mark.thorough) for n in OPTIMUM]
)
def test_weights_give_the_outputs_of_their_exported_graph(name: str, folders: Path) -> None:
    compare(name, folders / "models" / name, stored(folders, "optimum", name))


@pytest.mark.parametrize("name", ["labels", pytest.param("rewrite", marks=pytest.mark.thorough)])
def test_graph_and_weights_in_one_folder_give_equal_outputs(name: str, folders: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(folders / "optimum" / name, tmp_path / "both"))
    shutil.copy(folders / "models" / name / "model.safetensors", both)
    expected = stored(folders, "optimum", name)
    compare(name, both, expected)
    compare(name, both, expected, export=True)


@pytest.fixture
def adapter(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of an adapter whose base model is in the unpacked folders."""

    def get(name: str) -> Path:
        pytest.importorskip("peft", reason="the extra peft is not installed")
        folder = Path(shutil.copytree(folders / "peft" / name, tmp_path / name))
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = str(folders / settings["base_model_name_or_path"])
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return get


@pytest.mark.parametrize("name", [*ADAPTERS, *(pytest.param(n, marks=pytest.mark.thorough) for n in MORE_ADAPTERS)])
def test_peft_adapters(name: str, folders: Path, adapter: Callable[[str], Path]) -> None:
    compare(name.split("-")[0], adapter(name), stored(folders, "peft", name))


@pytest.mark.parametrize("name", ["mistral-fp32", "mistral-int4"])
def test_onnxruntime_genai(name: str, folders: Path) -> None:
    prompts = [[5, 6, 7], [12], [31, 9, 14, 20, 22]]
    options: list[dict[str, Any]] = [{}, {"num_beams": 3, "early_stopping": True}, {"repetition_penalty": 1.4}]
    with accel.ORTModelForCausalLM.from_pretrained(folders / "genai" / name) as model:
        for settings, expected in zip(options, stored(folders, "genai", name), strict=True):
            tokens = [
                model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, **settings)[
                    0, len(prompt) :
                ].tolist()
                for prompt in prompts
            ]
            assert tokens == expected, settings


@pytest.fixture
def searching(folders: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that copies a folder of onnxruntime-genai and changes its search settings."""

    def get(**settings: Any) -> Path:
        folder = Path(shutil.copytree(folders / "genai" / "mistral-fp32", tmp_path / "genai"))
        values = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        values["search"] |= settings
        (folder / "genai_config.json").write_text(json.dumps(values), encoding="utf-8")
        return folder

    return get


def test_genai_search_settings_become_generation_settings(searching: Callable[..., Path], folders: Path) -> None:
    expected = stored(folders, "genai", "mistral-fp32")[2]
    with accel.ORTModelForCausalLM.from_pretrained(searching(repetition_penalty=1.4, max_length=9)) as model:
        assert model.generate(torch.tensor([[12]])).tolist() == [[12, *expected[1]]]


def test_genai_sampling_settings_are_read_if_it_samples(searching: Callable[..., Path]) -> None:
    with accel.ORTModelForCausalLM.from_pretrained(searching(do_sample=True, top_k=3, temperature=0.7)) as model:
        settings = model.generation_config
        assert (settings.do_sample, settings.top_k, settings.temperature) == (True, 3, 0.7)


@pytest.mark.parametrize("settings", [{"diversity_penalty": 0.5}, {"logit_bias_of_next_year": 1}])
def test_unknown_search_settings_are_refused(settings: dict[str, Any], searching: Callable[..., Path]) -> None:
    with pytest.raises(IntegrityError, match=next(iter(settings))):
        accel.ORTModelForCausalLM.from_pretrained(searching(**settings))


# The tests below use other entry points with folders that Optimum wrote.


def short_texts(name: str, folders: Path) -> tuple[list[str], list[Any]]:
    """Return texts that need no truncation, together with the tool's outputs. Entry points that do not truncate use
    these texts.
    """
    pairs = zip(questions.CASES[name][0].inputs, stored(folders, "optimum", name)[0], strict=True)
    texts, answers = zip(*((text, answer) for text, answer in pairs if text != questions.LONG), strict=True)
    return list(texts), list(answers)


@pytest.fixture(scope="module")
def client(folders: Path) -> Iterator[TestClient]:
    names = ("labels", "tags", "spans", "mask", "entail", "features", "score")
    with TestClient(create_app(accel.Engine({name: str(folders / "optimum" / name) for name in names}))) as test_client:
        yield test_client


SERVED: list[tuple[str, str, int, Callable[[Any], dict[str, Any]]]] = [
    ("labels", "/classify", 0, lambda text: {"inputs": text, "top_k": None, "truncate": True}),
    ("score", "/classify", 0, lambda text: {"inputs": text, "truncate": True}),
    ("entail", "/classify", 0, lambda text: {"inputs": text, "top_k": None}),
    ("tags", "/ner", 1, lambda text: {"inputs": text, "aggregation_strategy": "simple"}),
    ("spans", "/qa", 0, lambda qa: {**qa, "top_k": 2}),
    ("mask", "/fill-mask", 0, lambda text: {"inputs": text, "top_k": 3}),
    ("entail", "/zero-shot", 1, lambda text: {"inputs": text, **questions.CASES["entail"][1].options}),
]


@pytest.mark.parametrize(("name", "path", "index", "body"), SERVED, ids=[f"{path}-{name}" for name, path, *_ in SERVED])
def test_server(name: str, path: str, index: int, body: Any, folders: Path, client: TestClient) -> None:
    question = questions.CASES[name][index]
    for single_input, expected in zip(question.inputs, stored(folders, "optimum", name)[index], strict=True):
        reply = client.post(path, json={"model": name, **body(single_input)})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        answer = answer[0] if isinstance(answer, list) and answer and isinstance(answer[0], list) else answer
        assert same(answer, expected, CLOSE), f"{answer} instead of {expected}"


@pytest.mark.parametrize("name", ["labels", "score", "entail"])
def test_offline_batches(name: str, folders: Path, tmp_path: Path) -> None:
    texts, answers = short_texts(name, folders)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": row}) + "\n" for row in texts), encoding="utf-8")
    batch(
        str(folders / "optimum" / name), str(rows), tmp_path / "out", format="jsonl", operation="text-classification",
        options={"top_k": 1},
    )  # fmt: skip
    records = [
        json.loads(line)
        for file in sorted((tmp_path / "out").glob("rows-*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["label"], pytest.approx(row["score"], rel=CLOSE)) for row in records] == [
        (row[0]["label"], row[0]["score"]) for row in answers
    ]


def test_evaluate(folders: Path) -> None:
    """The labels of the rows are the tool's predictions, so an accuracy of 1 means that accel's predictions are equal."""
    question = questions.CASES["entail"][0]
    rows = [
        {"text": text, "label": answer[0]["label"]}
        for text, answer in zip(question.inputs, stored(folders, "optimum", "entail")[0], strict=True)
    ]
    assert accel.evaluate(str(folders / "optimum" / "entail"), rows, metric="accuracy").value == 1


@pytest.mark.thorough
def test_tune(folders: Path, tmp_path: Path) -> None:
    """The artifact that `accel.tune` keeps predicts the tool's labels, which are also the labels of its data."""
    question, expected = questions.CASES["entail"][0], stored(folders, "optimum", "entail")[0]
    rows = [{"text": text, "label": answer[0]["label"]} for text, answer in zip(question.inputs, expected, strict=True)]
    accel.tune(
        str(folders / "models" / "entail"), tmp_path / "tuned", data=rows, max_drop=0.0, sequence=[8], backends=["cpu"], threads=1,
    )  # fmt: skip
    pipeline = accel.pipeline("text-classification", str(tmp_path / "tuned"))
    assert [pipeline(text)[0]["label"] for text in question.inputs] == [answer[0]["label"] for answer in expected]


@pytest.mark.parametrize("name", ["labels", "score", "entail"])
def test_triton_front_model(name: str, folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc", reason="the extra triton is not installed")
    from accel.deploying.triton import deploy
    from tests.triton.test_fronts import Front

    saved = tmp_path / "artifact"
    with accel.ORTModelForSequenceClassification.from_pretrained(folders / "optimum" / name) as model:
        model.save_pretrained(saved)
    repository = deploy(saved, tmp_path / "out", task="text-classification", name="front")
    front = Front(repository.path / "front" / "1", saved)
    for text, expected in zip(questions.CASES[name][0].inputs, stored(folders, "optimum", name)[0], strict=True):
        answer = front.ask({"TEXT": [text]}, truncation=True)
        assert answer["LABEL"].tolist() == [[expected[0]["label"].encode()]]
        np.testing.assert_allclose(answer["SCORE"], [[expected[0]["score"]]], rtol=CLOSE, atol=CLOSE)


# The tests below use folders with models that transformers does not support.


def test_setfit_classifiers_are_refused(folders: Path) -> None:
    folder = folders / "setfit" / "labels"
    for refused in (
        lambda: accel.pipeline("text-classification", str(folder)),
        lambda: accel.pipeline(model=str(folder)),
        lambda: accel.ORTModelForSequenceClassification.from_pretrained(folder),
        lambda: accel.Engine({"model": str(folder)}).start(),
        lambda: accel.export(folder, folder.parent / "out"),
    ):
        with pytest.raises(TaskError, match="in the pickle file model_head.pkl"):
            refused()


def test_setfit_embedding_model_runs(folders: Path) -> None:
    expected = np.array(stored(folders, "setfit", "labels")["embeddings"])
    with accel.ORTModelForFeatureExtraction.from_pretrained(folders / "setfit" / "labels") as model:
        np.testing.assert_allclose(model.encode(questions.TEXTS), expected, atol=CLOSE)


def test_gliner_model_is_refused_by_name(folders: Path) -> None:
    with pytest.raises(ArtifactNotFoundError, match="GLiNER") as error:
        accel.pipeline("token-classification", str(folders / "gliner" / "entities"))
    assert "export_to_onnx" in error.value.fix


@pytest.mark.parametrize(
    ("file", "library"),
    [("model_index.json", "Diffusers"), ("open_clip_config.json", "OpenCLIP")],
)
def test_folders_of_other_libraries_are_refused_by_name(file: str, library: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ArtifactNotFoundError, match=library):
        accel.ORTModel.from_pretrained(tmp_path)


def test_gliner_graph_runs_as_a_custom_model(folders: Path) -> None:
    expected = stored(folders, "gliner", "entities")
    with accel.ORTModelForCustomTasks.from_pretrained(folders / "gliner" / "graph") as model:
        outputs = model(**{name: torch.tensor(value) for name, value in expected["inputs"].items()})
    for name, value in expected["outputs"].items():
        np.testing.assert_allclose(outputs[name], np.array(value), atol=CLOSE)


def test_stored_folders_are_small() -> None:
    assert sum(path.stat().st_size for path in FOREIGN.rglob("*.xz")) <= 2_000_000
