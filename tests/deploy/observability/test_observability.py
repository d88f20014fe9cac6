"""deploy/observability/: all names in the files exist in a running pipeline, and real tools accept the files.

Every query of the board and every name in the two pages is compared with the metrics and spans of one small pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from relayline.coordinator.gateway.metrics import gateway_metrics
from relayline.coordinator.gateway.router import Router
from relayline.deploy.cli.main import relayline
from relayline.deploy.machine.ports import free_port
from relayline.deploy.manifest import load_manifest
from relayline.deploy.testing.otlp_receiver import StoredSpan, receiving
from relayline.deploy.testing.paths import DEPLOY, ROOT
from relayline.deploy.testing.trace_rebuild import ROUTE, is_complete, rebuild
from relayline.deploy.testing.traced_pipeline import PROMPTS, Traced, ask_all, settled, text_of, traced_pipeline
from relayline.wire.telemetry import names

HERE = DEPLOY / "observability"
BOARD = HERE / "grafana" / "dashboards" / "relayline.json"
PAGES = [ROOT / "docs" / "guide" / name for name in ("observability.md", "traces.md")]
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
NOT_OF_A_METRIC = {"le", "job", "instance", "role"}  # labels that Prometheus or the query brings
TRIES_MAX = 400  # looks at Prometheus, each after another request to the pipeline


# --- files on their own -----------------------------------------------------------------------------------------------


def yaml_of(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text())


def test_the_compose_file_is_valid_by_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, HERE / "compose.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_everything_that_the_compose_file_mounts_is_there() -> None:
    services = yaml_of("compose.yaml")["services"]
    assert set(services) == {"jaeger", "prometheus", "grafana"}
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((HERE / path).exists() for path in mounted if path.startswith("."))
    assert sum(path.startswith(".") for path in mounted) >= 4
    assert all(re.search(r":v?\d+\.\d+\.\d+$", service["image"]) for service in services.values())


def test_commands_name_files_that_are_mounted() -> None:
    services = yaml_of("compose.yaml")["services"]
    for name, path in (("jaeger", "/etc/jaeger/config.yaml"), ("prometheus", "/etc/prometheus/prometheus.yaml")):
        assert any(path in argument for argument in services[name]["command"])
        targets = [volume.split(":")[1] for volume in services[name]["volumes"]]
        assert any(path == target or path.startswith(target + "/") for target in targets)
    mounts = {volume.split(":")[1]: HERE / volume.split(":")[0] for volume in services["grafana"]["volumes"]}
    (provider,) = yaml_of("grafana/provisioning/dashboards/relayline.yaml")["providers"]
    assert (mounts[provider["options"]["path"]] / BOARD.name).exists()
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{BOARD.name}"


def test_jaegers_config_is_consistent_and_listens_where_relayline_sends() -> None:
    config = yaml_of("jaeger/config.yaml")
    service = config["service"]
    assert set(service["extensions"]) == set(config["extensions"])
    pipeline = service["pipelines"]["traces"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(config[part])
    store = config["exporters"]["jaeger_storage_exporter"]["trace_storage"]
    assert store == config["extensions"]["jaeger_query"]["storage"]["traces"]
    assert set(config["extensions"]["jaeger_storage"]["backends"]) == {store}
    protocols = config["receivers"]["otlp"]["protocols"]
    assert [protocols[name]["endpoint"].rsplit(":", 1)[1] for name in ("grpc", "http")] == ["4317", "4318"]
    assert config["extensions"]["jaeger_query"]["http"]["endpoint"].endswith(":16686")
    ui = HERE / "jaeger" / Path(config["extensions"]["jaeger_query"]["ui"]["config_file"]).name
    assert json.loads(ui.read_text())["linkPatterns"]


def test_links_of_the_ui_search_for_the_tag_they_stand_on() -> None:
    known = {value for key, value in vars(names).items() if key.startswith(("ATTR_", "HTTP_REQUEST_ID"))}
    for pattern in json.loads((HERE / "jaeger" / "ui.json").read_text())["linkPatterns"]:
        assert pattern["key"] in known
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(pattern["url"].replace("#{", "%23%7B")).query)
        by_stage = f"relayline-stage-#{{{names.ATTR_STAGE_INDEX}}}"  # of the span that has the tag
        assert query["service"][0] in ("relayline-coordinator", "relayline-stage-0", by_stage)
        assert json.loads(query["tags"][0]) == {pattern["key"]: f"#{{{pattern['key']}}}"}


def test_grafana_finds_its_data_where_the_others_listen() -> None:
    sources = {
        source["type"]: source for source in yaml_of("grafana/provisioning/datasources/relayline.yaml")["datasources"]
    }
    assert sources["jaeger"]["url"].endswith(":16686")
    assert (
        f"--web.listen-address={sources['prometheus']['url'].removeprefix('http://')}"
        in (yaml_of("compose.yaml")["services"]["prometheus"]["command"])
    )
    variable = next(v for v in board()["templating"]["list"] if v["name"] == "datasource")
    assert variable["current"]["value"] == sources["prometheus"]["uid"]


def test_the_pipeline_of_the_page_is_where_prometheus_looks_and_sends_where_jaeger_listens() -> None:
    spec = load_manifest(HERE / "pipeline.yaml").spec
    listed = {entry["labels"]["role"]: entry["targets"] for entry in yaml_of("prometheus/targets.yaml")}
    assert listed["coordinator"] == [f"{spec.coordinator.http.host}:{spec.coordinator.http.port}"]
    assert listed["stage"] == [f"127.0.0.1:{stage.metrics_port}" for stage in spec.stages]
    endpoint = urllib.parse.urlsplit(spec.telemetry.otlp_endpoint)
    protocols = yaml_of("jaeger/config.yaml")["receivers"]["otlp"]["protocols"]
    assert protocols["grpc"]["endpoint"].endswith(f":{endpoint.port}")
    assert spec.telemetry.level == "batches"


# --- the board --------------------------------------------------------------------------------------------------------


def board() -> Any:
    return json.loads(BOARD.read_text())


def queries() -> list[tuple[str, str]]:
    """Every query of the board as (panel, PromQL), the variable's own included."""
    found = [(panel["title"], target["expr"]) for panel in board()["panels"] for target in panel.get("targets", [])]
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert inner is not None
            found.append((f"variable {variable['name']}", f"count by ({inner[2]}) ({inner[1]})"))
    return found


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for one, other in itertools.combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_the_board_shows_the_questions_figures() -> None:
    asked = {
        names.METRIC_GENERATION_TOKENS, names.METRIC_TTFT, names.METRIC_ITL, names.METRIC_BATCH_ROWS,
        names.METRIC_FRAME_WAIT, "relayline_overlap_ratio", names.METRIC_CLOSE_REASONS, names.METRIC_PADDED_ROWS,
        names.METRIC_STEP_PREDICTED_SECONDS, names.METRIC_STEP_MEASURED_SECONDS, names.METRIC_RUNNING,
        names.METRIC_WAITING, names.METRIC_KV_USAGE, names.METRIC_LINK_IN_FLIGHT, names.METRIC_RECOVERIES,
    }  # fmt: skip
    text = " ".join(query for _, query in queries())
    assert [name for name in asked if name not in text] == []
    heat = [panel for panel in board()["panels"] if panel["type"] == "heatmap"]
    assert [(panel["repeat"], names.METRIC_BATCH_ROWS in panel["targets"][0]["expr"]) for panel in heat] == [
        ("stage", True)
    ]


# --- a running pipeline -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Shown:
    """The metrics of one pipeline after a little work."""

    traced: Traced
    families: dict[str, Metric]  # by name, of all processes together
    labels: dict[str, set[str]]  # sample name -> label names; empty while there is no sample
    spans: list[StoredSpan]

    @property
    def samples(self) -> set[str]:
        """Names that a query may use."""
        return {
            family.name + suffix for family in self.families.values() for suffix in SUFFIXES.get(family.type, ("",))
        }


def read(texts: Iterable[str]) -> tuple[dict[str, Metric], dict[str, set[str]]]:
    families: dict[str, Metric] = {}
    labels: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families[family.name] = family
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    return families, labels


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.grpc_endpoint}
        with traced_pipeline(tmp_path_factory.mktemp("split"), environment, level="frames") as traced:
            asyncio.run(ask_all(traced, PROMPTS[:4], 12, request_ids=True))
            n_steps = sum(status.n_steps for status in asyncio.run(settled(traced.stages)))
            spans = receiver.wait_for(functools.partial(is_complete, n_steps=n_steps, n_requests=4))

            async def texts() -> list[str]:
                return [await text_of(url) for url in (f"{traced.url}/metrics", *traced.stage_metrics)]

            yield Shown(traced, *read(asyncio.run(texts())), spans)


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"\brelayline_[a-z0-9_]+\b", text))


def test_every_query_of_the_board_names_exposed_metrics(shown: Shown) -> None:
    found = queries()
    assert len(found) > 30
    for title, query in found:
        wanted = metric_names(query)
        assert wanted, f"{title}: {query} names no metric of ours"
        assert wanted <= shown.samples, f"{title}: {wanted - shown.samples} is not exposed"


def test_every_label_in_a_query_is_on_its_metrics(shown: Shown) -> None:
    for title, query in queries():
        grouped = {label.strip() for part in re.findall(r"\bby \(([^)]*)\)", query) for label in part.split(",")}
        matched = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", query))
        for metric in metric_names(query):
            known = shown.labels.get(metric)
            if known:  # a counter of faults has no sample while there was none
                assert grouped | matched <= known | NOT_OF_A_METRIC, f"{title}: {metric} has the labels {known}"


def test_every_metric_that_has_a_name_in_code_is_exposed(shown: Shown) -> None:
    constants = {value for key, value in vars(names).items() if key.startswith("METRIC_")}
    constants.remove(names.METRIC_CERTIFICATE_EXPIRES)  # these links are plaintext; test_stage_metrics shows it
    unused = ("relayline_api_key_", "relayline_offline_")  # there are no keys, and no directory of batches
    constants = {name for name in constants if not name.startswith(unused)}
    assert constants <= set(shown.families), constants - set(shown.families)


def test_every_metric_is_on_the_page_of_metrics() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    constants = {value for key, value in vars(names).items() if key.startswith("METRIC_")}
    gateways = {family.name for family in gateway_metrics(Router(["a"])).collect()}
    wanted = {name for name in constants | gateways if name.startswith("relayline_")}
    assert [name for name in sorted(wanted) if not re.search(rf"`{name}(_total)?`", page)] == []


def text_of_pages() -> str:
    """Return the two pages that tell of observing."""
    return "\n".join(page.read_text() for page in PAGES)


def documented() -> set[str]:
    """Return every name of ours that the pages set in code style or in a code block."""
    text = text_of_pages()
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    return set(re.findall(r"\b(?:relayline[._]|gen_ai\.|http\.)[a-z0-9_.-]*[a-z0-9]", code)) - {
        "relayline.yaml", "relayline.json", "relayline.dev",
    }  # fmt: skip


def test_every_name_in_the_page_is_real(shown: Shown) -> None:
    real = {span.name for span in shown.spans} | shown.samples | set(shown.families)
    real |= {key for span in shown.spans for key in span.resource} | {names.RESOURCE_STAGE_NAME}  # stages that join
    real |= {names.ATTR_REQUEST_BATCH, names.ATTR_API_KEY_NAME}  # this pipeline has neither batches nor keys
    real |= {names.ATTR_MEDIA_FILES, names.ATTR_MEDIA_KEPT, names.ATTR_MEDIA_ROWS, names.ATTR_MEDIA_WAIT}  # nor images
    for span in shown.spans:
        real |= set(span.attributes)
        real |= {key for link in span.links for key in link.attributes}
    found = documented()
    assert len(found) > 20
    assert found <= real, found - real


def test_the_page_names_every_service_and_every_span(shown: Shown) -> None:
    text = text_of_pages()
    assert {span.service for span in shown.spans} == {
        "relayline-coordinator",
        *(f"relayline-stage-{index}" for index in range(3)),
    }
    sized = names.BATCH_NAMES | names.PASSES_NAMES
    wanted = {span.service for span in shown.spans} | {span.name for span in shown.spans} - sized
    assert [name for name in wanted if name not in text] == []


def test_commands_and_flags_of_the_page_are_there() -> None:
    text = text_of_pages()
    code = " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))
    context = click.Context(relayline)
    commands = {name: relayline.get_command(context, name) for name in relayline.list_commands(context)}
    assert set(re.findall(r"\brelayline ([a-z]+)\b", code)) <= set(commands)
    inner = [
        part for command in commands.values() if isinstance(command, click.Group) for part in command.commands.values()
    ]
    everyone = [command for command in (*commands.values(), *inner) if command is not None]
    known = {option for command in everyone for part in command.params for option in part.opts}
    of_others = {"--out", "--spans"}  # of benches.waterfall
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)) <= known | of_others


def test_pictures_and_files_that_the_page_shows_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", text_of_pages())
    assert [link for link in links if not link.startswith("http") and not (PAGES[0].parent / link).exists()] == []


@dataclasses.dataclass(frozen=True, slots=True)
class Search:
    """The text that a person types into Jaeger's search form."""

    service: str
    operation: str
    tags: dict[str, str]

    def finds(self, span: StoredSpan) -> bool:
        """Match as Jaeger's memory store does: each tag by its text, on the span or on one of its links."""
        if span.service != self.service or self.operation not in ("all", span.name):
            return False
        holders = [span.attributes, *(link.attributes for link in span.links)]
        return all(any(jaeger_text(held.get(key)) == value for held in holders) for key, value in self.tags.items())


def callers_id(shown: Shown, trace_id: str) -> str:
    (root,) = (span for span in shown.spans if span.trace_id == trace_id and span.name == ROUTE)
    return str(root.attributes[names.HTTP_REQUEST_ID])


def jaeger_text(value: Any) -> str | None:
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def searches() -> list[Search]:
    """Every search of the pages."""
    found = []
    for block in re.findall(r"```\n(Service .*?)```", text_of_pages(), re.DOTALL):
        fields = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in block.strip().splitlines())
        tags = dict(tag.split("=", 1) for tag in fields["Tags"].split())
        found.append(Search(fields["Service"], fields["Operation"], tags))
    return found


def test_every_search_of_the_page_finds_the_promised_spans(shown: Shown) -> None:
    found = rebuild(shown.spans)
    session = found.sessions[-1]
    position = session.sampled_rows[5]
    stands_for = {
        "REQUEST": session.request_id,
        "CALLERS": callers_id(shown, session.trace_id),
        "SESSION": session.session,
        "POSITION": str(position),
    }
    n_found = []
    for search in searches():
        filled = dataclasses.replace(search, tags={k: stands_for.get(v, v) for k, v in search.tags.items()})
        n_found.append((search, [span for span in shown.spans if filled.finds(span)]))
    assert len(n_found) == 7
    by_tags = {tuple(search.tags): spans for search, spans in n_found}
    for key in (names.ATTR_REQUEST_ID, names.HTTP_REQUEST_ID):
        (request,) = by_tags[(key,)]
        assert request.trace_id == session.trace_id
    mine = by_tags[(names.ATTR_SESSION_ID,)]
    held = [batch for batch in found.of_stage(0) if any(m.session == session.session for m in batch.members)]
    assert {span.trace_id for span in mine} == {session.trace_id, *(batch.span.trace_id for batch in held)}
    assert {batch.span.context for batch in held} <= {span.context for span in mine}
    token = by_tags[(names.ATTR_SESSION_ID, names.ATTR_FRAME_POSITION)]
    assert found.batches_of(session.session, position, 0)[0].span.context in {span.context for span in token}
    # Whether a batch was padded, or held one stream alone, is up to the policy and the moment: the tags are real.
    for search, _ in n_found:
        assert all(any(key in span.attributes or any(key in link.attributes for link in span.links)
                       for span in shown.spans) for key in search.tags)  # fmt: skip


# --- Debian's Prometheus ----------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return path


@pytest.mark.prometheus
def test_promtool_accepts_the_config() -> None:
    config = HERE / "prometheus" / "prometheus.yaml"
    done = subprocess.run([tool("promtool"), "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
def test_promtool_finds_no_fault_in_the_expositions(shown: Shown) -> None:
    for url in (f"{shown.traced.url}/metrics", *shown.traced.stage_metrics):
        command = [tool("promtool"), "check", "metrics"]
        done = subprocess.run(command, input=asyncio.run(text_of(url)), capture_output=True, text=True, check=False)
        complaints = [line for line in (done.stdout + done.stderr).splitlines() if "relayline_" in line]
        assert done.returncode in (0, 3), done.stderr  # 3: style alone
        assert [line for line in complaints if "no help text" in line or "error" in line] == []


# Of each alert: a series that raises it, one that does not, and the time after which Prometheus is asked.
ALARMS = {
    "RelaylineNotScraped": ('up{job="relayline", role="stage", instance="a"}', "1 1 0x10", "1x12", "5m"),
    "RelaylineStageLost": ('relayline_stage_up{stage="1", instance="a"}', "1 1 0x10", "1x12", "5m"),
    "RelaylineRecoversOften": ('relayline_recoveries_total{instance="a"}', "0+1x10", "5x12", "8m"),
    "RelaylineAnswersFail": (
        'relayline_request_success_total{finished_reason="error", instance="a"}', "0 0 1x10", "1x12", "4m",
    ),
    "RelaylineReplicaDown": ('relayline_gateway_pipeline_up{pipeline="b", instance="a"}', "1 1 0x10", "1x12", "5m"),
    "RelaylineFirstTokenSlow": (
        'relayline_time_to_first_token_seconds_bucket{le="LE", instance="a"}', "0+0x40 0+5x40", "0+5x40 0+5x40", "30m",
    ),
    "RelaylineQueueNeverEmpty": ('relayline_num_requests_waiting{instance="a"}', "3x40", "3x9 0 3x20", "20m"),
    "RelaylineKvCacheFull": ('relayline_kv_cache_usage_perc{instance="a"}', "0.97x40", "0.97x9 0.5 0.97x20", "20m"),
    "RelaylineCertificateExpires": (
        'relayline_certificate_expires_timestamp_seconds{instance="a"}', "86400x10", "2000000x10", "5m",
    ),
    "RelaylineSpansDropped": ('relayline_spans_dropped_total{instance="a"}', "0+9x40", "9x40", "25m"),
}  # fmt: skip


def alarm_test(name: str, series: str, values: str, at: str, *, fires: bool) -> dict[str, Any]:
    """A case for `promtool test rules`: whether these values of a series raise an alert."""
    if 'le="LE"' in series:  # a histogram: one bucket at 10 s, one at 20 s, and the whole
        low, high = values.split(" ")
        parts = zip(("10", "20", "+Inf"), (low, high, high), strict=True)
        given = [{"series": series.replace("LE", le), "values": each} for le, each in parts]
    else:
        given = [{"series": series, "values": values}]
    return {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [
            {"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})', "eval_time": at,
             "exp_samples": [{"labels": "{}", "value": 1}] if fires else []},
        ],
    }  # fmt: skip


@pytest.mark.prometheus
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    rules = [rule["alert"] for group in yaml_of("prometheus/alerts.yaml")["groups"] for rule in group["rules"]]
    assert rules == list(ALARMS)
    cases = [
        alarm_test(name, series, values, at, fires=fires)
        for name, (series, bad, good, at) in ALARMS.items()
        for values, fires in ((bad, True), (good, False))
    ]
    file = {"rule_files": [str(HERE / "prometheus" / "alerts.yaml")], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "alarms.yaml").write_text(yaml.safe_dump(file))
    command = [tool("promtool"), "test", "rules", tmp_path / "alarms.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{query}", timeout=30) as response:
            answer = json.loads(response.read())
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])


@contextlib.contextmanager
def scraping(traced: Traced, directory: Path) -> Iterator[Prometheus]:
    """Run Prometheus with the real config, its targets and its pace replaced."""
    config = yaml_of("prometheus/prometheus.yaml")
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    hosts = [urllib.parse.urlsplit(url).netloc for url in (traced.url, *traced.stage_metrics)]
    entries = [
        {"targets": hosts[:1], "labels": {"role": "coordinator"}},
        {"targets": hosts[1:], "labels": {"role": "stage"}},
    ]
    (directory / "targets.yaml").write_text(yaml.safe_dump(entries))
    address = f"127.0.0.1:{free_port()}"
    command = [
        tool("prometheus"), f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address={address}",
    ]  # fmt: skip
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if "Server is ready" in line:
                break
        else:
            raise AssertionError(f"Prometheus did not start, exit code {child.wait()}")
        yield Prometheus(f"http://{address}")
    finally:
        child.terminate()
        child.communicate()


@pytest.mark.slow
@pytest.mark.prometheus
def test_prometheus_scrapes_a_pipeline_and_answers_every_query_of_the_board(shown: Shown, tmp_path: Path) -> None:
    """Queries get a value each, apart from those of things that did not happen."""
    with scraping(shown.traced, tmp_path) as prometheus:
        for _ in range(TRIES_MAX):
            asyncio.run(ask_all(shown.traced, PROMPTS[:4], 12))
            seen = prometheus.query('count_over_time(up{job="relayline"}[1m])')
            if len(seen) == 4 and all(int(entry["value"][1]) >= 4 for entry in seen):
                break
        assert [entry["value"][1] for entry in prometheus.query("min(up)")] == ["1"]
        empty = []
        for title, query in queries():
            filled = query.replace("$__rate_interval", "1m").replace("$stage", ".*")
            result = prometheus.query(filled)
            if not [entry for entry in result if entry["value"][1] != "NaN"]:
                empty.append((title, query))
        assert [query for _, query in empty if names.METRIC_FAULTS not in query] == []
        by_stage = prometheus.query(f"sum by (stage) ({names.METRIC_BATCH_ROWS}_count)")
        assert {entry["metric"]["stage"] for entry in by_stage} == {"0", "1", "2"}
