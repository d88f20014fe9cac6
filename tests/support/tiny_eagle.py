"""Tiny EAGLE-3 draft models as llama.cpp's converter writes them, and what llama.cpp's `draft-eagle3` guesses by them.

`copying` ones are not random: their weights pass the last of the read rows on to the head, so they guess what the
model itself would say if its last layers changed nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.kv_cache import FLASH_ATTN
from tests.support.tiny_models import add_tokenizer
from tests.support.tiny_shapes import HEAD, N_EMBD, N_FF, N_HEADS, N_KV_HEADS

CTX = 256
N_TARGET = 3  # layers that such a model reads


def make_eagle(
    path: Path,
    layers: Sequence[int],
    *,
    vocab: int = 128,
    width: int = N_EMBD,
    target_width: int = N_EMBD,
    maps_tokens: bool = False,
    first_mapped: int = 0,
    own_table: bool = True,
    own_head: bool = True,
    norm_before_residual: bool = False,
    norm_before_fc: bool = False,
    kv_heads: int = N_KV_HEADS,
    tokenizer: bool = False,
    replaced: Mapping[str, np.ndarray] | None = None,
    seed: int = 3,
) -> Path:
    """Write a draft model that reads the inputs of these layers. `maps_tokens`: its head knows every second token."""
    writer = gguf.GGUFWriter(None, "eagle3")
    writer.add_name("tiny eagle")
    for key, value in {
        "block_count": 1, "context_length": 512, "embedding_length": width, "feed_forward_length": N_FF,
        "attention.head_count": N_HEADS, "attention.head_count_kv": kv_heads, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": HEAD, "vocab_size": vocab,
        "target_hidden_size": target_width,
    }.items():  # fmt: skip
        writer.add_uint32(f"eagle3.{key}", value)
    writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_bool("eagle3.norm_before_residual", norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", norm_before_fc)
    if tokenizer:
        add_tokenizer(writer, ())
    else:
        writer.add_tokenizer_model("none")
    n_guessed = vocab // 2 if maps_tokens else vocab
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(layers) * target_width), "output_norm.weight": (width,),
        "blk.0.attn_norm.weight": (width,), "blk.0.attn_norm_2.weight": (width,), "blk.0.ffn_norm.weight": (width,),
        "blk.0.attn_q.weight": (N_HEADS * HEAD, 2 * width), "blk.0.attn_k.weight": (kv_heads * HEAD, 2 * width),
        "blk.0.attn_v.weight": (kv_heads * HEAD, 2 * width), "blk.0.attn_output.weight": (width, N_HEADS * HEAD),
        "blk.0.ffn_gate.weight": (N_FF, width), "blk.0.ffn_up.weight": (N_FF, width),
        "blk.0.ffn_down.weight": (width, N_FF),
    }  # fmt: skip
    shapes |= {"enc.output_norm.weight": (len(layers) * target_width,)} if norm_before_fc else {}
    shapes |= {"output.weight": (n_guessed, width)} if own_head else {}
    shapes |= {"token_embd.weight": (vocab, width)} if own_table else {}
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name != "token_embd.weight":
            values *= np.float32((4.0 if name == "output.weight" else 1.5) / np.sqrt(shape[-1]))
        writer.add_tensor(name, (replaced or {}).get(name, values))
    if maps_tokens:
        writer.add_tensor("d2t", np.arange(0, vocab, 2, dtype=np.int64)[:n_guessed] + first_mapped)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_copying(model: Path, path: Path, layers: Sequence[int], *, tokenizer: bool = False) -> Path:
    """Write a draft model for a model whose layers add next to nothing ("llama:faint"): it guesses what that says.

    It attends to the token alone that it is given, and hands that on to the model's own head.
    """
    weights = {tensor.name: tensor.data for tensor in gguf.GGUFReader(model).tensors}
    vocab = len(weights["token_embd.weight"])
    of_token = np.concatenate([np.eye(N_EMBD, dtype=np.float32), np.zeros((N_EMBD, N_EMBD), np.float32)], axis=1)
    ones, zeros = np.ones(N_EMBD, np.float32), np.zeros(N_EMBD, np.float32)
    replaced = {
        "blk.0.attn_norm.weight": ones, "blk.0.attn_norm_2.weight": zeros, "blk.0.attn_q.weight": 40 * of_token,
        "blk.0.attn_k.weight": of_token, "blk.0.attn_v.weight": of_token,
        "blk.0.attn_output.weight": np.eye(N_EMBD, dtype=np.float32),
        "blk.0.ffn_down.weight": np.zeros((N_EMBD, N_FF), np.float32),
        "output_norm.weight": weights["output_norm.weight"],
    }  # fmt: skip
    return make_eagle(
        path, layers, vocab=vocab, own_table=False, own_head=False, norm_before_residual=True, kv_heads=N_HEADS,
        tokenizer=tokenizer, replaced=replaced,
    )  # fmt: skip


def _called(name: str, arguments: list[object], result: object = None) -> object:
    function = llama._lib[name]
    function.argtypes, function.restype = arguments, result
    return function


_GIVE = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_NEXT = "_Z26llama_get_embeddings_nextnP13llama_context"
_GIVE_LAYER = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_LAYER = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
_FLOATS = ctypes.POINTER(ctypes.c_float)


class WholeEagle:
    """An unsplit model and its EAGLE-3 model in bare llama.cpp, without any code of the stages."""

    def __init__(self, model: Path, eagle: Path, layers: Sequence[int], flash_attn: str = "auto") -> None:
        self._give = _called(_GIVE, [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool])
        self._next = _called(_NEXT, [ctypes.c_void_p], _FLOATS)
        give_layer = _called(_GIVE_LAYER, [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool])
        self._layer = _called(_LAYER, [ctypes.c_void_p, ctypes.c_uint32], _FLOATS)
        self._models, self._contexts, self._layers = [], [], layers
        for path in (model, eagle):
            params = llama.llama_model_default_params()
            ggml.leave_gpus(params)
            loaded = llama.llama_model_load_from_file(str(path).encode(), params)
            assert loaded
            self._models.append(loaded)
            own = llama.llama_context_default_params()
            own.n_ctx = own.n_batch = own.n_ubatch = CTX
            own.n_threads = own.n_threads_batch = 1
            own.swa_full = True
            own.flash_attn_type = FLASH_ATTN[flash_attn]
            if self._contexts:
                own.ctx_other = self._contexts[0]
            context = llama.llama_init_from_model(loaded, own)
            assert context
            self._contexts.append(context)
        main, draft = self._contexts
        self.n_layers = llama.llama_model_n_layer(self._models[0])
        for layer in layers:
            if layer < self.n_layers:
                give_layer(main, layer, True)
            else:
                self._give(main, True, False)
        self._give(draft, True, True)
        self.target_width, self.width = (llama.llama_model_n_embd(each) for each in self._models)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._models[1]))
        self._batch = llama.llama_batch_init(CTX, 0, 1)

    def inner(self, tokens: Sequence[int]) -> np.ndarray:
        """Read a text on empty caches: the rows that the draft model reads, f32 [tokens, layers x width]."""
        main = self._contexts[0]
        llama.llama_memory_clear(llama.llama_get_memory(main), False)
        self._decode(main, tokens, 0)
        parts = [self._layer(main, layer) if layer < self.n_layers else self._next(main) for layer in self._layers]
        shape = (len(tokens), self.target_width)
        return np.concatenate([np.ctypeslib.as_array(part, shape) for part in parts], axis=1)

    def guesses(self, tokens: Sequence[int], n_guesses: int) -> list[tuple[int, float]]:
        """Read a text on empty caches and guess behind it: each token with its probability."""
        draft = self._contexts[1]
        llama.llama_memory_clear(llama.llama_get_memory(draft), False)
        rows = self._encoded(self.inner(tokens[:-1]))
        found: list[tuple[int, float]] = []
        position, given = 0, list(tokens[1:])
        while len(found) < n_guesses:
            logits = self._decode(draft, given, position, rows)[-1].astype(np.float64)
            position += len(given)
            rows = np.ctypeslib.as_array(self._next(draft), (len(given), self.width)).copy()[-1:]
            chances = np.exp(logits - logits.max())
            given = [int(logits.argmax())]
            found.append((given[0], float(chances.max() / chances.sum())))
        return found

    def _encoded(self, inner: np.ndarray) -> np.ndarray:
        draft = self._contexts[1]
        self._fill([0] * len(inner), 0)
        rows, batch = np.ascontiguousarray(inner), type(self._batch).from_buffer_copy(self._batch)
        batch.token, batch.embd = ctypes.POINTER(llama.llama_token)(), rows.ctypes.data_as(_FLOATS)
        assert llama.llama_encode(draft, batch) == 0
        return np.ctypeslib.as_array(self._next(draft), (len(inner), self.width)).copy()

    def _fill(self, tokens: Sequence[int], first: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, first + row, 1, 1
            batch.seq_id[row][0] = 0

    def _decode(self, context: object, tokens: Sequence[int], first: int, rows: np.ndarray | None = None) -> np.ndarray:
        batch = self._batch
        self._fill(tokens, first)
        if rows is not None:
            rows = np.ascontiguousarray(rows)
            batch.embd = rows.ctypes.data_as(_FLOATS)
        assert llama.llama_decode(context, batch) == 0
        batch.embd = None  # these rows are not the batch's to free
        return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(tokens), self.n_vocab)).copy()

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        for context in reversed(self._contexts):
            llama.llama_free(context)
        for model in self._models:
            llama.llama_model_free(model)
