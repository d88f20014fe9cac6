"""Chooses the checkpoints of a recurrent state that stay; coordinator and stages apply the same rule. Pure.

The coordinator marks rows behind which every stage is to keep its lane's state (Flag.CHECKPOINT), and asks later for
these positions alone. Both ends forget by the same rule, so the coordinator knows the remaining ones without asking.
"""

from __future__ import annotations

from collections.abc import Iterable

# llm_arch_supports_rs_rollback: of these llama.cpp can keep the states behind a lane's last rows too.
REWINDING_ARCHITECTURES = frozenset(
    {
        "qwen35",
        "qwen35moe",
        "nemotron_h",
        "nemotron_h_moe",
        "lfm2",
        "lfm2moe",
        "bailingmoe3",
        "deepseek4",
        "glm5-next",
        "kimi-k3",
    }
)
CHECKPOINTS_PER_LANE_MAX = 4  # the end of the first message, of the last one, of the prompt, and one that others share
CHECKPOINT_BYTES_MAX = 2 * 1024**3  # of all lanes of a stage; tokens beyond it are read again


def kept_positions(positions: Iterable[int]) -> set[int]:
    """Return which checkpoints of a lane stay: the first one, and the last ones.

    The first one is where a system prompt ends, which all chats begin with; the last ones are those of the latest turn.
    """
    ascending = sorted(set(positions))
    n_surplus = max(0, len(ascending) - CHECKPOINTS_PER_LANE_MAX)
    return {*ascending[:1], *ascending[1 + n_surplus :]}
