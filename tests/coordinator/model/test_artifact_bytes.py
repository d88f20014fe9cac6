"""Goal: an artifact's bytes are the same from any offset and any source, and a source is asked for few, long parts."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from relayline.coordinator.model.artifact_bytes import artifact_bytes, unread_name
from relayline.coordinator.model.gguf_file import GgufModel, open_model
from relayline.coordinator.model.origin import origins_of
from relayline.coordinator.model.slices import PlannedArtifact
from relayline.coordinator.model.split import planned_stage, split_model
from relayline.wire.common.errors import ModelFileError
from tests.support.hollow_models import ReadInOneGo, hollowed, joined
from tests.support.shards import shard
from tests.support.tiny_models import make_tiny

# Those that copy alike, multiply vectors, reorder rows of heads, and have further tables behind stage 0's data.
FAMILIES = ("llama", "gemma3:27b", "glm4:bias", "deepseek4:hash", "qwen3:reranker")

BYTEWISE_MAX = 10_000  # bytes that are read one by one


class Case:
    """A model, and the files of its split at one cut."""

    def __init__(self, family: str, directory: Path, n_shards: int = 1) -> None:
        path = make_tiny(family, directory / "tiny.gguf", quant="f16")
        self.path = shard(path, directory / "shards", n_shards) if n_shards > 1 else path
        split = split_model(self.path, directory / "split", n_stages=2)
        self.model, self.cuts = open_model(self.path), split.cuts
        self.files = [(directory / "split" / stage.file).read_bytes() for stage in split.stages]
        self.planned = [planned_stage(self.model, self.cuts, stage.index) for stage in split.stages]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {family: Case(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}
    return {**found, "shards": Case("llama", tmp_path_factory.mktemp("shards"), n_shards=3)}


def kinds_of(planned: list[PlannedArtifact]) -> set[str]:
    found = set()
    for artifact in planned:
        found |= {"trailer"} if len(artifact.trailers) > 1 else set()
        for tensor in artifact.tensors:
            found |= {"zeros"} if tensor.source is None else {"kept"}
            found |= {"factor"} if tensor.factor != 1.0 else set()
            found |= {"order"} if tensor.row_order else set()
    return found


def test_the_families_have_every_kind_of_tensor(cases: dict[str, Case]) -> None:
    found = set.union(*(kinds_of(case.planned) for case in cases.values()))
    assert found == {"zeros", "kept", "factor", "order", "trailer"}


@pytest.mark.parametrize("name", [*FAMILIES, "shards"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_bytes_are_those_of_the_file_from_any_offset(cases: dict[str, Case], name: str, data: st.DataObject) -> None:
    case = cases[name]
    for planned, content in zip(case.planned, case.files, strict=True):
        edges = [0, len(planned.header), len(content) - 1, len(content)]
        offset = data.draw(st.sampled_from(edges) | st.integers(0, len(content)))
        sizes = [1, 333, 4_096] if len(content) - offset <= BYTEWISE_MAX else [333, 4_096]
        source = ReadInOneGo(case.model, piece_bytes=data.draw(st.sampled_from(sizes)))
        assert joined(artifact_bytes(planned, source, offset)) == content[offset:]


def test_tensors_that_follow_each_other_are_one_request(cases: dict[str, Case]) -> None:
    case = cases["llama"]
    source = ReadInOneGo(case.model)
    joined(artifact_bytes(case.planned[1], source))
    wanted = {tensor.source.name for tensor in case.planned[1].tensors if tensor.source is not None}
    n_files = len(case.model.files)
    assert len(wanted) > 4 * n_files
    assert len(source.asked) <= 3


@pytest.mark.parametrize("name", [*FAMILIES, "shards"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=20, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_bytes_up_to_an_end_are_those_of_the_file(cases: dict[str, Case], name: str, data: st.DataObject) -> None:
    case = cases[name]
    for planned, content in zip(case.planned, case.files, strict=True):
        end = data.draw(st.integers(1, len(content)))
        offset = data.draw(st.integers(0, end - 1))
        found = joined(artifact_bytes(planned, ReadInOneGo(case.model, piece_bytes=4_096), offset, end))
        assert found[: end - offset] == content[offset:end]


def test_no_more_is_asked_for_than_up_to_the_end(cases: dict[str, Case]) -> None:
    """A stage looks at a header's first bytes before it knows what it lacks; the tensor behind may be a gigabyte."""
    case = cases["llama"]
    planned = case.planned[1]
    first = planned.tensors[0].source
    assert first is not None
    for n_bytes in (1, first.size_bytes // 2):
        source = ReadInOneGo(case.model)
        joined(artifact_bytes(planned, source, 0, len(planned.header) + n_bytes))
        assert source.asked == [(first.file_index, first.offset, first.offset + n_bytes)]


def test_a_shard_is_its_own_request(cases: dict[str, Case]) -> None:
    case = cases["shards"]
    source = ReadInOneGo(case.model)
    joined(artifact_bytes(case.planned[0], source))
    assert {index for index, _, _ in source.asked} == {
        tensor.source.file_index for tensor in case.planned[0].tensors if tensor.source is not None
    } | {trailer.file_index for trailer in case.planned[0].trailers}


def hollow_of(case: Case, directory: Path) -> GgufModel:
    return open_model(hollowed(case.path, directory))


def test_the_name_of_unread_bytes_is_of_content_and_place(cases: dict[str, Case], tmp_path: Path) -> None:
    case = cases["llama"]
    origins = origins_of(hollow_of(case, tmp_path))
    names = [unread_name(planned, origins) for planned in case.planned]
    assert len({*names, *(unread_name(case.planned[0], origins) for _ in range(3))}) == 2
    assert all(len(name) == 64 and int(name, 16) >= 0 for name in names)
    (origin,) = origins
    moved = [type(origin)("other/repo", "b.gguf", "beef", origin.etag, origin.size_bytes)]
    other = [type(origin)(origin.repo, origin.file, origin.commit, "0" * 64, origin.size_bytes)]
    assert unread_name(case.planned[0], moved) == names[0], "the content is the same"
    assert unread_name(case.planned[0], other) != names[0]


def test_a_model_that_shrank_is_named(cases: dict[str, Case], tmp_path: Path) -> None:
    from relayline.coordinator.model.artifact_bytes import local_files

    path = make_tiny("llama", tmp_path / "tiny.gguf")
    model = open_model(path)
    planned = planned_stage(model, (1,), 1)
    with path.open("r+b") as file:
        file.truncate(planned.tensors[-1].source.offset if planned.tensors[-1].source else 0)
    with local_files(model) as source, pytest.raises(ModelFileError, match=r"tiny.gguf: ended inside tensor \S+ while"):
        joined(artifact_bytes(planned, source))
