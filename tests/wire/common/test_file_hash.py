"""Remembered hashes, their keys, and a split that was damaged on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relayline.coordinator.model.pipeline_file import PIPELINE_NAME
from relayline.coordinator.model.split import split_model
from relayline.deploy.cli import main as cli
from relayline.deploy.doctor.files import look_caches, look_split
from relayline.deploy.doctor.report import Outcome
from relayline.wire.common import file_hash
from relayline.wire.common.file_hash import REMEMBERED_S, remember_sha256, sha256_of
from tests.support.tiny_models import make_tiny


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "relayline"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, bit: int = 4) -> None:
    """Change one byte in place."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= bit
    with path.open("r+b") as file:
        file.write(content)


def rot(path: Path) -> None:
    """Change one byte without a visible trace: the file's stamp is the present one."""
    was = sha256_of(path)
    flip(path)
    remember_sha256(path, path.stat(), was)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)))
    return path


def test_stamps_that_do_not_count_any_more_are_removed(tmp_path: Path, cache: Path) -> None:
    """Every move of layers makes files with names of their own, and removes others."""
    then_s = time.time() - REMEMBERED_S - 60
    for at in range(3):
        path = tmp_path / f"stage-{at}.gguf"
        path.write_bytes(b"GGUF")
        sha256_of(path)
        path.unlink()
    stamps = sorted((cache / "verified").iterdir())
    for stamp in stamps[:2]:
        os.utime(stamp, (then_s, then_s))
    (tmp_path / "new.gguf").write_bytes(b"GGUF")
    sha256_of(tmp_path / "new.gguf")
    left = {*(cache / "verified").iterdir()}
    assert len(left) == 2
    assert stamps[2] in left, "the file may be the same again"


def test_a_file_that_looks_the_same_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sha256_of(file)
    monkeypatch.setattr(file_hash, "_hash", lambda *_: pytest.fail("read again"))
    assert sha256_of(file) == first == sha256(file)


def test_a_file_rewritten_with_its_old_time_is_hashed_again(file: Path) -> None:
    sha256_of(file)
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert sha256_of(file) == sha256(file)


@pytest.mark.parametrize("passed_s", [REMEMBERED_S + 1, -10.0])  # and a clock that was set back
def test_a_hash_expires(file: Path, passed_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rot(file)
    assert sha256_of(file) != sha256(file), "as a rotten file passes for a good one"
    now_s = time.time()
    monkeypatch.setattr(file_hash.time, "time", lambda: now_s + passed_s)
    assert sha256_of(file) == sha256(file)


def test_afresh_reads_in_any_case(file: Path) -> None:
    rot(file)
    assert sha256_of(file, afresh=True) == sha256(file)
    assert sha256_of(file) == sha256(file), "and is remembered"


# --- splits -----------------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a flipped byte": ("stage-1.gguf", flip),
    "in the tokenizer": ("tokenizer.gguf", flip),
    "cut": ("stage-0.gguf", cut),
    "gone": ("stage-1.gguf", Path.unlink),
    "the tokenizer is gone": ("tokenizer.gguf", Path.unlink),
    "half a description": (PIPELINE_NAME, cut),
    "no description": (PIPELINE_NAME, Path.unlink),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_split_is_made_again(what: str, tmp_path: Path) -> None:
    model, out = make_tiny("llama", tmp_path / "m.gguf"), tmp_path / "out"
    split_model(model, out, n_stages=2)
    good = {path.name: path.read_bytes() for path in out.iterdir()}
    name, damage = DAMAGES[what]
    damage(out / name)
    split_model(model, out, n_stages=2)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == good


def test_a_whole_split_is_not_read_when_it_was_just_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = make_tiny("llama", tmp_path / "m.gguf"), tmp_path / "out"
    made = split_model(model, out, n_stages=2)
    monkeypatch.setattr(file_hash, "_hash", lambda *_: pytest.fail("read"))
    assert split_model(model, out, n_stages=2) == made


def test_doctor_deep_finds_changes_that_leave_no_trace(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    split = cache / "splits" / "one"
    model = make_tiny("llama", tmp_path / "m.gguf")
    split_model(model, split, n_stages=2)
    fetched = cache / "artifacts" / sha256(split / "stage-0.gguf")
    fetched.mkdir(parents=True)
    for name in ("stage-0.gguf", PIPELINE_NAME):
        shutil.copy(split / name, fetched)
    (sound,) = look_caches(cache / "splits", cache / "artifacts")
    assert sound.found == "every sha256 is right (splits: 1, fetched artifacts: 1)"
    rot(split / "stage-1.gguf")
    rot(fetched / "stage-0.gguf")
    (blind,) = look_split(split)
    assert blind.outcome is Outcome.OK, "without --deep nothing is read that looks unchanged"
    monkeypatch.setattr("sys.argv", ["relayline", "doctor", "--deep"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    output = capsys.readouterr().out.replace("\n", "")
    assert "stage-1.gguf: its content has changed since the split" in output
    assert "stage-0.gguf: its content has changed since it was fetched" in output
    split_model(model, split, n_stages=2)
    assert look_caches(cache / "splits", cache / "none")[0].outcome is Outcome.OK, "the next start made it again"
