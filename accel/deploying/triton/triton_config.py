"""How an artifact is deployed to Triton."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ...config import JsonConfig, check_number
from ...errors import ConfigError
from .model_config import check_name

Layout = Literal["auto", "text", "ensemble", "graph"]
Server = Literal["auto", "onnxruntime", "openvino", "tensorrt", "python"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonConfig(JsonConfig):
    """How an artifact is deployed to Triton.

    Attributes:
        name: Of the model that clients call; the task's, with underscores, when `None`.
        task: A pipeline task that the artifact's model serves, such as `zero-shot-classification`; its own when `None`.
        layout: `text`: a front model takes texts, tokenizes all requests of a batch and calls the graph once. `ensemble`:
            Triton's own chain of tokenizer, graph and answers, one request at a time. `graph`: tensors in, tensors out.
            `auto` is `text` where the task has texts, else `graph`.
        backend: Triton's backend for the graph; `auto` is the format's own.
        accelerator: Of the backend `onnxruntime`: `tensorrt` or `openvino`.
        accelerator_options: Its own options, by Triton's names.
        device: `cpu`, `cuda` (every GPU of the server) or `cuda:0`.
        instances: Copies of the graph that run at once, on each device.
        front_instances: Copies of the front model, each a process of its own.
        threads: That work on one call of the graph; the runtime's choice when `None`.
        max_batch_size: Rows of a call at most.
        preferred_batch_sizes: That the batcher waits for within the delay.
        queue_delay_us: How long a request may wait for others, in microseconds.
        queue_timeout_us: How long a request may wait at all; no queue policy when `None` (a policy made Triton stall:
            server issue 8870).
        queue_size: Requests that may wait; no queue policy when `None`.
        max_length: Tokens of a text at most; the model's own limit when `None`.
        buckets: Lengths that batches of texts are padded up to.
        profile: Sizes of axes for TensorRT, least, usual and most: `batch=1:8:32,sequence=1:64:128`.
        cache: Folder on the server where engines and measured kernel times are kept.
        warmup: Whether the graph runs once for each of a few shapes before it takes requests.
        versions: Which of the versions in the folder are served: `latest` or `all`.
        version: Number of the version that is written.
        parameters: Further parameters of the graph's backend, by Triton's names.
    """

    name: str | None = None
    task: str | None = None
    layout: Layout = "auto"
    backend: Server = "auto"
    accelerator: Literal["tensorrt", "openvino"] | None = None
    accelerator_options: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    instances: int = 1
    front_instances: int = 1
    threads: int | None = None
    max_batch_size: int = 32
    preferred_batch_sizes: tuple[int, ...] = ()
    queue_delay_us: int = 0
    queue_timeout_us: int | None = None
    queue_size: int | None = None
    max_length: int | None = None
    buckets: tuple[int, ...] = ()
    profile: str = ""
    cache: str = "/var/cache/accel-triton"
    warmup: bool = True
    versions: Literal["latest", "all"] = "latest"
    version: int = 1
    parameters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super(TritonConfig, self).__post_init__()
        if self.name is not None:
            check_name(self.name)
        least = {"instances": 1, "front_instances": 1, "threads": 1, "max_batch_size": 1, "queue_delay_us": 0,
                 "queue_timeout_us": 1, "queue_size": 1, "max_length": 3, "version": 1}  # fmt: skip
        for name, smallest in least.items():
            check_number(f"TritonConfig.{name}", getattr(self, name), smallest)
        for name in ("buckets", "preferred_batch_sizes"):
            values = getattr(self, name)
            if any(value < 1 for value in values) or list(values) != sorted(set(values)):
                raise ConfigError(
                    f"TritonConfig.{name} is {list(values)}.", fix="use rising positive numbers, such as (16, 32, 64)."
                )
        if any(size > self.max_batch_size for size in self.preferred_batch_sizes):
            raise ConfigError(
                f"A preferred batch size of {self.preferred_batch_sizes[-1]} is above max_batch_size {self.max_batch_size}.",
                fix="raise max_batch_size.",
            )
        if self.accelerator_options and self.accelerator is None:
            raise ConfigError("accelerator_options without an accelerator.", fix="name one: accelerator='tensorrt'.")
        if self.buckets and self.max_length is not None and self.buckets[-1] > self.max_length:
            raise ConfigError(
                f"The bucket {self.buckets[-1]} is above max_length {self.max_length}.", fix="use shorter buckets."
            )
