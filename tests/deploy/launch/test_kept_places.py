"""Where a coordinator is to write later, it writes at the start for a try. One line says what is wrong."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from relayline.coordinator import serve as coordinator_serve
from relayline.deploy.cli import serve
from relayline.deploy.cli.serve import serve_command
from relayline.deploy.launch import kept_places
from relayline.deploy.launch.kept_places import check_kept_directories, check_kept_files
from relayline.wire.common.errors import RelaylineError, StartError, UsageError
from relayline.wire.common.files import TRY_BYTES, try_writing
from relayline.wire.settings.table import ServingSettings

DIRECTORIES, FILES = ("--batch-dir", "--responses-dir"), ("--keep-layers", "--plan-file")


def failing(number: int) -> object:
    def fail(directory: Path) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def began(*_: object, **__: object) -> NoReturn:
    pytest.fail("the work began before the refusal")


def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, place: Path) -> RelaylineError:
    monkeypatch.setattr(serve, "served_split", began)
    split = ("--pipeline", str(tmp_path), "--stages", "127.0.0.1:1", "--http", "127.0.0.1:0")
    with pytest.raises(RelaylineError) as caught:
        serve_command.main([*split, flag, str(place)], standalone_mode=False)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize("flag", [*DIRECTORIES, *FILES])
def test_serve_ends_at_once_where_the_disk_is_full(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(kept_places, "try_writing", failing(number))
        found = refusal(tmp_path, monkeypatch, flag, tmp_path / "kept")
        expected = f"{flag} {tmp_path}/kept: {os.strerror(number)}; free some there, or name another place"
        assert (type(found), found.message) == (StartError, expected)


@pytest.mark.parametrize("flag", [*DIRECTORIES, *FILES])
def test_serve_refuses_a_place_without_permission(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_places, "try_writing", failing(errno.EACCES))
    found = refusal(tmp_path, monkeypatch, flag, tmp_path / "kept")
    assert (type(found), found.message) == (UsageError, f"{flag} {tmp_path}/kept: cannot be written: Permission denied")


@pytest.mark.parametrize("flag", DIRECTORIES)
def test_serve_refuses_a_directory_below_a_file(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    found = refusal(tmp_path, monkeypatch, flag, tmp_path / "file" / "kept")
    assert found.message == f"{flag} {tmp_path}/file/kept: cannot be written: Not a directory"
    assert isinstance(found, UsageError)


def test_a_coordinator_that_is_started_again_serves_with_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_places, "try_writing", failing(errno.ENOSPC))
    with caplog.at_level(logging.WARNING, logger="relayline.coordinator"):
        check_kept_directories(ServingSettings(batch_dir=str(tmp_path)), may_be_full=True)
        check_kept_files(("--keep-layers", tmp_path / "kept"), may_be_full=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"{what}: No space left on device; what is new there is lost until some is free"
        for what in (f"--batch-dir {tmp_path}", f"--keep-layers {tmp_path}/kept")
    ]


def test_a_coordinator_that_is_started_again_serves_with_a_disk_that_became_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_places, "try_writing", failing(errno.EROFS))
    check_kept_files(("--keep-layers", tmp_path / "kept"), may_be_full=True)
    what = f"--keep-layers {tmp_path}/kept: Read-only file system"
    assert f"{what}; what is new there is lost until it can be written again" in caplog.text
    with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
        check_kept_files(("--keep-layers", tmp_path / "kept"))


def test_serve_says_once_what_is_wrong_with_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"architecture": "llama", "n_stages": 2, "known": None, "open_unread": None}
    split, configs = SimpleNamespace(directory=tmp_path, **facts), []
    for name in ("cut_model", "read_shape", "on_moved"):
        setattr(split, name, None)
    monkeypatch.setattr(kept_places, "try_writing", failing(errno.ENOSPC))
    monkeypatch.setattr(serve, "end_with_stdin", lambda: None)
    monkeypatch.setattr(serve, "served_split", lambda *_: split)
    monkeypatch.setattr(coordinator_serve, "run_coordinator", lambda config, _: configs.append(config))
    flags = [f"--exit-with-stdin --pipeline {tmp_path} --join-listen 127.0.0.1:0 --http 127.0.0.1:0".split()]
    flags += [[flag, str(tmp_path / flag.strip("-"))] for flag in (*DIRECTORIES, *FILES)]
    serve_command.main(list(itertools.chain(*flags)), standalone_mode=False)
    assert len(configs) == 1
    warned = re.findall(r"warning (--\S+) .* what is new there is lost", capsys.readouterr().err)
    assert sorted(warned) == sorted((*DIRECTORIES, *FILES))


def test_too_little_room_for_one_file_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    serving = ServingSettings(batch_dir=str(tmp_path), batch_file_bytes=3 << 20)
    for free_bytes, n_lines in ((3 << 20, 0), (2 << 20, 1)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, n=free_bytes: usage._replace(free=n))
        caplog.clear()
        check_kept_directories(serving)
        assert len(caplog.records) == n_lines
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        f"--batch-dir {tmp_path} has 2.0 MiB free, less than one file of requests may have "
        "(3.0 MiB, --batch-file-bytes)"
    )


def test_a_place_that_can_be_written_is_made_for_its_owner_alone_and_left_empty(tmp_path: Path) -> None:
    check_kept_directories(ServingSettings(batch_dir=str(tmp_path / "deep" / "kept")))
    kept = tmp_path / "deep" / "kept"
    assert (kept.stat().st_mode & 0o777, list(kept.iterdir())) == (0o700, [])
    check_kept_files(("--keep-layers", tmp_path / "layers.json"))
    assert [each.name for each in tmp_path.iterdir()] == ["deep"]
    with pytest.raises(UsageError, match="it is a directory; name a file"):
        check_kept_files(("--keep-layers", tmp_path / "deep"))


def test_a_try_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: sizes.append(os.fstat(number).st_size))
    try_writing(tmp_path)
    assert (sizes, list(tmp_path.iterdir())) == ([TRY_BYTES], [])
