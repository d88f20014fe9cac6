"""Jaeger, Prometheus and Grafana in a Compose deployment, under the profile `observability`.

`deploy/observability` holds the same three for pipelines of plain processes: there they share the host's network, here
the deployment's own. A test keeps their images in step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from typing import Any

import yaml

from relayline.deploy.manifest.dump import dump_yaml

PROFILE = "observability"
JAEGER_IMAGE = "cr.jaegertracing.io/jaegertracing/jaeger:2.20.0"
PROMETHEUS_IMAGE = "prom/prometheus:v3.12.0"
GRAFANA_IMAGE = "grafana/grafana:12.4.2"
SERVICES = ("jaeger", "prometheus", "grafana")
OTLP_PORT = 4_317
OTLP_ENDPOINT = f"http://jaeger:{OTLP_PORT}"
DASHBOARDS_DIR = "dashboards"
ALERTS = ("observability", "prometheus", "alerts.yaml")  # below relayline.deploy
JAEGER_DIR = "/etc/jaeger"  # where the image has its configuration
JAEGER_FILES = {"jaeger": "config.yaml", "jaeger-ui": "ui.json"}  # below relayline.deploy, observability, jaeger


TLS_DIR = "/etc/prometheus/tls"


@dataclasses.dataclass(frozen=True, slots=True)
class Scraped:
    """A pipeline whose metrics Prometheus reads."""

    name: str
    """Behind a gateway; empty for one by itself."""
    coordinator: str
    """host:port."""
    stages: Sequence[str]
    """host:port of each."""
    monitor_source: str | None
    """Directory of the credential with which stages' metrics are read; None without TLS."""

    @property
    def tls_dir(self) -> str:
        """Where Prometheus has that credential."""
        return f"{TLS_DIR}/{self.name}" if self.name else TLS_DIR


def services(pipelines: Sequence[Scraped]) -> dict[str, Any]:
    """Return the three services; each is reached from this machine only."""
    credentials = [
        {"type": "bind", "source": one.monitor_source, "target": one.tls_dir, "read_only": True,
         "bind": {"create_host_path": False}}
        for one in pipelines
        if one.monitor_source
    ]  # fmt: skip
    return {
        "jaeger": {
            "image": JAEGER_IMAGE,
            "profiles": [PROFILE],
            "command": [f"--config={JAEGER_DIR}/{JAEGER_FILES['jaeger']}"],
            "environment": {"JAEGER_LISTEN_HOST": "0.0.0.0"},  # of the container
            "ports": ["127.0.0.1:16686:16686"],
            "configs": [{"source": name, "target": f"{JAEGER_DIR}/{file}"} for name, file in JAEGER_FILES.items()],
            "restart": "unless-stopped",
            "deploy": {"resources": {"limits": {"memory": "4g"}}},  # traces are held in memory
        },
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            "profiles": [PROFILE],
            "command": [
                "--config.file=/etc/prometheus/prometheus.yml",
                "--storage.tsdb.path=/prometheus",
                "--enable-feature=exemplar-storage",  # links from waits to seconds of passes
            ],
            "ports": ["127.0.0.1:9090:9090"],
            "configs": [
                {"source": "prometheus", "target": "/etc/prometheus/prometheus.yml"},
                {"source": "prometheus-alerts", "target": "/etc/prometheus/alerts.yml"},
            ],
            "volumes": ["prometheus-data:/prometheus", *credentials],
            "restart": "unless-stopped",
        },
        "grafana": {
            "image": GRAFANA_IMAGE,
            "profiles": [PROFILE],
            "depends_on": ["prometheus", "jaeger"],
            "ports": ["127.0.0.1:3000:3000"],
            "environment": {
                "GF_AUTH_ANONYMOUS_ENABLED": "true",  # only this machine reaches it
                "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
            },
            "configs": [
                {
                    "source": "grafana-datasources",
                    "target": "/etc/grafana/provisioning/datasources/relayline.yaml",
                },
                {"source": "grafana-dashboards", "target": "/etc/grafana/provisioning/dashboards/relayline.yaml"},
            ],
            "volumes": [f"./{DASHBOARDS_DIR}:/etc/relayline/dashboards:ro", "grafana-data:/var/lib/grafana"],
            "restart": "unless-stopped",
        },
    }


def configs(pipelines: Sequence[Scraped], gateway: str = "") -> dict[str, Any]:
    """Return the three services' configuration files. `gateway`: host:port of the one before these pipelines."""
    coordinators = [{"targets": [one.coordinator], "labels": _labels(one, "coordinator")} for one in pipelines]
    if gateway:
        coordinators.insert(0, {"targets": [gateway], "labels": {"role": "gateway"}})
    scrape = {
        "global": {"scrape_interval": "5s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": "relayline", "static_configs": coordinators},
            *map(_stages_job, pipelines),
        ],
    }
    sources = {
        "apiVersion": 1,
        "datasources": [
            {
                "name": "Prometheus",
                "uid": "relayline-prometheus",
                "type": "prometheus",
                "access": "proxy",
                "url": "http://prometheus:9090",
                "isDefault": True,
                "jsonData": {
                    "exemplarTraceIdDestinations": [{"name": "trace_id", "datasourceUid": "relayline-jaeger"}]
                },
            },
            {
                "name": "Jaeger",
                "uid": "relayline-jaeger",
                "type": "jaeger",
                "access": "proxy",
                "url": "http://jaeger:16686",
            },
        ],
    }
    boards = {
        "apiVersion": 1,
        "providers": [{"name": "relayline", "type": "file", "options": {"path": "/etc/relayline/dashboards"}}],
    }
    return {
        **{name: {"content": _text("observability", "jaeger", file)} for name, file in JAEGER_FILES.items()},
        "prometheus": {"content": dump_yaml(scrape)},
        "prometheus-alerts": {"content": dump_yaml(alert_rules())},
        "grafana-datasources": {"content": dump_yaml(sources)},
        "grafana-dashboards": {"content": dump_yaml(boards)},
    }


def _labels(pipeline: Scraped, role: str) -> dict[str, str]:
    return {"role": role, "pipeline": pipeline.name} if pipeline.name else {"role": role}


def _stages_job(pipeline: Scraped) -> dict[str, Any]:
    files = {"ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem"}
    tls = {"scheme": "https", "tls_config": {key: f"{pipeline.tls_dir}/{file}" for key, file in files.items()}}
    return {
        "job_name": f"relayline-stages-{pipeline.name}" if pipeline.name else "relayline-stages",
        **(tls if pipeline.monitor_source else {}),
        "static_configs": [{"targets": list(pipeline.stages), "labels": _labels(pipeline, "stage")}],
    }


def alert_rules() -> dict[str, Any]:
    """Return the groups of deploy/observability/prometheus/alerts.yaml."""
    rules: dict[str, Any] = yaml.safe_load(_text(*ALERTS))
    return rules


def _text(*parts: str) -> str:
    """Return a file below relayline.deploy."""
    return resources.files("relayline.deploy").joinpath(*parts).read_text("utf-8")


def volumes() -> dict[str, Any]:
    """Return the services' named volumes."""
    return {"prometheus-data": {}, "grafana-data": {}}
