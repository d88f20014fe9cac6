"""What `relayline sleep` says."""

from __future__ import annotations

from relayline.deploy.cli.sleep import sleep_line


def test_it_says_that_memory_is_free_only_if_it_is() -> None:
    assert sleep_line({"is_sleeping": True, "state": "asleep", "requests": 0}).startswith("sleeps: the memory is free")
    assert sleep_line({"is_sleeping": False, "state": "waking", "requests": 1}).startswith("it wakes: it sleeps again")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 1}).startswith("1 request runs or wait")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 2}).startswith("2 requests run or wait")
    assert sleep_line({"is_sleeping": False, "state": "awake", "requests": 0}).startswith("no request runs: ")
