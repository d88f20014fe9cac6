"""Manifests: their values, refusals and their messages, and that text and values convert without loss."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
from check_jsonschema import main as check_jsonschema_command
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from relayline.deploy.manifest import Manifest, is_local, load, load_manifest, parse_manifest
from relayline.deploy.manifest.dump import dump_manifest
from relayline.deploy.manifest.gateway import GatewayManifest
from relayline.deploy.manifest.load import COMPLAINTS_MAX, ManifestError
from relayline.deploy.manifest.model import API_VERSION, Context
from relayline.deploy.manifest.scalars import Part
from relayline.deploy.manifest.schema import SCHEMA_FILE, schema_text
from relayline.deploy.manifest.stage import Stage
from relayline.deploy.manifest.text import DEPTH_MAX, NODES_MAX, TEXT_BYTES_MAX, read_document
from relayline.deploy.models.hub_reference import parse_reference
from relayline.deploy.testing.paths import DEPLOY
from relayline.stage.engine.kv_cache import KV_TYPES
from relayline.wire.common.kv_layout import KV_LAYOUTS
from relayline.wire.settings.setting import entries
from relayline.wire.settings.table import TABLES
from tests.support.examples import thinned
from tests.support.manifest_strategies import FORMS, manifests

HEAD = "apiVersion: relayline.dev/v1alpha1\nkind: Pipeline\nmetadata: {name: small}\n"
SMALLEST = HEAD + "spec:\n  model: {path: model.gguf}\n"
SPLICES = (b"\n", b"  ", b": ", b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a", b"!!", b"|\n", b"null", b"'", b'"')
KEYS = ("model", "path", "stages", "name", "layers", "coordinator", "http", "labels", "wire", "tls", "port", "host")
EXAMPLES = sorted((DEPLOY / "examples").glob("*.yaml"))


def parsed(text: str) -> Manifest:
    return parse_manifest(text.encode(), "m.yaml")


def with_stages(*stages: str) -> str:
    return SMALLEST + "  stages:\n" + "".join(f"    - {{{stage}}}\n" for stage in stages)


def refusal(text: str | bytes) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text if isinstance(text, bytes) else text.encode(), "m.yaml")
    assert caught.value.lines
    assert caught.value.message == "\n".join(caught.value.lines)
    return caught.value.lines


def complaints(data: bytes) -> list[str]:
    """The mistakes in some text; empty for a manifest. Lets every other exception through."""
    try:
        parse_manifest(data, "m.yaml")
    except ManifestError as error:
        return error.lines
    return []


# --- values of a manifest ---------------------------------------------------------------------------------------------


def test_the_smallest_manifest_is_five_lines_and_has_every_default() -> None:
    assert SMALLEST.count("\n") == 5
    manifest = parsed(SMALLEST)
    assert [stage.name for stage in manifest.stages] == ["stage-0", "stage-1"]
    assert all(stage.is_local and stage.port == 0 for stage in manifest.stages)
    assert manifest.all_local
    assert not manifest.uses_tls
    assert manifest.join_port == 0
    assert manifest.fixed_cuts() == (None,)
    assert manifest.spec.context == Context(tokens=2048, lanes=32, kv_type="f16")
    assert manifest.spec.coordinator.http.host == "127.0.0.1"


def test_paths_resolve_against_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "m.yaml").write_text(SMALLEST)
    monkeypatch.chdir(tmp_path)
    manifest = load_manifest(Path("deep/m.yaml"))
    assert manifest.model_path == tmp_path / "deep" / "model.gguf"
    assert manifest.directory == tmp_path / "deep"
    assert manifest.resolve("/etc/x") == Path("/etc/x")
    monkeypatch.setenv("HOME", "/home/someone")
    assert manifest.resolve("~/x") == Path("/home/someone/x")
    (tmp_path / "deep" / "m.yaml").write_text(SMALLEST + "  coordinator: {batchDir: kept, responsesDir: said}\n")
    serving = load_manifest(Path("deep/m.yaml")).serving
    assert serving.batch_dir == str(tmp_path / "deep" / "kept")
    assert serving.responses_dir == str(tmp_path / "deep" / "said")


def test_stages_on_other_hosts_make_links_private_and_ports_predictable() -> None:
    text = with_stages("name: a", "name: b, host: box", "name: c, host: box", "name: d, host: box, port: 7")
    manifest = parsed(text)
    assert manifest.uses_tls
    assert manifest.join_port == 50_050
    assert [manifest.listen_port(stage) for stage in manifest.stages] == [0, 50_051, 50_052, 7]
    assert [manifest.metrics_port(stage) for stage in manifest.stages] == [0, 9_464, 9_465, 9_466]
    assert not parsed(text + "  wire: {tls: {mode: off}}\n").uses_tls
    assert parsed(SMALLEST + "  wire: {tls: {mode: required}}\n").uses_tls


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("box", False), ("10.0.0.1", False),
     ("0.0.0.0", False), ("127.0.0.1.nip.io", False)],
)  # fmt: skip
def test_only_loopback_is_local(host: str, local: bool) -> None:
    assert is_local(host) is local


@pytest.mark.parametrize("host", ["box", "10.0.0.1", "::1", "::", "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1"])
def test_a_host_is_a_name_or_an_address(host: str) -> None:
    assert parsed(SMALLEST + f"  stages: [{{name: a, host: '{host}'}}]\n").stages[0].host == host


@pytest.mark.parametrize("host", ["box:80", "10.0.0.1:80", "a:1", "[::1]", "[::1]:80", "http://box"])
def test_a_host_has_no_port_and_no_brackets(host: str) -> None:
    with pytest.raises(ManifestError, match="is not a host name or an IP address without a port"):
        parsed(SMALLEST + f"  stages: [{{name: a, host: '{host}'}}]\n")


@pytest.mark.parametrize("hf", ["hf://org/repo/m.gguf", "hf://org/repo/Q4/m-00001-of-00002.gguf@refs/pr/1"])
def test_a_reference_to_the_hub(hf: str) -> None:
    assert parsed(HEAD + f"spec:\n  model: {{hf: '{hf}'}}\n").spec.model.hf == hf
    assert parse_reference(hf).repo == "org/repo", "the loader understands everything that a manifest may say"


@pytest.mark.parametrize(
    ("layers", "cuts"),
    [
        (["auto", "auto"], (None,)),
        (["[0, 4]", "[4, 9]"], (4,)),
        (["[0, 4]", "auto"], (4,)),
        (["auto", "[4, 9]"], (4,)),
        (["auto", "auto", "[4, 9]", "auto"], (None, 4, 9)),
        (["[0, 2]", "auto", "auto", "[4, 9]"], (2, None, 4)),
    ],
)
def test_ranges_and_auto_may_be_mixed(layers: list[str], cuts: tuple[int | None, ...]) -> None:
    stages = [f"name: s{index}, layers: {text}" for index, text in enumerate(layers)]
    assert parsed(with_stages(*stages)).fixed_cuts() == cuts


def test_yaml_means_the_same_as_in_an_editor() -> None:
    """YAML 1.2: `off` is text, 0o17 is fifteen, 8:30 is text."""
    text = SMALLEST + "  telemetry: {level: off}\n  coordinator: {queue: 0o17, modelId: 8:30}\n"
    spec = parsed(text + "  batching: {draft: off}\n").spec
    assert (spec.telemetry.level, spec.batching.draft) == ("off", "off")
    assert spec.coordinator.queue == 15
    assert spec.coordinator.model_id == "8:30"


def test_anchors_are_fine_in_moderation() -> None:
    text = with_stages("name: a, labels: &l {rack: one}", "name: b, labels: *l")
    assert [stage.labels for stage in parsed(text).stages] == [{"rack": "one"}] * 2


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (SMALLEST + "  contxt: {}\n", "m.yaml:6: unknown key \"contxt\" in spec; did you mean context?"),
        (SMALLEST + "  context: {kv_type: f16}\n", 'unknown key "kv_type" in spec.context; did you mean kvType?'),
        (SMALLEST + "  lanes: 4\n", 'm.yaml:6: unknown key "lanes" in spec; it belongs to spec.context'),
        (SMALLEST + "  context: {zzz: 1}\n", 'unknown key "zzz" in spec.context; known keys are tokens, lanes, kvType'),
        (SMALLEST + "  context:\n    lanes: '4'\n", 'm.yaml:7: spec.context.lanes: must be a whole number, not "4"'),
        (SMALLEST + "  context: {lanes: 1.5}\n", "spec.context.lanes: must be a whole number, not 1.5"),
        (SMALLEST + "  context: {lanes: yes}\n", 'must be a whole number, not "yes"'),
        (SMALLEST + "  context: {lanes: 0}\n", "spec.context.lanes: must be at least 1, not 0"),
        (SMALLEST + "  context:\n", "spec.context: is empty; give it a value or leave the key out"),
        (SMALLEST + "  context: [1]\n", "spec.context: must be a mapping, not [1]"),
        (f"{HEAD}spec:\n  model: a.gguf\n", 'spec.model: must be a mapping, such as {path: model.gguf}, not "a.gguf"'),
        (SMALLEST + "  batching: {share: 1}\n", "spec.batching.share: must be true or false, not 1"),
        (SMALLEST + "  batching: {draft: of}\n", 'spec.batching.draft: "of" is not auto or off; did you mean off?'),
        (SMALLEST + "  batching: {draft: 32}\n", "spec.batching.draft: must be at most 31, not 32"),
        (SMALLEST + "  batching: {draft: 0}\n", "spec.batching.draft: must be at least 1, not 0"),
        (SMALLEST + "  batching: {draft: true}\n", "spec.batching.draft: must be a whole number, not true"),
        (SMALLEST + "  batching: {draft: }\n", "spec.batching.draft: is empty; give it a value or leave the key out"),
        (SMALLEST + "  telemetry: {level: batchs}\n", "is not off, summary, batches or frames; did you mean batches?"),
        (SMALLEST + "  stages: 0\n", "spec.stages: must be at least 1, not 0"),
        (SMALLEST + "  stages: []\n", "spec.stages: must have 1 or more entries, not []"),
        (SMALLEST + "  stages: {a: 1}\n", 'spec.stages: must be a whole number, not {"a": 1}'),
        (with_stages("host: a"), "m.yaml:7: spec.stages[0].name is missing"),
        (with_stages("name: a, layers: [1]"), "m.yaml:7: spec.stages[0].layers[1] is missing"),
        (SMALLEST + '  coordinator: {modelId: "\\ud800"}\n', "m.yaml:6: an escape is half a character"),
        (HEAD.replace("small}", 'small, labels: {"a\\nb": x}}'),
         'm.yaml:3: metadata.labels."a\\nb": "a\\nb" is not a label'),
        (SMALLEST + "  stages: two\n", 'spec.stages: must be a whole number, not "two"'),
        (HEAD, "m.yaml:1: spec is missing"),
        (HEAD + "spec: {model: {}}\n", "m.yaml:4: spec.model: give either `path` (a GGUF file) or `hf`"),
        (HEAD + "spec: {model: {path: a, hf: hf://a/b/c.gguf}}\n", "only one of them"),
        (HEAD + "spec: {model: {hf: hf://a/b}}\n", 'spec.model.hf: "hf://a/b" is not hf://org/repo/file.gguf'),
        (HEAD + "spec: {model: {hf: hf://a/b/../c.gguf}}\n", "is not hf://org/repo/file.gguf"),
        (SMALLEST.replace("small", "Small"), "is not a name of lower-case letters, digits and inner dashes"),
        (SMALLEST.replace("v1alpha1", "v2"), 'm.yaml:1: apiVersion is "relayline.dev/v2"; this relayline reads'),
        (SMALLEST.replace("Pipeline", "Deployment"), 'm.yaml:2: kind is "Deployment"; this relayline reads Pipeline'),
        ("- a\n", "m.yaml:1: a manifest is a mapping with apiVersion, kind, metadata and spec"),
        ("", "m.yaml:1: the file is empty"),
        (SMALLEST + "x: " + "[" * 100_000, "m.yaml:6: values are nested too deeply"),
        (SMALLEST + "x:\n  - " + "- " * 100_000, "m.yaml:7: values are nested too deeply"),
        (SMALLEST + "---\na: 1\n", "m.yaml:7: a second YAML document starts here"),
        (SMALLEST + "  context: {lanes: 1}\n  context: {lanes: 2}\n", "'context' is given twice; first in line 6"),
        (SMALLEST + "  context: {lanes: [\n", "m.yaml:7: not YAML"),
        (SMALLEST + "\tcontext: {}\n", "m.yaml:6: not YAML: a tab stands where a value begins; indent with spaces"),
        (SMALLEST + "  stages: 2 : 3\n", "m.yaml:6: not YAML: a key is too much in this line; a text with"),
        (SMALLEST + "  stages: *two\n", "m.yaml:6: not YAML: a text that begins with * needs quotes"),
        (SMALLEST + "  context: !!python/object:os.system {}\n", "is not supported in a manifest"),
        (SMALLEST + "  ? [a]\n  : 1\n", "m.yaml:6: a key must be text"),
        (SMALLEST + "  context: {lanes: .inf}\n", ".inf is not a number that a manifest can use"),
        (SMALLEST + f"  context: {{lanes: {'9' * 5000}}}\n", "has too many digits"),
        (SMALLEST.encode() + b"# \xff\n", "m.yaml:6: byte 0xff is not UTF-8"),
        (SMALLEST + "# \x00\n", "m.yaml:6: not YAML"),
        (with_stages("name: a", "name: a"), "spec.stages[1].name: stage name 'a' is taken by stage 0"),
        (with_stages("name: a, port: 7", "name: b, port: 7"),
         "spec.stages[1].port: port 7 on localhost is taken by stage 'a'"),
        (with_stages("name: a, port: 7, metricsPort: 7"), "port 7 on localhost is taken by stage 'a'"),
        (with_stages("name: a, host: 10.0.0.2", "name: b, host: 10.0.0.2, port: 50051"),
         "spec.stages[1].port: port 50051 on 10.0.0.2 is taken by stage 'a'"),
        (with_stages("name: a, host: 10.0.0.2, metricsPort: 9465", "name: b, host: 10.0.0.2"),
         "spec.stages[1].metricsPort: port 9465 on 10.0.0.2 is taken by stage 'a'"),
        (with_stages("name: a, port: 50050", "name: b, host: 10.0.0.2"),
         "spec.stages[0].port: port 50050 is taken by the coordinator's joinPort"),
        (with_stages("name: a, gpuLayers: 3"), "spec.stages[0].gpuLayers: gpuLayers needs `device: gpu`"),
        (with_stages("name: a, layers: [1, 3]"), "no stage holds layer 0 at the start of the model; start at 0"),
        (with_stages("name: a, layers: [0, 3]", "name: b, layers: [5, 6]"),
         "no stage holds layers 3-4 after stage 'a', whose last layer is 2; start at 3"),
        (with_stages("name: a, layers: [0, 3]", "name: b, layers: [2, 6]"), "stage 'a' holds layer 2 already"),
        (with_stages("name: a, layers: [0, 3]", "name: b", "name: c, layers: [3, 6]"),
         "1 auto stage has to share 0 layers"),
        (with_stages("name: a, layers: [3, 3]"), "m.yaml:7: spec.stages[0].layers: [3, 3] holds no layer"),
        (with_stages("name: a, layers: all"), 'spec.stages[0].layers: "all" is not auto, nor a range such as [0, 16]'),
        (with_stages("name: a, host: 'box:50051'"), "is not a host name or an IP address without a port"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_in_one_line_with_its_place(text: str | bytes, line: str) -> None:
    found = refusal(text)
    assert any(line in message for message in found), found
    assert all(message.startswith("m.yaml:") and "\n" not in message for message in found)


def test_every_mistake_of_a_file_is_reported_in_order() -> None:
    found = refusal(SMALLEST + "  context: {lanes: x}\n  wire: {dtype: f64}\n  stges: 3\n")
    assert [line.split(":")[1] for line in found] == ["6", "7", "8"]


def test_a_long_list_of_mistakes_is_shortened() -> None:
    found = refusal(SMALLEST + "".join(f"  key{index}: 1\n" for index in range(100)))
    assert len(found) == COMPLAINTS_MAX + 1
    assert found[-1] == "m.yaml: 80 more mistakes"


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(9)),
        "a: &a [*a]\n",
        "[" * 5_000,
        "{a: " * 5_000,
        "- " * 5_000 + "x",
        "x: " + "[" * (DEPTH_MAX + 5) + "]" * (DEPTH_MAX + 5),
        "a:\n" + "- x\n" * (NODES_MAX + 1),
        "#" * (TEXT_BYTES_MAX + 1),
    ],
    ids=["bomb", "itself", "brackets", "braces", "dashes", "deep", "many", "long"],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(text: str) -> None:
    assert len(refusal(text)) == 1


def test_a_model_in_place_of_a_manifest_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(300_000))
    with pytest.raises(ManifestError, match=r"is a model, not a manifest; `relayline init --model"):
        load_manifest(path)


# --- text and values --------------------------------------------------------------------------------------------------


def test_every_setting_with_a_form_is_drawn_in_that_form() -> None:
    with_form = {entry.place.rpartition(".")[2] for table in TABLES for entry in entries(table) if entry.form}
    assert with_form == FORMS.keys()


@settings(max_examples=thinned(60), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(manifest=manifests())
def test_written_and_read_back_it_is_the_same(manifest: Manifest) -> None:
    text = dump_manifest(manifest)
    assert parsed(text) == manifest
    assert dump_manifest(parsed(text)) == text


@settings(max_examples=thinned(100), suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), path=st.sampled_from(EXAMPLES))
def test_mutated_text_is_read_or_refused(data: st.DataObject, path: Path) -> None:
    text = bytearray(path.read_bytes())
    pieces = st.one_of(st.binary(max_size=4), st.sampled_from(SPLICES))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        end = min(len(text), start + data.draw(st.integers(0, 12)))
        text[start:end] = data.draw(pieces)
    assert all(line.startswith("m.yaml:") and "\n" not in line for line in complaints(bytes(text)))


NAMES = st.text(max_size=8) | st.sampled_from(KEYS)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=thinned(80))
@given(metadata=VALUES, spec=VALUES)
def test_any_values_are_read_or_refused(metadata: object, spec: object) -> None:
    text = json.dumps({"apiVersion": API_VERSION, "kind": "Pipeline", "metadata": metadata, "spec": spec})
    assert all(line.startswith("m.yaml:1: ") and "\n" not in line for line in complaints(text.encode()))


@settings(max_examples=thinned(100))
@given(data=st.binary(max_size=200))
@example(b"\xef\xbb\xbf" + SMALLEST.encode())
@example(b"a: \xc2\x85")
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    assert all(line.startswith("m.yaml:") for line in complaints(data))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_read(path: Path) -> None:
    manifest = load_manifest(path)
    assert parsed(dump_manifest(manifest)).spec == manifest.spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_json_without_a_mistake_says_the_same_and_takes_no_yaml(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, text = parsed(path.read_text()), json.dumps(read_document(path.read_bytes()).value)
    monkeypatch.delattr(load, "read_document")
    assert parsed(text) == manifest


def test_json_with_a_key_given_twice_is_refused() -> None:
    value = json.dumps(read_document(SMALLEST.encode()).value)
    assert "'kind' is given twice; first in line 1" in refusal(value[:-1] + ', "kind": "Pipeline"}')[0]


# --- the schema -------------------------------------------------------------------------------------------------------


def test_the_published_schema_is_in_step() -> None:
    assert SCHEMA_FILE.read_text() == schema_text(), "run python -m relayline.deploy.manifest.schema"


def check_jsonschema(*arguments: str | Path) -> Result:
    """Does the work of the command `check-jsonschema`, without a process that imports it again."""
    return CliRunner().invoke(check_jsonschema_command, [*map(str, arguments)])


def test_the_schema_is_a_schema_and_the_examples_follow_it() -> None:
    assert check_jsonschema("--check-metaschema", SCHEMA_FILE).exit_code == 0
    done = check_jsonschema("--schemafile", SCHEMA_FILE, *EXAMPLES)
    assert done.exit_code == 0, done.output


def test_the_schema_refuses_the_same_as_the_reader(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    spec = ("contxt: {}", "stages: 0", "batching: {draft: 32}")
    for text in (*(f"{SMALLEST}  {part}\n" for part in spec), SMALLEST.replace("small", "Small")):
        wrong.write_text(text)
        assert refusal(text)
        assert check_jsonschema("--schemafile", SCHEMA_FILE, wrong).exit_code == 1


def test_every_field_is_described() -> None:
    schema, gateway = json.loads(schema_text()), json.loads(schema_text(GatewayManifest))
    parts = {"Manifest": schema, "GatewayManifest": gateway} | schema["$defs"] | gateway["$defs"]
    silent = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, field in part.get("properties", {}).items()
        if not field.get("description")
    ]
    assert silent == []
    direct = Part.__subclasses__()
    below = [inner for part in direct for inner in part.__subclasses__()]
    assert len(parts) == len([*direct, *below]) - len([part for part in direct if part.__subclasses__()])


def test_a_manifest_offers_exactly_what_the_engine_supports() -> None:
    assert set(typing.get_args(Context.model_fields["kv_type"].annotation)) == set(KV_TYPES)
    assert set(typing.get_args(Context.model_fields["kv_layout"].annotation)) == set(KV_LAYOUTS)
    assert Stage(name="a").gpu_layers_used == 0
    assert Stage(name="a", device="gpu").gpu_layers_used == -1
    assert Stage(name="a", device="gpu", gpu_layers=3).gpu_layers_used == 3
