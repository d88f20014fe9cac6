"""The pipelines behind a gateway as separate manifests, and `plan` and `doctor` of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from relayline.coordinator.planner.memory import GPU_RESERVE_BYTES_MIN, GpuMemory, StageMemory
from relayline.deploy.cli import stage_flags
from relayline.deploy.cli.wanted_behind import wanted_behind
from relayline.deploy.launch.gateway.pipelines import clashes, pipelines_behind
from relayline.deploy.launch.gateway.plan import plan_gateway
from relayline.deploy.launch.gpus import with_usual_gpu
from relayline.deploy.launch.here import at_home, facing
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, StateDir
from relayline.deploy.machine.gpus import Gpu
from relayline.deploy.manifest.gateway import load_gateway
from relayline.deploy.manifest.load import ManifestError
from relayline.deploy.manifest.model import JOIN_PORT
from relayline.deploy.planning.report import Draft, Plan
from relayline.deploy.planning.together import missing_memory, shared_machines
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import Phase
from relayline.wire.common.units import GIB
from tests.support.launches import launched
from tests.support.tiny_models import make_tiny

HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {name}}}\nspec:\n"
REPLICAS = "replicas: [{stages: [{name: x, host: 10.255.0.1}]}, {url: 'http://127.0.0.1:9'}]"
TWO = f"  pipelines: [{{name: a, manifest: inner.yaml, {REPLICAS}}}]\n"
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4, tokenizer=True)


@pytest.fixture
def house(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a gateway's manifest, and inner.yaml next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def write(spec: str, *inner: str) -> Path:
        lines = (f"model: {{path: {model}}}", "context: {tokens: 64, lanes: 2}", "stages: 2", *inner)
        text = HEAD.format(kind="Pipeline", name="inner") + "".join(f"  {line}\n" for line in lines)
        (tmp_path / "inner.yaml").write_text(text)
        path = tmp_path / "house.yaml"
        path.write_text(HEAD.format(kind="Gateway", name="house") + spec)
        return path

    return write


def test_each_is_a_manifest_as_up_starts_it(house: Write) -> None:
    found = pipelines_behind(load_gateway(house(TWO)))
    assert [each.name for each in found] == ["a", "a-2", "a-3"]
    first, second, third = (each.manifest for each in found)
    assert third is None
    assert (first.name, second.name) == ("house-a", "house-a-2")
    assert [stage.host for stage in second.stages] == ["10.255.0.1"]
    assert first.spec.coordinator.http.port == 0, "the port of its manifest is not used behind a gateway"
    assert "lanes" in first.spec.context.model_fields_set


def test_unset_values_of_a_manifest_stay_unset_behind_a_gateway(house: Write, tmp_path: Path) -> None:
    """The address that other hosts are given is this machine's, as for a pipeline by itself."""
    (_, second, _) = pipelines_behind(load_gateway(house(TWO)))
    inner = tmp_path / "inner.yaml"
    inner.write_text(inner.read_text().replace("tokens: 64, lanes: 2", "tokens: 64"))
    (first, *_) = pipelines_behind(load_gateway(tmp_path / "house.yaml"))
    assert "lanes" not in first.manifest.spec.context.model_fields_set, "so a model with large states has fewer"
    assert at_home(second.manifest, lambda _: False, lambda _: "10.255.0.9").spec.coordinator.host == "10.255.0.9"


def test_each_replica_keeps_things_in_a_directory_of_its_own(house: Write, tmp_path: Path) -> None:
    kept = "coordinator: {responsesDir: kept/responses/, batchDir: kept/batches}"
    found = pipelines_behind(load_gateway(house(TWO, kept)))
    places = [(one.serving.responses_dir, one.serving.batch_dir) for each in found if (one := each.manifest)]
    assert [tuple(Path(place) for place in each) for each in places] == [
        (tmp_path / "kept/responses", tmp_path / "kept/batches"),
        (tmp_path / "kept/responses-2", tmp_path / "kept/batches-2"),
    ]


def test_a_replica_that_runs_is_compared_with_what_up_starts(house: Write, tmp_path: Path) -> None:
    """Otherwise `up` would find a change in its directories, and start it again each time."""
    path = house(TWO, "coordinator: {responsesDir: responses, batchDir: batches}")
    gateway = load_gateway(path)
    plan = plan_gateway(gateway, path, "house", tmp_path / "of-house")
    for member, started in zip(gateway.members()[:2], pipelines_behind(gateway), strict=False):
        compared, _ = wanted_behind(plan, member)
        assert started.manifest is not None
        assert compared.manifest.serving == started.manifest.serving
        assert compared.manifest.stages == started.manifest.stages


def test_a_pipeline_that_runs_is_compared_with_what_its_own_up_starts(
    house: Write, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the projector that `auto` means, and on this machine's GPU, of which the manifest says nothing either."""
    shutil.copy(model, tmp_path / "own.gguf")
    (tmp_path / "mmproj-own.gguf").touch()
    path = house(TWO, "coordinator: {mmproj: auto}")
    inner = tmp_path / "inner.yaml"
    inner.write_text(inner.read_text().replace(str(model), "own.gguf").replace("  stages: 2\n", ""))
    with_gpu = functools.partial(with_usual_gpu, gpus=lambda: [Gpu("CUDA0", "a card", 8 << 30)])
    monkeypatch.setattr(stage_flags, "with_usual_gpu", with_gpu)
    gateway = load_gateway(path)
    plan = plan_gateway(gateway, path, "house", tmp_path / "of-house")
    compared, _ = wanted_behind(plan, gateway.members()[0])
    arguments = [each for each in plan.pipelines[0].arguments[1:] if each != "--exit-with-stdin"]
    own = launched(monkeypatch, *arguments).manifest
    assert own.serving.mmproj == str(tmp_path / "mmproj-own.gguf")
    assert [stage.gpu_layers_used for stage in own.stages] == [-1]
    assert (compared.manifest.serving, compared.manifest.stages) == (own.serving, own.stages)


def test_ports_that_two_pipelines_want(house: Write) -> None:
    again = "  pipelines: [{name: a, manifest: inner.yaml, replicas: [{stages: [%s]}, {stages: [%s]}]}]\n"
    apart = house(again % ("{name: x, host: 10.255.0.1}", "{name: y, host: 10.255.0.2}"))
    assert clashes(pipelines_behind(load_gateway(apart))) == []
    same = house(again % ("{name: x, host: 10.255.0.1}", "{name: y, host: 10.255.0.1}"))
    assert clashes(pipelines_behind(load_gateway(same)))[0] == (
        "port 50051 on 10.255.0.1 is wanted by stage y of a-3 and by stage x of a-2"
    )
    named = house(TWO, "coordinator: {joinPort: 50050}")
    assert "port 50050 on localhost is wanted by joining stages" in clashes(pipelines_behind(load_gateway(named)))[0]


def test_replicas_on_this_machine_join_at_ports_that_the_system_chooses(house: Write) -> None:
    """So two gateways on one machine do not want the same ones."""
    path = house("  pipelines: [{name: a, manifest: inner.yaml, replicas: [{stages: [{name: x}]}]}]\n")
    manifests = [each.manifest for each in pipelines_behind(load_gateway(path))]
    assert [found.join_port for found in manifests if found] == [0, 0]
    (_, far, _) = pipelines_behind(load_gateway(house(TWO)))
    assert far.manifest is not None
    assert far.manifest.join_port == JOIN_PORT


def test_a_name_that_is_too_long_with_the_gateways_is_one_line(house: Write) -> None:
    path = house(TWO)
    path.write_text(path.read_text().replace("name: house", f"name: {'h' * 62}"))
    with pytest.raises(UsageError, match="hhh-a' is not a name of lower-case letters"):
        pipelines_behind(load_gateway(path))


def test_plan_shows_every_pipeline_and_shared_machines(house: Write) -> None:
    path = house("  pipelines: [{name: a, manifest: inner.yaml, replicas: [{stages: [{name: x}]}]},"
                 " {name: b, url: 'http://127.0.0.1:9'}]\n")  # fmt: skip
    shown = relayline("plan", path)
    assert shown.returncode == 0, shown.stderr
    assert "house-a: " in shown.stdout
    assert "house-a-2: " in shown.stdout
    assert "b: runs elsewhere, at http://127.0.0.1:9" in shown.stdout
    assert "localhost has stages of a, a-2; each is planned as if it had the machine alone" in shown.stdout
    plans = json.loads(relayline("plan", path, "--json").stdout)
    assert [(each["name"], "plan" in each) for each in plans["pipelines"]] == [("a", True), ("a-2", True), ("b", False)]
    assert len(plans["notes"]) == 1


def test_plan_names_each_pipeline_that_does_not_fit(house: Write) -> None:
    small = "stages: [{name: x, host: 10.255.0.1, memoryGib: 0.001}]"
    path = house(f"  pipelines: [{{name: a, manifest: inner.yaml, replicas: [{{{small}}}]}}]\n")
    shown = relayline("plan", path)
    assert shown.returncode == 2
    assert "house-a: " in shown.stdout, "the others are shown"
    (line,) = shown.stderr.splitlines()
    assert line.startswith("relayline: error: a-2: ")
    for flags, message in ((("--compare",), "--url http://GATEWAY/pipelines/NAME"), (("--hosts", "h"), "to a MODEL")):
        refused = relayline("plan", path, *flags)
        assert (refused.returncode, message in refused.stderr) == (2, True)


def test_memory_is_added_up_where_pipelines_share_a_machine(house: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from relayline.deploy.cli.plan import make_plan

    path = house("  pipelines: [{name: a, manifest: inner.yaml}, {name: b, manifest: inner.yaml}]\n")
    monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: 1 << 40)
    pipelines = pipelines_behind(load_gateway(path))
    plans = [(each.name, make_plan(each.manifest)) for each in pipelines]
    assert missing_memory(plans) == []
    assert len(shared_machines(plans)) == 1
    needed = sum(stage.memory.total_bytes for stage in plans[0][1].prediction.stages)
    monkeypatch.setattr("relayline.deploy.machine.facts.available_memory_bytes", lambda: 2 * needed + (128 << 20))
    plans = [(each.name, make_plan(each.manifest)) for each in pipelines]
    (line,) = missing_memory(plans)
    assert line.startswith("localhost: ")
    assert "GiB are missing: the pipelines need a 0." in line
    assert missing_memory(plans, awake_max=2) == [line]
    assert missing_memory(plans, awake_max=1) == [], "they are never there together"


def test_plan_says_how_many_pipelines_it_counts(house: Write) -> None:
    path = house("  awakeMax: 1\n  pipelines: [{name: a, manifest: inner.yaml}, {name: b, manifest: inner.yaml}]\n")
    shown = relayline("plan", path)
    assert shown.returncode == 0, shown.stderr
    said = " ".join(shown.stdout.split())
    assert "awakeMax 1: of each machine's memory only the pipeline that needs most is counted" in said


def test_so_is_the_memory_of_a_gpu(house: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from relayline.deploy.cli.plan import make_plan

    def planned(size_bytes: int) -> list[tuple[str, Plan]]:
        monkeypatch.setattr(
            "relayline.deploy.planning.drafting.known_gpus", lambda: (Gpu("CUDA0", "a card", size_bytes),)
        )
        return [(each.name, make_plan(each.manifest)) for each in pipelines_behind(load_gateway(path))]

    path = house("  pipelines: [{name: a, manifest: inner.yaml}, {name: b, manifest: inner.yaml}]\n")
    inner = path.with_name("inner.yaml")
    inner.write_text(inner.read_text().replace("stages: 2", "stages: [{name: x, device: gpu, devices: CUDA0}]"))
    plans = planned(80 * GIB)
    assert missing_memory(plans) == []
    needed = plans[0][1].prediction.stages[0].memory.gpu
    assert needed is not None
    (line,) = missing_memory(planned(GPU_RESERVE_BYTES_MIN + needed.total_bytes * 3 // 2))
    assert line.startswith("CUDA0 of localhost: ")
    draft = Draft("small", 2_048, StageMemory(0, 0, 0, gpu=GpuMemory(30 * GIB, 40 * GIB, 20 * GIB)), 2 * 80 * GIB)
    first, (name, second) = planned(80 * GIB)
    hosts = tuple(dataclasses.replace(host, offload=None) for host in second.instance.hosts)
    stages = tuple(
        dataclasses.replace(stage, gpu="", memory=dataclasses.replace(stage.memory, gpu=None))
        for stage in second.prediction.stages
    )
    beside = dataclasses.replace(
        second,
        instance=dataclasses.replace(second.instance, hosts=hosts),
        prediction=dataclasses.replace(second.prediction, stages=stages),
        draft=draft,
    )
    assert missing_memory([first, (name, beside)]) == []
    both = dataclasses.replace(draft, gpus_bytes=80 * GIB)  # it has no second GPU to be on
    (line,) = missing_memory([first, (name, dataclasses.replace(beside, draft=both))])
    assert line.startswith("CUDA0 of localhost: ")
    assert "b 90.00 GiB" in line


def test_up_names_ports_that_two_pipelines_want_before_it_starts_any(house: Write) -> None:
    path = house(
        "  pipelines: [{name: a, manifest: inner.yaml, replicas: [{stages: [{name: x, host: 10.255.0.1}]},"
        " {stages: [{name: y, host: 10.255.0.1}]}]}]\n"
    )
    done = relayline("up", path)
    assert done.returncode == 2
    assert "port 50051 on 10.255.0.1 is wanted by stage y of a-3 and by stage x of a-2; name another" in done.stderr


def test_stages_of_this_machine_take_ports_that_nobody_wants(house: Write) -> None:
    """Also if the manifest names it by its address: both replicas have a stage here."""
    here = facing("10.255.0.1") or "127.0.0.1"
    path = house(
        f"  pipelines: [{{name: a, manifest: inner.yaml, replicas: [{{stages: [{{name: y, host: {here}}},"
        " {name: z, host: 10.255.0.2}]}, {url: 'http://h:1', keyFile: nowhere}]}]\n"
    )
    inner = path.with_name("inner.yaml")
    stages = f"stages: [{{name: x, host: {here}}}, {{name: far, host: 10.255.0.1}}]"
    inner.write_text(inner.read_text().replace("stages: 2", stages))
    pipelines = [each.prepared(at_home) for each in pipelines_behind(load_gateway(path))]
    assert clashes(pipelines) == []
    (line,) = relayline("up", path).stderr.splitlines()
    assert "nowhere cannot be read" in line, "which is looked at next"


def test_a_pipeline_of_an_older_relayline_is_not_restarted(tmp_path: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    directory = StateDir(tmp_path / "state")
    directory.path.mkdir()
    directory.store(LaunchState(STATE_VERSION, "chat", "chat.yaml", Phase.READY, me.pid, me.start_ticks))
    directory.manifest.write_text(HEAD.format(kind="Pipeline", name="chat") + "  model: {path: m.gguf}\n")
    done = relayline("restart", "chat", "--state-dir", directory.path)
    assert done.returncode == 2
    assert "chat was started by an older relayline, or not by `up`; run `relayline down chat`" in done.stderr
    assert relayline("restart", "nobody", "--state-dir", directory.path).returncode == 2


def test_doctor_examines_the_machine_once_and_each_pipeline(house: Write) -> None:
    done = relayline("doctor", house(TWO.replace("pipelines", "http: {port: 0}\n  pipelines")), "--json")
    checks = {each["check"]: each for each in json.loads(done.stdout)}
    assert [name for name in checks if name.endswith("python")] == ["python"]
    assert checks["house: port"]["found"] == "the system chooses it"
    for name in ("a: model", "a-2: model", "a: ports", "house: ports", "house: api keys"):
        assert checks[name]["outcome"] == "ok", checks[name]
    assert "the local stages need" in checks["memory"]["found"]
    assert "http://127.0.0.1:9 does not answer" in checks["a-3: url"]["found"]
    assert checks["a-3: url"]["outcome"] == "warning"
    assert any(name.startswith("a-2: host 10.255.0.1") for name in checks)


def test_doctor_says_which_file_of_which_pipeline_is_wrong(house: Write) -> None:
    spec = "  apiKeysFile: none\n  pipelines: [{name: a, url: 'http://127.0.0.1:9', keyFile: nowhere}]\n"
    done = relayline("doctor", house(spec), "--json")
    checks = {each["check"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 1
    assert checks["a: keyFile"]["found"].startswith("nowhere cannot be used: No such file")
    assert checks["house: api keys"]["outcome"] == "failure"
    house(TWO)
    (path := house(TWO)).with_name("inner.yaml").write_text("kind: Pipeline\n")
    with pytest.raises(ManifestError, match=r"inner.yaml:"):
        pipelines_behind(load_gateway(path))
