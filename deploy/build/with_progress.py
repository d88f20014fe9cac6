"""Runs a pip build and shows one line of progress instead of thousands of lines of log; the log on failure.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import time

STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")
LOG_LINES_KEPT = 60
QUIET_INTERVAL_S = 15.0  # between lines if the output is not a terminal


def main() -> int:
    """Run argv[1:]; return its exit code."""
    started_s = shown_s = time.monotonic()
    tail: collections.deque[str] = collections.deque(maxlen=LOG_LINES_KEPT)
    is_terminal = sys.stderr.isatty()
    process = subprocess.Popen(
        sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line)
        step = STEP.match(line)
        now_s = time.monotonic()
        if step and (is_terminal or now_s - shown_s >= QUIET_INTERVAL_S):
            shown_s = now_s
            text = f"      compiling llama.cpp {step[1]}/{step[2]}, {now_s - started_s:.0f} s"
            print(f"\r{text}" if is_terminal else text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    code = process.wait()
    if is_terminal:
        print(file=sys.stderr)
    if code:
        sys.stderr.writelines(tail)
    return code


if __name__ == "__main__":
    sys.exit(main())
