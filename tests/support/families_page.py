"""Writes docs/reference/families.md from the tables in the code and the tiny models in the tests."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path

from relayline.coordinator.model import family_rules as rules
from relayline.coordinator.model.eagle3 import FAMILIES as EAGLE3_FAMILIES
from relayline.coordinator.model.families import FAMILIES
from relayline.coordinator.model.family import Family
from relayline.coordinator.model.refused_families import REFUSED
from tests.support.tiny_families import RECIPES
from tests.support.tiny_shapes import Recipe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
_PLAIN = Family("")  # text of an empty cell

HEAD = """# Families of models

This page is written by `python -m tests.families --docs` from the tables in the code. A test holds it to them.

A family is what `general.architecture` of a GGUF file names. {n_certified} of the {n_all} names that the pinned
llama.cpp knows can be cut into stages. Each of them has tiny models in the tests; every legal cut of them computes what
the whole model computes, up to float noise, with f32 between the stages. `python -m tests.families --report` tries all
of that again and prints the outcome for every name. `relayline certify MODEL` does the same for a model of yours.

`relayline inspect MODEL` says at which layers a model may be cut. Without a rule below that is every layer. Images need
a projector: [which ones are served](http-api.md#images).

Layers for the prediction of further tokens (MTP) are left out of all stages, except in these families. There the last
stage has them, and [can draft by them](../explanation/drafts.md#prediction-layers): {predicting}.

An [EAGLE-3 model](../explanation/drafts.md#eagle-3-models) can draft for models of these families, if their rows have
no further parts: {drafted}.

## Certified

| architecture | models | layers | where it may be cut | left out | tiny models |
|---|---|---|---|---|---|
"""

EXCEPT = """
## Models of these families that are refused

| architecture | models that are refused |
|---|---|
"""

REFUSED_HEAD = """
## Refused by name

`inspect` gives the reason, and nothing is written.

| reason | architectures |
|---|---|
"""


def page() -> str:
    """Return the page's text."""
    rows = [_row(FAMILIES[name]) for name in sorted(FAMILIES)]
    some = [
        f"| `{name}` | {_doc_of(family.refusal)} |" for name, family in sorted(FAMILIES.items()) if _has(family.refusal)
    ]
    by_reason = collections.defaultdict(list)
    for name, reason in REFUSED.items():
        by_reason[reason].append(name)
    refused = [f"| {reason} | {_listed(sorted(names))} |" for reason, names in by_reason.items()]
    predicting = _listed(name for name in sorted(FAMILIES) if FAMILIES[name].predicts)
    head = HEAD.format(
        n_certified=len(FAMILIES),
        n_all=len(FAMILIES) + len(REFUSED),
        predicting=predicting,
        drafted=_listed(sorted(EAGLE3_FAMILIES)),
    )
    return head + "\n".join(rows) + "\n" + EXCEPT + "\n".join(some) + "\n" + REFUSED_HEAD + "\n".join(refused) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(family: Family) -> str:
    recipes = {name: recipe for name, recipe in RECIPES.items() if recipe.architecture == family.architecture}
    cells = (
        f"`{family.architecture}`",
        family.models,
        _layers(family, list(recipes.values())),
        _cuts(family),
        family.left_out,
        _listed(recipes),
    )
    return "| " + " | ".join(cells) + " |"


def _layers(family: Family, recipes: list[Recipe]) -> str:
    """Return the kinds of layers that the family's tiny models have."""
    has_experts = ["expert_count" in recipe.values for recipe in recipes]
    kinds = [
        "latent attention" if any("attention.kv_lora_rank" in recipe.values for recipe in recipes) else "attention"
    ]
    if family.kinds is not _PLAIN.kinds:
        kinds = {
            rules.recurrent_kinds: ["recurrent state"],
            rules.both_kinds: ["recurrent state and attention in each"],
        }.get(family.kinds, ["recurrent state in most", f"{kinds[0]} in the others"])
    if family.windows is not _PLAIN.windows:
        kinds.append("sliding windows in some layers")
    if any("attention.indexer.key_length" in recipe.values for recipe in recipes):
        kinds.append("indexers")
    if family.streams is not _PLAIN.streams:
        kinds.append("several streams of a row")
    if family.block_layers is not _PLAIN.block_layers:
        kinds.append("inputs of earlier blocks")
    if any(has_experts):
        kinds.append("experts" if all(has_experts) else "with or without experts")
    return ", ".join(kinds)


def _cuts(family: Family) -> str:
    texts = []
    if family.cut_period > 1:
        texts.append(f"every {family.cut_period} layers")
    if family.windows is not _PLAIN.windows:
        texts.append("each stage has a layer with a window")
    if family.kinds not in (_PLAIN.kinds, rules.recurrent_kinds, rules.both_kinds):
        which = "each" if family.block_layers is _PLAIN.block_layers else "the first"
        texts.append(f"{which} stage has a layer with a state and one that attends")
    if family.indexers is not _PLAIN.indexers:
        texts.append("a stage starts with a layer that has an indexer")
    texts += [_doc_of(rule) for rule in (family.needed, family.blocked, family.forbidden_lengths) if _has(rule)]
    return "; ".join(rule[:1].lower() + rule[1:] for rule in texts)


def _has(rule: object) -> bool:
    return rule not in (_PLAIN.refusal, _PLAIN.needed, _PLAIN.blocked, _PLAIN.forbidden_lengths)


def _doc_of(rule: object) -> str:
    """Return the first line of a rule's own documentation."""
    return (rule.__doc__ or "").strip().splitlines()[0].rstrip(".")
