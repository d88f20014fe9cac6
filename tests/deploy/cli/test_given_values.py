"""Goal: whatever path, number or text a user gives to whatever command, one that is no use is refused with exit code 2
before any work.

Method: click's own parameters say what the commands take, so that a new option is tested from its first day. The
commands parse their arguments, and do nothing.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from relayline.deploy.cli import main as cli
from relayline.deploy.cli.options import OUTPUT, Address, AddressList, CoreList, FloatRange, IntRange, Line
from relayline.deploy.cli.paths import (
    Directory,
    DirectoryToRead,
    FileToRead,
    FileToWrite,
    NamedPath,
    PathToRead,
    Target,
    write_text,
)
from relayline.deploy.cli.setting_flags import SettingType
from relayline.deploy.launch.target import gateway_of
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import load_gateway
from relayline.deploy.models.model_source import local_model
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.errors import StartError, UsageError


def commands(group: click.Group = cli.relayline, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by what a user types."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


EVERY = {
    f"{name} {parameter.opts[0]}": (command, parameter)
    for name, command in commands()
    for parameter in command.params
    if not (isinstance(parameter, click.Option) and parameter.is_flag)
}
GIVEN = {given: found for given, found in EVERY.items() if isinstance(found[1].type, click.Path)}
NUMBERS = [given for given, (_, found) in EVERY.items() if isinstance(found.type, click.IntRange | click.FloatRange)]
LINES = [given for given, (_, found) in EVERY.items() if isinstance(found.type, Line)]
PROSE = {"chat question", "chat --system"}  # may have line ends


def path_type(given: str) -> NamedPath:
    kind = GIVEN[given][1].type
    assert isinstance(kind, NamedPath), "a type of relayline.deploy.cli.paths"
    return kind


def parse(given: str, value: str | Path, good: Path) -> None:
    """Parse a command line with that value; everything else that the command needs is there."""
    command, tested = EVERY[given]
    arguments: list[str] = []
    places = [each for each in command.params if isinstance(each, click.Argument)]
    before = places[: places.index(tested)] if isinstance(tested, click.Argument) else []
    for parameter in command.params:
        if parameter is not tested and not parameter.required and parameter not in before:
            continue
        words = [str(value) if parameter is tested else stand_in(parameter, good)]
        arguments += words if isinstance(parameter, click.Argument) else [parameter.opts[0], *words]
    command.make_context(given, arguments)


def stand_in(parameter: click.Parameter, good: Path) -> str:
    if isinstance(parameter.type, click.Choice):
        return str(parameter.type.choices[0])
    if isinstance(parameter.type, Directory):
        return str(good.parent)
    return str(good) if isinstance(parameter.type, click.Path) else "word"


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    path = tmp_path / "good.gguf"
    path.write_bytes(DEMO_MODEL.read_bytes()[:100])
    return path


def refused(given: str, value: str | Path, good: Path) -> str:
    with pytest.raises((click.UsageError, UsageError)) as caught:
        parse(given, value, good)
    text = caught.value.format_message() if isinstance(caught.value, click.UsageError) else caught.value.message
    assert text.splitlines() == [text]
    return text


def test_the_table_knows_the_commands_that_take_paths() -> None:
    assert {"up target", "serve --tls", "certs issue directory", "batch requests", "split --output"} <= GIVEN.keys()


@pytest.mark.parametrize("given", GIVEN)
def test_a_name_that_no_path_should_have(given: str, good: Path) -> None:
    assert path_type(given)
    for name in ("", "a\nb", "a\x1b[31mb"):
        assert "\x1b" not in refused(given, name, good)
    if isinstance(path_type(given), Target):
        assert "is not UTF-8" in refused(given, os.fsdecode(b"a\xffb"), good)
    assert "name too long" in refused(given, good.with_name("x" * 300) / "y", good)


@pytest.mark.parametrize("given", GIVEN)
def test_a_pipe_a_socket_or_a_device_is_not_waited_for(given: str, good: Path) -> None:
    pipe = good.with_name("pipe.gguf")
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as unix:
        here = os.open(good.parent, os.O_RDONLY)
        try:
            unix.bind(f"/proc/self/fd/{here}/socket.gguf")  # a socket's path must be short
        finally:
            os.close(here)
        kind = path_type(given)
        for path in (good.with_name("socket.gguf"), pipe, Path("/dev/full")):
            if isinstance(kind, FileToRead) and kind.may_be_pipe and not stat.S_ISSOCK(path.stat().st_mode):
                parse(given, path, good)
            else:
                assert str(path) in refused(given, path, good)


@pytest.mark.parametrize("given", GIVEN)
def test_what_is_missing_or_of_another_kind(given: str, good: Path) -> None:
    kind, (_, parameter) = path_type(given), GIVEN[given]
    missing, below_a_file = good.with_name("none.gguf"), good / "none.gguf"
    if isinstance(kind, FileToRead | PathToRead | DirectoryToRead) or (
        isinstance(parameter, click.Argument) and parameter.name == "model"
    ):
        assert "no such " in refused(given, missing, good)
        assert str(below_a_file) in refused(given, below_a_file, good)
    if isinstance(kind, FileToRead | FileToWrite):
        assert "it is a directory; name a file" in refused(given, good.parent, good)
    if isinstance(kind, FileToWrite):
        assert f"there is no directory {missing}" in refused(given, missing / "new", good)
    if isinstance(kind, Directory):
        assert "it is a file; name a directory" in refused(given, good, good)
        assert f"{good} is a file; name another directory" in refused(given, good / "a" / "b", good)


def test_secrets_may_come_from_a_pipe_since_they_are_read_once() -> None:
    pipes = {given for given in GIVEN if isinstance(kind := path_type(given), FileToRead) and kind.may_be_pipe}
    assert pipes == {"batch --api-key-file", "serve --token-file", "stage --token-file"}


def test_every_value_has_a_type_that_refuses_in_one_line() -> None:
    own = (NamedPath, Line, IntRange, FloatRange, Address, AddressList, CoreList, SettingType, click.Choice)
    others = {given for given, (_, found) in EVERY.items() if not isinstance(found.type, own)}
    assert others == PROSE | {"service install join_flags"}


@pytest.mark.parametrize("given", NUMBERS)
def test_a_text_is_no_number(given: str, good: Path) -> None:
    for value in ("", "nan", "one", "1e", "1 2"):
        assert "\x1b" not in refused(given, value, good)


@pytest.mark.parametrize("given", LINES)
def test_a_text_is_one_line_that_can_be_printed(given: str, good: Path) -> None:
    for value in ("a\nb", "a\x1b[31mb", os.fsdecode(b"a\xffb")):
        assert refused(given, value, good).isprintable()


def test_the_help_shows_bounds_behind_a_flag_and_once() -> None:
    shown = CliRunner().invoke(cli.relayline, ["top", "--help"], terminal_width=80).output
    assert "--interval 0.2..60 " in shown
    assert "<=" not in shown


def test_a_manifest_is_a_file(tmp_path: Path) -> None:
    pipe, folder, none = (tmp_path / f"{name}.yaml" for name in ("pipe", "folder", "none"))
    os.mkfifo(pipe)
    folder.mkdir()
    for read in (load_manifest, load_gateway):
        for path, says in ((pipe, "is not a file"), (folder, "is not a file"), (none, "no such file")):
            with pytest.raises(UsageError, match=f"{path.name}: {says}"):
                read(path)
    assert gateway_of(str(pipe), tmp_path) is None


def test_a_model_that_is_not_there_is_a_mistake_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("none.gguf", "none", "empty", "pipe.gguf", "no*.gguf"):
        with pytest.raises(UsageError, match=rf"{name.replace('*', '[*]')}: "):
            local_model(str(tmp_path / name))


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    link.symlink_to(path)
    write_text(link, "new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StartError, match=f"^{path}: No space left on device$"):
        write_text(path, "newer")
    assert (path.read_text(), sorted(tmp_path.iterdir())) == ("new", [path, link])


def test_what_a_command_writes_has_one_name_everywhere() -> None:
    outputs = [name for name in GIVEN if "out" in name.rpartition(" ")[2] or name.endswith(" -o")]
    commands = ("batch", "certs issue", "init", "render", "report", "split")
    assert sorted(outputs) == [f"{command} {OUTPUT[0]}" for command in commands]
