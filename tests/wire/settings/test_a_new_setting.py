"""A setting is said once: one entry in the table is enough for it to arrive everywhere.

A child process reads a table with one more entry, before anything else is imported, and reports where it arrives.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayline.coordinator.joining.config import engine_message
from relayline.deploy.manifest.pages import METRICS_PAGE, PAGE, metrics_text, page_text
from relayline.deploy.manifest.schema import SCHEMA_FILE, schema_text
from relayline.wire.common.errors import UsageError
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.setting import entries, read_message
from relayline.wire.settings.table import TABLES, EngineSettings

ROOT = Path(__file__).parents[3]
ENTRY = """
    flux: int = setting(
        7, "Share of the flux in percent.", low=0, high=40, flag="--flux", place="batching.flux", reader=STAGE
    )
"""
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: small}
spec: {model: {path: m.gguf}, stages: 2, batching: {flux: FLUX}}
"""
SCRIPT = r'''
import importlib.util, json, os, sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import relayline.wire.settings as room

entry, directory, manifest = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
name, path = "relayline.wire.settings.table", Path(room.__file__).with_name("table.py")
before, head, after = path.read_text().partition('    """The engine of one stage."""\n')
table = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader=None))
sys.modules[name] = room.table = table
exec(compile(before + head + entry + after, path, "exec"), vars(table))

from relayline.coordinator.joining.config import engine_message
from relayline.deploy.cli.serve import serve_command
from relayline.deploy.cli.stage import stage_command
from relayline.deploy.cli.up import up_command
from relayline.deploy.cli.up_changes import changes_of
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.schema import schema_text
from relayline.deploy.manifest.pages import page_text
from relayline.stage.joining.config import JoinConfig
from relayline.wire.common.errors import UsageError
from relayline.wire.pb.relayline.v1 import join_pb2 as pb


def stage(*arguments):
    # The flux of the stage process that is started so.
    found = []
    with mock.patch("relayline.stage.process.run_stage", lambda config, *_: found.append(config.engine.flux)):
        stage_command.main(["--artifact", str(directory / "a.gguf"), *arguments], standalone_mode=False)
    return found[0]


def up(*arguments):
    # The flux of the stages that `up MODEL` starts.
    with (
        mock.patch("relayline.deploy.cli.up_launch.resolve_model", Path),
        mock.patch("relayline.deploy.cli.up_manifest.launch", return_value=False) as launch,
    ):
        up_command.main([str(directory / "m.gguf"), "--http", "127.0.0.1:0", *arguments], standalone_mode=False)
    settled = directory / "settled.yaml"
    settled.write_text(dump_manifest(launch.call_args.args[0].manifest))
    return serve("--manifest", str(settled))


def joined(engine):
    # The flux of a stage that gets this engine in its order, over the wire.
    order = pb.JoinResponse.FromString(pb.JoinResponse(engine=engine_message(engine)).SerializeToString())
    joining = JoinConfig("127.0.0.1:1", "stage-0", directory)
    return joining.ordered(order, directory / "a.gguf", (), "127.0.0.1").engine.flux


def serve(*arguments):
    # The flux of a stage that joins this coordinator.
    stages = SimpleNamespace(stages=[0, 1], architecture="llama")
    with (
        mock.patch("relayline.coordinator.model.pipeline_file.load_pipeline", lambda *_, **__: stages),
        mock.patch("relayline.coordinator.serve.run_coordinator") as run,
    ):
        serve_command.main(["--pipeline", str(directory), *arguments], standalone_mode=False)
    return joined(run.call_args.args[0].join.stages[1].engine)


def refusal(call):
    try:
        call()
    except UsageError as error:
        return error.message
    return "taken"


os.environ.pop("RELAYLINE_FLUX", None)
for model in ("a.gguf", "m.gguf"):
    (directory / model).touch()
low = directory / "low.yaml"
low.write_text(manifest.replace("FLUX", "12"))
high = directory / "high.yaml"
high.write_text(manifest.replace("FLUX", "41"))
joins = ("--join-listen", "127.0.0.1:0")
said = {
    "default": [stage(), up(), serve(*joins)],
    "flag": [stage("--flux", "9"), up("--flux", "9"), serve(*joins, "--flux", "9")],
    "manifest": serve("--manifest", str(low)),
    "changed": override(load_manifest(low), changes_of({"flux": 15})).engine.flux,
    "refused": [
        refusal(lambda: stage("--flux", "41")),
        refusal(lambda: up("--flux", "-1")),
        refusal(lambda: stage("--flux", "much")),
        refusal(lambda: load_manifest(high)).rpartition("/")[2],
        refusal(lambda: serve("--stages", "127.0.0.1:1,127.0.0.1:2", "--flux", "9")),
        refusal(lambda: stage_command.main(["--join", "127.0.0.1:1", "--name", "a", "--flux", "9"],
                                           standalone_mode=False)),
    ],
    "schema": json.loads(schema_text())["$defs"]["Batching"]["properties"]["flux"],
    "page": [line for line in page_text().splitlines() if "flux" in line],
}
order = engine_message(table.EngineSettings(flux=9))
order.more["flux"] = "41"
said["refused"].append(refusal(lambda: JoinConfig("127.0.0.1:1", "a", directory)
                               .ordered(pb.JoinResponse(engine=order), directory, (), "127.0.0.1")))
os.environ["RELAYLINE_FLUX"] = "11"
said["variable"] = [up(), serve(*joins), serve("--manifest", str(low)), serve("--manifest", str(low), "--flux", "9")]
print(json.dumps(said))
'''


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    directory = tmp_path_factory.mktemp("flux")
    command = [sys.executable, "-P", "-c", SCRIPT, ENTRY, str(directory), MANIFEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_arrives_at_the_stage(reported: dict[str, object]) -> None:
    assert reported["default"] == [7, 7, 7]
    assert reported["flag"] == [9, 9, 9]
    assert reported["manifest"] == 12
    assert reported["changed"] == 15
    assert reported["variable"] == [11, 11, 11, 9], "a flag wins over a variable, and that over the manifest"


def test_values_out_of_bounds_are_refused_in_one_line(reported: dict[str, object]) -> None:
    assert reported["refused"] == [
        "--flux 41 is outside 0..40",
        "--flux -1 is outside 0..40",
        "--flux 'much' is not a whole number",
        "high.yaml:4: spec.batching.flux: must be at most 40, not 41",
        "--flux is for stages that join; it needs --join-listen",
        "--flux is set by the coordinator when a stage joins; give it to `relayline serve`",
        "--flux 41 is outside 0..40",
    ]


def test_it_stands_in_the_schema_and_on_the_page(reported: dict[str, object]) -> None:
    expected = {"default": 7, "description": "Share of the flux in percent.", "maximum": 40, "minimum": 0}
    assert expected.items() <= dict(reported["schema"]).items()  # type: ignore[call-overload]
    (row,) = reported["page"]  # type: ignore[misc]
    assert "`--flux` | `RELAYLINE_FLUX` | `batching.flux` | 0..40 | `7` | stages | Share of the flux" in row


# --- the table of today -----------------------------------------------------------------------------------------------


def test_a_stage_refuses_a_setting_that_it_does_not_know() -> None:
    message = engine_message(EngineSettings(n_lanes=3))
    assert read_message(EngineSettings, message) == EngineSettings(n_lanes=3)
    message.more["flux\x1b[2J"] = "9"
    with pytest.raises(UsageError, match=r"setting 'flux\\\\x1b\[2J' that this stage does not know; run the same"):
        read_message(EngineSettings, message)
    message = engine_message(EngineSettings())
    message.more["n_lanes"] = "4"
    with pytest.raises(UsageError, match="does not know"):
        read_message(EngineSettings, message)


def test_a_coordinator_that_says_nothing_of_the_layout_means_one_cache() -> None:
    message: pb.EngineSettings = engine_message(EngineSettings(kv_layout="per-lane"))
    message.ClearField("kv_layout")
    assert read_message(EngineSettings, message).kv_layout == "unified"


def test_every_default_is_allowed_and_every_text_reads_back() -> None:
    for table in TABLES:
        values = table()
        for entry in entries(table):
            value = getattr(values, entry.name)
            assert entry.of_parameter(entry.of_parameter(value)) == value
            if value is not None:
                assert entry.read(entry.text(value)) == value
            for bound in (entry.low, entry.high):
                assert bound is None or entry.read(entry.kind(bound)) == bound


def test_no_flag_no_variable_and_no_place_stands_for_two_settings() -> None:
    found = [entry for table in TABLES for entry in entries(table)]
    for what in ("flag", "variable", "place"):
        values = [getattr(entry, what) for entry in found]
        assert len(set(values)) == len(values)


def test_the_pages_and_the_schema_agree_with_their_tables() -> None:
    assert PAGE.read_text() == page_text()
    assert METRICS_PAGE.read_text() == metrics_text()
    assert SCHEMA_FILE.read_text() == schema_text()


# Files that say flags to children of theirs for tests and pictures, as a person would.
AS_A_PERSON = ("deploy/testing/", "deploy/demo/")


def _texts(path: Path) -> set[str]:
    """Every text in a file's code. Docstrings are not included, since they are for readers of the file."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    for_readers = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in for_readers
    }


def _product() -> Iterator[tuple[str, set[str]]]:
    for room in ("wire", "stage", "coordinator", "deploy"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(("wire/settings/", "wire/pb/", *AS_A_PERSON)):
                yield name, _texts(path)


def test_no_other_file_repeats_a_flag_variable_place_or_meaning() -> None:
    repeated = []
    for name, texts in _product():
        for entry in (entry for table in TABLES for entry in entries(table)):
            texts_of_entry = {entry.flag, entry.variable, entry.doc, " ".join(entry.doc.split()), entry.help}
            if "." in entry.place:
                texts_of_entry.add(entry.place)
            repeated += [f"{name}: {text!r}" for text in texts & texts_of_entry]
    assert repeated == []
