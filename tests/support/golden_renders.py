"""Rendered deployments as committed under tests/golden. `python -m tests.support.golden_renders` writes them again."""

from __future__ import annotations

import shutil
from pathlib import Path

from relayline.deploy.manifest import load_manifest
from relayline.deploy.render.targets import render

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "golden"
EXAMPLES = ROOT.parent / "deploy" / "examples"
# The example for each target. Together they have every device, every probe and every kind of secret.
CASES = (
    ("smallest", "compose"),
    ("gpu-and-cpu", "compose"),
    ("one-machine", "compose"),
    ("several-hosts", "compose-hosts"),
    ("kubernetes", "kubernetes"),
    ("plaintext", "kubernetes"),
    ("gpu-and-cpu", "kubernetes"),
    ("cluster", "kubernetes"),
    ("replicas", "leaderworkerset"),
)


def example_file(name: str) -> Path:
    """The example of that name, or a manifest that only tests use."""
    path = EXAMPLES / f"{name}.yaml"
    return path if path.exists() else GOLDEN / f"{name}.yaml"


def rendered(name: str, target: str) -> dict[str, str]:
    return render(load_manifest(example_file(name)), target)


def golden_dir(name: str, target: str) -> Path:
    return GOLDEN / f"{name}-{target}"


if __name__ == "__main__":
    for case in CASES:
        shutil.rmtree(golden_dir(*case), ignore_errors=True)
        golden_dir(*case).mkdir(parents=True)
        for file, text in rendered(*case).items():
            (golden_dir(*case) / file).write_text(text, encoding="utf-8")
