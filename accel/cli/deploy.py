"""Commands that write and check model repositories for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .application import CommandResult, app, pairs_of, subcommand

deploy_app = typer.Typer(
    help="Write and check a model repository for Triton Inference Server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(deploy_app, name="deploy")

Pairs = list[str] | None


@subcommand(deploy_app, epilog="Example: accel deploy triton out-int8/ repository/ --name intents --max-batch-size 64")
def triton(
    artifact: options.Artifact,
    out: options.Out,
    name: Annotated[
        str | None, typer.Option(help="Name of the model that clients call; the name of the task if omitted.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Pipeline task, such as zero-shot-classification.")] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="auto, text (a Python model tokenizes texts and calls the graph), ensemble, or graph (only tensors)."
        ),
    ] = "auto",
    backend: Annotated[
        str, typer.Option(help="Triton backend: auto, onnxruntime, openvino, tensorrt or python.")
    ] = "auto",
    accelerator: Annotated[
        str | None, typer.Option(help="Accelerator of Triton's onnxruntime backend: tensorrt or openvino.")
    ] = None,
    accelerator_option: Annotated[
        Pairs,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of the accelerator, with its name in Triton. Repeat the flag for several options.",
        ),
    ] = None,
    parameter: Annotated[
        Pairs,
        typer.Option(
            metavar="NAME=VALUE",
            help="Parameter of the Triton backend, with its name in Triton. Repeat the flag for several.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda (every GPU of the server) or cuda:0.")] = "cpu",
    instances: Annotated[int, typer.Option(help="Number of instances of the graph on each device.")] = 1,
    front_instances: Annotated[
        int, typer.Option(help="Number of processes of the Python model that tokenizes texts.")
    ] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one call of the graph; chosen by the runtime if omitted.")
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Maximum number of rows per call.")] = 32,
    preferred_batch_size: Annotated[
        list[int] | None,
        typer.Option(help="Batch size that Triton's batcher waits for. Repeat the flag for several sizes."),
    ] = None,
    queue_delay_us: Annotated[
        int, typer.Option(help="Time that a request waits for other requests of its batch, in microseconds.")
    ] = 0,
    queue_timeout_us: Annotated[
        int | None,
        typer.Option(help="Maximum time in the queue, in microseconds. Read docs/guides/triton.md before you set it."),
    ] = None,
    queue_size: Annotated[
        int | None,
        typer.Option(help="Maximum number of waiting requests. Read docs/guides/triton.md before you set it."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Maximum tokens per text; the model's limit if omitted.")
    ] = None,
    bucket: Annotated[
        list[int] | None, typer.Option(help="Length to which batches are padded. Repeat the flag for several lengths.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="For TensorRT: shapes min:opt:max, such as batch=1:8:32,sequence=1:64:128.")
    ] = "",
    cache: Annotated[
        str, typer.Option(help="Folder on the server that caches compiled engines and kernel timings.")
    ] = "/var/cache/accel-triton",
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Run the graph once before the server accepts requests.")
    ] = True,
    versions: Annotated[str, typer.Option(help="Versions that Triton serves: latest or all.")] = "latest",
    version: Annotated[int, typer.Option(help="Version number of the written model.")] = 1,
) -> CommandResult:
    """Write a model repository for Triton: the graph, and a Python model that accepts texts and returns results."""
    from ..deploying.triton import deploy

    written = deploy(
        artifact, out, name=name, task=task, layout=layout, backend=backend, accelerator=accelerator,
        accelerator_options=pairs_of(accelerator_option, "--accelerator-option", "trt_cuda_graph_enable=1") or {},
        parameters=pairs_of(parameter, "--parameter", "enable_mem_arena=0") or {}, device=device,
        instances=instances, front_instances=front_instances, threads=threads, max_batch_size=max_batch_size,
        preferred_batch_sizes=tuple(preferred_batch_size or ()), queue_delay_us=queue_delay_us,
        queue_timeout_us=queue_timeout_us, queue_size=queue_size, max_length=max_length,
        buckets=tuple(bucket or ()), profile=profile, cache=cache, warmup=warmup,
        versions=versions, version=version,
    )  # fmt: skip
    rows = [f"  {model}  ({kind})" for model, kind in written.models.items()]
    return CommandResult(
        written,
        "\n".join(
            [
                f"{written.path}: {written.task} as {written.name}, layout {written.layout}",
                *rows,
                f"check it: accel deploy check {written.path}",
                f"start it: tritonserver --model-repository={written.path}",
            ]
        ),
    )


@subcommand(deploy_app, epilog="Example: accel deploy check repository/")
def check(
    repository: Annotated[Path, typer.Argument(metavar="OUT", help="Folder made by `accel deploy triton`.")],
) -> CommandResult:
    """Check the files of a model repository for Triton, and print each problem with a fix."""
    from ..deploying import triton as target

    findings = target.check(repository)
    text = "\n".join(map(str, findings)) or f"{repository}: no problem found in the files"
    return CommandResult({"path": repository, "findings": findings}, text, failed=bool(findings))
