"""Goal: a slice without weights computes with finite values, and its rows choose different experts, as real ones do."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import hollow_slices
from relayline.deploy.planning.measure import slices_for
from relayline.stage.engine import ggml
from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.wire.common.errors import NativeError
from relayline.wire.model_files import hollow_slice
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.model_files.hollow_slice import BF16, F16, ROUTER, spreads_rows, write_hollow
from relayline.wire.settings.table import EngineSettings
from tests.support.tiny_models import make_tiny


def test_a_hollow_slice_of_a_model_that_scales_angles_can_be_measured(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny.gguf", n_layers=4)
    assert "rope_freqs.weight" in open_model(model).tensors
    for index, hollow in enumerate(hollow_slices(model, [((1, 3), 1), ((3,), 1)])):
        path = tmp_path / f"{index}.gguf"
        write_hollow(path, hollow.header, hollow.size_bytes)
        assert path.stat().st_size == hollow.size_bytes
        settings = EngineSettings(n_threads=1, n_lanes=2, ctx_tokens=32).resolved()
        NativeEngine(EngineConfig(path, settings)).close()  # it checks itself when it loads


N_ROWS = 16
MOE = ("qwen3moe", "qwen2moe", "arctic", "gemma4:moe", "gpt-oss")


def choices(engine: NativeEngine) -> list[set[bytes]]:
    """Return, of each layer with experts, the different choices of some different rows."""
    capture = engine._capture
    assert capture is not None
    nodes: dict[str, int] = {}

    def note(address: int, name: str) -> None:
        nodes[name] = address

    def run() -> None:
        engine.input_rows[:N_ROWS] = np.random.default_rng(1).standard_normal((N_ROWS, engine.artifact.width_in))
        engine.seq_ids[:N_ROWS], engine.positions[:N_ROWS], engine.wants[:N_ROWS] = np.arange(N_ROWS), 0, 1
        engine.decode(N_ROWS)

    with capture.every_node(note):
        run()
    found = []
    for name in [name for name in nodes if name.startswith("ffn_moe_topk-") and "(" not in name]:
        for lane in range(N_ROWS):
            engine.clear(lane)
        with contextlib.suppress(NativeError), capture.stopping_at(name), capture.every_node(note):
            capture._state.n_entries = len(capture._entries)  # some families take their rows there
            run()  # which then gives no rows
        found.append(_choices_at(nodes[name]))
    return found


def _choices_at(address: int) -> set[bytes]:
    """Read the view of each row's first experts, in a longer line of all of them."""
    n_bytes = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(ggml.address_of("ggml_nbytes"))(address)
    read = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(
        ggml.address_of("ggml_backend_tensor_get")
    )
    raw = ctypes.create_string_buffer(n_bytes)
    read(address, raw, 0, n_bytes)
    line, used = 4 * 4, 4 * 2  # four experts, of which two are used
    assert n_bytes == (N_ROWS - 1) * line + used
    return {raw.raw[row * line : row * line + used] for row in range(N_ROWS)}


def hollow_of(family: str, directory: Path) -> Path:
    """Write a hollow slice of some layers of a tiny model."""
    model, path = make_tiny(family, directory / "tiny.gguf"), directory / "hollow.gguf"
    (hollow,) = hollow_slices(model, list(slices_for(inspect_model(model)))[:1])
    write_hollow(path, hollow.header, hollow.size_bytes)
    return path


@pytest.mark.parametrize("family", [*MOE, "deepseek4", "deepseek4:hash", "hy_v4", "glm5-next"])
def test_rows_of_a_hollow_slice_choose_different_experts(tmp_path: Path, family: str) -> None:
    path = hollow_of(family, tmp_path)
    assert spreads_rows(read_header(path).tensors)
    settings = EngineSettings(n_threads=1, n_lanes=N_ROWS, ctx_tokens=32).of_architecture(family.partition(":")[0])
    settings = settings.resolved()
    with NativeEngine(EngineConfig(path, settings)) as engine:
        found = choices(engine)
    assert found
    assert all(len(each) > N_ROWS // 4 for each in found)


def test_routers_have_the_same_values_everywhere_and_in_every_type(tmp_path: Path) -> None:
    path = hollow_of("qwen3moe", tmp_path)
    (router,) = (tensor for tensor in read_header(path).tensors if tensor.name.endswith(ROUTER))
    values = np.frombuffer(path.read_bytes()[router.offset :][: router.size_bytes], np.float32)
    assert values[0] == pytest.approx(hollow_slice._values(router, has_experts=True)[0])  # type: ignore[index]
    assert abs(values.mean()) < 0.5 < values.std()
    halves = np.frombuffer(hollow_slice._encoded(values, F16), np.float16).astype(np.float32)
    assert np.abs(halves - values).max() < 0.01
    brains = np.frombuffer(hollow_slice._encoded(values, BF16), np.uint16).astype(np.uint32) << 16
    assert np.abs(brains.view(np.float32) - values).max() < 0.05


def test_models_whose_rows_cannot_be_known_to_differ_are_told_apart(tmp_path: Path) -> None:
    tensors = read_header(hollow_of("qwen3moe", tmp_path)).tensors
    quantised = [dataclasses.replace(tensor, type_id=8) for tensor in tensors]
    assert not spreads_rows(quantised)
    assert spreads_rows([tensor for tensor in quantised if not tensor.name.endswith(ROUTER)]), "a dense model"
    hashed = read_header(make_tiny("deepseek4:hash", tmp_path / "hash.gguf")).tensors
    assert not spreads_rows(hashed), "its first layers look experts up"
    assert spreads_rows([tensor for tensor in hashed if not tensor.name.startswith(("blk.0", "blk.1", "blk.2"))])
