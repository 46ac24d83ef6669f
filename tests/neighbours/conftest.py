"""Fixtures of the tests that run other libraries with accel's models. `make test-neighbours` installs these libraries
in a separate environment.

Warnings of these libraries are ignored. Only warnings of accel are errors.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "neighbours" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error::UserWarning:accel"))
