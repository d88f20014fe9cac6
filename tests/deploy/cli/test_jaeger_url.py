"""The address of the traces' page: passed on by `up`, and refused at the start if it is no URL."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.deploy.cli.serve import serve_command
from relayline.deploy.manifest.dump import dump_manifest
from relayline.wire.common.errors import UsageError
from relayline.wire.settings.page_url import read_page_url
from relayline.wire.settings.table import ServingSettings
from tests.support.launches import launched

URL = "http://traces.example:16686"


def test_up_hands_it_on_and_a_manifest_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = launched(monkeypatch, "m.gguf", "--jaeger-url", URL).manifest
    (tmp_path / "settled.yaml").write_text(dump_manifest(manifest))
    assert f"jaegerUrl: {URL}" in (tmp_path / "settled.yaml").read_text()
    arguments = ["--manifest", str(tmp_path / "settled.yaml")]
    assert serve_command.make_context("serve", arguments).params["jaeger_url"] == URL


@pytest.mark.parametrize(
    "url", ["traces.example:16686", "ftp://traces.example", "http://", "http://[", "javascript:alert(1)"]
)
def test_a_bad_jaeger_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by `up`, before it does anything: it is a setting's form."""
    with pytest.raises(UsageError, match=r"--jaeger-url .*: give an address such as http://HOST:16686"):
        ServingSettings(jaeger_url=url)
    with pytest.raises(UsageError, match=r"--jaeger-url .*: give an address"):
        launched(monkeypatch, "m.gguf", "--jaeger-url", url)


def test_a_slash_at_its_end_changes_nothing() -> None:
    assert read_page_url(URL + "/") == URL
    assert read_page_url("https://box/jaeger/") == "https://box/jaeger"
