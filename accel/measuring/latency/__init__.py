"""Latency: calls to time, variants that take turns, and what is said about the times."""
