"""Stages that compute on the processor share no GPU, whatever else their manifest says of GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relayline.deploy.manifest import Manifest, parse_manifest
from relayline.deploy.planning.shared import gpu_numbers, gpu_sharing

GPU = {"device": "gpu", "devices": "CUDA0"}


def manifest(*stages: dict[str, Any]) -> Manifest:
    spec = {"model": {"path": "m.gguf"}, "stages": [{"name": f"s{at}", **each} for at, each in enumerate(stages)]}
    whole = {"apiVersion": "relayline.dev/v1alpha1", "kind": "Pipeline", "metadata": {"name": "x"}, "spec": spec}
    return parse_manifest(json.dumps(whole).encode(), "x.yaml")


def test_stages_on_one_gpu_share_it() -> None:
    two = manifest(GPU, {}, GPU)
    assert gpu_numbers(two) == [0, -1, 0]
    (line,) = gpu_sharing(two)
    assert "s0" in line
    assert "s2" in line
    assert "s1" not in line


@pytest.mark.parametrize("alone", [{"devices": "none"}, {"splitMode": "none"}])
def test_stages_on_the_processor_share_none(alone: dict[str, Any]) -> None:
    both = manifest({"device": "cpu", **alone}, {"device": "cpu", **alone})
    assert gpu_numbers(both) == [-1, -1]
    assert gpu_sharing(both) == ()
