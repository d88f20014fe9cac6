"""`relayline bench`: load a running server with streams of completions and show the results."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
from typing import Any

import aiohttp
import click

from relayline.deploy.cli import load
from relayline.deploy.cli.console_http import (
    KEY_STATUSES,
    base_url,
    chosen_url,
    client_tls,
    key_headers,
    key_option,
    parsed,
    refusal,
    unanswered,
)
from relayline.deploy.cli.options import FloatRange, IntRange, Line, Name, is_given
from relayline.deploy.tables import Trimmed, console_of_stdout, fitted
from relayline.wire.common.bounds import CTX_TOKENS_MAX
from relayline.wire.common.errors import StartError, UsageError

FIRST_TOKEN = 100  # below it vocabularies keep their control tokens
LAST_TOKEN = 1_900  # inside the smallest vocabulary that anybody serves
STREAMS_MAX = 10_000  # connections that one process may have open
REQUESTS_MAX = 1_000_000
TEMPERATURE_MAX = 2.0  # of OpenAI's API
READING_MS = 200.0  # between tokens: about 4 words a second, as people read
PATIENT_MS = 5_000.0  # people wait for a first token
NOISE_SHARE = 0.9  # of a figure's size; less of it is a loss, and not chance
STALL_RATIO = 10.0  # of a slow gap between tokens to the usual one
STALL_MS = 100.0  # shorter gaps nobody sees
SHOWN_MS = 0.05  # anything below is printed as 0.0
TTFT = ("TTFT ms p50", "TTFT ms p95")  # time to the first token
ITL = ("ITL ms mean", "ITL ms p50", "ITL ms p95", "ITL ms p99")  # between tokens
COLUMNS = ("streams", "tok/s", "decode tok/s", *TTFT, *ITL, "answered")
LEFT_OUT = ("ITL ms p50", "ITL ms p95", "tok/s", "TTFT ms p50", "ITL ms p99")  # on narrow terminals, in this order


def _counts(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{text!r} is not a list of stream counts such as 1,4,16")
    if max(counts) > STREAMS_MAX:
        raise click.BadParameter(f"{max(counts)} streams are too many; one load can have {STREAMS_MAX}")
    return counts


def _rate(_: click.Context, __: click.Parameter, per_s: float | None) -> float | None:
    if per_s is not None and not 0 < per_s < math.inf:
        raise click.BadParameter(f"{per_s:g} is not a number of requests per second above 0")
    return per_s


@click.command("bench", short_help="Send load to a running server and measure its answers.")
@click.argument("url", type=Name(), required=False, callback=chosen_url)
@click.option(
    "--streams",
    type=Line("n,..."),
    callback=_counts,
    default="1,2,4,8",
    show_default=True,
    help="Numbers of concurrent streams to try in turn.",
)
@click.option(
    "--rounds",
    type=IntRange(1, REQUESTS_MAX),
    default=1,
    show_default=True,
    help="Requests of each stream. With more, its start and end count less.",
)
@click.option(
    "--tokens", type=IntRange(2, CTX_TOKENS_MAX), default=64, show_default=True, help="Tokens of each answer."
)
@click.option(
    "--prompt-tokens", type=IntRange(1, CTX_TOKENS_MAX), default=32, show_default=True,
    help="Tokens of each prompt.",
)  # fmt: skip
@click.option(
    "--rate",
    type=FloatRange(),
    metavar="N",
    callback=_rate,
    default=None,
    help="Instead of streams: requests per second, at random times.",
)
@click.option("--requests", type=IntRange(1, REQUESTS_MAX), default=32, show_default=True, help="Requests with --rate.")
@click.option(
    "--temperature",
    type=FloatRange(0, TEMPERATURE_MAX),
    default=0.0,
    show_default=True,
    help="Of every answer; 0: greedy.",
)
@click.option(
    "--top-p", type=FloatRange(0, 1, min_open=True), default=None, help="Of every answer, with --temperature."
)
@click.option("--seed", type=IntRange(), default=1, show_default=True, help="Random seed of prompts and arrivals.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@key_option
def bench_command(url: str, as_json: bool, **given: Any) -> None:
    """Send completions of random token ids to the server at URL (http://HOST:PORT), by default the pipeline that
    runs here.

    Every prompt is different, so no prefix is shared. Every answer runs to its full length; exit code 1 if one does
    not.
    """
    if given["rate"] and (given["rounds"] > 1 or is_given("streams")):
        raise UsageError("--streams and --rounds do not go with --rate; give --requests instead")
    if given["top_p"] is not None and not given["temperature"]:
        raise UsageError("--top-p needs --temperature; greedy answers do not look at it")
    if not given["rate"] and is_given("requests"):
        raise UsageError("--requests needs --rate; without --rate give --rounds")
    summaries = asyncio.run(_measure(base_url(url), given))
    if as_json:
        for name, summary in summaries:
            click.echo(json.dumps(load.json_ready({"load": name} | dataclasses.asdict(summary))))
    else:
        console = console_of_stdout()
        console.print(bench_table(summaries, console.width))
        for line in filter(None, (bursts_line(summaries), verdict(summaries))):
            console.print(line, soft_wrap=True, highlight=False)
    failed = next(
        (summary.error or "an answer was too short" for _, summary in summaries if not _is_whole(summary)), ""
    )
    if failed:
        raise StartError(f"not every request was answered in full: {failed}")


def verdict(summaries: list[tuple[str, load.Summary]]) -> str:
    """Return a sentence that says whether the figures give cause to worry. Pure."""
    failed = [name for name, summary in summaries if not _is_whole(summary)]
    if failed:
        return f"worry: not every request was answered in full with {_streams(', '.join(failed))}."
    slow = [name for name, summary in summaries if summary.itl_ms["mean"] > READING_MS]
    if slow:
        return (
            f"with {_streams(slow[0])} a token takes more than {READING_MS:.0f} ms, which is slower than people read; "
            "run fewer streams, a smaller quantisation, or more machines."
        )
    stalls = [name for name, summary in summaries if _is_uneven(summary.itl_ms)]
    if stalls:
        return (
            f"with {_streams(stalls[0])} one token in a hundred takes {STALL_RATIO:.0f} times as long as usual: "
            "look for a busy machine with `relayline top`, or lower --itl-stretch."
        )
    late = [(name, summary.ttft_ms["p95"]) for name, summary in summaries if summary.ttft_ms["p95"] > PATIENT_MS]
    if late:
        return (
            f"with {_streams(late[0][0])} one first token in twenty takes more than {late[0][1] / 1e3:.1f} s: prompts "
            "come faster than they are read; try fewer streams, a lower --rate or shorter prompts."
        )
    first, last = summaries[0][1].decode_tok_s, summaries[-1][1].decode_tok_s
    if len(summaries) > 1 and last < NOISE_SHARE * first:
        return f"{summaries[-1][0]} streams together get fewer tokens a second than {summaries[0][0]}: find out why."
    return "nothing to worry about: every answer was complete, and tokens come faster than people read."


def bursts_line(summaries: list[tuple[str, load.Summary]]) -> str:
    """Return why a median of the time between tokens is 0.0, empty where none is. Pure."""
    if not any(summary.itl_ms["p50"] < SHOWN_MS for _, summary in summaries):
        return ""
    return "an ITL p50 of 0.0: tokens come in bursts, as drafts bring them; look at the mean."


def _streams(load_name: str) -> str:
    """Return a load's name with its noun: "1 stream", "1, 4 streams", "2/s"."""
    return load_name if load_name.endswith("/s") else f"{load_name} {'stream' if load_name == '1' else 'streams'}"


def _is_whole(summary: load.Summary) -> bool:
    return summary.n_complete == summary.n_requests


def _is_uneven(itl_ms: dict[str, float]) -> bool:
    """Return whether some gaps between tokens stand out. Where drafts bring several at once, the median may be 0."""
    usual_ms = max(itl_ms["p50"], itl_ms["mean"])
    return itl_ms["p99"] > max(STALL_MS, STALL_RATIO * usual_ms)


async def _measure(url: str, given: dict[str, Any]) -> list[tuple[str, load.Summary]]:
    draw = random.Random(given["seed"])

    def prompts(n_prompts: int) -> list[list[int]]:
        return [
            [draw.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(given["prompt_tokens"])] for _ in range(n_prompts)
        ]

    fields = {name: given[name] for name in ("temperature", "top_p") if given[name]}
    found: list[tuple[str, load.Summary]] = []
    async with load.client(key_headers(given["api_key"]), client_tls(url)) as session:
        target = load.Target(url, "openai", await _model(session, url))
        if given["rate"]:
            requests = await load.open_loop(
                session, target, prompts(given["requests"]), rate_per_s=given["rate"], n_tokens=given["tokens"],
                seed=given["seed"], fields=fields,
            )  # fmt: skip
            return [(f"{given['rate']:g}/s", load.summarise(requests))]
        for n_streams in given["streams"]:
            requests = await load.closed_loop(
                session, target, prompts(n_streams * given["rounds"]), n_streams=n_streams, n_tokens=given["tokens"],
                requests_per_stream=given["rounds"], fields=fields,
            )  # fmt: skip
            found.append((str(n_streams), load.summarise(requests)))
    return found


async def _model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status in KEY_STATUSES:
                raise StartError(refusal(f"{url}/v1/models", response.status, parsed(await response.read())))
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        raise unanswered(url, error) from error
    except (aiohttp.ClientError, KeyError, IndexError, TypeError, ValueError) as error:
        raise StartError(f"{url} does not answer as an OpenAI-compatible server ({error})") from error


def bench_table(summaries: list[tuple[str, load.Summary]], width: int) -> Trimmed:
    """Return the figures of loads as a table for a terminal of this width. Pure."""
    rows = []
    for name, summary in summaries:
        ttft, itl = summary.ttft_ms, summary.itl_ms
        figures = (ttft["p50"], ttft["p95"], itl["mean"], itl["p50"], itl["p95"], itl["p99"])
        rows.append(
            [
                name,
                f"{summary.tok_s:.1f}",
                f"{summary.decode_tok_s:.1f}",
                *("-" if math.isnan(value) else f"{value:.1f}" for value in figures),
                f"{summary.n_complete}/{summary.n_requests}",
            ]
        )
    return fitted(width, COLUMNS, rows, left_out=LEFT_OUT)
