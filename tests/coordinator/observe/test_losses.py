"""Which stage a loss is about, found by addresses, names, neighbours, or the connection that reported it."""

from __future__ import annotations

import gc
import re

import pytest

from relayline.coordinator.observe.losses import lost_stage
from relayline.wire.common.errors import StageLostError
from relayline.wire.links.silence import silent_text

ADDRESSES = ("10.0.0.1:50", "10.0.0.1:501", "box-b.lab:50")
NAMES = ("first", "first-b", "stage-3")


@pytest.mark.parametrize(
    ("reason", "brought_by", "expected"),
    [
        ("stage at 10.0.0.1:501 closed its return stream", 1, 1),
        ("stage at 10.0.0.1:50 closed its return stream", 0, 0),
        ("stage 0: link to 10.0.0.1:501 is gone", 0, 1),
        ("stage first-b left: the connection to the stage was lost", None, 1),
        ("stage first left: it said goodbye", None, 0),
        ("stage-3 left: it said goodbye", None, 2),
        ("stage-30 left: it said goodbye", None, None),
        ("stage stage-3 left: it said goodbye", None, 2),
        ("stage 2: stage-3 accepts no work", 0, 0),
        ("stage 2: the upstream link of stage 2 closed", 2, 1),
        ("stage 0: the upstream link of stage 0 closed", 0, None),
        (f"stage 2: {silent_text('10.0.0.1, which sends to stage 2,')}", 2, 1),
        (f"stage 0: {silent_text('10.0.0.9, which sends to stage 0,')}", 0, None),
        ("epoch 1 of this route is over", 2, 2),
        ("deciding what leaves failed", None, None),
        ("not-box-b.lab:50 is another host", None, None),
    ],
)
def test_the_stage_that_was_lost(reason: str, brought_by: int | None, expected: int | None) -> None:
    error = StageLostError(reason)
    error.stage_index = brought_by
    assert lost_stage(error, ADDRESSES, NAMES) == expected


def test_new_ports_leave_no_patterns_behind() -> None:
    before = sum(type(each) is re.Pattern for each in gc.get_objects())
    for port in range(50_000, 50_100):
        addresses = [f"h:{port}", f"h:{port}1"]
        assert lost_stage(StageLostError(f"the link to h:{port}1 closed"), addresses) == 1
        assert lost_stage(StageLostError(f"h:{port}1 says: the link to h:{port} closed"), addresses) == 0
    assert sum(type(each) is re.Pattern for each in gc.get_objects()) <= before
