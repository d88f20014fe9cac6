"""Compose for several machines: a file for each host, ports as in the manifest, certificates by token."""

from __future__ import annotations

import json
import shlex
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from relayline.deploy.cli import main as cli
from relayline.deploy.manifest import load_manifest, parse_manifest
from relayline.deploy.render import compose_hosts, inside
from relayline.deploy.render.targets import render
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import running
from relayline.wire.common.errors import UsageError
from relayline.wire.links.enrolment import read_token
from tests.deploy.manifest.test_manifest import parsed, with_stages
from tests.support.golden_renders import example_file, rendered
from tests.support.yaml_text import read_yaml

HEAD, SERVER = "compose.10.0.0.1.yaml", "compose.10.0.0.2.yaml"
TWO_HOSTS = with_stages("name: here", "name: there, host: 10.0.0.2") + "  coordinator: {host: 10.0.0.1}\n"


def example() -> dict[str, Any]:
    return {name: read_yaml(text) for name, text in rendered("several-hosts", compose_hosts.TARGET).items()}


def files_of(text: str) -> dict[str, Any]:
    made = render(parsed(text), compose_hosts.TARGET)
    return {name: read_yaml(one) for name, one in made.items()}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.relayline, [str(argument) for argument in arguments])


def flag(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


# --- content of the files ---------------------------------------------------------------------------------------------


def test_every_host_has_a_file_with_its_own_processes() -> None:
    files = example()
    assert list(files) == [HEAD, SERVER], "the coordinator's first"
    plain = {name for name, service in files[HEAD]["services"].items() if "profiles" not in service}
    assert plain == {"coordinator", "desk"}
    assert set(files[SERVER]["services"]) == {"server-card", "server-cores"}
    assert set(files[HEAD]["services"]["coordinator"]["depends_on"]) == {"desk"}, "others are not of this file"


def test_stages_of_one_host_publish_the_ports_that_they_tell() -> None:
    services = example()[SERVER]["services"]
    counted = {"server-card": (50_051, 9_464), "server-cores": (50_052, 9_465)}
    for name, (frames, metrics) in counted.items():
        service = services[name]
        assert service["ports"] == [f"{frames}:{frames}", f"{metrics}:{metrics}"]
        assert flag(service["command"], "--listen") == f"0.0.0.0:{frames}"
        assert flag(service["command"], "--metrics") == f"0.0.0.0:{metrics}"
        assert flag(service["command"], "--advertise") == "10.0.0.2"
        assert f"127.0.0.1', {frames})" in service["healthcheck"]["test"][-1]


def test_the_coordinators_manifest_has_the_hosts_as_they_are() -> None:
    text = example()[HEAD]["configs"]["pipeline"]["content"]
    inner = parse_manifest(text.encode(), "inner")
    assert [(s.name, s.host, s.port, s.metrics_port) for s in inner.stages] == [
        ("desk", "10.0.0.1", 50_051, 9_464),
        ("server-card", "10.0.0.2", 50_051, 9_464),
        ("server-cores", "10.0.0.2", 50_052, 9_465),
    ]
    assert inner.spec.coordinator.host == "10.0.0.1"
    targets = read_yaml(example()[HEAD]["configs"]["prometheus"]["content"])["scrape_configs"][1]
    assert targets["static_configs"][0]["targets"] == ["10.0.0.1:9464", "10.0.0.2:9464", "10.0.0.2:9465"]


def test_another_host_gets_its_certificate_by_token_into_its_volume() -> None:
    files = example()
    for name, service in files[SERVER]["services"].items():
        variable = f"RELAYLINE_TOKEN_{name.upper().replace('-', '_')}"
        assert service["command"][:3] == ["join", "10.0.0.1:50049", f"${{{variable}:-}}"]
        assert flag(service["command"], "--state").startswith(f"{inside.STATE_DIR}/")
        assert flag(service["command"], "--cache").startswith(f"{inside.STATE_DIR}/")
        assert service["volumes"] == [f"{name}-state:{inside.STATE_DIR}"], "no directory has to be copied"
        assert "user" not in service, "it reads nothing of the host's"
        assert service["restart"] == "unless-stopped"
    coordinator = files[HEAD]["services"]["coordinator"]
    assert flag(coordinator["command"], "--enrol-listen") == "0.0.0.0:50049"
    assert {"50049:50049", "50050:50050"} <= {port for port in coordinator["ports"] if isinstance(port, str)}
    (authority,) = [v for v in coordinator["volumes"] if isinstance(v, dict) and v["target"] == inside.AUTHORITY_DIR]
    assert authority["source"] == "./tls"
    assert "read_only" not in authority, "the coordinator notes there which tokens are used"


def test_memory_cores_and_gpus_are_passed_on() -> None:
    resources = {n: s["deploy"]["resources"] for n, s in example()[SERVER]["services"].items()}
    assert resources["server-card"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert resources["server-cores"]["limits"] == {"cpus": "16", "memory": "32768m"}
    assert "reservations" not in resources["server-cores"]


def test_links_in_the_clear_need_the_directories_of_tokens() -> None:
    files = render(parsed(TWO_HOSTS + "  wire: {tls: {mode: off}}\n"), compose_hosts.TARGET)
    head, there = (read_yaml(files[name])["services"] for name in (HEAD, SERVER))
    assert "--enrol-listen" not in head["coordinator"]["command"]
    assert "50049:50049" not in head["coordinator"]["ports"]
    assert there["there"]["volumes"][1]["source"] == "./tls/there"
    assert "--insecure" in there["there"]["command"]
    assert "certs issue ./tls 10.0.0.2 --stage there\n" in files[HEAD]
    assert "certs invite" not in files[HEAD]


def test_an_address_of_ipv6_is_bracketed_and_names_a_file() -> None:
    files = files_of(TWO_HOSTS.replace("10.0.0.2", '"fd00::2"').replace("10.0.0.1", '"fd00::1"'))
    assert list(files) == ["compose.fd00--1.yaml", "compose.fd00--2.yaml"]
    command = files["compose.fd00--2.yaml"]["services"]["there"]["command"]
    assert command[1] == "[fd00::1]:50049"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_stages("name: a", "name: b"), "all stages are on one host; --target compose renders them"),
        (with_stages("name: a", "name: b, host: 10.0.0.2"), "write this machine's address as coordinator.host"),
        (TWO_HOSTS + "  deployment: {replicas: 2}\n", "needs --target leaderworkerset"),
        (TWO_HOSTS.replace("there,", "jaeger,"), "stage name 'jaeger' is taken"),
        (
            with_stages("name: a, host: h, port: 50052", "name: b, host: h") + "  coordinator: {host: g}\n",
            "port 50052 on h is taken by stage 'a'",
        ),
        (TWO_HOSTS.replace("name: here", "name: here, port: 50050"), "taken by the coordinator's joinPort"),
        (
            with_stages("name: a, host: Box", "name: b, host: box") + "  coordinator: {host: g}\n",
            "two hosts would both have the file compose.box.yaml",
        ),
    ],
)
def test_a_manifest_that_cannot_be_rendered_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        render(parsed(text), compose_hosts.TARGET)
    assert "\n" not in caught.value.message


# --- as a user types it -----------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_for_each_host(tmp_path: Path) -> None:
    source = example_file("several-hosts")
    refused = invoke("render", source, "--target", compose_hosts.TARGET)
    assert refused.exit_code != 0
    done = invoke("render", source, "--target", compose_hosts.TARGET, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.glob("compose.*")} == {HEAD, SERVER}
    models = load_manifest(source).model_path
    assert models is not None
    mounts = read_yaml((tmp_path / HEAD).read_text())["services"]["coordinator"]["volumes"]
    (mount,) = [v for v in mounts if isinstance(v, dict) and v["target"] == inside.MODELS_DIR]
    relative = mount["source"].removeprefix("${RELAYLINE_MODELS:-").removesuffix("}")
    assert (tmp_path / relative).resolve() == models.parent.resolve()


def test_one_file_for_several_hosts_gets_a_hint() -> None:
    result = invoke("render", example_file("several-hosts"), "--target", "compose")
    assert "--target compose-hosts makes one for each" in result.stderr
    assert "compose-hosts" not in invoke("render", example_file("smallest"), "--target", "compose").stderr


def test_an_invitation_without_its_ca_is_refused(tmp_path: Path) -> None:
    refused = invoke("certs", "invite", tmp_path, "10.0.0.2", "--stage", "there")
    assert isinstance(refused.exception, UsageError)
    assert "`relayline certs init` makes one" in refused.exception.message
    assert invoke("certs", "init", tmp_path / "tls").exit_code == 0
    assert isinstance(invoke("certs", "invite", tmp_path / "tls", "h", "--stage", "No").exception, UsageError)
    made = invoke("certs", "invite", tmp_path / "tls", "10.0.0.2", "--stage", "there")
    assert read_token(made.stdout).name == "there"


def run_head(text: str) -> dict[str, str]:
    """Run the commands at the head of the coordinator's file; the tokens of the other hosts' stages, by name."""
    tokens = {}
    for line in text.splitlines():
        if line.startswith("#   relayline certs"):
            arguments = shlex.split(line.partition(" && ")[0])[2:]
            done = invoke(*arguments)
            assert done.exit_code == 0, done.output
            if "invite" in arguments:
                tokens[arguments[-1]] = done.stdout.strip()
    return tokens


def on_this_machine(service: dict[str, Any], root: Path, moved: dict[str, str]) -> list[str]:
    """A service's command, with a container's paths in directories and the hosts' addresses on loopback."""
    places = {v["target"]: str((root / v["source"]).resolve()) for v in service["volumes"] if isinstance(v, dict)}
    places |= {v.partition(":")[2]: str(root / v.partition(":")[0]) for v in service["volumes"] if isinstance(v, str)}
    places |= {"/etc/relayline/pipeline.yaml": str(root / "pipeline.yaml")} | moved
    command = []
    for part in service["command"]:
        for old, new in places.items():
            part = part.replace(old, new)
        command.append(part)
    return [*command, "--json"]


@pytest.mark.slow
def test_hosts_join_by_the_tokens_that_the_head_of_the_file_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = TWO_HOSTS.replace("model.gguf", "demo.gguf").replace("name: here", "name: here, threads: 1")
    text = text.replace("host: 10.0.0.2", "host: 10.0.0.2, threads: 1")
    text += "  context: {tokens: 256, lanes: 2}\n  batching: {calibrate: false}\n"
    files = render(parsed(text), compose_hosts.TARGET)
    loopback = {"10.0.0.1": "127.0.0.1", "10.0.0.2": "127.0.0.2"}
    for name, content in files.items():
        for old, new in loopback.items():
            content = content.replace(old, new)
        files[name] = content
    head, there = (read_yaml(files[name]) for name in (HEAD, SERVER))
    tokens = run_head(files[HEAD])
    models = tmp_path / "models"
    models.mkdir()
    (models / "demo.gguf").symlink_to(DEMO)
    pipeline = head["configs"]["pipeline"]["content"].replace("$$", "$").replace(inside.MODELS_DIR, str(models))
    (tmp_path / "pipeline.yaml").write_text(pipeline)
    free = {"0.0.0.0:50050": "127.0.0.1:0", "0.0.0.0:50049": "127.0.0.1:0", "0.0.0.0:8080": "127.0.0.1:0"}
    free |= {"0.0.0.0:50051": "0.0.0.0:0", "0.0.0.0:9464": "127.0.0.1:0"}
    with running(*on_this_machine(head["services"]["coordinator"], tmp_path, free)) as coordinator:
        ports = {"127.0.0.1:50050": coordinator.event["join"], "127.0.0.1:50049": coordinator.event["enrol"]}
        local = on_this_machine(head["services"]["here"], tmp_path, free | ports)
        service = there["services"]["there"]
        joining = on_this_machine(service, tmp_path, free | ports | {"${RELAYLINE_TOKEN_THERE:-}": tokens["there"]})
        with running(*local), running(*joining) as stage:
            assert coordinator.next_event("ready")["stages"] == 2
            with urllib.request.urlopen(f"{coordinator.event['url']}/v1/pipeline", timeout=30) as answer:
                stages = {stage["name"]: stage["address"] for stage in json.load(answer)["stages"]}
            assert stages["there"].startswith("127.0.0.2:"), "as the file advertises"
            (key,) = (tmp_path / "there-state").glob("joined/there-*/key.pem")
            assert key.is_file(), "in the volume, so that it outlives the container"
            assert stage.stop() == 0
        again = on_this_machine(service, tmp_path, free | ports | {"${RELAYLINE_TOKEN_THERE:-}": ""})
        with running(*again) as stage:  # as after a restart of the host whose .env has gone
            assert stage.event["name"] == "there"
