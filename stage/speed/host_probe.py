"""Measures slices in a separate process: `python -m relayline.stage.speed.host_probe THREADS GPU_LAYERS KV_TYPE
BUDGET_S ARTIFACT [BUDGET_S ARTIFACT]...`.

The slices may have no weights (stage.joining.survey). Prints one JSON object. `slices` has (rows, ns) of `decode` and
`prefill`. `in_service` is the usual time of a step as a multiple of the quickest. `is_doubtful` says that other
programs kept its threads from their cores all the time. A separate process, because llama.cpp ends it when one of its
assertions fails, and keeps some memory as long as it lives.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from relayline.stage.engine.artifact import open_artifact
from relayline.stage.engine.native import EngineConfig, NativeEngine
from relayline.stage.engine.place import place_of
from relayline.stage.speed.calibrate import row_costs, step_times, usual_share
from relayline.stage.speed.device_turn import alone_on
from relayline.wire.common.curve import PAD_SEARCH_ROWS
from relayline.wire.common.errors import RelaylineError
from relayline.wire.settings.table import EngineSettings

LANES = 64  # as many rows want logits at once
CTX_TOKENS = 64  # of one lane: the cache stays small
WAIT_S = 30.0  # for other stages of the host that measure on the same devices
DECODE_PART, PREFILL_PART = 0.65, 0.9  # of a slice's budget, until when each ladder is climbed


def measure_slice(artifact: Path, settings: EngineSettings, budget_s: float) -> tuple[dict[str, Any], float, bool]:
    """Return the costs of one slice, how long a step usually takes as a multiple of the quickest, and any doubt."""
    settings = settings.of_architecture(open_artifact(artifact).architecture).resolved()
    is_unified, max_wanted = settings.kv_layout == "unified", min(LANES + PAD_SEARCH_ROWS, settings.max_rows)
    config = EngineConfig(artifact, settings, spare_lanes=1 if is_unified else 0, max_wanted=max_wanted)
    device_ids = [device.id for device in place_of(settings).devices]
    with NativeEngine(config) as engine, alone_on(device_ids, wait_max_s=WAIT_S):
        now_s = time.monotonic()
        until = (now_s + DECODE_PART * budget_s, now_s + PREFILL_PART * budget_s)
        times = step_times(engine)
        decode, prefill = row_costs(engine, times, *until)
        usual = usual_share(engine, now_s + budget_s)
        return {"decode": decode, "prefill": prefill}, usual, times.are_doubtful


def main(argv: list[str]) -> None:
    """Measure the slices that the command line names."""
    n_threads, gpu_layers, kv_type, *rest = argv
    settings = EngineSettings(
        n_threads=int(n_threads), n_lanes=LANES, ctx_tokens=CTX_TOKENS, gpu_layers=int(gpu_layers), kv_type=kv_type
    )
    try:
        found = [
            measure_slice(Path(path), settings, float(budget_s))
            for budget_s, path in zip(rest[::2], rest[1::2], strict=True)
        ]
    except RelaylineError as error:
        print(error.message, file=sys.stderr)
        sys.exit(1)
    # The first slice has only layers, like most stages of a pipeline.
    result = {
        "slices": [costs for costs, _, _ in found],
        "in_service": found[0][1] if found else 0.0,
        "is_doubtful": any(is_doubtful for _, _, is_doubtful in found),
    }
    print(msgspec.json.encode(result).decode())


if __name__ == "__main__":
    main(sys.argv[1:])
