"""Measure a decoder of 8 billion parameters on one NVIDIA GPU with the backend `inductor`: float16, and weights in 4 bits.

    python benchmarks/gpu_large_model.py [OUT.json] [--work FOLDER] [--layers N] [--variants float16,int4] [--float8-prompt] [--profile]

The model has the shape of Llama 3 8B and random weights from a fixed seed. The script writes it as a sharded checkpoint in float16 and
loads the checkpoint for each variant. A variant generates 64 tokens after a prompt of 128 tokens with greedy search and one row. The time
of a token is the difference between the times of `generate` for 65 tokens and for 1 token, divided by 64. The CUDA graph of a decoding
step is also timed alone. The bound of a step is the number of bytes of the weights that the step reads, divided by the bandwidth in the
card's data sheet. The script also measures the bandwidth of a large copy and of a large sum. The error of a variant is the Euclidean norm
of the difference from the logits of the first variant after the prompt, divided by the norm of those logits.

With `--float8-prompt`, the script measures a prompt with `accel.accelerate` in float16 and in float8.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

import accel
from accel import ORTModelForCausalLM, SessionOptions

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT, NEW = 128, 64
ROUNDS, WARM_UP = 7, 2
# Memory bandwidth in bytes per second, from the data sheets of NVIDIA.
BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {"float16": {}, "int4": {"quantization": "int4"}}


def make_model(layers: int, shape: dict[str, Any], device: str) -> Any:
    """Return a float16 model with random weights.

    In a model with the usual random weights, each layer amplifies the rounding errors of the layers before it. As in trained models, the
    hidden state is larger here than the output of a layer.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **shape, num_hidden_layers=layers, tie_word_embeddings=False, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device(device):
            model: Any = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(50)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(call: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def milliseconds(call: Callable[[], object], rounds: int) -> float:
    return 1e3 * statistics.median(seconds(call) for _ in range(rounds))


def bandwidth(device: str) -> dict[str, float]:
    """Return the bandwidth of a copy (bytes read and written) and of a sum (bytes read), in TB/s."""
    count = 2**30 if device.startswith("cuda") else 2**22
    source = torch.rand(count, device=device)
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * size, lambda: [target.copy_(source) for _ in range(10)]),
        "sum": (size, lambda: [torch.sum(source.view(1024, -1), 1) for _ in range(10)]),
    }
    rates = {}
    for name, (moved, call) in ways.items():
        call()
        rates[name] = 10 * moved / milliseconds(call, 3) / 1e9
    return rates


def generate(model: Any, ids: torch.Tensor, new: int) -> None:
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)


def weight_bytes(model: Any) -> int:
    """Return the number of bytes of the weights that one decoding step reads, without the table of embeddings."""
    table = model.get_input_embeddings().weight
    tensors = {
        t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers()) if t.data_ptr() != table.data_ptr()
    }
    return sum(tensors.values())


def decode(model: Any, ids: torch.Tensor) -> dict[str, float]:
    pairs = []
    for turn in range(WARM_UP + ROUNDS):
        pair = seconds(lambda: generate(model, ids, 1)), seconds(lambda: generate(model, ids, NEW + 1))
        if turn >= WARM_UP:
            pairs.append(pair)
    per_token = sorted((long - short) / NEW for short, long in pairs)
    return {
        "ms_per_token": 1e3 * statistics.median(per_token),
        "ms_per_token_lowest": 1e3 * per_token[0],
        "ms_per_token_highest": 1e3 * per_token[-1],
        "prefill_ms": 1e3 * statistics.median(short for short, _ in pairs),
    }


def graph_alone(session: Any) -> float:
    """Return the time in milliseconds of the CUDA graph of a decoding step."""
    graph = next(slot._graph for slot in session._spare if slot._graph is not None)  # noqa: SLF001
    return milliseconds(lambda: [graph.replay() for _ in range(50)], 3) / 50


def profile(session: Any) -> None:
    """Print the kernels of one decoding step."""
    graph = next(slot._graph for slot in session._spare if slot._graph is not None)  # noqa: SLF001
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 3
    print(f"kernels {sum(row.count for row in rows) // 3}, together {total:.0f} us")
    for row in rows[:16]:
        print(
            f"  {row.self_device_time_total / 3:8.1f} us {row.count // 3:5d} x {row.self_device_time_total / row.count:7.1f} {row.key[:50]}"
        )


def prompts_in_float8(model: Any, ids: torch.Tensor) -> dict[str, float]:
    """Return the times of a prompt in milliseconds with `accel.accelerate`, in float16 and in float8, and the errors."""
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "logits_to_keep": 1}
    result: dict[str, float] = {}
    formats: tuple[Literal["float8"] | None, ...] = (None, "float8")
    with torch.no_grad():
        expected = model(**call).logits.float()
        result["eager"] = milliseconds(lambda: model(**call), 7)
        for quantization in formats:
            name = quantization or "float16"
            accel.accelerate(model, keep_slower=True, lengths=(ids.shape[1],), quantization=quantization)
            logits = model(**call).logits.float()
            result[name] = milliseconds(lambda: model(**call), 7)
            result[f"{name}_error"] = float((logits - expected).norm() / expected.norm())
            model.restore()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--variants", default="float16,int4")
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--float8-prompt", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", type=json.loads, default=LLAMA_8B)
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp())
    device, began = arguments.device, time.perf_counter()
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def tell(*values: object) -> None:
        print(f"{time.perf_counter() - began:6.1f} s |", *values, flush=True)

    result: dict[str, Any] = {
        "machine": card,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "shape": {"layers": arguments.layers, "prompt": PROMPT, "new": NEW, **arguments.shape},
        "rounds": ROUNDS,
        "bandwidth_tb_per_s": bandwidth(device),
        "variants": {},
    }
    tell(card, result["bandwidth_tb_per_s"])
    folder = work / f"checkpoint-{arguments.layers}"
    if arguments.variants and not folder.is_dir():
        make_model(arguments.layers, arguments.shape, device).save_pretrained(folder, max_shard_size="4GB")
        gc.collect()
        torch.cuda.empty_cache()
        files = sorted(folder.glob("*.safetensors"))
        tell(f"checkpoint of {len(files)} files, {sum(file.stat().st_size for file in files) / 1e9:.1f} GB")
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(10, arguments.shape["vocab_size"], (1, arguments.prefill), generator=draw).to(device)
    expected: torch.Tensor | None = None
    for name in filter(None, arguments.variants.split(",")):
        start = time.perf_counter()
        model = ORTModelForCausalLM.from_pretrained(
            folder, backend=arguments.backend, device=device, session_options=SessionOptions(compute_dtype="float16"),
            provider_options=VARIANTS[name],
        )  # fmt: skip
        opened = time.perf_counter() - start
        tell(name, f"opened in {opened:.1f} s")
        with torch.inference_mode():
            logits = model(input_ids=ids[:, :PROMPT], logits_to_keep=1).logits[0, -1].float().cpu()
        expected = logits if expected is None else expected
        start = time.perf_counter()
        generate(model, ids[:, :PROMPT], 4)
        compiled = time.perf_counter() - start
        session: Any = model.decoder_step.session
        tell(name, f"first tokens after {compiled:.1f} s", getattr(session, "_why_eager", ""))
        row: dict[str, Any] = {
            "open_s": opened,
            "first_tokens_s": compiled,
            "error": float((logits - expected).norm() / expected.norm()),
        }
        row |= decode(model, ids[:, :PROMPT])
        row["bytes"] = weight_bytes(session.runtime)
        row["read_tb_per_s"] = row["bytes"] / row["ms_per_token"] / 1e9
        if card in BANDWIDTH:
            row["bound_ms"] = 1e3 * row["bytes"] / BANDWIDTH[card]
            row["fraction_of_bound"] = row["bound_ms"] / row["ms_per_token"]
            row["graph_ms"] = graph_alone(session)
        row["long_prefill_ms"] = milliseconds(functools.partial(generate, model, ids, 1), 5)
        row["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        result["variants"][name] = row
        tell(name, {key: round(value, 4) for key, value in row.items()})
        if arguments.profile:
            profile(session)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        del model, session
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.float8_prompt:
        model = make_model(arguments.layers, arguments.shape, device)
        result["prompt_ms"] = prompts_in_float8(model, ids)
        tell(result["prompt_ms"])
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    tell("done")


if __name__ == "__main__":
    main()
