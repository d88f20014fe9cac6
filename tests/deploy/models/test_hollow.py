"""Goal: a model of the hub is known here by its headers alone, the same ones until the hub says otherwise."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.cli.model import facts_as_json
from relayline.deploy.testing.fake_hub import COMMIT, Hub
from tests.support.hub_loads import AT_ONCE, TAIL, forks_fixture, hub_fixture, load, model_fixture
from tests.support.shards import shard

FIXTURES = (forks_fixture, model_fixture, hub_fixture)  # pytest finds them in the modules that name them
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.origin import origins_of
from relayline.deploy.cli.model import facts_as_json
from relayline.deploy.models import hollow, hub_headers
from relayline.wire.common.errors import RelaylineError
hub_headers.FIRST_BYTES = 1_024
try:
    path = hollow.hollow_model(*sys.argv[1:])
    used = sum(os.stat(each).st_blocks * 512 for each in path.parent.iterdir())
    origins = [[each.repo, each.file, each.commit, each.etag, each.size_bytes] for each in origins_of(open_model(path))]
    print(json.dumps([str(path), facts_as_json(inspect_model(path)), origins, used]))
except RelaylineError as error:
    print(f"{type(error).__name__}: {error.message}")
    sys.exit(3)
"""


def sha256_of(model: Path) -> str:
    return hashlib.sha256(model.read_bytes()).hexdigest()


def test_headers_are_kept_with_their_origin(hub: Hub, model: Path, tmp_path: Path) -> None:
    paths = set()
    for name in ("org/repo", "hf://org/repo:Q4_K_M", f"hf://org/repo/{model.name}@v1"):
        code, text = load(hub.url, tmp_path, name, program=PROGRAM)
        assert code == 0, text
        path, facts, origins, used_bytes = json.loads(text)
        paths.add(path)
        assert origins == [["org/repo", model.name, COMMIT, sha256_of(model), model.stat().st_size]]
        assert used_bytes < len(TAIL) // 4
        facts.pop("path")
        assert facts == {key: value for key, value in facts_as_json(inspect_model(model)).items() if key != "path"}
    assert paths == {str(tmp_path / "cache" / "relayline" / "headers" / "org--repo" / COMMIT / model.name)}
    starts = [each.removeprefix("bytes=").split("-")[0] for each in hub.ranges]
    assert starts.count("0") == 1, "the header was read once"


def test_without_the_hub_the_last_headers_are_good(hub: Hub, model: Path, tmp_path: Path) -> None:
    name, gone = f"hf://org/repo/{model.name}", "http://127.0.0.1:1"
    first = load(hub.url, tmp_path, name, program=PROGRAM)
    assert first[0] == 0, first[1]
    for known in (name, "org/repo", "org/repo:Q4_K_M"):
        assert load(gone, tmp_path, known, program=AT_ONCE + PROGRAM) == first
    hub.is_down = True
    for known in (name, "org/repo"):
        assert load(hub.url, tmp_path, known, program=AT_ONCE + PROGRAM) == first, "nor with a hub that is broken"
    hub.is_down, hub.files = False, {}
    code, text = load(hub.url, tmp_path, name, program=AT_ONCE + PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1), "but one that refuses is heard"
    code, text = load(gone, tmp_path / "other", name, program=AT_ONCE + PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith(f"ModelFileError: {name}: cannot be downloaded: ")


def n_asked(hub: Hub) -> int:
    """Return how often the hub was asked which commit a branch is."""
    return [path.split("/")[3] for method, path in hub.asked if (method, "/resolve/" in path) == ("HEAD", True)].count(
        "main"
    )


def test_the_commit_is_asked_for_once(hub: Hub, model: Path, tmp_path: Path) -> None:
    name, found = f"hf://org/repo/{model.name}", PROGRAM.replace("*sys.argv[1:]", "*sys.argv[1:], is_found=True")
    first = load(hub.url, tmp_path, name, program=PROGRAM)
    assert (first[0], n_asked(hub)) == (0, 1), first[1]
    hub.files["org/repo/other-Q8_0.gguf"] = model.read_bytes()
    pulled = "from relayline.deploy.models.model_source import resolve_model; resolve_model('org/repo:Q8_0')"
    assert load(hub.url, tmp_path, program=pulled)[0] == 0
    hub.asked.clear()
    for known in (name, "org/repo", "org/repo:Q4_K_M"):
        assert load(hub.url, tmp_path, known, program=found) == first
    assert hub.asked == []
    assert load(hub.url, tmp_path / "other", name, program=found)[0] == 0, "where nothing is known it is asked for"
    (note,) = tmp_path.glob("cache/relayline/headers/org--repo/refs/main")
    for damaged in (b"\0" * 41, b"x" * 5_000, b""):  # as a power cut may leave it
        note.write_bytes(damaged)
        assert load(hub.url, tmp_path, name, program=found) == first
        assert note.read_text() == COMMIT


def test_new_content_has_a_place_of_its_own(hub: Hub, model: Path, tmp_path: Path) -> None:
    found = json.loads(load(hub.url, tmp_path, "org/repo", program=PROGRAM)[1])
    hub.commit = hashlib.sha1(b"the next commit").hexdigest()
    hub.files[f"org/repo/{model.name}"] = model.read_bytes()[:-1] + b"x"
    now = json.loads(load(hub.url, tmp_path, "org/repo", program=PROGRAM)[1])
    assert now[0] != found[0]
    assert now[2][0][2:4] == [hub.commit, hashlib.sha256(hub.files[f"org/repo/{model.name}"]).hexdigest()]


def test_every_shard_has_its_origin(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = shard(model, tmp_path / "shards", 3)
    hub.files = {f"org/many/big/{path.name}": path.read_bytes() for path in first.parent.iterdir()}
    code, text = load(hub.url, tmp_path / "home", f"hf://org/many/big/{first.name}", program=PROGRAM)
    assert code == 0, text
    path, _, origins, _ = json.loads(text)
    assert Path(path).parts[-3:] == (COMMIT, "big", first.name)
    assert [each[1] for each in origins] == sorted(name.removeprefix("org/many/") for name in hub.files)


def test_a_model_that_is_whole_in_the_cache_is_taken_whole(hub: Hub, model: Path, tmp_path: Path) -> None:
    pulled = "from relayline.deploy.models.model_source import resolve_model; resolve_model('org/repo')"
    assert load(hub.url, tmp_path, program=pulled)[0] == 0
    path, _, origins, _ = json.loads(load(hub.url, tmp_path, "org/repo", program=PROGRAM)[1])
    assert (Path(path).resolve().read_bytes(), origins) == (model.read_bytes(), [])


def test_the_hubs_checksum_is_compared(hub: Hub, model: Path, tmp_path: Path) -> None:
    for _ in range(2):  # also where the headers are here already
        assert load(hub.url, tmp_path, "org/repo", sha256_of(model).upper(), program=PROGRAM)[0] == 0
        code, text = load(hub.url, tmp_path, "org/repo", "0" * 64, program=PROGRAM)
        assert (code, len(text.splitlines())) == (3, 1)
        assert "0" * 64 in text
        assert text.endswith("it is another file")


def test_files_of_ones_own_are_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    code, text = load(hub.url, tmp_path, str(model), program=PROGRAM)
    assert code == 3
    assert text == f"UsageError: {model}: is here already; `download: layers` is for models of the hub"


def test_an_endpoint_without_a_scheme_is_named(hub: Hub, tmp_path: Path) -> None:
    for name in ("org/repo", "hf://org/repo/tiny.gguf"):
        code, text = load(hub.url, tmp_path, name, program=PROGRAM, HF_ENDPOINT="hub.example")
        assert (code, text) == (
            3, "UsageError: HF_ENDPOINT=hub.example is no URL; write HF_ENDPOINT=https://hub.example"
        )  # fmt: skip


def test_a_hub_cannot_lead_out_of_the_cache(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.files = {"org/repo/../../../../out/tiny-Q4_K_M.gguf": model.read_bytes()}
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_cache_in_a_files_place_is_one_line(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert code == 3
    assert "headers of models cannot be kept: " in text
    assert text.endswith("XDG_CACHE_HOME=DIRECTORY keeps the cache elsewhere")


def test_a_cache_that_is_full_is_named_with_its_variable(hub: Hub, tmp_path: Path) -> None:
    """As on a full disk, a file may not grow beyond the note of the commit."""
    full = "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
    code, text = load(hub.url, tmp_path, "org/repo", program=full + PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert (
        "/headers: headers of models cannot be kept: File too large; XDG_CACHE_HOME=DIRECTORY keeps the cache" in text
    )


def test_headers_whose_note_is_gone_are_read_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    path = Path(json.loads(first[1])[0])
    path.with_name(f"{path.name}.origin.json").unlink()
    assert load(hub.url, tmp_path, "org/repo", program=PROGRAM) == first


def test_headers_that_came_in_part_are_read_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    path = Path(json.loads(load(hub.url, tmp_path, "org/repo", program=PROGRAM)[1])[0])
    path.write_bytes(path.read_bytes()[:500])
    code, text = load(hub.url, tmp_path, "org/repo", program=PROGRAM)
    assert code == 0, text
    assert path.stat().st_size == model.stat().st_size
