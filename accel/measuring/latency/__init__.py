"""Latency: calls to time, variants that take turns, and their results."""
