"""Deployments rendered from a manifest: Compose, plain Kubernetes, LeaderWorkerSet. Text in, text out; pure."""
