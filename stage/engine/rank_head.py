"""The head of a reranker: from a prompt's pooled row to the chances of the labels, as llama.cpp's pooling RANK has it.

llama.cpp multiplies a quantised head with a quantised row. Here the head is converted to f32 once, and the row stays
as it is: scores of such a file differ from llama.cpp's by that rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayline.stage.engine.artifact import RankSection, StageArtifact
from relayline.stage.engine.table_rows import TableRows
from relayline.wire.common.errors import NumericError


class RankHead:
    """One model's head. Read-only, so any thread may use it."""

    def __init__(self, artifact: StageArtifact, section: RankSection) -> None:
        """Read it. Raises ArtifactError where it cannot be read as numbers, or the file ends before it does."""
        rows = TableRows(
            artifact.path,
            "head that ranks",
            offset_bytes=section.offset_bytes,
            type_id=section.type_id,
            n_rows=section.labels,
            n_columns=artifact.n_embd,
        )
        self._weights = np.empty((section.labels, artifact.n_embd), np.float32)
        rows.read(list(range(section.labels)), self._weights)

    def chances(self, row: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the chance of each label for a pooled row, f32 [labels]. Raises NumericError."""
        logits = self._weights @ row
        powers = np.exp(logits - logits.max())
        chances: npt.NDArray[np.float32] = (powers / powers.sum()).astype(np.float32)
        if not np.isfinite(chances).all():
            raise NumericError("the scores of this prompt are not finite")
        return chances
