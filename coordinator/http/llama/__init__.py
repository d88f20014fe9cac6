"""llama-server's own API: /completion, /infill, /slots; its bodies as completions, its answers and events."""
