"""`relayline chat`: talk to a running server in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from relayline.deploy.cli.console_http import Coordinator, key_option, url_option
from relayline.deploy.cli.options import FloatRange, IntRange, Line
from relayline.wire.common.errors import ContextLengthError, RelaylineError, UsageError
from relayline.wire.common.texts import counted, printable

ROUTE = "/v1/chat/completions"
MODELS = "/v1/models"
QUESTION_CHARS_MAX = 1 << 20  # of a question from a pipe; no context holds more
TEMPERATURE_MAX = 2.0  # of OpenAI's API
TEMPERATURE = 0.7  # as the page's chat, where a model recommends none; 1 is too much for small and quantised ones
GOES_ON = "\\"  # at the end of a line: the question has another one
NEW, END, HELP = ("/new",), ("/exit", "/quit", "/bye"), ("/help", "/?")
KEYS = "/new begins another chat, \\ at the end of a line adds a line, Ctrl-C stops an answer, Ctrl-D ends"
_KEPT = "\n\t\u200d"  # line ends and tabs, and what joins parts of an emoji


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer as far as it has come. All times are monotonic seconds."""

    began_s: float
    text: str = ""
    thoughts: str = ""
    first_s: float | None = None
    last_s: float = 0.0
    n_tokens: int = 0
    """As the server counts them; 0 until it has said so, at the end."""
    finish: str = ""

    def take(self, event: dict[str, Any], now_s: float) -> tuple[str, str]:
        """Take one event of the stream; returns what it adds to the thoughts and to the text."""
        self.n_tokens = (event.get("usage") or {}).get("completion_tokens") or self.n_tokens
        thought = text = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish
        if thought or text:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        self.thoughts += thought
        self.text += text
        return thought, text

    def figures(self) -> str:
        """Return how long it took, in words."""
        if self.first_s is None or not self.n_tokens:
            return "no answer" if self.first_s is None else "stopped"
        words = [counted(self.n_tokens, "token")]
        if self.n_tokens > 1 and self.last_s > self.first_s:
            words.append(f"{(self.n_tokens - 1) / (self.last_s - self.first_s):.1f} tok/s")
        words.append(f"the first after {(self.first_s - self.began_s) * 1e3:.0f} ms")
        if self.finish == "length":
            words.append("cut off: the limit of tokens is reached")
        return ", ".join(words)


@dataclasses.dataclass(slots=True)
class Chat:
    """The messages so far, and the fields of every request."""

    fields: dict[str, Any]
    """Of every request, beside its messages."""
    system: str = ""
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def body(self, question: str) -> dict[str, Any]:
        """Return the body of the request that asks the next question. Raises UsageError for text that is not UTF-8."""
        for what, text in (("system message", self.system), ("question", question)):
            if any("\ud800" <= each <= "\udfff" for each in text):  # so Python keeps bytes that are none
                raise UsageError(f"the {what} is not UTF-8; convert it, such as with iconv")
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*first, *self.messages, {"role": "user", "content": question}]
        return {"messages": messages, "stream": True, "stream_options": {"include_usage": True}} | self.fields

    def note(self, question: str, answer: str) -> None:
        """Keep a question and its answer, as far as it has come."""
        if answer:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def forget_half(self) -> bool:
        """Drop the older half of the turns, one at least; False where there are none."""
        n_turns = len(self.messages) // 2
        del self.messages[: 2 * -(-n_turns // 2)]
        return n_turns > 0


@click.command("chat", short_help="Talk to a running pipeline in the terminal.")
@click.argument("question", required=False)
@click.option("--system", default="", help="System message, before every chat.")
@click.option("--model", type=Line("name"), default="", help="Which model answers, where the server has several.")
@click.option("--max-tokens", type=IntRange(1), default=None, help="Most tokens of one answer.")
@click.option(
    "--temperature", type=FloatRange(0, TEMPERATURE_MAX), default=None,
    help=f"0: always the likeliest token.  [default: as the model recommends, else {TEMPERATURE}]",
)  # fmt: skip
@url_option
@key_option
def chat_command(question: str | None, system: str, url: str, api_key: str, **given: Any) -> None:
    """Chat with the pipeline that runs here, or with any OpenAI-compatible server.

    With QUESTION, or a question from a pipe, it prints one answer and ends. A chat that outgrows the model's context
    forgets its oldest turns.
    """
    fields = {name: given[name] for name in ("model", "max_tokens", "temperature") if given[name] not in (None, "")}
    chat, server = Chat(fields, system), (url, api_key)
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read(QUESTION_CHARS_MAX + 1)
        if len(question) > QUESTION_CHARS_MAX:
            raise UsageError(f"the question is longer than {QUESTION_CHARS_MAX:,} characters; send less")
    if question is None:
        _talk(chat, server)
        return
    if not question.strip():
        raise UsageError("there is no question; give one, or run `relayline chat` in a terminal")
    answer = Answer(time.monotonic())
    asyncio.run(_ask(chat.body(question), server, answer, _print_text))
    click.echo()


def shown(text: str) -> str:
    """Return a model's text with nothing in it that a terminal obeys, but for line ends and tabs."""
    if text.isprintable():
        return text
    return "".join(each if each in _KEPT else printable(each) for each in text)


def _print_text(thought: str, text: str) -> None:
    """Print an addition to the text alone."""
    click.echo(shown(text), nl=False)


def _print_all() -> Callable[[str, str], None]:
    """Return a function that prints additions: thoughts dimmed, and the text below them."""
    is_thinking = False

    def show(thought: str, text: str) -> None:
        nonlocal is_thinking
        if thought:
            click.secho(shown(thought), dim=True, nl=False)
            is_thinking = True
        if text:
            click.echo(("\n\n" if is_thinking else "") + shown(text), nl=False)
            is_thinking = False

    return show


async def _ask(body: dict[str, Any], server: tuple[str, str], answer: Answer, show: Callable[[str, str], None]) -> None:
    """Ask a question and show its answer as it comes. Raises ContextLengthError, StartError."""
    async with Coordinator(*server) as coordinator:
        if "temperature" not in body and not await _recommends_temperature(coordinator, body.get("model", "")):
            body = body | {"temperature": TEMPERATURE}
        async with contextlib.aclosing(coordinator.events(ROUTE, body)) as events:
            async for event in events:
                show(*answer.take(event, time.monotonic()))


async def _recommends_temperature(coordinator: Coordinator, name: str) -> bool:
    """Whether requests to a model that say no temperature get one from the model. Empty name: the first model."""
    try:
        models = (await coordinator.get(MODELS, ("data",)))["data"]
        found: dict[str, Any] = next((each for each in models if name in ("", each["id"])), {})
        return "temperature" in (found.get("default_parameters") or {})
    except (RelaylineError, TypeError, KeyError, AttributeError):  # the question itself says what is wrong
        return False


def _talk(chat: Chat, server: tuple[str, str]) -> None:
    """Ask the user's questions until there are no more."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives `input` the arrow keys and a history
    url = server[0].rstrip("/")
    click.secho(f"{url}: {KEYS}", dim=True)
    while (question := _question()) is not None:
        word = question.strip().lower()
        if word in END:
            return
        if word in NEW:
            chat.messages.clear()
            click.secho("a new chat", dim=True)
        elif word in HELP:
            click.secho(KEYS, dim=True)
        elif word:
            _one_turn(chat, server, question)


def _question() -> str | None:
    """Read a question of one or more lines; None at the end."""
    lines: list[str] = []
    prompt = "> "
    while True:
        try:
            line = input(prompt)
        except EOFError:
            click.echo()
            return None
        except KeyboardInterrupt:  # drops what was typed
            click.echo()
            return ""
        if not line.endswith(GOES_ON):
            return "\n".join([*lines, line])
        lines.append(line.removesuffix(GOES_ON))
        prompt = ". "


def _ask_in_context(chat: Chat, server: tuple[str, str], question: str, answer: Answer) -> None:
    """Ask a question after as many of the last turns as the model's context holds. Raises as `_ask`."""
    while True:
        try:
            asyncio.run(_ask(chat.body(question), server, answer, _print_all()))
            return
        except ContextLengthError:
            if not chat.forget_half():
                raise
            click.secho("the chat is longer than the context, so its oldest turns are forgotten", dim=True)


def _one_turn(chat: Chat, server: tuple[str, str], question: str) -> None:
    answer = Answer(time.monotonic())
    try:
        _ask_in_context(chat, server, question, answer)
    except KeyboardInterrupt:
        pass  # the server ends the request when its connection closes
    except RelaylineError as error:
        click.echo("\n" * bool(answer.text or answer.thoughts) + f"relayline: error: {error.message}", err=True)
        chat.note(question, answer.text)
        if chat.messages:  # they may be what is too long
            click.secho(KEYS, dim=True)
        return
    chat.note(question, answer.text)
    click.echo()
    click.secho(f"({answer.figures()})", dim=True)
