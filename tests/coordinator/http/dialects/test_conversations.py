"""/v1/conversations and responses that go on with one, by the official client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from relayline.coordinator.http.responses.kept_files import LONG_BYTES
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.testing.vocabulary_files import CHATML
from relayline.wire.common.errors import OverloadedError, StageLostError
from tests.support.batch_world import begun as begin_batch
from tests.support.batch_world import ended as batch_ended
from tests.support.batch_world import lines_of, request_lines, serving_batches
from tests.support.http_support import MODEL, WAIT_S, FakeGenerator, Gate, Step, says, serving, tokens
from tests.support.kept_responses import serving_kept
from tests.support.openai_client import client_of, leave, openai_client, prompt_of
from tests.support.polling import pause

CALLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}" + CHATML + "{% for m in messages %}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}{% endfor %}"
)
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
LONG_CALL = b'<tool_call>\n{"name": "f", "arguments": {"a": "' + b"x" * 40 + b'"}}\n</tool_call>'
CALL = b'<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def said(text: str, role: str = "user") -> Any:
    return {"role": role, "content": text}


async def texts_in(client: openai.AsyncOpenAI, id: str) -> list[str]:
    """The texts of a conversation's messages, the first one first."""
    items = [item async for item in client.conversations.items.list(id, order="asc", limit=2)]
    return [item.content[0].text for item in items]  # type: ignore[union-attr]


class Held(FakeGenerator):
    """Says `hello`, and waits at a gate in the middle of it."""

    def __init__(self) -> None:
        self.gate = Gate()
        super().__init__(self.play)

    def play(self, request: Any) -> Iterable[Step]:
        yield from tokens(request, b"he", ends=False)
        yield self.gate
        yield from tokens(request, b"llo")


async def test_a_conversation_from_its_beginning_to_its_end(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator()) as (client, _):
        begun = await client.conversations.create(items=[said("one")], metadata={"topic": "demo"})
        assert (begun.object, begun.metadata) == ("conversation", {"topic": "demo"})
        assert begun.id.startswith("conv_")
        assert begun.created_at > 1_700_000_000
        assert await client.conversations.retrieve(begun.id) == begun
        updated = await client.conversations.update(begun.id, metadata={"topic": "other"})
        assert (
            updated
            == await client.conversations.retrieve(begun.id)
            == begun.model_copy(update={"metadata": {"topic": "other"}})
        )
        assert (await client.conversations.update(begun.id, metadata=None)).metadata == {}
        assert await texts_in(client, begun.id) == ["one"], "an update leaves the items alone"
        gone = await client.conversations.delete(begun.id)
        assert gone.model_dump() == {"id": begun.id, "deleted": True, "object": "conversation.deleted"}
        for asking in (
            client.conversations.retrieve(begun.id),
            client.conversations.update(begun.id, metadata={}),
            client.conversations.delete(begun.id),
            client.conversations.items.create(begun.id, items=[said("two")]),
            client.conversations.items.retrieve("msg_1", conversation_id=begun.id),
            client.conversations.items.delete("msg_1", conversation_id=begun.id),
            client.responses.create(model=MODEL, input="hi", conversation=begun.id),
            client.responses.input_tokens.count(model=MODEL, input="hi", conversation=begun.id),
        ):
            with pytest.raises(openai.NotFoundError, match=f"no conversation '{begun.id}' is here") as refused:
                await asking
            assert refused.value.code == "conversation_not_found"


async def test_items_get_an_id_a_status_and_the_parts_of_their_types(tokenizer: Tokenizer) -> None:
    sent: list[Any] = [
        said("be brief", "developer"),
        {"type": "message", "role": "user", "id": "mine", "content": [{"type": "input_text", "text": "hi"}]},
        said("hello", "assistant"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"},
    ]
    async with client_of(tokenizer, FakeGenerator()) as (client, _):
        begun = await client.conversations.create()
        assert begun.metadata == {}
        added = await client.conversations.items.create(begun.id, items=sent, include=["reasoning.encrypted_content"])
        assert (added.object, added.has_more) == ("list", False)
        assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
        prefixes = [str(item.id).partition("_")[0] for item in added.data]
        assert prefixes == ["msg", "msg", "msg", "rs", "fc", "fco", "ctc", "ctco"]
        assert {item.status for item in added.data} == {"completed"}  # type: ignore[union-attr]
        assert [part.type for item in added.data[:3] for part in item.content] == [  # type: ignore[union-attr]
            "input_text",
            "input_text",
            "output_text",
        ]
        one = await client.conversations.items.retrieve(str(added.data[5].id), conversation_id=begun.id)
        assert one == added.data[5]
        listed = await client.conversations.items.list(begun.id, order="asc")
        assert listed.data == added.data
        again = await client.conversations.items.create(begun.id, items=added.to_dict()["data"])  # type: ignore[arg-type]
        assert not {item.id for item in again.data} & {item.id for item in added.data}, "ids are of one item each"


async def test_items_are_listed_in_pages_of_either_order(tokenizer: Tokenizer) -> None:
    words = [str(number) for number in range(25)]
    async with client_of(tokenizer, FakeGenerator()) as (client, _):
        begun = await client.conversations.create(items=list(map(said, words[:20])))
        await client.conversations.items.create(begun.id, items=list(map(said, words[20:])))
        assert await texts_in(client, begun.id) == words
        page = await client.conversations.items.list(begun.id)
        assert [item.content[0].text for item in page.data] == words[:4:-1]  # type: ignore[union-attr]
        assert (page.first_id, page.last_id, page.has_more) == (page.data[0].id, page.data[-1].id, True)  # type: ignore[attr-defined]
        rest = await client.conversations.items.list(begun.id, after=str(page.data[-1].id))
        assert [item.content[0].text for item in rest.data] == words[4::-1]  # type: ignore[union-attr]
        assert not rest.has_more
        for query, param in (({"after": "msg_1"}, "after"), ({"limit": 101}, "limit"), ({"limit": 0}, "limit")):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.conversations.items.list(begun.id, **query)  # type: ignore[arg-type]
            assert refused.value.param == param
        empty = await client.conversations.create()
        page = await client.conversations.items.list(empty.id)
        assert (page.data, page.has_more, page.model_extra["first_id"]) == ([], False, None)  # type: ignore[index]


async def test_an_item_can_be_deleted(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"x"))) as (client, served):
        begun = await client.conversations.create(items=[said("one"), said("two")])
        first = (await client.conversations.items.list(begun.id, order="asc", limit=1)).data[0]
        assert await client.conversations.items.delete(str(first.id), conversation_id=begun.id) == begun
        assert await texts_in(client, begun.id) == ["two"]
        for asking in (client.conversations.items.delete, client.conversations.items.retrieve):
            with pytest.raises(openai.NotFoundError, match=f"no item '{first.id}' is in the conversation"):
                await asking(str(first.id), conversation_id=begun.id)
        await client.responses.create(model=MODEL, input="three", conversation=begun.id)
        assert "one" not in prompt_of(tokenizer, served)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_goes_on_with_a_conversation_and_adds_to_it(tokenizer: Tokenizer, *, is_stream: bool) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"blue"))) as (client, served):
        begun = await client.conversations.create(items=[said("one")])
        responses = []
        for text, name in (("two", begun.id), ("three", {"id": begun.id})):
            asked: dict[str, Any] = {"model": MODEL, "input": text, "conversation": name}
            if is_stream:
                stream = await client.responses.create(**asked, stream=True)
                responses.append([event async for event in stream][-1].response)
            else:
                responses.append(await client.responses.create(**asked))
        prompt = prompt_of(tokenizer, served)
        places = [prompt.index(word) for word in ("one", "two", "blue", "three")]
        assert places == sorted(places)
        assert [each.conversation.id for each in responses] == [begun.id] * 2
        assert await texts_in(client, begun.id) == ["one", "two", "blue", "three", "blue"]
        listed = await client.conversations.items.list(begun.id)
        assert listed.data[0].id == responses[-1].output[0].id, "an answer's item is the same in both"
        inputs = await client.responses.input_items.list(responses[-1].id)
        assert [each.id for each in inputs.data] == [listed.data[1].id], "and so is what it answers"
        plain = await client.responses.create(model=MODEL, input="hi")
        assert "conversation" not in plain.to_dict()


async def test_tools_and_an_incomplete_answer_are_added_as_they_are(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(CALL)), CALLS) as (client, served):
        begun = await client.conversations.create()
        asked: dict[str, Any] = {"model": MODEL, "conversation": begun.id, "tools": [TOOL]}
        first = await client.responses.create(input="weather?", **asked)
        result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}  # type: ignore[union-attr]
        served.generator.script = says(b"hello")
        await client.responses.create(input=[result], max_output_tokens=2, **asked)
        assert '"name": "f"' in prompt_of(tokenizer, served)
        items = [item async for item in client.conversations.items.list(begun.id, order="asc")]
        assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message"]
        assert (items[-1].status, items[-1].content[0].text) == ("incomplete", "he")  # type: ignore[union-attr]
        served.generator.script = says(LONG_CALL)
        cut = await client.responses.create(input="and?", max_output_tokens=len(LONG_CALL) - 40, **asked)
        assert [(item.type, item.status) for item in cut.output] == [("function_call", "incomplete")]  # type: ignore[union-attr]
        last = (await client.conversations.items.list(begun.id)).data[0]
        assert last.type == "message", "a call that has not been finished could not be answered"


async def test_a_response_that_is_not_stored_is_added_all_the_same(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"blue"))) as (client, _):
        begun = await client.conversations.create()
        response = await client.responses.create(model=MODEL, input="one", conversation=begun.id, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        assert await texts_in(client, begun.id) == ["one", "blue"]


async def test_an_item_of_the_conversation_may_be_sent_by_its_id(tokenizer: Tokenizer) -> None:
    async with client_of(tokenizer, FakeGenerator(says(b"x"))) as (client, served):
        begun = await client.conversations.create(items=[said("one")])
        item = (await client.conversations.items.list(begun.id)).data[0]
        reference: Any = {"type": "item_reference", "id": item.id}
        await client.responses.create(model=MODEL, input=[reference], conversation=begun.id)
        assert prompt_of(tokenizer, served).count("one") == 2


async def test_input_tokens_are_counted_with_the_conversation(tokenizer: Tokenizer) -> None:
    generator = Held()
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.conversations.create(items=[said("one")])
        counted = await client.responses.input_tokens.count(model=MODEL, input="two", conversation=begun.id)
        alone = await client.responses.input_tokens.count(model=MODEL, input="two")
        assert await texts_in(client, begun.id) == ["one"], "counting adds nothing"
        asking = asyncio.create_task(client.responses.create(model=MODEL, input="two", conversation=begun.id))
        await generator.gate.reached.wait()
        again = await client.responses.input_tokens.count(model=MODEL, input="two", conversation=begun.id)
        generator.gate.opened.set()
        assert (await asking).usage.input_tokens == counted.input_tokens == again.input_tokens  # type: ignore[union-attr]
        assert counted.input_tokens > alone.input_tokens


async def test_a_long_conversation_is_copied_elsewhere_than_on_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_joined: list[int] = []

    async def to_thread(function: Any, *arguments: Any) -> Any:
        if getattr(function, "__name__", "") == "join":
            n_joined.append(sum(map(len, arguments[0])))
        return function(*arguments)

    text = "x" * LONG_BYTES
    async with client_of(tokenizer, FakeGenerator(ctx_tokens=2 * LONG_BYTES)) as (client, _):
        begun = await client.conversations.create(items=[said(text)])
        monkeypatch.setattr(asyncio, "to_thread", to_thread)
        asked = client.responses.input_tokens.count
        assert (await asked(model=MODEL, conversation=begun.id, input="y")).input_tokens > LONG_BYTES
        assert [n > LONG_BYTES for n in n_joined] == [True]
        assert (await client.conversations.items.list(begun.id)).data[0].content[0].text == text  # type: ignore[union-attr]
        assert [n > LONG_BYTES for n in n_joined] == [True, True]


async def test_one_response_at_a_time_goes_on_with_a_conversation(tokenizer: Tokenizer) -> None:
    generator = Held()
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.conversations.create(items=[said("one")])
        item = (await client.conversations.items.list(begun.id)).data[0]
        asked: dict[str, Any] = {"model": MODEL, "input": "two", "conversation": begun.id}
        asking = asyncio.create_task(client.responses.create(**asked))
        async with asyncio.timeout(WAIT_S):
            await generator.gate.reached.wait()
        for changing in (
            client.responses.create(**asked),
            client.responses.create(**asked, background=True),
            client.conversations.items.create(begun.id, items=[said("three")]),
            client.conversations.items.delete(str(item.id), conversation_id=begun.id),
        ):
            with pytest.raises(openai.BadRequestError) as refused:  # the Agents SDK looks for this class and code
                await changing
            assert refused.value.code == "conversation_locked"
        assert (await client.conversations.update(begun.id, metadata={"a": "b"})).metadata == {"a": "b"}
        assert await texts_in(client, begun.id) == ["one"]
        other = await client.conversations.create()
        generator.gate.opened.set()
        await client.responses.create(model=MODEL, input="x", conversation=other.id)
        await asking
        assert await texts_in(client, begun.id) == ["one", "two", "hello"]
        assert (await client.conversations.retrieve(begun.id)).metadata == {"a": "b"}
        await client.responses.create(**asked)
        assert len(await texts_in(client, begun.id)) == 5


async def test_a_response_that_fails_adds_nothing_and_lets_the_next_one_begin(tokenizer: Tokenizer) -> None:
    generator = FakeGenerator(lambda request: [*tokens(request, b"he", ends=False), StageLostError("stage 1 is lost")])
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.conversations.create(items=[said("one")])
        asked: dict[str, Any] = {"model": MODEL, "input": "two", "conversation": begun.id}
        generator.refusals = [OverloadedError("all lanes are taken")]
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(**asked)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**asked | {"input": [{"type": "computer_call"}]})
        with pytest.raises(openai.APIStatusError, match="stage 1 is lost"):
            await client.responses.create(**asked)
        with contextlib.suppress(Exception):  # the connection is cut: the client chooses the error
            async for _ in await client.responses.create(**asked, stream=True):
                pass
        background = await client.responses.create(**asked, background=True)
        while (await client.responses.retrieve(background.id)).status != "failed":
            await pause()
        assert await texts_in(client, begun.id) == ["one"]
        generator.script = says(b"blue")
        await client.responses.create(**asked)
        assert await texts_in(client, begun.id) == ["one", "two", "blue"]


async def test_a_client_that_leaves_adds_nothing_and_lets_the_next_one_begin(tokenizer: Tokenizer) -> None:
    generator = Held()
    async with client_of(tokenizer, generator) as (client, served):
        begun = await client.conversations.create()
        asked: dict[str, Any] = {"model": MODEL, "input": "two", "conversation": begun.id}
        stream = await client.responses.create(**asked, stream=True)
        async with asyncio.timeout(WAIT_S):
            await generator.gate.reached.wait()
            await leave(stream)
            await served.generator.streams[0].closed.wait()
        generator.script = says(b"blue")
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    await client.responses.create(**asked)
                    break
                except openai.BadRequestError:  # its handler has not ended yet
                    await pause()
        assert await texts_in(client, begun.id) == ["two", "blue"]


async def test_a_background_response_has_its_turn_until_it_ends(tokenizer: Tokenizer) -> None:
    generator = Held()
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.conversations.create()
        asked: dict[str, Any] = {"model": MODEL, "conversation": begun.id, "background": True}
        first = await client.responses.create(input="one", **asked)
        assert first.conversation is not None
        with pytest.raises(openai.BadRequestError, match="another response goes on with it"):
            await client.responses.create(input="two", **asked)
        cancelled = await client.responses.cancel(first.id)
        assert cancelled.status == "cancelled"
        assert await texts_in(client, begun.id) == [], "one that is cancelled adds nothing"
        generator.gate.opened.set()
        stream = await client.responses.create(input="two", **asked, stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.completed"
        assert await texts_in(client, begun.id) == ["two", "hello"], "before its client sees the end"
        await client.responses.create(input="three", model=MODEL, conversation=begun.id)
        assert await texts_in(client, begun.id) == ["two", "hello", "three", "hello"]


async def test_a_conversation_that_is_deleted_meanwhile_gets_nothing(tokenizer: Tokenizer) -> None:
    generator = Held()
    async with client_of(tokenizer, generator) as (client, _):
        begun = await client.conversations.create()
        asking = asyncio.create_task(client.responses.create(model=MODEL, input="one", conversation=begun.id))
        async with asyncio.timeout(WAIT_S):
            await generator.gate.reached.wait()
        await client.conversations.delete(begun.id)
        generator.gate.opened.set()
        assert (await asking).output_text == "hello"
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(begun.id)


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("", {"items": [said("x")] * 21}, "items", "length <= 20"),
        ("", {"items": [{"type": "computer_call"}]}, "items[0]", "'computer_call' are not served"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]", "'item_reference' are not served"),
        ("", {"items": [said("x", "king")]}, "items[0].role", "must be one of user"),
        ("", {"items": [{"type": "function_call", "name": "f"}]}, "items[0].call_id", "must be text"),
        ("", {"metadata": {str(at): "" for at in range(17)}}, "metadata", "length <= 16"),
        ("/ID", {}, "metadata", "required field is missing"),
        ("/ID", {"metadata": {"a": "x" * 513}}, "metadata[...]", "length <= 512"),
        ("/ID/items", {}, "items", "missing"),
        ("/ID/items", {"items": [said("x")] * 21}, "items", "length <= 20"),
    ],
)
async def test_what_a_conversation_cannot_hold_is_refused_in_one_line(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str, text: str
) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession(f"{served.url}") as session:
        async with session.post("/v1/conversations", json={}) as reply:
            id = (await reply.json())["id"]
        async with session.post(f"/v1/conversations{path.replace('ID', id)}", json=body) as reply:
            assert reply.status == 400
            error = (await reply.json())["error"]
        assert error["param"] == param
        assert text in error["message"]
        assert "\n" not in error["message"]
        async with session.get(f"/v1/conversations/{id}/items") as reply:
            assert (await reply.json())["data"] == []


async def test_the_routes_answer_head_options_and_a_path_without_v1(tokenizer: Tokenizer) -> None:
    async with serving(tokenizer) as served, aiohttp.ClientSession(f"{served.url}") as session:
        async with session.post("/conversations", json={}) as reply:
            id = (await reply.json())["id"]
        for path in (f"/v1/conversations/{id}", f"/conversations/{id}", f"/conversations/{id}/items/?order=asc"):
            async with session.head(path) as reply:
                assert reply.status == 200
        async with session.options(f"/v1/conversations/{id}") as reply:
            assert reply.status == 204
            assert {each.strip() for each in reply.headers["Allow"].split(",")} >= {"GET", "POST", "DELETE", "HEAD"}
        async with session.put(f"/v1/conversations/{id}", json={}) as reply:
            assert reply.status == 405


async def test_a_key_written_with_escapes_is_refused(tokenizer: Tokenizer) -> None:
    body = '{"model": "org/tiny", "input": "hi", "conv\\u0065rsation": "conv_1"}'
    async with (
        serving(tokenizer) as served,
        aiohttp.ClientSession() as session,
        session.post(f"{served.url}/v1/responses", data=body) as reply,
    ):
        assert (reply.status, (await reply.json())["error"]["param"]) == (400, "conversation")


async def test_a_key_finds_its_own_conversations_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: alice-key-0123456789\nbob: bob-key-012345678901\n")
    keys.chmod(0o600)
    async with (
        serving_kept(tokenizer, tmp_path / "kept", keys=keys) as url,
        openai_client(url, "alice-key-0123456789") as alice,
        openai_client(url, "bob-key-012345678901") as bob,
    ):
        begun = await alice.conversations.create(items=[said("one")])
        item = (await alice.conversations.items.list(begun.id)).data[0]
        for asking in (
            bob.conversations.retrieve(begun.id),
            bob.conversations.update(begun.id, metadata={}),
            bob.conversations.delete(begun.id),
            bob.conversations.items.create(begun.id, items=[said("two")]),
            bob.conversations.items.retrieve(str(item.id), conversation_id=begun.id),
            bob.conversations.items.delete(str(item.id), conversation_id=begun.id),
            bob.responses.create(model=MODEL, input="hi", conversation=begun.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await asking
        assert await texts_in(alice, begun.id) == ["one"]


async def test_a_key_finds_its_own_however_the_header_is_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Nor does it have another share of what is kept for each way of writing it."""
    (keys := tmp_path / "keys").write_text("alice: alice-key-0123456789\n")
    keys.chmod(0o600)
    key = "alice-key-0123456789"
    async with (
        serving_kept(tokenizer, tmp_path / "kept", keys=keys) as url,
        openai_client(url, key) as alice,
        aiohttp.ClientSession() as session,
    ):
        begun = await alice.conversations.create()
        where = f"{url}/v1/conversations/{begun.id}"
        for headers in (
            {"Authorization": f"bearer {key}"}, {"Authorization": f"BEARER   {key}"}, {"X-Api-Key": key},
        ):  # fmt: skip
            async with session.get(where, headers=headers) as found:
                assert found.status == 200, headers


async def test_lines_of_a_batch_go_on_with_their_keys_conversations_one_at_a_time(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: alice-key-0123456789\nbob: bob-key-012345678901\n")
    keys.chmod(0o600)
    generator = Held()
    async with (
        serving_batches(tokenizer, tmp_path / "kept", generator, keys=keys) as (url, _),
        openai_client(url, "alice-key-0123456789") as alice,
        openai_client(url, "bob-key-012345678901") as bob,
    ):
        begun = await alice.conversations.create()
        text = request_lines("one", "two", url="/v1/responses", input="hi", prompt=None, conversation=begun.id)
        refused = await begin_batch(bob, text, endpoint="/v1/responses")
        codes = [line["response"]["status_code"] for line in await errors_of(bob, refused)]
        assert codes == [404, 404]
        batch = await begin_batch(alice, text, endpoint="/v1/responses")
        async with asyncio.timeout(WAIT_S):
            while (await alice.batches.retrieve(batch.id)).request_counts.failed < 1:  # type: ignore[union-attr]
                await pause()
        generator.gate.opened.set()
        (line,) = await errors_of(alice, batch)
        assert line["response"]["body"]["error"]["code"] == "conversation_locked"
        assert await texts_in(alice, begun.id) == ["hi", "hello"]


async def errors_of(client: openai.AsyncOpenAI, batch: Any) -> list[Any]:
    """The lines that a batch has refused, once it has ended."""
    return [*(await lines_of(client, (await batch_ended(client, batch.id)).error_file_id)).values()]
