"""The planner: which stage holds which layers, and what that will give. Pure: facts in, numbers out."""
