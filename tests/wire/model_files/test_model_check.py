"""The one check of a header: a file that would crash llama.cpp is refused by `inspect`, `split`, fetch and load."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as llama

from relayline.coordinator.model.inspection import inspect_model
from relayline.coordinator.model.split import split_model
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.models.trial import try_artifacts
from relayline.stage.engine.artifact import open_artifact
from relayline.wire.common.errors import ArtifactError, ModelFileError
from relayline.wire.model_files.gguf_header import TENSOR_TYPES, read_header
from relayline.wire.model_files.gguf_write import F32, I32, U32, encode_array, encode_entry
from relayline.wire.model_files.model_check import PRODUCT_TYPES, _expert_problems, check_header
from tests.support.mutated_models import Draft, read_draft
from tests.support.tiny_families import RECIPES
from tests.support.tiny_models import make_tiny

TYPES = {name: number for number, (name, _, _) in TENSOR_TYPES.items()}
STRING = 8


class CpuTraits(ctypes.Structure):
    _fields_ = [("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p)]


def test_types_with_products_are_those_of_the_installed_ggml() -> None:
    function = llama._lib.ggml_get_type_traits_cpu
    function.restype = ctypes.POINTER(CpuTraits)
    native = {
        name
        for number, (name, _, _) in TENSOR_TYPES.items()
        if number < llama.GGML_TYPE_COUNT and function(number).contents.vec_dot
    }
    assert native == PRODUCT_TYPES


def typed(name: str, kind: str) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        (index,) = [at for at, tensor in enumerate(draft.tensors) if tensor[0] == name]
        _, dims, _, body = draft.tensors[index]
        draft.tensors[index] = (name, dims, TYPES[kind], body)

    return change


def valued(key: str, type_id: int, value: float | str) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.entries[key] = encode_entry(key, type_id, value)

    return change


def listed(key: str, item_type: int, values: tuple[float, ...]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.entries[key] = encode_array(key, item_type, values)

    return change


def without(key: str) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        del draft.entries[key]

    return change


def tokens(*texts: bytes) -> Callable[[Draft], None]:
    key = b"tokenizer.ggml.tokens"

    def change(draft: Draft) -> None:
        body = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        head = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, STRING, len(texts))
        draft.entries[key.decode()] = head + body

    return change


FAULTS: list[tuple[str, Callable[[Draft], None], str]] = [
    *(
        (f"matrix {kind}", typed("blk.0.ffn_up.weight", kind), f"is {kind}, a type that llama.cpp cannot multiply")
        for kind in ("I8", "I16", "I32", "I64", "F64", "Q8_1")
    ),
    *(
        (f"norm {kind}", typed("blk.0.attn_norm.weight", kind), f"is {kind}, but norms")
        for kind in ("Q8_0", "F16", "BF16", "I64", "MXFP4")
    ),
    *((f"eps {value}", valued("llama.attention.layer_norm_rms_epsilon", F32, value), "epsilon is")
      for value in (math.nan, math.inf, -1.0, 1e30)),
    ("freq base", valued("llama.rope.freq_base", F32, math.nan), "freq_base is nan"),
    ("freq base 0", valued("llama.rope.freq_base", F32, 0.0), "freq_base is 0"),
    ("a float for a number", valued("llama.block_count", F32, 2.0), "block_count is not a whole number"),
    ("layers", valued("llama.block_count", U32, 513), "block_count is 513"),
    ("context", valued("llama.context_length", U32, 0xFFFFFFFF), "context_length is"),
    ("window", valued("llama.attention.sliding_window", U32, 1 << 31), "sliding_window is"),
    ("any number", valued("llama.something.else", I32, -5), "something.else is -5"),
    ("any float", valued("llama.something.else", F32, -math.inf), "something.else is -inf"),
    ("in a list", listed("llama.something.each", F32, (1.0, math.nan)), "something.each is nan"),
    ("heads", valued("llama.attention.head_count_kv", U32, 3), "head_count is 4, not a multiple of its 3"),
    ("experts", valued("llama.expert_used_count", U32, 2), "expert_used_count is 2 of 0"),
    ("many experts", valued("llama.expert_count", U32, 100_000), "expert_count is 100000"),
    ("keys", valued("llama.attention.key_length", U32, 4096), "key_length is 4096 and value_length 16"),
    ("rotated", valued("llama.rope.dimension_count", U32, 8), "rope.dimension_count is 8; it must be 16"),
    ("odd rotation", valued("llama.rope.dimension_count", U32, 15), "rope.dimension_count is 15"),
    ("rope", valued("llama.rope.scaling.type", STRING, "spiral"), "rope.scaling.type is 'spiral'"),
    ("another tokenizer", valued("tokenizer.ggml.model", STRING, "rwkv"), "tokenizer.ggml.model is 'rwkv'"),
    ("no bytes", valued("tokenizer.ggml.model", STRING, "llama"), "tokens for only 0 of 256 bytes"),
    ("the same text twice", tokens(b"a", b"b", b"a"), "holds the same text twice"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("whole") / "m.gguf", n_layers=2, tokenizer=True)


@pytest.fixture(scope="module")
def split(whole: Path) -> Path:
    split_model(whole, whole.with_name("split"), n_stages=2)
    return whole.with_name("split")


def rewritten(source: Path, change: Callable[[Draft], None], path: Path) -> Path:
    draft = read_draft(source)
    change(draft)
    path.write_bytes(draft.encoded())
    return path


EXPERTS = {"expert_count": 8, "expert_used_count": 2}


@pytest.mark.parametrize(
    ("values", "n_problems"),
    [
        (EXPERTS, 0),
        (EXPERTS | {"expert_group_count": 1, "expert_group_used_count": 1}, 0),  # as DeepSeek's files say it
        (EXPERTS | {"expert_group_count": 4, "expert_group_used_count": 2}, 0),
        (EXPERTS | {"expert_group_count": 4, "expert_group_used_count": 4}, 1),
        (EXPERTS | {"expert_group_count": 4}, 1),
        (EXPERTS | {"expert_group_count": 3, "expert_group_used_count": 1}, 1),
        (EXPERTS | {"expert_group_count": 8, "expert_group_used_count": 1}, 1),
        (EXPERTS | {"expert_used_count": 9}, 1),
        ({"expert_count": 8}, 1),
    ],
)
def test_groups_of_experts_divide_them(values: dict[str, int], n_problems: int) -> None:
    assert len(list(_expert_problems("", values))) == n_problems


@pytest.mark.parametrize(("change", "words"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_a_damaged_model_is_refused_by_all_alike(
    change: Callable[[Draft], None], words: str, whole: Path, split: Path, tmp_path: Path
) -> None:
    model = rewritten(whole, change, tmp_path / "model.gguf")
    artifact = rewritten(split / "stage-1.gguf", change, tmp_path / "stage-1.gguf")  # the last one has a tokenizer
    for refuse in (
        lambda: inspect_model(model),
        lambda: split_model(model, tmp_path / "out", n_stages=2),
        lambda: open_artifact(artifact),
        lambda: Tokenizer.load(model),
    ):
        with pytest.raises(ModelFileError) as caught:
            refuse()
        assert words in caught.value.message
        assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_a_trial_in_a_child_process_finds_what_only_llama_cpp_knows(tmp_path: Path) -> None:
    """Its graph follows a null pointer where a layer that chooses its attended rows lacks the keys to choose by."""
    whole = make_tiny("glm-dsa:shared", tmp_path / "m.gguf")
    draft = read_draft(whole)
    draft.tensors = [tensor for tensor in draft.tensors if tensor[0] != "blk.6.indexer.attn_k.weight"]
    whole.write_bytes(draft.encoded())
    with pytest.raises(ModelFileError, match=r"cannot load its slices: llama\.cpp ended with SIGSEGV"):
        split_model(whole, tmp_path / "out", n_stages=2, trial=try_artifacts)
    assert not (tmp_path / "out").exists()


def test_empty_tokens_are_no_repeats(whole: Path, tmp_path: Path) -> None:
    check_header(read_header(rewritten(whole, tokens(b"", b"a", b""), tmp_path / "m.gguf")))


@pytest.mark.sampled(60)
@pytest.mark.parametrize("family", RECIPES)
def test_models_of_every_family_pass(family: str, tmp_path: Path) -> None:
    check_header(read_header(make_tiny(family, tmp_path / "m.gguf")))


@pytest.mark.timeout(900)  # half a minute on a quiet host
@pytest.mark.parametrize("n_mutants", [15, pytest.param(60, marks=pytest.mark.nightly)])
def test_no_mutation_ends_the_process_that_loads_it(n_mutants: int, tmp_path: Path) -> None:
    """Inspect, split, load and decode, each in a new process; `tests.support.mutated_models` tries more."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.mutated_models", str(n_mutants), "41"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("key", "type_id", "value"),
    [
        ("relayline.output.scale", F32, math.nan),
        ("relayline.output.scale", F32, 0.0),
        ("relayline.n_vocab", I32, -1),
        ("relayline.layer_end", I32, -2),
    ],
)
def test_an_artifacts_own_metadata_is_checked_too(
    key: str, type_id: int, value: float, split: Path, tmp_path: Path
) -> None:
    artifact = rewritten(split / "stage-1.gguf", valued(key, type_id, value), tmp_path / "stage-1.gguf")
    with pytest.raises(ArtifactError, match=key):
        open_artifact(artifact)


def test_no_more_values_are_rotated_than_a_head_has_by_default(tmp_path: Path) -> None:
    """llama.cpp aborts at the first step. The file says no width of a head, which follows from others then."""
    model = make_tiny("chatglm", tmp_path / "m.gguf", extra_values={"rope.dimension_count": 1 << 20})
    with pytest.raises(
        ModelFileError, match=r"chatglm\.rope\.dimension_count is 1048576, but a head has only \d+ values"
    ):
        inspect_model(model)
