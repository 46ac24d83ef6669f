"""Write the comparison with other libraries into README.md and docs/benchmarks/peers.md, from the JSON of `make bench-peers`.

python docs/tools/peers_table.py            # write
python docs/tools/peers_table.py --check    # exit 1 if a page differs from the JSON

The tables are between comments, for example `peers:begin` and `peers:end`; do not edit them by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks" / "peers.md"
README = ROOT / "README.md"


def read(name: str) -> dict[str, Any]:
    """Return the parsed JSON file of a benchmark."""
    document: dict[str, Any] = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    return document


# Descriptions of the rows in the table. Rows without an entry are shown with their name in the JSON file.
_LABELS = {
    "accel openvino int8": "accel, OpenVINO, int8",
    "accel openvino int8, bfloat16 elsewhere": "accel, OpenVINO, int8, other operators in bfloat16",
    "accel openvino int8, bfloat16 elsewhere, buckets": "accel, OpenVINO, int8, other operators in bfloat16, static shapes (buckets)",
    "accel cpu int8": "accel, ONNX Runtime, int8",
    "optimum-onnx int8": "optimum-onnx, int8",
    "optimum-intel as loaded": "optimum-intel, default settings",
    "accel cpu int4": "accel, ONNX Runtime, int4",
    "accel cpu int4, blocks of 128": "accel, ONNX Runtime, int4, blocks of 128",
    "accel openvino int4": "accel, OpenVINO, int4",
    "accel openvino int4, inexact": "accel, OpenVINO, int4, activations and KV cache in 8 bits",
    "optimum-intel int4": "optimum-intel, int4 (activations and KV cache in 8 bits)",
    "accel openvino int4, blocks of 128": "accel, OpenVINO, int4, blocks of 128",
    "accel openvino int4, blocks of 128, inexact": "accel, OpenVINO, int4, blocks of 128, activations and KV cache in 8 bits",
    "genai int4": "onnxruntime-genai, int4",
    "genai int4, blocks of 128": "onnxruntime-genai, int4, blocks of 128",
    "llama.cpp Q4_0": "llama.cpp, Q4_0",
}


def classification() -> str:
    """Return a table that compares the latency of one call of DistilBERT in accel, PyTorch and Optimum."""
    report = read("classification_peers.json")
    base = report["rows"]["PyTorch float32"]["median_ms"]
    lines = [
        "| one call of DistilBERT, 1 row of 128 tokens | median, ms | 5th to 95th percentile, ms | speed-up over PyTorch |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in report["rows"].items():
        label = _LABELS.get(name, name)
        if name.startswith("accel"):
            label = f"**{label}**"
        lines.append(
            f"| {label} | {row['median_ms']:.1f} | {row['p5_ms']:.1f} to {row['p95_ms']:.1f} | {base / row['median_ms']:.1f} |"
        )
    return "\n".join(lines) + (
        f"\n\nMeasured on {report['processors']} processor cores. `make bench-peers` repeats the measurement.\n"
    )


def generation() -> str:
    """Return a table that compares text generation in accel, PyTorch, onnxruntime-genai and optimum-intel."""
    report = read("generation_peers.json")
    lengths = list(next(iter(report["rows"].values())))
    columns = [f"{name}, prompt of {length}" for length in lengths for name in ("first token, ms", "tokens/s")]
    lines = ["| text generation, 1 prompt | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, row in report["rows"].items():
        label = _LABELS.get(name, name)
        if name.startswith("accel"):
            label = f"**{label}**"
        cells = [
            f"{row[length]['first_ms']:.0f} | {row[length]['tokens_per_s']:.0f} ({row[length]['best_twentieth_tokens_per_s']:.0f})"
            for length in lengths
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + (
        f"\n\nMedians; in parentheses, the speed that the fastest twentieth of the steps reached. Measured on {report['processors']} "
        "processor cores. `make bench-peers` repeats the measurement.\n"
    )


def large_model(name: str) -> str:
    """Return a table of text generation with the range of the rounds and the share of the memory bandwidth."""
    report = read(name)
    lengths = sorted({length for row in report["rows"].values() for length in row if length != "weight_bytes"}, key=int)
    columns = [
        "MB a step",
        *(f"{name}, prompt of {length}" for length in lengths for name in ("first token, ms", "a step, ms")),
    ]
    bandwidth = report.get("read_gb_per_s")
    if bandwidth is not None:
        columns.append(f"share of {bandwidth} GB/s")
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, row in report["rows"].items():
        label = _LABELS.get(name, name)
        cells = [f"{row['weight_bytes'] / 1e6:.0f}"]
        for length in lengths:
            if length in row:
                values = row[length]
                step = f"{values['step_ms']:.1f} ({values['least_step_ms']:.1f} to {values['most_step_ms']:.1f})"
                cells += [
                    f"{values['first_ms']:,.0f} ({values['best_first_ms']:,.0f} to {values['most_first_ms']:,.0f})",
                    step,
                ]
            else:
                cells += ["", ""]
        if bandwidth is not None:
            cells.append(f"{row['weight_bytes'] / 1e6 / row[lengths[0]]['step_ms'] / bandwidth:.0%}")
        lines.append(f"| {f'**{label}**' if name.startswith('accel') else label} | " + " | ".join(cells) + " |")
    rounds = sorted(
        {values["rounds"] for row in report["rows"].values() for key, values in row.items() if key != "weight_bytes"}
    )
    return "\n".join(lines) + (
        f"\n\nMedians of {' to '.join(map(str, rounds))} rounds; in parentheses, the fastest and the slowest round. Measured on "
        f"{report['processors']} processor cores.\n"
    )


def start() -> str:
    """Return a table of the time from the start of a process to the first token."""
    report = read("generation_start.json")
    lines = [
        "| | library imported | model loaded | first token | first token, model not in the page cache |",
        "| --- |" + " ---: |" * 4,
    ]
    for name, row in report["rows"].items():
        label = _LABELS.get(name, name)
        # The package accel imports torch and transformers only when it loads a model.
        imported = "" if name.startswith("accel") else f"{row['imported_s']:.1f}"
        lines.append(
            f"| {f'**{label}**' if name.startswith('accel') else label} | {imported} | {row['loaded_s']:.1f} | {row['first_token_s']:.1f} "
            f"| {row['dropped_first_token_s']:.1f} |"
        )
    return (
        "\n".join(lines)
        + f"\n\nSeconds, medians of {report['rounds']} processes. Measured on {report['processors']} processor cores.\n"
    )


def retrieval(name: str) -> str:
    """Return a table of the speed-up of embedding models over sentence-transformers, for each kind of texts."""
    report = read(name)
    kinds = report["texts"]
    first, *others = next(iter(kinds.values()))
    lines = [f"| | {' | '.join(kinds)} |", "| --- |" + " ---: |" * len(kinds)]
    lines.append(f"| {first}, ms | " + " | ".join(f"{rows[first]['median_ms']:.1f}" for rows in kinds.values()) + " |")
    for row in others:
        ratios = [(rows[row]["ratio"], *rows[row]["ratio_range"]) for rows in kinds.values()]
        label = f"**{row}**" if row.startswith("accel") else row
        cells = " | ".join(f"{middle:.1f} ({low:.1f} to {high:.1f})" for middle, low, high in ratios)
        lines.append(f"| {label} | {cells} |")
    cores = "Processor cores" if report["device"] == "cpu" else "Processor cores next to the GPU"
    return "\n".join(lines) + (
        "\n\nThe first row has the median time of a call. The other rows have the speed-up over it: the median of all turns, and the "
        f"smallest and largest value. {cores}: {report['processors']}.\n"
    )


def retrieval_quality() -> str:
    """Return a table of the retrieval quality of quantized embeddings."""
    report = read("retrieval_quality.json")
    lines = ["| embeddings | nDCG@10, % |", "| --- | ---: |"]
    lines += [f"| {name} | {value:.2f} |" for name, value in report["ndcg@10"].items()]
    return "\n".join(lines) + "\n"


TABLES = {
    "retrieval": lambda: retrieval("retrieval.json"),
    "retrieval-gpu": lambda: retrieval("retrieval_gpu.json"),
    "retrieval-late": lambda: retrieval("retrieval_late.json"),
    "retrieval-quality": retrieval_quality,
    "generation-start": start,
    "peers": classification,
    "generation": generation,
    "generation-24-layers": lambda: large_model("generation_peers_24_layers.json"),
    "generation-1b": lambda: large_model("generation_peers_1b.json"),
    "generation-1b-amx": lambda: large_model("generation_peers_1b_amx.json"),
}


def filled(text: str) -> str:
    """Return a page with new tables."""
    for name, render in TABLES.items():
        block = re.compile(rf"(?<=<!-- {name}:begin -->\n).*?(?=<!-- {name}:end -->)", re.DOTALL)
        if block.search(text):
            table = f"\n{render()}\n"
            text = block.sub(lambda _, table=table: table, text)
    return text


def main() -> int:
    """Write the pages, or with --check report which pages are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check, stale = parser.parse_args().check, []
    for page in (README, PAGE):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if check and after != before:
            stale.append(page.name)
        elif not check:
            page.write_text(after, encoding="utf-8")
    if stale:
        print(
            f"These pages are out of date: {', '.join(stale)}. Fix: python docs/tools/peers_table.py", file=sys.stderr
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
