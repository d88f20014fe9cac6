"""The tables of the routes whose bodies are chats in another form than OpenAI's older one, or items of such chats."""

from __future__ import annotations

from collections.abc import Callable

from relayline.coordinator.http.conversations import asking as conversations_asking
from relayline.coordinator.http.messages import asking as messages_asking
from relayline.coordinator.http.ollama import asking as ollama_asking
from relayline.coordinator.http.requests.inner_form import Inner
from relayline.coordinator.http.responses import asking as responses_asking
from relayline.coordinator.http.transcriptions import asking as transcriptions_asking
from relayline.coordinator.http.workers.prepared import Route, Work
from relayline.wire.common.errors import InvalidRequestError

Rename = Callable[[InvalidRequestError], InvalidRequestError]
# Route -> what reads its body as a chat, and what makes an error about the chat one about the body.
CHATS: dict[Route, tuple[Callable[[Work], Inner], Rename]] = {
    "responses": (lambda work: responses_asking.read(work.raw, work.asked.n_context), responses_asking.rename),
    "messages": (lambda work: messages_asking.read(work.raw), messages_asking.rename),
    "counted": (lambda work: messages_asking.read_counted(work.raw), messages_asking.rename),
    "transcriptions": (lambda work: transcriptions_asking.read(work.raw), transcriptions_asking.rename),
    "ollama_chat": (lambda work: ollama_asking.read_chat(work.raw), ollama_asking.rename),
}
# Route -> what reads its body, and needs nothing of the model.
ITEMS: dict[Route, Callable[[Work], bytes]] = {
    "references": lambda work: responses_asking.references(work.raw),
    "conversation": lambda work: conversations_asking.read_new(work.raw),
    "conversation_items": lambda work: conversations_asking.read_items(work.raw),
    "conversation_update": lambda work: conversations_asking.read_update(work.raw),
}
