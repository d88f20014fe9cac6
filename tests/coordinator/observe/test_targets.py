"""The addresses of metrics, in the form of Prometheus' HTTP service discovery."""

from __future__ import annotations

from relayline.coordinator.observe.targets import targets


def test_coordinator_and_every_stage_that_serves_metrics_are_listed() -> None:
    stages = [
        {
            "index": 0,
            "name": "desk",
            "address": "10.0.0.1:50051",
            "metrics": "127.0.0.1:9464",
            "metrics_scheme": "http",
        },
        {"index": 1, "name": "old", "address": "10.0.0.2:50051", "metrics": "0.0.0.0:9465", "metrics_scheme": "https"},
        {"index": 2, "address": "[fd00::3]:50051", "metrics": "[::]:9466", "metrics_scheme": "https"},
        {"index": 3, "name": "none", "address": "10.0.0.4:50051", "metrics": ""},
        {"index": 4, "name": "gone", "address": "10.0.0.5:50051"},
    ]
    found = targets({"model": "chat", "stages": stages}, "box:8080", "https")
    assert [each["targets"] for each in found] == [
        ["box:8080"], ["127.0.0.1:9464"], ["10.0.0.2:9465"], ["[fd00::3]:9466"],
    ]  # fmt: skip
    labels = [each["labels"] for each in found]
    assert labels[0] == {"__scheme__": "https", "role": "coordinator", "model": "chat"}
    assert labels[2] == {"__scheme__": "https", "role": "stage", "model": "chat", "stage_name": "old"}
    assert [each.get("stage_name") for each in labels if isinstance(each, dict)] == [None, "desk", "old", "2"]
