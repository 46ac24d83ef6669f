"""The sweep's parts: small configs, the page, what is skipped, and that a wrong answer is called wrong."""

from __future__ import annotations

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
from tests.sweep.cells import Cell, stages_of, sweep_pair, wanted
from tests.sweep.page import number, page, rows_of
from tests.sweep.questions import Question, answers, difference, prompts, questions
from tests.sweep.rounding import largest_error
from tests.sweep.shrinking import FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN, PAD, VOCABULARY, NotShrinkable, small_config
from tests.sweep.store import Store, digest_of

BERT = Pair("bert", "text-classification", "BertForSequenceClassification")
DIGESTS = {"cpu": "aaaaaaaa", "pytorch": "bbbbbbbb"}


def a_cell(**values: Any) -> Cell:
    chosen = {"architecture": "bert", "task": BERT.task, "backend": "cpu", "stage": "export", "status": "ok"} | values
    return Cell(**{"digest": DIGESTS["pytorch" if chosen["backend"] == "pytorch" else "cpu"], **chosen})


@pytest.mark.parametrize(
    "name",
    [
        "bert/text-classification",  # plain names
        "distilbert/fill-mask",  # names of its own
        "gemma3_text/text-generation",  # layers of two kinds
        "t5/text2text-generation",  # an encoder and a decoder
        "vit/image-classification",
        "mixtral/text-generation",  # experts
        "llava/image-text-to-text",  # configs in a config
    ],
)
def test_an_architecture_becomes_small_and_answers(name: str) -> None:
    (pair,) = pairs(only=[name])
    model = build(pair)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    assert all(parameter.abs().max() > 0 for parameter in model.parameters() if parameter.numel())
    asked = questions(pair, model)
    assert len(asked) >= 3
    assert all(value.isfinite().all() for value in asked[0].expected.values())


@pytest.mark.parametrize("name", ["bert/text-classification", "gemma2/text-generation", "t5/text2text-generation"])
def test_the_small_models_can_fail(name: str) -> None:
    """The mask matters and tokens differ from step to step; else a green cell would prove nothing."""
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


def test_layers_of_every_kind_are_kept() -> None:
    config = small_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}
    assert config.num_hidden_layers == len(config.layer_types)
    assert config.sliding_window < 64


def test_special_tokens_are_in_the_small_vocabulary() -> None:
    config = small_config("modernbert")
    named = [value for name, value in config.to_dict().items() if name.endswith("_token_id") and value is not None]
    assert named
    assert max(named) < VOCABULARY == config.vocab_size


def test_an_unknown_architecture_says_so() -> None:
    with pytest.raises(NotShrinkable, match="no-such-model"):
        small_config("no-such-model")


def test_padding_does_not_count() -> None:
    real = torch.tensor([[True, True, False]])
    expected = {"logits": torch.tensor([[[1.0], [-2.0], [0.0]]])}
    question = Question("1x3 right", {}, expected, real)
    assert difference(question, {"logits": torch.tensor([[[1.0], [-2.0], [9.0]]])}) == 0
    assert difference(question, {"logits": torch.tensor([[[1.0], [-1.0], [0.0]]])}) == 0.5
    assert difference(question, {"logits": torch.full((1, 3, 1), torch.nan)}) == float("inf")
    assert difference(question, {"hidden": expected["logits"]}) == float("inf")


def test_hidden_states_beside_logits_need_not_be_returned() -> None:
    """Moshi returns both; a decoder graph returns what its task is about."""
    expected = {"last_hidden_state": torch.ones(1, 3, 4), "logits": torch.ones(1, 3, 5)}
    assert difference(Question("1x3 none", {}, expected), {"logits": expected["logits"]}) == 0


def test_a_saved_model_answers_as_the_one_in_memory(tmp_path: Path) -> None:
    """Marian saves no positions: they are computed, and must not be made random."""
    (pair,) = pairs(only=["marian/text2text-generation"])
    model = build(pair)
    loaded, folder = cells.saved(pair, model, tmp_path / "model")
    assert folder is not None
    assert loaded is not model
    (question, *_) = questions(pair, model)
    assert difference(question, answers(loaded, question.inputs)) == 0


def test_what_cannot_be_read_back_stays_in_memory(tmp_path: Path) -> None:
    """The part of Emu3 that writes, alone: transformers finds no model for text generation in its folder."""
    (pair,) = pairs(only=["emu3/text-generation"])
    model = build(pair)
    assert cells.saved(pair, model, tmp_path / "model") == (model, None)


def test_prompts_hold_no_token_types() -> None:
    """transformers' `generate` refuses them for BERT."""
    (pair,) = pairs(only=["bert/text-generation"])
    assert "token_type_ids" not in prompts(pair, build(pair))


def test_positions_behind_images_are_no_padding() -> None:
    (pair,) = pairs(only=["llava/image-text-to-text"])
    for question in questions(pair, build(pair)):
        assert question.real is not None
        assert question.real.shape == question.inputs["input_ids"].shape


def test_sounds_in_prompts_are_no_text_to_text() -> None:
    names = {pair.architecture for pair in pairs(["text2text-generation"])}
    assert {"t5", "marian", "t5gemma"} <= names
    assert not {"voxtral", "qwen2_audio", "granite_speech"} & names


@pytest.mark.parametrize("by_number", [False, True])
def test_captured_upstream_means_at_other_sizes(by_number: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cuts its answer to what it saw in the trace is captured, and of no use."""

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


def test_a_merge_replaces_cells_and_forgets_pairs_that_are_swept_no_more(tmp_path: Path) -> None:
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


def test_rounding_to_eight_bits_is_small_and_not_nothing() -> None:
    model = build(BERT)
    error = largest_error(model, questions(BERT, model))
    assert 1e-3 < error < cells.TOLERANCES["int8"]


def test_a_wrong_answer_is_called_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Export succeeds, and the model that it opens answers something else."""

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
    found: list[Cell] = []
    known = [("cpu", "int8"), ("cpu", "rows"), ("cpu", "rows-int8")]
    sweep_pair(BERT, ["cpu"], found.append, lambda *_: None, known)
    assert [(cell.stage, cell.status, cell.difference) for cell in found] == [
        ("export", "wrong", 1.0),
        ("O2", "wrong", 1.0),
    ]
    store = Store(tmp_path / "sweep.json")
    for cell in found:
        store.put(cell)
    store.write()
    arguments = ["--page-only", "--json", str(store.path), "--page", str(tmp_path / "models.md")]
    assert main(arguments) == 1
    assert "`bert/text-classification/cpu/export`" in (tmp_path / "models.md").read_text(encoding="utf-8")


def test_a_refusal_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise accel.AccelError("This graph is round.", fix="square it")

    monkeypatch.setattr(accel, "export", refuse)
    monkeypatch.setattr(cells, "captured_upstream", lambda *_: False)
    found: list[Cell] = []
    sweep_pair(BERT, ["cpu"], found.append, lambda *_: None)
    assert {cell.stage for cell in found} == set(stages_of(BERT))
    assert {(cell.status, cell.reason) for cell in found} == {("refused", "AccelError: This graph is round.")}
    assert found[0].upstream is False


def test_the_page_holds_numbers_reasons_and_what_was_not_built() -> None:
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
    text = page(some, {"versions": {"torch": "2"}, "processor": "a processor"})
    assert "| bert | 2e-7 | [[1]](#reasons) | 0.031 |" in text
    assert "| gpt2 | same | 1.2x |" in text
    assert "1. `OptimizeError: the model has | no graph`" in text
    assert "- `no`: x (text-generation)" in text
    assert "No call that succeeded gave a wrong answer." in text
    assert "torch 2; a processor" in text


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.0, 2.4e-7, 0.03, 0.125, None)] == ["0", "2e-7", "0.03", "0.12", ""]


def test_the_file_keeps_a_line_a_cell(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep.json")
    for cell in (a_cell(), a_cell(stage="int8", status="refused", reason="why")):
        store.put(cell)
    store.write()
    lines = (tmp_path / "sweep.json").read_text(encoding="utf-8").splitlines()
    assert sum('"bert/' in line for line in lines) == 2
    assert Store(tmp_path / "sweep.json").cells == store.cells


def test_only_files_of_ours_are_written_over(tmp_path: Path) -> None:
    """Writing puts a new file in the old one's place; what is a pipe, a device or a link must stay one."""
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


# Forking a process with threads warns; the sweep's own parent has none.
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
class TestRunning:
    def test_what_is_known_is_skipped(self, tmp_path: Path) -> None:
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

    def test_a_stage_that_hangs_is_ended_and_the_next_one_tried(self) -> None:
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

    def test_a_crash_takes_nothing_with_it(self) -> None:
        def crashes(pair: Pair, backends: Sequence[str], report: Any, announce: Any, skip: Any = ()) -> None:
            announce("cpu", "export")
            os.kill(os.getpid(), signal.SIGKILL)

        store = Store()
        assert swept(crashes, store) == [BERT.name]
        assert {cell.reason for cell in store.cells.values()} == {"ended the process with SIGKILL"}
        assert len(store.cells) == len(stages_of(BERT))


def test_shards_share_the_architectures_out() -> None:
    chosen = pairs(tasks=["fill-mask", "token-classification"])
    parts = [running.shard(chosen, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(pair for part in parts for pair in part) == sorted(chosen)
    assert not {p.architecture for p in parts[0]} & {p.architecture for p in parts[1]}
    with pytest.raises(ValueError, match="1 <= i <= n"):
        running.shard(chosen, "4/3")


def test_a_digest_is_of_one_backends_code() -> None:
    assert digest_of("cpu") != digest_of("openvino")
    assert digest_of("cpu") == digest_of("cpu")


def test_gpu_shapes_have_every_padding() -> None:
    assert {padding for *_, padding in gpu.SHAPES} == {"none", "left", "right"}
    assert {(batch, sequence) for batch, sequence, _ in gpu.SHAPES} >= {(1, 7), (16, 256)}


class Neighbour(torch.nn.Module):
    """A classifier that answers every row with what it makes of the first one, or of its own."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> dict[str, torch.Tensor]:
        own = input_ids.float().sum(1, keepdim=True)
        return {"logits": own[:1].expand_as(own) if self.first else own}


def test_an_answer_from_another_row_is_found() -> None:
    ids = torch.arange(18).reshape(6, 3)
    right, wrong = Neighbour(first=False), Neighbour(first=True)
    alone = [rows.cut({"input_ids": ids}, i, 6) for i in range(6)]
    company = rows.Company({"input_ids": ids}, [
        rows.Row(f"row {i}", one, answers(right, one), (i, 6)) for i, one in enumerate(alone)
    ])  # fmt: skip
    assert rows.apart(company, lambda inputs: answers(right, inputs)).worst == 0
    found = rows.apart(company, lambda inputs: answers(wrong, inputs))
    assert found.alone == 0
    assert found.in_batch == pytest.approx(45 / 48)
    assert found.where == "logits of row 5, in the batch and alone"


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


def test_stages_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    assert wanted(BERT, ["cpu"], ["rows"]) == {("cpu", "rows")}
    store = Store(tmp_path / "sweep.json")
    store.put(a_cell(stage="rows", digest=DIGESTS["cpu"]))
    done: list[str] = []
    running.run(
        [BERT], ["cpu"], store, digests=DIGESTS, jobs=1, limit_s=5, advance=lambda p: done.append(p.name), sweep=must_not_run,
        stages=["rows"],
    )  # fmt: skip
    assert done == [BERT.name]


def test_pairs_refused_because_rows_depend_on_each_other_are_listed() -> None:
    some = [
        a_cell(stage="rows", in_batch=2e-7, difference=1e-7),
        a_cell(architecture="x", status="refused", reason="ValidationError: The answer to row 2 depends on the other rows of"),
    ]  # fmt: skip
    assert rows_of(some) == [
        "rows on cpu: 1 ok, 0 refused, 0 failed, 0 wrong, 0 none; alone and in a batch at most 2e-7 apart",
        "pairs refused because rows depend on each other: 1 x/text-classification",
    ]
