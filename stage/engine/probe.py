"""Loads artifacts in a separate process: `python -m relayline.stage.engine.probe [--dry] ARTIFACT...`.

llama.cpp ends the process when one of its assertions fails, and nothing in that process can report it. So the caller
starts this module and reads its end: exit code 0 if the artifact runs, 1 with one line on stderr if it is refused, a
signal if it aborted. It decodes a few rows; `--dry` makes model, cache and graph without weights, which takes little
time and memory for any size of artifact.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.wire.common.errors import ModelFileError, NativeError, RelaylineError
from relayline.wire.settings.table import EngineSettings

PREFILL_ROWS = 5  # a chunk, then single rows: the two shapes of graph that serving uses
DECODE_STEPS = 2
DRY_CTX_TOKENS, DRY_ROWS = 256, 8


def probe(path: Path) -> None:
    """Decode one prefill chunk and a few single rows. Raises the engine's errors, and NativeError for NaN."""
    random = np.random.default_rng(0)
    settings = EngineSettings(n_lanes=2, ctx_tokens=64, max_rows=PREFILL_ROWS, n_threads=1)
    settings = settings.of_architecture(open_artifact(path).architecture)
    with NativeEngine(EngineConfig(path, settings)) as engine:
        position = 0
        for n_rows in (PREFILL_ROWS, *([1] * DECODE_STEPS)):
            engine.input_rows[:n_rows] = random.standard_normal((n_rows, engine.artifact.width_in), np.float32)
            engine.positions[:n_rows] = np.arange(position, position + n_rows)
            engine.seq_ids[:n_rows] = 1
            engine.wants[:n_rows] = 1
            engine.decode(n_rows)
            rows = engine.logits(n_rows - 1) if engine.is_last else engine.output_rows[:n_rows]
            if not np.isfinite(rows).all():
                raise NativeError(f"{path}: gives values that are not finite")
            position += n_rows


def dry(path: Path) -> None:
    """Have llama.cpp make all of a model but its weights. Raises ArtifactError or ModelFileError."""
    open_artifact(path)
    ggml.LOG.watch()
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    params.no_alloc, params.load_mode = True, llama.LLAMA_LOAD_MODE_NONE
    ggml.leave_gpus(params)  # running processes may fill them
    model = llama.llama_model_load_from_file(bytes(path), params)
    if not model:
        raise ModelFileError(f"{path}: cannot be loaded: {ggml.LOG.reason('llama.cpp gave no reason')}")
    try:
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = DRY_CTX_TOKENS, DRY_ROWS, DRY_ROWS, 1
        context = llama.llama_init_from_model(model, options)
        if not context:
            raise ModelFileError(f"{path}: cannot be computed: {ggml.LOG.reason('llama.cpp gave no reason')}")
        llama.llama_free(context)
    finally:
        llama.llama_model_free(model)


def main() -> None:
    """Probe the artifacts named on the command line."""
    try:
        if sys.argv[1] == "--dry":
            for name in sys.argv[2:]:
                print(name, flush=True)  # so that the parent knows which one ended it
                dry(Path(name))
        else:
            probe(Path(sys.argv[1]))
    except RelaylineError as error:
        print(error.message, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
