from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import os
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import TinyShape, write_pipeline, write_stage, write_whole
from relayline.stage.engine import capture, ggml, native
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.kv_cache import remedy
from relayline.stage.engine.loading import Load
from relayline.stage.engine.model_load import load_model
from relayline.stage.engine.native import LANES_MAX, EngineConfig, NativeEngine
from relayline.wire.common.errors import (
    ArtifactError,
    InternalError,
    LaneLimitError,
    ModelFileError,
    NativeError,
    UsageError,
)
from relayline.wire.common.kv_layout import LAYOUTS
from relayline.wire.settings.table import EngineSettings

pytestmark = pytest.mark.kernels

SHAPE = TinyShape()
N_LANES, CTX_TOKENS, MAX_ROWS = 4, 64, 96
# Logits have a standard deviation near 2. Steps of the same shape give the same bits; other shapes move the last bits,
# which the f16 cache rounds up to 1e-3 and more as a prompt grows.
SAME_SHAPE, OTHER_SHAPE = 1e-5, 3e-2


WAIT_S = 60


@dataclasses.dataclass(frozen=True)
class Rows:
    """Consecutive rows of one lane."""

    lane: int
    position: int
    tokens: Sequence[int]


def tokens_of(seed: int, n_tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SHAPE.n_vocab, n_tokens).tolist()


class Chain:
    """All stages of a tiny model in one process, f32 handed from one to the next."""

    def __init__(self, paths: list[Path], **config: object) -> None:
        defaults: dict[str, object] = {"n_lanes": N_LANES, "ctx_tokens": CTX_TOKENS, "max_rows": MAX_ROWS}
        config = defaults | config
        self.engines = [NativeEngine(engine_config(path, **config)) for path in paths]  # type: ignore[arg-type]
        self.embedding = EmbeddingTable(self.engines[0].artifact)

    def decode(self, *parts: Rows) -> list[np.ndarray]:
        """One step of all parts together; logits of every row, part by part."""
        tokens = np.array([token for part in parts for token in part.tokens], np.int32)
        n_rows = tokens.size
        for index, engine in enumerate(self.engines):
            if index == 0:
                self.embedding.lookup(tokens, engine.input_rows[:n_rows])
            else:
                engine.input_rows[:n_rows] = self.engines[index - 1].output_rows[:n_rows]
            engine.positions[:n_rows] = [part.position + i for part in parts for i in range(len(part.tokens))]
            engine.seq_ids[:n_rows] = [part.lane for part in parts for _ in part.tokens]
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
        logits = np.stack([self.engines[-1].logits(row) for row in range(n_rows)])
        return np.split(logits, np.cumsum([len(part.tokens) for part in parts])[:-1])

    def each(self, method: str, *arguments: int) -> None:
        for engine in self.engines:
            getattr(engine, method)(*arguments)

    def close(self) -> None:
        self.each("close")


def reference_logits(reference: ReferenceModel, tokens: Sequence[int]) -> np.ndarray:
    """Logits of every position of one prompt, alone in the model."""
    reference.drop_from(0, 0)
    return reference.decode(tokens, range(len(tokens)), [0] * len(tokens), [True] * len(tokens))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pipeline(tmp_path_factory.mktemp("pipeline"), SHAPE, [2])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceModel]:
    path = write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", SHAPE)
    with ReferenceModel(path, n_ctx=N_LANES * CTX_TOKENS, n_seq_max=N_LANES) as model:
        yield model


@pytest.fixture(params=LAYOUTS)
def chain(stages: list[Path], request: pytest.FixtureRequest) -> Iterator[Chain]:
    made = Chain(stages, kv_layout=request.param, flash_attn="on")  # as the reference has it
    yield made
    made.close()


# --- split equals whole -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2], [1, 3], [1, 2, 3]])
def test_every_cut_gives_the_logits_of_the_whole(cuts: list[int], reference: ReferenceModel, tmp_path: Path) -> None:
    chain = Chain(write_pipeline(tmp_path, SHAPE, cuts))
    tokens = tokens_of(1, 36)
    reference.drop_from(0, 0)
    shapes = [range(20), *([position] for position in range(20, 36))]  # a prefill, then decode steps
    for positions in shapes:
        rows = [tokens[position] for position in positions]
        expected = reference.decode(rows, positions, [0] * len(rows), [True] * len(rows))
        got = chain.decode(Rows(0, positions[0], rows))[0]
        assert np.abs(got - expected).max() < SAME_SHAPE
        assert expected.std() > 1
    chain.close()


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantised_weights_split_exactly(name: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, type=gguf.GGMLQuantizationType[name])
    tokens = tokens_of(2, 12)
    with ReferenceModel(write_whole(tmp_path / "whole.gguf", shape), 256, 1) as whole:
        expected = whole.decode(tokens, range(12), [0] * 12, [True] * 12)
    chain = Chain(write_pipeline(tmp_path, shape, [2]))
    assert np.abs(chain.decode(Rows(0, 0, tokens))[0] - expected).max() < SAME_SHAPE
    chain.close()


def test_the_tolerance_would_see_one_wrong_token(reference: ReferenceModel) -> None:
    tokens = tokens_of(3, 20)
    right = reference_logits(reference, tokens)
    for wrong in (0, 7, 18):
        changed = [*tokens[:wrong], (tokens[wrong] + 1) % SHAPE.n_vocab, *tokens[wrong + 1 :]]
        assert np.abs(reference_logits(reference, changed)[-1] - right[-1]).max() > 5 * OTHER_SHAPE


def test_lanes_of_different_lengths_in_one_step(chain: Chain, reference: ReferenceModel) -> None:
    prompts = [tokens_of(10 + lane, 4 + 9 * lane) for lane in range(4)]
    expected = [reference_logits(reference, prompt) for prompt in prompts]
    # Prefill of one lane, a chunk of another and single decode rows of the rest share steps.
    chain.decode(Rows(0, 0, prompts[0][:3]), Rows(1, 0, prompts[1][:12]), Rows(2, 0, prompts[2][:1]))
    mixed = chain.decode(
        Rows(3, 0, prompts[3]), Rows(1, 12, prompts[1][12:]), Rows(0, 3, prompts[0][3:]), Rows(2, 1, prompts[2][1:])
    )
    for got, want in (
        (mixed[0], expected[3]),
        (mixed[1], expected[1][12:]),
        (mixed[2], expected[0][3:]),
        (mixed[3], expected[2][1:]),
    ):
        assert np.abs(got - want).max() < OTHER_SHAPE


def test_rows_of_several_lanes_may_be_interleaved(chain: Chain, reference: ReferenceModel) -> None:
    a, b = tokens_of(20, 5), tokens_of(21, 5)
    parts = [part for i in range(5) for part in (Rows(2, i, [a[i]]), Rows(0, i, [b[i]]))]
    got = chain.decode(*parts)
    assert np.abs(np.concatenate(got[0::2]) - reference_logits(reference, a)).max() < OTHER_SHAPE
    assert np.abs(np.concatenate(got[1::2]) - reference_logits(reference, b)).max() < OTHER_SHAPE


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_other_cache_types(kv_type: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, n_embd=128)  # heads of 32, one q8_0 block
    tokens = tokens_of(22, 10)
    ggml_type = {"f16": 1, "q8_0": 8}[kv_type]
    with ReferenceModel(write_whole(tmp_path / "whole.gguf", shape), 256, 1, kv_type=ggml_type) as whole:
        expected = whole.decode(tokens, range(10), [0] * 10, [True] * 10)
    chain = Chain(write_pipeline(tmp_path, shape, [2]), kv_type=kv_type)
    assert np.abs(chain.decode(Rows(0, 0, tokens))[0] - expected).max() < SAME_SHAPE
    chain.close()


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_dropping_a_tail_and_decoding_it_again_changes_nothing(chain: Chain) -> None:
    tokens = tokens_of(30, 16)
    first = chain.decode(Rows(1, 0, tokens))[0]
    chain.each("drop_from", 1, 10)
    assert [engine.lane_tokens(1) for engine in chain.engines] == [10, 10]
    again = chain.decode(Rows(1, 10, tokens[10:]))[0]
    assert np.abs(again - first[10:]).max() < OTHER_SHAPE


def test_another_tail_after_a_drop(chain: Chain, reference: ReferenceModel) -> None:
    tokens, other = tokens_of(31, 12), tokens_of(32, 4)
    chain.decode(Rows(1, 0, tokens))
    chain.each("drop_from", 1, 8)
    got = chain.decode(Rows(1, 8, other))[0]
    assert np.abs(got - reference_logits(reference, tokens[:8] + other)[8:]).max() < OTHER_SHAPE


def test_a_lane_does_not_see_the_others(chain: Chain, reference: ReferenceModel) -> None:
    tokens = tokens_of(33, 10)
    for lane in (0, 2, 3):
        chain.decode(Rows(lane, 0, tokens_of(40 + lane, 20)))
    got = chain.decode(Rows(1, 0, tokens))[0]
    assert np.abs(got - reference_logits(reference, tokens)).max() < OTHER_SHAPE


def test_a_cleared_lane_starts_again_and_gives_its_cells_back(chain: Chain, reference: ReferenceModel) -> None:
    tokens = tokens_of(34, 60)
    expected = reference_logits(reference, tokens)
    for _ in range(3 * N_LANES):  # three times more than the cache holds, were nothing given back
        got = chain.decode(Rows(2, 0, tokens))[0]
        chain.each("clear", 2)
    assert np.abs(got - expected).max() < OTHER_SHAPE


def test_a_copied_prefix_is_the_prefix(chain: Chain, reference: ReferenceModel) -> None:
    tokens, tail = tokens_of(35, 12), tokens_of(36, 5)
    chain.decode(Rows(0, 0, tokens), Rows(3, 0, tokens_of(37, 6)))
    chain.each("copy_prefix", 0, 3, 9)  # what lane 3 held is gone
    got = chain.decode(Rows(3, 9, tail), Rows(0, 12, tail))
    assert np.abs(got[0] - reference_logits(reference, tokens[:9] + tail)[9:]).max() < OTHER_SHAPE
    assert np.abs(got[1] - reference_logits(reference, tokens + tail)[12:]).max() < OTHER_SHAPE
    chain.each("clear", 0)  # the shared cells live on in lane 3
    got = chain.decode(Rows(3, 14, [1]))
    assert np.abs(got[0] - reference_logits(reference, [*tokens[:9], *tail, 1])[14:]).max() < OTHER_SHAPE


def test_more_lanes_than_rows_in_a_step(stages: list[Path], reference: ReferenceModel) -> None:
    chain = Chain(stages, n_lanes=32, ctx_tokens=8, max_rows=4)
    tokens = tokens_of(38, 3)
    got = chain.decode(Rows(31, 0, tokens))[0]
    assert np.abs(got - reference_logits(reference, tokens)).max() < OTHER_SHAPE
    chain.close()


# --- steps ------------------------------------------------------------------------------------------------------------


def test_logits_belong_to_the_rows_that_wanted_them(chain: Chain, reference: ReferenceModel) -> None:
    tokens = tokens_of(50, 6)
    expected = reference_logits(reference, tokens)
    chain.decode(Rows(0, 0, tokens))
    chain.each("clear", 0)
    first, last = chain.engines
    first.decode(6)
    last.wants[:6] = [0, 1, 0, 0, 1, 0]
    last.decode(6)
    for row in (1, 4):
        assert np.abs(last.logits(row) - expected[row]).max() < OTHER_SHAPE
    with pytest.raises(InternalError, match="row 2"):
        last.logits(2)
    with pytest.raises(InternalError, match="no head"):
        first.logits(0)


def test_a_step_may_want_no_logits(chain: Chain, reference: ReferenceModel) -> None:
    tokens = tokens_of(51, 8)
    chain.decode(Rows(0, 0, tokens))
    chain.each("clear", 0)
    chain.engines[-1].wants[:8] = 0
    chain.engines[-1].decode(8)
    chain.engines[0].decode(8)
    got = chain.decode(Rows(0, 8, [5]))[0]
    assert np.abs(got - reference_logits(reference, [*tokens, 5])[8:]).max() < OTHER_SHAPE


def test_max_wanted_bounds_the_rows_with_logits(stages: list[Path]) -> None:
    with NativeEngine(engine_config(stages[1], 2, 64, max_rows=16, max_wanted=3)) as engine:
        engine.positions[:5] = range(5)
        engine.wants[:5] = [1, 1, 1, 0, 0]
        engine.decode(5)
        engine.positions[:5] = range(5, 10)
        engine.wants[:5] = 1
        with pytest.raises(InternalError, match="more than 3"):
            engine.decode(5)
        assert engine.lane_tokens(0) == 5


def test_a_steady_step_allocates_nothing_payload_sized(chain: Chain) -> None:
    first, last = chain.engines
    assert ctypes.cast(first._batch.fill(48).embd, ctypes.c_void_p).value == first.input_rows.ctypes.data
    payload_bytes = MAX_ROWS * SHAPE.n_embd * 4

    def step(start: int) -> None:
        for engine in (first, last):
            engine.positions[:48] = range(start, start + 48)
            engine.decode(48)
        last.logits(47)

    step(0)
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        step(48)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes - before_bytes < payload_bytes / 4


@pytest.mark.skipif(sys.platform != "linux", reason="needs a semaphore in this process's memory")
def test_the_step_runs_without_the_gil(chain: Chain) -> None:
    """Every node of the step waits for a post of this thread: if the step held the GIL, there would be none.

    Then no Python runs any more, and faulthandler ends the process.
    """
    (engine, _), libc, semaphore = chain.engines, ctypes.CDLL(None), ctypes.create_string_buffer(64)
    assert libc.sem_init(semaphore, 0, 0) == 0
    wait_for_post = llama.ggml_abort_callback(ctypes.cast(libc.sem_wait, ctypes.c_void_p).value)  # returns 0: go on
    engine.positions[:4] = range(4)
    worker, n_posts = threading.Thread(target=engine.decode, args=(4,)), 0
    faulthandler.dump_traceback_later(WAIT_S, exit=True, file=sys.__stderr__)
    llama.llama_set_abort_callback(engine._context, wait_for_post, ctypes.addressof(semaphore))
    try:
        worker.start()
        while worker.is_alive():
            libc.sem_post(semaphore)
            n_posts += 1
        worker.join()
    finally:
        faulthandler.cancel_dump_traceback_later()
        llama.llama_set_abort_callback(engine._context, llama.ggml_abort_callback(), None)
    assert n_posts > 10, "a post for every node"
    assert engine.lane_tokens(0) == 4


def test_a_step_ends_when_it_has_been_computed(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU still computes after llama_decode has returned: here until some call waits for it."""
    is_computed = True
    decode, synchronize = llama.llama_decode, llama.llama_synchronize

    def begin(*arguments: object) -> int:
        nonlocal is_computed
        is_computed = False
        return int(decode(*arguments))

    def wait(*arguments: object) -> None:
        nonlocal is_computed
        synchronize(*arguments)
        is_computed = True

    monkeypatch.setattr(llama, "llama_decode", begin)
    monkeypatch.setattr(llama, "llama_synchronize", wait)
    for engine in chain.engines:
        engine.input_rows[0] = 0.01
        engine.seq_ids[0] = engine.positions[0] = 0
        engine.wants[0] = 1
        for has_device in (False, True):
            monkeypatch.setattr(native, "computes_apart", lambda _, has_device=has_device: has_device)
            seen: list[bool] = []
            engine.decode(1, meanwhile=lambda seen=seen: seen.append(is_computed))
            assert is_computed, "the step's clock stops before its arithmetic has ended"
            assert seen == [False] * has_device, "work for the meantime is done before the wait, only on a GPU"
            engine.positions[0] += 1


def test_a_full_cache_is_a_lane_limit_and_leaves_lanes_as_they_were(
    stages: list[Path], reference: ReferenceModel
) -> None:
    chain = Chain(stages, n_lanes=2, ctx_tokens=128)
    tokens = tokens_of(52, 90)
    chain.decode(Rows(0, 0, tokens))
    chain.decode(Rows(1, 0, tokens))
    with pytest.raises(LaneLimitError, match="80 rows"):
        chain.decode(Rows(0, 90, tokens_of(53, 80)))
    assert [engine.lane_tokens(lane) for lane in (0, 1) for engine in chain.engines] == [90] * 4
    got = chain.decode(Rows(0, 90, [7]))[0]
    assert np.abs(got - reference_logits(reference, [*tokens, 7])[90:]).max() < OTHER_SHAPE
    chain.close()


def test_a_refused_step_drops_its_rows_and_no_others(chain: Chain) -> None:
    chain.decode(Rows(0, 0, tokens_of(54, 8)), Rows(1, 0, tokens_of(55, 8)), Rows(2, 0, tokens_of(56, 8)))
    with pytest.raises(NativeError, match="consecutive"):  # lane 0 continues; lane 1 leaves a gap
        chain.decode(Rows(0, 8, [1, 2]), Rows(1, 12, [3]))
    first = chain.engines[0]
    assert [first.lane_tokens(lane) for lane in (0, 1, 2)] == [8, 8, 8]
    with pytest.raises(NativeError, match="consecutive"):  # lane 0 goes back without a drop: it ends before the row
        chain.decode(Rows(0, 4, [1]))
    assert [first.lane_tokens(lane) for lane in (0, 1, 2)] == [4, 8, 8]


def test_batches_that_llama_cpp_would_abort_on_are_refused_first(chain: Chain) -> None:
    first = chain.engines[0]
    for n_rows in (0, -1, MAX_ROWS + 1):
        with pytest.raises(InternalError, match="rows"):
            first.decode(n_rows)
    for lane in (-1, N_LANES):
        for call in (lambda lane=lane: first.clear(lane), lambda lane=lane: first.copy_prefix(0, lane, 1)):
            with pytest.raises(InternalError, match="lane"):
                call()
    first.seq_ids[0], first.positions[0] = N_LANES, 0
    with pytest.raises(NativeError, match="seq_id"):
        first.decode(1)


# --- loading ----------------------------------------------------------------------------------------------------------


def config_of(path: Path, **changes: object) -> EngineConfig:
    return engine_config(path, **{"n_lanes": N_LANES, "ctx_tokens": CTX_TOKENS} | changes)


def test_facts(chain: Chain) -> None:
    first, last = chain.engines
    assert (first.is_last, first.n_vocab, first.n_embd) == (False, 0, SHAPE.n_embd)
    assert (last.is_last, last.n_vocab, last.n_embd) == (True, SHAPE.n_vocab, SHAPE.n_embd)
    assert first.input_rows.shape == (MAX_ROWS, SHAPE.n_embd)
    assert first.output_rows.shape == (MAX_ROWS, SHAPE.n_embd)
    assert [engine.lane_tokens(lane) for engine in chain.engines for lane in range(N_LANES)] == [0] * 8


@pytest.mark.parametrize("content", [b"", b"GGUF", os.urandom(4096), b"\x00" * 100])
def test_garbage_is_a_model_file_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    reasons = r"(cannot be read as GGUF: \w+|not a GGUF file|the file is empty|truncated)"
    with pytest.raises(ModelFileError, match=rf"garbage\.gguf: {reasons}") as caught:
        NativeEngine(config_of(path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("part", [0.001, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_a_model_file_error(part: float, stages: list[Path], tmp_path: Path) -> None:
    content = stages[1].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(
        ModelFileError,
        match=r"cut\.gguf: (cannot be (read as GGUF|loaded): \w+|truncated: tensor|announces \d+ tensors)",
    ) as caught:
        NativeEngine(config_of(path))
    assert "\n" not in caught.value.message
    assert "gave no reason" not in caught.value.message


def test_a_missing_file_and_a_whole_model_are_artifact_errors(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such file"):
        NativeEngine(config_of(tmp_path / "nothing.gguf"))
    with pytest.raises(ArtifactError, match="not a relayline stage artifact"):
        NativeEngine(config_of(write_whole(tmp_path / "whole.gguf", SHAPE)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_lanes": 0}, "--lanes 0 is"),
        ({"n_lanes": LANES_MAX - 1, "spare_lanes": 2}, "--lanes 255 is too many"),
        ({"ctx_tokens": 0}, "--ctx 0 is"),
        ({"max_rows": 0}, "--max-rows 0 is"),
        ({"max_rows": 4096}, "--max-rows 4096 is"),
        ({"n_threads": -1}, "--threads -1 is"),
        ({"gpu_layers": -2}, "--gpu-layers -2 is"),
        ({"kv_type": "f8"}, "--kv-type f8 is unknown"),
        ({"max_wanted": 513}, "513 rows with logits"),
    ],
)
def test_values_that_cannot_be_used(changes: dict[str, object], says: str, stages: list[Path]) -> None:
    with pytest.raises(UsageError, match=says):
        NativeEngine(config_of(stages[0], **changes))


def test_a_context_that_cannot_be_made_is_one_native_error(stages: list[Path]) -> None:
    with pytest.raises(NativeError, match=r"cannot make a context of 512 tokens \(q8_0\): K cache type q8_0") as caught:
        NativeEngine(config_of(stages[0], kv_type="q8_0"))  # heads are half a block wide
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith("; --kv-type f16 suits heads of any width"), "less memory would not help"
    assert remedy("failed to allocate buffer") == "a smaller --ctx or fewer --lanes need less memory"


def test_a_stage_without_the_named_tensor_is_refused_at_load(
    stages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Misnamed(capture.RowCapture):
        def __init__(self, tensor_name: str, destination: np.ndarray, *_: object) -> None:
            super().__init__("layer_output" + tensor_name[5:], destination)

    monkeypatch.setattr("relayline.stage.engine.native.RowCapture", Misnamed)
    with pytest.raises(NativeError, match="layer_output-1 gave 0 floats instead of 64"):
        NativeEngine(config_of(stages[0]))


@pytest.mark.parametrize(
    ("tensor", "width", "message"),
    [
        ("l_out-1", 63, "not a whole number of rows"),  # 64 floats are no multiple of 63
        ("l_out-1", 4096, "not a whole number of rows"),
        ("Kcur-1", 64, "not a contiguous f32|not a whole number|gave 32"),
        ("inp_pos", 64, "not a whole number|gave"),
    ],
)
def test_the_capture_reports_and_never_writes_past_its_rows(
    tensor: str, width: int, message: str, stages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(capture.RowCapture):
        def __init__(self, _tensor_name: str, destination: np.ndarray, *_: object) -> None:
            super().__init__(tensor, np.zeros((1, width), np.float32))

    monkeypatch.setattr("relayline.stage.engine.native.RowCapture", Other)
    with pytest.raises(NativeError, match=message):
        NativeEngine(config_of(stages[0]))


def test_too_many_rows_for_the_capture(stages: list[Path]) -> None:
    with NativeEngine(config_of(stages[0])) as engine:
        assert engine._capture is not None
        engine._capture._state.capacity = 2 * SHAPE.n_embd
        engine.positions[:3] = range(3)
        engine.output_rows[:] = 7.0
        with pytest.raises(NativeError, match="more rows than the step"):
            engine.decode(3)
        assert (engine.output_rows == 7.0).all()
        assert engine.lane_tokens(0) == 0


def test_rows_that_come_in_parts_are_refused(stages: list[Path]) -> None:
    with NativeEngine(config_of(stages[0])) as engine:
        capture_ = engine._capture
        assert capture_ is not None
        capture_.begin(4)
        capture_._state.written, capture_._state.n_calls = 4 * SHAPE.n_embd, 2
        with pytest.raises(NativeError, match="into 2 parts"):
            capture_.check(4)


def test_closing_twice_is_harmless(stages: list[Path]) -> None:
    engine = NativeEngine(config_of(stages[0]))
    engine.close()
    engine.close()


def test_metadata_that_contradicts_the_file(tmp_path: Path) -> None:
    path = write_stage(tmp_path / "stage.gguf", SHAPE, 1, [2])
    content = path.read_bytes()
    key = b"relayline.layer_start"
    at = content.index(key) + len(key) + 4  # behind the value's type
    path.write_bytes(content[:at] + (1).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(NativeError, match="holds 2 layers, but its metadata states 3"):
        NativeEngine(config_of(path))


# --- log --------------------------------------------------------------------------------------------------------------


def test_the_log_is_bounded_silent_and_quotes_the_first_error(
    capfd: pytest.CaptureFixture[str], stages: list[Path], tmp_path: Path
) -> None:
    ring = ggml.LogRing()
    for index in range(10 * ggml.LOG_LINES_MAX):
        ring.append(3, f"warning {index}\n")
    assert len(ring._lines) == ggml.LOG_LINES_MAX
    ring.append(2, "a fact\n")
    ring.append(5, "its continuation\n")
    assert ring.reason("nothing") == f"warning {9 * ggml.LOG_LINES_MAX}"
    ring.append(4, "load_all: error loading model: the\n cause\n")
    ring.append(4, "load: failed\n")
    assert ring.reason("nothing") == "the cause"
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"nonsense")
    other = llama.llama_log_callback(lambda level, text, user: None)
    llama.llama_log_set(other, ctypes.c_void_p(0))  # as another module of the process might
    artifact = dataclasses.replace(open_artifact(stages[0]), path=path)  # as if it had changed since it was checked
    capfd.readouterr()
    with pytest.raises(ModelFileError, match="invalid magic"):
        load_model(artifact, EngineSettings(ctx_tokens=64), Load())
    assert capfd.readouterr() == ("", "")
