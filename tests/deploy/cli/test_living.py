"""Goal: a person finds the right command, the right pipeline and a verdict without looking anything up."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import math
import os
import shlex
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from relayline.coordinator.joining.config import PoolState
from relayline.coordinator.model.cuts import balanced_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.deploy.cli import top
from relayline.deploy.cli.bench import bursts_line, verdict
from relayline.deploy.cli.cache import cache_command
from relayline.deploy.cli.completion import SHELLS
from relayline.deploy.cli.console_http import DEFAULT_URL, key_option, url_option
from relayline.deploy.cli.doctor import doctor_command
from relayline.deploy.cli.load import Summary
from relayline.deploy.cli.main import COMMANDS, grouped, nearest, relayline
from relayline.deploy.cli.sections import TITLES
from relayline.deploy.doctor import examine
from relayline.deploy.doctor.report import Finding, Outcome
from relayline.deploy.launch.cached import kept_downloads
from relayline.deploy.launch.checks import warn_of_context
from relayline.deploy.launch.control import Launched, find, launched
from relayline.deploy.launch.process_id import identify
from relayline.deploy.launch.state import (
    ELSEWHERE,
    STATE_VERSION,
    LaunchState,
    ProcessRecord,
    StateDir,
    register,
    state_root,
)
from relayline.deploy.launch.tell import curl_of
from relayline.deploy.manifest import Manifest
from relayline.deploy.models.kept_layers import keeper
from relayline.deploy.models.splits import split_for, split_place
from relayline.deploy.planning import compare
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.phase import HostState, Phase


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_HOME", "HF_HUB_CACHE", "RELAYLINE_URL", "RELAYLINE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def running_here(
    name: str, path: Path | None = None, url: str = "http://127.0.0.1:7", pid: int = 0, behind: tuple[str, ...] = (),
    manifest: Path | None = None,
) -> StateDir:  # fmt: skip
    """Note a pipeline whose supervisor is this process, or one of another start time for `pid`."""
    directory = StateDir(path or state_root() / name)
    me = identify(os.getpid())
    assert me is not None
    with directory.locked(name):
        ticks = me.start_ticks if not pid else me.start_ticks - 1
        records = tuple(ProcessRecord(each, "pipeline", "localhost", HostState.READY) for each in behind)
        state = LaunchState(
            STATE_VERSION,
            name,
            str(manifest or f"/{name}.yaml"),
            Phase.READY,
            me.pid,
            ticks,
            url=url,
            processes=records,
        )
        directory.store(state)
        register(directory.path)
    return directory


# --- one registry -----------------------------------------------------------------------------------------------------


def test_a_pipeline_with_another_state_directory_is_found_until_that_is_gone(tmp_path: Path) -> None:
    directory = running_here("far", tmp_path / "far away")
    running_here("near")
    assert [each.state.name for each in launched(None)] == ["near", "far"]
    found = find("far", None)
    assert found is not None
    assert found.directory.path == directory.path
    (directory.path / "state.json").unlink()
    assert [each.state.name for each in launched(None)] == ["near"]
    assert list((state_root() / ELSEWHERE).iterdir()) == [], "the note is stale"


def test_a_home_that_cannot_be_written_keeps_no_pipeline_elsewhere_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))  # root, too, can make no directory in it
    directory = running_here("far", tmp_path / "far")
    assert f"other commands find this pipeline with --state-dir {directory.path}" in caplog.text
    found = find("far", directory.path)
    assert found is not None
    assert launched(None) == []


def test_of_two_with_one_name_the_one_that_runs_is_meant(tmp_path: Path) -> None:
    running_here("same", pid=1)  # the pid lives, and another process has it
    runs = running_here("same", tmp_path / "other")
    found = find("same", None)
    assert found is not None
    assert found.directory.path == runs.path
    running_here("same", tmp_path / "third")
    flags = [rf"--state-dir {place}" for place in (tmp_path / "other", tmp_path / "third")]
    one = f"({'|'.join(flags)})"
    with pytest.raises(UsageError, match=rf"several pipelines named 'same' run here; give {one} or {one}$"):
        find("same", None)
    with pytest.raises(UsageError, match=rf"several pipelines run here; name one of {one}, {one}$"):
        find(None, None)
    with pytest.raises(UsageError, match=r"no pipeline 'other' was launched here \(known: same\)"):
        find("other", None)


def test_of_two_with_one_name_that_have_ended_the_last_one_is_meant(tmp_path: Path) -> None:
    last = [running_here("same", path, pid=1) for path in (None, tmp_path / "other", tmp_path / "third")][1]
    for at, directory in enumerate((state_root() / "same", tmp_path / "third", last.path)):
        os.utime(directory / "state.json", (at, at))
    found = find("same", None)
    assert found is not None
    assert found.directory.path == last.path


def test_a_doctor_visits_the_one_that_was_started_with_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, visited = tmp_path / "same.yaml", list[Launched | None]()

    async def visit(_: Manifest, one: Launched | None, *__: object, **___: object) -> list[Finding]:
        visited.append(one)
        return [Finding("x", Outcome.OK, "y")]

    def visits() -> Path | None:
        done = CliRunner().invoke(doctor_command, [str(manifest)])
        assert done.exit_code == 0, done.output
        one = visited.pop()
        return one.directory.path if one is not None else None

    monkeypatch.setattr(examine, "examine_manifest", visit)
    manifest.write_text("apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: same}\n"
                        "spec: {model: {path: m.gguf}}\n")  # fmt: skip
    assert visits() is None
    running_here("same", pid=1)
    assert visits() == state_root() / "same", "it ran last"
    other = running_here("same", tmp_path / "other")
    assert visits() == other.path, "it runs"
    own = running_here("same", tmp_path / "own", manifest=manifest)
    running_here("same", tmp_path / "third")
    assert visits() == own.path


def test_a_gateway_stands_for_the_pipelines_that_it_started() -> None:
    running_here("house", behind=("house-a", "house-b"))
    for name in ("house-a", "house-b"):
        running_here(name)
    found = find(None, None)
    assert found is not None
    assert found.state.name == "house"
    running_here("other")
    with pytest.raises(UsageError, match="several pipelines run here; name one of house, other"):
        find(None, None)


def looked_at(*arguments: str) -> str:
    """Return the URL and the key that a command with both options looks at."""
    seen: list[str] = []

    @click.command()
    @url_option
    @key_option
    def command(url: str, api_key: str, **_: object) -> None:
        seen.append(f"{url} {api_key}".strip())

    command.main(list(arguments), standalone_mode=False)
    return seen[0]


def test_commands_find_the_coordinator_and_its_key_by_themselves(tmp_path: Path) -> None:
    assert looked_at() == DEFAULT_URL
    first = running_here("first", url="http://127.0.0.1:11")
    keys = tmp_path / "keys"
    keys.write_text("me: 0123456789abcdef\n")
    text = {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "first"},
            "spec": {"model": {"path": "m.gguf"}, "coordinator": {"apiKeysFile": str(keys)}}}  # fmt: skip
    first.manifest.write_text(json.dumps(text))
    assert looked_at() == "http://127.0.0.1:11 0123456789abcdef"
    assert looked_at("--url", "http://box:1") == "http://box:1", "another server gets no key of this one"
    running_here("second", url="http://127.0.0.1:12")
    assert looked_at("--pipeline", "second") == "http://127.0.0.1:12"
    with pytest.raises(UsageError, match="several pipelines run here; name one of first, second"):
        looked_at()
    with pytest.raises(UsageError, match="give only one of --url and --pipeline"):
        looked_at("--pipeline", "second", "--url", "http://box:1")
    running_here("gone", pid=1)
    with pytest.raises(UsageError, match="gone does not run here"):
        looked_at("--pipeline", "gone")
    running_here("second", tmp_path / "other", url="http://0.0.0.0:13")
    told = "several pipelines named 'second' run here; give --url http://127.0.0.1:12 or --url http://127.0.0.1:13, not"
    with pytest.raises(UsageError, match=told):  # these commands have no --state-dir
        looked_at("--pipeline", "second")


@pytest.mark.parametrize("named", [(), ("--pipeline", "slow")])
def test_a_pipeline_without_an_address_yet_is_said_to_be_starting(named: tuple[str, ...]) -> None:
    running_here("slow", url="")
    with pytest.raises(StartError, match="slow is still starting; `relayline status` shows what it waits for"):
        looked_at(*named)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_every_command_is_in_one_group_of_the_help() -> None:
    names = [name for group in grouped().values() for name in group]
    assert sorted(names) == sorted(COMMANDS)
    text = CliRunner().invoke(relayline, ["--help"]).output
    assert all(f"\n  {name} " in text for name in names)
    assert "Look after it:" in text


@pytest.mark.parametrize(
    ("typed", "meant"), [("stauts", "`status`"), ("UP", "`up`"), ("m.gguf", "`relayline up m.gguf`"), ("zzzzz", "")]
)
def test_a_near_command_name_is_suggested(typed: str, meant: str) -> None:
    assert nearest(typed) == meant
    done = CliRunner().invoke(relayline, [typed])
    assert done.exit_code == 2
    assert (f"Did you mean {meant}?" in done.output) == bool(meant)
    assert typed in done.output


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_the_parsers_own(shell: str) -> None:
    done = CliRunner().invoke(relayline, ["completion", shell])
    assert done.exit_code == 0
    assert "_RELAYLINE_COMPLETE" in done.output
    assert shell != "zsh" or done.output.startswith("#compdef relayline")


def test_completion_knows_commands_flags_words_and_pipelines() -> None:
    running_here("mine")
    completion = ShellComplete(relayline, {}, "relayline", "_RELAYLINE_COMPLETE")

    def offered(*before: str, incomplete: str) -> set[str]:
        return {item.value for item in completion.get_completions(list(before), incomplete)}

    assert {"status", "stage"} <= offered(incomplete="sta")
    assert "--kv-type" in offered("up", incomplete="--kv")
    assert offered("up", "--kv-type", incomplete="q8") == {"q8_0"}
    assert offered("down", incomplete="m") == {"mine"}
    assert offered("top", "--pipeline", incomplete="") == {"mine"}


def test_keys_of_the_live_view() -> None:
    stopping = asyncio.Event()
    keys = top.Keys(stopping, 1.0)
    keys.press("+")
    assert "every 0.5 s" in keys.help_line
    for _ in range(20):
        keys.press("-")
    assert keys.interval_s == top.INTERVAL_MAX_S
    keys.press("p")
    assert keys.is_held
    keys.press(" ")
    assert (keys.is_held, stopping.is_set()) == (False, False)
    keys.press("q")
    assert stopping.is_set()


# --- words at the end -------------------------------------------------------------------------------------------------


def test_the_command_to_try_asks_this_model_in_its_own_way() -> None:
    ready = {"event": "ready", "url": "http://127.0.0.1:1", "model": "it's mine", "chat": True}
    words = shlex.split(curl_of(ready))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:1/v1/chat/completions"]
    body = json.loads(words[-1])
    assert body["model"] == "it's mine"
    assert body["messages"][0]["content"].endswith("?")
    words = shlex.split(curl_of(ready | {"chat": False, "needs_key": True}))
    assert words[2].endswith("/v1/completions")
    assert "Authorization: Bearer KEY" in words
    assert json.loads(words[-1])["prompt"].startswith("def ")
    everywhere = ready | {"url": "http://0.0.0.0:8080"}
    assert " http://127.0.0.1:8080/v1/" in curl_of(everywhere)
    assert " http://10.0.0.1:8080/v1/" in curl_of(everywhere | {"clients": "http://10.0.0.1:8080"})


@pytest.mark.parametrize(("trained", "is_warned"), [(4_096, True), (8_192, False), (0, False)])
def test_a_context_beyond_the_models_own_is_warned_of(
    trained: int, is_warned: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PipelineFile(1, "", None, "llama", "m", 2, 8, 8, trained, (), None, ())  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, logger="relayline.up"):
        warn_of_context(8_192, file)
    assert ("--ctx 4096 saves memory too" in caplog.text) == is_warned


def summary(
    n_complete: int = 4, decode_tok_s: float = 100.0, p50: float = 20.0, p99: float = 40.0, mean: float | None = None,
    ttft_p95: float = 2.0,
) -> Summary:  # fmt: skip
    itl = {"mean": p50 if mean is None else mean, "p50": p50, "p95": p50, "p99": p99}
    return Summary(4, n_complete, 64, 1.0, 60.0, decode_tok_s, {"p50": 1.0, "p95": ttft_p95}, itl, "")


@pytest.mark.parametrize(
    ("summaries", "says"),
    [
        ([("1", summary()), ("4", summary(decode_tok_s=200.0))], "nothing to worry about: "),
        ([("1", summary()), ("4", summary(n_complete=3))], "worry: not every request was answered in full with 4"),
        ([("1", summary(p50=500.0))], "with 1 stream a token takes more than 200 ms"),
        ([("1", summary()), ("4", summary(p99=900.0))], "with 4 streams one token in a hundred takes 10 times"),
        ([("1", summary(p50=0.0, mean=2.0, p99=30.0))], "nothing to worry about: "),  # of drafts tokens come together
        (
            [("1", summary()), ("64", summary(ttft_p95=8_040.0))],
            "with 64 streams one first token in twenty takes more than 8.0 s",
        ),
        ([("1", summary(p50=0.0, mean=300.0))], "with 1 stream a token takes more than 200 ms"),
        ([("1", summary()), ("4", summary(decode_tok_s=50.0))], "4 streams together get fewer tokens a second than 1"),
    ],
)
def test_a_bench_ends_with_a_verdict(summaries: list[tuple[str, Summary]], says: str) -> None:
    assert verdict(summaries).startswith(says)


def test_a_bench_says_why_most_tokens_take_no_time() -> None:
    assert not bursts_line([("1", summary())])
    assert not bursts_line([("1", summary(n_complete=0, p50=math.nan))])
    assert "bursts, as drafts bring them" in bursts_line([("1", summary()), ("4", summary(p50=0.04, mean=2.0))])


@pytest.mark.parametrize(
    ("unit", "ratio", "says"),
    [
        ("ms", 1.1, "nothing to worry about: everything is within 15%"),
        ("ms", 0.5, "nothing to worry about, but the plan is too careful"),
        ("tok/s", 2.0, "nothing to worry about, but the plan is too careful"),
        ("ms", 1.4, "no need to worry yet"),
        ("tok/s", 0.7, "no need to worry yet"),
        ("ms", 3.0, "worry: a step is 3.00 times the plan's"),
        ("tok/s", 0.2, "worry: a step is 0.20"),
    ],
)
def test_a_comparison_ends_with_a_verdict(unit: str, ratio: float, says: str) -> None:
    exact = compare.Comparison("another", "ms", 1.0, 1.0)
    assert compare.verdict([exact, compare.Comparison("a step", unit, 10.0, 10.0 * ratio)]).startswith(says)


# --- the cache --------------------------------------------------------------------------------------------------------


def listed(*arguments: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(cache_command, ["--json", *arguments], catch_exceptions=False)
    return [json.loads(line) for line in done.output.splitlines()]


def test_equal_cuts_share_one_copy_and_are_listed_and_pruned(tmp_path: Path) -> None:
    cuts = balanced_cuts(inspect_model(DEMO), 2)
    assert split_for(DEMO, 2, None, None) == split_for(DEMO, None, cuts, None) == split_place(DEMO, 2, None)
    blobs = tmp_path / "cache" / "huggingface" / "hub" / "models--org--many" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.relayline").write_bytes(b"x" * 10)
    entries = listed()
    assert [(entry["kind"], entry["state"]) for entry in sorted(entries, key=lambda each: str(each["kind"]))] == [
        ("downloads", "partial"), ("splits", "whole")]  # fmt: skip
    assert next(entry["file"] for entry in entries if entry["kind"] == "splits") == (
        f"relayline-demo, layers 0-{cuts[0] - 1}, {cuts[0]}-7"
    )
    assert listed("--unused-days", "1") == []
    # A pipeline that runs keeps its split; downloads go only where they are named.
    stages = [{"name": "a", "layers": [0, cuts[0]]}, {"name": "b", "layers": [cuts[0], 8]}]
    settled = {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "mine"},
               "spec": {"model": {"path": str(DEMO)}, "stages": stages}}  # fmt: skip
    running = running_here("mine")
    running.manifest.write_text(json.dumps(settled))
    assert {entry["kind"]: entry["state"] for entry in listed("--clear")} == {"downloads": "kept", "splits": "kept"}
    (running.path / "state.json").unlink()
    assert {entry["kind"]: entry["state"] for entry in listed("splits", "--clear")} == {"splits": "removed"}
    assert [entry["state"] for entry in listed("downloads", "--clear")] == ["removed"]
    assert (listed(), kept_downloads()) == ([], [])


def test_the_split_to_which_layers_have_moved_is_in_use() -> None:
    """Its coordinator reads a stage's layers from there whenever that starts again."""
    base, moved = split_for(DEMO, None, (3,), None), split_for(DEMO, None, (5,), None)
    split_for(DEMO, None, (4,), None)
    stages = [{"name": "a", "layers": [0, 3]}, {"name": "b", "layers": [3, 8]}]
    settled = {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "mine"},
               "spec": {"model": {"path": str(DEMO)}, "stages": stages}}  # fmt: skip
    running = running_here("mine")
    running.manifest.write_text(json.dumps(settled))
    keep = keeper(running.layers, base)
    assert keep is not None
    keep(PoolState((5,), ("a", "b")))
    states = {entry["file"]: entry["state"] for entry in listed("splits", "--clear")}
    assert states == {
        "relayline-demo, layers 0-2, 3-7": "kept",
        "relayline-demo, layers 0-3, 4-7": "removed",
        "relayline-demo, layers 0-4, 5-7": "kept",
    }
    assert moved.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_its_own_options(name: str) -> None:
    """Options that several commands share, as --url with --pipeline, come from one place: each must take them all."""
    module, function = COMMANDS[name]
    command = getattr(importlib.import_module(module), function)
    pending = [command]
    while pending:
        each = pending.pop()
        pending += getattr(each, "commands", {}).values()
        if each.callback is not None:
            given = {parameter.name: None for parameter in each.params if parameter.expose_value}
            inspect.signature(each.callback).bind_partial(**given)


@pytest.mark.parametrize("name", ["up", "serve", "stage"])
def test_help_of_many_options_is_in_sections_and_leaves_none_out(name: str) -> None:
    module, function = COMMANDS[name]
    command = getattr(importlib.import_module(module), function)
    text = CliRunner().invoke(command, ["--help"]).output
    titles = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [title for title in TITLES if title in titles]
    assert {"Options", "Engine", "Traces and logs"} <= set(titles)
    engine = text[text.index("\nEngine:") : text.index("\nAccess:" if name == "stage" else "\nServing:")]
    assert "--ctx" in engine
    shown = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    assert all(option.opts[0] in text for option in shown)
    assert "\n  [MODEL|MANIFEST]" not in text, "an argument is no option"
