"""Reads one artifact's weights into a llama.cpp model, until the load is stopped."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.adapters import Adapters
from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.devices import count_elsewhere, place
from relayline.stage.engine.loading import WEIGHTS, Load, LoadStoppedError
from relayline.stage.engine.rope_choice import choose_rope
from relayline.wire.common.errors import ModelFileError, NativeError
from relayline.wire.common.faulty_amx import leave_faulty_amx
from relayline.wire.common.units import GIB
from relayline.wire.model_files.adapters import Adapter
from relayline.wire.settings.table import EngineSettings

log = logging.getLogger("relayline.stage")


def load_model(
    artifact: StageArtifact, settings: EngineSettings, load: Load, given: Sequence[Adapter] = ()
) -> tuple[Any, Adapters]:
    """Return a llama.cpp model loaded with the settings of lanes and devices, which the caller frees, and its adapters.

    Raises UsageError (a device), ModelFileError (a file), NativeError (memory or a device) or LoadStoppedError.
    """
    model, adapters = _load_model(artifact, settings, load), Adapters(given)
    try:
        adapters.load(model, artifact)
    except BaseException:
        llama.llama_model_free(model)
        raise
    return model, adapters


def _load_model(artifact: StageArtifact, settings: EngineSettings, load: Load) -> Any:
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    placed = place(params, settings, artifact, ggml.list_devices())  # held by its name until the call is over
    for device, n_bytes in count_elsewhere(placed, artifact).items():
        log.info("weights on devices of their own", extra={"fields": {"device": device, "gib": f"{n_bytes / GIB:.2f}"}})
    leave_faulty_amx(llama._lib, params)
    rope = choose_rope(params, artifact.long_rope, settings.ctx_tokens)  # held by its name as well
    params.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    params.load_mtp = artifact.predicts(settings)
    # Held by its name until the call is over: llama.cpp calls it after each tensor, and stops loading if it returns
    # False.
    goes_on = llama.llama_progress_callback(lambda share, _: load.goes_on(WEIGHTS, share))
    params.progress_callback = goes_on
    ggml.LOG.watch()
    model = llama.llama_model_load_from_file(bytes(artifact.path), params)
    del rope, placed
    if model:
        return model
    if load.is_stopped:
        raise LoadStoppedError(WEIGHTS)
    reason = ggml.LOG.reason("llama.cpp gave no reason")
    text = f"{artifact.path}: cannot be loaded: {reason}"
    raise NativeError(text) if re.search(r"alloc|memory|CUDA|device", reason) else ModelFileError(text)


@contextlib.contextmanager
def abandonable(context: Any, load: Load) -> Iterator[None]:
    """Let llama.cpp abort this context's computation once the load is stopped; then raises LoadStoppedError.

    Costs a call for each node of the graph, and works on the processor alone.
    """
    is_stopped = llama.ggml_abort_callback(lambda _: load.is_stopped)
    llama.llama_set_abort_callback(context, is_stopped, None)
    try:
        yield
    except NativeError:
        if load.is_stopped:
            raise LoadStoppedError(WEIGHTS) from None
        raise
    finally:
        llama.llama_set_abort_callback(context, llama.ggml_abort_callback(), None)
