"""Goal: two stages and a coordinator as processes over mutual TLS answer a request, and each kind of stranger is
refused in one line.

Every address is a loopback one, but certificates and names are checked as between hosts.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.engine.stage_client import StageClient
from relayline.deploy.launch.certificates import issue, revoke
from relayline.deploy.testing.processes import TIMEOUT_S, Running, relayline, running
from relayline.wire.common.errors import UnauthenticatedError
from relayline.wire.links.revocation import IS_REVOKED
from relayline.wire.links.roles import Role
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb
from tests.support.identities import NOW, Identities, make_identities, security_of
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.slow  # real processes, started many times

KEY = "a-key-of-the-test-0123"
TRIES_MAX = 200
SMALL = ("--ctx", "64", "--lanes", "2", "--threads", "1", "--no-calibrate", "--json")


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return make_identities(tmp_path_factory.mktemp("identities"))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    model = make_tiny("llama", directory / "tiny.gguf", n_layers=4)
    done = relayline("split", model, "--stages", "2", "--out", directory / "split")
    assert done.returncode == 0, done.stderr
    return directory / "split"


@pytest.fixture(scope="module")
def stages(ids: Identities, split: Path) -> Iterator[tuple[Running, Running]]:
    arguments = ("stage", *SMALL, "--artifact")
    with (
        running(*arguments, split / "stage-0.gguf", "--listen", "127.0.0.2:0", "--tls", ids.box1) as first,
        running(*arguments, split / "stage-1.gguf", "--listen", "127.0.0.3:0", "--tls", ids.box2) as second,
    ):
        yield first, second


def serve(split: Path, stages: tuple[Running, ...], *more: str | Path) -> tuple[str | Path, ...]:
    addresses = ",".join(stage.event["address"] for stage in stages)
    return ("serve", "--pipeline", split, "--stages", addresses, "--http", "127.0.0.1:0", "--json", *more)


def ask(url: str, key: str | None) -> tuple[int, dict[str, Any]]:
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def granted_rows(url: str) -> int:
    """How many rows stages have computed without a word from the coordinator."""
    request = urllib.request.Request(f"{url}/v1/pipeline", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return int(json.load(response)["grants"]["rows"])


def last_line(done: Any) -> str:
    """The one error line of a command that must have failed."""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "relayline: error: " in line]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("relayline: error: ")


def test_a_private_pipeline_answers(split: Path, ids: Identities, stages: tuple[Running, Running], tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text(f"test: {KEY}\n")
    keys.chmod(0o600)
    more = ("--tls", ids.coordinator, "--api-keys", keys, "--draft", "off", "--grant-steps", "8")
    with running(*serve(split, stages, *more)) as coordinator:
        url = coordinator.event["url"]
        status, reply = ask(url, KEY)
        assert (status, reply["usage"]["completion_tokens"]) == (200, 5), reply
        # The last stage links to stage 0 in the background, and shows that it is the last stage.
        for _ in range(TRIES_MAX):
            if granted_rows(url) > 0:
                break
            assert ask(url, KEY)[0] == 200
        assert granted_rows(url) > 0
        assert ask(url, None)[0] == 401
        assert ask(url, KEY + "x")[1]["error"]["code"] == "invalid_api_key"
        assert KEY not in coordinator.stderr
    token = (ids.ca / "token").read_text().strip()
    assert all(token not in process.stderr for process in (coordinator, *stages))


@pytest.mark.parametrize(
    ("host", "client", "server"),
    [
        ("stranger", "shows a certificate that does not come from the CA in", "it does not trust the CA of this end"),
        (None, "speaks TLS and this process does not; give --tls DIR", "it speaks plaintext and this end TLS"),
    ],
)
def test_strangers(
    host: str | None, client: str, server: str, split: Path, ids: Identities, stages: tuple[Running, Running]
):
    tls = ("--tls", getattr(ids, host)) if host else ()
    done = relayline(*serve(split, stages, *tls))
    assert done.returncode == 1
    assert client in last_line(done)
    for stage, name in zip(stages, ("stage 0", "stage 1"), strict=True):
        stage.wait_for_log(f"{name} refused 127.0.0.1: {server}")
        # Lines of gRPC's core are recognised by their source file.
        assert not any(".cc:" in line or "Traceback" in line for line in stage.lines), stage.stderr


def test_a_host_of_the_pipeline_that_is_no_coordinator(
    split: Path, ids: Identities, stages: tuple[Running, Running], tmp_path: Path
):
    """Its certificate is of the same CA: refused at its start, and by the stages where it talks to them itself."""
    done = relayline(*serve(split, stages, "--tls", ids.box2))
    assert done.returncode == 2
    assert "is for a stage, but this process is a coordinator; make one with `relayline certs issue" in last_line(done)

    async def take_over() -> list[str]:
        messages = []
        for stage in stages:
            client = StageClient(stage.event["address"], security_of(ids.box2))
            with pytest.raises(UnauthenticatedError) as caught:
                await client.describe()
            messages.append(caught.value.message)
            assert await client.set_telemetry(pb.SetTelemetryRequest(level=pb.TELEMETRY_LEVEL_FRAMES)) is None
            assert await client.status(with_recent=False) is None
            await client.close()
        return messages

    assert asyncio.run(take_over()) == [
        f"stage {index} refuses this call: this credential is of another role" for index in (0, 1)
    ]
    stages[0].wait_for_log("stage 0 refused 127.0.0.1: its credential does not allow this call (stage box2 on box2")


def test_a_coordinator_takes_no_stage_whose_credential_is_revoked(
    split: Path, ids: Identities, stages: tuple[Running, Running], tmp_path: Path
):
    arguments = ("stage", *SMALL, "--artifact", split / "stage-0.gguf", "--listen", "127.0.0.1:0")
    issue(ids.ca, "box5", [], 1, tmp_path / "tls", NOW, role=Role.STAGE, stage="box5")
    with running(*arguments, "--tls", tmp_path / "tls") as first:
        revoked = revoke(ids.ca, lambda identity: identity.name == "box5", NOW)
        assert revoked.identities == ("stage box5 on box5",)
        done = relayline(*serve(split, (first, stages[1]), "--tls", ids.coordinator))
        assert done.returncode == 1
        assert last_line(done) == f"the credential of {first.event['address']} (stage box5 on box5) {IS_REVOKED}"


def test_plaintext_beyond_this_machine_is_refused(split: Path):
    done = relayline("stage", "--artifact", split / "stage-0.gguf", "--listen", "0.0.0.0:0")
    assert done.returncode == 2
    assert "beyond this machine, without TLS; give --tls DIR" in last_line(done)
    done = relayline("serve", "--pipeline", split, "--stages", "10.1.2.3:1,10.1.2.3:2", "--http", "127.0.0.1:0")
    assert done.returncode == 2
    assert last_line(done).startswith("10.1.2.3:1 is beyond this machine and TLS is not set up; ")


def test_insecure_is_possible_and_warns(split: Path):
    arguments = ("stage", *SMALL, "--artifact", split / "stage-0.gguf", "--listen", "0.0.0.0:0", "--insecure")
    with running(*arguments) as stage:
        stage.wait_for_log("stage 0 listens on 0.0.0.0 in PLAINTEXT")
    assert stage.stderr.count("PLAINTEXT") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--tls", "expired"), "cert.pem expired on "),
        (("--token-file", "nowhere"), "no such file"),
    ],
)
def test_material_that_cannot_be_used(flags: tuple[str, ...], says: str, split: Path, ids: Identities, tmp_path: Path):
    given = [str(getattr(ids, flag, tmp_path / flag)) if not flag.startswith("--") else flag for flag in flags]
    done = relayline("stage", "--artifact", split / "stage-0.gguf", "--listen", "127.0.0.2:0", *given)
    assert done.returncode == 2
    assert says in last_line(done)
