"""`accel.Engine`: batch the requests of many callers into few model calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, SupportsIndex

from ..config import SessionOptions, check_number
from ..errors import ConfigError, EngineClosedError, RequestTimeoutError, did_you_mean
from ..models.base import ORTModel
from .continuous_batching.generation_engine import GenerationEngine
from .continuous_batching.scheduler import GenerationLimits
from .job import Job
from .model_queue import ModelQueue, Observer, QueueLimits
from .shadow import Shadow
from .worker_models import Source, named, open_all


class Engine:
    """Process requests of many concurrent callers with few model calls (dynamic batching).

    When the model is free, waiting rows of similar length run together, up to `max_batch_tokens`. There is no batching delay to tune.
    Results are equal to those of `accel.pipeline`. Any number of asyncio tasks and threads may call an engine.

        async with accel.Engine("model-int8/") as engine:
            answers = await asyncio.gather(*(engine(text) for text in texts))

        with accel.Engine("model-int8/") as engine:
            answer = engine.run("I lost my card")

    Args:
        models: Hub id, folder, artifact or `ORTModelFor...`; a list of these; or a mapping from model name to one of these.
        workers: Number of sessions per model. The sessions share the processors. Their threads do not spin between calls, unless
            `session_options` is given.
        task: The task for folders whose files do not contain the task.
        backend, device, session_options, revision, token, trust_remote_code: As in `from_pretrained`.
        processors: Number of processors that the models share; `None` means all that the process may use.
        max_batch: Greatest number of rows in one model call.
        max_batch_tokens: Greatest number of tokens in one model call, including padding.
        max_queue: Greatest number of inputs that wait or run in a model's queue; further requests are refused.
        max_wait_s: Longest expected wait in seconds; a request that would wait longer is refused on arrival.
        timeout_s: Seconds after which a request without a result is dropped.
        max_new_tokens: Greatest number of new tokens that a request may ask for; `None` means as many as the KV cache can hold.
        observer: Object whose methods are called for every model call and every request.
        shadow: A second model that gets copies of a part of the requests.

    Raises:
        ConfigError: A limit or the number of workers is invalid.
    """

    def __init__(
        self,
        models: Source | Sequence[Source] | Mapping[str, Source],
        *,
        workers: int = 1,
        task: str | None = None,
        backend: str | None = None,
        device: str | None = None,
        session_options: SessionOptions | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        processors: int | None = None,
        max_batch: int = 64,
        max_batch_tokens: int = 16384,
        max_queue: int = 512,
        max_wait_s: float | None = None,
        timeout_s: float | None = None,
        max_new_tokens: int | None = None,
        observer: Observer | None = None,
        shadow: Shadow | None = None,
    ) -> None:
        self.shadow = shadow
        self._sources = named(models)
        check_number("workers", workers, 1)
        check_number("processors", processors, 1)
        self._open = partial(
            open_all, workers=workers, processors=processors, task=task, backend=backend, device=device,
            session_options=session_options, revision=revision, token=token, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        self.limits = QueueLimits(
            max_batch=max_batch, max_batch_tokens=max_batch_tokens, max_queue=max_queue, max_wait_s=max_wait_s,
            timeout_s=timeout_s, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        self._observer = observer
        self._opened: dict[str, list[ORTModel]] = {}
        self._queues: dict[str, ModelQueue] = {}
        self._generators: dict[str, GenerationEngine] = {}
        self._making = threading.Lock()
        self._closed = False

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise ConfigError(
            "An Engine cannot be pickled or copied, because it contains running threads.",
            fix="pickle the model, and start accel.Engine(model) in the other process.",
        )

    # The methods below start and close the engine.

    def start(self) -> Self:
        """Open the models and start the threads; `with` calls this method."""
        if self._closed:
            raise EngineClosedError(
                "The engine is closed and cannot be started again.", fix="create a new accel.Engine(...)."
            )
        if not self._queues:
            try:
                for name, source in self._sources.items():
                    self._opened[name] = self._open(source)
                    self._queues[name] = ModelQueue(name, self._opened[name], self.limits, self._observer)
            except BaseException:
                # Models that were opened before the failing one must be closed.
                self._release(drain=False)
                self._queues.clear()
                raise
            if self.shadow is not None:
                try:
                    self.shadow.start(self)
                except BaseException:
                    self._release(drain=False)
                    self._queues.clear()
                    raise
        return self

    def close(self, *, drain: bool = True) -> None:
        """Finish the accepted requests (with `drain=False`: refuse them), then close the models."""
        with self._making:
            self._closed = True
            generators, self._generators = self._generators, {}
        if self.shadow is not None:
            self.shadow.close()
        for generator in generators.values():
            generator.close(drain=drain)
        self._release(drain=drain)

    def _release(self, *, drain: bool) -> None:
        for queue in self._queues.values():
            queue.close(drain=drain)
        for name, models in self._opened.items():
            for model in models:
                # Do not close a model that the caller opened.
                if model is not self._sources[name]:
                    model.close()
        self._opened.clear()

    def replace(self, name: str, source: Source, **arguments: Any) -> None:
        """Answer the requests for a model with another model from now on. Accepted requests are finished by the earlier model.

        Args:
            name: Name of the model.
            source: The new model. Opening takes seconds; requests are answered by the earlier model meanwhile.
            **arguments: Arguments of `from_pretrained` that replace those of the engine, such as `backend`.

        Raises:
            ConfigError: The engine has no such model, or the new model lacks an operation of the earlier one.
            EngineClosedError: The engine is closed.
        """
        earlier = self._queue(name)
        models = self._open(source, **arguments)
        queue = ModelQueue(name, models, self.limits, self._observer)
        missing = sorted(set(earlier.operations) - set(queue.operations))
        if missing or self._closed:
            queue.close(drain=False)
            for model in models:
                if model is not source:
                    model.close()
            if self._closed:
                raise EngineClosedError("The engine is closed.", fix="create a new accel.Engine(...).")
            raise ConfigError(
                f"The new model for {name!r} does not support the operations {', '.join(missing)}.",
                fix="use a model for the same task.",
            )
        with self._making:
            self._queues[name], closing = queue, self._opened[name]
            self._opened[name], first = models, self._sources[name]
            self._sources[name] = source
            generator = self._generators.pop(name, None)
        if generator is not None:
            generator.close()
        earlier.close()
        for model in closing:
            if model is not first:
                model.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def observe(self, observer: Observer) -> None:
        """Set the observer of the engine.

        Raises:
            ConfigError: The engine has a different observer already.
        """
        if self._observer not in (None, observer):
            raise ConfigError(
                "The engine was created with observer=..., so the HTTP server cannot set its own observer for the metrics.",
                fix="create the engine without observer=...",
            )
        self._observer = observer
        for queue in self._queues.values():
            queue.observer = observer

    # The methods below return information about the models.

    @property
    def models(self) -> Mapping[str, ORTModel]:
        """The open models by name."""
        return {name: queue.model for name, queue in self._queues.items()}

    def operations(self, model: str | None = None) -> tuple[str, ...]:
        """Return the operations of a model: pipeline tasks, and names such as `embed` and `tensors`. For `generate`, call `generator`."""
        return tuple(self._queue(model).operations)

    def generator(self, model: str | None = None) -> GenerationEngine:
        """Return the engine that generates text for many callers at once; it is closed together with this engine.

        Raises:
            InputError: The model does not generate text.
        """
        queue = self._queue(model)
        with self._making:
            if self._closed:
                raise EngineClosedError("The engine is closed.", fix="create a new accel.Engine(...).")
            if queue.name not in self._generators:
                limits = GenerationLimits(
                    rows=min(self.limits.max_batch, 16),
                    queue=self.limits.max_queue,
                    max_new_tokens=self.limits.max_new_tokens,
                )
                self._generators[queue.name] = GenerationEngine(queue.model, limits=limits)
            return self._generators[queue.name]

    def pending(self, model: str | None = None) -> int:
        """Return the number of inputs that wait or run."""
        return self._queue(model).pending

    @property
    def wait_s(self) -> float:
        """Expected waiting time in the shortest queue, in seconds."""
        return min((queue.wait_s for queue in self._queues.values()), default=0.0)

    def _queue(self, model: str | None) -> ModelQueue:
        if not self._queues:
            raise EngineClosedError("The engine is not started.", fix="use `with accel.Engine(...) as engine`.")
        if model is None:
            if len(self._queues) > 1:
                raise ConfigError(
                    f"The engine has several models ({', '.join(self._queues)}), and the request does not name one of them.",
                    fix="pass the name of the model: model=...",
                )
            return next(iter(self._queues.values()))
        if model not in self._queues:
            raise ConfigError(
                f"The engine has no model {model!r}.{did_you_mean(model, self._queues)}",
                fix=f"use one of {', '.join(self._queues)}.",
            )
        return self._queues[model]

    # The methods below run requests.

    async def __call__(
        self,
        inputs: Any,
        *,
        model: str | None = None,
        operation: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        """Return the result for an input or a list of inputs, as the pipeline returns it.

        If the caller is cancelled, its rows that have not run yet are dropped.

        Args:
            inputs: Inputs of the pipeline; for `rank` a query and its documents, for `tensors` arrays by name.
            model: Name of the model; required if the engine has several models.
            operation: Name of an operation from `operations`; `None` means the model's own task.
            timeout_s: Timeout in seconds, instead of the engine's `timeout_s`.
            **options: Options of the pipeline.

        Raises:
            QueueFullError: The queue is full.
            RequestTimeoutError: There is no result after `timeout_s`.
            TaskError: The model does not support the operation.
        """
        job = self.submit(inputs, model=model, operation=operation, **options)
        return await self.answer(job, timeout_s)

    def run(
        self,
        inputs: Any,
        *,
        model: str | None = None,
        operation: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        """Run a request and wait for its result; like `__call__`, but without an event loop."""
        job = self.submit(inputs, model=model, operation=operation, **options)
        seconds = timeout_s if timeout_s is not None else self.limits.timeout_s
        try:
            return job.future.result(seconds)
        except concurrent.futures.TimeoutError as error:
            if job.future.done():
                raise
            raise _too_late(seconds) from error
        finally:
            # Drop the request after a timeout or an interrupt. This has no effect on a finished request.
            job.future.cancel()

    def submit(self, inputs: Any, *, model: str | None = None, operation: str | None = None, **options: Any) -> Job:
        """Put a request into the queue and return it: its `future` receives the result, and `timing` the seconds of each step.

        Raises:
            QueueFullError: The queue is full.
            TaskError: The model does not support the operation.
        """
        queue = self._queue(model)
        try:
            job = queue.submit(operation, inputs, options)
        except EngineClosedError:
            # `replace` may have closed this queue in the meantime.
            if self._queue(model) is queue:
                raise
            job = self._queue(model).submit(operation, inputs, options)
        if self.shadow is not None:
            self.shadow.copy(queue.name, job)
        return job

    async def answer(self, job: Job, timeout_s: float | None = None) -> Any:
        """Wait for the result of a submitted request and return it."""
        seconds = timeout_s if timeout_s is not None else self.limits.timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(job.future)
        except TimeoutError as error:
            if isinstance(error, RequestTimeoutError):
                raise
            raise _too_late(seconds) from error


def _too_late(seconds: float | None) -> RequestTimeoutError:
    return RequestTimeoutError(
        f"There was no result within {seconds:g} s, so the request was cancelled.",
        fix="use a longer timeout (timeout_s=...), or send fewer inputs at once.",
    )
