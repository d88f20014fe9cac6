"""The tables of the routes whose bodies are chats in another form than OpenAI's older one, or items of such chats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relayline.coordinator.http.conversations import asking as conversations_asking
from relayline.coordinator.http.messages import asking as messages_asking
from relayline.coordinator.http.ollama import asking as ollama_asking
from relayline.coordinator.http.requests.inner_form import Inner
from relayline.coordinator.http.responses import asking as responses_asking
from relayline.coordinator.http.transcriptions import asking as transcriptions_asking
from relayline.coordinator.http.workers.prepared import Route, Work

# Route -> what reads its body as a chat, and what makes an error about the chat one about the body.
CHATS: dict[Route, tuple[Callable[[bytes | bytearray, int], Inner], Callable[[Any], Any]]] = {
    "responses": (responses_asking.read, responses_asking.rename),
    "messages": (messages_asking.read, messages_asking.rename),
    "counted": (messages_asking.read_counted, messages_asking.rename),
    "transcriptions": (transcriptions_asking.read, transcriptions_asking.rename),
    "ollama_chat": (ollama_asking.read_chat, ollama_asking.rename),
}
# Route -> what reads its body, and needs nothing of the model.
ITEMS: dict[Route, Callable[[Work], bytes]] = {
    "references": lambda work: responses_asking.references(work.raw),
    "conversation": lambda work: conversations_asking.read_new(work.raw),
    "conversation_items": lambda work: conversations_asking.read_items(work.raw),
    "conversation_update": lambda work: conversations_asking.read_update(work.raw),
}
