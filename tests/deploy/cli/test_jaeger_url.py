"""Where traces are looked at: handed on by `up`, and refused at the start where it is no address of a web page."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayline.coordinator.serve import _checked_url
from relayline.deploy.cli.processes import serve_command
from relayline.deploy.cli.up import _up_model, up_command
from relayline.wire.common.errors import UsageError

URL = "http://traces.example:16686"


def test_up_hands_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("relayline.deploy.launch.splits.split_for", lambda *_: tmp_path)
    monkeypatch.setattr(
        "relayline.deploy.launch.local.LocalConfig", lambda **given: told.extend(given["serve_arguments"])
    )
    monkeypatch.setattr("relayline.wire.common.process.run", lambda _: None)
    arguments = ["--model", "m.gguf", "--http", "127.0.0.1:0", "--jaeger-url", URL]
    with up_command.make_context("up", arguments) as context:
        _up_model(context.params)
    assert serve_command.make_context("serve", told).params["jaeger_url"] == URL


@pytest.mark.parametrize(
    "url", ["traces.example:16686", "ftp://traces.example", "http://", "http://[", "javascript:alert(1)"]
)
def test_what_is_no_page_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--jaeger-url"):
        _checked_url(url)


def test_a_slash_at_its_end_changes_nothing() -> None:
    assert _checked_url(URL + "/") == URL
    assert _checked_url("https://box/jaeger/") == "https://box/jaeger"
    assert _checked_url("") == ""
