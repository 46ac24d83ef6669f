"""What a server lets in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...config import check_number
from ...errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/\s*]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server lets in.

    Attributes:
        max_body_bytes: Of a request; larger ones get 413.
        max_client_batch: Inputs in one request; more get 422.
        max_text_chars: Letters of all texts in one request; more get 413. A tokenizer reads a text of any length before it can say that the
            model does not, and the model waits meanwhile.
        api_keys: Keys of which a request needs one (`Authorization: Bearer ...`); empty: anybody may call.
        cors_origins: Origins whose pages may call from a browser, such as `https://app.example.org`, or `*`; empty: none.
        body_timeout_s: How long a request's body may take to arrive; then it gets 408.
        drain_s: How long a server that was told to end waits for requests that it accepted.
        linger_s: How long it goes on refusing new ones politely before it closes its door.
    """

    max_body_bytes: int = 8 << 20
    max_client_batch: int = 256
    max_text_chars: int = 1 << 20
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    body_timeout_s: float = 30.0
    drain_s: float = 60.0
    linger_s: float = 0.5

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_client_batch", "max_text_chars"):
            check_number(name, getattr(self, name), 1)
        check_number("body_timeout_s", self.body_timeout_s, above=0)
        if not all(self.api_keys):
            raise ConfigError("An API key is empty.", fix="leave it out, or give it a value.")
        if not all(key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ConfigError(
                "An API key has letters that a header does not carry as they are.",
                fix="use printable ASCII without outer spaces.",
            )
        for one in self.cors_origins:
            if one != "*" and not _ORIGIN.match(one):
                raise ConfigError(
                    f"{one!r} is no origin.", fix="write it like https://app.example.org, without a path."
                )
