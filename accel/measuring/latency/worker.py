"""The process of a variant: load the variant, receive workloads, and time calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...artifact.processor_loading import open_companion
from ...config import available_processors
from ...errors import AccelError, SessionError
from ..processes import ANSWER_TIMEOUT_S, HelperProcess, WorkerLostError, peak_memory
from .variants import CallTimings, LoadedVariantFacts, Traffic, Variant, Workload, planned_variant

if TYPE_CHECKING:
    from ...artifact.manifest import Artifact
    from ...interfaces.specs import TensorSpec

_PROMPT = ("input_ids", "attention_mask", "pixel_values", "flattened_patches", "input_features", "input_values")


class VariantProcess(HelperProcess):
    """A separate process that runs one variant.

    Args:
        variant: The variant to load.
        threads: Number of threads that work on one call; `None` for all processors that the process may use.
        until: Deadline for all answers, as a value of `time.perf_counter`; `None` for no deadline.

    Raises:
        SessionError: Raised by every method if the variant failed, or its process ended or did not answer.
    """

    def __init__(self, variant: Variant, threads: int | None = None, until: float | None = None) -> None:
        super().__init__(variant.name, imports=("torch", "transformers"))
        self.variant = variant
        self._threads = threads or available_processors()
        self._until = until
        self.start()

    def load(self) -> LoadedVariantFacts:
        """Load the variant in the process."""
        loaded: LoadedVariantFacts = self._ask("load", self.variant, self._threads)
        return loaded

    def sample(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
        """Return sample inputs of these sizes for the variant, as arrays without padding."""
        inputs: dict[str, Any] = self._ask("sample", dict(sizes), seed)
        return inputs

    def prepare(self, workload: Workload) -> None:
        """Send a workload to the process; later calls refer to it by its name."""
        self._ask("prepare", workload)

    def outputs(self, workload: str, case: int = 0) -> dict[str, Any]:
        """Return the variant's outputs for one case of a workload, as arrays."""
        outputs: dict[str, Any] = self._ask("outputs", workload, case)
        return outputs

    def time(
        self,
        workload: str,
        calls: int,
        first: int = 0,
        traffic: Traffic | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> CallTimings:
        """Time calls of a workload, starting at the case with index `first`."""
        block: CallTimings = self._ask("time", workload, calls, first, traffic or Traffic(), patience=timeout_s)
        return block

    def peak_memory(self) -> int:
        """Return the peak memory of the process so far, in bytes, including interpreter and PyTorch."""
        peak: int = self.call(peak_memory)
        return peak

    def _ask(self, verb: str, *args: Any, patience: float = ANSWER_TIMEOUT_S) -> Any:
        if self._until is not None:
            patience = min(patience, max(self._until - time.perf_counter(), 0.1))
        try:
            return self.call(_serve, verb, args, timeout_s=patience)
        except WorkerLostError:
            raise
        except AccelError as error:
            kind = "" if type(error) is SessionError else f"{type(error).__name__}: "
            raise SessionError(f"{self.variant.name} failed: {kind}{error}") from error


# The code below runs in the separate process.


def _serve(verb: str, args: Sequence[Any]) -> Any:
    return getattr(_served, verb)(*args)


def _inputs(artifact: Artifact) -> tuple[TensorSpec, ...]:
    """Return the inputs of all graphs, except for inputs that are outputs of another graph."""
    outputs = {spec.name for component in artifact.components for spec in component.outputs}
    return tuple(spec for component in artifact.components for spec in component.inputs if spec.name not in outputs)


class _VariantServer:
    """The variant inside its process, with one method for each request."""

    def __init__(self) -> None:
        self._model: Any = None
        self._names: frozenset[str] = frozenset()
        self._workloads: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {}

    def load(self, variant: Variant, threads: int) -> LoadedVariantFacts:
        import torch
        import transformers

        from ...models.base import ORTModel

        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        started = time.perf_counter()
        plan = planned_variant(variant)
        options = replace(plan.options, threads=plan.options.threads or threads)
        self._model = model = ORTModel.from_plan(plan.with_options(options))
        artifact = model.artifact
        component = artifact.components[0]
        session = model.sessions[component.name]
        self._names = frozenset(_PROMPT if model.can_generate() else (spec.name for spec in _inputs(artifact)))
        notes = tuple(f"{name}={value}" for name, value in (variant.provider_options or {}).items())
        return LoadedVariantFacts(
            load_s=time.perf_counter() - started,
            backend=model.backend,
            device=str(session.device),
            compute_dtype=session.compute_dtype,
            threads=options.threads or threads,
            options=options.to_dict(),
            axes=tuple(sorted({a for spec in session.inputs for a in spec.shape if isinstance(a, str)})),
            limits=dict(component.max_sizes),
            notes=notes,
            quantized=artifact.manifest.quantization is not None,
        )

    def sample(self, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
        from ... import capture

        artifact = self._model.artifact
        specs = artifact.components[0].inputs if self._model.can_generate() else _inputs(artifact)
        if self._model.can_generate():
            # Keep only the prompt's inputs, which a caller passes to `generate`.
            specs = tuple(spec for spec in specs if spec.name in _PROMPT)
            sizes = {"total": sizes.get("sequence", 2), **sizes}
        feeds = capture.feeds_for(specs, {"choices": 2, **sizes}, seed=seed, folder=artifact.path)
        # Sample inputs have no padding, because a variant that skips padding would otherwise seem faster for this shape than it is.
        return {name: (t.fill_(1) if name == "attention_mask" else t).numpy() for name, t in feeds.items()}

    def prepare(self, workload: Workload) -> None:
        import torch

        where = self._model.device
        model = partial(_generate, self._model, workload.new_tokens) if workload.new_tokens else self._model
        call = _synchronized(model, where) if where.type == "cuda" else model
        if workload.tokenizer is None:
            cases = [
                {
                    name: torch.from_numpy(np.ascontiguousarray(array)).to(where)
                    for name, array in case.items()
                    if name in self._names
                }
                for case in workload.cases
            ]
        else:
            call = self._tokenizing(workload, call)
            cases = [dict(case) for case in workload.cases]
        self._workloads[workload.name] = (call, cases)

    def _tokenizing(self, workload: Workload, model: Callable[..., Any]) -> Callable[..., Any]:
        assert workload.tokenizer is not None
        tokenizer = open_companion("AutoTokenizer", workload.tokenizer)
        names, where, limit = self._names, self._model.device, workload.max_length

        def call(texts: Sequence[str]) -> Any:
            feeds = tokenizer(
                list(texts), padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt"
            )
            return model(**{name: tensor.to(where) for name, tensor in feeds.items() if name in names})

        return call

    def outputs(self, workload: str, case: int) -> dict[str, Any]:
        import torch

        call, cases = self._workloads[workload]
        with torch.inference_mode():
            result = call(**cases[case])
        if not isinstance(result, torch.Tensor) and "sequences" in result:
            # Compare only the logits of the first generated token, because every later token depends on it.
            result = {"logits": result["logits"][0]}
        if isinstance(result, torch.Tensor):
            result = {"output": result}
        return {name: value.float().cpu().numpy() for name, value in result.items() if isinstance(value, torch.Tensor)}

    def time(self, workload: str, calls: int, first: int, traffic: Traffic) -> CallTimings:
        call, cases = self._workloads[workload]
        ordered = [cases[(first + i) % len(cases)] for i in range(calls)]
        processor, started = time.process_time(), time.perf_counter()
        alone = traffic.callers == 1 and traffic.rate is None
        times = timed(call, ordered) if alone else _traffic(call, ordered, traffic)
        return CallTimings(tuple(times), time.perf_counter() - started, time.process_time() - processor)


_served = _VariantServer()


def _generate(model: Any, new_tokens: int, **feeds: Any) -> Any:
    """Generate exactly `new_tokens` tokens with greedy decoding."""
    return model.generate(
        **feeds, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=1,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


def timed(call: Callable[..., Any], cases: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the latency of `call(**case)` for each case, in milliseconds. The timed region contains only the call."""
    import torch

    clock = time.perf_counter_ns
    times = []
    with torch.inference_mode():
        for case in cases:
            started = clock()
            call(**case)
            times.append(clock() - started)
    return [t / 1e6 for t in times]


def _traffic(call: Callable[..., Any], cases: Sequence[Mapping[str, Any]], traffic: Traffic) -> list[float]:
    """Time calls from several threads that share the model, or calls that arrive at random times."""
    import torch

    gaps = None
    if traffic.rate is not None:
        gaps = np.random.default_rng(traffic.seed).exponential(1e9 / traffic.rate, len(cases)).cumsum()
    begin = time.perf_counter_ns() + 1_000_000

    def timed_call(i: int) -> float:
        with torch.inference_mode():
            arrival = begin + int(gaps[i]) if gaps is not None else time.perf_counter_ns()
            wait = arrival - time.perf_counter_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            call(**cases[i])
            return (time.perf_counter_ns() - arrival) / 1e6

    with ThreadPoolExecutor(traffic.callers) as pool:
        return list(pool.map(timed_call, range(len(cases))))


def _synchronized(model: Any, device: Any) -> Callable[..., Any]:
    """Wrap a model so that each call waits until the GPU has finished."""
    import torch

    def call(**feeds: Any) -> Any:
        result = model(**feeds)
        torch.cuda.synchronize(device)
        return result

    return call
