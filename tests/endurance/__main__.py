"""Run experiments: `python -m tests.endurance kills flips fuzz disk crowd`. Without names, all experiments run."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}

_COUNTS = {"kills": 300, "flips": 1000, "fuzz": 10_000, "disk": 10, "crowd": 300}
_FOUND = Path(__file__).parents[2] / "benchmarks" / "endurance.json"


def added(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Combine the results of two parts of one experiment. Counts are added, lists are joined, and for other fields the
    later value is kept.

    Args:
        before: Results of the earlier parts.
        more: Results of the new part.
    """
    both = dict(before)
    for key, value in more.items():
        old = before.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            both[key] = added(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            both[key] = old + [entry for entry in value if key != "seeds" or entry not in old]
        elif isinstance(value, int) and isinstance(old, int):
            both[key] = old + value
        else:
            both[key] = value
    return both


def main() -> int:
    """Run the requested experiments. Return 1 if an experiment finds a fault, and 0 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.endurance",
        description=__doc__,
        epilog="Example: python -m tests.endurance kills --count 30, or in pieces: fuzz --count 2000 --seed 1, then "
        "fuzz --count 2000 --seed 2 --add",
    )
    parser.add_argument("experiments", nargs="*", choices=[*_COUNTS, []], help="; ".join(
        f"{name}: {count} {unit}" for (name, count), unit in zip(
            _COUNTS.items(), ("kills", "bytes", "graphs", "fillings of a disk a command", "seconds"), strict=True)
    ))  # fmt: skip
    parser.add_argument("--count", type=int, help="instead of each experiment's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="NAME", help="kills and disk: a regular expression for commands")
    parser.add_argument("--add", action="store_true", help="to what the file has of this experiment, for pieces of it")
    parser.add_argument("--json", type=Path, default=_FOUND, help="where what was found goes (%(default)s)")
    args = parser.parse_args()

    from accel.backends.machine import machine

    from .world import import_everything

    import_everything()
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    faults = 0
    for name in args.experiments or _COUNTS:
        root = Path(tempfile.mkdtemp(prefix=f"accel-{name}-"))
        experiment = importlib.import_module(f"{__package__}.{name}")
        only = {"only": args.only} if "only" in inspect.signature(experiment.run).parameters else {}
        result = experiment.run(root / name, count=args.count or _COUNTS[name], seed=args.seed, **only)
        if result["faults"]:
            print(f"what made faults is kept in {root}", flush=True)
        else:
            shutil.rmtree(root, ignore_errors=True)
        text = json.dumps(result["faults"]).replace(str(root), "").replace(sys.executable, "python")
        result["faults"] = json.loads(text)
        facts = machine()
        about = {"accel": facts["accel"], "processors": facts["processors"]}
        result["seeds"] = [args.seed]
        results[name] = {**about, **(added(results.get(name, {}), result) if args.add else result)}
        args.json.write_text(json.dumps(results, indent=2) + "\n")
        faults += len(result["faults"])
        print(f"{name}: {result['total']} tries, {len(result['faults'])} faults", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
