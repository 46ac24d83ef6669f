"""Public objects can be pickled and copied, or raise an error with the reason."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accel
from accel import errors
from accel.artifact import Artifact
from accel.backends import registry
from accel.errors import AccelError, ArtifactError, ConfigError, InputError
from accel.interfaces.specs import DeviceSpec
from accel.measuring.accuracy.evaluation import evaluate
from accel.testing.generative_models import save_generator
from accel.testing.models import save_tiny, tiny_tokenizer

TEXT = "where is my card"
WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
QUESTION = {"question": "where", "context": "my card is in london"}
# Each entry maps a pipeline task to the model family, the task of the model, and the input of the pipeline.
PIPELINES: dict[str, tuple[str, str, Any]] = {
    "text-classification": ("bert", "text-classification", TEXT),
    "zero-shot-classification": ("bert", "text-classification", None),
    "token-classification": ("bert", "token-classification", TEXT),
    "feature-extraction": ("bert", "feature-extraction", TEXT),
    "fill-mask": ("bert", "fill-mask", f"{TEXT} [MASK]"),
    "question-answering": ("bert", "question-answering", QUESTION),
    "text-generation": ("gpt2", "", TEXT),
    "summarization": ("t5", "", TEXT),
    "translation": ("t5", "", TEXT),
    "text2text-generation": ("t5", "", TEXT),
    "image-classification": ("vit", "image-classification", None),
    "automatic-speech-recognition": ("wav2vec2", "ctc", None),
}


@pytest.fixture(scope="module")
def open_pipeline(shared: Callable[..., Path], tiny_folder: Callable[..., Path]) -> Callable[[str], Any]:
    """Return a function that creates pipelines with the `pytorch` backend, which needs no export."""

    def get(task: str) -> Any:
        family, name, _ = PIPELINES[task]
        folder = (
            tiny_folder(family, name) if name else shared(f"generator-{family}", lambda f: save_generator(f, family))
        )
        options = {} if family in ("vit", "wav2vec2") else {"tokenizer": tiny_tokenizer()}
        return accel.pipeline(task, folder, backend="pytorch", **options)

    return get


@pytest.mark.parametrize("task", PIPELINES)
@pytest.mark.filterwarnings("ignore")
def test_pipelines(task: str, open_pipeline: Callable[[str], Any]) -> None:
    pipe, inputs = open_pipeline(task), PIPELINES[task][2]
    for way in WAYS.values():
        other = way(pipe)
        assert type(other) is type(pipe)
        assert vars(other).keys() == vars(pipe).keys()
        if inputs is not None:
            settings = {"max_new_tokens": 3} if PIPELINES[task][1] == "" else {}
            settings |= {"do_sample": False} if settings else {}
            assert repr(other(inputs, **settings)) == repr(pipe(inputs, **settings))


def test_pickled_pipeline_in_another_process(open_pipeline: Callable[[str], Any], tmp_path: Path) -> None:
    """A new Python interpreter that has imported nothing loads the pickle, as with multiprocessing's spawn, Ray and
    Spark.
    """
    pipe = open_pipeline("text-classification")
    (tmp_path / "pipe.pickle").write_bytes(pickle.dumps(pipe))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(sys.argv[2])[0]['label'])"
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pipe.pickle"), TEXT], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[-1] == pipe(TEXT)[0]["label"]


def test_joblib_stores_pipelines(open_pipeline: Callable[[str], Any], tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib", reason="joblib is not installed")
    pipe = open_pipeline("text-classification")
    joblib.dump(pipe, tmp_path / "pipe.joblib")
    assert joblib.load(tmp_path / "pipe.joblib")(TEXT) == pipe(TEXT)


VALUES: dict[str, Callable[[Artifact], Any]] = {
    "artifact": lambda artifact: artifact,
    "session options": lambda _: accel.SessionOptions(),
    "export config": lambda _: accel.ExportConfig(),
    "optimize config": lambda _: accel.OptimizeConfig(),
    "quantize config": lambda _: accel.QuantizeConfig(),
    "accelerate config": lambda _: accel.AccelerateConfig(),
    "generation options": lambda _: accel.GenerationOptions(),
    "generation limits": lambda _: accel.GenerationLimits(),
    "device": lambda _: DeviceSpec.parse("cuda:1"),
    "backends": lambda _: accel.list_backends(),
    "specs": lambda _: registry.describe_all()[0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VALUES)
def test_public_values_are_equal_after_copying(name: str, way: str, tiny_artifact: Callable[..., Artifact]) -> None:
    value = VALUES[name](tiny_artifact())
    assert WAYS[way](value) == value


def test_evaluation_result_is_pickled(tiny_folder: Callable[..., Path]) -> None:
    model = accel.ORTModelForSequenceClassification.from_pretrained(tiny_folder(), backend="pytorch")
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(["my card", "the bank", "help", "london"])]
    report = evaluate(model, rows, processor=tiny_tokenizer())
    assert repr(pickle.loads(pickle.dumps(report))) == repr(report)


@pytest.mark.parametrize(
    "name", [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AccelError)]
)
def test_errors_keep_message_fix_and_notes(name: str) -> None:
    error = getattr(errors, name)("It failed.", fix="do this.")
    error.retry_after_s = 1.5
    error.add_note("row 3")
    for way in WAYS.values():
        other = way(error)
        assert type(other) is type(error)
        assert str(other) == str(error) == "It failed.\nFix: do this."
        assert (other.message, other.fix, other.retry_after_s) == ("It failed.", "do this.", 1.5)
        assert other.__notes__ == ["row 3"]


# The tests below check objects that own memory or threads of a runtime.


@pytest.fixture(scope="module")
def gpt2(shared: Callable[..., Path]) -> Any:
    folder = shared("generator-gpt2", lambda folder: save_generator(folder, "gpt2"))
    return accel.ORTModelForCausalLM.from_pretrained(folder, backend="pytorch")


def test_cache_is_copied_and_not_pickled(gpt2: Any) -> None:
    cache = gpt2(input_ids=torch.tensor([[5, 6]])).past_key_values
    for way in (copy.copy, copy.deepcopy):
        other = way(cache)
        gpt2(input_ids=torch.tensor([[7]]), past_key_values=other)
        assert (cache.get_seq_length(), other.get_seq_length()) == (2, 3)
    with pytest.raises(InputError, match="cannot be pickled") as error:
        pickle.dumps(cache)
    assert "DynamicCache" in str(error.value.fix)


@pytest.mark.parametrize("way", WAYS)
def test_engines_are_neither_pickled_nor_copied(gpt2: Any, way: str) -> None:
    for engine in (accel.Engine(gpt2), accel.GenerationEngine(gpt2, tiny_tokenizer())):
        with pytest.raises(ConfigError, match="cannot be pickled"):
            WAYS[way](engine)


def test_pickled_model_without_its_folder_raises(tmp_path: Path) -> None:
    """A pickle contains the path of the artifact, which may be a cached export. Loading the pickle raises an error if
    the files no longer exist.
    """
    save_tiny(tmp_path / "model", "bert")
    accel.export(tmp_path / "model", tmp_path / "onnx")
    pickled = pickle.dumps(accel.ORTModelForSequenceClassification.from_pretrained(tmp_path / "onnx"))
    shutil.rmtree(tmp_path / "onnx")
    with pytest.raises(ArtifactError) as error:
        pickle.loads(pickled)
    assert str(tmp_path / "onnx") in str(error.value)
    assert error.value.fix
