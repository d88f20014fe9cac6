"""What users of other servers type is answered with the name that it has here."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from relayline.deploy.cli import main
from relayline.deploy.cli.main import COMMANDS, relayline
from relayline.deploy.cli.other_names import COMMANDS as OTHER_COMMANDS
from relayline.deploy.cli.other_names import FLAGS, explained
from relayline.deploy.cli.up import up_command
from relayline.deploy.launch.state import LaunchState, StateDir
from relayline.wire.common.errors import UsageError
from relayline.wire.common.phase import Phase

UP_FLAGS = {name for parameter in up_command.params for name in parameter.opts}


def said(*arguments: str) -> str:
    """The line about a mistake in a command line."""
    with pytest.raises(click.UsageError) as raised:
        relayline.main(list(arguments), prog_name="relayline", standalone_mode=False)
    return explained(raised.value, arguments)


def test_every_answer_exists_and_no_name_is_in_the_way() -> None:
    assert set(OTHER_COMMANDS.values()) <= set(COMMANDS)
    assert not set(OTHER_COMMANDS) & set(COMMANDS)
    assert not {flag for flag in FLAGS if flag in UP_FLAGS} - {"--model"}
    named = {flag for meant in FLAGS.values() for flag in re.findall(r"--[a-z-]+", meant)}
    assert named <= UP_FLAGS


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("up", "x.gguf", "-ngl", "99"), "No such option '-ngl'; here it is --gpu-layers"),
        (("up", "x.gguf", "-c", "4096"), "No such option '-c'; here it is --ctx"),
        (("up", "x.gguf", "--ctx-size=10"), "No such option '--ctx-size'; here it is --ctx"),
        (("up", "x.gguf", "--port", "1"), "No such option '--port'; here it is --http HOST:PORT"),
        (("up", "x.gguf", "--swa-full"), "No such option '--swa-full'; here it is --window-cells all"),
        (("up", "-m", "x.gguf"), "No such option '-m'; here it is the model's path or name without a flag"),
        (("top", "--port", "1"), "No such option '--port'."),
        (("up", "--nothing-like-it"), "No such option '--nothing-like-it'."),
        (("serve", "x.gguf"), "`relayline up MODEL` runs a model, `serve` is a coordinator alone"),
        (("run", "x.gguf"), "No such command 'run'. Did you mean `up`?"),
        (("ps",), "No such command 'ps'. Did you mean `status`?"),
    ],
)
def test_a_name_of_another_server_is_answered_with_ours(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in said(*arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("init", "--hosts", "10.0.0.1", "10.0.0.2", "-o", "-"), "--hosts 10.0.0.1,10.0.0.2"),
        (("plan", "m.gguf", "--hosts", "10.0.0.1,", "10.0.0.2"), "--hosts 10.0.0.1,10.0.0.2"),
        (("serve", "--stages", "a:1", "b:2", "c:3"), "--stages a:1,b:2,..."),
        (("up", "m.gguf", "--cuts", "3", "5"), "--cuts 3,5"),
    ],
)
def test_a_list_in_several_words_is_answered_with_how_it_is_written(arguments: tuple[str, ...], expected: str) -> None:
    assert said(*arguments).endswith(f"; a list has commas and no blanks: {expected}")


@pytest.mark.parametrize("arguments", [("--cuts", "3", "5,8"), ("5,8", "--cuts", "3")])
def test_the_rest_of_a_list_that_would_be_a_name_is_answered_so_too(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(UsageError) as raised:
        said("move", *arguments)
    assert raised.value.message.endswith("; a list has commas and no blanks: --cuts 3,5,8")


def test_a_pipeline_may_be_named_as_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = StateDir(tmp_path / "relayline" / "5")
    directory.path.mkdir(parents=True)
    directory.store(LaunchState(1, "5", "5.yaml", Phase.STOPPED, 1, 1))
    with pytest.raises(UsageError) as raised:
        said("move", "--cuts", "3", "5")
    assert raised.value.message == "5 does not run here; `relayline status` shows what does"


def test_an_argument_too_many_behind_a_whole_list_is_no_part_of_it() -> None:
    assert said("init", "--hosts", "10.0.0.1,10.0.0.2", "--force", "x").endswith("extra argument (x)")


def test_the_command_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["relayline", "up", "x.gguf", "-ngl", "99"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err.splitlines()[-1] == "relayline: error: No such option '-ngl'; here it is --gpu-layers"
    )
