"""Ollama's own API, for programs that speak no other: editors, home automation, notes."""
