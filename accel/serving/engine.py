"""`accel.Engine`: many callers, few calls of the model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self, SupportsIndex

from ..config import SessionOptions
from ..errors import ConfigError, EngineClosedError, RequestTimeoutError, did_you_mean
from ..models.base import ORTModel
from .continuous_batching.generation_engine import GenerationEngine
from .continuous_batching.scheduler import GenerationLimits
from .job import Job
from .model_queue import Limits, ModelQueue, Observer
from .worker_models import Source, WorkerSettings, close_all, named, open_all


class Engine:
    """Answers many callers at once with few calls of the model.

    What waits when the model is free runs together: rows of like lengths, within a budget of tokens. There is no delay to tune.
    Answers look exactly like those of `accel.pipeline`. An engine may be called from any number of tasks and threads.

        async with accel.Engine("model-int8/") as engine:
            answers = await asyncio.gather(*(engine(text) for text in texts))

        with accel.Engine("model-int8/") as engine:
            answer = engine.run("I lost my card")

    Args:
        models: Hub id, folder, artifact or `ORTModelFor...`; a list of them; or a mapping, names first.
        workers: Sessions a model; they share the processors, and their threads do not spin between calls, unless `session_options` says
            otherwise.
        task: For folders that do not tell.
        backend, device, session_options, revision, token, trust_remote_code: As in `from_pretrained`.
        processors: That the models share; all that the process may use when `None`.
        max_batch: Rows in one call of the model.
        max_batch_tokens: Tokens in one call, padding counted.
        max_queue: Inputs that may wait or be computed; when there are as many, the next request is refused.
        max_wait_s: A request that would wait longer than this, as it looks when it comes, is refused.
        timeout_s: A request that is not answered by then is dropped.
        max_new_tokens: Tokens of a generated answer that a request may ask for; as many as the caches hold when `None`.
        observer: Told of every call of a model and of every request.

    Raises:
        ConfigError: A limit or a number of workers that cannot work.
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
    ) -> None:
        self._sources = named(models)
        arguments = {
            "task": task, "backend": backend, "device": device, "session_options": session_options, "revision": revision,
            "token": token, "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        self._worker_settings = WorkerSettings(workers=workers, processors=processors, arguments=arguments)
        self.limits = Limits(
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
            "An Engine runs threads, which cannot be pickled or copied.",
            fix="pickle the model, and start accel.Engine(model) in the other process.",
        )

    # Lifetime

    def start(self) -> Self:
        """Open the models and start the threads: what `with` does."""
        if self._closed:
            raise EngineClosedError("The engine was closed.", fix="make another one.")
        if not self._queues:
            try:
                for name, source in self._sources.items():
                    self._opened[name] = open_all(source, self._worker_settings)
                    self._queues[name] = ModelQueue(name, self._opened[name], self.limits, self._observer)
            except BaseException:
                # Those before the one that fails are open, and nobody else closes them.
                self._release(drain=False)
                self._queues.clear()
                raise
        return self

    def close(self, *, drain: bool = True) -> None:
        """Answer what was accepted (or refuse it, without `drain`), and give the runtimes' memory back."""
        with self._making:
            self._closed = True
            generators, self._generators = self._generators, {}
        for generator in generators.values():
            generator.close(drain=drain)
        self._release(drain=drain)

    def _release(self, *, drain: bool) -> None:
        for queue in self._queues.values():
            queue.close(drain=drain)
        for name, models in self._opened.items():
            close_all(self._sources[name], models)
        self._opened.clear()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def observe(self, observer: Observer) -> None:
        """Tell this one of every call of a model and of every request from now on.

        Raises:
            ConfigError: Another one is told.
        """
        if self._observer not in (None, observer):
            raise ConfigError("The engine has an observer.", fix="make the engine without one.")
        self._observer = observer
        for queue in self._queues.values():
            queue.observer = observer

    # What there is

    @property
    def models(self) -> Mapping[str, ORTModel]:
        """The opened models by name."""
        return {name: queue.model for name, queue in self._queues.items()}

    def operations(self, model: str | None = None) -> tuple[str, ...]:
        """What can be asked of a model: pipeline tasks, and words such as `embed` and `tensors`; `generate` of its `generator`."""
        return tuple(self._queue(model).operations)

    def generator(self, model: str | None = None) -> GenerationEngine:
        """Continuous batching of a generating model: tokens of many callers, as they are made. Open as long as the engine.

        Raises:
            InputError: The model does not continue text.
        """
        queue = self._queue(model)
        with self._making:
            if self._closed:
                raise EngineClosedError("The engine was closed.", fix="make another one.")
            if queue.name not in self._generators:
                limits = GenerationLimits(
                    rows=min(self.limits.max_batch, 16),
                    queue=self.limits.max_queue,
                    max_new_tokens=self.limits.max_new_tokens,
                )
                self._generators[queue.name] = GenerationEngine(queue.model, limits=limits)
            return self._generators[queue.name]

    def pending(self, model: str | None = None) -> int:
        """Inputs that wait or are computed."""
        return self._queue(model).pending

    @property
    def wait_s(self) -> float:
        """How long a request that comes now waits at least, as it looks: in the shortest queue."""
        return min((queue.wait_s for queue in self._queues.values()), default=0.0)

    def _queue(self, model: str | None) -> ModelQueue:
        if not self._queues:
            raise EngineClosedError("The engine was not started.", fix="use `with accel.Engine(...) as engine`.")
        if model is None:
            if len(self._queues) > 1:
                raise ConfigError(
                    f"The engine has several models: {', '.join(self._queues)}.", fix="say which: model=..."
                )
            return next(iter(self._queues.values()))
        if model not in self._queues:
            raise ConfigError(
                f"There is no model {model!r}.{did_you_mean(model, self._queues)}",
                fix=f"use one of {', '.join(self._queues)}.",
            )
        return self._queues[model]

    # Asking

    async def __call__(
        self,
        inputs: Any,
        *,
        model: str | None = None,
        operation: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        """The answer to an input, or to a list of them, as the pipeline gives it.

        A caller that is cancelled frees its place: what was not computed yet is dropped.

        Args:
            inputs: What the pipeline takes; for `rank` a query and its documents, for `tensors` arrays by name.
            model: Which one, of several.
            operation: See `operations`; the model's own task when `None`.
            timeout_s: Instead of the engine's.
            **options: Of the pipeline.

        Raises:
            QueueFullError: Too much is waiting.
            RequestTimeoutError: Not in time.
            TaskError: The model does not do the operation.
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
        """The same for callers without an event loop; blocks."""
        job = self.submit(inputs, model=model, operation=operation, **options)
        seconds = timeout_s if timeout_s is not None else self.limits.timeout_s
        try:
            return job.future.result(seconds)
        except concurrent.futures.TimeoutError as error:
            if job.future.done():
                raise
            raise _too_late(seconds) from error
        finally:
            # Not in time, or interrupted: nobody waits for it.
            job.future.cancel()

    def submit(self, inputs: Any, *, model: str | None = None, operation: str | None = None, **options: Any) -> Job:
        """Put a request into the queue: its `future` gets the answer, its `timing` tells how long what took.

        Raises:
            QueueFullError: Too much is waiting.
            TaskError: The model does not do the operation.
        """
        return self._queue(model).submit(operation, inputs, options)

    async def answer(self, job: Job, timeout_s: float | None = None) -> Any:
        """Wait for a request that was submitted."""
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
        f"There was no answer within {seconds:g} s, and the request was dropped.",
        fix="give it more time (timeout_s=...), or send less at once.",
    )
