"""Tests of `accelerate`, which compiles a model in place: input sizes, checks, errors and `restore`, and real
compilation of small models.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import accel
from accel.backends import registry
from accel.config import AccelerateConfig, PrepareConfig
from accel.errors import BackendUnavailableError, ConfigError, ExportError, InputError, PrepareError
from accel.testing.conformance import BackendConformance
from accel.testing.generative_models import save_generator
from accel.testing.models import tiny_model, tiny_tokenizer
from accel_plugins.pytorch.inductor import backend, compiled_model
from accel_plugins.pytorch.inductor.precision import check_quantization

_model_logger: Any = logging.getLogger(f"{__name__}.model")
compiler = pytest.mark.skipif(backend.cpp_compiler() is None, reason="no C++ compiler is installed")


@compiler
@pytest.mark.thorough
class TestInductor(BackendConformance):
    backend = "inductor"
    artifact_format = "torch"

    def preparation(self, scheme: str) -> PrepareConfig:
        return AccelerateConfig(keep_slower=True)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """Replace the compiler, which takes seconds for each input shape, by a function that returns the uncompiled
    function. Return the list of functions that the compiler received.
    """
    functions: list[Callable[..., Any]] = []

    def stand_in(function: Callable[..., Any], **how: object) -> Callable[..., Any]:
        functions.append(function)
        return function

    monkeypatch.setattr(compiled_model, "compiled", stand_in)
    monkeypatch.setattr(compiled_model, "_ROUNDS", 1)
    return functions


def inputs(*texts: str) -> dict[str, torch.Tensor]:
    encoded = tiny_tokenizer()(list(texts or ("where is my card",)), padding=True, return_tensors="pt")
    return dict(encoded)


def answer(model: Any, **call: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**call).logits


# The tests below check compilation.


class Pooling(torch.nn.Module):
    """Small module that returns logits from the mean of the non-padding tokens, and logs a warning as transformers
    models do.

    It compiles in seconds, and wrong handling of padding would change its output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = torch.nn.Embedding(120, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        _model_logger.warning_once("said at every call, shown once")
        mask = attention_mask.unsqueeze(-1).float()
        return {"logits": self.out((self.table(input_ids) * mask).sum(1) / mask.sum(1))}


def one_layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    )


@compiler
@pytest.mark.parametrize("make", [Pooling, pytest.param(one_layer, marks=pytest.mark.thorough)])
def test_compiled_outputs_equal_the_model(
    make: Callable[[], torch.nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    """The model is compiled once for all lengths up to 16, the compilation is logged, and outputs match the original
    model. After `restore`, outputs are bit-identical to the original outputs.
    """
    model: Any = make().eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for ids in (torch.randint(4, 100, (1, n), generator=torch.Generator().manual_seed(n)) for n in (2, 5, 9, 12))
    ]
    expected = [logits(model, call) for call in calls]
    with caplog.at_level(logging.INFO, "accel_plugins"):
        assert accel.accelerate(model, keep_slower=True, lengths=(16,)) is model
        outputs = [logits(model, call) for call in calls]
    # Compiled code adds float32 numbers in a different order, so outputs differ slightly.
    assert all((output - other).abs().max() < 1e-5 for output, other in zip(outputs, expected, strict=True))
    assert f"compiling {type(model).__name__} for 1 row of 16 tokens" in caplog.text
    assert model.acceleration.compilations == 1
    [report] = model.acceleration.report()
    assert report["state"] == "compiled"
    assert report["ms"] > 0
    assert 0 <= report["difference"] < 1e-4
    model.restore()
    assert all(torch.equal(logits(model, call), other) for call, other in zip(calls, expected, strict=True))
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert not {"forward", "warmup", "restore", "acceleration"} & set(vars(model))


def logits(model: Any, call: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(**call)["logits"]


@compiler
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_compiled_generation_gives_equal_tokens(family: str, tmp_path: Path) -> None:
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(save_generator(tmp_path / family, family)).eval()
    call = prompt()
    expected = model.generate(**call)
    accel.accelerate(model, keep_slower=True)
    # Generate twice. The second call has a new KV cache, and compiled code must not write to the KV cache of the first
    # call.
    assert torch.equal(model.generate(**call), expected)
    assert torch.equal(model.generate(**call), expected)
    assert [report["state"] for report in model.acceleration.report()] == ["compiled"]


@compiler
@pytest.mark.thorough
@pytest.mark.parametrize(("settings", "accepted"), [({"dtype": "bfloat16"}, 5e-2), ({"quantization": "int8"}, 0.25)])
def test_lower_precision_has_small_error(settings: dict[str, Any], accepted: float) -> None:
    if "quantization" in settings:
        pytest.importorskip("torchao", reason="int8 is torchao's")
    model = tiny_model("bert").eval()
    expected = answer(model, **inputs())
    accel.accelerate(model, keep_slower=True, **settings)
    output = answer(model, **inputs())
    assert output.dtype is torch.float32
    assert 0 < (output - expected).abs().max() <= accepted * expected.abs().max()
    assert torch.equal(answer(model.restore(), **inputs()), expected)


_ANSWERS_ONCE = """
import torch
import accel
from accel.testing.models import tiny_model
model = accel.accelerate(tiny_model("bert").eval(), keep_slower=True)
with torch.inference_mode():
    model(input_ids=torch.tensor([[2, 5, 6, 3]]), attention_mask=torch.ones(1, 4, dtype=torch.int64))
assert model.acceleration.compilations == 1
"""


@compiler
@pytest.mark.thorough
def test_second_process_reuses_compiled_kernels(tmp_path: Path) -> None:
    environment = {**os.environ, "ACCEL_HOME": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    timestamps = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", _ANSWERS_ONCE], env=environment, capture_output=True, check=True)
        timestamps.append({file: file.stat().st_mtime_ns for file in (tmp_path / "inductor").rglob("*.so")})
    assert timestamps[0]
    assert timestamps[0] == timestamps[1]


# The tests below check input sizes.


@pytest.mark.thorough
def test_fifty_shapes_need_few_compilations(uncompiled: list[Any]) -> None:
    model = tiny_model("bert").eval()
    generator = torch.Generator().manual_seed(0)
    calls = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for ids in (torch.randint(4, 100, (1 + n % 2, 3 + n), generator=generator) for n in range(50))
    ]
    expected = [answer(model, **call) for call in calls]
    accel.accelerate(model, keep_slower=True)
    outputs = [answer(model, **call) for call in calls]
    assert all((output - other).abs().max() < 1e-5 for output, other in zip(outputs, expected, strict=True))
    # The ten compilations are for lengths 16, 24, 32, 48 and 64, each with one row and with two rows.
    assert len(uncompiled) == model.acceleration.compilations == 10
    assert model.acceleration.engine.uncompiled_calls == 0


def test_limit_of_graphs_warns_and_uses_larger_shapes(uncompiled: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("bert").eval()
    accel.accelerate(model, keep_slower=True, graphs=1)
    ids = torch.randint(4, 100, (1, 40))
    for length, count in ((40, 0), (30, 0), (12, 1), (10, 1)):
        model(input_ids=ids[:, :length], attention_mask=torch.ones(1, length, dtype=torch.int64))
        warned = [record for record in caplog.records if "sizes are compiled already" in record.message]
        assert len(warned) == count
    assert len(uncompiled) == 1
    assert model.acceleration.engine.uncompiled_calls == 2


def test_token_outputs_are_cut_to_the_input_length() -> None:
    model = tiny_model("bert", "token-classification").eval()
    call = inputs("where is my card", "lost", "i lost it please help me")
    expected = answer(model, **call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_model, "compiled", lambda function, **how: function)
        output = answer(accel.accelerate(model, keep_slower=True), **call)
    real = call["attention_mask"].bool()
    assert output.shape == expected.shape
    assert (output[real] - expected[real]).abs().max() < 1e-5


def test_missing_mask_is_created_if_the_model_accepts_masks(uncompiled: list[Any]) -> None:
    model = tiny_model("bert").eval()
    ids = inputs()["input_ids"]
    expected = answer(model, input_ids=ids)
    assert (answer(accel.accelerate(model, keep_slower=True), input_ids=ids) - expected).abs().max() < 1e-5


class Averaging(torch.nn.Module):
    """Module that returns the mean of all tokens, and ignores the attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(100, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": self.table(input_ids).mean(1)}


def test_model_affected_by_padding_is_not_padded(uncompiled: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    model = Averaging().eval()
    ids = torch.tensor([[5, 6, 7]])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model(**call)["mean"]
    mean = accel.accelerate(model, keep_slower=True)(**call)["mean"]
    assert torch.allclose(mean, expected)
    assert "Padding changes the outputs of Averaging" in caplog.text
    with torch.no_grad():
        assert torch.equal(model(**call)["mean"], expected)


# The tests below call the model from several threads.


def at_once(count: int, call: Callable[[], Any]) -> list[Any]:
    """Call `call` in `count` threads that start at the same time, and return their results."""
    together = threading.Barrier(count)

    def begin(_: int) -> Any:
        together.wait()
        return call()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_threads_get_results_when_padding_is_disabled(uncompiled: list[Any]) -> None:
    """The first thread detects that padding changes the output and removes the compiled code, while the other threads
    wait for the compiled code. All threads get correct results.
    """
    model = Averaging().eval()
    ids = torch.tensor([[5, 6, 7]])
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model(**call)["mean"]
    accel.accelerate(model, keep_slower=True)
    assert all(torch.allclose(outputs["mean"], expected) for outputs in at_once(8, lambda: model(**call)))


def test_threads_fall_back_to_eager_if_compiled_code_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_model, "compiled", slow)
    model = tiny_model("bert").eval()
    expected = answer(model, **inputs())
    accel.accelerate(model)
    # On a busy machine, PyTorch may use fewer threads for a product, and then adds in another order.
    assert all(torch.allclose(output, expected, atol=1e-6) for output in at_once(8, lambda: answer(model, **inputs())))
    assert model.acceleration.report()[0]["state"] == "eager"


def test_outputs_are_cut_while_another_thread_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    checking, finished = threading.Event(), threading.Event()

    def stand_in(function: Callable[..., Any], **how: object) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            if threading.current_thread().name == "checking":
                checking.set()
                assert finished.wait(60)
            return function(**kwargs)

        return call

    monkeypatch.setattr(compiled_model, "compiled", stand_in)
    model = accel.accelerate(tiny_model("bert", "token-classification").eval(), keep_slower=True, lengths=(16,))
    short, full = torch.tensor([[5, 6, 7]]), torch.arange(16)[None] + 5
    assert answer(model, input_ids=short).shape[1] == 3
    thread = threading.Thread(target=lambda: answer(model, input_ids=full), name="checking")
    thread.start()
    try:
        assert checking.wait(60)
        assert answer(model, input_ids=short).shape[1] == 3
    finally:
        finished.set()
        thread.join()
    assert model.acceleration.compilations == 1


@pytest.fixture
def traced(uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the compiler by a tracer. As in compiled code, traced graphs have the input sizes of the first call and
    no guards, but PyTorch runs the operators without compilation.
    """

    def graph(function: Callable[..., Any], **how: object) -> Any:
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        # `torch.compile` stores its results for each code object, so each function needs its own code object.
        code = function.__func__ if hasattr(function, "__func__") else function
        copied = types.FunctionType(
            code.__code__.replace(co_name=f"traced_{next(_COUNT)}"),
            code.__globals__, None, code.__defaults__, code.__closure__,
        )  # fmt: skip
        copied.__kwdefaults__ = code.__kwdefaults__
        bound = types.MethodType(copied, function.__self__) if hasattr(function, "__self__") else copied
        return torch.compile(bound, backend="eager", fullgraph=True, dynamic=False, options=options)

    monkeypatch.setattr(compiled_model, "compiled", graph)


_COUNT = itertools.count()


class TwoInputs(torch.nn.Module):
    """Module with two inputs whose lengths are independent. The attention mask belongs to the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(120, 8)

    def forward(
        self, input_ids: torch.Tensor, other: torch.Tensor, attention_mask: torch.Tensor
    ) -> dict[str, torch.Tensor | int]:
        mask = attention_mask.unsqueeze(-1).float()
        logits = (self.table(input_ids) * mask).sum(1) - 2 * self.table(other).mean(1)
        return {"logits": logits, "rows": input_ids.shape[0], "columns": other.shape[1]}


def test_calls_with_different_structure_are_compiled_separately(traced: None) -> None:
    """Outputs are correct if two inputs happen to have equal lengths, if one tensor is passed as two inputs, if strides
    differ, or if the output contains Python numbers.
    """
    model: Any = TwoInputs().eval()
    wide = torch.randint(4, 100, (3, 40))
    five, seven, sixteen = wide[:, :5], wide[:, 1:8], wide[:, 3:19]
    pairs = [
        (five, five),
        (seven, seven),
        (five, seven),
        (sixteen, sixteen),
        (sixteen, wide[:, :16]),
        (five[:2], five[:2]),
    ]
    calls = [
        {"input_ids": ids, "other": other, "attention_mask": torch.ones(ids.shape, dtype=torch.int64)}
        for ids, other in pairs
    ]
    with torch.no_grad():
        expected = [model(**call) for call in calls]
        accel.accelerate(model, keep_slower=True)
        outputs = [model(**call) for call in calls]
    for output, other in zip(outputs, expected, strict=True):
        assert torch.allclose(output["logits"], other["logits"], atol=1e-5)
        assert (output["rows"], output["columns"]) == (other["rows"], other["columns"])


def test_outer_autocast_does_not_change_results(uncompiled: list[Any]) -> None:
    model = accel.accelerate(tiny_model("bert").eval(), keep_slower=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = answer(model, **inputs())
    assert first.dtype is torch.float32
    assert torch.equal(answer(model, **inputs()), first)


# The tests below check verification and errors.


def test_wrong_compiled_output_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(function: Callable[..., Any], **how: object) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            result = function(**kwargs)
            result.logits = result.logits * 1.5
            return result

        return call

    monkeypatch.setattr(compiled_model, "compiled", wrong)
    model = accel.accelerate(tiny_model("bert").eval(), keep_slower=True)
    with pytest.raises(
        PrepareError,
        match=r"differ from the outputs of the original model by 0.\d+ of the largest value; at most 0.001",
    ):
        model(**inputs())


def slow(function: Callable[..., Any], **how: object) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        for _ in range(9):
            function(**kwargs)
        return function(**kwargs)

    return call


def test_slower_compiled_code_raises_with_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_model, "compiled", slow)
    model = tiny_model("bert").eval()
    with pytest.raises(
        PrepareError,
        match=r"not faster than the original model: for 2 rows of 16 tokens, compiled code takes [\d.e+]+ ms and .* ms",
    ):
        accel.accelerate(model, shapes=[(2, 12)])
    assert "forward" not in vars(model)
    model = accel.accelerate(model, keep_slower=True, shapes=[(2, 12)])
    assert model.acceleration.report()[0]["state"] == "compiled"


def test_slower_compiled_code_in_a_call_warns_and_runs_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_model, "compiled", slow)
    model = tiny_model("bert").eval()
    expected = answer(model, **inputs())
    accel.accelerate(model)
    for _ in range(2):
        output = answer(model, **inputs())
    assert torch.equal(output, expected)
    assert "is not faster for 1 row of 16 tokens" in caplog.text
    assert model.acceleration.report()[0]["state"] == "eager"


def test_compiler_error_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(function: Callable[..., Any], **how: object) -> Callable[..., Any]:
        def call(**kwargs: Any) -> Any:
            raise RuntimeError("graph break at print")

        return call

    monkeypatch.setattr(compiled_model, "compiled", failing)
    model = accel.accelerate(tiny_model("bert").eval())
    with pytest.raises(PrepareError, match="cannot be compiled for 1 row of 16 tokens: RuntimeError: graph break"):
        model(**inputs())


def _hook(model: Any) -> None:
    model.bert.pooler.register_forward_hook(lambda module, args, output: output * 2)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "in place": (lambda m: m.classifier.weight.data.mul_(2), "weights were changed"),
    "other data": (lambda m: setattr(m.bert.pooler.dense.weight, "data", torch.ones(32, 32)), "weights were changed"),
    "another type": (lambda m: m.double(), "weights were changed or moved"),
    "state dict": (lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}), "weights were changed"),
    "another parameter": (
        lambda m: setattr(m.classifier, "bias", torch.nn.Parameter(torch.ones(3))), "classifier.bias was replaced",
    ),
    "another layer": (lambda m: setattr(m, "classifier", torch.nn.Identity()), "classifier was replaced"),
    "a hook": (_hook, "hooks of its submodules"),
    "a setting": (lambda m: setattr(m.bert.embeddings.LayerNorm, "eps", 1.0), "eps was 1e-12 and is now 1.0"),
    "a part in training": (lambda m: m.bert.train(), "training was False and is now True"),
    "its config": (
        lambda m: setattr(m.config, "output_hidden_states", True), "output_hidden_states was False and is now True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changed_model_raises(uncompiled: list[Any], change: str) -> None:
    how, message = CHANGES[change]
    model = accel.accelerate(one_layer().eval(), keep_slower=True)
    answer(model, **inputs())
    # The following changes do not affect the compiled code, so the accelerated model accepts them.
    model.config.id2label = {0: "no", 1: "yes"}
    model.register_forward_hook(lambda module, args, output: output)
    answer(model.to("cpu").requires_grad_(False), **inputs())
    how(model)
    with pytest.raises(PrepareError, match=message):
        model(**inputs())
    with torch.no_grad():
        assert "forward" not in vars(model.restore())


# PEFT reads a deprecated attribute of transformers, and transformers warns about the attribute.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["another adapter", "none"])
def test_other_adapter_raises(uncompiled: list[Any], how: str) -> None:
    peft = pytest.importorskip("peft", reason="adapters are PEFT's")
    settings = {"r": 2, "target_modules": ["query"], "init_lora_weights": False}
    model = peft.get_peft_model(one_layer(), peft.LoraConfig(**settings))
    model.add_adapter("other", peft.LoraConfig(**settings))
    expected = answer(model.eval(), **inputs())
    accel.accelerate(model, keep_slower=True)
    assert torch.allclose(answer(model, **inputs()), expected, atol=1e-5)
    with contextlib.ExitStack() as stack:
        if how == "none":
            stack.enter_context(model.disable_adapter())
        else:
            model.set_adapter("other")
        with pytest.raises(PrepareError, match="adapter"):
            model(**inputs())


def test_training_and_gradients_raise(uncompiled: list[Any]) -> None:
    model = accel.accelerate(tiny_model("bert").eval(), keep_slower=True)
    with pytest.raises(PrepareError, match="in training mode"):
        model.train()(**inputs())
    with pytest.raises(InputError, match="computes no gradients"):
        model.eval()(inputs_embeds=torch.zeros(1, 4, 32, requires_grad=True))
    assert answer(model.restore(), **inputs()) is not None


def test_failed_call_leaves_no_compiled_shape(uncompiled: list[Any]) -> None:
    model = accel.accelerate(tiny_model("bert").eval(), keep_slower=True)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]))
    assert model.acceleration.report() == []


class Nameless(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.layer(args[0])


def test_invalid_arguments_raise(uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tiny_model("bert")
    with pytest.raises(ConfigError, match="evaluation mode"):
        accel.accelerate(model.train())
    with pytest.raises(BackendUnavailableError, match="'inductor'"):
        accel.accelerate(model.eval(), backend="cpu")
    with pytest.raises(ConfigError, match="no setting 'quantisation'.* Did you mean 'quantization'"):
        accel.accelerate(model, quantisation="int8")
    accel.accelerate(model, keep_slower=True)
    with pytest.raises(InputError, match="no loss"):
        model(**inputs(), labels=torch.tensor([1]))
    with pytest.raises(InputError, match="already"):
        accel.accelerate(model)
    for silly in ([(1, 2, 3)], [5], [(0, 5)], [(True, 3)], ["ab"]):
        with pytest.raises(ConfigError, match="not a valid shape"):
            model.warmup(silly)
    for silly in (5, None, "ab", {"input_ids": torch.ones(1, 3)}):
        with pytest.raises(ConfigError, match="Expected a list of shapes"):
            model.warmup(silly)
    with pytest.raises(ConfigError, match=r"supports at most \d+ tokens per row, but the shape \(1, 100000\)"):
        model.warmup([(1, 100000)])
    with pytest.raises(InputError, match="submodule bert of the model is already accelerated"):
        full_model = tiny_model("bert").eval()
        accel.accelerate(full_model.bert)
        accel.accelerate(full_model)
    with pytest.raises(InputError, match="input 1 of Nameless.forward has no parameter name"):
        accel.accelerate(Nameless().eval())(torch.ones(2, 2))
    with pytest.raises(ExportError, match="was accelerated by accel.accelerate"):
        accel.export(model, tmp_path / "onnx")
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PrepareError, match="cannot be copied or pickled"):
            copying(model)
    monkeypatch.setattr(backend, "cpp_compiler", lambda: None)
    status = backend.InductorBackend().probe()
    assert "g++" in next(reason.remedy for reason in status.reasons if reason.code == "no-compiler")
    assert "cpu" not in {device.type for device in status.devices}


# The tests below use accelerated models in pipelines, in generation and in saving.


def test_pipelines_and_saving_work(uncompiled: list[Any], tmp_path: Path) -> None:
    model = tiny_model("bert").eval()
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tiny_tokenizer())
    expected = pipe(["where is my card", "help"])
    accel.accelerate(model, keep_slower=True)
    results = transformers.pipeline("text-classification", model=model, tokenizer=tiny_tokenizer())(
        ["where is my card", "help"]
    )
    assert uncompiled
    assert [result["label"] for result in results] == [result["label"] for result in expected]
    assert all(abs(result["score"] - other["score"]) < 1e-5 for result, other in zip(results, expected, strict=True))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(answer(again, **inputs()), answer(model.restore(), **inputs()))


def prompt() -> dict[str, Any]:
    ids = torch.randint(5, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {
        "input_ids": ids, "attention_mask": mask, "max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False,
        "pad_token_id": 0,
    }  # fmt: skip


@pytest.fixture
def llama(shared: Callable[..., Path]) -> Any:
    folder = shared("inductor-llama", lambda folder: save_generator(folder, "llama"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_uses_static_cache(uncompiled: list[Any], llama: Any, beams: int) -> None:
    longer = {**prompt(), "max_new_tokens": 20, "min_new_tokens": 20}
    expected = llama.generate(**prompt(), num_beams=beams)
    expected_longer = llama.generate(**longer, num_beams=beams)
    accel.accelerate(llama, keep_slower=True)
    # A saved model must contain only the user's settings, so `accelerate` must not change the generation config.
    assert llama.generation_config.cache_implementation is None
    assert torch.equal(llama.generate(**prompt(), num_beams=beams), expected)
    # The length of the static cache is rounded up, so this longer output uses the same compiled code.
    assert torch.equal(llama.generate(**longer, num_beams=beams), expected_longer)
    assert len(uncompiled) == 1
    assert torch.equal(llama.restore().generate(**prompt(), num_beams=beams), expected)


def test_generate_runs_inside_and_outside_inference_mode(uncompiled: list[Any], llama: Any) -> None:
    beams = {**prompt(), "num_beams": 3}
    expected = [llama.generate(**call) for call in (prompt(), beams)]
    accel.accelerate(llama, keep_slower=True)
    for mode in (False, True, False):
        with torch.inference_mode(mode):
            sequences = [llama.generate(**call) for call in (prompt(), beams)]
        assert all(torch.equal(tokens, other) for tokens, other in zip(sequences, expected, strict=True))


def test_assisted_generation_needs_no_static_cache(uncompiled: list[Any], llama: Any) -> None:
    """Assisted generation gives equal tokens when the main model and the assistant model are accelerated. Prompt lookup
    is tested as a second kind of assisted generation.
    """
    call = {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in prompt().items()}
    assistant = copy.deepcopy(llama)
    expected = llama.generate(**call)
    accel.accelerate(llama, keep_slower=True)
    accel.accelerate(assistant, keep_slower=True)
    for how in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}):
        assert torch.equal(llama.generate(**call, **how), expected)


def test_warmup_of_generator_generates_tokens(uncompiled: list[Any], llama: Any) -> None:
    [report] = accel.accelerate(llama, keep_slower=True).warmup([(1, 8)])
    assert report["form"].startswith("one token with StaticCache")
    assert report["ms"] > 0


def test_backend_runs_pytorch_artifacts(uncompiled: list[Any], tiny_folder: Callable[..., Path]) -> None:
    settings = {"provider_options": {"keep_slower": True}}
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="inductor", **settings)
    assert (model.backend, model.compute_dtype) == ("inductor", "float32")
    expected = answer(tiny_model("bert").eval(), **inputs())
    assert (model(**inputs()).logits - expected).abs().max() < 1e-5
    assert uncompiled
    with pytest.raises(ConfigError, match="no option 'compile'"):
        accel.ORTModelForSequenceClassification.from_pretrained(
            tiny_folder(), backend="inductor", provider_options={"compile": True}
        )


def test_generation_on_cpu_is_refused_with_fix(shared: Callable[..., Path]) -> None:
    folder = shared("inductor-llama", lambda folder: save_generator(folder, "llama"))
    with pytest.raises(ConfigError, match="only on NVIDIA GPUs"):
        accel.ORTModelForCausalLM.from_pretrained(folder, backend="inductor")
    assert "accelerate" in registry.describe("inductor").capability("prepare").schemes


def test_int8_is_refused_on_gpus() -> None:
    pytest.importorskip("torchao", reason="int8 is torchao's")
    with pytest.raises(ConfigError, match="at least 17 rows"):
        check_quantization("int8", torch.device("cuda"), torch.float16)
