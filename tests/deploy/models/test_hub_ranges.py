"""Goal: weights are read from the hub in few requests, across breaks and expired addresses, or refused in one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from relayline.coordinator.model.gguf_file import open_model
from relayline.deploy.models.hub_client import first_line, headers_at
from relayline.deploy.testing.fake_hub import COMMIT, Hub, serving
from tests.support.hub_loads import forks_fixture, load
from tests.support.shards import shard
from tests.support.tiny_models import make_tiny

# Reads some tensors of the first file, as a stage's artifact is read. Waits are none; what was waited for is counted.
PROGRAM = """
import hashlib, json, sys, threading
from pathlib import Path
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.origin import Origin
from relayline.deploy.models import hub_patience, hub_ranges
from relayline.wire.common.errors import RelaylineError
path, origin, names = sys.argv[1], Origin(**json.loads(sys.argv[2])), sys.argv[3].split(",")
hub_ranges.RETRY_FIRST_S = hub_ranges.RETRY_MAX_S = 0.0
tensors = open_model(Path(path)).tensors
wanted = [tensors[name] for name in names]
end = max(tensor.offset + tensor.size_bytes for tensor in wanted)
weights = hub_ranges.HubWeights([origin], threading.Event(), hub_patience.Patience())
try:
    found = [b"".join(bytes(part) for part in weights.read(each, each.offset, each.offset + each.size_bytes, end))
             for each in wanted]
    print(json.dumps([hashlib.sha256(data).hexdigest() for data in found]))
except RelaylineError as error:
    print(f"{type(error).__name__}: {error.message}")
    sys.exit(3)
"""
NAMES = ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.3.ffn_up.weight")
FIXTURES = (forks_fixture,)  # pytest finds it in the modules that name it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny-Q4_K_M.gguf", n_layers=4, tokenizer=True)


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    with serving(Hub({f"org/repo/{model.name}": model.read_bytes()})) as running:
        yield running


def read(
    hub: Hub, home: Path, model: Path, program: str = PROGRAM, token: str = "", **changes: object
) -> tuple[int, str]:
    content = model.read_bytes()
    origin = {"repo": "org/repo", "file": model.name, "commit": COMMIT, "etag": hashlib.sha256(content).hexdigest(),
              "size_bytes": len(content)} | changes  # fmt: skip
    words = (str(model), json.dumps(origin), ",".join(NAMES))
    return load(hub.url, home, *words, program=program, HF_TOKEN=token)


def edges(hub: Hub) -> list[list[str]]:
    """Return the first and last byte of each request for a part."""
    return [each.removeprefix("bytes=").split("-") for each in hub.ranges]


def methods(hub: Hub) -> list[str]:
    """Return how files were asked for; the hub's client asks for other things, too."""
    return [method for method, path in hub.asked if "/resolve/" in path]


def hashes(model: Path) -> list[str]:
    content, tensors = model.read_bytes(), open_model(model).tensors
    places = [(tensors[name].offset, tensors[name].size_bytes) for name in NAMES]
    return [hashlib.sha256(content[start : start + size_bytes]).hexdigest() for start, size_bytes in places]


def test_tensors_of_one_file_are_one_request(hub: Hub, model: Path, tmp_path: Path) -> None:
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text)) == (0, hashes(model))
    tensors = open_model(model).tensors
    first, last = tensors[NAMES[0]], tensors[NAMES[-1]]
    assert hub.ranges == [f"bytes={first.offset}-{last.offset + last.size_bytes - 1}"]


def test_a_file_is_read_from_its_first_byte(hub: Hub, model: Path, tmp_path: Path) -> None:
    whole = """
class Whole:
    file_index, offset, size_bytes = 0, 0, origin.size_bytes
wanted, end = [Whole], origin.size_bytes
weights ="""
    code, text = read(hub, tmp_path, model, program=PROGRAM.replace("weights =", whole, 1))
    assert (code, json.loads(text)) == (0, [hashlib.sha256(model.read_bytes()).hexdigest()])


def test_a_break_goes_on_at_the_next_byte(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_cuts = 4
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text), hub.n_cuts) == (0, hashes(model), 0)
    starts = [int(each.removeprefix("bytes=").split("-")[0]) for each in hub.ranges]
    assert starts == sorted(set(starts)), "no byte was asked for again"


def test_fewer_bytes_than_were_asked_for_go_on_at_the_next_byte(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_short = 4
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text), hub.n_short) == (0, hashes(model), 0)
    starts = [int(start) for start, _ in edges(hub)]
    assert starts == sorted(set(starts)), "no byte was asked for again"
    assert len(starts) == 5


def test_an_address_that_has_expired_is_asked_for_again(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_expired = 1
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text)) == (0, hashes(model))
    assert methods(hub) == ["HEAD", "GET", "HEAD", "GET"]


def test_every_request_may_need_a_new_address(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.address_uses = 1
    short = "from relayline.deploy.models import hub_ranges\nhub_ranges.REQUEST_BYTES_MAX = 4_096\n"
    code, text = read(hub, tmp_path, model, program=short + PROGRAM)
    assert (code, json.loads(text)) == (0, hashes(model))
    assert len(hub.ranges) > 2
    assert max(int(end) - int(start) for start, end in edges(hub)) < 4_096
    assert len({start for start, _ in edges(hub)}) == len(hub.ranges), "no byte comes twice"


def test_the_token_is_for_the_hub_alone(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    code, text = read(hub, tmp_path, model, token="hf_secret")
    assert (code, json.loads(text), hub.n_tokens_leaked) == (0, hashes(model), 0)
    assert read(hub, tmp_path, model)[0] == 3, "it was needed"


def test_a_repository_may_have_another_name_now(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.moved["old/name"] = "org/repo"
    code, text = read(hub, tmp_path, model, repo="old/name")
    assert (code, json.loads(text)) == (0, hashes(model))


def test_another_part_than_was_asked_for_is_no_weights(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.sends_other_parts = True
    code, text = read(hub, tmp_path, model)
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.endswith(
        "the hub cannot be reached: something else answers in its place; check the proxy, if there is one"
    )


def test_a_page_in_the_files_place_is_no_weights(hub: Hub, model: Path, tmp_path: Path) -> None:
    page = """
from relayline.deploy.models import hub_ranges
located = hub_ranges.locate
def locate(*words, **flags):
    found = located(*words, **flags)
    object.__setattr__(found, "url", found.url.replace("tiny-Q4_K_M.gguf", "page.html"))
    return found
hub_ranges.locate = locate
"""
    hub.files["org/repo/page.html"], hub.knows_ranges = bytes(2 * model.stat().st_size), False
    code, text = read(hub, tmp_path, model, program=page + PROGRAM)
    assert (code, len(text.splitlines())) == (3, 1)
    assert "something else answers in its place" in text


def test_no_signed_address_is_shown() -> None:
    said = "Client error '404 Not Found' for url 'https://store.example/a/b?Expires=1&Signature=x'\nMore: x"
    assert first_line(ValueError(said)) == "Client error '404 Not Found' for url 'https://store.example/a/b'"


@pytest.mark.parametrize(
    ("location", "is_sent"),
    [
        ("https://hub.example/org/repo/resolve/main/f.gguf", True),
        ("https://HUB.example:443/other", True),
        ("http://hub.example/org/repo/resolve/main/f.gguf", False),  # in plain text
        ("https://hub.example:444/f", False),
        ("https://store.hub.example/f", False),
        (f"{constants.HUGGINGFACE_CO_URL_HOME}f", True),  # of a mirror that leads on
    ],
)
def test_who_gets_the_token(location: str, is_sent: bool) -> None:
    headers = headers_at(location, "https://hub.example/org/repo/resolve/main/f.gguf", {"Authorization": "t", "a": "b"})
    assert headers == ({"Authorization": "t", "a": "b"} if is_sent else {"a": "b"})


def test_a_hub_that_refuses_for_good_is_one_line(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_expired = 1_000
    code, text = read(hub, tmp_path, model)
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith(f"ModelFileError: hf://org/repo/{model.name}: cannot be downloaded: ")
    assert methods(hub) == ["HEAD", "GET", "HEAD", "GET"]


def test_a_hub_with_too_much_to_do_is_asked_again_and_then_left_to_the_stage(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    hub.n_busy = 3
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text)) == (0, hashes(model))
    hub.n_busy = 1_000
    code, text = read(hub, tmp_path, model)
    assert (code, text) == (
        3, f"NotReadyError: hf://org/repo/{model.name}: the hub answers 503 Service Unavailable"
    )  # fmt: skip


# Time passes where something waits for the hub, and nowhere else; the waits are printed.
CLOCK = """
import threading, types
from relayline.deploy.models import hub_patience, hub_ranges
clock, waits = [0.0], []
class Clocked(threading.Event):
    def wait(self, seconds):
        waits.append(seconds)
        clock[0] += seconds
        return self.is_set()
hub_patience.time = types.SimpleNamespace(monotonic=lambda: clock[0])
"""
# Two stages read, and each does so again after an error, as stages do.
TWICE = (
    PROGRAM.partition("weights =")[0]
    + """
hub_ranges.RETRY_FIRST_S, hub_ranges.RETRY_MAX_S = 0.2, 5.0
patience = hub_patience.Patience()
for stage in sys.argv[4].split(","):
    try:
        weights = hub_ranges.HubWeights([origin], Clocked(), patience)
        for each in wanted:
            for part in weights.read(each, each.offset, each.offset + each.size_bytes, end):
                pass
        print(f"{stage}: done")
    except RelaylineError as error:
        print(f"{stage}: {error.message.partition(': ')[2]}")
    print(waits)
    waits.clear()
"""
)


def read_by_stages(hub: Hub, home: Path, model: Path, stages: str, first: str = "") -> list[str]:
    content = model.read_bytes()
    origin = {"repo": "org/repo", "file": model.name, "commit": COMMIT, "size_bytes": len(content),
              "etag": hashlib.sha256(content).hexdigest()}  # fmt: skip
    words = (str(model), json.dumps(origin), ",".join(NAMES), stages)
    code, text = load(hub.url, home, *words, program=CLOCK + first + TWICE)
    assert code == 0, text
    return text.splitlines()


@pytest.mark.parametrize(
    ("busy", "seconds"),
    [
        ((429, {"Retry-After": "40"}), 40.0),
        ((503, {"retry-after": " 40 "}), 40.0),
        ((503, {"Retry-After": "Sun, 09 Sep 2001 01:47:20 GMT", "Date": "Sun, 09 Sep 2001 01:46:40 GMT"}), 40.0),
        ((429, {"RateLimit": '"api";r=0;t=40', "Retry-After": "7"}), 40.0),
        ((429, {"Retry-After": "4000"}), 300.0),
    ],
)
def test_a_hub_that_asks_for_time_gets_it_and_the_stage_the_reason(
    hub: Hub, model: Path, tmp_path: Path, busy: tuple[int, dict[str, str]], seconds: float
) -> None:
    hub.n_busy, hub.busy = 1, busy
    name = {429: "429 Too Many Requests", 503: "503 Service Unavailable"}[busy[0]]
    asked = "4,000" if seconds > 40.0 else "40"
    told, waited, done, waited_again, *rest = read_by_stages(hub, tmp_path, model, "one,one")
    assert (told, waited) == (f"one: the hub answers {name} and asks to wait {asked} s", "[]"), "told at once"
    assert (done, waited_again, rest) == ("one: done", f"[{seconds}]", []), "the next attempt waits"


def test_a_wish_may_have_more_digits_than_a_number(hub: Hub, model: Path, tmp_path: Path) -> None:
    for header in ({"Retry-After": "9" * 400}, {"RateLimit": f'"api";r=0;t={"9" * 400}'}):
        hub.n_busy, hub.busy = 1, (429, header)
        told, _ = read_by_stages(hub, tmp_path, model, "one")
        assert told == "one: the hub answers 429 Too Many Requests and asks to wait 1,000,000,000 s"


def test_all_stages_leave_a_hub_alone_that_one_was_asked_to(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_busy, hub.busy = 2, (429, {"Retry-After": "40"})
    said = read_by_stages(hub, tmp_path, model, "one,two,two")
    asks = "the hub answers 429 Too Many Requests and asks to wait 40 s"
    assert said == [f"one: {asks}", "[]", f"two: {asks}", "[40.0]", "two: done", "[40.0]"]


def test_a_stage_that_reads_already_is_told_why_it_waits(hub: Hub, model: Path, tmp_path: Path) -> None:
    """Each request brings 4,096 bytes; after the first one another stage is asked for time."""
    other = """
hub_ranges.REQUEST_BYTES_MAX, ask = 4_096, hub_ranges.bytes_between
def bytes_between(*words):
    patience._until_s, patience.why = clock[0] + 40.0, "asked of another"
    return ask(*words)
hub_ranges.bytes_between = bytes_between
"""
    said = read_by_stages(hub, tmp_path, model, "one", first=other)
    assert (said, len(hub.ranges)) == (["one: asked of another", "[]"], 1)


def test_a_short_wish_is_no_trouble(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.n_busy, hub.busy = 2, (503, {"Retry-After": "3"})
    assert read_by_stages(hub, tmp_path, model, "one") == ["one: done", "[3.0, 3.0]"]


def test_a_hub_that_is_gone_is_retried_by_the_stage(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:1"
    code, text = read(hub, tmp_path, model)
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith(f"NotReadyError: hf://org/repo/{model.name}: the hub cannot be reached: ")


def test_a_hub_that_does_not_answer_is_left_to_the_stage_after_one_request(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    slow = """
import types
from relayline.deploy.models import hub_ranges
clock = [0.0]
hub_ranges.time = types.SimpleNamespace(monotonic=lambda: clock[0])
def locate(*words, **flags):
    clock[0] += 10.0
    print("asked")
    raise TimeoutError("timed out")
hub_ranges.locate = locate
"""
    code, text = read(hub, tmp_path, model, program=slow + PROGRAM)
    named = f"hf://org/repo/{model.name}"
    assert (code, text.splitlines()) == (3, ["asked", f"NotReadyError: {named}: the hub cannot be reached: timed out"])


@pytest.mark.parametrize("change", [{"etag": "0" * 64}, {"size_bytes": 5}])
def test_another_content_at_the_same_place_is_refused(
    hub: Hub, model: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    code, text = read(hub, tmp_path, model, **change)
    named = f"hf://org/repo/{model.name}"
    assert (code, text) == (3, f"ModelFileError: {named}: the hub has another file there now; start the pipeline again")


def test_a_file_that_is_gone_is_refused(hub: Hub, model: Path, tmp_path: Path) -> None:
    code, text = read(hub, tmp_path, model, file="gone.gguf")
    assert (code, text) == (3, "ModelFileError: hf://org/repo/gone.gguf: the repository has no such file")


def test_a_hub_without_ranges_serves_small_files(hub: Hub, model: Path, tmp_path: Path) -> None:
    hub.knows_ranges = False
    code, text = read(hub, tmp_path, model)
    assert (code, json.loads(text)) == (0, hashes(model))


def test_shards_are_read_from_their_own_files(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = shard(model, tmp_path / "shards", 2)
    shards = open_model(first)
    hub.files = {f"org/repo/{file.path.name}": file.path.read_bytes() for file in shards.files}
    program = PROGRAM.replace("HubWeights([origin]", "HubWeights([Origin(**each) for each in json.loads(sys.argv[4])]")
    origins = [
        {"repo": "org/repo", "file": file.path.name, "commit": COMMIT, "size_bytes": file.size_bytes,
         "etag": hashlib.sha256(file.path.read_bytes()).hexdigest()} for file in shards.files
    ]  # fmt: skip
    words = (str(first), json.dumps(origins[0]), ",".join(NAMES), json.dumps(origins))
    code, text = load(hub.url, tmp_path / "home", *words, program=program)
    assert (code, json.loads(text)) == (0, hashes(model))
    assert len({path for method, path in hub.asked if method == "GET" and "/resolve/" in path}) == 2
