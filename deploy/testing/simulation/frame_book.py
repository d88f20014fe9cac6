"""The book of frames: where every row frame is that left the coordinator."""

from __future__ import annotations

from relayline.deploy.testing.simulation.stage import SimStage, Violation


class FrameBook:
    """Counts of row frames. All that were sent are answered, dropped, on a link, in a step, or in a queue."""

    def __init__(self, n_stages: int) -> None:
        self.n_sent = self.n_answered = self.n_dropped = self.n_on_links = self.n_in_steps = 0
        self._waiting = [0] * n_stages  # frames in the queue of each, after its latest event
        self._n_waiting = 0  # and in all of them

    def count_queue(self, stage: SimStage) -> None:
        """Count the queue of a stage again. Raises Violation if frames wait for a free engine."""
        n_waiting = stage.n_waiting
        self._n_waiting += n_waiting - self._waiting[stage.index]
        self._waiting[stage.index] = n_waiting
        if n_waiting and not stage.is_busy:
            raise Violation(f"stage {stage.index} holds frames while its engine is free")

    def check(self) -> None:
        """Raise Violation if a frame is lost or doubled."""
        here = self.n_on_links + self.n_in_steps + self._n_waiting
        if self.n_sent != self.n_answered + self.n_dropped + here:
            raise Violation(
                f"{self.n_sent} frames were sent, {self.n_answered} answered, {self.n_dropped} dropped, {here} remain"
            )
