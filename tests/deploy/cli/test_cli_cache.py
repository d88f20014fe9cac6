"""Goal: fetched artifacts of joining stages can be listed and removed, and a fetch under way is left alone."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from relayline.deploy.cli.cache import _outcome, cache_command
from relayline.deploy.launch.cached import Kept, hub_cache
from relayline.deploy.models.hub_files import headers_dir
from relayline.deploy.models.splits import split_place, splits_dir
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import relayline
from relayline.stage.joining.artifact_store import Slot, cached, remove
from relayline.wire.common.errors import StartError, UsageError
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.common.use import Use
from relayline.wire.pb.relayline.v1 import join_pb2 as pb


def put(cache: Path, name: str, data: bytes, used_s: int, *, whole: bool = True) -> Slot:
    slot = Slot(cache, pb.ArtifactFile(file=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)))
    slot.prepare(b"{}")
    (slot.path if whole else slot.partial).write_bytes(data)
    os.utime(slot.directory / "pipeline.json", (used_s, used_s))
    return slot


def test_the_cache_is_listed_oldest_first_and_cleared(tmp_path: Path) -> None:
    put(tmp_path, "new.gguf", b"x" * 10, 2_000_000_000)
    put(tmp_path, "old.gguf", b"y" * 20, 1_000_000_000, whole=False)
    (tmp_path / "notes.txt").write_text("not ours")
    done = relayline("cache", "--cache", tmp_path, "--json")
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(entry["file"], entry["size_bytes"], entry["state"]) for entry in entries] == [
        ("old.gguf", 20, "partial"),
        ("new.gguf", 10, "whole"),
    ]
    assert "2 artifacts" in relayline("cache", "--cache", tmp_path).stdout
    assert ": 1 artifact," in relayline("cache", "--cache", tmp_path, "--unused-days", "1").stdout
    assert relayline("cache", "--cache", tmp_path, "--clear").returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_a_stage_or_coordinator_uses_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    slots = [put(tmp_path / "relayline" / "artifacts", "stage-0.gguf", data, 1_000_000_000) for data in (b"x", b"y")]
    splits = [tmp_path / "relayline" / "splits" / name for name in ("one", "other")]
    for split in splits:
        split.mkdir(parents=True)
        (split / "tokenizer.gguf").write_bytes(b"x")
    use = Use([slots[0].path, splits[0] / "tokenizer.gguf"])
    done = relayline("cache", "--clear", "--json")
    found = {entry["path"]: entry["state"] for entry in map(json.loads, done.stdout.splitlines())}
    assert found == {
        str(slots[0].directory): "kept",
        str(slots[1].directory): "removed",
        str(splits[0]): "kept",
        str(splits[1]): "removed",
    }
    assert [path.exists() for path in (slots[0].path, slots[1].path, *splits)] == [True, False, True, False]
    text = relayline("cache", "--clear").stdout
    assert text.splitlines()[-1] == "freed 0 splits, 0 artifacts, 0 downloads, 0.0 MiB", "what is kept does not count"
    use.close()
    text = relayline("cache", "--clear").stdout
    assert text.count("removed") == 2
    assert text.splitlines()[-1].startswith("freed 1 split, 1 artifact, 0 downloads, ")


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC-9")  # nine hours before it, as POSIX counts
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_tokyo")
def test_times_are_those_of_the_users_clock(tmp_path: Path) -> None:
    put(tmp_path, "old.gguf", b"y", 1_000_000_000)
    text, found = (CliRunner().invoke(cache_command, ["--cache", str(tmp_path), *more]) for more in ((), ("--json",)))
    assert " 2001-09-09 10:46 " in text.stdout
    assert json.loads(found.stdout)["used"] == "2001-09-09T01:46:40+00:00"


@pytest.mark.parametrize("name", ["none", "empty"])
def test_no_cache_is_no_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = relayline("cache", "--cache", tmp_path / name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "0 artifacts" in done.stdout


def test_a_fetch_under_way_is_left_alone(tmp_path: Path) -> None:
    slot = put(tmp_path, "stage.gguf", b"x", 1_000_000_000, whole=False)
    assert slot.try_lock()
    (entry,) = cached(tmp_path)
    assert not remove(entry)
    assert slot.partial.exists()
    slot.unlock()
    assert remove(entry)
    assert cached(tmp_path) == []


def test_a_split_and_downloads_under_way_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    split, headers = splits_dir() / "one", headers_dir() / "org--repo" / "commit"
    blob = hub_cache() / "models--org--repo" / "blobs" / "etag.relayline"
    for directory in (split, headers, blob.parent):
        directory.mkdir(parents=True)
    blob.touch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(scratch_directory(".partial-", headers))
        stack.enter_context(contextlib.closing(Use([split, blob])))
        assert cleared() == {"splits": "being made", "downloads": "being fetched"}
        assert split.exists()
        assert blob.exists()
    assert cleared() == {"splits": "removed", "downloads": "removed"}
    assert not any(path.exists() for path in (split, headers, blob))


def cleared() -> dict[str, str]:
    found = {}
    for kind in ("splits", "downloads"):
        states = {
            json.loads(line)["state"] for line in relayline("cache", kind, "--clear", "--json").stdout.splitlines()
        }
        (found[kind],) = states
    return found


def test_an_entry_that_cannot_be_removed_is_named_with_its_directory(tmp_path: Path) -> None:
    def remove_it() -> bool:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "stage-1.gguf")  # as shutil.rmtree does

    entry = Kept("splits", "small", tmp_path / "small", 1, "whole", 0.0, remove_it)
    with pytest.raises(StartError) as caught:
        _outcome(entry, None)
    assert caught.value.message == f"{tmp_path / 'small'}: cannot be removed: Read-only file system"


def test_a_cache_whose_name_is_no_text_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / os.fsdecode(b"home\xff")))
    says = "the name is not UTF-8; rename it; XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere"
    with pytest.raises(UsageError, match=says):
        split_place(DEMO_MODEL, 2, None)
