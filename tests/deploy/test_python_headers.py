"""The C extensions, compiled by the header that stands in where the interpreter came without its own (setup.py)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from relayline.deploy.build import check_native
from relayline.deploy.testing.paths import ROOT

pytestmark = [
    pytest.mark.slow,  # compiles the C extensions
    pytest.mark.skipif(bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="free-threaded: another ABI"),
]

# Tests of each extension, none that is long.
TESTS = (
    "wire/envelopes/test_plain_envelopes.py",
    "wire/envelopes/test_messages.py",
    "wire/envelopes/test_rows.py",
    "wire/telemetry/test_otlp.py",
    "stage/engine/test_capture_rows.py",
)
# These measure memory in a process of their own, which has the extensions of the environment.
NOT_HERE = (
    "test_a_messages_weight_is_never_less_than_reading_takes",
    "test_an_envelope_of_many_parts_is_refused_for_less_memory_than_its_size",
)
CHILD = """
import sys
from pathlib import Path
from relayline.deploy.build import check_native
check_native.BUILT = Path(sys.argv[1])
check_native.child("pytest", sys.argv[2:])
"""


def test_all_extensions_work_when_they_are_compiled_by_the_header_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_native, "BUILT", tmp_path)
    for name, sources in check_native.extensions().items():
        command = [*check_native.compiler(), "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
        command += [f"-I{check_native.HEADERS}", *map(str, sources), "-o", str(check_native.built_path(name))]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        compiled = subprocess.run(command, capture_output=True, text=True, check=False)
        assert compiled.returncode == 0, compiled.stderr
    tests = [str(ROOT / "tests" / name) for name in TESTS]
    command = [sys.executable, "-c", CHILD, str(tmp_path), "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    command += [f"--deselect=tests/{TESTS[1]}::{name}" for name in NOT_HERE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
