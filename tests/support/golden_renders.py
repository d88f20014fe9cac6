"""Rendered deployments as committed under tests/golden. `python -m tests.support.golden_renders` writes them again."""

from __future__ import annotations

import shutil
from pathlib import Path

from relayline.deploy.launch.gateway.pipelines import pipelines_behind
from relayline.deploy.manifest import load_manifest
from relayline.deploy.manifest.gateway import is_gateway, load_gateway
from relayline.deploy.render.targets import render, render_gateway

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
    ("house", "compose"),
    ("house", "kubernetes"),
)


def example_file(name: str) -> Path:
    """The example of that name, or a manifest that only tests use."""
    places = (EXAMPLES, EXAMPLES / "gateway", GOLDEN)
    return next(path for place in places if (path := place / f"{name}.yaml").exists())


def rendered(name: str, target: str) -> dict[str, str]:
    path = example_file(name)
    return rendered_gateway(path, target) if is_gateway(path) else render(load_manifest(path), target)


def rendered_gateway(path: Path, target: str) -> dict[str, str]:
    gateway = load_gateway(path)
    pipelines = pipelines_behind(gateway, {})
    return render_gateway(gateway, pipelines, target, {each.name: "." for each in pipelines})


def golden_files(name: str, target: str) -> dict[str, Path]:
    """The committed files by their names below the case's directory."""
    top = golden_dir(name, target)
    return {path.relative_to(top).as_posix(): path for path in sorted(top.rglob("*.yaml"))}


def golden_dir(name: str, target: str) -> Path:
    return GOLDEN / f"{name}-{target}"


if __name__ == "__main__":
    for case in CASES:
        shutil.rmtree(golden_dir(*case), ignore_errors=True)
        golden_dir(*case).mkdir(parents=True)
        for file, text in rendered(*case).items():
            (golden_dir(*case) / file).parent.mkdir(exist_ok=True)
            (golden_dir(*case) / file).write_text(text, encoding="utf-8")
