"""Hooks of mkdocs, which mkdocs.yml lists under `hooks`.

`on_config` replaces each folder in the navigation (such as `guides/`) by its pages, so that a new page is shown without a change
of mkdocs.yml. `on_page_markdown` removes the words after the language of a code block (`python notest`, `text output`), which
only the tests use.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^(```[a-z]+)[ \t]+[a-z].*$", re.MULTILINE)
# Pages that the navigation shows first in their folder; all other pages of the folder follow in alphabetical order.
_FIRST = ("cpu.md",)


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """Return the navigation with each folder replaced by its pages."""
    expanded: list[Any] = []
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str) and target.endswith("/"):
                pages = [path.name for path in (docs / target).glob("*.md")]
                pages.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
                expanded.append({title: [f"{target}{name}" for name in pages]})
            else:
                expanded.append({title: expand(target, docs) if isinstance(target, list) else target})
    return expanded


def on_config(config: Any) -> Any:
    """Replace each folder in the navigation by its pages."""
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove all words after the language in the first line of each code block."""
    return _FENCE.sub(r"\1", markdown)
