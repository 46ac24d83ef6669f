"""Measure the speed and the error of ONNX Runtime's `MatMulNBits` with float activations and with 8-bit activations.

    python benchmarks/block_products.py [--threads 2] [--block-size 32]

Activations stay float with `accuracy_level` 1 and are rounded to 8 bits with `accuracy_level` 4. The matrix product is
`(rows, inner) x (inner, outer)` with random 4-bit weights. Both graphs take turns in one process. The error is the largest difference from
the float64 product of the same weights, divided by the largest value of that product.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SIZES = ((1, 896, 4864), (1, 4864, 896), (16, 896, 896), (128, 768, 3072))
LEVELS = (1, 4)


def graph(inner: int, outer: int, block: int, level: int, weights: dict[str, np.ndarray]) -> bytes:
    """Return an ONNX model with one matrix product."""
    sizes: dict[str, Any] = {"K": inner, "N": outer, "bits": 4, "block_size": block, "accuracy_level": level}
    node = helper.make_node("MatMulNBits", ["x", *weights], ["y"], domain="com.microsoft", **sizes)
    product = helper.make_graph(
        [node], "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", inner])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", outer])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    written: bytes = helper.make_model(product, opset_imports=opsets, ir_version=10).SerializeToString()
    onnx.checker.check_model(written)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = arguments.threads
    print("| rows x inner x outer | level 1, ms | level 4, ms | times as fast | error, level 1 | error, level 4 |")
    print("|---|---:|---:|---:|---:|---:|")
    for rows, inner, outer in SIZES:
        random = np.random.default_rng(0)
        blocks = inner // arguments.block_size
        values = random.integers(0, 16, (outer, blocks, arguments.block_size), dtype=np.uint8)
        scales = random.uniform(0.5, 1.5, (outer, blocks)).astype(np.float32) / inner
        weights = {"w": values[..., ::2] | (values[..., 1::2] << 4), "scales": scales}
        x = random.standard_normal((rows, inner)).astype(np.float32)
        dense = ((values.astype(np.float64) - 8) * scales[..., None]).reshape(outer, inner)
        exact = x.astype(np.float64) @ dense.T
        sessions = [
            onnxruntime.InferenceSession(
                graph(inner, outer, arguments.block_size, level, weights), options, providers=["CPUExecutionProvider"]
            )
            for level in LEVELS
        ]
        times: list[list[float]] = [[], []]
        for _ in range(arguments.rounds):
            for place, session in enumerate(sessions):
                for call in range(12):
                    started = time.perf_counter()
                    session.run(None, {"x": x})
                    if call >= 2:
                        times[place].append(1e3 * (time.perf_counter() - started))
        errors = [np.abs(s.run(None, {"x": x})[0] - exact).max() / np.abs(exact).max() for s in sessions]
        level1_ms, level4_ms = map(statistics.median, times)
        print(
            f"| {rows} x {inner} x {outer} | {level1_ms:.3f} | {level4_ms:.3f} | {level1_ms / level4_ms:.2f} | "
            f"{errors[0]:.1e} | {errors[1]:.1e} |"
        )


if __name__ == "__main__":
    main()
