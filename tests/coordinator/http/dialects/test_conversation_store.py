"""The store of conversations: its bounds, its turns and its owners."""

from __future__ import annotations

import pytest

from relayline.coordinator.http.conversations import store as stores
from relayline.coordinator.http.conversations.store import Conversation, ConversationStore
from relayline.coordinator.http.responses.store import ITEM_BYTES
from relayline.wire.common.errors import (
    ContextLengthError,
    ConversationLockedError,
    ConversationNotFoundError,
    InvalidRequestError,
)


def begun(id: str, n_bytes: int = 0, owner: str = "") -> Conversation:
    items = [(f"msg_{id}", b"x" * (n_bytes - ITEM_BYTES))] if n_bytes else []
    return Conversation.of(id, owner, 0, b"", items)


def ids_in(store: ConversationStore) -> list[str]:
    """The one that was used longest ago first."""
    return [id for share in store._shares._of.values() for id in share.used]


class Mirror:
    """What a store has told."""

    def __init__(self) -> None:
        self.kept: dict[str, Conversation] = {}

    def put(self, conversation: Conversation) -> None:
        self.kept[conversation.id] = conversation

    def drop(self, id: str) -> None:
        del self.kept[id]


def test_the_one_that_was_used_longest_ago_goes_first_and_those_with_a_turn_last() -> None:
    store = ConversationStore(n_max=3)
    for id in "abc":
        store.put(begun(id))
    turn = store.begin("a", "")
    turn.leave()
    store.put(begun("d"))
    assert ids_in(store) == ["c", "a", "d"], "a turn is a use"
    held = store.begin("c", "")
    store.put(begun("e"))
    store.put(begun("f"))
    assert ids_in(store) == ["c", "e", "f"]
    for id in "ef":
        store.begin(id, "")
    store.put(begun("g"))
    assert (ids_in(store), held.add([("x", b"")])) == (["e", "f", "g"], False), "the bound is kept in any case"


class Counted(str):
    """An id that counts how often it is looked at."""

    __hash__ = str.__hash__
    n_looks = 0

    def __ne__(self, other: object) -> bool:
        Counted.n_looks += 1
        return not self == other


def test_hundreds_go_for_a_large_one_without_a_look_at_all_for_each() -> None:
    store = ConversationStore(bytes_max=500 * 300)
    for number in range(500):
        store.put(begun(Counted(number), 300))
    store.put(begun("large", 499 * 300))
    assert (len(store), Counted.n_looks) == (2, 499)


def test_all_of_a_conversation_counts_for_the_bound_of_bytes() -> None:
    whole = Conversation.of("a", "", 0, b'{"a":"b"}', [("x", b"12345"), ("y", b"")])
    assert whole.items_bytes == 5 + 2 * ITEM_BYTES
    assert whole.n_bytes == whole.items_bytes + 9
    assert whole.with_items([("z", b"1")]).without_item("x").n_bytes == whole.n_bytes - 5 + 1
    assert ConversationStore(bytes_max=whole.n_bytes).put(whole)
    assert not ConversationStore(bytes_max=whole.n_bytes - 1).put(whole)
    store = ConversationStore(bytes_max=2_000)
    for id in "abc":
        store.put(begun(id, 600))
    store.add("a", "", [("msg_1", b"x" * 500)])
    assert (ids_in(store), store.n_bytes) == (["c", "a"], 600 + 600 + 500 + ITEM_BYTES)
    store.delete("a", "")
    store.delete("c", "")
    assert (len(store), store.n_bytes) == (0, 0)


def test_an_answer_that_leaves_no_room_is_not_added() -> None:
    store = ConversationStore(bytes_max=1_000)
    store.put(begun("a", 600))
    turn = store.begin("a", "")
    assert not turn.add([("x", b"x" * 500)])
    assert [*store.get("a", "").items] == ["msg_a"]
    assert turn.add([("x", b"")])


def test_one_conversation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ConversationStore()
    store.put(begun("a"))
    monkeypatch.setattr(stores, "CONVERSATION_ITEMS_MAX", 2)
    store.add("a", "", [("x", b""), ("y", b"")])
    with pytest.raises(InvalidRequestError, match=r"would have 3 items .* 2 items .* are the most; begin another one"):
        store.add("a", "", [("z", b"")])
    with pytest.raises(ContextLengthError, match="too long to go on with"):
        store.begin("a", "")
    with store.begin("a", "", resumes=True) as turn:
        assert turn.add([("z", b"")]), "what has begun ends"
    monkeypatch.setattr(stores, "CONVERSATION_ITEMS_MAX", 9)
    monkeypatch.setattr(stores, "CONVERSATION_BYTES_MAX", store.n_bytes)
    store.begin("a", "").leave()
    with pytest.raises(InvalidRequestError, match=f"have 4 items and {store.n_bytes + ITEM_BYTES} bytes"):
        store.add("a", "", [("more", b"")])
    monkeypatch.setattr(stores, "CONVERSATION_BYTES_MAX", store.n_bytes - 1)
    with pytest.raises(ContextLengthError, match="too long to go on with"):
        store.begin("a", "")


def test_a_turn_keeps_the_items_as_they_are_until_it_ends() -> None:
    store = ConversationStore()
    store.put(begun("a"))
    with store.begin("a", "") as turn:
        for changing in (lambda: store.begin("a", ""), lambda: store.add("a", "", []), lambda: store.unlocked("a", "")):
            with pytest.raises(ConversationLockedError):
                changing()
        store.update("a", "", b'{"a":"b"}')
        assert turn.add([("x", b"1"), ("y", b"2")])
        with pytest.raises(ConversationLockedError):
            store.begin("a", "")
        turn.leave()
        after = store.begin("a", "")
    with pytest.raises(ConversationLockedError):
        store.begin("a", "")  # the end of the first one's context leaves the second one's turn alone
    assert after.add([("y", b"3"), ("z", b"3")])
    assert store.get("a", "").items == {"x": b"1", "y": b"2", "z": b"3"}, "one that ends again adds nothing twice"
    assert store.get("a", "").metadata == b'{"a":"b"}'
    after.leave()
    with store.begin("a", "") as turn:
        turn.detach()
    with pytest.raises(ConversationLockedError):
        store.begin("a", "")
    turn.leave()
    store.begin("a", "")


def test_a_conversation_is_its_owners() -> None:
    store = ConversationStore()
    store.put(begun("a", owner="me"))
    for asking in (
        lambda: store.get("a", "you"),
        lambda: store.begin("a", "you"),
        lambda: store.add("a", "you", []),
        lambda: store.update("a", "you", b""),
        lambda: store.delete("a", "you"),
    ):
        with pytest.raises(ConversationNotFoundError, match="no conversation 'a' is here"):
            asking()
    assert store.get("a", "me").owner == "me"


def test_its_mirror_is_told_of_each_change() -> None:
    store, mirror = ConversationStore(n_max=2), Mirror()
    store.mirror = mirror
    for id in "ab":
        store.put(begun(id))
    store.add("b", "", [("x", b"1")])
    store.update("b", "", b"{}")
    store.begin("a", "").add([("y", b"2")])
    assert mirror.kept == {id: store.get(id, "") for id in "ab"}
    store.put(begun("c"))
    store.delete("a", "")
    assert [*mirror.kept] == ["c"]
