"""The directory of stored responses: what is written is read again, and what cannot be read is left out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from relayline.coordinator.http.responses import directory as directories
from relayline.coordinator.http.responses import kept_files
from relayline.coordinator.http.responses import orders as order_files
from relayline.coordinator.http.responses.directory import STORED, UNFINISHED, ResponseDirectory
from relayline.coordinator.http.responses.orders import Order, OrderFiles, Sent
from relayline.coordinator.http.responses.recording import Recording
from relayline.coordinator.http.responses.store import Stored
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.wire.common.errors import OverloadedError, UsageError

ALICE = "a" * 64


def id_of(number: int) -> str:
    return f"resp_{number:048x}"


def response(number: int, body: bytes = b"{}", *, events: int | None = None) -> Stored:
    recording = None
    if events is not None:
        recording = Recording()
        recording.add(b"".join(b"data: %d\n\n" % each for each in range(events)))
        recording = recording.kept()
    items = [(f"item_{number}", b'{"id":1}')]
    return Stored(id_of(number), ALICE, body, items, [(f"msg_{number}", b"{}")], id_of(0), True, recording)


def put(path: Path, *responses: Stored) -> None:
    directory = ResponseDirectory(path)
    for at, each in enumerate(responses):
        directory.put(each)
        os.utime(path / STORED / each.id, (at, at))
    directory.close()


def ids_in(path: Path) -> list[str]:
    directory = ResponseDirectory(path)
    try:
        return [each.id for each in directory.load()[0]]
    finally:
        directory.close()


def test_a_response_comes_back_whole(tmp_path: Path) -> None:
    written = response(1, b'{"id":"resp"}', events=3)
    put(tmp_path, written)
    directory = ResponseDirectory(tmp_path)
    (found,), _ = directory.load()
    assert written.recording is not None
    assert found.recording is not None
    assert found.recording.contents() == written.recording.contents()
    assert (found.recording.n_bytes, found.recording.is_over) == (written.recording.n_bytes, True)
    assert (found.id, found.owner, found.body, found.previous_id) == (written.id, ALICE, written.body, id_of(0))
    assert (found.input_items, found.output_items) == (written.input_items, written.output_items)
    assert found.n_bytes == written.n_bytes
    directory.close()


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kept"
    put(path, response(1))
    for each in (path, path / STORED, path / UNFINISHED):
        assert each.stat().st_mode & 0o777 == 0o700
    assert (path / STORED / id_of(1)).stat().st_mode & 0o777 == 0o600


def test_they_come_in_the_order_of_their_last_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, *(response(number) for number in range(1, 9)))
    set_times = os.utime

    def at_a_clock_that_stands(path: Path, *, ns: tuple[int, int] = (10**18, 10**18)) -> None:
        set_times(path, ns=ns)

    monkeypatch.setattr(os, "utime", at_a_clock_that_stands)
    directory, order = ResponseDirectory(tmp_path), (4, 2, 7, 1, 3, 8)
    directory.used([id_of(99), *map(id_of, order)])  # one of them is gone
    directory.close()
    assert ids_in(tmp_path) == [*map(id_of, (5, 6, *order))]


def test_the_oldest_ones_beyond_the_bounds_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, response(1), response(2), response(3))
    monkeypatch.setattr(directories, "STORED_RESPONSES_MAX", 2)
    assert ids_in(tmp_path) == [id_of(2), id_of(3)]
    assert not (tmp_path / STORED / id_of(1)).exists()
    monkeypatch.setattr(directories, "STORED_RESPONSES_BYTES_MAX", response(3).n_bytes)
    assert ids_in(tmp_path) == [id_of(3)]


def test_files_that_cannot_be_read_are_left_out_with_a_line_for_those_of_another_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, *(response(number) for number in range(1, 8)))
    stored = tmp_path / STORED
    whole = (stored / id_of(1)).read_bytes()
    (stored / id_of(2)).write_bytes(whole[: len(whole) // 2])
    (stored / id_of(3)).write_bytes(b"")
    (stored / id_of(4)).write_bytes(msgspec.msgpack.encode({"version": 2, "id": id_of(4)}))
    (stored / id_of(5)).write_bytes(whole)  # under another's name
    (stored / id_of(6)).write_bytes(os.urandom(64))
    with (stored / id_of(7)).open("r+b") as file:
        file.truncate(kept_files.FILE_BYTES_MAX + 1)
    (stored / id_of(9)).write_bytes(whole.replace(id_of(1).encode(), b"\xff" * len(id_of(1))))
    (stored / "notes.txt").write_text("somebody's own")
    (stored / f".{id_of(8)}.0123abcd").write_bytes(whole)  # of a writer that was killed
    assert ids_in(tmp_path) == [id_of(1)]
    of_version, torn = (record.message for record in caplog.records)
    assert of_version == (
        f"{stored} has responses in files of version 2, and this relayline reads version 1; left out: 1. "
        "They stay there: start the relayline that wrote them, or remove these files"
    )
    assert torn.startswith("6 responses cannot be read and are left out, the first is")
    assert sorted(path.name for path in stored.iterdir()) == sorted(
        ["notes.txt", *(id_of(number) for number in (*range(1, 8), 9))]
    ), "the torn one is gone; the others are for people to look at"


def test_a_directory_has_one_coordinator(tmp_path: Path) -> None:
    first = ResponseDirectory(tmp_path)
    with pytest.raises(UsageError, match="holds the responses of another coordinator; give each its own"):
        ResponseDirectory(tmp_path)
    first.close()
    ResponseDirectory(tmp_path).close()


def test_a_file_in_its_place_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no directory")
    with pytest.raises(UsageError, match="kept cannot hold responses: Not a directory"):
        ResponseDirectory(tmp_path / "kept")


def test_a_response_that_does_not_fit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    directory = ResponseDirectory(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        directory.put(response(1))
    assert [*(tmp_path / STORED).iterdir()] == []
    directory.close()


def test_an_answer_that_is_too_long_to_be_read_again_is_not_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, path = OrderFiles(tmp_path), tmp_path / f"{id_of(1)}.tokens"
    orders.add(id_of(1), [TokenEvent(1, None, ())])
    monkeypatch.setattr(order_files, "SAID_BYTES_MAX", path.stat().st_size * 2)
    orders.add(id_of(1), [TokenEvent(2, None, ())])
    with pytest.raises(OSError, match="too large"):
        orders.add(id_of(1), [TokenEvent(3, None, ())])
    assert [event.token for event in orders.said(id_of(1))] == [1, 2]


def order(number: int, owner: str = "") -> Order:
    return Order(
        id=id_of(number), owner=owner, payer="", behalf="", created=number, sent=Sent(b"{}", 0, 7), model_id="m",
        n_vocab=9, queued=b"{}", input_items=[], previous_id=None, is_stream=False,
    )  # fmt: skip


def test_all_answers_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = [TokenEvent(1, None, ())]
    orders = OrderFiles(tmp_path)
    for number in (1, 2):
        orders.begin(order(number))
    orders.add(id_of(1), said)
    n_bytes = (tmp_path / f"{id_of(1)}.tokens").stat().st_size
    monkeypatch.setattr(order_files, "SAID_BYTES_MAX", 2 * n_bytes)
    monkeypatch.setattr(order_files, "UNFINISHED_ANSWERS_BYTES_MAX", 3 * n_bytes)
    orders.add(id_of(2), said)
    with pytest.raises(OverloadedError, match="room for one more"):
        orders.begin(order(3))
    assert not (tmp_path / id_of(3)).exists()
    orders.add(id_of(2), said)
    with pytest.raises(OSError, match="quota"):
        orders.add(id_of(1), said)
    again = OrderFiles(tmp_path)
    assert len(again.load()) == 2
    with pytest.raises(OSError, match="quota"):
        again.add(id_of(1), said)
    again.finished(id_of(2))
    again.begin(order(3))
    again.add(id_of(3), said)
    with (tmp_path / f"{id_of(3)}.tokens").open("ab") as file:
        file.write(b"torn")
    assert len(again.said(id_of(3))) == 1
    again.add(id_of(1), said)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.tokens")) == 3 * n_bytes


def test_the_requests_of_one_key_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = OrderFiles(tmp_path)
    orders.begin(order(1, ALICE))
    n_bytes = (tmp_path / id_of(1)).stat().st_size
    monkeypatch.setattr(order_files, "UNFINISHED_RESPONSES_BYTES_MAX", 4 * n_bytes)
    orders.begin(order(2, ALICE))
    again = OrderFiles(tmp_path)
    again.load()
    for each in (orders, again):
        with pytest.raises(
            OverloadedError, match=rf"of this API key .* have {3 * n_bytes} bytes .* most {2 * n_bytes} "
        ):
            each.begin(order(3, ALICE))
    again.begin(order(3, "b" * len(ALICE)))
    again.finished(id_of(1))
    again.begin(order(4, ALICE))


def test_all_requests_together_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = OrderFiles(tmp_path)
    orders.begin(order(1))
    n_bytes = (tmp_path / id_of(1)).stat().st_size
    monkeypatch.setattr(order_files, "UNFINISHED_RESPONSES_BYTES_MAX", 2 * n_bytes)
    orders.begin(order(2))
    again = OrderFiles(tmp_path)
    again.load()
    for each in (orders, again):
        with pytest.raises(OverloadedError, match=rf"have {3 * n_bytes} bytes .* send at most {2 * n_bytes} bytes"):
            each.begin(order(3))
    for number in (1, 2):
        again.finished(id_of(number))
    monkeypatch.setattr(order_files, "FILE_BYTES_MAX", n_bytes)
    again.begin(order(3))
    again.finished(id_of(3))
    monkeypatch.setattr(order_files, "FILE_BYTES_MAX", n_bytes - 1)
    with pytest.raises(OverloadedError, match=f"send at most {n_bytes - 1} bytes"):
        again.begin(order(3))


def test_a_start_finds_what_was_not_ended_and_nothing_else(tmp_path: Path) -> None:
    orders = OrderFiles(tmp_path)
    for number in (2, 1):
        orders.begin(order(number))
    orders.add(id_of(1), [TokenEvent(1, None, ())])
    for _ in range(2):
        orders.started(id_of(1))
    (tmp_path / f"{id_of(9)}.tokens").write_bytes(b"of a request that is gone")
    (tmp_path / f"{id_of(9)}.notes").write_text("somebody's own")
    first, second = OrderFiles(tmp_path).load()
    assert (first.order.id, first.has_begun, first.n_starts, first.order.sent) == (id_of(1), True, 2, None)
    assert (second.order.id, second.has_begun, second.n_starts) == (id_of(2), False, 0)
    names = {id_of(1), f"{id_of(1)}.tokens", f"{id_of(1)}.starts", id_of(2), f"{id_of(9)}.notes"}
    assert {path.name for path in tmp_path.iterdir()} == names
    orders.left([id_of(1), id_of(2)])
    assert [each.n_starts for each in OrderFiles(tmp_path).load()] == [0, 0], "an end in order counts as none"


def test_a_start_waits_for_the_disk_and_a_token_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    orders = OrderFiles(tmp_path)
    monkeypatch.setattr(os, "fsync", broken)
    said = [
        TokenEvent(1, -0.5, ((1, -0.5), (2, -1.0)), None, n_cached=3),
        TokenEvent(2, None, (), "stop", is_end_token=True),
    ]
    for event in said:
        orders.add(id_of(1), [event])
    assert orders.said(id_of(1)) == said
    with pytest.raises(OSError, match="Input/output error"):
        orders.started(id_of(1))


def test_one_that_was_stored_has_ended(tmp_path: Path) -> None:
    directory = ResponseDirectory(tmp_path)
    for number in (1, 2, 3):
        directory.orders.begin(order(number))
    directory.put(response(1))
    assert not (tmp_path / UNFINISHED / id_of(1)).exists()
    (tmp_path / STORED / id_of(2)).write_bytes((tmp_path / STORED / id_of(1)).read_bytes().replace(b"1", b"2"))
    stored, unfinished = directory.load()  # as if the process had ended before it could forget the second
    assert [each.order.id for each in unfinished] == [id_of(3)]
    assert not (tmp_path / UNFINISHED / id_of(2)).exists()
    assert id_of(1) in [each.id for each in stored]
    directory.drop(id_of(3))
    assert directory.load()[1] == []
    directory.close()


def test_what_is_long_is_written_as_it_is() -> None:
    long = bytes(kept_files.LONG_BYTES)
    order = Order(
        id=id_of(1), owner=ALICE, payer="", behalf="", created=5, sent=Sent(long, 3, 7), model_id="m", n_vocab=9,
        queued=b"{}", input_items=[("a", b"{}"), ("b", long)], previous_id=None, is_stream=True,
    )  # fmt: skip
    pieces = [*kept_files.in_pieces(order)]
    assert msgspec.msgpack.decode(b"".join(pieces), type=Order) == order
    assert sum(piece is long for piece in pieces) == 2
    assert max(len(piece) for piece in pieces if piece is not long) < 200


def test_a_long_list_is_written_some_entries_at_a_time() -> None:
    for n_entries in (1, 15, 16, 64, 65, 79, 80, 128, 1_000):
        entries = [("a", b"x" * 1_000)] * n_entries
        pieces = [*kept_files.in_pieces(entries)]
        assert msgspec.msgpack.decode(b"".join(pieces), type=list[tuple[str, bytes]]) == entries, n_entries
        assert max(map(len, pieces)) < 1_010 * kept_files.ENTRIES_AT_ONCE


@pytest.mark.parametrize(
    "record", [b"\xff" * 32, b"\0\0\0\x09\x91\x96\x01\xc0\x90\xa1\xff\xc2\0"], ids=["too long", "not UTF-8"]
)
def test_a_record_that_cannot_be_read_is_cut_off(record: bytes, tmp_path: Path) -> None:
    orders, path = OrderFiles(tmp_path), tmp_path / f"{id_of(1)}.tokens"
    orders.add(id_of(1), [TokenEvent(1, None, ())])
    whole = path.read_bytes()
    path.write_bytes(whole + record)
    assert [event.token for event in orders.said(id_of(1))] == [1]
    assert path.read_bytes() == whole
