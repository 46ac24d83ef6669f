"""Measurements of accuracy on labelled rows, and of the latency of variants, which run in turns in separate processes.

In: models and labelled rows, or models and calls. Out: an `EvaluationResult` or a `BenchmarkResult` with confidence intervals, as a table,
JSON or HTML. The subpackage `accuracy` contains the metrics, and the subpackage `latency` contains the kinds of load.
"""
