"""Measure accuracy on labelled rows, and latency of variants that take turns, each in a process of its own.

In: models and data, or models and calls. Out: an `Evaluation` or a `Benchmark`, with intervals, as table, JSON or HTML. A
new metric goes into `accuracy`, a new kind of load into `latency`.
"""
