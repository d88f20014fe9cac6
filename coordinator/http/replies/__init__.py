"""From a plan to its reply: streams are opened, their tokens become text, and that is written as JSON or as events."""
