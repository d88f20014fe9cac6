"""The words for a pipeline's state as clients see it, and for the state of one of its processes.

`/health`, `/v1/pipeline`, `relayline status`, `relayline top`, the launcher's state file and the logs use these and no
others, each with one meaning.
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """The state of a pipeline for its clients."""

    STARTING = "starting"
    """Its processes are being started; none answers yet."""
    LOADING = "loading"
    """The coordinator answers; the stages have not all been there yet. Requests are refused."""
    READY = "ready"
    """A request starts now."""
    RECOVERING = "recovering"
    """A stage was lost just now. Running requests pause and new ones wait."""
    UNREACHABLE = "unreachable"
    """A stage has been lost for longer than new requests wait, so that they are refused; or the coordinator itself does
    not answer."""
    SLEEPING = "sleeping"
    """Nobody asked anything for a while, and the stages have freed their memory. The next request wakes it."""
    WAKING = "waking"
    """The stages load again; requests wait for that."""
    DRAINING = "draining"
    """It is draining: running requests may finish, new ones are refused."""
    STOPPED = "stopped"
    """It ended on request."""
    FAILED = "failed"
    """It has ended because of an error."""
    DEAD = "dead"
    """Its supervisor has ended without a word."""

    @property
    def is_paused(self) -> bool:
        """Whether a stage is waited for that was there before."""
        return self in (Phase.RECOVERING, Phase.UNREACHABLE)

    @property
    def rests(self) -> bool:
        """Whether the stages hold nothing yet, so that requests wait for them to load."""
        return self in (Phase.SLEEPING, Phase.WAKING)

    @property
    def is_up(self) -> bool:
        """Whether it serves, or serves again once a process that was lost is back."""
        return self in (Phase.READY, Phase.RECOVERING)

    @property
    def takes_requests(self) -> bool:
        """Whether a request is answered, now or once the stages have loaded."""
        return self is Phase.READY or self.rests

    @property
    def has_ended(self) -> bool:
        """Whether an end in order was noted."""
        return self in (Phase.STOPPED, Phase.FAILED)


class HostState(enum.StrEnum):
    """How far one process of a pipeline is."""

    WAITING = "waiting"
    """It has not been here yet."""
    STARTING = "starting"
    """It runs, and has not reported its state yet."""
    MEASURING = "measuring"
    """A stage measures its host, since there is no plan yet; or it has, and waits for the plan."""
    FETCHING = "fetching"
    """A stage gets its artifact."""
    LOADING = "loading"
    """A stage reads its weights and measures its speed."""
    READY = "ready"
    """It serves."""
    SPARE = "spare"
    """A stage is here and holds no layers: it takes over from one that is lost or drained."""
    SLEEPING = "sleeping"
    """A stage is here and has freed its memory, because the pipeline sleeps."""
    DRAINED = "drained"
    """A stage was freed of its layers for maintenance; `relayline uncordon` offers it again."""
    SILENT = "silent"
    """It served and has not answered for a few seconds; not given up yet."""
    RESTARTING = "restarting"
    """It has died, and will be started again."""
    LOST = "lost"
    """It has left. Its owner must start it again, unless it returns by itself."""
    STOPPED = "stopped"
    """It ended on request."""
    FAILED = "failed"
    """It has died, and will not be started again."""
