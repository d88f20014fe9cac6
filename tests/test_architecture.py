"""The documented architecture, checked in the source: floors, one decode module, pure cores, sizes."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import gc
import graphlib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "relayline"
# The floors of the house, lowest first: a module imports from its own floor and from those below it. A folder stands
# for all modules in it that are not named themselves.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "wire": (
        ("wire/pb", "wire/__init__.py"),
        ("wire/common",),
        ("wire/envelopes", "wire/model_files"),
        ("wire/links", "wire/telemetry"),
        ("wire/settings",),
    ),
    "stage": (
        ("stage/__init__.py", "stage/config.py", "stage/queue_types.py"),
        ("stage/engine", "stage/sampling"),
        ("stage/speed",),
        ("stage/steps",),
        ("stage/sending_back.py",),
        ("stage/observe", "stage/facts.py", "stage/routes.py"),
        ("stage/inbound.py",),
        ("stage/epochs.py", "stage/intake.py", "stage/hand_over.py"),
        ("stage/outbound.py", "stage/report.py"),
        ("stage/service.py", "stage/assembly.py"),
        ("stage/loaded_engine.py",),
        ("stage/served.py",),
        ("stage/process.py",),
        ("stage/joining",),
    ),
    "coordinator": (
        (
            "coordinator/__init__.py",
            "coordinator/model",
            "coordinator/text",
            "coordinator/relay",
            "coordinator/drafting",
            "coordinator/batches",
        ),
        ("coordinator/sessions", "coordinator/answers", "coordinator/media"),
        ("coordinator/schedule", "coordinator/observe"),
        ("coordinator/planner", "coordinator/engine"),
        ("coordinator/http/edge",),
        ("coordinator/http/requests",),
        (
            "coordinator/http/conversations/asking.py",
            "coordinator/http/embeddings/asking.py",
            "coordinator/http/rerank/asking.py",
            "coordinator/http/llama/asking.py",
            "coordinator/http/llama/settings.py",
            "coordinator/http/messages/asking.py",
            "coordinator/http/ollama/asking.py",
            "coordinator/http/responses/asking.py",
            "coordinator/http/responses/bodies.py",
            "coordinator/http/responses/items.py",
            "coordinator/http/transcriptions/asking.py",
        ),
        ("coordinator/http/workers",),
        ("coordinator/http/replies",),
        ("coordinator/http", "coordinator/joining"),
        ("coordinator/config.py", "coordinator/gateway"),
        ("coordinator/steering.py",),
        ("coordinator/serve.py",),
    ),
    "deploy": (
        ("deploy/__init__.py", "deploy/tables.py", "deploy/machine", "deploy/build", "deploy/testing"),
        ("deploy/manifest",),
        ("deploy/planning", "deploy/render"),
        ("deploy/models",),
        ("deploy/launch",),
        ("deploy/launch/gateway",),
        ("deploy/certify", "deploy/doctor"),
        ("deploy/cli",),
    ),
}
BELOW = {"wire": (), "stage": ("wire",), "coordinator": ("wire",), "deploy": ("wire", "stage", "coordinator")}
PURE_CORES = (
    "stage/sampling/draws.py",
    "stage/steps/lanes.py",
    "stage/steps/batcher.py",
    "stage/steps/policy.py",
    "stage/queue_types.py",
    "coordinator/batches/lines.py",
    "coordinator/batches/patience.py",
    "coordinator/sessions/session.py",
    "coordinator/sessions/suspects.py",
    "coordinator/schedule/tiles.py",
    "coordinator/sessions/turnover.py",
    "coordinator/sessions/admission.py",
    "coordinator/sessions/fair_lanes.py",
    "coordinator/sessions/tenants.py",
    "coordinator/http/edge/token_rate.py",
    "coordinator/observe/usage.py",
    "coordinator/schedule/scheduler.py",
    "coordinator/schedule/plan_choice.py",
    "coordinator/schedule/pool.py",
    "coordinator/schedule/groups.py",
    "coordinator/schedule/cycles.py",
    "coordinator/schedule/prompt_mix.py",
    "coordinator/observe/overlap.py",
    "coordinator/engine/membership.py",
    "coordinator/engine/availability.py",
    "coordinator/engine/conductor.py",
    "coordinator/engine/epoch_facts.py",
    "coordinator/engine/moves.py",
    "coordinator/engine/instructions.py",
    "coordinator/sessions/frame.py",
    "coordinator/sessions/readers.py",
    "coordinator/joining/config.py",
    "coordinator/relay/config.py",
    "coordinator/joining/invitations.py",
    "coordinator/observe/observer.py",
    "coordinator/observe/targets.py",
    "coordinator/sessions/request_log.py",
    "coordinator/observe/trace_view.py",
    "coordinator/model/cuts.py",
    "coordinator/answers/calls.py",
    "coordinator/answers/grammar.py",
    "coordinator/answers/reader.py",
    "coordinator/answers/syntax.py",
    "coordinator/answers/tagged_calls.py",
    "coordinator/answers/template.py",
    "coordinator/planner/costs.py",
    "coordinator/planner/frontier.py",
    "coordinator/planner/instance.py",
    "coordinator/planner/memory.py",
    "coordinator/planner/predict.py",
    "coordinator/planner/rates.py",
    "coordinator/planner/search.py",
    "coordinator/planner/speed.py",
    "coordinator/planner/whatif.py",
    "coordinator/text/detokenize.py",
    "coordinator/http/conversations/store.py",
    "coordinator/http/workers/fair_line.py",
    "coordinator/gateway/peek.py",
    "coordinator/gateway/router.py",
    "coordinator/text/special_tokens.py",
    "stage/steps/padding.py",
    "stage/steps/grants.py",
    "coordinator/schedule/grants.py",
    "stage/observe/ring.py",
    "stage/observe/summaries.py",
    "wire/common/curve.py",
    "wire/envelopes/envelope.py",
    "wire/envelopes/frames.py",
    "wire/envelopes/rows.py",
    "wire/telemetry/config.py",
    "wire/telemetry/names.py",
    "wire/envelopes/trace_context.py",
)
IMPURE = {"asyncio", "grpc", "time", "socket", "aiohttp"}
# What a pure core may reach although it imports one of these, and why that is no I/O and no clock of the core's.
REACHED = {
    "wire/common/errors.py": "grpc's status codes, a table",
    "wire/telemetry/telemetry.py": "the tracer that a core is handed; it stamps what it writes",
    "wire/telemetry/export.py": "imported by the tracer where spans have somewhere to go",
    "wire/common/file_hash.py": "remembered hashes have an age; a pipeline's file is read before anything runs",
    "coordinator/observe/pass_traces.py": "the shell around the pure windows of `passes.py`",
}
POLLING = "tests/support/polling.py"  # one pause, for tests that look again and again
WALL_CLOCK = (
    "coordinator/http/",
    "coordinator/serve.py",
    "wire/telemetry/telemetry.py",
    "wire/common/file_hash.py",
    "stage/engine/load_attempts.py",
    "stage/engine/tier_left.py",
    "deploy/launch/process_id.py",
    "deploy/planning/known_hosts.py",
    "tests/wire/common/test_file_hash.py",
    "tests/stage/engine/test_load_attempts.py",
    "tests/stage/engine/test_tier_left.py",
)
FUNCTION_LINES_MAX = 70
CLASS_METHODS_MAX = 25
CLASS_ATTRIBUTES_MAX = 25
SENTENCE_WORDS_MAX = 40
LIST_ITEM = re.compile(r"(?:\*|\d\.) ")
COLLABORATORS_MAX = 20  # modules of ours that one module imports from
LLAMA_IN_COORDINATOR = {
    "coordinator/text/tokenizer.py",
    "coordinator/text/llama_errors.py",
    "coordinator/media/projector.py",
    "coordinator/drafting/draft_model.py",
}
DECODE_MODULE, PREDICTING_MODULE = "stage/engine/native.py", "stage/engine/prediction.py"


Node = TypeVar("Node", bound=ast.AST)
Imports = tuple[tuple[str, int], ...]  # every imported module by its full name, with its line


@dataclasses.dataclass(frozen=True)
class Module:
    """Every test asks about the same nodes, so a module is read and walked once."""

    path: str  # relative to the repository
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.path.split("/", 1)[0]

    @property
    def name(self) -> str:
        return f"{PACKAGE}." + self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @functools.cached_property
    def _nodes(self) -> dict[type[ast.AST], list[ast.AST]]:
        found: dict[type[ast.AST], list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            found.setdefault(type(node), []).append(node)
        return found

    def nodes(self, *kinds: type[Node]) -> Iterator[Node]:
        """Every node of these kinds, wherever it is."""
        for kind in kinds:
            for node in self._nodes.get(kind, ()):
                assert isinstance(node, kind)
                yield node

    @functools.cached_property
    def imports(self) -> Imports:
        return tuple(imports_of(self.tree))

    @functools.cached_property
    def imports_at_run_time(self) -> Imports:
        return tuple(imports_of(_without_types(self.tree)))


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every hand-written module of the packages and of the tests."""
    found = []
    gc.disable()  # a million nodes that stay: searching them for garbage takes three times as long as parsing
    try:
        for package in (*FLOORS, "tests"):
            for path in sorted((ROOT / package).rglob("*.py")):
                name = path.relative_to(ROOT).as_posix()
                if name.startswith("wire/pb/") or "/demo/" in name:
                    continue
                found.append(Module(name, ast.parse(path.read_text())))
    finally:
        gc.freeze()
        gc.enable()
    return tuple(found)


@pytest.fixture(scope="module", autouse=True)
def forgotten_at_the_end() -> Iterator[None]:
    """The tests that follow in this process are not slowed by what these read."""
    yield
    for table in (modules, product, by_name, _by_path, ours_at_run_time):
        table.cache_clear()


@functools.cache
def product() -> tuple[Module, ...]:
    return tuple(module for module in modules() if module.package != "tests")


@functools.cache
def by_name() -> Mapping[str, Module]:
    return {module.name: module for module in product()}


def imports_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module by its full name, wherever the import is, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def ours(module: Module, imports: Imports | None = None) -> dict[str, int]:
    """Modules of the packages that one module imports from, by path, with a line. Not the __init__ on their way."""
    found: dict[str, int] = {}
    for name, line in module.imports if imports is None else imports:
        known = by_name().get(name)
        if known is not None and known.path != module.path and not known.path.endswith("/__init__.py"):
            found[known.path] = line
    return found


def floor_of(path: str) -> tuple[str, int]:
    """The package and the floor of a module; the longest entry of the table that holds it decides."""
    package = path.split("/", 1)[0]
    fits = [
        (len(entry), number)
        for number, entries in enumerate(FLOORS[package])
        for entry in entries
        if path == entry or path.startswith(entry + "/")
    ]
    assert fits, f"{path} stands on no floor"
    return package, max(fits)[1]


def calls_of(module: Module, *names: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a function with one of these dotted names."""
    last = {name.rpartition(".")[2] for name in names}
    for node in module.nodes(ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in last:  # to write every call as text takes long
            name = ast.unparse(node.func)
            if name in names:
                yield name, node


def test_the_modules_are_found() -> None:
    assert {module.package for module in modules()} == {*FLOORS, "tests"}
    named = {*PURE_CORES, *LLAMA_IN_COORDINATOR, *REACHED, DECODE_MODULE, PREDICTING_MODULE}
    assert named <= {module.path for module in modules()}


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {module.path.rpartition("/")[0].replace("/", ".") for module in product()}
    # run from a checkout only
    assert {f"{PACKAGE}.{folder}" for folder in folders} - {*listed} == {f"{PACKAGE}.deploy.build"}


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_down(package: str) -> None:
    wrong = []
    for module in product():
        if module.package != package:
            continue
        _, floor = floor_of(module.path)
        for path, line in ours(module).items():
            other, below = floor_of(path)
            if other not in (package, *BELOW[package]) or (other == package and below > floor):
                wrong.append(f"{module.path}:{line} imports {path}")
        wrong += [
            f"{module.path}:{line} imports {name}"
            for name, line in module.imports
            if name.split(".")[0] in {"tests", "benches", *FLOORS}
        ]
    assert wrong == []


def test_benches_do_not_import_tests() -> None:
    """Code that both need is in deploy/testing."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "benches").rglob("*.py"))
        for name, line in imports_of(ast.parse(path.read_text()))
        if name.split(".")[0] == "tests"
    ]
    assert wrong == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by these names alone, so a second file of one name ends a run of both."""
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, n_files in names.items() if n_files > 1] == []


def test_tests_of_the_product_do_not_import_benches() -> None:
    wrong = [
        f"{module.path}:{line} imports {name}"
        for module in modules()
        if module.package == "tests" and not module.path.startswith("tests/benches/")
        for name, line in module.imports
        if name.split(".")[0] == "benches"
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {module.path: set(ours_at_run_time(module.path)) for module in product()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle in its text


def test_only_one_module_decodes() -> None:
    users = {
        module.path
        for module in product()
        for node in module.nodes(ast.Attribute, ast.Name)
        if (isinstance(node, ast.Attribute) and node.attr in ("llama_decode", "llama_encode"))
        or (isinstance(node, ast.Name) and node.id in ("llama_decode", "llama_encode"))
        if module.package == "stage"
    }
    assert users == {DECODE_MODULE, PREDICTING_MODULE}, "steps, and their guesses"


def test_the_coordinator_meets_llama_cpp_in_text_projector_and_draft_model_only() -> None:
    users = {
        module.path
        for module in product()
        if module.package == "coordinator"
        for name, _ in module.imports
        if name.split(".")[0] == "llama_cpp"
    }
    assert users == LLAMA_IN_COORDINATOR


def test_the_wire_knows_no_model() -> None:
    users = {
        module.path
        for module in product()
        if module.package == "wire"
        for name, _ in module.imports
        if name.split(".")[0] in ("llama_cpp", "gguf", "aiohttp")
    }
    assert users == set()


def reached_from(module: Module) -> dict[str, str]:
    """Every module of ours that an import reaches from here, with the one it was reached from."""
    found: dict[str, str] = {}
    todo = [module]
    while todo:
        here = todo.pop()
        for path in ours_at_run_time(here.path):
            if path not in found and path != module.path:
                found[path] = here.path
                todo.append(_by_path()[path])
    return found


@functools.cache
def _by_path() -> Mapping[str, Module]:
    return {module.path: module for module in product()}


@functools.cache
def ours_at_run_time(path: str) -> tuple[str, ...]:
    module = _by_path()[path]
    return tuple(ours(module, module.imports_at_run_time))


def _without_types(tree: ast.Module) -> ast.Module:
    """The module without the imports under `if TYPE_CHECKING:`, which no running program imports."""
    body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(body, [])


@pytest.mark.parametrize("path", PURE_CORES)
def test_pure_cores_do_no_io_and_read_no_clock(path: str) -> None:
    module = _by_path()[path]
    wrong = [f"{name} in line {line}" for name, line in module.imports if name.split(".")[0] in IMPURE]
    wrong += [f"await in line {node.lineno}" for node in module.nodes(ast.Await)]
    for other, through in reached_from(module).items():
        names = {name.split(".")[0] for name, _ in _by_path()[other].imports_at_run_time}
        if names & IMPURE and other not in REACHED:
            wrong.append(f"{', '.join(sorted(names & IMPURE))} by way of {other}, imported by {through}")
    assert wrong == []


def test_nobody_sleeps_and_nobody_reads_the_wall_clock() -> None:
    """Waiting is for events; durations come from the monotonic clock.

    A turn of the loop (sleep of 0) is no sleep. The HTTP side may give the time of day, because the OpenAI API shows
    it; so may telemetry, because spans carry it. Values remembered in files have an age that outlives processes and
    boots.
    """
    wrong = [
        f"{module.path}:{node.lineno} {name}"
        for module in modules()
        for name, node in calls_of(module, "time.sleep", "time.time", "time.time_ns")
        if name == "time.sleep" or not module.path.startswith(WALL_CLOCK)
    ]
    wrong += [
        f"{module.path}:{node.lineno} {name}"
        for module in modules()
        if module.package == "tests" and module.path != POLLING
        for name, node in calls_of(module, "asyncio.sleep")
        if ast.unparse(node.args[0]) != "0"
    ]
    assert wrong == []


GONE_MODULES = frozenset({
    "asynchat", "asyncore", "aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "imghdr", "imp",
    "lib2to3", "mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau",
    "telnetlib", "uu", "xdrlib",
})  # fmt: skip
GOING_NAMES = frozenset({
    "ast.Bytes", "ast.NameConstant", "ast.Num", "ast.Str", "asyncio.get_event_loop", "asyncio.get_event_loop_policy",
    "asyncio.iscoroutinefunction", "asyncio.set_event_loop_policy", "codecs.open", "collections.abc.ByteString",
    "datetime.datetime.utcfromtimestamp", "datetime.datetime.utcnow", "locale.getdefaultlocale", "pkgutil.find_loader",
    "pkgutil.get_loader", "tempfile.mktemp", "typing.ByteString", "uvloop.install",
})  # fmt: skip


def test_nobody_uses_what_a_later_python_has_dropped_or_warns_of() -> None:
    """The suite runs on one Python, and users have others. `ruff` looks for syntax that is too new for the oldest."""
    last = {name.rpartition(".")[2] for name in GOING_NAMES}
    wrong = [
        f"{module.path}:{line} {name}"
        for module in modules()
        for name, line in module.imports
        if name.partition(".")[0] in GONE_MODULES or name in GOING_NAMES
    ]
    wrong += [
        f"{module.path}:{node.lineno} {ast.unparse(node)}"
        for module in modules()
        for node in module.nodes(ast.Attribute)
        if node.attr in last and ast.unparse(node) in GOING_NAMES
    ]
    assert wrong == []


def test_functions_are_short() -> None:
    wrong = [
        f"{module.path}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for module in modules()
        for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    ]
    assert wrong == []


def _size_of(node: ast.ClassDef) -> tuple[int, int]:
    """Methods and attributes: those in the class body, and those that its methods set on self."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    attributes = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    attributes |= {
        item.attr
        for method in methods
        for item in ast.walk(method)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if isinstance(item.value, ast.Name) and item.value.id == "self"
    }
    return len(methods), len(attributes)


def test_classes_are_small() -> None:
    """A table of fields, such as a request body, is not counted: it has no methods that share them."""
    sizes = {
        f"{module.path}:{node.name}": _size_of(node) for module in product() for node in module.nodes(ast.ClassDef)
    }
    wrong = []
    for name, (n_methods, n_attributes) in sizes.items():
        if n_methods > CLASS_METHODS_MAX or (n_methods > 4 and n_attributes > CLASS_ATTRIBUTES_MAX):
            wrong.append(f"{name} has {n_methods} methods, {n_attributes} attributes")
    assert wrong == []


def test_modules_have_few_collaborators() -> None:
    wrong = [
        f"{module.path} imports from {len(found)} modules of ours"
        for module in product()
        if len(found := ours(module)) > COLLABORATORS_MAX
    ]
    assert wrong == []


def test_public_things_are_documented() -> None:
    """Ruff checks functions and classes; modules say what they are for."""
    silent = [
        module.path
        for module in product()
        if module.tree.body and not ast.get_docstring(module.tree) and not module.path.endswith("__init__.py")
    ]
    assert silent == []


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Every docstring of a module, of fields too, with its line."""
    for node in module.nodes(ast.Expr):
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, inspect.cleandoc(node.value.value)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a docstring's paragraphs and list items; blocks that are set in stand for themselves."""
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_set_in, is_item = line.startswith("    "), LIST_ITEM.match(line.lstrip()) is not None
        if not line.strip() or is_item or is_set_in:
            yield from re.split(r"(?<=[.!?]) +", " ".join(paragraph))
            paragraph = []
        if not is_set_in:
            paragraph.append(line.strip())


def broken_items(text: str) -> Iterator[str]:
    """Lines of a list that go on at the margin, or begin a further item in their middle."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        margin = len(line) - len(line.lstrip())
        is_item, goes_on = LIST_ITEM.match(line.lstrip()), following.strip() and not LIST_ITEM.match(following.lstrip())
        if is_item and goes_on and len(following) - len(following.lstrip()) <= margin:
            yield following
        if re.search(r"[.:] \* [A-Z`]", line):
            yield line


def test_docstrings_have_short_sentences_and_whole_lists() -> None:
    wrong = []
    for module in modules():
        for line, text in docstrings(module):
            wrong += [f"{module.path}:{line} {each}" for each in broken_items(text)]
            wrong += [
                f"{module.path}:{line} {each}" for each in sentences(text) if len(each.split()) > SENTENCE_WORDS_MAX
            ]
    assert wrong == []


def test_the_check_of_docstrings_finds_each_mistake() -> None:
    long = " ".join(["word"] * (SENTENCE_WORDS_MAX + 1)) + "."
    assert [each for each in sentences(f"Short. {long}\n\n    a block {long}\n* item") if each] == [
        "Short.",
        long,
        "* item",
    ]
    assert list(broken_items("* one\ngoes on\n* two\n  goes on\nAll: * Three")) == ["goes on", "All: * Three"]
