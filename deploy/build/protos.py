"""Makes the protobuf stubs in wire/pb from proto/, or checks that they are what proto/ says (--check)."""

from __future__ import annotations

import filecmp
import re
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


def main() -> None:
    """Generate, or compare with what is committed."""
    committed = ROOT / "wire" / "pb"
    if "--check" not in sys.argv:
        generate(committed)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = [path.relative_to(scratch) for path in Path(scratch).rglob("*_pb2.py*")]
        stale = [
            str(p)
            for p in fresh
            if not (committed / p).exists() or not filecmp.cmp(Path(scratch, p), committed / p, False)
        ]
    if stale:
        sys.exit(f"stubs differ from proto/: {', '.join(stale)}; run `make proto`")
    print(f"{len(fresh)} generated stubs match proto/")


if __name__ == "__main__":
    main()
