"""Goal: two teams share a pipeline of real processes: one's batch job does not make the other wait for all of it.

Method: one key fills both lanes and has 22 requests in line when the other key's request comes. First come, first
served would answer it last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relayline.deploy.testing.paths import DEMO_MODEL as DEMO
from relayline.deploy.testing.processes import child_running, relayline, running
from tests.support.polling import pause

pytestmark = pytest.mark.slow  # real processes

BATCH, ALICE = "batch-key-0123456789", "alice-key-0123456789"
N_LANES, N_BATCH, WAIT_S = 2, 24, 120


async def ask(session: aiohttp.ClientSession, key: str, seed: int, n_tokens: int = 30) -> str:
    """Returns the answer's id."""
    body = {"prompt": [5 + seed, 7, 9], "max_tokens": n_tokens, "seed": seed, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post("/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        return str((await answer.json())["id"])


async def usage(session: aiohttp.ClientSession) -> dict[str, dict[str, Any]]:
    async with session.get("/v1/usage", headers={"Authorization": f"Bearer {ALICE}"}) as answer:
        return {key["name"]: key for key in (await answer.json())["data"]}


async def until_waiting(session: aiohttp.ClientSession, name: str, n_waiting: int) -> None:
    while (await usage(session)).get(name, {}).get("waiting") != n_waiting:
        await pause()


async def begun_ms(session: aiohttp.ClientSession) -> dict[str, float]:
    """When each request got its lane, as the coordinator says: a busy client hears of it late."""
    while True:
        async with session.get("/v1/pipeline/live", headers={"Authorization": f"Bearer {ALICE}"}) as answer:
            requests = (await answer.json())["state"]["requests"]
        if len(requests) == N_BATCH + 1 and {each["state"] for each in requests} == {"done"}:
            return {each["id"]: each["came_unix_ms"] + each["queue_ms"] for each in requests}
        await pause()


async def share(url: str, stage: int) -> None:
    async with asyncio.timeout(WAIT_S), aiohttp.ClientSession(url) as session:
        os.kill(stage, signal.SIGSTOP)  # none of them is answered before all have come
        try:
            asking = [asyncio.create_task(ask(session, BATCH, seed)) for seed in range(N_BATCH)]
            await until_waiting(session, "batch", N_BATCH - N_LANES)
            alone = asyncio.create_task(ask(session, ALICE, 99))
            await until_waiting(session, "alice", 1)
        finally:
            os.kill(stage, signal.SIGCONT)
        alice, ids = await alone, await asyncio.gather(*asking)
        begun = await begun_ms(session)
        assert sum(begun[id] > begun[alice] for id in ids) >= N_BATCH // 2
        found = await usage(session)
    assert {name: (key["requests"], key["completion_tokens"]) for name, key in found.items()} == {
        "alice": (1, 30),
        "batch": (N_BATCH, N_BATCH * 30),
    }


def test_a_batch_job_leaves_lanes_to_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"batch: {BATCH}\nalice: {ALICE}\n")
    keys.chmod(0o600)
    with running("up", "--model", DEMO, "--stages", "2", "--split-dir", tmp_path / "split", "--http", "127.0.0.1:0",
                 "--json", "--ctx", "128", "--lanes", str(N_LANES), "--threads", "1", "--no-calibrate",
                 "--api-keys", keys) as process:  # fmt: skip
        url = process.event["url"]
        asyncio.run(share(url, child_running(process.process.pid, "stage-0")))
        shown = relayline("top", "--once", "--interval", "0.2", "--url", url, "--api-key", ALICE)
        assert shown.returncode == 0, shown.stderr
        (row,) = [line.split() for line in shown.stdout.splitlines() if line.startswith("batch")]
        assert row[1:4] == ["0", "0", str(N_BATCH)]


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"batch: {BATCH} share=all\n")
    done = relayline("up", "--model", DEMO, "--stages", "2", "--http", "127.0.0.1:0", "--api-keys", keys)
    assert done.returncode == 2
    assert f"{keys}:1: share: expected `int`, got `str`" in done.stderr
    assert "Traceback" not in done.stderr
    assert BATCH not in done.stderr
