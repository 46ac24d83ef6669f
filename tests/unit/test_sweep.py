"""Tests of the sweep over all model architectures: small configs, the generated page, skipped cells, and detection of
wrong results.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from tests.sweep import cells, gpu, rows, running
from tests.sweep.__main__ import main
from tests.sweep.building import build
from tests.sweep.cases import Pair, pairs
from tests.sweep.cells import Cell, cells_of, stages_of, sweep_pair
from tests.sweep.page import number, rows_of, site
from tests.sweep.questions import Question, answers, difference, prompts, questions
from tests.sweep.rounding import largest_error
from tests.sweep.shrinking import FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, PAD, VOCABULARY, NotShrinkable, small_config
from tests.sweep.store import Store, digest_of

ROOT = Path(__file__).parents[2]
BERT = Pair("bert", "text-classification", "BertForSequenceClassification")
DIGESTS = {"cpu": "aaaaaaaa", "pytorch": "bbbbbbbb"}


def a_cell(**values: Any) -> Cell:
    chosen = {"architecture": "bert", "task": BERT.task, "backend": "cpu", "stage": "export", "status": "ok"} | values
    return Cell(**{"digest": DIGESTS["pytorch" if chosen["backend"] == "pytorch" else "cpu"], **chosen})


@pytest.mark.parametrize(
    "name",
    [
        "bert/text-classification",  # usual config field names
        "distilbert/fill-mask",  # different config field names
        "gemma3_text/text-generation",  # two kinds of layers
        "t5/text2text-generation",  # encoder and decoder
        "vit/image-classification",
        "mixtral/text-generation",  # mixture of experts
        "llava/image-text-to-text",  # nested configs
    ],
)
def test_small_model_gives_finite_outputs(name: str) -> None:
    (pair,) = pairs(only=[name])
    model = build(pair)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert all(parameter.abs().max() > 0 for parameter in model.parameters() if parameter.numel())
    asked_questions = questions(pair, model)
    assert len(asked_questions) >= 3
    assert all(value.isfinite().all() for value in asked_questions[0].expected.values())


@pytest.mark.parametrize("name", ["bert/text-classification", "gemma2/text-generation", "t5/text2text-generation"])
def test_masks_and_steps_change_outputs_of_small_models(name: str) -> None:
    """The mask must change the outputs, and generated tokens must differ between steps. Otherwise a passing cell would
    prove nothing.
    """
    (pair,) = pairs(only=[name])
    model = build(pair)
    worst = 0.0
    for question in questions(pair, model):
        unmasked = {**question.inputs, "attention_mask": torch.ones_like(question.inputs["attention_mask"])}
        worst = max(worst, difference(question, answers(model, unmasked)))
    assert worst > 50 * cells.TOLERANCES["export"]
    if model.can_generate() and pair.task != "text-classification":
        tokens = model.generate(**prompts(pair, model), **cells.GREEDY)[:, -cells.NEW_TOKENS :]
        assert len(set(tokens.flatten().tolist())) >= cells.NEW_TOKENS


def test_small_model_keeps_a_layer_of_each_kind() -> None:
    config = small_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types)
    assert config.sliding_window < 64


def test_special_tokens_are_in_the_small_vocabulary() -> None:
    config = small_config("modernbert")
    named = [value for name, value in config.to_dict().items() if name.endswith("_token_id") and value is not None]
    assert named
    assert max(named) < VOCABULARY == config.vocab_size


def test_unknown_architecture_is_refused() -> None:
    with pytest.raises(NotShrinkable, match="no-such-model"):
        small_config("no-such-model")


def test_padding_is_not_compared() -> None:
    real = torch.tensor([[True, True, False]])
    expected = {"logits": torch.tensor([[[1.0], [-2.0], [0.0]]])}
    question = Question("1x3 right", {}, expected, real)
    assert difference(question, {"logits": torch.tensor([[[1.0], [-2.0], [9.0]]])}) == 0
    assert difference(question, {"logits": torch.tensor([[[1.0], [-1.0], [0.0]]])}) == 0.5
    assert difference(question, {"logits": torch.full((1, 3, 1), torch.nan)}) == float("inf")
    assert difference(question, {"hidden": expected["logits"]}) == float("inf")


def test_hidden_states_may_be_missing_if_logits_exist() -> None:
    """A graph that returns logits does not have to return hidden states. Moshi returns both outputs, and its decoder
    graph returns only the output of its task.
    """
    expected = {"last_hidden_state": torch.ones(1, 3, 4), "logits": torch.ones(1, 3, 5)}
    assert difference(Question("1x3 none", {}, expected), {"logits": expected["logits"]}) == 0


def test_saved_model_equals_the_model_in_memory(tmp_path: Path) -> None:
    """A model that is saved and loaded again gives equal outputs. Marian computes its position embeddings and does not
    save them, so the sweep must not randomize them.
    """
    (pair,) = pairs(only=["marian/text2text-generation"])
    model = build(pair)
    loaded, folder = cells.saved(pair, model, tmp_path / "model")
    assert folder is not None
    assert loaded is not model
    (question, *_) = questions(pair, model)
    assert difference(question, answers(loaded, question.inputs)) == 0


def test_models_that_cannot_be_loaded_stay_in_memory(tmp_path: Path) -> None:
    """The sweep uses the model in memory if transformers cannot load the saved model, for example the text model of
    Emu3 alone.
    """
    (pair,) = pairs(only=["emu3/text-generation"])
    model = build(pair)
    assert cells.saved(pair, model, tmp_path / "model") == (model, None)


def test_prompts_contain_no_token_types() -> None:
    """Prompts contain no token types, because transformers' `generate` rejects them for BERT."""
    (pair,) = pairs(only=["bert/text-generation"])
    assert "token_type_ids" not in prompts(pair, build(pair))


def test_positions_after_images_are_not_padding() -> None:
    (pair,) = pairs(only=["llava/image-text-to-text"])
    for question in questions(pair, build(pair)):
        assert question.real is not None
        assert question.real.shape == question.inputs["input_ids"].shape


def test_audio_prompts_are_not_text_to_text() -> None:
    names = {pair.architecture for pair in pairs(["text2text-generation"])}
    assert {"t5", "marian", "t5gemma"} <= names
    assert not {"voxtral", "qwen2_audio", "granite_speech"} & names


@pytest.mark.parametrize("by_number", [False, True])
def test_transformers_exports_are_tested_at_other_sizes(by_number: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exported model that cuts its outputs to the length of the trace is reported as wrong, although the export
    succeeds.
    """

    class Exported:
        def __init__(self, model: Any, length: int) -> None:
            self.model, self.length = model, length

        def __call__(self, **inputs: torch.Tensor) -> Any:
            cut = {name: value[:, : self.length] for name, value in inputs.items()} if by_number else inputs
            return self.model(**cut)

    class Exporter:
        def export(self, model: Any, inputs: dict[str, torch.Tensor], _: Any) -> Exported:
            return Exported(model, inputs["input_ids"].shape[1])

    monkeypatch.setattr(cells, "OnnxExporter", Exporter)
    model = build(BERT)
    assert cells.captured_upstream(BERT, model, questions(BERT, model)) is not by_number


def test_merge_replaces_cells_and_removes_unknown_pairs(tmp_path: Path) -> None:
    old, new = Store(tmp_path / "old.json"), Store(tmp_path / "new.json")
    old.about = {"versions": {"torch": "2.13.0", "onnx": "1.23.2"}, "processor": "one"}
    new.about = {"versions": {"torch": "2.11.0", "onnx": "1.23.2"}, "processor": "another"}
    for cell in (a_cell(status="failed"), a_cell(architecture="voxtral", task="text2text-generation")):
        old.put(cell)
    new.put(a_cell(status="ok"))
    old.write()
    new.write()
    assert main(["--json", str(old.path), "--page", str(tmp_path / "models.md"), "--merge", str(new.path)]) == 0
    merged = Store(old.path)
    assert [(cell.architecture, cell.status) for cell in merged.cells.values()] == [("bert", "ok")]
    assert merged.about["versions"] == {"torch": "2.13.0 and 2.11.0", "onnx": "1.23.2"}
    assert "one and another" in (tmp_path / "models.md").read_text(encoding="utf-8")


def test_rounding_to_8_bits_has_a_small_error() -> None:
    model = build(BERT)
    error = largest_error(model, questions(BERT, model))
    assert 1e-3 < error < cells.TOLERANCES["int8"]


def test_wrong_outputs_are_reported_as_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sweep reports a wrong result: the export succeeds, but the opened model returns other outputs."""

    class Liar:
        def __init__(self, artifact: Any, **_: Any) -> None:
            self.sessions: dict[str, Any] = {}

        def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": torch.zeros(len(inputs["input_ids"]), 3)}

    class Exported:
        format = "onnx"
        components = ()

    monkeypatch.setattr(accel, "export", lambda *_, **__: Exported())
    monkeypatch.setattr(accel, "optimize", lambda *_, **__: Exported())
    monkeypatch.setattr(cells, "model_class", lambda _: Liar)
    reported: list[Cell] = []
    known_cells = [("cpu", "int8"), ("cpu", "rows"), ("cpu", "rows-int8")]
    sweep_pair(BERT, ["cpu"], reported.append, lambda *_: None, known_cells)
    assert [(cell.stage, cell.status, cell.difference) for cell in reported] == [
        ("export", "wrong", 1.0),
        ("O2", "wrong", 1.0),
    ]
    store = Store(tmp_path / "sweep.json")
    for cell in reported:
        store.put(cell)
    store.write()
    arguments = ["--page-only", "--json", str(store.path), "--page", str(tmp_path / "models.md")]
    assert main(arguments) == 1
    assert "`bert/text-classification/cpu/export`" in (tmp_path / "models.md").read_text(encoding="utf-8")


def test_refused_cell_contains_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise accel.AccelError("This graph is round.", fix="square it")

    monkeypatch.setattr(accel, "export", refuse)
    monkeypatch.setattr(cells, "captured_upstream", lambda *_: False)
    reported: list[Cell] = []
    sweep_pair(BERT, ["cpu"], reported.append, lambda *_: None)
    assert {cell.stage for cell in reported} == set(stages_of(BERT))
    assert {(cell.status, cell.reason) for cell in reported} == {("refused", "AccelError: This graph is round.")}
    assert reported[0].upstream is False


def test_pages_contain_numbers_reasons_and_unbuilt_models() -> None:
    some = [
        a_cell(difference=2.4e-7),
        a_cell(stage="int8", difference=0.031),
        a_cell(stage="O2", status="refused", reason="OptimizeError: A BertForMaskedLM has | no graph"),
        a_cell(architecture="gpt2", task="text-generation", stage="generate", difference=0.0),
        a_cell(architecture="gpt2", task="text-generation", stage="O4", backend="cuda", difference=1.24),
        a_cell(
            architecture="x", task="text-generation", backend="pytorch", stage="build", status="not built", reason="no"
        ),
    ]
    files = site(some, {"versions": {"torch": "2"}, "processor": "a processor"})
    text, table = files["models.md"], json.loads(files["assets/models.json"])
    assert table["columns"] == ["ORT export", "ORT O2", "ORT int8", "ORT generate", "GPU O4"]
    assert table["rows"] == [
        ["bert", "text-classification", "text", "2e-7", "[1]", "0.031", "", ""],
        ["gpt2", "text-generation", "text", "", "", "", "same", "1.2x"],
    ]
    assert table["reasons"] == ["OptimizeError: the model has | no graph"]
    assert "| bert | all but O2 [1] |" in files["models/text.md"]
    assert "1. `OptimizeError: the model has | no graph`" in files["models/text.md"]
    assert "- `no`: x (text-generation)" in text
    assert "No stage that ran without an error gave wrong outputs." in text
    assert "library versions: torch 2. The processors were: a processor." in text


def test_pages_match_the_recorded_cells() -> None:
    store = Store(ROOT / "benchmarks" / "sweep.json")
    stale = [
        name for name, text in site(store.cells.values(), store.about).items()
        if (ROOT / "docs" / name).read_text("utf-8") != text
    ]  # fmt: skip
    assert not stale, "out of date: python -m tests.sweep --page-only --json benchmarks/sweep.json"


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.0, 2.4e-7, 0.03, 0.125, None)] == ["0", "2e-7", "0.03", "0.12", ""]


def test_file_has_one_line_for_each_cell(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep.json")
    for cell in (a_cell(), a_cell(stage="int8", status="refused", reason="why")):
        store.put(cell)
    store.write()
    lines = (tmp_path / "sweep.json").read_text(encoding="utf-8").splitlines()
    assert sum('"bert/' in line for line in lines) == 2
    assert Store(tmp_path / "sweep.json").cells == store.cells


def test_only_json_files_are_overwritten(tmp_path: Path) -> None:
    """Only regular JSON files are overwritten, because writing replaces the file and would destroy a pipe, a device or
    a link.
    """
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "link.json").symlink_to(tmp_path / "elsewhere.json")
    for name in ("pipe.json", "link.json", "models.md"):
        store = Store()
        store.path = tmp_path / name
        with pytest.raises(ValueError, match="not a JSON file"):
            store.write()
    assert (tmp_path / "pipe.json").is_fifo()
    assert (tmp_path / "link.json").is_symlink()


def swept(
    work: Callable[..., None], store: Store, chosen: Sequence[Pair] = (BERT,), limit_s: float = 20.0
) -> list[str]:
    done: list[str] = []
    running.run(
        list(chosen), ["cpu"], store, digests=DIGESTS, jobs=1, limit_s=limit_s, advance=lambda p: done.append(p.name), sweep=work
    )  # fmt: skip
    return done


def all_green(pair: Pair, backends: Sequence[str], report: Any, announce: Any, skip: Any = ()) -> None:
    for stage in stages_of(pair):
        if ("cpu", stage) not in skip:
            report(a_cell(stage=stage, digest=""))


def must_not_run(*_: Any, **__: Any) -> None:
    raise AssertionError


# Forking a process that has threads causes a warning. The real parent process of the sweep has no threads.
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
class TestRunning:
    def test_known_cells_are_skipped(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "sweep.json")
        assert swept(all_green, store) == [BERT.name]
        again = Store(store.path)
        assert swept(must_not_run, again) == [BERT.name]
        assert again.cells == store.cells
        assert {cell.status for cell in again.cells.values()} == {"ok"}
        stale = Store(store.path)
        stale.put(a_cell(stage="int8", digest="old"))
        swept(all_green, stale)
        assert {cell.digest for cell in stale.cells.values()} == {DIGESTS["cpu"]}

    def test_stage_that_hangs_is_ended_and_the_next_stage_runs(self) -> None:
        def hangs(pair: Pair, backends: Sequence[str], report: Any, announce: Any, skip: Any = ()) -> None:
            for stage in stages_of(pair):
                if ("cpu", stage) not in skip:
                    announce("cpu", stage)
                    time.sleep(60 if stage == "O2" else 0)
                    report(a_cell(stage=stage))

        store = Store()
        swept(hangs, store, limit_s=1.5)
        by_stage = {cell.stage: cell for cell in store.cells.values()}
        assert by_stage["O2"].status == "failed"
        assert by_stage["O2"].reason == "took more than 1.5 s"
        assert by_stage["export"].status == by_stage["int8"].status == "ok"

    def test_crash_ends_only_its_own_pair(self) -> None:
        def crashes(pair: Pair, backends: Sequence[str], report: Any, announce: Any, skip: Any = ()) -> None:
            announce("cpu", "export")
            os.kill(os.getpid(), signal.SIGKILL)

        store = Store()
        assert swept(crashes, store) == [BERT.name]
        assert {cell.reason for cell in store.cells.values()} == {"ended the process with SIGKILL"}
        assert len(store.cells) == len(stages_of(BERT))


def test_shards_divide_the_architectures() -> None:
    chosen = pairs(tasks=["fill-mask", "token-classification"])
    parts = [running.shard(chosen, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(pair for part in parts for pair in part) == sorted(chosen)
    assert not {p.architecture for p in parts[0]} & {p.architecture for p in parts[1]}
    with pytest.raises(ValueError, match="1 <= i <= n"):
        running.shard(chosen, "4/3")


def test_digest_depends_on_the_code_of_one_backend() -> None:
    assert digest_of("cpu") != digest_of("openvino")
    assert digest_of("cpu") == digest_of("cpu")


def test_gpu_shapes_have_every_padding() -> None:
    assert {padding for *_, padding in gpu.SHAPES} == {"none", "left", "right"}
    assert {(batch, sequence) for batch, sequence, _ in gpu.SHAPES} >= {(1, 7), (16, 256)}


class Neighbour(torch.nn.Module):
    """Classifier whose output for every row depends on the first row (with `first`), or only on the row itself."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> dict[str, torch.Tensor]:
        token_sum = input_ids.float().sum(1, keepdim=True)
        return {"logits": token_sum[:1].expand_as(token_sum) if self.first else token_sum}


def test_output_that_depends_on_another_row_is_detected() -> None:
    ids = torch.arange(18).reshape(6, 3)
    right, wrong = Neighbour(first=False), Neighbour(first=True)
    alone = [rows.cut({"input_ids": ids}, i, 6) for i in range(6)]
    company = rows.Company({"input_ids": ids}, [
        rows.Row(f"row {i}", inputs_of_row, answers(right, inputs_of_row), (i, 6)) for i, inputs_of_row in enumerate(alone)
    ])  # fmt: skip
    assert rows.apart(company, lambda inputs: answers(right, inputs)).worst == 0
    difference = rows.apart(company, lambda inputs: answers(wrong, inputs))
    assert difference.alone == 0
    assert difference.in_batch == pytest.approx(45 / 48)
    assert difference.where == "logits of row 5, in the batch and alone"


def test_rows_differ_in_length_and_special_tokens() -> None:
    model = build(BERT)
    (company,) = rows.companies(BERT, model)
    ids, mask = company.inputs["input_ids"], company.inputs["attention_mask"]
    special = ((ids < FIRST_PLAIN_TOKEN) | (ids > LAST_PLAIN_TOKEN)) & mask.bool()
    assert len(ids) >= 5
    assert len(set(mask.sum(1).tolist())) >= 4
    assert len(set(special.sum(1).tolist())) >= 3
    assert ((ids == PAD) & mask.bool()).any(), "a padding token within a text"
    assert sum("without padding" in row.name for row in company.rows) >= 3


def test_stages_that_were_not_requested_are_skipped(tmp_path: Path) -> None:
    assert cells_of(BERT, ["cpu"], ["rows"]) == {("cpu", "rows")}
    store = Store(tmp_path / "sweep.json")
    store.put(a_cell(stage="rows", digest=DIGESTS["cpu"]))
    done: list[str] = []
    running.run(
        [BERT], ["cpu"], store, digests=DIGESTS, jobs=1, limit_s=5, advance=lambda p: done.append(p.name), sweep=must_not_run,
        stages=["rows"],
    )  # fmt: skip
    assert done == [BERT.name]


def test_pairs_with_dependent_rows_are_listed() -> None:
    some = [
        a_cell(stage="rows", in_batch=2e-7, difference=1e-7),
        a_cell(architecture="x", status="refused", reason="ValidationError: The answer to row 2 depends on the other rows of"),
    ]  # fmt: skip
    assert rows_of(some) == [
        "rows on cpu: 1 ok, 0 refused, 0 failed, 0 wrong, 0 none; alone and in a batch at most 2e-7 apart",
        "pairs refused because rows depend on each other: 1 x/text-classification",
    ]
