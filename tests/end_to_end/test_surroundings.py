"""Surroundings that must not affect a process: proxies, a directory with foreign modules, a missing home."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from relayline.deploy.launch.state import state_root
from relayline.deploy.testing.paths import ROOT
from relayline.deploy.testing.processes import TIMEOUT_S
from relayline.wire.common import places
from relayline.wire.common.child_command import code_command, module_command
from relayline.wire.common.errors import UsageError
from relayline.wire.common.file_hash import sha256_of
from relayline.wire.links.rpc import open_channel

BY_HAND = re.compile(r'sys\.executable,\s*"-[cm]"|"-m",\s*"\w+\.')
ROOMS = ("wire", "stage", "coordinator", "deploy")


# --- proxies ----------------------------------------------------------------------------------------------------------


class Echo(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY"])
async def test_links_go_by_no_proxy(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")  # nothing listens there
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        call = channel.unary_unary("/x/y", request_serializer=None, response_deserializer=None)
        assert await call(b"hi", timeout=20) == b"hi"
    finally:
        await channel.close()
        await server.stop(0)


# --- modules in the user's directory ----------------------------------------------------------------------------------


@pytest.fixture
def booby_trapped(tmp_path: Path) -> Path:
    """A directory with modules that are called like rooms and like what children use."""
    trap = "import pathlib, sys; pathlib.Path(__file__).with_suffix('.ran').touch(); sys.exit(77)\n"
    for name in (*ROOMS, "click", "json", "llama_cpp"):
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "__init__.py").write_text(trap)
    return tmp_path


@pytest.mark.usefixtures("own_processes")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (module_command("relayline.deploy.cli", "--version"), 0),
        (module_command("relayline.stage.engine.probe", "/no/such/file"), 1),
        (module_command("relayline.coordinator.text.grammar_worker"), 0),
        (
            code_command(
                "import relayline.deploy.cli, relayline.stage.config, relayline.wire.common.bounds, sys; "
                "sys.exit(len(sys.argv))",
                "one",
            ),
            2,
        ),
    ],
)
def test_a_child_runs_nothing_from_where_the_user_stands(command: list[str], code: int, booby_trapped: Path) -> None:
    done = subprocess.run(
        command,
        cwd=booby_trapped,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert not [*booby_trapped.rglob("*.ran")]
    assert done.returncode == code, done.stderr


def test_children_run_the_package_that_their_parent_runs(tmp_path: Path) -> None:
    command = code_command("import relayline.deploy.cli; print(relayline.deploy.cli.__file__)")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert Path(done.stdout.strip()) == ROOT / "deploy" / "cli" / "__init__.py"


def test_every_child_is_started_that_way() -> None:
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if "build" not in path.parts]
    at_will = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.name != "child_command.py" and BY_HAND.search(path.read_text())
    ]
    assert at_will == []


# --- no home ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user id that passwd does not know, without HOME; returns where temporary files go."""

    def unknown(_: int) -> Any:
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_one_in_the_temporary_directory(homeless: Path) -> None:
    own = homeless / f"relayline-{os.getuid()}"
    assert places.cache_dir() == own / ".cache" / "relayline"
    assert state_root() == places.state_dir() == own / ".local" / "state" / "relayline"
    assert places.expanded("~/models/x.gguf") == own / "models" / "x.gguf"
    assert own.stat().st_mode & 0o777 == 0o700
    (homeless / "x").write_bytes(b"x")
    assert len(sha256_of(homeless / "x")) == 64
    assert [*(own / ".cache" / "relayline" / "verified").iterdir()]


@pytest.mark.parametrize("given", ["", "/"])  # as containers say it
def test_a_home_that_is_none(given: str, homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", given)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert places.home() == homeless / f"relayline-{os.getuid()}"


def test_a_directory_that_others_may_write_is_no_home(homeless: Path) -> None:
    (homeless / f"relayline-{os.getuid()}").mkdir(mode=0o777)
    (homeless / f"relayline-{os.getuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="may be written by others; set HOME") as caught:
        places.cache_dir()
    assert "\n" not in caught.value.message


def test_a_link_of_somebody_else_is_no_home(homeless: Path) -> None:
    (homeless / "elsewhere").mkdir(mode=0o700)
    (homeless / f"relayline-{os.getuid()}").symlink_to(homeless / "elsewhere")
    with pytest.raises(UsageError, match="set HOME"):
        places.state_dir()


def test_the_home_of_nobody_is_one_line() -> None:
    with pytest.raises(UsageError, match="no such user"):
        places.expanded("~nobody-of-this-name/x")


def test_variables_win_over_a_home(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert (places.cache_dir(), places.state_dir()) == (Path("/c/relayline"), Path("/s/relayline"))
    assert not [*homeless.iterdir()]


def test_nobody_else_asks_for_the_home() -> None:
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "places.py"]
    assert [str(path) for path in sources if re.search(r"Path\.home\(|expanduser\(", path.read_text())] == []
