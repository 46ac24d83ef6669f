"""Compare the time and memory of `accel.export` with the exporter of transformers, for an ONNX export in the shape of roberta-base.

    python benchmarks/export_cost.py [OUT.json] [--rounds 3] [--layers 12]

Every run is a new process that loads the model from a folder. The time of loading does not count. `transformers.exporters` traces the
model and writes the graph. `accel` also compares the graph with PyTorch on several shapes, writes a manifest with checksums of all files,
and writes the tokenizer and the config. In the result, `processor` is the processor time of all threads, and the peak memory is the peak of
the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_MEASURED = """
import json, resource, sys, time
from pathlib import Path
import torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
{imports}
begun, spent = time.perf_counter(), time.process_time()
{export}
print("\\n" + json.dumps({{
    "wall_s": time.perf_counter() - begun,
    "processor_s": time.process_time() - spent,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}}))
"""
VARIANTS = {
    "transformers.exporters": _MEASURED.format(
        imports="""
from transformers.exporters import OnnxConfig, OnnxExporter
ids = torch.randint(5, 30000, (3, 24))
mask = torch.ones_like(ids)
mask[1, 14:] = 0
""",
        export="""
exported = OnnxExporter().export(model, {"input_ids": ids, "attention_mask": mask}, OnnxConfig(dynamic=True))
exported.save_pretrained(sys.argv[2])
""",
    ),
    "accel": _MEASURED.format(
        imports="import accel, accel.stages.export",
        export="accel.export(model, Path(sys.argv[2]), task='text-classification')",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "export_cost.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        make = (
            "import sys, transformers; config = transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514, "
            f"type_vocab_size=1, num_hidden_layers={arguments.layers}); "
            "transformers.RobertaForSequenceClassification(config).save_pretrained(sys.argv[1])"
        )
        subprocess.run([sys.executable, "-c", make, str(folder)], check=True, capture_output=True)
        weights = (folder / "model.safetensors").stat().st_size
        for turn in range(arguments.rounds):
            for name, code in VARIANTS.items():
                out = Path(temporary) / f"{name}-{turn}"
                done = subprocess.run(
                    [sys.executable, "-c", code, str(folder), str(out)], check=True, capture_output=True, text=True
                )
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    report: dict[str, Any] = {"rounds": arguments.rounds, "weights_bytes": weights, "variants": {}}
    for name, runs in results.items():
        report["variants"][name] = {
            kind: {
                "median": round(statistics.median(run[kind] for run in runs), 2),
                "least": round(min(run[kind] for run in runs), 2),
            }
            for kind in runs[0]
        }
    ours, theirs = report["variants"]["accel"], report["variants"]["transformers.exporters"]
    report["accel against transformers.exporters"] = {
        kind: {of: round(ours[kind][of] / theirs[kind][of], 3) for of in ours[kind]} for kind in ours
    }
    report["peak against the weights"] = round(ours["peak_bytes"]["median"] / weights, 2)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
