"""Goal: `plan` and `inspect` know a model of the hub from its headers, and the weights stay there."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.cli.model import facts_as_json
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S
from relayline.deploy.testing.processes import relayline as run_here
from tests.support.fake_hub import Hub, serving
from tests.support.hub_loads import AT_ONCE, forking, hub_environment, load
from tests.support.shards import shard
from tests.support.tiny_models import make_tiny

FIRST_BYTES = 1_024  # of a header that has more, so that it comes in several pieces
TAIL = bytes(1 << 20)  # behind the tensors: a file whose weights are many times its header
PROGRAM = f"""
import json, os, sys
from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.cli.model import facts_as_json
from relayline.deploy.models import hub_headers
from relayline.wire.common.errors import RelaylineError
hub_headers.FIRST_BYTES = {FIRST_BYTES}
try:
    with hub_headers.model_or_headers(*sys.argv[1:]) as shown:
        facts = facts_as_json(inspect_model(shown.path))
        used = sum(os.stat(path).st_blocks * 512 for path in shown.path.parent.iterdir())
    print(json.dumps([facts, shown.download_bytes, used, shown.path.exists()]))
except RelaylineError as error:
    print(f"{{type(error).__name__}}: {{error.message}}")
    sys.exit(3)
"""


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with forking():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-Q4_K_M.gguf", n_layers=5, tokenizer=True)
    path.write_bytes(path.read_bytes() + TAIL)
    return path


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serving(Hub({f"org/repo/{model.name}": model.read_bytes()})) as running:
        yield running


def n_sent(hub: Hub) -> int:
    """Return how many bytes of files a hub was asked for."""
    edges = [each.removeprefix("bytes=").split("-") for each in hub.ranges]
    return sum(int(last) + 1 - int(first) for first, last in edges)


def known(text: str) -> list[Any]:
    facts, *others = json.loads(text)
    facts.pop("path")
    return [facts, *others]


def of_file(path: Path) -> dict[str, object]:
    return {name: value for name, value in facts_as_json(inspect_model(path)).items() if name != "path"}


@pytest.mark.parametrize("named", ["org/repo", "hf://org/repo/tiny-Q4_K_M.gguf@v1"])
def test_a_header_says_the_same_as_the_file(hub: Hub, model: Path, tmp_path: Path, named: str) -> None:
    code, text = load(hub.url, tmp_path, named, program=PROGRAM)
    assert code == 0, text
    size_bytes = model.stat().st_size
    facts, download_bytes, used_bytes, is_left = known(text)
    assert (facts, download_bytes, is_left) == (of_file(model), size_bytes, False)
    assert len(hub.ranges) > 2
    assert n_sent(hub) < len(TAIL) // 4
    assert used_bytes < len(TAIL) // 2
    assert not list(tmp_path.rglob("*.gguf*")), "nothing is kept"


def test_every_shard_shows_its_header(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = shard(model, tmp_path / "shards", 3)
    hub.files = {f"org/many/big/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    second = f"hf://org/many/big/{first.name.replace('-00001-', '-00002-')}"
    code, text = load(hub.url, tmp_path / "home", second, program=PROGRAM)
    assert code == 0, text
    assert known(text)[:2] == [of_file(first), sum(map(len, hub.files.values()))]


def test_a_server_without_ranges_is_left_once_the_header_is_there(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.knows_ranges = False
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert code == 0, text
    assert known(text)[0] == of_file(model)


def test_a_network_that_breaks_is_tried_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_cuts = 4
    code, text = load(hub.url, tmp_path, "org/repo", program=AT_ONCE + PROGRAM)
    assert (code, hub.n_cuts) == (0, 0), text
    assert known(text)[0] == of_file(model)
    hub.n_cuts, n_before = 1_000, len(hub.ranges)
    code, text = load(hub.url, tmp_path, "org/repo", program=AT_ONCE + PROGRAM)
    assert (code, len(text.splitlines()), len(hub.ranges) - n_before) == (3, 1, 5)
    assert text.startswith("ModelFileError: hf://org/repo/tiny-Q4_K_M.gguf: cannot be downloaded: ")


def test_a_model_that_was_loaded_is_read_here(hub: Hub, model: Path, tmp_path: Path) -> None:
    pulled = "from relayline.deploy.models.model_source import resolve_model; resolve_model('org/repo')"
    assert load(hub.url, tmp_path, program=pulled)[0] == 0
    hub.ranges.clear()
    for url in (hub.url, "http://127.0.0.1:1"):
        code, text = load(url, tmp_path, "org/repo", program=AT_ONCE + PROGRAM)
        assert code == 0, text
        assert known(text)[:2] == [of_file(model), 0]
    assert hub.ranges == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>not here</html>" * 200, "hf://org/bad/bad.gguf: not a GGUF file"),
        (b"GGUF\x03\0\0\0" + b"\xff" * 8_192, "hf://org/bad/bad.gguf: announces"),
        (b"", "hf://org/bad/bad.gguf: the file is empty"),
        (b"GGUF", "hf://org/bad/bad.gguf: truncated after 4 bytes"),
    ],
)
def test_what_is_no_model_is_one_line_with_its_name(hub: Hub, tmp_path: Path, body: bytes, says: str) -> None:
    hub.files["org/bad/bad.gguf"] = body
    code, text = load(hub.url, tmp_path, "org/bad", program=PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith(f"ModelFileError: {says}")


def test_a_truncated_upload_is_named_by_its_place_on_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.files["org/bad/bad.gguf"] = model.read_bytes()[: -len(TAIL) - 64]
    code, text = load(hub.url, tmp_path, "org/bad", program=PROGRAM)
    assert code == 3
    assert text.startswith("ModelFileError: hf://org/bad/bad.gguf: truncated: tensor ")


def test_refusals_of_the_hub_are_those_of_a_download(hub: Hub, tmp_path: Path) -> None:
    code, text = load(hub.url, tmp_path, "hf://org/repo/none.gguf", program=PROGRAM)
    assert (code, text) == (3, "ModelFileError: hf://org/repo/none.gguf: the repository has no such file")
    code, text = load(hub.url, tmp_path, "hf://org/repo/tiny-Q4_K_M.gguf", program=PROGRAM, HF_HUB_OFFLINE="1")
    assert code == 3
    assert "not in the local cache, and the hub cannot be reached" in text


def test_the_hubs_checksum_is_compared(hub: Hub, model: Path, tmp_path: Path) -> None:
    right = hashlib.sha256(model.read_bytes()).hexdigest()
    assert load(hub.url, tmp_path, "org/repo", right.upper(), program=PROGRAM)[0] == 0
    code, text = load(hub.url, tmp_path, "org/repo", "0" * 64, program=PROGRAM)
    assert code == 3
    assert f"its sha256 is {right}, not {'0' * 64}" in text


def relayline(hub: Hub, home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command, environment = [*COMMAND, *map(str, arguments)], hub_environment(hub.url, home)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment, cwd=home
    )


def test_a_plan_for_machines_needs_no_download(hub: Hub, model: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "relayline.yaml"
    head = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: small}\n"
    stages = "stages: [{name: a, layers: [0, 2]}, {name: b, layers: [2, 5]}]"
    manifest.write_text(f"{head}spec:\n  model: {{hf: 'hf://org/repo/{model.name}'}}\n  {stages}\n")
    here = json.loads(run_here("plan", model, "--hosts", "127.0.0.1,10.255.255.1", "--json").stdout)
    for target in (("org/repo", "--hosts", "127.0.0.1,10.255.255.1"), (manifest,)):
        done = relayline(hub, tmp_path, "plan", *target, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found["notes"][0].startswith("only the header was read from the hub; `up` downloads 1.")
        assert found["model"] == here["model"]
        assert sum(stage["weights_bytes"] for stage in found["stages"]) == sum(
            stage["weights_bytes"] for stage in here["stages"]
        )
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))


def test_a_model_that_cannot_be_split_is_refused_before_it_is_downloaded(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.files["org/odd/odd.gguf"] = model.read_bytes().replace(b"llama", b"lemma")
    done = relayline(hub, tmp_path, "plan", "org/odd")
    assert (done.returncode, done.stdout) == (2, "")
    assert "hf://org/odd/odd.gguf: cannot be split: " in done.stderr
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))


def test_inspect_shows_a_model_of_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:
    done = relayline(hub, tmp_path, "inspect", "org/repo")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("only the header was read from the hub; ")
    assert done.stdout.splitlines()[:-1] == run_here("inspect", model).stdout.splitlines()
    found = json.loads(relayline(hub, tmp_path, "inspect", "org/repo", "--json").stdout)
    assert found == {**of_file(model), "path": "org/repo"}
