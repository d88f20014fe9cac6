"""The benches as processes: the delaying proxy, rivals that cannot be built, quick runs, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benches import peers
from benches.hop import PARTS
from benches.proxy import delayed


async def test_proxy_holds_bytes_back_in_both_directions_without_throttling() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
        writer.close()

    delay_s, n_messages = 0.05, 400  # one after another they would take 20 s
    loop = asyncio.get_running_loop()
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, delayed([f"127.0.0.1:{server.sockets[0].getsockname()[1]}"], delay_s) as (proxy,):
        host, _, port = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent_s = loop.time()
        for index in range(n_messages):  # all under way at once: the whole takes one round trip, not 400
            writer.write(index.to_bytes(4, "big"))
            await writer.drain()
        answer = await reader.readexactly(4 * n_messages)
        took_s = loop.time() - sent_s
        assert answer == b"".join(index.to_bytes(4, "big") for index in range(n_messages))
        assert 2 * delay_s <= took_s < n_messages * delay_s
        assert proxy.mean_delay_s >= delay_s
        writer.write_eof()
        assert await reader.read() == b""  # the end of a stream passes too
        writer.close()
        await writer.wait_closed()


async def test_proxy_before_a_server_that_is_gone_closes_the_connection() -> None:
    async with delayed(["127.0.0.1:1"], 0.0) as (proxy,):
        host, _, port = proxy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


def test_peers_say_in_one_line_why_they_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert peers.find_peers() is None
    with pytest.raises(peers.PeersUnavailableError, match="cmake was not found"):
        peers.build_peers(1)
    (tmp_path / "relayline" / f"peers-{peers.pinned_version()}" / "bin").mkdir(parents=True)
    assert peers.find_peers() is None  # a directory without the programs is no build


def test_a_smoke_run_goes_on_without_peers_that_cannot_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["peers", "--if-possible"])
    peers.main()
    assert capsys.readouterr() == (
        "",
        "note: peers: cmake was not found; install cmake to build llama.cpp's programs\n",
    )
    monkeypatch.setattr(sys, "argv", ["peers"])
    with pytest.raises(SystemExit, match="peers: cmake was not found"):
        peers.main()


@pytest.mark.bench
@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (("benches.hop", "--quick", "--steps", "20", "--width", "64"), "hop.json"),
        (("benches.contexts", "--quick", "--contexts", "16", "--lanes", "2"), "contexts.json"),
        (("benches.cliffs", "--quick", "--contexts", "16"), "cliffs.json"),
        (("benches.windows", "--quick", "--contexts", "600"), "windows.json"),
        (("benches.quantisation", "--quick", "--steps", "1", "--types", "q4_0,nvfp4"), "quantisation.json"),
        (("benches.pauses", "--quick", "--prompt", "20"), "pauses.json"),
        (("benches.pauses", "--quick", "--prompt", "20", "--cut-link"), "pauses.json"),
        (("benches.chats", "--quick", "--system", "40", "--prompt", "20", "--turns", "2"), "chats.json"),
        (("benches.drafts", "--quick"), "drafts.json"),
        (("benches.layers", "--quick"), "layers.json"),
    ],  # compare runs as a whole in CI's smoke run, and below until it is interrupted
    ids=["hop", "contexts", "cliffs", "windows", "quantisation", "pauses", "pauses-link", "chats", "drafts", "layers"],
)
def test_quick_benches_run_and_leave_their_results(tmp_path: Path, arguments: tuple[str, ...], written: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", *arguments, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.stderr
    results = json.loads((tmp_path / written).read_text())
    assert results["machine"]["cores"] >= 1
    if written == "hop.json":
        for figures in (results["figures"], results["figures_cold"]):
            assert [entry["rows"] for entry in figures] == [1, 8, 32]
        for entry in (*results["figures"], *results["figures_cold"]):
            assert all(entry["p50_us"][part] >= 0 for part in PARTS)
            assert entry["message_bytes"] > entry["payload_bytes"] == 2 * 64 * entry["rows"]
    if written == "chats.json":
        assert [(turn["prefix_lanes"], turn["turn"]) for turn in results["turns"]].count((2, 1)) == 2
    if written == "drafts.json":
        assert [(run["draft"], run["share"]) for run in results["runs"][:2]] == [("off", 1.0), ("auto", 1.0)]
        assert [run["accepted"] > 0 for run in results["runs"][:2]] == [False, True]
    if written == "layers.json":
        whole, layers = (run["started"] for run in results["runs"])
        n_layers_bytes = layers["disk_bytes"]["one"] + layers["disk_bytes"]["two"]
        assert layers["disk_bytes"]["up"] < results["model_bytes"] // 2 < n_layers_bytes
        assert whole["disk_bytes"]["up"] > 2 * results["model_bytes"]
        assert whole["hub_bytes"] == results["model_bytes"]
    if written == "pauses.json":
        assert [(loss["policy"], loss["n_streams"]) for loss in results["losses"]] == [("auto", 3), ("drain", 3)]
        assert all(loss["n_paused"] and loss["ready_s"] > 0 and min(loss["pauses_s"]) > 0 for loss in results["losses"])


@pytest.mark.bench
def test_an_interrupted_comparison_leaves_no_process(tmp_path: Path) -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "benches.compare", "--quick", "--systems", "auto", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert bench.stderr is not None
    with bench.stderr:
        line = next(line for line in bench.stderr if line.startswith("streams auto"))  # its servers are up
        assert "tok/s" in line
        bench.send_signal(signal.SIGINT)
        bench.send_signal(signal.SIGINT)  # impatience changes nothing
        assert bench.wait(120) == 130
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(path)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
