"""Goal: what a user got wrong is refused before work that takes minutes: a split, a fetch, a load, measurements.

Method: the commands themselves. Where the work would begin, the test fails.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click
import pytest

from relayline.coordinator.model.split import split_model
from relayline.deploy.cli import join, serve
from relayline.deploy.cli.join import join_command
from relayline.deploy.cli.serve import serve_command
from relayline.deploy.cli.stage import stage_command
from relayline.deploy.launch import run
from relayline.deploy.launch.run import Launch, ready_to_start
from relayline.deploy.launch.state import StateDir
from relayline.deploy.manifest import parse_manifest
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.stage import process
from relayline.stage.joining import join as joining
from relayline.wire.common.errors import RelaylineError, UsageError

MANIFEST = f"""apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {{name: early}}
spec:
  model: {{path: {DEMO_MODEL}}}
  stages: 2
"""
BAD_FILES = {
    "--api-keys BAD": "a key is 16 to 512",
    "--api-keys NONE": "no such file",
    "--http-cert BAD --http-key BAD": "is not a PEM certificate",
    "--http-cert BAD": "go together",
    "--chat-template NONE": "no such file",
    "--chat-template TEMPLATE": "does not compile",
    "--mmproj NONE": "no such file",
    "--mmproj BAD": "BAD",
    "--responses-dir BAD": "--responses-dir BAD: is not a directory",
    "--responses-dir NONE --batch-dir NONE": "--responses-dir and --batch-dir are the same directory, NONE",
    "--tls NONE": "no such directory",
    "--token-file NONE": "no such file",
    "--jaeger-url box": "give an address",
    "--cors box": "is not an origin",
    "--draft 4 --policy drain": "needs --policy auto",
    "--http TAKEN": "the HTTP API: TAKEN is taken by another process",
    "--http 192.0.2.1:80": "is no address of this machine",
    "--join-listen TAKEN": "--join-listen: TAKEN is taken",
    "--stages 127.0.0.1:1": "give either --stages",
    "--enrol-listen 127.0.0.1:0": "--enrol-listen needs",
    "--plan-file no/such/plan.json": "no/such/plan.json: there is no directory no/such",
    "--keep-layers no/such/kept.json": "there is no directory no/such",
}


def test_layers_of_a_model_on_the_hub_are_not_planned(tmp_path: Path) -> None:
    manifest = tmp_path / "hub.yaml"
    manifest.write_text(MANIFEST.replace(f"path: {DEMO_MODEL}", "hf: hf://some/model/file.gguf"))
    arguments = [
        "--manifest",
        str(manifest),
        "--plan-file",
        str(tmp_path / "plan.json"),
        "--join-listen",
        "127.0.0.1:0",
    ]
    with pytest.raises(UsageError, match="--plan-file plans for a model that is here"):
        serve_command.main(arguments, standalone_mode=False)


def began(*_: object, **__: object) -> NoReturn:
    pytest.fail("the work began before the refusal")


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield f"127.0.0.1:{holder.getsockname()[1]}"


def refusal(command: click.Command, *arguments: str) -> str:
    with pytest.raises((RelaylineError, click.BadParameter)) as caught:
        command.main(list(arguments), standalone_mode=False)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("flags", BAD_FILES)
def test_serve_refuses_before_it_splits(flags: str, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "served_split", began)
    files = {"BAD": tmp_path / "bad", "NONE": tmp_path / "none", "TEMPLATE": tmp_path / "template", "TAKEN": taken}
    (tmp_path / "bad").write_text("short\n")
    (tmp_path / "bad").chmod(0o600)
    (tmp_path / "template").write_text("{% for %}")
    (tmp_path / "m.yaml").write_text(MANIFEST)
    arguments = [str(files.get(word, word)) for word in flags.split()]
    if "--http" not in arguments:
        arguments += ["--http", "127.0.0.1:0"]
    expected = BAD_FILES[flags]
    for word, value in files.items():
        expected = expected.replace(word, str(value))
    assert expected in refusal(serve_command, "--manifest", str(tmp_path / "m.yaml"), *arguments)


def test_serve_refuses_a_model_that_is_none_before_layers_have_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("relayline.coordinator.serve.run_coordinator", began)
    split_model(DEMO_MODEL, tmp_path / "split", n_stages=2)
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder").mkdir()
    flags = ("--pipeline", str(tmp_path / "split"), "--stages", "127.0.0.1:1,127.0.0.1:2", "--http", "127.0.0.1:0")
    for name, says in (("empty.gguf", "the file is empty"), ("folder", "has no .gguf file of a model")):
        assert says in refusal(serve_command, *flags, "--model", str(tmp_path / name))


def test_serve_refuses_a_variable_that_no_collector_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serve, "served_split", began)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    (tmp_path / "m.yaml").write_text(MANIFEST)
    arguments = ("--manifest", str(tmp_path / "m.yaml"), "--http", "127.0.0.1:0")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT 'nowhere' is not" in refusal(serve_command, *arguments)


def test_a_stage_refuses_before_it_loads_or_joins(taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "run_stage", began)
    monkeypatch.setattr(joining, "run_joined", began)
    monkeypatch.setattr(join, "_joined", began)  # which uses the token up
    (tmp_path / "s.gguf").touch()
    line = f"{taken} is taken by another process; end it, or take another port"
    for where in (("--artifact", str(tmp_path / "s.gguf")), ("--join", "127.0.0.1:1", "--name", "a")):
        assert refusal(stage_command, *where, "--listen", taken) == f"--listen: {line}"
        assert refusal(stage_command, *where, "--metrics", taken) == f"--metrics: {line}"
    assert refusal(join_command, "127.0.0.1:1", "TOKEN", "--listen", taken) == f"--listen: {line}"
    open_to_all = refusal(stage_command, "--artifact", str(tmp_path / "s.gguf"), "--listen", "0.0.0.0:0")
    assert "would listen on 0.0.0.0, beyond this machine, without TLS" in open_to_all
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    assert "is not a collector's address" in refusal(stage_command, "--artifact", str(tmp_path / "s.gguf"))


def test_up_refuses_credentials_and_collectors_before_it_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "prepare", began)
    directory = StateDir(tmp_path / "state")
    tls = MANIFEST + "  wire: {tls: {mode: required, directory: tls/coordinator}}\n"
    manifest = parse_manifest(tls.encode(), "m.yaml").with_directory(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        ready_to_start(Launch(manifest, tmp_path / "m.yaml", measure=False), directory)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    plain = parse_manifest(MANIFEST.encode(), "m.yaml").with_directory(tmp_path)
    with pytest.raises(UsageError, match="is not a collector's address"):
        ready_to_start(Launch(plain, tmp_path / "m.yaml", measure=False), directory)
