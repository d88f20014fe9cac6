"""Runs what loads from a hub in processes of their own: the hub's client reads its environment when it is imported.

Each is a fork of one that has imported all else.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

FORKS = """
import json, os, sys, traceback
import httpx2
import relayline.deploy.models.hub_headers
assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    program, words, environment, output, errors = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["-c", *words]
        code = 0
        try:
            exec(program, {"__name__": "__main__"})
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

# The hub's client tries again at once, as often as it would in half a minute.
AT_ONCE = "import time\ntime.sleep = lambda seconds: None\n"

_forks: list[subprocess.Popen[str]] = []


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Have the process that forks, for the length of a with block."""
    command = [sys.executable, "-c", FORKS]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"OPENBLAS_NUM_THREADS": "1"},
    ) as begun:
        _forks.append(begun)
        yield
        _forks.clear()


def hub_environment(hub_url: str, home: Path) -> dict[str, str]:
    """Return the variables of a process that loads from this hub, and keeps it under `home`."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return unset | {
        "HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "XDG_CACHE_HOME": str(home / "cache"),
    }  # fmt: skip


def load(hub_url: str, home: Path, *arguments: str, program: str, **environment: str) -> tuple[int, str]:
    """Run a program in a fresh process with an empty hub cache under `home`; returns (exit code, output)."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = (Path(directory, name) for name in ("output", "errors"))
        request = [program, arguments, hub_environment(hub_url, home) | environment, str(output), str(errors)]
        (begun,) = _forks
        assert begun.stdin is not None
        assert begun.stdout is not None
        begun.stdin.write(json.dumps(request) + "\n")
        begun.stdin.flush()
        code = int(begun.stdout.readline())
        assert code in (0, 3), errors.read_text()
        return code, output.read_text().strip()
