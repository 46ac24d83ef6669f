"""The suite with the oldest and the newest versions that `pyproject.toml` declares: `python -m tests.versions oldest newest`."""
