"""Compare prompt lookup decoding with greedy search for a text that repeats itself.

    python benchmarks/prompt_lookup.py [OUT.json] [--work FOLDER] [--layers 8] [--rounds 5]

The decoder has layers in the shape of Qwen2-0.5B and a vocabulary of 32,000. Its output layer maps each token to the next token of a
cycle of 40 tokens. The other layers have random weights; they take the usual time, but change the outputs little. Because of this, the
model is as certain about the next token as a trained model. This matters because rounding can change the selected token if two tokens are
almost equally likely: a call with several tokens may round differently than a call with one token (`weight-int4` on `cpu`, which rounds
activations to 8 bits).

The script measures float32 and 4-bit weights on ONNX Runtime and OpenVINO. The methods take turns in one process, and their tokens must
equal the tokens of greedy search. Results are the median tokens per second of `--new` tokens after the first token. The prompt contains the
cycle three times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from generation_peers import configuration

import accel

CYCLE = 40
WAYS: dict[str, dict[str, int]] = {
    "plain": {},
    **{f"lookup of {n}": {"prompt_lookup_num_tokens": n} for n in (4, 8, 16, 32)},
}


def copying(folder: Path, layers: int) -> Path:
    """Return the folder of the decoder, and create the decoder if the folder does not exist."""
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = configuration(layers, tied=False)
        model = transformers.Qwen2ForCausalLM(config).eval()
        model.generation_config.eos_token_id = None
        tokens = torch.arange(config.vocab_size)
        first = tokens // CYCLE * CYCLE
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()
            model.lm_head.weight[first + (tokens - first + 1) % CYCLE] = model.model.embed_tokens.weight
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(0.1)
                layer.mlp.down_proj.weight.mul_(0.1)
        model.save_pretrained(folder)
    return folder


def measure(model: accel.ORTModelForCausalLM, new: int, rounds: int) -> dict[str, Any]:
    prompt = torch.arange(10 * CYCLE, 11 * CYCLE).repeat(3).unsqueeze(0)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False}
    expected = model.generate(**inputs, max_new_tokens=new + 1)
    if not torch.equal(expected[0, CYCLE:], expected[0, :-CYCLE]):
        raise SystemExit("The decoder does not copy.")
    equal, seconds = dict.fromkeys(WAYS, True), {name: list[float]() for name in WAYS}
    for _ in range(rounds):
        for name, more in WAYS.items():
            started = time.perf_counter()
            model.generate(**inputs, max_new_tokens=1)
            middle = time.perf_counter()
            tokens = model.generate(**inputs, **more, max_new_tokens=new + 1)
            seconds[name].append(time.perf_counter() - middle - (middle - started))
            equal[name] &= torch.equal(tokens, expected)
    medians = {name: statistics.median(duration) for name, duration in seconds.items()}
    return {
        name: {
            "tokens_per_s": round(new / duration, 1),
            "times_plain": round(medians["plain"] / duration, 2),
            "equal": equal[name],
        }
        for name, duration in medians.items()
    }


def main() -> None:
    """Measure each backend and precision, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the models, which the script does not delete")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        source = copying(work / f"copying-{args.layers}", args.layers)
        for backend in ("cpu", "openvino"):
            plain, small = work / f"copying-{backend}", work / f"copying-{backend}-int4"
            if not plain.is_dir():
                accel.export(source, plain, backend=backend)
            if not small.is_dir():
                accel.quantize(plain, small, scheme="weight-int4", block_size=32)
            for name, artifact in (("float32", plain), ("weight-int4", small)):
                model = accel.ORTModelForCausalLM.from_pretrained(artifact, backend=backend)
                results[f"{backend} {name}"] = rows = measure(model, args.new, args.rounds)
                print(f"\n{backend} {name}")
                for way, row in rows.items():
                    note = "" if row["equal"] else ", other tokens"
                    print(f"  {way:14}{row['tokens_per_s']:8.1f} tokens/s, {row['times_plain']:.2f} times{note}")
    if args.out is not None:
        result = {"processors": len(os.sched_getaffinity(0)), "rows": results}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
