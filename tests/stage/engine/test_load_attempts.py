"""An artifact that repeatedly crashes its process at loading is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from relayline.stage.engine import load_attempts
from relayline.stage.engine.load_attempts import DEATHS_MAX, attempt
from relayline.wire.common.child_command import code_command
from relayline.wire.common.errors import ArtifactError, ModelFileError

DIES = """
import os, signal, sys
from pathlib import Path
from relayline.stage.engine.load_attempts import attempt
with attempt(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "stage-1.gguf"
    path.write_bytes(b"GGUF")
    return path


def die_of(artifact: Path) -> None:
    done = subprocess.run(code_command(DIES, str(artifact)), timeout=120, check=False)
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_fourth_load_of_an_artifact_that_crashed_three_processes_is_refused(artifact: Path, sign: int) -> None:
    """Until it is forgotten, which a clock that was ahead at the crashes does not hold up."""
    for _ in range(DEATHS_MAX):
        die_of(artifact)
    with pytest.raises(ArtifactError, match="ended the process 3 times in a row") as caught, attempt(artifact):
        pytest.fail("it was loaded once more")
    assert "\n" not in caught.value.message
    notes = Path(caught.value.message.rpartition(" remove ")[2])
    assert len([*notes.iterdir()]) == DEATHS_MAX
    for note in notes.iterdir():
        os.utime(note, (0, time.time() + sign * (load_attempts.FORGOTTEN_S + 9)))
    with attempt(artifact):
        pass


def test_loads_that_went_well_leave_nothing(artifact: Path, tmp_path: Path) -> None:
    """Each move of layers loads another file."""
    with attempt(artifact), attempt(artifact):
        notes = [*(tmp_path / "cache" / "relayline" / "loads").glob("*/*")]
    assert len(notes) == 2
    die_of(artifact)
    with attempt(artifact):
        pass
    assert [*(tmp_path / "cache" / "relayline" / "loads").iterdir()] == []


def test_another_file_of_the_name_is_another_matter(artifact: Path) -> None:
    for _ in range(DEATHS_MAX):
        die_of(artifact)
    artifact.write_bytes(b"GGUF, but longer")
    with attempt(artifact):
        pass


def test_loads_that_end_otherwise_are_not_counted(artifact: Path) -> None:
    for _ in range(DEATHS_MAX - 1):
        die_of(artifact)
    for _ in range(DEATHS_MAX):
        with pytest.raises(ModelFileError), attempt(artifact):
            raise ModelFileError("refused")
    with attempt(artifact), attempt(artifact), attempt(artifact), attempt(artifact):
        pass  # several stages of one artifact load at a time; then the deaths are forgotten
    die_of(artifact)
    with attempt(artifact):
        pass


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_load(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with attempt(artifact):
        pass
