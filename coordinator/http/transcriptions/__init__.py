"""OpenAI's transcriptions, /v1/audio/transcriptions: a form with a file as a chat, and its answers and events."""
