"""A first start over hosts without measurements: real processes over loopback, one host four times as fast."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.launch.prepare import planned_cuts
from relayline.deploy.launch.survey import wants_survey
from relayline.deploy.manifest import load_manifest
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.slow_hosts import CTX_TOKENS, SLOWED, local_command, manifest_text
from relayline.wire.common.child_command import module_command
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow  # real processes

LAYER_MS = {"laptop": 40.0, "server": 10.0}
STOP_S = 120.0


class Up:
    """`relayline up` of the two hosts, and the stages started on them. A context manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[dict[str, Any]] = []
        self._stages: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Up:
        environment = os.environ | {
            "XDG_STATE_HOME": str(self.directory / "xdg-state"),
            "XDG_CACHE_HOME": str(self.directory / "cache"),
        }
        state = self.directory / "state"
        flags = ("up", str(self.directory / "manifest.yaml"), "--json", "--state-dir", str(state))
        command = module_command("relayline.deploy.cli", *flags)
        with (self.directory / "up.log").open("ab") as log:
            self._up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        assert self._up.stdout is not None
        for line in self._up.stdout:
            self.events.append(event := json.loads(line))
            if event["event"] == "remote":
                self._start(event, state)
            if event["event"] == "ready":
                return self
        self.__exit__()
        raise AssertionError(f"not ready: {(self.directory / 'up.log').read_text()}")

    def _start(self, event: dict[str, Any], state: Path) -> None:
        name = event["name"]
        more = {"SLOWED_LAYER_MS": str(LAYER_MS[name]), "PYTHONPATH": str(SLOWED)}
        more["SLOWED_AT_ONCE"] = "1"  # on a clock of their own, since a busy machine would add to each in its own way
        more["XDG_CACHE_HOME"] = str(self.directory / f"{name}-cache")
        command = module_command("relayline.deploy.cli", *local_command(event["command"], state), "--always-fetch")
        with (self.directory / f"{name}.log").open("ab") as log:
            self._stages.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | more))

    def __exit__(self, *_: object) -> None:
        for process in (self._up, *self._stages):
            process.terminate()
        for process in (self._up, *self._stages):
            process.wait(STOP_S)
        assert self._up.stdout is not None
        self._up.stdout.close()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "manifest.yaml").write_text(manifest_text(DEMO_MODEL, list(LAYER_MS), 4, calibrates=False))
    return tmp_path


def test_the_first_start_plans_from_measurements_and_the_next_one_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_layers = inspect_model(DEMO_MODEL).n_layers
    with Up(directory) as up:
        (planned,) = up.of("planned")
        plan = planned["plan"]
        assert plan["from"] == "measured"
        (slow, fast) = plan["stages"]
        assert (slow["relative_speed"], fast["relative_speed"]) == (1.0, 4.0)
        n_fast = fast["layers"][1] - fast["layers"][0]
        assert n_fast > n_layers / 2, "the faster host has more layers"
        assert plan["tok_s"] > plan["equal_tok_s"]
        assert (slow["cores"], slow["processor"]) == (len(os.sched_getaffinity(0)), fast["processor"])
        assert plan["survey_s"] > 0
        assert "planned from measured hosts: laptop 1.0x, server" in planned["message"]
        assert up.of("splitting")
        with urllib.request.urlopen(f"{up.of('ready')[0]['url']}/v1/pipeline") as answer:
            described = json.load(answer)
        assert described["planned"]["stages"] == plan["stages"], "and it is shown for as long as the pipeline runs"
        assert [stage["layers"] for stage in described["stages"]] == [stage["layers"] for stage in plan["stages"]]
    state, cache = directory / "xdg-state", directory / "cache"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    manifest = load_manifest(directory / "manifest.yaml")
    assert not wants_survey(manifest, DEMO_MODEL, measure=None), "the next start plans at once"
    assert planned_cuts(manifest, DEMO_MODEL) == (slow["layers"][1],), "and to the same layers"


def test_an_open_context_is_chosen_when_the_hosts_are_known(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf", tokenizer=True, extra_values={"context_length": 4_096})
    text = manifest_text(model, list(LAYER_MS), 4, calibrates=False)
    given = f"tokens: {CTX_TOKENS}, "
    assert given in text
    (tmp_path / "manifest.yaml").write_text(text.replace(given, ""))
    with Up(tmp_path) as up:
        assert up.of("planned")
        with urllib.request.urlopen(f"{up.of('ready')[0]['url']}/v1/pipeline") as answer:
            described = json.load(answer)
        assert (described["lanes"], described["ctx_tokens"]) == (4, 4_096)
        settled = load_manifest(tmp_path / "state" / "manifest.json")
        assert settled.engine.ctx_tokens == 4_096, "a restarted coordinator does not choose again"
