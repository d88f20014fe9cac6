"""Services of joined stages: the units' text, and a fake systemctl that records its calls."""

from __future__ import annotations

import os
import plistlib
import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from relayline.deploy.cli.control import status_command
from relayline.deploy.cli.service import service_command
from relayline.deploy.machine.service import launchd_unit, systemd_unit, systemd_word
from relayline.deploy.machine.unit_variables import (
    kept_variables,
    private_text,
    secret_variables,
)
from relayline.stage.joining.enrol import JOINED_FILE, JoinedFile
from relayline.wire.common.errors import StartError, UsageError

COMMAND = ("/opt/my env/bin/python", "-m", "relayline.deploy.cli", "join", "10.0.0.1:50049", "--name", "old")


def test_a_users_unit_starts_with_the_network_and_not_after_a_usage_error() -> None:
    unit = systemd_unit("old", COMMAND, "stage old", Path("/home/ann"), is_system=False, user="ann")
    assert unit.path == Path("/home/ann/.config/systemd/user/relayline-old.service")
    lines = unit.text.splitlines()
    for line in ("After=network-online.target", "Restart=on-failure", "SyslogIdentifier=%N",
                 "RestartPreventExitStatus=2", "WantedBy=default.target"):  # fmt: skip
        assert line in lines
    (start,) = (line for line in lines if line.startswith("ExecStart="))
    assert shlex.split(start.removeprefix("ExecStart=")) == list(COMMAND)
    assert not any(line.startswith("User=") for line in lines)
    assert unit.enable[-1] == ("systemctl", "--user", "enable", "--now", "relayline-old.service")
    assert "enable-linger ann" in unit.advice


def test_a_systems_unit_runs_as_the_user() -> None:
    unit = systemd_unit("old", COMMAND, "50 % of it", Path("/home/ann"), is_system=True, user="ann")
    assert unit.path == Path("/etc/systemd/system/relayline-old.service")
    assert {"User=ann", "WantedBy=multi-user.target", "Description=50 %% of it"} <= {*unit.text.splitlines()}
    assert {"CapabilityBoundingSet=", "ProtectSystem=full", "RestrictNamespaces=true"} <= {*unit.text.splitlines()}
    assert not any(line.startswith(("PrivateDevices", "MemoryDenyWriteExecute")) for line in unit.text.splitlines())
    assert unit.enable == (("systemctl", "daemon-reload"),
                           ("systemctl", "enable", "--now", "relayline-old.service"))  # fmt: skip


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ("50%", "50%%"),
        ("$HOME", "$$HOME"),
        ('say "x"', '"say \\"x\\""'),
    ],
)
def test_words_reach_systemd_unchanged(word: str, written: str) -> None:
    assert systemd_word(word) == written


def test_launchd_gets_the_command_word_by_word() -> None:
    unit = launchd_unit("old", COMMAND, Path("/Users/ann"), is_system=False, user="ann", user_id=501)
    facts = plistlib.loads(unit.text.encode())
    assert unit.path == Path("/Users/ann/Library/LaunchAgents/dev.relayline-old.plist")
    assert (facts["Label"], facts["ProgramArguments"]) == ("dev.relayline-old", list(COMMAND))
    assert facts["KeepAlive"] == {"SuccessfulExit": False}
    assert unit.enable == (("launchctl", "bootstrap", "gui/501", str(unit.path)),)
    daemon = launchd_unit("old", COMMAND, Path("/Users/ann"), is_system=True, user="ann", user_id=501)
    assert plistlib.loads(daemon.text.encode())["UserName"] == "ann"
    assert daemon.disable == (("launchctl", "bootout", "system/dev.relayline-old"),)


def test_a_unit_has_the_variables_that_name_places_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "XDG_CACHE_HOME": "/big disk/50% \"x\" $y", "HF_HOME": "hub", "HF_HUB_CACHE": "~/hub",
        "HF_ENDPOINT": "https://hub",
        "HF_TOKEN": "hf_secret", "XDG_RUNTIME_DIR": "/run/user/1", "XDG_SESSION_ID": "4", "XDG_STATE_HOME": "",
        "PATH": "/bin",
    }  # fmt: skip
    kept = kept_variables(given)
    assert kept == {
        "HF_ENDPOINT": "https://hub", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_CACHE": "~/hub",
        "XDG_CACHE_HOME": given["XDG_CACHE_HOME"],
    }  # fmt: skip
    unit = systemd_unit("old", COMMAND, "old", Path("/home/ann"), is_system=False, user="ann", variables=kept)
    lines = [line for line in unit.text.splitlines() if line.startswith("Environment=")]
    assert lines[-1] == r'''Environment="XDG_CACHE_HOME=/big disk/50%% \"x\" $y"'''
    assert len(lines) == 4
    plist = launchd_unit("old", COMMAND, tmp_path, is_system=False, user="ann", user_id=1, variables=kept)
    assert plistlib.loads(plist.text.encode())["EnvironmentVariables"] == kept


def test_what_may_be_secret_is_in_no_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = {
        "CUDA_VISIBLE_DEVICES": "1", "HTTPS_PROXY": "http://proxy:3128", "no_proxy": "10.0.0.0/8",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_RESOURCE_ATTRIBUTES": "a=b",
        "RELAYLINE_KERNELS": "off", "XDG_CACHE_HOME": "/home/ann@lab/cache",
    }  # fmt: skip
    secret = {
        "HF_TOKEN": "hf_secret", "HTTP_PROXY": "http://ann:secret@proxy", "OTEL_EXPORTER_OTLP_HEADERS": "key=secret",
        "all_proxy": "ann:se/cret@proxy:3128",
    }  # fmt: skip
    others = {"RELAYLINE_API_KEY": "secret", "RELAYLINE_URL": "http://a", "LD_PRELOAD": "/x", "OTEL_X": "two\nlines"}
    given = {**plain, **secret, **others, "OTEL_EXPORTER_OTLP_CERTIFICATE": "ca.pem"}
    assert kept_variables(given) == {**plain, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(tmp_path / "ca.pem")}
    assert secret_variables(given) == list(secret)


def test_a_private_file_says_what_was_given() -> None:
    given = {"A": "a b", "B": "\\ ` $HOME \"x\" '#'"}
    text = private_text(given)
    echoed = subprocess.run(
        ["/bin/sh", "-c", f'{text}printf "%s|" "$A" "$B"'], capture_output=True, text=True, check=True
    ).stdout
    assert echoed == "a b|\\ ` $HOME \"x\" '#'|", "in double quotes systemd and a shell read the same"
    unit = systemd_unit("a", COMMAND, "a", Path("/h"), is_system=True, user="ann", private=Path("/50% of it/x.env"))
    assert "EnvironmentFile=/50%% of it/x.env" in unit.text.splitlines()


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host that has joined once, on a system whose systemctl only records its calls."""
    home, programs = tmp_path / "home", tmp_path / "programs"
    directory = home / ".local" / "state" / "relayline" / ".joined" / "old-1234"
    directory.mkdir(parents=True)
    file = JoinedFile("old", "10.0.0.1:50049", "10.0.0.1:50050", "digest")
    (directory / JOINED_FILE).write_bytes(msgspec.json.encode(file))
    programs.mkdir()
    control = programs / "systemctl"
    control.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ntest ! -e {tmp_path}/broken || '
                       '{ echo "Failed to connect to bus: No medium" >&2; exit 1; }\necho active\n')  # fmt: skip
    control.chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("XDG_STATE_HOME", "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "asked"


def service(*arguments: str) -> Result:
    done = CliRunner().invoke(service_command, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_install_status_and_uninstall(asked: Path) -> None:
    unit = Path(os.environ["HOME"], ".config/systemd/user/relayline-old.service")
    assert service("status").exit_code == 1
    done = service("install", "--", "--threads", "4")
    assert "stage old runs now, and at every start of this system" in done.output
    assert "loginctl enable-linger" in done.output
    (start,) = (line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    words = shlex.split(start)
    assert words[words.index("join") :][:2] == ["join", "10.0.0.1:50049"]
    assert words[-2:] == ["--threads", "4"]
    assert asked.read_text().splitlines() == ["--user daemon-reload", "--user enable --now relayline-old.service"]
    found = service("status", "old")
    assert (found.exit_code, found.output.splitlines()) == (0, [f"installed: {unit}", "active"])
    service("uninstall")
    assert not unit.exists()
    assert asked.read_text().splitlines()[-1] == "--user disable --now relayline-old.service"
    with pytest.raises(UsageError, match="is not installed"):
        service("uninstall")


def test_an_installed_service_ends_before_it_starts_with_other_flags(asked: Path) -> None:
    service("install", "--", "--threads", "4")
    n_calls = len(asked.read_text().splitlines())
    service("install", "--", "--threads", "2")
    again = asked.read_text().splitlines()[n_calls:]
    assert again == [
        "--user disable --now relayline-old.service",
        "--user daemon-reload",
        "--user enable --now relayline-old.service",
    ]


def test_a_named_variable_is_in_a_file_for_its_owner_alone(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OTEL_EXPORTER_OTLP_HEADERS", "key=secret"), ("CUDA_VISIBLE_DEVICES", "1"), ("OWN", "a b")):
        monkeypatch.setenv(name, value)
    home = Path(os.environ["HOME"])
    unit = home / ".config/systemd/user/relayline-old.service"
    private = home / ".local/state/relayline/.joined/old-1234/service.env"
    done = service("install")
    assert "its variables: CUDA_VISIBLE_DEVICES" in done.output
    assert "HEADERS; to keep them: --env OTEL_EXPORTER_OTLP_HEADERS\n" in done.output
    assert "secret" not in unit.read_text()
    assert 'Environment="CUDA_VISIBLE_DEVICES=1"' in unit.read_text().splitlines()
    assert not private.exists()
    named = ("--env", "OTEL_EXPORTER_OTLP_HEADERS", "--env", "OWN")
    assert "secret" not in service("install", *named, "--dry-run").output
    assert not private.exists()
    done = service("install", *named)
    assert (
        f"its variables in {private}, which only its owner may read: OTEL_EXPORTER_OTLP_HEADERS, OWN\n" in done.output
    )
    assert "left out" not in done.output
    assert f"EnvironmentFile={private}" in unit.read_text().splitlines()
    assert private.read_text() == 'OTEL_EXPORTER_OTLP_HEADERS="key=secret"\nOWN="a b"\n'
    assert (private.stat().st_mode & 0o777, "secret" in unit.read_text()) == (0o600, False)
    assert f"rm {private}\n" in service("uninstall", "--dry-run").output
    service("uninstall")
    assert not private.exists()


def test_a_named_variable_is_in_a_property_list_for_its_owner_alone(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    control = next(Path(place) for place in os.environ["PATH"].split(os.pathsep)) / "launchctl"
    control.symlink_to("systemctl")
    monkeypatch.setenv("OWN", "secret")
    service("install", "--env", "OWN")
    unit = Path(os.environ["HOME"], "Library/LaunchAgents/dev.relayline-old.plist")
    assert plistlib.loads(unit.read_bytes())["EnvironmentVariables"]["OWN"] == "secret"
    assert unit.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("named", "says"),
    [("NOT_THERE", "this shell has no such variable"), ("A=b", "a variable's name alone"), ("LINES", "control char")],
)
def test_a_named_variable_is_one_of_this_shell(
    named: str, says: str, asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", "two\nlines")
    monkeypatch.delenv("NOT_THERE", raising=False)
    with pytest.raises(UsageError, match=says):
        service("install", "--env", named)
    assert not asked.exists()


def test_sudo_finds_what_its_caller_joined(asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joined = tmp_path / "home" / ".local" / "state" / "relayline" / ".joined"
    monkeypatch.setattr("relayline.deploy.cli.service.joined_dir_of", lambda user: {"ann": joined}[user])
    monkeypatch.setenv("HOME", str(tmp_path / "home-of-root"))
    with pytest.raises(UsageError, match="has not joined a pipeline yet"):
        service("install", "--system", "--dry-run")
    monkeypatch.setenv("SUDO_USER", "ann")
    with pytest.raises(UsageError, match="has not joined a pipeline yet"):
        service("install", "--dry-run")
    text = service("install", "--system", "--dry-run").output
    assert f"--state {joined}" in text
    assert f"User={joined.owner()}" in text, "the one who can read the key"


def test_status_names_the_pipeline_that_this_host_has_joined(asked: Path) -> None:
    done = CliRunner().invoke(status_command, [])
    assert done.output.splitlines() == [
        "nothing runs here that `relayline up` started",
        "this host has joined the pipeline at 10.0.0.1:50049 as old; its state: `relayline status` there",
    ]


def test_a_dry_run_changes_nothing(asked: Path) -> None:
    done = service("install", "old", "--dry-run", "--", "--advertise", "old.lan")
    assert "[Service]" in done.output
    assert "# then: systemctl --user enable --now relayline-old.service" in done.output
    assert "systemctl --user disable --now" in service("uninstall", "--dry-run").output
    assert not asked.exists()
    assert not Path(os.environ["HOME"], ".config").exists()


def test_mistakes_are_reported_before_anything_is_installed(asked: Path) -> None:
    with pytest.raises(UsageError, match=r"has not joined that pipeline, only old at 10\.0\.0\.1:50049"):
        service("install", "new")
    wrong = service("install", "--", "--thread-count", "4")
    assert (wrong.exit_code, "--thread-count" in wrong.output) == (2, True)
    assert not asked.exists()
    asked.with_name("broken").touch()
    with pytest.raises(
        StartError, match="daemon-reload` failed: Failed to connect to bus: No medium; no service manager"
    ):
        service("install")
    assert service("status").output.startswith("not installed"), "a unit that nothing starts would be in the way"


def test_an_installed_service_uses_the_cache_of_who_installed_it(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, f"/mnt/{name}")
    lines = service("install", "--dry-run").output.splitlines()
    assert {'Environment="HF_HOME=/mnt/HF_HOME"', 'Environment="XDG_CACHE_HOME=/mnt/XDG_CACHE_HOME"'} <= {*lines}
