"""Commands that write and check model repositories for other servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .application import CommandResult, app, pairs_of, subcommand

deploy_app = typer.Typer(
    help="Write what another server runs, and check it: Triton Inference Server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.add_typer(deploy_app, name="deploy")

Pairs = list[str] | None


@subcommand(deploy_app, epilog="Example: accel deploy triton out-int8/ repository/ --name intents --max-batch-size 64")
def triton(
    artifact: options.Artifact,
    out: options.Out,
    name: Annotated[str | None, typer.Option(help="Of the model that clients call; the task's when left out.")] = None,
    task: Annotated[str | None, typer.Option(help="Pipeline task, such as zero-shot-classification.")] = None,
    layout: Annotated[
        str, typer.Option(help="auto, text (a front that batches), ensemble, or graph (tensors alone).")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="Triton's: auto, onnxruntime, openvino, tensorrt or python.")] = "auto",
    accelerator: Annotated[str | None, typer.Option(help="Of onnxruntime: tensorrt or openvino.")] = None,
    accelerator_option: Annotated[
        Pairs, typer.Option(metavar="NAME=VALUE", help="An option of the accelerator, by Triton's name; repeat.")
    ] = None,
    parameter: Annotated[
        Pairs, typer.Option(metavar="NAME=VALUE", help="A parameter of the graph's backend, by Triton's name; repeat.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda (every GPU of the server) or cuda:0.")] = "cpu",
    instances: Annotated[int, typer.Option(help="Copies of the graph, on each device.")] = 1,
    front_instances: Annotated[int, typer.Option(help="Copies of the front, each a process.")] = 1,
    threads: Annotated[int | None, typer.Option(help="Threads of a call of the graph; the runtime's choice.")] = None,
    max_batch_size: Annotated[int, typer.Option(help="Rows of a call at most.")] = 32,
    preferred_batch_size: Annotated[
        list[int] | None, typer.Option(help="Rows that the batcher waits for; repeat.")
    ] = None,
    queue_delay_us: Annotated[int, typer.Option(help="How long a request waits for others, microseconds.")] = 0,
    queue_timeout_us: Annotated[
        int | None, typer.Option(help="How long a request waits at all; see the guide before setting it.")
    ] = None,
    queue_size: Annotated[int | None, typer.Option(help="Requests that may wait; likewise.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a text at most; the model's when left out.")] = None,
    bucket: Annotated[list[int] | None, typer.Option(help="A length that batches are padded up to; repeat.")] = None,
    profile: Annotated[str, typer.Option(help="Of TensorRT: batch=1:8:32,sequence=1:64:128.")] = "",
    cache: Annotated[
        str, typer.Option(help="Folder on the server for engines and kernel times.")
    ] = "/var/cache/accel-triton",
    warmup: Annotated[
        bool, typer.Option("--warmup/--no-warmup", help="Run the graph before it takes requests.")
    ] = True,
    versions: Annotated[str, typer.Option(help="Versions that are served: latest or all.")] = "latest",
    version: Annotated[int, typer.Option(help="Number of the version that is written.")] = 1,
) -> CommandResult:
    """Write a model repository for Triton: the graph, and a front that takes texts and answers with what they mean."""
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
    """Compare a model repository with what `accel deploy triton` writes: every difference, each with its remedy."""
    from ..deploying import triton as target

    findings = target.check(repository)
    text = "\n".join(map(str, findings)) or f"{repository}: nothing is wrong with its files"
    return CommandResult({"path": repository, "findings": findings}, text, failed=bool(findings))
