"""An EAGLE-3 model of a launch: held against the model before it is split, counted in plans, and completed."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relayline.coordinator.model.eagle3 import served
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.memory import stage_memory
from relayline.deploy.doctor.files import look_draft_model
from relayline.deploy.launch.companions import check_companions
from relayline.deploy.launch.draft_model import served_draft_model
from relayline.deploy.launch.eagle3 import inner_layers, served_eagle3
from relayline.deploy.launch.prepare import override
from relayline.deploy.manifest import Manifest
from relayline.deploy.manifest.smallest import smallest_manifest
from relayline.deploy.models.recut import shape_reader
from relayline.deploy.planning.drafting import draft_memory
from relayline.deploy.planning.inputs import instance_of
from relayline.wire.common.errors import ArtifactError, ModelFileError, StartError, UsageError
from relayline.wire.model_files.eagle3 import GUESSES, read_eagle3
from relayline.wire.settings.table import ServingSettings
from tests.support.tiny_eagle import make_eagle
from tests.support.tiny_models import TOKENS, make_tiny
from tests.support.tiny_shapes import HEAD, N_EMBD, N_KV_HEADS

LAYERS = (1, 2, 4)
VOCAB = {"vocab": len(TOKENS), "tokenizer": True}


def manifest_with(model: Path, draft_model: Path, **more: object) -> Manifest:
    return override(smallest_manifest(model), {"coordinator.draftModel": str(draft_model), **more})


@pytest.fixture(name="model")
def model_fixture(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "model.gguf", tokenizer=True)


@pytest.fixture(name="eagle")
def eagle_fixture(tmp_path: Path) -> Path:
    return make_eagle(tmp_path / "eagle.gguf", LAYERS, own_table=False, **VOCAB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"target_width": 32}, "reads rows of 32 values, and the model's have 64"),
        ({"vocab": 64, "tokenizer": False}, "its vocabulary has 64 tokens, that of the model"),
        ({"layers": (1, 2, 6)}, "reads the input of layer 6, and the model has layers 0 to 5"),
        ({"width": 32, "own_table": False}, "its rows have 32 values, too few or too many"),
        ({"tokenizer": False}, "a draft model needs the same vocabulary"),
    ],
    ids=str,
)
def test_one_for_another_model_is_refused_before_the_split(
    model: Path, tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    other = make_eagle(tmp_path / "other.gguf", **{"layers": LAYERS, **VOCAB, **more})
    with pytest.raises((UsageError, ModelFileError), match=rf"^--draft-model: .*other\.gguf: .*{says}"):
        check_companions(manifest_with(model, other), model)


@pytest.mark.parametrize("family", ["deepseek4", "gemma4:e2b", "falcon"])
def test_a_model_whose_stages_cannot_hand_inner_rows_on_is_named(family: str, tmp_path: Path) -> None:
    model, eagle = make_tiny(family, tmp_path / "model.gguf"), make_eagle(tmp_path / "eagle.gguf", LAYERS)
    says = rf"inner rows, which stages of {inspect_model(model).architecture} cannot hand on"
    with pytest.raises(UsageError, match=says):
        check_companions(manifest_with(model, eagle), model)


def test_it_excludes_prediction_layers(model: Path, eagle: Path) -> None:
    check_companions(manifest_with(model, eagle), model)
    with pytest.raises(UsageError, match="--mtp-drafts 2 both draft on the last stage"):
        check_companions(manifest_with(model, eagle, **{"batching.mtpDrafts": 2}), model)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {}, ""),
        ("qwen35", {}, "does nothing without --rewind-rows N: tiny qwen35 has recurrent states"),
        ("qwen35", {"context.rewindRows": 4}, ""),
        ("gpt-oss", {"context.kvLayout": "unified"}, "does nothing with shared KV cells: tiny gpt-oss has sliding"),
        ("gpt-oss", {"context.kvLayout": "per-lane"}, ""),
    ],
    ids=str,
)
def test_what_keeps_it_from_drafting_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, changes: dict[str, object], says: str
) -> None:
    model, eagle = make_tiny(family, tmp_path / "model.gguf"), make_eagle(tmp_path / "eagle.gguf", LAYERS)
    with caplog.at_level(logging.WARNING, logger="relayline.up"):
        check_companions(manifest_with(model, eagle, **changes), model)
    messages = [record.getMessage() for record in caplog.records if record.name == "relayline.up"]
    assert [says in message for message in messages] == [True] * bool(says)


def test_a_plan_counts_it_on_the_last_stage_and_its_rows_between_stages(model: Path, eagle: Path) -> None:
    facts = inspect_model(model)
    plain, drafted = (
        instance_of(manifest, facts) for manifest in (smallest_manifest(model), manifest_with(model, eagle))
    )
    edges = [(0, 3), (3, 6)]
    two, one = drafted.link_bytes(1, edges)[1], plain.link_bytes(1, edges)[1]
    assert two - one == 2 * 2 * N_EMBD, "the inputs of layers 1 and 2, in f16"
    first, last = ([stage_memory(each.model, each.load, *edge) for each in (plain, drafted)] for edge in edges)
    assert first[0].weights_bytes == first[1].weights_bytes
    weights_bytes = read_eagle3(eagle).weights_bytes + facts.embedding_bytes
    assert last[1].weights_bytes - last[0].weights_bytes == weights_bytes
    cells_bytes = (last[1].kv_bytes - last[0].kv_bytes) // (2 * 2 * N_KV_HEADS * HEAD)
    assert cells_bytes >= drafted.load.n_lanes * drafted.load.ctx_tokens
    assert drafted.load.mtp_drafts == GUESSES
    assert draft_memory(manifest_with(model, eagle).serving) is None, "the coordinator's machine holds nothing of it"
    read = shape_reader(model, "", str(eagle))
    assert read is not None
    assert read().head_bytes == facts.head_bytes + weights_bytes
    (finding,) = look_draft_model(manifest_with(model, eagle))
    assert "an EAGLE-3 model of 0.00 GiB, counted on the last stage" in finding.found


def test_a_coordinator_gives_the_last_stage_a_file_with_the_models_token_table(
    model: Path, eagle: Path, tmp_path: Path
) -> None:
    file = split_model(model, tmp_path / "split", cuts=(2,))
    serving = served_draft_model(ServingSettings(draft_model=str(eagle)), tmp_path / "split" / file.tokenizer.file)
    assert inner_layers(serving) == LAYERS
    drafter = served_eagle3(serving, tmp_path / "split", None)
    assert drafter is not None
    assert read_eagle3(drafter.path).has_table
    whole = make_eagle(tmp_path / "whole.gguf", LAYERS, **VOCAB)  # type: ignore[arg-type]
    own = served_eagle3(ServingSettings(draft_model=str(whole)), tmp_path / "split", None)
    assert own is not None
    assert own.path == whole, "it has a table of its own"
    assert served_eagle3(ServingSettings(draft_model=str(model)), tmp_path / "split", None) is None


def test_the_table_of_a_model_on_the_hub_is_read_from_there(model: Path, eagle: Path, tmp_path: Path) -> None:
    file = split_model(model, tmp_path / "split", cuts=(2,))
    slice_ = tmp_path / "split" / file.stages[0].file
    expected = served(read_eagle3(eagle), tmp_path / "split", file, None)
    content = slice_.read_bytes()
    unread = msgspec.structs.replace(
        file, stages=(msgspec.structs.replace(file.stages[0], unread=True), file.stages[1])
    )

    def read(offset: int, end: int, _: threading.Event) -> Iterator[bytes]:
        for start in range(offset, end, 1_000):
            yield content[start : start + 1_000]

    expected.path.unlink()
    with slice_.open("r+b") as hollow:
        hollow.seek(-2_000, 2)
        hollow.write(bytes(2_000))
    assert served(read_eagle3(eagle), tmp_path / "split", unread, read) == expected
    expected.path.unlink()
    with pytest.raises(ArtifactError, match="the token table is on the hub"):
        served(read_eagle3(eagle), tmp_path / "split", unread, None)


def test_a_disk_that_cannot_take_the_file_is_named(
    model: Path, eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = split_model(model, tmp_path / "split", cuts=(2,))
    monkeypatch.setattr("relayline.coordinator.model.eagle3.replaced", full)
    with pytest.raises(StartError, match="the draft model's file: No space left on device"):
        served(read_eagle3(eagle), tmp_path / "split", file, None)
