"""Run the test suite with the oldest and the newest versions that `pyproject.toml` allows: `python -m tests.versions
oldest newest`.
"""
