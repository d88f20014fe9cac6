"""The lanes' activities, and the progress of prompts, for the HTTP side. Pure."""

from __future__ import annotations

from relayline.coordinator.sessions.admission import Admission
from relayline.coordinator.sessions.generation import PromptProgress, Slot
from relayline.coordinator.sessions.session import Session, State
from relayline.wire.envelopes.session_ids import PLAIN_ID


def slots_of(admission: Admission, *, may_draft: bool) -> list[Slot]:
    """Return what each lane does, in their order."""
    running = {session.lane: session for session in admission.running.values()}
    return [
        _busy(running[lane], may_draft=may_draft) if lane in running else Slot(lane, "idle", may_draft=may_draft)
        for lane in range(admission.n_lanes)
    ]


def _busy(session: Session, *, may_draft: bool) -> Slot:
    n_prompt = len(session.request.prompt_tokens)
    return Slot(
        lane=session.lane,
        state=session.state.value,
        is_busy=True,
        may_draft=may_draft and session.acceptance is not None,
        task=session.session_id & PLAIN_ID,  # clients read it as a signed number
        n_prompt=n_prompt,
        n_read=min(n_prompt, session.n_sent) if session.state is State.PREFILL else n_prompt,
        n_cached=session.n_copied,
        n_generated=session.n_generated,
        n_left=session.request.max_tokens - session.n_generated,
    )


def progress_of(session: Session, n_read: int) -> PromptProgress | None:
    """Return the progress of a prompt to report; None where no client asked, or it was reported before."""
    n_prompt = len(session.request.prompt_tokens)
    is_again = session.replays or session.n_generated > (n_read == n_prompt)
    if not session.request.wants_progress or is_again:
        return None
    return PromptProgress(n_prompt, session.n_copied, n_read)
