"""Latency: the calls to time (workloads), the variants that run in turns, and their results."""
