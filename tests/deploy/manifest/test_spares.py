"""A manifest's spares: stages like the others, but without layers at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.launch.prepare import settled
from relayline.deploy.launch.serving import flag_defaults
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.render.targets import TARGETS, render
from relayline.wire.common.errors import UsageError

TEXT = """\
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: m}
spec:
  model: {path: m.gguf}
  stages:
    - name: desk
    - name: laptop
  spares:
    - name: SPARE
      LAYERS
"""


def written(tmp_path: Path, spare: str, layers: str = "") -> Path:
    path = tmp_path / "m.yaml"
    path.write_text(TEXT.replace("SPARE", spare).replace("LAYERS", layers))
    return path


def manifest(tmp_path: Path) -> Manifest:
    return load_manifest(written(tmp_path, "old"))


def test_they_join_behind_the_stages_and_hold_no_layers(tmp_path: Path) -> None:
    made = manifest(tmp_path)
    assert [stage.name for stage in made.stages] == ["desk", "laptop"]
    assert [stage.name for stage in made.members] == ["desk", "laptop", "old"]
    again = settled(made, tmp_path / "m.gguf", [(0, 4), (4, 8)])
    assert [(stage.layer_range, bool(stage.threads)) for stage in again.members] == [
        ((0, 4), True), ((4, 8), True), (None, True)
    ]  # fmt: skip
    defaults = flag_defaults(again)
    assert (defaults["names"], defaults["spares"]) == ("desk,laptop", "old")


@pytest.mark.parametrize(
    ("spare", "layers", "words"),
    [
        ("laptop", "", r"spec.spares\[0\].name: stage name 'laptop' is taken"),
        ("old", "layers: [0, 3]", "spare 'old' gets the layers of the stage that it replaces"),
    ],
)
def test_a_stage_that_cannot_be_a_spare_is_refused(tmp_path: Path, spare: str, layers: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_manifest(written(tmp_path, spare, layers))


@pytest.mark.parametrize("target", TARGETS)
def test_rendered_deployments_have_none(tmp_path: Path, target: str) -> None:
    with pytest.raises(UsageError, match="spares stand by where `relayline up` runs the pipeline"):
        render(manifest(tmp_path), target)
