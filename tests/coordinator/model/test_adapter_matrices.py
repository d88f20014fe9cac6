"""Goal: an adapter on a matrix where llama.cpp applies no LoRA is refused, and no other.

Method: tiny models of each family. An adapter on each matrix alone changes the logits, or does not: llama.cpp says
nothing of the latter. So a new llama.cpp shows where `UNTOUCHED` is not true any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.adapters import UNTOUCHED, check_of_model
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import inspect_model
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_adapters import make_adapter
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.adapters import read_adapter
from tests.support.tiny_models import RECIPES, make_tiny

N_LAYERS_MAX = 10  # only deepseek2:lite has more, and 27 take fourteen seconds of a core
TOKENS = [token % 100 + 3 for token in range(160)]  # more than one window, pool and compressed cell of 128
N_FEW = 24  # a change shows in these already, but for some matrices of pools and cells
# Those of the table, and some that are not in it.
FAMILIES = sorted(
    name
    for name, recipe in RECIPES.items()
    if recipe.architecture in {*UNTOUCHED, "deepseek2-ocr", "qwen2moe", "gpt-oss"} or name in ("llama", "gemma3")
)


def changing(model: Path, adapters: Sequence[Path]) -> list[bool | None]:
    """Whether each adapter alone changes any logit; None where llama.cpp does not load it, which a stage reports.

    What changes none in a few tokens gets all of them.
    """
    with ReferenceModel(model, 256, 1, max_rows=len(TOKENS)) as whole:

        def logits(n_rows: int) -> np.ndarray:
            llama.llama_memory_clear(llama.llama_get_memory(whole._context), True)
            return whole.decode(TOKENS[:n_rows], range(n_rows), [0] * n_rows, [True] * n_rows)

        plain = {n_rows: logits(n_rows) for n_rows in (N_FEW, len(TOKENS))}
        found: list[bool | None] = []
        for path in adapters:
            loaded = llama.llama_adapter_lora_init(whole._model, str(path).encode())
            if not loaded:
                found.append(None)
                continue
            whole._use([loaded], [1.0])
            found.append(any(not np.array_equal(logits(n_rows), plain[n_rows]) for n_rows in plain))
        whole._use([], [])
    return found


def is_refused(adapter: Path, model: Path, architecture: str, n_layers: int) -> bool:
    try:
        check_of_model([read_adapter(adapter)], model, architecture, n_layers)
    except ModelFileError as error:
        return "where llama.cpp applies no LoRA" in error.message
    return False


@pytest.fixture(autouse=True)
def headers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter is compared with the same model, whose header takes longer to read than a step."""
    opened = functools.cache(open_model)
    for module in ("relayline.coordinator.model.adapters", "relayline.deploy.testing.tiny_adapters"):
        monkeypatch.setattr(f"{module}.open_model", opened)


@pytest.mark.sampled(2)  # a step with each of up to a hundred adapters
@pytest.mark.parametrize("family", FAMILIES)
def test_what_changes_nothing_is_refused_and_what_changes_something_is_not(family: str, tmp_path: Path) -> None:
    model = make_tiny(family, tmp_path / "model.gguf")
    facts = inspect_model(model)
    names = [
        name
        for name, tensor in open_model(model).tensors.items()
        if name.endswith(".weight") and len(tensor.dims) > 1 and _layer(name) < min(facts.n_layers, N_LAYERS_MAX)
        if not name.endswith("_norm.weight")  # neither we nor llama.cpp read those
        if "ssm_conv1d_" not in name  # of four dimensions: no pair of matrices fits
    ]
    adapters = [
        make_adapter(model, tmp_path / f"{at}.gguf", changes=[name], strength=0.8) for at, name in enumerate(names)
    ]
    refused = [is_refused(adapter, model, facts.architecture, facts.n_layers) for adapter in adapters]
    changes = changing(model, adapters)
    rests = [name.split(".", 2)[2].removesuffix(".weight") for name in names]
    silent = {rest for rest, changed in zip(rests, changes, strict=True) if changed is False}
    unloaded = {rest for rest, changed in zip(rests, changes, strict=True) if changed is None}
    # A name that some layers apply and others do not is refused in all.
    missing, extra = (
        silent - (found := {rest for rest, no in zip(rests, refused, strict=True) if no}),
        found - silent - unloaded,
    )
    assert (sorted(missing), sorted(extra)) == ([], [])


def _layer(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else 1 << 30
