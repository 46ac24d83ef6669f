"""How much an engine takes at once."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..config import check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much an engine takes at once, for each model.

    Attributes:
        max_batch: Rows in one call of the model.
        max_batch_tokens: Tokens in one call, padding counted.
        max_queue: Inputs that may wait or be computed; when there are as many, the next request is refused.
        max_wait_s: A request that would wait longer than this, as it looks when it comes, is refused; `None`: `max_queue` alone decides.
        timeout_s: A request that is not answered by then is dropped; `None`: never.
        max_new_tokens: Tokens of an answer that a request may ask for; `None`: as many as the caches hold.
    """

    max_batch: int = 64
    max_batch_tokens: int = 16384
    max_queue: int = 512
    max_wait_s: float | None = None
    timeout_s: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            check_number(field.name, getattr(self, field.name), above=0)
