"""Commands that make and check artifacts: export, validate, optimize, quantize, convert."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from . import options
from .application import CommandResult, app, columns_of, pairs_of, subcommand

# Default number of timed calls and of calls before them, and default optimization level, of `accel convert`.
_MEASURES, _WARMUP, _LEVEL = 240, 10, "O2"
_LIST = "list"


@subcommand(app, epilog="Example: accel export distilbert/distilbert-base-uncased-finetuned-sst-2-english out/")
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, transformers folder, PEFT adapter or GGUF file.")
    ],
    out: options.Out,
    task: options.Task = None,
    backend: options.Backend = None,
    format: Annotated[
        str | None,
        typer.Option(help="Format of the exported graph. If omitted, onnx, or the named backend's own format."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights: float32, float16 or bfloat16.")] = "float32",
    opset: Annotated[int | None, typer.Option(help="ONNX opset; the exporter's default if omitted.")] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help="For embeddings, pooling added to the graph: mean, cls, max, last, weightedmean or mean_sqrt_len_tokens."
        ),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="For embeddings, normalize the vectors in the graph."),
    ] = None,
    output_hidden_states: Annotated[
        bool, typer.Option("--output-hidden-states", help="The graph also returns the hidden states of every layer.")
    ] = False,
    output_attentions: Annotated[
        bool, typer.Option("--output-attentions", help="The graph also returns the attentions of every layer.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="Option of the backend's exporter. Repeat the flag for several options."
        ),
    ] = None,
    atol: options.Atol = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Export a model, compare it with PyTorch on five shapes, and write an artifact."""
    from ..stages.export import export as run

    artifact = run(
        model,
        out,
        task=task,
        backend=backend,
        format=format,
        dtype=dtype,
        opset=opset,
        pooling=pooling,
        normalize=normalize,
        output_hidden_states=output_hidden_states,
        output_attentions=output_attentions,
        options=pairs_of(option, "--option", "profile=batch=1:8:32") or {},
        atol=atol,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    step = artifact.manifest.steps[-1]
    checked = step.validation
    compiled = "executed" in checked
    if compiled and not checked["executed"]:
        comparison = (
            "the compiled graphs were not run, because this machine has no device for them; to compare them on another machine: "
            f"accel validate {artifact.path.name} --backend {step.backend}"
        )
    else:
        comparison = (
            f"largest difference from {'the ONNX graph' if compiled else 'PyTorch'}: {checked['max_abs_difference']:.2g} (accepted: "
            f"{checked['tolerance']:.2g}, compared on {len(checked['shapes'])} shapes)"
        )
    return CommandResult(
        _described(artifact),
        f"{artifact.path}: {artifact.format}, {artifact.task}, {artifact.dtype}, {artifact.bytes / 1e6:.1f} MB\n{comparison}",
    )


@subcommand(
    app, epilog="Example: accel validate out/ --against distilbert/distilbert-base-uncased-finetuned-sst-2-english"
)
def validate(
    artifact: options.Artifact,
    against: Annotated[
        str | None, typer.Option(help="PyTorch model to compare with; the original model if omitted.")
    ] = None,
    backend: options.Backend = None,
    device: options.Device = None,
    atol: options.Atol = None,
    accept_files: Annotated[
        bool,
        typer.Option("--accept-files", help="First record the current config and tokenizer files in the manifest."),
    ] = False,
    here: Annotated[
        bool,
        typer.Option("--here", help="Compare with the stored outputs of PyTorch, without the PyTorch model."),
    ] = False,
    require_signature: options.RequireSignature = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Check the files of an artifact, and compare the artifact with its original PyTorch model."""
    from ..artifact.hub import HubOptions
    from ..artifact.manifest import Artifact as Folder
    from ..stages.validate import validate as run
    from ..stages.validate import validate_here

    options.require_signatures(require_signature)
    hub = HubOptions(trust_remote_code=trust_remote_code)
    if accept_files:
        Folder.accept_files(artifact)
    if here:
        for name, value in (("--against", against), ("--atol", atol)):
            if value is not None:
                raise ConfigError(
                    f"--here compares with stored outputs, so {name} has no effect.", fix=f"leave {name} or --here out."
                )
        return _probed(validate_here(artifact, backend=backend, device=device, hub=hub))
    result = run(artifact, against=against, backend=backend, device=device, atol=atol, hub=hub)
    verdict = "passed" if result.passed else "FAILED"
    lines = [
        f"{verdict}: largest difference from PyTorch {result.max_abs_difference:.3g}, accepted {result.tolerance:.3g}, "
        f"{len(result.shapes)} shapes, run by the backend {result.backend}"
    ]
    for form in result.forms:
        details = (
            form.error or f"largest difference from the plain call {form.difference:.2g}, accepted {form.tolerance:.2g}"
        )
        lines.append(f"  form {form.form}: {'used' if form.passed else 'NOT USED'}; {details}")
    return CommandResult(result, "\n".join(lines), failed=not result.passed)


def _probed(result: Any) -> CommandResult:
    """Return the result of `accel validate --here`."""
    lines = [f"{'passed' if result.passed else 'FAILED'}: probes run by the backend {result.backend} on this machine"]
    lines += [
        f"  {output.output}: differs from PyTorch by {output.difference:.2g} of its size, accepted {output.tolerance:.2g}"
        for output in result.outputs
    ]
    changed = [
        f"{name}: {result.measured.get(name, 'none')} -> {result.conditions.get(name, 'none')}"
        for name in dict.fromkeys((*result.measured, *result.conditions))
        if result.measured.get(name) != result.conditions.get(name)
    ]
    if changed:
        lines += ["different from where the artifact was made:", *(f"  {change}" for change in changed)]
    return CommandResult(result, "\n".join(lines), failed=not result.passed)


@subcommand(app, epilog="Example: accel adopt model-of-optimum/ --against org/model")
def adopt(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a graph, also of another tool.")],
    against: Annotated[str, typer.Option(help="PyTorch model to compare with.")],
    backend: options.Backend = None,
    atol: options.Atol = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Compare a folder of another tool, or of an earlier version, with PyTorch, and store probes in it."""
    from ..artifact.hub import HubOptions
    from ..stages.validate import adopt as run

    hub = HubOptions(trust_remote_code=trust_remote_code)
    result = run(folder, against=against, backend=backend, atol=atol, hub=hub)
    verdict = "passed, and stored probes" if result.passed else "FAILED, and stored nothing"
    return CommandResult(
        result,
        f"{verdict}: largest difference from PyTorch {result.max_abs_difference:.3g}, accepted {result.tolerance:.3g}, "
        f"{len(result.shapes)} shapes, run by the backend {result.backend}",
        failed=not result.passed,
    )


@subcommand(app, epilog="Example: accel sign out/ --key private.pem")
def sign(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of an artifact.")],
    key: Annotated[
        Path | None,
        typer.Option(
            help="Private key in PEM format. If omitted, your identity signs through Sigstore, over the network."
        ),
    ] = None,
    password: Annotated[str | None, typer.Option(envvar="ACCEL_SIGN_PASSWORD", help="Password of the key.")] = None,
) -> CommandResult:
    """Sign an artifact and statements of its origin, so that other machines can require the signature."""
    from ..artifact.signing import sign as run

    path = run(folder, key=key, password=password)
    return CommandResult({"path": path}, f"{path}: signed")


@subcommand(app, epilog="Example: accel optimize out/ out-o2/ --level O2")
def optimize(
    artifact: options.Artifact,
    out: options.Out,
    level: Annotated[str, typer.Option(help="Level: O1, O2 (fusions), O3 (approximations) or O4 (float16).")] = "O2",
    disable: Annotated[
        list[str] | None, typer.Option(help="Fusion to disable. Repeat the flag for several fusions.")
    ] = None,
    enable: Annotated[
        list[str] | None, typer.Option(help="Fusion to add. Repeat the flag for several fusions.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(help="Accepted absolute difference from the outputs of ARTIFACT.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="For O4: rows that test float16. Operators with values outside its range stay in float32."),
    ] = None,
    calibration_split: options.CalibrationSplit = None,
    column: options.Column = None,
    backend: options.Backend = None,
) -> CommandResult:
    """Rewrite a graph into a faster graph, and compare it with the original graph."""
    from ..stages.optimize import optimize as run

    optimized = run(
        artifact,
        out,
        calibration=calibration,
        calibration_split=calibration_split,
        columns=columns_of(column),
        backend=backend,
        level=level,
        disable=tuple(disable or ()),
        enable=tuple(enable or ()),
        atol=atol,
    )
    step = optimized.manifest.steps[-1]
    fused = {name: count for name, count in step.report.get("fused", {}).items() if count}
    return CommandResult(
        _described(optimized),
        f"{optimized.path}: {level}, {optimized.bytes / 1e6:.1f} MB\n"
        f"fused: {', '.join(f'{name} {count}' for name, count in fused.items()) or 'nothing'}\n"
        f"largest difference from the original graph: {step.validation['max_abs_difference']:.2g} "
        f"(accepted: {step.validation['tolerance']:.2g})",
    )


@subcommand(app, epilog="Example: accel quantize out/ out-int8/ --max-drop 0.3 --metric accuracy --data test.csv")
def quantize(
    artifact: options.Artifact,
    out: options.Out,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="dynamic-int8 (default), static-int8, weight-int8, weight-int4, ... With --max-drop, try only this scheme."
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="Processor to quantize for; auto detects this machine's processor.")
    ] = "auto",
    calibration: options.Calibration = None,
    calibration_split: options.CalibrationSplit = None,
    samples: Annotated[int | None, typer.Option(help="Maximum number of calibration rows (default: 256).")] = None,
    method: Annotated[
        str | None,
        typer.Option(help="How activation ranges are computed: minmax, moving_average, entropy or percentile."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Layer to keep in float, or re:EXPRESSION. Repeat the flag for several layers."),
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(help="Quantize only this operator type. Repeat the flag for several types.")
    ] = None,
    per_channel: Annotated[
        bool | None,
        typer.Option(
            "--per-channel/--per-tensor",
            help="One scale per output channel or per weight tensor; set by the preset if omitted.",
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Symmetric weights (zero point 0) or asymmetric weights; set by the preset if omitted.",
        ),
    ] = None,
    graph: Annotated[str | None, typer.Option("--format", help="For static-int8: qdq (default) or qoperator.")] = None,
    smooth_quant: Annotated[
        float | None,
        typer.Option(help="For static-int8: SmoothQuant exponent from 0 to 1, which moves outliers into the weights."),
    ] = None,
    percentile: Annotated[
        float | None,
        typer.Option(help="For --method percentile: percentage of values inside the range (default: 99.99)."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="For weight-int4: number of values that share a scale (default: 32).")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="For weight-int4, if the backend has it: rtn (default), hqq, awq, gptq, teq or autoround."),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="For weight-int4: fraction of the layers in 4 bits; the other layers get 8 bits (default: 1)."
        ),
    ] = None,
    scale_estimation: Annotated[
        bool | None,
        typer.Option(
            "--scale-estimation",
            help="For weight-int4, if the backend has it: fit the scales to the --calibration rows.",
        ),
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Accuracy budget: points of the metric that may be lost on --data.")
    ] = None,
    metric: options.Metric = None,
    data: Annotated[
        str | None, typer.Option(help="Labelled rows to measure accuracy: a file or a Hub data set.")
    ] = None,
    split: options.Split = None,
    column: options.Column = None,
    rows: Annotated[int | None, typer.Option(help="Maximum number of rows of --data.")] = None,
    max_length: options.MaxLength = None,
    batch_size: options.BatchSize = 1,
    backend: options.Backend = None,
) -> CommandResult:
    """Quantize a graph. With --max-drop, search for the fastest quantization that stays within the accuracy budget."""
    from ..tuning.quantize_within_budget import quantize as run

    all_settings: dict[str, Any] = {
        "scheme": scheme, "samples": samples, "operators": tuple(operator) if operator else None, "format": graph,
        "per_channel": per_channel, "symmetric": symmetric, "smooth_quant": smooth_quant, "percentile": percentile,
        "block_size": block_size, "algorithm": algorithm, "ratio": ratio, "scale_estimation": scale_estimation,
    }  # fmt: skip
    settings = {name: value for name, value in all_settings.items() if value is not None}
    quantized = run(
        artifact,
        out,
        calibration=calibration,
        calibration_split=calibration_split,
        method=method,
        max_drop=max_drop,
        metric=metric,
        data=data,
        columns=columns_of(column),
        split=split,
        rows=rows,
        batch_size=batch_size,
        max_length=max_length,
        backend=backend,
        preset=preset,
        exclude=tuple(exclude or ()),
        **settings,
    )
    return CommandResult(_described(quantized), _quantized(quantized))


def _described(artifact: Any) -> dict[str, Any]:
    return {"path": artifact.path, "digest": artifact.digest, "bytes": artifact.bytes, **artifact.manifest.to_dict()}


def _quantized(artifact: Any) -> str:
    """Return a description of a quantized artifact: its size, its accuracy, and the other attempts."""
    manifest = artifact.manifest
    step, quantization = manifest.steps[-1], manifest.quantization
    preset = f" ({quantization.preset})" if quantization.preset else ""
    lines = [f"{artifact.path}: {quantization.scheme}{preset}, {artifact.bytes / 1e6:.1f} MB"]
    accuracy = step.validation.get("accuracy")
    if accuracy is None:
        return f"{lines[0]}\nThe accuracy was not measured. To measure it, pass --data FILE or run `accel evaluate`."
    from ..measuring.accuracy.evaluation import rows_a_call
    from ..measuring.report import disturbed

    low, high = accuracy["drop_interval"]
    lines.append(
        f"{accuracy['metric']} {accuracy['value']:.4f}, {accuracy['float']:.4f} in float: loses {accuracy['drop']:.2f} points "
        f"(95 % interval {low:.2f} to {high:.2f}) on {accuracy['data']['n']} rows, {rows_a_call([accuracy['batch_size']])}"
    )
    search = step.report.get("search")
    if search is not None:
        from ..tuning.quantize_within_budget import Attempt

        lines += ["tried:", *(f"  {Attempt(**trial)}" for trial in search["table"])]
        if search["float_ms"] is not None:
            calls = f"{rows_a_call([search['batch_size']])}, of median length"
            lines += [f"float: {search['float_ms']:.2f} ms; {calls}", *disturbed(search)]
    return "\n".join(lines)


def _layouts() -> CommandResult:
    """Return the layouts of other libraries that installed backends write, with their variants."""
    from ..backends import registry

    layouts = {}
    for name in registry.written_layouts():
        spec, writer = registry.folder_writer(name)
        layouts[name] = {"backend": spec.name, "variants": list(writer.variants)}
    lines = [
        f"{name}: {', '.join(values['variants'])} (written by {values['backend']})" for name, values in layouts.items()
    ]
    return CommandResult({"layouts": layouts}, "\n".join(lines))


@subcommand(app, epilog="Example: accel convert org/model out/ -b 1 -s 16 -s 128 --quantize dynamic-int8")
def convert(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Hub id or transformers folder.")] = None,
    out: Annotated[Path | None, typer.Argument(metavar="OUT", help="Output folder.")] = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", help="Replaces the argument MODEL.")] = None,
    out_option: Annotated[Path | None, typer.Option("--output", "-o", help="Replaces the argument OUT.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch-size", "-b", help="Rows per call. Repeat the flag for several sizes. [default: 1]"),
    ] = None,
    sequence: Annotated[
        list[int] | None,
        typer.Option("--seq-len", "-s", help="Tokens per row. Repeat the flag for several lengths. [default: 16, 128]"),
    ] = None,
    backend: options.Backends = None,
    task: options.Task = None,
    optimize: Annotated[str, typer.Option(help="Optimization level, or `none`.")] = _LEVEL,
    quantize: Annotated[str | None, typer.Option(help="Quantization scheme; no quantization if omitted.")] = None,
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Write only one artifact, quantized with this scheme, for one --backend (default: that of ONNX). Nothing is timed."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Write one folder for another library, such as transformers.js. `--layout list` shows the layouts. Nothing is timed."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Variant of --layout to write; repeat the flag for several. [default: all]"),
    ] = None,
    calibration: options.Calibration = None,
    atol: options.Atol = None,
    nb_measures: Annotated[int, typer.Option(help="Number of timed calls for each variant and shape.")] = _MEASURES,
    warmup: Annotated[int, typer.Option(help="Number of calls before the timed calls.")] = _WARMUP,
    threads: options.Threads = None,
    revision: options.Revision = None,
    trust_remote_code: options.Trust = False,
) -> CommandResult:
    """Export, optimize and quantize a model for every backend, compare and time the results with PyTorch, and write a report."""
    from ..measuring.report import text_table
    from ..stages.folder_layouts import write_layout
    from ..tuning.conversion import convert as run
    from ..tuning.conversion import convert_to_scheme

    if layout == _LIST:
        return _layouts()
    if model is not None and out is None and model_option is not None:
        # In `accel convert -m MODEL OUT`, the only positional argument is the output folder.
        model, out = None, Path(str(model))
    for name, argument, option in (("MODEL", model, model_option), ("OUT", out, out_option)):
        if (argument is None) == (option is None):
            flag = "--model" if name == "MODEL" else "--output"
            problem = f"is set by the argument and by {flag}" if argument is not None else "is missing"
            raise ConfigError(f"{name} {problem}.", fix="run `accel convert MODEL OUT`.")
    single = "--layout" if layout is not None else "--scheme"
    if layout is not None or scheme is not None:
        values_by_flag: dict[str, object] = {
            "--quantize": quantize,
            "--batch-size": batch,
            "--seq-len": sequence,
            "--nb-measures": nb_measures != _MEASURES,
            "--warmup": warmup != _WARMUP,
            "--threads": threads,
            "a second --backend": len(backend or ()) > 1,
        }
        if layout is not None:
            others = {"--scheme": scheme, "--backend": backend, "--calibration": calibration, "--atol": atol}
            values_by_flag |= {**others, "--optimize": optimize != _LEVEL}
        unused = [flag for flag, value in values_by_flag.items() if value]
        if unused:
            raise ConfigError(
                f"{single} writes one folder and times nothing, so it cannot be used with {' and '.join(unused)}.",
                fix=f"leave {single} out to convert for several backends and to time the results. Otherwise leave out "
                f"{' and '.join(unused)}.",
            )
    if variant and layout is None:
        raise ConfigError("--variant names a variant of a layout, but there is no --layout.", fix="pass --layout NAME.")
    if layout is not None:
        folder = write_layout(
            str(model or model_option), Path(out or out_option or ""), layout=layout, variants=variant, task=task, revision=revision,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        values = {name: asdict(item) for name, item in folder.variants.items()}
        rows = [
            f"  {name}: {item.bytes / 1e6:,.1f} MB, differs from PyTorch by {item.max_abs_difference:.2g} (accepted: {item.tolerance:.2g}; "
            f"run on {item.compared_on})"
            for name, item in folder.variants.items()
        ]
        rows += [f"  {name} could not be written: {why}" for name, why in folder.failed.items()]
        return CommandResult(
            {"path": folder.path, "layout": layout, "variants": values, "failed": folder.failed},
            "\n".join((f"{folder.path}: {layout}", *rows)),
            failed=bool(folder.failed),
        )  # fmt: skip
    if scheme is not None:
        artifact = convert_to_scheme(
            str(model or model_option), Path(out or out_option or ""), scheme=scheme, backend=backend[0] if backend else None,
            task=task, level=None if optimize == "none" else optimize, calibration=calibration, atol=atol, revision=revision,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        return CommandResult(
            {"path": artifact.path, "scheme": scheme, "bytes": artifact.bytes},
            f"{artifact.path}: {scheme}, {artifact.bytes / 1e6:,.1f} MB",
        )
    conversion = run(
        str(model or model_option), Path(out or out_option or ""), backends=backend, task=task,
        level=None if optimize == "none" else optimize, scheme=quantize, calibration=calibration,
        batch=batch or (1,), sequence=sequence or (16, 128), atol=atol, nb_measures=nb_measures, warmup=warmup,
        threads=threads, revision=revision, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    values = conversion.benchmark.to_dict()
    failures = "".join(f"\n{name} could not be created: {why}" for name, why in conversion.failed.items())
    artifacts = {name: artifact.path for name, artifact in conversion.artifacts.items()}
    return CommandResult(
        {"path": conversion.path, "artifacts": artifacts, "failed": conversion.failed, "benchmark": values},
        f"{conversion.benchmark}\n\n{text_table(values)}{failures}\n{conversion.path}: {', '.join(artifacts)}, benchmark.json, report.html",
        failed=bool(conversion.failed) or any(variant.error for variant in conversion.benchmark.variants),
    )
