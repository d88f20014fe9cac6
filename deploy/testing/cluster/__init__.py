"""A whole cluster on virtual time, with losses: `run.simulate(seed)` plays one history and checks its invariants."""
