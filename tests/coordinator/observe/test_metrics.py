"""/metrics has the figures of /v1/pipeline, in a form that a Prometheus parser reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from relayline.coordinator.observe.metrics import render
from relayline.coordinator.observe.request_metrics import GAP_BUCKETS, TokenGaps
from relayline.wire.telemetry import names

DESCRIBED = {
    "model": "m", "running": 3, "waiting": 2, "lanes": 8, "epoch": 1, "shared_requests": 5,
    "ctx_tokens": 100, "kv_tokens": 200,
    "link": {"envelopes_sent": 6, "payload_bytes_sent": 64, "in_flight_bytes": 8, "window_bytes": 1024},
    "grants": {"steps": 8, "given": 4, "extended": 3, "repeated": 2, "rows": 20, "vain_rows": 5},
    "plan": {"n_groups": 2, "group_rows": 4}, "overlap": {"1": 0.25, "2": 0.75, "2+": 0.75},
    "stages": [
        {"index": 0, "up": True, "steps": 10, "rows": 40, "frames": 40, "padded_rows": 3, "micro_batches": 11,
         "busy_ns": 2_000_000_000,
         "payload_bytes_in": 1, "payload_bytes_out": 2, "lanes_used": 3, "queued_rows": 4, "wait_p50_ns": 1_000_000,
         "wait_p95_ns": 2_000_000, "close_reasons": {"row_cap": 6, "queue_drained": 4}, "faults": {"no_lane": 1}},
        {"index": 1, "up": False},
    ],
}  # fmt: skip


def test_every_figure_is_there_under_its_name() -> None:
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(DESCRIBED)[0].decode())
        for sample in family.samples
    }
    assert found["relayline_num_requests_running", "m"] == 3
    assert found["relayline_num_requests_waiting", "m"] == 2
    assert found["relayline_shared_requests_total", "m"] == 5
    assert found["relayline_overlap_ratio", "2+"] == 0.75
    assert [found["relayline_grants_total", event, "m"] for event in ("given", "extended", "ended")] == [4, 3, 2]
    assert [found["relayline_grant_rows_total", "m", outcome] for outcome in ("used", "vain")] == [20, 5]
    assert found["relayline_kv_cache_usage_perc", "m"] == 0.25
    assert found["relayline_link_envelopes_total", "coordinator", "out"] == 6
    assert found["relayline_link_in_flight_bytes", "coordinator"] == 8
    assert found["relayline_stage_batches_closed_total", "0", "row_cap"] == 6
    assert found["relayline_stage_session_faults_total", "0", "no_lane"] == 1
    assert found["relayline_stage_rows_total", "0"] == 40
    assert found["relayline_stage_padded_rows_total", "0"] == 3
    assert found["relayline_stage_micro_batches_total", "0"] == 11
    assert found["relayline_stage_busy_seconds_total", "0"] == 2.0
    assert found["relayline_stage_wait_p95_seconds", "0"] == 0.002
    assert (found["relayline_stage_up", "0"], found["relayline_stage_up", "1"]) == (1, 0)
    assert ("relayline_certificate_expires_timestamp_seconds", "m") not in found, "links are plaintext"
    assert ("relayline_stage_steps_total", "1") not in found  # a silent stage has no figures, not zeros


def test_batches_are_counted_where_some_are_kept() -> None:
    batches = {"running": 1, "waiting": 2, "requests_waiting": 30, "requests_done": 12, "requests_failed": 3}
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(DESCRIBED | {"batches": batches})[0].decode())
        for sample in family.samples
    }
    assert [found["relayline_offline_batches", "m", state] for state in ("running", "waiting")] == [1, 2]
    states = ("waiting", "done", "failed")
    assert [found["relayline_offline_requests", *sorted(("m", state))] for state in states] == [30, 12, 3]
    assert "relayline_offline" not in render(DESCRIBED)[0].decode()


def test_what_the_relay_carries_is_there_for_relayed_stages_alone() -> None:
    relay = {"port": 5, "connected": 1, "connections": 7, "taken": 9, "refused": 2, "to_stage_bytes": 30,
             "from_stage_bytes": 40}  # fmt: skip
    first, second = DESCRIBED["stages"]  # type: ignore[misc]
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(
            render(DESCRIBED | {"stages": [first, {**second, "relay": relay}]})[0].decode()
        )
        for sample in family.samples
        if sample.name.startswith("relayline_relay_")
    }
    assert found == {
        ("relayline_relay_connections", "1"): 7,
        ("relayline_relay_refused_connections_total", "1"): 2,
        ("relayline_relay_bytes_total", "1", "in"): 30,
        ("relayline_relay_bytes_total", "1", "out"): 40,
    }


def test_a_sleep_is_a_metric_as_long_as_the_stages_hold_nothing() -> None:
    sleep = {"state": "waking", "sleeps": 3, "wakes": 2, "failed": 1, "woke_in_s": 4.5}
    text = render(DESCRIBED | {"sleep": sleep})[0].decode()
    for line in (
        'relayline_asleep{model_name="m"} 1.0',
        'relayline_sleeps_total{model_name="m"} 3.0',
        'relayline_wakes_total{model_name="m",outcome="woken"} 2.0',
        'relayline_wakes_total{model_name="m",outcome="failed"} 1.0',
        'relayline_last_wake_duration_seconds{model_name="m"} 4.5',
    ):
        assert line in text
    assert 'relayline_asleep{model_name="m"} 0.0' in render(DESCRIBED)[0].decode()


def test_a_certificates_expiry_is_a_metric() -> None:
    text = render(DESCRIBED | {"certificate_expires_unix_s": 1_800_000_000.0})[0].decode()
    assert 'relayline_certificate_expires_timestamp_seconds{model_name="m"} 1.8e+09' in text


def test_open_metrics_is_sent_on_request_with_exemplars() -> None:
    requests = CollectorRegistry()
    Counter("requests_seen", "Requests", registry=requests).inc(3)
    text, content_type = render(DESCRIBED, requests, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"# EOF\n")
    assert text.count(b"# EOF") == 1
    found = {family.name: family for family in open_metrics_families(text.decode())}
    assert found["requests_seen"].samples[0].value == 3
    assert "relayline_lanes" in found
    plain, content_type = render(DESCRIBED, requests, "*/*")
    assert content_type.startswith("text/plain")
    assert b"requests_seen_total 3.0" in plain


def test_tokens_and_their_gaps_are_counted_as_prometheus_counts_them() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    gaps = TokenGaps("m", GAP_BUCKETS)
    ours.register(gaps)
    histogram = Histogram(names.METRIC_ITL, "x", [names.LABEL_MODEL], registry=theirs, buckets=GAP_BUCKETS).labels("m")
    gaps.token(None)
    for gap_ns in (0, 1, 5_000_000, 5_000_001, 39_999_999, 80_000_000_000, 80_000_000_001, 10**12):
        gaps.token(gap_ns)
        histogram.observe(gap_ns * 1e-9)
    found, wanted = (
        {
            (sample.name, sample.labels.get("le")): round(sample.value, 6)
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        for registry in (ours, theirs)
    )
    assert found.pop((f"{names.METRIC_GENERATION_TOKENS}_total", None)) == 9
    assert found == wanted
