"""What mkdocs does not do by itself; named under `hooks` in mkdocs.yml.

A folder in the navigation (`guides/`) stands for the pages in it, so that a new guide or backend page needs no second
entry; and words behind a fence's language (`python notest`, `text output`), which the tests read, are not shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FENCE = re.compile(r"^(```[a-z]+)[ \t]+[a-z].*$", re.MULTILINE)
# Pages that come first in their folder, in the order a reader needs them; the rest follow by name.
_FIRST = ("cpu.md",)


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation with each folder replaced by its pages."""
    expanded: list[Any] = []
    for entry in nav:
        for title, target in entry.items():
            if isinstance(target, str) and target.endswith("/"):
                found = [path.name for path in (docs / target).glob("*.md")]
                found.sort(key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
                expanded.append({title: [f"{target}{name}" for name in found]})
            else:
                expanded.append({title: expand(target, docs) if isinstance(target, list) else target})
    return expanded


def on_config(config: Any) -> Any:
    """Expand the navigation."""
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave only the language behind each opening fence."""
    return _FENCE.sub(r"\1", markdown)
