from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.planner.instance import Load
from relayline.coordinator.planner.memory import compute_bytes, kv_cells
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.cli.model import inspect_command, split_command
from relayline.deploy.models import progress, splits
from relayline.deploy.planning.shapes import shape_of
from relayline.deploy.testing.paths import ROOT
from relayline.wire.common.errors import CutError, ModelFileError, UnsupportedArchitectureError, UsageError
from tests.support.tiny_models import make_tiny
from tests.support.tiny_shapes import INDEX_KEY, KV_RANK, ROPE


def test_facts(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("llama", tmp_path / "m.gguf", vocab=100))
    assert (facts.architecture, facts.n_layers, facts.n_embd, facts.n_vocab) == ("llama", 6, 64, 100)
    assert (facts.n_heads, facts.n_kv_heads, facts.ctx_train) == ((4,) * 6, (2,) * 6, 512)
    block_values = 2 * 64 + 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    assert facts.layer_bytes == (4 * block_values,) * 6
    assert facts.embedding_bytes == facts.head_bytes == 4 * 64 * 100
    assert not facts.tied_embeddings
    assert facts.kv_bytes_per_token == (2 * (2 * 16 * 2),) * 6  # keys and values of two heads of 16, two bytes each
    assert facts.legal_cuts == (1, 2, 3, 4, 5)


def test_kv_bytes_with_latent_attention(tmp_path: Path) -> None:
    """Latent attention caches one row of rank + rope values, and no separate values."""
    latent = inspect_model(make_tiny("deepseek2", tmp_path / "m.gguf"))
    assert latent.kv_bytes_per_token == ((32 + 16) * 2,) * 5
    legacy = inspect_model(make_tiny("deepseek2:legacy", tmp_path / "l.gguf"))
    assert legacy.kv_bytes_per_token == (4 * (32 + 16) * 2,) * 5


def test_quantisation_mix(tmp_path: Path) -> None:
    facts = inspect_model(make_tiny("llama", tmp_path / "m.gguf", quant="q8_0"))
    assert [share.type_name for share in facts.quantization] == ["Q8_0", "F32"]
    assert sum(share.size_bytes for share in facts.quantization) < facts.file_bytes


def test_json(tmp_path: Path) -> None:
    model = make_tiny("smollm3", tmp_path / "m.gguf", tied=True)
    result = CliRunner().invoke(inspect_command, [str(model), "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["legal_cuts"] == [4, 8]
    assert facts["supported"] is True
    assert facts["tied_embeddings"] is True
    assert facts["kv_bytes_per_token_total"] == sum(facts["kv_bytes_per_token"]) == 1280


@pytest.mark.parametrize("name", ["llama", "glm4moe", "cohere2moe"])
def test_table(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "cohere2moe")
    model = make_tiny(name, tmp_path / "m.gguf", extra_values={"note": 1})
    result = CliRunner().invoke(inspect_command, [str(model)])
    assert result.exit_code == 0
    assert f"tiny {name}" in result.stdout
    assert ("legal cuts    1 to" in result.stdout) is (name != "cohere2moe")
    assert ("cannot be split" in result.stdout) is (name == "cohere2moe")


@pytest.mark.parametrize(("name", "n_masks"), [("llama", 1), ("gemma3", 2), ("olmo2", 1), ("olmo2:windows", 2)])
def test_a_plan_knows_that_windows_take_a_separate_mask(name: str, n_masks: int, tmp_path: Path) -> None:
    shape = shape_of(inspect_model(make_tiny(name, tmp_path / "m.gguf")))
    assert shape.n_masks == n_masks
    load = Load(ctx_tokens=1024, n_lanes=8, window_cells="all")
    alike = compute_bytes(dataclasses.replace(shape, n_masks=1), load, is_last=False)
    assert compute_bytes(shape, load, is_last=False) - alike == (n_masks - 1) * 2 * load.max_rows * kv_cells(load)


@pytest.mark.parametrize(
    ("name", "chosen"), [("deepseek2", ()), ("deepseek32", (1,) * 5), ("glm-dsa:shared", (1, 1, 0, 0, 1, 0, 1))]
)
def test_a_plan_knows_the_memory_of_indexers(name: str, chosen: tuple[int, ...], tmp_path: Path) -> None:
    """A key more for each cell of a layer that chooses, and scores of all cells for each row of a step."""
    facts = inspect_model(make_tiny(name, tmp_path / "m.gguf"))
    assert facts.indexers == chosen
    latent_bytes = 2 * (KV_RANK + ROPE)
    assert facts.kv_bytes_per_token == tuple(
        latent_bytes + 2 * INDEX_KEY * has_indexer for has_indexer in chosen or (0,) * facts.n_layers
    )
    shape, load = shape_of(facts), Load(ctx_tokens=1024, n_lanes=8)
    without = compute_bytes(dataclasses.replace(shape, has_indexers=False), load, is_last=False)
    more = compute_bytes(shape, load, is_last=False) - without
    assert more == (6 * load.max_rows * kv_cells(load) if chosen else 0)


def test_sampling_that_a_model_recommends_is_shown_and_reaches_the_coordinators_file(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.min_p": 7.0}
    model = make_tiny("llama", tmp_path / "m.gguf", tokenizer=True, extra_values=keys)
    shown = CliRunner().invoke(inspect_command, [str(model)]).stdout
    assert "recommended sampling  temperature 0.6, top-k 20\n" in re.sub(" +\n", "\n", shown)
    assert "general.sampling.min_p is 7.0, not a number between 0 and 1; ignored" in shown
    facts = json.loads(CliRunner().invoke(inspect_command, [str(model), "--json"]).stdout)
    assert facts["recommended_sampling"] == {"temperature": 0.6, "top_k": 20}
    assert CliRunner().invoke(split_command, [str(model), "--cuts", "1", "-o", str(tmp_path / "out")]).exit_code == 0
    assert (
        dict(Tokenizer.load(tmp_path / "out" / "tokenizer.gguf").recommended.options) == facts["recommended_sampling"]
    )


def test_markup_in_a_model_name_is_only_text(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    model.write_bytes(model.read_bytes().replace(b"tiny llama", b"[/a] [red]"))
    assert "[/a] [red]" in CliRunner().invoke(inspect_command, [str(model)]).stdout


def test_a_model_name_moves_no_cursor(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    model.write_bytes(model.read_bytes().replace(b"tiny llama", b"t\x1b[2J\nllam"))
    assert inspect_model(model).model_name == "t\\x1b[2J\\nllam"


def test_incomplete_models(tmp_path: Path) -> None:
    for missing in (b"llama.block_count", b"llama.embedding_length", b"general.architecture", b"token_embd.weight"):
        model = make_tiny("llama", tmp_path / "m.gguf")
        model.write_bytes(model.read_bytes().replace(missing, b"x" * len(missing)))
        with pytest.raises(ModelFileError, match=r"missing|not a language model|not a complete"):
            inspect_model(model)
    model = make_tiny("llama", tmp_path / "m.gguf")
    model.write_bytes(model.read_bytes().replace(b"blk.3.", b"blk.9."))
    with pytest.raises(ModelFileError, match=r"holds blk\.9\..*, but only 6 layers"):
        inspect_model(model)


def test_split_command(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    arguments = [str(model), "--cuts", "2,4", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(split_command, arguments)
    assert result.exit_code == 0
    assert "stage-2.gguf" in result.stdout
    assert result.stderr == ""
    again = CliRunner().invoke(split_command, [*arguments, "--json"])
    assert json.loads(again.stdout)["cuts"] == [2, 4]
    assert "nothing written" in CliRunner().invoke(split_command, arguments).stdout


@pytest.mark.parametrize(
    "arguments", [[], ["--stages", "2", "--cuts", "1"], ["--cuts", "one"], ["--cuts", "1,"], ["--stages", "x"], ["--x"]]
)
def test_usage_errors(arguments: list[str], tmp_path: Path) -> None:
    (model := tmp_path / "m.gguf").touch()  # a missing one would be named first
    result = CliRunner().invoke(split_command, [str(model), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2


def test_split_command_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FAMILIES, "cohere2moe")
    model = make_tiny("cohere2moe", tmp_path / "m.gguf", n_layers=4)
    out = ["--out", str(tmp_path / "out")]
    runs = {
        ("nothing.gguf", "--stages", "2"): UsageError,
        (str(model), "--stages", "2"): UnsupportedArchitectureError,
        (str(model), "--cuts", "9", "--experimental"): CutError,
        (str(model), "--cuts", "3", "--experimental"): UnsupportedArchitectureError,
    }
    for arguments, error in runs.items():
        assert isinstance(CliRunner().invoke(split_command, [*arguments, *out]).exception, error)
    result = CliRunner().invoke(split_command, [str(model), "--cuts", "2", "--experimental", *out])
    assert result.exit_code == 0
    assert "relayline certify" in result.stderr


def test_progress_bar_only_on_a_terminal(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf")
    script = (
        "import sys; from relayline.deploy.cli.model import split_command; "
        "split_command(sys.argv[1:], standalone_mode=False)"
    )
    controller, terminal = pty.openpty()
    ended = subprocess.run(
        [sys.executable, "-c", script, str(model), "--stages", "2", "--out", str(tmp_path / "out")],
        cwd=ROOT, stderr=terminal, stdout=subprocess.PIPE, check=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(terminal)
    drawn = b""
    try:
        while piece := os.read(controller, 65_536):
            drawn += piece
    except OSError:
        pass  # Linux reports the closed other end so
    os.close(controller)
    assert b"splitting" in drawn
    assert b"0/? bytes" not in drawn, "nothing is drawn before the size is known"
    assert b"splitting" not in ended.stdout


def test_no_log_line_breaks_into_the_bar_of_a_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bar says on a terminal that the model is split; a file gets the line, and a terminal that can draw no bar."""
    model = make_tiny("llama", tmp_path / "m.gguf")
    caplog.set_level(logging.INFO)
    kinds = ((True, "xterm", True), (False, "xterm", False), (True, "dumb", False))
    for at, (is_terminal, term, has_bar) in enumerate(kinds):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, _environ={"TERM": term})
        monkeypatch.setattr(progress, "error_console", lambda console=console: console)
        monkeypatch.setattr(splits, "error_console", lambda console=console: console)
        caplog.clear()
        splits.split_for(model, 2, None, tmp_path / str(at))
        (record,) = (each for each in caplog.records if each.message.startswith("splitting"))
        assert getattr(record, "is_printed", False) is has_bar
        assert isinstance(console.file, io.StringIO)
        assert bool(console.file.getvalue()) is has_bar, "not an empty line either"
