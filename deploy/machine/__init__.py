"""This machine as the launcher and the planner see it: cores, memory, directories."""
