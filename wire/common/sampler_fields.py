"""The table of sampling fields that are one number and matter to the last stage alone.

To add one, write an entry here and use `SamplingOptions.number` where it matters, below `stage/sampling`. The HTTP
field with its check, the way over the wire and the stage's own check follow from the entry. A field that is not given
has the neutral value, and costs nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from relayline.wire.common.bounds import CTX_TOKENS_MAX, PENALTY_TOKENS_MAX
from relayline.wire.common.errors import ProtocolError
from relayline.wire.common.sampler_order import N_ORDERS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplerField:
    """One number."""

    name: str
    neutral: float
    """The value that changes nothing."""
    low: float
    high: float
    """Bounds, both included."""
    aliases: tuple[str, ...] = ()
    """Further names of the HTTP field."""
    off: tuple[float, ...] = ()
    """Values outside the bounds that clients send for "not at all"."""
    is_off_below: bool = False
    """Whether all values below `low` say so."""
    is_whole: bool = False
    is_kind: bool = False
    """Whether each value means another kind: then one above `high` is refused, and not taken as `high`."""
    is_public: bool = True
    """Whether it is an HTTP field; else the coordinator works it out."""
    only_with: str = ""
    """The field without which it changes nothing, and is not sent to the stage."""


FIELDS = (
    # How far the temperature goes down for a sure token and up for an unsure one; see
    # stage.sampling.dynamic_temperature.
    SamplerField(name="dynatemp_range", neutral=0.0, low=0.0, high=1e6, is_off_below=True),
    SamplerField(name="dynatemp_exponent", neutral=1.0, low=0.0, high=100.0, only_with="dynatemp_range"),
    # Of tokens that the prompt or the answer has: a positive logit is divided by it, a negative one multiplied.
    SamplerField(
        name="repetition_penalty", neutral=1.0, low=0.01, high=100.0, aliases=("repeat_penalty",), off=(0.0, -1.0)
    ),
    # How many of the latest tokens the repetition penalty looks at.
    SamplerField(
        name="repeat_last_n",
        neutral=PENALTY_TOKENS_MAX,
        low=0,
        high=PENALTY_TOKENS_MAX,
        off=(-1.0,),
        is_whole=True,
        only_with="repetition_penalty",
    ),
    SamplerField(name="top_n_sigma", neutral=0.0, low=0.0, high=1e6, off=(-1.0,)),
    SamplerField(name="typical_p", neutral=1.0, low=1e-9, high=1.0, aliases=("typ_p",), off=(0.0, -1.0)),
    SamplerField(name="xtc_probability", neutral=0.0, low=0.0, high=1.0),
    SamplerField(name="xtc_threshold", neutral=0.1, low=0.0, high=1.0, only_with="xtc_probability"),
    # What repeats costs dry_multiplier x dry_base ^ (its length - dry_allowed_length); see stage.sampling.dry.
    SamplerField(name="dry_multiplier", neutral=0.0, low=0.0, high=100.0),
    SamplerField(name="dry_base", neutral=1.75, low=1.0, high=100.0, only_with="dry_multiplier"),
    SamplerField(
        name="dry_allowed_length",
        neutral=2,
        low=0,
        high=PENALTY_TOKENS_MAX,
        is_whole=True,
        only_with="dry_multiplier",
    ),
    # How many of the latest tokens it looks at.
    SamplerField(
        name="dry_penalty_last_n",
        neutral=PENALTY_TOKENS_MAX,
        low=0,
        high=PENALTY_TOKENS_MAX,
        off=(-1.0,),
        is_whole=True,
        only_with="dry_multiplier",
    ),
    # 1: only tokens that fill a gap for sure, else the end; see stage.sampling.infill.
    SamplerField(name="infill", neutral=0, low=0, high=1, is_whole=True, is_kind=True),
    # Version 1 or 2, in place of the filters and penalties; see stage.sampling.mirostat.
    SamplerField(name="mirostat", neutral=0, low=0, high=2, aliases=("mirostat_mode",), is_whole=True, is_kind=True),
    SamplerField(name="mirostat_tau", neutral=5.0, low=0.0, high=100.0, only_with="mirostat"),
    SamplerField(name="mirostat_eta", neutral=0.1, low=0.0, high=1.0, only_with="mirostat"),
    # The chance that tokens have on average; see stage.sampling.adaptive.
    SamplerField(name="adaptive_target", neutral=-1.0, low=0.0, high=1.0, is_off_below=True),
    SamplerField(name="adaptive_decay", neutral=0.9, low=0.0, high=0.99, only_with="adaptive_target"),
    # Another order of the filters and the temperature; see wire.common.sampler_order.
    SamplerField(name="sampler_order", neutral=0, low=0, high=N_ORDERS - 1, is_whole=True, is_public=False),
    # Where the session stands with one of these, as its last sample said; not given before the first.
    SamplerField(name="mirostat_mu", neutral=0.0, low=-1e6, high=1e6, is_public=False),
    # Nothing is sampled: a prompt's hidden rows become one embedding. See `POOLINGS`.
    SamplerField(name="pooling", neutral=0, low=0, high=3, is_whole=True, is_public=False),
    # And that goes through the model's head that ranks: the chances of its labels are the answer.
    SamplerField(name="ranked", neutral=0, low=0, high=1, is_whole=True, is_public=False),
    # Thoughts are ended behind so many tokens; see stage.sampling.thought_budget.
    SamplerField(name="thought_tokens_max", neutral=-1.0, low=0, high=CTX_TOKENS_MAX, is_whole=True, is_public=False),
    # Position of the first token of thoughts that are under way at the open.
    SamplerField(name="thoughts_begun_at", neutral=-1.0, low=0, high=1 << 32, is_whole=True, is_public=False),
    # Tokens that are held back are not picked before this position.
    SamplerField(name="held_back_until", neutral=0, low=0, high=1 << 32, is_whole=True, is_public=False),
)
POOLINGS = {"mean": 1, "cls": 2, "last": 3}  # llama.cpp's numbers
BY_NAME = {field.name: field for field in FIELDS}
# What came to SessionOptions and frames after protocol 7 began. A last stage of an older version would silently ignore
# it, so each stage reports the fields that it knows.
LISTS = ("allowed_tokens", "held_back_tokens", "bad_words")
PROMPT_SCORES = "prompt_logprobs"
OPTIONS = frozenset((*BY_NAME, *LISTS, PROMPT_SCORES))
HTTP_FIELDS = {name: field for field in FIELDS if field.is_public for name in (field.name, *field.aliases)}


def check_numbers(numbers: Mapping[str, float]) -> None:
    """Raise ProtocolError for numbers that no coordinator sends."""
    for name, value in numbers.items():
        field = BY_NAME.get(name)
        if field is None:
            raise ProtocolError(f"sampling option {name[:40]!r} is not known here; update this stage")
        if not field.low <= value <= field.high or math.isnan(value):
            raise ProtocolError(f"sampling option {name} is {value}; it must be between {field.low} and {field.high}")
