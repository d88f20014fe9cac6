"""Cuts llama.cpp's sources to what one model needs on a GPU: one width of heads, its weight types, an f16 cache.

ggml instantiates its CUDA kernels for every width and type, which compiles for an hour. The rest compiles in two
minutes on 16 cores, and packs into 5 MB. A model of another width or type ends with an assertion of ggml's, so a packed
build says which model it is for. The functions over text are pure.
"""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable, Collection
from pathlib import Path

from benches.peers import PeersUnavailableError

WIDTHS = (64, 128, 256)  # width of heads that all of ggml's attention kernels support
BACKENDS_KEPT = ("ggml-cpu", "ggml-cuda", "ggml-rpc")
# Below the source distribution's root and llama.cpp's: folders that the build does not need.
LEFT_OUT = (".git", "examples")
LEFT_OUT_OF_LLAMA_CPP = (
    ".devops", ".github", "benches", "ci", "conversion", "docs", "examples", "gguf-py", "grammars", "licenses", "media",
    "models", "pocs", "tests", "tools/mtmd/test-1.jpeg", "tools/mtmd/test-2.mp3", "tools/server/bench",
    "tools/server/public", "tools/server/tests", "tools/server/themes", "tools/server/webui",
)  # fmt: skip
MMA_CASES = (
    "    switch (Q->ne[0]) {\n        case 64:\n            GGML_ASSERT(V->ne[0] == 64);",
    "#define FATTN_VEC_CASE",
)
PRODUCTS = ("    switch (args.type_x)", "        default:")
DECLARATION = re.compile(r"DECL_FATTN_(MMA_F16|TILE|VEC)_CASE\( *(\d+), *(\S+?)[,)]")


def between(text: str, marks: tuple[str, str], instead: str) -> str:
    """Replace the text from the first mark up to the second. Raises PeersUnavailableError if a mark is missing, which
    means that the sources are not the version that this module knows.
    """
    begin = text.find(marks[0])
    end = text.find(marks[1], begin)
    if begin < 0 or end < 0:
        raise PeersUnavailableError(f"these sources of llama.cpp cannot be trimmed: {marks[0].strip()!r} is not there")
    return text[:begin] + instead + text[end:]


def attention(text: str, width: int) -> str:
    """Return fattn.cu for one width of heads."""
    only = (
        f"    GGML_ASSERT(Q->ne[0] == {width} && V->ne[0] == {width});\n"
        "    GGML_UNUSED(cc); GGML_UNUSED(KQV); GGML_UNUSED(K); GGML_UNUSED(mask);\n"
        f"    ggml_cuda_flash_attn_ext_mma_f16_switch_ncols2<{width}, {width}>(ctx, dst);\n"
        "}\n\n"
    )
    text = between(text, MMA_CASES, only)
    text = re.sub(r"    FATTN_VEC_CASES_ALL_D\((?!F16,  F16\))[^)]*\)\n", "", text)
    for other in WIDTHS:
        if other != width:
            text = re.sub(rf"    FATTN_VEC_CASE\( *{other},.*\n", "", text)
    return text


def tiles(text: str, width: int) -> str:
    """Return fattn-tile.cu for one width of heads."""
    return re.sub(rf"        case +(?!{width}:)\d+: \{{.*?\}} break;\n", "", text, flags=re.DOTALL)


def instances(text: str, width: int) -> str:
    """Return a file of attention kernels for one width and an f16 cache; empty if none is left."""
    kept = [
        line for line in text.splitlines() if not (found := DECLARATION.match(line)) or _is_kept(found, line, width)
    ]
    return "\n".join(kept) + "\n" if any(line.startswith("DECL") for line in kept) else ""


def _is_kept(found: re.Match[str], line: str, width: int) -> bool:
    kind, keys, values = found.groups()
    if int(keys) != width:
        return False
    return "GGML_TYPE_F16, GGML_TYPE_F16" in line if kind == "VEC" else values == str(width)


def products(text: str, types: Collection[str]) -> str:
    """Return mmq.cu for some types of weights, such as Q4_0."""
    cases = "".join(
        f"        case GGML_TYPE_{name}:\n            mul_mat_q_case<GGML_TYPE_{name}>(ctx, args, stream);\n"
        "            break;\n"
        for name in sorted(types)
    )
    return between(text, PRODUCTS, "    GGML_UNUSED(prec_src1);\n    switch (args.type_x) {\n" + cases)


def trim(root: Path, width: int, types: Collection[str]) -> None:
    """Cut an unpacked source distribution of llama-cpp-python, in place. Raises PeersUnavailableError."""
    if width not in WIDTHS:
        raise PeersUnavailableError(f"heads of width {width} cannot be trimmed to; {', '.join(map(str, WIDTHS))} can")
    llama_cpp = root / "vendor" / "llama.cpp"
    for path in (*(root / name for name in LEFT_OUT), *(llama_cpp / name for name in LEFT_OUT_OF_LLAMA_CPP)):
        _remove(path)
    for path in (llama_cpp / "ggml/src").iterdir():
        if path.is_dir() and path.name not in BACKENDS_KEPT:
            _remove(path)
    for path in (llama_cpp / "scripts").iterdir():
        if path.name != "ui-assets.cmake":
            _remove(path)
    for path in (llama_cpp / "tools/ui").iterdir():
        if path.is_dir():
            _remove(path)
    _rewrite(
        llama_cpp / "ggml/CMakeLists.txt", lambda text: text.replace("q4_0-q4_0;q8_0-q8_0;f16-f16;bf16-bf16", "f16-f16")
    )
    cuda = llama_cpp / "ggml/src/ggml-cuda"
    _rewrite(cuda / "fattn.cu", lambda text: attention(text, width))
    _rewrite(cuda / "fattn-tile.cu", lambda text: tiles(text, width))
    _rewrite(cuda / "mmq.cu", lambda text: products(text, types))
    for path in (cuda / "template-instances").glob("fattn-*.cu"):
        kept = instances(path.read_text(), width)
        if kept:
            path.write_text(kept)
        else:
            path.unlink()
    wanted = {f"mmq-instance-{name.lower()}.cu" for name in types}
    for path in (cuda / "template-instances").glob("mmq-*.cu"):
        if path.name not in wanted:
            path.unlink()


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pack_sources(root: Path, archive: Path) -> None:
    """Write an unpacked source distribution into a compressed archive."""
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(root, root.name)
