"""Export small models of many architectures, and run their probes on each backend with one and with two threads.

A correct backend must pass: a probe that does not pass is a false alarm. The table shows the outputs that come closest to their
tolerance, the size of `probes.safetensors`, and the exports without probes.

    python benchmarks/probe_alarms.py --count 200 --seed 0
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from accel.artifact import Artifact
from accel.artifact.probe_file import PROBES
from accel.backends.plan import RunPreferences, make_plan
from accel.backends.probe_checks import results_of
from accel.backends.sessions import open_plan
from accel.capture.probes import read_probes
from accel.config import SessionOptions
from accel.errors import AccelError
from accel.stages.export import export
from accel.stages.quantize import quantize
from tests.sweep.building import NotBuilt, build
from tests.sweep.cases import Pair, pairs


def probe_shares(artifact: Artifact, backend: str) -> list[tuple[float, str]]:
    """Return the differences of all outputs as shares of their tolerances, with the output's name; the largest first."""
    probes = read_probes(artifact.path)
    if probes is None:
        return []
    shares = []
    for threads in (1, 2):
        settings = RunPreferences(backend=backend, options=SessionOptions(threads=threads))
        opened = open_plan(make_plan(artifact, settings), probes=False)
        try:
            shares += [
                (r.difference / r.tolerance, f"{r.output} ({r.difference:.2g}, {threads} threads)")
                for r in results_of(opened, probes)
            ]
        finally:
            opened.close()
    return sorted(shares, reverse=True)


def checked_exports(pair: Pair, folder: Path) -> None:
    """Export a pair for each backend and with dynamic int8, and print the probes that come closest to their tolerance."""
    model = build(pair)
    for name, exporter, backends in (("onnx", None, ("cpu", "openvino")), ("ir", "openvino", ("openvino",))):
        try:
            artifact = export(model, folder / name, task=pair.task, backend=exporter)
            variants = [artifact]
            if exporter is None:
                variants.append(quantize(artifact, folder / "int8", scheme="dynamic-int8"))
        except AccelError as error:
            print(f"{pair.name:50} {name:5} not exported: {error.message[:80]}", flush=True)
            continue
        for variant in variants:
            size = (variant.path / PROBES).stat().st_size if (variant.path / PROBES).is_file() else 0
            for backend in backends:
                try:
                    started = time.perf_counter()
                    shares = probe_shares(variant, backend)
                    seconds = time.perf_counter() - started
                except AccelError as error:
                    print(f"{pair.name:50} {name:5} {backend:9} does not run: {error.message[:60]}", flush=True)
                    continue
                worst, output = shares[0] if shares else (0.0, "no probes")
                alarm = "ALARM" if worst > 1 else ""
                print(
                    f"{pair.name:50} {variant.path.name:5} {backend:9} {size:7,} bytes {seconds:5.1f} s {worst:8.3f} {output} {alarm}",
                    flush=True,
                )


def main() -> None:
    """Run the pairs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="number of pairs (architecture and task)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their order")
    parser.add_argument("--only", action="append", default=[], help="patterns of architectures or pairs")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = pairs(only=arguments.only)
    random.Random(arguments.seed).shuffle(chosen)
    for pair in chosen[: arguments.count]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                checked_exports(pair, Path(folder))
            except NotBuilt:
                continue
            # A sample of models must continue after any error of one model.
            except Exception as error:  # noqa: BLE001
                print(f"{pair.name:50} failed: {type(error).__name__}: {str(error)[:100]}", flush=True)


if __name__ == "__main__":
    main()
