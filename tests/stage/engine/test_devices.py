"""A stage's device settings arrive in llama_model_params, and a device that this host lacks is refused."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.stage.engine import devices, ggml, model_load
from relayline.stage.engine.artifact import StageArtifact, open_artifact
from relayline.stage.engine.ggml import Device
from relayline.stage.engine.loading import Load
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.model_files.gguf_header import read_header
from relayline.wire.settings.table import EngineSettings
from tests.support.tiny_models import make_tiny

CPU = next(device for device in ggml.list_devices() if not device.is_gpu)
FOUND = (Device("CUDA0", "H100", 1, 1000), Device("CUDA1", "H100", 1, 2000), Device("CUDA2", "A2", 1, 3000), CPU)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> StageArtifact:
    """The second stage of a mixture of experts: layers 1 to 3 of the model, which its file counts from 0."""
    directory = tmp_path_factory.mktemp("moe")
    pipeline = split_model(make_tiny("qwen2moe", directory / "m.gguf", n_layers=4), directory / "split", cuts=(1,))
    return open_artifact(directory / "split" / pipeline.stages[1].file)


def placed(artifact: StageArtifact, **given: Any) -> tuple[Any, devices.Placed]:
    params = llama.llama_model_default_params()
    return params, devices.place(params, EngineSettings(**given), artifact, FOUND)


def overrides_of(params: Any) -> list[tuple[str, int]]:
    """Read llama.cpp's list as llama.cpp does, up to its empty end."""
    found = []
    entries = ctypes.cast(params.tensor_buft_overrides, ctypes.POINTER(devices._Override))
    while entries[len(found)].pattern is not None:
        entry = entries[len(found)]
        found.append((entry.pattern.decode(), entry.buffer_type))
    return found


def test_unset_values_are_llama_cpps_defaults(artifact: StageArtifact) -> None:
    params, held = placed(artifact)
    default = llama.llama_model_default_params()
    for name in ("split_mode", "main_gpu", "tensor_buft_overrides"):
        assert getattr(params, name) == getattr(default, name), name
    assert not params.tensor_split
    assert params.n_gpu_layers == 0
    assert not held.elsewhere


def listed(params: Any) -> list[int]:
    """Return llama.cpp's list of devices as it reads it, up to the empty end."""
    handles, found = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p)), []
    while handles[len(found)] is not None:
        found.append(handles[len(found)])
    return found


def test_a_stage_without_layers_on_gpus_leaves_them_alone(artifact: StageArtifact) -> None:
    """Without a list llama.cpp would compute prompts there, and keep the host's weights unprepared for its kernels."""
    params, _ = placed(artifact)
    assert params.devices
    assert listed(params) == []
    for given in ({"gpu_layers": -1}, {"gpu_layers": 1}, {"override_tensor": "ffn=CPU"}):
        assert not placed(artifact, **given)[0].devices, given
    params, _ = placed(artifact, devices="CUDA1")  # named, and so wanted
    assert listed(params) == [2000]


@pytest.mark.parametrize("mode", ["none", "layer", "row", "tensor"])
def test_layers_split_mode_and_main_gpu(artifact: StageArtifact, mode: str) -> None:
    params, _ = placed(artifact, gpu_layers=-1, split_mode=mode, main_gpu=2)
    expected = getattr(llama, f"LLAMA_SPLIT_MODE_{mode.upper()}")
    assert (params.n_gpu_layers, params.split_mode, params.main_gpu) == (-1, expected, 2)


def test_shares_and_chosen_devices(artifact: StageArtifact) -> None:
    params, held = placed(artifact, devices="CUDA2, CUDA0", tensor_split="3,1")
    handles = ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))
    assert [handles[0], handles[1], handles[2]] == [3000, 1000, None]
    assert [params.tensor_split[at] for at in range(4)] == [3, 1, 0, 0]
    assert len(held.held) == 2  # llama.cpp reads what both point to
    params, _ = placed(artifact, devices="none")
    assert ctypes.cast(params.devices, ctypes.POINTER(ctypes.c_void_p))[0] is None


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"devices": "CUDA0,CUDA7"}, "--device CUDA7 is unknown here; choose among CUDA0, CUDA1, CUDA2, none"),
        ({"devices": "CPU"}, "--device CPU is unknown here; choose among CUDA0, CUDA1, CUDA2, none"),
        ({"override_tensor": "ffn=TPU"}, "--override-tensor ffn=TPU: no such device here; choose among CUDA0,"),
        ({"devices": "CUDA1", "tensor_split": "1,1"}, "--tensor-split 1,1 has 2 shares; the stage has 1 GPU (CUDA1)"),
        ({"devices": "none", "tensor_split": "1"}, "--tensor-split 1 has 1 shares; the stage has no GPU"),
        ({"main_gpu": 3}, "--main-gpu 3: the stage has 3 GPUs (CUDA0, CUDA1, CUDA2), counted from 0"),
    ],
)
def test_a_device_that_the_host_lacks_is_refused(artifact: StageArtifact, given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        placed(artifact, **given)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"split_mode": "rows"}, "--split-mode rows is unknown; choose one of layer, none, row, tensor"),
        ({"devices": "CUDA0,,"}, "--device 'CUDA0,,': give names"),
        ({"devices": "CUDA0,CUDA0"}, "named twice"),
        ({"devices": "none,CUDA0"}, "none cannot be combined"),
        ({"tensor_split": "1;2"}, "--tensor-split '1;2': give a number for each device"),
        ({"tensor_split": "0,0"}, "not all 0"),
        ({"tensor_split": "1,nan"}, "0 or more"),
        ({"tensor_split": ",".join("1" * 17)}, "17 shares; llama.cpp takes at most 16"),
        ({"main_gpu": 16}, "--main-gpu 16 is outside 0..15"),
        ({"n_cpu_moe": -1}, "--n-cpu-moe -1 is outside"),
        ({"override_tensor": "ffn"}, "give PATTERN=DEVICE"),
        ({"override_tensor": "(=CPU"}, "is not a regular expression"),
    ],
)
def test_a_device_that_no_host_has_is_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)) as refused:
        EngineSettings(**given)
    assert "\n" not in refused.value.message


def test_a_gpu_with_the_hosts_memory_counts_where_there_is_no_other(artifact: StageArtifact) -> None:
    inside, params = Device("Metal", "M4", 2, 4000), llama.llama_model_default_params()
    given = EngineSettings(tensor_split="1,1")
    with pytest.raises(UsageError, match=re.escape("1 GPU (CUDA0)")):
        devices.place(params, given, artifact, (inside, FOUND[0], CPU))
    with pytest.raises(UsageError, match=re.escape("1 GPU (Metal)")):
        devices.place(params, given, artifact, (inside, CPU))
    several = tuple(Device(name, "Iris", 2, 5000) for name in ("Vulkan0", "Vulkan1", "SYCL0"))
    with pytest.raises(UsageError, match=re.escape("2 GPUs (Vulkan0, Vulkan1)")):
        devices.place(params, EngineSettings(tensor_split="1,1,1"), artifact, several)


def test_experts_of_the_first_layers_go_to_the_host(artifact: StageArtifact) -> None:
    params, held = placed(artifact, gpu_layers=-1, n_cpu_moe=2)
    names = {name for name in held.elsewhere if "_exps" in name}
    assert names == set(held.elsewhere)
    assert {name.split(".")[1] for name in names} == {"0", "1"}  # of this stage's own
    assert set(held.elsewhere.values()) == {"CPU"}
    assert {buffer_type for _, buffer_type in overrides_of(params)} == {ggml.buffer_type(CPU)}
    counts = devices.count_elsewhere(held, artifact)
    assert counts == {"CPU": sum(t.size_bytes for t in read_header(artifact.path).tensors if t.name in names)}
    assert counts["CPU"] > 0
    _, all_layers = placed(artifact, n_cpu_moe=100_000)
    assert len(all_layers.elsewhere) == len(names) * 3 / 2


def test_patterns_mean_the_layers_of_the_model(artifact: StageArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "buffer_type", lambda device: device.handle + 7)
    rules = r"blk\.2\.ffn_up_exps=CUDA1,blk\.[23]\.ffn_=CPU,output_norm=CUDA0"
    params, held = placed(artifact, override_tensor=rules, n_cpu_moe=1)
    assert held.elsewhere["blk.1.ffn_up_exps.weight"] == "CUDA1"  # the model's layer 2, and the first rule counts
    assert held.elsewhere["blk.1.ffn_down_exps.weight"] == held.elsewhere["blk.2.ffn_down_exps.weight"] == "CPU"
    assert held.elsewhere["blk.0.ffn_down_exps.weight"] == "CPU"  # by n_cpu_moe
    assert held.elsewhere["output_norm.weight"] == "CUDA0"
    overrides = overrides_of(params)
    for tensor in read_header(artifact.path).tensors:  # as llama.cpp goes through them
        found = [buffer_type for pattern, buffer_type in overrides if re.search(pattern, tensor.name)]
        device = held.elsewhere.get(tensor.name)
        assert found == [each.handle + 7 for each in FOUND if each.name == device]


def test_the_load_itself_gets_the_settings(artifact: StageArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, list[float], list[tuple[str, int]]]] = []

    def load(path: bytes, params: Any) -> None:
        shares = [params.tensor_split[at] for at in range(2)]
        seen.append((params.split_mode, params.main_gpu, shares, overrides_of(params)))

    monkeypatch.setattr(ggml, "list_devices", lambda: FOUND)
    monkeypatch.setattr(llama, "llama_model_load_from_file", load)
    given = EngineSettings(gpu_layers=2, split_mode="row", main_gpu=1, tensor_split="1,2", override_tensor="exps=CPU")
    with pytest.raises(ModelFileError):
        model_load.load_model(artifact, given, Load())
    ((mode, main_gpu, shares, overrides),) = seen
    assert (mode, main_gpu, shares) == (llama.LLAMA_SPLIT_MODE_ROW, 1, [1, 2])
    assert overrides
    assert all("exps" in pattern for pattern, _ in overrides)


def test_a_stage_with_its_experts_on_the_host_computes_the_same(artifact: StageArtifact) -> None:
    rows = np.random.default_rng(3).standard_normal((4, artifact.n_embd), np.float32)
    logits = []
    for given in ({}, {"n_cpu_moe": 1, "override_tensor": r"blk\.\d\.attn_q=CPU", "devices": "none"}):
        with NativeEngine(engine_config(artifact.path, n_lanes=1, ctx_tokens=32, **given)) as engine:
            engine.input_rows[:4], engine.positions[:4], engine.seq_ids[:4] = rows, range(4), 0
            engine.decode(4)
            logits.append(engine.logits(3).copy())
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-5)
    with pytest.raises(UsageError, match=r"--device CUDA9(: llama.cpp finds no GPU on this host| is unknown here)"):
        NativeEngine(engine_config(artifact.path, n_lanes=1, ctx_tokens=32, devices="CUDA9"))


def test_llama_cpp_says_which_weights_it_puts_elsewhere(artifact: StageArtifact) -> None:
    """The log of a load names each tensor that a pattern found, which proves that the patterns are C++'s too."""
    lines: list[str] = []
    params = llama.llama_model_default_params()
    held = devices.place(params, EngineSettings(n_cpu_moe=3), artifact, ggml.list_devices())
    llama.llama_backend_init()
    callback = llama.llama_log_callback(lambda level, text, _: lines.append(text.decode()))
    llama.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        llama.llama_model_free(llama.llama_model_load_from_file(bytes(artifact.path), params))
    finally:
        ggml.LOG.watch()
    logged = {found[1] for line in lines if (found := re.search(r"tensor (\S+) .*overrid", line))}
    assert logged == set(held.elsewhere)


def test_placeholders_stay_in_the_hosts_memory(tmp_path: Path) -> None:
    """Numbers of layers and patterns mean the stage's own layers, which come behind them in the file."""
    pipeline = split_model(make_tiny("kimi-k3", tmp_path / "m.gguf"), tmp_path / "split", cuts=(5, 8))
    artifact = open_artifact(tmp_path / "split" / pipeline.stages[1].file)
    for asked, given in ((-1, 4), (2, 2), (4, 4), (99, 4), (0, 0)):
        assert placed(artifact, gpu_layers=asked)[0].n_gpu_layers == given
    pattern = r"blk\.[17]\..*norm\.weight=CUDA1"
    elsewhere = devices._elsewhere(EngineSettings(gpu_layers=-1, n_cpu_moe=1, override_tensor=pattern), artifact)
    assert {name for name, where in elsewhere.items() if where == devices.HOST_MEMORY} == {
        f"blk.5.ffn_{part}_exps.weight" for part in ("gate", "up", "down")
    }
    others = [name for name, where in elsewhere.items() if where == "CUDA1"]
    assert others
    assert all(name.startswith("blk.7.") for name in others), "and not those of a placeholder"
