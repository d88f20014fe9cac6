"""The context of a pipeline that leaves it open: chosen by `up`, `plan` and `doctor`, kept while the pipeline runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from relayline.deploy.cli.main import relayline
from relayline.deploy.launch import context
from relayline.deploy.launch.context import with_usual_context
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, StateDir, register
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.settings import open_context
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.phase import Phase
from relayline.wire.common.units import GIB
from tests.support.launches import launched
from tests.support.tiny_models import make_tiny

LENGTH = 16_384


@pytest.fixture(name="model")
def long_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model that was trained for LENGTH tokens, on a machine with much memory and no pipeline."""
    monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: 64 * GIB)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_tiny("llama", tmp_path / "model.gguf", tokenizer=True, extra_values={"context_length": LENGTH})


def manifest_of(model: Path, context: str = "") -> Path:
    path = model.parent / "pipeline.yaml"
    path.write_text(
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: p}\n"
        f"spec:\n  model: {{path: {model.name}}}\n{context}"
    )
    return path


def planned(*arguments: str) -> dict[str, Any]:
    """The JSON that a command prints."""
    result = CliRunner().invoke(relayline, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def context_of(*arguments: str) -> tuple[int, int]:
    found = planned(*arguments)
    return found["lanes"], found["ctx_tokens"]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("", (32, LENGTH)),
        ("  context: {tokens: 4096}\n", (32, 4_096)),
        ("  context: {lanes: 3}\n", (3, LENGTH)),
        ("  context: {lanes: 3, tokens: 700}\n", (3, 700)),
    ],
)
def test_plan_and_up_choose_it_where_the_manifest_does_not(
    model: Path, context: str, expected: tuple[int, int]
) -> None:
    path = manifest_of(model, context)
    assert context_of("plan", str(path)) == expected
    assert context_of("up", str(path), "--dry-run") == expected


def test_flags_stand_and_a_model_alone_gets_it_too(model: Path) -> None:
    assert context_of("plan", str(model)) == (32, LENGTH)
    assert context_of("up", str(model), "--dry-run", "--stages", "1") == (32, LENGTH)
    assert context_of("up", str(model), "--dry-run", "--ctx", "1024") == (32, 1_024)
    assert context_of("up", str(model), "--dry-run", "--lanes", "2", "--stages", "3") == (2, LENGTH)
    assert context_of("plan", str(DEMO_MODEL)) == (32, 512), "it was trained for less"


def test_little_memory_gives_less(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = planned("plan", str(model))
    needed = sum(stage["memory_bytes"] for stage in usual["stages"])
    monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: int(1.5 * needed))
    assert context_of("plan", str(model)) < (32, LENGTH)


def test_a_running_pipeline_keeps_its_own(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settled = tmp_path / "settled.yaml"
    settled.write_text(manifest_of(model, "  context: {lanes: 5, tokens: 4096}\n").read_text())
    wanted = load_manifest(manifest_of(model))
    kept, anew = (5, 4_096), (32, LENGTH)
    # Its supervisor may be this process: it has ended the pipeline, and starts it again.
    for is_running, phase, expected in (
        (True, Phase.READY, kept),
        (True, Phase.STOPPED, anew),
        (False, Phase.DEAD, anew),
    ):
        one = SimpleNamespace(
            state=SimpleNamespace(name="p", phase=phase),
            is_running=is_running,
            directory=SimpleNamespace(manifest=settled),
        )
        monkeypatch.setattr(context, "launched", lambda *_asked, one=one: [one])
        engine = with_usual_context(wanted, open_context(wanted.spec)).engine
        assert (engine.n_lanes, engine.ctx_tokens) == expected
        # A check of the next start looks at the memory that this one will have left.
        monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: 1 << 20)
        engine = with_usual_context(wanted, open_context(wanted.spec), ends_first=True).engine
        assert (engine.n_lanes, engine.ctx_tokens) == anew
        monkeypatch.undo()


def test_one_of_the_same_name_that_runs_elsewhere_has_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere, path = StateDir(tmp_path / "elsewhere"), manifest_of(model)
    elsewhere.path.mkdir()
    elsewhere.manifest.write_text(path.read_text() + "  context: {lanes: 5, tokens: 4096}\n")
    me = identify(os.getpid())
    assert me is not None
    elsewhere.store(LaunchState(STATE_VERSION, "p", str(path), Phase.READY, me.pid, me.start_ticks))
    register(elsewhere.path)
    found = [launched(monkeypatch, path, *flags).manifest.engine for flags in ((), ("--state-dir", elsewhere.path))]
    assert [(engine.n_lanes, engine.ctx_tokens) for engine in found] == [(32, LENGTH), (5, 4_096)]


def test_a_model_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    absent = smallest_manifest(tmp_path / "absent.gguf")
    assert with_usual_context(absent, open_context(absent.spec)) is absent
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    unread = smallest_manifest(broken)
    assert with_usual_context(unread, open_context(unread.spec)) is unread


def test_a_manifest_of_a_model_on_the_hub_has_the_same_context(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.deploy.launch.prepare.resolve_model", lambda reference, sha256: model)
    monkeypatch.setattr("relayline.deploy.launch.projector.projector_of", lambda reference: "")
    path = manifest_of(model)
    path.write_text(path.read_text().replace(f"path: {model.name}", "hf: 'hf://org/repo/model.gguf'"))
    engine = launched(monkeypatch, path).manifest.engine
    assert (engine.n_lanes, engine.ctx_tokens) == (32, LENGTH)
