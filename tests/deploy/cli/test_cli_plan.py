"""`relayline plan` on tiny models: tables, JSON, models that do not fit, and prediction compared with measurement."""

from __future__ import annotations

import dataclasses
import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from relayline.coordinator.model.cuts import ranges
from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.planner.instance import Machine
from relayline.coordinator.planner.speed import Sample
from relayline.deploy.cli.plan import make_plan
from relayline.deploy.cli.plan_notes import notes_of
from relayline.deploy.cli.planned import planned_manifest
from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.deploy.planning import compare as plan_compare
from relayline.deploy.planning.inputs import cuts_for, instance_of, threads_of
from relayline.deploy.planning.measure import _quickest, known_speed, slices_for
from relayline.deploy.testing.processes import Running, relayline
from relayline.wire.common.errors import ModelFileError, StartError, UsageError
from tests.deploy.manifest.test_manifest_commands import samples
from tests.support.tiny_models import make_tiny

HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: small}\n"
SMALL = "context: {tokens: 64, lanes: 2}"
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=5, tokenizer=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def text_of(model: Path, *lines: str) -> str:
    return HEAD + "spec:\n" + "".join(f"  {line}\n" for line in (f"model: {{path: {model}}}", *lines))


def manifest_of(model: Path, *lines: str) -> Manifest:
    return parse_manifest(text_of(model, *lines).encode(), "test.yaml")


def test_a_model_is_planned_over_named_hosts_without_a_manifest(model: Path, tmp_path: Path) -> None:
    found = planned_manifest(str(model), ["127.0.0.1", "laptop.invalid", "10.255.255.1"])
    assert [(stage.name, stage.host) for stage in found.stages] == [
        ("stage-0", "127.0.0.1"), ("laptop", "laptop.invalid"), ("stage-2", "10.255.255.1"),
    ]  # fmt: skip
    assert len(planned_manifest(str(model), []).stages) == 2
    with pytest.raises(UsageError, match="without ports"):
        planned_manifest(str(model), ["laptop:80"])
    path = tmp_path / "small.yaml"
    path.write_text(text_of(model))
    with pytest.raises(UsageError, match="--hosts belongs to a MODEL"):
        planned_manifest(str(path), ["laptop"])


def test_a_host_of_the_manifest_that_is_this_machine_is_planned_as_such(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayline.deploy.launch.here.at_home.__defaults__", (lambda host: host == "10.0.0.1", str))
    path = tmp_path / "small.yaml"
    path.write_text(text_of(model, "stages: [{name: a, host: 10.0.0.1}, {name: b, host: 10.0.0.2}]"))
    assert [stage.is_local for stage in planned_manifest(str(path), []).stages] == [True, False]


def test_the_command_counts_a_draft_model_and_promises_no_speed(model: Path) -> None:
    small = make_tiny("llama", model.parent / "small.gguf", tokenizer=True, n_layers=1)
    shown = relayline("plan", model, "--draft-model", small, "--draft-ctx", "2048", "--json")
    assert shown.returncode == 0, shown.stderr
    beside, alone = json.loads(shown.stdout), json.loads(relayline("plan", model, "--json").stdout)
    assert alone["draft_model"] is None
    assert (beside["draft_model"]["name"], beside["draft_model"]["ctx_tokens"]) == ("small.gguf", 2_048)
    assert beside["draft_model"]["memory_bytes"] > beside["draft_model"]["kv_bytes"] > 0
    assert [rate["streams"] for rate in beside["rates"]] == [rate["streams"] for rate in alone["rates"]]
    text = relayline("plan", model, "--draft-model", small).stdout
    assert "draft model small.gguf: 0." in text
    assert "the rates are those without it" in text
    refused = relayline("plan", model, "--draft-model", model.parent / "nope.gguf")
    assert refused.returncode == 2, refused.stderr
    assert "--draft-model" in refused.stderr


def test_a_draft_model_that_is_no_gguf_is_refused_and_not_left_out(model: Path, tmp_path: Path) -> None:
    for name, content in (("empty.gguf", b""), ("text.gguf", b"words\n"), ("cut.gguf", model.read_bytes()[:5_000])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelFileError, match=rf"^--draft-model: \S*{name}: "):
            make_plan(planned_manifest(str(model), [], {"coordinator.draftModel": str(tmp_path / name)}))
    other = make_tiny("llama", tmp_path / "other.gguf", vocab=64)
    with pytest.raises(UsageError, match=r"^--draft-model: .*same vocabulary"):
        make_plan(planned_manifest(str(model), [], {"coordinator.draftModel": str(other)}))


def test_one_stage_of_a_split_is_not_planned_nor_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> NoReturn:
        pytest.fail("it was measured before the refusal")

    monkeypatch.setattr("relayline.deploy.cli.plan._measure", measured)
    split_model(model, tmp_path, cuts=(2,))
    with pytest.raises(ModelFileError, match=r"stage-0.gguf: is already one stage of a split; give the whole model"):
        make_plan(planned_manifest(str(tmp_path / "stage-0.gguf"), []), measure=True)


def test_the_command_shows_the_main_figures(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text_of(model))
    shown = relayline("plan", path)
    assert shown.returncode == 0, shown.stderr
    for part in ("stage-0", "stage-1", "KV cache", "tok/s", "limited by", "first token", "bytes per token",
                 "one more machine", "estimated", "--measure"):  # fmt: skip
        assert part in shown.stdout
    assert max(map(len, shown.stdout.splitlines()[1:12])) <= 80


def test_json_has_the_keys_that_its_docstring_names(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text_of(model, SMALL, "stages: 3"))
    done = relayline("plan", path, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    keys = ["name", "model", "cuts", "exact", "lanes", "ctx_tokens", "streams", "reachable_tok_s", "stages", "rates"]
    assert list(plan) == [*keys, "ttft_ms", "ttft_prompt_tokens", "links", "one_more", "draft_model", "advice", "notes"]
    facts = inspect_model(model)
    assert [tuple(stage["layers"]) for stage in plan["stages"]] == list(ranges(facts.n_layers, plan["cuts"]))
    assert sum(stage["weights_bytes"] for stage in plan["stages"]) == (
        sum(facts.layer_bytes) + facts.embedding_bytes + facts.head_bytes
    )
    assert [stage["kv_tokens"] for stage in plan["stages"]] == [512] * 3  # 2 x 64 and the spare ones, in steps of 256
    assert [rate["streams"] for rate in plan["rates"]] == [1, 2]
    assert [link["from"] for link in plan["links"]] == ["coordinator", "stage-0", "stage-1", "stage-2"]
    assert plan["links"][1]["bytes_per_token"] > facts.n_embd * 2


def test_given_ranges_stay_and_cuts_are_legal(model: Path) -> None:
    manifest = manifest_of(model, "stages: [{name: a, layers: [0, 3]}, {name: b}]")
    assert cuts_for(manifest, model) == (3,)
    assert cuts_for(manifest_of(model, "stages: 1"), model) == ()
    with pytest.raises(UsageError, match="cannot make"):
        cuts_for(manifest_of(model, "stages: 9"), model)


def test_a_model_that_does_not_fit_is_refused_with_remedies(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(text_of(model, "stages: [{name: a, memoryGib: 0.3}, {name: b, memoryGib: 0.3}]",
                            "context: {tokens: 16384, lanes: 32}"))  # fmt: skip
    done = relayline("plan", path)
    assert done.returncode == 2
    assert "GiB are missing" in done.stderr
    assert "contexts of " in done.stderr
    assert " lanes instead of " not in done.stderr, "even one lane with per-lane cells has scores that do not fit"
    assert "Traceback" not in done.stderr
    path.write_text(path.read_text().replace("lanes: 32", "lanes: 32, kvLayout: unified"))
    assert " lanes instead of " in relayline("plan", path).stderr


def test_a_declared_slow_host_gets_fewer_layers_and_links_are_the_manifests(model: Path) -> None:
    lines = (
        "stages: [{name: a, host: 10.0.0.1, speed: {decodeGbytesPerS: 50}, link: {roundTripMs: 8}}, "
        "{name: b, host: 10.0.0.2, speed: {decodeGbytesPerS: 0.001}, link: {roundTripMs: 4}}]",
    )
    manifest = manifest_of(model, *lines)
    facts = inspect_model(model)
    instance = instance_of(manifest, facts)
    assert [link.round_trip_ns for link in instance.links] == [4_000_000, 8_000_000, 4_000_000]
    assert cuts_for(manifest, model) == (facts.n_layers - 1,)
    assert {host.speed.source for host in instance.hosts} == {"declared"}


def test_local_stages_share_cores_and_memory(model: Path) -> None:
    instance = instance_of(manifest_of(model, "stages: 2"), inspect_model(model))
    assert instance.hosts[0].machine == instance.hosts[1].machine == instance.coordinator
    assert sum(host.threads for host in instance.hosts) <= max(2, instance.hosts[0].machine.cores)


@pytest.mark.parametrize(("threads", "told"), [(2, []), (3, ["a, b, c and d"])])
def test_a_plan_tells_of_the_stages_that_the_coordinator_will_find_to_take_turns(
    model: Path, threads: int, told: list[str]
) -> None:
    """With two threads each, any two stages have cores enough, though all four together have not."""
    manifest, facts = manifest_of(model, "stages: 2"), inspect_model(model)
    instance = instance_of(manifest, facts)
    box, host = Machine("box", 4), instance.hosts[0]
    four = tuple(dataclasses.replace(host, name=name, machine=box, threads=threads) for name in "abcd")
    instance = dataclasses.replace(instance, hosts=four)
    assert len(set(instance.devices)) == (1 if told else 4)
    notes = [note for note in notes_of(manifest, instance, facts) if "take turns" in note]
    assert [note.partition(" share ")[0] for note in notes] == [f"stages {names}" for names in told]


def test_a_calibration_file_counts_and_a_wrong_one_is_refused(model: Path, tmp_path: Path) -> None:
    rows = [{"rows": rows, "step_ms": 2.0 * rows} for rows in (1, 2, 4, 8)]
    file = tmp_path / "box.json"
    line = f"stages: [{{name: a, host: box, speed: {{calibration: {file}}}}}]"
    file.write_text(json.dumps({"artifact": {"layer_bytes": 1 << 20, "head_bytes": 0}, "decode": rows, "prefill": []}))
    (host,) = instance_of(manifest_of(model, line), inspect_model(model)).hosts
    assert host.speed.source == "calibrated"
    assert host.speed.layer_ns(4) / 1024 == pytest.approx(8e6)
    file.write_text("{}")
    with pytest.raises(UsageError, match=r"box\.json: not the output"):
        instance_of(manifest_of(model, line), inspect_model(model))


def test_slices_to_measure_are_stages_of_legal_splits(model: Path) -> None:
    facts = inspect_model(model)
    found = list(slices_for(facts))
    edges = [ranges(facts.n_layers, cuts)[index] for cuts, index in found]
    assert edges[-1][1] == facts.n_layers
    assert all(end < facts.n_layers for _, end in edges[:-1])
    assert len({end - start for start, end in edges[:-1]}) == len(edges) - 1


MEMORY_BYTES = 8 << 30  # the caches of the largest sample take 2.6 GiB


@pytest.mark.parametrize(("name", "text"), samples(), ids=lambda value: value if "\n" not in value else "")
def test_every_sample_can_be_planned(name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small model that has the layers named in the sample's ranges. What other tests hold is no matter to it."""
    monkeypatch.setattr("relayline.deploy.planning.inputs.machine.available_memory_bytes", lambda: MEMORY_BYTES)
    manifest = parse_manifest(text.encode(), name)
    last = max((stage.layer_range[1] for stage in manifest.stages if stage.layer_range), default=0)
    n_layers = last if manifest.stages[-1].layer_range else last + 8
    tiny = make_tiny("llama", tmp_path / "tiny.gguf", n_layers=n_layers, tokenizer=True)
    data = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["spec"]["model"] = {"path": str(tiny)}
    data["spec"]["deployment"]["storage"].pop("fill", None)
    plan = make_plan(Manifest.model_validate(data))
    assert len(plan.best.edges) == len(manifest.stages)
    assert plan.best.is_exact
    assert all(rate.tokens_per_s > 0 for rate in plan.prediction.rates)


@pytest.mark.slow
def test_measuring_is_remembered_and_used(model: Path) -> None:
    manifest = manifest_of(model, SMALL)
    first = make_plan(manifest, measure=True, quiet=True)
    assert {stage.source for stage in first.prediction.stages} == {"measured"}
    again = make_plan(manifest)
    assert again.prediction.rates == first.prediction.rates
    assert again.best == first.best
    assert known_speed(model, n_threads=77, gpu_layers=0, kv_type="f16") is None
    n_threads = threads_of(manifest)[0]
    found = [known_speed(model, n_threads=n_threads, gpu_layers=0, kv_type="f16", n_at_once=n) for n in range(1, 9)]
    assert sum(speed is not None for speed in found) == 1, "it holds for as many neighbours as it was measured with"


def status_of(plan: Any, busy_ns: int, rows: int = 10, generated: int = 10, running: int = 1) -> dict[str, Any]:
    return {
        "running": running,
        "generated_tokens": generated,
        "stages": [
            {"layers": list(edge), "steps": 10, "rows": rows, "steps_by_rows": {"1": 10}, "busy_ns": busy_ns}
            for edge in plan.best.edges
        ],
    }


def test_a_comparison_shows_measurement_and_prediction(model: Path) -> None:
    plan = make_plan(manifest_of(model, SMALL))
    # 400 more rows, but 300 of them were prompts: 100 tokens in two seconds.
    before, after = status_of(plan, 10_000_000), status_of(plan, 30_000_000, rows=410, generated=110)
    bench = [{"load": "2", "decode_tok_s": 50.0}, {"load": "5/s", "decode_tok_s": 1.0}]
    figures = plan_compare.compare(plan, before, after, 2.0, bench)
    assert [figure.unit for figure in figures] == ["ms", "ms", "tok/s", "tok/s"]
    assert [figure.measured for figure in figures] == [3.0, 3.0, 50.0, 50.0]
    assert figures[2].predicted == plan.prediction.rates[0].tokens_per_s
    assert figures[3].ratio == pytest.approx(50.0 / plan.prediction.rates[1].tokens_per_s)


@pytest.mark.parametrize(
    ("first", "last", "wall_s", "why"),
    [
        ({"running": 2}, {"running": 3, "generated": 90}, 2.0, "2 ran at the first reading, 3 at the last"),
        ({"generated": 90}, {"generated": 20}, 2.0, "was restarted"),
        ({}, {}, 2.0, "no stream decoded during the 2.0 s"),
        ({"running": 0}, {"running": 0, "generated": 90}, 2.0, "no stream decoded"),
        ({"running": 3}, {"running": 3, "generated": 90}, 2.0, "predicts nothing for 3 streams (--streams 3 does)"),
        ({}, {"generated": 90}, 0.0, "only one reading"),
    ],
)
def test_looks_that_give_no_rate_say_why(
    model: Path, first: dict[str, int], last: dict[str, int], wall_s: float, why: str
) -> None:
    plan = make_plan(manifest_of(model, SMALL))
    before, after = status_of(plan, 1, **first), status_of(plan, 2, **last)
    assert why in plan_compare.why_no_rate(plan, before, after, wall_s)
    assert all(figure.unit != "tok/s" for figure in plan_compare.compare(plan, before, after, wall_s, []))


def test_a_comparison_needs_the_same_split_and_some_steps(model: Path) -> None:
    plan = make_plan(manifest_of(model, SMALL))
    other = status_of(plan, 1)
    other["stages"][0]["layers"] = [0, 1]
    with pytest.raises(StartError, match="this plan"):
        plan_compare.compare(plan, {}, other, 0.0, [])
    idle = status_of(plan, 0)
    for stage in idle["stages"]:
        stage["steps"] = 0
    with pytest.raises(StartError, match="not decoded anything"):
        plan_compare.compare(plan, {}, idle, 0.0, [])


def test_compare_against_a_running_pipeline(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(text_of(model, SMALL))
    cuts = json.loads(relayline("plan", path, "--json").stdout)["cuts"]
    flags = ("--cuts", ",".join(map(str, cuts)), "--ctx", "64", "--lanes", "2", "--threads", "1", "--no-calibrate")
    up = Running(["up", "--model", model, "--name", "small", "--http", "127.0.0.1:0", *flags, "--json"])
    try:
        url = up.event["url"]
        body = {"model": up.event["model"], "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200
        (tmp_path / "bench.jsonl").write_text(json.dumps({"load": "1", "decode_tok_s": 100.0}) + "\n")
        arguments = ("--compare", "--url", url, "--seconds", "0", "--json")
        done = relayline("plan", path, *arguments, "--bench", tmp_path / "bench.jsonl")
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)["compare"]
        assert [figure["unit"] for figure in figures] == ["ms", "ms", "tok/s"]
        assert all(figure["measured"] > 0 for figure in figures)
        idle = relayline("plan", path, "--compare", "--seconds", "0.1")  # it finds the one that runs
        assert idle.returncode == 0, idle.stderr
        output = " ".join(idle.stdout.split())
        assert re.search(
            r"no tok/s from these readings: no stream decoded during the \d+\.\d s from start to end", output
        )
    finally:
        up.stop()
    away = relayline("plan", model, "--compare")
    assert away.stderr.endswith(" does not run here; give the coordinator's address with --url\n")
    gone = relayline("plan", path, *arguments)
    assert gone.returncode == 1
    assert "does not answer" in gone.stderr


def test_the_quicker_of_two_measurements_counts() -> None:
    disturbed = Sample(100, 10, [(1, 9.0), (2, 30.0), (4, 50.0)], [(4, 70.0)])
    other = Sample(100, 10, [(1, 10.0), (2, 20.0)], [(4, 40.0)])
    assert _quickest([disturbed, other]) == Sample(100, 10, [(1, 9.0), (2, 20.0)], [(4, 40.0)])
