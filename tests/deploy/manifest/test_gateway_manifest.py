"""A gateway's manifest: its keys, the processes that it starts, and messages about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from relayline.deploy.launch.gateway.plan import plan_gateway
from relayline.deploy.manifest.gateway import GatewayManifest, is_gateway, load_gateway
from relayline.deploy.manifest.load import ManifestError, load_manifest
from relayline.deploy.manifest.schema import GATEWAY_SCHEMA_FILE, schema_text
from relayline.wire.common.errors import UsageError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "gateway" / "house.yaml"
HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: Gateway\nmetadata: {name: house}\nspec:\n"
PIPELINE = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: inner}
spec:
  model: {path: model.gguf}
  coordinator: {apiKeysFile: keys}
"""


def written(directory: Path, spec: str) -> Path:
    path = directory / "house.yaml"
    path.write_text(HEAD + spec)
    (directory / "inner.yaml").write_text(PIPELINE)
    (directory / "keys").write_text("me: key-of-the-inner-pipeline\n")
    return path


def test_the_example_and_its_replicas() -> None:
    members = load_gateway(EXAMPLE).members()
    assert [member.name for member in members] == ["chat", "chat-2", "chat-3", "small"]
    assert [member.place.url for member in members] == [None, None, "http://10.0.2.1:8080", None]
    assert members[1].stages is not None
    assert [stage.host for stage in members[1].stages] == ["10.0.1.1", "10.0.1.2"]
    for member in members:
        if member.manifest is not None:
            load_manifest(member.manifest)
    Draft202012Validator(json.loads(GATEWAY_SCHEMA_FILE.read_text())).validate(yaml.safe_load(EXAMPLE.read_text()))
    assert GATEWAY_SCHEMA_FILE.read_text() == schema_text(GatewayManifest)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("  pipelines: [{name: a}]", "give either `manifest` or `url`"),
        ("  pipelines: [{name: a, url: 'http://h:1', manifest: b}]", "give either `manifest` or `url`, not both"),
        ("  pipelines: [{name: a, url: 'h:1'}]", "pipelines[0].url"),
        ("  pipelines: [{name: a, manifest: b, keyFile: k}]", "keyFile and caFile go with `url`"),
        ("  pipelines: [{name: a, url: 'http://h:1', replicas: [{stages: [{name: x}]}]}]", "need `manifest`"),
        ("  pipelines: [{name: a, manifest: b, replicas: [{}]}]", "give either `stages` or `url`"),
        ("  pipelines: [{name: a, url: 'http://h:1'}, {name: a, url: 'http://h:2'}]", "two pipelines are named 'a'"),
        ("  pipelines: [{nme: a, url: 'http://h:1'}]", "did you mean name?"),
        ("  pipelines: []", "must have 1 or more entries"),
    ],
)
def test_mistakes_get_one_line(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_gateway(written(tmp_path, spec))
    assert message in "\n".join(caught.value.lines)
    assert all(line.startswith(f"{tmp_path}/house.yaml:") for line in caught.value.lines)


def test_other_commands_say_that_it_is_a_gateways(tmp_path: Path) -> None:
    path = written(tmp_path, "  pipelines: [{name: a, url: 'http://h:1'}]")
    assert is_gateway(path)
    assert not is_gateway(tmp_path / "inner.yaml")
    with pytest.raises(ManifestError, match="kind is Gateway; this command reads Pipeline"):
        load_manifest(path)


def test_every_pipeline_is_a_separate_up_with_different_ports(tmp_path: Path) -> None:
    far = "replicas: [{stages: [{name: x, host: 10.0.0.1}]}, {stages: [{name: y, host: 10.0.0.2}]}]"
    path = written(
        tmp_path, f"  pipelines: [{{name: a, manifest: inner.yaml, {far}}}, {{name: b, url: 'http://h:1/v1'}}]"
    )
    plan = plan_gateway(load_gateway(path), path, "home", tmp_path / "state", ("--verbose",))
    assert [each.name for each in plan.pipelines] == ["home-a", "home-a-2", "home-a-3"]
    changes = [json.loads(each.arguments[each.arguments.index("--change") + 1]) for each in plan.pipelines]
    assert "stages" not in changes[0]
    assert changes[1]["stages"] == [{"name": "x", "host": "10.0.0.1"}]
    ports = [port for change in changes for key, port in change.items() if key.endswith("Port")]
    assert len(set(ports)) == len(ports) == 4
    urls = [backend.url for backend in plan.config.backends]
    assert len(set(urls)) == 4
    assert urls[-1] == "http://h:1"
    assert [backend.key for backend in plan.config.backends] == ["key-of-the-inner-pipeline"] * 3 + [""]
    for each, url in zip(plan.pipelines, urls, strict=False):
        assert each.arguments[each.arguments.index("--http") + 1] == url.removeprefix("http://")
        assert "--exit-with-stdin" in each.arguments, "none outlives the gateway"


def test_a_key_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "  pipelines: [{name: a, url: 'http://h:1', keyFile: nowhere}]")
    with pytest.raises(UsageError, match=r"API key file .*/nowhere cannot be read"):
        plan_gateway(load_gateway(path), path, "home", None)
