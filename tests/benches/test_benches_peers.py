"""The compared programs are built again when their sources or flags change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benches import peers
from benches.peers import Kernels
from relayline.deploy.testing.paths import DEPLOY

KERNELS = DEPLOY / "kernels"


def test_other_words_to_gcc_make_another_build_of_the_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name for path in KERNELS.iterdir() if path.is_file() and path.suffix != ".md"}
    monkeypatch.setattr(peers, "KERNELS", shutil.copytree(KERNELS, tmp_path / "kernels"))
    as_shipped = {peers.digest_of(("-DX=1",), Kernels.SHIPPED)}
    digests = {peers.digest_of((option,), Kernels.OURS) for option in ("-DX=1", "-DX=2")}
    assert not as_shipped & digests
    for name in files:
        with (tmp_path / "kernels" / name).open("a") as file:
            file.write("\n")
        as_shipped.add(peers.digest_of(("-DX=1",), Kernels.SHIPPED))
        digests.add(peers.digest_of(("-DX=1",), Kernels.OURS))
    assert files == set(Kernels.OURS.value)
    assert len(digests) == 2 + len(files)
    assert len(as_shipped) == 1 + len(Kernels.SHIPPED.value), (
        "a file that is in no unpatched build must not cause a new one"
    )
