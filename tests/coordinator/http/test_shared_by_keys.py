"""Goal: what the file of API keys says of a key holds for its requests, and what they used is counted under its name.

Method: the real application with keys, before a fake generator that keeps the requests it is given; OpenAI's client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.http.app import make_app
from relayline.coordinator.http.edge.api_keys import ApiKeys, protect_http
from relayline.coordinator.http.edge.clients import BEHALF, check_may_use
from relayline.coordinator.http.edge.key_file import MODELS_MAX, first_key, parse_keys
from relayline.coordinator.http.edge.limits import HttpLimits
from relayline.coordinator.http.edge.listener import HttpListener
from relayline.coordinator.http.edge.server import start_http
from relayline.coordinator.http.edge.token_rate import TokenRate
from relayline.coordinator.http.replies.service import ServedModel
from relayline.coordinator.observe.usage import NAMES_MAX, OTHERS, Spent, UsageByKey
from relayline.coordinator.sessions.generation import TokenEvent
from relayline.coordinator.sessions.tenants import ANYONE, Level, Tenant, circle_of, turn_of
from relayline.coordinator.sessions.turnover import RETRY_AFTER_MAX_S
from relayline.coordinator.text.chat import ChatTemplate
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML, write_tokenizer
from relayline.wire.common.errors import ModelNotFoundError, OverloadedError, RateLimitError, UsageError
from tests.support.http_support import CREATED, MODEL, FakeGenerator
from tests.support.openai_client import openai_client

ALICE, BATCH, SQL = "alice-key-0123456789", "batch-key-0123456789", "sql-key-0123456789ab"
FILE = f"""alice: {ALICE}
batch: {BATCH} share=2 streams=8 queue=0 priority=low tokens-per-minute=600
sql: {SQL} models=sql,other
"""
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path_factory.mktemp("vocab") / "tokenizer.gguf"))
    yield tokenizer
    tokenizer.close()


@contextlib.asynccontextmanager
async def serving(
    tokenizer: Tokenizer, folder: Path, generator: FakeGenerator, *, text: str = FILE
) -> AsyncIterator[str]:
    path = folder / "keys"
    await asyncio.to_thread(path.write_text, text)
    path.chmod(0o600)
    chat = ChatTemplate(CHATML, bos_text=tokenizer.bos_text, eos_text=tokenizer.eos_text)
    model, limits = ServedModel(MODEL, CREATED, tokenizer, chat), HttpLimits(adapters=("sql",), model_aliases=("also",))
    app = make_app(generator, model, limits)
    with protect_http(app, HttpListener(api_keys_file=path)):
        runner, port = await start_http(app, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


def test_options_of_a_key() -> None:
    keys = parse_keys(FILE + f"a:b: {ALICE}x models=org/m:Q4\n{ALICE}y share=3\n", Path("keys"))
    batch = keys["batch"]
    assert (batch.tenant.share, batch.tenant.streams_max, batch.tenant.waiting_max) == (2, 8, 0)
    assert (batch.tenant.level, batch.options.tokens_per_minute, batch.tenant.models) == (Level.LOW, 600, frozenset())
    assert keys["sql"].tenant.models == {"sql", "other"}
    assert keys["a:b"].tenant.models == {"org/m:Q4"}
    assert keys["line 5"].tenant.share == 3
    assert keys["alice"].tenant.level is Level.NORMAL
    assert keys["alice"].options.tokens_per_minute is None


def test_own_prefixes_are_a_circle_that_outlasts_lines() -> None:
    def circles(text: str) -> list[str]:
        return [key.tenant.circle for key in parse_keys(text, Path("keys")).values()]

    first, second = circles(f"alice: {ALICE} prefixes=own\n{BATCH} prefixes=own\n")
    assert circles(f"{SQL}\n{BATCH} prefixes=own\nalice: {ALICE} prefixes=own\nb: {ALICE}x prefixes=shared\n") == [
        "",
        second,
        first,
        "",
    ]
    assert (first, first != second) == ("alice", True)
    alice = parse_keys(f"alice: {ALICE} prefixes=own\n", Path("keys"))["alice"]
    bob = parse_keys(f"bob: {BATCH}\n", Path("keys"))["bob"]
    for options, theirs in (("", ["gw/alice", ""]), (" prefixes=own", ["gw/alice", "gw"])):
        gateway = parse_keys(f"gw: {SQL} gateway=yes{options}\n", Path("keys"))["gw"]
        assert [gateway.of_behalf(key.behalf).tenant.circle for key in (alice, bob)] == theirs


def test_circles_are_of_tenant_and_salt() -> None:
    ours, theirs = Tenant("a", circle="a"), Tenant("b", circle="b")
    found = [circle_of(who, salt) for who in (ANYONE, ours, theirs) for salt in ("", "x", "y", "\ud800")]
    assert found[0] == ""
    assert len({*found}) == len(found)
    assert circle_of(Tenant("1", circle="ab"), "c") != circle_of(Tenant("2", circle="a"), "bc")


async def test_a_request_names_the_circle_that_its_prefixes_serve(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator, text = FakeGenerator(), f"alice: {ALICE} prefixes=own\nsql: {SQL}\n"
    alice = Tenant("alice", circle="alice")
    messages: list[Any] = [{"role": "user", "content": "x"}]
    async with serving(tokenizer, tmp_path, generator, text=text) as url:
        for key in (ALICE, SQL):
            async with openai_client(url, key) as client:
                await client.completions.create(model=MODEL, prompt="x", max_tokens=1)
                salt = {"cache_salt": "s"}
                await client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body=salt)
                await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_body=salt)
                await client.responses.create(model=MODEL, input="x", max_output_tokens=1, extra_body=salt)
                for wrong in ("", "s" * 1_025, 5):
                    with pytest.raises(openai.BadRequestError, match="cache_salt"):
                        await client.completions.create(model=MODEL, prompt="x", extra_body={"cache_salt": wrong})
    assert [request.circle for request in generator.requests] == [
        *(circle_of(alice, salt) for salt in ("", "s", "s", "s")),
        *(circle_of(ANYONE, salt) for salt in ("", "s", "s", "s")),
    ]


def test_the_first_key_of_a_file_is_no_option() -> None:
    text = f"# keys\n\nalice: {ALICE} share=2\nhouse: {BATCH} gateway=yes\n"
    assert (first_key(text), first_key(text, of_gateway=True), first_key("# none\n")) == (ALICE, BATCH, "")


def test_options_fit_a_header() -> None:
    n_names = 0
    with contextlib.suppress(UsageError):
        while True:
            names = ",".join(f"meta/model-{n:016}" for n in range(n_names + 1))
            longest = parse_keys(f"alice: {ALICE} models={names}", Path("keys"))["alice"]
            n_names += 1
    assert 200 < n_names <= MODELS_MAX
    assert len(longest.behalf) + len(BEHALF) < 8_190


def test_a_gateway_says_whose_request_it_is() -> None:
    keys = parse_keys(f"häuser/x: {ALICE} share=7 models=a,b tokens-per-minute=9 queue=0\n", Path("keys"))
    house = parse_keys(f"house: {BATCH} gateway=yes share=2\n", Path("keys"))["house"]
    theirs = house.of_behalf(keys["häuser/x"].behalf)
    assert (theirs.name, theirs.tenant.share, theirs.tenant.waiting_max) == ("house/häuser/x", 7, 0)
    assert (theirs.tenant.models, theirs.options.tokens_per_minute) == ({"a", "b"}, 9)
    for own, models in (("models=b,c", {"b"}), ("models=c", {""}), ("steers=no", {"a", "b"})):
        narrow = parse_keys(f"house: {BATCH} gateway=yes {own}\n", Path("keys"))["house"]
        found = narrow.of_behalf(keys["häuser/x"].behalf)
        assert (found.tenant.models, found.options.steers) == (models, "no" if own == "steers=no" else "yes")
        if models == {""}:  # of adapters, which have no model's id beside their name
            with pytest.raises(ModelNotFoundError):
                check_may_use(found.tenant, "adapter", "")
    (unnamed,) = parse_keys(f"# a comment\n{ALICE}\n", Path("keys")).values()
    asked = house.of_behalf(unnamed.behalf)
    assert (asked.name, asked.lasting_name) == ("house/line 2", f"house/{unnamed.digest.hex()}")
    newer = keys["häuser/x"].behalf.replace("%7B", "%7B%22newer%22:1,", 1)
    assert house.of_behalf(newer).name == theirs.name
    for bad in ("", "x", "%ff", "%7B%7D", keys["häuser/x"].behalf.replace("7", "0")):
        assert house.of_behalf(bad) is house


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            f"alice: {ALICE} share 2",
            "keys:1: behind the key stand options only, as in share=2; there are share, streams, ",
        ),
        (
            f"alice: {ALICE} shares=2",
            "keys:1: an option that there is not; there are share, streams, queue, priority, mod",
        ),
        (f"alice: {ALICE} share=0", "keys:1: share: expected `int` >= 1"),
        (f"alice: {ALICE} share=half", "keys:1: share: expected `int`, got `str`"),
        (f"alice: {ALICE} streams=0", "keys:1: streams: expected `int` >= 1"),
        (f"alice: {ALICE} queue=-1", "keys:1: queue: expected `int` >= 0"),
        (f"alice: {ALICE} priority=urgent", "keys:1: priority: must be high, normal or low"),
        (f"alice: {ALICE} prefixes=mine", "keys:1: prefixes: must be shared or own"),
        (f"alice: {ALICE} share=1 share=2", "keys:1: an option is said twice, or has no value"),
        (f"alice: {ALICE} models=", "keys:1: an option is said twice, or has no value"),
        (f"alice: {ALICE} tokens-per-minute=0", "keys:1: tokens-per-minute: expected `int` >= 1"),
        (f"alice: {ALICE} models={','.join(map(str, range(MODELS_MAX + 1)))}", "keys:1: models: at most 256 names"),
        (
            f"alice: {ALICE} models={','.join(f'meta/model-{n:020}' for n in range(250))}",
            "keys:1: the name and its model",
        ),
        (f"{'語' * 2_000}: {ALICE}", "keys:1: the name and its models are too long"),
        ("alice: short share=2", "keys:1: a key is 16 to 512 printable ASCII characters"),
    ],
)
def test_a_bad_line_is_one_clear_line_without_the_key(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_keys(line, Path("keys"))
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message
    assert ALICE not in caught.value.message


async def test_a_request_carries_whose_it_is_and_its_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with serving(tokenizer, tmp_path, generator) as url, openai_client(url, BATCH) as client:
        await client.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body={"priority": 7})
        await client.responses.create(model=MODEL, input="x", service_tier="flex")
        with pytest.raises(openai.InternalServerError, match="gave no pooled row"):
            await client.embeddings.create(model=MODEL, input="x")
    first, second, third = generator.requests
    assert {each.tenant for each in generator.requests} == {Tenant("batch")}
    assert first.tenant.level is Level.LOW
    assert (first.turn, second.turn, third.turn) == (7, turn_of(0, "flex"), 0)
    assert turn_of(0, "priority") < turn_of(-(1 << 40), None) < turn_of(-1, None) < 0 < turn_of(1 << 40, "default")


async def test_a_service_tier_is_answered_where_it_was_asked_for(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path, FakeGenerator()) as url, openai_client(url, ALICE) as client:
        messages = [{"role": "user", "content": "x"}]

        async def tier(asked: str | None) -> str | None:
            more = {} if asked is None else {"service_tier": asked}
            answer = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=2, **more)
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=2, stream=True, **more
            )
            assert {chunk.service_tier async for chunk in stream} == {answer.service_tier}
            return answer.service_tier

        tiers = {asked: await tier(asked) for asked in (None, "auto", "default", "flex", "priority", "scale")}
        assert tiers == {
            None: None,
            "auto": "default",
            "default": "default",
            "flex": "flex",
            "priority": "priority",
            "scale": "default",
        }
        response = await client.responses.create(model=MODEL, input="x", service_tier="priority")
        assert response.service_tier == "priority"


async def test_a_key_uses_only_its_models(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with serving(tokenizer, tmp_path, generator) as url:
        async with openai_client(url, SQL) as client:
            assert [model.id async for model in await client.models.list()] == ["sql"]
            assert (await client.completions.create(model="sql", prompt="x", max_tokens=1)).model == "sql"
            for call in (
                client.completions.create(model=MODEL, prompt="x"),
                client.completions.create(model="also", prompt="x"),
                client.embeddings.create(model=MODEL, input="x"),
                client.models.retrieve(MODEL),
            ):
                with pytest.raises(openai.NotFoundError, match="no access to it; it may use 'other', 'sql'") as caught:
                    await call
                assert caught.value.code == "model_not_found"
        async with openai_client(url, ALICE) as client:
            assert [model.id async for model in await client.models.list()] == [MODEL, "also", "sql"]
    assert len(generator.requests) == 1


async def test_tokens_per_minute(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with serving(tokenizer, tmp_path, FakeGenerator()) as url, aiohttp.ClientSession() as session:

        async def send(key: str, prompt: list[int]) -> tuple[int, dict[str, str], dict[str, object]]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                return (
                    answer.status,
                    {name.lower(): value for name, value in answer.headers.items()},
                    await answer.json(),
                )

        status, headers, _ = await send(ALICE, [5] * 60)
        assert status == 200
        assert not any(name.startswith("x-ratelimit") for name in headers)
        status, headers, _ = await send(BATCH, [5] * 60)
        assert (status, headers["x-ratelimit-limit-tokens"]) == (200, "600")
        assert 538 <= int(headers["x-ratelimit-remaining-tokens"]) <= 600, "the bucket fills in the meantime"
        assert headers["x-ratelimit-reset-tokens"].endswith("s")
        statuses = [(await send(BATCH, [5] * 60))[0] for _ in range(8)]
        assert set(statuses) == {200}
        status, headers, body = await send(BATCH, [5] * 62)
        while status == 200:  # the bucket fills in the meantime
            status, headers, body = await send(BATCH, [5] * 62)
        assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (
            "Rate limit reached for API key 'batch' on tokens per min (TPM): Limit 600, Used"
            in body["error"]["message"]
        )
        assert int(headers["retry-after"]) >= 1


def test_a_bucket_fills_evenly_and_a_long_answer_leaves_a_debt() -> None:
    rate = TokenRate(600, 0)
    rate.check("a", 700, 0)  # larger than the bucket: once it is full
    rate.spend(600, 0)
    with pytest.raises(RateLimitError) as refused:
        rate.check("a", 10, 0)
    assert refused.value.retry_after_s == 1
    rate.check("a", 10, SECOND_NS)
    rate.spend(10 + 6_000, SECOND_NS)
    with pytest.raises(RateLimitError) as refused:
        rate.check("a", 1, SECOND_NS)
    assert refused.value.retry_after_s == RETRY_AFTER_MAX_S
    assert rate.headers(SECOND_NS) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "11m0s",
    }
    assert rate.headers(700 * SECOND_NS)["x-ratelimit-reset-tokens"] == "0ms"


def test_what_was_spent_outlasts_another_reading_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(FILE)
    path.chmod(0o600)
    keys = ApiKeys(path)
    batch = keys.find(BATCH)
    assert batch is not None
    rate = keys.rate_of(batch)
    keys.reload()
    assert keys.rate_of(batch) is rate
    path.write_text(FILE.replace("=600", "=700"))
    keys.reload()
    changed = keys.find(BATCH)
    assert changed is not None
    assert keys.rate_of(changed) is not rate
    path.write_text(f"batch: {BATCH} share=none\n")
    keys.reload()
    assert keys.find(BATCH) is changed, "a bad file changes nothing"


async def test_embeddings_are_counted_once_they_are_admitted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = FakeGenerator(lambda _: [TokenEvent(0, None, (), "length", embedding=bytes(8))])
    full = OverloadedError("full")
    generator.refusals = [full, full, None, full]  # the last one: an input waits for another one of its body
    async with serving(tokenizer, tmp_path, generator) as url, openai_client(url, BATCH) as client:
        for _ in range(2):
            with pytest.raises(openai.RateLimitError, match="full"):
                await client.embeddings.create(model=MODEL, input=[[5] * 200, [6] * 200])
        await client.embeddings.create(model=MODEL, input=[[5] * 200, [6] * 200])
        with pytest.raises(openai.RateLimitError, match="tokens"):
            await client.embeddings.create(model=MODEL, input=[[5] * 300, [6] * 300])  # not for 40 s
        async with aiohttp.ClientSession() as session:
            headers = {"Authorization": f"Bearer {BATCH}"}
            async with session.get(f"{url}/v1/usage", headers=headers) as answer:
                usage = {each["name"]: each for each in (await answer.json())["data"]}
    assert (usage["batch"]["requests"], usage["batch"]["prompt_tokens"]) == (1, 400)


async def test_usage_by_key(tokenizer: Tokenizer, tmp_path: Path) -> None:
    generator = FakeGenerator()
    async with serving(tokenizer, tmp_path, generator) as url, aiohttp.ClientSession() as session:
        async with openai_client(url, BATCH) as client:
            await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2, n=2)
            generator.refusals.append(OverloadedError("full"))
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model=MODEL, prompt=[5, 6, 7])
        async with session.get(f"{url}/v1/usage", headers={"Authorization": f"Bearer {ALICE}"}) as answer:
            found = await answer.json()
    assert (found["object"], found["key"], found["since"]) == ("list", "alice", CREATED)
    alice, batch = found["data"]
    assert (alice["name"], alice["running"], alice["waiting"], alice["requests"]) == ("alice", 1, 2, 0)
    assert batch == {
        "name": "batch",
        "running": 0,
        "waiting": 0,
        "requests": 1,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "completion_tokens": 4,
    }


def test_names_that_are_counted_are_bounded() -> None:
    usage = UsageByKey()
    for at in range(NAMES_MAX + 9):
        usage.add(str(at), Spent(3, 2, 1))
    figures = usage.figures({ANYONE.name: (9, 9), "7": (1, 2), "one more": (3, 4)})
    assert len(figures) == NAMES_MAX + 1
    by_name = {each["name"]: each for each in figures}
    assert (by_name[OTHERS]["requests"], by_name[OTHERS]["running"], by_name[OTHERS]["waiting"]) == (9, 3, 4)
    assert by_name["7"]["running"] == 1
    assert usage.figures({})[0]["running"] == 0
