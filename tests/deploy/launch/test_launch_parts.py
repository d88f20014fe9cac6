"""Parts of the launcher: from the manifest to processes."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.schedule.draft_flights import DRAFT_AUTO
from relayline.deploy.cli.join_flags import coordinator_join, fixed_stages
from relayline.deploy.cli.options import given_settings
from relayline.deploy.cli.serve import schedule_config, serve_command
from relayline.deploy.cli.up import up_command
from relayline.deploy.cli.up_changes import changes_of
from relayline.deploy.doctor.files import look_security, names_here
from relayline.deploy.doctor.report import Outcome
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.checks import check_ports
from relayline.deploy.launch.launch_plan import LocalStage, RemoteStage
from relayline.deploy.launch.own_tls import make_own_tls, make_own_token, make_stage_tokens, needs_own_token
from relayline.deploy.launch.ports import wanted_ports
from relayline.deploy.launch.prepare import override, settle, threads_for
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.run import Launch, plan_of, write_settled
from relayline.deploy.launch.serving import flag_defaults, for_each_stage
from relayline.deploy.launch.stage_checks import check_names
from relayline.deploy.launch.state import STATE_VERSION, LaunchState, StateDir
from relayline.deploy.launch.supervisor import Supervisor
from relayline.deploy.launch.tell import line_of
from relayline.deploy.manifest import Manifest, load_manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.load import ManifestError
from relayline.deploy.testing.processes import relayline
from relayline.wire.common.bounds import DRAFT_TOKENS_MAX
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.phase import Phase
from relayline.wire.links.ports import port_problem
from relayline.wire.links.roles import Role
from relayline.wire.links.security import load_security, read_token
from relayline.wire.links.tls_material import check_material
from tests.support.launches import launched
from tests.support.tiny_models import make_tiny

SMALL = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: small}
spec:
  model: {path: model.gguf}
"""
FOUR = """
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: four}
spec:
  model: {path: model.gguf}
  stages:
    - {name: here, threads: 3}
    - {name: box1, host: box1}
    - {name: box2, host: 10.0.0.2, port: 7000, device: gpu}
  coordinator: {host: head, http: {host: 0.0.0.0, port: 9000}}
  wire: {tls: {directory: tls/head}, tokenFile: secret}
  telemetry: {level: batches, otlpEndpoint: "http://otel:4317"}
"""


def manifest_of(text: str, directory: Path) -> Manifest:
    path = directory / "pipeline.yaml"
    path.write_text(text)
    return load_manifest(path)


def test_flags_win_over_the_manifest(tmp_path: Path) -> None:
    manifest = manifest_of(SMALL, tmp_path)
    changed = changes_of({"ctx": 64, "http": ("127.0.0.1", 0), "no_share": True, "policy": "drain", "verbose": True})
    spec = override(manifest, changed).spec
    assert (spec.context.tokens, spec.coordinator.http.port, spec.batching.share) == (64, 0, False)
    assert spec.batching.policy == "drain"
    assert override(manifest, {}) is manifest
    with pytest.raises(UsageError, match="context"):
        override(manifest, {"context.tokens": 1})


def draft_of_serve(*arguments: str | Path) -> int:
    """The coordinator's schedule settings for such a call of `relayline serve`."""
    return schedule_config(serve_command.make_context("serve", [*map(str, arguments)]).params).draft


def test_drafts_by_number_need_the_policy_that_makes_them() -> None:
    with pytest.raises(UsageError, match="--draft 4 needs --policy auto: with drain there are no drafts"):
        draft_of_serve("--policy", "drain", "--draft", "4")
    assert draft_of_serve("--policy", "single", "--draft", "off") == 0
    assert draft_of_serve("--policy", "drain", "--groups", "2", "--draft", "4") == 4


def test_with_grants_there_are_no_drafts_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As flags, as variables, in a manifest, and over one."""
    (tmp_path / "pipeline.yaml").write_text(SMALL + "  batching: {grantSteps: 8}\n")
    monkeypatch.setattr("relayline.deploy.cli.up_launch.with_stage_flags", lambda manifest, *_: manifest)
    manifest = launched(monkeypatch, str(tmp_path / "pipeline.yaml")).manifest
    assert manifest.serving.draft_tokens == 0
    assert override(manifest, changes_of({"grant_steps": 0})).serving.draft_tokens == DRAFT_AUTO
    assert draft_of_serve("--grant-steps", "8") == draft_of_serve("--manifest", tmp_path / "pipeline.yaml") == 0
    assert draft_of_serve("--grant-steps", "off") == DRAFT_AUTO
    assert draft_of_serve("--grant-steps", "8", "--draft", "off") == 0
    excluded = "^--draft 4 and --grant-steps 8 exclude each other: streams with drafts get no grants"
    with pytest.raises(UsageError, match=excluded):
        draft_of_serve("--grant-steps", "8", "--draft", "4")
    with pytest.raises(UsageError, match=excluded):
        launched(monkeypatch, str(tmp_path / "pipeline.yaml"), "--draft", "4")
    monkeypatch.setenv("RELAYLINE_DRAFT", "4")
    for arguments in (["--grant-steps", "8"], ["--manifest", tmp_path / "pipeline.yaml"]):
        with pytest.raises(UsageError, match=excluded):
            draft_of_serve(*arguments)
    with pytest.raises(UsageError, match=excluded):
        launched(monkeypatch, "m.gguf", "--grant-steps", "8")


@pytest.mark.parametrize(
    ("draft", "n_tokens"),
    [("auto", DRAFT_AUTO), ("off", 0), ("0", 0), ("1", 1), (str(DRAFT_TOKENS_MAX), DRAFT_TOKENS_MAX)],
)
def test_drafts_are_said_alike_everywhere(
    draft: str, n_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a flag, a variable, in a manifest, over a manifest, and on the way through `up` and its background."""
    assert draft_of_serve() == DRAFT_AUTO
    assert draft_of_serve("--draft", draft) == n_tokens
    manifest, path = manifest_of(SMALL, tmp_path), tmp_path / "pipeline.yaml"
    changed = {"draft": up_command.make_context("up", ["--draft", draft]).params["draft"]}
    settled = override(manifest, changes_of(changed))
    path.write_text(dump_manifest(settled))
    assert draft_of_serve("--manifest", path) == n_tokens
    monkeypatch.setenv("RELAYLINE_DRAFT", "7")
    assert draft_of_serve("--manifest", path) == 7
    assert draft_of_serve("--manifest", path, "--draft", draft) == n_tokens
    monkeypatch.setenv("RELAYLINE_DRAFT", draft)
    assert draft_of_serve() == up_command.make_context("up", []).params["draft"] == n_tokens


@pytest.mark.parametrize("draft", ["auto", "off", "5"])
def test_arguments_that_up_passes_on_keep_their_meaning(
    draft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_tokens = up_command.make_context("up", ["--draft", draft]).params["draft"]
    (tmp_path / "settled.yaml").write_text(dump_manifest(launched(monkeypatch, "m.gguf", "--draft", draft).manifest))
    assert draft_of_serve("--manifest", tmp_path / "settled.yaml") == n_tokens
    manifest_of(SMALL, tmp_path)
    handed_on: list[str] = []
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.ready_to_start", lambda *_: None)
    monkeypatch.setattr(
        "relayline.deploy.cli.up_manifest.start_detached", lambda arguments, *_: handed_on.extend(arguments)
    )
    flags = ["--detach", "--json", "--state-dir", str(tmp_path / "state"), "--allow-host", "a.example",
             "--allow-host", "b.example", "--no-share", "--http", "127.0.0.1:0", "--cuts", "4"]  # fmt: skip
    monkeypatch.setattr("relayline.deploy.cli.up_launch.with_stage_flags", lambda manifest, *_: manifest)
    up_command.main([str(tmp_path / "pipeline.yaml"), "--draft", draft, *flags], standalone_mode=False)
    again = up_command.make_context("up", handed_on).params
    assert (again["draft"], again["no_share"], again["http"], again["cuts"], again["target"], again["name"]) == (
        n_tokens, True, ("127.0.0.1", 0), (4,), str(tmp_path / "pipeline.yaml"), "small")  # fmt: skip
    assert again["allow_hosts"] == ("a.example", "b.example")
    assert not again["detach"]


def test_a_detached_supervisor_does_not_detach_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RELAYLINE_DETACH reaches the supervisor in the background as well, which would start another, and so on."""
    manifest_of(SMALL, tmp_path)
    started: list[Manifest] = []
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.launch", lambda what, *_, **__: started.append(what.manifest))
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.start_detached", lambda *_: pytest.fail("detached once more"))
    monkeypatch.setenv("RELAYLINE_DETACH", "1")
    read_end, write_end = os.pipe()
    command_line = [
        str(tmp_path / "pipeline.yaml"),
        "--state-dir",
        str(tmp_path / "state"),
        "--report-fd",
        str(write_end),
    ]
    monkeypatch.setattr("sys.argv", ["relayline", "up", *command_line])
    try:
        done = CliRunner().invoke(up_command, command_line)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert done.exit_code == 0, done.output
    assert [manifest.name for manifest in started] == ["small"]


def test_detaching_first_ends_leftovers_of_a_killed_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers hold the ports and the memory that are looked at next."""
    manifest_of(SMALL, tmp_path)
    done: list[str] = []
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.end_leftovers", lambda _: done.append("leftovers"))
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.ready_to_start", lambda *_: done.append("looked"))
    monkeypatch.setattr("relayline.deploy.cli.up_manifest.start_detached", lambda *_: done.append("started"))
    flags = ["--detach", "--json", "--state-dir", str(tmp_path / "state")]
    up_command.main([str(tmp_path / "pipeline.yaml"), *flags], standalone_mode=False)
    assert done == ["leftovers", "looked", "started"]


def test_threads_are_divided_among_the_stages_of_this_machine(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    two = manifest_of(SMALL, tmp_path).stages
    assert [threads_for(stage, two) for stage in two] == [max(1, cores // 2)] * 2
    four = manifest_of(FOUR, tmp_path).stages
    assert [threads_for(stage, four) for stage in four] == [3, 0, 0]


def test_a_settled_manifest_leaves_nothing_open(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=4)
    assert relayline("split", model, "--cuts", "1,2", "--out", tmp_path / "split").returncode == 0
    settled = settle(manifest_of(FOUR, tmp_path), model, load_pipeline(tmp_path / "split"))
    assert [stage.layer_range for stage in settled.stages] == [(0, 1), (1, 2), (2, 4)]
    assert settled.model_path == model
    assert settled.spec.wire.tls.directory == str(tmp_path / "tls" / "head")
    elsewhere = settled.with_directory(Path("/nowhere"))
    assert elsewhere.resolve(str(elsewhere.spec.wire.token_file)) == tmp_path / "secret"


@pytest.mark.parametrize(("layers", "fixed"), [("", ()), (", layers: [0, 2]", ("here",))])
def test_a_new_stage_may_share_layers_that_only_the_plan_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str, fixed: tuple[str, ...]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    (tmp_path / "state").mkdir()
    make_tiny("llama", tmp_path / "model.gguf", n_layers=4)
    text = SMALL.replace(
        "spec:", "spec:\n  coordinator: {http: {port: 0}}\n  stages: [{name: hereLAYERS}, {name: there}]"
    )
    manifest = manifest_of(text.replace("LAYERS", layers), tmp_path)
    plan, _ = plan_of(Launch(manifest, tmp_path / "m.yaml"), StateDir(tmp_path / "state"))
    arguments = dict(zip(plan.serve_arguments[::2], plan.serve_arguments[1::2], strict=True))
    given = {"settle": arguments["--settle"], "fixed": arguments.get("--fixed", "")}
    assert fixed_stages({**given, "manifest": load_manifest(Path(arguments["--manifest"]))}) == fixed


def test_stages_are_started_here_or_elsewhere(tmp_path: Path) -> None:
    plan = arrange(manifest_of(FOUR, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json", ("--verbose",))
    here, box1, box2 = plan.stages
    assert isinstance(here, LocalStage)
    assert isinstance(box1, RemoteStage)
    assert isinstance(box2, RemoteStage)
    assert plan.join == ("0.0.0.0", 50_050)
    assert plan.http == ("0.0.0.0", 9_000)
    assert plan.serve_arguments == (
        "--manifest", str(tmp_path / "settled.json"), "--keep-layers", str(tmp_path / "layers.json"),
        "--plan-file", str(tmp_path / "plan.json"), "--settle", str(tmp_path / "settled.json"), "--verbose",
    )  # fmt: skip
    assert here.arguments[:4] == ("--listen", "0.0.0.0:0", "--advertise", "head")
    assert ("--tls", str(tmp_path / "tls" / "here")) == here.arguments[6:8], "not the coordinator's"
    assert ("--token-file", str(tmp_path / "join" / "here.token")) == here.arguments[8:10]
    assert box1.arguments[:4] == ("--listen", "0.0.0.0:50051", "--advertise", "box1")
    assert box1.arguments[-4:] == ("--tls", "box1", "--token-file", "box1.token")
    assert box1.arguments[4:6] == ("--metrics", "box1:9464"), "over TLS, for who shows a certificate"
    assert box2.arguments[1] == "0.0.0.0:7000"
    assert box1.bring == (tmp_path / "tls" / "box1", tmp_path / "join" / "box1.token")
    clear = FOUR.replace("tls: {directory: tls/head}, tokenFile: secret", "tls: {mode: off}")
    _, far, _ = arrange(manifest_of(clear, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json").stages
    assert isinstance(far, RemoteStage)
    assert far.arguments[4:] == ("--metrics", "127.0.0.1:9464", "--insecure")


def test_on_one_machine_nothing_listens_beyond_it(tmp_path: Path) -> None:
    plan = arrange(manifest_of(SMALL, tmp_path), tmp_path / "small.yaml", tmp_path / "settled.json")
    assert plan.join == ("127.0.0.1", 0)
    assert not plan.remote
    for stage in plan.local:
        assert stage.arguments == ("--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
    settled = manifest_of(SMALL + "  wire: {tokenFile: /state/join/token}\n", tmp_path)
    for stage in arrange(settled, tmp_path / "small.yaml", tmp_path / "settled.json").local:
        assert stage.arguments[-2:] == ("--token-file", str(tmp_path / "join" / f"{stage.name}.token"))


def test_serve_takes_its_defaults_from_the_manifest(tmp_path: Path) -> None:
    from relayline.coordinator.joining.config import JoinConfig, JoiningStage

    manifest = manifest_of(FOUR, tmp_path)
    defaults = flag_defaults(manifest)
    assert defaults["names"] == "here,box1,box2"
    assert defaults["join_listen"] == ("0.0.0.0", 50_050)
    assert defaults["tls_dir"] == tmp_path / "tls" / "head"
    assert defaults["token_file"] == tmp_path / "secret"
    assert "insecure" not in defaults
    join = JoinConfig(tuple(JoiningStage(stage.name) for stage in manifest.stages))
    stages = for_each_stage(join, manifest, "llama")
    assert stages is not None
    assert [place.engine.n_threads for place in stages.stages] == [3, 0, 0]
    assert [place.engine.gpu_layers for place in stages.stages] == [0, 0, -1]
    assert {place.engine.kv_layout for place in stages.stages} == {"per-lane"}, "one of them is on a CPU"
    assert [place.telemetry.metrics_port for place in stages.stages] == [0, 9_464, 9_464]
    assert {place.telemetry.level for place in stages.stages} == {"batches"}
    with pytest.raises(UsageError, match="--names leaves out box1, box2, here of the manifest"):
        for_each_stage(JoinConfig((JoiningStage("one"),)), manifest, "llama")


def test_a_flag_of_serve_wins_over_the_settings_of_single_stages(tmp_path: Path) -> None:
    manifest = manifest_of(FOUR, tmp_path)
    (tmp_path / "tls" / "head").mkdir(parents=True)
    (tmp_path / "secret").touch()
    arguments = ["--manifest", str(tmp_path / "pipeline.yaml"), "--gpu-layers", "5", "--trace-level", "off"]
    with serve_command.make_context("serve", arguments) as context:
        join = coordinator_join(context.params, 3)
        stages = for_each_stage(join, manifest, "llama", given_settings(context.params))
    assert stages is not None
    assert [place.engine.gpu_layers for place in stages.stages] == [5, 5, 5], "in place of 0, 0 and -1"
    assert [place.engine.n_threads for place in stages.stages] == [3, 0, 0], "not given by a flag"
    assert {place.telemetry.level for place in stages.stages} == {"off"}


def test_a_pipeline_that_is_to_start_again_holds_its_ports_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of its stages and of their metrics, which its manifest fixes."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    directory, me = StateDir(tmp_path / "state" / "relayline" / "small"), identify(os.getpid())
    assert me is not None
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
        text = SMALL + f"  stages: [{{name: a, port: {ports[0]}, metricsPort: {ports[1]}}}]\n"
        manifest = manifest_of(text + "  coordinator: {http: {port: 0}}\n", tmp_path)
        assert [port for _, _, port in wanted_ports(manifest)] == ports
        directory.path.mkdir(parents=True)
        directory.store(LaunchState(STATE_VERSION, "small", "small.yaml", Phase.READY, me.pid, me.start_ticks))
        with pytest.raises(StartError, match="is taken by another process"):
            check_ports(manifest, may_run=True)
        write_settled(manifest, directory.manifest)
        check_ports(manifest, may_run=True)
        with pytest.raises(StartError) as refused:
            check_ports(manifest)
    assert refused.value.message.count("is taken by the pipeline small; `relayline down small` ends it") == len(ports)


@pytest.mark.parametrize("name", ["up", "coordinator"])
def test_names_of_the_launchs_own_processes_are_taken(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"no stage can be named '{name}'"):
        check_names(manifest_of(SMALL + f"  stages: [{{name: a}}, {{name: {name}}}]\n", tmp_path))


async def test_an_address_that_is_shown_can_be_connected_to(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    with directory.locked("four"):
        plan = arrange(manifest_of(FOUR, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json")
        supervisor = Supervisor(plan, directory, lambda _: None)
        supervisor._coordinator.log.close()
        for listener, shown in (
            ("0.0.0.0:7", "head:7"),
            ("[::]:7", "head:7"),
            ("127.0.0.1:7", "127.0.0.1:7"),
            ("", ""),
        ):
            assert supervisor._reachable_url(f"https://{listener}") == (shown and f"https://{shown}")


async def test_stages_get_an_address_that_they_can_read(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    with directory.locked("four"):
        text = FOUR.replace("host: head", 'host: "fd00::1"')
        plan = arrange(manifest_of(text, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json")
        supervisor = Supervisor(plan, directory, lambda _: None)
        supervisor._coordinator.log.close()
        assert supervisor._reachable_url("http://[::]:7") == "http://[fd00::1]:7"


def test_ports_that_are_taken_are_all_named(tmp_path: Path) -> None:
    with socket.socket() as first, socket.socket() as second:
        for listener in (first, second):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        port, http_port = first.getsockname()[1], second.getsockname()[1]
        text = SMALL + f"  stages: [{{name: a, port: {port}}}]\n  coordinator: {{http: {{port: {http_port}}}}}\n"
        manifest = manifest_of(text, tmp_path)
        assert [what for what, _, _ in wanted_ports(manifest)] == ["the HTTP API", "stage a"]
        with pytest.raises(StartError, match=rf"HTTP API: 127.0.0.1:{http_port} is taken.*stage a: 127.0.0.1:{port}"):
            check_ports(manifest)
    with pytest.raises(ManifestError, match=f"port {port} is taken by the coordinator's http"):
        manifest_of(text.replace(f"port: {http_port}", f"port: {port}"), tmp_path)
    assert port_problem("127.0.0.1", port) is None
    assert port_problem("192.0.2.1", 1) is not None, "an address of no interface here"


@pytest.mark.netns
@pytest.mark.parametrize("setup", ["true", "ip link set lo up && ip addr del 127.0.0.1/8 dev lo"])
def test_a_machine_that_does_not_reach_itself_is_refused_at_once(tmp_path: Path, setup: str) -> None:
    """Ports can be had on an interface that is down, so the processes waited for each other without an end."""
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces are not allowed here")
    manifest = tmp_path / "small.yaml"
    manifest.write_text(SMALL + "  stages: [{name: a}]\n")
    program = (
        "import sys; from pathlib import Path; from relayline.deploy.launch.checks import check_before_work;"
        "from relayline.deploy.manifest import load_manifest; check_before_work(load_manifest(Path(sys.argv[1])))"
    )
    command = f'{setup} && exec "$0" -c "$1" "$2"'
    ended = subprocess.run(
        ["unshare", "-n", "sh", "-c", command, sys.executable, program, str(manifest)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "StartError: 127.0.0.1 cannot be reached: " in ended.stderr
    assert ended.stderr.rstrip().endswith("bring the loopback interface up, as with `ip link set lo up`")


def test_the_launcher_makes_tls_material_once_and_renews_it(tmp_path: Path) -> None:
    text = FOUR.replace("tls: {directory: tls/head}, tokenFile: secret", "tls: {mode: auto}")
    manifest = manifest_of(text, tmp_path)
    here = make_own_tls(manifest, tmp_path / "own")
    assert here == tmp_path / "own" / "coordinator"
    load_security(here, environment={}, role=Role.COORDINATOR)
    assert str(load_security(tmp_path / "own" / "here", environment={}, name="here").identity) == "stage here on head"
    assert not (tmp_path / "own" / "box1").exists(), "its key is made there"
    before = (here / "cert.pem").read_bytes()
    make_own_tls(manifest, tmp_path / "own")
    assert (here / "cert.pem").read_bytes() == before
    make_own_tls(manifest, tmp_path / "own", datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=360))
    assert (here / "cert.pem").read_bytes() != before


def test_certificates_of_hosts_written_otherwise_are_not_made_again(tmp_path: Path) -> None:
    text = FOUR.replace("tls: {directory: tls/head}, tokenFile: secret", "tls: {mode: auto}")
    text = text.replace("host: head", "host: Head").replace("10.0.0.2", '"fd00:0::7"')
    manifest = manifest_of(text, tmp_path)
    here = make_own_tls(manifest, tmp_path / "own")
    before = {path: path.read_bytes() for path in sorted(here.parent.rglob("cert.pem"))}
    assert len(before) == 2
    make_own_tls(manifest, tmp_path / "own")
    assert {path: path.read_bytes() for path in before} == before
    findings, _ = look_security(manifest, names_here(manifest), here)
    assert {finding.outcome for finding in findings} == {Outcome.OK}, findings


@pytest.mark.parametrize("left", [["ca-key.pem"], ["ca-key.pem", "token"]])
def test_a_ca_that_was_cut_short_is_made_again(left: list[str], tmp_path: Path) -> None:
    text = FOUR.replace("tls: {directory: tls/head}, tokenFile: secret", "tls: {mode: auto}")
    (tmp_path / "own").mkdir()
    for name in left:
        (tmp_path / "own" / name).write_text("half")
    here = make_own_tls(manifest_of(text, tmp_path), tmp_path / "own")
    assert load_security(here, environment={}).token


@pytest.mark.parametrize("age_days", [0, 360], ids=["new", "renewed"])
def test_material_that_was_cut_short_anywhere_is_made_again(
    age_days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FOUR.replace("tls: {directory: tls/head}, tokenFile: secret", "tls: {mode: auto}")
    manifest, now = manifest_of(text, tmp_path), datetime.datetime.now(datetime.UTC)
    replace, n_cuts = Path.replace, 0
    while True:
        root = tmp_path / f"own-{n_cuts}"
        if age_days:
            make_own_tls(manifest, root, now - datetime.timedelta(days=age_days))
        n_left = n_cuts

        def cut_short(path: Path, target: Path) -> Path:
            nonlocal n_left
            if n_left == 0:
                raise _KilledError
            n_left -= 1
            return replace(path, target)

        with monkeypatch.context() as patched, contextlib.suppress(_KilledError):
            patched.setattr(Path, "replace", cut_short)
            make_own_tls(manifest, root, now)
            break
        here = make_own_tls(manifest, root, now)
        for directory, name in ((here, ""), (root / "here", "here")):
            assert load_security(directory, environment={}, name=name).token
            check_material(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
        n_cuts += 1
    assert n_cuts >= 8


class _KilledError(BaseException):
    """The process ends here."""


def test_without_tls_the_launcher_makes_a_token_once(tmp_path: Path) -> None:
    clear = SMALL + "  stages: [{name: a}, {name: b, host: box}]\n  wire: {tls: {mode: off}}\n"
    assert needs_own_token(manifest_of(clear, tmp_path))
    assert needs_own_token(manifest_of(SMALL, tmp_path)), "other users of this machine could use its stages"
    assert not needs_own_token(manifest_of(clear.replace("{tls", "{tokenFile: own, tls"), tmp_path))
    made = make_own_token(tmp_path / "state" / "token")
    token = read_token(made)
    assert made.stat().st_mode & 0o777 == 0o600
    assert read_token(make_own_token(made)) == token
    manifest = override(manifest_of(clear, tmp_path), {"wire.tokenFile": str(made)})
    make_stage_tokens(manifest, tmp_path / "join")
    found = {path.name: read_token(path) for path in (tmp_path / "join").iterdir()}
    assert sorted(found) == ["a.token", "b.token"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "join").iterdir())
    assert found["b.token"].startswith("stage/b/box/"), "says whose it is"
    assert token.partition("/")[2] not in "".join(found.values())
    made.write_text("a-token-without-a-role")
    with pytest.raises(UsageError, match=r"is no coordinator's join token, or one of an older version"):
        make_stage_tokens(manifest, tmp_path / "join")


def test_lines_for_people() -> None:
    ready = {"event": "process", "name": "stage-0", "role": "stage", "pid": 7, "address": "127.0.0.1:5", "restarts": 1,
             "layers": [0, 4]}  # fmt: skip
    assert line_of(ready, as_json=False).split() == ["stage-0", "ready", "layers", "0-3", "127.0.0.1:5", "(pid", "7,",
                                                     "restart", "1)"]  # fmt: skip
    remote = {"event": "remote", "name": "b", "host": "box", "command": "relayline stage", "bring": "/tls/box"}
    assert line_of(remote, as_json=False) == "on box, run (copy /tls/box there first):\n  relayline stage"
    served = {"event": "ready", "url": "http://127.0.0.1:8080", "model": "m"}
    (first, *rest) = line_of(served, as_json=False).splitlines()
    assert first == "ready: http://127.0.0.1:8080/v1"
    assert rest[:3] == ["page:  http://127.0.0.1:8080/", "try it:", "  relayline chat"]
    assert "http://127.0.0.1:8080/v1/chat/completions" in rest[3]
    assert line_of(served, as_json=False, is_here=True).splitlines()[-1].startswith("Ctrl-C ends it")
    assert "relayline chat" not in line_of(served | {"chat": False}, as_json=False)
    ranks = line_of(served | {"ranks": True}, as_json=False)
    assert "relayline chat" not in ranks
    assert "/v1/rerank " in ranks
    assert '"query": ' in ranks
    alone = line_of(served | {"clients": ""}, as_json=False).splitlines()[0]
    assert alone.endswith("/v1 (only for this machine; `--http 0.0.0.0:8080` lets other hosts in)")
    everywhere = {"event": "ready", "url": "http://0.0.0.0:8080", "clients": "http://10.0.0.9:8080", "model": "m"}
    assert line_of(everywhere, as_json=False).splitlines()[:2] == [
        "ready: http://10.0.0.9:8080/v1", "page:  http://10.0.0.9:8080/",
    ]  # fmt: skip
    house = {"event": "ready", "role": "gateway", "url": "http://0.0.0.0:8000", "model": "m"}
    first, *rest = line_of(house, as_json=False).splitlines()
    assert first == "ready: http://127.0.0.1:8000/v1 (also at the other addresses of this machine)"
    assert rest[:3] == ["page:  http://127.0.0.1:8000/", "try it:", "  relayline chat"]
    assert line_of(ready, as_json=True).startswith('{"event": "process"')


async def test_restarts_of_a_stage_on_another_host_are_counted(tmp_path: Path) -> None:
    """Also over a restart of the coordinator, which has seen no stage before; the same process again is no restart."""
    directory = StateDir(tmp_path / "state")
    with directory.locked("four"):
        plan = arrange(manifest_of(FOUR, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json")
        emitted: list[dict[str, object]] = []
        supervisor = Supervisor(plan, directory, emitted.append)
        supervisor._coordinator.log.close()
        name = plan.remote[0].name

        def tell(state: str, process: str) -> tuple[str, int]:
            supervisor._on_event({"event": "stage", "name": name, "state": state, "address": "", "process": process})
            record = supervisor.board[name]
            return record.state.value, record.n_restarts

        assert tell("starting", "a") == ("starting", 0)
        assert tell("ready", "a") == ("ready", 0)
        assert tell("lost", "a") == ("lost", 0)
        assert tell("ready", "a") == ("ready", 0)
        assert tell("ready", "b") == ("ready", 1)
        assert tell("waiting", "") == ("lost", 1)
        assert tell("ready", "c") == ("ready", 2)
        assert [event["restarts"] for event in emitted if event["event"] == "process"] == [0, 0, 2]


async def test_the_detail_of_a_stage_on_another_host_does_not_say_its_state_again(tmp_path: Path) -> None:
    directory = StateDir(tmp_path / "state")
    with directory.locked("four"):
        plan = arrange(manifest_of(FOUR, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json")
        supervisor = Supervisor(plan, directory, lambda _: None)
        supervisor._coordinator.log.close()
        name, details = plan.remote[0].name, {}
        for state in ("waiting", "starting", "measuring", "fetching", "loading", "ready", "spare", "lost"):
            supervisor._on_event({"event": "stage", "name": name, "state": state, "address": "", "process": "a"})
            details[state] = supervisor.board[name].detail
    told = {state: text for state, text in details.items() if text}
    assert told == {"waiting": "has not joined yet", "lost": "start it there again if it has ended"}


async def test_stages_of_other_hosts_that_leave_at_a_planned_end_are_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = StateDir(tmp_path / "state")
    with directory.locked("four"):
        plan = arrange(manifest_of(FOUR, tmp_path), tmp_path / "four.yaml", tmp_path / "settled.json")
        supervisor = Supervisor(plan, directory, lambda _: None)
        supervisor._coordinator.log.close()
        name = plan.remote[0].name

        def tell(state: str, failure: str = "") -> None:
            event = {"event": "stage", "name": name, "state": state, "address": "", "process": "a", "failure": failure}
            supervisor._on_event(event)

        tell("ready")
        tell("lost")
        assert caplog.text.count(f"stage {name} is lost") == 1
        tell("fetching")
        tell("lost", "its disk is full")
        assert f"stage {name} is lost (its disk is full); waiting for it to join again" in caplog.text
        caplog.clear()
        tell("ready")
        supervisor._stopping.set()
        tell("lost")
        assert f"stage {name} is lost" not in caplog.text
