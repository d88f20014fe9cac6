"""Shared by tests and benches: fakes, tiny models, a reference model, real processes, the simulation."""
