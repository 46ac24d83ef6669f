"""What tests are made of, ours and those of plugins: the conformance suite, tiny models, generators.

In: the name of a backend. Out: pytest tests of the contract. A clause of the contract is one test of the suite; a family that
tests should cover is one entry of `models` or `generators`.
"""
