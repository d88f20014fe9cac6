"""Makes the protobuf stubs in wire/pb from proto/, or checks that they match proto/ (--check).

From the stubs follow where the fields of an envelope stand: `_layout.h` of the C readers, and a page of docs/reference.
"""

from __future__ import annotations

import filecmp
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "proto").rglob("*.proto"))


def generate(target: Path) -> None:
    """Write stubs of every source below target."""
    arguments = ["protoc", f"-I{ROOT / 'proto'}", f"--python_out={target}", f"--pyi_out={target}"]
    if protoc.main([*arguments, *map(str, SOURCES)]) != 0:
        sys.exit("protoc failed")
    for stub in target.rglob("*_pb2.py*"):
        # protoc imports by proto path, and the stubs live inside a package of ours.
        stub.write_text(
            re.sub(r"^from relayline\.", "from relayline.wire.pb.relayline.", stub.read_text(), flags=re.MULTILINE)
        )


def layout_files() -> dict[Path, str]:
    """Return the files that wire/envelopes/layout.py writes, in a process that has just loaded the stubs."""
    code = "from relayline.wire.envelopes import layout as l; print(l.c_header(), l.page(), sep=chr(0), end='')"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    header, page = output.split("\0")
    return {ROOT / "wire/envelopes/_layout.h": header, ROOT / "docs/reference/envelopes.md": page}


def main() -> None:
    """Generate, or compare with the committed files."""
    committed = ROOT / "wire" / "pb"
    if "--check" not in sys.argv:
        generate(committed)
        for path, text in layout_files().items():
            path.write_text(text)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = [path.relative_to(scratch) for path in Path(scratch).rglob("*_pb2.py*")]
        stale = [
            str(p)
            for p in fresh
            if not (committed / p).exists() or not filecmp.cmp(Path(scratch, p), committed / p, False)
        ]
    stale += [path.name for path, text in layout_files().items() if not path.exists() or path.read_text() != text]
    if stale:
        sys.exit(f"generated files differ from proto/: {', '.join(stale)}; run `make proto`")
    print(f"{len(fresh)} generated stubs match proto/")


if __name__ == "__main__":
    main()
