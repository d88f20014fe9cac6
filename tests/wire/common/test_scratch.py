"""Goal: a directory for a while goes at its end, or, after a kill, when the next one is made. Living ones stay."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayline.wire.common import scratch
from relayline.wire.common.scratch import LOCK, UNLOCKED_S, scratch_directory

ROOT = Path(__file__).parents[3]
TEMPORARY = re.compile(r"tempfile\.(TemporaryDirectory|NamedTemporaryFile|mkdtemp|mkstemp)")
# Those that clear up after a kill by themselves, programs that call us, and the build of a checkout.
OTHERS = {"coordinator/http/edge/inside.py", "deploy/launch/local.py", "deploy/build/protos.py"}
MAKES = """
import sys
from pathlib import Path
from relayline.wire.common.scratch import scratch_directory
with scratch_directory("work-", Path(sys.argv[1])) as directory:
    (directory / "slice").write_bytes(b"x")
    print(directory, flush=True)
    sys.stdin.read()
"""


def made_again(place: Path) -> None:
    with scratch_directory("work-", place) as directory:
        assert directory.is_dir()
    assert not directory.exists()


def make_old(directory: Path) -> None:
    then_s = directory.stat().st_mtime - UNLOCKED_S - 1
    os.utime(directory, (then_s, then_s))


def test_what_a_killed_process_has_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        made_again(tmp_path)
        assert (theirs / "slice").read_bytes() == b"x", "its maker lives"
        process.kill()
    assert theirs.exists(), "nothing runs at a kill"
    made_again(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_directories_of_the_same_kind_go(tmp_path: Path) -> None:
    names = ("other-abcdefgh", "work-abc", "work-abcdefghi")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / LOCK).touch()
    (tmp_path / "work-hgfedcba").symlink_to("kept")
    made_again(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", *names, "work-hgfedcba"]


def test_one_without_a_lock_goes_once_it_is_old(tmp_path: Path) -> None:
    """An older relayline makes no locks, and a removal may be cut short behind the lock."""
    left, new = tmp_path / "work-00000000", tmp_path / "work-11111111"
    for path in (left, new):
        path.mkdir(mode=0o700)
        (path / "slice").touch()
    make_old(left)
    made_again(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_those_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, unlocked = tmp_path / "work-00000000", tmp_path / "work-11111111"
    for path in (left, unlocked):
        path.mkdir(mode=0o700)
    (left / LOCK).touch()
    make_old(unlocked)
    with monkeypatch.context() as patched:
        patched.setattr(scratch.os, "geteuid", lambda: os.getuid() + 1)
        made_again(tmp_path)
    assert sorted(tmp_path.iterdir()) == [left, unlocked]
    assert list(unlocked.iterdir()) == [], "root, who can make a lock there, would take it for its own"
    made_again(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_user_made_under_such_a_name_stays(tmp_path: Path) -> None:
    """As `relayline certify --keep relayline-certify-20261201`: the name has as many characters."""
    kept = tmp_path / "work-20261201"
    kept.mkdir()
    kept.chmod(0o755)
    make_old(kept)
    made_again(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]
    assert list(kept.iterdir()) == []


def test_without_locks_nothing_is_removed_and_the_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_directory("work-", tmp_path) as first, scratch_directory("work-", tmp_path) as second:
        assert first.is_dir()
        assert second.is_dir()


def test_without_a_place_of_its_own_it_is_among_the_systems_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    with scratch_directory("work-") as directory:
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o077 == 0


def test_stages_coordinators_and_commands_make_no_others() -> None:
    rooms = [path for room in ("stage", "coordinator", "deploy") for path in (ROOT / room).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in rooms if TEMPORARY.search(path.read_text())}
    assert {name for name in found if not name.startswith("deploy/testing/")} == OTHERS
