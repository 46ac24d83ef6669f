"""Compare text generation in accel, onnxruntime-genai, optimum-intel and llama.cpp: the time of prompts and of decode steps.

    make bench-peers
    python benchmarks/generation_peers.py OUT.json --work FOLDER [--genai PYTHON] [--optimum-intel PYTHON]
        [--llama-cpp FOLDER] [--shape llama-1b] [--layers 8] [--prepare] [--continue] [--lock FILE] [--start]

The model has the shape of Qwen2-0.5B (with 8 layers) or of Llama-3.2-1B (1.04 billion parameters), a vocabulary of 32,000 and random
weights in bfloat16. It generates one row with greedy search. Each library is installed in a separate environment, and each row of the
result is measured in a process that loads its own artifact once. The processes take turns for `--rounds` rounds. In each round, they
generate `--new` tokens from a prompt of each length in `--prompts`. The result contains for each row and length:

- first: milliseconds from the prompt to the first token, as the median and the shortest time;
- tokens/s: tokens per second after the first token, as the median and the 95th percentile;
- step: milliseconds of a step, as the median of the rounds' medians and as their smallest and largest value.

`weight_bytes` are the bytes of the weights that a step reads, as stored in the row's files: all weights except embedding tables from
which a step reads one row.

On a machine that does other work, measure in several short runs: `--prepare` only writes the artifacts, `--continue` adds rounds to those
of earlier runs with the same work folder, and `--lock FILE` holds a lock on a file (as `flock FILE` does) during each round.

`--start` measures something else: the time from the start of a process to the first token after a prompt of 16 tokens. Every run is a new
process, and the rows take turns. The files of the artifact are in the page cache of the operating system, or are removed from it before the
start. Libraries stay in the page cache. The result contains for each row the seconds until the library is imported, until the model is
loaded and until the first token.

Rows with "inexact" in their names use the defaults of optimum-intel: bfloat16 if the processor supports it, activations in 8 bits, and
keys and values in 8 bits. accel and optimum-intel are timed with a streamer in `generate` of transformers. onnxruntime-genai is timed in
its own decoding loop, as in its examples. llama.cpp is timed in node-llama-cpp, whose npm package contains the compiled library. All
matrices of its GGUF file are Q4_0 (blocks of 32).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
    "accel openvino int4, blocks of 128": {
        "side": "ours",
        "backend": "openvino",
        "scheme": "weight-int4",
        "block_size": 128,
    },
    "accel openvino int8": {"side": "ours", "backend": "openvino", "scheme": "weight-int8"},
    "accel openvino int4, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int4", "inexact": True},
    "accel openvino int4, blocks of 128, inexact": {
        "side": "ours",
        "backend": "openvino",
        "scheme": "weight-int4",
        "block_size": 128,
        "inexact": True,
    },
    "accel openvino int8, inexact": {"side": "ours", "backend": "openvino", "scheme": "weight-int8", "inexact": True},
    "optimum-intel int4": {"side": "optimum-intel", "bits": 4},
    "optimum-intel int8": {"side": "optimum-intel", "bits": 8},
    "genai int4": {"side": "genai", "precision": "int4"},
    "genai int4, blocks of 128": {"side": "genai", "precision": "int4", "block_size": 128},
    "llama.cpp Q4_0": {"side": "llama.cpp"},
}
ONNX_BITS = {1: 32, 2: 8, 3: 8, 10: 16, 16: 16, 21: 4, 22: 4}
"""Bits of a value of each ONNX data type that stores weights: float32, uint8, int8, float16, bfloat16, uint4 and int4."""

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
        model.to(torch.bfloat16).save_pretrained(folder)
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
        values = tensor.detach().float().numpy()
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

IMPORTED: list[float] = []
"""The time when the library was imported."""


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

    IMPORTED.append(time.time())
    return by_generate(transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32).eval())


def artifact_folder(spec: dict[str, Any]) -> Path:
    """Return the folder or file of a row's artifact."""
    if spec["side"] == "ours":
        settings = [str(spec[name]) for name in ("block_size", "symmetric") if name in spec]
        name = "-".join([spec["backend"], spec["scheme"], *settings])
    elif spec["side"] == "optimum-intel":
        name = f"optimum-intel-{spec['bits']}"
    elif spec["side"] == "genai":
        name = f"genai-{spec['precision']}-{spec.get('block_size', 32)}"
    else:
        name = {"llama.cpp": "q4_0.gguf", "pytorch": "model"}[spec["side"]]
    return Path(spec["work"]) / name


def ours(spec: dict[str, Any]) -> Any:
    import accel

    folder = artifact_folder(spec)
    if not folder.is_dir():
        settings = {name: spec[name] for name in ("block_size", "symmetric") if name in spec}
        scheme = accel.QuantizeConfig(scheme=spec["scheme"], **settings)
        accel.export(spec["model"], folder, backend=spec["backend"], quantize=scheme)
    IMPORTED.append(time.time())
    options, provider_options = accel.SessionOptions(threads=spec["threads"]), {}
    if spec.get("inexact"):
        half = "bfloat16" if "avx512_bf16" in Path("/proc/cpuinfo").read_text() else None
        options = replace(options, compute_dtype=half)
        provider_options = {"dynamic_quantization_group_size": 32, "kv_cache_precision": "u8"}
    return by_generate(
        accel.ORTModelForCausalLM.from_pretrained(
            folder, backend=spec["backend"], session_options=options, provider_options=provider_options
        )
    )


def optimum_intel(spec: dict[str, Any]) -> Any:
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    folder = artifact_folder(spec)
    if not folder.is_dir():
        quantization = OVWeightQuantizationConfig(bits=spec["bits"])
        OVModelForCausalLM.from_pretrained(
            spec["model"], export=True, compile=False, quantization_config=quantization
        ).save_pretrained(folder)
    IMPORTED.append(time.time())
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": spec["threads"]}
    return by_generate(OVModelForCausalLM.from_pretrained(folder, ov_config=settings))


def genai(spec: dict[str, Any]) -> Any:
    import onnxruntime_genai as og

    blocks, folder = spec.get("block_size", 32), artifact_folder(spec)
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
    IMPORTED.append(time.time())
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
    loaded = time.time()
    run(list(range(10, 26)), 1 if spec.get("start") else 4)
    if spec.get("start"):
        print(json.dumps([IMPORTED[0], loaded, time.time()]), file=answers, flush=True)
        return
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        length, new = map(int, line.split())
        print(json.dumps(run([10 + (37 * i) % 31_000 for i in range(length)], new)), file=answers, flush=True)


# Functions that run in the main process


def start_process(interpreter: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"])}
    if interpreter != sys.executable:
        environment.pop("PYTHONPATH", None)
    command = [interpreter, __file__, "--answer", json.dumps(spec)]
    if spec["side"] == "llama.cpp":
        file = save_gguf(Path(spec["model"]), artifact_folder(spec))
        script = Path(__file__).with_name("llama_cpp.mjs")
        mode = "start" if spec.get("start") else "rounds"
        command = ["node", str(script), interpreter, str(file), str(spec["threads"]), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def drop_from_page_cache(path: Path) -> None:
    """Remove the files of an artifact from the page cache of the operating system."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def first_token(interpreter: str, spec: dict[str, Any], *, drop: bool) -> list[float]:
    """Return the seconds from the start of a process until the import, the loaded model and the first token."""
    if drop:
        drop_from_page_cache(artifact_folder(spec))
    started = time.time()
    process = start_process(interpreter, {**spec, "start": True})
    text, _ = process.communicate()
    return [moment - started for moment in json.loads(text)]


class Side:
    """Process of one library that measures on request.

    Args:
        interpreter: The Python interpreter of the library, or the folder of node-llama-cpp.
        spec: The row, the model and the number of threads.
    """

    def __init__(self, interpreter: str, spec: dict[str, Any]) -> None:
        self._process = start_process(interpreter, spec)
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


def weight_bytes(spec: dict[str, Any]) -> int:
    """Return the bytes of the weights that a decode step reads, as stored in the files of the row's artifact."""
    path = artifact_folder(spec)
    if spec["side"] == "llama.cpp":
        import gguf

        # A tied embedding is also the last matrix product.
        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    if spec["side"] == "pytorch":
        import transformers

        return 4 * int(transformers.AutoModelForCausalLM.from_pretrained(path).num_parameters())
    graphs = [*path.rglob("*.xml")]
    if graphs:
        return sum(map(openvino_bytes, graphs))
    return sum(map(onnx_bytes, path.glob("*.onnx")))


def onnx_bytes(file: Path) -> int:
    import onnx

    graph = onnx.load(file, load_external_data=False).graph
    sizes = {
        tensor.name: math.prod(tensor.dims) * ONNX_BITS[tensor.data_type] // 8
        for tensor in graph.initializer
        if tensor.data_type in ONNX_BITS
    }
    names = {
        name
        for node in graph.node
        if not node.op_type.startswith("Gather") and node.op_type != "GroupQueryAttention"
        for name in node.input
    }
    return sum(sizes[name] for name in names & sizes.keys())


def openvino_bytes(file: Path) -> int:
    from xml.etree import ElementTree as ET

    net = ET.parse(file).getroot()
    kinds = {layer.get("id"): layer.get("type") for layer in net.iter("layer")}
    sizes = {
        layer.get("id"): int(layer.find("data").get("size", 0))
        for layer in net.iter("layer")
        if layer.get("type") == "Const"
    }  # type: ignore[union-attr]
    consumers: dict[str | None, list[str | None]] = {}
    for edge in net.iter("edge"):
        consumers.setdefault(edge.get("from-layer"), []).append(edge.get("to-layer"))

    def is_table(layer: str | None) -> bool:
        """Whether only Gather reads a constant, or what dequantization computes from it."""
        return all(
            kinds[consumer] == "Gather"
            or (kinds[consumer] in {"Convert", "Subtract", "Multiply", "Reshape"} and is_table(consumer))
            for consumer in consumers.get(layer, [])
        )

    return sum(size for layer, size in sizes.items() if not is_table(layer))


@contextlib.contextmanager
def locked(file: Path | None) -> Iterator[None]:
    """Hold an exclusive lock on a file, if there is one."""
    if file is None:
        yield
        return
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def summary(rounds: list[Timed]) -> dict[str, float]:
    firsts = [first for first, _ in rounds]
    steps = sorted(itertools.chain.from_iterable(steps for _, steps in rounds))
    medians = [statistics.median(steps) for _, steps in rounds]
    return {
        "rounds": len(rounds),
        "first_ms": round(statistics.median(firsts) * 1e3, 1),
        "best_first_ms": round(min(firsts) * 1e3, 1),
        "most_first_ms": round(max(firsts) * 1e3, 1),
        "tokens_per_s": round(1 / statistics.median(steps), 1),
        "best_twentieth_tokens_per_s": round(1 / steps[len(steps) // 20], 1),
        "step_ms": round(statistics.median(medians) * 1e3, 2),
        "least_step_ms": round(min(medians) * 1e3, 2),
        "most_step_ms": round(max(medians) * 1e3, 2),
    }


def read_gb_per_s(threads: int) -> float:
    """Return the bandwidth of the memory in GB/s: the fastest of 12 sums of 1 GiB of float32 numbers in PyTorch."""
    import torch

    torch.set_num_threads(threads)
    values, times = torch.ones(1 << 28), []
    for _ in range(12):
        started = time.perf_counter()
        values.sum()
        times.append(time.perf_counter() - started)
    return round(values.nbytes / min(times) / 1e9, 1)


def start_summary(cached: list[list[float]], dropped: list[list[float]]) -> dict[str, float]:
    imported, loaded, first = (round(statistics.median(values), 2) for values in zip(*cached, strict=True))
    return {
        "imported_s": imported,
        "loaded_s": loaded,
        "first_token_s": first,
        "least_first_token_s": round(min(run[2] for run in cached), 2),
        "most_first_token_s": round(max(run[2] for run in cached), 2),
        "dropped_first_token_s": round(statistics.median(run[2] for run in dropped), 2),
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
    parser.add_argument("--prepare", action="store_true", help="write the artifacts and measure nothing")
    parser.add_argument(
        "--continue", action="store_true", help="add rounds to those of earlier runs in the work folder"
    )
    parser.add_argument("--lock", type=Path, help="file to lock exclusively during each round")
    parser.add_argument("--start", action="store_true", help="measure the time from process start to the first token")
    parser.add_argument(
        "--drop", action="store_true", help="with --start: remove the artifact from the page cache first"
    )
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
    specs = {name: {**row, **same} for name, row in chosen.items()}
    if args.prepare:
        for spec in specs.values():
            Side(interpreters[spec["side"]], spec).close()
        return
    conditions = {"processors": args.threads, "shape": args.shape, "layers": layers, "load": os.getloadavg()[0]}
    if args.start:
        starts: dict[str, dict[bool, list[list[float]]]] = {name: {False: [], True: []} for name in specs}
        for _ in range(args.rounds):
            with locked(args.lock):
                for name, spec in specs.items():
                    for drop, runs in starts[name].items():
                        runs.append(first_token(interpreters[spec["side"]], spec, drop=drop))
        rows = {name: start_summary(runs[False], runs[True]) for name, runs in starts.items()}
        print(json.dumps(rows, indent=1))
        if args.out is not None:
            args.out.write_text(json.dumps({**conditions, "rounds": args.rounds, "rows": rows}, indent=1) + "\n")
        return
    records, times = work / "times.json", {}
    if vars(args)["continue"] and records.is_file():
        times = json.loads(records.read_text())
    sides = {name: Side(interpreters[spec["side"]], spec) for name, spec in specs.items()}
    for turn in range(args.rounds):
        for length in args.prompts:
            with locked(args.lock):
                for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
                    times.setdefault(name, {}).setdefault(str(length), []).append(sides[name].run(length, args.new))
            records.write_text(json.dumps(times))
    for side in sides.values():
        side.close()
    specs = {name: {**ROWS[name], **same} for name in ROWS if name in times}
    rows = {
        name: {length: summary(rounds) for length, rounds in times[name].items()} | {"weight_bytes": weight_bytes(spec)}
        for name, spec in specs.items()
    }
    for length in sorted({length for row in times.values() for length in row}, key=int):
        print(f"\nprompt of {length}\n{'':48}first ms    best   tokens/s    best  step ms     from       to       MB")
        for name, row in rows.items():
            if length in row:
                values = row[length]
                print(
                    f"{name:48}{values['first_ms']:8.0f}{values['best_first_ms']:8.0f}{values['tokens_per_s']:11.1f}"
                    f"{values['best_twentieth_tokens_per_s']:8.1f}{values['step_ms']:9.2f}{values['least_step_ms']:9.2f}"
                    f"{values['most_step_ms']:9.2f}{row['weight_bytes'] / 1e6:9.0f}"
                )
    if args.out is not None:
        conditions["read_gb_per_s"] = read_gb_per_s(args.threads)
        args.out.write_text(json.dumps({**conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
