"""The parts of a chat model's answer: its reasoning, its text and its tool calls."""
