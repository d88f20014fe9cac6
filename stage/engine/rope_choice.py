"""Makes llama.cpp take the set of rope factors that lanes of a certain length need (see wire.common.rope_factors)."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.wire.common.rope_factors import LongRope

_NO_LIMIT_TOKENS = (1 << 31) - 1


def choose_rope(params: Any, rope: LongRope | None, ctx_tokens: int) -> Any:
    """Set in llama_model_params the rope factors for lanes of `ctx_tokens`; without `rope` do nothing.

    For the short set, the file's original context is replaced by one that no cache exceeds. The long set needs nothing,
    since no cache has fewer cells than a lane has tokens. The original context has no other use there: yarn and
    mistral3 read it too, but their models have one set. Keep the returned value until the model is loaded, because
    llama.cpp reads from it.
    """
    if rope is None or rope.takes_long(ctx_tokens):
        return None
    overrides = (llama.llama_model_kv_override * 2)()  # the second, empty, ends the list
    overrides[0].tag = llama.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = rope.key.encode()
    overrides[0].value.val_i64 = _NO_LIMIT_TOKENS
    params.kv_overrides = overrides
    return overrides
