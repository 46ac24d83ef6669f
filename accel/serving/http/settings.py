"""What a server lets in."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server lets in.

    Attributes:
        max_body_bytes: Of a request; larger ones get 413.
        max_client_batch: Inputs in one request; more get 422.
        api_keys: Keys of which a request needs one (`Authorization: Bearer ...`); empty: anybody may call.
        drain_s: How long a server that was told to end waits for requests that it accepted.
        linger_s: How long it goes on refusing new ones politely before it closes its door.
    """

    max_body_bytes: int = 8 << 20
    max_client_batch: int = 256
    api_keys: tuple[str, ...] = ()
    drain_s: float = 60.0
    linger_s: float = 0.5

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1 or self.max_client_batch < 1:
            raise ConfigError("max_body_bytes and max_client_batch are at least 1.", fix="use larger ones.")
        if not all(self.api_keys):
            raise ConfigError("An API key is empty.", fix="leave it out, or give it a value.")
