"""From the bytes of a body to the pipeline's request: everything whose cost grows with the body.

It runs in a separate process (`body_worker.py`): a body may be megabytes of brackets, a text may be one word of a
megabyte, and strangers write a model's chat template. Its result is small and typed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from relayline.coordinator.answers.template import Conversation
from relayline.coordinator.http.llama import asking as llama_asking
from relayline.coordinator.http.ollama import asking as ollama_asking
from relayline.coordinator.http.requests import lora, tokenizing, validation
from relayline.coordinator.http.requests.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    decode_body,
)
from relayline.coordinator.http.requests.defaults import Body, with_defaults, with_recommended
from relayline.coordinator.http.requests.grammar_tasks import grammar_from, task_of_chat, task_of_prompt
from relayline.coordinator.http.requests.inner_form import Inner
from relayline.coordinator.http.requests.plan import Plan
from relayline.coordinator.http.requests.plan_tokens import PlanTokens
from relayline.coordinator.http.requests.prompts import check_fit, check_tokens, split_prompt
from relayline.coordinator.http.workers.other_chats import CHATS, ITEMS
from relayline.coordinator.http.workers.prepared import (
    Asked,
    Enter,
    Prepared,
    Route,
    Setting,
    Style,
    Work,
    packed,
    unpacked,
)
from relayline.coordinator.http.workers.read_alone import READ_ALONE
from relayline.coordinator.media.parts import Marked, take_media
from relayline.coordinator.text.chat import ChatTemplate, content_text
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.wire.common.errors import InvalidRequestError

_OLLAMA: tuple[Route, ...] = ("ollama_chat", "ollama_generate")
_GOES_ON = "q7VxK2goes-on"  # marks the place where a turn is to be continued, while its chat is rendered


class Preparer:
    """Reads and checks bodies for one application, in a worker."""

    def __init__(self, setting: Setting, tokenizer: Tokenizer) -> None:
        """Nothing is done yet that could take long."""
        self._setting, self._tokenizer = setting, tokenizer
        self._made: Conversation | None = None
        self._plan_tokens = PlanTokens(tokenizer)
        self._answers: dict[Route, Callable[[Work], bytes]] = {
            "style": self._style,
            "grammar": self._grammar,
            "tokenize": self._tokenized,
            "detokenize": self._detokenized,
            "template": self._templated,
            **ITEMS,
        }
        self._prepares: dict[Route, Callable[[Work], Prepared]] = {
            "chat": self._chat,
            "completions": self._completion,
            "llama": self._llama,
            "infill": self._llama,
            "ollama_generate": self._ollama_generated,
            **dict.fromkeys(CHATS, self._of_other_dialect),
            **{route: functools.partial(read, setting, tokenizer) for route, read in READ_ALONE.items()},
        }

    def answer(self, asked: Asked, raw: bytes | bytearray, enter: Enter) -> bytes:
        """Return the answer to one request, in its route's form; `enter` gets the name of each activity. Raises its
        errors.
        """
        enter("reading")
        work = Work(asked, raw, enter)
        if asked.route in self._answers:
            return self._answers[asked.route](work)
        return msgspec.msgpack.encode(self._prepares[asked.route](work))

    def _style(self, work: Work) -> bytes:
        work.enter("template")
        chat = _chat_template(self._setting)
        fault = chat.fault()
        return msgspec.msgpack.encode(Style.of(Conversation(chat, self._tokenizer).style, fault))

    def _conversation(self) -> Conversation:
        if self._made is None:
            style = self._setting.style
            self._made = Conversation(
                _chat_template(self._setting), self._tokenizer, style.tool_style() if style else None
            )
        return self._made

    def _completion(self, work: Work) -> Prepared:
        return self._completed(work, decode_body(work.raw, CompletionBody))

    def _completed(self, work: Work, body: CompletionBody, *, has_limit: bool = True) -> Prepared:
        """`has_limit`: the answer is short unless it says how long it may be."""
        limits, body = self._setting.limits, self._with_defaults(work, body)
        plan = validation.plan_completion(body, limits, work.asked.seed)
        if not has_limit:
            plan = dataclasses.replace(plan, max_tokens_default=None)
        sent: Sequence[str | list[int]] = split_prompt(body.prompt, plan.n, limits)
        if body.suffix and isinstance(body.prompt, str):
            work.enter("tokens")
            sent = [llama_asking.filled_in(self._tokenizer, body.prompt, body.suffix, param="prompt")]
        return self._prepared_completion(work, body, plan, sent)

    def _llama(self, work: Work) -> Prepared:
        """Read a body in llama-server's own form."""
        limits, tokenizer = self._setting.limits, self._tokenizer
        if work.asked.route == "infill":
            found = llama_asking.read_infill(work.raw, tokenizer, limits, work.ctx_tokens)
        else:
            found = llama_asking.read(work.raw, tokenizer, limits)
        plan = llama_asking.in_its_form(found, validation.plan_completion(found.body, limits, work.asked.seed))
        prepared = self._prepared_completion(work, found.body, plan, found.prompts)
        texts = [tokenizer.decode(unpacked(prompt)) for prompt in prepared.prompts] if tokenizer.has_text else []
        prepared.answer_options = llama_asking.answer_options(found, plan, texts or [""] * len(prepared.prompts))
        return prepared

    def _ollama_generated(self, work: Work) -> Prepared:
        """Read the body of /api/generate: a chat of one question, or a prompt."""
        found = ollama_asking.read_generate(work.raw)
        try:
            if isinstance(found, Inner):
                return self._prepared_chat(work, found.chat)
            return self._completed(work, found, has_limit=False)
        except InvalidRequestError as error:
            raise ollama_asking.rename(error) from None

    def _with_defaults(self, work: Work, body: Body) -> Body:
        """Return a body with the sampling options of the model, and then of its dialect, where it names none."""
        body = with_recommended(body, self._setting.limits.recommended)
        return with_defaults(body, ollama_asking.DEFAULTS) if work.asked.route in _OLLAMA else body

    def _model_of(self, body: GenerationBody) -> str:
        limits = self._setting.limits
        return lora.model_of(validation.check_model(body.model, self._setting.model_id, limits), body.lora, limits.lora)

    def _prepared_completion(
        self, work: Work, body: CompletionBody, plan: Plan, sent: Sequence[str | list[int]]
    ) -> Prepared:
        tokenizer, ctx_tokens = self._tokenizer, work.ctx_tokens
        model = self._model_of(body)
        plan = self._plan_tokens.of_texts(plan)
        self._check_shape(plan)
        work.enter("tokens")
        start_ns = time.monotonic_ns()
        check_fit([len(each) for each in sent if not isinstance(each, str)], ctx_tokens)
        prompts: list[list[int]] = []
        for each in sent:
            if isinstance(each, str):
                add_special = body.add_special_tokens is not False
                prompts.append(tokenizer.encode(each, add_special=add_special, ctx_tokens=ctx_tokens))
            else:
                check_tokens(each, tokenizer.n_vocab, "prompt")
                prompts.append(each)
            check_fit(list(map(len, prompts)), ctx_tokens)
        echoes = [each if isinstance(each, str) else tokenizer.decode(each) for each in sent] if plan.echo else []
        prediction = self._plan_tokens.of_prediction(plan, ctx_tokens)
        texts = [("user", tokenizer.decode(prompt)) for prompt in prompts] if work.asked.wants_content else []
        return Prepared(
            model=model,
            plan=_lean(plan),
            prompts=[packed(prompt) for prompt in prompts],
            echoes=echoes,
            prediction=packed(prediction),
            is_thinking=False,
            grammar_task=task_of_prompt(plan),
            input_json=_messages_json(texts),
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            is_plain=True,
        )

    def _of_other_dialect(self, work: Work) -> Prepared:
        read, rename = CHATS[work.asked.route]
        inner = read(work)
        try:
            prepared = self._prepared_chat(work, inner.chat)
        except InvalidRequestError as error:
            raise rename(error) from None
        prepared.answer_options = inner.answer_options
        return prepared

    def _chat(self, work: Work) -> Prepared:
        return self._prepared_chat(work, decode_body(work.raw, ChatBody))

    def _prepared_chat(self, work: Work, body: ChatBody) -> Prepared:
        limits, tokenizer, ctx_tokens = self._setting.limits, self._tokenizer, work.ctx_tokens
        body = self._with_defaults(work, body)
        model = self._model_of(body)
        plan = self._plan_tokens.of_texts(validation.plan_chat(body, limits, work.asked.seed))
        if not tokenizer.has_text:
            text = "this model has no tokenizer; send token ids to /v1/completions"
            raise InvalidRequestError(text, param="messages")
        self._check_shape(plan)
        work.enter("template")
        rendered, messages, marked = self._rendered(body, plan)
        begun = content_text(body.messages[-1].content, "messages") if body.continue_final_message else ""
        is_thinking = self._conversation().is_thinking(rendered, begun)
        thinking = self._conversation().thinking
        plan = self._plan_tokens.with_thoughts(plan, thinking, ctx_tokens, is_thinking=is_thinking)
        work.enter("tokens")
        start_ns = time.monotonic_ns()
        prompt = self._chat_tokens(rendered, marked, ctx_tokens)
        if plan.scores_prompt and marked.media:
            raise InvalidRequestError.of_field("prompt_logprobs", "not for prompts with images or audio")
        prediction = self._plan_tokens.of_prediction(plan, ctx_tokens)
        texts = [(each["role"], marked.shown(_text(each))) for each in messages] if work.asked.wants_content else []
        return Prepared(
            model=model,
            plan=_lean(plan),
            prompts=[packed(prompt)],
            echoes=[],
            prediction=packed(prediction),
            is_thinking=is_thinking,
            grammar_task=task_of_chat(plan, is_thinking=is_thinking),
            input_json=_messages_json(texts),
            start_ns=start_ns,
            end_ns=time.monotonic_ns(),
            media=marked.media,
        )

    def _chat_tokens(self, rendered: str, marked: Marked, ctx_tokens: int) -> list[int]:
        """Return the tokens of a rendered chat, with a number below 0 in place of each file."""
        if not marked.media:
            return self._tokenizer.encode_chat(rendered, ctx_tokens)
        (first, *texts), numbers = marked.split(rendered)
        tokens = self._tokenizer.encode_chat(first, ctx_tokens)
        for number, text in zip(numbers, texts, strict=True):
            tokens.append(-1 - number)
            tokens += self._tokenizer.encode(text, add_special=False, ctx_tokens=ctx_tokens, param="messages")
            check_fit([len(tokens)], ctx_tokens)
        return tokens

    def _rendered(self, body: ChatBody, plan: Plan) -> tuple[str, list[dict[str, Any]], Marked]:
        """Return the prompt of a checked chat as text, its messages as the template saw them, and its media.

        Raises InvalidRequestError, with the template's own fault if it has one.
        """
        if self._setting.style is not None and self._setting.style.fault:
            raise InvalidRequestError(self._setting.style.fault, param="messages")
        messages = [msgspec.to_builtins(message) for message in body.messages]
        marked = Marked(messages, [], "")
        if any(self._setting.takes):
            marked = take_media(messages, self._setting.takes, self._setting.limits.media_hosts)
        messages = marked.messages
        conversation = self._conversation()
        variables = conversation.variables(body.reasoning_effort, body.chat_template_kwargs or {})
        if body.continue_final_message or body.add_generation_prompt is False:
            variables = {**variables, "add_generation_prompt": False}
        if body.continue_final_message:
            messages[-1]["content"] = f"{content_text(messages[-1]['content'], 'messages')}{_GOES_ON}"
        rendered = conversation.render(messages, plan.offered.shown if plan.offered else (), variables)
        return (_up_to_mark(rendered) if body.continue_final_message else rendered), messages, marked

    def _templated(self, work: Work) -> bytes:
        body = decode_body(work.raw, ChatBody)
        plan = validation.plan_chat(body, self._setting.limits, 0)
        work.enter("template")
        rendered, _, marked = self._rendered(body, plan)
        return msgspec.json.encode({"prompt": marked.shown(rendered)})

    def _check_shape(self, plan: Plan) -> None:
        if plan.shape is not None and not self._tokenizer.has_text:
            raise InvalidRequestError.of_field(plan.shape.param, "this model has no tokenizer")

    def _grammar(self, work: Work) -> bytes:
        return grammar_from(work.raw, self._conversation).encode()

    def _detokenized(self, work: Work) -> bytes:
        return tokenizing.detokenized(decode_body(work.raw, DetokenizeBody), self._tokenizer)

    def _tokenized(self, work: Work) -> bytes:
        body, tokenizer = decode_body(work.raw, TokenizeBody), self._tokenizer
        if [body.content, body.prompt, body.messages].count(None) != 2:
            raise InvalidRequestError.of_field("content", "send one of content, prompt and messages")
        if body.messages is not None:
            chat = decode_body(work.raw, ChatBody)  # the prompt is made as a chat's is
            plan = validation.plan_chat(chat, self._setting.limits, 0)
            work.enter("template")
            rendered = self._rendered(chat, plan)[0]
            work.enter("tokens")
            ids = tokenizer.encode_chat(rendered)
        elif body.prompt is not None:
            work.enter("tokens")
            ids = tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
        else:
            work.enter("tokens")
            ids = tokenizer.encode(
                body.content or "", add_special=body.add_special, parse_special=body.parse_special, param="content"
            )
        return tokenizing.tokenized(body, ids, tokenizer, work.asked.ctx_tokens)


def as_sent(route: Route, error: InvalidRequestError) -> InvalidRequestError:
    """Return an error about a chat as one about the body that the chat was made from."""
    return CHATS[route][1](error) if route in CHATS else error


def _chat_template(setting: Setting) -> ChatTemplate:
    template = functools.partial(ChatTemplate, bos_text=setting.bos_text, eos_text=setting.eos_text)
    of_tools = template(setting.tool_template) if setting.tool_template is not None else None
    return template(setting.template, for_tools=of_tools)


def _up_to_mark(rendered: str) -> str:
    """Return a prompt up to the place where its last turn continues.

    Raises InvalidRequestError if the template drops that.
    """
    prompt, mark, _ = rendered.rpartition(_GOES_ON)
    if not mark:
        text = "the model's chat template does not end an assistant's turn"
        raise InvalidRequestError.of_field("continue_final_message", text)
    return prompt


def _lean(plan: Plan) -> Plan:
    """Return the plan without the parts that only its making needed."""
    return dataclasses.replace(
        plan,
        prediction="",
        shape=dataclasses.replace(plan.shape, texts=()) if plan.shape else None,
        offered=dataclasses.replace(plan.offered, shown=(), schemas={}) if plan.offered else None,
    )


def _messages_json(messages: Sequence[tuple[str, str]]) -> str:
    parts = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in messages]
    return json.dumps(parts) if parts else ""


def _text(message: Mapping[str, Any]) -> str:
    """Return a chat message's text; parts of other kinds have none."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
