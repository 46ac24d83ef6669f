"""Compare text generation on an NVIDIA GPU: transformers eager, with a static cache and torch.compile, `accel.accelerate`, and
accel's backends `inductor` (PyTorch) and `cuda` (ONNX Runtime; called accel below).

    python benchmarks/gpu_generation.py [OUT.json] [--no-compile] [--layers N] [--work FOLDER] [--batches 1,8]

The model has the shape of Qwen2-0.5B and random weights from a fixed seed. It generates 64 tokens after a prompt of 128 tokens with greedy
search in float16, with batch size 1 (and 8, except for torch.compile). All variants run in one process and take turns. In each round, a
variant calls `generate` once for 1 token and once for 65 tokens. The prefill time is the time of the first call. The decoding speed is 64
tokens divided by the difference of the two times. A decode step of accel is also measured alone: as a step in a loop, and as its CUDA graph
alone. An error is the Euclidean norm of the difference from PyTorch in float32, for the logits after the prompt, divided by the norm of
PyTorch's logits.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import torch
import transformers

import accel
from accel import Artifact, ORTModelForCausalLM, SessionOptions, export, optimize

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT, NEW = 128, 64
ROUNDS, WARM_UP = 7, 2
Generate = Callable[[torch.Tensor, int], torch.Tensor]


def make_model(layers: int) -> Any:
    """Return a decoder in the shape of Qwen2-0.5B with random weights from a fixed seed."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    # Biases of trained models are not zero. The exporter would remove biases that are zero from the graph.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generator(model: Any, **choices: Any) -> Generate:
    def generate(ids: torch.Tensor, new: int) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **choices
        )
        return tokens

    return generate


def seconds(generate: Generate, ids: torch.Tensor, new: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    generate(ids, new)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(variants: dict[str, Generate], ids: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return the prefill time in milliseconds and the decoded tokens per second of each variant. The variants take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(WARM_UP + ROUNDS):
        for name, generate in variants.items():
            pair = seconds(generate, ids, 1), seconds(generate, ids, NEW + 1)
            if turn >= WARM_UP:
                times[name].append(pair)
    results = {}
    for name, pairs in times.items():
        rates = sorted(NEW / (long - short) for short, long in pairs)
        results[name] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_lowest": rates[0],
            "tokens_per_s_highest": rates[-1],
            "ms_per_token": 1e3 / statistics.median(rates),
            "prefill_ms": 1e3 * statistics.median(short for short, _ in pairs),
            "generate_ms": 1e3 * statistics.median(long for _, long in pairs),
        }
    return results


def steps_alone(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Return the time of accel's decode step in a loop and the time of its CUDA graph alone, in milliseconds."""
    cache = model.new_cache()
    batch = len(ids)
    mask = torch.ones((batch, PROMPT + 200), dtype=torch.int64, device=ids.device)
    places = torch.arange(PROMPT + 200, device=ids.device).expand(batch, -1)
    model(input_ids=ids, attention_mask=mask[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    token = ids[:, :1]

    def step(place: int) -> None:
        model(
            input_ids=token, attention_mask=mask[:, : place + 1], position_ids=places[:, place : place + 1],
            past_key_values=cache,
        )  # fmt: skip

    for place in range(PROMPT, PROMPT + 10):
        step(place)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for place in range(PROMPT + 10, PROMPT + 74):
        step(place)
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    total = time.perf_counter() - start
    slot = cache.state._slot  # noqa: SLF001
    result = {"step_ms": 1e3 * total / 64, "step_host_ms": 1e3 * host / 64}
    if slot.captured:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(64):
            slot._graph.replay()  # noqa: SLF001
        torch.cuda.synchronize()
        result["graph_ms"] = 1e3 * (time.perf_counter() - start) / 64
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--batches", default="1,8")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp())
    model = make_model(arguments.layers)
    began = time.perf_counter()
    folder = work / "fp16"
    if not (folder / "accel.json").is_file():
        model.save_pretrained(work / "source")
        print("saved", round(time.perf_counter() - began, 1), flush=True)
        plain = work / "fp32"
        exported = Artifact.load(plain) if plain.is_dir() else export(work / "source", plain, task="text-generation")
        print("exported", round(time.perf_counter() - began, 1), flush=True)
        optimize(exported, folder, backend="cuda", level="O4")
        print("optimized", round(time.perf_counter() - began, 1), flush=True)
    accelerated = ORTModelForCausalLM.from_pretrained(folder, device="cuda:0")
    draw = torch.Generator().manual_seed(1)
    prompts = {batch: torch.randint(10, 150000, (batch, PROMPT), generator=draw).cuda() for batch in (1, 8)}
    single = prompts[1]
    prompts = {batch: prompts[batch] for batch in map(int, arguments.batches.split(","))}
    with torch.inference_mode():
        reference = model(single.cpu(), logits_to_keep=1).logits[0, -1]
    half = model.half().cuda()
    weights = work / "half"
    if not weights.is_dir():
        half.save_pretrained(weights)
    compiled = ORTModelForCausalLM.from_pretrained(
        weights, backend="inductor", device="cuda:0", session_options=SessionOptions(compute_dtype="float16")
    )
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnxruntime": ort.__version__,
            "python": platform.python_version(),
        },
        "shape": {"layers": arguments.layers, "prompt": PROMPT, "new": NEW},
        "rounds": ROUNDS,
        "errors": {},
        "batches": {},
    }
    for name, variant in (("transformers eager", half), ("accel, inductor", compiled), ("accel", accelerated)):
        with torch.inference_mode():
            logits = variant(input_ids=single, logits_to_keep=1).logits[0, -1].float().cpu()
        result["errors"][name] = float((logits - reference).norm() / reference.norm())
    print(result["errors"], flush=True)
    for batch, ids in prompts.items():
        variants = {"transformers eager": generator(half)}
        if batch == 1 and not arguments.no_compile:
            variants["transformers static cache, torch.compile"] = generator(half, cache_implementation="static")
            variants["accel.accelerate"] = generator(accel.accelerate(copy.deepcopy(half), keep_slower=True))
        variants["accel, inductor"] = generator(compiled)
        variants["accel"] = generator(accelerated)
        rows: dict[str, Any] = dict(measure(variants, ids))
        rows["accel"] |= steps_alone(accelerated, ids)
        result["batches"][str(batch)] = rows
        eager = rows["transformers eager"]["tokens_per_s"]
        for name, row in rows.items():
            row["against_eager"] = row["tokens_per_s"] / eager
            print(
                f"batch {batch} | {name} | {row['tokens_per_s']:.0f} tokens/s ({row['tokens_per_s_lowest']:.0f} to "
                f"{row['tokens_per_s_highest']:.0f}) | {row['ms_per_token']:.2f} ms a token | prefill "
                f"{row['prefill_ms']:.1f} ms | {row['against_eager']:.2f}",
                flush=True,
            )
        print({key: round(value, 3) for key, value in rows["accel"].items()}, flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        gc.collect()


if __name__ == "__main__":
    main()
