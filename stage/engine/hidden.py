"""The last stage's hidden rows: what its layers and its final norm give, before the head. For embeddings.

They are copied out of the running graph, like a stage's rows for the next one (`stage.engine.capture`), and only in
steps that need them. In every other step the callback compares no name. A GPU still waits for the callback in every
step, so there it is installed only on request, and for a reranker.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import StageArtifact
from relayline.stage.engine.capture import RowCapture
from relayline.stage.engine.micro_batches import Cut
from relayline.stage.engine.rank_head import RankHead
from relayline.stage.engine.row_parts import Nodes
from relayline.wire.common.errors import NativeError


class Decoding(Protocol):
    """The engine whose rows they are."""

    def decode(self, n_rows: int) -> None:
        """Run one step."""

    def clear(self, lane: int) -> None:
        """Drop a lane's rows."""


NODE = "result_norm"  # llama.cpp's name for it, in the graphs of nearly all families


class HiddenRows:
    """Hidden rows of the last step, where that was asked for beforehand."""

    def __init__(self, max_rows: int, n_embd: int, nodes: Nodes, rank_head: RankHead | None = None) -> None:
        """`nodes` are those of a RowCapture: where incoming rows are written over."""
        self.rank_head = rank_head  # of a reranker
        self._rows = np.empty((max_rows, n_embd), np.float32)  # pages come with the first use
        self.capture = RowCapture(NODE, self._rows, nodes, stops=False)
        self._computed: npt.NDArray[np.intp] | None = None  # wanted rows of the step in the order of `_rows`

    @classmethod
    def of(cls, artifact: StageArtifact, max_rows: int, nodes: Nodes) -> HiddenRows:
        """Make them for a last stage. Raises ArtifactError where its head that ranks cannot be read."""
        head = RankHead(artifact, artifact.rank_head) if artifact.rank_head is not None else None
        return cls(max_rows, artifact.n_embd, nodes, head)

    def want(self, *, wanted: bool) -> None:
        """Say whether the next steps are to give them."""
        self.capture.is_armed = wanted

    def note(self, wants: npt.NDArray[np.int8], cut: Cut | None) -> None:
        """Note about the step that has run which rows wanted logits, and how it was cut."""
        if not self.capture.is_armed:
            self._computed = None
            return
        computed = cut.computed if cut is not None else np.arange(wants.size)
        n_written = self.capture.n_written
        # Most graphs drop the rows without wanted logits before the norm, some only after it.
        self._computed = computed if n_written == computed.size else computed[wants[computed] != 0]
        if n_written != self._computed.size:
            self._computed = None

    def rows(self, first: int, n_rows: int) -> npt.NDArray[np.float32]:
        """Return rows [first : first + n_rows) of the last step as a copy, f32 [n, n_embd]. All must have wanted
        logits.

        Raises NativeError where this architecture does not give them.
        """
        if self._computed is None:
            raise NativeError(f"no tensor {NODE} gave hidden rows in this step")
        places = np.flatnonzero((self._computed >= first) & (self._computed < first + n_rows))
        if places.size != n_rows:
            raise NativeError(f"{places.size} hidden rows came instead of {n_rows}")
        return self._rows[places[np.argsort(self._computed[places], kind="stable")]]


def gives_hidden(engine: Decoding, hidden: HiddenRows) -> bool:
    """Find out with a step of one row whether this architecture gives hidden rows."""
    hidden.want(wanted=True)
    engine.decode(1)
    try:
        gives = bool(np.isfinite(hidden.rows(0, 1)).all())
    except NativeError:
        gives = False
    hidden.want(wanted=False)
    engine.clear(0)
    return gives
