"""Hosts of a launch: which one is this machine, the join line for each other one, and the output while they join."""

from __future__ import annotations

import datetime
import functools
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from relayline.deploy.cli import drain
from relayline.deploy.cli.control import _status_text
from relayline.deploy.cli.invite import invite_command
from relayline.deploy.launch import control, supervisor
from relayline.deploy.launch.arrange import arrange
from relayline.deploy.launch.certificates import CA_KEY_FILE, issue, revoke
from relayline.deploy.launch.control import Launched, describe
from relayline.deploy.launch.here import at_home, facing, reached_by
from relayline.deploy.launch.invitations import (
    CODES_FILE,
    FILE,
    SigningAuthority,
    has_joined,
    invite,
    invited_host,
)
from relayline.deploy.launch.inviting import authority_of, fresh_line
from relayline.deploy.launch.own_tls import make_own_tls
from relayline.deploy.launch.prepare import override
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import NOT_SEEN, STATE_VERSION, LaunchState, ProcessRecord, StateDir
from relayline.deploy.launch.tell import line_of
from relayline.deploy.launch.waiting import FETCH_LINE_EVERY_S, Waiting
from relayline.deploy.machine.addresses import addresses_of, is_this_machine
from relayline.deploy.machine.ports import free_port
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.wire.common.errors import RelaylineError, UsageError
from relayline.wire.common.phase import HostState, Phase
from relayline.wire.links.enrolment import read_token
from relayline.wire.links.roles import Role

GB = 1_000_000_000


def manifest_of(directory: Path, coordinator: str = "") -> Manifest:
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: four}\nspec:\n"
        "  model: {path: m.gguf}\n"
        "  stages: [{name: desk, host: desk.test}, {name: mini}, {name: server, host: 10.0.0.2}, "
        "{name: old, host: old}]\n" + (f"  coordinator: {{{coordinator}}}\n" if coordinator else "")
    )
    return parse_manifest(text.encode(), "four").with_directory(directory)


# --- this machine ---------------------------------------------------------------------------------------------------


def test_hosts_of_this_machine_are_started_here(tmp_path: Path) -> None:
    manifest = at_home(manifest_of(tmp_path), lambda host: host == "desk.test", lambda host: "")
    assert [stage.host for stage in manifest.stages] == ["localhost", "localhost", "10.0.0.2", "old"]
    plan = arrange(manifest, tmp_path / "four.yaml", tmp_path / "settled.json")
    assert [stage.name for stage in plan.local] == ["desk", "mini"]


def test_the_coordinators_own_host_is_this_machine(tmp_path: Path) -> None:
    manifest = at_home(manifest_of(tmp_path, "host: desk.test"), lambda host: False, lambda host: "10.0.0.9")
    assert manifest.stages[0].is_local
    assert manifest.spec.coordinator.host == "desk.test", "as it was written"


def test_a_coordinator_without_a_host_takes_the_address_that_faces_the_others(tmp_path: Path) -> None:
    asked = []

    def way(host: str) -> str:
        asked.append(host)
        return "10.0.0.9"

    manifest = at_home(manifest_of(tmp_path), lambda host: host == "desk.test", way)
    assert (manifest.spec.coordinator.host, asked) == ("10.0.0.9", ["10.0.0.2"])
    assert manifest.directory == tmp_path
    kept = at_home(manifest_of(tmp_path, "host: 127.0.0.1"), lambda host: False, way)
    assert kept.spec.coordinator.host == "127.0.0.1", "the user wrote it"


def test_spares_are_hosts_like_others(tmp_path: Path) -> None:
    """Also for a manifest with a number of stages, or none: then only the spare is elsewhere."""
    head = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: x}\nspec:\n  model: {path: m.gguf}\n"
    spares = "  spares: [{name: mine, host: 10.0.0.1}, {name: old, host: 10.0.0.3}]\n"
    for stages in ("", "  stages: 2\n", "  stages: [{name: desk, host: 10.0.0.1}]\n"):
        manifest = parse_manifest((head + stages + spares).encode(), "x").with_directory(tmp_path)
        found = at_home(manifest, lambda host: host == "10.0.0.1", lambda _: "10.0.0.1")
        assert all(stage.is_local for stage in found.stages)
        assert [spare.host for spare in found.spares] == ["localhost", "10.0.0.3"]
        assert found.spec.coordinator.host == "10.0.0.1", "where the spare finds it"


def test_addresses_of_this_machine_are_known_by_the_kernel() -> None:
    assert is_this_machine("127.0.0.1")
    assert is_this_machine(socket.gethostname()) == any(
        is_this_machine(a) for _, a in addresses_of(socket.gethostname())
    )
    assert not is_this_machine("192.0.2.1"), "an address that no host has"
    assert not is_this_machine("no-such-host.invalid")
    assert facing("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    ("listens", "host", "shown"),
    [
        ("0.0.0.0:8080", "10.0.0.1", "10.0.0.1:8080"),
        ("0.0.0.0:8080", "desk.test", "desk.test:8080"),
        ("[::]:8080", "2001:db8::7", "[2001:db8::7]:8080"),
        ("0.0.0.0:8080", "2001:db8::7", "10.0.0.9:8080"),
        ("[::]:8080", "10.0.0.1", "[2001:db8::9]:8080"),
        ("[::]:8080", "127.0.0.1", "[::1]:8080"),
        ("10.0.0.1:8080", "2001:db8::7", "10.0.0.1:8080"),
    ],
)
def test_the_shown_url_is_of_the_kind_of_address_that_is_listened_on(
    listens: str, host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.0.0.0 is IPv4 alone and :: IPv6 alone, whatever `coordinator.host` is, where stages find this machine."""
    own = {"192.0.2.1": "10.0.0.9", "2001:db8::1": "2001:db8::9"}
    monkeypatch.setattr(supervisor, "reached_by", functools.partial(reached_by, way=own.__getitem__))
    one: Any = SimpleNamespace(plan=SimpleNamespace(advertised_host=host))
    assert supervisor.Supervisor._reachable_url(one, f"https://{listens}") == f"https://{shown}"


def test_without_a_network_of_that_kind_the_url_is_of_this_machine_alone() -> None:
    assert reached_by("0.0.0.0", "2001:db8::7", lambda _: "") == "127.0.0.1"
    ready = {"event": "ready", "url": "http://0.0.0.0:8080", "clients": "", "model": "m"}
    assert "`--http [::]:8080` lets other hosts in" in line_of(ready, as_json=False)


# --- the lines ------------------------------------------------------------------------------------------------------


def test_only_the_holder_of_the_cas_key_invites(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, "host: 10.0.0.9")
    material = make_own_tls(manifest, tmp_path / "tls")
    settled = override(manifest, {"wire.tls.directory": str(material)})
    assert authority_of(settled) == tmp_path / "tls"
    plan = arrange(settled, tmp_path / "four.yaml", tmp_path / "settled.json")
    assert (plan.authority, plan.enrol) == (tmp_path / "tls", ("0.0.0.0", 50_049))
    (tmp_path / "tls" / CA_KEY_FILE).unlink()
    assert authority_of(settled) is None, "then credentials are copied by hand"


def test_a_host_that_has_joined_is_known_to_come_back_by_itself(tmp_path: Path) -> None:
    make_own_tls(manifest_of(tmp_path, "host: 10.0.0.9"), tmp_path / "tls")
    authority = SigningAuthority(tmp_path / "tls")
    invite(tmp_path / "tls", "old", "old")
    assert not has_joined(tmp_path / "tls", "old", "old")
    authority.bind("old", "key", "10.0.0.3")
    for _ in range(3):
        assert has_joined(tmp_path / "tls", "old", "old")
        invite(tmp_path / "tls", "old", "old")  # each start makes a new one
    invitation = authority.invitation("old")
    assert invitation is not None
    assert not invitation.used_by, "the new one is unused"
    assert not has_joined(tmp_path / "tls", "old", "10.0.0.7"), "another host has no certificate"
    event = {"event": "remote", "name": "old", "host": "old", "command": "relayline join X", "bring": ""}
    both = line_of(event | {"short": "relayline join 482-177-309"}, as_json=False)
    assert both == "on old, run:\n  relayline join X\n  or, within 30 minutes: relayline join 482-177-309"
    assert line_of(event, as_json=False) == "on old, run:\n  relayline join X"
    again = line_of(event | {"again": True}, as_json=False)
    assert again == "on old, unless it still runs there, run:\n  relayline join X"


def test_a_gateway_gives_no_line_but_says_how_to_name_its_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = StateDir(tmp_path)
    directory.manifest.write_text("kind: Gateway\n")
    me = identify(os.getpid())
    assert me is not None
    both = (
        ProcessRecord("front", "coordinator", "here", HostState.READY),
        ProcessRecord("a", "pipeline", "here", HostState.READY),
    )
    state = LaunchState(STATE_VERSION, "front", "front.yaml", Phase.READY, me.pid, me.start_ticks, processes=both)
    state = msgspec.structs.replace(state, url="http://127.0.0.1:1")  # which nobody is to ask
    asked = re.escape("front is a gateway; name the pipeline with --pipeline NAME (it runs here: a)")
    with pytest.raises(UsageError, match=asked):
        fresh_line(Launched(directory, state), "old")
    monkeypatch.setattr(control, "find", lambda pipeline, state_dir: Launched(directory, state))
    for more in ([], ["--spare"]):
        result = CliRunner().invoke(invite_command, ["later", "--host", "10.0.0.7", *more])
        assert isinstance(result.exception, UsageError), result.exception
        assert re.fullmatch(asked, result.exception.message)


def launched_four(tmp_path: Path, *processes: ProcessRecord) -> Launched:
    """Return a pipeline with a CA that runs as far as its state says: this process counts as its supervisor."""
    manifest = manifest_of(tmp_path, "host: 10.0.0.9")
    material = make_own_tls(manifest, tmp_path / "tls")
    directory = StateDir(tmp_path)
    settled = override(manifest, {"wire.tls.directory": str(material)})
    directory.manifest.write_text(settled.model_dump_json(by_alias=True, exclude_none=True))
    me = identify(os.getpid())
    assert me is not None
    state = LaunchState(
        STATE_VERSION,
        "four",
        "four.yaml",
        Phase.LOADING,
        me.pid,
        me.start_ticks,
        enrol="10.0.0.9:50049",
        processes=processes,
    )
    return Launched(directory, state)


def test_status_names_the_host_of_a_stage_that_was_added_while_serving_and_what_to_run_there(tmp_path: Path) -> None:
    records = [ProcessRecord(name, "stage", NOT_SEEN, HostState.WAITING) for name in ("later", "stranger")]
    known = ProcessRecord("server", "stage", "10.0.0.2", HostState.WAITING, command="relayline join X Y")
    lost = ProcessRecord(
        "old", "stage", "10.0.0.3", HostState.LOST, command="relayline join 10.0.0.9:50049 TOKEN --relay"
    )
    four = launched_four(tmp_path, *records, known, lost)
    fresh_line(four, "later", "10.0.0.7")
    facts = describe(four)
    assert [entry["host"] for entry in facts["processes"]] == ["10.0.0.7", NOT_SEEN, "10.0.0.2", "10.0.0.3"]
    text = _status_text(facts)
    assert "pid or host" in text
    line = "  on {}, run the line that `up` printed for {}; a new one:\n    relayline invite {} --pipeline four"
    assert "  on 10.0.0.7, run:\n    relayline join 10.0.0.9:50049 later." in text, "the newest, while its code is good"
    assert re.search(r"\n    or, until \d\d:\d\d: relayline join \d{3}-\d{3}-\d{3}\n", text)
    assert line.format(NOT_SEEN, "stranger", "stranger") in text
    assert "  on 10.0.0.2, run:\n    relayline join X Y" in text
    again = "  on 10.0.0.3, unless it still runs there, run:\n    relayline join 10.0.0.9:50049 --name old"
    assert text.endswith(again), "its host has a certificate: no token"


def test_status_says_why_there_is_no_answer_without_a_number(tmp_path: Path) -> None:
    four = launched_four(tmp_path)
    away = Launched(four.directory, msgspec.structs.replace(four.state, url=f"http://127.0.0.1:{free_port()}"))
    assert describe(away)["problem"] == "the coordinator does not answer: Connection refused"


def test_status_gives_a_host_whose_credential_is_revoked_a_new_line(tmp_path: Path) -> None:
    """What it joined with before is refused."""
    lost = ProcessRecord("old", "stage", "10.0.0.3", HostState.LOST, command="relayline join 10.0.0.9:50049 TOKEN")
    four, tls = launched_four(tmp_path, lost), tmp_path / "tls"
    now = datetime.datetime.now(datetime.UTC)

    def issued() -> str:
        issue(tls, "10.0.0.3", (), 9, tmp_path / "issued", now, role=Role.STAGE, stage="old")
        return _status_text(describe(four))

    again = "  on 10.0.0.3, unless it still runs there, run:\n    relayline join 10.0.0.9:50049 --name old"
    assert issued().endswith(again)
    revoke(tls, lambda identity: identity.name == "old", now)
    text = _status_text(describe(four))
    assert text.endswith("  on 10.0.0.3, run the line that this prints:\n    relayline invite old --pipeline four")
    fresh_line(four, "old")
    assert "  on 10.0.0.3, run:\n    relayline join 10.0.0.9:50049 old." in _status_text(describe(four))
    assert issued().endswith(again), "it has used the new line"


def test_a_fresh_line_is_for_a_stage_on_another_host_of_a_pipeline_that_runs(tmp_path: Path) -> None:
    directory, state = (four := launched_four(tmp_path)).directory, four.state
    line, short = fresh_line(Launched(directory, state), "old")
    words = line.split()
    assert words[:3] == ["relayline", "join", "10.0.0.9:50049"]
    assert read_token(words[3]).name == "old"
    assert re.fullmatch(r"relayline join \d{3}-\d{3}-\d{3}", short)
    for name in ("mini", "nobody"):
        with pytest.raises(
            UsageError, match=rf"no stage '{name}' on another host; its stages there: desk, server, old"
        ):
            fresh_line(Launched(directory, state), name)
    later = fresh_line(Launched(directory, state), "later", "10.0.0.7")[0].split()[3]
    again = fresh_line(Launched(directory, state), "later")[0].split()[3]
    assert read_token(again).name == "later", "its host is known since it was invited"
    assert again != later
    ended = LaunchState(
        STATE_VERSION, "four", "four.yaml", Phase.STOPPED, state.supervisor_pid, state.supervisor_start_ticks - 1
    )
    with pytest.raises(UsageError, match="four does not run"):
        fresh_line(Launched(directory, ended), "old")


def with_layers(four: Launched, file: Path, layers: str) -> Launched:
    """Return a launch whose user's manifest is `file`, with `layers` in the first stage."""
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: four}\nspec:\n  model: {path: m.gguf}\n"
        f"  stages: [{{name: desk, host: desk.test{layers}}}, {{name: mini}}]\n"
    )
    file.write_text(text)
    return Launched(four.directory, msgspec.structs.replace(four.state, manifest=str(file), url="http://127.0.0.1:1"))


def invited(monkeypatch: pytest.MonkeyPatch, four: Launched, *arguments: str, known: bool = False) -> tuple[int, str]:
    """Return the exit code of `relayline invite`, and what it printed or had done."""
    done: list[str] = []
    monkeypatch.setattr(control, "find", lambda pipeline, state_dir: four)
    monkeypatch.setattr(drain, "is_known", lambda launched, name: known)
    monkeypatch.setattr(drain, "let_join", lambda launched, name, is_spare: done.append(f"{name} spare={is_spare}"))
    result = CliRunner().invoke(invite_command, arguments)
    if isinstance(result.exception, RelaylineError):
        return 2 if isinstance(result.exception, UsageError) else 1, result.exception.message
    return result.exit_code, " ".join([*done, result.output])


def test_layers_that_a_manifest_fixes_are_not_shared_anew_by_an_invitation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`invite` refuses what `up` refuses, makes no invitation, and names the ways out; each of them works."""
    file = tmp_path / "four.yaml"
    four = with_layers(launched_four(tmp_path), file, ", layers: [0, 4]")
    code, text = invited(monkeypatch, four, "later", "--host", "10.0.0.7")
    assert code == 2
    assert text == (
        "later would share all layers with the others, and four.yaml fixes `layers` of desk; leave these out of it "
        "until later has joined, or give --spare: later then stands by"
    )
    assert invited_host(tmp_path / "tls", "later") == ""
    code, text = invited(monkeypatch, four, "later", "--host", "10.0.0.7", "--spare")
    assert (code, text.split()[:4]) == (0, ["later", "spare=True", "relayline", "join"])
    code, text = invited(monkeypatch, four, "later", "--host", "10.0.0.7", known=True)
    assert (code, text.split()[:2]) == (0, ["later", "spare=False"]), "it has its place already"
    free = with_layers(four, file, "")
    code, text = invited(monkeypatch, free, "more", "--host", "10.0.0.8")
    assert (code, text.split()[:4]) == (0, ["more", "spare=False", "relayline", "join"])
    file.unlink()
    assert invited(monkeypatch, free, "more", "--host", "10.0.0.8")[0] == 0
    code, text = invited(monkeypatch, four, "later", "--spare")
    assert (code, text) == (2, "--spare is for a new stage; give its address too: --host ADDRESS")


def test_an_invitation_that_is_refused_leaves_the_line_before_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pipeline starts nobody new can join, and a stage of the manifest is where the manifest says."""
    four = launched_four(tmp_path)
    fresh_line(four, "old")
    files = [tmp_path / "tls" / name for name in (FILE, CODES_FILE)]
    before = [file.read_bytes() for file in files]
    code, text = invited(monkeypatch, four, "later", "--host", "10.0.0.7")
    assert (code, text) == (1, "four is still starting; `relayline status` shows what it waits for")
    (old,) = (stage for stage in manifest_of(tmp_path, "host: 10.0.0.9").stages if stage.name == "old")
    code, text = invited(monkeypatch, four, "old", "--host", "10.0.0.7")
    assert (code, text) == (
        2,
        f"the manifest has old on {old.host}; leave out --host, or change the manifest and run "
        "`relayline restart four`",
    )
    assert [file.read_bytes() for file in files] == before
    code, text = invited(monkeypatch, four, "old", "--host", old.host)
    assert (code, text.split()[:2]) == (0, ["relayline", "join"]), "it has its place in the manifest"


# --- output -----------------------------------------------------------------------------------------------------------


def messages_for(
    waiting: Waiting, name: str, state: str, now_s: float = 0.0, done: int = 0, total: int = 0, **more: str
) -> list[str]:
    event: dict[str, Any] = {"name": name, "state": state, "done_bytes": done, "total_bytes": total, **more}
    return [shown["message"] for shown in waiting.events_for(event, now_s)]


def test_missing_hosts_are_listed_once_per_change() -> None:
    waiting = Waiting(["desk", "mini", "server", "old"])
    assert messages_for(waiting, "desk", "starting") == ["1 of 4 joined, waiting for mini, server, old"]
    for state in ("measuring", "starting", "loading"):  # it joins, is surveyed, and joins again for its layers
        assert messages_for(waiting, "desk", state) == []
    assert messages_for(waiting, "mini", "starting") == ["2 of 4 joined, waiting for server, old"]
    assert messages_for(waiting, "mini", "lost") == ["1 of 4 joined, waiting for mini, server, old"]
    assert messages_for(waiting, "nobody", "starting") == []
    for name in ("mini", "server", "old"):
        messages_for(waiting, name, "starting")
    for name in ("desk", "mini", "server", "old"):
        assert messages_for(waiting, name, "ready") == []
    assert waiting.is_over
    assert messages_for(waiting, "old", "lost") == [], "that is for the log, from then on"


def test_stages_of_this_machine_are_not_waited_for_aloud_but_their_fetches_are() -> None:
    waiting = Waiting(["one", "two"], tells_members=False)
    assert messages_for(waiting, "one", "starting") == []
    assert messages_for(waiting, "one", "fetching", 0.0, 0, 4 * GB) == []
    assert messages_for(waiting, "one", "fetching", 10.0, GB, 4 * GB) == [
        "one fetches its layers: 1.00 of 4.00 GB, 100 MB/s, 30 s left"
    ]
    assert messages_for(waiting, "one", "ready") == messages_for(waiting, "two", "ready") == []
    assert waiting.is_over


def test_a_fetch_that_does_not_get_on_says_why_once() -> None:
    waiting, why = Waiting(["one"], tells_members=False), "hf://org/repo/f.gguf: the hub cannot be reached"
    line = f"one fetches its layers: 1.00 of 4.00 GB; nothing comes just now: {why}"
    assert messages_for(waiting, "one", "fetching", 0.0, GB, 4 * GB, trouble=why) == [line]
    for now_s in (0.2, FETCH_LINE_EVERY_S + 1):
        assert messages_for(waiting, "one", "fetching", now_s, GB, 4 * GB, trouble=why) == []
    assert messages_for(waiting, "one", "fetching", 8.0, GB, 4 * GB, trouble=f"{why}: timed out") == [
        f"{line}: timed out"
    ]
    assert messages_for(waiting, "one", "fetching", 9.0, GB, 4 * GB, trouble=why) == [], "many reasons, few lines"
    assert messages_for(waiting, "one", "fetching", 20.0, 2 * GB, 4 * GB) == [
        "one fetches its layers: 2.00 of 4.00 GB, 91 MB/s, 22 s left"
    ], "as fast as it has been since it got on again"
    assert messages_for(waiting, "one", "fetching", 20.2, 2 * GB, 4 * GB, trouble=why) != [], "it stalls again"


def test_a_long_fetch_says_how_far_it_is_and_how_long_it_takes() -> None:
    waiting = Waiting(["old"])
    assert messages_for(waiting, "old", "fetching", 0.0, 0, 4 * GB) == ["1 of 1 joined"]
    assert messages_for(waiting, "old", "fetching", FETCH_LINE_EVERY_S - 0.1, GB // 2, 4 * GB) == []
    assert messages_for(waiting, "old", "fetching", 10.0, GB, 4 * GB) == [
        "old fetches its layers: 1.00 of 4.00 GB, 100 MB/s, 30 s left"
    ]
    assert messages_for(waiting, "old", "fetching", 12.0, GB, 4 * GB) == []
    assert messages_for(waiting, "old", "fetching", 20.0, 4 * GB, 4 * GB) == []
    assert messages_for(waiting, "old", "loading", 20.0, GB, 4 * GB) == []
