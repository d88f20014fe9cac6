"""The forms of errors besides OpenAI's: middlewares around everything else, which write what went wrong anywhere."""

from __future__ import annotations

from relayline.coordinator.http.messages.errors import messages_errors
from relayline.coordinator.http.ollama.errors import ollama_errors

ERROR_FORMS = (messages_errors, ollama_errors)
