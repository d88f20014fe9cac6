"""OpenAI's Responses API, /v1/responses: its bodies as chats, its answers and events, and its stored responses."""
