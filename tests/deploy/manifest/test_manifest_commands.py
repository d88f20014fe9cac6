"""`relayline init` and `relayline render` on the command line, commands in rendered files, documented samples."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from relayline.coordinator.model.split import split_model
from relayline.deploy.cli import main as cli
from relayline.deploy.cli.init import machine_facts
from relayline.deploy.cli.render import models_dir
from relayline.deploy.manifest import load_manifest, parse_manifest
from relayline.deploy.manifest.starter import MachineFacts, ModelChoice, StageHost, pipeline_name, starter_text
from relayline.deploy.render import inside
from relayline.deploy.render.targets import TARGETS, render
from relayline.deploy.testing.fake_hub import Hub, hub_environment, serving
from relayline.deploy.testing.paths import ROOT
from relayline.deploy.testing.processes import COMMAND, TIMEOUT_S, relayline
from relayline.wire.common.errors import UsageError
from tests.deploy.manifest.test_manifest import SMALLEST
from tests.support.golden_renders import CASES, golden_files

DEMO = ROOT / "deploy" / "demo" / "relayline-demo.gguf"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "deploy").rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


# --- init -------------------------------------------------------------------------------------------------------------


def test_init_writes_a_manifest_that_loads_and_never_overwrites(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.yaml"
    done = relayline("init", "--model", DEMO, "--output", out)
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(out)
    assert manifest.name == "relayline-demo"
    assert manifest.model_path == DEMO
    assert "# llama, 8 layers" in out.read_text()
    assert sum(stage.threads for stage in manifest.stages) <= max(2, machine_facts().n_cores)
    before = out.read_bytes()
    again = relayline("init", "--output", out)
    assert again.returncode == 2
    assert again.stderr == f"relayline: error: {out} already exists; give --force to replace it, or another --output\n"
    assert out.read_bytes() == before
    assert relayline("init", "--output", out, "--force").returncode == 0
    assert load_manifest(out).model_path == tmp_path / "model.gguf"


def test_init_names_files_as_they_are_on_the_disk_in_a_locale_of_other_letters(tmp_path: Path) -> None:
    model = tmp_path / "m\xf6del.gguf"
    model.write_bytes(DEMO.read_bytes())
    out = tmp_path / "p.yaml"
    other = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "relayline.deploy.cli", "init", "--model", str(model), "--output", str(out)],
        capture_output=True, text=True, check=False, env=os.environ | other,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert load_manifest(out).model_path == model


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "none.gguf"], 2, "none.gguf: no such file"),
        (
            ["--model", "hf://org"],
            2,
            "'hf://org' is not a model on the hub; write hf://ORG/REPO/FILE.gguf, hf://ORG/REPO",
        ),
        (["--model", "hf://org/repo/a b.gguf"], 2, "a b.gguf: a manifest names files of letters, digits"),
        (["--model", str(Path(__file__))], 1, "test_manifest_commands.py"),
        (["--output", "none/x.yaml"], 2, "none/x.yaml: there is no directory none"),
    ],
)
def test_init_refuses_in_one_line(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    done = relayline("init", "--output", tmp_path / "x.yaml", *arguments)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert not (tmp_path / "x.yaml").exists()


def test_init_names_a_model_of_the_hub_without_asking_it(tmp_path: Path) -> None:
    out, named = tmp_path / "x.yaml", "hf://org/repo/qwen3-8b-q4_k_m-00001-of-00002.gguf@v1"
    done = relayline("init", "--model", named, "--hosts", "127.0.0.1,192.0.2.7", "--output", out)
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(out)
    assert (manifest.spec.model.hf, manifest.model_path, manifest.name) == (named, None, "qwen3-8b-q4-k-m")
    whole = out.read_text().replace("    # download: layers", "    download: layers")
    out.write_text(whole)
    assert load_manifest(out).spec.model.download == "layers", "the line that is commented out can be taken"


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("org/repo:Q8_0", "hf://org/repo/m-Q8_0.gguf"),
        ("org/repo", "hf://org/repo/m-Q4_K_M-00001-of-00002.gguf"),
        ("hf://org/repo:q8_0@v1", "hf://org/repo/m-Q8_0.gguf@v1"),
        ("org/repo:Q2_K", "hf://org/repo: it has no Q2_K; name one of Q4_K_M, Q8_0 after a colon"),
    ],
)
def test_init_names_the_file_that_a_quantisation_means(named: str, found: str, tmp_path: Path) -> None:
    files = ("m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")
    out = tmp_path / "x.yaml"
    with serving(Hub({f"org/repo/{file}": b"" for file in files})) as hub:
        environment = hub_environment(hub.url, tmp_path / "home")
        command = [*COMMAND, "init", "--model", named, "--output", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if found.startswith("hf://org/repo/"):
        assert done.returncode == 0, done.stderr
        assert load_manifest(out).spec.model.hf == found
    else:
        assert (done.returncode, done.stderr) == (1, f"relayline: error: {found}\n")
        assert not out.exists()
    assert all("/resolve/" not in path for _, path in hub.asked), "no file is read"


def test_init_writes_no_manifest_of_one_stage_of_a_split(tmp_path: Path) -> None:
    split_model(DEMO, tmp_path, n_stages=2)
    part, out = tmp_path / "stage-0.gguf", tmp_path / "x.yaml"
    done = relayline("init", "--model", part, "--output", out)
    assert done.returncode == 1
    assert done.stderr == f"relayline: error: {part}: is already one stage of a split; give the whole model\n"
    assert not out.exists()


def test_init_writes_a_stage_for_each_host(tmp_path: Path) -> None:
    out = tmp_path / "pipeline.yaml"
    done = relayline("init", "--model", DEMO, "--hosts", "127.0.0.1, 192.0.2.7", "--output", out)
    assert done.returncode == 0, done.stderr
    here, there = load_manifest(out).stages
    assert (here.name, here.host, there.name, there.host) == ("stage-0", "127.0.0.1", "stage-1", "192.0.2.7")
    assert here.memory_gib is not None
    assert there.memory_gib is None, "this machine's memory says nothing about another's"
    assert here.threads == machine_facts().n_cores
    refused = relayline("init", "--hosts", "192.0.2.7,,192.0.2.8", "--output", tmp_path / "other.yaml")
    assert refused.returncode == 2
    assert "give names or addresses without ports, separated by commas" in refused.stderr
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("has_gpu_build", [False, True])
def test_stages_of_several_machines_share_only_this_one(has_gpu_build: bool) -> None:
    hosts = [StageHost("a", "10.0.0.1", is_here=True), StageHost("b", "b.lan", is_here=False)]
    hosts.append(StageHost("c", "localhost", is_here=True))
    facts = MachineFacts(8, 20.0, has_gpu_build)
    text = starter_text(facts, ModelChoice("m.gguf", "x"), "schema.json", hosts)
    a, b, c = parse_manifest(text.encode(), "new").stages
    assert [stage.host for stage in (a, b, c)] == ["10.0.0.1", "b.lan", "localhost"]
    assert [(stage.threads, stage.memory_gib) for stage in (a, b, c)] == [(4, 8.0), (0, None), (4, 8.0)]
    assert [stage.device for stage in (a, b, c)] == (["gpu", "cpu", "gpu"] if has_gpu_build else ["cpu"] * 3)
    shown = re.sub(r"(?m)^      # memoryGib", "      memoryGib", text)
    assert parse_manifest(shown.encode(), "new").stages[1].memory_gib == 16


@pytest.mark.parametrize("has_gpu_build", [False, True])
@pytest.mark.parametrize("n_cores", [1, 2, 64])
@pytest.mark.parametrize("memory_gib", [0.4, 16.0, 2048.0])
@pytest.mark.parametrize("path", ["m.gguf", "/a b/ü: #x.gguf", "C'\"\\.gguf", "~/0.gguf"])
def test_every_machine_gets_a_manifest_that_loads(
    n_cores: int, memory_gib: float, has_gpu_build: bool, path: str
) -> None:
    text = starter_text(MachineFacts(n_cores, memory_gib, has_gpu_build), ModelChoice(path, "about: it"), "schema.json")
    manifest = parse_manifest(text.encode(), "new")
    assert manifest.spec.model.path == path
    assert [stage.device for stage in manifest.stages] == (["gpu"] if has_gpu_build else ["cpu", "cpu"])
    assert manifest.all_local


def test_commented_lines_of_a_new_manifest_are_valid_too() -> None:
    """Every comment that shows a key can be uncommented, one block at a time."""
    text = starter_text(MachineFacts(4, 16.0, False), ModelChoice("m.gguf", "x"), "schema.json")
    blocks = re.findall(r"(?m)^  # \w+:\n(?:  #   .*\n)+", text)
    assert len(blocks) == 4
    for block in blocks:
        parse_manifest(text.replace(block, re.sub(r"(?m)^  # ", "  ", block)).encode(), "new")
    remote = re.search(r"(?m)^    # - name: box2\n(?:    #   .*\n)+", text)
    assert remote is not None
    manifest = parse_manifest(text.replace(remote[0], re.sub(r"(?m)^    # ", "    ", remote[0])).encode(), "new")
    assert manifest.stages[-1].host == "192.168.1.12"
    assert manifest.uses_tls


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Meta-Llama-3.1-8B-Q4_K_M.gguf", "meta-llama-3-1-8b-q4-k-m"),
        ("/x/m-00001-of-00003.gguf", "m"),
        ("7b.gguf", "model-7b"),
        ("模型.gguf", "model"),
        ("", "model"),
        ("a" * 99, "a" * 40),
    ],
)
def test_names_come_from_files(path: str, name: str) -> None:
    assert pipeline_name(path) == name


# --- render -----------------------------------------------------------------------------------------------------------


def test_render_prints_or_writes(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(SMALLEST)
    shown = relayline("render", tmp_path / "m.yaml", "--target", "compose")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr == ""
    assert shown.stdout == render(load_manifest(tmp_path / "m.yaml"), "compose", ".")["compose.yaml"]
    done = relayline("render", tmp_path / "m.yaml", "--target", "kubernetes", "--output", tmp_path / "out")
    assert done.returncode == 0
    assert f"wrote {tmp_path / 'out' / 'stages.yaml'}\n" in done.stderr
    assert "note: stage 'stage-0' has no memoryGib" in done.stderr
    (tmp_path / "out" / "stages.yaml").write_text("mine")
    refused = relayline("render", tmp_path / "m.yaml", "--target", "kubernetes", "--output", tmp_path / "out")
    assert refused.returncode == 2
    assert "stages.yaml was not made by this command or was edited since" in refused.stderr


def test_mistakes_of_a_manifest_are_one_a_line_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(SMALLEST + "  contxt: {}\n  stages: 0\n")
    done = relayline("render", path, "--target", "compose")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f'relayline: error: {path}:6: unknown key "contxt" in spec; did you mean context?',
        f"relayline: error: {path}:7: spec.stages: must be at least 1, not 0",
    ]


@pytest.mark.parametrize(
    ("model", "compose_dir", "seen"),
    [
        ("model.gguf", "", "."),
        ("models/m.gguf", "", "./models"),
        ("models/m.gguf", "out", "../models"),
        ("../m.gguf", "", ".."),
        ("/data/m.gguf", "out", "/data"),
    ],
)
def test_compose_finds_the_models_directory(model: str, compose_dir: str, seen: str, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(SMALLEST.replace("model.gguf", model))
    assert models_dir(load_manifest(tmp_path / "m.yaml"), tmp_path / compose_dir) == seen


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_commands_in_a_rendered_file_make_the_objects_it_names(
    case: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for keys in ("api-keys", "api-keys-chat", "api-keys-chat-2"):
        (tmp_path / keys).write_text("k" * 32 + "\n")
    files = {name: path.read_text() for name, path in golden_files(*case).items()}
    comments = [line[1:].strip() for text in files.values() for line in text.splitlines() if line.startswith("#")]
    for line in comments:
        if line.startswith("relayline certs"):
            command = shlex.split(line.partition(" && ")[0])
            done = CliRunner().invoke(cli.relayline, command[1:], catch_exceptions=False)
            assert done.exit_code == 0, done.output
    made = {}  # secret -> its keys
    for line in comments:
        if " create secret generic " in line:
            _, name, *sources = shlex.split(line.partition(" create secret ")[2], comments=True)
            made[name] = set().union(*(_secret_keys(source) for source in sources))
    documents = [document for text in files.values() for document in yaml.safe_load_all(text)]
    certificates = (each for each in documents if each.get("kind") == "Certificate")
    made |= {each["spec"]["secretName"]: {"ca.crt", "tls.crt", "tls.key"} for each in certificates}
    for document in documents:
        for name, keys in _secrets_of(document):
            assert keys <= made[name], f"{name} lacks {keys - made[name]}"
        for secret in document.get("secrets", {}).values():
            assert Path(secret["file"]).is_file()


def _secret_keys(argument: str) -> set[str]:
    """The keys that kubectl would make from one --from-file."""
    key, equals, path = argument.removeprefix("--from-file=").partition("=")
    source = Path(path if equals else key)
    assert source.exists()
    return {key} if equals else {entry.name for entry in source.iterdir()} if source.is_dir() else {source.name}


def _secrets_of(value: object) -> list[tuple[str, set[str]]]:
    """Every secret that a volume anywhere inside refers to, with the keys it wants."""
    if isinstance(value, dict):
        inner = [found for part in value.values() for found in _secrets_of(part)]
        if isinstance(value.get("secretName"), str):
            inner.append((value["secretName"], {item["key"] for item in value.get("items", ())}))
        return inner
    return [found for part in value for found in _secrets_of(part)] if isinstance(value, list) else []


# --- documents about manifests ----------------------------------------------------------------------------------------


def samples() -> list[tuple[str, str]]:
    """Every manifest that comes along: files, and blocks of YAML in the documentation."""
    files = [(path, path.read_text()) for path in sorted((ROOT / "deploy").rglob("*.yaml"))]
    return [(str(path.relative_to(ROOT)), text) for path, text in files if "kind: Pipeline" in text] + [
        (f"{path.relative_to(ROOT)}-{index}", block)
        for path in DOCUMENTS
        for index, block in enumerate(re.findall(r"(?ms)^ *```yaml\n(.*?)^ *```", path.read_text()))
        if "kind: Pipeline" in block
    ]


def test_samples_are_found() -> None:
    assert len(samples()) > len(list((ROOT / "deploy" / "examples").glob("*.yaml")))


@pytest.mark.parametrize(("name", "text"), samples(), ids=lambda value: value if "\n" not in value else "")
def test_every_sample_is_read_and_rendered(name: str, text: str) -> None:
    manifest = parse_manifest(text.encode(), name)
    n_rendered = 0
    for target in TARGETS:
        try:
            n_rendered += len(render(manifest, target)) > 0
        except UsageError:
            continue
    assert n_rendered


# --- the container ----------------------------------------------------------------------------------------------------


def test_the_container_file_and_the_renders_agree() -> None:
    text = (ROOT / "deploy" / "Containerfile").read_text()
    assert f"USER {inside.USER_ID}:{inside.USER_ID}" in text
    assert f"XDG_CACHE_HOME={inside.STATE_DIR}" in text
    assert 'ENTRYPOINT ["relayline"]' in text
    bases = {name: base for base, name in re.findall(r"(?m)^FROM (\S+) AS (\S+)$", text)}
    chosen = [base for base in bases.values() if base.endswith("-${ACCELERATOR}")]
    assert len(chosen) == 2
    assert {base.replace("${ACCELERATOR}", kind) for base in chosen for kind in ("cpu", "cuda")} <= bases.keys()
    sources = " ".join(re.findall(r"(?m)^COPY (?!--from)(.+) \S+$", text)).split()
    for copied in sources:
        assert (ROOT / copied).exists()
    ignored = (ROOT / "deploy" / "Containerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == {copied for copied in sources if "/" not in copied}
