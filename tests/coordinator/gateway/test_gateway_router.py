"""Routing of requests: the pure router, and the fields that it reads from a body."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relayline.coordinator.gateway import router as module
from relayline.coordinator.gateway.bounds import CHAIN_FIRST, CHAIN_MAX
from relayline.coordinator.gateway.peek import Asked, Mark, peek
from relayline.coordinator.gateway.router import Backend, Health, Heard, Router
from relayline.wire.common.errors import ModelNotFoundError, NotReadyError, OverloadedError

READY = Heard(("chat",), is_ready=True, n_lanes=4, started_unix_s=1)


def router_of(**heard: Heard | None) -> Router:
    """A router whose pipelines have sent these reports; None: no report yet."""
    found = Router(heard)
    for name, report in heard.items():
        if report is not None:
            backend_of(found, name).heard(report, 1)
    return found


def backend_of(router: Router, name: str) -> Backend:
    found = router.named(name)
    assert found is not None
    return found


def chat(*messages: str, **more: object) -> Asked:
    turns = [{"role": "user", "content": text} for text in messages]
    return peek(json.dumps({"model": "chat", "messages": turns, **more}).encode())


def test_a_pipeline_that_has_never_answered_is_not_said_to_be_dead() -> None:
    one = Backend("a")
    one.failed("it refuses connections")
    assert (one.state, one.health) == ("unknown", Health.DEAD), "it may start just now, and gets no requests"
    one.heard(READY, 1)
    one.failed("it refuses connections")
    assert one.state == "dead"


def test_a_conversation_stays_where_its_beginning_is_known_until_that_place_is_much_busier() -> None:
    router = router_of(a=READY, b=READY)
    first = chat("x" * 8_000)
    a, b = router.backends
    b.sent(0, first)
    b.ended(0)
    turn = chat("x" * 8_000, "yes?", "go on")
    assert b.unread_tokens(turn) < 100 < a.unread_tokens(turn)
    assert router.choose(turn) is b
    for key in range(1, 4):  # 2,000 tokens that need not be read are worth two answers of 256 tokens over 4 lanes
        b.sent(key, Asked())
    assert router.choose(turn) is a
    for key in range(1, 4):
        b.ended(key)
    b.heard(READY, 2)
    assert router.choose(turn) is b, "another report of the same process changes nothing"
    b.heard(Heard(("chat",), True, n_lanes=4, started_unix_s=2), 2)
    assert router.choose(turn) is a, "a pipeline that was started again has read nothing"


def test_the_least_loaded_replica_is_chosen_by_all_requests_there() -> None:
    router = router_of(a=READY, b=READY)
    a, b = router.backends
    a.sent(0, chat("hi"))
    assert router.choose(chat("hello")) is b
    b.heard(Heard(("chat",), True, n_requests=3, n_lanes=4, started_unix_s=1), 2)
    assert router.choose(chat("hello")) is a
    a.sent(1, chat("z" * 40_000))  # a long prompt is in front
    assert router.choose(chat("hello")) is b
    a.began(1)
    assert router.choose(chat("hello")) is a


def test_a_report_counts_this_gateways_own_requests_once() -> None:
    router = router_of(a=READY)
    (a,) = router.backends
    for key in range(2):
        a.sent(key, Asked())
    for n_reported, n_others in ((5, 3), (2, 0), (1, 0)):  # a report may be older than the latest requests
        a.heard(Heard(("chat",), True, n_requests=n_reported, n_lanes=4, started_unix_s=1), 2)
        assert a.n_others == n_others
    a.failed("gone")
    assert a.n_others == 0


def test_a_removed_pipeline_is_gone_and_the_others_stay() -> None:
    router = router_of(a=READY, b=READY, c=READY)
    _, b, c = router.backends
    router.learn("of b", b)
    router.learn("of c", c)
    router.remove(b)
    assert [backend.name for backend in router.backends] == ["a", "c"]
    assert (router.holder("of b"), router.holder("of c")) == (None, c)
    router.arrange(["c", "x", "a"])
    assert [backend.name for backend in router.backends] == ["c", "a"]


def test_models_choose_the_pipeline_and_errors_say_which_there_are() -> None:
    router = router_of(a=READY, b=Heard(("small", "tiny"), True))
    assert router.choose(Asked("tiny")).name == "b"
    assert router.choose(Asked()).name == "a", "without a model it is the first one's"
    with pytest.raises(ModelNotFoundError, match="'huge' is not served here; use one of chat, small, tiny"):
        router.choose(Asked("huge"))
    backend_of(router, "a").failed("it refuses connections")
    with pytest.raises(NotReadyError, match=r"no replica of chat answers \(a: it refuses connections\)") as caught:
        router.choose(Asked("chat"))
    assert caught.value.retry_after_s
    router = router_of(a=READY)
    with pytest.raises(NotReadyError, match=r"no replica of chat answers \(a: the connection to it was lost\)"):
        router.choose(Asked("chat"), [backend_of(router, "a")])
    with pytest.raises(NotReadyError, match="not every pipeline has been reached yet"):
        router_of(a=READY, b=None).choose(Asked("small"))
    with pytest.raises(NotReadyError, match="no pipeline has been reached yet"):
        router_of(a=None).choose(Asked())


def test_a_stored_response_binds_its_conversation_to_its_holder() -> None:
    router = router_of(a=READY, b=READY)
    a, b = router.backends
    router.learn("resp_1", b)
    for key in range(9):
        b.sent(key, Asked())
    assert router.choose(Asked("chat", previous_id="resp_1")) is b
    assert router.choose(Asked("chat", previous_id="resp_2")) is a
    b.failed("gone")
    with pytest.raises(NotReadyError, match="b: gone"):
        router.choose(Asked("chat", previous_id="resp_1"))


def test_a_paused_replica_is_only_asked_where_none_is_ready() -> None:
    router = router_of(a=Heard(("chat",), is_ready=False), b=READY)
    a, b = router.backends
    for key in range(9):
        b.sent(key, Asked())
    assert router.choose(Asked("chat")) is b
    b.failed("gone")
    assert router.choose(Asked("chat")) is a


def test_all_bounds_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTSTANDING_MAX", "PREFIXES_PER_BACKEND_MAX", "HELD_MAX"):
        monkeypatch.setattr(module, name, 3)
    router = router_of(a=READY)
    (a,) = router.backends
    for key in range(3):
        a.sent(key, chat(*map(str, range(key, key + 3))))
        router.learn(f"r{key}", a)
    router.learn("r3", a)
    assert len(a._known) == 3
    assert router.holder("r0") is None
    assert router.holder("r3") is a
    with pytest.raises(OverloadedError):
        router.choose(Asked("chat"))


class Events(RuleBasedStateMachine):
    """Any order of what happens to three replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router("abc")
        self.running: dict[int, Backend] = {}
        self.began: set[int] = set()
        self.n_sent = 0

    @rule(at=st.integers(0, 2), is_ready=st.booleans(), n=st.integers(0, 9), lanes=st.integers(0, 8))
    def heard(self, at: int, is_ready: bool, n: int, lanes: int) -> None:
        self.router.backends[at].heard(Heard(("chat",), is_ready, n, lanes), 1)

    @rule(at=st.integers(0, 2))
    def failed(self, at: int) -> None:
        self.router.backends[at].failed("gone")

    @rule(
        hashes=st.lists(st.sampled_from([b"1", b"2", b"3", b"4"]), max_size=4, unique=True),
        n_bytes=st.integers(0, 100_000),
        tried=st.sets(st.integers(0, 2)),
    )
    def asked(self, hashes: list[bytes], n_bytes: int, tried: set[int]) -> None:
        marks = tuple(Mark(each, (at + 1) * n_bytes) for at, each in enumerate(hashes))
        asked = Asked("chat", chain=marks, prompt_bytes=len(marks) * n_bytes)
        left_out = [self.router.backends[at] for at in tried]
        may = [each for each in self.router.backends if each not in left_out]
        ready = [each for each in may if each.health is Health.READY]
        paused = [each for each in may if each.health is Health.PAUSED]
        try:
            chosen = self.router.choose(asked, left_out)
        except NotReadyError:
            known = any(each.models for each in self.router.backends)
            assert not known or not (ready or paused)
            return
        assert chosen in (ready or paused)
        costs = [each.work() + each.unread_tokens(asked) for each in ready or paused]
        assert chosen.work() + chosen.unread_tokens(asked) == min(costs)
        chosen.sent(self.n_sent, asked)
        assert chosen.unread_tokens(asked) == 0
        self.running[self.n_sent] = chosen
        self.n_sent += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running[key].began(key)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.pop(key).ended(key)

    @invariant()
    def nothing_is_left_of_what_has_ended(self) -> None:
        assert sum(each.n_outstanding for each in self.router.backends) == len(self.running)
        for each in self.router.backends:
            assert each.work() >= 0
            if not each.n_outstanding and not each.n_others:
                assert each.work() == 0


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck))


# --- reading a body ---------------------------------------------------------------------------------------------------


def test_each_turn_has_the_marks_of_the_turns_before_it() -> None:
    first, second = chat("a", "b"), chat("a", "b", "c")
    assert second.chain[:2] == first.chain
    assert chat("a", "c").chain[0] == first.chain[0]
    assert chat("a", "c").chain[1] != first.chain[1]
    assert chat("a", "b", tools=[{"type": "function"}]).chain[0] != first.chain[0], "tools come first"
    assert first.prompt_bytes == first.chain[-1].n_bytes > 0


def test_texts_are_known_by_their_beginnings() -> None:
    text = "The quick brown fox. " * 400
    first = peek(json.dumps({"prompt": text}).encode())
    longer = peek(json.dumps({"prompt": text + "And so on."}).encode())
    n_same = sum(one == other for one, other in zip(first.chain, longer.chain, strict=False))
    assert n_same >= len(first.chain) - 1
    assert longer.chain[n_same - 1].n_bytes > len(text) / 2


def test_long_conversations_keep_marks_at_both_ends() -> None:
    whole = chat(*map(str, range(500)))
    assert len(whole.chain) == CHAIN_MAX
    assert whole.chain[:CHAIN_FIRST] == chat(*map(str, range(CHAIN_FIRST))).chain
    assert whole.chain[-1] == chat(*map(str, range(500)), "more").chain[-2]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "m", "max_tokens": 7}, ("m", 7)),
        ({"model": "m", "max_completion_tokens": 9, "max_tokens": None}, ("m", 9)),
        ({"n_predict": -1}, (None, 256)),
        ({"model": 3, "max_output_tokens": 1 << 40}, (None, 1_024)),
        ({"model": "m", "max_tokens": "many"}, ("m", 256)),
        ({"name": "m"}, ("m", 256)),
        ({"model": "m", "name": "other"}, ("m", 256)),
    ],
)
def test_model_and_length_are_read_as_far_as_they_make_sense(
    body: dict[str, object], expected: tuple[str | None, int]
) -> None:
    asked = peek(json.dumps(body).encode())
    assert (asked.model, asked.output_tokens) == expected


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"model":"\xff"}', b"[" * 5_000, b'{"messages":{"a":1}}'])
def test_no_body_is_too_broken_to_be_sent_on(raw: bytes) -> None:
    assert peek(raw).model is None


def test_a_replica_that_sleeps_is_woken_once_the_others_have_no_free_lane() -> None:
    router = router_of(a=Heard(("chat",), True, n_lanes=4, rests=True), b=Heard(("chat",), True, n_lanes=2))
    a, b = router.backends
    for key in range(2):
        assert router.choose(Asked("chat")) is b
        b.sent(key, Asked("chat"))
    assert router.choose(Asked("chat")) is a
    a.heard(Heard(("chat",), True, n_lanes=4), 1)
    b.ended(0)
    assert router.choose(Asked("chat")) is a, "awake, it has less to do"


def test_where_all_replicas_sleep_one_is_woken() -> None:
    router = router_of(a=Heard(("chat",), True, rests=True), b=Heard(("chat",), True, rests=True))
    assert router.choose(Asked("chat")) is router.backends[0]


def test_a_restarted_pipeline_is_not_about_to_unload() -> None:
    (a,) = router_of(a=READY).backends
    a.is_unloading = True
    a.heard(READY, 1)
    assert a.is_unloading, "it waits for its requests"
    a.heard(dataclasses.replace(READY, started_unix_s=2), 2)
    assert not a.is_unloading
