"""The host of an address is the one that would be connected to."""

from __future__ import annotations

import pytest

from relayline.coordinator.media.addresses import host_of, url_of


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("https://Example.org/a.png?b=c#d", "example.org"),
        ("http://example.org.:8080/", "example.org"),
        ("https://[::1]:80/", "::1"),
        ("ftp://example.org/a.png", ""),
        ("file:///etc/passwd", ""),
        ("//example.org/a.png", ""),
        ("example.org", ""),
        ("https://user:secret@example.org/", ""),
        ("https://example.org@10.0.0.1/", ""),
        ("https://example.org:99999/", ""),
        ("https://example.org:x/", ""),
        ("https:///a.png", ""),
        ("http://[::1", ""),
        ("http://⑩.0.0.1/", "10.0.0.1"),
        ("http://１２７。0。0。1/", "127.0.0.1"),
        ("http://BÜCHER.example/", "xn--bcher-kva.example"),
        ("http://exam\tple.org/", "example.org"),
        ("http://example.org\\@10.0.0.1/", ""),
    ],
)
def test_the_host_of_an_address(address: str, host: str) -> None:
    assert host_of(url_of(address)) == host
