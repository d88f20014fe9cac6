"""Everything that the documents name exists: pages and headings behind links, files, commands and flags, targets,
modules.

`make docs` checks links inside docs/ too; these tests also look at README.md and the other pages outside of it.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from relayline.deploy.cli.main import relayline
from relayline.deploy.testing.paths import ROOT

README = ROOT / "README.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "deploy").rglob("*.md")),
    ROOT / "benches" / "RESULTS.md",
]
README_LINES_MAX = 120
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
COLUMNS_MAX = 130
FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOLDERS = "proto|wire|stage|coordinator|deploy|tests|benches|docs"
PATH = re.compile(rf"`((?:{FOLDERS})/[\w./*-]*)`")
TOPS = ("wire", "stage", "coordinator", "deploy")
FLAG = re.compile(r"--[a-z][a-z-]*")
# These pages also name words of docker, of llama.cpp's programs, of gdb and of benches.
FLAGS_OF_OTHERS = {
    "--build-arg",
    "--parallel",
    "--profile",
    "--args",
    "--spans",
    "--models-max",
    "--models-dir",
    "--reranking",
}
HISTORY = "CHANGELOG.md"  # names things as they were then
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def spans(page: Path) -> list[str]:
    """Return the text of a page in code style."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def lines(page: Path) -> Iterator[str]:
    """Return every line of code: spans, and the lines of fenced blocks except output; no prompts, no comments."""
    yield from spans(page)
    for block in FENCE.findall(page.read_text()):
        if block.startswith("```text"):
            continue
        for line in block.splitlines()[1:-1]:
            yield re.split(r"\s+#\s", line.strip().removeprefix("$ "))[0]


def anchors(page: Path) -> set[str]:
    """Return the possible links into a page: to headings, as GitHub and the site generator make them, and to <a id>."""
    text = prose(page)
    headings = re.findall(r"(?m)^#+ +(.+)$", text)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    placed = re.findall(r'<a id="([a-z0-9-]+)">', text)
    return {*(re.sub(r"[ -]+", "-", heading.strip()) for heading in plain), *placed}


@functools.cache
def commands() -> dict[str, set[str]]:
    """Return "up", "certs issue", ... -> the flags that it has."""
    context = click.Context(relayline, info_name="relayline")
    found: dict[str, set[str]] = {}
    for name in relayline.list_commands(context):
        command = relayline.get_command(context, name)
        assert command is not None
        inner = command.commands if isinstance(command, click.Group) else {}
        for path, each in {name: command, **{f"{name} {part}": inner[part] for part in inner}}.items():
            found[path] = {
                option for parameter in each.params for option in (*parameter.opts, *parameter.secondary_opts)
            } | {"--help"}
    return found


def called(line: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of ours in a line of code, with the words that follow."""
    for part in re.findall(r"(?:^|[|;&] *)(?:\.venv/bin/)?relayline ([a-z].*?)(?=$| \| |;|&&)", line):
        try:
            first, *rest = shlex.split(part)
        except ValueError:
            continue  # a quotation that continues in the next line
        if rest and f"{first} {rest[0]}" in commands():
            yield f"{first} {rest[0]}", rest[1:]
        else:
            yield first, rest


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_lines_of_guides_fit_a_screen(page: Path):
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())
    wide = [n for n, line in enumerate(text.splitlines(), 1) if len(line) > COLUMNS_MAX and line[:1] != "|"]
    assert not wide, "wrap these lines; tables and fenced blocks may be wider"


@by_page
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue  # the suite needs no internet
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@by_page
def test_files_are_there(page: Path):
    if page.name == HISTORY:
        return
    missing = [path for path in PATH.findall(prose(page)) if not list(ROOT.glob(path.rstrip("/")))]
    made = {"docs/results/*.md", "benches/results/NAME.json"}  # a pattern, and one to be written
    assert set(missing) <= made


def test_every_package_is_in_the_table_of_packages():
    named = set(spans(ROOT / "docs" / "explanation" / "architecture.md"))
    packages = {path.parent.relative_to(ROOT) for top in TOPS for path in (ROOT / top).glob("*/__init__.py")}
    assert {path.as_posix() for path in packages} - named == set()


@by_page
def test_commands_have_the_flags_that_pages_give_them(page: Path):
    if page.name == HISTORY:
        return
    for line in lines(page):
        for command, rest in called(line):
            for each in command.split("|"):  # `compose|kubernetes` and `status | logs | down`
                assert each in commands(), line
                assert {flag for word in rest for flag in FLAG.findall(word)} <= commands()[each], line


@by_page
def test_flags_that_stand_alone_are_of_some_command(page: Path):
    known = FLAGS_OF_OTHERS.union(*commands().values())
    alone = [span for span in spans(page) if span.startswith("--")]
    if page.parent.name == "results" or page.name in (HISTORY, "RESULTS.md"):
        return  # of the benches, which their commands name
    assert {flag for span in alone for flag in FLAG.findall(span)} <= known


@by_page
def test_targets_and_modules_are_there(page: Path):
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    for line in lines(page):
        for words in re.findall(r"(?:^|\s)make ([a-z-]+)(?=$|\s)", line):
            assert words in targets, line
        for module in re.findall(r"python -m ((?:benches|relayline)[\w.]*)", line):
            path = ROOT / module.removeprefix("relayline.").replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), line


def test_the_checks_find_each_mistake(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, two\n\n`relayline up --no-such`\n\n```\n$ relayline certs issue DIR HOST --stage a  # x\n```\n"
    )
    assert list(lines(page)) == ["relayline up --no-such", "relayline certs issue DIR HOST --stage a"]
    assert anchors(page) == {"a-heading-two"}
    ((command, rest),) = called("relayline up --no-such")
    assert not set(rest) <= commands()[command]
    ((command, rest),) = called("relayline certs issue DIR HOST --stage a")
    assert (command, rest[-2]) == ("certs issue", "--stage")
    assert "--stage" in commands()[command]
