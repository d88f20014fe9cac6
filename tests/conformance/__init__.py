"""Test suites of other projects, run against the demo model by `make conformance`."""
