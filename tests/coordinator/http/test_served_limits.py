"""Settings of serving reach the HTTP side of a coordinator."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from relayline.coordinator.http.edge.limits import HttpLimits, limits_of
from relayline.wire.model_files.recommended import Recommended
from relayline.wire.settings.table import ServingSettings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"queue": 7}, {"connections_max": HttpLimits().connections_max + 7}),
        ({"connections_per_address": 3}, {"connections_per_address_max": 3}),
        ({"pooling": "cls"}, {"pooling": "cls"}),
        ({"strict_max_tokens": True}, {"strict_max_tokens": True}),
        ({"served_model_name": "one, two"}, {"model_aliases": ("one", "two")}),
        ({"any_model_name": True}, {"any_model_name": True}),
    ],
    ids=lambda each: next(iter(each)),
)
def test_each_setting_changes_its_limit_and_no_other(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    def limits(**more: Any) -> HttpLimits:
        return limits_of(dataclasses.replace(ServingSettings(), **more))

    usual = limits()
    assert limits(**settings) == dataclasses.replace(usual, **expected) != usual


def test_the_models_sampling_options_are_those_of_requests_unless_the_setting_says_otherwise() -> None:
    recommended = Recommended((("temperature", 0.6),))
    assert limits_of(ServingSettings(), recommended).recommended == (("temperature", 0.6),)
    assert limits_of(ServingSettings(sampling_defaults="openai"), recommended) == limits_of(
        ServingSettings(sampling_defaults="openai")
    )


def test_last_words_of_the_server_may_have_lines() -> None:
    serving = ServingSettings(reasoning_budget_message=r"\nEnough.\n", reasoning_budget=5)
    assert (limits_of(serving).reasoning_budget, limits_of(serving).reasoning_budget_message) == (5, "\nEnough.\n")
