"""Write the table of request fields into `docs/guides/serve.md`, from the bodies that the server parses.

python docs/tools/request_fields.py            # write
python docs/tools/request_fields.py --check    # exit 1 if the page differs from the server's fields

The table is between two comments, `fields:begin` and `fields:end`; do not edit it by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from accel.serving.http.app import endpoints
from accel.serving.http.bodies import Body
from accel.serving.http.unserved_paths import UNSUPPORTED

PAGE = Path(__file__).parents[1] / "guides" / "serve.md"
PATHS = (
    "/v1/embeddings",
    "/v1/chat/completions",
    "/v1/completions",
    "/embed",
    "/similarity",
    "/rerank",
    "/score",
    "/tokenize",
    "/v2/embed",
    "/v2/rerank",
)
"""Endpoints of several APIs."""
_BLOCK = re.compile(r"(?<=<!-- fields:begin -->\n).*?(?=<!-- fields:end -->)", re.DOTALL)


def _named(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def render() -> str:
    """Return the Markdown table of the fields of all requests to the HTTP server."""
    bodies = {endpoint.path: endpoint.body for endpoint in endpoints()}
    lines = [
        "| endpoint | supported fields | accepted fields without an effect | rejected fields |",
        "| --- | --- | --- | --- |",
    ]
    for path in PATHS:
        body = bodies[path]
        assert body is not None
        assert issubclass(body, Body)
        followed = [name for name in body.model_fields if name not in body.ignored]
        lines.append(f"| `{path}` | {_named(followed)} | {_named([*body.ignored])} | {_named([*body.refused])} |")
    lines += [
        "",
        "The server does not have these endpoints of other servers:",
        "",
        "| endpoint | what to do instead |",
        "| --- | --- |",
    ]
    lines += [f"| `{path}` | {remedy[0].upper()}{remedy[1:]} |" for path, remedy in UNSUPPORTED.items()]
    return "\n".join(["", *lines, "", ""])


def page() -> str:
    """Return the page with the current table."""
    return _BLOCK.sub(lambda _: render(), PAGE.read_text(encoding="utf-8"))


def main() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
