"""Check the documentation against the code: code blocks run, and every error, command, flag and public name is
documented.

The blocks of a page share one namespace and run from top to bottom, offline, in an empty folder. The word after the
three backticks of a block decides what the test does:

- `python`: the block runs.
- `text output`: the block contains the exact output of the block before it.
- `python notest`: the block does not run. Its first line gives the reason: `# Not run by the tests: <reason>`.
- `python from=<file>`: the block is an exact part of the file.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import linecache
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.version import Version

import accel
from accel import errors
from accel.artifact import Artifact
from accel.artifact.atomic_folder_writing import check_output
from accel.demo import MODEL
from accel.interfaces.specs import BackendSpec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Reports of measurements may contain blocks for other machines, so only the other pages are tested.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# These scripts train for an hour, or read data that is not in the package.
LONG_EXAMPLES = {"quantization_aware_training.py", "distill_demo_model.py"}
# Pages and examples with a block that takes 8 seconds or more run only in the thorough tests.
SLOW = {
    "openvino.md",
    "optimize.md",
    "concepts.md",
    "generation.md",
    "quantization-aware-training.md",
    "serve-generation.md",
    "foreign-folders.md",
    "evaluate.md",
    "export.md",
    "accuracy-budget.md",
    "pipelines.md",
    "benchmark.md",
    "images.md",
    "sounds.md",
    "embeddings.md",
    "documents.md",
    "from-optimum.md",
    "triton.md",
    "chat.py",
    "embeddings.py",
}
MOST_BLOCKS_NOT_RUN = 11  # the blocks for GPUs and other libraries, and the blocks that compile for minutes
NOT_RUN = "# Not run by the tests: "
ADR_PARTS = ("Context", "Decision", "Consequences", "Rejected")

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[a-z][^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.MULTILINE | re.DOTALL
)
# This pattern matches the absolute path of a folder on one machine, which does not exist on the reader's machine.
_MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:tmp|work|home|root|Users|mnt|opt)/[\w.-]+")


def slow_ones(paths: list[Path]) -> list[Any]:
    """Return the test cases for `paths`. Slow pages and examples are marked `thorough`."""
    return [pytest.param(path, marks=pytest.mark.thorough) if path.name in SLOW else path for path in paths]


def tool(name: str) -> ModuleType:
    """Load a script of docs/tools as a module and return it."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    info: str
    body: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        yield Block(page, text.count("\n", 0, match.start()) + 1, match["info"].strip(), body)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_python(page: Path) -> bool:
    return any(block.info == "python" for block in blocks(page))


@pytest.fixture
def _shared_demo_export(shared: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `accel.export` for the demo model. Six pages export this model with the same settings, so the first
    export is copied for the other pages.
    """
    real = accel.export

    def export(model: Any, out: Any, **settings: Any) -> Artifact:
        if settings or model != MODEL:
            return real(model, out, **settings)
        exported = shared("demo-model-onnx", lambda folder: real(model, folder))
        return Artifact.load(shutil.copytree(exported, check_output(out, MODEL), dirs_exist_ok=True))

    monkeypatch.setattr(accel, "export", export)


@pytest.mark.usefixtures("_shared_demo_export")
@pytest.mark.parametrize("page", slow_ones([page for page in PAGES if has_python(page)]), ids=name_of)
def test_page_blocks_run_and_print_their_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The output of a page must not depend on the installed plugins, so the test enables only some plugins. The page of
    # a backend also enables the backend.
    backend = page.stem if page.parent.name == "backends" else "cpu"
    monkeypatch.setenv("ACCEL_PLUGINS", f"cpu,{backend}")
    namespace: dict[str, Any] = {"__name__": "docs_page"}
    printed = None
    for block in blocks(page):
        where = f"{name_of(page)}:{block.line}"
        if block.info == "python":
            # With this entry, tracebacks show the line of the block, and `inspect` finds its source.
            linecache.cache[where] = (len(block.body), None, block.body.splitlines(keepends=True), where)
            stream = io.StringIO()
            with redirect_stdout(stream):
                exec(compile(block.body, where, "exec"), namespace)
            printed = stream.getvalue()
        elif block.info == "text output":
            assert printed is not None, f"{where}: there is no block above that printed this"
            assert printed.rstrip() == block.body.rstrip(), where
            printed = None


@pytest.mark.parametrize(
    "example", slow_ones([path for path in EXAMPLES if path.name not in LONG_EXAMPLES]), ids=name_of
)
def test_example_runs_without_arguments(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_blocks_that_do_not_run_are_few_and_have_a_reason() -> None:
    skipped = [block for page in PAGES for block in blocks(page) if block.info == "python notest"]
    silent = [f"{name_of(b.page)}:{b.line}" for b in skipped if not b.body.startswith(NOT_RUN)]
    assert not silent, f"the first line must be {NOT_RUN!r} and the reason"
    assert len(skipped) <= MOST_BLOCKS_NOT_RUN
    for block in skipped:
        compile(block.body, f"{name_of(block.page)}:{block.line}", "exec")


def test_fences_have_a_known_word() -> None:
    fence_words = {
        "python",
        "python notest",
        "text output",
        "text",
        "bash",
        "toml",
        "json",
        "yaml",
        "diff",
        "javascript",
    }
    unknown = [
        f"{name_of(b.page)}:{b.line}: {b.info}"
        for p in PAGES
        for b in blocks(p)
        if b.info not in fence_words and " from=" not in b.info
    ]
    assert not unknown


def test_excerpts_equal_their_files() -> None:
    shown = [(b, b.info.split(" from=")[1]) for page in PAGES for b in blocks(page) if " from=" in b.info]
    changed = [f"{name_of(b.page)}:{b.line}" for b, file in shown if b.body not in (ROOT / file).read_text("utf-8")]
    assert not changed
    assert shown


def commands_in(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place and the words of each line in a bash block that calls `accel`."""
    for block in blocks(page):
        if block.info == "bash":
            for number, line in enumerate(block.body.replace("\\\n", " ").splitlines(), start=block.line + 1):
                words = shlex.split(line, comments=True)
                if words and words[0] == "accel":
                    yield f"{name_of(page)}:{number}", words


def test_commands_in_bash_blocks_exist_with_their_flags() -> None:
    reference = tool("cli_reference")
    known_flags = {path: reference.options(command, context) for path, command, context in reference.commands()}
    wrong, count = [], 0
    for page in PAGES:
        for where, words in commands_in(page):
            count += 1
            path = "accel"
            for word in words[1:]:
                if f"{path} {word}" not in known_flags:
                    break
                path = f"{path} {word}"
            flags = {word.split("=")[0] for word in words if word.startswith("-")}
            if not flags <= known_flags[path] or (path == "accel" and len(words) > 1 and not words[1].startswith("-")):
                wrong.append(f"{where}: {' '.join(words)}: {sorted(flags - known_flags[path])}")
    assert not wrong
    assert count >= 5


@pytest.mark.skipif(
    Version(metadata.version("typer")) < Version("0.29"),
    reason="versions of typer before 0.29 format help texts differently; the next test checks the content of the page",
)
def test_command_line_page_is_up_to_date() -> None:
    reference = tool("cli_reference")
    assert reference.PAGE.read_text("utf-8") == reference.render(), "out of date: python docs/tools/cli_reference.py"


def test_every_command_and_flag_is_on_the_command_line_page() -> None:
    reference = tool("cli_reference")
    text = reference.PAGE.read_text(encoding="utf-8")
    for path, command, context in reference.commands():
        assert f"# {path}\n" in text
        section = text.split(f"# {path}\n", 1)[1].split("\n## ", 1)[0]
        for flag in reference.options(command, context):
            assert flag in section, f"{path} {flag}"


def test_request_fields_table_is_up_to_date() -> None:
    fields = tool("request_fields")
    assert fields.PAGE.read_text("utf-8") == fields.page(), "out of date: python docs/tools/request_fields.py"


def test_drawings_are_up_to_date() -> None:
    drawings = tool("drawings")
    stale = [
        n for n, draw in drawings.DRAWINGS.items() if (drawings.ASSETS / f"{n}.svg").read_text("utf-8") != draw().svg()
    ]
    assert not stale, "out of date: python docs/tools/drawings.py"


def test_support_table_is_up_to_date() -> None:
    table = tool("support_table")
    assert table.PAGE.read_text("utf-8") == table.render(), "out of date: python docs/tools/support_table.py"


def test_comparison_tables_are_up_to_date() -> None:
    peers = tool("peers_table")
    stale = [
        page.name
        for page in (peers.README, peers.PAGE)
        if peers.filled(page.read_text("utf-8")) != page.read_text("utf-8")
    ]
    assert not stale, "out of date: python docs/tools/peers_table.py"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150


def test_demo_output_is_up_to_date() -> None:
    import json

    demo = tool("demo_table")
    assert demo.problems(json.loads(demo.RECORD.read_text(encoding="utf-8"))) == []


def test_every_error_is_in_troubleshooting() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.AccelError) and value.__module__ == errors.__name__
    }
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == classes
    for name, section in sections.items():
        assert "**Fix" in section, f"{name}: what to do about it?"


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: accel\.(\w+)$", text, re.MULTILINE))
    assert documented == set(accel.__all__) - {"__version__"}
    assert "`accel.__version__`" in text


def test_folders_entry_points_extras_and_pages_of_backends_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entries = project["entry-points"]["accel.backends"]
    shared = {"ortkit"}  # shared code of the ONNX Runtime backends, not a backend
    folders = {path.parent.name for path in (ROOT / "accel_plugins").glob("*/__init__.py")} - shared
    # Each folder has the name of its backend. The folder of the `pytorch` backend also contains the two backends that
    # compile PyTorch models.
    assert {value.partition(":")[0].rpartition(".")[2] for value in entries.values()} == folders
    names = {name.replace("-", "_") for name in entries}
    assert names == folders | {"inductor", "aotinductor"}
    assert {path.stem.replace("-", "_") for path in (DOCS / "backends").glob("*.md")} == names
    for name, value in entries.items():
        module, _, attribute = value.partition(":")
        spec: BackendSpec = getattr(importlib.import_module(module), attribute)
        assert spec.name == name
        assert spec.extra in project["optional-dependencies"], f"{name}: no extra {spec.extra!r}"
        page = (DOCS / "backends" / f"{name}.md").read_text(encoding="utf-8")
        assert f'".[{spec.extra}]"' in page, f"docs/backends/{name}.md must say how to install it"
        for alias in spec.aliases:
            assert f"`{alias}`" in page, f"docs/backends/{name}.md must name the alias {alias}"


def navigation() -> list[Any]:
    # mkdocs.yml may contain YAML tags of mkdocs, which `safe_load` refuses. The navigation contains no tags, so only
    # the navigation is read.
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    expanded: list[Any] = tool("mkdocs_hooks").expand(nav, DOCS)
    return expanded


def targets(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for target in entry.values():
                yield from targets(target if isinstance(target, list) else [target])


def test_navigation_contains_every_page_once() -> None:
    named = list(targets(navigation()))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert len(named) == len(set(named))
    assert pages - set(named) - {f"benchmarks/{p.name}" for p in (DOCS / "benchmarks").glob("*.md")} == set()
    assert set(named) <= pages


@pytest.mark.parametrize("page", sorted((DOCS / "adr").glob("*.md")), ids=name_of)
def test_decision_record_fits_one_page_and_has_its_parts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == ADR_PARTS
    assert len(text.split()) <= 650


def test_pages_and_examples_contain_no_local_paths() -> None:
    files = [
        *PAGES,
        ROOT / "CHANGELOG.md",
        *EXAMPLES,
        *(ROOT / "benchmarks").glob("*.py"),
        *(DOCS / "tools").glob("*.py"),
    ]
    matches = [
        f"{name_of(path)}: {match}" for path in files for match in _MACHINE_PATH.findall(path.read_text("utf-8"))
    ]
    assert not matches


def test_pages_do_not_install_another_accel_package() -> None:
    wrong = re.compile(r"pip install\s+[\"']?accel(?![-\w])")
    assert not [name_of(page) for page in PAGES if wrong.search(page.read_text(encoding="utf-8"))]


def test_scripts_named_on_pages_exist() -> None:
    script = re.compile(r"(?<![\w/])((?:docs|examples|tests|benchmarks)/[\w/.-]+\.(?:py|json|toml|md))")
    missing = {
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in script.findall(page.read_text(encoding="utf-8"))
        if not (ROOT / name).exists() and not (page.parent / name).exists()
    }
    assert not missing
