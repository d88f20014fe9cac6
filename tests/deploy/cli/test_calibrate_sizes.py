"""The bytes that a step of an artifact reads: what `plan` divides measured times by."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.cli.calibrate import sizes_of
from tests.support.tiny_models import make_tiny


@pytest.mark.parametrize("family", ["llama", "kimi-k3"])
def test_layers_of_an_artifact_are_as_large_as_those_of_the_model(family: str, tmp_path: Path) -> None:
    """Placeholders, with which later slices of kimi-k3 begin, are not computed and do not count."""
    model, cut = make_tiny(family, tmp_path / "model.gguf", n_layers=10), 8
    split_model(model, tmp_path / "out", cuts=(cut,))
    facts, found = inspect_model(model), [sizes_of(tmp_path / "out" / f"stage-{index}.gguf") for index in (0, 1)]
    assert [sizes["layer_bytes"] for sizes in found] == [sum(facts.layer_bytes[:cut]), sum(facts.layer_bytes[cut:])]
    assert [sizes["head_bytes"] for sizes in found] == [0, facts.head_bytes]
