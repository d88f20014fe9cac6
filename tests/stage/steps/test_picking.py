"""Goal: for any guesses, split into frames in any way, sessions give the tokens that they would give without guesses.

Method: a fake last stage whose logits depend on all that a lane holds. A coordinator that knows the truth guesses right
and wrong at random, in one frame or several, of several sessions of two routes in one step, with some steps repeated.
"""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from llguidance import LLTokenizer

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import N_VOCAB, write_tokenizer
from relayline.stage.queue_types import QueuedFrame
from relayline.stage.sampling.constraint import read_vocabulary
from relayline.stage.steps.batcher import Batcher
from relayline.stage.steps.policy import DrainPolicy, GroupPolicy, Policy, SinglePolicy
from relayline.stage.steps.step import StepExecutor
from relayline.wire.common.curve import CostCurve
from relayline.wire.common.errors import NativeError
from relayline.wire.envelopes import dtypes, envelope
from relayline.wire.envelopes.frames import Flag
from tests.stage.sampling.test_constraint import LONG_GRAMMAR
from tests.support.draft_world import FOLLOWING, GUESSES, KEYS, SAMPLE, DraftWorld, answers_of, frame_of, played_plainly
from tests.support.examples import thinned
from tests.support.fakes import CTX, EPOCH, ROUTE, VOCAB, FakeEngine, control, greedy, new_executor, new_wiring, step_of

N_TOKENS = 24
KINDS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 7},
    "drawn of few": {"temperature": 1.3, "seed": 8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"frequency_penalty": 1.2, "presence_penalty": 0.5, "bias_tokens": [3, 9], "biases": [1.0, -2.0]},
    "drawn and penalised": {"temperature": 0.7, "seed": 9, "frequency_penalty": 0.9, "top_k": 9},
    "repeated, ranked and banned": {
        "temperature": 0.9, "seed": 3, "read": [3, 4], "numbers": {"repetition_penalty": 1.4, "typical_p": 0.8},
        "bad_words": [{"tokens": [1, 2]}, {"tokens": [5]}],
    },
    "by a grammar": {"grammar": LONG_GRAMMAR},
    "drawn by a grammar, penalised": {
        "grammar": LONG_GRAMMAR, "temperature": 1.0, "seed": 4, "presence_penalty": 0.7,
    },
}  # fmt: skip


@pytest.fixture(scope="module", name="tokenizer")
def tokenizer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.gguf"))


@pytest.fixture(scope="module", name="vocabulary")
def vocabulary_fixture(tokenizer: Tokenizer) -> LLTokenizer:
    found = read_vocabulary(tokenizer._vocab, N_VOCAB)
    assert found is not None
    return found


def world_of(kind: str, vocabulary: LLTokenizer, seed: int = 0) -> DraftWorld:
    options = KINDS[kind]
    return DraftWorld(options, vocabulary, N_VOCAB if "grammar" in options else VOCAB, seed)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("n_seeds", [6, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_with_drafts_equals_without(kind: str, n_seeds: int, vocabulary: LLTokenizer) -> None:
    """Tokens, their log-probabilities and the largest ones; lanes, table and samplers afterwards."""
    n_dropped = n_accepted = 0
    for seed in range(n_seeds // 2 if "grammar" in kind else n_seeds):
        plain, drafted = world_of(kind, vocabulary, seed), world_of(kind, vocabulary, seed)
        truth = played_plainly(plain, N_TOKENS)
        drafted.play(truth, random.Random(seed))
        assert drafted.history == truth
        assert drafted.said == plain.said
        for world in (plain, drafted):
            world.run([world.row(key) for key in KEYS])
        assert drafted.history == plain.history
        assert drafted.state == plain.state
        n_dropped, n_accepted = n_dropped + drafted.n_dropped, n_accepted + drafted.n_accepted
    assert n_dropped > n_seeds
    assert n_accepted > 10 * n_seeds


@settings(max_examples=thinned(25))
@given(st.integers(0, 1 << 30), st.sampled_from([kind for kind in KINDS if "grammar" not in kind]))
def test_any_guesses_in_any_split(seed: int, kind: str) -> None:
    plain, drafted = DraftWorld(KINDS[kind], seed=seed), DraftWorld(KINDS[kind], seed=seed)
    truth = played_plainly(plain, N_TOKENS)
    drafted.play(truth, random.Random(seed))
    assert drafted.said == plain.said


@pytest.mark.parametrize("n_seeds", [3, pytest.param(10, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_faults_between_change_nothing_either(kind: str, n_seeds: int, vocabulary: LLTokenizer) -> None:
    """Steps that fail and rows that are no numbers; the session begins again with all that it has said."""
    n_faults = 0
    for seed in range(n_seeds):
        plain, drafted = world_of(kind, vocabulary, seed), world_of(kind, vocabulary, seed)
        truth = played_plainly(plain, N_TOKENS)
        n_faults += drafted.play(truth, random.Random(seed), faults=0.1)
        assert drafted.said == plain.said
        assert drafted.history == truth
    assert n_faults > n_seeds


# --- one by one -------------------------------------------------------------------------------------------------------

KEY = KEYS[0]


def truth_of(n_tokens: int = 12, **options: object) -> tuple[DraftWorld, list[int], int]:
    """A world whose sessions have read their prompts, KEY's future tokens, and the position of its next row."""
    truth = played_plainly(DraftWorld(options), n_tokens)[KEY]
    world = DraftWorld(options)
    return world, truth, len(world.history[KEY]) - 1


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def answers_to(world: DraftWorld, *frames: QueuedFrame) -> list[tuple[list[int], list[int], list[str]]]:
    """Positions of samples, passed positions and faults, frame by frame, each in a separate step."""
    found = []
    for frame in frames:
        samples, passed, faults = answers_of(world.executor.execute(step_of(frame)), KEY)
        found.append(([each.position for each in samples], passed, faults))
    return found


def test_rows_behind_a_wrong_guess_are_not_computed() -> None:
    world, truth, at = truth_of()
    first = frame_of(KEY, at, [truth[at], truth[at + 1], wrong(truth[at + 2]), truth[at + 3]], GUESSES)
    behind = [
        frame_of(KEY, at + 4, truth[at + 4 : at + 6], FOLLOWING),
        frame_of(KEY, at + 6, [truth[at + 6]], FOLLOWING),
    ]
    n_steps = len(world.engine.steps)
    assert answers_to(world, first, *behind) == [
        ([at + 1, at + 2], [at + 4], []),
        ([], [at + 6], []),
        ([], [at + 7], []),
    ]
    assert len(world.engine.steps) == n_steps + 1
    true_row = frame_of(KEY, at + 2, truth[at + 2 : at + 5], GUESSES)
    assert answers_to(world, true_row) == [([at + 3, at + 4, at + 5], [], [])]
    assert [row[0] for row in world.engine.lanes[0]] == truth[: at + 5]


def test_a_flight_of_guesses_that_begins_wrong_or_right() -> None:
    for is_right in (True, False):
        world, truth, at = truth_of()
        guess = truth[at + 1] if is_right else wrong(truth[at + 1])
        frames = frame_of(KEY, at, [truth[at]], SAMPLE), frame_of(KEY, at + 1, [guess, truth[at + 2]], FOLLOWING)
        expected = ([at + 2, at + 3], [], []) if is_right else ([], [at + 3], [])
        assert answers_to(world, *frames) == [([at + 1], [], []), expected]


def test_a_frame_that_comes_again_says_the_same() -> None:
    for options in (KINDS["greedy"], KINDS["drawn and penalised"]):
        world, truth, at = truth_of(**options)
        right = frame_of(KEY, at, truth[at : at + 4], GUESSES)
        behind = frame_of(KEY, at + 4, [truth[at + 4], wrong(truth[at + 5]), 1], FOLLOWING)
        stale = frame_of(KEY, at + 7, [1, 2], FOLLOWING)
        once = answers_to(world, right, behind, stale)
        state = world.state
        assert answers_to(world, right, behind, stale) == once
        assert world.state == state
        assert once[1:] == [([at + 5], [at + 7], []), ([], [at + 9], [])]


def test_not_a_number_in_the_middle_keeps_the_samples_before() -> None:
    world, truth, at = truth_of()
    world.nan_at = {(1, at + 3)}
    first = frame_of(KEY, at, truth[at : at + 4], GUESSES)
    behind = frame_of(KEY, at + 4, truth[at + 4 : at + 6], FOLLOWING)
    assert answers_to(world, first, behind) == [([at + 1, at + 2], [], ["not_finite"]), ([], [], [])]
    world.nan_at = set()
    world.begin(KEY, truth[: at + 3], n_said=3)
    assert answers_to(world, frame_of(KEY, at + 3, truth[at + 3 : at + 5], GUESSES)) == [([at + 4, at + 5], [], [])]


def test_not_a_number_of_one_session_is_no_others() -> None:
    world, truth, at = truth_of()
    others = played_plainly(DraftWorld({}), 12)
    world.nan_at = {(1, at + 2)}
    mine = frame_of(KEY, at, truth[at : at + 4], GUESSES)
    starts = {key: len(world.history[key]) - 1 for key in KEYS[1:]}
    theirs = [frame_of(key, start, others[key][start : start + 3], GUESSES) for key, start in starts.items()]
    result = world.executor.execute(step_of(mine, *theirs))
    assert answers_of(result, KEY)[2] == ["not_finite"]
    for key in KEYS[1:]:
        samples, passed, faults = answers_of(result, key)
        assert (len(samples), passed, faults) == (3, [], [])


def test_a_row_that_its_coordinator_is_sure_of_is_computed_whatever_was_sampled_there() -> None:
    """An answer from before a replay decided the token; the replay, on a near-tie, gave another one."""
    world, truth, at = truth_of()
    token = wrong(truth[at])
    assert world.executor.sessions.samplers[KEY].last == (at, truth[at])
    assert answers_to(world, frame_of(KEY, at, [token], GUESSES | Flag.GUESSED)) == [([], [at + 1], [])]
    ((positions, *_),) = answers_to(world, frame_of(KEY, at, [token, wrong(0), 5], GUESSES))
    assert positions[0] == at + 1
    assert [row[0] for row in world.engine.lanes[0]][at] == token


def test_guesses_before_any_sample_are_computed() -> None:
    """The coordinator opens a session again with its earlier tokens: the first row of a frame is true."""
    world, truth, at = truth_of()
    world.executor.execute(step_of(control(KEY[1], Flag.OPEN)))
    assert answers_to(world, frame_of(KEY, at, truth[at : at + 3], GUESSES)) == [([at + 1, at + 2, at + 3], [], [])]


def test_stale_guesses_before_an_open_change_nothing_behind_it() -> None:
    for options in (KINDS["greedy"], KINDS["drawn and penalised"]):
        world, truth, at = truth_of(**options)
        first = frame_of(KEY, at, [truth[at], wrong(truth[at + 1]), 5], GUESSES)
        stale = frame_of(KEY, at + 3, [6, 7], FOLLOWING)
        assert answers_to(world, first, stale) == [([at + 1], [at + 3], []), ([], [at + 5], [])]
        world.begin(KEY, truth[: at + 2], n_said=2)
        assert world.history[KEY] == truth[: at + 3]
        again = DraftWorld(options)
        again.begin(KEY, truth[: at + 2], n_said=2)
        assert world.state == again.state


def test_lanes_left_by_an_epoch_may_end_in_wrong_guesses() -> None:
    """The next one rewinds the lane to the last known true row, and reads that row again."""
    world, truth, at = truth_of()
    answers_to(world, frame_of(KEY, at, [truth[at], truth[at + 1], wrong(truth[at + 2]), 5], GUESSES))
    executor, history = world.executor, truth[: at + 3]
    assert executor.leave_route(ROUTE) == 2
    assert executor.begin_route(ROUTE, new_wiring(world.engine, epoch=EPOCH + 1))[KEY[1]] == at + 4
    again = [
        control(KEY[1], Flag.OPEN, options=greedy(**world.options, said=history[at:])),
        control(KEY[1], Flag.TRIM, at + 2),
        frame_of(KEY, at + 2, history[at + 2 :], Flag.PREFILL | SAMPLE),
    ]
    guesses = frame_of(KEY, at + 3, truth[at + 3 : at + 6], GUESSES)
    for frame in (*again, guesses):
        frame.epoch = EPOCH + 1
    samples = [answers_of(executor.execute(step_of(*frames)), KEY)[0] for frames in (again, [guesses])]
    assert [each.token for part in samples for each in part] == truth[at + 3 : at + 7]
    assert [row[0] for row in world.engine.lanes[0]] == truth[: at + 6]


@pytest.mark.parametrize("policy", [DrainPolicy(64, 64), GroupPolicy(64, CostCurve()), SinglePolicy(64)])
def test_stale_guesses_wait_in_line_before_the_open_behind_them(policy: Policy) -> None:
    """Controls of a step go first; so an open must not be taken with what came before it."""
    world, truth, at = truth_of()
    batcher = Batcher(policy)
    wrong_one, stale = (
        frame_of(KEY, at, [truth[at], wrong(truth[at + 1])], GUESSES),
        frame_of(KEY, at + 2, [6], FOLLOWING),
    )
    opening, prompt = control(KEY[1], Flag.OPEN), frame_of(KEY, 0, truth[: at + 1], Flag.PREFILL | SAMPLE)
    behind = frame_of(KEY, at + 1, truth[at + 1 : at + 4], GUESSES)
    for frame in (wrong_one, stale, opening, prompt, behind):
        batcher.push(frame)
    steps = []
    while step := batcher.take(0):
        steps.append([*step.controls, *step.frames])
        world.executor.execute(step)
    assert steps == [[wrong_one], [stale], [opening, prompt], [behind]]
    assert [row[0] for row in world.engine.lanes[0]] == truth[: at + 4]


@pytest.mark.parametrize("is_last", [True, False])
def test_a_step_that_fails_takes_its_guesses_along(is_last: bool) -> None:
    """They come back as one fault; rows sent behind them are dropped silently until the session starts again."""
    world, truth, at = truth_of()
    engine, executor = world.engine, world.executor
    if not is_last:
        engine = FakeEngine()
        executor = new_executor(engine)
        executor.execute(step_of(control(KEY[1], Flag.OPEN), frame_of(KEY, 0, truth[:at], Flag.PREFILL)))
    engine.fail_next = NativeError("told to")
    results = [
        executor.execute(step_of(frame_of(KEY, position, truth[position : position + 3], GUESSES)))
        for position in (at, at + 3, at + 6)
    ]
    assert [answers_of(result, KEY) for result in results] == [([], [], ["native"]), ([], [], []), ([], [], [])]
    assert [output.message for result in results for output in result.outputs] == [b""]
    assert len(engine.lanes[0]) == at


def test_guesses_behind_a_fault_do_not_continue_from_wrong_ones() -> None:
    """A stage that is not last holds wrong rows until the true one comes: where that is lost, they are long enough."""
    engine = FakeEngine()
    executor = new_executor(engine)
    executor.execute(step_of(control(KEY[1], Flag.OPEN), frame_of(KEY, 0, [1, 2, 3], Flag.PREFILL)))
    executor.execute(step_of(frame_of(KEY, 3, [4, 5, 6, 7, 8, 9], GUESSES)))
    engine.reused_until[0] = 8
    true_row, behind = frame_of(KEY, 4, [15, 16], GUESSES), frame_of(KEY, 6, [17, 18], FOLLOWING)
    lost = executor.execute(step_of(true_row))
    assert answers_of(lost, KEY)[2] == ["position_gap"]
    engine.reused_until.clear()
    assert executor.execute(step_of(behind)).outputs == []
    assert len(engine.lanes[0]) == 9
    executor.execute(step_of(control(KEY[1], Flag.OPEN), frame_of(KEY, 0, [1, 2, 3, 4], Flag.PREFILL)))
    assert executor.execute(step_of(frame_of(KEY, 4, [15, 16], GUESSES))).n_rows == 2


def test_a_cancelled_session_gives_no_samples_of_its_guesses() -> None:
    world, truth, at = truth_of()
    world.executor.sessions.cancelled.add(KEY)
    other = KEYS[1]
    result = world.executor.execute(step_of(frame_of(KEY, at, truth[at : at + 3], GUESSES), world.row(other)))
    assert answers_of(result, KEY) == ([], [], [])
    assert len(answers_of(result, other)[0]) == 1


def test_rows_that_want_more_than_the_engine_gives_are_a_fault_of_their_session() -> None:
    world, truth, at = truth_of()
    world.engine.max_wanted = 4
    frames = [frame_of(KEY, at, truth[at : at + 4], GUESSES), *(world.row(key) for key in KEYS[1:])]
    result = world.executor.execute(step_of(*frames))
    assert np.count_nonzero(world.engine.wants[: result.n_rows]) == 4
    assert [answers_of(result, key)[2] for key in KEYS] == [[], ["protocol"], ["protocol"]]
    result = world.executor.execute(step_of(frame_of(KEYS[1], 0, [1, 2, 3, 4, 5], Flag.PREFILL), world.row(KEYS[2])))
    assert [answers_of(result, key)[2] for key in KEYS] == [[], [], []]
    assert world.engine.wants[:6].tolist() == [0] * 5 + [1], "prompt rows want none"
    assert answers_to(world, frame_of(KEY, at, truth[at : at + 5], GUESSES))[0][2] == ["protocol"]


def test_dropped_rows_take_no_room_from_wanted_ones() -> None:
    world, truth, at = truth_of()
    answers_to(world, frame_of(KEY, at, [truth[at], wrong(truth[at + 1])], GUESSES))
    world.engine.max_wanted = 2
    stale = frame_of(KEY, at + 2, [1, 2, 3, 4], FOLLOWING)
    result = world.executor.execute(step_of(stale, *(world.row(key) for key in KEYS[1:])))
    assert (result.n_rows, result.members) == (2, [f for f in result.step.frames if f is not stale])
    assert result.consumed == [stale, *result.members], "its bytes are credit again"
    assert [len(answers_of(result, key)[0]) for key in KEYS] == [0, 1, 1]


# --- stages before the last -------------------------------------------------------------------------------------------


def forwarding() -> tuple[FakeEngine, StepExecutor]:
    engine = FakeEngine()
    executor = new_executor(engine, dtype=dtypes.DTYPE_F16)
    executor.reset_route(ROUTE + 1, new_wiring(engine))
    for key in KEYS:
        opening = control(key[1], Flag.OPEN, route_id=key[0])
        executor.execute(step_of(opening, frame_of(key, 0, [1, 2, 3], Flag.PREFILL | SAMPLE)))
    return engine, executor


def test_drafts_go_on_with_exactly_the_frames_that_do() -> None:
    """With prompts, single rows, opens; without the frames that had a fault of position or numbers."""
    for case in ("all", "a gap", "not a number"):
        engine, executor = forwarding()
        frames = {
            KEYS[0]: frame_of(KEYS[0], 3, [10, 11, 12], GUESSES),
            KEYS[1]: frame_of(KEYS[1], 9 if case == "a gap" else 3, [20, 21], GUESSES),
            KEYS[2]: frame_of(KEYS[2], 3, [30, 31, 32, 33], GUESSES),
        }
        if case == "not a number":
            engine.nan_lanes = {executor.lanes.open(KEYS[1][1], KEYS[1][0]).index}
        opening = control(5, Flag.OPEN)
        result = executor.execute(step_of(opening, *frames.values(), frame_of((ROUTE, 5), 0, [7, 8], Flag.PREFILL)))
        views = {each.route_id: envelope.parse(each.message) for each in result.outputs}
        assert views[ROUTE].draft_tokens == ((10, 11, 12, 20, 21) if case == "all" else (10, 11, 12))
        assert views[ROUTE + 1].draft_tokens == (30, 31, 32, 33)
        faults = {"all": [], "a gap": ["position_gap"], "not a number": ["not_finite"]}
        assert answers_of(result, KEYS[1])[2] == faults[case]
        drafted = [head[:4] for head in views[ROUTE].heads if head[4] == GUESSES]
        assert [head[0] for head in drafted] == ([0, 1] if case == "all" else [0])
        assert len(views[ROUTE].options) == 1


def test_only_the_last_stage_drops_by_guess() -> None:
    engine, executor = forwarding()
    for position, tokens in ((3, [10, 11, 12]), (6, [13, 14]), (4, [1, 2]), (6, [3]), (2, [9, 9])):
        result = executor.execute(step_of(frame_of(KEY, position, tokens, GUESSES)))
        (output,) = result.outputs
        view = envelope.parse(output.message)
        assert (view.draft_tokens, output.progress, output.samples) == (tuple(tokens), [], [])
        assert len(engine.lanes[executor.lanes.open(0, ROUTE).index]) == position + len(tokens)


def test_lanes_end_where_they_are_too_short_for_guesses() -> None:
    """Which no coordinator sends: a fault of that session, and nothing has changed."""
    world, _, at = truth_of()
    end = CTX - 2
    for position in range(at, end, 32):
        world.run([frame_of(KEY, position, [1] * min(32, end - position), Flag.PREFILL | SAMPLE)])
    lane = list(world.engine.lanes[0])
    last = world.executor.sessions.samplers[KEY].last
    assert last is not None
    guesses = frame_of(KEY, end, [last[1], 4, 4], GUESSES)
    result = world.executor.execute(step_of(guesses, world.row(KEYS[1])))
    assert [answers_of(result, key)[2] for key in KEYS[:2]] == [["no_lane"], []]
    assert len(answers_of(result, KEYS[1])[0]) == 1
    assert world.engine.lanes[0] == lane
    world.executor.sessions.broken.clear()
    assert len(answers_to(world, frame_of(KEY, end, [2, 4], SAMPLE))[0][0]) == 1
