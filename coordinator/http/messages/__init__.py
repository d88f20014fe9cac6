"""Anthropic's Messages API, /v1/messages: its bodies as chats, its answers, events and errors."""
