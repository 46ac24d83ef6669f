"""Test utilities for accel and its plugins: the conformance suite for backends, tiny models, tiny generating models.

In: the name of a backend. Out: pytest tests of the backend contract, one test for each clause. `models` and `generative_models`
have one entry for each model family.
"""
