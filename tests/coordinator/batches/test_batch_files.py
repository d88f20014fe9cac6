"""The files of a batch: an input is checked whole, an output is gone on with after any end of its writer."""

from __future__ import annotations

import json
import stat
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from relayline.coordinator.batches import input_file
from relayline.coordinator.batches.input_file import Known, check_input, waiting_requests
from relayline.coordinator.batches.lines import BOM, Outcome
from relayline.coordinator.batches.output_file import OutputFile, drop_failed
from relayline.wire.common.errors import StartError, UsageError


def request(custom_id: str) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})


def answered(custom_id: str, status: int = 200) -> bytes:
    return Outcome(custom_id, status, "", {"text": "é\n"}).line()


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def left(path: Path, known: Known) -> list[str]:
    return [asked.custom_id for _, asked in waiting_requests(path, known)]


def test_a_good_file_gives_its_requests_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("b"), "", request("a"), "  ", request("c")])
    path.write_bytes(BOM + path.read_bytes().rstrip())  # as an editor leaves it, without the last line's end
    known = check_input(path)
    assert left(path, known) == ["b", "a", "c"]
    assert [known.place_of(name) for name in ("b", "a", "c", "d")] == [0, 1, 2, None]


def test_every_bad_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), "{", "", request("b").replace("POST", "GET")])
    with pytest.raises(UsageError) as found:
        check_input(path)
    first, second = found.value.message.splitlines()
    assert first.startswith(f"{path}, line 2: it is no JSON")
    assert second.startswith(f'{path}, line 4: its method is "GET"')


def test_the_first_problems_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "in", ["{"] * 1_025)
    with pytest.raises(UsageError) as found:
        check_input(path)
    lines = found.value.message.splitlines()
    assert (len(lines), lines[-1]) == (21, f"{path}: 1,005 more lines are wrong")


def test_two_of_one_name_are_both_named(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), "", request("b"), request("a"), request("a")])
    with pytest.raises(UsageError) as found:
        check_input(path)
    assert found.value.message.splitlines() == [
        f"{path}, line 4: its custom_id 'a' is that of line 1 too",
        f"{path}, line 5: its custom_id 'a' is that of line 4 too",
    ]


def test_an_empty_file_and_a_line_too_long_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no requests"):
        check_input(write(tmp_path / "empty", ["", " "]))
    monkeypatch.setattr(input_file, "LINE_BYTES_MAX", 1_000)
    with pytest.raises(UsageError, match="line 2: it has more than"):
        check_input(write(tmp_path / "long", [request("a"), request("b" * 1_000)]))
    with pytest.raises(UsageError, match="more than 2 requests"):
        check_input(write(tmp_path / "many", [request("a"), request("b"), request("c")]), n_max=2)


def test_as_many_requests_and_bytes_as_allowed_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in", [request("a"), request("b")])
    monkeypatch.setattr(input_file, "LINE_BYTES_MAX", len(request("a")) + 1)
    assert left(path, check_input(path, n_max=2)) == ["a", "b"]
    with pytest.raises(UsageError, match=f"^{path}, line 2: it has more than"):
        check_input(write(path, [request("a"), request("bc")]))


def test_it_says_how_far_it_has_come_and_of_what_url_all_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "REPORT_LINES", 2)
    path = write(tmp_path / "in", [request(name) for name in "abcde"])
    seen: list[int] = []
    check_input(path, seen.append, url="/v1/completions")
    assert seen == [2, 4]
    with pytest.raises(input_file.BadInputError, match="its url is /v1/completions; the batch is of /v1/x") as found:
        check_input(path, url="/v1/x")
    assert [number for number, _ in found.value.problems] == [1, 2, 3, 4, 5]


def test_memory_does_not_grow_with_the_text_of_a_file(tmp_path: Path) -> None:
    n_lines, path = 2_000, tmp_path / "in"
    write(path, [request(f"{number}-" + "x" * 400) for number in range(n_lines)])
    tracemalloc.start()
    try:
        known = check_input(path)
        n_left = sum(1 for _ in waiting_requests(path, known))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert n_left == n_lines
    assert peak_bytes < path.stat().st_size / 4


def test_a_changed_input_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a"), request("b")])
    known = check_input(path)
    for lines in (
        [request("b"), request("a")],
        [request("a"), "{"],
        [request("a"), request("b"), request("c")],
        [request("a")],  # cut at the end of a line
    ):
        write(path, lines)
        with pytest.raises(StartError, match="changed after it was checked"):
            left(path, known)


@pytest.mark.parametrize("n_bytes", range(len(answered("b")) + 1))
def test_an_output_cut_anywhere_is_gone_on_with(tmp_path: Path, n_bytes: int) -> None:
    """A power cut leaves any part of the last line."""
    path = write(tmp_path / "in", [request("a"), request("b"), request("c")])
    out, known, last = tmp_path / "out", check_input(path), answered("b")
    out.write_bytes(answered("a") + last[:n_bytes])
    with OutputFile(out) as output:
        is_cut = output.mend()
        assert output.note_done(known)[0] == (2 if n_bytes >= len(last) - 1 else 1)
        assert is_cut == (0 < n_bytes < len(last) - 1)
        for name in left(path, known):
            output.add(answered(name))
    assert sorted(json.loads(line)["custom_id"] for line in out.read_bytes().splitlines()) == ["a", "b", "c"]


def test_zeros_of_a_power_cut_are_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(answered("a") + bytes(3 << 20))
    with OutputFile(out) as output:
        assert output.mend()
    assert out.read_bytes().count(b"\n") == 1
    out.write_bytes(b"half a line alone")
    with OutputFile(out) as output:
        assert output.mend()
    assert out.read_bytes() == b""


def test_another_files_output_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "in", [request("a")])
    for text, says in ((answered("z"), "has no request 'z'"), (b"notes\n", "line 1: it is no JSON")):
        (tmp_path / "out").write_bytes(text)
        with OutputFile(tmp_path / "out") as output, pytest.raises(UsageError, match=says):
            output.note_done(check_input(path))
        assert (tmp_path / "out").read_bytes() == text


def test_one_process_writes_an_output(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "out"), pytest.raises(UsageError, match="another batch is writing it"):
        OutputFile(tmp_path / "out")
    with OutputFile(tmp_path / "out"):
        pass


def test_failed_requests_are_asked_again(tmp_path: Path) -> None:
    path, out = write(tmp_path / "in", [request("a"), request("b"), request("c")]), tmp_path / "out"
    out.write_bytes(answered("a") + answered("b", 400) + answered("c")[:-9])
    assert drop_failed(out) == 1
    known = check_input(path)
    with OutputFile(out) as output:
        assert output.note_done(known) == (1, 0)
    assert left(path, known) == ["b", "c"]


def test_an_output_keeps_its_permissions_and_its_links(tmp_path: Path) -> None:
    out, link, victim = tmp_path / "out", tmp_path / "link", tmp_path / "victim"
    victim.write_bytes(b"theirs")
    (tmp_path / ".link.partial").symlink_to(victim)
    out.write_bytes(answered("a") + answered("b", 400))
    out.chmod(0o600)
    link.symlink_to(out)
    assert drop_failed(link) == 1
    assert (link.is_symlink(), stat.S_IMODE(out.stat().st_mode), victim.read_bytes()) == (True, 0o600, b"theirs")
    out.write_bytes(answered("a") + b"notes\n")
    with pytest.raises(UsageError, match="line 2: it is no JSON"):
        drop_failed(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".link.partial", "link", "out", "victim"]


def test_what_a_killed_run_left_beside_an_output_goes(tmp_path: Path) -> None:
    out, others = tmp_path / "out", [".out.0123abcde", ".out.0123abcg", ".xout.0123abcd", "xout.0123abcd"]
    out.write_bytes(answered("a") + answered("b", 400))
    for name in (".out.0123abcd", ".out.ffffffff", *others):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".out.00000000").symlink_to(out)
    with OutputFile(out), pytest.raises(UsageError, match="another batch is writing it"):
        drop_failed(out)
    assert (tmp_path / ".out.0123abcd").exists(), "the other one may write it now"
    assert drop_failed(out) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.00000000", *others}
