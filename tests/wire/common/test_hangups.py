"""SIGHUP of a terminal that closes, told from one that somebody sends to a process without a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from relayline.wire.common.process import may_hang_up

PROGRAM = """
import os, signal, sys
from relayline.wire.common.process import has_terminal, may_hang_up
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
print(may_hang_up(), has_terminal())
os.open(sys.argv[1], os.O_RDWR)  # of a session's first process: its controlling terminal from now on
print(may_hang_up(), has_terminal(), flush=True)
signal.sigwait({signal.SIGHUP})
print(has_terminal())
"""


def test_a_session_without_a_terminal_is_never_hung_up_and_a_closed_one_is_missed() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, os.ttyname(theirs)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(2)] == ["False False\n", "True True\n"]
        os.close(theirs)
        os.close(ours)
        assert child.communicate(timeout=60) == ("False\n", None)
    assert child.returncode == 0


def test_nohup_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayline.wire.common.process.has_terminal", lambda: True)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not may_hang_up()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert may_hang_up()
    finally:
        signal.signal(signal.SIGHUP, before)
