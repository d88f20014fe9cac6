"""Mistakes of a user: one clear line on stderr and the right exit code, never a traceback."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from relayline.deploy.cli import main as cli
from relayline.deploy.testing.processes import relayline, running
from tests.support.tiny_models import make_tiny

N_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=N_LAYERS)


@pytest.fixture(scope="module")
def split(model: Path) -> Path:
    directory = model.parent / "split"
    done = relayline("split", model, "--stages", "2", "--out", directory)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture
def taken_port() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def refused(code: int, *arguments: str | Path, says: str) -> None:
    """The command ends with `code` and its last line is one error line that contains `says`."""
    done = relayline(*arguments)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("relayline: error: ")]
    assert len(lines) == 1, done.stderr
    assert says in lines[0]


def refused_here(code: int, *arguments: str | Path, says: str) -> None:
    """As `refused`, in this process."""
    stderr = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["relayline", *map(str, arguments)]))
        stack.enter_context(mock.patch.object(cli, "restart_with_huge_pages"))  # which may replace the process
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(stderr))
        ended = stack.enter_context(pytest.raises(SystemExit))
        cli.main()
    assert ended.value.code == code, stderr.getvalue()
    lines = [line for line in stderr.getvalue().splitlines() if line.startswith("relayline: error: ")]
    assert len(lines) == 1, stderr.getvalue()
    assert says in lines[0]


HEAVY = {"aiohttp", "grpc", "llama_cpp", "numpy", "opentelemetry", "pydantic", "uvloop"}
OTHERS = {"asyncio", "relayline.wire.settings.table"}  # what nothing about relayline as a whole needs


@pytest.mark.parametrize(
    ("words", "unloaded"),
    [
        ("--help", HEAVY | OTHERS),
        ("--version", HEAVY | OTHERS),
        ("status", HEAVY),
        ("up --help", HEAVY),
        ("move --help", HEAVY),
    ],
)
def test_commands_that_compute_nothing_load_no_heavy_module(words: str, unloaded: set[str]) -> None:
    program = (
        f"import sys; sys.argv = ['relayline', *{words.split()!r}]\n"
        "from relayline.deploy.cli.main import main\n"
        f"try: main()\nfinally: print('loaded:', *sorted({unloaded!r} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("loaded:\n")


def test_help_lists_every_subcommand_as_its_module_has_it() -> None:
    listed = CliRunner().invoke(cli.relayline, ["--help"]).stdout
    context = click.Context(cli.relayline, info_name="relayline")
    imported = {name: cli.relayline.get_command(context, name) for name in cli.COMMANDS}
    words = " ".join(listed.split())
    assert sorted(name for names in cli.grouped().values() for name in names) == sorted(cli.COMMANDS)
    for name, command in imported.items():
        assert command is not None
        assert f" {name} {' '.join(command.get_short_help_str(90).split())}" in words


def test_help_reads_no_more_of_a_module_than_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """To parse whole modules took longer than all else that the help does."""
    parsed: list[str] = []
    parse = ast.parse
    monkeypatch.setattr(cli.ast, "parse", lambda source: parsed.append(source) or parse(source))
    CliRunner().invoke(cli.relayline, ["--help"])
    assert len(parsed) == len(cli.COMMANDS)
    assert all(source.count("\ndef ") == 1 and "\nimport " not in source for source in parsed)


@pytest.mark.parametrize("command", ["inspect", "split", "up", "certify"])
def test_files_that_are_no_model(command: str, model: Path, tmp_path: Path) -> None:
    extra = {
        "split": ["--stages", "2", "--out", str(tmp_path / "out")],
        "up": ["--http", "127.0.0.1:0", "--model"],
    }.get(command, [])
    before, after = (extra, []) if command == "up" else ([], extra)
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"this is not a model" * 100)
    refused(1, command, *before, garbage, *after, says="garbage.gguf")
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(model.read_bytes()[:-5000])
    refused(1, command, *before, truncated, *after, says="truncated.gguf")
    refused(2, command, *before, tmp_path / "nowhere.gguf", *after, says="nowhere.gguf")


def test_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "gemma9")
    writer.add_block_count(4)
    writer.add_embedding_length(64)
    writer.add_vocab_size(32)
    for name in ("token_embd", *(f"blk.{layer}.attn_norm" for layer in range(4))):
        writer.add_tensor(f"{name}.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(1, "split", path, "--stages", "2", "--out", tmp_path / "out", says="gemma3 among them")
    assert not (tmp_path / "out" / "pipeline.json").exists()


def test_a_model_may_be_a_directory_and_not_a_name_of_the_hub(model: Path, tmp_path: Path) -> None:
    (tmp_path / "only.gguf").symlink_to(model)
    facts = relayline("inspect", tmp_path, "--json")
    assert json.loads(facts.stdout)["path"].endswith("only.gguf")
    (tmp_path / "empty").mkdir()
    refused_here(2, "inspect", tmp_path / "empty", says="empty: has no .gguf file of a model")
    refused_here(2, "split", "org/repo", says="org/repo: no such file; `relayline pull org/repo` loads it")


def test_a_server_that_does_not_answer_is_named_with_the_cause(tmp_path: Path) -> None:
    for command in (("bench", "http://127.0.0.1:1"), ("top", "--once", "--url", "http://127.0.0.1:1")):
        refused_here(1, *command, says="http://127.0.0.1:1 does not answer (Connection refused); `relayline status`")
    refused_here(1, "top", "--once", "--url", "http://127.0.0.1:1", says="give its URL: --url http://HOST:8080")


def test_usage_errors_exit_with_2(model: Path, split: Path, tmp_path: Path) -> None:
    """The first as its own process; the others in this one, since each start takes a second."""
    refused(2, "split", model, "--cuts", str(N_LAYERS), "--out", tmp_path / "x", says=str(N_LAYERS))
    refused_here(2, "split", model, "--stages", str(N_LAYERS + 1), "--out", tmp_path / "x", says="")
    refused_here(2, "split", model, "--no-such-flag", says="--no-such-flag")
    refused_here(2, "stage", "--artifact", split / "stage-0.gguf", "--listen", "nonsense", says="HOST:PORT")
    refused_here(2, "stage", "--artifact", split / "stage-0.gguf", "--ctx", "0", says="--ctx")
    refused_here(2, "stage", "--artifact", split / "stage-0.gguf", "--kv-type", "q3", says="q8_0")
    refused_here(2, "serve", "--pipeline", split, "--stages", "127.0.0.1:1", "--http", "127.0.0.1:0", says="2 stages")
    refused_here(
        2,
        "serve",
        "--pipeline",
        split,
        "--stages",
        "127.0.0.1:1,127.0.0.1:2",
        "--http",
        "127.0.0.1:0",
        "--mmproj",
        "auto",
        says="holds no projector (mmproj*.gguf); name it, or give --model",
    )
    refused_here(2, "nonsense", says="nonsense")
    for n_tokens in ("32", "-1", "x", "٣"):
        says = f"'--draft': {n_tokens!r} is not auto, off or a number from 1 to 31"
        refused_here(2, "up", "--model", model, "--draft", n_tokens, says=says)
    refused_here(
        2, "serve", "--pipeline", split, "--draft", "1.5", says="'1.5' is not auto, off or a number from 1 to 31"
    )
    for rate in ("-1", "0", "inf"):
        says = f"'--rate': {rate} is not a number of requests per second above 0"
        refused_here(2, "bench", "http://127.0.0.1:1", "--rate", rate, says=says)
    refused_here(
        2,
        "bench",
        "http://127.0.0.1:1",
        "--rate",
        "1",
        "--rounds",
        "2",
        says="--streams and --rounds do not go with --rate",
    )
    refused_here(
        2, "bench", "http://127.0.0.1:1", "--rate", "1", "--streams", "2", says="--streams and --rounds do not go with"
    )
    refused_here(2, "bench", "http://127.0.0.1:1", "--requests", "2", says="--requests needs --rate")
    refused_here(2, "bench", "http://127.0.0.1:1", "--top-p", ".9", says="--top-p needs --temperature")
    for flag, value, says in (
        ("--temperature", "-1", "-1 is outside 0..2"), ("--temperature", "2.1", "2.1 is outside 0..2"),
        ("--top-p", "0", "0 is not above 0"), ("--top-p", "1.1", "1.1 is outside 0..1"),
    ):  # fmt: skip
        refused_here(2, "bench", "http://127.0.0.1:1", flag, value, says=says)
    refused_here(2, "bench", "http://127.0.0.1:1", "--temperature", "nan", says="'nan' is not a number")
    # It has nothing to do with a measurement, and was taken without a word.
    refused_here(2, "calibrate", split / "stage-0.gguf", "--no-calibrate", says="No such option '--no-calibrate'")


def test_numbers_that_are_none_or_no_machine_has(model: Path) -> None:
    refused(2, "bench", "http://127.0.0.1:1", "--streams", "999999999", says="too many; one load can have 10000")
    refused(2, "bench", "http://127.0.0.1:1", "--prompt-tokens", "99999999999999999999", says="--prompt-tokens")
    for command, flag in (("top", "--interval"), ("doctor", "--timeout"), ("down", "--timeout")):
        refused(2, command, flag, "nan", says="'nan' is not a number")


def test_flags_that_no_stage_would_take_are_refused_before_anything_is_done(model: Path, split: Path) -> None:
    for flag, value, says in (
        ("--lanes", "0", "--lanes 0 is outside 1..255"), ("--ctx", "5", "--ctx 5"), ("--kv-type", "q3", "q8_0"),
        ("--threads", "99999", "--threads"), ("--otlp-endpoint", "foo", "foo"),
    ):  # fmt: skip
        refused(2, "up", "--model", model, "--split-dir", split.parent / "never", flag, value, says=says)
        assert not (split.parent / "never").exists()
    refused(2, "serve", "--pipeline", split, "--join-listen", "127.0.0.1:0", "--lanes", "0", says="--lanes 0")


@pytest.mark.parametrize("command", ["up", "inspect", "plan", "down", "logs", "restart", "pull", "trace", "bench"])
def test_a_variable_that_is_not_set_names_nothing(command: str) -> None:
    """`relayline down "$NAME"` would end the only pipeline, and `up "$MODEL"` look for models in this folder."""
    refused_here(2, command, "", says="it is empty")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("up m.gguf --stages 1e9", "'--stages': '1e9' is not a whole number"),
        ("up m.gguf --stages 65", "'--stages': 65 is outside 1..64"),
        ("up m.gguf --stages 99999999999", "'--stages': 99999999999 is outside 1..64"),
        (f"up m.gguf --stages {'9' * 400}", "is outside 1..64"),  # no float is as large
        ("bench http://127.0.0.1:1 --temperature x", "'--temperature': 'x' is not a number"),
        ("top --once --url http://127.0.0.1:99999", "'http://127.0.0.1:99999' is not a URL such as http://127"),
        ("chat hi --url http://", "is not a URL such as http://127.0.0.1:8080"),
        ("chat hi --url 10.0.0.1:8080", "'10.0.0.1:8080' is not a URL such as http://10.0.0.1:8080"),
        ("up m.gguf --http 8080", "'8080' is not HOST:PORT, such as 127.0.0.1:8080"),
        ("up m.gguf --http 127.0.0.1:\u00b2", "is not HOST:PORT, such as 127.0.0.1:8080"),
    ],
)
def test_texts_that_are_no_number_or_address(words: str, says: str) -> None:
    refused_here(2, *words.split(), says=says)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RELAYLINE_CTX", "x", "--ctx 'x' is not a whole number (from RELAYLINE_CTX)"),
        ("RELAYLINE_STAGES", "two", "'--stages': 'two' is not a whole number (from RELAYLINE_STAGES)"),
        ("RELAYLINE_JSON", "perhaps", "(from RELAYLINE_JSON)"),
        ("RELAYLINE_HTTP", "8080", "'8080' is not HOST:PORT, such as 127.0.0.1:8080 (from RELAYLINE_HTTP)"),
    ],
)
def test_a_refused_variable_is_named(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    refused_here(2, "up", "m.gguf", says=says)


def test_names_of_other_things(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused_here(2, "certs", "init", tmp_path / "file", says="file: it is a file; name a directory")
    refused_here(2, "certs", "init", tmp_path / "file" / "deep", says="file is a file; name another directory")
    refused_here(2, "pull", "nosuch", says="nosuch: no such file; give a .gguf file, a directory of shards or ORG/NAME")
    refused(1, "stage", "--artifact", model, says="not a relayline stage artifact (a whole model?); make one with")


def test_no_command_shows_the_help() -> None:
    for arguments in ((), ("certs",)):
        done = relayline(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("Usage: relayline")
        assert len(done.stderr.splitlines()) > 5


def test_names_and_terminals_that_are_not_utf8(model: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.gguf")
    shutil.copy(model, odd)
    done = relayline("split", odd, "--stages", "2", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    refused(2, "trace", os.fsdecode(b"\xff"), "--url", "http://127.0.0.1:9", says="cannot be printed")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    plot = subprocess.run(
        [sys.executable, "-m", "relayline.deploy.cli", "calibrate", tmp_path / "out" / "stage-0.gguf", "--ctx", "64"],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert plot.returncode == 0, plot.stderr
    assert "?" in plot.stdout


def test_an_altered_artifact_is_refused(split: Path, tmp_path: Path) -> None:
    shutil.copytree(split, tmp_path / "copy")
    artifact = tmp_path / "copy" / "stage-1.gguf"
    content = bytearray(artifact.read_bytes())
    content[-100] ^= 1
    artifact.write_bytes(content)
    refused(1, "stage", "--artifact", artifact, says="sha256")


def test_taken_ports(split: Path, model: Path, taken_port: str, tmp_path: Path) -> None:
    refused(1, "stage", "--artifact", split / "stage-0.gguf", "--listen", taken_port, says=taken_port)
    refused(
        1, "up", "--model", model, "--stages", "2", "--split-dir", tmp_path / "s", "--http", taken_port, says="taken"
    )


@pytest.mark.slow
def test_stages_that_do_not_belong_together(split: Path, model: Path, tmp_path: Path) -> None:
    other_model = make_tiny("llama", tmp_path / "other.gguf", n_layers=N_LAYERS, seed=2)
    for source, name, cuts in ((other_model, "other", "2"), (model, "recut", "1")):
        assert relayline("split", source, "--cuts", cuts, "--out", tmp_path / name).returncode == 0
    artifacts = (split / "stage-0.gguf", split / "stage-1.gguf", tmp_path / "other" / "stage-1.gguf",
                 tmp_path / "recut" / "stage-1.gguf")  # fmt: skip
    stages = [running("stage", "--artifact", path, "--ctx", "64", "--lanes", "2", "--json") for path in artifacts]
    with stages[0] as first, stages[1] as second, stages[2] as other, stages[3] as recut:
        address = [process.event["address"] for process in (first, second, other, recut)]
        for pair, says in (
            ((address[1], address[0]), "wrong order"),
            ((address[0], address[2]), "another model"),
            ((address[0], address[3]), "another split"),
        ):
            refused(1, "serve", "--pipeline", split, "--stages", ",".join(pair), "--http", "127.0.0.1:0", says=says)
        with running(
            "serve", "--pipeline", split, "--stages", ",".join(address[:2]), "--http", "127.0.0.1:0", "--json"
        ):
            pass  # and the right ones in the right order are taken


def test_help_and_version_need_no_model() -> None:
    for arguments in (("--help",), ("up", "--help"), ("--version",)):
        done = relayline(*arguments)
        assert done.returncode == 0
        assert "relayline" in done.stdout


@pytest.mark.slow
def test_commands_for_launched_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for arguments in (("status",), ("down",)):
        done = relayline(*arguments)
        assert (done.returncode, done.stdout) == (0, "nothing runs here\n")
    assert json.loads(relayline("status", "--json").stdout) == []
    for command in ("status", "down", "logs"):
        refused(2, command, "nobody", says="no pipeline 'nobody' was launched here")
        refused(2, command, tmp_path / "nowhere.yaml", says="nowhere.yaml: no such file")
    refused(2, "logs", says="nothing runs here")
    refused(2, "down", "--timeout", "-1", says="--timeout")


@pytest.mark.slow
def test_a_manifest_that_does_not_fit_its_model(model: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "pipeline.yaml"
    text = (
        "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: misfit}\n"
        f"spec:\n  model: {{path: {model}}}\n  coordinator: {{http: {{port: 0}}}}\n"
    )
    for command in (("up", "--state-dir", str(tmp_path / "state")), ("serve", "--manifest")):
        manifest.write_text(f"{text}  stages: [{{name: a, layers: [0, 2]}}, {{name: b, layers: [2, 9]}}]\n")
        refused(2, *command, manifest, says=f"write layers: [2, {N_LAYERS}]")
        manifest.write_text(f"{text}  stages: {N_LAYERS + 1}\n")
        refused(2, *command, manifest, says="")
        manifest.write_text(f"{text}  stage: 2\n")
        refused(2, *command, manifest, says="did you mean stages?")
    manifest.write_text(f"{text}  context: {{lanes: 255, tokens: 1000000}}\n")
    refused(2, "up", "--state-dir", tmp_path / "state", manifest, says="GiB")
    refused(2, "serve", "--http", "127.0.0.1:0", says="--manifest")


def test_json_outputs_parse(model: Path, split: Path) -> None:
    assert json.loads(relayline("inspect", model, "--json").stdout)["layers"] == N_LAYERS
    assert json.loads((split / "pipeline.json").read_text())["cuts"]
