"""The counts of docs/development/adding.md: how many product files name an entry of a table.

An existing entry shows the cost of the next one, as long as only its table and its use name it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from relayline.coordinator.model import family, family_rules
from relayline.coordinator.model.families import FAMILIES
from relayline.wire.common.sampler_fields import BY_NAME
from relayline.wire.settings.setting import entries
from relayline.wire.settings.table import TABLES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "development" / "adding.md"
# Not the product: generated code, and what only tests and pictures use.
LEFT_OUT = ("wire/pb/", "deploy/testing/", "deploy/demo/", "deploy/build/")
SETTING_TABLE = "wire/settings/table.py"
FIELD_TABLE = "wire/common/sampler_fields.py"
DIALECTS = ("coordinator/http/llama/", "coordinator/http/ollama/")
FAMILY_TABLE = "coordinator/model/families.py"


@functools.cache
def product() -> dict[str, str]:
    """Every file of the product, with its text."""
    paths = [path for room in ("wire", "stage", "coordinator", "deploy") for path in (ROOT / room).rglob("*.py")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {path: text for path, text in texts.items() if not path.startswith(LEFT_OUT)}


def files_with(pattern: str) -> set[str]:
    """The product's files that contain the pattern."""
    found = re.compile(pattern)
    return {path for path, text in product().items() if found.search(text)}


def documented(task: str) -> int:
    """The number of files that the page says for a task."""
    found = re.search(rf"\ba {task} (\d+)\b", PAGE.read_text())
    assert found, f"the page says no number for a {task}"
    return int(found[1])


@pytest.mark.parametrize("name", ["prefill_chunk", "served_model_name", "device_sampling", "rebalance_every_s"])
def test_a_setting_is_its_entry_and_its_use(name: str) -> None:
    assert name in {entry.name for table in TABLES for entry in entries(table)}
    found = files_with(rf"\b{name}\b")
    assert SETTING_TABLE in found
    assert len(found) == documented("setting"), found


@pytest.mark.parametrize("name", ["dynatemp_range", "typical_p"])
def test_a_sampler_field_is_its_entry_and_its_use(name: str) -> None:
    """The rooms of llama-server's and Ollama's dialects list their names too."""
    assert BY_NAME[name].is_public
    found = {path for path in files_with(rf"['\"]{name}['\"]") if not path.startswith(DIALECTS)}
    assert FIELD_TABLE in found
    assert all(path.startswith("stage/sampling/") for path in found - {FIELD_TABLE})
    assert len(found) == documented("sampler field"), found


@pytest.mark.parametrize("name", ["plamo3", "jamba", "granitehybrid", "mamba"])
def test_a_family_is_its_row(name: str) -> None:
    assert name in FAMILIES
    assert files_with(rf"['\"]{name}['\"]") == {FAMILY_TABLE}


def test_a_rule_of_a_family_stands_next_to_the_table() -> None:
    """The row and its rule are the two files. Rules that no family has are those of `Family` itself."""
    rules = {
        rule.__module__
        for row in FAMILIES.values()
        for field in dataclasses.fields(row)
        if callable(rule := getattr(row, field.name))
    }
    assert family_rules.__name__ in rules
    assert rules <= {family_rules.__name__, family.__name__}
    assert documented("family") == 2
