"""Goal: a manifest says which hosts can only dial out, and everything that is derived from it goes by that."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.doctor.network import hosts_of
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.inviting import join_line
from relayline.deploy.launch.ports import wanted_ports
from relayline.deploy.launch.serving import flag_defaults
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.manifest.load import ManifestError
from relayline.deploy.render.targets import render
from relayline.wire.common.errors import UsageError
from relayline.wire.links.enrolment import new_token

RELAYED = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: nat}
spec:
  model: {path: m.gguf}
  stages:
  - {name: desk, host: localhost, port: 50051}
  - {name: laptop, host: home, relay: true}
  - {name: old, host: home, relay: true, port: 50060}
  - {name: shed, host: shed, relay: true}
  - {name: server, host: 10.0.0.3}
  coordinator: {host: 10.0.0.1}
"""


def test_relayed_stages_are_reached_at_the_coordinators_host() -> None:
    manifest = parse_manifest(RELAYED.encode(), "m")
    ports = {stage.name: manifest.listen_port(stage) for stage in manifest.members}
    assert ports == {"desk": 50_051, "laptop": 50_052, "old": 50_060, "shed": 50_053, "server": 50_051}
    assert manifest.relay_port == 50_048
    wanted = {what: (host, port) for what, host, port in wanted_ports(manifest)}
    assert wanted["tunnels of relayed stages"] == ("0.0.0.0", 50_048)
    assert wanted["relayed stage laptop"] == ("0.0.0.0", 50_052)
    assert [*hosts_of(manifest)] == ["10.0.0.3", "10.0.0.1"], "nobody can connect to a relayed host"
    defaults = flag_defaults(manifest)
    assert defaults["relay_listen"] == ("0.0.0.0", 50_048)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("host: shed, relay", "relay", "relay is for a stage on another host"),
        ("port: 50060", "port: 50051", "port 50051 on 10.0.0.1 is taken by stage 'desk'"),
        ("port: 50060", "port: 50048", "port 50048 is taken by the coordinator's relayPort"),
    ],
)
def test_a_relayed_stage_that_cannot_be_reached_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(RELAYED.replace(old, new).encode(), "m")
    assert message in str(caught.value)


def test_a_relayed_stage_is_not_rendered() -> None:
    with pytest.raises(UsageError, match="stage laptop has `relay`"):
        render(parse_manifest(RELAYED.encode(), "m"), "kubernetes")


def test_the_line_for_a_relayed_host_says_so() -> None:
    plan = arrange(parse_manifest(RELAYED.encode(), "m"), Path("m.yaml"), Path("state/m.yaml"))
    laptop = next(stage for stage in plan.remote if stage.name == "laptop")
    assert laptop.is_relayed
    assert laptop.arguments[0] == "--relay"
    assert not {"--listen", "--advertise", "--metrics"} & {*laptop.arguments}
    token = str(new_token("laptop", b"a certificate"))
    assert join_line("10.0.0.1:50049", token, is_relayed=True) == f"relayline join 10.0.0.1:50049 {token} --relay"
