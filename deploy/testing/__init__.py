"""The rig that tests and benches share: fakes, tiny models, a reference, real processes, the simulation."""
