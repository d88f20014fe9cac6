"""Goal: others see which files a process uses, until it uses them no more or ends; without locks nothing is known."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayline.wire.common.use import Use, is_free, is_used

USES = """
import sys
from pathlib import Path
from relayline.wire.common.use import Use
use = Use([Path(sys.argv[1])])
print("used", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    one, other = tmp_path / "one" / "stage-0.gguf", tmp_path / "other" / "stage-0.gguf"
    for path in (one, other):
        path.parent.mkdir()
        path.write_bytes(b"x")
    return one, other


def test_a_file_is_in_use_until_another_one_is(files: tuple[Path, Path]) -> None:
    one, other = files
    use = Use([one])
    assert (is_used(one.parent), is_free(one.parent)) == (True, False)
    assert (is_used(other.parent), is_free(other.parent)) == (False, True)
    use.become([other])
    assert (is_used(one.parent), is_used(other.parent)) == (False, True)
    use.close()
    assert is_free(other.parent)


def test_two_may_use_a_file(files: tuple[Path, Path]) -> None:
    first, second = Use([files[0]]), Use([files[0]])
    first.close()
    assert is_used(files[0].parent)
    second.close()
    assert is_free(files[0].parent)


def test_a_process_that_is_killed_uses_nothing_any_more(files: tuple[Path, Path]) -> None:
    command = [sys.executable, "-c", USES, str(files[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"used\n"
        assert is_used(files[0].parent)
        process.kill()
    assert is_free(files[0].parent)


def test_a_child_does_not_go_on_with_the_use(files: tuple[Path, Path]) -> None:
    use = Use([files[0]])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE):
        use.close()
        assert is_free(files[0].parent)


def test_without_locks_nothing_is_known(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    n_before = len(os.listdir("/proc/self/fd"))
    use = Use([files[0], files[1].parent / "not-there.gguf"])
    assert (is_used(files[0].parent), is_free(files[0].parent)) == (False, False)
    use.close()
    assert len(os.listdir("/proc/self/fd")) == n_before
