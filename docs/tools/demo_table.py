"""Write the real output of `accel demo` into README.md and docs/index.md.

    python docs/tools/demo_table.py                 # run the demo, keep its report in benchmarks/demo.json, paste it
    python docs/tools/demo_table.py --check         # exit 1 if a page differs from demo.json
    python docs/tools/demo_table.py --check --run   # also run the demo again, and compare the values that do not depend on speed

The table is between two comments, `demo:begin` and `demo:end`; do not edit it by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

from accel.config import available_processors
from accel.demo.walkthrough import DemoReport, DemoResultRow, DemoSearch, render

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "demo.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
_BLOCK = re.compile(r"(?<=<!-- demo:begin -->\n).*?(?=<!-- demo:end -->)", re.DOTALL)
_LIBRARIES = ("torch", "transformers", "onnxruntime", "openvino")
# Fields of a row that depend on the machine's speed.
_TIMES = ("median_ms", "p5_ms", "p95_ms", "speedup", "speedup_low", "speedup_high")


def machine() -> str:
    """Return a sentence about the processor cores and the load of this computer, and the versions of the libraries."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags"))
        instruction_sets = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
        name += "; instruction sets " + ", ".join(flag for flag in instruction_sets if f" {flag} " in f"{flags} ")
    except (OSError, StopIteration):
        pass
    versions = []
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    load = f" The load average before the run was {os.getloadavg()[0]:.1f}." if hasattr(os, "getloadavg") else ""
    computer = f"a computer with {available_processors()} processor cores ({name}).{load}"
    return f"{computer} Versions: Python {platform.python_version()}, {', '.join(versions)}"


def run() -> dict[str, Any]:
    """Run the command that users run, and return the demo's report."""
    done = subprocess.run([sys.executable, "-m", "accel", "demo", "--json"], capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def block(record: dict[str, Any]) -> str:
    """Return the text between the comments of a page."""
    report = record["report"]
    rows = tuple(DemoResultRow(**row) for row in report["rows"])
    tuned = DemoSearch(**report["tuned"]) if report.get("tuned") else None
    table = render(DemoReport(**{**report, "rows": rows, "shape": tuple(report["shape"]), "tuned": tuned}))
    text = "\n".join(line.rstrip() for line in table.splitlines())
    return f"\n```text\n$ accel demo\n{text}\n```\n\nThe demo was measured on {record['machine']}.\n\n"


def problems(record: dict[str, Any]) -> list[str]:
    """List the pages whose text differs from the record."""
    expected = block(record)
    differences = []
    for page in PAGES:
        match = _BLOCK.search(page.read_text(encoding="utf-8"))
        if match is None:
            differences.append(f"{page.name} has no demo:begin and demo:end comments")
        elif match[0] != expected:
            differences.append(f"{page.name} differs from {RECORD.name}")
    if {field.name for field in fields(DemoResultRow)} != set(record["report"]["rows"][0]):
        differences.append("the demo's rows have other fields now")
    return differences


def drift(record: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List differences from the recorded demo, except times and rows that only one of the two machines can have."""

    def lasting(report: dict[str, Any]) -> dict[str, Any]:
        return {
            row["name"]: {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in row.items()
                if key not in _TIMES
            }
            for row in report["rows"]
        }

    then, current = lasting(record["report"]), lasting(now)
    incomparable = {*record["report"].get("absent", {}), *now["absent"]}
    return [
        f"{name}: {then.get(name)} then, {current.get(name)} now"
        for name in sorted({*then, *current} - incomparable)
        if then.get(name) != current.get(name)
    ]


def main() -> int:
    """Run the demo and write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--run", action="store_true", help="with --check: also run the demo")
    args = parser.parse_args()
    if not args.check:
        record = {"machine": machine(), "report": run()}
        RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        text = block(record)
        for page in PAGES:
            if page.is_file():
                page.write_text(_BLOCK.sub(lambda _: text, page.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    differences = problems(record) + (drift(record, run()) if args.run else [])
    for problem in differences:
        print(f"{problem}. Fix: python docs/tools/demo_table.py")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
