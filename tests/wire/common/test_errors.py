"""Goal: every deliberate error has one label, one status row and survives the wire; the root is never raised."""

from __future__ import annotations

import grpc
import pytest

from relayline.wire.common import errors
from relayline.wire.common.errors import Fault, RelaylineError


def all_leaves(root: type[RelaylineError] = RelaylineError) -> list[type[RelaylineError]]:
    """Found by walking the classes, not by asking the code under test."""
    return [leaf for child in root.__subclasses__() for leaf in (child, *all_leaves(child))]


OURS = [leaf for leaf in all_leaves() if leaf.__module__ == "relayline.wire.common.errors"]
each_leaf = pytest.mark.parametrize("leaf", OURS, ids=lambda leaf: leaf.__name__)


def test_labels_are_unique_and_the_table_has_exactly_them():
    labels = [leaf.label for leaf in OURS]
    assert sorted(labels) == sorted(set(labels))
    assert set(labels) == set(errors.STATUS)
    assert set(labels) <= set(errors.leaves())


@each_leaf
def test_leaf_says_its_own_label_in_snake_case(leaf: type[RelaylineError]):
    assert "label" in vars(leaf), "an inherited label would make two errors one on the wire"
    assert leaf.label == leaf.label.lower()
    assert leaf.label.replace("_", "").isalpha()
    assert leaf.__doc__


@each_leaf
def test_leaf_survives_the_wire(leaf: type[RelaylineError]):
    error = leaf("what happened; what to do")
    back = errors.from_wire(error.label, error.message)
    assert type(back) is leaf
    assert back.message == str(back) == "what happened; what to do"


@each_leaf
def test_statuses_agree_with_whose_fault_it_is(leaf: type[RelaylineError]):
    error = leaf("x")
    grpc_status, http_status = errors.grpc_status(error), errors.http_status(error)
    assert grpc_status is not grpc.StatusCode.OK
    assert http_status in (400, 404, 429, 499, 500, 501, 502, 503)
    if leaf.fault is Fault.CLIENT:
        assert 400 <= http_status < 500
        assert leaf.retryable is (http_status == 429)
    if http_status == 429:
        assert leaf.retryable
        assert grpc_status is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_root_is_not_raised_itself():
    with pytest.raises(TypeError, match="leaf"):
        RelaylineError("x")


def test_unknown_label_of_a_newer_peer_becomes_internal():
    error = errors.from_wire("invented_later", "text")
    assert type(error) is errors.InternalError
    assert error.message == "text"


def test_details_that_only_this_process_uses():
    assert errors.InvalidRequestError("x", param="prompt").param == "prompt"
    assert errors.OverloadedError("x", retry_after_s=7).retry_after_s == 7
