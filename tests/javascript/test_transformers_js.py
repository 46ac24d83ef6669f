"""transformers.js gives PyTorch's answers for folders of `accel convert --layout transformers.js`, in Node and in Chromium."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from .cases import ARCHITECTURES, TOLERANCE
from .conftest import Converted
from .running import browser, node_modules, run_in_browser, run_in_node

pytestmark = pytest.mark.skipif(
    node_modules() is None,
    reason="Node or @huggingface/transformers is not installed (ACCEL_NODE_MODULES; `make test-javascript` installs it)",
)
IN_BROWSER = ("bert", "mpnet", "llama", "whisper")


def cases_of(name: str, converted: Converted, dtypes: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Return the cases of a model, one for each dtype."""
    architecture = ARCHITECTURES[name]
    feeds = {
        key: {
            "type": str(value.dtype).removeprefix("torch."),
            "dims": list(value.shape),
            "data": value.ravel().tolist(),
        }
        for key, value in converted.reference.feeds.items()
    }
    case = {
        "folder": name, "loader": architecture.loader, "feeds": feeds, "outputs": architecture.outputs,
        "generates": architecture.generates, "level": architecture.graph_optimization,
    }  # fmt: skip
    return [{**case, "dtype": dtype} for dtype in dtypes or converted.folder.variants]


def check(case: Mapping[str, Any], result: Mapping[str, Any], converted: Converted) -> float:
    """Compare the answers of one case, and return the largest difference relative to an output's scale."""
    assert "error" not in result, f"{case['folder']} {case['dtype']}: {result['error']}"
    worst = 0.0
    for name, expected in converted.reference.outputs.items():
        output = np.array(result["answers"][name]["data"], np.float32).reshape(result["answers"][name]["dims"])
        assert output.shape == expected.shape
        mask = converted.reference.feeds.get("attention_mask")
        rows = np.ones(expected.shape[:2], bool)
        if mask is not None and expected.ndim == 3 and tuple(mask.shape) == expected.shape[:2]:
            rows = mask.numpy().astype(bool)
        if expected.ndim == 3:
            output, expected = output[rows], expected[rows]
        worst = max(worst, float(np.abs(output - expected).max() / max(1.0, np.abs(expected).max())))
    assert worst <= TOLERANCE[case["dtype"]], f"{case['folder']} {case['dtype']}: {worst}"
    if case["dtype"] == "fp32":
        expected_tokens = converted.reference.tokens
        # PyTorch returns Whisper's tokens without the first token.
        skip = len(result["tokens"][0]) - len(expected_tokens[0]) if expected_tokens else 0
        assert skip <= 1
        assert expected_tokens is None or [row[skip:] for row in result["tokens"]] == expected_tokens
    return worst


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_node_gives_the_answers_of_pytorch(
    name: str, converted: Callable[[str], Converted], measured: Callable[..., None]
) -> None:
    folder = converted(name)
    assert tuple(folder.folder.failed) == ARCHITECTURES[name].failing
    cases = cases_of(name, folder)
    results = run_in_node(folder.folder.path.parent, cases)
    assert len(results) == len(cases) == len(TOLERANCE) - len(folder.folder.failed)
    for case, result in zip(cases, results, strict=True):
        measured("node", name, case["dtype"], check(case, result, folder))


@pytest.mark.skipif(browser() is None, reason="Chromium is not installed (`apt-get install chromium`)")
@pytest.mark.parametrize("name", IN_BROWSER)
def test_chromium_gives_the_answers_of_pytorch(
    name: str, converted: Callable[[str], Converted], measured: Callable[..., None]
) -> None:
    folder = converted(name)
    cases = cases_of(name, folder, ("fp32", "q8", "q4"))
    results = run_in_browser(folder.folder.path.parent, cases)
    assert len(results) == len(cases), results
    for case, result in zip(cases, results, strict=True):
        measured("chromium", name, case["dtype"], check(case, result, folder))
