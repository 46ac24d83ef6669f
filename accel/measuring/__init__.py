"""Measure the accuracy of models on labelled rows, and the latency of variants that run in turns, each in its own process.

In: models and data, or models and calls. Out: an `Evaluation` or a `Benchmark` with confidence intervals, as table, JSON or HTML.
New metrics belong in `accuracy`, new kinds of load in `latency`.
"""
