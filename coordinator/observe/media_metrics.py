"""Metrics of images and audio: the time that one file takes, and how often its rows were there already."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from relayline.coordinator.sessions.media_record import MediaRecord
from relayline.wire.telemetry import names

_S = 1e-9  # seconds in a nanosecond
# From a look at a small file to minutes of sound on a slow host.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class MediaMetrics:
    """Counters and histograms of one served model."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        labels = [names.LABEL_MODEL]
        self._seconds = Histogram(
            names.METRIC_MEDIA_SECONDS,
            "Work on one image or audio file: fetch, count rows, encode",
            [*labels, names.LABEL_STEP, names.LABEL_KIND],
            registry=registry,
            buckets=BUCKETS,
        )
        wait = "Waits of a request's files for the encoder, which works on one file at a time"
        self._wait = Histogram(names.METRIC_MEDIA_WAIT, wait, labels, registry=registry, buckets=BUCKETS)
        self._wait_of_model = self._wait.labels(model_name)
        asked, found = "Images and audio files of requests", "Those whose rows an earlier request had left"
        self._asked = Counter(names.METRIC_MEDIA_QUERIES, asked, labels, registry=registry).labels(model_name)
        self._found = Counter(names.METRIC_MEDIA_HITS, found, labels, registry=registry).labels(model_name)

    def ended(self, record: MediaRecord) -> None:
        """Count the files of a request. Those that nothing could be done with are among them."""
        self._wait_of_model.observe(record.wait_ns * _S)
        for file in record.files:
            self._asked.inc()
            self._found.inc(file.is_kept)
            for step, (start_ns, end_ns) in file.steps.items():
                self._seconds.labels(self._model_name, step, file.kind).observe((end_ns - start_ns) * _S)
