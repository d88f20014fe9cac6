"""Rendered deployments: equal to the committed ones, valid by their engines' schemas, and with the required content."""

from __future__ import annotations

import functools
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
from hypothesis import HealthCheck, given, settings

from relayline.deploy.cli import main as cli
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.serving import flag_defaults
from relayline.deploy.manifest import Manifest, load_manifest, parse_manifest
from relayline.deploy.manifest.dump import dump_yaml
from relayline.deploy.render import compose_hosts, inside, observability
from relayline.deploy.render.inside import notes
from relayline.deploy.render.targets import COMPOSE, TARGETS, render
from relayline.deploy.render.write import RECORD_FILE, write_files
from relayline.wire.common import bounds
from relayline.wire.common.errors import UsageError
from tests.deploy.manifest.test_manifest import SMALLEST, check_jsonschema, parsed, with_stages
from tests.support.golden_renders import CASES, EXAMPLES, GOLDEN, golden_files, rendered
from tests.support.manifest_strategies import manifests
from tests.support.yaml_text import read_all, read_yaml

OPERATORS = {"cert-manager.io", "monitoring.coreos.com"}  # test_cluster_objects looks at their objects
KUBERNETES = "1.32"  # the oldest version whose schema has everything that is used


# It reads the same megabytes for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


def documents(files: dict[str, str]) -> list[dict[str, Any]]:
    return [document for text in files.values() for document in read_all(text)]


def of_kind(files: dict[str, str], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents(files) if document["kind"] == kind]


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", **template["metadata"]},
        "spec": template["spec"],
    }


def check_kubernetes(files: dict[str, str]) -> int:
    """Validate every object strictly; a LeaderWorkerSet, whose schema is nowhere bundled, by its pods."""
    n_checked = 0
    for document in documents(files):
        if document["apiVersion"].partition("/")[0] in OPERATORS:
            continue
        checked = [document]
        if document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            checked = [as_pod(group["leaderTemplate"]), as_pod(group["workerTemplate"])]
        for one in checked:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
            n_checked += 1
    return n_checked


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "n_cores", "expected"),
    [([0, 0, 0], 2, "1"), ([0, 0], 8, "4"), ([4, 0, 0], 16, "6"), ([4, 0], 16, "12"), ([6, 0], 4, "1")],
)
def test_stages_without_threads_share_the_cores_that_others_leave(
    threads: list[int], n_cores: int, expected: str
) -> None:
    text = render(with_threads(threads), "compose")["compose.yaml"]
    (line,) = (line.removeprefix("#") for line in text.splitlines() if "export RELAYLINE_THREADS" in line)
    script = f"nproc() {{ echo {n_cores}; }}\n{line}\necho $RELAYLINE_THREADS"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize("threads", [[0], [4], [4, 4]])
def test_nobody_has_to_share_out_what_is_given(threads: list[int]) -> None:
    assert "export RELAYLINE_THREADS" not in render(with_threads(threads), "compose")["compose.yaml"]


def with_threads(threads: list[int]) -> Manifest:
    return parsed(with_stages(*(f"name: s{index}, threads: {count}" for index, count in enumerate(threads))))


# --- golden renders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_renders_are_as_committed(case: tuple[str, str]) -> None:
    made = rendered(*case)
    committed = golden_files(*case)
    assert sorted(made) == sorted(committed)
    for name, text in made.items():
        assert text == committed[name].read_text(), "run python -m tests.support.golden_renders and look at the diff"


def test_golden_directories_are_all_used() -> None:
    others = {"llama_cpp"}  # of tests/deploy/kernels
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} - others == {"-".join(case) for case in CASES}


def test_compose_files_follow_the_compose_specification() -> None:
    files = [path for case in CASES if case[1] in COMPOSE for path in golden_files(*case).values()]
    done = check_jsonschema("--builtin-schema", "vendor.compose-spec", *files)
    assert files
    assert done.exit_code == 0, done.output


def test_compose_files_ask_for_nothing_that_podman_refuses() -> None:
    services = [
        service
        for case in CASES
        if case[1] in COMPOSE
        for text in rendered(*case).values()
        for service in read_yaml(text)["services"].values()
    ]
    checked = [service["healthcheck"] for service in services if "healthcheck" in service]
    assert checked
    assert not any("start_interval" in check for check in checked), "of Docker's API 1.44; Podman has 1.41"


@pytest.mark.parametrize("case", [case for case in CASES if case[1] not in COMPOSE], ids="-".join)
def test_kubernetes_files_are_valid(case: tuple[str, str]) -> None:
    assert check_kubernetes(rendered(*case)) >= 3


def test_the_validator_would_notice() -> None:
    files = rendered("kubernetes", "kubernetes")
    spoiled = {name: text.replace("failureThreshold", "failureTreshold") for name, text in files.items()}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_kubernetes(spoiled)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_renders_for_some_target(path: Path, tmp_path: Path) -> None:
    manifest, n_rendered = load_manifest(path), 0
    for target in TARGETS:
        try:
            files = render(manifest, target)
        except UsageError:
            continue
        n_rendered += 1
        if target in COMPOSE:
            for name, text in files.items():
                (tmp_path / name).write_text(text)
            done = check_jsonschema("--builtin-schema", "vendor.compose-spec", *(tmp_path / name for name in files))
            assert done.exit_code == 0, done.output
        else:
            check_kubernetes(files)
    assert n_rendered


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifest=manifests(stages_max=3))
def test_any_manifest_renders_validly_or_is_refused(manifest: Manifest) -> None:
    for target in TARGETS:
        try:
            files = render(manifest, target)
        except UsageError:
            continue
        assert render(manifest, target) == files
        contained = contained_manifest(files)
        assert [s.layers for s in contained.stages] == [s.layers for s in manifest.stages]
        if target not in COMPOSE:
            check_kubernetes(files)


# --- content of the files ---------------------------------------------------------------------------------------------


def contained_manifest(files: dict[str, str]) -> Manifest:
    """The manifest that the rendered coordinator will read."""
    first = next(iter(files))
    if first.startswith("compose."):
        text = read_yaml(files[first])["configs"]["pipeline"]["content"].replace("$$", "$")
    else:
        (config,) = of_kind(files, "ConfigMap")
        text = config["data"]["pipeline.yaml"]
    return parse_manifest(text.encode(), "contained")


@pytest.mark.parametrize("target", [target for target in TARGETS if target != compose_hosts.TARGET])
def test_the_coordinator_gets_its_own_manifest(target: str) -> None:
    contained = contained_manifest(render(parsed(SMALLEST), target))
    assert contained.model_path == Path("/models/model.gguf")
    assert contained.uses_tls, "containers are not loopback, so links are private"
    assert contained.join_port == 50_050
    assert not any(stage.is_local for stage in contained.stages)
    flags = flag_defaults(contained)
    assert flags["http"] == ("0.0.0.0", inside.HTTP_PORT)
    assert flags["tls_dir"] == Path(inside.TLS_DIR)
    assert "token_file" not in flags, "each process's own key is next to its certificate"
    clear = contained_manifest(render(parsed(SMALLEST + "  wire: {tls: {mode: off}}\n"), target))
    assert flag_defaults(clear)["token_file"] == Path(inside.TOKEN_FILE)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_rendered_command_has_only_flags_that_exist(case: tuple[str, str]) -> None:
    found = list(commands(documents(rendered(*case))))
    assert len(found) >= 2
    for command in found:
        known = cli.relayline.get_command(click.Context(cli.relayline), command[0])
        assert known is not None
        options = {name for parameter in known.params for name in parameter.opts}
        assert {argument for argument in command if argument.startswith("--")} <= options


def commands(value: object) -> Iterator[list[str]]:
    """The arguments of every relayline process anywhere inside."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key in ("args", "command") and part[0] in ("serve", "stage", "join", "gateway"):
                yield part
            else:
                yield from commands(part)
    elif isinstance(value, list):
        for part in value:
            yield from commands(part)


def test_compose_stops_the_coordinator_before_its_stages() -> None:
    services = read_yaml(rendered("smallest", "compose")["compose.yaml"])["services"]
    assert set(services["coordinator"]["depends_on"]) == {"stage-0", "stage-1"}
    assert services["coordinator"]["ports"] == [{"target": 8080, "published": "8080", "host_ip": "127.0.0.1"}]
    for name in ("coordinator", "stage-0", "stage-1"):
        assert int(services[name]["stop_grace_period"].removesuffix("s")) > bounds.DRAIN_TIMEOUT_S


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "compose"], ids="-".join)
def test_compose_makes_containers_without_copied_files_read_only(case: tuple[str, str]) -> None:
    compose = read_yaml(rendered(*case)["compose.yaml"])
    for name, service in compose["services"].items():
        copied = [config for config in service.get("configs", ()) if "file" not in compose["configs"][config["source"]]]
        assert not (copied and service.get("read_only")), f"Compose refuses to start {name}"
        assert service.get("read_only") or copied or name in observability.SERVICES


def test_compose_has_the_observability_services_under_a_profile() -> None:
    services = read_yaml(rendered("smallest", "compose")["compose.yaml"])["services"]
    assert {name for name, s in services.items() if s.get("profiles") == ["observability"]} == set(
        observability.SERVICES
    )
    own = read_yaml((EXAMPLES.parent / "observability" / "compose.yaml").read_text())["services"]
    images = {name: service["image"] for name, service in own.items()}
    assert {name: services[name]["image"] for name in observability.SERVICES} == images


def test_compose_takes_no_text_of_the_user_for_a_variable() -> None:
    files = render(parsed(SMALLEST + '  coordinator: {modelId: "a$HOME"}\n'), "compose", "/data/$x")
    assert "modelId: a$$HOME" in files["compose.yaml"]
    assert "${RELAYLINE_MODELS:-/data/$$x}" in files["compose.yaml"]
    braced = read_yaml(render(parsed(SMALLEST), "compose", "/data/}x/$y")["compose.yaml"])
    (mount,) = [
        v for v in braced["services"]["coordinator"]["volumes"] if isinstance(v, dict) and "/data" in v["source"]
    ]
    assert mount["source"] == "/data/}x/$$y", "a brace would end the variable early"
    named = render(parsed(SMALLEST + '  deployment: {image: "a/$HOME"}\n'), "compose", "/data")["compose.yaml"]
    assert read_yaml(named)["services"]["coordinator"]["image"] == "a/$$HOME"


@pytest.mark.parametrize("text", ["a\x85b", "a\u2028b: c", "\u2029", "a\rb", "a\nb\x85c", " - }x #\x85"])
def test_line_breaks_of_yaml_are_text_like_any_other(text: str) -> None:
    assert read_yaml(dump_yaml({"key": text, "list": [text]})) == {"key": text, "list": [text]}
    source = read_yaml(render(parsed(SMALLEST), "compose", f"/data/{text}")["compose.yaml"])
    (mount,) = [
        v for v in source["services"]["coordinator"]["volumes"] if isinstance(v, dict) and "/data" in v["source"]
    ]
    assert f"/data/{text}" in mount["source"]


def test_a_gpu_stage_asks_for_a_gpu() -> None:
    services = read_yaml(rendered("gpu-and-cpu", "compose")["compose.yaml"])["services"]
    assert services["card"]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    assert services["card"]["image"].endswith("-cuda")
    assert "reservations" not in services["processor"]["deploy"]["resources"]
    sets = {s["metadata"]["name"]: s for s in of_kind(rendered("kubernetes", "kubernetes"), "StatefulSet")}
    limits = {n: s["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for n, s in sets.items()}
    assert limits["chat-first"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in limits["chat-second"]


def test_a_stage_of_several_gpus_asks_for_all_of_them() -> None:
    text = with_stages("name: a, device: gpu, devices: 'CUDA0,CUDA1'", "name: b, device: gpu, tensorSplit: '1,1,1'")
    services = read_yaml(render(parsed(text), "compose", "m.yaml")["compose.yaml"])["services"]
    asked = [services[n]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for n in "ab"]
    assert asked == [["0", "1"], ["2", "3", "4"]], "no device belongs to two of them"
    text = with_stages("name: a, device: gpu", "name: b, device: gpu, devices: CUDA1", "name: c, device: gpu")
    by_stage = read_yaml(render(parsed(text), "compose", "m.yaml")["compose.yaml"])["services"]
    asked = [by_stage[n]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for n in "abc"]
    assert asked == [["0"], ["0", "1"], ["2"]], "b uses CUDA1 alone, and the name has to mean the same inside"
    text = with_stages("name: a, device: gpu, devices: 'CUDA0,CUDA1'", "name: b, device: gpu, tensorSplit: '1,1,1'")
    sets = of_kind(render(parsed(text), "kubernetes", "m.yaml"), "StatefulSet")
    limits = [s["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for s in sets]
    assert sorted(each.get("nvidia.com/gpu", "0") for each in limits)[-2:] == ["2", "3"]


@pytest.mark.parametrize("target", ["compose", "kubernetes", "leaderworkerset"])
def test_the_memory_of_a_gpu_limits_no_container(target: str) -> None:
    """A process with its weights on a card of 22 GiB may need more of the host's memory, or far less."""
    card, host = "device: gpu, memoryGib: 22", "memoryGib: 3"
    on_card = parsed(with_stages(f"name: a, {card}", f"name: b, {card}"))
    assert not re.search(r"22528(m|Mi)\b", "".join(render(on_card, target).values()))
    assert "stage 'a': memoryGib is its GPU's memory" in notes(on_card, in_kubernetes=target != "compose")[0]
    both = parsed(with_stages(f"name: a, {host}", f"name: b, {host}"))
    assert re.search(r"3072(m|Mi)\b", "".join(render(both, target).values())), "on the processor it is the limit"


def test_kubernetes_pods_end_after_the_drain_and_own_nothing() -> None:
    files = rendered("kubernetes", "kubernetes")
    pods = [d["spec"]["template"]["spec"] for d in documents(files) if d["kind"] in ("Deployment", "StatefulSet")]
    assert len(pods) == 4
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > bounds.DRAIN_TIMEOUT_S
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["affinity"]["podAntiAffinity"]
        assert not pod["automountServiceAccountToken"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= container.keys()


def test_stages_can_join_before_anything_is_ready() -> None:
    services = {s["metadata"]["name"]: s["spec"] for s in of_kind(rendered("kubernetes", "kubernetes"), "Service")}
    assert services["chat-join"]["publishNotReadyAddresses"]
    assert services["chat-stages"]["clusterIP"] == "None"
    assert services["chat-stages"]["publishNotReadyAddresses"]
    assert "publishNotReadyAddresses" not in services["chat"], "clients reach only a coordinator that is ready"


def test_a_stage_advertises_the_name_that_its_certificate_is_made_for() -> None:
    files = rendered("kubernetes", "kubernetes")
    for stage_set in of_kind(files, "StatefulSet"):
        args = stage_set["spec"]["template"]["spec"]["containers"][0]["args"]
        host = args[args.index("--advertise") + 1]
        assert host == f"{stage_set['metadata']['name']}-0.{stage_set['spec']['serviceName']}"
        name = args[args.index("--name") + 1]
        assert f"certs issue tls {host} --stage {name}\n" in files["config.yaml"]


def test_probes_are_grpc_where_links_are_in_the_clear() -> None:
    (first, _) = of_kind(rendered("plaintext", "kubernetes"), "StatefulSet")
    container = first["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["grpc"] == {"port": 50_051}
    assert "--insecure" in container["args"]
    (private, *_) = of_kind(rendered("kubernetes", "kubernetes"), "StatefulSet")
    assert private["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"] == "grpc"


def test_every_process_has_its_own_credential() -> None:
    for case, n_processes in ((("kubernetes", "kubernetes"), 4), (("plaintext", "kubernetes"), 3)):
        pods = [*of_kind(rendered(*case), "StatefulSet"), *of_kind(rendered(*case), "Deployment")]
        volumes = [volume for pod in pods for volume in pod["spec"]["template"]["spec"]["volumes"]]
        secrets = [v["secret"]["secretName"] for v in volumes if v["name"] in ("tls", "join")]
        assert len(set(secrets)) == len(secrets) == n_processes
    services = documents(rendered("gpu-and-cpu", "compose"))[0]["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", ()) if isinstance(mount, dict)]
    sources = {mount["source"] for mount in mounts if "tls" in mount["source"]}
    assert sources == {f"./tls/{name}" for name in ("coordinator", "card", "processor", "second-box", "monitor")}


def test_workers_of_one_template_see_their_own_credential_only() -> None:
    (group,) = of_kind(rendered("replicas", "leaderworkerset"), "LeaderWorkerSet")
    spec = group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "tls"]
    paths = {item["path"] for item in volume["secret"]["items"]}
    assert paths == {f"stage-{n}/{file}" for n in (1, 2) for file in ("ca.pem", "cert.pem", "key.pem", "token")}
    (mount,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "tls"]
    assert mount["subPathExpr"] == "stage-$(LWS_WORKER_INDEX)"


def test_no_rendered_file_holds_a_secret() -> None:
    for case in CASES:
        kinds = {document.get("kind") for document in documents(rendered(*case))}
        assert "Secret" not in kinds


def test_a_leader_worker_set_has_one_pod_per_process() -> None:
    (group,) = of_kind(rendered("replicas", "leaderworkerset"), "LeaderWorkerSet")
    assert group["spec"]["replicas"] == 4
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 3
    worker = template["workerTemplate"]["spec"]["containers"][0]
    assert worker["resources"]["requests"] == {"cpu": "8", "memory": "16384Mi"}, "the need of the greediest stage"
    names = [stage.name for stage in contained_manifest(rendered("replicas", "leaderworkerset")).stages]
    assert names == ["stage-1", "stage-2"]
    assert worker["args"][worker["args"].index("--name") + 1] == "stage-$(LWS_WORKER_INDEX)"


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (SMALLEST + "  deployment: {replicas: 2}\n", "compose", "needs --target leaderworkerset"),
        (SMALLEST + "  deployment: {replicas: 2}\n", "kubernetes", "needs --target leaderworkerset"),
        (with_stages("name: jaeger"), "compose", "stage name 'jaeger' is taken by another part"),
        (with_stages("name: join"), "kubernetes", "stage name 'join' is taken by another part"),
        (with_stages(f"name: {'a' * 60}"), "kubernetes", "is longer than 52 characters"),
        (SMALLEST.replace("small", "1st"), "kubernetes", "begins with a digit"),
        (with_stages("name: a, device: gpu", "name: b"), "leaderworkerset", "stages differ in device"),
    ],
)
def test_a_manifest_that_a_target_cannot_run_is_refused(text: str, target: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        render(parsed(text), target)


KEEPS = "  coordinator: {responsesDir: /home/me/responses, batchDir: batches, batchDiskBytes: 2147483648}\n"


@pytest.mark.parametrize("target", ["kubernetes", "leaderworkerset"])
def test_what_a_coordinator_keeps_has_a_volume_in_a_cluster(target: str) -> None:
    files = render(parsed(with_stages("name: a") + KEEPS), target)
    inner = read_yaml(of_kind(files, "ConfigMap")[0]["data"]["pipeline.yaml"])["spec"]["coordinator"]
    assert (inner["responsesDir"], inner["batchDir"]) == (f"{inside.KEPT_DIR}/responses", f"{inside.KEPT_DIR}/batch")
    if target == "kubernetes":
        pod = of_kind(files, "Deployment")[0]["spec"]["template"]["spec"]
        (claim,) = [
            each for each in of_kind(files, "PersistentVolumeClaim") if each["metadata"]["name"] == "small-kept"
        ]
        assert claim["spec"]["resources"]["requests"]["storage"] == "3072Mi"
        source = {"persistentVolumeClaim": {"claimName": "small-kept"}}
    else:
        pod = of_kind(files, "LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "kept"]
        source = {"ephemeral": volume["ephemeral"]}
        assert "a pod that is replaced loses them" in files["pipelines.yaml"]
    assert {"name": "kept", **source} in pod["volumes"]
    assert {"name": "kept", "mountPath": inside.KEPT_DIR} in pod["containers"][0]["volumeMounts"]
    plain = "".join(render(parsed(with_stages("name: a")), target).values())
    assert not [word for word in ("kept", "is replaced loses") if word in plain]


def test_what_a_coordinator_keeps_has_a_named_volume_in_compose() -> None:
    for target, stages in (("compose", "name: a"), ("compose-hosts", "name: a, host: 10.0.0.7")):
        text = with_stages(stages) + KEEPS.replace("{", "{host: 10.0.0.1, ")
        document = read_yaml(next(iter(render(parsed(text), target).values())))
        assert f"coordinator-kept:{inside.KEPT_DIR}" in document["services"]["coordinator"]["volumes"], target
        assert "coordinator-kept" in document["volumes"], target
        inner = read_yaml(document["configs"]["pipeline"]["content"])["spec"]["coordinator"]
        assert inner["responsesDir"] == f"{inside.KEPT_DIR}/responses"


def test_parts_left_out_of_the_rendering_are_noted() -> None:
    own = parsed(with_stages("name: a, threads: 2, memoryGib: 4"))
    own = override(own, {"coordinator.chatTemplateFile": "chat.jinja"})
    assert notes(own, in_kubernetes=True) == ["coordinator.chatTemplateFile is a file of this machine and is left out"]
    assert not any("chat.jinja" in text for text in render(own, "compose").values())
    found = notes(parsed(with_stages("name: a, speed: {calibration: a.json}")), in_kubernetes=True)
    assert len(found) == 3
    assert notes(parsed(with_stages("name: a, threads: 2, memoryGib: 4")), in_kubernetes=True) == []


# --- onto disk --------------------------------------------------------------------------------------------------------


def test_files_are_written_and_replaced_and_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_files(out, {"a.yaml": "1", "b.yaml": "2", "sub/c.json": "3"})
    write_files(out, {"a.yaml": "4", "sub/c.json": "3"})
    paths = [path for path in out.rglob("*") if path.is_file() and path.name != RECORD_FILE]
    assert {path.relative_to(out).as_posix(): path.read_text() for path in paths} == {"a.yaml": "4", "sub/c.json": "3"}
    assert stat.S_IMODE((out / "a.yaml").stat().st_mode) == 0o644


@pytest.mark.parametrize("how", ["foreign", "edited", "link", "directory"])
def test_nobody_elses_file_is_replaced(tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    if how == "edited":
        write_files(out, {"b.yaml": "old"})
        (out / "b.yaml").write_text("edited")
    elif how == "link":
        (tmp_path / "real").write_text("precious")
        (out / "b.yaml").symlink_to(tmp_path / "real")
    elif how == "directory":
        (out / "b.yaml").mkdir()
    else:
        (out / "b.yaml").write_text("mine")
    with pytest.raises(UsageError, match=r"b\.yaml was not made by this command or was edited since"):
        write_files(out, {"a.yaml": "new", "b.yaml": "new"})
    assert not (out / "a.yaml").exists(), "nothing is written when something is refused"
    if how in ("foreign", "edited"):
        write_files(out, {"b.yaml": "new"}, force=True)
        assert (out / "b.yaml").read_text() == "new"


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / RECORD_FILE).write_text("0" * 64 + "  notes.txt\n" + "0" * 64 + "  ../outside\nnonsense\n\x00\n")
    write_files(tmp_path, {"a.yaml": "1"})
    assert (tmp_path / "notes.txt").read_text() == "mine"
