"""The effect of hostile requests on other clients: `python -m benches.hostile [--quick] [--only NAMES]`.

One pipeline of the bundled model answers one long stream. Meanwhile a probe asks /live every 10 ms, and another process
sends one hostile body after the other. For each body the table shows the answer, the longest silence of the stream,
/live at the 99th percentile, and the resident memory of the coordinator with its workers: before, at its highest, and
after. The first row is a quiet time, the second an honest request: they show whether the machine itself stutters.

Goals: a silence stays under three times the quiet gap at the 99th percentile, or 100 ms; /live under 50 ms; memory
under 256 MiB above idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gzip
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benches import interrupt, machine
from benches.servers import Setup
from benches.tracing import pipeline
from relayline.deploy.testing.paths import DEMO_MODEL as DEMO

MIB = 1 << 20
SILENCE_MAX_S, SILENCE_RATIO, LIVE_MAX_S, MEMORY_MAX_BYTES = 0.1, 3.0, 0.05, 256 * MIB  # the goals
PROBE_EVERY_S, MEMORY_EVERY_S = 0.01, 0.4
CTX_TOKENS = 2048
QUIET_S, WATCHED_S = 5.0, 1.5  # of the quiet row; after each answer: work may go on when the client has left
ANSWER_TIMEOUT_S = 60.0
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# Sends standard input as the body of a POST and prints the status, the seconds and the beginning of the answer.
SENDER = """
import json, sys, time, http.client
host, port, path, headers, limit_s = sys.argv[1:]
body = sys.stdin.buffer.read()
print("sending", flush=True)
began = time.monotonic()
status, text = 0, b""
try:
    link = http.client.HTTPConnection(host, int(port), timeout=float(limit_s))
    try:
        link.request("POST", path, body, {"Content-Type": "application/json"} | json.loads(headers))
    except (BrokenPipeError, ConnectionResetError):
        pass  # refused before it had been sent; the answer may stand there all the same
    reply = link.getresponse()
    status, text = reply.status, reply.read()
except Exception as error:
    text = repr(error).encode()
print(json.dumps([status, time.monotonic() - began, text[:160].decode(errors="replace")]))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """One hostile request."""

    name: str
    path: str
    make: Callable[[], bytes]
    headers: tuple[tuple[str, str], ...] = ()


def _said(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"max_tokens": 1} | fields).encode()


def _filled(before: str, item: str, after: str, size_bytes: int = 16 * MIB - 256) -> Callable[[], bytes]:
    """Return a body of about that size: one item again and again, between commas."""
    n_items = (size_bytes - len(before) - len(after)) // (len(item) + 1)
    return lambda: (before + ",".join([item] * n_items) + after).encode()


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _bomb(pack: Callable[[bytes], bytes], size_bytes: int) -> Callable[[], bytes]:
    return lambda: pack(bytes(size_bytes))


def _patterns() -> list[Body]:
    """Regular expressions, grammars and schemas that are expensive to compile or to follow."""
    regexes = {
        "alternatives": "(a|b|ab)*" * 3000, "optionals": "(a?){6000}" + "a" * 50, "dots": "(.*x){3000}",
        "classes": "[a-z]*[a-y]*[a-x]*" * 1200, "properties": r"\p{L}*\p{Lu}*" * 800, "nested": "([a-z]+ ?)+" * 2500,
        "counted": ".{0,30000}", "words": "(" + "|".join(f"w{at}x*" for at in range(5000)) + ")*",
    }  # fmt: skip
    wide = {
        "type": "object",
        "properties": {f"key{at}": {"enum": [f"v{at}-{n}" for n in range(20)]} for at in range(900)},
    }
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": {"anyOf": [deep, {"type": "number"}]}}
    ambiguous = "root ::= (a | b)* \na ::= [a-z]* \nb ::= [a-z]+ " + "[a-y]?" * 200
    return [
        *(Body(f"regex {name}", COMPLETIONS, _said(prompt="x", guided_regex=text)) for name, text in regexes.items()),
        Body("schema wide", COMPLETIONS, _said(prompt="x", guided_json=wide)),
        Body("schema deep", COMPLETIONS, _said(prompt="x", guided_json=deep)),
        Body("grammar ambiguous", COMPLETIONS, _said(prompt="x", guided_grammar=ambiguous, max_tokens=40)),
        Body("choices", COMPLETIONS, _filled('{"prompt":"x","guided_choice":[', '"ab"', "]}")),
        Body("schema as text", COMPLETIONS, lambda: b'{"prompt":"x","guided_json":"' + b"[" * (8 * MIB) + b'"}'),
    ]


def bodies() -> list[Body]:
    """Return every hostile request, in the order of the table."""
    zipped, deflated = (("Content-Encoding", "gzip"),), (("Content-Encoding", "deflate"),)
    special = "<|im_start|>" * 5000
    chat = '{"max_tokens":1,"messages":'
    return [
        Body("honest", COMPLETIONS, _said(prompt="def f(", max_tokens=16)),
        Body("prompt of 8M ids", COMPLETIONS, _filled('{"max_tokens":1,"prompt":[', "1", "]}")),
        Body("prompt of 16 MiB", COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"a" * (16 * MIB - 100) + b'"}'),
        Body("prompt of 32 KiB", COMPLETIONS, _said(prompt="ab " * (32 * 1024 // 3))),
        Body("prompt of special tokens", COMPLETIONS, _said(prompt=special)),
        Body("chat of special tokens", CHAT, _said(messages=_user(special))),
        Body("prompts 5M empty", COMPLETIONS, _filled('{"prompt":[', '""', "]}")),
        Body("stops 5M empty", COMPLETIONS, _filled('{"prompt":"x","stop":[', '""', "]}")),
        Body("tools 5M empty lists", CHAT, _filled(chat + '[{"role":"user","content":"x"}],"tools":[', "[]", "]}")),
        Body("template arguments", CHAT,
             _filled(chat + '[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[', "{}", "]}}")),
        Body("messages 1M", CHAT, _filled(chat + "[", '{"role":"user","content":""}', "]}")),
        Body("content 600k parts", CHAT,
             _filled(chat + '[{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}")),
        Body("deep lists 16 MiB", CHAT,
             lambda: (chat + '[],"tools":').encode() + b"[" * (8 * MIB - 90) + b"]" * (8 * MIB - 90) + b"}"),
        Body("biases 1M", COMPLETIONS,
             lambda: b'{"prompt":"x","logit_bias":{' + b",".join(b'"%d":1' % at for at in range(1_200_000)) + b"}}"),
        Body("prediction of 4 MiB", COMPLETIONS,
             _said(prompt="x", prediction={"type": "content", "content": "ab " * (4 * MIB // 3)})),
        Body("tokenize 16 MiB", "/tokenize",
             lambda: b'{"with_pieces":true,"content":"' + b"ab " * ((16 * MIB - 100) // 3) + b'"}'),
        Body("detokenize 8M", "/detokenize", _filled('{"tokens":[', "1", "]}")),
        Body("number of 20k digits", COMPLETIONS, lambda: b'{"prompt":"x","seed":' + b"9" * 20_000 + b"}"),
        Body("blanks 17 MiB", COMPLETIONS, lambda: b" " * (17 * MIB)),
        Body("strings 2M short", COMPLETIONS, _filled('{"prompt":"x","metadata":[', '"abcde"', "]}")),
        Body("keys 1M", COMPLETIONS,
             lambda: b'{"prompt":"x","metadata":{' + b",".join(b'"k%d":1' % at for at in range(1_200_000)) + b"}}"),
        Body("128 answers", COMPLETIONS,
             _said(prompt=["x"] * 8, n=16, max_tokens=50, logprobs=5, seed=1, temperature=1)),
        Body("gzip of 1 GiB", COMPLETIONS, _bomb(lambda data: gzip.compress(data, 9), 1024 * MIB), zipped),
        Body("gzip of 1 GiB to nowhere", "/nowhere", _bomb(lambda data: gzip.compress(data, 9), 1024 * MIB), zipped),
        Body("deflate of 1 GiB", COMPLETIONS, _bomb(lambda data: zlib.compress(data, 9), 1024 * MIB), deflated),
        *_patterns(),
    ]  # fmt: skip


@dataclasses.dataclass(slots=True)
class Row:
    """The measurements during one body; times in seconds, memory in bytes."""

    name: str
    status: int = 0
    took_s: float = 0.0
    answer: str = ""
    sent_bytes: int = 0
    silence_s: float = 0.0
    gap_p99_s: float = 0.0
    live_p99_s: float = 0.0
    live_max_s: float = 0.0
    before_bytes: int = 0
    peak_bytes: int = 0
    after_bytes: int = 0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of them do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def family_of(root: int) -> list[int]:
    """Return a process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def resident_bytes(pids: Sequence[int]) -> int:
    """Return the resident memory of these processes together; a page that several share counts once (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def coordinator_pid() -> int:
    """Return the process of this bench's own coordinator."""
    for pid in family_of(os.getpid()):
        with contextlib.suppress(OSError):
            if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
    raise RuntimeError("no coordinator runs")


class Probe:
    """A stream that never ends and a probe of /live: the gaps between tokens, and how long a probe took."""

    def __init__(self, url: str, pid: int) -> None:
        self._url, self._pid = url, pid
        self.gaps_s: list[float] = []
        self.probes_s: list[float] = []
        self.peak_bytes = 0
        self.streams = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Stream, probe and read memory during a with block, which begins with the first token."""
        tasks = [asyncio.create_task(work) for work in (self._stream(), self._probe(), self._weigh())]
        try:
            await self.streams.wait()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def clear(self) -> None:
        """Drop the measurements so far."""
        self.gaps_s, self.probes_s, self.peak_bytes = [], [], 0

    async def _stream(self) -> None:
        fields = {"prompt": "def f(", "max_tokens": CTX_TOKENS - 16, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            while True:
                async with session.post(self._url + COMPLETIONS, json=fields) as reply:
                    last_s = 0.0
                    async for line in reply.content:
                        if not line.startswith(b"data: {"):
                            continue
                        now_s = time.monotonic()
                        if last_s:  # between two tokens of one answer; a first token waits for its prompt
                            self.gaps_s.append(now_s - last_s)
                        last_s = now_s
                        self.streams.set()

    async def _probe(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                began_s = time.monotonic()
                async with session.get(self._url + "/live") as reply:
                    await reply.read()
                self.probes_s.append(time.monotonic() - began_s)
                await asyncio.sleep(PROBE_EVERY_S)

    async def _weigh(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, resident_bytes(family_of(self._pid)))
            await asyncio.sleep(MEMORY_EVERY_S)


async def one(probe: Probe, url: str, pid: int, body: Body) -> Row:
    """Send one body and watch until some time after its answer."""
    data = await asyncio.to_thread(body.make)
    host, port = url.removeprefix("http://").split(":")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SENDER, host, port, body.path, json.dumps(dict(body.headers)), str(ANSWER_TIMEOUT_S),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(data)
    await child.stdin.drain()
    before = resident_bytes(family_of(pid))
    child.stdin.close()
    await child.stdout.readline()  # it has the body and starts now
    probe.clear()
    status, took_s, answer = json.loads(await child.stdout.readline())
    await child.wait()
    await asyncio.sleep(WATCHED_S)
    return row_of(body.name, probe, resident_bytes(family_of(pid)), before, (status, took_s, answer), len(data))


def row_of(
    name: str, probe: Probe, after: int, before: int, answer: tuple[int, float, str] = (0, 0.0, ""), sent: int = 0
) -> Row:
    """Return the measurements of one body until now."""
    return Row(
        name, *answer, sent, max(probe.gaps_s, default=0.0), percentile(probe.gaps_s, 0.99),
        percentile(probe.probes_s, 0.99), max(probe.probes_s, default=0.0), before, probe.peak_bytes, after,
    )  # fmt: skip


async def measure(chosen: Sequence[Body], log_dir: Path, console: Console) -> list[Row]:
    """Send every body in turn; the first row is a quiet time."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    setup = Setup(DEMO, 2, 16, CTX_TOKENS, cores, log_dir)
    async with pipeline(setup) as (target, _):
        pid = coordinator_pid()
        probe = Probe(target.url, pid)
        async with probe.running():
            await asyncio.sleep(1)
            probe.clear()
            before = resident_bytes(family_of(pid))
            await asyncio.sleep(QUIET_S)
            rows = [row_of("(quiet)", probe, resident_bytes(family_of(pid)), before)]
            for body in chosen:
                rows.append(await one(probe, target.url, pid, body))
                console.print(f"  {rows[-1].name}: {rows[-1].status} after {rows[-1].took_s:.2f} s", highlight=False)
    return rows


def missed(row: Row, quiet: Row) -> list[str]:
    """Return the goals that this row misses."""
    silence_max_s = max(SILENCE_MAX_S, SILENCE_RATIO * quiet.gap_p99_s)
    return [
        word
        for word, is_missed in (
            ("silence", row.silence_s > silence_max_s),
            ("/live", row.live_p99_s > LIVE_MAX_S),
            ("memory", row.peak_bytes - quiet.before_bytes > MEMORY_MAX_BYTES),
        )
        if is_missed
    ]


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table."""
    table = Table(title="beside hostile requests (one stream, two stages, demonstration model)")
    for name in ("body", "sent", "answer", "after", "silence", "/live p99", "max", "memory", "misses"):
        table.add_column(name, justify="left" if name in ("body", "misses") else "right")
    quiet = rows[0]
    for row in rows:
        table.add_row(
            row.name, f"{row.sent_bytes / MIB:.1f} MiB", str(row.status or "-"), f"{row.took_s:.2f} s",
            f"{row.silence_s * 1e3:.0f} ms", f"{row.live_p99_s * 1e3:.0f} ms", f"{row.live_max_s * 1e3:.0f} ms",
            f"+{(row.peak_bytes - quiet.before_bytes) / MIB:.0f} MiB", ", ".join(missed(row, quiet)),
        )  # fmt: skip
    console.print(table)


async def main(options: argparse.Namespace) -> int:
    """Measure, print and write hostile.json; exit code 1 if the server stopped answering."""
    console = Console(width=160)
    chosen = [body for body in bodies() if not options.only or body.name in options.only]
    if options.quick:
        chosen = chosen[:3]
    with tempfile.TemporaryDirectory(prefix="relayline-bench-") as logs:
        rows = await measure(chosen, Path(logs), console)
    show(rows, console)
    results = {"machine": machine.facts(), "rows": [dataclasses.asdict(row) for row in rows]}
    await asyncio.to_thread(machine.write_json, options.out / "hostile.json", results)
    return int(any(not row.status for row in rows[1:]))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.hostile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three bodies: checks the bench itself")
    parser.add_argument("--only", type=lambda text: tuple(text.split(",")), default=(), help="some bodies, by name")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(interrupt.run(main(parse())))
