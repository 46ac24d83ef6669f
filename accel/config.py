"""Settings of stages and sessions. They are immutable, validated, and can be converted to and from JSON."""

# `from __future__ import annotations` is not used, because the checks need the field types at run time.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
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
# Types of arguments whose default does not reveal the type. An argument name has the same type in all public functions.
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


def check_type(subject: str, value: object, kinds: tuple[type, ...], taker: str = "") -> None:
    """Raise if a value has the wrong type, or is text with a NUL character.

    Args:
        subject: Name of the argument or setting.
        value: The value. A bool is accepted only if `kinds` contains `bool`.
        kinds: The accepted types.
        taker: Name of the function with this argument, for the error message.

    Raises:
        ConfigError: The type is wrong. The message has the value and the accepted types.
    """
    requirement = f"{taker} accepts only" if taker else "it must be"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = " or ".join(dict.fromkeys(_WORDS.get(kind, kind.__name__) for kind in kinds))
        raise ConfigError(
            f"{subject} is {reprlib.repr(value)} (type {type(value).__name__}), but {requirement} {words}.",
            fix=f"pass {words} for {subject}.",
        )
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(
            f"{subject} is {value!r}, which contains a NUL character ('\\0').", fix="remove the NUL character."
        )


def check_number(
    subject: str,
    value: float | None,
    least: float | None = None,
    most: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise if a value is not a number, or is out of range. `None` is accepted.

    Args:
        subject: Name of the argument or setting.
        value: The value.
        least: Smallest accepted number.
        most: Largest accepted number.
        above: Exclusive lower bound.
        below: Exclusive upper bound.

    Raises:
        ConfigError: The value is invalid. The message has the value and the range.
    """
    if value is None:
        return
    check_type(subject, value, (numbers.Real,))
    limits = (
        ("above", above, operator.gt), ("at least", least, operator.ge), ("at most", most, operator.le), ("below", below, operator.lt)
    )  # fmt: skip
    bounds = [(word, limit, holds) for word, limit, holds in limits if limit is not None]
    if not all(holds(value, limit) for _, limit, holds in bounds):
        words = " and ".join(f"{word} {limit}" for word, limit, _ in bounds)
        raise ConfigError(f"{subject} is {value}, but it must be {words}.", fix=f"use a number {words}.")


def checked_arguments(
    **kinds: type | tuple[type, ...],
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Wrap a public function so that it raises on arguments of the wrong type.

    The accepted type is taken from `kinds`, from the argument's default, or from the table `_ARGUMENTS`. Arguments
    without a known type are not checked, and neither are the items of sequences and mappings.

    Args:
        kinds: Accepted types by argument name. `None` is also accepted if it is the default.
    """

    def wrap(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        allowed: dict[str, tuple[type, ...]] = {}
        for name, parameter in signature.parameters.items():
            accepted = kinds.get(name, _OF_DEFAULTS.get(type(parameter.default), _ARGUMENTS.get(name)))
            if accepted is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                types_of_argument = accepted if isinstance(accepted, tuple) else (accepted,)
                allowed[name] = (*types_of_argument, type(None)) if parameter.default is None else types_of_argument

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                values = signature.bind(*args, **kwargs).arguments
            except TypeError:
                # An argument is missing or unexpected: let Python raise its own error.
                return function(*args, **kwargs)
            for name, value in values.items():
                check_type(name, value, allowed.get(name, _ANYTHING), function.__qualname__)
            return function(*args, **kwargs)

        return call

    return wrap


class WrongTypeError(ValueError):
    """A value of the wrong type for a field. Callers convert it to an error of accel that names the setting.

    Attributes:
        subject: Name of the field.
        value: The value, shortened.
        expected: Description of the expected type.
        near: Suggestion of `did_you_mean` from the choices of a `Literal`.
    """

    def __init__(self, subject: str, value: object, options: Sequence[Any]) -> None:
        super().__init__(f"{subject} is {type(value).__name__} {reprlib.repr(value)}")
        choices = [str(choice) for option in options if get_origin(option) is Literal for choice in get_args(option)]
        self.subject, self.value = subject, reprlib.repr(value)
        self.expected = (
            f"one of {', '.join(choices)}" if choices else f"a value of type {' or '.join(map(_words, options))}"
        )
        self.near = did_you_mean(str(value), choices)


def _words(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"tuple of {_words(get_args(hint)[0])}"
    return "None" if hint is types.NoneType else getattr(get_origin(hint) or hint, "__name__", str(hint))


def fitted(subject: str, value: Any, hint: Any, make: Callable[[Any, Any, str], Any] | None = None) -> Any:
    """Return a value converted to the type of a field. Lists and ranges become tuples.

    Args:
        subject: Name of the field.
        value: The value.
        hint: Type of the field: classes, tuples, mappings, `Literal`s, dataclasses, or a union of these types.
        make: Function that makes a dataclass instance from its class, its values and the subject.

    Raises:
        WrongTypeError: The value or one of its items has the wrong type.
    """
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and types.NoneType in options:
        return None
    for option in options:
        kind, arguments = get_origin(option) or option, get_args(option)
        if kind in (Any, object):
            return value
        if kind is Literal:
            if value in arguments:
                return value
        elif kind is tuple:
            if isinstance(value, list | tuple | range):
                kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
                if len(kinds) == len(value):
                    items = enumerate(zip(value, kinds, strict=True))
                    return tuple(fitted(f"{subject}[{i}]", item, kind, make) for i, (item, kind) in items)
        elif issubclass(kind, Mapping):
            if isinstance(value, Mapping):
                return {key: fitted(f"{subject}.{key}", item, arguments[1], make) for key, item in value.items()}
        elif make is not None and is_dataclass(kind):
            return make(kind, value, subject)
        elif isinstance(value, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(value, bool)
        ):
            return value
    raise WrongTypeError(subject, value, options)


def check_names(owner: str, kind: str, names: Iterable[str], valid_names: Collection[str]) -> None:
    """Raise for unknown names of settings, arguments or options.

    Args:
        owner: Name of the class or function with these settings, for the error message.
        kind: The word for a name in the error message, such as `setting`.
        names: The names that were passed.
        valid_names: The names that exist.

    Raises:
        ConfigError: A name is unknown. The message has the first unknown name, the most similar known name and all
            known names.
    """
    for name in names:
        if name not in valid_names:
            fix = f"use one of {', '.join(valid_names)}." if valid_names else f"leave {name} out."
            raise ConfigError(f"{owner} has no {kind} {name!r}.{did_you_mean(name, valid_names)}", fix=fix)


def check_rising(subject: str, lengths: Sequence[int]) -> None:
    """Raise if lengths are not positive and in increasing order.

    Raises:
        ConfigError: The lengths are invalid. The message lists them.
    """
    if any(length < 1 for length in lengths) or list(lengths) != sorted(set(lengths)):
        raise ConfigError(
            f"{subject} is {list(lengths)}, but the lengths must be positive and in increasing order.",
            fix="use lengths such as (16, 32, 64).",
        )


class JsonConfig:
    """Base class of settings dataclasses: validates the types of fields and adds `to_dict` and `from_dict`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            subject, value = f"{type(self).__name__}.{item.name}", getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, fitted(subject, value, item.type))
            except WrongTypeError as error:
                raise ConfigError(
                    f"{error.subject} is {error.value}, which is not a valid value.{error.near}",
                    fix=f"use {error.expected}.",
                ) from None
            if isinstance(value, str):
                check_type(subject, value, (str,))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @classmethod
    def merged(cls, config: Self | None, settings: Mapping[str, Any]) -> Self:
        """Return the settings of `config`, or the defaults, with the values of `settings` replaced.

        Raises:
            ConfigError: A key is not a setting, or a value is invalid.
        """
        return cls.from_dict({**(config.to_dict() if config is not None else {}), **settings})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make settings from the values of `to_dict` or of a file.

        Raises:
            ConfigError: A key is not a setting, or a value is invalid.
        """
        names = [item.name for item in fields(cls)]  # type: ignore[arg-type]  # every subclass is a dataclass
        check_names(cls.__name__, "setting", values, names)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig(JsonConfig):
    """Settings of an export.

    Attributes:
        dtype: Data type of the weights in the graph.
        opset: ONNX opset; the exporter's default when `None`.
        pooling: For embeddings: adds pooling to the graph, with the output `sentence_embedding`. When `None`, pooling
            is read from a sentence-transformers folder; for `sentence-similarity` the fallback is `mean`.
        normalize: For embeddings: divides each embedding by its Euclidean norm in the graph. When `None`, read like
            `pooling`.
        output_hidden_states: Whether the graph also returns `hidden_states`, as transformers does on request: after the
            embeddings and after each layer. Not supported for generating models.
        output_attentions: Whether the graph also returns the `attentions` of each layer: `(batch, heads, sequence,
            sequence)`.
        atol: Largest accepted absolute difference from the PyTorch model. `None` means 1e-4 for float32, 1e-2 for
            float16 and 1e-1 for bfloat16, multiplied by the largest reference value if it is above 1.
        external_data: Whether weights are stored in `model.onnx.data` next to the graph. `False` stores them in the
            graph file, which is refused above 1 GiB, because protobuf limits files to 2 GiB.
        options: Options of the backend that exports.
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
    """Settings of an optimization.

    Attributes:
        level: `O1` general optimizations, `O2` adds transformer fusions, `O3` adds approximations, `O4` adds float16.
        disable: Names of fusions to exclude.
        enable: Names of fusions to add to the fusions of the level.
        atol: Largest accepted absolute difference from the input artifact. `None` means 1e-4 up to O2 and 1e-2 from O3,
            multiplied by the largest reference value if it is above 1.
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
    """Settings of a quantization.

    Attributes:
        scheme: A scheme that the backend declares: `dynamic-int8`, `static-int8`, `weight-int8`, `weight-int4`, ...
        preset: The CPU or accelerator to quantize for; `auto` detects that of this machine.
        per_channel: Whether each output channel of a weight has its own scale; the preset's value when `None`.
        symmetric: Whether weights are quantized symmetrically; the preset's value when `None`.
        operators: Operator types to quantize; the preset's types when `None`.
        exclude: Nodes that stay in floating point: node names, or `re:` and a regular expression.
        calibration: Method that computes activation ranges from the calibration data.
        percentile: For `percentile`: the percentage of values inside the range.
        samples: Largest number of calibration rows.
        seed: Random seed for the choice of calibration rows.
        format: For `static-int8`: Q/DQ pairs or integer operators.
        smooth_quant: For `static-int8`: moves activation outliers into the weights (Xiao et al., 2022, SmoothQuant).
            The value is the exponent, 0 to 1; `None` disables it.
        block_size: For 4-bit weights: number of values that share a scale.
        algorithm: For 4-bit weights: the quantization algorithm.
        ratio: Fraction of the layers that get the low precision; the other layers get 8 bits.
        scale_estimation: For 4-bit weights: whether scales are fitted to the calibration data (NNCF).
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

    def __post_init__(self) -> None:
        super(QuantizeConfig, self).__post_init__()
        _check_blocks(self)
        check_number("QuantizeConfig.percentile", self.percentile, most=100, above=50)
        check_number("QuantizeConfig.samples", self.samples, 1)
        check_number("QuantizeConfig.smooth_quant", self.smooth_quant, 0, 1)
        check_number("QuantizeConfig.ratio", self.ratio, most=1, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig(JsonConfig):
    """Base class for the settings of preparing a PyTorch model. Each scheme has a subclass with its own settings.

    Attributes:
        scheme: A scheme that the backend declares for the stage `prepare`: `accelerate`, ...
    """

    scheme: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateConfig(PrepareConfig):
    """Settings for accelerating a PyTorch model in place.

    Attributes:
        scheme: `accelerate`.
        dtype: Data type used for computation; the model's own dtype when `None`.
        quantization: Quantizes the linear layers during computation: `int8` on CPUs; on GPUs, `float8` or `int4` (only
            the weights, for text generation).
        attention: The attention implementation of transformers to compile; `None` keeps the model's own.
        lengths: Numbers of tokens to compile for, in increasing order. `None` chooses lengths from 16 on, each at most
            one and a half times the previous length.
        graphs: Largest number of compiled sizes.
        cuda_graph: On a GPU: whether CUDA graphs are replayed.
        packing: On a GPU in half precision: whether encoder layers skip padding tokens if a batch has many of them.
        freezing: On the CPU: whether weights become constants of the compiled code, in the layout of its kernels. This
            takes memory for a copy of the weights for each size.
        keep_slower: Whether compiled code is kept if it was measured to be slower than the original model.
    """

    scheme: str = "accelerate"
    dtype: Dtype | None = None
    quantization: Literal["int8", "float8", "int4"] | None = None
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
    """Settings for quantization-aware training; `accel.prepare_qat` explains them in detail.

    Attributes:
        preset: Name of the rounding scheme: which values are rounded, and how their scales are chosen.
        exclude: Layers that stay in floating point.
        block_size: For `int4`: number of weights that share a scale.
        samples: Largest number of calibration rows.
        distillation: Fraction of the loss that compares with the outputs of the float model.
        temperature: Temperature of the distillation.
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
    """Check `block_size` and `exclude`."""
    if config.block_size < 16 or config.block_size & (config.block_size - 1):
        raise ConfigError(
            f"{type(config).__name__}.block_size is {config.block_size}, but it must be a power of two of at least 16.",
            fix="use 16, 32, 64 or 128.",
        )
    for pattern in config.exclude:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise ConfigError(
                f"{type(config).__name__}.exclude contains {pattern!r}, which is not a valid regular expression: {error}.",
                fix="correct the regular expression after 're:' (syntax of Python's re module), or use the name of a layer.",
            ) from error


def matched_layers(patterns: Sequence[str], names: Sequence[Sequence[str]]) -> set[int]:
    """Return the indices of the layers that match the entries of `exclude`.

    Args:
        patterns: Layer names, or `re:` and a regular expression that is searched in the names.
        names: The names of each layer.

    Raises:
        ConfigError: An entry matches no layer.
    """
    indices: set[int] = set()
    for pattern in patterns:
        search = re.compile(pattern.removeprefix("re:")).search if pattern.startswith("re:") else None
        matched = {i for i, ours in enumerate(names) if any(search(n) if search else n == pattern for n in ours)}
        if not matched:
            first = [ours[0] for ours in names]
            raise ConfigError(
                f"exclude contains {pattern!r}, which matches none of the {len(names)} layers of the model."
                f"{did_you_mean(pattern, first)}",
                fix=f"use the name of a layer, such as {', '.join(first[:3])}, or 're:' followed by a regular expression.",
            )
        indices |= matched
    return indices


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions(JsonConfig):
    """Options of a session. All backends use the same option names.

    Attributes:
        threads: Number of threads for one call. `None` means the processors available to this process, from its CPU
            affinity and the quota of its cgroup.
        inter_op_threads: Number of threads that run independent operators in parallel on a CPU; 1 runs operators in
            order. On a GPU, operators always run in order.
        compute_dtype: Data type used for computation; the artifact's own when `None`. A backend that does not support
            it raises an error.
        buckets: Lengths, in increasing order, to which the `sequence` axis is padded, each with its own compiled graph.
            Empty: no padding.
        pad_to_multiple_of: Pads the `sequence` axis to a multiple of this number, with dynamic shapes; 1: no padding.
            `None`: the backend's preference, if the model can be padded (OpenVINO compiles each new length, and prefers
            16).
        graph_optimization: How much the runtime may rewrite the graph when it loads it.
        spinning: Whether idle threads spin between calls, which lowers latency but uses the processor.
        profile: Folder for the profile that the runtime writes; `None`: no profile.
        check_inputs: Whether input values are checked: token ids against the vocabulary, and masks for values other
            than 0 and 1 and for rows without a token. This takes 2 to 10 microseconds per input. Without the check,
            results for invalid values are undefined, and the process may crash.
        native: Settings of the vendor's runtime by their own names, passed on unchanged.
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
            raise ConfigError(
                f"SessionOptions has both buckets={self.buckets} and pad_to_multiple_of={self.pad_to_multiple_of}. A session "
                "pads sequences either to buckets or to multiples, not to both.",
                fix="set only one of buckets and pad_to_multiple_of.",
            )


def available_processors() -> int:
    """Return the number of processors that this process may use: its CPU affinity, limited by its cgroup's quota, at
    least 1.

    Runtimes choose the number of threads from the whole machine, which is too many in a container.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_QUOTA.read_text(encoding="ascii").split()[:2]
        if quota != "max":
            count = min(count, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass
    return max(count, 1)
