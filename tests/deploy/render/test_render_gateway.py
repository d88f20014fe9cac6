"""A rendered gateway with every pipeline behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.gateway.serve import GatewayConfig
from relayline.deploy.launch.gateway.plan import config_of_running
from relayline.deploy.manifest.gateway import load_gateway
from relayline.deploy.render import front, inside, observability
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.errors import UsageError
from tests.deploy.manifest.test_manifest import check_jsonschema
from tests.support.golden_renders import rendered, rendered_gateway
from tests.support.yaml_text import read_all, read_yaml

HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"
STAGES = "stages: [{name: low, threads: 1, device: gpu}, {name: high, threads: 1}]"


def written(directory: Path, spec: str, *inner: str, **more: str) -> Path:
    """A gateway's manifest with inner.yaml next to it, and one file for each of `more`."""
    texts = {"inner": "\n  ".join(("model: {path: m.gguf}", *(inner or (STAGES,)))), **more}
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(f"{HEAD.format(kind='Pipeline', name=name)}  {text}\n")
    path = directory / "house.yaml"
    path.write_text(HEAD.format(kind="Gateway", name="house") + spec)
    return path


TWICE = "  pipelines: [{name: a, manifest: inner.yaml, replicas: [{stages: [{name: x, device: gpu}]}]}]\n"


def of_gateway(files: dict[str, str], kind: str) -> dict[str, Any]:
    (found,) = (one for one in read_all(files["gateway.yaml"]) if one["kind"] == kind)
    return found


def read_inside(text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> GatewayConfig:
    """The gateway's manifest as its container reads it, with its paths below `directory`."""
    for path in (front.BACKENDS_DIR, inside.API_KEYS_DIR):
        text = text.replace(path, f"{directory}{path}")
    (directory / "inside.yaml").write_text(text)
    return config_of_running(load_gateway(directory / "inside.yaml"))


def test_the_gateway_finds_every_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = rendered("house", "kubernetes")
    compose = read_yaml(rendered("house", "compose")["compose.yaml"])
    for name in ("chat", "chat-2"):
        keys = tmp_path / front.BACKENDS_DIR.lstrip("/") / name / front.KEYS_FILE
        keys.parent.mkdir(parents=True)
        keys.write_text(f"me: key-of-{name}\n")
    inner = of_gateway(files, "ConfigMap")["data"]["gateway.yaml"]
    config = read_inside(inner, tmp_path, monkeypatch)
    assert [(one.name, one.url, one.key) for one in config.backends] == [
        ("chat", "http://house-chat", "key-of-chat"),
        ("chat-2", "http://house-chat-2", "key-of-chat-2"),
        ("chat-3", "http://10.0.2.1:8080", ""),
        ("small", "http://house-small", ""),
    ]
    services = {
        one["metadata"]["name"] for text in files.values() for one in read_all(text) if one["kind"] == "Service"
    }
    assert {one.url.removeprefix("http://") for one in config.backends if "house" in one.url} <= services
    config = read_inside(compose["configs"]["gateway"]["content"], tmp_path, monkeypatch)
    hosts = [one.url.removeprefix("http://").partition(":")[0] for one in config.backends]
    assert [host for host in hosts if host in compose["services"]] == [
        "chat-coordinator", "chat-2-coordinator", "small-coordinator"
    ]  # fmt: skip
    (gateway,) = (one for name, one in compose["services"].items() if name == "gateway")
    assert {one["target"] for one in gateway["secrets"]} == {
        f"{front.BACKENDS_DIR}/{name}/keys" for name in ("chat", "chat-2")
    }


def test_every_object_of_the_cluster_is_there_once() -> None:
    objects = [one for text in rendered("house", "kubernetes").values() for one in read_all(text)]
    counts = Counter((one["kind"], one["metadata"]["name"]) for one in objects)
    assert set(counts.values()) == {1}
    assert ("Deployment", "house") in counts
    assert {name for kind, name in counts if kind == "Deployment"} == {
        "house", "house-chat-coordinator", "house-chat-2-coordinator", "house-small-coordinator"
    }  # fmt: skip
    selectors = [one["spec"]["selector"]["matchLabels"] for one in objects if one["kind"] == "Deployment"]
    assert len({json.dumps(one, sort_keys=True) for one in selectors}) == len(selectors)


def test_compose_keeps_pipelines_apart_and_publishes_the_gateway_alone(tmp_path: Path) -> None:
    compose = read_yaml(rendered_gateway(written(tmp_path, TWICE), "compose")["compose.yaml"])
    services = compose["services"]
    assert {"gateway", "a-coordinator", "a-low", "a-high", "a-2-coordinator", "a-2-x"} <= services.keys()
    published = {name for name, one in services.items() if "ports" in one and name not in observability.SERVICES}
    assert published == {"gateway"}
    assert services["gateway"]["ports"] == [{"target": 8080, "published": "8080", "host_ip": "127.0.0.1"}]
    credentials = [v["source"] for s in services.values() for v in s.get("volumes", ()) if isinstance(v, dict)]
    assert {"./tls/a/low", "./tls/a-2/x", "./tls/a/monitor", "./tls/a-2/monitor"} <= set(credentials)
    gpus = [
        services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in ("a-low", "a-2-x")
    ]
    assert gpus == [["0"], ["1"]], "no two pipelines have one GPU"
    jobs = {job["job_name"]: job for job in read_yaml(compose["configs"]["prometheus"]["content"])["scrape_configs"]}
    assert set(jobs) == {"relayline", "relayline-stages-a", "relayline-stages-a-2"}
    targets = [each["targets"] for each in jobs["relayline"]["static_configs"]]
    assert targets == [["gateway:8080"], ["a-coordinator:8080"], ["a-2-coordinator:8080"]]
    assert jobs["relayline-stages-a-2"]["tls_config"]["ca_file"] == f"{observability.TLS_DIR}/a-2/ca.pem"


def test_keys_and_certificates_of_pipelines_elsewhere_are_secrets(tmp_path: Path) -> None:
    spec = (
        "  apiKeysFile: k\n  pipelines: [{name: far, url: 'https://h:1', keyFile: key, caFile: ca},"
        " {name: a, manifest: inner.yaml}]\n"
    )
    path = written(tmp_path, spec)
    compose = rendered_gateway(path, "compose")["compose.yaml"]
    assert read_yaml(compose)["secrets"] == {
        "api-keys": {"file": "./api-keys"}, "far-key": {"file": "./key-far"}, "far-ca": {"file": "./ca-far.pem"},
    }  # fmt: skip
    assert "#   put an API key of https://h:1 into ./key-far\n" in compose
    (tmp_path / "compose.yaml").write_text(compose)
    done = check_jsonschema("--builtin-schema", "vendor.compose-spec", tmp_path / "compose.yaml")
    assert done.exit_code == 0, done.output
    files = rendered_gateway(path, "kubernetes")
    pod = of_gateway(files, "Deployment")["spec"]["template"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["backend-far"]["secret"]["items"] == [
        {"key": "keys", "path": "keys"}, {"key": "ca.pem", "path": "ca.pem"}
    ]  # fmt: skip
    made = "create secret generic house-far-backend --from-file=keys=key-far --from-file=ca.pem=ca-far.pem"
    assert made in files["gateway.yaml"]
    assert volumes["api-keys"]["secret"]["secretName"] == "house-api-keys"


@pytest.mark.parametrize(
    ("spec", "inner", "more", "says"),
    [
        (TWICE, ("deployment: {replicas: 2}",), {}, "a: deployment.replicas; list `replicas`"),
        (TWICE, ("spares: [{name: s}]",), {}, "a: spares stand by"),
        (TWICE, ("deployment: {secrets: {tls: own}}",), {}, "a and a-2 would share the credentials 'own'"),
        (
            "  pipelines: [{name: a, manifest: inner.yaml}, {name: b, manifest: other.yaml}]\n", (),
            {"other": "model: {path: m.gguf}\n  deployment: {namespace: llm}"},
            "a has deployment.namespace unset, b llm",
        ),
        (
            "  pipelines: [{name: a, manifest: inner.yaml}, {name: a-2, manifest: inner.yaml}]\n",
            ("stages: [{name: 2-x}, {name: x}]",), {}, "a-2 and a would both have a service 'a-2-x'; rename a stage",
        ),
        (TWICE, ("stages: [{name: coordinator}]",), {}, "'coordinator' is taken"),
    ],
)  # fmt: skip
def test_a_gateway_that_cannot_be_rendered_is_refused_in_one_line(
    tmp_path: Path, spec: str, inner: tuple[str, ...], more: dict[str, str], says: str
) -> None:
    path, messages = written(tmp_path, spec, *inner, **more), []
    for target in ("compose", "kubernetes"):
        try:
            rendered_gateway(path, target)
        except UsageError as error:
            messages.append(error.message)
    assert any(says in line for line in messages)


def test_the_command_writes_it_with_a_kustomization(tmp_path: Path) -> None:
    path = written(tmp_path, TWICE)
    done = relayline("render", path, "--target", "kubernetes", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    base = read_yaml((tmp_path / "out" / "kustomization.yaml").read_text())
    assert base["resources"][:2] == ["gateway.yaml", "a/config.yaml"]
    assert all((tmp_path / "out" / file).exists() for file in base["resources"])
    assert "relayline: note: a-2: stage 'x' has no memoryGib" in done.stderr
    refused = relayline("render", path, "--target", "leaderworkerset")
    assert refused.returncode == 2
    assert "renders one pipeline" in refused.stderr
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(tmp_path / "out")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    n_objects = sum(len([*read_all((tmp_path / "out" / file).read_text())]) for file in base["resources"])
    assert len([one for one in read_all(built) if one]) == n_objects


def test_gateway_by_manifest_refuses_unsupported_flags(tmp_path: Path) -> None:
    path = written(tmp_path, TWICE)
    for flags, says in (
        (("--manifest", path), "pipeline 'a' has no url"),
        ((), "give either --backend, once for each pipeline, or --manifest"),
    ):
        done = relayline("gateway", *flags)
        assert done.returncode == 2
        assert says in done.stderr
