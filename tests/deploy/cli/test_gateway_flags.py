"""Flags about a gateway's clients reach the gateway, from `relayline gateway` and from `relayline up`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from relayline.coordinator.gateway.serve import GatewayConfig
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.deploy.cli.gateway import gateway_command
from relayline.deploy.cli.up import up_command
from relayline.wire.common.errors import UsageError

MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Gateway
metadata: {name: house}
spec:
  http: {host: 127.0.0.2, port: 8090}
  allowHosts: [house.example]
  pipelines: [{name: chat, url: "http://10.0.0.7:8080"}]
"""
FLAGS = ("--cors", "https://a.example,https://b.example", "--protect-metrics", "--connections-per-address", "7")
ORIGINS = ("https://a.example", "https://b.example")


class Taken(Exception):
    """Raised in place of serving."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., GatewayConfig]:
    """Run a command up to the moment at which its gateway would serve; returns the gateway."""
    found: list[GatewayConfig] = []

    def serving(config: GatewayConfig) -> None:
        found.append(config)
        raise Taken

    monkeypatch.setattr("relayline.coordinator.gateway.serve.serving_gateway", serving)
    monkeypatch.setattr(
        "relayline.deploy.launch.gateway.run.launch_gateway", lambda plan, *_, **__: serving(plan.config)
    )
    monkeypatch.setenv("RELAYLINE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "house.yaml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)

    def run(command: str, *arguments: str) -> GatewayConfig:
        with pytest.raises(Taken):
            {"gateway": gateway_command, "up": up_command}[command].main(list(arguments), standalone_mode=False)
        return found.pop()

    return run


def test_how_many_may_be_awake_is_a_flag_and_a_field(taken: Callable[..., GatewayConfig], tmp_path: Path) -> None:
    assert taken("gateway", "--backend", "chat=http://10.0.0.7:8080").awake_max == 0
    assert taken("gateway", "--backend", "chat=http://10.0.0.7:8080", "--awake-max", "2").awake_max == 2
    (tmp_path / "house.yaml").write_text(MANIFEST + "  awakeMax: 3\n")
    assert taken("up", "house.yaml").awake_max == taken("gateway", "--manifest", "house.yaml").awake_max == 3
    assert taken("gateway", "--manifest", "house.yaml", "--awake-max", "0").awake_max == 0, "flags win"


@pytest.mark.parametrize(
    "command",
    [("gateway", "--backend", "chat=http://10.0.0.7:8080"), ("gateway", "--manifest", "house.yaml"),
     ("up", "house.yaml")],
    ids=("backend", "manifest", "up"),
)  # fmt: skip
def test_rules_for_clients_are_flags_of_a_gateway(
    taken: Callable[..., GatewayConfig], command: tuple[str, ...]
) -> None:
    config = taken(*command, *FLAGS)
    assert (config.http.cors, config.http.protect_metrics) == (ORIGINS, True)
    assert config.limits == HttpLimits(connections_per_address_max=7)


def test_flags_win_over_a_manifest_and_leave_the_rest(taken: Callable[..., GatewayConfig], tmp_path: Path) -> None:
    (tmp_path / "keys").touch()
    assert taken("gateway", "--manifest", "house.yaml").http == HttpListener(
        "127.0.0.2", 8090, allow_hosts=("house.example",)
    )
    changed = taken("up", "house.yaml", "--allow-host", "other.example", "--api-keys", "keys").http
    assert changed == HttpListener("127.0.0.2", 8090, api_keys_file=Path("keys"), allow_hosts=("other.example",))
    assert taken("up", "house.yaml", "--http", "127.0.0.1:0").http.port == 0


@pytest.mark.usefixtures("taken")
def test_a_gateway_links_no_traces_and_says_so() -> None:
    with pytest.raises(UsageError, match=r"--jaeger-url: .* is a gateway's manifest"):
        up_command.main(["house.yaml", "--jaeger-url", "http://h:1"], standalone_mode=False)
