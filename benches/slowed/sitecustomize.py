"""Makes this process's native steps as long as on a slower host, for `deploy.testing.slow_hosts`.

Python imports it at its start where PYTHONPATH names this folder. SLOWED_LAYER_MS is the time of a step of one row for
each layer; a head counts like one layer. SLOWED_STEPS_MS is the time of a whole step by its rows instead, such as
1:3.1,8:6.3, with lines between the points: as long as on a GPU that computes while this processor does other work. The
step sleeps for the rest of that time, so that several such hosts fit on one machine.

With SLOWED_AT_ONCE the steps do not sleep. Measurements read a clock instead on which nothing but these steps takes
time. So they find the speeds that were set, whatever else the machine does.

SLOWED_DEVICE is a path. Processes with the same one compute in turns, and say in their handshake that they share a
device, as stages on one GPU do.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Patch = Callable[[Any], None]

LAYER_MS = float(os.environ.get("SLOWED_LAYER_MS", "0"))
POINTS = [point.partition(":") for point in os.environ.get("SLOWED_STEPS_MS", "").split(",") if point]
STEPS_MS = [(float(rows), float(took_ms)) for rows, _, took_ms in POINTS]
ROW_SHARE = 0.5  # share of a one-row step for each further row: on a CPU a batch saves only the reading of weights
DEVICE = os.environ.get("SLOWED_DEVICE", "")
IS_AT_ONCE = "SLOWED_AT_ONCE" in os.environ
ENGINE, CALIBRATE = "relayline.stage.engine.native", "relayline.stage.speed.calibrate"
PLACE = "relayline.stage.engine.place"


class _Clock:
    """Takes the place of the module `time`: only steps take time, and no deadline comes."""

    ns = 0

    def monotonic_ns(self) -> int:
        return self.ns

    def process_time_ns(self) -> int:
        return self.ns

    def monotonic(self) -> float:
        return 0.0


CLOCK = _Clock()


def _slow_engine(module: Any) -> None:
    decode = module.NativeEngine.decode

    def slowed(self: Any, n_rows: int, *, meanwhile: Callable[[], None] | None = None, **more: Any) -> None:
        with _device():
            began_s = time.monotonic()
            decode(self, n_rows, **more)
            if STEPS_MS and meanwhile is not None:
                meanwhile()  # as while a GPU computes
            wanted_ms = _by_rows_ms(n_rows) if STEPS_MS else _by_layers_ms(self, n_rows)
            if IS_AT_ONCE:
                CLOCK.ns += round(wanted_ms * 1e6)
            else:
                time.sleep(max(0.0, began_s + wanted_ms / 1e3 - time.monotonic()))

    module.NativeEngine.decode = slowed


@contextlib.contextmanager
def _device() -> Iterator[None]:
    """Have the device alone."""
    if not DEVICE:
        yield
        return
    with open(DEVICE, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _on_device(module: Any) -> None:
    place_of = module.place_of

    def shared(settings: Any) -> Any:
        place = place_of(settings)
        del place.devices[:]
        place.devices.add(id=DEVICE, name="GPU0", description="emulated")
        return place

    module.place_of = shared


def _by_layers_ms(engine: Any, n_rows: int) -> float:
    n_layers = engine.artifact.layer_end - engine.artifact.layer_start
    n_heads = max(int(engine.wants[:n_rows].sum()), 1) if engine.is_last else 0
    wanted = n_layers * (1 + ROW_SHARE * (n_rows - 1)) + (1 + ROW_SHARE * (n_heads - 1) if n_heads else 0)
    return float(wanted * LAYER_MS)


def _by_rows_ms(n_rows: int) -> float:
    """Return the time by STEPS_MS; beyond its ends the nearest two points are extrapolated."""
    if len(STEPS_MS) == 1:
        return STEPS_MS[0][1]
    at = next((at for at, (rows, _) in enumerate(STEPS_MS[1:-1], 1) if n_rows <= rows), len(STEPS_MS) - 1)
    (low, low_ms), (high, high_ms) = STEPS_MS[at - 1], STEPS_MS[at]
    return low_ms + (n_rows - low) / (high - low) * (high_ms - low_ms)


def _timed_by_the_clock(module: Any) -> None:
    module._is_offloaded = lambda engine: True  # sleep uses no processor time, which would look like a disturbed step
    if IS_AT_ONCE:
        module.time = CLOCK


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patches: dict[str, Patch]) -> None:
        self.patches = patches

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        patch = self.patches.pop(fullname, None)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if patch is not None else None
        if spec is None or spec.loader is None or patch is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            patch(module)

        loader.exec_module = exec_module
        return spec


if LAYER_MS or STEPS_MS:
    patches: dict[str, Patch] = {ENGINE: _slow_engine, CALIBRATE: _timed_by_the_clock}
    sys.meta_path.insert(0, _Finder(patches | ({PLACE: _on_device} if DEVICE else {})))
