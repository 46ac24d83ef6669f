"""Compare text generation in accel, onnxruntime-genai, optimum-intel and llama.cpp: the time of prompts and of decode steps.

    make bench-peers
    python benchmarks/generation_peers.py OUT.json --work FOLDER [--genai PYTHON] [--optimum-intel PYTHON]
        [--llama-cpp FOLDER] [--shape llama-1b] [--layers 8]

The model has the shape of Qwen2-0.5B (with 8 layers) or of Llama-3.2-1B (1.04 billion parameters), a vocabulary of 32,000 and random
weights. It generates one row with greedy search. Each library is installed in a separate environment, and each row of the result is
measured in a process that loads its own artifact once. The processes take turns for `--rounds` rounds. In each round, they generate
`--new` tokens from a prompt of each length in `--prompts`. The result contains two numbers for each row and length:

- first: milliseconds from the prompt to the first token, as the median and the shortest time;
- tokens/s: tokens per second after the first token, as the median and the 95th percentile.

Rows with "inexact" in their names use the defaults of optimum-intel: bfloat16 if the processor supports it, activations in 8 bits, and
keys and values in 8 bits. accel and optimum-intel are timed with a streamer in `generate` of transformers. onnxruntime-genai is timed in
its own decoding loop, as in its examples. llama.cpp is timed in node-llama-cpp, whose npm package contains the compiled library. All
matrices of its GGUF file are Q4_0 (blocks of 32).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

Timed = tuple[float, list[float]]
"""Seconds until the first token, and the seconds between the following tokens."""

# The 4-bit weights of onnxruntime-genai and of accel on ONNX Runtime are symmetric, except in the row with zero points. Those of
# accel on OpenVINO have zero points.
ROWS: dict[str, dict[str, Any]] = {
    "PyTorch float32": {"side": "pytorch"},
    "accel cpu int4": {"side": "ours", "backend": "cpu", "scheme": "weight-int4"},
    "accel cpu int4, blocks of 128": {"side": "ours", "backend": "cpu", "scheme": "weight-int4", "block_size": 128},
    "accel cpu int4, blocks of 128, zero points": {
        "side": "ours",
        "backend": "cpu",
        "scheme": "weight-int4",
        "block_size": 128,
        "symmetric": False,
    },
    "accel cpu int8": {"side": "ours", "backend": "cpu", "scheme": "weight-int8"},
    "accel openvino int4": {"side": "ours", "backend": "openvino", "scheme": "weight-int4"},
    "accel openvino int8": {"side": "ours", "backend": "openvino", "scheme": "weight-int8"},
    "accel openvino int4, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int4", "inexact": True},
    "accel openvino int8, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int8", "inexact": True},
    "optimum-intel int4": {"side": "optimum-intel", "bits": 4},
    "optimum-intel int8": {"side": "optimum-intel", "bits": 8},
    "genai int4": {"side": "genai", "precision": "int4"},
    "genai int4, blocks of 128": {"side": "genai", "precision": "int4", "block_size": 128},
    "llama.cpp Q4_0": {"side": "llama.cpp"},
}
SHAPES = {"qwen2-0.5b": 8, "llama-1b": 16}
"""Shapes of the model, with the usual number of layers."""


def configuration(layers: int, *, tied: bool = True, shape: str = "qwen2-0.5b") -> Any:
    """Return a config with the layer sizes of Qwen2-0.5B or Llama-3.2-1B and a vocabulary of 32,000."""
    import transformers

    if shape == "llama-1b":
        return transformers.LlamaConfig(
            vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, head_dim=64, max_position_embeddings=32_768, tie_word_embeddings=tied, bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
    return transformers.Qwen2Config(
        vocab_size=32_000, hidden_size=896, intermediate_size=4864, num_hidden_layers=layers, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def save_model(folder: Path, layers: int, shape: str = "qwen2-0.5b") -> Path:
    """Save a model with random weights and a tokenizer. The model builder of onnxruntime-genai copies the tokenizer."""
    import torch
    import transformers

    from accel.testing.models import tiny_tokenizer

    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(configuration(layers, shape=shape)).eval()
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    return folder


def save_gguf(folder: Path, file: Path) -> Path:
    """Write the model in a folder to a GGUF file, whose matrices are Q4_0, for llama.cpp."""
    import gguf
    import transformers

    if file.is_file():
        return file
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config, arch = model.config, gguf.MODEL_ARCH[model.config.model_type.upper()]
    writer = gguf.GGUFWriter(file.with_suffix(".part"), config.model_type, use_temp_file=True)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    # llama.cpp needs a vocabulary, although the prompts are token ids.
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        values = tensor.detach().numpy()
        if arch == gguf.MODEL_ARCH.LLAMA and stem.endswith(("q_proj", "k_proj")):
            # llama.cpp stores the rotated halves of each head interleaved.
            halves = values.reshape(-1, 2, config.head_dim // 2, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q4_0 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.with_suffix(".part").rename(file)


# Functions that run in the measured processes


class Clock:
    """Streamer that records the time of each token. The first recorded time is the time of the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Record the time of a token or of the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


def by_generate(model: Any) -> Callable[[list[int], int], Timed]:
    import torch

    def run(prompt: list[int], new: int) -> Timed:
        ids, clock, started = torch.tensor([prompt]), Clock(), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            streamer=clock,
        )
        first, *rest = clock.times[1:]
        return first - started, [after - before for before, after in itertools.pairwise([first, *rest])]

    return run


def pytorch(spec: dict[str, Any]) -> Any:
    import torch
    import transformers

    return by_generate(transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval())


def ours(spec: dict[str, Any]) -> Any:
    import accel

    own_scheme = {name: spec[name] for name in ("block_size", "symmetric") if name in spec}
    folder = Path(spec["work"]) / "-".join([spec["backend"], spec["scheme"], *map(str, own_scheme.values())])
    if not folder.is_dir():
        plain = Path(spec["work"]) / f"{spec['backend']}-float32"
        if not plain.is_dir():
            accel.export(spec["model"], plain, backend=spec["backend"])
        if spec["backend"] == "cpu":
            optimized = Path(spec["work"]) / "cpu-O2"
            plain = optimized if optimized.is_dir() else accel.optimize(plain, optimized, level="O2").path
        accel.quantize(plain, folder, scheme=spec["scheme"], **own_scheme)
    options, provider_options = accel.SessionOptions(threads=spec["threads"]), {}
    if spec.get("inexact"):
        half = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else None
        options = replace(options, compute_dtype=half, native={"KV_CACHE_PRECISION": "u8"})
        provider_options = {"dynamic_quantization_group_size": 32}
    return by_generate(
        accel.ORTModelForCausalLM.from_pretrained(
            folder, backend=spec["backend"], session_options=options, provider_options=provider_options
        )
    )


def optimum_intel(spec: dict[str, Any]) -> Any:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    folder = Path(spec["work"]) / f"optimum-intel-{spec['bits']}"
    if not folder.is_dir():
        quantization = OVWeightQuantizationConfig(bits=spec["bits"])
        OVModelForCausalLM.from_pretrained(
            spec["model"], export=True, compile=False, quantization_config=quantization
        ).save_pretrained(folder)
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": spec["threads"]}
    return by_generate(OVModelForCausalLM.from_pretrained(folder, ov_config=settings))


def genai(spec: dict[str, Any]) -> Any:
    import onnxruntime_genai as og

    blocks = spec.get("block_size", 32)
    folder = Path(spec["work"]) / f"genai-{spec['precision']}-{blocks}"
    if not (folder / "genai_config.json").is_file():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", spec["model"], "-o", str(folder)]
        subprocess.run(
            [*builder, "-p", spec["precision"], "-e", "cpu", "-c", str(folder / "cache"),
             "--extra_options", f"block_size={blocks}"],
            check=True, stdout=sys.stderr,
        )  # fmt: skip
        settings = json.loads((folder / "genai_config.json").read_text())
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = spec["threads"]
        (folder / "genai_config.json").write_text(json.dumps(settings))
    model = og.Model(str(folder))

    def run(prompt: list[int], new: int) -> Timed:
        parameters = og.GeneratorParams(model)
        total = len(prompt) + new
        parameters.set_search_options(max_length=total, min_length=total, do_sample=False)
        generator = og.Generator(model, parameters)
        times = [time.perf_counter()]
        generator.append_tokens([prompt])
        for _ in range(new):
            generator.generate_next_token()
            times.append(time.perf_counter())
        first, *rest = [after - before for before, after in itertools.pairwise(times)]
        return first, rest

    return run


SIDES = {"pytorch": pytorch, "ours": ours, "optimum-intel": optimum_intel, "genai": genai}


def answer(spec: dict[str, Any]) -> None:
    """Read lines with a prompt length and a number of tokens from the standard input, and print the times for each line."""
    # The libraries may print text, which must not mix with the printed times, so their output goes to standard error.
    answers, sys.stdout = sys.stdout, sys.stderr
    run = SIDES[spec["side"]](spec)
    run(list(range(10, 26)), 4)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        length, new = map(int, line.split())
        print(json.dumps(run([10 + (37 * i) % 31_000 for i in range(length)], new)), file=answers, flush=True)


# Functions that run in the main process


class Side:
    """Process of one library that measures on request.

    Args:
        interpreter: The Python interpreter of the library, or the folder of node-llama-cpp.
        spec: The row, the model and the number of threads.
    """

    def __init__(self, interpreter: str, spec: dict[str, Any]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
        if interpreter != sys.executable:
            environment.pop("PYTHONPATH", None)
        command = [interpreter, __file__, "--answer", json.dumps(spec)]
        if spec["side"] == "llama.cpp":
            file = save_gguf(Path(spec["model"]), Path(spec["work"]) / "q4_0.gguf")
            script = Path(__file__).with_name("llama_cpp.mjs")
            command = ["node", str(script), interpreter, str(file), str(spec["threads"])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise SystemExit(f"{spec} failed; its error is above")

    def run(self, length: int, new: int) -> Timed:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{length} {new}\n")
        self._process.stdin.flush()
        first, rest = json.loads(self._process.stdout.readline())
        return first, rest

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def summary(firsts: list[float], steps: list[float]) -> dict[str, float]:
    steps = sorted(steps)
    return {
        "first_ms": round(statistics.median(firsts) * 1e3, 1),
        "best_first_ms": round(min(firsts) * 1e3, 1),
        "tokens_per_s": round(1 / statistics.median(steps), 1),
        "best_twentieth_tokens_per_s": round(1 / steps[len(steps) // 20], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--work", type=Path, help="folder for the models")
    parser.add_argument("--genai", help="Python interpreter of the environment with onnxruntime-genai")
    parser.add_argument("--optimum-intel", help="Python interpreter of the environment with optimum-intel")
    parser.add_argument("--llama-cpp", help="folder in which `npm install node-llama-cpp` ran")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2-0.5b")
    parser.add_argument("--layers", type=int, help="number of layers (default: 8 for qwen2-0.5b, 16 for llama-1b)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prompts", type=int, nargs="*", default=[128, 1024, 2048])
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer is not None:
        answer(json.loads(args.answer))
        return
    interpreters = {
        "genai": args.genai, "optimum-intel": args.optimum_intel, "ours": sys.executable, "pytorch": sys.executable,
        "llama.cpp": args.llama_cpp,
    }  # fmt: skip
    layers = args.layers or SHAPES[args.shape]
    work = args.work / f"{args.shape}-{layers}"
    work.mkdir(parents=True, exist_ok=True)
    model = save_model(work / "model", layers, args.shape)
    chosen = {name: row for name, row in ROWS.items() if name in args.rows and interpreters[row["side"]] is not None}
    same = {"model": str(model), "work": str(work), "threads": args.threads}
    sides = {name: Side(interpreters[row["side"]], {**row, **same}) for name, row in chosen.items()}
    durations: dict[str, dict[int, tuple[list[float], list[float]]]] = {
        name: {length: ([], []) for length in args.prompts} for name in sides
    }
    for turn in range(args.rounds):
        for length in args.prompts:
            for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                first, steps = sides[name].run(length, args.new)
                durations[name][length][0].append(first)
                durations[name][length][1].extend(steps)
    for side in sides.values():
        side.close()
    rows = {name: {length: summary(*times) for length, times in lengths.items()} for name, lengths in durations.items()}
    for length in args.prompts:
        print(f"\nprompt of {length}\n{'':32}first ms    best   tokens/s    best")
        for name, lengths in rows.items():
            values = lengths[length]
            print(
                f"{name:32}{values['first_ms']:8.0f}{values['best_first_ms']:8.0f}{values['tokens_per_s']:11.1f}"
                f"{values['best_twentieth_tokens_per_s']:8.1f}"
            )
    if args.out is not None:
        result = {
            "processors": args.threads, "shape": args.shape, "layers": layers, "load": os.getloadavg()[0], "rows": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
