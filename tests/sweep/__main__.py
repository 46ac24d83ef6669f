"""Command line of the sweep over all model architectures: `python -m tests.sweep`. The option `--help` lists its
options.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

# Use one thread in each process. torch reads these variables when it is imported, so set them first.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
if "--artifacts" not in sys.argv:
    # Hide GPUs: tracing looks for GPUs, and a process that has initialized CUDA cannot be forked.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CI", "true")  # disables the telemetry of OpenVINO and NNCF

_JSON, _PAGE = Path("benchmarks/sweep.json"), Path("docs/models.md")
_EXAMPLES = """examples:
  python -m tests.sweep                                  everything that is not known yet; writes the JSON and the page
  python -m tests.sweep --only 'bert/*' --only llama     some architectures
  python -m tests.sweep --tasks text-classification --backends cpu
  python -m tests.sweep --jobs 64 --shard 1/4            the first quarter of the architectures
  python -m tests.sweep --stages rows,rows-int8          rows of a batch recomputed alone, and nothing else
  python -m tests.sweep --build-only                     which small models can be built at all, in a minute
  python -m tests.sweep --page-only                      the page again, from the JSON
  python -m tests.sweep --merge part1.json part2.json    the shards' files into one, and the page
  python -m tests.sweep --export-to DIR                  what a machine with a GPU needs
  python -m tests.sweep --artifacts DIR --backends cuda  on that machine
  python -m tests.sweep --backends tensorrt-rtx          float16 engines, built without a GPU and not run
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    argument_parser = argparse.ArgumentParser(
        prog="python -m tests.sweep",
        description="Every architecture of transformers, through every backend that is here, compared with PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    add = argument_parser.add_argument
    add(
        "--only", action="append", default=[], metavar="PATTERN", help="architectures, or architecture/task; repeatable"
    )
    add("--tasks", default="", metavar="A,B", help="tasks; all of them by default")
    add("--backends", default="", metavar="A,B", help="backends; cpu, and openvino where it is installed")
    add("--stages", default="", metavar="A,B", help="stages, such as rows,rows-int8; all of them by default")
    add("--jobs", type=int, default=processors, metavar="N", help="processes at a time (default: %(default)s)")
    add("--limit-seconds", type=float, default=240.0, metavar="S", help="for one stage (default: %(default)g)")
    add("--shard", default="1/1", metavar="I/N", help="this part of the architectures")
    add("--json", type=Path, default=_JSON, metavar="FILE", help="what is known (default: %(default)s)")
    add("--page", type=Path, default=_PAGE, metavar="FILE", help="the page (default: %(default)s)")
    add("--fresh", action="store_true", help="try again what was made with this very code, too")
    add("--build-only", action="store_true", help="build the small models and ask PyTorch, write nothing")
    add("--page-only", action="store_true", help="write the page from the JSON")
    add("--merge", nargs="+", type=Path, default=[], metavar="FILE", help="take the cells of other JSON files")
    add("--export-to", type=Path, metavar="DIR", help="write float16 graphs for a machine with a GPU")
    add(
        "--artifacts",
        type=Path,
        metavar="DIR",
        help="what --export-to wrote; or, for tensorrt-rtx, a folder of float16 graphs",
    )
    return argument_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 1 if a stage succeeded with wrong outputs, 2 if no architecture and task match, and
    0 if not.
    """
    options = parser().parse_args(arguments)
    if options.page_only or options.merge:
        return _finish(options, options.merge)
    _preload()
    from .cases import pairs
    from .running import shard

    tasks = [task for task in options.tasks.split(",") if task]
    chosen = shard(pairs(tasks, options.only), options.shard)
    if not chosen:
        print("No pair of architecture and task matches.", file=sys.stderr)
        return 2
    if options.build_only:
        return _build_only(options, chosen)
    if options.export_to is not None:
        return _export(options, chosen)
    return _sweep(options, chosen)


def _backends(named: str) -> list[str]:
    from accel.backends import registry

    if named:
        return [registry.describe(name).name for name in named.split(",") if name]
    return [name for name in ("cpu", "openvino") if registry.probe(registry.describe(name)).available]


def _preload() -> None:
    """Import all modules that the forked processes need. Create no session, because the forked processes would not have
    its threads.
    """
    import importlib
    import warnings
    from unittest.mock import patch

    import torch

    warnings.simplefilter("ignore")
    for name in ("torch._dynamo", "torch.export", "torch.onnx", "onnxscript", "onnxruntime", "openvino", "nncf",
                 "transformers.exporters.exporter_onnx", "transformers.exporters.exporter_openvino", "accel.stages.checked_export",
                 "accel.tuning.quantize_within_budget", "accel.models.encoder_decoder", "accel.tasks.text_classification"):  # fmt: skip
        # Hide GPUs during the imports. torchao looks for GPUs when it is imported, and this process could then not be
        # forked.
        with contextlib.suppress(ImportError), patch("torch.cuda.is_available", return_value=False):
            importlib.import_module(name)
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _warm_up() -> None:
    """Trace one model before processes are forked, so that the forked processes inherit the tables that the first trace
    fills.

    Measured on two busy processor cores: a trace of RoBERTa takes 17 s in a process without this trace, and 4 to 7 s
    with it.
    """
    from accel import capture
    from accel.config import ExportConfig
    from accel.stages.checked_export import load_source
    from accel.stages.resolution import resolve

    from .building import build
    from .cases import pairs

    (pair,) = pairs(only=["bert/text-classification"])
    source = load_source(resolve(build(pair), task=pair.task), ExportConfig())
    capture.capture_onnx(source, ExportConfig())


def _sweep(options: argparse.Namespace, chosen: Sequence[Any]) -> int:
    from . import gpu, running
    from .cells import GPU, RTX, STAGES, sweep_pair
    from .store import Store, about, digest_of

    backends = _backends(options.backends)
    sweep: Any = sweep_pair
    store = Store(options.json)
    if backends == [RTX]:
        from .engines import sweep_engines

        sweep = functools.partial(sweep_engines, options.artifacts)
    elif RTX in backends:
        raise SystemExit(f"Test {RTX} in a run of its own: --backends {RTX}")
    elif options.artifacts is not None:
        backends = [GPU]
        sweep = functools.partial(gpu.sweep_on_gpu, options.artifacts)
        chosen = [pair for pair in chosen if gpu.is_ready(options.artifacts, pair)]
        store.merge(Store(options.artifacts / "sweep.json").cells)
    digests = {name: digest_of(name) for name in (*backends, "pytorch")}
    if options.fresh:
        chosen_names = {(pair.architecture, pair.task) for pair in chosen}
        store.cells = {
            key: cell
            for key, cell in store.cells.items()
            if (cell.architecture, cell.task) not in chosen_names or cell.backend not in (*backends, "pytorch")
        }
    store.about = _joined(store.about, about(backends))
    if options.artifacts is None or backends == [RTX]:
        _warm_up()
    with _progress(len(chosen), ", ".join(backends)) as advance:
        running.run(
            chosen, backends, store, digests=digests, jobs=options.jobs, limit_s=options.limit_seconds, advance=advance,
            sweep=sweep, stages=[stage for stage in options.stages.split(",") if stage] or STAGES,
        )  # fmt: skip
    return _finish(options, ())


def _export(options: argparse.Namespace, chosen: Sequence[Any]) -> int:
    """Write the graphs that a machine with a GPU needs. Failed exports are recorded in the file `sweep.json` of the
    same folder.
    """
    from . import gpu, running
    from .cells import GPU
    from .store import Store, digest_of

    _warm_up()
    root: Path = options.export_to
    store = Store(root / "sweep.json")
    digests = {name: digest_of(name) for name in (GPU, "pytorch")}
    with _progress(len(chosen), "exporting") as advance:
        running.run(
            chosen, [GPU], store, digests=digests, jobs=options.jobs, limit_s=options.limit_seconds, advance=advance,
            sweep=functools.partial(gpu.export_for_gpu, root),
        )  # fmt: skip
    folders = [gpu.folder_of(root, pair) for pair in chosen if gpu.is_ready(root, pair)]
    ready = sum((folder / "O4").is_dir() for folder in folders)
    print(
        f"{len(folders)} of {len(chosen)} pairs are in {root}; {len(folders) - ready} of them are still to be optimized there."
    )
    return 0


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the new versions and settings, together with the old versions of backends that were not tested this time."""
    return {**old, **new, "versions": {**old.get("versions", {}), **new["versions"]}}


def _both(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the versions and processors of two files of results. Different values are joined by `and`."""

    def either(first: str | None, other: str | None) -> str:
        # An earlier merge may already have joined values. Split them, so that no value occurs twice.
        return " and ".join(dict.fromkeys(part for text in (first, other) if text for part in text.split(" and ")))

    ours, theirs = old.get("versions", {}), new.get("versions", {})
    versions = {name: either(ours.get(name), theirs.get(name)) for name in sorted({*ours, *theirs})}
    return {**old, **new, "processor": either(old.get("processor"), new.get("processor")), "versions": versions}


def _build_only(options: argparse.Namespace, chosen: Sequence[Any]) -> int:
    from . import running
    from .cells import sweep_pair
    from .store import Store, digest_of

    store = Store()
    with _progress(len(chosen), "building") as advance:
        running.run(
            chosen, [], store, digests={"pytorch": digest_of("pytorch")}, jobs=options.jobs,
            limit_s=options.limit_seconds, advance=advance, sweep=sweep_pair,
        )  # fmt: skip
    for cell in sorted(store.cells.values(), key=lambda entry: (entry.task, entry.architecture)):
        print(f"{cell.architecture}/{cell.task}: {cell.reason}")
    print(f"{len(chosen) - len(store.cells)} of {len(chosen)} small models were built and answer.")
    return 0


@contextlib.contextmanager
def _progress(total: int, description: str) -> Iterator[Callable[[Any], None]]:
    with tqdm(total=total, desc=description) as bar:

        def advance(pair: Any) -> None:
            bar.set_postfix_str(pair.name, refresh=False)
            bar.update()

        yield advance


def _finish(options: argparse.Namespace, others: Sequence[Path]) -> int:
    from .cases import pairs
    from .cells import FAILED, NOT_BUILT, OK, REFUSED, WRONG
    from .page import capturable, counts, rows_of, share, site
    from .store import Store

    store = Store(options.json)
    for path in others:
        other = Store(path)
        store.merge(other.cells)
        store.about = _both(store.about, other.about)
    if others:
        store.keep((pair.architecture, pair.task) for pair in pairs())
        store.write()
    cells = store.cells.values()
    for name, text in site(cells, store.about).items():
        path = options.page if name == "models.md" else options.page.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    totals, exportable = counts(cells), capturable(cells)
    print(", ".join(f"{totals[status]} {status}" for status in (OK, REFUSED, FAILED, WRONG, NOT_BUILT)))
    print(
        f"{share(exportable):.1%} of the {len(exportable)} cells that transformers' own exporters can capture are green: "
        f"{options.page}"
    )
    for line in rows_of(cells):
        print(line)
    for cell in cells:
        if cell.status in (WRONG, FAILED):
            print(f"{cell.status.upper()} {cell.key}: {cell.reason}", file=sys.stderr)
    return 1 if totals[WRONG] else 0


def _stop(*_: object) -> None:
    """Handle the signal SIGTERM like Ctrl-C, so that the results are written and the processes are ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
