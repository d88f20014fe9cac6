"""The TLS context of HTTP ports says in one line why its files cannot be used."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from relayline.wire.common.errors import UsageError
from relayline.wire.links.tls_server import server_context


def test_a_missing_file_and_a_damaged_one_are_named(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    with pytest.raises(UsageError) as missing:
        server_context(cert, key)
    assert missing.value.message == f"{cert} and {key} cannot be used: No such file or directory"
    cert.write_text("no certificate\n")
    key.write_text("no key\n")
    with pytest.raises(UsageError) as damaged:
        server_context(cert, key)
    with pytest.raises(ssl.SSLError) as raised:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    assert damaged.value.message == f"{cert} and {key} cannot be used: {raised.value.strerror}"
    assert "None" not in damaged.value.message
