"""llama.cpp's log in processes that load several models: its taker may be gone when the next model is loaded."""

from __future__ import annotations

import subprocess
from pathlib import Path

from relayline.wire.common.child_command import code_command
from tests.support.tiny_models import make_tiny

# A call of a callback that is gone ends the process with SIGSEGV.
_LOADS_TWICE = """
import gc, sys
from pathlib import Path
from relayline.coordinator.drafting.draft_model import check_drafts
from relayline.deploy.testing.reference import ReferenceModel
path = Path(sys.argv[1])
for _ in range(2):
    check_drafts(path, path)
    gc.collect()
    ReferenceModel(path, 64, 1).close()
"""


def test_models_load_after_the_taker_of_the_log_is_gone(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model.gguf", tokenizer=True)
    done = subprocess.run(code_command(_LOADS_TWICE, str(model)), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
