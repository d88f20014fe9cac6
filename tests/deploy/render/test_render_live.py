"""A rendered deployment, run: its own commands, secrets and manifest, with the container's paths below a directory."""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relayline.deploy.cli import main as cli
from relayline.deploy.render import inside, observability
from relayline.deploy.render.targets import render
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import Running, running
from tests.deploy.manifest.test_manifest import SMALLEST, parsed
from tests.support.golden_renders import rendered_gateway
from tests.support.yaml_text import read_yaml

KEY = "key-of-the-only-client"
PORTS = {
    "0.0.0.0:50050": "0.0.0.0:0",
    "0.0.0.0:8080": "127.0.0.1:0",
    "0.0.0.0:50051": "0.0.0.0:0",
    "0.0.0.0:9464": "127.0.0.1:0",
}


class Machine:
    """A fake Compose: gives every service its files and moves paths, ports and names to this machine."""

    def __init__(self, text: str, root: Path) -> None:
        self.text, self.root = text, root
        self.compose = read_yaml(text)

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run the commands at the head of the file, and put every config and secret where its service reads it."""
        monkeypatch.chdir(self.root)
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.root / "state"))
        for line in self.text.splitlines():
            if line.startswith("#   relayline certs"):
                assert CliRunner().invoke(cli.relayline, shlex.split(line.partition(" && ")[0])[2:]).exit_code == 0
        for secret in self.compose.get("secrets", {}).values():
            Path(secret["file"]).write_text(KEY + "\n")
        for name, service in self.compose["services"].items():
            if name in observability.SERVICES:
                continue
            for secret in service.get("secrets", ()):
                data = Path(self.compose["secrets"][secret["source"]]["file"]).read_text()
                self._write(name, secret["target"], data)
            for mount in service.get("volumes", ()):
                if isinstance(mount, dict) and mount["target"].startswith("/etc/relayline"):
                    self._mount(name, mount["target"], Path(mount["source"]))
            for config in service.get("configs", ()):
                self.configure(name, config)
            if name.endswith("coordinator"):
                models = self.root / name / "models"
                models.mkdir()
                (models / "demo.gguf").symlink_to(DEMO)

    def configure(self, name: str, config: dict[str, str], **addresses: str) -> None:
        """Write a service's configuration; `addresses` replaces the placeholders."""
        content = self.compose["configs"][config["source"]]["content"].replace("$$", "$")
        for placeholder, address in addresses.items():
            content = content.replace(f"{placeholder}-coordinator:8080", address)
        self._write(name, config["target"], self._moved(name, content))

    def command(self, name: str, join: str = "") -> list[str]:
        """The service's command, for this machine."""
        moved = [
            PORTS.get(part) or (join if part.endswith("coordinator:50050") else self._moved(name, part))
            for part in self.compose["services"][name]["command"]
        ]
        if "--advertise" in moved:
            moved[moved.index("--advertise") + 1] = "localhost"  # also in every certificate
        return [part.replace("${RELAYLINE_THREADS:-0}", "1") for part in moved]

    def _mount(self, name: str, target: str, source: Path) -> None:
        for path in source.rglob("*") if source.is_dir() else (source,):
            if path.is_file():
                inner = f"{target}/{path.relative_to(source)}" if source.is_dir() else target
                self._write(name, inner, path.read_text())

    def _write(self, name: str, target: str, data: str) -> None:
        path = Path(self._moved(name, target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
        path.chmod(0o600)

    def _moved(self, name: str, text: str) -> str:
        for inner in ("/etc/relayline", inside.MODELS_DIR, inside.STATE_DIR):
            text = text.replace(inner, f"{self.root}/{name}{inner}")
        return text


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Running, list[Running]]]:
    manifest = parsed(
        SMALLEST.replace("model.gguf", "demo.gguf")
        + "  context: {tokens: 256, lanes: 2}\n  batching: {calibrate: false}\n  coordinator: {apiKeysFile: keys}\n"
    )
    machine = Machine(render(manifest, "compose")["compose.yaml"], tmp_path)
    machine.prepare(monkeypatch)
    with ExitStack() as stack:
        coordinator = stack.enter_context(running(*machine.command("coordinator")))
        assert coordinator.event["event"] == "joinable"
        join = f"localhost:{coordinator.event['join'].rpartition(':')[2]}"
        stages = [stack.enter_context(running(*machine.command(f"stage-{index}", join))) for index in range(2)]
        yield coordinator, stages


def ask(url: str, body: dict[str, Any] | None = None, key: str = "") -> tuple[int, bytes]:
    """One request; the status and the answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode() if body else None, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.slow
def test_a_rendered_pipeline_serves(pipeline: tuple[Running, list[Running]]) -> None:
    coordinator, stages = pipeline
    url = coordinator.event["url"]
    event = coordinator.next_event("ready")
    assert event["stages"] == 2
    assert ask(f"{url}/live")[0] == 200
    assert ask(f"{url}/health")[0] == 200
    for stage in stages:
        assert ask(f"http://{stage.event['metrics']}/metrics")[0] == 200, "the probes' path"
    assert ask(f"{url}/v1/models")[0] == 401
    body = {"model": event["model"], "prompt": "The", "max_tokens": 3}
    status, answer = ask(f"{url}/v1/completions", body, KEY)
    assert status == 200
    assert json.loads(answer)["usage"]["completion_tokens"] == 3
    assert coordinator.stop() == 0, "the coordinator goes first, as in the file"
    assert [stage.stop() for stage in stages] == [0, 0]


HOUSE = """apiVersion: relayline.dev/v1alpha1
kind: Gateway
metadata: {name: house}
spec:
  apiKeysFile: keys
  pipelines: [{name: chat, manifest: small.yaml, replicas: [{url: "http://127.0.0.1:9"}]}]
"""


@pytest.mark.slow
def test_a_rendered_gateway_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = "  context: {tokens: 256, lanes: 2}\n  batching: {calibrate: false}\n  coordinator: {apiKeysFile: keys}\n"
    (tmp_path / "small.yaml").write_text(SMALLEST.replace("model.gguf", "demo.gguf") + spec)
    (tmp_path / "house.yaml").write_text(HOUSE)
    machine = Machine(rendered_gateway(tmp_path / "house.yaml", "compose")["compose.yaml"], tmp_path)
    machine.prepare(monkeypatch)
    with ExitStack() as stack:
        coordinator = stack.enter_context(running(*machine.command("chat-coordinator")))
        join = f"localhost:{coordinator.event['join'].rpartition(':')[2]}"
        for index in range(2):
            stack.enter_context(running(*machine.command(f"chat-stage-{index}", join)))
        model = coordinator.next_event("ready")["model"]
        (config,) = machine.compose["services"]["gateway"]["configs"]
        machine.configure("gateway", config, chat=coordinator.event["url"].removeprefix("http://"))
        gateway = stack.enter_context(running(*machine.command("gateway"), "--http", "127.0.0.1:0"))
        url = gateway.event["url"]
        assert gateway.event["pipelines"] == ["chat", "chat-2"]
        assert ask(f"{url}/health")[0] == 200, "the probes' path"
        body = {"model": model, "prompt": "The", "max_tokens": 3}
        assert ask(f"{url}/v1/completions", body)[0] == 401
        status, answer = ask(f"{url}/v1/completions", body, KEY)
        assert status == 200
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
