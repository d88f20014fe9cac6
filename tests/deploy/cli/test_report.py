"""`relayline report`: one file that needs no server and holds everything that the page requests."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from relayline.coordinator.http import live
from relayline.coordinator.http.page import FILES_DIR
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.cli import report
from relayline.deploy.testing.vocabulary_files import write_tokenizer
from relayline.wire.common.errors import StartError
from tests.support.page_support import served


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer.gguf"))


async def test_a_report_holds_all_that_the_page_requests(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(report, "LOOK_WAIT_S", 0.0)
    async with served(tokenizer) as world, aiohttp.ClientSession(world.url) as session:
        ids = []
        for name in ("one", "two"):
            async with session.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": name}) as reply:
                ids.append((await reply.json())["id"])
        answers, aliases = await report.collect(world.url, "", 60.0)
        assert answers.keys() == {report.LIVE, report.PLAN, *map(report.trace_path, ids)}
        assert len(answers[report.LIVE]["looks"]) == 2, "rates are of the time between two"
        assert aliases[report.trace_path("one")] == report.trace_path(ids[0])
        monkeypatch.setattr(report, "TRACES_BYTES_MAX", len(json.dumps(answers[report.trace_path(ids[1])])))
        answers, _ = await report.collect(world.url, "", 60.0)
        assert [path for path in answers if path.startswith("/v1/traces/")] == [report.trace_path(ids[1])], "the latest"
        answers, _ = await report.collect(world.url, "", -1.0)
        assert answers.keys() == {report.LIVE, report.PLAN}, "none that ended before"


def test_the_file_is_self_contained() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    text = report.document({"/v1/traces/a": {"error": hostile}}, {"/v1/traces/b": "/v1/traces/a"})
    assert hostile not in text
    assert not re.search(r'(?:src|href)="/', text.split("<body>", 1)[0])
    (kept,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', text, re.DOTALL)
    assert json.loads(kept)["answers"] == {"/v1/traces/a": {"error": hostile}}
    (modules,) = re.findall(r'<script type="importmap">(.*?)</script>', text, re.DOTALL)
    named = json.loads(modules)["imports"]
    assert named.keys() == {f"page/{path.stem}" for path in FILES_DIR.glob("*.js")}
    assert "default-src 'none'" in text


@pytest.mark.parametrize("given", ["cmpl-a-0", "mine/yours?x", "ü &"])
def test_paths_are_those_that_the_page_asks_for(given: str) -> None:
    assert report.trace_path("a b/c'(d)!*~") == "/v1/traces/a%20b%2Fc'(d)!*~", "as encodeURIComponent has it"
    assert "/" not in report.trace_path(given).removeprefix("/v1/traces/")


async def test_no_report_is_made_without_a_coordinator(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        with pytest.raises(StartError, match="not served by a relayline coordinator"):
            await report.collect(f"{world.url}/v1/models?", "", 1.0)


def test_a_coordinator_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = CliRunner().invoke(report.report_command, ["--url", "http://127.0.0.1:9", "--out", str(out)])
    assert isinstance(result.exception, StartError)
    assert not out.exists()
