"""Recognises files that are no GGUF: the usual mistakes, each with its remedy. Pure."""

from __future__ import annotations

HEAD_BYTES = 256  # what `foreign_kind` wants to see of a file

_LFS = b"version https://git-lfs.github.com/spec/"
_GET_GGUF = "take a GGUF of the model, or make one with llama.cpp's convert_hf_to_gguf.py"
_BY_MAGIC: tuple[tuple[bytes, str], ...] = (
    (_LFS, "a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned"),
    (b"PK\x03\x04", f"a PyTorch or zip archive; {_GET_GGUF}"),
    (b"\x80\x02", f"a PyTorch pickle; {_GET_GGUF}"),
    (b"\x89HDF", f"an HDF5 file; {_GET_GGUF}"),
    (b"ggjt", "a GGML file from before GGUF; convert it with an old llama.cpp, or take a GGUF of the model"),
    (b"lmgg", "a GGML file from before GGUF; convert it with an old llama.cpp, or take a GGUF of the model"),
    (b"<!DOCTYPE", "a web page, probably of a download that failed; fetch the file itself"),
    (b"<html", "a web page, probably of a download that failed; fetch the file itself"),
)


def foreign_kind(name: str, head: bytes) -> str:
    """Return a few words about a file that is not a GGUF: its kind, and the remedy; empty if unknown.

    `head` holds its first HEAD_BYTES, or all of it.
    """
    start = head.lstrip()
    for magic, kind in _BY_MAGIC:
        if start[: len(magic)].lower() == magic.lower():
            return kind
    # safetensors: the length of a JSON header as 8 bytes, then that header.
    if name.endswith(".safetensors") or head[8:10] == b'{"':
        return f"a safetensors file; {_GET_GGUF}"
    # The importance matrix of llama.cpp before it was a GGUF: the count of entries, the length of a tensor's name, it.
    if head[8:12] in (b"blk.", b"outp", b"toke") or name.endswith((".imatrix", "imatrix.dat")):
        return "an importance matrix, which only helps to quantise a model; give the model itself"
    return ""
