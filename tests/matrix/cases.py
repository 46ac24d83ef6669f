"""Test cases of the matrix: every valid chain of export, optimization, quantization and run that the backends declare.

The input is the specs of the installed backends, and the output is `Case` objects. A newly declared backend, format,
data type, level, scheme, setting or device gets its cases automatically. A new setting or option also needs a test
value in one of the tables below.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, get_args

from covering import cover, pairs

from accel.backends import registry
from accel.config import Calibration, Dtype, Level, Pooling
from accel.interfaces.specs import WEIGHTS, BackendSpec, Capability
from accel.interfaces.task import Task
from accel.interfaces.task_registry import all_tasks, load_task, task_spec

HOST = ("cpu", "auto")
"""Device types that every machine has; cases on other devices are marked `gpu`."""

COMPILES = ("inductor", "aotinductor")
"""Backends that compile for seconds to minutes; their cases run only in thorough test runs."""

HALVING = get_args(Level)[-1]
"""The optimization level that converts graphs to half precision."""

# These names are for the optimizer's `enable` argument. No optimization level includes them.
ENABLED = ("bfloat16",)

# Custom modules have no specific task and no weights folder to compare with (see tests/integration/test_parity.py). In
# text-to-audio, rounding changes the length of the speech (see tests/integration/test_sounds.py).
CASE_TASKS = tuple(spec.name for spec in all_tasks() if spec.name not in ("custom", "text-to-audio"))

# For each export setting, the table has values that differ from the default.
CAPTURES: Mapping[str, tuple[Any, ...]] = {
    "opset": (20,),
    "pooling": get_args(Pooling),
    "normalize": (True,),
    "output_hidden_states": (True,),
    "output_attentions": (True,),
    "atol": (0.5,),
    "external_data": (False,),
}
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "per_channel": (False, True),
    "symmetric": (False, True),
    "operators": (("MatMul",),),
    # Exclude the nodes or modules with even numbers, which are about half, so that the smallest model still has some to
    # quantize. Constants are not excluded, because in OpenVINO's graphs all constants may have even numbers.
    "exclude": ((r"re:(?!Constant).*([02468]|_[0-9]*[02468]/.*|\.0\..*)$",),),
    "calibration": tuple(word for word in get_args(Calibration) if word != "minmax"),
    "percentile": (99.9,),
    "format": ("qoperator",),
    "smooth_quant": (0.5,),
    "block_size": (16,),
    "algorithm": ("hqq", "awq", "gptq"),
    "ratio": (0.5,),
    "scale_estimation": (True,),
}
# Presets name processor types, so their names differ between backends.
PRESETS: Mapping[str, tuple[str, ...]] = {"cpu": ("avx2", "arm64"), "openvino": ("performance", "mixed")}
OTHER_PRESETS = ("tensorrt",)
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "threads": (1,),
    "inter_op_threads": (2,),
    "compute_dtype": get_args(Dtype),
    "buckets": ((8, 16),),
    "pad_to_multiple_of": (8,),
    "graph_optimization": ("none", "basic", "extended"),
    "spinning": (False,),
    "profile": ("FOLDER",),
    "check_inputs": (False,),
}
# Native settings of the runtimes, for `SessionOptions.native` and for provider options.
NATIVE: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"enable_cpu_mem_arena": False},
    "cuda": {"enable_mem_pattern": False},
    "openvino": {"PERF_COUNT": False},
    "tensorrt": {"enable_mem_pattern": False},
    "tensorrt-rtx": {"enable_mem_pattern": False},
}
PROVIDER: Mapping[str, Mapping[str, Any]] = {
    "inductor": {"keep_slower": True, "freezing": False},
    "cuda": {"cuda_graphs": 0, "padding": "any", "packing": False, "use_tf32": True, "gpu_mem_limit": 2**31},
    "openvino": {
        "performance_hint": "throughput",
        "streams": 1,
        "dynamic_quantization_group_size": 32,
        "kv_cache_precision": "u8",
    },
    "pytorch": {"cuda_graph": True},
    "tensorrt": {"trt_builder_optimization_level": 1, "profile": "batch=1:2:8,sequence=1:8:64"},
    "tensorrt-rtx": {
        "device_id": 0,
        "enable_cuda_graph": False,
        "nv_detailed_build_log": False,
        "nv_dump_subgraphs": False,
        "nv_max_shared_mem_size": 0,
        "nv_max_workspace_size": 2**30,
        "nv_op_types_to_exclude": "Erf",
        "nv_weight_streaming_budget": 0,
        "profile": "batch=1:2:8,sequence=1:8:64",
    },
}
EXPORTER_OPTIONS: Mapping[str, str] = {"profile": "batch=1:2:8,sequence=1:8:64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One chain of steps. In an empty field, the step is left out or its default is used. A setting has the form
    `name=JSON`.
    """

    task: str
    exporter: str
    format: str
    dtype: str
    capture: str = ""
    rewritten: str = ""
    optimizer: str = ""
    level: str = ""
    enable: str = ""
    quantizer: str = ""
    scheme: str = ""
    setting: str = ""
    runner: str = ""
    device: str = ""
    option: str = ""

    def __str__(self) -> str:
        export = f"{self.exporter} {self.format} {self.dtype}"
        words = [
            self.task,
            f"{export} {self.capture}" if self.capture else export,
            f"{self.optimizer} {self.level} {self.enable}".rstrip() if self.level else "",
            f"{self.quantizer} {self.scheme} {self.setting}".rstrip() if self.scheme else "",
            f"{self.runner} on {self.device} {self.option}".rstrip(),
        ]
        return " > ".join(word for word in words if word)

    @property
    def factors(self) -> dict[str, str]:
        """Values of the factors of the case. Each pair of values of two factors is covered by a test. Fields that only
        occur together form one factor.
        """
        return {
            "task": self.task,
            "export": f"{self.exporter} {self.format}",
            "dtype": self.dtype,
            "capture": self.capture,
            "optimize": f"{self.optimizer} {self.level} {self.enable}",
            "quantize": f"{self.quantizer} {self.scheme}",
            "setting": self.setting,
            "run": f"{self.runner} {self.device}",
            "option": self.option,
        }

    @property
    def chain(self) -> tuple[str, ...]:
        """All fields except settings and options."""
        return tuple(value for name, value in asdict(self).items() if name not in ("capture", "setting", "option"))

    @property
    def exported(self) -> Case:
        """The case reduced to its export."""
        return Case(task=self.task, exporter=self.exporter, format=self.format, dtype=self.dtype, capture=self.capture)

    @property
    def optimized(self) -> Case:
        """The case reduced to its export and optimization."""
        return replace(self.exported, optimizer=self.optimizer, level=self.level, enable=self.enable)

    @property
    def without_run(self) -> Case:
        """The case without its run: only the steps that make the artifact."""
        return replace(self, runner="", device="", option="")

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the chain, from the export's format to the format that runs."""
        return (
            self.format,
            *dict.fromkeys(rewritten for rewritten in (self.rewritten,) if rewritten and rewritten != self.format),
        )

    @property
    def made_dtype(self) -> str:
        """Data type of the artifact that the case runs."""
        return self.enable or ("float16" if self.level == HALVING else self.dtype)

    @property
    def on_host(self) -> bool:
        """Whether every machine has the device of this case."""
        return self.device in HOST

    @property
    def generates(self) -> bool:
        """Whether the task of this case generates tokens or other outputs step by step, so that its model has a KV
        cache.
        """
        return task_spec(self.task).generates


def parsed(words: str) -> dict[str, Any]:
    """Convert a setting in the form `name=JSON` to keyword arguments. An empty setting gives no arguments."""
    name, _, value = words.partition("=")
    return {name: json.loads(value)} if words else {}


def word(name: str, value: object) -> str:
    """Convert a setting to the form `name=JSON`."""
    return f"{name}={json.dumps(value)}"


def declared(specs: Sequence[BackendSpec], tasks: Iterable[str] = CASE_TASKS, **limits: Any) -> list[Case]:
    """Return every valid case: the combinations that the specs declare, without the combinations in `REFUSALS`. See
    `combined`.
    """
    return [case for case in combined(specs, tasks, **limits) if refusal(case) is None]


def combined(
    specs: Sequence[BackendSpec],
    tasks: Iterable[str] = CASE_TASKS,
    *,
    plain: bool = False,
    keeps: Callable[[Case], bool] = lambda case: True,
) -> Iterator[Case]:
    """Yield every case that the specs declare.

    Args:
        specs: Specs of the backends.
        tasks: Tasks of the cases.
        plain: Use only the defaults of all settings and options. With other values, all tasks together have a million
            cases.
        keeps: Filter that is called after each step with the case so far. If it rejects a case, it must also reject the
            case with more steps.
    """
    for task in tasks:
        for spec, capability in _offers(specs, task, "export", None):
            for dtype in capability.dtypes:
                for capture in [""] if plain else _captures(task, capability):
                    start = Case(
                        task=task, exporter=spec.name, format=str(capability.produces), dtype=dtype, capture=capture
                    )
                    if keeps(start):
                        yield from _steps(specs, start, plain, keeps)


def _offers(
    specs: Iterable[BackendSpec], task: str, stage: str, consumes: str | None
) -> Iterator[tuple[BackendSpec, Capability]]:
    for spec in specs:
        for capability in spec.capabilities:
            if capability.stage == stage and capability.consumes == consumes and capability.does(task):
                yield spec, capability


def _captures(task: str, capability: Capability) -> list[str]:
    names = [n for n in CAPTURES if task_spec(task).embeds or n not in ("pooling", "normalize")]
    exporter_options = [word("options", {name: EXPORTER_OPTIONS[name]}) for name in capability.options]
    return ["", *(word(name, value) for name in names for value in CAPTURES[name]), *exporter_options]


def _steps(specs: Sequence[BackendSpec], start: Case, plain: bool, keeps: Callable[[Case], bool]) -> Iterator[Case]:
    starts = [(start, start.format, start.dtype)]
    for spec, capability in _offers(specs, start.task, "optimize", start.format):
        levels = [(level, "") for level in capability.schemes]
        if start.dtype == "float32" and capability.consumes == capability.produces:
            levels += [("O2", dtype) for dtype in ENABLED if dtype in capability.dtypes]
        for level, enable in levels if start.dtype in capability.dtypes else ():
            optimized = replace(
                start, optimizer=spec.name, level=level, enable=enable, rewritten=str(capability.produces)
            )
            if keeps(optimized):
                starts.append((optimized, str(capability.produces), optimized.made_dtype))
    for case, format, dtype in starts:
        yield from filter(keeps, _runs(specs, case, format, dtype, plain))
        for spec, capability in _offers(specs, case.task, "quantize", format):
            # Only the backend for whose kernels a graph was rewritten quantizes and runs the rewritten graph.
            if dtype not in capability.dtypes or case.optimizer not in ("", spec.name):
                continue
            for scheme in capability.schemes:
                for setting in [""] if plain else _settings(spec, capability, scheme):
                    quantized = replace(
                        case, quantizer=spec.name, scheme=scheme, setting=setting, rewritten=str(capability.produces)
                    )
                    if keeps(quantized):
                        yield from filter(keeps, _runs(specs, quantized, str(capability.produces), dtype, plain))


def _settings(spec: BackendSpec, capability: Capability, scheme: str) -> list[str]:
    values = {**SETTINGS, "preset": PRESETS.get(spec.name, OTHER_PRESETS)}
    return ["", *(word(name, value) for name in capability.takes(scheme) for value in values[name])]


def _runs(specs: Sequence[BackendSpec], case: Case, format: str, dtype: str, plain: bool) -> Iterator[Case]:
    offers = [
        (spec, spec.capability("run", format, task=case.task) or capability)
        for spec, capability in _offers(specs, case.task, "run", format)
    ]
    # A graph that was rewritten for the kernels of one backend runs on this backend if the backend supports the format.
    rewriter = case.quantizer or case.optimizer
    if any(spec.name == rewriter and spec.capability("run", format) for spec in specs):
        offers = [offer for offer in offers if offer[0].name == rewriter]
    for spec, capability in {offer[0].name: offer for offer in offers}.values():
        if dtype in capability.dtypes:
            for device in capability.devices:
                for option in [""] if plain else _run_options(spec, capability):
                    # On a CUDA device, a graph computes in the data type with which it was made. Another
                    # `compute_dtype` raises an error.
                    if spec.name == "cuda" and parsed(option).get("compute_dtype", dtype) != dtype:
                        continue
                    yield replace(case, runner=spec.name, device=device, option=option)


def _run_options(spec: BackendSpec, capability: Capability) -> list[str]:
    options = [word(name, value) for name, values in OPTIONS.items() for value in values if name != "compute_dtype"]
    options += [word("compute_dtype", value) for value in OPTIONS["compute_dtype"] if value in capability.dtypes]
    options += [word("native", {name: value}) for name, value in NATIVE.get(spec.name, {}).items()]
    options += [word("provider", {name: value}) for name, value in PROVIDER.get(spec.name, {}).items()]
    return ["", *options]


# Backends reject the following combinations with an error, although their specs allow them. A test runs each
# combination once and expects the error.


@dataclass(frozen=True, slots=True)
class Refusal:
    """Kind of combination that a backend rejects.

    Attributes:
        when: Function that returns whether a case is rejected.
        message: Part of the error message, as a regular expression.
        unless: Reason why some machines have no such case. It is empty if every machine has one.
        takes_long: Whether the check is slow because it compiles a model or exports a large model. A slow check runs
            only in thorough test runs.
    """

    when: Callable[[Case], bool]
    message: str
    unless: str = ""
    takes_long: bool = False


def _ort(case: Case) -> bool:
    return case.runner in ("cpu", "cuda", "tensorrt", "tensorrt-rtx")


def _has(case: Case, *names: str) -> bool:
    return case.option.partition("=")[0] in names


@functools.cache
def _openvino_dtypes() -> tuple[str, ...]:
    """Return the data types in which OpenVINO can compute on this processor. The result is empty if OpenVINO is not
    installed.
    """
    if importlib.util.find_spec("openvino") is None:
        return ()
    import openvino

    words = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return tuple(
        dtype for dtype, word in (("float32", "FP32"), ("float16", "FP16"), ("bfloat16", "BF16")) if word in words
    )


def _computes(case: Case) -> bool:
    return parsed(case.option)["compute_dtype"] in _openvino_dtypes()


def _sets(case: Case, *settings: str) -> bool:
    return case.setting in settings or case.setting.partition("=")[0] in settings


def _has_parts(task: str) -> bool:
    """Return whether the class of a task splits its models into several graphs (`Task.parts`). `_PARTS` lists the other
    tasks with several graphs.
    """
    return type(load_task(task)).parts is not Task.parts


_PARTS = ("text2text-generation", "automatic-speech-recognition", "image-to-text", "image-text-to-text")

REFUSALS: tuple[Refusal, ...] = (
    Refusal(lambda c: c.exporter in ("openvino", "aotinductor") and c.capture.startswith("opset"), "opset"),
    Refusal(
        lambda c: (
            c.runner == "aotinductor" and _has(c, "compute_dtype") and parsed(c.option)["compute_dtype"] != c.made_dtype
        ),
        "was compiled to compute in",
        takes_long=True,  # tests/backends/test_aotinductor.py also checks this error
    ),
    Refusal(
        lambda c: c.quantizer == "cpu" and _sets(c, 'algorithm="awq"', 'algorithm="gptq"'),
        "is not available in this backend",
    ),
    Refusal(lambda c: c.quantizer == "openvino" and _sets(c, 'algorithm="hqq"'), "does not support the algorithm"),
    Refusal(lambda c: c.quantizer == "neural-compressor" and _sets(c, 'algorithm="hqq"'), "not available"),
    Refusal(lambda c: c.quantizer == "neural-compressor" and _sets(c, 'calibration="percentile"'), "percentile"),
    # The layers of the small BERT have 48 inputs, and the default block size of 32 does not divide 48.
    Refusal(
        lambda c: (
            c.quantizer == "neural-compressor" and c.task == "text-classification" and _sets(c, 'algorithm="awq"')
        ),
        "awq needs whole blocks",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            c.quantizer == "neural-compressor"
            and c.runner in ("pytorch", *COMPILES)
            and _has(c, "compute_dtype")
            and "float32" not in c.option
        ),
        "cannot be exported with dtype",
        takes_long=True,
    ),
    Refusal(lambda c: c.quantizer == "openvino" and _sets(c, 'calibration="entropy"'), "entropy"),
    Refusal(
        lambda c: c.quantizer in ("cuda", "tensorrt", "tensorrt-rtx") and _sets(c, "symmetric=false"),
        "does not support symmetric",
    ),
    # The calibration batches of the matrix fit only the first graph of a model. In image-text-to-text, the first graph
    # reads one image per call.
    Refusal(
        lambda c: (
            _has_parts(c.task)
            and c.quantizer in ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
            and c.scheme.startswith("static")
        ),
        "the graph also needs|does not run on a calibration batch",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            c.quantizer == "openvino"
            and (c.task in _PARTS or _has_parts(c.task))
            and (c.scheme == "static-int8" or _sets(c, 'algorithm="gptq"', "scale_estimation"))
        ),
        "needs calibration data for each graph",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            c.quantizer == "neural-compressor"
            and c.scheme == "static-int8"
            and c.task in ("automatic-speech-recognition", "image-to-text", "image-text-to-text")
        ),
        "cannot be called with a batch of the calibration data",
        takes_long=True,
    ),
    # Neural Compressor calibrates SAM with images only, but SAM's mask decoder also reads points.
    Refusal(
        lambda c: c.quantizer == "neural-compressor" and c.scheme == "static-int8" and c.task == "mask-generation",
        "calibrates the model only with the inputs",
        takes_long=True,
    ),
    Refusal(
        lambda c: c.runner == "cpu" and _has(c, "compute_dtype") and "float32" not in c.option, "compute in float32"
    ),
    Refusal(lambda c: c.runner == "openvino" and _has(c, "inter_op_threads", "graph_optimization"), "OpenVINO has no"),
    # This is a limit of NNCF: its GPTQ does not support products of a transposed activation and a constant matrix,
    # which graphs from ONNX contain.
    Refusal(
        lambda c: c.quantizer == "openvino" and c.format == "onnx" and _sets(c, 'algorithm="gptq"'),
        "Transpose is not supported",
    ),
    # This refusal applies to processors without float16 instructions. Other processors run these cases.
    Refusal(
        lambda c: c.runner == "openvino" and c.device in HOST and _has(c, "compute_dtype") and not _computes(c),
        "does not support compute_dtype",
        unless="this CPU supports all values of compute_dtype",
    ),
    Refusal(
        lambda c: (
            c.runner == "openvino"
            and c.device in HOST
            and (c.scheme, c.option) == ("static-int8", 'compute_dtype="float16"')
            and _computes(c)
        ),
        "no fast kernels for 8-bit",
        unless="this CPU does not support float16",
    ),
    Refusal(lambda c: c.runner == "openvino" and c.device != "cpu" and _has(c, "threads"), "does not use CPU threads"),
    Refusal(
        lambda c: c.runner in ("pytorch", *COMPILES) and _has(c, "profile", "graph_optimization"),
        "The backend 'pytorch' does not support SessionOptions",
    ),
    Refusal(
        lambda c: c.runner == "pytorch" and c.device == "cpu" and "cuda_graph" in c.option,
        "needs an NVIDIA GPU",
    ),
    Refusal(
        lambda c: c.generates and _has(c, "buckets", "pad_to_multiple_of"), "leave (buckets|pad_to_multiple_of) out"
    ),
    Refusal(
        lambda c: (
            not (c.generates or set(task_spec(c.task).modalities) == {"text"})
            and _has(c, "buckets", "pad_to_multiple_of")
        ),
        "buckets|pad_to_multiple_of",
    ),
    # Blocks of 16 weights do not divide the few channels of the small model's mask decoder. In graphs from ONNX, such
    # layers stay in floating point.
    Refusal(
        lambda c: c.task == "mask-generation" and c.format == "openvino_ir" and c.scheme == "weight-int4",
        "block size .* does not divide",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            (c.task, c.runner, c.device, c.dtype) == ("mask-generation", "inductor", "cpu", "float32")
            and metadata.version("torch") < "2.12"
        ),
        "cannot be compiled",
        unless="only the compiler of PyTorch 2.11 fails on the loops of the mask decoder",
        takes_long=True,
    ),
    # The answer is read from the column with the largest score. In float16, another column may have the largest score.
    Refusal(
        lambda c: c.task == "table-question-answering" and c.optimizer == "cpu" and c.level == HALVING,
        "Optimization at level O4",
        takes_long=True,
    ),
    # The model selects keypoints one by one, so rounding can change which keypoint is selected.
    Refusal(
        lambda c: c.task == "keypoint-matching" and c.exporter == "aotinductor" and c.dtype != "float32",
        "output 'matches'",
        takes_long=True,
    ),
    Refusal(
        lambda c: c.task == "keypoint-matching" and c.runner == "inductor" and c.dtype != "float32",
        "differ from the outputs of the original model",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            (c.task, c.optimizer, c.dtype) == ("keypoint-matching", "cpu", "float16") and c.level in ("O2", "O3", "O4")
        ),
        "output 'matches' of the new graph",
        takes_long=True,
    ),
    # In PyTorch, negative indices count from the end. OpenVINO's converter handles negative indices differently if
    # several axes are indexed at once.
    Refusal(
        lambda c: c.task == "keypoint-matching" and c.exporter == "openvino",
        "output 'keypoints'",
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            c.task == "keypoint-matching" and c.quantizer == "neural-compressor" and c.scheme.startswith("static")
        ),
        "Neural Compressor f",  # depending on its version, it finds nothing to quantize or fails
        takes_long=True,
    ),
    Refusal(
        lambda c: (
            (c.generates or c.task == "keypoint-matching" or not load_task(c.task).traced_as_is)
            and c.capture.startswith("output_")
        ),
        "cannot return hidden states",
    ),
)
"""Combinations that `declared` leaves out. `Capability.domains` excludes more: ONNX decoders have ONNX Runtime's own operators."""


def refusal(case: Case) -> Refusal | None:
    """Return the rule in `REFUSALS` that rejects a case, or `None`."""
    return next((rule for rule in REFUSALS if rule.when(case)), None)


def specs() -> tuple[BackendSpec, ...]:
    """Return the specs of the installed backends."""
    return registry.describe_all()[0]


# The functions below select the cases for each kind of test run.


def stages(case: Case) -> dict[str, float]:
    """Return the artifacts that a case needs, with the approximate time in seconds to make each artifact on two
    processor cores.
    """
    seconds = {}
    if case.format != WEIGHTS:
        seconds[str(case.exported)] = 12.0 if case.generates else 4.0
    if case.level:
        seconds[str(case.optimized)] = 0.7
    if case.scheme:
        seconds[str(case.without_run)] = (
            3.0 if case.quantizer == "openvino" and case.scheme.startswith("static") else 0.7
        )
    return seconds


QUICK = ("text-classification", "text-generation", "text2text-generation", "sentence-similarity")


USUAL = ("text-classification", "text-generation")
"""Tasks whose covering cases run in `make test`; `make test-all` runs the cases of all tasks and every chain."""


def _is_quick(case: Case) -> bool:
    """Return whether a case can be in every test run.

    This is true for cases of one task of each kind (encoder, decoder, encoder-decoder). Export settings are tested only
    with the smallest model. Encoder-decoders take long to export, so their half-precision exports are excluded.
    """
    if case.task == "sentence-similarity":
        return not (case.level or case.scheme or case.option) and (not case.capture or case.dtype == "float32")
    if case.task == "text2text-generation" and case.dtype != "float32":
        return False
    return not case.capture


APART = ({"setting", "option"}, {"setting", "optimize"})
"""Pairs of factors that need not be covered together.

Settings are covered with each scheme, and schemes with each level and option; covering all three together takes too long.
"""


def _quick_pairs(case: Case) -> list[Hashable]:
    """Return the pairs of values in a case that every test run must cover."""
    covered: list[Hashable] = [pair for pair in pairs(case.factors) if {pair[0][0], pair[1][0]} not in APART]
    # A setting belongs to one scheme of one backend and format. Another scheme may have a different setting with the
    # same name.
    return [*covered, (case.format, case.quantizer, case.scheme, case.setting)]


@functools.cache
def _quick_pool() -> tuple[Case, ...]:
    return tuple(declared(specs(), QUICK, keeps=_is_quick))


@functools.cache
def quick_cases(*, on_host: bool = True) -> tuple[Case, ...]:
    """Return the cases of every test run. If two values can occur together, at least one case has both values."""
    pool = [case for case in _quick_pool() if case.on_host is on_host and not (on_host and case.runner in COMPILES)]
    return tuple(sorted(cover(pool, _quick_pairs, stages=stages, seconds=2.0), key=str))


@functools.cache
def thorough_cases() -> tuple[Case, ...]:
    """Return every chain of every task on devices that every machine has, with the defaults of settings and options."""
    return tuple(case for case in declared(specs(), plain=True) if case.on_host)


@functools.cache
def elsewhere_cases() -> tuple[Case, ...]:
    """Return the cases on devices that not every machine has.

    These are the cases of every test run on such devices, and every chain without optimization and quantization of
    encoder-decoders and image-text-to-text models.
    """
    quick = quick_cases(on_host=False)
    plain = declared(specs(), _PARTS, keeps=lambda case: not (case.level or case.scheme), plain=True)
    return (*quick, *(case for case in plain if not case.on_host and case not in quick))


def reached() -> tuple[Case, ...]:
    """Return all cases that run on any machine."""
    return (*quick_cases(), *thorough_cases(), *elsewhere_cases())
