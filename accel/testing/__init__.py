"""Test utilities for accel and its plugins: the conformance suite for backends, tiny models, tiny generating models.

The conformance suite tests the contract of backends with pytest, with one test for each clause of the contract. `models` and `generators`
have one entry for each model family.
"""
