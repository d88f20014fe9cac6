"""A joined stage as a service of its system, so that a host that starts again comes back. Units as text; pure.

systemd on Linux, for this user or for the whole system; launchd on macOS, for this user or for the whole system.
"""

from __future__ import annotations

import dataclasses
import plistlib
from collections.abc import Mapping, Sequence
from pathlib import Path

RESTART_S = 5  # between an end and the next start; a stage that cannot start is not tried without a pause
STARTS_MAX, STARTS_S = 20, 600  # a stage that fails so often in that time is left alone, and `status` says so

# What a stage never needs. Not here: devices, of which GPUs are some, and memory that is executable, as CUDA wants it.
_CONFINED = (
    "NoNewPrivileges=true", "CapabilityBoundingSet=", "PrivateTmp=true", "ProtectSystem=full",
    "ProtectKernelTunables=true", "ProtectKernelModules=true", "ProtectKernelLogs=true", "ProtectControlGroups=true",
    "RestrictSUIDSGID=true", "RestrictNamespaces=true", "LockPersonality=true", "SystemCallArchitectures=native",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """One service."""

    name: str
    """`relayline-NAME`; of systemd's unit without its ending, and of launchd's label behind `dev.`."""
    path: Path
    """File that the unit is."""
    text: str
    """Its content."""
    enable: tuple[tuple[str, ...], ...]
    """Commands that make the system take it up, now and at every start."""
    disable: tuple[tuple[str, ...], ...]
    """Commands that end it for good; the file goes after them."""
    status: tuple[str, ...]
    """Command that shows how it is."""
    logs: str
    """What shows its log, for people."""
    advice: str = ""
    """What else has to be done, in one line; empty for nothing."""


def systemd_unit(
    name: str,
    command: Sequence[str],
    description: str,
    home: Path,
    *,
    is_system: bool,
    user: str,
    variables: Mapping[str, str] | None = None,
    private: Path | None = None,
) -> Unit:
    """Return a unit of systemd; `home` is this user's home directory. A system's unit runs as `user`.

    `variables`: the service's, besides those of its system. `private`: a file with more of them.
    """
    unit = f"relayline-{name}"
    directory = Path("/etc/systemd/system") if is_system else home / ".config" / "systemd" / "user"
    lines = [
        "[Unit]",
        f"Description={_no_percent(description)}",
        "Wants=network-online.target",
        "After=network-online.target",
        f"StartLimitIntervalSec={STARTS_S}",
        f"StartLimitBurst={STARTS_MAX}",
        "",
        "[Service]",
        *(f"Environment={_assignment(key, value)}" for key, value in (variables or {}).items()),
        *([f"EnvironmentFile={_no_percent(str(private))}"] if private else []),
        f"ExecStart={' '.join(map(systemd_word, command))}",
        "Restart=on-failure",
        f"RestartSec={RESTART_S}",
        "# A usage error is not cured by another start.",
        "RestartPreventExitStatus=2",
        "SyslogIdentifier=%N",
        "LimitNOFILE=65536",
        "TimeoutStopSec=45",
    ]
    if is_system:
        lines += [f"User={user}", *_CONFINED]
    lines += ["", "[Install]", f"WantedBy={'multi-user' if is_system else 'default'}.target", ""]
    scope = () if is_system else ("--user",)
    control = ("systemctl", *scope)
    return Unit(
        unit,
        directory / f"{unit}.service",
        "\n".join(lines),
        enable=((*control, "daemon-reload"), (*control, "enable", "--now", f"{unit}.service")),
        disable=((*control, "disable", "--now", f"{unit}.service"),),
        status=(*control, "status", "--no-pager", f"{unit}.service"),
        logs=f"journalctl {'' if is_system else '--user '}-u {unit}",
        advice="" if is_system else f"so that it starts without a login: loginctl enable-linger {user}",
    )


def launchd_unit(
    name: str,
    command: Sequence[str],
    home: Path,
    *,
    is_system: bool,
    user: str,
    user_id: int,
    variables: Mapping[str, str] | None = None,
) -> Unit:
    """Return a property list of launchd; a system's daemon runs as `user`. `variables` as of `systemd_unit`."""
    unit = f"relayline-{name}"
    label = f"dev.{unit}"
    directory = Path("/Library/LaunchDaemons") if is_system else home / "Library" / "LaunchAgents"
    path = directory / f"{label}.plist"
    log = home / "Library" / "Logs" / f"{unit}.log"
    facts: dict[str, object] = {
        "Label": label,
        "ProgramArguments": list(command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "StandardOutPath": str(log),
        "StandardErrorPath": str(log),
    }
    if variables:
        facts["EnvironmentVariables"] = dict(variables)
    if is_system:
        facts["UserName"] = user
    domain = "system" if is_system else f"gui/{user_id}"
    return Unit(
        unit,
        path,
        plistlib.dumps(facts, sort_keys=False).decode(),
        enable=(("launchctl", "bootstrap", domain, str(path)),),
        disable=(("launchctl", "bootout", f"{domain}/{label}"),),
        status=("launchctl", "print", f"{domain}/{label}"),
        logs=f"tail -f {log}",
    )


def systemd_word(word: str) -> str:
    """Return one argument as ExecStart takes it: `%` and `$` mean something there, and so do quotes and spaces."""
    escaped = _no_percent(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return escaped if escaped and not any(char.isspace() or char in "\"'\\;" for char in escaped) else f'"{escaped}"'


def _assignment(name: str, value: str) -> str:
    """Return a variable as Environment takes it: `$` means nothing there."""
    escaped = _no_percent(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{name}={escaped}"'


def _no_percent(text: str) -> str:
    return text.replace("%", "%%")
