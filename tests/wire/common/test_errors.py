"""Goal: every deliberate error has one label, one status row and survives the wire; the root is never raised."""

from __future__ import annotations

import grpc
import pytest

from relayline.wire.common import errors
from relayline.wire.common.errors import Fault, RelaylineError

# Every error of 0.1.0: whose fault, whether to retry, gRPC, HTTP. Clients and other versions act on these.
RELEASED = {
    "usage": (Fault.OPERATOR, False, "INVALID_ARGUMENT", 400),
    "bad_cut": (Fault.OPERATOR, False, "INVALID_ARGUMENT", 400),
    "bad_model_file": (Fault.OPERATOR, False, "FAILED_PRECONDITION", 500),
    "unsupported_architecture": (Fault.OPERATOR, False, "FAILED_PRECONDITION", 500),
    "bad_artifact": (Fault.OPERATOR, False, "FAILED_PRECONDITION", 500),
    "cannot_start": (Fault.OPERATOR, False, "FAILED_PRECONDITION", 500),
    "invalid_request": (Fault.CLIENT, False, "INVALID_ARGUMENT", 400),
    "context_length_exceeded": (Fault.CLIENT, False, "INVALID_ARGUMENT", 400),
    "model_not_found": (Fault.CLIENT, False, "NOT_FOUND", 404),
    "overloaded": (Fault.SERVER, True, "RESOURCE_EXHAUSTED", 429),
    "not_ready": (Fault.SERVER, True, "UNAVAILABLE", 503),
    "protocol": (Fault.PEER, False, "INVALID_ARGUMENT", 502),
    "checksum": (Fault.PEER, True, "DATA_LOSS", 502),
    "handshake": (Fault.OPERATOR, False, "FAILED_PRECONDITION", 503),
    "unauthenticated": (Fault.OPERATOR, False, "UNAUTHENTICATED", 503),
    "place_taken": (Fault.OPERATOR, True, "ALREADY_EXISTS", 503),
    "stale_epoch": (Fault.PEER, False, "ABORTED", 503),
    "position_gap": (Fault.PEER, True, "FAILED_PRECONDITION", 503),
    "bad_session": (Fault.PEER, False, "FAILED_PRECONDITION", 500),
    "no_lane": (Fault.SERVER, True, "RESOURCE_EXHAUSTED", 429),
    "not_finite": (Fault.SERVER, False, "INTERNAL", 500),
    "native": (Fault.SERVER, False, "INTERNAL", 500),
    "stage_lost": (Fault.SERVER, True, "UNAVAILABLE", 503),
    "internal": (Fault.SERVER, False, "INTERNAL", 500),
}


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


def test_what_was_released_stays():
    found = {leaf.label: (leaf.fault, leaf.retryable, *errors.STATUS[leaf.label]) for leaf in OURS}
    assert {label: found.get(label) for label in RELEASED} == RELEASED
