"""Which addresses of the web `--media-hosts` allows, and which lists it takes."""

from __future__ import annotations

import pytest

from relayline.wire.settings.media_hosts import is_public, may_be_asked, read_media_hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("example.org", ("example.org",)),
        ("Example.org, *.Example.com", ("example.org", "*.example.com")),
        ("*", ("*",)),
        ("10.0.0.7,[2001:db8::1],::1", ("10.0.0.7", "[2001:db8::1]", "::1")),
    ],
)
def test_lists_are_read(text: str, names: tuple[str, ...]) -> None:
    assert read_media_hosts(text) == names


@pytest.mark.parametrize("text", ["", "a,,b", "https://example.org", "example.org/pictures", "a b", "*.*", "-a", "**"])
def test_other_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give names of hosts separated by commas"):
        read_media_hosts(text)


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="65 hosts; at most 64"):
        read_media_hosts(",".join(f"host{number}.example" for number in range(65)))


@pytest.mark.parametrize(
    ("host", "names", "may"),
    [
        ("example.org", ("example.org",), True),
        ("www.example.org", ("example.org",), False),
        ("example.org.evil.example", ("example.org",), False),
        ("www.example.org", ("*.example.org",), True),
        ("a.b.example.org", ("*.example.org",), True),
        ("example.org", ("*.example.org",), False),
        ("notexample.org", ("*.example.org",), False),
        ("::1", ("[::1]",), True),
        ("2001:db8::5", ("[2001:DB8:0::5]".lower(),), True),
        ("127.0.0.1", ("127.0.0.1",), True),
        ("example.org", (), False),
        ("", ("*",), False),
        ("example.org", ("*",), True),
        ("9.9.9.9", ("*",), True),
        ("127.0.0.1", ("*",), False),
        ("10.1.2.3", ("*",), False),
        ("169.254.169.254", ("*",), False),
        ("2130706433", ("*",), False),
        ("127.1", ("*",), False),
        ("::1", ("*",), False),
        ("fe80::1%eth0", ("*",), False),
    ],
)
def test_hosts_that_may_be_asked(host: str, names: tuple[str, ...], may: bool) -> None:
    assert may_be_asked(host, names) is may


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("9.9.9.9", True),
        ("2620:fe::fe", True),
        ("0.0.0.0", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:9.9.9.9", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b:1::a00:1", False),
        ("fec0::5", False),
        ("::a00:1", False),
        ("::ffff:0:a00:1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
        ("ff02::1", False),
        ("no address", False),
    ],
)
def test_addresses_of_the_internet(address: str, public: bool) -> None:
    assert is_public(address) is public
