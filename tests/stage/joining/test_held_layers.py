"""Goal: layers that a host has fetched before are not fetched again, and the new artifact is the same to the byte."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from relayline.coordinator.joining import service as join_service
from relayline.coordinator.joining.artifact_reader import read_chunks
from relayline.coordinator.model.cuts import legal_cuts
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.coordinator.model.split import split_model
from relayline.stage.engine.loading import Load
from relayline.stage.joining import artifact_fetch, held_layers
from relayline.stage.joining.artifact_fetch import obtain
from relayline.stage.joining.artifact_store import cached
from relayline.stage.joining.held_layers import held_stretches
from relayline.wire.model_files.gguf_header import read_header
from tests.support.join_support import join_port
from tests.support.tiny_models import make_tiny

WAIT_S = 60
N_LAYERS = 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(artifact_fetch, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(artifact_fetch, "RETRY_MAX_S", 0.0)
    monkeypatch.setattr(held_layers, "LOOK_FIRST_BYTES", 512)
    monkeypatch.setattr(held_layers, "HELD_BYTES_MIN", 1 << 12)
    monkeypatch.setattr(held_layers, "COPY_BYTES", 10_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


class Sent:
    """Counts what the coordinator reads for stages: (offset, end) of each request."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []

    async def __call__(
        self, path: Path, offset: int, size_bytes: int, end: int = 0
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        self.parts.append((offset, end or size_bytes))
        async for at, data in read_chunks(path, offset, size_bytes, end):
            yield at, data

    @property
    def n_bytes(self) -> int:
        return sum(end - offset for offset, end in self.parts)


class Older(Sent):
    """A coordinator that knows no end of a request."""

    async def __call__(
        self, path: Path, offset: int, size_bytes: int, end: int = 0
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        self.parts.append((offset, end or size_bytes))
        async for at, data in read_chunks(path, offset, size_bytes):
            yield at, data


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    spy = Sent()
    monkeypatch.setattr(join_service, "read_chunks", spy)
    return spy


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, PipelineFile]]:
    """Splits of one model at one cut."""
    directory = tmp_path_factory.mktemp("splits")
    model = make_tiny("llama", directory / "m.gguf", n_layers=N_LAYERS, tokenizer=True, quant="f16")
    return {cut: (directory / f"{cut}", split_model(model, directory / f"{cut}", cuts=(cut,))) for cut in (3, 4, 5)}


async def fetched(split: tuple[Path, PipelineFile], index: int, cache: Path) -> Path:
    directory, made = split
    name = f"box{index + 1}"
    async with asyncio.timeout(WAIT_S), join_port(directory, made=made) as port:
        member = await port.join(name, name)
        try:
            return (await obtain(member, cache, Load(), always_fetch=True)).artifact
        finally:
            await member.close()


@pytest.mark.parametrize(("first", "then", "index"), [(4, 5, 0), (4, 3, 0), (4, 3, 1), (4, 5, 1)])
async def test_only_new_layers_are_fetched(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path, first: int, then: int, index: int
) -> None:
    await fetched(splits[first], index, tmp_path)
    sent.parts.clear()
    path = await fetched(splits[then], index, tmp_path)
    wanted = splits[then][0] / f"stage-{index}.gguf"
    assert path.read_bytes() == wanted.read_bytes()
    header = read_header(wanted)
    is_layer = {each.name: each.name.startswith("blk.") for each in header.tensors}
    layer_bytes = sum(each.size_bytes for each in header.tensors if each.name.startswith("blk.0."))
    fetched_bytes = min(each.offset for each in header.tensors) + 2 * held_layers.HELD_BYTES_MIN
    if index == 0:  # of small stand-ins for a head, which no other stage needs
        fetched_bytes += sum(each.size_bytes for each in header.tensors if not is_layer[each.name])
    if (then > first) == (index == 0):
        fetched_bytes += layer_bytes
    assert sent.n_bytes <= fetched_bytes, "no layer and no table twice"
    assert sent.parts == sorted(sent.parts)


async def test_without_earlier_artifacts_all_is_one_request(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path
) -> None:
    path = await fetched(splits[4], 0, tmp_path)
    assert sent.parts == [(0, path.stat().st_size)]


async def test_those_of_another_model_are_no_use(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path
) -> None:
    other = make_tiny("llama", tmp_path / "o.gguf", n_layers=N_LAYERS, tokenizer=True, quant="f16", seed=2)
    await fetched((tmp_path / "o", split_model(other, tmp_path / "o", cuts=(4,))), 0, tmp_path / "cache")
    sent.parts.clear()
    path = await fetched(splits[4], 0, tmp_path / "cache")
    assert path.read_bytes() == (splits[4][0] / "stage-0.gguf").read_bytes()
    assert sent.n_bytes == path.stat().st_size


@pytest.mark.parametrize("damage", ["content", "gone", "cut short"])
async def test_an_earlier_artifact_that_was_altered_is_not_used(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path, damage: str
) -> None:
    earlier = await fetched(splits[4], 0, tmp_path)
    content = earlier.read_bytes()
    match damage:
        case "content":
            earlier.write_bytes(content[:-40_000] + bytes(40_000))
        case "gone":
            earlier.unlink()
        case "cut short":
            earlier.write_bytes(content[:-40_000])
    sent.parts.clear()
    path = await fetched(splits[5], 0, tmp_path)
    assert path.read_bytes() == (splits[5][0] / "stage-0.gguf").read_bytes()
    assert sent.n_bytes == path.stat().st_size


async def test_a_copy_with_wrong_bytes_is_found_and_all_is_fetched(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = await fetched(splits[4], 0, tmp_path)
    earlier.write_bytes(earlier.read_bytes()[:-40_000] + bytes(40_000))
    monkeypatch.setattr(held_layers, "_is_unaltered", lambda path: True)  # as if its disk had changed it unseen
    path = await fetched(splits[5], 0, tmp_path)
    assert path.read_bytes() == (splits[5][0] / "stage-0.gguf").read_bytes()
    assert sent.parts[-1] == (0, path.stat().st_size)


async def test_an_earlier_artifact_that_vanishes_is_fetched_on(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = await fetched(splits[4], 0, tmp_path)
    take, n_takes = held_layers.HeldLayers.take, 0

    def vanishing(self: held_layers.HeldLayers, writer: held_layers.Writer) -> bool:
        nonlocal n_takes
        found = take(self, writer)
        n_takes += found
        if n_takes == 2:
            earlier.unlink()
        return found

    monkeypatch.setattr(held_layers.HeldLayers, "take", vanishing)
    path = await fetched(splits[5], 0, tmp_path)
    assert path.read_bytes() == (splits[5][0] / "stage-0.gguf").read_bytes()
    assert n_takes == 2


async def test_an_interrupted_fetch_goes_on_within_layers_that_are_held(
    splits: dict[int, tuple[Path, PipelineFile]], sent: Sent, tmp_path: Path
) -> None:
    await fetched(splits[4], 0, tmp_path)
    wanted = (splits[5][0] / "stage-0.gguf").read_bytes()
    directory, made = splits[5]
    place = tmp_path / made.stages[0].sha256
    place.mkdir()
    (place / "stage-0.gguf.partial").write_bytes(wanted[: len(wanted) // 2])
    sent.parts.clear()
    path = await fetched((directory, made), 0, tmp_path)
    assert path.read_bytes() == wanted
    assert all(offset > len(wanted) // 2 for offset, _ in sent.parts)


async def test_an_older_coordinator_sends_all_and_is_left(
    splits: dict[int, tuple[Path, PipelineFile]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fetched(splits[4], 0, tmp_path)
    monkeypatch.setattr(join_service, "read_chunks", Older())
    path = await fetched(splits[5], 0, tmp_path)
    assert path.read_bytes() == (splits[5][0] / "stage-0.gguf").read_bytes()


def test_whole_models_and_other_layers_share_nothing(
    splits: dict[int, tuple[Path, PipelineFile]], tmp_path: Path
) -> None:
    model = make_tiny("llama", tmp_path / "m.gguf", n_layers=N_LAYERS, tokenizer=True, quant="f16")
    split_model(model, tmp_path / "one", n_stages=1)
    whole = read_header(tmp_path / "one" / "stage-0.gguf")
    first, second = (read_header(splits[4][0] / f"stage-{index}.gguf") for index in range(2))
    assert held_stretches(first, whole) == held_stretches(whole, first) == held_stretches(first, second) == ()
    layers, tables = held_stretches(first, first)
    blocks = [each for each in first.tensors if each.name.startswith("blk.")]
    assert (layers.start, layers.end) == (blocks[0].offset, blocks[-1].offset + blocks[-1].size_bytes)
    assert (tables.start, tables.end) == (first.value("relayline.embedding.offset_bytes"), first.size_bytes)
    (everything,) = held_stretches(second, second)
    assert (everything.start, everything.end) == (min(each.offset for each in second.tensors), second.size_bytes)
    assert len(cached(tmp_path / "none")) == 0


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3:27b", "glm4:bias", "deepseek4:hash", "gemma4:e2b", "qwen35:mtp", "qwen3:reranker", "kimi-k3"],
)
def test_stretches_have_the_same_bytes_in_both(tmp_path: Path, family: str) -> None:
    """Layers that only the hub has come without a hash, so that a wrong copy would be found by nobody."""
    model = make_tiny(family, tmp_path / "m.gguf", quant="f16")
    cuts = legal_cuts(inspect_model(model))
    files = []
    for cut in {cuts[0], cuts[-1]}:
        split_model(model, tmp_path / f"{cut}", cuts=(cut,))
        files += [tmp_path / f"{cut}" / f"stage-{index}.gguf" for index in range(2)]
    n_compared = 0
    for one, other in itertools.permutations(files, 2):
        content, earlier = one.read_bytes(), other.read_bytes()
        for held in held_stretches(read_header(one), read_header(other)):
            n_bytes = held.end - held.start
            assert content[held.start : held.end] == earlier[held.offset : held.offset + n_bytes]
            n_compared += n_bytes
    assert n_compared
