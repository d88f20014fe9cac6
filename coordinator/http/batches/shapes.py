"""Files and batches as OpenAI's and Anthropic's clients read them. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from relayline.coordinator.batches.store import StoredBatch, StoredFile
from relayline.coordinator.http.replies.shapes import utc_text

K = TypeVar("K", StoredFile, StoredBatch)
MESSAGE_BATCHES = "/v1/messages/batches"
_UNASKED = {"cancelled": "canceled", "expired": "expired"}  # Anthropic's word for requests that were not asked
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def file_shape(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.n_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_shape(batch: StoredBatch) -> dict[str, Any]:
    """Return OpenAI's batch object."""
    problems = [
        {"code": each.code, "line": each.line, "message": each.message, "param": each.param} for each in batch.problems
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_id,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_id if batch.has_output else None,
        "error_file_id": batch.error_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{moment}_at": batch.moments.get(moment) for moment in _MOMENTS},
        "request_counts": {"total": batch.n_requests, "completed": batch.n_answered, "failed": batch.n_failed},
        "metadata": batch.metadata,
    }


def message_batch_shape(batch: StoredBatch) -> dict[str, Any]:
    """Return Anthropic's batch object. Its counts move when the whole batch has ended."""
    ended_s = batch.moments.get(batch.status) if batch.is_ended else None
    status = "ended" if batch.is_ended else "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": _message_counts(batch),
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_s),
        "cancel_initiated_at": _time(batch.moments.get("cancelling")),
        "archived_at": None,
        # Without a host: clients put it behind their base URL, which may be that of a gateway or a proxy.
        "results_url": f"{MESSAGE_BATCHES}/{batch.id}/results" if batch.is_ended else None,
    }


def _message_counts(batch: StoredBatch) -> dict[str, int]:
    counts = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if not batch.is_ended:
        return counts | {"processing": batch.n_requests}
    n_without_line = max(0, batch.n_requests - batch.n_answered - batch.n_failed)  # only where its work went wrong
    counts |= {"succeeded": batch.n_answered, "errored": batch.n_failed - batch.n_unasked}
    counts[_UNASKED.get(batch.status, "errored")] += batch.n_unasked + n_without_line
    return counts


def message_page(found: Sequence[StoredBatch], after: str | None, before: str | None, n_max: int) -> dict[str, Any]:
    """Return Anthropic's list of at most `n_max` batches: those behind `after`, just before `before`, or the first.

    An id that is not there counts as none.
    """
    places = {batch.id: at for at, batch in enumerate(found)}
    begin = places[after] + 1 if after in places else 0
    end = begin + n_max
    if after not in places and before in places:
        end = places[before]
        begin = max(0, end - n_max)
        has_more = begin > 0
    else:
        has_more = end < len(found)
    page = [message_batch_shape(batch) for batch in found[begin:end]]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"data": page, "has_more": has_more, **ends}


def _time(unix_s: int | None) -> str | None:
    return None if unix_s is None else utc_text(datetime.datetime.fromtimestamp(unix_s, datetime.UTC))


def page_of(
    kept: Sequence[K], shape_of: Callable[[K], dict[str, Any]], after: str | None, n_max: int
) -> dict[str, Any]:
    """Return OpenAI's list of at most `n_max` objects, from the one behind `after` on; of all where it is not there."""
    begin = next((at + 1 for at, each in enumerate(kept) if each.id == after), 0) if after else 0
    page = [shape_of(each) for each in kept[begin : begin + n_max]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + len(page) < len(kept),
    }
