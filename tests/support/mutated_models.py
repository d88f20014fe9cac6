"""Seeded mutations of tiny models, each run from `inspect` to the first decoded rows.

`python -m tests.support.mutated_models COUNT [SEED] [PART/PARTS]` tries COUNT of them, each in a new process, and lists
every one that crashed its process instead of being refused. A part is every PARTS-th of the same mutants: parts can run
in parallel, or one after the other.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import random
import resource
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from relayline.coordinator.model.gguf_file import open_model, read_entries
from relayline.deploy.testing.engines import engine_config
from relayline.wire.common.errors import RelaylineError
from relayline.wire.model_files.gguf_header import ARRAY_TYPE, SCALARS, STRING_TYPE, TENSOR_TYPES
from relayline.wire.model_files.gguf_write import TensorSlot, encode_array, encode_entry, encode_header
from tests.support.tiny_families import RECIPES
from tests.support.tiny_models import make_tiny

U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10
# Hyperparameters that llama.cpp reads for some family, in its own namespace. A mutation may add any of them.
KNOWN_KEYS = """
attention.causal attention.clamp_kqv attention.group_norm_epsilon attention.group_norm_groups attention.head_count
attention.head_count_kv attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k
attention.indexer.types attention.key_length attention.key_length_mla attention.key_length_swa attention.kv_lora_rank
attention.layer_norm_epsilon attention.layer_norm_rms_epsilon attention.max_alibi_bias attention.output_scale
attention.q_lora_rank attention.scale attention.shared_kv_layers attention.sliding_window
attention.sliding_window_pattern attention.temperature_length attention.temperature_scale attention.value_length
attention.value_length_mla attention.value_length_swa attn_logit_softcapping block_count context_length
embedding_length embedding_length_out embedding_scale expert_count expert_feed_forward_length expert_gating_func
expert_group_count expert_group_scale expert_group_used_count expert_shared_count expert_shared_feed_forward_length
expert_used_count expert_weights_norm expert_weights_scale experts_per_group feed_forward_length
final_logit_softcapping full_attention_interval interleave_moe_layer_step leading_dense_block_count logit_scale
moe_every_n_layers n_deepstack_layers nextn_predict_layers pooling_type residual_scale rope.dimension_count
rope.dimension_count_swa rope.dimension_sections rope.freq_base rope.freq_base_swa rope.scale_linear
rope.scaling.alpha rope.scaling.attn_factor rope.scaling.factor rope.scaling.original_context_length rope.scaling.type
rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_ext_factor
rope.scaling.yarn_log_multiplier router_logit_softcapping ssm.conv_kernel ssm.inner_size ssm.state_size
swiglu_clamp_exp swiglu_clamp_shexp use_parallel_residual vocab_size
""".split()  # noqa: SIM905
TOKENIZER_KEYS = """
add_bos_token add_eos_token add_sep_token add_space_prefix bos_token_id cls_token_id eom_token_id eos_token_id
eot_token_id mask_token_id merges model padding_token_id pre precompiled_charsmap remove_extra_whitespaces scores
seperator_token_id suppress_tokens token_type token_type_count tokens unknown_token_id
""".split()  # noqa: SIM905
FLOAT_WORDS = ("eps", "scal", "freq", "softcap", "yarn", "clamp", "bias")
WORDS = ["", "none", "linear", "yarn", "longrope", "llama", "gpt2", "bert", "t5", "rwkv", "plamo2", "default", "qwen2",
         "llama-bpe", "gpt-2", "deepseek-llm", "x" * 300, "\x00", "ü\x1b[31m"]  # fmt: skip
INTEGERS = [0, 1, 2, 3, 5, 7, 8, 16, 31, 33, 64, 100, 127, 128, 255, 256, 257, 512, 513, 1024, 4096, 65535, 65536,
            1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]  # fmt: skip
FLOATS = [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1.0, 0.5, 2.0, 1e-6, 1e-30, 1e-45, 1e30, -1e30, 3.4e38, 1e4]


@dataclasses.dataclass
class Draft:
    """A model that is being changed: encoded entries by key, and per tensor name, dims, type and bytes."""

    architecture: str
    n_layers: int
    entries: dict[str, bytes]
    values: dict[str, tuple[int, int, object]]  # key -> type, type of items, value
    tensors: list[tuple[str, tuple[int, ...], int, bytes]]

    def encoded(self) -> bytes:
        """Return the file."""
        slots, bodies = [], []
        for name, dims, type_id, body in self.tensors:
            _, block, block_bytes = TENSOR_TYPES.get(type_id, ("", 1, 1))
            n_bytes = min(math.prod(dims) // block * block_bytes, 1 << 24)
            body = (body * (n_bytes // max(1, len(body)) + 1))[:n_bytes]
            slots.append(TensorSlot(name, dims, type_id, n_bytes))
            bodies.append(body + bytes(-n_bytes % 32))
        return encode_header(list(self.entries.values()), slots) + b"".join(bodies)


def read_draft(path: Path) -> Draft:
    """Take a model apart."""
    model = open_model(path)
    raw, keys = path.read_bytes(), list(model.entries)
    architecture = model.text("general.architecture")
    return Draft(
        architecture,
        model.integer(f"{architecture}.block_count"),
        dict(zip(keys, read_entries(model, keys), strict=True)),
        {key: (entry.type_id, entry.item_type, entry.value) for key, entry in model.entries.items()},
        [
            (tensor.name, tensor.dims, tensor.type_id, raw[tensor.offset : tensor.offset + tensor.size_bytes])
            for tensor in model.tensors.values()
        ],
    )


def mutate(draft: Draft, dice: random.Random) -> tuple[bytes, str]:
    """Return a mutated file and a description of the change. The draft cannot be used again."""
    kinds = (mutate_value, mutate_value, mutate_value, add_value, add_value, mutate_type, mutate_type, mutate_tensor)
    done = [dice.choice(kinds)(draft, dice) for _ in range(dice.choice((1, 1, 1, 2, 3)))]
    content = draft.encoded()
    if dice.random() < 0.15:
        flipped = bytearray(content)
        end = min(len(content), sum(map(len, draft.entries.values())) + 64 * len(draft.tensors))
        for _ in range(dice.choice((1, 2, 8))):
            at = dice.randrange(4, end)
            flipped[at] = dice.choice((0, 0xFF, flipped[at] ^ (1 << dice.randrange(8)), dice.randrange(256)))
            done.append(f"byte {at} to {flipped[at]:#x}")
        content = bytes(flipped)
    return content, "; ".join(done)


def scalar(dice: random.Random, type_id: int, value: object) -> tuple[int, int | float | bool | str]:
    """Return a type and a value for it, often near the old value."""
    if dice.random() < 0.1:
        type_id = dice.choice((*SCALARS, STRING_TYPE))
    if type_id == STRING_TYPE:
        return type_id, dice.choice(WORDS)
    if type_id == BOOL:
        return type_id, dice.random() < 0.5
    if type_id in (6, 12):
        return type_id, dice.choice(FLOATS)
    near = [value - 1, value + 1, value * 2, value // 2, -value] if isinstance(value, int) and value > 0 else []
    width = 8 * struct.calcsize(SCALARS[type_id])
    number = dice.choice([*INTEGERS, *near, *near]) % (1 << width)
    return type_id, number - (1 << width) if type_id in (1, 3, 5, 11) and number >> (width - 1) else number


def put(draft: Draft, dice: random.Random, key: str, type_id: int, item_type: int, value: object) -> str:
    """Change a key's value, make it an array, or remove it; returns a description."""
    if dice.random() < 0.05 and draft.entries.pop(key, None):
        return f"no {key}"
    if type_id == ARRAY_TYPE or dice.random() < 0.1:
        if item_type == STRING_TYPE:
            words = [dice.choice(WORDS).encode() for _ in range(dice.choice((0, 1, 5, 300)))]
            body = b"".join(struct.pack("<Q", len(word)) + word for word in words)
            head = struct.pack("<Q", len(key.encode())) + key.encode()
            draft.entries[key] = head + struct.pack("<IIQ", ARRAY_TYPE, STRING_TYPE, len(words)) + body
            return f"{key} is {len(words)} texts"
        item_type = dice.choice((U32, I32, F32, BOOL)) if item_type not in SCALARS else item_type
        some = list(value) if isinstance(value, tuple) else []
        if some and dice.random() < 0.6:
            item_type, some[dice.randrange(len(some))] = scalar(dice, item_type, some[0])
        else:
            length = dice.choice((0, 1, 2, 4, draft.n_layers, draft.n_layers + 1, 512, 600, len(some) // 2))
            some = [scalar(dice, item_type, some[0] if some else 1)[1] for _ in range(length)]
        try:
            draft.entries[key] = encode_array(key, item_type, some)
        except (struct.error, KeyError, TypeError, OverflowError):
            return f"{key} stays"
        return f"{key} is {len(some)} of type {item_type}: {str(some)[:90]}"
    type_id, new = scalar(dice, type_id, value)
    try:
        draft.entries[key] = encode_entry(key, type_id, new)
    except (struct.error, OverflowError):
        return f"{key} stays"
    return f"{key} = {str(new)[:40]!r} ({type_id})"


def mutate_value(draft: Draft, dice: random.Random) -> str:
    key = dice.choice(list(draft.values))
    return put(draft, dice, key, *draft.values[key])


def add_value(draft: Draft, dice: random.Random) -> str:
    key = dice.choice(
        [
            *(f"{draft.architecture}.{name}" for name in KNOWN_KEYS),
            *(f"tokenizer.ggml.{name}" for name in TOKENIZER_KEYS),
        ]
    )
    known = draft.values.get(key)
    if known is None:
        type_id = (
            F32 if any(word in key for word in ("eps", "scal", "freq", "softcap", "yarn", "clamp", "bias")) else U32
        )
        known = dice.choice((type_id, type_id, type_id, STRING_TYPE if "type" in key else BOOL)), U32, 1
    return put(draft, dice, key, *known)


def mutate_type(draft: Draft, dice: random.Random) -> str:
    index = dice.randrange(len(draft.tensors))
    name, dims, _, body = draft.tensors[index]
    fitting = [kind for kind, (_, block, _) in TENSOR_TYPES.items() if dims[0] % block == 0]
    kind = dice.choice(fitting if dice.random() < 0.95 else [*TENSOR_TYPES, 4, 36, 99])
    draft.tensors[index] = (name, dims, kind, body)
    return f"{name} is {TENSOR_TYPES.get(kind, '?')[0]}"


def mutate_tensor(draft: Draft, dice: random.Random) -> str:
    index = dice.randrange(len(draft.tensors))
    name, dims, kind, body = draft.tensors[index]
    way = dice.randrange(5)
    if way == 0:
        del draft.tensors[index]
        return f"no {name}"
    if way == 1:
        dims = tuple(reversed(dims)) if dice.random() < 0.5 else (*dims, 1)[: dice.randint(1, 4)]
    elif way == 2:
        changed = list(dims)
        changed[dice.randrange(len(dims))] = dice.choice((1, 2, 32, 64, 96, 128, 256, 1 << 12))
        dims = tuple(changed)
    elif way == 3:
        body = np.full(max(1, len(body) // 4), dice.choice(FLOATS), np.float32).tobytes()
    else:
        other = draft.tensors[dice.randrange(len(draft.tensors))][0]
        draft.tensors[index] = (other if dice.random() < 0.3 else name + "x", dims, kind, body)
        return f"{name} is called {draft.tensors[index][0]}"
    draft.tensors[index] = (name, dims, kind, body)
    return f"{name} has shape {dims}"


def sources(directory: Path, dice: random.Random) -> Iterator[tuple[str, Path]]:
    """Yield tiny models of all families, without end."""
    made: dict[tuple[object, ...], Path] = {}
    while True:
        family = dice.choice(list(RECIPES))
        key = (family, dice.choice(("f32", "f32", "q8_0", "f16")), dice.random() < 0.6)
        if key not in made:
            made[key] = directory / f"{len(made)}.gguf"
            try:
                make_tiny(family, made[key], quant=key[1], tokenizer=key[2])
            except gguf.quants.QuantError:  # too narrow for its blocks
                make_tiny(family, made[key], tokenizer=key[2])
        yield family, made[key]


def go_through(path: Path, directory: Path) -> None:
    """Inspect, split and load a model and decode a few rows of each stage. Raises RelaylineError if it is refused."""
    from relayline.coordinator.model.inspection import inspect_model
    from relayline.coordinator.model.split import split_model
    from relayline.coordinator.text.tokenizer import Tokenizer
    from relayline.deploy.models.trial import try_artifacts
    from relayline.stage.engine.artifact import verify_artifact
    from relayline.stage.engine.embedding import EmbeddingTable
    from relayline.stage.engine.native import NativeEngine
    from relayline.stage.sampling.constraint import read_vocabulary

    facts = inspect_model(path)
    n_stages = min(2, len(facts.legal_cuts) + 1)
    pipeline = split_model(path, directory, n_stages=n_stages, experimental=True, trial=try_artifacts)
    tokenizer = Tokenizer.load(directory / "tokenizer.gguf")
    if tokenizer.has_text:
        tokenizer.decode(tokenizer.encode("the <|user|>\n grüße \x00 \U0001f600")[:64])
        tokenizer.encode_chat("<|end|> x")
        assert isinstance(tokenizer.bos_text + tokenizer.eos_text, str)
        for token in range(min(tokenizer.n_vocab, 300)):
            tokenizer.piece(token, special=True)
            tokenizer.is_end(token)
    tokenizer.close()
    for stage in pipeline.stages:
        artifact = verify_artifact(directory / stage.file)
        for layout in ("unified", "per-lane"):
            with NativeEngine(
                engine_config(artifact.path, n_lanes=2, ctx_tokens=64, max_rows=8, kv_layout=layout)
            ) as engine:
                if artifact.is_first:
                    EmbeddingTable(artifact).lookup(np.arange(3, dtype=np.int32), engine.input_rows[:3])
                for position, n_rows in ((0, 5), (5, 1), (6, 1)):
                    engine.input_rows[:n_rows] = np.random.default_rng(0).standard_normal(
                        (n_rows, engine.input_rows.shape[1])
                    )
                    engine.positions[:n_rows] = np.arange(position, position + n_rows)
                    engine.seq_ids[:n_rows] = 1
                    engine.wants[:n_rows] = 1
                    engine.decode(n_rows)
                if engine.is_last:
                    read_vocabulary(engine.vocab, engine.n_vocab)


def load_modules() -> None:
    """Import the modules that `go_through` needs, so that each fork has them."""
    import relayline.coordinator.model.inspection
    import relayline.coordinator.model.split
    import relayline.coordinator.text.tokenizer
    import relayline.deploy.models.trial
    import relayline.stage.engine.native
    import relayline.stage.sampling.constraint  # noqa: F401


def outcome(path: Path, directory: Path, limit_s: int = 200) -> str:
    """Go through a model in a forked process; returns how it ended: ok, the line it was refused with, or the signal
    that killed it.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.dup2(write_end, 1)
            os.dup2(os.open(directory.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.environ["GGML_NO_BACKTRACE"] = "1"
            signal.alarm(limit_s)
            go_through(path, directory)
            os.write(1, b"ok")
            code = 0
        except RelaylineError as error:
            os.write(1, error.message.encode(errors="replace")[:400])
            code = 0
        except BaseException as error:
            import traceback

            traceback.print_exc()
            os.write(1, f"{type(error).__name__}: {error}".encode(errors="replace")[:400])
        finally:
            os._exit(code)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return text
    lines = directory.with_suffix(".err").read_text(errors="replace").strip().splitlines() or ["nothing"]
    how = signal.Signals(-status).name if status < 0 else f"exit {status}"
    return f"DEATH {how}: {text} {lines[-1][:200]}"


def main(count: int, seed: int, part: int = 0, n_parts: int = 1) -> int:
    deaths, tally = [], collections.Counter[str]()
    load_modules()
    with tempfile.TemporaryDirectory() as name:
        root, dice = Path(name), random.Random(seed)
        models = sources(root, dice)
        for number in range(count):
            family, source = next(models)
            content, done = mutate(read_draft(source), dice)
            if number % n_parts != part:
                continue
            path, place = root / "mutant.gguf", root / "split"
            path.write_bytes(content)
            found = outcome(path, place)
            tally["ok" if found == "ok" else "death" if found.startswith("DEATH") else "refused"] += 1
            if found.startswith("DEATH"):
                deaths.append(f"{number} {family}: {done} -> {found}")
                print(deaths[-1], flush=True)
            for file in place.glob("*") if place.is_dir() else ():
                file.unlink()
            for file in place.glob(".*"):
                file.unlink()
    print(dict(tally))
    return bool(deaths)


if __name__ == "__main__":
    _part, _, _parts = (sys.argv[3] if len(sys.argv) > 3 else "0/1").partition("/")
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, int(_part), int(_parts)))
