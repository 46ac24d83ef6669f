"""Settings of the stages and of sessions: frozen, validated when made, and round-tripped through JSON."""

# Without `from __future__ import annotations`: the types of fields are read when settings are checked.
import functools
import inspect
import math
import numbers
import operator
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, ParamSpec, Self, TypeVar, get_args, get_origin

from .errors import ConfigError, did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")

Dtype = Literal["float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "max", "last", "mean_sqrt_len_tokens", "weightedmean"]
Level = Literal["O1", "O2", "O3", "O4"]
QatPreset = Literal["int8", "int8-symmetric", "int8-per-tensor", "int4-int8", "int4-per-tensor", "int4"]
Calibration = Literal["minmax", "moving_average", "entropy", "percentile"]


_PATH = (str, os.PathLike)
# Without a default that tells its type, an argument of one name has one type in all public functions.
_ARGUMENTS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("out", "folder", "path", "cache_dir"), _PATH),
    **dict.fromkeys(("task", "backend", "split", "calibration_split", "metric", "method"), (str,)),
    **dict.fromkeys(("revision", "data_revision", "file_name", "variant", "provider", "dtype"), (str,)),
    **dict.fromkeys(("batch_size", "max_length", "rows", "samples", "threads"), (numbers.Integral,)),
    **dict.fromkeys(("atol", "max_drop", "min_accuracy", "max_latency_ms", "max_memory_mb"), (numbers.Real,)),
    **dict.fromkeys(("max_size_mb", "rate", "time_limit_s"), (numbers.Real,)),
    **dict.fromkeys(("export", "use_cache"), (bool,)),
    **dict.fromkeys(("columns", "calibration_columns", "sample", "axes", "model_kwargs"), (Mapping,)),
    **dict.fromkeys(("backends", "providers", "cuda_graph"), (Sequence,)),
    "token": (str, bool),
    "texts": (*_PATH, Sequence),
}
_OF_DEFAULTS: Mapping[type, tuple[type, ...]] = {
    bool: (bool,), int: (numbers.Integral,), float: (numbers.Real,), str: (str,), tuple: (Sequence,)
}  # fmt: skip
_ANYTHING = (object, bool)
_WORDS = {numbers.Integral: "a whole number", numbers.Real: "a number", type(None): "None"}


def check_type(subject: str, value: object, kinds: tuple[type, ...], taker: str = "", expected: str = "") -> None:
    """Refuse a value of another type, and text that no system takes.

    Args:
        subject: The name of the argument or setting.
        value: Its value. `True` is an int to Python, but no number of threads.
        kinds: The types that it may have.
        taker: The function that has the argument.
        expected: The types in words; their names when empty.

    Raises:
        ConfigError: With the name, the value and the types.
    """
    by = f", which {taker} does not take" if taker else ""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = expected or " or ".join(dict.fromkeys(_WORDS.get(kind, kind.__name__) for kind in kinds))
        raise ConfigError(f"{subject} is {reprlib.repr(value)}{by}.", fix=f"use {words}.")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{subject} is {value!r}, which holds a NUL character.", fix="leave it out.")


def check_number(
    subject: str,
    value: float | None,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse a number outside of its range, and what is no number; `None` is no value.

    Args:
        subject: The name of the argument or setting.
        value: Its value.
        least: The smallest number.
        most: The largest number.
        above: A number that the value is larger than.
        below: A number that the value is smaller than.

    Raises:
        ConfigError: With the name, the value and the range.
    """
    if value is None:
        return
    check_type(subject, value, (numbers.Real,))
    limits = (
        ("above", above, operator.gt), ("at least", least, operator.ge), ("at most", most, operator.le), ("below", below, operator.lt)
    )  # fmt: skip
    asked = [(word, limit, holds) for word, limit, holds in limits if limit is not None]
    if not all(holds(value, limit) for _, limit, holds in asked):
        words = " and ".join(f"{word} {limit}" for word, limit, _ in asked)
        raise ConfigError(f"{subject} is {value}.", fix=f"use a number {words}.")


def checked_arguments(
    **kinds: type | tuple[type, ...],
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Wrap a public function so that it raises on arguments of the wrong type.

    The type follows from the argument's default. Where that is `None`, or there is none, the table above says it, or `kinds`. Other
    arguments may be of any type; the items of sequences and mappings are not checked.

    Args:
        kinds: Types of arguments by name. `None` is allowed where it is the default.
    """

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        allowed: dict[str, tuple[type, ...]] = {}
        for name, parameter in signature.parameters.items():
            own = kinds.get(name, _OF_DEFAULTS.get(type(parameter.default), _ARGUMENTS.get(name)))
            if own is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found = own if isinstance(own, tuple) else (own,)
                allowed[name] = (*found, type(None)) if parameter.default is None else found

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                values = signature.bind(*args, **kwargs).arguments
            except TypeError:
                # One is missing or one too many: Python's own error.
                return function(*args, **kwargs)
            for name, value in values.items():
                check_type(name, value, allowed.get(name, _ANYTHING), function.__qualname__)
            return function(*args, **kwargs)

        return call

    return wrap


def _check_setting(subject: str, value: object, hint: Any) -> None:
    """Check a setting against its type: classes, tuples of one class, or `Literal`s, each also next to `None`."""
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    if choices:
        if value not in choices and not (value is None and type(None) in options):
            words = [str(choice) for choice in choices]
            raise ConfigError(
                f"{subject} is {value!r}.{did_you_mean(str(value), words)}", fix=f"use one of {', '.join(words)}."
            )
        return
    kinds = [get_origin(option) or option for option in options]
    items = next((get_args(option)[0] for option in options if get_origin(option) is tuple), None)
    expected = f"tuple of {items.__name__}" if isinstance(items, type) else ""
    check_type(subject, value, (*kinds, *((int,) if float in kinds else ())), expected=expected)
    if isinstance(value, tuple) and isinstance(items, type) and not all(isinstance(item, items) for item in value):
        check_type(subject, value, (), expected=expected)


def check_rising(subject: str, lengths: Sequence[int]) -> None:
    """Refuse lengths that do not rise, or are not positive.

    Raises:
        ConfigError: With the name and the lengths.
    """
    if any(length < 1 for length in lengths) or list(lengths) != sorted(set(lengths)):
        raise ConfigError(f"{subject} is {list(lengths)}.", fix="use rising positive lengths, such as (16, 32, 64).")


class JsonConfig:
    """Validation of `Literal` fields, and `to_dict` / `from_dict`, for the dataclasses below."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, item.name)
            hint = item.type
            if isinstance(value, list | range) and any(get_origin(one) is tuple for one in (hint, *get_args(hint))):
                # Any sequence will do; frozen settings keep a tuple.
                value = tuple(value)
                object.__setattr__(self, item.name, value)
            _check_setting(f"{type(self).__name__}.{item.name}", value, hint)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings from `to_dict` or from a file.

        Raises:
            ConfigError: A key that is no setting, or a value that cannot work.
        """
        known = [item.name for item in fields(cls)]  # type: ignore[arg-type]  # every subclass is a dataclass
        for key in values:
            if key not in known:
                raise ConfigError(
                    f"{cls.__name__} has no setting {key!r}.{did_you_mean(key, known)}",
                    fix=f"use one of {', '.join(known)}.",
                )
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig(JsonConfig):
    """How a model is captured.

    Attributes:
        dtype: Element type of the weights in the graph.
        opset: ONNX opset; the exporter's default when `None`.
        pooling: For embeddings: puts pooling into the graph, output `sentence_embedding`. `None` reads it from a
            sentence-transformers folder, and for `sentence-similarity` falls back to `mean`.
        normalize: For embeddings: divides by the Euclidean norm in the graph. `None` as for `pooling`.
        output_hidden_states: The graph returns `hidden_states`, too, as transformers does where it is asked: after the embeddings and
            after each layer. Not for generating models.
        output_attentions: Likewise `attentions`, which each layer writes down: `(batch, heads, sequence, sequence)` each.
        atol: Largest absolute difference from the PyTorch model that is accepted; `None` takes 1e-4 for float32,
            1e-2 for float16 and 1e-1 for bfloat16, times the largest reference value where that is above 1.
        external_data: Whether weights are kept in `model.onnx.data` beside the graph. `False` puts them into the
            file, which protobuf limits to 2 GiB, and is refused above 1 GiB.
        options: Options that only the exporting backend has, by its own names.
    """

    dtype: Dtype = "float32"
    opset: int | None = None
    pooling: Pooling | None = None
    normalize: bool | None = None
    output_hidden_states: bool = False
    output_attentions: bool = False
    atol: float | None = None
    external_data: bool = True
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(ExportConfig, self).__post_init__()
        check_number("ExportConfig.opset", self.opset, 18, 25)
        check_number("ExportConfig.atol", self.atol, above=0, below=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizeConfig(JsonConfig):
    """Which optimizations a graph gets.

    Attributes:
        level: `O1` general, `O2` adds transformer fusions, `O3` adds approximations, `O4` adds float16.
        disable: Named fusions to leave out.
        enable: Named fusions to add to the level's own.
        atol: Largest absolute difference from the parent that is accepted; `None` takes 1e-4 up to O2 and 1e-2 from O3,
            times the largest reference value where that is above 1.
    """

    level: Level = "O2"
    disable: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()
    atol: float | None = None

    def __post_init__(self) -> None:
        super(OptimizeConfig, self).__post_init__()
        check_number("OptimizeConfig.atol", self.atol, above=0, below=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeConfig(JsonConfig):
    """How a graph is quantized.

    Attributes:
        scheme: A scheme that the backend declares: `dynamic-int8`, `static-int8`, `weight-int8`, `weight-int4`, ...
        preset: The CPU or accelerator to quantize for; `auto` reads this machine's.
        per_channel: One scale for each output channel of a weight; `None` takes the preset's.
        symmetric: Symmetric weights; `None` takes the preset's.
        operators: Operator types to quantize; `None` takes the preset's.
        exclude: Node names, or `re:` and a regular expression, to leave in float.
        calibration: How activation ranges are found from the calibration data.
        percentile: For `percentile`: the share of values kept, in percent.
        samples: Calibration rows at most.
        seed: Seed of the choice of rows.
        format: For `static-int8`: Q/DQ pairs, or integer operators.
        smooth_quant: For `static-int8`: move activation outliers into the weights (Xiao et al., 2022, SmoothQuant);
            the exponent, 0 to 1, or `None` for off.
        block_size: For 4-bit weights: values that share a scale.
        algorithm: For 4-bit weights.
        ratio: Share of the layers that get the low precision, the rest 8 bits.
        scale_estimation: For 4-bit weights: fit each scale to calibration data (NNCF).
        max_drop: Largest accepted loss of the measure that the caller passes as `evaluate`, for backends that put
            layers back into float until it holds; `None` quantizes everything.
    """

    scheme: str = "dynamic-int8"
    preset: str = "auto"
    per_channel: bool | None = None
    symmetric: bool | None = None
    operators: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    calibration: Calibration = "minmax"
    percentile: float = 99.99
    samples: int = 256
    seed: int = 0
    format: Literal["qdq", "qoperator"] = "qdq"
    smooth_quant: float | None = None
    block_size: int = 32
    algorithm: Literal["rtn", "hqq", "awq", "gptq", "teq", "autoround"] = "rtn"
    ratio: float = 1.0
    scale_estimation: bool = False
    max_drop: float | None = None

    def __post_init__(self) -> None:
        super(QuantizeConfig, self).__post_init__()
        _check_blocks(self)
        check_number("QuantizeConfig.percentile", self.percentile, most=100, above=50)
        check_number("QuantizeConfig.samples", self.samples, 1)
        check_number("QuantizeConfig.smooth_quant", self.smooth_quant, 0, 1)
        check_number("QuantizeConfig.ratio", self.ratio, most=1, above=0)
        check_number("QuantizeConfig.max_drop", self.max_drop, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(JsonConfig):
    """How a PyTorch model is prepared. Each scheme has a subclass with its own settings.

    Attributes:
        scheme: A scheme that the backend declares for the stage `prepare`: `accelerate`, ...
    """

    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateConfig(PrepareConfig):
    """How a PyTorch model is accelerated where it is.

    Attributes:
        scheme: `accelerate`.
        dtype: What it computes in; `None` for its own type.
        quantization: Quantize the linear layers as they compute: `int8`, or `float8` on GPUs that have it.
        attention: Which of transformers' attention functions is compiled; `None` leaves the model's own.
        lengths: Numbers of tokens to compile for, rising; `None` takes steps of at most a half from 16 on.
        graphs: How many sizes are compiled for, at most.
        cuda_graph: On a GPU: replay CUDA graphs.
        packing: On a GPU, in half precision: layers of encoders compute no padding, where a batch has much of it.
        freezing: On the host: weights become constants of the compiled code, in the layout that its kernels want, for
            the memory of another copy for each size.
        keep_slower: Keep what was measured to be slower than the model as it was.
    """

    scheme: str = "accelerate"
    dtype: Dtype | None = None
    quantization: Literal["int8", "float8"] | None = None
    attention: Literal["sdpa", "eager"] | None = None
    lengths: tuple[int, ...] | None = None
    graphs: int = 16
    cuda_graph: bool = True
    packing: bool = True
    freezing: bool = True
    keep_slower: bool = False

    def __post_init__(self) -> None:
        super(AccelerateConfig, self).__post_init__()
        check_number("AccelerateConfig.graphs", self.graphs, 1)
        check_rising("AccelerateConfig.lengths", self.lengths or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class QatConfig(PrepareConfig):
    """How a model is made ready for quantization-aware training; see `accel.prepare_qat` for the settings.

    Attributes:
        preset: What is rounded, and how.
        exclude: Layers that stay in float.
        block_size: For `int4`: weights that share a step.
        samples: Calibration rows at most.
        distillation: Share of the float model's answers in the loss.
        temperature: Of the distillation.
    """

    scheme: str = "qat"
    preset: QatPreset = "int8"
    exclude: tuple[str, ...] = ()
    block_size: int = 32
    samples: int = 256
    distillation: float = 0.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        super(QatConfig, self).__post_init__()
        check_number("QatConfig.distillation", self.distillation, 0, 1)
        check_number("QatConfig.temperature", self.temperature, above=0)
        check_number("QatConfig.samples", self.samples, 1)
        _check_blocks(self)


def _check_blocks(config: QuantizeConfig | QatConfig) -> None:
    """Check the settings that say which weights are quantized in which blocks."""
    if config.block_size < 16 or config.block_size & (config.block_size - 1):
        raise ConfigError(
            f"{type(config).__name__}.block_size is {config.block_size}.", fix="use a power of two from 16 on."
        )
    for pattern in config.exclude:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(
                f"{type(config).__name__}.exclude holds {pattern!r}, which is no regular expression: {error}.",
                fix="write it as Python's re module reads it, or use a layer's name.",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions(JsonConfig):
    """How a graph is run; the words are the same for every backend.

    Attributes:
        threads: Threads that work on one call. `None`: the processors this process may use, from its CPU affinity
            and its cgroup's quota.
        inter_op_threads: Threads that run independent operators at once; 1 runs them in order.
        compute_dtype: What the kernels compute in; `None` is the artifact's own dtype. A backend that cannot refuses.
        buckets: Lengths that the `sequence` axis is padded up to, smallest first, each compiled for itself. Empty: no padding.
        pad_to_multiple_of: What the `sequence` axis is padded to a multiple of, with dynamic shapes; 1: no padding. `None`: what
            the backend prefers, where the model can be padded (OpenVINO compiles each new length, and prefers 16).
        graph_optimization: How much the runtime may rewrite the graph when it loads it.
        spinning: Whether threads that are idle between calls spin: lower latency, and a busy processor.
        profile: Folder that gets the runtime's own profile, or `None`.
        check_inputs: Whether ids of tokens are held against what the model has, and masks against 0, 1 and rows without a token, which
            costs 2 to 10 microseconds for each such input. Without it what the model does not have is answered as the runtime likes, and
            may end the process.
        native: Settings of the vendor's runtime by their own names, passed on as they are.
    """

    threads: int | None = None
    inter_op_threads: int = 1
    compute_dtype: Dtype | None = None
    buckets: tuple[int, ...] = ()
    pad_to_multiple_of: int | None = 1
    graph_optimization: Literal["none", "basic", "extended", "all"] = "all"
    spinning: bool = True
    profile: str | None = None
    check_inputs: bool = True
    native: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(SessionOptions, self).__post_init__()
        for name in ("threads", "inter_op_threads", "pad_to_multiple_of"):
            check_number(f"SessionOptions.{name}", getattr(self, name), 1)
        check_rising("SessionOptions.buckets", self.buckets)
        if self.buckets and self.pad_to_multiple_of not in (1, None):
            raise ConfigError("Lengths are padded to buckets or to multiples.", fix="leave one of the two out.")


def available_processors() -> int:
    """Processors that this process may use: its CPU affinity, limited by its cgroup's quota, at least 1.

    Runtimes size their thread pools from the whole machine, which in a container is too many.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text(encoding="ascii").split()[:2]
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(count, 1)
