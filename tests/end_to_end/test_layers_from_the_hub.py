"""`download: layers` with real processes: each stage gets its layers from a hub, and no machine has the whole model."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.fake_hub import Hub, serving
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S
from tests.support.hub_loads import hub_environment
from tests.support.shards import shard

pytestmark = pytest.mark.slow  # real processes, started twice

N_SHARDS = 5
NAME = "demo-Q4_K_M.gguf"
MANIFEST = f"""
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: far}}
spec:
  model: {{hf: "hf://org/repo/{NAME}", download: layers}}
  context: {{tokens: 256, lanes: 2}}
  batching: {{calibrate: false}}
  stages: [{{name: one, layers: [0, 4]}}, {{name: two, layers: [4, 8]}}]
  coordinator: {{http: {{port: 0}}}}
"""


class Far:
    """The commands of a machine that knows the model only from a hub."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.hub, self.home, self.cache = hub, home, home / "cache" / "relayline"
        (home / "far.yaml").write_text(MANIFEST)

    def run(self, *arguments: str, hub_url: str = "") -> subprocess.CompletedProcess[str]:
        environment = hub_environment(hub_url or self.hub.url, self.home)
        environment |= {"XDG_STATE_HOME": str(self.home / "state"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        return subprocess.run(
            [*COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
        )

    def up(self, *more: str, hub_url: str = "") -> str:
        """Start it, and return the API's URL."""
        done = self.run("up", str(self.home / "far.yaml"), "--detach", "--json", *more, hub_url=hub_url)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout.splitlines()[-1])["url"])

    def artifacts(self) -> dict[tuple[int, int], Path]:
        """Return the layers that stages have fetched, each with its file."""
        found = {}
        for path in self.cache.glob("artifacts/*/*.gguf"):
            entries = open_model(path)
            found[entries.integer("relayline.layer_start"), entries.integer("relayline.layer_end")] = path
        return found


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Far]:
    with serving(Hub({f"org/repo/{NAME}": DEMO_MODEL.read_bytes()})) as hub:
        machine = Far(hub, tmp_path)
        try:
            yield machine
        finally:
            machine.run("down", "far")


def answer(url: str) -> dict[str, Any]:
    body = {"prompt": "def copytree(src, dst):\n", "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        return dict(json.load(reply))


def n_times_asked(far: Far) -> int:
    """Return how often the hub was asked which commit the branch is."""
    return sum(method == "HEAD" and "/resolve/main/" in path for method, path in far.hub.asked)


def tensors_of(path: Path) -> dict[str, bytes]:
    content = path.read_bytes()
    return {
        tensor.name: content[tensor.offset : tensor.offset + tensor.size_bytes]
        for tensor in open_model(path).tensors.values()
    }


def check_layers(far: Far, cuts: tuple[int, ...], directory: Path) -> None:
    """Fail unless the stages' files hold exactly what a split of the whole model holds."""
    split = split_model(DEMO_MODEL, directory, cuts=cuts)
    artifacts = far.artifacts()
    for stage in split.stages:
        fetched = artifacts[stage.layer_start, stage.layer_end]
        assert tensors_of(fetched) == tensors_of(directory / stage.file)
        assert fetched.stat().st_blocks * 512 >= stage.size_bytes // 2, "and no hole"


def disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def test_stages_get_their_layers_and_nobody_the_model(far: Far, tmp_path: Path) -> None:
    url = far.up()
    assert n_times_asked(far) == 1
    first = answer(url)
    assert first["choices"][0]["text"]
    check_layers(far, (4,), tmp_path / "whole-4")
    assert not list((far.home / "hub").glob("models--*/blobs/*"))
    assert disk_bytes(far.cache / "splits") < DEMO_MODEL.stat().st_size // 8
    done = far.run("move", "--cuts", "3", "--pipeline", "far")
    assert done.returncode == 0, done.stderr
    assert answer(url)["choices"] == first["choices"], "moved layers answer the same"
    check_layers(far, (3,), tmp_path / "whole-3")
    assert far.run("down", "far").returncode == 0
    n_asked = len(far.hub.ranges)
    gone = far.up("--no-measure", hub_url="http://127.0.0.1:1")  # the hosts have what they need
    assert answer(gone)["choices"] == first["choices"]
    assert len(far.hub.ranges) == n_asked
    listed = far.run("cache", "--json").stdout
    assert {json.loads(line)["state"] for line in listed.splitlines() if "org/repo" in line} == {"in use"}
    deep = far.run("doctor", "--deep", "--json")
    assert "every sha256 is right" in deep.stdout


def test_layers_may_lie_in_several_shards(far: Far, tmp_path: Path) -> None:
    """The cut at layer 4, and the one at 3, are inside a shard; the embeddings and the head are in the outer ones."""
    first = shard(DEMO_MODEL, tmp_path / "shards", N_SHARDS)
    names = [path.name for path in sorted(first.parent.iterdir())]
    far.hub.files = {f"org/repo/big/{name}": (first.parent / name).read_bytes() for name in names}
    (far.home / "far.yaml").write_text(MANIFEST.replace(NAME, f"big/{names[1]}"))
    url = far.up()
    before = answer(url)
    assert before["choices"][0]["text"]
    check_layers(far, (4,), tmp_path / "whole-4")
    read = {path for method, path in far.hub.asked if method == "GET" and "/resolve/" in path}
    assert {path.rpartition("/")[2] for path in read} == set(names)
    assert far.run("down", "far").returncode == 0
    n_asked = len(far.hub.ranges)
    far.hub.asked.clear()
    url = far.up("--no-measure")
    assert n_times_asked(far) == 1
    assert answer(url)["choices"] == before["choices"], "a restart answers the same"
    assert len(far.hub.ranges) == n_asked, "with what the stages have"
    done = far.run("move", "--cuts", "3", "--pipeline", "far")
    assert done.returncode == 0, done.stderr
    assert answer(url)["choices"] == before["choices"], "moved layers answer the same"
    check_layers(far, (3,), tmp_path / "whole-3")
    assert not list((far.home / "hub").glob("models--*/blobs/*"))


def test_a_model_that_was_pulled_is_used_from_there(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    assert far.run("pull", "org/repo").returncode == 0
    monkeypatch.setenv("RELAYLINE_DOWNLOAD", "layers")  # not a flag: it would reach the one in the background, too
    flags = (
        "--detach",
        "--http",
        "127.0.0.1:0",
        "--name",
        "far",
        "--no-calibrate",
        "--stages",
        "1",
    )
    done = far.run("up", "org/repo", *flags, hub_url="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("RELAYLINE_DOWNLOAD")
    done = far.run("restart", "far")
    assert done.returncode == 0, done.stderr
    assert not (far.cache / "headers").exists()


def test_a_path_and_layers_do_not_go_together(far: Far) -> None:
    done = far.run("up", str(DEMO_MODEL), "--download", "layers")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "is here already; `download: layers` is for models of the hub" in done.stderr
    (far.home / "here.yaml").write_text(MANIFEST.replace(f'hf: "hf://org/repo/{NAME}"', f"path: {DEMO_MODEL}"))
    done = far.run("up", str(far.home / "here.yaml"))
    assert (done.returncode, done.stdout) == (2, "")
    said = "`download: layers` is for a model of the hub, given as `hf` and not as `path`"
    assert said in done.stderr
    here = (far.home / "here.yaml").read_text().replace(", download: layers", "")
    (far.home / "here.yaml").write_text(here)
    done = far.run("up", str(far.home / "here.yaml"), "--download", "layers")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"relayline: error: model: {said}\n")
