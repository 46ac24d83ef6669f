"""Command line that runs Optimum's own tests: `python -m tests.optimum_suite`. The option `--help` lists its options."""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_CACHE = ROOT / "build" / "optimum-suite"
# The fast files come first. test_diffusion.py is left out because diffusion models are out of scope, and test_timm.py
# because its checkpoints exist only on the Hub.
FILES = (
    "test_utils.py",
    "test_quantization.py",
    "test_optimization.py",
    "test_modeling.py",
    "test_seq2seq.py",
    "test_decoder.py",
)
_EXAMPLES = """example:
  git clone https://github.com/huggingface/optimum-onnx build/optimum-onnx
  python -m tests.optimum_suite --clone build/optimum-onnx --json build/optimum.json
  python -m tests.optimum_suite --clone build/optimum-onnx --json build/optimum.json --only 'test_decoder.py and gpt2'
  python -m tests.optimum_suite --clone build/optimum-onnx --json build/optimum.json --rest      after Ctrl-C

Results join those that the JSON file has of other tests. An hour on two processors.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    argument_parser = argparse.ArgumentParser(
        prog="python -m tests.optimum_suite",
        description="Optimum's own tests of optimum.onnxruntime through accel.compat.optimum, on small local models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = argument_parser.add_argument
    add("--clone", type=Path, required=True, metavar="PATH", help="a clone of github.com/huggingface/optimum-onnx")
    add("--only", default="", metavar="PATTERN", help="tests that pytest's -k chooses by this")
    add("--json", type=Path, metavar="FILE", help="what became of each test, by file and as a list of failures")
    add("--rest", action="store_true", help="only tests of which the JSON file has nothing yet")
    add("--jobs", type=int, default=2, metavar="N", help="processes (default: %(default)s)")
    add("--cache", type=Path, default=_CACHE, metavar="DIR", help="where models are kept (default: %(default)s)")
    return argument_parser


def main() -> int:
    """Run the tests and print the table of results. Return 1 if a test failed, 130 if Ctrl-C stopped the run, and 0 if
    all tests passed.
    """
    options = parser().parse_args()
    clone, cache = options.clone.resolve(), options.cache.resolve()
    files = [clone / "tests" / "onnxruntime" / name for name in FILES]
    if missing := [str(path) for path in files if not path.is_file()]:
        print(f"Not a clone of optimum-onnx: it lacks {', '.join(missing)}.", file=sys.stderr)
        return 2
    cache.mkdir(parents=True, exist_ok=True)
    outcomes: dict[str, Any] = {}
    if options.json is not None and options.json.is_file():
        outcomes = json.loads(options.json.read_text(encoding="utf-8"))["tests"]
    with tempfile.TemporaryDirectory() as scratch:
        results, finished_tests = Path(scratch) / "results", Path(scratch) / "known"
        finished_tests.write_text(json.dumps(list(outcomes) if options.rest else []), encoding="utf-8")
        for path in files:
            results.touch()
            stopped = run(path, clone, options.jobs, options.only, _environment(cache, results, finished_tests))
            outcomes |= dict(json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
            summary = summarized(outcomes)
            if options.json is not None:
                options.json.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            if stopped:
                break
    print(table(summary["files"]))
    for failure in summary["failures"]:
        print(f"{failure['test']}: {failure['error']}")
    return 130 if stopped else 1 if summary["failures"] else 0


def run(path: Path, clone: Path, jobs: int, only: str, environment: Mapping[str, str]) -> bool:
    """Run one test file. Return whether Ctrl-C stopped the run."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.optimum_suite.plugin", "-p", "no:cacheprovider", "-q", "--tb=short",
               "-n", str(jobs), "--dist", "worksteal", "--rootdir", str(clone), str(path)]  # fmt: skip
    if only:
        command += ["-k", only]
    try:
        # Run in the clone, because the tests use relative paths. PYTHONSAFEPATH prevents that Python imports the
        # clone's own packages.
        subprocess.run(command, cwd=clone, env={**os.environ, **environment}, check=False)
    except KeyboardInterrupt:
        return True
    return False


def _environment(cache: Path, results: Path, finished_tests: Path) -> dict[str, str]:
    from .hub import CACHE
    from .plugin import KNOWN, RESULTS

    return {
        CACHE: str(cache), RESULTS: str(results), KNOWN: str(finished_tests), "TMPDIR": str(results.parent),
        "ACCEL_HOME": str(cache / "home"), "HF_HOME": str(cache / "hf"), "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }  # fmt: skip


def summarized(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of outcomes in each file, the failures, and the outcome of every test."""
    files: dict[str, dict[str, int]] = {}
    for test, (outcome, _) in sorted(outcomes.items()):
        counts = files.setdefault(test.partition("::")[0], collections.Counter())
        counts[outcome] += 1
    failures = [
        {"test": test, "error": error} for test, (outcome, error) in sorted(outcomes.items()) if outcome == "failed"
    ]
    return {"files": files, "failures": failures, "tests": dict(sorted(outcomes.items()))}


def table(files: Mapping[str, Mapping[str, int]]) -> str:
    """Return the numbers of outcomes as a table, with one line for each file and one line for all files."""
    from .plugin import FAILED, LEFT_OUT, PASSED, SKIPPED

    columns = (PASSED, FAILED, LEFT_OUT, SKIPPED)
    rows = [(name, *(counts.get(column, 0) for column in columns)) for name, counts in files.items()]
    rows.append(("all", *(sum(row[i] for row in rows) for i in range(1, 5))))
    lines = [f"{'tests of':24}" + "".join(f"{column:>{max(8, len(column) + 2)}}" for column in columns)]
    for name, *counts in rows:
        lines.append(f"{name:24}" + "".join(f"{n:>{max(8, len(c) + 2)}}" for n, c in zip(counts, columns, strict=True)))
    passed, failed = rows[-1][1], rows[-1][2]
    return "\n".join(
        [*lines, f"{passed / max(1, passed + failed):.1%} of the {passed + failed} that were run and count pass."]
    )


def _stop(*_: object) -> None:
    """Handle SIGTERM like Ctrl-C, so that the results are written."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
