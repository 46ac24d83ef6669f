"""Model that runs compiled code. Each set of input sizes has its own compiled form, which is compared with the original
model and timed before use.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accel.capture import IntegerLinear, first_lines, pad_id
from accel.capture.fast_path_verification import relative_tolerance
from accel.config import AccelerateConfig
from accel.errors import InputError, PrepareError
from accel.interfaces.cpu_features import adds_in_16_bits, cpu_flags

from ..cuda_graphs import on_device
from ..session import CapturedModule
from ..upstream import tree_flatten, tree_map_only, tree_unflatten
from .comparison import compare, difference
from .compilation import compiled, compiling
from .forms import CompilationPlan, CompiledForm
from .matmul_fusion import MatmulFusionPass, join_projections
from .packing import TokenCounter, Tokens, attending, packable, sharing_copy, token_counter
from .precision import HALF, computing_copy
from .replays import MOST, ReplayCache, call_key
from .sizes import BATCHES, BY_TOKEN, LENGTHS, MASK, CallSizes, cut, longest, padded, sizes_of, step_up
from .static_caches import as_inputs, cache_of, copied, is_decoding, shape_of, tensors_of

logger = logging.getLogger(__name__)

# Number of timed rounds; the fastest round counts. If compiled code seems slower than the original model, more rounds
# run, because other processes may have disturbed the timing.
_ROUNDS, _MORE_ROUNDS = 5, 20
# Maximum time for all rounds, in seconds.
_SECONDS = 4.0
# On a busy machine, two timings of the same code may differ by this factor. Compiled code counts as slower only if its
# time exceeds the time of the original model by more than this factor.
_EQUAL = 1.02


class CompiledModel:
    """Callable that computes a model with compiled code.

    Args:
        model: The model in evaluation mode; its weights are not changed.
        forward: The function that computes a call without compiled code.
        config: Settings for compilation.
        owned: Whether no other code uses the model. Then the parameters of the model may be replaced by views of joined
            tensors.
    """

    def __init__(
        self, model: Any, forward: Callable[..., Any], config: AccelerateConfig, *, owned: bool = False
    ) -> None:
        self.model, self.eager, self.config = model, forward, config
        model_dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self.own_dtype = model_dtype
        self.dtype: torch.dtype = getattr(torch, config.dtype) if config.dtype else model_dtype
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.signature = inspect.signature(forward)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._named = {name for name, parameter in self.signature.parameters.items() if parameter.kind in kinds}
        self._computing = computing_copy(model, dtype=self.dtype, quantization=config.quantization)
        self._fuses = self.device.type == "cuda" and self.dtype in HALF
        if self._fuses and (owned or self._computing is not model):
            join_projections(self._computing)
        # `forward` belongs to the original model. If the code computes with a copy of the model, use the copy's
        # `forward`.
        self._compute = forward if self._computing is model else self._computing.forward
        rounds = config.quantization is not None or any(isinstance(module, IntegerLinear) for module in model.modules())
        self.tolerance = relative_tolerance(self.compute_dtype, quantized=rounds)
        self.forms: dict[tuple[Any, CallSizes], CompiledForm] = {}
        self._plans: dict[Any, CompilationPlan] = {}
        self._kinds: dict[Any, int] = {}
        self._repeats = ReplayCache()
        self.compilations = 0
        self.uncompiled_calls = 0
        self._logged: set[str] = set()
        self._pads = True
        attends = self.device.type == "cuda" and packable(self._computing, self.dtype)
        # This copy of the model uses packed attention. It must be created before `accel.accelerate` replaces the
        # model's `forward`.
        self._encoder = sharing_copy(self._computing) if attends else None
        self._pad_id = pad_id(model.config) if getattr(model, "config", None) is not None else 0
        self._maskable = MASK in self.signature.parameters or any(
            p.kind is inspect.Parameter.VAR_KEYWORD for p in self.signature.parameters.values()
        )
        self.longest = longest(model)
        self._turn = threading.RLock()

    @property
    def _freezes(self) -> bool:
        """Whether weights become constants of the compiled code (freezing).

        Freezing is off for int8 on processors without VNNI instructions. On these processors, frozen int8 matrix
        products add pairs of products in 16 bits, which overflows. Measured on a tiny BERT: the error is 0.4 of the
        largest output with freezing and 0.04 without.
        """
        saturates = self.config.quantization == "int8" and adds_in_16_bits(cpu_flags())
        return self.config.freezing and self.device.type == "cpu" and not saturates

    @property
    def compute_dtype(self) -> str:
        """Name of the data type used for computation."""
        return str(self.dtype).removeprefix("torch.")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of a call, without gradients."""
        with on_device(self.device):
            return self._computed(args, kwargs)

    def _computed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = None if args else call_key(kwargs)
        if (replays := self._repeats.get(key)) is not None:
            output = replays.answer(kwargs, self._token_counter(kwargs, replays.plan))
            if output is not None:
                return output
        call = self.bind(args, kwargs)
        with contextlib.ExitStack() as stack:
            # PyTorch forbids writes outside of inference mode to a KV cache that was created inside of it. Calls with a
            # cache therefore keep the caller's mode.
            if torch.is_inference_mode_enabled() and cache_of(call) is None:
                stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if torch.is_autocast_enabled(self.device.type):
                # Compiled code chooses its own data types, so autocast is turned off.
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            return self.answer(call, key)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, without arguments that are `None`.

        Raises:
            InputError: The arguments contain labels (compiled code computes no loss), or an input that has no parameter
                name in `forward`.
        """
        call: dict[str, Any] = {}
        plain = not args and self._named.issuperset(kwargs)
        for name, value in (kwargs if plain else self.signature.bind_partial(*args, **kwargs).arguments).items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                call.update(value)
            elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
                raise InputError(
                    f"The positional input {len(call) + 1} of {type(self.model).__name__}.forward has no parameter name, but accel needs a "
                    "name for every input.",
                    fix="pass inputs as keyword arguments, or accelerate a wrapper module whose forward has named parameters.",
                )
            else:
                call[name] = value
        call = {name: value for name, value in call.items() if value is not None}
        if "labels" in call:
            raise InputError(
                "The call contains labels, but an accelerated model computes no loss.",
                fix="leave labels out, or call model.restore() to compute the loss with the original model.",
            )
        return call

    def answer(self, call: dict[str, Any], key: Any = None) -> Any:
        """Compute the output of a call.

        Args:
            call: The inputs by name.
            key: Key of the call, from `call_key`, so that later calls with this key replay the CUDA graph without a search.
                With `None`, each call looks for the CUDA graph of its input shapes.
        """
        plan = self._plan(call)
        have = plan.have
        form = None if plan.why else self._form(call, plan)
        if form is None:
            self._tell(plan.why)
            return self.eager(**call)
        kind = (have.batch != form.sizes.batch, have.length != form.sizes.length)
        if form.call is not None and kind not in form.checked:
            with self._turn:
                # Another thread may have removed the form in the meantime, because its outputs differ or it is slower.
                if not any(other is form for other in self.forms.values()):
                    return self.answer(call)
                if form.call is not None and kind not in form.checked:
                    return self._first(form, call, have, kind)
        code = form.call
        if code is None:
            return self.eager(**call)
        output = self._run(form, code, call, have, form.cuts)
        if key is not None and not any(kind) and not any(form.cuts):
            self._repeats.remember(key, plan, form.tokens, code, call, self.own_dtype)
        return output

    def _tell(self, why: str) -> None:
        """Log the reason why calls run without compiled code, each reason once. Count the calls that need more compiled
        forms than the limit allows.
        """
        self.uncompiled_calls += not why
        reason = why or f"{self.config.graphs} input sizes are compiled already, which is the limit"
        if reason in self._logged:
            return
        self._logged.add(reason)
        name = type(self.model).__name__
        if why:
            # Calls without compiled code are normal during generation, so they are logged at INFO level.
            logger.info("%s: %s", name, why)
        else:
            logger.warning(
                "%s: %s. Calls with other sizes run the original model. Pass graphs=... to compile more sizes, or lengths=... to "
                "pad the inputs to fewer sizes.", name, reason,
            )  # fmt: skip

    def _sizes(self, call: Mapping[str, Any]) -> CallSizes:
        if cache_of(call) is not None:
            first = next((value for value in call.values() if isinstance(value, torch.Tensor)), None)
            return CallSizes(None if first is None else int(first.shape[0]), None)
        return sizes_of(call, maskable=self._maskable)

    def _plan(self, call: Mapping[str, Any]) -> CompilationPlan:
        """Return the plan of a call. Plans are cached, because creating a plan takes longer than launching a CUDA
        graph.
        """
        key = call_key(call)
        if key is None:
            return self._planned(call)
        key = (self._pads, key)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST:
                self._plans = {}
            plan = self._plans[key] = self._planned(call)
        return plan

    def _planned(self, call: Mapping[str, Any]) -> CompilationPlan:
        have = self._sizes(call)
        if why := self._why_eager(call):
            return CompilationPlan(why, have, -1, have)
        kind, want = self._key(call, have)
        # Replace the long key by a number: hashing the key in each call would be slow.
        return CompilationPlan("", have, self._kinds.setdefault(kind, len(self._kinds)), want)

    def _token_counter(self, call: Mapping[str, Any], plan: CompilationPlan) -> TokenCounter | None:
        """Return a function that counts the tokens which the layers compute without padding. Return `None` if the
        layers also compute the padding.
        """
        packs = self.config.packing and self._encoder is not None and cache_of(call) is None
        return token_counter(call, plan.have, plan.want) if packs else None

    def _form(self, call: Mapping[str, Any], plan: CompilationPlan) -> CompiledForm | None:
        """Return the compiled form for a call; create the form if it does not exist.

        If the limit of forms is reached, return a larger form to which the call can be padded, or `None`.
        """
        count_tokens = self._token_counter(call, plan)
        want, tokens = plan.want, None if count_tokens is None else count_tokens(False)
        kind = (plan.kind, tokens)
        form = self.forms.get((kind, want))
        if form is None:
            with self._turn:
                form = self.forms.get((kind, want))
                if form is None and self.compilations < self.config.graphs:
                    form = self.forms[kind, want] = self._new_form(call, want, tokens)
                elif form is None:
                    form = self._larger(kind, want)
        return form

    def _larger(self, kind: Any, want: CallSizes) -> CompiledForm | None:
        """Return the smallest compiled form to which a call of the sizes `want` can be padded. Return `None` if no form
        is large enough, or if padding would more than double the size of the call.
        """
        if want.batch is None or want.length is None or not self._pads:
            return None
        fitting = [
            (sizes.batch * sizes.length, form)
            for (other, sizes), form in self.forms.items()
            if other == kind and form.call is not None and sizes.batch is not None and sizes.length is not None
            and sizes.batch >= want.batch and sizes.length >= want.length
        ]  # fmt: skip
        size, form = min(fitting, key=lambda sized: sized[0], default=(0, None))
        return form if size <= 2 * want.batch * want.length else None

    def _key(self, call: Mapping[str, Any], have: CallSizes) -> tuple[Any, CallSizes]:
        """Return the key of the compiled code, which does not contain the batch size and length, and the sizes to which
        the call is padded.
        """
        cache = cache_of(call)
        want = have
        if cache is None and self._pads:
            lengths = self.config.lengths or LENGTHS
            length = None if have.length is None else step_up(have.length, lengths)
            if length is not None and self.longest is not None and have.length is not None:
                length = max(have.length, min(length, self.longest))
            want = CallSizes(None if have.batch is None else step_up(have.batch, BATCHES), length)
        pads_mask = want.length is not None and MASK not in call
        parts: list[tuple[Any, ...]] = []
        for name in sorted(call):
            value = call[name]
            if value is cache and cache is not None:
                parts.append((name, shape_of(cache)))
                continue
            leaves, spec = tree_flatten(value)
            by_token = name in BY_TOKEN
            parts.append((name, str(spec), tuple(self._leaf(leaf, have, by_token=by_token) for leaf in leaves)))
        return (tuple(parts), pads_mask), want

    def _leaf(self, leaf: Any, have: CallSizes, *, by_token: bool) -> Any:
        """Return the key of an input tensor: data type, device and shape. The shape contains "batch" or "length"
        instead of each size that is padded.
        """
        if not isinstance(leaf, torch.Tensor):
            return repr(leaf)
        shape: list[Any] = list(leaf.shape)
        if self._pads and shape and shape[0] == have.batch:
            shape[0] = "batch"
        if self._pads and by_token and have.length is not None:
            shape[1] = "length"
        return (leaf.dtype, leaf.device, tuple(shape))

    def _new_form(self, call: Mapping[str, Any], want: CallSizes, tokens: Tokens) -> CompiledForm:
        cache = cache_of(call)
        name = str(want) if cache is None else f"one token with {shape_of(cache)}"
        form = CompiledForm(name if tokens is None else f"{name}, {tokens} tokens computed", want, tokens=tokens)
        graphs = self.device.type == "cuda" and self.config.cuda_graph
        form.replayed = graphs and cache is not None
        compute = self._compute
        form.attends = self._encoder is not None and cache is None and want.length is not None
        if form.attends:
            compute = attending(self._encoder, tokens)
        form.fuses = self._fuses
        options = {"pre_grad_custom_pass": MatmulFusionPass()} if form.fuses else None
        code = compiled(compute, replayed=form.replayed, options=options)
        if graphs and cache is None:
            code = CapturedModule(code, self.device)
        form.call = code
        return form

    def _why_eager(self, call: Mapping[str, Any]) -> str:
        cache = cache_of(call)
        if cache is not None:
            why = "calls with several new tokens, or with a KV cache that is not a static cache, run the original model"
            return "" if is_decoding(call, cache) else why
        generates = callable(getattr(self.model, "can_generate", None)) and self.model.can_generate()
        caches = generates and call.get("use_cache", getattr(self.model.config, "use_cache", False))
        return (
            "calls that return a new KV cache run the original model; pass use_cache=False to run compiled code"
            if caches
            else ""
        )

    def _run(
        self,
        form: CompiledForm,
        code: Any,
        call: dict[str, Any],
        have: CallSizes,
        cuts: Sequence[Mapping[int, str]] = (),
    ) -> Any:
        padded_call = self._cast(padded(call, have, form.sizes, self._pad_id))
        if form.replayed:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        leaves, spec = tree_flatten(code(**padded_call))
        # Index of the next output tensor.
        place = 0
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if place < len(cuts):
                    leaf = cut(leaf, cuts[place], have)
                place += 1
                # Copy outputs in CUDA graph memory, because the next replay overwrites them.
                dtype = self.own_dtype if leaf.is_floating_point() else leaf.dtype
                leaves[i] = leaf.to(dtype, copy=form.replayed)
        return tree_unflatten(leaves, spec)

    def _cast(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs in the data type and memory layout that the code is compiled for.

        Each input becomes a separate tensor object: the compiler would merge two inputs that are the same object.
        """
        cache, tensor_ids = cache_of(call), set[int]()

        def separate(tensor: torch.Tensor) -> torch.Tensor:
            cast = (tensor.to(self.dtype) if tensor.is_floating_point() else tensor).contiguous()
            if id(cast) in tensor_ids:
                cast = cast.view_as(cast)
            tensor_ids.add(id(cast))
            return cast

        def each(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return separate(value)
            return value if value is cache else tree_map_only(torch.Tensor, separate, value)

        return {name: each(value) for name, value in call.items()}

    def _first(self, form: CompiledForm, call: dict[str, Any], have: CallSizes, kind: tuple[bool, bool]) -> Any:
        """Compute the first call of a form: compile the code if needed, compare its output with the original model's
        output, and time both.

        Raises:
            PrepareError: The model cannot be compiled, or the outputs differ.
        """
        cache = cache_of(call)
        before, again = (call, call) if cache is None else (copied(call), copied(call))
        try:
            expected = self.eager(**before)
        except BaseException:
            if not form.compile_s:
                self._drop(form)
            raise
        started = time.perf_counter()
        if not form.compile_s:
            logger.info("compiling %s for %s: this may take minutes", type(self.model).__name__, form.name)
            if cache is not None:
                as_inputs(cache)
        try:
            output = self._compile(form, call, have)
        except PrepareError as error:
            if cache is not None or not (form.attends or form.fuses):
                raise
            return self._plainer(form, call, error.message)
        if not form.compile_s:
            form.compile_s = time.perf_counter() - started
            self.compilations += 1
            logger.info(
                "compiled %s for %s in %.1f s (%d of at most %d sizes)",
                type(self.model).__name__, form.name, form.compile_s, self.compilations, self.config.graphs,
            )  # fmt: skip
        mask = call.get(MASK) if form.tokens is not None else None
        output, gap, axes = compare(output, expected, have, form.sizes, mask)
        if cache is not None:
            gap = max(gap, self._other_cache(form, again, have, before, expected))
        if not gap <= self.tolerance:
            return self._differs(form, call, kind, gap)
        form.cuts = [{**old, **new} for old, new in zip(form.cuts or [{}] * len(axes), axes, strict=True)]
        form.difference = max(form.difference, gap)
        form.checked.add(kind)
        if cache is None or self.device.type == "cpu":
            self._time(form, call, have)
        # If the compiled code is slower, later calls run the original model. Return the original model's output now as
        # well, so that all calls give identical results.
        return expected if form.call is None and cache is None else output

    def _compile(self, form: CompiledForm, call: dict[str, Any], have: CallSizes) -> Any:
        try:
            with compiling(freezing=self._freezes):
                return self._run(form, form.call, call, have)
        except Exception as error:
            self._drop(form)
            raise PrepareError(
                f"{type(self.model).__name__} cannot be compiled for {form.name}: {type(error).__name__}: "
                f"{first_lines(error)}",
                fix="call model.restore() to use the original model. If PyTorch's compiler does not support an operation of the model, "
                "report the error to PyTorch.",
            ) from error

    def _other_cache(
        self, form: CompiledForm, call: dict[str, Any], have: CallSizes, before: dict[str, Any], expected: Any
    ) -> float:
        """Run compiled code on a KV cache other than the one of its compilation. Return the largest difference from the
        original model, of the outputs and of the caches after the call.
        """
        _, gap, _ = compare(self._run(form, form.call, call, have), expected, have, form.sizes)
        pairs = zip(tensors_of(cache_of(call)), tensors_of(cache_of(before)), strict=True)
        return max(gap, *(difference(tensor, reference) for tensor, reference in pairs))

    def _differs(self, form: CompiledForm, call: dict[str, Any], kind: tuple[bool, bool], gap: float) -> Any:
        """Handle a form whose outputs differ from those of the original model. Compile again without packed attention,
        without joined matrix products, or without padding, and return the output.

        Raises:
            PrepareError: The outputs also differ without packed attention, joined products and padding.
        """
        self._drop(form)
        why = f"the outputs differ by {gap:.2g} of the largest value; at most {self.tolerance:.2g} is accepted"
        if form.attends or (form.fuses and not any(kind) and cache_of(call) is None):
            return self._plainer(form, call, why)
        if any(kind) and self._pads:
            self._pads = False
            logger.warning(
                "Padding changes the outputs of %s by %.2g of the largest value; at most %.2g is accepted. From now on, accel does "
                "not pad the inputs and compiles the model for each input size, up to %d sizes.",
                type(self.model).__name__, gap, self.tolerance, self.config.graphs,
            )  # fmt: skip
            return self.answer(call)
        raise PrepareError(
            f"The outputs of {type(self.model).__name__} compiled for {form.name} differ from the outputs of the original model by "
            f"{gap:.2g} of the largest value; at most {self.tolerance:.2g} is accepted in {self.compute_dtype}.",
            fix="pass another dtype=..., leave quantization out, or call model.restore() to use the original model.",
        )

    def _plainer(self, form: CompiledForm, call: dict[str, Any], why: str) -> Any:
        """Turn off packed attention for all later calls, or joined matrix products if the form has no packed attention.
        Then compute the call again and return its output.
        """
        part = "packed attention" if form.attends else "joined matrix products"
        self._encoder, self._fuses = (None, self._fuses) if form.attends else (self._encoder, False)
        self._repeats.forget()
        logger.warning(
            "From now on, %s is compiled without %s, which may be slower. Reason: %s",
            type(self.model).__name__,
            part,
            why,
        )
        return self.answer(call)

    def _drop(self, form: CompiledForm) -> None:
        self.forms = {key: other for key, other in self.forms.items() if other is not form}
        self._repeats.forget()

    def _time(self, form: CompiledForm, call: dict[str, Any], have: CallSizes) -> None:
        """Time the compiled form and the original model alternately, and compare their fastest calls. If the form is
        slower, later calls do not use the form, and a warning is logged.
        """
        cache = cache_of(call)
        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        ways: dict[str, Callable[[dict[str, Any]], Any]] = {
            "eager": lambda inputs: self.eager(**inputs),
            "compiled": lambda inputs: self._run(form, form.call, inputs, have, form.cuts),
        }
        started = time.perf_counter()

        def slower() -> bool:
            return not self.config.keep_slower and min(times["compiled"]) > min(times["eager"]) * _EQUAL

        while not times["compiled"] or (
            len(times["compiled"]) < (_MORE_ROUNDS if slower() else _ROUNDS)
            and time.perf_counter() - started < _SECONDS
        ):
            for name, way in ways.items():
                inputs = call if cache is None else copied(call)
                self._wait()
                begun = time.perf_counter()
                way(inputs)
                self._wait()
                times[name].append(time.perf_counter() - begun)
        form.eager_ms, form.ms = min(times["eager"]) * 1e3, min(times["compiled"]) * 1e3
        if slower():
            form.call = None
            form.why = f"compiled code takes {form.ms:.3g} ms and the original model takes {form.eager_ms:.3g} ms"
            logger.warning(
                "Compiled code of %s is not faster for %s: %s. Calls of this size run the original model. Pass keep_slower=True to run "
                "the compiled code.",
                type(self.model).__name__, form.name, form.why,
            )  # fmt: skip

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def report(self) -> list[dict[str, Any]]:
        """Return one dictionary for each compiled form. It contains the state, the compile time in seconds, the fastest
        times in milliseconds and the difference of the outputs.
        """
        return [
            {
                "form": form.name,
                "state": form.state,
                "why": form.why,
                "compile_s": round(form.compile_s, 2),
                "eager_ms": form.eager_ms,
                "ms": form.ms,
                "difference": form.difference,
            }
            for form in [*self.forms.values()]
        ]
