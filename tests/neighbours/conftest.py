"""Other libraries, real ones, over our models. `make test-neighbours` installs them into an environment of their own.

Warnings of theirs are not ours to mend: only our own are errors here.
"""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "neighbours" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.filterwarnings("error::UserWarning:accel"))
