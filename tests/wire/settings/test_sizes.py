"""Goal: sizes may have units, in flags, variables and manifests alike, and bad ones get one line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from relayline.deploy.cli.setting_flags import setting_options
from relayline.deploy.manifest import load_manifest, parse_manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.load import ManifestError
from relayline.deploy.manifest.schema import schema_text
from relayline.wire.common.errors import UsageError
from relayline.wire.settings.setting import entries
from relayline.wire.settings.sizes import SIZE, read_size, size_text
from relayline.wire.settings.table import TABLES, EngineSettings

SIZES = [entry for table in TABLES for entry in entries(table) if entry.name.endswith("_bytes")]
BAD = ("4X", "-1", "1.5", "1e9", "", "4 M B", "M", "٤M", "4Bi", "9" * 40)
MANIFEST = """apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata: {name: small}
spec: {model: {path: m.gguf}, stages: 2, context: {prefixMemoryBytes: VALUE}}
"""


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0), ("4096", 4096), ("4096B", 4096), ("1K", 1 << 10), ("4M", 4 << 20), ("4m", 4 << 20), ("4Mi", 4 << 20),
        ("4MiB", 4 << 20), ("4mib", 4 << 20), ("4MB", 4_000_000), ("4 GiB", 4 << 30), ("1.5G", 3 << 29),
        ("2.5KB", 2_500), ("1T", 1 << 40), ("1P", 1 << 50),
    ],
)  # fmt: skip
def test_sizes(text: str, n_bytes: int):
    assert read_size(text) == n_bytes
    assert re.match(SIZE, text), "the schema takes it too"


@given(st.integers(0, 1 << 50))
def test_a_size_shown_is_the_size(n_bytes: int):
    assert read_size(size_text(n_bytes)) == n_bytes
    assert read_size(str(n_bytes)) == n_bytes


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_refused(text: str):
    with pytest.raises(ValueError, match=r"^is not a "):
        read_size(text)


def test_every_setting_of_bytes_is_a_size():
    assert {entry.flag for entry in SIZES} >= {"--prefix-memory-bytes", "--prefix-disk-bytes"}
    for entry in SIZES:
        assert entry.is_size, entry.flag
        assert entry.read("4MiB") == 4 << 20
        assert entry.allowed.endswith("0..1PiB")
        for bad in (*BAD, "2P"):
            with pytest.raises(UsageError) as caught:
                entry.read(bad)
            line = f"{entry.flag} {bad!r} is not " + "".join(f"{word}, " for word in entry.words)
            assert caught.value.message == f"{line}a number of bytes, or a size such as 4M or 1.5GiB, at most 1PiB"


@click.command(context_settings={"auto_envvar_prefix": "RELAYLINE"})
@setting_options(EngineSettings, only=("prefix_memory_bytes", "prefix_disk_bytes"))
def shown(**given: int) -> None:
    click.echo(f"{given['prefix_memory_bytes']} {given['prefix_disk_bytes']}")


def test_flags_and_variables():
    done = CliRunner().invoke(shown, ["--prefix-disk-bytes", "50GiB"], env={"RELAYLINE_PREFIX_MEMORY_BYTES": "4M"})
    assert done.output == f"{4 << 20} {50 << 30}\n"
    assert CliRunner().invoke(shown, []).output == "-1 0\n"
    assert CliRunner().invoke(shown, ["--prefix-memory-bytes", "4Q"]).exit_code == 2


@pytest.mark.parametrize(("value", "found"), [("4GiB", 4 << 30), ("'4096'", 4096), ("8", 8), ("auto", "auto")])
def test_manifests(value: str, found: int | str, tmp_path: Path):
    """A size with a unit is the same as without one, so that `up` sees no difference."""
    text = MANIFEST.replace("VALUE", value)
    manifest = parse_manifest(text.encode(), "m.yaml")
    assert manifest.spec.context.prefix_memory_bytes == found
    path = tmp_path / "again.yaml"
    path.write_text(dump_manifest(manifest))
    assert load_manifest(path).spec.context == manifest.spec.context


@pytest.mark.parametrize("value", ["4Q", "[4]", "-4", "1.5", "2P", "true"])
def test_bad_sizes_of_a_manifest_get_one_line(value: str):
    with pytest.raises(ManifestError) as caught:
        parse_manifest(MANIFEST.replace("VALUE", value).encode(), "m.yaml")
    (line,) = caught.value.lines
    assert line.startswith("m.yaml:4: spec.context.prefixMemoryBytes: ")


def test_the_schema_takes_them():
    schema = json.loads(schema_text())
    context = {"$schema": schema["$schema"], "$defs": schema["$defs"], "$ref": "#/$defs/Context"}
    for good in ("4GiB", 7, "auto"):
        jsonschema.validate({"prefixMemoryBytes": good}, context)
    for bad in ("4Q", -1, [4]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"prefixMemoryBytes": bad}, context)
