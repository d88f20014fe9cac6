"""LoRA adapters on stages: a split with adapters computes what llama.cpp does with the whole model and the whole
adapters, and steps may change between them.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_adapters import adapter_of, make_adapter
from relayline.stage.engine import adapters
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import ModelFileError, NativeError, ProtocolError
from relayline.wire.common.kv_layout import PER_LANE_ARCHITECTURES
from tests.support.chain import Chain
from tests.support.family_check import ERROR_MAX, covering_cuts
from tests.support.lane_texts import far
from tests.support.tiny_models import make_tiny

PROMPT = list(range(3, 23))
FAMILIES = ("llama", "qwen2", "gemma2", "qwen3moe", "gpt-oss", "qwen35", "kimi-k3")


def whole_logits(model: Path, *adapters: tuple[Path, float], flash_attn: str = "auto") -> np.ndarray:
    with ReferenceModel(model, n_ctx=64, n_seq_max=1, flash_attn=flash_attn, adapters=adapters) as whole:
        rows = [whole.decode(PROMPT, range(len(PROMPT)), [0] * len(PROMPT), [True] * len(PROMPT))]
        rows += [whole.decode([at], [at], [0], [True]) for at in range(len(PROMPT), len(PROMPT) + 3)]
    return np.concatenate(rows)


def chain_logits(chain: Chain, adapter: int = 0) -> np.ndarray:
    first = chain.position
    steps = [chain.step(PROMPT, adapter)]
    steps += [chain.step([at], adapter) for at in range(first + len(PROMPT), first + len(PROMPT) + 3)]
    return np.concatenate(steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_with_an_adapter_computes_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    lora = make_adapter(model, tmp_path / "lora.gguf")
    facts = inspect_model(model)
    layout = "per-lane" if facts.architecture in PER_LANE_ARCHITECTURES else "unified"
    for cuts in covering_cuts(facts):
        pipeline = split_model(model, tmp_path / "-".join(map(str, cuts)), cuts=cuts)
        directory = tmp_path / "-".join(map(str, cuts))
        with Chain(directory, pipeline, kv_layout=layout, adapters=[adapter_of(lora, scale=0.7)]) as chain:
            found, flash_attn = chain_logits(chain), chain.flash_attn
        expected = whole_logits(model, (lora, 0.7), flash_attn=flash_attn)
        assert far(found, expected) < ERROR_MAX
    assert far(whole_logits(model, flash_attn=flash_attn), expected) > 0.1  # otherwise nothing was shown


def test_steps_change_between_adapters_and_lanes_keep_their_own(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    always, first, second = (make_adapter(model, tmp_path / f"{seed}.gguf", seed=seed) for seed in (1, 2, 3))
    pipeline = split_model(model, tmp_path / "split", cuts=(1,))
    served = [adapter_of(always, scale=0.5), adapter_of(first, "first"), adapter_of(second, "second", -0.4)]
    expected = [
        whole_logits(model, (always, 0.5)),
        whole_logits(model, (always, 0.5), (first, 1.0)),
        whole_logits(model, (always, 0.5), (second, -0.4)),
    ]
    with Chain(tmp_path / "split", pipeline, lanes=(0, 1, 2), adapters=served) as chain:
        found: list[list[np.ndarray]] = [[], [], []]
        for fed in (PROMPT, *([at] for at in range(len(PROMPT), len(PROMPT) + 3))):
            before = chain.position
            for lane in range(3):
                chain.position, chain.lanes = before, (lane,)
                found[lane].append(chain.step(fed, lane))
    for rows, logits in zip(found, expected, strict=True):
        assert far(np.concatenate(rows), logits) < ERROR_MAX
    assert far(expected[1], expected[2]) > 0.1


def test_a_stage_whose_layers_an_adapter_leaves_alone_serves_it(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    lora = make_adapter(model, tmp_path / "lora.gguf", changes=("blk.0.*",))
    pipeline = split_model(model, tmp_path / "split", cuts=(1,))
    with Chain(tmp_path / "split", pipeline, adapters=[adapter_of(lora, "first")]) as chain:
        found = chain_logits(chain, 1)
    assert far(found, whole_logits(model, (lora, 1.0))) < ERROR_MAX


def test_a_full_temporary_directory_is_named_with_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    lora = make_adapter(model, tmp_path / "lora.gguf")
    split_model(model, tmp_path / "split", n_stages=1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(adapters, "write_part", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = engine_config(tmp_path / "split" / "stage-0.gguf", 1, 64, adapters=(adapter_of(lora),))
    says = rf"cannot be written: {tmp_path}/relayline-lora-\w{{8}}/part.gguf: No space left on device; TMPDIR=DIRECTORY"
    with pytest.raises(NativeError, match=says):
        NativeEngine(config)


def test_a_choice_that_is_not_there_is_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    pipeline = split_model(model, tmp_path / "split", n_stages=1)
    lora = adapter_of(make_adapter(model, tmp_path / "lora.gguf"), "first")
    with Chain(tmp_path / "split", pipeline, adapters=[lora]) as chain:
        with pytest.raises(ProtocolError, match="wants adapter 2 of a stage with 1"):
            chain.step([1], 2)
        chain.step([1], 1)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"changes": ("blk.*.attn_q.weight",), "family": "qwen2"}, "of the architecture qwen2, and this one is llama"),
        ({"n_layers": 9}, "changes layer 8, but the model has layers 0 to"),
        ({"n_embd": True}, r"the matrices of blk.0.attn_q.weight, 7 x 4 and 4 x \d+, do not fit the model's"),
        ({"renamed": True}, "changes blk.0.attn_other.weight, which the model does not have"),
    ],
)
def test_an_adapter_of_another_model_is_one_line(given: dict[str, object], problem: str, tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf")
    split_model(model, tmp_path / "split", n_stages=1)
    if "family" in given or "n_layers" in given:
        n_layers = given.get("n_layers")
        model = make_tiny(str(given.get("family", "llama")), tmp_path / "other.gguf", n_layers=n_layers)  # type: ignore[arg-type]
        lora = make_adapter(model, tmp_path / "lora.gguf")
    else:
        rows = [np.ones((4, 7), np.float32), np.ones((64, 4), np.float32)]
        name = "blk.0.attn_other.weight" if "renamed" in given else "blk.0.attn_q.weight"
        tensors = {f"{name}.lora_a": rows[0], f"{name}.lora_b": rows[1]}
        lora = make_adapter(model, tmp_path / "lora.gguf", changes=(), tensors=tensors)
    config = engine_config(tmp_path / "split" / "stage-0.gguf", 1, 64, adapters=(adapter_of(lora),))
    with pytest.raises(ModelFileError, match=problem):
        NativeEngine(config)
