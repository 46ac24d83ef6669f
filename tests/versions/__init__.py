"""Run the test suite with the oldest and with the newest library versions that `pyproject.toml` allows: `python -m
tests.versions oldest newest`.
"""
