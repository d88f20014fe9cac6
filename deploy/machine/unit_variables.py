"""The variables of the shell that installs a service: those that the service has too, and where they are written. Pure.

Everyone may read a unit, and systemd tells everyone what is in it. So what may be secret is never in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from relayline.wire.common.errors import UsageError

_PLACES = ("_HOME", "_CACHE", "_PATH", "_CERTIFICATE", "_CLIENT_KEY")  # endings of what names a directory or file
_FAMILIES = ("XDG_", "HF_")  # of which only places are kept
_TELEMETRY = "OTEL_"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_ALONE = frozenset(
    ("HF_ENDPOINT", "HF_HUB_OFFLINE", "RELAYLINE_KERNELS", *_PROXIES, *map(str.upper, _PROXIES),
     "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")
)  # fmt: skip
_HUB_TOKEN = "HF_TOKEN"
_SECRET = re.compile(r"(_HEADERS|_TOKEN|_PASSWORD|_SECRET|_API_KEY)$")
_WITH_PASSWORD = re.compile(r"(^|://)[^/]\S*@")  # a proxy needs no scheme; a path may have an @
_SPECIAL = re.compile(r'[\\`$"]')  # in double quotes of an EnvironmentFile
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def kept_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what says where files are, which hub, GPUs, proxy and collector: the service must find the same ones.

    Nothing among them may be secret. Places become absolute.
    """
    return {
        name: _absolute(name, value)
        for name, value in sorted(environment.items())
        if value.isprintable() and _is_wanted(name, value) and not _is_secret(name, value)
    }


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the names of what would be kept, but may be secret."""
    return [name for name, value in sorted(environment.items()) if _is_wanted(name, value) and _is_secret(name, value)]


def chosen_variables(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return variables that the user names. Raises UsageError for one that is not there, or has several lines."""
    chosen = {}
    for name in names:
        if not _NAME.fullmatch(name):
            raise UsageError(f"--env {name}: give a variable's name alone; its value is taken from this shell")
        if not (value := environment.get(name, "")):
            raise UsageError(f"--env {name}: this shell has no such variable; export it first")
        if not value.isprintable():
            raise UsageError(f"--env {name}: its value has control characters")
        chosen[name] = value
    return chosen


def private_text(variables: Mapping[str, str]) -> str:
    """Return the file that systemd's EnvironmentFile reads."""
    escaped = {name: _SPECIAL.sub(r"\\\g<0>", value) for name, value in variables.items()}
    return "".join(f'{name}="{value}"\n' for name, value in escaped.items())


def _is_wanted(name: str, value: str) -> bool:
    is_place = name.startswith(_FAMILIES) and name.endswith(_PLACES)
    return bool(value) and (is_place or name.startswith(_TELEMETRY) or name in _ALONE or name == _HUB_TOKEN)


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET.search(name) or _WITH_PASSWORD.search(value))


def _absolute(name: str, value: str) -> str:
    is_place = name.startswith((*_FAMILIES, _TELEMETRY)) and name.endswith(_PLACES)
    return str(Path(value).absolute()) if is_place and not value.startswith(("~", "$")) else value
