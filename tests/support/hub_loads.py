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

import pytest

from relayline.deploy.testing.fake_hub import Hub, hub_environment, serving
from tests.support.tiny_models import make_tiny

TAIL = bytes(1 << 20)  # behind the tensors: a file whose weights are many times its header

FORKS = """
import json, os, sys, traceback
import anyio, filelock, h11, httpx2, httpcore2, tqdm.auto, truststore  # as the client of the hub does
import relayline.coordinator.model.inspection, relayline.deploy.cli.model, relayline.deploy.models.hollow
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

# Both the hub's client and relayline try again at once, as often as they would in half a minute.
AT_ONCE = """
import time
from relayline.deploy.models import hub_patience
time.sleep = lambda seconds: None
hub_patience.FIRST_S = hub_patience.MAX_S = 0.0
"""

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


@pytest.fixture(name="forks", scope="module", autouse=True)
def forks_fixture() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(name="model", scope="module")
def model_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a TAIL."""
    path = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-Q4_K_M.gguf", n_layers=5, tokenizer=True)
    path.write_bytes(path.read_bytes() + TAIL)
    return path


@pytest.fixture(name="hub")
def hub_fixture(model: Path) -> Iterator[Hub]:
    """A hub that has the model in org/repo."""
    with serving(Hub({f"org/repo/{model.name}": model.read_bytes()})) as running:
        yield running


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
