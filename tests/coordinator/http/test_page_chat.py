"""The page's chat in a real browser: Markdown, refusals, reloads, edits, results of tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import ContextLengthError, OverloadedError
from tests.support.browser import Tab, browsing, chromium
from tests.support.http_support import Gate, says, tokens
from tests.support.page_support import World, served

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(chromium() is None, reason="no Chromium is installed; `apt install chromium` on Debian"),
]

# An element as TAG[children], where text stands as it is.
TREE = """(node) => {
  const seen = (each) => each.nodeType === 3 ? each.data
    : `${each.tagName.toLowerCase()}${each.start > 1 ? each.start : ""}[${[...each.childNodes].map(seen).join("")}]`;
  return [...node.childNodes].map(seen).join(" ");
}"""
BUSY = "document.querySelector('.compose [type=submit]').disabled"
TURNS = "[...document.querySelectorAll('.turn')].map((turn) => turn.querySelector('.text').innerText.trim())"
PICK = "((name) => [...document.querySelectorAll('.chat button')].findLast((button) => button.textContent === name))"
COMPOSE = "document.querySelector('.compose')"
INPUT = "document.querySelector('.compose textarea')"

MARKDOWN = [
    ("# One\n### Three ##\n#no", "h3[One] h5[Three] p[#no]"),
    ("a **b *c*** `d` ~~e~~ _f_", "p[a strong[b em[c]] code[d] s[e] em[f]]"),
    ("2 * 3 * 4, snake_case_name, __init__, *args and **kw", "p[2 * 3 * 4, snake_case_name, __init__, *args and **kw]"),
    ("``a ` b``, \\*c\\*, `d", "p[code[a ` b], *c*, `d]"),
    ("1. a\n   - b\n\n     c\n2. d\n\n5. e", "ol[li[aul[li[p[b]p[c]]]]li[d]li[e]]"),
    ("text\n3) c\n- x\n+ y", "p[text] ol3[li[c]] ul[li[x]li[y]]"),
    ("in\n2024. Was\n\n- a\nb", "p[in\n2024. Was] ul[li[a\nb]]"),
    ("- [ ] do\n- [x] done", "ul[li[☐ do]li[☑ done]]"),
    ("> a\n> > b\n\nc\n\n---", "blockquote[p[a]blockquote[p[b]]] p[c] hr[]"),
    ("|a|b|\n|-|:-:|\n|`c`|d \\| e|\nend", "div[table[thead[tr[th[a]th[b]]]tbody[tr[td[code[c]]td[d | e]]]]] p[end]"),
    ("a | b", "p[a | b]"),
    ("```py\n# no *list*\n```\nx", "div[div[span[py]button[Copy]]pre[# no *list*]] p[x]"),
    ("~~~~\n```\n~~~~", "div[div[span[code]button[Copy]]pre[```]]"),
    ("1. a\n   ```\n   b\n    c\n   ```", "ol[li[p[a]div[div[span[code]button[Copy]]pre[b\n c]]]]"),
    ("see https://a.example/x_(y). [t](http://b.example)", "p[see a[https://a.example/x_(y)]. a[t]]"),
    ("![t](https://c.example/i.png) [u](javascript:alert(1))", "p[a[image: t] [u](javascript:alert(1))]"),
    ("<script>x()</script> <img src=x onerror=x()>", "p[<script>x()</script> <img src=x onerror=x()>]"),
]  # fmt: skip


@pytest.fixture(name="chat")
async def chat_fixture(tokenizer: Tokenizer) -> AsyncIterator[tuple[World, Tab]]:
    async with served(tokenizer) as world, browsing() as tab:
        await tab.look()
        await tab.go(f"{world.url}/#/chat")
        await tab.until("document.querySelector('#phase').textContent === 'ready'")
        yield world, tab


async def send(tab: Tab, text: str | None) -> None:
    """Send a message (None: what stands there), and wait until the model is asked."""
    await asking(tab, f"{INPUT}.value = {json.dumps(text)} ?? {INPUT}.value; {COMPOSE}.requestSubmit()")


async def asking(tab: Tab, script: str) -> None:
    """Run a script that makes the page ask the model, and wait until it has: the button to send is changed then."""
    await tab.value(f"""new Promise((done) => {{
      const seen = new MutationObserver(() => done(seen.disconnect()));
      seen.observe(document.querySelector('.compose [type=submit]'), {{ attributes: true }});
      {script};
    }})""")


async def settled(tab: Tab) -> list[str]:
    """Wait for the end of an answer and return the texts of the turns."""
    await tab.until(f"!{BUSY}")
    found = await tab.value(TURNS)
    assert isinstance(found, list)
    return found


async def click(tab: Tab, name: str) -> None:
    await tab.value(f"{PICK}({name!r}).click()")


async def test_answers_are_drawn_as_markdown_and_never_as_html(chat: tuple[World, Tab]) -> None:
    _, tab = chat
    await _draws_markdown(tab)
    await _links_show_where_they_lead(tab)
    await _draws_hostile_text_in_time(tab)
    await _keeps_what_stands(tab)
    await _sends_results_of_tools(tab)
    assert tab.problems == []


async def _draws_markdown(tab: Tab) -> None:
    for text, wanted in MARKDOWN:
        found = await tab.value(f"""import('/page/prose.js').then(({{ Prose }}) => {{
          const element = document.createElement('div');
          new Prose(element).show({json.dumps(text)});
          return ({TREE})(element);
        }})""")
        assert found == wanted, text


async def _links_show_where_they_lead(tab: Tab) -> None:
    found = await tab.value("""import('/page/prose.js').then(({ Prose }) => {
      const element = document.createElement('div');
      new Prose(element).show('[bank](https://evil.example/?a=1 "bank")');
      const link = element.querySelector('a');
      return [link.href, link.title, link.target, link.rel];
    })""")
    assert found == ["https://evil.example/?a=1", "https://evil.example/?a=1", "_blank", "noopener noreferrer nofollow"]


async def _draws_hostile_text_in_time(tab: Tab) -> None:
    hostile = ("'>'.repeat(20000)", "'- '.repeat(20000)", "'**a '.repeat(10000)", "'['.repeat(40000)",
               "Array(4000).fill('|a|').join('\\n')", "'`'.repeat(30001)", "'http://a('.repeat(4000)",
               "Array(3000).fill(0).map((_, at) => ' '.repeat(at % 60) + '- a').join('\\n')")  # fmt: skip
    for text in hostile:
        took_ms = await tab.value(f"""import('/page/prose.js').then(({{ Prose }}) => {{
          const began = performance.now();
          new Prose(document.createElement('div')).show({text});
          return performance.now() - began;
        }})""")
        assert took_ms < 10_000, text  # what grows with the square takes minutes


async def _keeps_what_stands(tab: Tab) -> None:
    kept = await tab.value("""import('/page/prose.js').then(({ Prose }) => {
      const element = document.createElement('div'), prose = new Prose(element);
      prose.show('one\\n\\n```js\\na');
      const before = [...element.children], pre = element.querySelector('pre');
      prose.show('one\\n\\n```js\\na\\nb\\n```\\nend');
      return [before.every((each, at) => each === element.children[at]), pre.textContent, element.children.length];
    })""")
    assert kept == [True, "a\nb", 3]


async def test_the_model_recommends_how_tokens_are_picked_and_a_person_decides(chat: tuple[World, Tab]) -> None:
    world, tab = chat
    await send(tab, "one")
    await settled(tab)
    world.facts["recommended"] = {"temperature": 0.6, "top_p": 0.95}
    await tab.until("document.querySelector('#chat-temperature').placeholder === '0.6'")
    assert await tab.value("document.querySelector('#chat-top_p').placeholder") == "0.95"
    await send(tab, "two")
    await settled(tab)
    await tab.value("document.querySelector('#chat-temperature').value = '0.2'")
    await send(tab, "three")
    await settled(tab)
    asked = [request.sampling.temperature for request in world.generator.requests]
    assert asked == [0.7, 1, 0.2], "1 is what this server takes where nothing is asked for"


async def test_a_token_high_up_shows_its_probabilities_in_view(chat: tuple[World, Tab]) -> None:
    world, tab = chat
    world.generator.script = says(b"a\n" * 150)
    await tab.value("document.querySelector('#chat-probs').click()")
    await send(tab, "one")
    await settled(tab)
    await tab.value("(scrollTo(0, 0), document.querySelector('.tok').focus())")
    box, top = await tab.value("""[document.querySelector('.probs').getBoundingClientRect().toJSON(),
      document.querySelector('.compose').getBoundingClientRect().top]""")
    assert 0 < box["top"] < box["bottom"] <= top, "not below the message box, nor below the page"
    for key in ("ArrowRight", "End"):
        await tab.value(
            f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
        )
    assert await tab.value("[...document.querySelectorAll('.tok')].filter((each) => each.tabIndex === 0).length") == 1
    assert await tab.value("document.activeElement === document.querySelector('.tok:last-child')")
    for view in ("plan", "chat"):
        await tab.value(f"location.hash = '#/{view}'")
        await tab.until(f"document.title.toLowerCase().startsWith({view!r})")
    left = "document.documentElement.scrollHeight - innerHeight - scrollY"
    assert await tab.value(f"scrollY > 0 && {left} < 2"), "who comes back sees the newest"


async def test_a_refused_message_comes_back_and_the_chat_stays_as_it_was(chat: tuple[World, Tab]) -> None:
    world, tab = chat
    await send(tab, "one")
    assert await settled(tab) == ["one", "hello"]
    world.generator.refusals = [OverloadedError("too many requests wait", retry_after_s=2)] * 2
    await send(tab, "two")
    assert await settled(tab) == ["one", "hello"]
    assert await tab.value(f"{INPUT}.value") == "two"
    assert await tab.value("document.querySelector('.compose .bad').innerText") == "Too many requests wait."
    await asking(tab, PICK + "('Regenerate').click()")
    assert await settled(tab) == ["one", "hello"], "the answer that was to be replaced is not lost"
    await send(tab, None)
    assert await settled(tab) == ["one", "hello", "two", "hello"]


async def test_a_chat_that_outgrows_the_context_goes_on_with_its_last_turns(chat: tuple[World, Tab]) -> None:
    world, tab = chat
    full = ContextLengthError.of_prompt(64, "70 tokens", "messages")
    above = "document.querySelector('.log .limit')?.nextElementSibling.querySelector('.text').innerText.trim()"
    for text in ("one", "two", "three"):
        await send(tab, text)
        await settled(tab)
    lengths = [len(request.prompt_tokens) for request in world.generator.requests]
    world.generator.refusals = [full]
    await send(tab, "four.")
    said = ["one", "hello", "two", "hello", "three", "hello", "four.", "hello"]
    assert await settled(tab) == said, "all of it stays to be read"
    assert lengths[0] < len(world.generator.requests[-1].prompt_tokens) < lengths[2]
    assert await tab.value(above) == "three", "what the model does not see is told apart"
    world.generator.refusals = [full] * 3
    await send(tab, "five")
    assert await settled(tab) == said, "a question that is too long by itself comes back"
    assert await tab.value(f"{INPUT}.value") == "five"
    assert "maximum context length" in await tab.value("document.querySelector('.compose .bad').innerText")
    assert await tab.value(above) == "three", "and the model sees what it saw before"
    await click(tab, "New chat")
    assert await tab.value("document.querySelector('.limit')") is None


async def test_what_came_of_an_answer_stays(chat: tuple[World, Tab], monkeypatch: pytest.MonkeyPatch) -> None:
    world, tab = chat
    monkeypatch.setattr("relayline.coordinator.http.edge.sse._LAST_READ_S", 4.0)  # for the page of a busy host, too
    await _says_that_an_answer_broke_off(world, tab)
    await tab.value(f"{PICK}('New chat').click()")
    await _stops_by_keyboard(world, tab)


async def _says_that_an_answer_broke_off(world: World, tab: Tab) -> None:
    gate, error = Gate(), OverloadedError("no room")
    world.generator.script = lambda request: [*tokens(request, b"half", ends=False), gate, error]
    await send(tab, "one")
    await tab.until(f"{TURNS}[1] === 'half'")
    gate.opened.set()
    assert await settled(tab) == ["one", "half"]
    assert "broke off" in await tab.value("document.querySelector('.turn.assistant .by').innerText")
    assert "No room" in await tab.value("document.querySelector('.compose .bad').innerText")


async def test_a_chat_outlives_a_reload_until_a_new_one_begins(chat: tuple[World, Tab]) -> None:
    world, tab = chat
    world.generator.script = says(b"**bold**")
    await send(tab, "one")
    await settled(tab)
    await tab.reload()
    await tab.until("document.querySelector('.turn strong')?.textContent === 'bold'")
    assert await tab.value(TURNS) == ["one", "bold"]
    await send(tab, "two")
    await settled(tab)
    first, second = (request.prompt_tokens for request in world.generator.requests)
    assert len(second) > len(first) + len("**bold**"), "it goes on where it was"
    await click(tab, "New chat")
    await tab.reload()
    await tab.until("document.querySelector('.log .empty') !== null")
    assert await tab.value(TURNS) == []


async def test_an_edited_message_replaces_what_followed_it(chat: tuple[World, Tab]) -> None:
    _, tab = chat
    for text in ("one", "two"):
        await send(tab, text)
        await settled(tab)
    await tab.value("document.querySelector('.turn.user .acts button').click()")
    assert await tab.value(f"{INPUT}.value") == "one"
    await click(tab, "Cancel")
    assert await tab.value(f"[{INPUT}.value, {TURNS}.length]") == ["", 4]
    await tab.value("document.querySelector('.turn.user .acts button').click()")
    await send(tab, "three")
    assert await settled(tab) == ["three", "hello"]


async def _stops_by_keyboard(world: World, tab: Tab) -> None:
    gate = Gate()
    world.generator.script = lambda request: [*tokens(request, b"some", ends=False), gate]
    await send(tab, "one")
    await gate.reached.wait()
    await tab.until(f"{TURNS}[1] === 'some'")
    escape = "new KeyboardEvent('keydown', {key: 'Escape', bubbles: true})"
    await tab.value(f"{INPUT}.dispatchEvent({escape})")
    assert await settled(tab) == ["one", "some"]
    assert "stopped by you" in await tab.value("document.querySelector('.turn.assistant .by').innerText")
    gate.opened.set()


async def _sends_results_of_tools(tab: Tab) -> None:
    sent = await tab.value("""import('/page/turn.js').then(({ Turn }) => {
      const turn = new Turn('assistant', { edit() {}, results() {} });
      turn.calls = [{ id: 'c1', name: 'now', arguments: '{}', result: '' },
                    { id: 'c2', name: 'add', arguments: '{"a": 1}', result: '' }];
      turn.draw(false, false);
      const [, second] = turn.called.querySelectorAll('textarea');
      const before = turn.called.querySelector(':scope > button').disabled;
      second.value = '2';
      second.dispatchEvent(new Event('input'));
      return [before, turn.called.querySelector(':scope > button').disabled, turn.messages];
    })""")  # fmt: skip
    call = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert sent == [True, False, [{"role": "assistant", "content": "", "tool_calls": [call]},
                                  {"role": "tool", "tool_call_id": "c2", "content": "2"}]]  # fmt: skip


async def test_adapters_are_models_to_choose_among(tokenizer: Tokenizer, chat: tuple[World, Tab]) -> None:
    _, without = chat
    model = "document.querySelector('#chat-model')"
    assert await without.value(f"{model}.parentElement.hidden"), "without adapters there is nothing to choose"
    async with served(tokenizer, adapters=("sql", "style")) as world, browsing() as tab:
        await tab.look()
        await tab.go(f"{world.url}/#/chat")
        await tab.until(f"{model} && {model}.options.length === 3 && !{model}.parentElement.hidden")
        await tab.value(f"{model}.value = 'style'")
        await send(tab, "hi")
        await settled(tab)
        assert await tab.value(f"{model}.value") == "style", "looks at the pipeline change no choice"
        assert [request.adapter for request in world.generator.requests] == [2]
        assert tab.problems == []
