"""Goal: a model reference leads to a file with the right content, or to one line that names the problem."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.deploy.models.hub_choice import chosen_file, projector_among
from relayline.deploy.models.hub_download import RESERVE_BYTES
from relayline.deploy.models.hub_reference import HubFile, parse_reference
from relayline.deploy.models.model_source import local_model, resolve_model, resolve_projector
from relayline.deploy.testing.fake_hub import COMMIT, Hub, serving
from relayline.wire.common import file_hash
from relayline.wire.common.errors import ModelFileError, UsageError
from tests.support import hub_loads
from tests.support.hub_loads import AT_ONCE, forks_fixture

FIXTURES = (forks_fixture,)  # pytest finds it in the modules that name it
WHOLE = b"GGUF the whole model"
SHARDS = {f"big/model-{n:05d}-of-00003.gguf": f"GGUF shard {n}".encode() for n in (1, 2, 3)}
FILES = {"org/repo/model.gguf": WHOLE} | {f"org/repo/{name}": body for name, body in SHARDS.items()}
PROGRAM = """
import sys
from relayline.deploy.models.model_source import resolve_model
from relayline.wire.common.errors import RelaylineError
try:
    print(resolve_model(*sys.argv[1:]))
except RelaylineError as error:
    print(f"{type(error).__name__}: {error.message}")
    sys.exit(3)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(dict(FILES))) as running:
        yield running


def load(hub_url: str, home: Path, *arguments: str, program: str = PROGRAM, **environment: str) -> tuple[int, str]:
    """Resolve in a fresh process; see `hub_loads.load`."""
    return hub_loads.load(hub_url, home, *arguments, program=program, **environment)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("hf://org/repo/model.gguf", HubFile("org/repo", "model.gguf")),
        ("hf://org/repo/a/b.gguf@v1", HubFile("org/repo", "a/b.gguf", "v1")),
        ("hf://org/repo/b.gguf@refs/pr/2", HubFile("org/repo", "b.gguf", "refs/pr/2")),
        ("hf://org/repo", HubFile("org/repo", "")),
        ("org/repo:Q4_K_M", HubFile("org/repo", "", "", "Q4_K_M")),
        ("hf://org/repo:Q8_0@v1", HubFile("org/repo", "", "v1", "Q8_0")),
    ],
)
def test_a_reference_names_repository_file_and_revision(reference: str, expected: HubFile) -> None:
    assert parse_reference(reference) == expected


@pytest.mark.parametrize(
    "reference",
    ["hf://", "hf://org", "hf://org/model.gguf", "hf://org/repo/model.bin", "hf://org/repo/../../x.gguf",
     "hf://org/repo/x.gguf@", "hf:/org/repo/x.gguf@v1/"],
)  # fmt: skip
def test_a_bad_reference_to_the_hub_is_refused(reference: str) -> None:
    with pytest.raises(UsageError, match=r"hf://ORG/REPO/FILE\.gguf"):
        parse_reference(reference)


def test_any_shard_stands_for_the_whole_set() -> None:
    names = HubFile("org/repo", "big/model-00002-of-00003.gguf").shards()
    assert names == sorted(SHARDS)
    with pytest.raises(UsageError, match="shard 4 of 3"):
        HubFile("org/repo", "model-00004-of-00003.gguf").shards()


def test_a_file_is_loaded_once(hub: Hub, tmp_path: Path) -> None:
    code, first = load(hub.url, tmp_path, "hf://org/repo/model.gguf")
    assert code == 0, first
    assert Path(first).read_bytes() == WHOLE
    hub.asked.clear()
    assert load(hub.url, tmp_path, "hf://org/repo/model.gguf") == (0, first)
    assert not [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]


def test_every_shard_comes_from_the_commit_of_the_first(hub: Hub, tmp_path: Path) -> None:
    code, first = load(hub.url, tmp_path, "hf://org/repo/big/model-00002-of-00003.gguf@v1")
    assert code == 0, first
    assert first.endswith("model-00001-of-00003.gguf")
    assert {path.name: path.read_bytes() for path in Path(first).parent.iterdir()} == {
        name.removeprefix("big/"): body for name, body in SHARDS.items()
    }
    asked = [path.split("/")[3] for _, path in hub.asked if "/resolve/" in path]
    assert asked[0] == "v1"
    assert set(asked[1:]) <= {"v1", COMMIT}
    assert {path for _, path in hub.asked if path.endswith("00003-of-00003.gguf")} == {
        f"org/repo/resolve/{COMMIT}/big/model-00003-of-00003.gguf"
    }


def test_a_token_is_sent(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    assert load(hub.url, tmp_path, "hf://org/repo/model.gguf", HF_TOKEN="hf_secret")[0] == 0
    code, text = load(hub.url, tmp_path / "other", "hf://org/repo/model.gguf")
    assert code == 3
    assert "private" in text
    assert "HF_TOKEN" in text
    hub.gated = True
    assert "its authors must grant access" in load(hub.url, tmp_path / "gated", "hf://org/repo/model.gguf")[1]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("hf://org/other/model.gguf", "no such repository"),
        ("hf://org/repo/other.gguf", "no such file"),
        ("hf://org/repo/model.gguf@v9", "no revision 'v9'"),
        ("hf://or--g/repo/model.gguf", "or--g/repo"),
    ],
)
def test_a_file_missing_on_the_hub_is_one_line(hub: Hub, tmp_path: Path, reference: str, words: str) -> None:
    code, text = load(hub.url, tmp_path, reference)
    assert code == 3
    assert words in text
    assert "\n" not in text


def test_offline_uses_cached_files(hub: Hub, tmp_path: Path) -> None:
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", HF_HUB_OFFLINE="1")
    assert code == 3
    assert "HF_HUB_OFFLINE" in text
    _, path = load(hub.url, tmp_path, "hf://org/repo/model.gguf")
    hub.asked.clear()
    assert load(hub.url, tmp_path, "hf://org/repo/model.gguf", HF_HUB_OFFLINE="1") == (0, path)
    assert hub.asked == []


def test_the_directory_of_a_split_is_no_choice_of_models(tmp_path: Path) -> None:
    for name in ("stage-0.gguf", "stage-1.gguf", "tokenizer.gguf", "pipeline.json"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="holds a split of a model; give the whole model"):
        local_model(str(tmp_path))


def test_a_hub_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, text = load("http://127.0.0.1:1", tmp_path, "hf://org/repo/model.gguf", program=AT_ONCE + PROGRAM)
    assert code == 3
    assert "cannot be reached" in text
    assert "\n" not in text


@pytest.mark.parametrize("reference", ["hf://org/repo/model.gguf", "hf://org/repo"])
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("SSL_CERT_FILE", "/none/ca.pem", "=/none/ca.pem: No such file or directory; name one that is there"),
        ("ALL_PROXY", "socks5://127.0.0.1:1", "; `pip install socksio`, or unset ALL_PROXY"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:1", "; check HTTPS_PROXY and ALL_PROXY"),
        ("HF_TOKEN", "kéy", "; check HF_TOKEN"),
        ("HF_HUB_OFFLINE", "1", ": HF_HUB_OFFLINE is set; unset it"),
        ("NO_PROXY", "127.0.0.1", "the hub cannot be reached: Connection refused; check the network"),
    ],
)
def test_a_hub_that_is_not_reached_says_what_is_in_the_way(
    tmp_path: Path, reference: str, variable: str, value: str, says: str
) -> None:
    """It asked to check the network, whatever the cause."""
    code, text = load("https://127.0.0.1:1", tmp_path, reference, program=AT_ONCE + PROGRAM, **{variable: value})
    assert code == 3
    assert text.endswith(says)
    assert "\n" not in text


def test_a_repository_is_listed_once(hub: Hub, tmp_path: Path) -> None:
    hub.files = {f"org/one/{name}": WHOLE for name in ("model.gguf", "mmproj-model.gguf")}
    program = """
from relayline.deploy.models.hub_files import with_file
from relayline.deploy.models.hub_download import RESERVE_BYTES
from relayline.deploy.models.hub_reference import parse_reference
from relayline.deploy.models.model_source import projector_of
print(with_file(parse_reference("org/one")).file, projector_of("org/one"), projector_of("org/one@v1"))
"""
    code, text = load(hub.url, tmp_path, program=program)
    assert (code, text) == (0, "model.gguf mmproj-model.gguf mmproj-model.gguf")
    listed = [path for _, path in hub.asked if path.startswith("api/models/")]
    assert len(listed) == 2, "once of each revision"


def test_a_hub_that_is_away_is_asked_once_for_what_is_here(hub: Hub, tmp_path: Path) -> None:
    """Its client would try to list the files for half a minute, for a model and again for its projector."""
    hub.files = {"org/one/model.gguf": WHOLE}
    assert load(hub.url, tmp_path, "org/one")[0] == 0
    hub.is_down = True
    hub.asked.clear()
    code, text = load(hub.url, tmp_path, "org/one", program=AT_ONCE + PROGRAM)
    assert (code, "model.gguf" in text) == (0, True)
    assert len([path for _, path in hub.asked if path.startswith("api/models/")]) == 1


def test_the_hubs_client_says_once_that_it_tries_again(tmp_path: Path) -> None:
    program = AT_ONCE + "import sys\nsys.stderr = sys.stdout\n" + PROGRAM
    code, text = load("http://127.0.0.1:1", tmp_path, "org/repo", program=program)
    assert code == 3
    again, cannot = text.splitlines()
    assert again == "the hub does not answer; trying again for up to half a minute"
    assert "cannot be reached" in cannot


@pytest.mark.parametrize("reference", ["hf://org/repo/model.gguf", "hf://org/repo"])
def test_a_place_that_holds_no_downloads_names_the_variable_that_moves_it(
    hub: Hub, tmp_path: Path, reference: str
) -> None:
    """The hub answers: that its cache is a file is not the network's fault."""
    (tmp_path / "file").touch()
    code, text = load(hub.url, tmp_path / "file", reference, XDG_CACHE_HOME=str(tmp_path))
    assert code == 3
    assert "the download cannot be kept: " in text
    assert text.endswith("Not a directory; HF_HOME=DIRECTORY keeps downloads elsewhere")


def test_the_content_is_checked(hub: Hub, tmp_path: Path) -> None:
    right, wrong = hashlib.sha256(WHOLE).hexdigest(), hashlib.sha256(b"else").hexdigest()
    assert load(hub.url, tmp_path, "hf://org/repo/model.gguf", right)[0] == 0
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", wrong)
    assert code == 3
    assert right in text
    assert wrong in text


def test_paths_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(WHOLE)
    sha256 = hashlib.sha256(WHOLE).hexdigest()
    assert resolve_model(str(path)) == path
    assert resolve_model(str(path), sha256.upper()) == path
    with pytest.raises(UsageError, match="no such file"):
        resolve_model(str(tmp_path / "other.gguf"))
    with pytest.raises(UsageError, match="64 hexadecimal"):
        resolve_model(str(path), "abc")
    monkeypatch.setattr(file_hash, "_hash", lambda path: pytest.fail("an unchanged file was read again"))
    assert resolve_model(str(path), sha256) == path


def test_a_directory_a_pattern_and_any_shard_lead_to_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"big-Q4_0-{number:05d}-of-00002.gguf" for number in (1, 2)]
    for name in (*names, "mmproj-F16.gguf", "big-lora.gguf"):
        (tmp_path / name).write_bytes(WHOLE)
    first = tmp_path / names[0]
    assert resolve_model(str(tmp_path)) == first
    assert resolve_model(f"{tmp_path}/big-Q4*.gguf") == first
    assert resolve_model(str(tmp_path / names[1])) == first
    (tmp_path / "other.gguf").write_bytes(WHOLE)
    with pytest.raises(UsageError, match=rf"holds 2 models; name one of {names[0]}, other\.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(UsageError, match=r"no \.gguf file"):
        resolve_model(f"{tmp_path}/none*.gguf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="holds safetensors files; take a GGUF"):
        resolve_model(str(tmp_path / "hf"))
    # A folder of this name is meant before a repository of the hub.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "repo").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"org/repo: has no \.gguf file"):
        resolve_model("org/repo")


def test_a_repository_is_enough(hub: Hub, tmp_path: Path) -> None:
    hub.files |= {"org/many/m-Q4_K_M.gguf": WHOLE, "org/many/m-Q8_0.gguf": b"GGUF 8", "org/many/mmproj-F16.gguf": b"x"}
    hub.files |= {"org/hf/model.safetensors": b"x"}
    code, usual = load(hub.url, tmp_path, "org/many")
    assert (code, Path(usual).name) == (0, "m-Q4_K_M.gguf")
    assert Path(load(hub.url, tmp_path, "hf://org/many:q8_0")[1]).read_bytes() == b"GGUF 8"
    code, text = load(hub.url, tmp_path, "org/many:Q2_K")
    assert (code, text) == (3, "ModelFileError: hf://org/many: it has no Q2_K; name one of Q4_K_M, Q8_0 after a colon")
    assert "it holds safetensors and no GGUF; take a repository" in load(hub.url, tmp_path, "org/hf")[1]
    assert "no such repository" in load(hub.url, tmp_path, "org/none")[1]
    # Without the network the cached files are enough.
    assert load(hub.url, tmp_path, "org/many:Q4_K_M", HF_HUB_OFFLINE="1") == (0, usual)
    assert "the hub cannot be reached" in load(hub.url, tmp_path / "empty", "org/many", HF_HUB_OFFLINE="1")[1]


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (["m.gguf"], "", "m.gguf"),
        (["m-Q8_0.gguf", "mmproj-m-F16.gguf"], "", "m-Q8_0.gguf"),
        (["UD-Q4_K_XL/m-UD-Q4_K_XL-00002-of-00002.gguf", "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf"],
         "ud-q4_k_xl", "UD-Q4_K_XL/m-UD-Q4_K_XL-00001-of-00002.gguf"),
        (["BF16/m-00001-of-00001.gguf", "m-Q4_K_M.gguf"], "bf16", "BF16/m-00001-of-00001.gguf"),
        (["m.IQ2_XXS.gguf", "m.Q4_K_M.gguf", "m.imatrix.gguf"], "IQ2_XXS", "m.IQ2_XXS.gguf"),
    ],
)  # fmt: skip
def test_a_quantisation_leads_to_one_file(names: list[str], quant: str, expected: str) -> None:
    assert chosen_file(names, quant, "hf://o/n") == expected


@pytest.mark.parametrize(
    ("names", "quant", "says"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "", "it has no Q4_K_M, the default; name one of Q4_0, Q8_0"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several files are Q8_0; name one as hf://o/n/FILE: a-Q8_0.gguf, b-"),
        (["mmproj-F16.gguf"], "", "it holds only parts of models"),
        (["README.md"], "", r"it holds no \.gguf file"),
    ],
)
def test_a_repository_without_exactly_one_file_is_refused(names: list[str], quant: str, says: str) -> None:
    with pytest.raises(ModelFileError, match=f"^hf://o/n: {says}"):
        chosen_file(names, quant, "hf://o/n")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m-F16.gguf", "m-mmproj.json"], ""),
        (["mmproj-model-f16.gguf", "m-Q4_K_M.gguf"], "mmproj-model-f16.gguf"),
        (["mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["a.mmproj-Q8_0.gguf", "a.mmproj-bf16.gguf"], "a.mmproj-bf16.gguf"),
        (["mmproj.gguf", "sub/mmproj-Q5_1.gguf"], "mmproj.gguf"),
    ],
)
def test_the_projector_of_a_repository(names: list[str], expected: str) -> None:
    assert projector_among(names) == expected


def test_the_projector_comes_from_the_repository_or_the_models_directory(hub: Hub, tmp_path: Path) -> None:
    hub.files |= {"org/many/Q4_K_M/m-Q4_K_M.gguf": WHOLE, "org/many/mmproj-F16.gguf": b"GGUF p",
                  "org/many/mmproj-F32.gguf": b"x"}  # fmt: skip
    program = PROGRAM.replace(
        "print(resolve_model(*sys.argv[1:]))",
        "path = resolve_model(sys.argv[1]); print(path)\n    for name in (sys.argv[1], str(path)):\n"
        "        print(resolve_projector(name, path))",
    ).replace("import resolve_model", "import resolve_model, resolve_projector")
    code, output = load(hub.url, tmp_path, "org/many", program=program)
    assert code == 0, output
    _, by_name, by_path = output.splitlines()
    assert by_name == by_path
    assert Path(by_name).read_bytes() == b"GGUF p"
    assert not any("F32" in path for _, path in hub.asked)
    code, output = load(hub.url, tmp_path, "hf://org/repo/model.gguf", program=program)
    assert (code, output.splitlines()[1]) == (
        3, "ModelFileError: hf://org/repo: it holds no projector (mmproj*.gguf); name one as a file")  # fmt: skip
    (tmp_path / "alone.gguf").write_bytes(WHOLE)
    with pytest.raises(ModelFileError, match="no projector"):
        resolve_projector(str(tmp_path / "alone.gguf"), tmp_path / "alone.gguf")


def test_a_download_that_was_cut_short_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    name, body = "org/repo/model.gguf", b"GGUF" + bytes(range(256)) * 64
    hub.files[name] = body
    blobs = tmp_path / "hub" / "models--org--repo" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(body).hexdigest()}.relayline").write_bytes(body[:5_000])
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf")
    assert code == 0, text
    assert Path(text).read_bytes() == body
    assert hub.ranges == [f"bytes=5000-{len(body) - 1}"]


def test_what_does_not_fit_the_disk_is_refused_before_it_fills_it(hub: Hub, tmp_path: Path) -> None:
    name, body = "org/repo/model.gguf", b"GGUF" + bytes(range(256)) * 64
    hub.files[name] = body
    blobs = tmp_path / "hub" / "models--org--repo" / "blobs"
    blobs.mkdir(parents=True)
    begun = blobs / f"{hashlib.sha256(body).hexdigest()}.relayline"
    begun.write_bytes(body[:5_000])
    free_bytes = len(body) - 5_000 + RESERVE_BYTES
    program = "import shutil, types\nshutil.disk_usage = lambda _: types.SimpleNamespace(free={})\n{}"
    full = program.format(free_bytes - 1, PROGRAM)
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", program=full)
    assert code == 3
    assert "hf://org/repo/model.gguf: needs 11.1 KiB more and 64.0 MiB to spare, but only 64.0 MiB are free in" in text
    assert "HF_HOME=DIRECTORY keeps downloads elsewhere" in text
    assert (hub.sent_bytes, begun.read_bytes()) == (0, body[:5_000]), "what is here stays for the next attempt"
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", program=program.format(free_bytes, PROGRAM))
    assert (code, Path(text).read_bytes()) == (0, body)


def test_a_download_outlives_its_address(hub: Hub, tmp_path: Path) -> None:
    name, body = "org/repo/model.gguf", b"GGUF" + bytes(range(256)) * 4_096
    hub.files[name], hub.address_uses, hub.n_cuts, hub.token = body, 1, 3, "hf_secret"
    blobs = tmp_path / "hub" / "models--org--repo" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(body).hexdigest()}.relayline").write_bytes(body[:5_000])
    program = AT_ONCE + "import sys\nsys.stderr = sys.stdout\n" + PROGRAM
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", program=program, HF_TOKEN="hf_secret")
    assert (code, hub.n_cuts, hub.n_tokens_leaked) == (0, 0, 0), text
    assert Path(text.splitlines()[-1]).read_bytes() == body
    assert len(hub.ranges) == 4
    assert "Signature" not in text


@pytest.mark.parametrize("n_here", [0, 5_000])
def test_a_page_of_a_proxy_is_no_part_of_a_download(hub: Hub, tmp_path: Path, n_here: int) -> None:
    """Neither in place of what is here, nor behind it: both would cost the whole download."""
    name, body = "org/repo/model.gguf", b"GGUF" + bytes(range(256)) * 64
    hub.files[name], hub.n_pages = body, 1
    partial = tmp_path / "hub" / "models--org--repo" / "blobs" / f"{hashlib.sha256(body).hexdigest()}.relayline"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(body[:n_here])
    code, text = load(hub.url, tmp_path, f"hf://{name}")
    assert (code, text.partition("cannot be downloaded: ")[2]) == (
        3, "something else answers in its place; check the proxy, if there is one")  # fmt: skip
    assert partial.read_bytes() == body[:n_here]
    assert load(hub.url, tmp_path, f"hf://{name}")[0] == 0
    assert hub.sent_bytes == len(body) - n_here


@pytest.mark.parametrize("etag", ["", "..", "../../x"])
def test_a_name_of_content_that_is_no_file_name_is_refused(hub: Hub, tmp_path: Path, etag: str) -> None:
    body = hub.files["org/repo/model.gguf"]
    hub.etags[id(body)] = body, etag
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf")
    says = f"the hub's name for its content, {etag!r}, cannot be used; check HF_ENDPOINT"
    assert (code, text) == (3, f"ModelFileError: hf://org/repo/model.gguf: {says}")
    assert not [*tmp_path.rglob("x*"), *tmp_path.rglob("model.gguf")]


def test_a_list_of_files_without_an_end_is_refused(hub: Hub, tmp_path: Path) -> None:
    endless = (
        "import huggingface_hub, itertools, types\n"
        "def endless(*_, **__): return itertools.repeat(types.SimpleNamespace(path='a.gguf'))\n"
        "huggingface_hub.HfApi.list_repo_tree = endless\n"
    )
    code, text = load(hub.url, tmp_path, "org/repo", program=endless + PROGRAM)
    assert (code, text) == (
        3, "ModelFileError: hf://org/repo: the hub's list of its files makes no sense; check HF_ENDPOINT")  # fmt: skip


def test_a_store_that_refuses_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.n_expired = 1_000
    name, body = "org/repo/model.gguf", WHOLE
    blobs = tmp_path / "hub" / "models--org--repo" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(body).hexdigest()}.relayline").write_bytes(body[:5])
    code, text = load(hub.url, tmp_path, f"hf://{name}")
    assert (code, len(text.splitlines())) == (3, 1)
    assert text.startswith(f"ModelFileError: hf://{name}: cannot be downloaded: ")


def test_a_file_too_large_for_http_is_left_to_the_hubs_client(hub: Hub, tmp_path: Path) -> None:
    bounded = (
        "import huggingface_hub\nfrom huggingface_hub import constants\nconstants.MAX_HTTP_DOWNLOAD_SIZE = 8\n"
        "huggingface_hub.hf_hub_download = lambda repo, file, revision: f'by xet: {file}'\n"
    )
    code, text = load(hub.url, tmp_path, "hf://org/repo/model.gguf", program=bounded + PROGRAM)
    assert (code, text) == (0, "by xet: model.gguf")


def test_a_checksum_of_one_shard_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.gguf"
    path.write_bytes(WHOLE)
    with pytest.raises(UsageError, match="single file only"):
        resolve_model(str(path), hashlib.sha256(WHOLE).hexdigest())
