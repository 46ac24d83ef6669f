"""Compare the embeddings of accel with those of sentence-transformers 6 for tiny models of many architectures.

    python benchmarks/embedding_equality.py [--only NAME ...] [--backend cpu openvino] [--texts 500] [--out FILE]

Needs sentence-transformers 6 in the same environment. If it cannot be installed there, add it next to the packages of accel:

    pip install --no-deps --target build/sentence-transformers sentence-transformers
    PYTHONPATH=build/sentence-transformers python benchmarks/embedding_equality.py

Each model has random weights. Its tokenizer is trained on the texts of the demo, and the texts have 1 to 500 tokens. sentence-transformers
saves each model, and accel exports the folder with each backend. Then both compute the same texts with each option: the prompts by name,
`truncate_dim` with and without a new normalization, the five precisions and `similarity`, in ragged batches and each text alone.

The difference of two results is their largest absolute difference, divided by the largest absolute value of sentence-transformers if that
is above 1. The script prints one row per model and backend, and ends with exit code 1 if a difference is above 1e-5. Integers and bits may
differ only where a value is within 1e-5 of the border of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers as st
import torch
import transformers
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import accel
from accel.demo import read_test_set
from accel.testing.models import rescale

BAR = 1e-5
HIDDEN = 64
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
SIZES: Mapping[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 520,
    "pad_token_id": 0,
}  # fmt: skip
DECODER: Mapping[str, Any] = {
    **SIZES, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 3, "bos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
PROMPTS = {"query": "find the answer : ", "document": "the text : "}
METHODS = ("encode", "encode_query", "encode_document")


@dataclass(frozen=True)
class Model:
    """A tiny model: the transformers classes with config fields, and the modules of sentence-transformers after the transformer.

    Attributes:
        config: Name of the config class.
        architecture: Name of the model class.
        settings: Fields of the config.
        modules: Function that creates the modules after the transformer from the hidden size.
        kind: Name of the class of sentence-transformers.
        left: Whether the tokenizer pads on the left.
        prompts: Prompts by name.
        transformer: Arguments of the module Transformer.
    """

    config: str
    architecture: str
    settings: Mapping[str, Any]
    modules: Callable[[], list[Any]]
    kind: str = "SentenceTransformer"
    left: bool = False
    prompts: Mapping[str, str] = field(default_factory=lambda: PROMPTS)
    transformer: Mapping[str, Any] = field(default_factory=dict)


def pooled(*modes: str, after: Sequence[Callable[[], Any]] = (Normalize,), **settings: Any) -> Callable[[], list[Any]]:
    mode: Any = modes[0] if len(modes) == 1 else list(modes)
    return lambda: [Pooling(HIDDEN, pooling_mode=mode, **settings), *(make() for make in after)]


def dense(size: int = 48, *, activation: Any = None, **settings: Any) -> Callable[[], Any]:
    return lambda: rescale(Dense(HIDDEN, size, activation_function=activation or torch.nn.Tanh(), **settings))


def scaled_norm() -> Any:
    return rescale(LayerNorm(HIDDEN))


def projection() -> Any:
    return rescale(
        Dense(HIDDEN, 32, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    )


def late() -> list[Any]:
    return [projection(), MultiVectorMask(skiplist_words=["."]), Normalize(module_input_name="token_embeddings")]


def splade() -> list[Any]:
    return [SpladePooling()]


MODERN = {
    **SIZES, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "global_attn_every_n_layers": 2,
    "local_attention": 32,
}  # fmt: skip
DISTIL = {
    "dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "max_position_embeddings": 520, "pad_token_id": 0,
}  # fmt: skip
XLM = {**SIZES, "pad_token_id": 0, "type_vocab_size": 1}
DEBERTA = {
    **SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "type_vocab_size": 0,
    "position_buckets": 32, "share_att_key": True, "norm_rel_ebd": "layer_norm",
}  # fmt: skip
T5 = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 3}
GEMMA = {
    **DECODER,
    "sliding_window": 64,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
MODELS: Mapping[str, Model] = {
    "bert": Model("BertConfig", "BertModel", SIZES, pooled("mean")),
    "bert-dense": Model("BertConfig", "BertModel", SIZES, pooled("cls", after=(dense(), Normalize))),
    "bert-unnormalized": Model("BertConfig", "BertModel", SIZES, pooled("max", "mean_sqrt_len_tokens", after=())),
    "xlm-roberta": Model("XLMRobertaConfig", "XLMRobertaModel", XLM, pooled("cls")),
    "mpnet": Model("MPNetConfig", "MPNetModel", SIZES, pooled("mean")),
    "mpnet-no-prompt": Model("MPNetConfig", "MPNetModel", SIZES, pooled("mean", include_prompt=False)),
    "modernbert": Model("ModernBertConfig", "ModernBertModel", MODERN, pooled("mean")),
    "modernbert-left": Model("ModernBertConfig", "ModernBertModel", MODERN, pooled("cls", "mean"), left=True),
    "distilbert": Model("DistilBertConfig", "DistilBertModel", DISTIL, pooled("mean")),
    "nomic-bert": Model("NomicBertConfig", "NomicBertModel", SIZES, pooled("mean")),
    "t5": Model("T5Config", "T5EncoderModel", T5, pooled("mean", after=(dense(bias=False, activation=torch.nn.Identity()), Normalize))),
    "qwen3-left": Model("Qwen3Config", "Qwen3Model", DECODER, pooled("lasttoken"), left=True),
    "qwen3-right": Model("Qwen3Config", "Qwen3Model", DECODER, pooled("lasttoken", include_prompt=True)),
    "qwen3-weighted": Model("Qwen3Config", "Qwen3Model", DECODER, pooled("weightedmean"), left=True),
    "gemma3": Model(
        "Gemma3TextConfig", "Gemma3TextModel", {**GEMMA, "use_bidirectional_attention": True},
        pooled("mean", after=(dense(96, bias=False, activation=torch.nn.Identity()), Normalize)),
    ),
    "deberta-v2": Model("DebertaV2Config", "DebertaV2Model", DEBERTA, pooled("mean", after=(scaled_norm, Normalize))),
    "albert": Model("AlbertConfig", "AlbertModel", {**SIZES, "embedding_size": 32}, pooled("mean_sqrt_len_tokens")),
    "electra": Model("ElectraConfig", "ElectraModel", {**SIZES, "embedding_size": 32}, pooled("max")),
    "splade": Model(
        "DistilBertConfig", "DistilBertForMaskedLM", DISTIL, splade, kind="SparseEncoder",
        transformer={"transformer_task": "fill-mask"},
    ),
    "late-bert": Model(
        "BertConfig", "BertModel", SIZES, late, kind="MultiVectorEncoder",
        transformer={"query_expansion": {"strategy": "fixed", "attend": False, "length": 32}, "document_length": 180},
    ),
    "late-modernbert": Model(
        "ModernBertConfig", "ModernBertModel", MODERN, late, kind="MultiVectorEncoder",
        transformer={"query_expansion": {"strategy": "min", "attend": True, "length": 32}},
    ),
}  # fmt: skip


def trained_tokenizer(texts: Sequence[str]) -> Tokenizer:
    """Train a WordPiece tokenizer of 2,000 tokens."""
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL["unk"]))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=list(SPECIAL.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def texts_of_many_lengths(sentences: Sequence[str], tokenizer: Tokenizer, count: int) -> list[str]:
    """Return texts of 1 to 500 tokens, in random order."""
    drawn = random.Random(0)
    texts = []
    for i in range(count):
        length = 1 + i * 499 // max(count - 1, 1)
        words: list[str] = []
        while len(words) < length:
            words += drawn.choice(sentences).split()
        encoded = tokenizer.encode(" ".join(words), add_special_tokens=False)
        texts.append(" ".join(words)[: encoded.offsets[min(length, len(encoded.ids)) - 1][1]])
    drawn.shuffle(texts)
    return texts


def saved_model(model: Model, tokenizer: Tokenizer, folder: Path) -> Any:
    """Save a model with sentence-transformers, and return it loaded from its folder."""
    config = getattr(transformers, model.config)(vocab_size=tokenizer.get_vocab_size(), **model.settings)
    base = folder / "base"
    torch.manual_seed(0)
    network: Any = rescale(getattr(transformers, model.architecture)(config).eval())
    network.save_pretrained(base)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    names = (
        names
        if model.architecture in ("BertModel", "AlbertModel", "ElectraModel", "NomicBertModel")
        else [names[0], names[2]]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        model_input_names=names,
        padding_side="left" if model.left else "right",
        **{f"{name}_token": token for name, token in SPECIAL.items()},
    ).save_pretrained(base)
    kind = getattr(st, model.kind)
    modules = [Transformer(str(base), **model.transformer), *model.modules()]
    kind(modules=modules, device="cpu", prompts=dict(model.prompts)).save_pretrained(str(folder / "saved"))
    return kind(str(folder / "saved"), device="cpu")


def arrays(results: Any) -> list[np.ndarray[Any, Any]]:
    """Return results of either library as a list of arrays."""
    if isinstance(results, list):
        return [array for part in results for array in arrays(part)]
    if isinstance(results, torch.Tensor):
        results = (results.to_dense() if results.is_sparse else results).cpu().numpy()
    return [np.asarray(results)]


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference of two results, relative to the largest value if that is above 1."""
    pairs = list(zip(arrays(actual), arrays(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    largest = max((float(np.abs(b).max(initial=0)) for _, b in pairs), default=0.0)
    return max((float(np.abs(a - b).max(initial=0)) for a, b in pairs), default=0.0) / max(largest, 1.0)


def wrong_integers(actual: Any, expected: Any, values: np.ndarray[Any, Any], borders: np.ndarray[Any, Any]) -> int:
    """Return how many integers differ although the value is further than 1e-5 from a border. `borders` are the distances to them."""
    return int(((actual.astype(int) != expected.astype(int)) & (borders > BAR * max(1.0, np.abs(values).max()))).sum())


def bits(codes: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Return the bits of embeddings with the precision `binary` or `ubinary`, `(texts, size)`."""
    offset = 128 if codes.dtype == np.int8 else 0
    return np.unpackbits((codes.astype(np.int16) + offset).astype(np.uint8), axis=-1)[:, :size]


def compared(reference: Any, model: Any, texts: list[str], kind: str) -> Iterator[tuple[str, float]]:
    """Yield the name and the difference of each comparison."""
    few = texts[::12]
    computed = {}
    for method in METHODS:
        expected = getattr(reference, method)(texts)
        actual = getattr(model, method)(texts)
        computed[method] = expected
        yield method, difference(actual, expected)
        alone = [getattr(model, method)(text) for text in few]
        rows = list(expected.to_dense()) if isinstance(expected, torch.Tensor) else list(expected)
        parts = rows[::12]
        yield f"{method} alone", max(difference([a], [b]) for a, b in zip(alone, parts, strict=True))
    queries, documents = reference.encode_query(texts[:40]), reference.encode_document(texts[40:80])
    yield "similarity", difference(model.similarity(queries, documents), reference.similarity(queries, documents))
    yield "prompt_name", difference(model.encode(few, prompt_name="query"), reference.encode(few, prompt_name="query"))
    yield "prompt", difference(model.encode(few, prompt="a bank : "), reference.encode(few, prompt="a bank : "))
    if kind == "SparseEncoder":
        options: dict[str, Any] = {"max_active_dims": 16}
        yield "max_active_dims", difference(model.encode(few, **options), reference.encode(few, **options))
    if kind != "SentenceTransformer":
        return
    for options in ({"truncate_dim": 16}, {"truncate_dim": 16, "normalize_embeddings": True}):
        name = ", ".join(options)
        yield name, difference(model.encode(texts, **options), reference.encode(texts, **options))
    values = computed["encode"]
    ranges = np.stack([values.min(axis=0), values.max(axis=0)])
    steps = (ranges[1] - ranges[0]) / 255
    place = (values - ranges[0]) / np.where(steps == 0, 1, steps)
    distances = {"int": np.abs(place - place.round()) * steps, "bit": np.abs(values)}
    for precision in ("int8", "uint8", "binary", "ubinary"):
        # The last value of each range is clipped by accel, and overflows in the type of sentence-transformers.
        inside = place < 255
        expected = st.util.quantize_embeddings(values, precision=precision, ranges=ranges)
        actual = model.encode(texts, precision=precision, ranges=ranges)
        if precision in ("int8", "uint8"):
            wrong = wrong_integers(actual[inside], expected[inside], values, distances["int"][inside])
        else:
            size = values.shape[1]
            wrong = wrong_integers(bits(actual, size), bits(expected, size), values, distances["bit"])
        yield f"precision {precision}", float(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--backend", nargs="*", default=["cpu", "openvino"])
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--out", type=Path, help="write all differences to this JSON file")
    args = parser.parse_args()
    sentences = [text for text in read_test_set()[0] if text.isascii()]
    tokenizer = trained_tokenizer(sentences)
    texts = texts_of_many_lengths(sentences, tokenizer, args.texts)
    results: dict[str, dict[str, dict[str, float]]] = {}
    worst = 0.0
    print(f"{'model':20} {'backend':10} {'largest difference':>18}  comparison")
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            reference = saved_model(MODELS[name], tokenizer, Path(folder))
            for backend in args.backend:
                out = Path(folder) / backend
                accel.export(Path(folder) / "saved", out, backend=backend)
                with accel.ORTModelForFeatureExtraction.from_pretrained(out, backend=backend) as model:
                    differences = dict(compared(reference, model, texts, MODELS[name].kind))
                results.setdefault(name, {})[backend] = differences
                largest = max(differences, key=differences.__getitem__)
                worst = max(worst, differences[largest])
                print(f"{name:20} {backend:10} {differences[largest]:18.1e}  {largest}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"largest difference {worst:.1e}, bar {BAR:.0e}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
