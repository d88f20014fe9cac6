"""Files and batches as OpenAI's clients read them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from relayline.coordinator.batches.store import StoredBatch, StoredFile

K = TypeVar("K", StoredFile, StoredBatch)
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
