"""What a chat model's answer is made of: what it thought, what it says, and the tools that it calls."""
