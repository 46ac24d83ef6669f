"""Write the comparison with other libraries into README.md and docs/benchmarks/peers.md, from the JSON of `make bench-peers`.

python docs/tools/peers_table.py            # write
python docs/tools/peers_table.py --check    # exit 1 if a page differs from the JSON

The tables are between comments, for example `peers:begin` and `peers:end`; do not edit them by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks" / "peers.md"
README = ROOT / "README.md"


def read(name: str) -> dict[str, Any]:
    """A benchmark's JSON."""
    document: dict[str, Any] = json.loads((BENCHMARKS / name).read_text(encoding="utf-8"))
    return document


def classification() -> str:
    """Compare DistilBERT with Optimum: milliseconds a call."""
    report = read("classification_peers.json")
    base = report["rows"]["PyTorch float32"]["median_ms"]
    lines = [
        "| DistilBERT, one row of 128 tokens | ms, median | 5 % to 95 % | times PyTorch |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, row in report["rows"].items():
        label = f"**{name}**" if name.startswith("accel") else name
        lines.append(
            f"| {label} | {row['median_ms']:.1f} | {row['p5_ms']:.1f} to {row['p95_ms']:.1f} | {base / row['median_ms']:.1f} |"
        )
    return "\n".join(lines) + f"\n\n{report['processors']} processors; `make bench-peers` prints it.\n"


TABLES = {"peers": classification}


def filled(text: str) -> str:
    """Return a page with new tables."""
    for name, render in TABLES.items():
        block = re.compile(rf"(?<=<!-- {name}:begin -->\n).*?(?=<!-- {name}:end -->)", re.DOTALL)
        if block.search(text):
            table = f"\n{render()}\n"
            text = block.sub(lambda _, table=table: table, text)
    return text


def main() -> int:
    """Write the pages, or with --check report which pages are out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 when a page is out of date")
    check, stale = parser.parse_args().check, []
    for page in (README, PAGE):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if check and after != before:
            stale.append(page.name)
        elif not check:
            page.write_text(after, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}: python docs/tools/peers_table.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
