"""`relayline certify` as a user runs it: real processes, real wire, real exit codes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import load_pipeline, store_pipeline
from relayline.coordinator.model.split import split_model
from relayline.deploy.certify import pipeline as certify_pipeline
from relayline.deploy.certify import run as certify_run
from relayline.deploy.certify.pipeline import SplitConfig, run_split
from relayline.deploy.certify.workload import Script
from relayline.deploy.cli.main import main
from relayline.deploy.launch.child import Child
from relayline.deploy.launch.local import stage_child
from relayline.wire.common.child_command import module_command
from relayline.wire.common.errors import StageLostError, UsageError
from relayline.wire.envelopes.dtypes import DTYPE_F32
from relayline.wire.model_files.gguf_header import read_header
from tests.support.tiny_models import make_tiny

TIMEOUT_S = 120


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """The directory of the command's temporary artifacts."""
    directory = tmp_path / "scratch"
    directory.mkdir()
    return directory


def command(*arguments: object) -> list[str]:
    return module_command("relayline.deploy.cli", "certify", *map(str, arguments))


def environment(scratch: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(scratch.parent / "cache"), "COLUMNS": "120"}


def certify(scratch: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), env=environment(scratch), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert not list(scratch.iterdir()), "temporary artifacts were left behind"
    assert not processes_over(scratch.parent), "processes were left behind"
    return done


def certify_json(scratch: Path, *arguments: object, expect: int = 0) -> dict[str, Any]:
    done = certify(scratch, *arguments, "--json")
    assert done.returncode == expect, done.stderr
    assert done.stderr == ""
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["verdict"] == ("pass" if expect == 0 else "fail")
    return report


def processes_over(directory: Path) -> list[str]:
    """Return the command lines of running processes that name the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it had ended before
        if str(directory) in text and "relayline.deploy.cli" in text:
            found.append(text)
    return found


# --- sound splits -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_cut_of_a_sound_split_passes(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=3)
    report = certify_json(scratch, model)
    assert (report["model"], report["wire"], report["architecture"]) == (str(model), "f32", "llama")
    assert [cut["cuts"] for cut in report["cuts"]] == [[1], [2]]
    assert report["noise"]["max_relative"] > 0, "float32 sums depend on the batch shape"
    for cut in report["cuts"]:
        assert (cut["verdict"], cut["problem"]) == ("pass", None)
        assert cut["rows"] == 6 * 25, "a prefill and 24 steps of one session alone and five together"
        assert cut["alone"]["rows"] == 25
        assert cut["alone"]["max_relative"] <= report["tolerance"]["alone_relative"]
        assert cut["max_relative"] <= report["tolerance"]["max_relative"]
        assert 0 <= cut["mean_kl"] <= report["tolerance"]["mean_kl"]
        assert cut["top1_agree"] == pytest.approx(cut["top1_agreement"] * cut["rows"])
        assert cut["sessions_per_step_max"] == 5, "the mixed batch was never whole"


@pytest.mark.slow
def test_a_quantised_model_in_three_stages(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("qwen3", tmp_path / "model.gguf", n_layers=3, quant="q8_0", tokenizer=True)
    done = certify(scratch, model, "--stages", 3, "--seeds", "4,5", "--steps", 16)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "qwen3, 3 layers, f32 wire, per-lane KV cells, 204 rows per cut" in done.stdout
    assert "float noise of the unsplit model: run again 0.0e+00" in done.stdout
    assert "pass: 1 of 1 may be trusted" in done.stdout


@pytest.mark.slow
def test_per_lane_cells_compute_as_the_whole_does(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=3)
    (cut,) = certify_json(scratch, model, "--cuts", 1, "--kv-layout", "per-lane")["cuts"]
    assert (cut["verdict"], cut["sessions_per_step_max"]) == ("pass", 5)


def test_f16_reports_how_far_it_agrees(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=2)
    (cut,) = certify_json(scratch, model, "--cuts", 1, "--wire", "f16")["cuts"]
    assert cut["alone"]["max_abs"] > 0, "rounding to f16 leaves a trace"
    assert cut["top1_agreement"] > 0.9


# --- broken splits ----------------------------------------------------------------------------------------------------


def corrupt(directory: Path, stage: int, tensor: str) -> None:
    """Change one byte of a tensor so that no checksum notices."""
    pipeline = load_pipeline(directory)
    path = directory / pipeline.stages[stage].file
    (found,) = [each for each in read_header(path).tensors if each.name == tensor]
    data = bytearray(path.read_bytes())
    data[found.offset + 2] ^= 0x40  # the first weight of the first block, behind its scale
    path.write_bytes(data)
    stages = list(pipeline.stages)
    stages[stage] = msgspec.structs.replace(stages[stage], sha256=hashlib.sha256(data).hexdigest())
    store_pipeline(directory, msgspec.structs.replace(pipeline, stages=tuple(stages)))


@pytest.mark.slow
def test_one_wrong_weight_fails_the_cut_that_has_it(tmp_path: Path, scratch: Path) -> None:
    """One quantised weight moves logits less than this model's own noise between batch shapes."""
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=3, quant="q8_0")
    keep = tmp_path / "keep"
    for cut in (1, 2):
        split_model(model, keep / f"cuts-{cut}", cuts=(cut,))
    corrupt(keep / "cuts-2", 1, "blk.0.ffn_down.weight")
    sound, broken = certify_json(scratch, model, "--keep", keep, expect=1)["cuts"]
    assert (sound["cuts"], sound["verdict"]) == ([1], "pass")
    assert (broken["cuts"], broken["verdict"]) == ([2], "fail")
    assert "a session alone differs by" in broken["problem"]
    assert load_pipeline(keep / "cuts-2").cuts == (2,), "kept artifacts stay"


@pytest.mark.slow
def test_f16_fails_when_another_model_answers(tmp_path: Path, scratch: Path) -> None:
    """The blocks of a stage replaced by those of a model with other weights; the table names the cut."""
    model, other = (make_tiny("llama", tmp_path / f"{seed}.gguf", n_layers=2, seed=seed) for seed in (1, 2))
    keep = tmp_path / "keep"
    pipeline = split_model(model, keep / "cuts-1", cuts=(1,))
    split_model(other, tmp_path / "other", cuts=(1,))
    path, foreign = keep / "cuts-1" / pipeline.stages[1].file, tmp_path / "other" / pipeline.stages[1].file
    data, source = bytearray(path.read_bytes()), foreign.read_bytes()
    for mine, theirs in zip(read_header(path).tensors, read_header(foreign).tensors, strict=True):
        if mine.name.startswith("blk."):
            data[mine.offset : mine.offset + mine.size_bytes] = source[theirs.offset :][: theirs.size_bytes]
    path.write_bytes(data)
    stages = (pipeline.stages[0], msgspec.structs.replace(pipeline.stages[1], sha256=hashlib.sha256(data).hexdigest()))
    store_pipeline(keep / "cuts-1", msgspec.structs.replace(pipeline, stages=stages))
    done = certify(scratch, model, "--keep", keep, "--wire", "f16")
    assert done.returncode == 1
    assert "cut 1: another top token across a margin of" in done.stdout
    assert "fail: 0 of 1 may be trusted" in done.stdout


def test_a_kept_artifact_that_was_altered_is_made_again(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=2)
    pipeline = split_model(model, tmp_path / "keep" / "cuts-1", cuts=(1,))
    path = tmp_path / "keep" / "cuts-1" / pipeline.stages[1].file
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 0x7F]))
    (cut,) = certify_json(scratch, model, "--keep", tmp_path / "keep")["cuts"]
    assert cut["verdict"] == "pass"
    assert path.read_bytes() == sound


def test_a_native_abort_is_named_as_such(tmp_path: Path, scratch: Path) -> None:
    """llama.cpp aborts on a slice of granite_swa that states no layer with a sliding window."""
    model = make_tiny("granite_swa", tmp_path / "model.gguf")
    keep = tmp_path / "keep"
    pipeline = split_model(model, keep / "cuts-4", cuts=(4,))
    path = keep / "cuts-4" / pipeline.stages[1].file
    data, key = bytearray(path.read_bytes()), b"granite_swa.attention.sliding_window_pattern"
    first = data.index(key) + len(key) + 16  # behind the types of array and item and the length
    assert data[first : first + 4] == bytes([1, 1, 1, 0])
    data[first : first + 4] = bytes(4)
    path.write_bytes(data)
    stages = (pipeline.stages[0], msgspec.structs.replace(pipeline.stages[1], sha256=hashlib.sha256(data).hexdigest()))
    store_pipeline(keep / "cuts-4", msgspec.structs.replace(pipeline, stages=stages))
    (cut,) = certify_json(scratch, model, "--keep", keep, "--cuts", 4, expect=1)["cuts"]
    assert "stage-1 ended with signal SIGABRT" in cut["problem"]
    assert "GGML_ASSERT" in cut["problem"]


async def test_a_stage_that_dies_in_the_middle_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=2)
    split_model(model, tmp_path / "split", cuts=(1,))
    stages: list[Child] = []

    def remembered(*arguments: Any, **named: Any) -> Child:
        stages.append(stage_child(*arguments, **named))
        return stages[-1]

    monkeypatch.setattr(certify_pipeline, "stage_child", remembered)
    n_tokens = 0

    def kill_at_the_tenth() -> None:
        nonlocal n_tokens
        n_tokens += 1
        if n_tokens == 10:
            os.kill(stages[1].pid, signal.SIGKILL)

    config = SplitConfig(tmp_path / "split", DTYPE_F32, 1, ("--no-verify", "--no-calibrate", "--ctx", "64"))
    with pytest.raises(StageLostError, match="stage-1 ended with signal SIGKILL"):
        await run_split(config, [(Script("s", (1, 2, 3), 0.0, 1),)], 40, lambda *_: None, kill_at_the_tenth)
    assert n_tokens < 40
    assert all(stage.exited.is_set() for stage in stages)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, scratch: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=2)
    process = subprocess.Popen(
        command(model, "--cuts", 1, "--steps", 128, "--verbose"),
        env=environment(scratch),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "pipeline ready" in line:
            assert list(scratch.iterdir())
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, "".join(seen) + rest
    assert rest.splitlines()[-1] == "relayline: error: interrupted"
    assert not list(scratch.iterdir())
    assert not processes_over(tmp_path)


# --- wrong things -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong:
    family: str
    arguments: tuple[str, ...]
    exit_code: int
    text: str


WRONG = {
    "architecture": Wrong(
        "cohere2moe", (), 1, "cohere2moe model cannot be split: its architecture has not been certified; "
    ),
    "cut": Wrong("llama", ("--cuts", "9"), 2, "cut 9 is outside the model's 2 layers"),
    "not a cut": Wrong("llama", ("--cuts", "one"), 2, "'one' is not a list of layer numbers"),
    "both": Wrong("llama", ("--cuts", "1", "--stages", "2"), 2, "give either --stages or --cuts, not both"),
    "stages": Wrong("llama", ("--stages", "3"), 2, "2 layers cannot make 3 stages"),
    "context": Wrong("llama", ("--ctx", "100"), 2, "--ctx 100 is too small: the longest session takes 175 tokens"),
    "cache": Wrong("llama", ("--kv-type", "f8"), 2, "--kv-type f8 is unknown"),
    "seeds": Wrong("llama", ("--seeds", "x"), 2, "'x' is not a list of at most 16 numbers"),
}


def refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Run the command here; return its exit code and its one line of error."""
    for logger in (logging.getLogger(), logging.getLogger("relayline")):  # the command sets logging up for a process
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(sys, "argv", ["relayline", "certify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("relayline: error: ")
    assert "Traceback" not in captured.err
    assert isinstance(ended.value.code, int)
    return ended.value.code, line


@pytest.mark.parametrize("name", WRONG)
def test_wrong_things_are_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = WRONG[name]
    monkeypatch.delitem(FAMILIES, "cohere2moe")
    model = make_tiny(wrong.family, tmp_path / "model.gguf", n_layers=2)
    code, line = refused([str(model), *wrong.arguments], monkeypatch, capsys)
    assert (code, wrong.text in line) == (wrong.exit_code, True), line


def test_a_stage_is_not_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", n_layers=2)
    pipeline = split_model(model, tmp_path / "split", cuts=(1,))
    code, line = refused([str(tmp_path / "split" / pipeline.stages[0].file)], monkeypatch, capsys)
    assert (code, "is already one stage of a split" in line) == (1, True), line


def test_no_model_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.gguf").write_text("not a model, however long this line may be")
    code, line = refused([str(tmp_path / "text.gguf")], monkeypatch, capsys)
    assert (code, "text.gguf" in line) == (1, True), line


async def test_a_directory_that_cannot_be_made_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def began(_: object) -> None:
        pytest.fail("the model was measured before the refusal")

    monkeypatch.setattr(certify_run._Certification, "measure", began)
    (tmp_path / "file").write_text("")
    model = make_tiny("llama", tmp_path / "tiny.gguf")
    config = certify_run.CertifyConfig(model, keep=tmp_path / "file" / "keep")
    facts = inspect_model(model)
    with pytest.raises(UsageError, match=r"^--keep .*/file/keep: cannot be used as a directory: Not a directory$"):
        await certify_run.certify(config, facts, lambda *_: None, lambda *_: None)
