"""The facts of a model that planning needs, from its file's header."""

from __future__ import annotations

import functools

from relayline.coordinator.model.cuts import is_allowed
from relayline.coordinator.model.family import ATTENDS, RECURRENT
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.inspection import BLOCK_NAME, ModelFacts
from relayline.coordinator.planner.instance import Before, ModelShape
from relayline.wire.settings.table import EngineSettings, wants_rows_ahead


def shape_of(facts: ModelFacts) -> ModelShape:
    """Return the sizes that planning needs; reads the model's header again for the width of its layers."""
    widths = [
        tensor.dims[1]
        for tensor in open_model(facts.path).tensors.values()
        if BLOCK_NAME.match(tensor.name) and len(tensor.dims) > 1
    ]
    return ModelShape(
        layer_bytes=facts.layer_bytes,
        head_bytes=facts.head_bytes,
        embedding_bytes=facts.embedding_bytes,
        kv_bytes=facts.kv_bytes_per_token,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_ff=max(widths, default=facts.n_embd),
        n_heads=max(facts.n_heads, default=0),
        windows=facts.windows,
        window_tokens=facts.window_tokens,
        n_masks=max(1, len(set(facts.windows))),
        has_indexers=bool(facts.indexers),
        state_bytes=facts.state_bytes_per_lane if any(facts.state_bytes_per_lane) else (),
        rewinds_states=facts.rewinds_states,
        row_widths=facts.row_widths,
        prediction_bytes=facts.prediction.size_bytes if facts.prediction else 0,
        prediction_kv_bytes=facts.prediction.n_layers * max(facts.kv_bytes_per_token) if facts.prediction else 0,
        bits_per_weight=8 * bytes_of_weight(facts),
        ctx_train=facts.ctx_train,
        before=functools.cache(functools.partial(_before, facts)),  # plans ask for the same stages again and again
        is_allowed=lambda start, end: is_allowed(facts, start, end),
    )


def _before(facts: ModelFacts, start: int, end: int) -> Before:
    made = facts.placeholders
    if made is None:
        return Before()
    kinds = made.before(start, end)
    cells, states = max(facts.kv_bytes_per_token), max(facts.state_bytes_per_lane)
    return Before(made.size_bytes(start, end), cells * kinds.count(ATTENDS), states * kinds.count(RECURRENT))


def bytes_of_weight(facts: ModelFacts) -> float:
    """Return the bytes of an average weight of the layers."""
    size_bytes = n_weights = 0
    for tensor in open_model(facts.path).tensors.values():
        if BLOCK_NAME.match(tensor.name):
            count = 1
            for dim in tensor.dims:
                count *= dim
            size_bytes, n_weights = size_bytes + tensor.size_bytes, n_weights + count
    return size_bytes / n_weights if n_weights else 1.0


def runs_ahead(engine: EngineSettings, facts: ModelFacts) -> bool:
    """Return whether a stage with all layers computes rows ahead: a recurrent state cannot be taken back."""
    return wants_rows_ahead(engine) and not any(facts.state_bytes_per_lane)
