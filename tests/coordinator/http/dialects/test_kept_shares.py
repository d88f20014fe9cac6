"""What one API key keeps pushes out nothing of a key that keeps less, in the stores of responses and conversations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relayline.coordinator.http.conversations.store import Conversation, ConversationStore
from relayline.coordinator.http.responses.shares import Shares
from relayline.coordinator.http.responses.store import ITEM_BYTES, ResponseStore, Stored

Store = ResponseStore | ConversationStore
MAKING = pytest.mark.parametrize("make", [ResponseStore, ConversationStore])


def put(store: Store, owner: str, name: str, n_bytes: int = ITEM_BYTES) -> bool:
    items = [(f"msg_{name}", b"x" * (n_bytes - ITEM_BYTES))]
    if isinstance(store, ResponseStore):
        return store.put(Stored(name, owner, b"", (), items, None))
    return store.put(Conversation.of(name, owner, 0, b"", items))


def kept(store: Store) -> str:
    return "".join(sorted(store._by_id))


@MAKING
def test_a_key_with_many_loses_its_own_oldest(make: Callable[..., Store]) -> None:
    store = make(n_max=4)
    put(store, "bob", "B")
    for name in "abcdefgh":
        put(store, "alice", name)
    assert kept(store) == "Bfgh"
    put(store, "bob", "C")
    assert kept(store) == "BCgh"
    put(store, "bob", "D")
    put(store, "carl", "X")
    assert kept(store) == "CDXh", "of two that keep as many, the one with the oldest"


@MAKING
def test_a_key_with_much_loses_its_own_oldest(make: Callable[..., Store]) -> None:
    store = make(bytes_max=2_000)
    for name in "BCD":
        put(store, "bob", name, 300)
    put(store, "alice", "a", 900)
    put(store, "alice", "b", 900)
    assert (kept(store), store.n_bytes) == ("BCDb", 1_800)


@MAKING
def test_one_that_is_new_stays_unless_it_is_large_and_leaves_the_others_too_little(make: Callable[..., Store]) -> None:
    store = make(bytes_max=2_000)
    for name in "BCDEF":
        put(store, name, name, 300)
    assert not put(store, "alice", "a", 1_001)
    assert kept(store) == "BCDEF"
    assert put(store, "alice", "a", 1_000)
    assert kept(store) == "DEFa", "what is new is the last to go"
    put(store, "G", "G", 200)
    assert kept(store) == "DEFG", "and then it is what keeps most"
    assert put(store, "D", "b", 1_200), "the others keep less and lose nothing"
    assert not put(store, "D", "c", 1_201)


@MAKING
def test_one_owner_may_have_all(make: Callable[..., Store]) -> None:
    store = make(bytes_max=2_000)
    put(store, "", "a", 300)
    assert put(store, "", "b", 2_000)
    assert kept(store) == "b"


def test_an_owner_of_nothing_is_forgotten() -> None:
    shares = Shares(2, 1_000)
    for number in range(100):
        shares.put(str(number), f"id_{number}", 10)
        for id in shares.too_many(f"id_{number}"):
            shares.drop(id.removeprefix("id_"), id)
    assert (len(shares._of), len(shares._sizes), shares.n_bytes) == (2, 2, 20)
