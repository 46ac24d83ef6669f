"""Tests of the registry of model families, which is searched by model type and contains families of other
distributions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from accel.interfaces import family_registry
from accel.interfaces.family import Family
from accel.interfaces.family_registry import family_of, max_text_sizes

FAMILY_MODULE = """
from accel.interfaces.family import Family

class Tall(Family):
    positions = "mask"

FAMILY = Tall()
"""


@pytest.fixture
def another_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution with two entries for model families: one refers to the module `tall`, and one refers to a
    module that does not exist.
    """
    package = tmp_path / "tall_models"
    package.mkdir()
    (package / "__init__.py").write_text('MODULES = {"tall-text": "tall", "broken": "absent"}', encoding="utf-8")
    (package / "tall.py").write_text(FAMILY_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    entries = (EntryPoint("tall", "tall_models:MODULES", "accel.families"),)
    monkeypatch.setattr(family_registry, "entry_points", lambda _group: entries)
    family_registry._family.cache_clear()
    yield
    family_registry._family.cache_clear()
    for name in ("tall_models", "tall_models.tall"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("another_distribution")
def test_family_of_another_distribution_is_imported_on_demand() -> None:
    assert type(family_of({"model_type": "short-text"})) is Family
    assert "tall_models.tall" not in sys.modules
    assert family_of(SimpleNamespace(model_type="tall-text")).positions == "mask"
    with pytest.raises(ModuleNotFoundError):
        family_of({"model_type": "broken"})


@pytest.mark.parametrize("config", [None, {}, {"model_type": None}, SimpleNamespace(), {"model_type": "bert"}])
def test_unknown_configs_use_the_general_family(config: object) -> None:
    assert type(family_of(config)) is Family


def test_position_tables_that_start_after_padding() -> None:
    limit = {"max_position_embeddings": 514}
    assert max_text_sizes({"model_type": "bert", **limit}) == {"sequence": 514}
    assert max_text_sizes({"model_type": "roberta", **limit, "pad_token_id": 1}) == {"sequence": 512}
    assert max_text_sizes({"model_type": "llama", **limit, "rope_theta": 1e4}) == {}
