"""`accel verify`: audit a server against a model, and write the result as a table or a page."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .. import progress
from ..errors import ConfigError
from ..interfaces.task_registry import task_spec
from ..measuring.report import page
from .checks import TOLERANCES, ChatAudit, Check, TextAudit
from .references import ChatReference, EmbeddingReference, LabelReference, RelevanceReference
from .requests import ChatClient, Connection, embedding_client, label_client, relevance_client

Subject = Literal["embed", "classify", "rerank", "chat"]
SUBJECTS: tuple[Subject, ...] = ("embed", "classify", "rerank", "chat")
"""What a server computes: embeddings, classes, relevance scores or chats."""
_QUERY = "how do I get a new card?"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        url: The server.
        model: The model of the comparison.
        subject: What was compared: `embed`, `classify`, `rerank` or `chat`.
        api: The API, and the path of the endpoint.
        reference: The library that computed the expected answers.
        dtype: The data type whose rounding is accepted.
        tolerance: Largest accepted difference.
        checks: The checks.
        seconds: Duration in seconds.
    """

    url: str
    model: str
    subject: str
    api: str
    reference: str
    dtype: str
    tolerance: float
    checks: tuple[Check, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "passed": self.passed}

    def __str__(self) -> str:
        rows = [("check", "result", "difference", "cosine", ""), *(_row(check) for check in self.checks)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows
        ]
        failed = [check.name for check in self.checks if check.passed is False]
        verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
        return "\n".join(
            [f"{self.url} ({self.api}) against {self.model} ({self.reference}, {self.dtype})", *lines, verdict]
        )

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as an HTML page that needs no other file."""
        cells = "".join(
            f"<tr><td>{html.escape(row[0])}</td><td class=text>{html.escape(row[1])}</td><td>{row[2]}</td><td>{row[3]}</td>"
            f"<td class=text>{html.escape(row[4])}</td></tr>"
            for row in map(_row, self.checks)
        )
        facts = (
            f"{self.url}, {self.api}, compared with {self.model} ({self.reference}). Accepted difference {self.tolerance:g} "
            f"({self.dtype}). {self.seconds:.1f} s."
        )
        heading = "The server passed" if self.passed else "The server failed"
        parts = [
            f"<h1>{heading}</h1><p class=note>{html.escape(facts)}</p><div class=scroll><table><tr><th>check</th><th class=text>result</th>"
            f"<th>difference</th><th>cosine</th><th class=text>detail</th></tr>{cells}</table></div>"
        ]
        Path(path).write_text(page(parts, title="accel verify"), encoding="utf-8")


def _row(check: Check) -> tuple[str, str, str, str, str]:
    result = {True: "passed", False: "FAILED", None: "not checked"}[check.passed]
    difference = "" if check.difference is None else f"{check.difference:.2g}"
    cosine = "" if check.cosine is None else f"{check.cosine:.6f}"
    return check.name, result, difference, cosine, check.detail


def verify(
    url: str,
    *,
    against: str | os.PathLike[str],
    subject: Subject | None = None,
    name: str | None = None,
    dtype: str = "float32",
    concurrency: int = 8,
    api_key: str | None = None,
    trust_remote_code: bool = False,
) -> AuditReport:
    """Compare the answers of a server with those of a PyTorch model. Takes seconds to two minutes.

    Args:
        url: The server's URL, or the URL of an endpoint (for Triton: `http://HOST:PORT/v2/models/NAME`).
        against: The PyTorch model: a transformers or sentence-transformers folder, or a Hub id.
        subject: What the server computes; inferred from the model when `None`.
        name: The server's name of the model; the first that the server lists when `None`.
        dtype: Data type in which the server computes. It decides which rounding errors are accepted.
        concurrency: Number of requests at the same time.
        api_key: Key of the server.
        trust_remote_code: Whether Python code of the model may run.

    Raises:
        ConfigError: An argument is invalid, or the subject cannot be inferred.
        ServingError: The server does not answer, or has no endpoint for the subject.
        ArtifactNotFoundError: The model does not exist.
    """
    import accel

    from ..stages.resolution import resolve

    if dtype not in TOLERANCES:
        raise ConfigError(f"dtype is {dtype!r}.", fix=f"use one of {', '.join(TOLERANCES)}.")
    if concurrency < 1:
        raise ConfigError(f"concurrency is {concurrency}.", fix="use a number of at least 1.")
    if subject is not None and subject not in SUBJECTS:
        raise ConfigError(f"The subject is {subject!r}.", fix=f"use one of {', '.join(SUBJECTS)}.")
    started = time.perf_counter()
    connection = Connection(url, api_key=api_key)
    if subject is None:
        task = resolve(against).task
        subject = next((option for option in SUBJECTS if option == task_spec(task).audit), None)
        if subject is None:
            raise ConfigError(
                f"accel cannot audit a server of the task {task!r}.",
                fix=f"pass --task with one of {', '.join(SUBJECTS)}.",
            )

    def load(class_name: str) -> Any:
        arguments = {"backend": "pytorch", "trust_remote_code": trust_remote_code}
        return getattr(accel, class_name).from_pretrained(against, **arguments)

    tolerance = TOLERANCES[dtype]
    progress.report("computing answers with PyTorch and asking the server", 0, 1)
    run, api, source = _prepared(subject, connection, name, load, str(against), tolerance, concurrency)
    checks = run()
    progress.report("compared", 1, 1)
    return AuditReport(
        url=url, model=str(against), subject=subject, api=api, reference=source, dtype=dtype, tolerance=tolerance,
        checks=tuple(checks), seconds=round(time.perf_counter() - started, 2),
    )  # fmt: skip


def _prepared(
    subject: Subject,
    connection: Connection,
    name: str | None,
    load: Callable[[str], Any],
    model: str,
    tolerance: float,
    concurrency: int,
) -> tuple[Callable[[], Sequence[Check]], str, str]:
    """Return a function that runs the checks, the name of the API, and the library that computes the expected answers."""
    if subject == "chat":
        chat = ChatClient(connection, name)
        chat_reference = ChatReference(load)
        return (
            ChatAudit(chat, chat_reference, concurrency=concurrency).run,
            f"openai {chat.path}",
            chat_reference.source,
        )
    reference: EmbeddingReference | LabelReference | RelevanceReference
    if subject == "embed":
        client = embedding_client(connection, name)
        reference = EmbeddingReference(model, load)
    elif subject == "classify":
        reference = labels = LabelReference(load)
        client = label_client(connection, name, labels.labels)
    else:
        client = relevance_client(connection, name, _QUERY)
        reference = RelevanceReference(load, _QUERY)
    audit = TextAudit(client, reference, directions=subject == "embed", tolerance=tolerance, concurrency=concurrency)
    return audit.run, f"{client.dialect} {client.path}", reference.source
