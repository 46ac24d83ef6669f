"""Settings of a server: limits, API keys and CORS origins."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...config import check_number
from ...errors import ConfigError

_ORIGIN = re.compile(r"https?://[^/\s*]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server: limits, API keys and CORS origins.

    Attributes:
        max_body_bytes: Greatest size of a request body in bytes; larger bodies get 413.
        max_client_batch: Greatest number of inputs in one request; requests with more inputs get 422.
        max_text_chars: Greatest number of characters of all texts in one request; longer requests get 413. This limit exists because a
            tokenizer must read a text completely before the number of tokens is known, while the model waits.
        api_keys: Accepted API keys (`Authorization: Bearer ...`); empty: no key is required.
        cors_origins: Origins whose web pages may send requests from a browser, such as `https://app.example.org`, or `*`; empty: none.
        body_timeout_s: Seconds within which a request body must arrive; slower requests get 408.
        drain_s: Seconds that the server waits for accepted requests after a signal.
        linger_s: Seconds that the server responds to new requests with 503 before it closes its socket.
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
            raise ConfigError("One of the API keys is empty.", fix="remove the empty key, or set it to a text.")
        if not all(key.isascii() and key.isprintable() and key == key.strip() for key in self.api_keys):
            raise ConfigError(
                "An API key contains characters that are not allowed in an HTTP header.",
                fix="use only printable ASCII characters, without a space at the start or the end.",
            )
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.match(origin):
                raise ConfigError(
                    f"{origin!r} is not a valid CORS origin.",
                    fix="write the scheme and the host without a path, such as https://app.example.org.",
                )
