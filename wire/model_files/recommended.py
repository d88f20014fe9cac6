"""The sampling options that a model's file recommends: llama.cpp's keys `general.sampling.*`. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from relayline.wire.common.sampler_fields import BY_NAME
from relayline.wire.common.texts import printable
from relayline.wire.model_files.gguf_header import KeyValue

PREFIX = "general.sampling."
_SHOWN_CHARS = 40  # of a value that is not taken


class _Option(NamedTuple):
    """An option, by its name in requests, and the values that requests may give it."""

    name: str
    low: float
    high: float
    is_whole: bool = False
    is_kind: bool = False  # one above `high` is refused then, and not taken as `high`
    off: tuple[float, ...] = ()  # values outside the bounds that mean "not at all"


def _sampler(name: str, shown: str = "") -> _Option:
    field = BY_NAME[name]
    return _Option(shown or name, field.low, field.high, field.is_whole, field.is_kind, field.off)


# The end of a key -> the option that it means. A penalty has llama.cpp's name: it is over 64 tokens by default then.
_OPTIONS = {
    "temp": _Option("temperature", 0, 2),
    "top_p": _Option("top_p", 0, 1),
    "top_k": _Option("top_k", -1, (1 << 31) - 1, is_whole=True),
    "min_p": _Option("min_p", 0, 1),
    "xtc_probability": _sampler("xtc_probability"),
    "xtc_threshold": _sampler("xtc_threshold"),
    "penalty_repeat": _sampler("repetition_penalty", "repeat_penalty"),
    "penalty_last_n": _sampler("repeat_last_n"),
    "mirostat": _sampler("mirostat"),
    "mirostat_tau": _sampler("mirostat_tau"),
    "mirostat_eta": _sampler("mirostat_eta"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Recommended:
    """What one file recommends."""

    options: tuple[tuple[str, int | float], ...] = ()
    """Sampling options by their names in requests, each with a value that a request may have."""
    ignored: tuple[str, ...] = ()
    """For each key that is not followed, a line that names it and says why."""

    @property
    def text(self) -> str:
        """The options for people; empty where there are none."""
        return ", ".join(f"{name.replace('_', '-')} {value:.9g}" for name, value in self.options)


NOTHING = Recommended()


def read_recommended(entries: Mapping[str, KeyValue]) -> Recommended:
    """Return what the entries of a file's header recommend."""
    options: list[tuple[str, int | float]] = []
    ignored: list[str] = []
    for end, option in _OPTIONS.items():
        entry = entries.get(PREFIX + end)
        if entry is None:
            continue
        if (value := _checked(entry, option)) is not None:
            options.append((option.name, value))
            continue
        kind = "a whole number" if option.is_whole else "a number"
        shown = printable(repr(entry.value), _SHOWN_CHARS) if entry.value is not None else "a list"
        ignored.append(f"{entry.key} is {shown}, not {kind} between {option.low:g} and {option.high:g}; ignored")
    if PREFIX + "sequence" in entries:
        ignored.append(f"{PREFIX}sequence is ignored: samplers act in a fixed order here")
    return Recommended(tuple(options), tuple(ignored))


def _checked(entry: KeyValue, option: _Option) -> int | float | None:
    """Return the value of a key, None for one that no request may have."""
    value = entry.value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if option.is_whole and not option.is_kind:
        value = min(value, option.high)
    if not (option.low <= value <= option.high or value in option.off) or (option.is_whole and value != int(value)):
        return None
    return int(value) if option.is_whole else float(f"{value:.7g}")  # 0.6 as f32 is 0.6 again
