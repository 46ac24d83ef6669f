"""Settings for deploying an artifact to Triton."""

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
    """Settings for deploying an artifact to Triton.

    Attributes:
        name: Name of the model that clients call; `None` means the task's name with underscores.
        task: A pipeline task that the model supports, such as `zero-shot-classification`; `None` means the model's own task.
        layout: `text` writes a front model, which accepts texts, tokenizes all requests of a batch and calls the graph. `ensemble` writes a
            Triton ensemble of tokenizer, graph and computation of results, and pads each request separately. `graph` writes only the graph,
            whose inputs and outputs are tensors. `auto` is `text` for tasks with texts, and `graph` for other tasks.
        backend: Triton's backend for the graph; `auto` selects the default backend of the artifact's format.
        accelerator: Execution accelerator for the backend `onnxruntime`: `tensorrt` or `openvino`.
        accelerator_options: Options of the accelerator, with Triton's names.
        device: `cpu`, `cuda` (every GPU of the server) or `cuda:0`.
        instances: Number of graph instances on each device.
        front_instances: Number of front model instances, each in its own process.
        threads: Number of threads for one call of the graph; `None` means the runtime's default.
        max_batch_size: Greatest number of rows in a call.
        preferred_batch_sizes: Batch sizes that the dynamic batcher waits for, up to the queue delay.
        queue_delay_us: Microseconds that a request may wait for other requests to form a batch.
        queue_timeout_us: Microseconds after which a waiting request times out. `None` means no queue policy, because Triton stalled with a
            policy (server issue 8870).
        queue_size: Greatest number of waiting requests; `None` means no queue policy.
        max_length: Greatest number of tokens in a text; `None` means the model's limit.
        buckets: Lengths to which batches of texts are padded.
        profile: Smallest, usual and largest sizes of axes for TensorRT, such as `batch=1:8:32,sequence=1:64:128`.
        cache: Folder on the server for cached engines and kernel timings.
        warmup: Whether the graph runs a few shapes before the first request.
        versions: Which model versions are served: `latest` or `all`.
        version: Number of the version to write.
        parameters: Further parameters of the graph's backend, with Triton's names.
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
                    f"TritonConfig.{name} is {list(values)}, but it must contain positive numbers in increasing order.",
                    fix="pass increasing numbers, such as (16, 32, 64).",
                )
        if any(size > self.max_batch_size for size in self.preferred_batch_sizes):
            raise ConfigError(
                f"preferred_batch_sizes contains {self.preferred_batch_sizes[-1]}, which is larger than max_batch_size = "
                f"{self.max_batch_size}.",
                fix="use a larger max_batch_size or smaller preferred_batch_sizes.",
            )
        if self.accelerator_options and self.accelerator is None:
            raise ConfigError(
                f"accelerator_options is {dict(self.accelerator_options)}, but no accelerator is set.",
                fix="set accelerator='tensorrt' or accelerator='openvino', or leave accelerator_options out.",
            )
        if self.buckets and self.max_length is not None and self.buckets[-1] > self.max_length:
            raise ConfigError(
                f"buckets contains {self.buckets[-1]}, which is larger than max_length = {self.max_length}.",
                fix="use a larger max_length or smaller buckets.",
            )
