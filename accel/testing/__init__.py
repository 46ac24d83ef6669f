"""Test utilities for accel and its plugins: the conformance suite for backends, tiny models, tiny generating models.

In: the name of a backend. Out: pytest tests of the backend contract. Each clause of the contract is one test of
the suite; each model family for tests is one entry of `models` or `generators`.
"""
