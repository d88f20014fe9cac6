"""Stored content of lanes, in memory and on disk: bounds, restarts, damage."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from relayline.stage.engine import open_tier as open_tier_module
from relayline.stage.engine.open_tier import AUTO_FROM_NS, open_tier, spare_memory_bytes
from relayline.stage.engine.tier import Tier
from relayline.stage.engine.tier_disk import TierDisk
from relayline.stage.engine.tier_notes import TierNotes
from relayline.stage.steps import lane_states
from relayline.stage.steps.lane_states import LaneStates
from relayline.wire.common.bounds import NOTE_BYTES_MAX, NOTES_BYTES_MAX, STORED_STATES_MAX
from relayline.wire.settings.table import EngineSettings

ARTIFACT: Any = SimpleNamespace(
    long_rope=None, source_sha256="0" * 64, architecture="llama", stage_index=0, layer_start=0, layer_end=4
)


def state(value: int, n_bytes: int = 1_000) -> np.ndarray:
    return np.full(n_bytes, value, np.uint8)


def brought_back(tier: Tier, key: int) -> tuple[int, int] | None:
    """Read a state as a stage does, from the disk first. Returns its tokens and its fill value."""
    if (reading := tier.begin(key)) is not None:
        reading.result(10)
    found = tier.fetch(key)
    return None if found is None else (found[0], int(found[1][0]))


def disk(path: Path, bytes_max: int = 100_000, identity: str = "model, layers 0-3") -> TierDisk:
    return TierDisk(path, identity, bytes_max)


def test_the_least_recently_used_goes_first() -> None:
    tier = Tier(2_500)
    tier.store(1, 10, state(1))
    tier.store(2, 20, state(2))
    assert brought_back(tier, 1) == (10, 1)
    tier.store(3, 30, state(3))
    assert tier.stored() == {1: 10, 3: 30}
    assert brought_back(tier, 2) is None
    counts = tier.figures()
    assert (counts.memory_bytes, counts.n_states, counts.n_hits, counts.n_misses) == (2_000, 2, 1, 1)
    tier.store(4, 40, state(4, 3_000))
    assert tier.stored() == {1: 10, 3: 30}, "a state larger than the bound displaces none"
    tier.forget(1)
    assert tier.figures().memory_bytes == 1_000


def test_an_elastic_tier_gives_memory_back_that_the_host_needs() -> None:
    spare_bytes = [10_000]
    tier = Tier(8_000, spare_bytes=lambda: spare_bytes[0])
    for key in range(1, 10):
        tier.store(key, key, state(key))
    assert list(tier.stored()) == [2, 3, 4, 5, 6, 7, 8, 9], "its own bound"
    asked_for = Tier(8_000)
    asked_for.store(1, 1, state(1))
    asked_for.give_back()
    assert list(asked_for.stored()) == [1]
    spare_bytes[0] = -3_000
    tier.store(10, 10, state(10))
    assert list(tier.stored()) == [5, 6, 7, 8, 9, 10], "three more than the new one had to go"
    spare_bytes[0] = -50_000
    tier.store(11, 11, state(11))
    assert tier.stored() == {}, "there is no room for any"
    assert tier.figures().memory_bytes == 0
    spare_bytes[0] = 10_000
    assert tier.has_room()
    tier.store(12, 12, state(12))
    tier.give_back()
    assert (tier.stored(), tier.figures().memory_bytes) == ({}, 0)


def test_no_state_leaves_the_engine_while_the_host_has_no_memory_for_it() -> None:
    spare_bytes, saved = [10_000], list[int]()

    def save(lane: int) -> np.ndarray:
        saved.append(lane)
        return state(lane)

    tier = Tier(8_000, spare_bytes=lambda: spare_bytes[0])
    engine: Any = SimpleNamespace(save=save, pieces=None, pieces_of=lambda lane: None, size=lambda lane: 1_000)
    states = LaneStates(engine, engine, tier)
    states.store(1, 1, 10)
    spare_bytes[0] = -1_000
    states.store(2, 2, 10)
    assert saved == [1], "all streams would wait for it, and it would be thrown away"
    assert tier.figures().memory_bytes == 0, "what was kept has been given back"


def test_lanes_that_all_go_at_once_hold_up_others_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_states, "WHOLE_BYTES_MAX", 2_500)
    saved = list[int]()

    def save(lane: int) -> np.ndarray:
        saved.append(lane)
        return state(lane)

    tier, lost = Tier(8_000), list[int]()
    engine: Any = SimpleNamespace(save=save, pieces=None, pieces_of=lambda lane: None, size=lambda lane: 1_000)
    states = LaneStates(engine, engine, tier)
    states.on_dropped = lost.append
    states.store_all([(11, 1, 10), (12, 2, 10), (13, 3, 10)])
    assert (tier.stored(), saved, lost) == ({11: 10, 12: 10}, [1, 2], []), "those that are copied whole"
    tier.store(14, 10, state(4))
    states.store_all([(11, 1, 10)])
    assert saved == [1, 2], "it is there already"
    assert list(tier.stored()) == [12, 14, 11], "and counts as used"


def test_what_is_on_disk_is_not_stored_again(tmp_path: Path) -> None:
    tier = Tier(0, disk(tmp_path, 3_000))
    for key in (1, 2):
        tier.store(key, 10, state(key))
        until_written(tier)
    assert tier.has(1)
    assert not tier.has(3)
    tier.store(3, 10, state(3))
    tier.close()
    assert list(tier.stored()) == [1, 3], "it counted as used"


def test_a_full_tier_and_one_with_a_disk_still_take_states(tmp_path: Path) -> None:
    full = Tier(1_000)
    full.store(1, 10, state(1))
    assert full.has_room(), "the new one takes the place of the old"
    assert Tier(0, disk(tmp_path), spare_bytes=lambda: -1_000).has_room()


def test_what_is_lost_unasked_is_reported_once_it_is_nowhere(tmp_path: Path) -> None:
    spare_bytes, lost = [10_000], list[int]()
    tier = Tier(2_500, spare_bytes=lambda: spare_bytes[0])
    tier.on_dropped = lost.append
    for key in (1, 2, 3):
        tier.store(key, key, state(key))
    assert lost == [1], "it made room"
    tier.forget(2)
    assert lost == [1], "the coordinator asked for that"
    tier.store(4, 4, state(4, 3_000))
    assert lost == [1, 4], "it does not fit"
    spare_bytes[0] = -10_000
    assert not tier.has_room()
    assert lost == [1, 4, 3]

    lost.clear()
    on_disk = Tier(0, disk(tmp_path, 2_500))
    on_disk.on_dropped = lost.append
    for key in (1, 2):
        on_disk.store(key, key, state(key))
    assert lost == [], "they are on their way to the disk"
    on_disk.store(3, 3, state(3))
    on_disk.close()
    assert lost == [1]


def test_a_full_or_damaged_disk_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = list[int]()
    tier = Tier(0, disk(tmp_path))
    tier.on_dropped = lost.append
    tier.store(1, 1, state(1))
    tier._disk._writer.submit(lambda: None).result(10)  # type: ignore[union-attr]
    (path,) = tmp_path.glob("*/*.state")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert brought_back(tier, 1) is None
    assert lost == [1]
    path.parent.rename(tmp_path / "gone")
    tier.store(2, 2, state(2))
    tier.close()
    assert lost == [1, 2]
    assert len(caplog.records) == 2, "a line for each"


def test_by_default_a_tier_takes_spare_memory_for_long_prompts(tmp_path: Path) -> None:
    unasked = open_tier(EngineSettings(), ARTIFACT)
    assert unasked is not None
    assert unasked.store_from_ns == AUTO_FROM_NS
    assert unasked.stored() == {}
    asked = open_tier(EngineSettings(prefix_memory_bytes=1_000), ARTIFACT)
    assert asked is not None
    assert asked.store_from_ns == 0
    assert open_tier(EngineSettings(prefix_memory_bytes=0), ARTIFACT) is None
    on_disk = open_tier(EngineSettings(prefix_disk_bytes=10_000, prefix_disk_dir=str(tmp_path)), ARTIFACT)
    assert on_disk is not None
    assert on_disk.is_on_disk
    assert on_disk.store_from_ns == 0
    on_disk.close()


def test_a_host_keeps_a_quarter_of_its_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_tier_module, "total_memory_bytes", lambda: 16_000)
    monkeypatch.setattr(open_tier_module, "available_memory_bytes", lambda: 5_000)
    assert spare_memory_bytes() == 1_000
    monkeypatch.setattr(open_tier_module, "available_memory_bytes", lambda: 1_000)
    assert spare_memory_bytes() == -3_000
    monkeypatch.setattr(open_tier_module, "available_memory_bytes", lambda: None)
    assert open_tier(EngineSettings(), ARTIFACT) is None, "it is unknown whether there is room"


def test_a_restart_finds_the_states_on_disk(tmp_path: Path) -> None:
    first = Tier(1_500, disk(tmp_path))
    first.store(1, 10, state(1))
    first.store(2, 20, state(2))  # 1 is on the disk alone now, or on its way there
    first.close()
    second = Tier(1_500, disk(tmp_path))
    assert second.stored() == {1: 10, 2: 20}
    assert second.fetch(1) is None, "the decode thread reads no disk"
    assert brought_back(second, 1) == (10, 1)
    assert second.figures().disk_bytes > 2_000
    second.close()
    other = Tier(0, disk(tmp_path, identity="model, layers 4-7"))
    assert other.stored() == {}, "of other layers"
    other.close()


def test_the_disk_has_its_own_bound(tmp_path: Path) -> None:
    tier = Tier(0, disk(tmp_path, 2_500))
    for key in (1, 2, 3):
        tier.store(key, 10 * key, state(key))
    tier.close()
    tier = Tier(0, disk(tmp_path, 2_500))
    assert tier.stored() == {2: 20, 3: 30}
    assert len(list(tmp_path.rglob("*.state"))) == 2
    tier.close()
    tier = Tier(0, disk(tmp_path, 1_500))
    assert tier.stored() == {3: 30}, "the bound is smaller after the restart"
    tier.close()


@pytest.mark.parametrize("damage", ["cut", "changed", "another's head", "tokens", "key"])
def test_a_damaged_file_is_reported_in_one_line_and_removed(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(0, disk(tmp_path))
    tier.store(1, 10, state(1))
    tier.store(2, 20, state(2))
    tier.close()
    path = next(tmp_path.rglob(f"{1:016x}.state"))
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-100:]
    elif damage == "changed":
        data[-1] ^= 1
    elif damage == "tokens":
        data[23] ^= 0x80  # of a number that would not fit where a stage tells of it
    elif damage == "key":
        data[:] = data.replace((1).to_bytes(8, "little"), (3).to_bytes(8, "little"), 1)
    else:
        data[:8] = b"GGUFGGUF"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        tier = Tier(0, disk(tmp_path))
        assert damage == "changed" or tier.stored() == {2: 20}, "of the others the head tells"
        assert brought_back(tier, 1) is None
        assert brought_back(tier, 2) == (20, 2)
    assert [record.message.count("is damaged") for record in caplog.records] == [1]
    assert not path.exists()
    assert tier.stored() == {2: 20}
    tier.close()


def until_written(tier: Tier) -> None:
    tier._disk._writer.submit(lambda: None).result(10)  # type: ignore[union-attr]


def test_notes_last_as_long_as_their_states(tmp_path: Path) -> None:
    tier = Tier(2_500)
    for key in (1, 2):
        tier.note(key, b"first")
        tier.store(key, 10, state(key))
        tier.note(key, b"%d" % key)
    assert tier.notes() == {1: b"1", 2: b"2"}
    tier.store(3, 30, state(3))
    assert tier.notes() == {2: b"2"}, "1 had to make room"
    tier.note(3, bytes(NOTE_BYTES_MAX + 1))
    assert tier.notes() == {2: b"2"}, "too long"
    tier.forget(2)
    tier.store(2, 10, state(2))
    assert tier.notes() == {}


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_restart_finds_the_notes_on_disk(comes_first: bool, tmp_path: Path) -> None:
    first = Tier(0, disk(tmp_path, 2_500))
    for key in (1, 2, 3):
        if comes_first:
            first.note(key, b"%d" % key)
        first.store(key, 10 * key, state(key))
        until_written(first)
        if not comes_first:
            first.note(key, b"%d" % key)
    first.close()
    assert {path.name for path in tmp_path.rglob("*.note")} == {f"{key:016x}.note" for key in (2, 3)}
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.rglob("*.note")), "they are the owner's alone"
    stray = next(tmp_path.rglob("*.state")).with_name(f"{9:016x}.note")
    stray.write_bytes(b"?")  # an older release removed the state
    second = Tier(0, disk(tmp_path, 2_500))
    assert second.notes() == {2: b"2", 3: b"3"}
    assert not stray.exists()
    second.close()


def test_a_note_that_cannot_be_written_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(0, disk(tmp_path))
    tier.store(1, 10, state(1))
    until_written(tier)
    (folder,) = tmp_path.iterdir()
    (folder / f".{1:016x}.note.part").mkdir()  # where it would be written
    tier.note(1, b"1")
    tier.close()
    assert tier.notes() == {1: b"1"}
    tier.note(1, b"after the end")
    assert not caplog.records


def test_the_notes_of_a_tier_are_bounded() -> None:
    notes = TierNotes()
    long, n_max = bytes(NOTE_BYTES_MAX), NOTES_BYTES_MAX // NOTE_BYTES_MAX
    for key in range(n_max + 1):
        notes.put(key, long)
    assert notes.get(0) is None, "the oldest goes"
    assert notes.on(range(n_max + 1)).keys() == set(range(1, n_max + 1))
    for key in range(2 * STORED_STATES_MAX):
        notes.put(key, b"")
    assert len(notes.on(range(2 * STORED_STATES_MAX))) == STORED_STATES_MAX


def test_one_process_has_a_directory_at_a_time(tmp_path: Path) -> None:
    first = disk(tmp_path)
    with pytest.raises(BlockingIOError):
        disk(tmp_path)
    first.close()
    disk(tmp_path).close()


def test_an_unwritable_disk_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(10_000, disk(tmp_path))
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    for key in (1, 2):
        (folder / f".{key:016x}.part").mkdir()  # where the file would be written
        tier.store(key, 10, state(key))
    tier.close()
    assert len([record for record in caplog.records if "cannot be kept" in record.message]) == 1


def test_windows_count_among_what_all_lanes_that_go_at_once_hold_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_states, "WHOLE_BYTES_MAX", 2_500)
    pieces: Any = SimpleNamespace(window_bytes=lambda n_tokens: 100 * n_tokens)
    engine: Any = SimpleNamespace(pieces=pieces, pieces_of=lambda lane: pieces)
    states, begun = LaneStates(engine, engine, Tier(8_000)), list[int]()
    monkeypatch.setattr(states, "store", lambda key, lane, n_tokens, *, is_alone: begun.append(key))
    states.store_all([(11, 1, 10), (12, 2, 10), (13, 3, 10)])
    assert begun == [11, 12]


def test_notes_on_what_is_not_stored_go_first() -> None:
    notes, long = TierNotes(), bytes(NOTE_BYTES_MAX)
    n_max = NOTES_BYTES_MAX // NOTE_BYTES_MAX
    for key in range(n_max):
        notes.put(key, long, (0, 1))
    notes.put(n_max, long, (0, 1))
    assert notes.get(2) is None, "the oldest on no state"
    notes.put(n_max + 1, long, range(n_max + 2))
    assert notes.get(0) is None, "all are on states: then the oldest"
    assert notes.get(1) == long


def test_notes_on_states_under_way_are_told_too() -> None:
    tier = Tier(8_000)
    tier.note(1, b"one")
    tier.note(2, b"two")
    tier.store(1, 10, state(1))
    assert tier.notes() == {1: b"one"}
    assert tier.notes((2,)) == {1: b"one", 2: b"two"}


def test_a_directory_that_cannot_be_listed_is_free_again(tmp_path: Path) -> None:
    first = disk(tmp_path)
    first.close()
    (bad,) = tmp_path.iterdir()
    (bad / f"{1:016x}.state").mkdir()
    with pytest.raises(IsADirectoryError):
        disk(tmp_path)
    (bad / f"{1:016x}.state").rmdir()
    disk(tmp_path).close()
