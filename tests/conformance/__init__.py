"""Suites that nobody here wrote, run against the demo model by `make conformance`."""
