"""Paths in a source checkout, for tests and benches."""

from __future__ import annotations

from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1]
ROOT = DEPLOY.parent
DEMO = DEPLOY / "demo"
DEMO_MODEL = DEMO / "relayline-demo.gguf"
DEMO_DRAFT_MODEL = DEMO / "relayline-demo-draft.gguf"  # drafts for it; only in a source checkout, as the next one
HYBRID_DEMO_MODEL = DEMO / "relayline-demo-hybrid.gguf"  # only in a source checkout: no wheel has it
