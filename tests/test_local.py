"""`relayline up --model`: what its children are told, and children that end, fail to start or are being started."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from deploy.child import child_environment
from tests.processes import running
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4, tokenizer=True)


# --- what children are told -------------------------------------------------------------------------------------------


def test_children_inherit_everything_but_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {
        "RELAYLINE_TOKEN": "join",
        "RELAYLINE_API_KEY": "key",
        "RELAYLINE_API_KEYS": "keys",
        "RELAYLINE_PROTECT_METRICS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "HTTPS_PROXY": "http://proxy:3128",
        "LD_LIBRARY_PATH": "/opt/cuda",
    }
    flags = ("RELAYLINE_CTX", "RELAYLINE_LANES", "RELAYLINE_JOIN_LISTEN", "RELAYLINE_NAMES", "RELAYLINE_HTTP")
    for name, value in kept.items() | {(flag, "1") for flag in flags}:
        monkeypatch.setenv(name, value)
    environment = child_environment()
    assert {name: environment.get(name) for name in kept} == kept
    assert not environment.keys() & set(flags)
    assert environment["PATH"]


def test_variables_are_flags_of_up_and_not_of_its_children(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("me: 0123456789abcdef\n")
    keys.chmod(0o600)
    for name, value in (("CTX", "64"), ("LANES", "3"), ("NO_CALIBRATE", "1"), ("MODEL_ID", "mine"), ("API_KEYS", keys)):
        monkeypatch.setenv(f"RELAYLINE_{name}", str(value))
    flags = ("--split-dir", tmp_path / "split", "--threads", "1", "--http", "127.0.0.1:0", "--json")
    with running("up", "--model", model, *flags) as up:
        assert (up.event["ctx"], up.event["lanes"], up.event["model"]) == (64, 3, "mine")
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{up.event['url']}/v1/models", timeout=60)
        refused.value.close()
