"""The page at `/`: which clients get it, what it may do, and its requests while it is open.

tests/end_to_end/test_page_in_browser.py opens it in a real Chromium.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import tomllib
from pathlib import Path

import pytest

from relayline.coordinator.gateway.page import gateway_page
from relayline.coordinator.http import live
from relayline.coordinator.http.page import FILES_DIR, read_files
from relayline.coordinator.text.tokenizer import Tokenizer
from tests.support.http_support import MODEL, Gate
from tests.support.page_support import served

ROOT = Path(__file__).parents[3]
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
KEY = "a-key-of-sixteen-chars"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEY)
    path.chmod(0o600)
    return path


def test_scripts_import_what_they_call() -> None:
    """Only the part of a page that is drawn would notice a missing one."""
    shared = set(re.findall(r"^export (?:async )?function (\w+)", (FILES_DIR / "dom.js").read_text(), re.MULTILINE))
    assert {"h", "plural"} <= shared
    for path in sorted(FILES_DIR.glob("*.js")):
        text = path.read_text()
        known = {*re.findall(r"(?:function|const|let) (\w+)", text)}
        known.update(*(re.findall(r"\w+", names) for names in re.findall(r"import \{([^}]*)\}", text)))
        assert {*re.findall(r"(?<![.\w])(\w+)\(", text)} & shared - known == set(), path.name


# --- files ------------------------------------------------------------------------------------------------------------


async def test_a_browser_gets_the_page_and_others_get_the_apis_address(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        status, headers, body = await world.get("/", **HTML)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert body == (FILES_DIR / "index.html").read_bytes()
        for accept in ("*/*", "application/json"):
            status, headers, body = await world.get("/", Accept=accept)
            assert (status, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
            assert b"/v1" in body
            assert "Accept" in headers["Vary"]
        status, headers, body = await world.get("/", "HEAD", **HTML)
        assert (status, body) == (200, b"")
        assert (await world.get("/page/nothing.js"))[0] == 404
        assert (await world.get("/page/../app.py"))[0] == 404
        assert (await world.get("/", "POST"))[0] == 405


async def test_every_file_is_locked_down_and_kept_by_its_tag(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        for path, file in read_files().items():
            status, headers, body = await world.get(path, **HTML)
            assert (status, body) == (200, file.body), path
            rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
            assert rules["default-src"] == "'none'"
            assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
            assert rules["img-src"] == "'self' blob:"
            assert rules["frame-ancestors"] == rules["base-uri"] == "'none'"
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-cache"
            tag = headers["ETag"]
            status, headers, body = await world.get(path, **HTML, **{"If-None-Match": tag})
            assert (status, body, headers["ETag"]) == (304, b"", tag)
            assert (await world.get(path, **HTML, **{"If-None-Match": '"other"'}))[0] == 200
            status, headers, body = await world.get(path, **HTML, **{"Accept-Encoding": "gzip, br"})
            assert headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(body) == file.body


def test_the_page_fits_its_bound_and_asks_nobody_else() -> None:
    files = read_files()
    assert sum(len(file.body) for file in files.values()) < 300_000, "of all files together, as sent"
    asked: set[str] = set()
    for html in (files["/"].body.decode(), gateway_page(()).decode()):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", html), (
            "content that the policy would refuse"
        )
        asked |= {f"/{path}" for path in re.findall(r'(?:src|href)="(page/[^"]*)"', html)}
        assert not re.search(r'(?:src|href)="/', html), "behind a gateway the page is below /pipelines/NAME/"
    for path, file in files.items():
        text = file.body.decode()
        if path.endswith(".js"):
            asked |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
            assert not re.search(r'fetch\(\s*["`]https?:', text)
        assert not re.search(r"url\(\s*['\"]?https?:|@import", text), path
    assert asked == files.keys() - {"/"}, "each file is used, and each that is used is there"


def test_the_wheel_carries_the_page() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = listed["relayline.coordinator.http"]
    carried = {path.name for pattern in patterns for path in FILES_DIR.parent.glob(pattern)}
    assert carried == {path.name for path in FILES_DIR.iterdir()}


# --- keys and strangers -----------------------------------------------------------------------------------------------


async def test_the_page_loads_without_a_key_and_shows_nothing_without_one(tokenizer: Tokenizer, keys: Path) -> None:
    async with served(tokenizer, keys) as world:
        for path in read_files():
            assert (await world.get(path, **HTML))[0] == 200
        for path in ("/v1/pipeline/live", "/v1/pipeline/plan", "/v1/traces/last"):
            assert (await world.get(path))[0] == 401
            assert (await world.get(path, Authorization="Bearer wrong-wrong-wrong"))[0] == 401
        assert world.generator.n_asked == 0
        assert (await world.get("/v1/pipeline/live", Authorization=f"Bearer {KEY}"))[0] == 200
        assert MODEL.encode() not in (await world.get("/"))[2]


async def test_without_keys_the_page_may_ask_and_pages_of_others_may_not(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        assert (await world.get("/v1/pipeline/live", Origin=world.url))[0] == 200
        for stranger in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert (await world.get("/", **HTML, **stranger))[0] == 403
            assert (await world.get("/v1/pipeline/live", **stranger))[0] == 403


# --- looks ------------------------------------------------------------------------------------------------------------


async def test_steps_come_by_number_and_nobody_looks_while_no_page_is_open(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LOOK_EVERY_S", 0.0)
    async with served(tokenizer) as world:
        assert (world.generator.n_asked, world.stage.asked) == (0, [])
        first = await world.look()
        assert [step[1] for step in first["looks"][0][4]] == [1, 2, 3]
        assert first["facts"]["model_id"] == MODEL
        assert "/v1/chat/completions" in first["facts"]["routes"]
        world.stage.n_steps = 5
        second = await world.look(first["look"])
        (look,) = second["looks"]
        assert [step[1] for step in look[4]] == [4, 5]
        assert world.stage.asked[1] == ((), 3, world.stage.asked[0][2]), "all sessions, after the step seen last"
        assert second["state"]["stages"][0]["round_trip_ms"] == 2.0
        assert world.stage.n_beats == 1, "a round trip is measured now and then"
        assert [step[1] for each in (await world.look(second["look"]))["looks"] for step in each[4]] == []
        assert len(world.stage.asked) == 2, "a stage that has no new step is not asked for them"
        world.facts["join"] = "box:50050"
        assert (await world.look())["facts"]["join"] == "box:50050"


async def test_pages_that_ask_together_share_a_look(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        world.stage.gate = gate = Gate()
        pages = [asyncio.create_task(world.look()) for _ in range(5)]
        await gate.reached.wait()
        pages[0].cancel()  # a page that is closed takes no look with it
        gate.opened.set()
        found = await asyncio.gather(*pages[1:])
        assert [each["look"] for each in found] == [1] * 4
        assert (await world.look(1))["look"] == 1, "the time for the next has not come"
        assert (world.generator.n_asked, len(world.stage.asked), world.stage.n_beats) == (1, 1, 1)


@pytest.mark.parametrize("after", ["-1", "x", "1.0", "²", "9" * 16, ""])
async def test_a_bad_look_number_is_refused(tokenizer: Tokenizer, after: str) -> None:
    async with served(tokenizer) as world:
        status, _, body = await world.get(f"/v1/pipeline/live?after={after}")
        assert status == 400
        assert json.loads(body)["error"]["param"] == "after"
        assert world.generator.n_asked == 0


async def test_a_server_that_ends_takes_its_look_along(tokenizer: Tokenizer) -> None:
    async with served(tokenizer) as world:
        world.stage.gate = gate = Gate()
        page = asyncio.create_task(world.look())
        await gate.reached.wait()
        page.cancel()
    await asyncio.gather(page, return_exceptions=True)  # that no task is left is checked after every test


async def test_plans_count_with_all_rows_that_a_stage_takes_at_once(tokenizer: Tokenizer) -> None:
    """Its curve ends at eight rows."""
    for max_rows, shown in ((8, ["1", "8"]), (512, ["1", "8", "32"])):
        async with served(tokenizer) as world:
            world.stage.max_rows = max_rows
            plan = json.loads((await world.get("/v1/pipeline/plan"))[2])
            assert list(plan["stages"][0]["step_ms"]) == shown


async def test_plans_come_from_the_stages_measurements(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PLAN_EVERY_S", 3_600.0)  # a busy host takes seconds for what follows
    async with served(tokenizer) as world:
        status, _, body = await world.get("/v1/pipeline/plan")
        plan = json.loads(body)
        assert status == 200
        assert plan["is_known"]
        names = [each["name"] for each in plan["plans"]]
        assert names == ["as it runs", "16 lanes", "every lane full: 64 tokens", "one more machine like stage 0's"]
        assert plan["streams"] == [1, 8, 16]
        assert all(rate > 0 for each in plan["plans"] for rate in each["tokens_per_s"])
        assert (await world.get("/v1/pipeline/plan"))[2] == body
        assert world.generator.n_asked == 1, "planned once for some seconds"
