"""Variants of a model in processes of their own, which are asked to run it.

One process a variant: two spinning thread pools in one process slow each other by up to 190 microseconds a call, and a
runtime that crashes takes nobody with it. The parent asks one process at a time, so that they never compete.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import SessionOptions, available_processors
from .errors import AccelError, BackendUnavailableError, ConfigError, SessionError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 600.0
"""How long a process may take for one request; compiling a large model is the slowest."""

Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One thing to measure: an artifact, or the PyTorch model in a transformers folder.

    Attributes:
        name: Shown in tables.
        path: Artifact, or transformers folder when `pytorch`.
        task: The task.
        pytorch: Measure PyTorch in this dtype instead of an artifact.
        compiled: For PyTorch: through `torch.compile`, weights frozen on the CPU.
        captured: For PyTorch on an NVIDIA GPU: eager, captured in a CUDA graph for each shape and replayed.
        backend: Who runs an artifact; its own choice when `None`.
        device: Where; the backend's choice when `None`, the host for PyTorch.
        provider_options: The vendor's own options.
        options: How an artifact is run; as its manifest says when `None`.
        trust_remote_code: Run code that comes with the model.
    """

    name: str
    path: Path
    task: str
    pytorch: str | None = None
    compiled: bool = False
    captured: bool = False
    backend: str | None = None
    device: str | None = None
    provider_options: Mapping[str, object] | None = None
    options: SessionOptions | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a process says about the variant that it loaded.

    Attributes:
        load_s: Seconds to load it, imports excluded.
        backend: What runs it; `pytorch` for PyTorch.
        device: Where.
        compute_dtype: What its kernels compute in.
        threads: That work on one call.
        options: The session's options; empty for PyTorch.
        axes: Names of the axes that may vary.
        limits: Largest sizes of named axes.
        notes: Settings that change what a number means, such as TF32.
        quantized: Whether its weights or activations have fewer bits.
    """

    load_s: float
    backend: str
    device: str
    compute_dtype: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    quantized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Calls to time.

    Attributes:
        name: Shown in tables: `1x128`, or the file of texts.
        batch: Rows a call.
        sequence: Tokens a row; `None` where they vary.
        cases: Inputs of one call each (arrays by name), repeated in turn; or `{"texts": [...]}` each when tokenized in
            the timed call.
        tokenizer: Folder of the tokenizer that turns `texts` into inputs, inside the timed call.
        max_length: Tokens that longer texts are cut to.
        new_tokens: Tokens that a call generates from its inputs; 0: a call is one of the model's `forward`.
    """

    name: str
    batch: int
    sequence: int | None
    cases: tuple[Arrays, ...]
    tokenizer: Path | None = None
    max_length: int | None = None
    new_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How calls arrive.

    Attributes:
        callers: Threads that call. Each waits for its answer before it calls again (a closed loop).
        rate: Calls a second that arrive on their own, at random (Poisson) times, whether or not earlier ones are
            answered (an open loop); latency then counts from the arrival. `None`: a closed loop.
        seed: Of the arrivals.
    """

    callers: int = 1
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Calls timed without a break.

    Attributes:
        milliseconds: Latency of each call.
        seconds: From the first call to the last answer.
        processor_seconds: Processor time of the whole process meanwhile.
    """

    milliseconds: tuple[float, ...]
    seconds: float
    processor_seconds: float


class WorkerLostError(SessionError):
    """A process that died or did not answer in time; another try may go better.

    Attributes:
        late: It did not answer in time.
    """

    def __init__(self, message: str, *, fix: str | None = None, late: bool = False) -> None:
        super().__init__(message, fix=fix)
        self.late = late


class Worker:
    """A process that holds one variant.

    Args:
        variant: What to hold.
        threads: That work on one call; what the process may use when `None`.
        until: When, on the clock of `time.perf_counter`, it must have answered everything; `None`: never.

    Raises:
        SessionError: From every method: the variant failed, its process died, or it did not answer.
    """

    def __init__(self, variant: Variant, threads: int | None = None, until: float | None = None) -> None:
        self.variant = variant
        self._until = until
        self._process, self._pipe = _start(_serve, variant, threads or available_processors())

    def load(self) -> Loaded:
        """Load the variant."""
        self._answer()  # the imports are done
        loaded: Loaded = self._ask("load")
        return loaded

    def sample(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Any]:
        """Inputs of these sizes for the variant, without padding, as arrays."""
        made: dict[str, Any] = self._ask("sample", dict(sizes), seed)
        return made

    def prepare(self, workload: Workload) -> None:
        """Send a workload; the calls below name it."""
        self._ask("prepare", workload)

    def outputs(self, workload: str, case: int = 0) -> dict[str, Any]:
        """What the variant answers to a case, as arrays."""
        found: dict[str, Any] = self._ask("outputs", workload, case)
        return found

    def time(
        self,
        workload: str,
        calls: int,
        first: int = 0,
        traffic: Traffic | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Block:
        """Time calls, from the case `first` on."""
        block: Block = self._ask("time", workload, calls, first, traffic or Traffic(), patience=timeout_s)
        return block

    def peak_memory(self) -> int:
        """Largest resident memory of the process so far, in bytes; the interpreter and PyTorch take part of it."""
        peak: int = self._ask("memory")
        return peak

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(model, *args)` in the process, for a function of a module."""
        return self._ask("call", function, args)

    def hang_up(self) -> None:
        """Let the process end by itself; `close` waits for it."""
        self._pipe.close()

    def close(self) -> None:
        """End the process."""
        self.hang_up()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=10)

    def _ask(self, verb: str, *args: Any, patience: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            self._pipe.send((verb, args))
        except (OSError, ValueError) as error:
            raise self._died() from error
        return self._answer(patience)

    def _answer(self, patience: float = ANSWER_TIMEOUT_S) -> Any:
        try:
            if self._until is not None:
                patience = min(patience, max(self._until - time.perf_counter(), 0.1))
            if not self._pipe.poll(patience):
                self._process.kill()
                raise WorkerLostError(f"{self.variant.name} did not answer for {patience:.0f} s.", late=True)
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if not good:
            raise SessionError(f"{self.variant.name} failed: {value}")
        return value

    def _died(self) -> WorkerLostError:
        self._process.join(timeout=5)
        return WorkerLostError(
            f"The process of {self.variant.name} died ({exit_reason(self._process.exitcode)}).",
            fix="run it alone to see why.",
        )


class Helper:
    """A process that runs functions of modules, so that a library that crashes takes nobody with it.

    It is started at the first call, and again after it died.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._ended = False

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """`function(*args)` in the process.

        Args:
            function: Of a module.
            args: Its arguments.
            timeout_s: How long it may take; `None`: as long as it needs.

        Raises:
            AccelError: What the function raised; anything that is no `AccelError` comes as a `SessionError`.
            SessionError: The process died, or took too long and was ended.
        """
        if self._process is None or not self._process.is_alive():
            self.close()
            self._process, self._pipe = _start(_help)
            if self._ended:
                self.kill()
        try:
            self._pipe.send((function, args))
            if not self._pipe.poll(timeout_s):
                self.kill()
                self._process.join(timeout=5)
                raise SessionError(f"It was stopped after {timeout_s:.0f} s.", fix="allow more time.")
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            why = exit_reason(self._process.exitcode)
            raise SessionError(f"The process died ({why}).", fix="run this step alone to see why.") from error
        if not good:
            raise value
        return value

    def end(self) -> None:
        """Kill it, from another thread, also when it is only just starting."""
        self._ended = True
        self.kill()

    def kill(self) -> None:
        """End the process in the middle of a call, which then raises `SessionError`."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(timeout=5)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(timeout=5)
            self._process = None


_not_mapped = 0  # bytes of imported libraries that a process of its own would hold in memory
_starting = threading.Lock()
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
# What every process needs before it does anything of its own, and no runtime.
_IMPORTED = ("torch", "transformers.modeling_utils", "transformers.generation", "accel.capture", "accel.modeling")


def _start(target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
    """A process that runs `target(pipe, *args)`, and the other end of its pipe.

    On Linux it is forked from a server that has imported torch and transformers and done nothing else, so that a process
    costs a tenth of a second and not five. Where that is not safe, each imports for itself: on other systems, and beside a GPU
    driver, which a library may start while it is imported, and which no forked process can use.
    """
    forked = sys.platform == "linux" and not any(Path(node).exists() for node in _GPU_DRIVERS)
    context: Any = multiprocessing.get_context("forkserver" if forked else "spawn")
    if forked:
        context.set_forkserver_preload(list(_IMPORTED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(target, dict(os.environ), forked, theirs, *args), daemon=True)
    with _without_main():
        process.start()
    theirs.close()
    return process, ours


def _run(
    target: Callable[..., None], environment: Mapping[str, str], forked: bool, pipe: Connection, *args: Any
) -> None:
    """In the process: the server's environment is that of its start, not of now."""
    global _not_mapped
    # A forked process has the imported libraries, but not their pages until it touches them.
    _not_mapped = max(0, _status("VmRSS", os.getppid()) - _status("VmRSS")) if forked else 0
    os.environ.clear()
    os.environ.update(environment)
    target(pipe, *args)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the user's script from a process that starts: it would run the script again, up to the line that got here.

    Everything that is sent to a process is found by the name of its module, so nothing there needs the script.
    """
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def exit_reason(code: int | None) -> str:
    """A process's exit code in words."""
    if code is None:
        return "it is still running"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


# In the process


def quiet_child() -> None:
    """Set a child up: Ctrl-C is the parent's to handle, and stdout belongs to the parent's result."""
    import tqdm  # type: ignore[import-untyped]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    # tqdm's own lock is a semaphore, which a process that is ended from outside leaves behind.
    tqdm.tqdm.set_lock(threading.RLock())


def _help(pipe: Connection) -> None:
    """A helper: run functions until the pipe closes."""
    quiet_child()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except AccelError as error:
            answer = (False, error)
        # Foreign code: whatever it raises is a report about this one step.
        except Exception as error:  # noqa: BLE001
            answer = (False, SessionError(f"{type(error).__name__}: {error}"))
        try:
            pipe.send(answer)
        except OSError:
            return


def _serve(pipe: Connection, variant: Variant, threads: int) -> None:
    """A worker: answer requests until the pipe closes."""
    quiet_child()
    try:
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        served = _Served(variant, threads)
        pipe.send((True, None))
        while True:
            try:
                verb, args = pipe.recv()
            except EOFError:
                return
            pipe.send((True, getattr(served, verb)(*args)))
    # The parent raises it as an error of this variant.
    except Exception as error:
        logger.debug("worker of %s", variant.name, exc_info=True)
        with contextlib.suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {error}"))


class _Served:
    """The variant in its process; a method for each request."""

    def __init__(self, variant: Variant, threads: int) -> None:
        self._variant = variant
        self._threads = threads
        self._model: Any = None
        self._source: Any = None
        self._names: frozenset[str] | None = None
        self._workloads: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {}

    def load(self) -> Loaded:
        started = time.perf_counter()
        return self._load_pytorch(started) if self._variant.pytorch is not None else self._load_artifact(started)

    def _load_pytorch(self, started: float) -> Loaded:
        import inspect

        import torch

        from . import capture
        from .config import ExportConfig
        from .hub import HubOptions, Location

        variant = self._variant
        assert variant.pytorch is not None
        device = variant.device or "cpu"
        on_gpu = device.startswith("cuda")
        if variant.captured and not on_gpu:
            raise ConfigError(
                f"A CUDA graph needs an NVIDIA GPU, and PyTorch runs on {device} here.",
                fix="pass device='cuda' (--device).",
            )
        if on_gpu and not torch.cuda.is_available():
            raise BackendUnavailableError(
                f"PyTorch {torch.__version__} finds no NVIDIA GPU.",
                fix="install torch for CUDA, or leave the device out.",
            )
        config = ExportConfig.from_dict({"dtype": variant.pytorch})
        hub = HubOptions(local_files_only=True, trust_remote_code=variant.trust_remote_code)
        location = Location(str(variant.path), variant.path)
        self._source = capture.load_source(location, task=variant.task, config=config, hub=hub)
        model = self._source.model.to(device)
        inner = model.model if isinstance(model, capture.SentenceEmbedder) else model
        self._names = frozenset(inspect.signature(inner.forward).parameters)
        notes = []
        if variant.compiled:
            # Freezing makes weights constants of the compiled code (weight layout, constant folding); CPU only.
            how: dict[str, Any] = {"options": {"freezing": True}} if device == "cpu" else {"mode": "reduce-overhead"}
            model = torch.compile(model, **how)
            notes.append(f"torch.compile({', '.join(f'{k}={v}' for k, v in how.items())})")
        if variant.captured:
            model = _Captured(model)
            notes.append("inputs are copied into the graph's buffers at each call")
        if on_gpu:
            notes.append(f"TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}")
        self._model = model
        axes = {axis for named in self._source.axes.values() for axis in named.values()}
        return Loaded(
            load_s=time.perf_counter() - started,
            backend="pytorch",
            device=device,
            compute_dtype=variant.pytorch,
            threads=torch.get_num_threads(),
            axes=tuple(sorted(axes)),
            limits=dict(self._source.max_sizes),
            notes=tuple(notes),
        )

    def _load_artifact(self, started: float) -> Loaded:
        import accel

        from .artifact import Artifact
        from .tasks import task_spec

        variant = self._variant
        options = variant.options
        if options is None:
            options = SessionOptions()
            if (variant.path / "accel.json").is_file():
                run = Artifact.load(variant.path).manifest.run
                if run is not None and variant.backend in (None, run.backend):
                    options = SessionOptions.from_dict(run.session)
        options = replace(options, threads=options.threads or self._threads)
        cls = getattr(accel, task_spec(variant.task).model)
        self._model = cls.from_pretrained(
            variant.path,
            backend=variant.backend,
            device=variant.device,
            provider_options=variant.provider_options,
            session_options=options,
            local_files_only=True,
            trust_remote_code=variant.trust_remote_code,
        )
        session = self._model.sessions[self._model.artifact.components[0].name]
        self._names = frozenset(spec.name for spec in session.inputs)
        return Loaded(
            load_s=time.perf_counter() - started,
            backend=self._model.backend,
            device=str(session.device),
            compute_dtype=session.compute_dtype,
            threads=options.threads or self._threads,
            options=options.to_dict(),
            axes=tuple(sorted({a for spec in session.inputs for a in spec.shape if isinstance(a, str)})),
            limits=dict(self._model.artifact.components[0].max_sizes),
            quantized=self._model.artifact.manifest.quantization is not None,
        )

    def sample(self, sizes: Mapping[str, int], seed: int) -> dict[str, Any]:
        from . import capture

        if self._source is not None:
            feeds = self._source.sample({"choices": 2, **sizes}, seed=seed)
        else:
            artifact = self._model.artifact
            inputs = artifact.components[0].inputs
            feeds = capture.feeds_for(inputs, {"choices": 2, **sizes}, seed=seed, folder=artifact.path)
        # Padding would let a variant that skips it look faster than it is on the stated shape.
        return {name: (t.fill_(1) if name == "attention_mask" else t).numpy() for name, t in feeds.items()}

    def prepare(self, workload: Workload) -> None:
        import torch

        device = self._variant.device or "cpu"
        on_gpu = device.startswith("cuda")
        if workload.tokenizer is None:
            names = self._names
            cases = [
                {
                    name: torch.from_numpy(np.ascontiguousarray(array)).to(device if on_gpu else "cpu")
                    for name, array in case.items()
                    if names is None or name in names
                }
                for case in workload.cases
            ]
            if self._source is not None:
                cases = [{k: _like(v, self._variant.pytorch) for k, v in case.items()} for case in cases]
            model = partial(_generate, self._model, workload.new_tokens) if workload.new_tokens else self._model
            call = _synchronized(model) if on_gpu else model
        else:
            call = self._tokenizing(workload, device if on_gpu else None)
            cases = [dict(case) for case in workload.cases]
        self._workloads[workload.name] = (call, cases)

    def _tokenizing(self, workload: Workload, device: str | None) -> Callable[..., Any]:
        import transformers

        assert workload.tokenizer is not None
        tokenizer = transformers.AutoTokenizer.from_pretrained(workload.tokenizer, local_files_only=True)
        model = _synchronized(self._model) if device else self._model
        names = self._names or frozenset()
        limit = workload.max_length

        def call(texts: Sequence[str]) -> Any:
            feeds = tokenizer(
                list(texts), padding=True, truncation=limit is not None, max_length=limit, return_tensors="pt"
            )
            return model(**{k: v.to(device) if device else v for k, v in feeds.items() if k in names})

        return call

    def outputs(self, workload: str, case: int) -> dict[str, Any]:
        import torch

        call, cases = self._workloads[workload]
        with torch.inference_mode():
            result = call(**cases[case])
        if not isinstance(result, torch.Tensor) and "sequences" in result:
            # Of what was generated, the logits of the first token: the choice of every later one depends on it.
            result = {"logits": result["logits"][0]}
        if isinstance(result, torch.Tensor):
            result = {"output": result}
        return {name: value.float().cpu().numpy() for name, value in result.items() if isinstance(value, torch.Tensor)}

    def time(self, workload: str, calls: int, first: int, traffic: Traffic) -> Block:
        call, cases = self._workloads[workload]
        ordered = [cases[(first + i) % len(cases)] for i in range(calls)]
        processor, started = time.process_time(), time.perf_counter()
        alone = traffic.callers == 1 and traffic.rate is None
        times = timed(call, ordered) if alone else _traffic(call, ordered, traffic)
        return Block(tuple(times), time.perf_counter() - started, time.process_time() - processor)

    def memory(self) -> int:
        return peak_memory()

    def call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        return function(self._model, *args)


def _generate(model: Any, new_tokens: int, **feeds: Any) -> Any:
    """Greedy generation of exactly so many tokens."""
    return model.generate(
        **feeds, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=1,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


def timed(call: Callable[..., Any], cases: Sequence[Mapping[str, Any]]) -> list[float]:
    """Milliseconds of `call(**case)` for each case; the timed region holds the call and nothing else."""
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
    """Latency of each call when several callers share the model, or when calls arrive on their own."""
    import torch

    gaps = None
    if traffic.rate is not None:
        gaps = np.random.default_rng(traffic.seed).exponential(1e9 / traffic.rate, len(cases)).cumsum()
    counter = itertools.count()
    times = [0.0] * len(cases)
    failures: list[BaseException] = []
    begin = time.perf_counter_ns() + 1_000_000

    def caller() -> None:
        try:
            with torch.inference_mode():
                # `next` on a counter is atomic: every call is made once.
                while not failures and (i := next(counter)) < len(cases):
                    arrival = begin + int(gaps[i]) if gaps is not None else time.perf_counter_ns()
                    wait = arrival - time.perf_counter_ns()
                    if wait > 0:
                        time.sleep(wait / 1e9)
                    call(**cases[i])
                    times[i] = (time.perf_counter_ns() - arrival) / 1e6
        # Raised below, in the thread that answers the parent.
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=caller, daemon=True) for _ in range(traffic.callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return times


def peak_memory() -> int:
    """Largest resident memory of this process in bytes.

    From `/proc`, because `getrusage` hands the parent's peak down to a process that it starts; with the pages of libraries
    that a process started alone would have mapped.
    """
    if peak := _status("VmHWM"):
        return peak + _not_mapped
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(name: str, pid: int | str = "self") -> int:
    """A number of bytes that Linux tells about a process; 0 where it does not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _synchronized(model: Any) -> Callable[..., Any]:
    """A call on a GPU ends when its results are there."""
    import torch

    def call(**feeds: Any) -> Any:
        result = model(**feeds)
        torch.cuda.synchronize()
        return result

    return call


class _Captured:
    """PyTorch on a GPU, replayed from a CUDA graph: eager kernels without the host's part in launching them.

    Each shape is captured at its first call. Inputs are copied into the graph's buffers, and outputs stay in them until
    the next call, so callers take turns.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._model = model
        self._graphs: dict[Any, tuple[Any, dict[str, torch.Tensor], Any]] = {}
        self._turn = threading.Lock()

    def __call__(self, **feeds: torch.Tensor) -> Any:
        import torch

        shape = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in feeds.items())
        with self._turn:
            if shape not in self._graphs:
                self._graphs[shape] = self._capture(feeds)
            graph, buffers, result = self._graphs[shape]
            torch._foreach_copy_(list(buffers.values()), list(feeds.values()))
            graph.replay()
            torch.cuda.synchronize()
        return result

    def _capture(self, feeds: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor], Any]:
        """As PyTorch's documentation of CUDA graphs asks for: warm up on a side stream, then capture."""
        import torch

        buffers = {name: tensor.clone() for name, tensor in feeds.items()}
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._model(**buffers)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._model(**buffers)
        return graph, buffers, result


def _like(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    import torch

    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor
