"""Objects of a rendered deployment apart from pods: policies, certificates, monitoring, the model's files."""

from __future__ import annotations

import ipaddress
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.gateway.metrics import gateway_metrics
from relayline.coordinator.gateway.router import Router
from relayline.deploy.manifest import load_manifest, parse_manifest
from relayline.deploy.manifest.load import ManifestError
from relayline.deploy.manifest.model import METRICS_PORT, STAGE_PORT
from relayline.deploy.render import cluster, inside, observability, pods
from relayline.deploy.render.targets import render
from relayline.wire.links.roles import Role, identity_among
from relayline.wire.telemetry import names
from tests.support.golden_renders import EXAMPLES, example_file
from tests.support.yaml_text import read_all, read_yaml

REPLICAS = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: many}
spec:
  model: {path: /data/tiny.gguf}
  stages: [{name: a, threads: 2, memoryGib: 2}, {name: b, threads: 2, memoryGib: 2}]
  deployment:
    replicas: 2
    namespace: llm
    certManager: {issuer: own, kind: ClusterIssuer, days: 30}
    monitoring: {podMonitor: true}
    storage: {fill: hf://org/repo/gguf/tiny.gguf@main}
"""


def objects(files: dict[str, str], kind: str) -> list[dict[str, Any]]:
    documents = [document for text in files.values() for document in read_all(text)]
    return [document for document in documents if document["kind"] == kind]


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return render(load_manifest(EXAMPLES / "cluster.yaml"), "kubernetes")


@pytest.fixture(scope="module")
def replicas() -> dict[str, str]:
    return render(parse_manifest(REPLICAS.encode(), "many.yaml"), "leaderworkerset")


def test_certificates_state_the_roles_that_links_ask_for(files: dict[str, str]) -> None:
    found = {}
    for one in objects(files, "Certificate"):
        spec = one["spec"]
        identity = identity_among(spec["uris"])
        assert identity is not None
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert [ipaddress.ip_address(each).is_loopback for each in spec["ipAddresses"]] == [True, True]
        assert spec["dnsNames"] == [identity.host, "localhost"]
        found[spec["secretName"]] = (identity.role, identity.name)
    assert found == {
        "team-chat-tls-coordinator": (Role.COORDINATOR, ""),
        "team-chat-tls-front": (Role.STAGE, "front"),
        "team-chat-tls-back": (Role.STAGE, "back"),
        "team-chat-tls-prometheus": (Role.MONITOR, ""),
    }
    for stage_set in objects(files, "StatefulSet"):
        pod = stage_set["spec"]["template"]["spec"]
        args = pod["containers"][0]["args"]
        advertised = args[args.index("--advertise") + 1]
        (volume,) = (each for each in pod["volumes"] if each["name"] == "tls")
        assert volume["secret"]["secretName"] in found
        assert {item["path"] for item in volume["secret"]["items"]} == {"ca.pem", "cert.pem", "key.pem"}
        assert any(advertised in one["spec"]["dnsNames"] for one in objects(files, "Certificate"))
    assert "relayline certs" not in files["config.yaml"], "nothing has to be made by hand"


def test_certificates_come_from_the_issuer_that_the_manifest_names(replicas: dict[str, str]) -> None:
    for one in objects(replicas, "Certificate"):
        assert one["spec"]["issuerRef"] == {"name": "own", "kind": "ClusterIssuer", "group": "cert-manager.io"}
        assert one["spec"]["duration"] == "720h"


def test_secrets_have_the_names_that_the_manifest_gives() -> None:
    text = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: many}
spec:
  model: {hf: hf://org/repo/tiny.gguf}
  stages: [{name: a, threads: 2}]
  coordinator: {apiKeysFile: keys}
  wire: {tls: {mode: "off"}}
  deployment: {secrets: {token: their-join, apiKeys: their-keys, hfToken: their-hub}}
"""
    files = render(parse_manifest(text.encode(), "many.yaml"), "kubernetes")
    pods = [one["spec"]["template"]["spec"] for kind in ("Deployment", "StatefulSet") for one in objects(files, kind)]
    mounted = {each["secret"]["secretName"] for pod in pods for each in pod["volumes"] if "secret" in each}
    assert mounted == {"their-join-coordinator", "their-join-a", "their-keys"}
    from_secrets = [each for each in pods[0]["containers"][0]["env"] if "valueFrom" in each]
    assert [each["valueFrom"]["secretKeyRef"]["name"] for each in from_secrets] == ["their-hub"]


def test_workers_of_one_template_see_their_own_certificate(replicas: dict[str, str]) -> None:
    (group,) = objects(replicas, "LeaderWorkerSet")
    worker = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (volume,) = (each for each in worker["volumes"] if each["name"] == "tls")
    paths = {item["path"] for source in volume["projected"]["sources"] for item in source["secret"]["items"]}
    assert paths == {f"stage-{index}/{file}" for index in (1, 2) for file in ("ca.pem", "cert.pem", "key.pem")}
    (mount,) = (each for each in worker["containers"][0]["volumeMounts"] if each["name"] == "tls")
    assert mount["subPathExpr"] == "stage-$(LWS_WORKER_INDEX)"
    made = {one["spec"]["secretName"]: one["spec"] for one in objects(replicas, "Certificate")}
    assert {source["secret"]["name"] for source in volume["projected"]["sources"]} <= set(made)
    assert made["many-tls-stage-2"]["dnsNames"][0] == "*.many.llm"
    assert made["many-tls-stage-2"]["uris"] == ["relayline:stage:stage-2:*.many.llm"]
    assert (made["many-tls-stage-2"]["duration"], made["many-tls-stage-2"]["renewBefore"]) == ("720h", "240h")


def test_stages_take_frames_from_their_own_pipeline_alone(files: dict[str, str]) -> None:
    policies = {one["metadata"]["name"]: one["spec"] for one in objects(files, "NetworkPolicy")}
    stages, coordinator = policies["team-chat-stages"], policies["team-chat-coordinator"]
    frames, metrics = stages["ingress"]
    assert frames["ports"] == [{"protocol": "TCP", "port": STAGE_PORT}]
    (source,) = frames["from"]
    own = source["podSelector"]["matchLabels"]
    assert (metrics["ports"][0]["port"], "from" in metrics) == (METRICS_PORT, False)
    for kind in ("StatefulSet", "Deployment"):
        for one in objects(files, kind):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert own.items() <= labels.items(), "each process may reach a stage"
            chosen = [
                spec for spec in policies.values() if spec["podSelector"]["matchLabels"].items() <= labels.items()
            ]
            assert len(chosen) == 1, "and is behind one policy"
    api, join = coordinator["ingress"]
    assert ("from" in api, "from" in join) == (False, True)
    plain = example_file("plaintext").read_text().replace("spec:\n", "spec:\n  deployment: {networkPolicy: false}\n", 1)
    assert not objects(render(parse_manifest(plain.encode(), "plain.yaml"), "kubernetes"), "NetworkPolicy")


def test_prometheus_reads_the_pods_ports(files: dict[str, str]) -> None:
    (monitor,) = objects(files, "PodMonitor")
    opened = {
        port["name"]
        for kind in ("StatefulSet", "Deployment")
        for one in objects(files, kind)
        for port in one["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
    ends = monitor["spec"]["podMetricsEndpoints"]
    assert {end["port"] for end in ends} <= opened
    tls = next(end for end in ends if end["port"] == "metrics")["tlsConfig"]
    assert (tls["serverName"], tls["keySecret"]["name"]) == ("localhost", "team-chat-tls-prometheus")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    manifest = load_manifest(EXAMPLES / "cluster.yaml")
    deployment = manifest.spec.deployment.model_copy(update={"cert_manager": None})
    by_hand = manifest.model_copy(update={"spec": manifest.spec.model_copy(update={"deployment": deployment})})
    made = render(by_hand, "kubernetes")
    (monitor,) = objects(made, "PodMonitor")
    assert monitor["spec"]["podMetricsEndpoints"][1]["tlsConfig"]["keySecret"]["key"] == "key.pem"
    assert "secret generic team-chat-tls-prometheus --from-file=tls/monitor" in made["config.yaml"]


def test_alerts_ask_for_metrics_that_exist() -> None:
    known = {value for key, value in vars(names).items() if key.startswith("METRIC_")}
    known |= {family.name for family in gateway_metrics(Router(["chat"])).collect()}
    rules = [rule for group in observability.alert_rules()["groups"] for rule in group["rules"]]
    assert len(rules) >= 6
    for rule in rules:
        for metric in re.findall(r"relayline_\w+", rule["expr"]):
            assert metric in known or re.sub(r"_(total|bucket)$", "", metric) in known, metric
        assert rule["annotations"].keys() == {"summary", "description"}
    installed = resources.files("relayline.deploy").joinpath("observability", "prometheus", "alerts.yaml")
    assert installed.is_file(), "it comes with a wheel"
    (rendered,) = objects(render(load_manifest(EXAMPLES / "cluster.yaml"), "kubernetes"), "PrometheusRule")
    assert rendered["spec"] == observability.alert_rules()


def test_the_models_volume_is_filled_once(files: dict[str, str], replicas: dict[str, str]) -> None:
    (deployment,) = objects(files, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (first,) = pod["initContainers"]
    assert first["args"] == [
        "pull",
        "hf://Qwen/Qwen2.5-14B-Instruct-GGUF/qwen2.5-14b-instruct-q4_k_m.gguf",
        "--to",
        "/models",
    ]
    (writable,) = (mount for mount in first["volumeMounts"] if mount["name"] == "models")
    (readable,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "models")
    assert ("readOnly" in writable, readable["readOnly"]) == (False, True)
    assert not objects(files, "Job"), "the volume is on one node: a separate pod could wait for ever"
    (job,) = objects(replicas, "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "pull"
    (group,) = objects(replicas, "LeaderWorkerSet")
    (waits,) = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["initContainers"]
    assert "/models/tiny.gguf" in waits["command"][-1]
    compile(waits["command"][-1], "wait", "exec")


def test_nodes_images_and_runtimes(files: dict[str, str]) -> None:
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects(files, "StatefulSet")}
    dedicated = {"key": "dedicated", "operator": "Equal", "value": "inference", "effect": "NoSchedule"}
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pods["team-chat-front"]["tolerations"] == [dedicated, gpu]
    assert pods["team-chat-back"]["tolerations"] == [dedicated]
    assert pods["team-chat-front"]["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in pods["team-chat-back"]
    (deployment,) = objects(files, "Deployment")
    for pod in (*pods.values(), deployment["spec"]["template"]["spec"]):
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert {each["imagePullPolicy"] for each in pod["containers"]} == {"IfNotPresent"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ("  deployment: {storage: {fill: hf://a/b/c.gguf}}", "needs model.path"),
        ("  deployment: {tolerations: [{operator: Equal}]}", "operator Equal needs a key"),
        ("  deployment: {tolerations: [{key: a, operator: Exists, value: b}]}", "takes no value"),
        ("  deployment: {tolerations: [{key: a, tolerationSeconds: 3}]}", "needs effect NoExecute"),
        ("  deployment: {certManager: {}}", "issuer"),
    ],
)
def test_values_that_a_cluster_would_refuse_are_refused_here(changed: str, says: str) -> None:
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: x}\nspec:\n"
        f"  model: {{hf: hf://org/repo/file.gguf}}\n{changed}\n"
    )
    with pytest.raises(ManifestError, match=says):
        parse_manifest(text.encode(), "x.yaml")
    other = REPLICAS.replace("gguf/tiny.gguf", "gguf/other.gguf")
    with pytest.raises(ManifestError, match="loads another file than"):
        parse_manifest(other.encode(), "x.yaml")


def test_kustomize_builds_the_base_and_an_overlay(tmp_path: Path, files: dict[str, str]) -> None:
    kubectl = shutil.which("kubectl")
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    base.mkdir()
    overlay.mkdir()
    for name, text in files.items():
        (base / name).write_text(text)
    text = cluster.kustomization("team-chat", "kubernetes", "llm", list(files))
    (base / cluster.KUSTOMIZATION_FILE).write_text(text)
    assert read_yaml(text)["resources"] == list(files)
    (overlay / cluster.KUSTOMIZATION_FILE).write_text(
        "resources: [../base]\nnamespace: staging\nimages: [{name: registry.example.com/ml/relayline, newTag: 0.2.0}]\n"
    )
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, timeout=60, check=True)
    built = [document for document in read_all(done.stdout) if document]
    n_objects = sum(len([*read_all(each)]) for each in files.values())
    assert len(built) == n_objects
    assert {one["metadata"]["namespace"] for one in built} == {"staging"}
    assert f"{inside.MODELS_DIR}/qwen2.5-14b-instruct-q4_k_m.gguf" in done.stdout
    assert "registry.example.com/ml/relayline:0.2.0\n" in done.stdout


def test_pods_that_are_not_ready_never_hold_a_node(files: dict[str, str], replicas: dict[str, str]) -> None:
    """A stage that does not come up would otherwise block the drain of its node."""
    for rendered in (files, replicas):
        (budget,) = objects(rendered, "PodDisruptionBudget")
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_containers_that_prepare_say_what_they_need(files: dict[str, str], replicas: dict[str, str]) -> None:
    """A name space with a quota refuses every pod with a container that does not."""
    found = []
    for rendered in (files, replicas):
        pods = [one["spec"]["template"]["spec"] for kind in ("Deployment", "Job") for one in objects(rendered, kind)]
        leaders = [one["spec"]["leaderWorkerTemplate"] for one in objects(rendered, "LeaderWorkerSet")]
        pods += [each[part]["spec"] for each in leaders for part in ("leaderTemplate", "workerTemplate")]
        preparing = [one for pod in pods for one in pod.get("initContainers", ())]
        preparing += [one for job in objects(rendered, "Job") for one in job["spec"]["template"]["spec"]["containers"]]
        found += [one["name"] for one in preparing]
        for one in preparing:
            assert one["resources"]["requests"].keys() == {"cpu", "memory"}, one["name"]
            assert "memory" in one["resources"]["limits"], one["name"]
    assert sorted(set(found)) == ["fetch-model", "wait-for-model"]


def test_no_pod_fills_its_node_through_tmp(files: dict[str, str], replicas: dict[str, str]) -> None:
    for text in (*files.values(), *replicas.values()):
        for document in read_all(text):
            for volumes in _found(document, "volumes"):
                for volume in volumes:
                    assert volume["name"] != "tmp" or volume["emptyDir"] == {"sizeLimit": "1Gi"}


def test_a_stage_on_a_gpu_asks_for_memory_of_the_host_without_a_limit() -> None:
    found = pods.resources(pods.Need(threads=4, n_gpus=2), "nvidia.com/gpu")
    assert found["requests"] == {"cpu": "4", "memory": "4Gi", "nvidia.com/gpu": "2"}
    assert found["limits"] == {"nvidia.com/gpu": "2"}
    assert "memory" not in pods.resources(pods.Need(threads=4), "nvidia.com/gpu")["requests"]


def _found(document: Any, key: str) -> Iterator[Any]:
    """All values of a key, wherever they are."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name == key:
                yield value
            yield from _found(value, key)
    elif isinstance(document, list):
        for each in document:
            yield from _found(each, key)
