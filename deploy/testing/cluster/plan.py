"""The plan of one history: the cluster, its clients, and its faults with their times. All of it follows from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np

from relayline.coordinator.engine.pool import STEADY_S
from relayline.coordinator.media.encoded import row_numbers
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.sessions.generation import ImageRows
from relayline.coordinator.sessions.prefixes import PREFIX_TOKENS_MIN
from relayline.deploy.testing.cluster.clock import MS, S
from relayline.deploy.testing.cluster.model import ADAPTERS, N_VOCAB, WIDTH, value_of

START_NS = 100 * MS  # until the first fault
COMES_BACK_NS = 400 * MS  # between two repetitions of a fault
TAKEOVER_NS = 3 * S  # after which other stages take over the layers of an absent one
IMAGES_SHARE = 0.35  # of histories with images
ADAPTERS_SHARE = 0.35  # of histories with adapters
TURNS_SHARE = 0.3  # of histories whose clients come again
WINDOWS_SHARE = 0.35  # of those without recurrent states, with sliding windows whose cells alone are kept
IMAGE_SIDES = ((4, 3), (2, 5), (1, 1), (5, 4))
STEADY_NS = round(STEADY_S * S)
TROUBLE_NS = 2 * S  # from the start, in which faults and clients begin
TURN_NS = TROUBLE_NS  # within which a client comes again


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """An image's place in a prompt, and its sides in rows."""

    start: int
    width: int
    height: int
    are_mutual: bool
    """Its rows attend to each other; else they have places in a grid."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """One client's request."""

    at_ns: int
    coordinator: int
    prompt: tuple[int, ...]
    max_tokens: int
    leaves_after: int | None
    """Number of tokens after which the client leaves; 0: soon after its request; None: it stays."""
    is_predicted: bool
    """The client predicts the answer, with every fourth token wrong."""
    kills_stage: int | None
    """The request's rows crash this stage."""
    image: Image | None = None
    """The image whose rows are in its prompt."""
    adapter: int = 0
    """The choice of LoRA adapters that its rows are computed with."""

    @property
    def images(self) -> tuple[ImageRows, ...]:
        """The rows of its image."""
        if self.image is None:
            return ()
        start, n_rows = self.image.start, self.image.width * self.image.height
        rows = np.zeros((n_rows, WIDTH), np.float32)
        rows[:, 0] = [value_of(token) for token in self.prompt[start : start + n_rows]]
        grid = None if self.image.are_mutual else (self.image.width, self.image.height)
        return (ImageRows(start, rows, self.image.are_mutual, grid),)


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """One fault."""

    at_ns: int
    kind: str
    stage: int
    lasts_ns: int
    which: int
    """Selects the link, the answer or the number of lanes at that time."""


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
    """One-way time of a link, on average."""
    keeps_state: bool
    """Lanes have a recurrent state: they can only be rewound to checkpoints."""
    tier_bytes: int
    """Size of each stage's tier for stored prefixes; 0: none."""
    tier_survives: bool
    """Stored prefixes survive a restart, as on a disk."""
    has_slow_calls: bool
    """Some calls take much longer, and may arrive after those of the next attempt."""
    has_late_answers: bool
    """Answers of an old epoch arrive during the next one."""
    wishes: tuple[Wish, ...]
    troubles: tuple[Trouble, ...]
    n_spares: int = 0
    """Spare stages, if there is one coordinator."""
    keeps_window: bool = False
    """Half of the layers keep the cells of a sliding window alone."""
    takeover_ns: int = 0
    """How long a stage may be absent before others take over its layers; 0: without limit."""

    @property
    def settled_ns(self) -> int:
        """The time after which there are no more faults."""
        ends_ns = (trouble.at_ns + 4 * (trouble.lasts_ns + COMES_BACK_NS) for trouble in self.troubles)
        hands_over = any(trouble.kind in HANDS_OVER for trouble in self.troubles)
        return START_NS + max([TROUBLE_NS, *ends_ns]) + hands_over * 2 * (TAKEOVER_NS + STEADY_NS)


KINDS = (
    "dies",  # a stage's process ends, and comes back
    "comes back with other lanes",
    "flaps",  # dies and comes back several times
    "hangs",  # for a moment, or until others notice
    "is late",  # its steps take many times as long
    "loses rows",  # of the next envelopes, by a bug that nothing else reports
    "cut",  # cuts a link, up to three times
    "slow link",
    "moves",  # no fault: other layers are requested, up to three times
    "drains",  # no fault: a stage holds no layers for a while
    "is lost for long",  # so long that other stages take over
    "joins",  # one more stage
    "sleeps",  # no fault: the pipeline is told to sleep, up to three times
    "answers again",  # answers of this or an old epoch arrive again
)

HANDS_OVER = ("drains", "is lost for long", "joins")
OFTEN = {"cut": 4, "moves": 3}  # if only a link breaks, sessions go on from the stages' caches


def plan_of(seed: str, kinds: Sequence[str] = KINDS) -> Plan:
    """Return the plan of a seed, with these kinds of faults."""
    rng = random.Random(seed)
    n_stages = rng.randint(1, 3)
    n_coordinators = rng.choice((1, 1, 2))
    mode = rng.choice(("auto", "auto", "drain", "fixed"))
    draft = rng.choice((0, 0, -1, 2))
    chunk_rows = rng.choice((0, 5, 16))
    grant_steps = random.Random(f"{seed} grants").choice((0, 2, 8))
    schedule = ScheduleConfig(mode, 2, 2, chunk_rows, draft=draft, grant_steps=grant_steps)
    common = tuple(rng.randrange(N_VOCAB) for _ in range(PREFIX_TOKENS_MIN + 4))
    has_poison = rng.random() < 0.08
    n_wishes = rng.randint(3, 7)
    wishes = [
        _wish(rng, n_coordinators, common, n_stages, is_poison=has_poison and number == 1) for number in range(n_wishes)
    ]
    keeps_state = random.Random(f"{seed} state").random() < 0.3
    wishes = _with_images(random.Random(f"{seed} images"), wishes, common, keeps_state=keeps_state)
    wishes = _with_adapters(random.Random(f"{seed} adapters"), wishes)
    wishes = _with_turns(random.Random(f"{seed} turns"), wishes)
    if rng.random() < 0.3:  # another client has the same prompt
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
        keeps_state=keeps_state,
        tier_bytes=random.Random(f"{seed} tier").choice((0, 4_000, 1_000_000)),
        tier_survives=random.Random(f"{seed} disk").random() < 0.5,
        has_slow_calls=rng.random() < 0.4,
        has_late_answers=rng.random() < 0.4,
        wishes=tuple(wishes),
        troubles=tuple(_trouble(rng, n_stages, kinds) for _ in range(n_troubles)),
        keeps_window=not keeps_state and random.Random(f"{seed} windows").random() < WINDOWS_SHARE,
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


def _with_images(rng: random.Random, wishes: list[Wish], common: tuple[int, ...], *, keeps_state: bool) -> list[Wish]:
    """Put images into prompts, in some histories. There are two images, so that prompts with one begin alike."""
    if rng.random() >= IMAGES_SHARE:
        return wishes
    are_mutual = rng.random() < 0.4 and not keeps_state
    sides = [rng.choice(IMAGE_SIDES) for _ in range(2)]
    found = []
    for wish in wishes:
        which = rng.randrange(3)
        if which == len(sides):
            found.append(wish)
            continue
        width, height = sides[which]
        begins_alike = wish.prompt[: len(common)] == common
        start = PREFIX_TOKENS_MIN - 4 if begins_alike else rng.randrange(len(wish.prompt))
        numbers = row_numbers(bytes([which]), width * height)
        prompt = (*wish.prompt[:start], *numbers, *wish.prompt[start:])
        found.append(dataclasses.replace(wish, prompt=prompt, image=Image(start, width, height, are_mutual)))
    return found


def _with_adapters(rng: random.Random, wishes: list[Wish]) -> list[Wish]:
    """Let requests choose adapters, in some histories."""
    if rng.random() >= ADAPTERS_SHARE:
        return wishes
    return [dataclasses.replace(wish, adapter=rng.randrange(len(ADAPTERS))) for wish in wishes]


def _with_turns(rng: random.Random, wishes: list[Wish]) -> list[Wish]:
    """Let clients come again with more text, in some histories: their lanes may have been taken and stored by then."""
    if rng.random() >= TURNS_SHARE:
        return wishes
    text = tuple(rng.randrange(N_VOCAB) for _ in range(PREFIX_TOKENS_MIN))
    first = [wish if wish.image else dataclasses.replace(wish, prompt=(*wish.prompt, *text)) for wish in wishes]
    again = [
        dataclasses.replace(
            wish,
            at_ns=wish.at_ns + rng.randrange(TURN_NS),
            prompt=(*wish.prompt, *(rng.randrange(N_VOCAB) for _ in range(rng.choice((1, 5))))),
            leaves_after=None,
            kills_stage=None,
        )
        for wish in first
        for _ in range(rng.randint(0, 2))
    ]
    return [*first, *again]


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
"""Three equal requests and no faults, as a base for plans by hand."""
