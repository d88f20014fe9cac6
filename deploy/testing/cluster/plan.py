"""What happens in one history: the cluster, its clients, and what goes wrong when. All of it follows from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from relayline.coordinator.engine.pool import STEADY_S
from relayline.coordinator.schedule.scheduler import ScheduleConfig
from relayline.coordinator.sessions.prefixes import PREFIX_TOKENS_MIN
from relayline.deploy.testing.cluster.clock import MS, S
from relayline.deploy.testing.cluster.model import N_VOCAB

START_NS = 100 * MS  # until the first thing happens
COMES_BACK_NS = 400 * MS  # between two turns of what happens several times
TAKEOVER_NS = 3 * S  # after which others take over the layers of a stage that is away
STEADY_NS = round(STEADY_S * S)
TROUBLE_NS = 2 * S  # from the beginning on, in which things begin to go wrong and clients come


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """One client's request."""

    at_ns: int
    coordinator: int
    prompt: tuple[int, ...]
    max_tokens: int
    leaves_after: int | None
    """So many tokens, or soon after it came with 0; None: it stays."""
    is_predicted: bool
    """Its client predicts the answer, and every fourth token wrongly."""
    kills_stage: int | None
    """Rows of it bring this stage down."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """Something that goes wrong."""

    at_ns: int
    kind: str
    stage: int
    lasts_ns: int
    which: int
    """Chooses among what there is then: a link, an answer, a number of lanes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One history."""

    seed: str
    n_stages: int
    n_lanes: int
    n_coordinators: int
    schedule: ScheduleConfig
    stage_policy: str
    prefix_lanes: int
    waiting_max: int
    share: bool
    delay_ns: int
    """One way of a link, on average."""
    keeps_state: bool
    """Lanes have a recurrent state: they can be taken back to checkpoints alone."""
    tier_bytes: int
    """Of each stage's tier for what lanes held; 0: none."""
    tier_survives: bool
    """What it stored is there after a restart, as from a disk."""
    has_slow_calls: bool
    """Some calls take much longer, and may come after those of the next attempt."""
    has_late_answers: bool
    """Answers of an epoch that is over come while the next one stands."""
    wishes: tuple[Wish, ...]
    troubles: tuple[Trouble, ...]
    n_spares: int = 0
    """Stages that stand by, where there is one coordinator."""
    takeover_ns: int = 0
    """How long a stage may be away before others take over its layers; 0: for any time."""

    @property
    def settled_ns(self) -> int:
        """When nothing more goes wrong."""
        ends_ns = (trouble.at_ns + 4 * (trouble.lasts_ns + COMES_BACK_NS) for trouble in self.troubles)
        hands_over = any(trouble.kind in HANDS_OVER for trouble in self.troubles)
        return START_NS + max([TROUBLE_NS, *ends_ns]) + hands_over * 2 * (TAKEOVER_NS + STEADY_NS)


KINDS = (
    "dies",  # a stage's process ends, and comes back
    "comes back with other lanes",
    "flaps",  # dies and comes back several times
    "hangs",  # for a moment, or until it is noticed
    "is late",  # takes many times as long for its steps
    "loses rows",  # of the next envelopes, by a bug that nobody else notices
    "cut",  # a link is, up to three times
    "slow link",
    "moves",  # nothing goes wrong: other layers are wanted, up to three times
    "drains",  # nothing goes wrong: a stage is to hold no layers for a while
    "is lost for long",  # so that others take over
    "joins",  # one more stage
    "answers again",  # answers of now, or of an epoch that is over, come once more
)

HANDS_OVER = ("drains", "is lost for long", "joins")
OFTEN = {"cut": 4, "moves": 3}  # where only a link breaks, sessions go on from what stages hold


def plan_of(seed: str, kinds: Sequence[str] = KINDS) -> Plan:
    """Return what happens with a seed, where these kinds of things may go wrong."""
    rng = random.Random(seed)
    n_stages = rng.randint(1, 3)
    n_coordinators = rng.choice((1, 1, 2))
    mode = rng.choice(("auto", "auto", "drain", "fixed"))
    draft = rng.choice((0, 0, -1, 2))
    schedule = ScheduleConfig(mode, n_groups=2, group_rows=2, chunk_rows=rng.choice((0, 5, 16)), draft=draft)
    common = tuple(rng.randrange(N_VOCAB) for _ in range(PREFIX_TOKENS_MIN + 4))
    has_poison = rng.random() < 0.08
    n_wishes = rng.randint(3, 7)
    wishes = [
        _wish(rng, n_coordinators, common, n_stages, is_poison=has_poison and number == 1) for number in range(n_wishes)
    ]
    if rng.random() < 0.3:  # somebody asks for the same
        wishes.append(dataclasses.replace(wishes[0], at_ns=wishes[0].at_ns + 50 * MS, leaves_after=None))
    n_troubles = rng.choice((0, 1)) if has_poison else rng.choice((0, 1, 1, 2, 2, 3, 5))
    return Plan(
        seed=seed,
        n_stages=n_stages,
        n_lanes=rng.randint(1, 4),
        n_coordinators=n_coordinators,
        schedule=schedule,
        stage_policy="drain" if mode == "drain" else "auto",
        prefix_lanes=rng.choice((0, 0, 1, 2)),
        waiting_max=rng.choice((2, 8, 8)),
        share=rng.random() < 0.5,
        delay_ns=rng.choice((MS // 10, MS, 10 * MS)),
        keeps_state=random.Random(f"{seed} state").random() < 0.3,
        tier_bytes=random.Random(f"{seed} tier").choice((0, 4_000, 1_000_000)),
        tier_survives=random.Random(f"{seed} disk").random() < 0.5,
        has_slow_calls=rng.random() < 0.4,
        has_late_answers=rng.random() < 0.4,
        wishes=tuple(wishes),
        troubles=tuple(_trouble(rng, n_stages, kinds) for _ in range(n_troubles)),
        n_spares=random.Random(f"{seed} spares").choice((0, 0, 1)),
        takeover_ns=random.Random(f"{seed} takeover").choice((0, TAKEOVER_NS)),
    )


def _wish(rng: random.Random, n_coordinators: int, common: tuple[int, ...], n_stages: int, *, is_poison: bool) -> Wish:
    begins_alike = rng.random() < 0.3
    prompt = tuple(rng.randrange(N_VOCAB) for _ in range(rng.choice((1, 3, 9, 24))))
    return Wish(
        at_ns=rng.randrange(TROUBLE_NS * 3 // 4),
        coordinator=rng.randrange(n_coordinators),
        prompt=(*common, *prompt) if begins_alike else prompt,
        max_tokens=rng.randint(1, 10),
        leaves_after=rng.choice((None, None, None, None, 0, 1, 3)),
        is_predicted=rng.random() < 0.5,
        kills_stage=rng.randrange(n_stages) if is_poison else None,
    )


def _trouble(rng: random.Random, n_stages: int, kinds: Sequence[str]) -> Trouble:
    kind = rng.choices(kinds, [OFTEN.get(kind, 1) for kind in kinds])[0]
    lasts_ns = rng.choice((50 * MS, 500 * MS, 3 * S))
    if kind == "hangs":
        lasts_ns = rng.choice((500 * MS, 4 * S, 20 * S))
    return Trouble(rng.randrange(TROUBLE_NS), kind, rng.randrange(n_stages), lasts_ns, rng.randrange(1 << 30))


CALM = Plan(
    seed="by hand",
    n_stages=3,
    n_lanes=4,
    n_coordinators=1,
    schedule=ScheduleConfig("auto", draft=0, chunk_rows=16),
    stage_policy="auto",
    prefix_lanes=0,
    waiting_max=8,
    share=False,
    delay_ns=MS,
    keeps_state=False,
    tier_bytes=0,
    tier_survives=False,
    has_slow_calls=False,
    has_late_answers=True,
    wishes=tuple(Wish(50 * MS * at, 0, (7, 8, 9 + at), 20, None, False, None) for at in range(3)),
    troubles=(),
)
"""Three equal requests, and nothing goes wrong: to be changed by hand."""
