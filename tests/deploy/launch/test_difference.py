"""A changed manifest compared with the running one: layers, values that need a restart, and no invented difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relayline.deploy.cli.apply import show_difference
from relayline.deploy.launch.difference import Change, Difference, difference
from relayline.deploy.launch.prepare import override, settled
from relayline.deploy.manifest import Manifest

N_LAYERS = 24


def manifest(stages: Any = 2, **spec: Any) -> Manifest:
    return Manifest.model_validate(
        {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "m"},
         "spec": {"model": {"path": "/models/m.gguf"}, "stages": stages, **spec}}
    )  # fmt: skip


def named(*layers: Any) -> list[dict[str, Any]]:
    return [{"name": name, "layers": each} for name, each in zip(("desk", "laptop", "old"), layers, strict=False)]


def against(running: Manifest, wanted: Manifest, *cuts: int) -> Difference:
    """Compare with the pipeline running since `up`, now cut at `cuts`; it was launched with its own layers."""
    edges = (0, *range(1, len(cuts) + 1), N_LAYERS)
    ranges = [(edges[at], edges[at + 1]) for at in range(len(edges) - 1)]
    return difference(settled(running, Path("/models/m.gguf"), ranges), wanted, cuts, N_LAYERS)


def test_the_same_manifest_is_no_difference_wherever_layers_are_now() -> None:
    assert against(manifest(), manifest(), 9) == Difference((), (9,), ())
    made = override(manifest(wire={"tls": {"mode": "required"}}),
                    {"wire.tls.directory": "/state/tls", "wire.tokenFile": "/state/token"})  # fmt: skip
    assert against(made, manifest(wire={"tls": {"mode": "required"}}), 9).others == (), "the launcher made both"


def test_layers_are_compared_with_those_of_now() -> None:
    running = manifest(named([0, 8], [8, 16], [16, 24]))
    assert against(running, manifest(named([0, 8], [8, 12], [12, 24])), 8, 12) == Difference((), (8, 12), ())
    differs = against(running, running, 8, 12)
    assert differs.cuts == (8, 16)
    assert [str(change) for change in differs.layers] == [
        "stages[laptop].layers: 8-11 -> 8-15", "stages[old].layers: 12-23 -> 16-23",
    ]  # fmt: skip
    assert differs.others == ()
    assert against(running, manifest(named("auto", "auto", [15, 24])), 8, 12).cuts == (8, 15), "auto keeps what runs"


def test_everything_else_takes_a_new_start() -> None:
    wanted = manifest([{"name": "stage-0", "threads": 3}, {"name": "stage-1", "layers": [4, 24]}],
                      context={"tokens": 512})  # fmt: skip
    running = manifest([{"name": "stage-0", "threads": 2}, {"name": "stage-1"}])
    differs = against(running, wanted, 9)
    assert {change.field for change in differs.others} >= {"context.tokens", "stages[stage-0].threads"}
    assert differs.cuts == (4,)
    moved = against(manifest(), manifest(model={"path": "/models/other.gguf"}), 9)
    assert moved.others == (Change("model.path", "/models/m.gguf", "/models/other.gguf"),)


def test_other_stages_are_one_line() -> None:
    differs = against(manifest(3), manifest(), 8, 16)
    assert [str(change) for change in differs.others] == ["stages: stage-0, stage-1, stage-2 -> stage-0, stage-1"]
    assert differs.layers == ()


def test_one_more_stage_joins_a_running_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    running = manifest(named([0, 8], [8, 24]))
    wanted = manifest([*named("auto", "auto"), {"name": "fifth"}], spares=[{"name": "spare"}])
    differs = against(running, wanted, 8)
    assert [stage.name for stage in differs.added] == ["fifth", "spare"]
    assert differs.spares == {"spare"}
    assert (differs.layers, differs.others) == ((), ())
    again = difference(settled(running, Path("/models/m.gguf"), [(0, 8), (8, 24)]), wanted, (8, 12), N_LAYERS,
                       holders=["desk", "laptop", "fifth"], known=["desk", "laptop", "fifth", "spare"])  # fmt: skip
    assert again == Difference((), (8, 12), ()), "it has joined since"
    all_fixed = manifest(named([0, 8], [8, 20], [20, 24]))
    kept = difference(settled(running, Path("/models/m.gguf"), [(0, 8), (8, 24)]), all_fixed, (8, 12), N_LAYERS,
                      holders=["desk", "laptop", "old"], known=["desk", "laptop", "old"])  # fmt: skip
    assert (kept.cuts, [change.field for change in kept.layers]) == (
        (8, 20), ["stages[laptop].layers", "stages[old].layers"],
    ), "what joined since the start takes the layers that the manifest fixes"  # fmt: skip
    left_out = difference(settled(running, Path("/models/m.gguf"), [(0, 8), (8, 24)]), running, (8, 12), N_LAYERS,
                          holders=["desk", "laptop", "fifth"], known=["desk", "laptop", "fifth"])  # fmt: skip
    assert left_out == Difference((), (8, 12), (), unlisted=("fifth",)), "it was taken out of the manifest again"
    show_difference("m", left_out, is_dry=False, as_json=False, restarts="")
    assert capsys.readouterr().out.splitlines() == [
        "m already runs with these settings; nothing to change",
        "stages[fifth]: was added while it served, and is not in the manifest: the next start leaves it out",
    ]
    gone = against(running, manifest(named("auto")), 8)
    assert gone.others == (Change("stages", "desk, laptop", "desk"),)
    elsewhere = manifest([*named("auto", "auto"), {"name": "fifth", "host": "10.0.0.5"}])
    assert [change.field for change in against(running, elsewhere, 8).others] == ["stages"], "nothing listens for it"


def test_a_stage_does_not_join_where_the_layers_of_others_are_fixed() -> None:
    """It would share all layers anew, also those that the manifest fixes."""
    running = manifest(named([0, 8], [8, 24]))
    fixed = manifest(named([0, 8], [8, 20], [20, 24]))
    differs = against(running, fixed, 8)
    assert (differs.layers, differs.added, differs.cuts) == ((), (), (8,))
    assert differs.others == (Change("stages", "desk, laptop", "desk, laptop, old"),)
    assert differs.refusal.startswith("old would share all layers with the others, and the manifest fixes `layers` of")
    assert against(running, manifest(named([0, 8], "auto", "auto")), 8).refusal, "one is enough"
    spare = manifest(named([0, 8], [8, 24]), spares=[{"name": "old"}])
    assert [stage.name for stage in against(running, spare, 8).added] == ["old"], "a spare takes nobody's layers"
