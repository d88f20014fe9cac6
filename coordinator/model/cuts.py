"""The legal cuts of a model, and its default cuts. Pure: facts in, layer numbers out.

A cut is the first layer of a later stage; `(8, 16)` makes three stages that start at layers 0, 8 and 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from relayline.coordinator.model.family import ATTENDS, BOTH, RECURRENT
from relayline.wire.common.errors import CutError
from relayline.wire.common.texts import named_layers

STAGES_MAX = 256
# A plan may be this much slower than the best one if that needs less memory on the fullest machine.
STEP_SLACK = 1.05


class CutFacts(Protocol):
    """The part of ModelFacts that cutting needs. Sizes in bytes."""

    @property
    def n_layers(self) -> int: ...  # noqa: D102
    @property
    def layer_bytes(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def embedding_bytes(self) -> int: ...  # noqa: D102
    @property
    def head_bytes(self) -> int: ...  # noqa: D102
    @property
    def cut_period(self) -> int: ...  # noqa: D102
    @property
    def forbidden_lengths(self) -> frozenset[int]: ...  # noqa: D102
    @property
    def windows(self) -> tuple[bool, ...]: ...  # noqa: D102
    @property
    def needed(self) -> tuple[bool, ...]: ...  # noqa: D102
    @property
    def kinds(self) -> str: ...  # noqa: D102
    @property
    def fills_kinds(self) -> bool: ...  # noqa: D102
    @property
    def indexers(self) -> tuple[bool, ...]: ...  # noqa: D102
    @property
    def blocked(self) -> Mapping[int, str]: ...  # noqa: D102


def ranges(n_layers: int, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return each stage's (first layer, last layer + 1)."""
    edges = (0, *cuts, n_layers)
    return tuple(itertools.pairwise(edges))


def is_allowed(facts: CutFacts, start: int, end: int) -> bool:
    """Tell whether the layers from start to end may be one stage. A whole model always may."""
    if start % facts.cut_period or start in facts.blocked or end in facts.blocked:
        return False
    if _lacks_choice(facts, start) or _lacks_window(facts, start, end) or _lacks_kind(facts, start, end):
        return False
    if _lacks_needed(facts, start, end):
        return False
    return end - start == facts.n_layers or end - start not in facts.forbidden_lengths


def _lacks_window(facts: CutFacts, start: int, end: int) -> bool:
    """Tell whether llama_model::create_memory would abort the process: it asserts that some layer has a window."""
    return bool(facts.windows) and not any(facts.windows[start:end])


def _lacks_needed(facts: CutFacts, start: int, end: int) -> bool:
    """Tell whether llama.cpp would end the process for want of a layer of a certain kind."""
    return bool(facts.needed) and not any(facts.needed[start:end])


def _lacks_kind(facts: CutFacts, start: int, end: int) -> bool:
    """Tell whether llama.cpp would abort: llm_graph_input_mem_hybrid sets inputs of both kinds, which no layer reads.

    Of a model whose layers are all alike every slice is as the whole. In some models slices behind the first have
    placeholders, of the kind that they lack.
    """
    if facts.fills_kinds and start > 0:
        return False
    needed, there = facts.kinds, facts.kinds[start:end]
    if BOTH in needed or not (ATTENDS in needed and RECURRENT in needed):
        return False
    return not (ATTENDS in there and RECURRENT in there)


def _lacks_choice(facts: CutFacts, start: int) -> bool:
    """Tell whether the first layer attends to tokens that an earlier one has chosen."""
    return bool(facts.indexers) and not facts.indexers[start]


def legal_cuts(facts: CutFacts) -> tuple[int, ...]:
    """Return every layer at which a later stage may begin."""
    return tuple(
        cut
        for cut in range(1, facts.n_layers)
        if cut % facts.cut_period == 0 and _reaches(facts, 0, cut) and _reaches(facts, cut, facts.n_layers)
    )


def _reaches(facts: CutFacts, start: int, end: int) -> bool:
    """Tell whether some sequence of allowed stages covers the layers from start to end."""
    reached = {start}
    for edge in range(start + 1, end + 1):
        if any(is_allowed(facts, begin, edge) for begin in reached):
            reached.add(edge)
    return end in reached


def check_cuts(facts: CutFacts, cuts: Sequence[int]) -> None:
    """Raise CutError, naming the legal cuts, unless the cuts ascend and every stage they make is allowed."""
    legal = legal_cuts(facts)
    listed = _listed(legal)
    for cut in cuts:
        if not 0 < cut < facts.n_layers:
            raise CutError(f"cut {cut} is outside the model's {facts.n_layers} layers; legal cuts: {listed}")
        if cut not in legal:
            raise CutError(f"cut {cut} is not legal: {_reason(facts, (0, cut, facts.n_layers))}; legal cuts: {listed}")
    if list(cuts) != sorted(set(cuts)):
        raise CutError(f"cuts {','.join(map(str, cuts))} must ascend without repeats; legal cuts: {listed}")
    for start, end in ranges(facts.n_layers, cuts):
        if not is_allowed(facts, start, end):
            reason = _reason(facts, (start, end))
            raise CutError(f"{named_layers(start, end)} cannot be one stage: {reason}; legal cuts: {listed}")


def _reason(facts: CutFacts, edges: Sequence[int]) -> str:
    """Tell why the layers between one edge and the next cannot be stages."""
    if any(_lacks_window(facts, start, end) for start, end in itertools.pairwise(edges)):
        return "llama.cpp runs layers without a sliding window only together with one that has a window"
    if any(_lacks_needed(facts, start, end) for start, end in itertools.pairwise(edges)):
        return "llama.cpp runs no layers of this model without one that compresses four tokens into a cell"
    if any(_lacks_kind(facts, start, end) for start, end in itertools.pairwise(edges)):
        if facts.fills_kinds:
            return "the first stage needs a layer with a recurrent state and one that attends"
        return "llama.cpp runs layers with a recurrent state only together with one that attends, and the reverse"
    if any(_lacks_choice(facts, start) for start in edges[:-1]):
        return "its first layer would attend to tokens that the previous layer has chosen"
    blocked = [edge for edge in edges if edge in facts.blocked]
    if blocked:
        return facts.blocked[blocked[0]]
    if facts.cut_period > 1 and any(edge % facts.cut_period for edge in edges[:-1]):
        return f"this architecture repeats every {facts.cut_period} layers"
    if facts.forbidden_lengths == {1}:
        return "llama.cpp runs no file of a single layer of this architecture"
    lengths = " or ".join(map(str, sorted(facts.forbidden_lengths)))
    return f"llama.cpp takes a file of {lengths} layers of this architecture for another model"


def _listed(legal: Sequence[int]) -> str:
    """Return 1,2,3,4 as 1-4 and 4,8,12 as 4,8,12."""
    if len(legal) > 2 and legal[-1] - legal[0] == len(legal) - 1:
        return f"{legal[0]}-{legal[-1]}"
    return ",".join(map(str, legal)) or "none"


def balanced_cuts(facts: CutFacts, n_stages: int) -> tuple[int, ...]:
    """Return the cuts for a number of stages when the user names none.

    The slowest stage sets the pipeline's pace, and a step reads each block once and, on the last stage, the head; the
    embedding table costs stage 0 memory but hardly time. So: first the least bytes read by any stage; among the plans
    within STEP_SLACK of that, the least memory on any stage, embedding table included; among those, the most even.

    Raises CutError if the model cannot be cut into n_stages.
    """
    if not 1 <= n_stages <= STAGES_MAX:
        raise CutError(f"the number of stages must lie between 1 and {STAGES_MAX}, not {n_stages}")
    sums = [0]
    for size in facts.layer_bytes:
        sums.append(sums[-1] + size)

    def step_bytes(start: int, end: int) -> float:
        return float(sums[end] - sums[start] + (facts.head_bytes if end == facts.n_layers else 0))

    def held_bytes(start: int, end: int) -> float:
        return step_bytes(start, end) + (facts.embedding_bytes if start == 0 else 0)

    def allowed(start: int, end: int) -> bool:
        return is_allowed(facts, start, end)

    fastest = _best(facts.n_layers, n_stages, allowed, step_bytes, max)
    if fastest is None:
        text = f"this model's {facts.n_layers} layers cannot make {n_stages} stages"
        raise CutError(f"{text}; the maximum is {most_stages(facts)}")
    step_cap = max(step_bytes(*pair) for pair in ranges(facts.n_layers, fastest)) * STEP_SLACK

    def fast_enough(start: int, end: int) -> bool:
        return allowed(start, end) and step_bytes(start, end) <= step_cap

    smallest = _best(facts.n_layers, n_stages, fast_enough, held_bytes, max)
    assert smallest is not None, "the fastest plan is among the fast ones"
    held_cap = max(held_bytes(*pair) for pair in ranges(facts.n_layers, smallest))

    def good(start: int, end: int) -> bool:
        return fast_enough(start, end) and held_bytes(start, end) <= held_cap

    evenest = _best(facts.n_layers, n_stages, good, lambda start, end: step_bytes(start, end) ** 2, float.__add__)
    assert evenest is not None, "the smallest plan is among the good ones"
    return evenest


def most_stages(facts: CutFacts) -> int:
    """Return how many stages the model can be cut into."""
    most = {0: 0}
    for end in range(1, facts.n_layers + 1):
        found = [most[start] + 1 for start in most if is_allowed(facts, start, end)]
        if found:
            most[end] = max(found)
    return most.get(facts.n_layers, 0)


def _best(
    n_layers: int,
    n_stages: int,
    allowed: Callable[[int, int], bool],
    cost: Callable[[int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[int, ...] | None:
    """Return the cuts with the least combined cost over all stages, by dynamic programming; None if none fit."""
    if n_stages > n_layers:
        return None
    reached: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(n_stages):
        left = n_stages - stage - 1
        ends = (n_layers,) if left == 0 else tuple(range(stage + 1, n_layers - left + 1))
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            options = (
                (combine(so_far, cost(start, end)), (*cuts, end))
                for start, (so_far, cuts) in reached.items()
                if start < end and allowed(start, end)
            )
            best = min(options, default=None)
            if best is not None:
                longer[end] = best
        reached = longer
    return reached[n_layers][1][:-1] if n_layers in reached else None
