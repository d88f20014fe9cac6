"""The forms of errors besides OpenAI's: one middleware around everything else writes what went wrong anywhere."""

from __future__ import annotations

from relayline.coordinator.http.edge.error_form import errors_in
from relayline.coordinator.http.messages.errors import MESSAGES_FORM
from relayline.coordinator.http.ollama.errors import OLLAMA_FORM

errors_in_form = errors_in((MESSAGES_FORM, OLLAMA_FORM))
