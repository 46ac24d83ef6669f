"""What `accel serve` counted itself while a load test ran: calls of the model, their rows and tokens, requests by status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .client import Client, Lost

_NAMES = {
    "accel_batch_rows_sum": "rows",
    "accel_batch_rows_count": "calls",
    "accel_inference_seconds_sum": "inference_s",
    "accel_batch_tokens_sum": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCount:
    """What a server counted.

    Attributes:
        requests: To the endpoint, by status.
        calls: Of the model.
        rows: In those calls.
        tokens: Likewise, padding counted.
        inference_s: All of them took.
    """

    requests: Mapping[str, int]
    calls: int = 0
    rows: int = 0
    tokens: int = 0
    inference_s: float = 0.0

    def since(self, before: ServerCount) -> ServerCount:
        """What was added."""
        statuses = {**before.requests, **self.requests}
        requests = {one: self.requests.get(one, 0) - before.requests.get(one, 0) for one in statuses}
        return ServerCount(
            requests={status: count for status, count in requests.items() if count},
            calls=self.calls - before.calls,
            rows=self.rows - before.rows,
            tokens=self.tokens - before.tokens,
            inference_s=self.inference_s - before.inference_s,
        )


async def read_metrics(client: Client, path: str) -> ServerCount | None:
    """The counters of a server; `None` of one that has none of ours."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return None
    try:
        reply = await client.request("GET", "/metrics")
    except (Lost, OSError):
        return None
    if reply.status != 200:
        return None
    # As the server's table of endpoints has it.
    label = "/v2/models/{model}/infer" if path.startswith("/v2/models/") else path
    sums = dict.fromkeys(_NAMES.values(), 0.0)
    requests: dict[str, int] = {}
    try:
        families = list(text_string_to_metric_families(reply.body.decode("utf-8", "replace")))
    except ValueError:
        return None
    if not any(family.name == "accel_requests" for family in families):
        return None
    for family in families:
        for sample in family.samples:
            if sample.name in _NAMES:
                sums[_NAMES[sample.name]] += sample.value
            elif sample.name == "accel_requests_total" and sample.labels["path"] == label:
                status = sample.labels["status"]
                requests[status] = requests.get(status, 0) + int(sample.value)
    return ServerCount(
        requests=requests, calls=int(sums["calls"]), rows=int(sums["rows"]), tokens=int(sums["tokens"]),
        inference_s=sums["inference_s"],
    )  # fmt: skip
