"""Goal: `plan` and `inspect` know a model of the hub from its headers, and the weights stay there."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.cli.model import facts_as_json
from relayline.deploy.testing.fake_hub import Hub
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S
from relayline.deploy.testing.processes import relayline as run_here
from tests.support.hub_loads import AT_ONCE, TAIL, forks_fixture, hub_environment, hub_fixture, load, model_fixture
from tests.support.shards import shard
from tests.support.tiny_models import make_tiny

FIXTURES = (forks_fixture, model_fixture, hub_fixture)  # pytest finds them in the modules that name them
FIRST_BYTES = 1_024  # of a header that has more, so that it comes in several pieces
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


def test_several_shards_are_read_at_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    """No answer comes before all shards but the first are asked for."""
    first = shard(model, tmp_path / "shards", 5)
    hub.files = {f"org/many/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    meeting, names = threading.Barrier(4, timeout=TIMEOUT_S), []

    def meet(name: str, asked: str) -> None:
        if "-00001-of-" not in name and asked.startswith("bytes=0-"):
            names.append(name)
            meeting.wait()

    hub.on_part = meet
    code, text = load(hub.url, tmp_path / "home", f"hf://org/many/{first.name}", program=PROGRAM)
    assert code == 0, text
    assert known(text)[:2] == [of_file(first), sum(map(len, hub.files.values()))]
    assert (len(set(names)), meeting.broken) == (4, False)


def test_a_shard_that_is_missing_is_named(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = shard(model, tmp_path / "shards", 5)
    hub.files = {f"org/many/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    gone = first.name.replace("-00001-", "-00004-")
    del hub.files[f"org/many/{gone}"]
    code, text = load(hub.url, tmp_path / "home", f"hf://org/many/{first.name}", program=PROGRAM)
    assert (code, text) == (3, f"ModelFileError: hf://org/many/{gone}: the repository has no such file")


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


def test_fewer_bytes_than_were_asked_for_are_asked_for_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_short = 4
    code, text = load(hub.url, tmp_path, "org/repo", program=AT_ONCE + PROGRAM)
    assert (code, hub.n_short) == (0, 0), text
    assert known(text)[0] == of_file(model)
    hub.n_short = 1_000
    code, text = load(hub.url, tmp_path, "org/repo", program=AT_ONCE + PROGRAM)
    named = f"hf://org/repo/{model.name}"
    assert (code, text) == (3, f"ModelFileError: {named}: cannot be downloaded: an answer ended 512 bytes too early")


ELSEWHERE = "; TMPDIR=DIRECTORY puts them elsewhere"


def test_a_temporary_directory_that_is_full_is_named_with_its_variable(hub: Hub, tmp_path: Path) -> None:
    """As on a full disk, a file may not grow."""
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    (tmp_path / "tmp").mkdir()
    code, text = load(hub.url, tmp_path, "org/repo", program=full + PROGRAM, TMPDIR=str(tmp_path / "tmp"))
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith("ModelFileError: headers of a model cannot be kept for the time of this command: ")
    assert text.endswith(ELSEWHERE)
    assert "HF_HOME" not in text


def test_a_temporary_directory_that_is_not_there_is_named_with_its_variable(hub: Hub, tmp_path: Path) -> None:
    gone = f"import tempfile\ntempfile.tempdir = {str(tmp_path / 'gone')!r}\n"
    code, text = load(hub.url, tmp_path, "org/repo", program=gone + PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert f"command: {tmp_path / 'gone'}/relayline-header-" in text
    assert text.endswith(f"No such file or directory{ELSEWHERE}")


# Time passes where something waits for the hub, and nowhere else.
CLOCK = """
import sys, threading, types
from relayline.deploy.models import hub_headers, hub_patience
sys.stderr, clock = sys.stdout, [0.0]
class Clocked(threading.Event):
    def wait(self, seconds):
        print(f"waits {seconds}")
        clock[0] += seconds
        return self.is_set()
hub_headers.threading = types.SimpleNamespace(Event=Clocked)
hub_patience.time = types.SimpleNamespace(monotonic=lambda: clock[0])
"""


@pytest.mark.parametrize("where", ["n_busy", "n_busy_fronts"])
def test_a_hub_that_asks_for_time_gets_it(hub: Hub, model: Path, tmp_path: Path, where: str) -> None:
    setattr(hub, where, 2)
    hub.busy = 429, {"Retry-After": "55"}
    code, text = load(hub.url, tmp_path, f"hf://org/repo/{model.name}", program=CLOCK + PROGRAM)
    assert code == 0, text
    *said, found = text.splitlines()
    line = "the hub answers 429 Too Many Requests and asks to wait 55 s; trying again then"
    assert said == [line, "waits 55.0"] * 2
    assert known(found)[0] == of_file(model)


def test_a_hub_that_asks_for_more_time_than_a_user_waits_is_one_line(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_busy_fronts, hub.busy = 1, (429, {"Retry-After": "3600"})
    named = f"hf://org/repo/{model.name}"
    code, text = load(hub.url, tmp_path, named, program=CLOCK + PROGRAM)
    asks = "the hub answers 429 Too Many Requests and asks to wait 3,600 s; try again then"
    assert (code, text) == (3, f"ModelFileError: {named}: cannot be downloaded: {asks}")


def test_a_hub_that_asks_for_no_time_is_asked_for_half_a_minute(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.is_down = True
    code, text = load(hub.url, tmp_path, f"hf://org/repo/{model.name}", program=CLOCK + PROGRAM)
    said, *waits, error = text.splitlines()
    assert (code, said) == (3, "the hub does not answer; trying again for up to half a minute")
    assert waits == [f"waits {seconds}" for seconds in (1.0, 2.0, 4.0, 8.0, 8.0)]
    assert error.startswith(f"ModelFileError: hf://org/repo/{model.name}: cannot be downloaded: ")


def test_an_address_that_expires_between_two_pieces_is_asked_for_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.address_uses = 1
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert code == 0, text
    assert known(text)[0] == of_file(model)
    assert len(hub.ranges) > 2
    hub.address_uses, hub.n_expired = 0, 1_000
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert (code, len(text.splitlines()), 1_000 - hub.n_expired) == (3, 1, 2), "a store that refuses is asked twice"


def test_the_token_is_for_the_hub_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM, HF_TOKEN="hf_secret")
    assert (code, hub.n_tokens_leaked) == (0, 0), text
    assert known(text)[0] == of_file(model)


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
        assert (found["lanes"], found["ctx_tokens"]) == (here["lanes"], here["ctx_tokens"])
        assert sum(stage["weights_bytes"] for stage in found["stages"]) == sum(
            stage["weights_bytes"] for stage in here["stages"]
        )
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))


def test_a_plan_with_a_draft_model_needs_its_header_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.files["org/small/small-Q8_0.gguf"] = model.read_bytes()
    manifest = tmp_path / "drafted.yaml"
    head = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: drafted}\n"
    drafted = "coordinator: {draftModel: 'hf://org/small/small-Q8_0.gguf'}"
    manifest.write_text(f"{head}spec:\n  model: {{path: {model}}}\n  {drafted}\n  stages: [{{name: a}}, {{name: b}}]\n")
    for target in ((model, "--draft-model", "hf://org/small"), (manifest,)):
        done = relayline(hub, tmp_path, "plan", *target, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found["notes"][0].startswith("draft model: only the header was read from the hub; `up` downloads 1.")
        assert (found["draft_model"]["name"], found["draft_model"]["weights_bytes"] > 0) == ("small-Q8_0.gguf", True)
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))
    assert n_sent(hub) <= 2 << 20, "and no weights"
    done = relayline(hub, tmp_path, "plan", model, "--draft-model", "hf://org/none")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "--draft-model: hf://org/none: there is no such repository" in done.stderr


def layers_manifest(home: Path, name: str) -> Path:
    path = home / "far.yaml"
    head = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: far}\n"
    stages = "stages: [{name: a, threads: 1}, {name: b, threads: 1}]"
    path.write_text(f"{head}spec:\n  model: {{hf: 'hf://{name}', download: layers}}\n  {stages}\n")
    return path


@pytest.mark.slow
def test_a_model_of_layers_is_measured_without_its_weights(hub: Hub, model: Path, tmp_path: Path) -> None:
    manifest = layers_manifest(tmp_path, f"org/repo/{model.name}")
    before = json.loads(relayline(hub, tmp_path, "plan", manifest, "--json").stdout)
    assert "estimate" in " ".join(before["notes"])
    for flags in (("--measure",), ()):
        done = relayline(hub, tmp_path, "plan", manifest, "--json", *flags)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert "estimate" not in " ".join(found["notes"])
        assert "all stages together download 1." in found["notes"][0]
    assert n_sent(hub) <= 1 << 20, "the header alone"
    assert not list((tmp_path / "hub").glob("models--*/blobs/*"))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3moe", "deepseek4", "hy_v4"])
def test_experts_are_measured_without_their_weights(hub: Hub, tmp_path: Path, family: str) -> None:
    experts = make_tiny(family, tmp_path / "moe-Q4_K_M.gguf", tokenizer=True)
    hub.files["org/moe/moe-Q4_K_M.gguf"] = experts.read_bytes()
    done = relayline(hub, tmp_path, "plan", layers_manifest(tmp_path, "org/moe/moe-Q4_K_M.gguf"), "--json", "--measure")
    assert done.returncode == 0, done.stderr
    assert "estimate" not in " ".join(json.loads(done.stdout)["notes"])


def test_experts_that_only_weights_can_choose_are_not_measured_without_them(hub: Hub, tmp_path: Path) -> None:
    experts = make_tiny("deepseek4:hash", tmp_path / "moe-Q4_K_M.gguf", n_layers=4, tokenizer=True)
    hub.files["org/moe/moe-Q4_K_M.gguf"] = experts.read_bytes()
    manifest = layers_manifest(tmp_path, "org/moe/moe-Q4_K_M.gguf")
    done = relayline(hub, tmp_path, "plan", manifest, "--measure")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert "its weights decide which experts work, and are on the hub; measure with `download: whole`" in done.stderr


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
