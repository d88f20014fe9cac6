"""Every architecture of llama.cpp is certified, or refused for a reason before anything is written."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.refused_families import REFUSED
from relayline.coordinator.model.split import split_model
from relayline.deploy.cli.model import inspect_command
from relayline.wire.common.errors import ModelFileError, UnsupportedArchitectureError
from tests import families
from tests.support.architectures import architectures
from tests.support.families_page import PAGE, page


def write(path: Path, architecture: str, *, kind: str = "", is_whole: bool = True) -> Path:
    """Write a header that is read as a model of some architecture."""
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    if is_whole:
        writer.add_block_count(4)
        writer.add_embedding_length(64)
        for name in ("token_embd", *(f"blk.{layer}.attn_norm" for layer in range(4))):
            writer.add_tensor(f"{name}.weight", np.zeros((32, 64), np.float32))
    else:
        writer.add_tensor("v.blk.0.attn_q.weight", np.zeros((32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_architecture_of_llama_cpp_stands_in_one_table() -> None:
    assert sorted([*FAMILIES, *REFUSED]) == sorted(architectures())
    assert all(family.models for family in FAMILIES.values())


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_family_that_cannot_be_split_is_refused_by_name(architecture: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", architecture)
    facts = inspect_model(model)
    assert (facts.supported, facts.refusal, facts.may_be_tried) == (False, REFUSED[architecture], False)
    with pytest.raises(UnsupportedArchitectureError) as caught:
        split_model(model, tmp_path / "out", n_stages=2, experimental=True)
    assert caught.value.message == f"{model}: this {architecture} model cannot be split: {REFUSED[architecture]}"
    assert not (tmp_path / "out").exists()


def test_inspect_says_why(tmp_path: Path) -> None:
    result = CliRunner().invoke(inspect_command, [str(write(tmp_path / "model.gguf", "minicpm3"))])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"cannot be split: {REFUSED['minicpm3']}"


@pytest.mark.parametrize("architecture", ["clip", "wavtokenizer-dec"])
def test_a_file_without_a_language_model_is_refused_with_its_kind(architecture: str, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedArchitectureError, match=f"this {architecture} model cannot be split: {REFUSED[architecture]}"
    ):
        inspect_model(write(tmp_path / "model.gguf", architecture, is_whole=False))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adapter", r"an adapter \(LoRA\), .*; give the model itself, and this file with --lora"),
        ("imatrix", "an importance matrix, .*; give the model itself"),
        ("mmproj", "a projector for images .*; give the model itself"),
    ],
)
def test_parts_of_a_model_are_named(kind: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"is {words}"):
        inspect_model(write(tmp_path / "model.gguf", "llama", kind=kind, is_whole=False))


def test_the_page_agrees_with_the_tables() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.families --docs"


def test_the_report_counts_its_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    assert families.report(["olmo", "rwkv6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["olmo", "certified"]
    assert "olmo: cuts 1-4 of 5 layers, difference 0e+00" in lines[0]
    assert lines[1].split()[:2] == ["rwkv6", "refused"]
    assert lines[2] == "2 architectures: 1 certified, 1 refused, 0 wrong or aborted, 0 hung, 0 neither"


def test_the_report_tells_an_architecture_that_nobody_has_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert families.report(["gemma9"]) == 1
    assert "gemma9" in capsys.readouterr().out


def test_the_report_ends_hung_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(families, "TIME_LIMIT_S", 0.01)
    assert families.report(["olmo"]) == 1
    assert "1 hung" in capsys.readouterr().out
