"""The building blocks of a manifest: the base class and the constrained scalars."""

from __future__ import annotations

from typing import Annotated

import pydantic
from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from relayline.deploy.machine.cores import LIST
from relayline.wire.links.security import is_loopback

# Patterns stay within what ECMA 262 and Rust's regular expressions share: the JSON Schema publishes them.
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
HOST = r"^([A-Za-z0-9_]([-A-Za-z0-9_.]{0,251}[A-Za-z0-9_.])?|[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.%a-z0-9]*)$"
LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
LABEL_VALUE = r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
CORES = rf"^(auto|any|{LIST})$"
TEXT_CHARS_MAX = 4_096  # of any one value: longer than every path and URL that systems accept


class Part(pydantic.BaseModel):
    """A mapping of the manifest: frozen, camelCase in YAML, snake_case in Python, unknown keys refused."""

    model_config = ConfigDict(
        defer_build=True,  # values are built only when read or shown, and nested parts once
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


DnsLabel = Annotated[str, Field(pattern=DNS_LABEL)]
"""Lower-case letters, digits and inner dashes, at most 63 characters: a name that DNS and Kubernetes accept."""
Host = Annotated[str, Field(pattern=HOST)]
"""A host name or an IP address, without port and brackets."""
Port = Annotated[int, Field(ge=0, le=65_535)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=TEXT_CHARS_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""One line without control characters."""
FilePath = Annotated[str, Field(min_length=1, max_length=TEXT_CHARS_MAX, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""A path; relative ones resolve against the manifest's directory, `~` against the user's home."""
CoreList = Annotated[str, Field(max_length=TEXT_CHARS_MAX, pattern=CORES)]
"""Cores such as 0-3,8; or `auto`, or `any`."""
LabelKey = Annotated[str, Field(pattern=LABEL_KEY)]
LabelValue = Annotated[str, Field(pattern=LABEL_VALUE)]
Labels = dict[LabelKey, LabelValue]


def is_local(host: str) -> bool:
    """Return whether a host of a manifest is this machine's loopback: localhost, 127.* or ::1.

    Other names of this machine count as another host: the launcher starts only plainly local ones.
    """
    return is_loopback(host)
