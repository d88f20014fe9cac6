"""Launching a pipeline from a manifest on this machine: state directory, supervisor, logs, control from outside."""
