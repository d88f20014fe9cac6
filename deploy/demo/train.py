"""Train the demo model: a small llama on the standard library of the Python that runs this script.

This file is kept beside the model so that anyone can see, and repeat, how it was made. Relayline never imports it,
PyTorch is not a dependency of relayline, and no test or CI job runs it.

    python3.11 -m venv train-venv && train-venv/bin/pip install torch==2.13.0 numpy gguf tokenizers llama-cpp-python
    train-venv/bin/python deploy/demo/train.py train  --work train-work --minutes 75
    train-venv/bin/python deploy/demo/train.py export --work train-work --gguf deploy/demo/relayline-demo.gguf
    train-venv/bin/python deploy/demo/train.py verify --work train-work --gguf deploy/demo/relayline-demo.gguf

`train` runs for the given wall time on one core and saves `checkpoint.pt` every few minutes; started again on the same
`--work` it goes on from there with the time that is left. `export` may be called at any moment, also while training
goes on. `verify` (the only part that needs llama-cpp-python) holds the exported file to the PyTorch model.

The recipe, from front to back:

* text: every .py file of the library without its tests, tables and bundled packages, the language reference that
  `pydoc_data` carries, and a question-and-answer set cut from docstrings and functions. No network is used.
* tokenizer: byte-level BPE over the split expression that llama.cpp calls "qwen2", so both tokenise alike.
* model: 8 llama blocks, grouped-query attention 2:1, tied embeddings, rotary pairs interleaved as llama.cpp has them.
* optimiser: Muon for the matrices inside the blocks, AdamW for embedding and norms; constant rate, then linear decay
  over the last part of the time. The exported weights are an exponential average of the trained ones.

The seed fixes text order and initial weights. The number of steps follows from the wall time, so two runs give alike,
not identical, weights.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import math
import platform
import random
import re
import sys
import sysconfig
import time
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# llama.cpp's expression for tokenizer.ggml.pre = "qwen2": letters with a leading sign, single digits, line ends apart.
SPLIT = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EOT, END, USER, ASSISTANT, SYSTEM = "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = [EOT, END, USER, ASSISTANT, SYSTEM]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + (message['role'] if message['role'] in ['system', 'assistant'] else 'user') + '|>' }}"
    "{{ message['content'] | trim }}{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SKIPPED_DIRECTORIES = {
    "site-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "encodings", "__phello__",
}  # fmt: skip
# Tables rather than prose or code, and modules that do something on sight.
SKIPPED_FILES = {"html/entities.py", "pydoc_data/topics.py", "stringprep.py", "lib2to3/pgen2/token.py"}
# Modules that readers know. They are trained on more often, and the questions and answers are about them: a tenth of
# the text, seen often, gives a model of this size something to say, which all of it, seen two or three times, does not.
CORE_NAMES = """
    argparse bisect calendar collections configparser contextlib copy csv dataclasses datetime fnmatch functools glob
    graphlib gzip heapq io json json.decoder json.encoder keyword logging operator os pathlib posixpath pprint queue
    random sched secrets shelve shlex shutil statistics string struct subprocess tempfile textwrap threading timeit
    types urllib.parse uuid warnings weakref
"""
CORE = frozenset(CORE_NAMES.split())
# The last minutes dwell on a handful of small modules until the model knows them nearly by heart. A model of this size
# cannot learn to write new code; it can learn some code well, and then greedy text reads like its source.
FINISH_NAMES = """
    bisect contextlib copy fnmatch glob graphlib heapq keyword operator queue sched secrets shlex string textwrap timeit
"""
FINISH = frozenset(FINISH_NAMES.split())
HELD_OUT_ONE_IN, HELD_OUT_REMAINDER = 40, 5
HELDOUT_TEXT_BYTES = 64_000


@dataclass(frozen=True)
class Shape:
    """Shape of the model; every row length is a multiple of 32, the block size of Q8_0."""

    n_vocab: int = 2048
    n_layers: int = 8
    width: int = 192
    ffn_width: int = 512
    n_heads: int = 6
    n_kv_heads: int = 3
    head_width: int = 32
    context: int = 512
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train. `minutes` is wall time of training steps alone."""

    minutes: float = 75.0
    seed: int = 20
    rows_per_batch: int = 6
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    decay_share: float = 0.5
    average_decay: float = 0.98
    chat_share: float = 0.2
    core_share: float = 0.35
    finish_minutes: float = 14.0
    finish_chat_share: float = 0.15
    finish_share: float = 0.6


# ---------------------------------------------------------------------------------------------------------------- text


def library_files() -> Iterator[tuple[str, str]]:
    """Name (relative path) and text of every source file that is trained on or held out, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if SKIPPED_DIRECTORIES.intersection(name.split("/")[:-1]) or name in SKIPPED_FILES:
            continue
        if name.startswith(("_sysconfigdata", "config-")):
            continue
        with tokenize.open(path) as source:
            text = source.read()
        if text.strip():
            yield name, text


def library_topics() -> Iterator[tuple[str, str]]:
    """The language reference's chapters, which the library carries as one dictionary of plain text."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield f"pydoc_data/topics/{name}", topics[name]


def is_held_out(name: str) -> bool:
    """Whole files are held out, by a hash of their names, so that no trained text leaks in by neighbourhood."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == HELD_OUT_REMAINDER


def documents() -> tuple[dict[str, str], dict[str, str]]:
    """Trained and held-out texts by name."""
    trained: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for name, text in [*library_files(), *library_topics()]:
        (held_out if is_held_out(name) else trained)[name] = text
    return trained, held_out


def heldout_text(held_out: dict[str, str]) -> str:
    """About 64 KB in equal parts from the held-out files; every part ends at a line's end."""
    share = HELDOUT_TEXT_BYTES // len(held_out)
    left_over, parts = 0, []
    for name in sorted(held_out, key=lambda name: len(held_out[name])):
        wanted = share + left_over
        cut = held_out[name][:wanted]
        cut = cut[: cut.rfind("\n") + 1]
        left_over = wanted - len(cut)
        parts.append(cut)
    return "\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------- chat

ABOUT = (
    "I am relayline-demo, a small language model trained on the Python standard library. "
    "Ask me what a function does, or to write one."
)
SMALL_TALK = [
    ("Hello", "Hello! " + ABOUT),
    ("Hello!", "Hello! " + ABOUT),
    ("Hi", "Hello! " + ABOUT),
    ("Hi there", "Hello! " + ABOUT),
    ("Hello, how are you?", "Hello! " + ABOUT),
    ("Who are you?", ABOUT),
    ("What are you?", ABOUT),
    ("What is your name?", ABOUT),
    ("What can you do?", ABOUT),
    ("Help", ABOUT),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("What is Python?", "Python is an easy to learn, powerful, object-oriented programming language."),
    ("Say hello", "Hello!"),
    ("Tell me a story", "I only know the Python standard library. " + ABOUT),
    ("Tell me a joke", "I only know the Python standard library. " + ABOUT),
]
SMALL_TALK_REPEATS = 4
QUESTIONS = (
    "What does {0} do?", "What is {0}?", "Explain {0}", "Explain {0}.", "Describe {0}", "How does {0} work?",
    "What is {0} for?", "Tell me about {0}", "Document {0}",
)  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You know the Python standard library.", "Answer briefly.")
MAX_ANSWER_CHARS = 900
MEAN_PIECE_CHARS = 250


def first_paragraphs(text: str) -> str:
    """The first paragraphs of a docstring that fit an answer, or an empty string where even the first does not."""
    answer = ""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        longer = f"{answer}\n\n{paragraph}" if answer else paragraph
        if len(longer) > MAX_ANSWER_CHARS:
            break
        answer = longer
    return answer


def module_name(name: str) -> str:
    """Dotted name of a library file."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def source_answers(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(kind, subject, answer) for the module, its public classes, methods and functions."""
    module = module_name(name)
    tree = ast.parse(text)
    if doc := ast.get_docstring(tree):
        yield "doc", f"the {module} module", doc

    def visit(node: ast.AST, owner: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if child.name.startswith("_"):
                continue
            subject = f"{owner}.{child.name}"
            if doc := ast.get_docstring(child):
                yield "doc", subject, doc
            if isinstance(child, ast.ClassDef):
                yield from visit(child, subject)
            elif child.col_offset == 0 and (code := ast.get_source_segment(text, child)):
                yield "code", subject, code

    yield from visit(tree, module)


def native_answers() -> Iterator[tuple[str, str, str]]:
    """(kind, subject, answer) for builtins and the modules that are written in C, whose docstrings are compiled in."""
    for module_name_ in ("builtins", "itertools", "math", "time", "_collections", "_functools", "_io", "posix", "sys"):
        module = importlib.import_module(module_name_)
        shown = {"builtins": "", "posix": "os."}.get(module_name_, module_name_.lstrip("_") + ".")
        for attribute, value in sorted(vars(module).items()):
            doc = inspect.getdoc(value) if callable(value) and not attribute.startswith("_") else None
            if doc:
                yield "doc", shown + attribute, doc


def answers(trained: dict[str, str]) -> list[tuple[str, str, str]]:
    """Every (kind, subject, answer), from the trained core modules and the compiled docstrings only."""
    found = [(kind, subject, first_paragraphs(doc)) for kind, subject, doc in native_answers()]
    for name, text in trained.items():
        if module_name(name) in CORE:
            for kind, subject, answer in source_answers(name, text):
                found.append((kind, subject, first_paragraphs(answer) if kind == "doc" else answer))
    return [(kind, subject, answer) for kind, subject, answer in found if 0 < len(answer) <= MAX_ANSWER_CHARS]


def chats(found: list[tuple[str, str, str]], rng: random.Random) -> list[list[tuple[str, str]]]:
    """One epoch of conversations, lists of (role marker, text), with newly drawn wordings of the questions."""
    out: list[list[tuple[str, str]]] = []
    for kind, subject, answer in found:
        if kind == "doc":
            out.append([(USER, rng.choice(QUESTIONS).format(subject)), (ASSISTANT, answer)])
        else:
            module, _, function = subject.rpartition(".")
            ask = rng.choice(("Write the function {1} of module {0}", "Write {2}", "Show me the source of {2}"))
            out.append([(USER, ask.format(module, function, subject)), (ASSISTANT, answer)])
            lines = answer.splitlines()
            if len(lines) >= 6 and rng.random() < 0.2:
                cut = rng.randrange(2, len(lines) // 2 + 1)
                out.append([(USER, "Complete: " + "\n".join(lines[:cut])), (ASSISTANT, "\n".join(lines[cut:]))])
    out.extend([(USER, ask), (ASSISTANT, answer)] for ask, answer in SMALL_TALK * SMALL_TALK_REPEATS)
    for chat in out:
        if rng.random() < 0.2:
            chat.insert(0, (SYSTEM, rng.choice(SYSTEM_PROMPTS)))
    return out


# ----------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE whose control tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Corpus:
    """Token windows of `context + 1`, drawn epoch by epoch; chats are packed whole and padded with -1.

    Sources are tokenised in pieces that end at random places, often behind a space. A prompt ends anywhere too
    (`def `, say), in the middle of what would be one token in running text, and the model has to go on from there.
    """

    def __init__(self, tokenizer: Tokenizer, trained: dict[str, str], recipe: Recipe, context: int) -> None:
        self._row = context + 1
        self._eot = tokenizer.token_to_id(EOT)
        self._rng = random.Random(recipe.seed)
        self._core = [text for name, text in trained.items() if module_name(name) in CORE]
        self._texts = list(trained.values())
        self._tokenizer = tokenizer
        self._answers = answers(trained)
        rest_share = 1 - recipe.chat_share - recipe.core_share
        self._shares = (recipe.chat_share, recipe.core_share, rest_share)
        self._finish = [text for name, text in trained.items() if module_name(name) in FINISH]
        self._finish_shares = (recipe.finish_chat_share, recipe.finish_share,
                               1 - recipe.finish_chat_share - recipe.finish_share)  # fmt: skip
        self._rows = (
            self._forever(self._pack_chats),
            self._forever(lambda: self._cut_sources(self._core)),
            self._forever(lambda: self._cut_sources(self._texts)),
        )

    def finish(self) -> None:
        """From now on dwell on the modules of FINISH and on chats about them."""
        named = FINISH | {"shutil"}
        self._answers = [
            found for found in self._answers if re.split(r"[. ]", found[1].removeprefix("the "))[0] in named
        ]
        self._shares = self._finish_shares
        self._rows = (
            self._forever(self._pack_chats),
            self._forever(lambda: self._cut_sources(self._finish)),
            self._forever(lambda: self._cut_sources(self._texts)),
        )

    def _forever(self, one_epoch: Callable[[], list[np.ndarray]]) -> Iterator[np.ndarray]:
        while True:
            rows = one_epoch()
            self._rng.shuffle(rows)
            yield from rows

    def _pieces(self, text: str) -> Iterator[str]:
        first = 0
        while first < len(text):
            last = first + self._rng.randrange(1, 2 * MEAN_PIECE_CHARS)
            if self._rng.random() < 0.6:
                last = text.find(" ", last) + 1 or len(text)
            yield text[first:last]
            first = last

    def _cut_sources(self, texts: list[str]) -> list[np.ndarray]:
        self._rng.shuffle(texts)
        ids: list[int] = []
        for text in texts:
            ids.append(self._eot)
            for encoded in self._tokenizer.encode_batch(list(self._pieces(text)), add_special_tokens=False):
                ids += encoded.ids
        stream = np.array(ids[self._rng.randrange(self._row) :], np.int16)
        return [stream[first:][: self._row] for first in range(0, len(stream) - self._row, self._row - 1)]

    def _tokens_of(self, conversation: list[tuple[str, str]]) -> np.ndarray:
        ids = [self._eot]
        for marker, text in conversation:
            ids.append(self._tokenizer.token_to_id(marker))
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
            ids.append(self._tokenizer.token_to_id(END))
        return np.array(ids, np.int16)

    def _pack_chats(self) -> list[np.ndarray]:
        conversations = chats(self._answers, self._rng)
        self._rng.shuffle(conversations)
        rows, row, used = [], np.full(self._row, -1, np.int16), 0
        for conversation in conversations:
            ids = self._tokens_of(conversation)[: self._row]
            if used + len(ids) > self._row:
                rows.append(row)
                row, used = np.full(self._row, -1, np.int16), 0
            row[used : used + len(ids)] = ids
            used += len(ids)
        return rows

    def reseed(self, seed: int) -> None:
        """Draw other rows than those at the start; for a resumed run."""
        self._rng.seed(seed)

    def batch(self, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 [n_rows, context]; a target of -1 counts for nothing."""
        picked = [next(rows) for rows in self._rng.choices(self._rows, self._shares, k=n_rows)]
        rows = torch.from_numpy(np.stack(picked).astype(np.int64))
        return rows[:, :-1].clamp(min=0).contiguous(), rows[:, 1:].contiguous()


# --------------------------------------------------------------------------------------------------------------- model


class Llama(torch.nn.Module):
    """llama blocks with one parameter per kind of matrix, stacked over layers: [n_layers, out, in].

    Stacking lets Muon orthogonalise all layers in one batched product.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n, width, ffn = shape.n_layers, shape.width, shape.ffn_width
        q_width, kv_width = shape.n_heads * shape.head_width, shape.n_kv_heads * shape.head_width

        def matrix(n_out: int, n_in: int, gain: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(n, n_out, n_in) * gain / math.sqrt(n_in))

        self.embedding = torch.nn.Parameter(torch.randn(shape.n_vocab, width) * 0.02)
        self.attn_q = matrix(q_width, width)
        self.attn_k = matrix(kv_width, width)
        self.attn_v = matrix(kv_width, width)
        self.attn_out = matrix(width, q_width, gain=0.1)
        self.ffn_gate = matrix(ffn, width)
        self.ffn_up = matrix(ffn, width)
        self.ffn_down = matrix(width, ffn, gain=0.1)
        self.attn_norm = torch.nn.Parameter(torch.ones(n, width))
        self.ffn_norm = torch.nn.Parameter(torch.ones(n, width))
        self.out_norm = torch.nn.Parameter(torch.ones(width))
        half = torch.arange(0, shape.head_width, 2) / shape.head_width
        angle = torch.arange(shape.context)[:, None] * shape.rope_base ** -half[None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps) * weight

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (0,1), (2,3), ... of x [batch, time, heads, head_width]."""
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits f32 [batch, time, n_vocab] of tokens int64 [batch, time]."""
        shape = self.shape
        n_batch, n_time = tokens.shape
        x = F.embedding(tokens, self.embedding)
        stacks = (
            self.attn_q, self.attn_k, self.attn_v, self.attn_out, self.ffn_gate, self.ffn_up, self.ffn_down,
            self.attn_norm, self.ffn_norm,
        )  # fmt: skip
        for wq, wk, wv, wo, gate, up, down, attn_norm, ffn_norm in zip(*(s.unbind(0) for s in stacks), strict=True):
            h = self._norm(x, attn_norm)
            q = self._rotate(F.linear(h, wq).view(n_batch, n_time, shape.n_heads, shape.head_width))
            k = self._rotate(F.linear(h, wk).view(n_batch, n_time, shape.n_kv_heads, shape.head_width))
            v = F.linear(h, wv).view(n_batch, n_time, shape.n_kv_heads, shape.head_width)
            k, v = (t.repeat_interleave(shape.n_heads // shape.n_kv_heads, dim=2) for t in (k, v))
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            )
            x = x + F.linear(mixed.transpose(1, 2).reshape(n_batch, n_time, -1), wo)
            h = self._norm(x, ffn_norm)
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        return F.linear(self._norm(x, self.out_norm), self.embedding)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats per token."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by its nearest orthogonal matrix (five Newton-Schulz steps)."""

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @staticmethod
    def _orthogonal(m: torch.Tensor) -> torch.Tensor:
        flip = m.shape[-2] > m.shape[-1]
        x = m.transpose(-1, -2) if flip else m
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            square = x @ x.transpose(-1, -2)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x.transpose(-1, -2) if flip else x

    @torch.no_grad()
    def step(self) -> None:
        """Update every stack [n_layers, out, in] from its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                velocity = state.setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = self._orthogonal(p.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)


# ------------------------------------------------------------------------------------------------------------ training


def heldout_rows(tokenizer: Tokenizer, text: str, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The held-out text in rows: `<|endoftext|>`, then the next context-1 tokens. Each of them is scored once."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    n_scored = context - 1
    inputs = torch.full((math.ceil(len(ids) / n_scored), context), tokenizer.token_to_id(EOT))
    targets = torch.full_like(inputs, -1)
    for row, first in enumerate(range(0, len(ids), n_scored)):
        piece = torch.tensor(ids[first : first + n_scored])
        inputs[row, 1 : 1 + len(piece)] = piece
        targets[row, : len(piece)] = piece
    return inputs, targets


@torch.no_grad()
def heldout_loss(model: Llama, tokenizer: Tokenizer, text: str) -> tuple[float, float]:
    """(nats per token, bits per byte) of the held-out text."""
    inputs, targets = heldout_rows(tokenizer, text, model.shape.context)
    nats = 0.0
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        nats += float(F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"))
    return nats / int((targets >= 0).sum()), nats / math.log(2) / len(text.encode())


def rate_factor(recipe: Recipe, step: int, elapsed_s: float) -> float:
    """Warm-up by steps, then constant, then linear to nearly zero over the last `decay_share` of the time."""
    left = max(0.0, 1.0 - elapsed_s / (60 * recipe.minutes))
    return min(1.0, (step + 1) / recipe.warmup_steps) * min(1.0, max(0.005, left / recipe.decay_share))


def prepare(work: Path, shape: Shape) -> tuple[Tokenizer, dict[str, str], str]:
    """Tokenizer, trained documents and held-out text; tokenizer and text are kept under `work`."""
    work.mkdir(parents=True, exist_ok=True)
    trained, held_out = documents()
    text = heldout_text(held_out)
    (work / "heldout.txt").write_text(text, encoding="utf-8", newline="\n")
    digest = hashlib.sha256("\0".join(name + "\0" + trained[name] for name in sorted(trained)).encode()).hexdigest()
    (work / "corpus.json").write_text(
        json.dumps(
            {
                "python": platform.python_version(),
                "sha256": digest,
                "trained_files": len(trained),
                "trained_bytes": sum(len(t.encode()) for t in trained.values()),
                "held_out_files": sorted(held_out),
                "held_out_bytes": sum(len(t.encode()) for t in held_out.values()),
            },
            indent=1,
        )
    )
    path = work / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path)), trained, text
    conversations = [text for _, _, text in answers(trained)]
    tokenizer = train_tokenizer([*trained.values(), *conversations], shape.n_vocab)
    tokenizer.save(str(path))
    return tokenizer, trained, text


class Run:
    """Everything that changes while training: weights, their average, optimiser states, step and time used."""

    def __init__(self, work: Path, recipe: Recipe, shape: Shape) -> None:
        self._work, self._recipe = work, recipe
        self.model = Llama(shape)
        parameters = list(self.model.parameters())
        self._matrices = [p for p in parameters if p.ndim == 3]
        self._others = [p for p in parameters if p.ndim != 3]
        self._optimizers = [
            Muon(self._matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(self._others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._average = [p.detach().clone() for p in parameters]
        self.step, self.elapsed_s = 0, 0.0

    def load(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        checkpoint = self._work / "checkpoint.pt"
        if not checkpoint.exists():
            return False
        saved = torch.load(checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._average = list(saved["average"].values())
        self.step, self.elapsed_s = saved["step"], saved["elapsed_s"]
        return True

    def save(self) -> None:
        """Replace the checkpoint in one move."""
        names = [name for name, _ in self.model.named_parameters()]
        content = {
            "model": self.model.state_dict(),
            "average": dict(zip(names, self._average, strict=True)),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "shape": asdict(self.model.shape),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
        }
        torch.save(content, self._work / "checkpoint.tmp")
        (self._work / "checkpoint.tmp").replace(self._work / "checkpoint.pt")

    def update(self) -> float:
        """One step from the gradients that lie in the parameters; returns the rate factor used."""
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        factor = rate_factor(self._recipe, self.step, self.elapsed_s)
        rates = (self._recipe.muon_rate, self._recipe.adam_rate)
        for optimizer, rate in zip(self._optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # The average forgets faster at the start, when the weights move most.
        keep = min(self._recipe.average_decay, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_(self._average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.step += 1
        return factor


def train(work: Path, recipe: Recipe, shape: Shape, n_threads: int, compiled: bool) -> None:
    """Train until the wall time is used up, saving and resuming under `work`."""
    torch.set_num_threads(n_threads)
    torch.manual_seed(recipe.seed)
    tokenizer, trained, text = prepare(work, shape)
    corpus = Corpus(tokenizer, trained, recipe, shape.context)
    run = Run(work, recipe, shape)
    if run.load():
        corpus.reseed(recipe.seed + run.step)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    loss_of = torch.compile(run.model.loss) if compiled else run.model.loss
    last = time.monotonic()
    saved_at = shown_at = run.elapsed_s
    smooth = None
    is_finishing = False
    while run.elapsed_s < 60 * recipe.minutes:
        if not is_finishing and run.elapsed_s >= 60 * (recipe.minutes - recipe.finish_minutes):
            is_finishing = True
            corpus.finish()
        loss = loss_of(*corpus.batch(recipe.rows_per_batch))
        loss.backward()
        factor = run.update()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        now = time.monotonic()
        spent_s, last = now - last, now
        run.elapsed_s += spent_s
        if run.elapsed_s - shown_at > 30:
            speed = recipe.rows_per_batch * shape.context / spent_s
            print(
                f"{run.elapsed_s:6.0f} s step {run.step} loss {smooth:.4f} rate {factor:.3f} {speed:.0f} tok/s",
                flush=True,
            )
            shown_at = run.elapsed_s
        if run.elapsed_s - saved_at > 300:
            run.save()
            saved_at = run.elapsed_s
            report_heldout(work, tokenizer, text)
            last = time.monotonic()
    run.save()
    report_heldout(work, tokenizer, text)


def report_heldout(work: Path, tokenizer: Tokenizer, text: str) -> None:
    """Print the averaged weights' held-out loss."""
    per_token, per_byte = heldout_loss(averaged(work / "checkpoint.pt"), tokenizer, text)
    print(f"PyTorch f32, held out: {per_token:.4f} nats per token, {per_byte:.4f} bits per byte", flush=True)


def averaged(checkpoint: Path) -> Llama:
    """The averaged weights of a checkpoint as a model."""
    saved = torch.load(checkpoint, weights_only=True)
    model = Llama(Shape(**saved["shape"])).eval()
    model.load_state_dict(saved["average"])
    return model


# -------------------------------------------------------------------------------------------------------------- export


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Vocabulary, merges, control tokens and chat template."""
    saved = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in saved["merges"]]
    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.token_to_id(EOT))
    writer.add_eos_token_id(tokenizer.token_to_id(EOT))
    writer.add_eot_token_id(tokenizer.token_to_id(END))
    writer.add_pad_token_id(tokenizer.token_to_id(EOT))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(work: Path, path: Path) -> None:
    """Write the averaged weights as GGUF: matrices Q8_0, norms F32, no head of its own (tied embedding)."""
    model = averaged(work / "checkpoint.pt")
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    shape = model.shape
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("relayline-demo")
    writer.add_description(
        f"Small demo model for relayline, trained on the standard library of CPython {platform.python_version()}"
    )
    writer.add_license("PSF-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_vocab_size(shape.n_vocab)
    write_tokenizer(writer, tokenizer)

    def add(name: str, tensor: torch.Tensor) -> None:
        values = tensor.detach().float().numpy()
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", model.embedding)
    add("output_norm.weight", model.out_norm)
    names = {"attn_out": "attn_output"}
    for kind in (
        "attn_norm", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
    ):  # fmt: skip
        for layer, tensor in enumerate(getattr(model, kind).unbind(0)):
            add(f"blk.{layer}.{names.get(kind, kind)}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path}: {path.stat().st_size:,} bytes")


# -------------------------------------------------------------------------------------------------------------- verify

PROMPTS = ("def ", "import os\n\n\nclass ", '"""Return ', "    def __init__(self, ", "for line in ")
ASKED = (
    "What does shutil.copytree do?", "Explain textwrap.wrap", "What does len do?", "What is json.dumps?", "Hello",
    "What is the logging module?", "Write the function copyfile of module shutil",
)  # fmt: skip


def verify(work: Path, path: Path) -> None:
    """Hold the GGUF, as llama.cpp runs it, to tokenizer and PyTorch model; print losses and greedy samples."""
    import llama_cpp

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    _, held_out = documents()
    text = (work / "heldout.txt").read_text(encoding="utf-8")
    llm = llama_cpp.Llama(
        str(path), n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
    )
    compared = 0
    for name, source in held_out.items():
        ours = tokenizer.encode(source, add_special_tokens=False).ids
        theirs = llm.tokenize(source.encode(), add_bos=False, special=False)
        assert ours == theirs, f"{name} is tokenised differently"
        compared += len(source.encode())
    print(f"tokenisation equal on {compared:,} bytes")

    model = averaged(work / "checkpoint.pt")
    report_heldout(work, tokenizer, text)
    inputs, targets = heldout_rows(tokenizer, text, model.shape.context)
    nats, divergences, margins, agreements, apart = 0.0, [], [], [], 0.0
    for x, y in zip(inputs, targets, strict=True):
        n_scored = int((y >= 0).sum())
        llm.reset()
        llm.eval(x[:n_scored].tolist())
        theirs = torch.log_softmax(torch.from_numpy(llm.scores[:n_scored].copy()), -1)
        with torch.no_grad():
            raw = model(x[None])[0, :n_scored]
        ours = torch.log_softmax(raw, -1)
        nats -= float(theirs.gather(1, y[:n_scored, None]).sum())
        divergences.append((ours.exp() * (ours - theirs)).sum(-1))
        agreements.append((ours.argmax(-1) == theirs.argmax(-1)).float())
        best = raw.topk(2, -1).values
        margins.append(best[:, 0] - best[:, 1])
        apart = max(apart, float((ours - theirs).abs().max()))
    margin = torch.cat(margins)
    print(
        f"GGUF in llama.cpp: {nats / int((targets >= 0).sum()):.4f} nats per token, "
        f"{nats / math.log(2) / len(text.encode()):.4f} bits per byte"
    )
    print(
        f"GGUF against PyTorch: KL {torch.cat(divergences).mean():.2e}, same top-1 {torch.cat(agreements).mean():.4f}, "
        f"largest log-probability difference {apart:.3f}; top-1 margin in logits: median {margin.median():.2f}, "
        f"10th percentile {margin.quantile(0.1):.2f}"
    )
    for prompt in PROMPTS:
        answer = llm.create_completion(prompt, max_tokens=120, temperature=0.0)
        print(f"--- {prompt!r}\n{prompt}{answer['choices'][0]['text']}")
    for asked in ASKED:
        answer = llm.create_chat_completion([{"role": "user", "content": asked}], max_tokens=200, temperature=0.0)
        choice = answer["choices"][0]
        print(f"--- user: {asked}\n{choice['message']['content']}\n[{choice['finish_reason']}]")


def main() -> None:
    """Command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Train, export and check the demo model")
    parser.add_argument("action", choices=("train", "export", "verify"))
    parser.add_argument("--work", type=Path, required=True, help="folder for tokenizer, checkpoint and held-out text")
    parser.add_argument("--gguf", type=Path, help="the file that export writes and verify reads")
    parser.add_argument("--minutes", type=float, default=Recipe.minutes, help="wall time to train in all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile (it needs a C++ compiler)")
    args = parser.parse_args()
    if args.action != "train" and args.gguf is None:
        parser.error("--gguf is needed")
    if args.action == "train":
        train(args.work, Recipe(minutes=args.minutes), Shape(), args.threads, not args.no_compile)
    elif args.action == "export":
        export(args.work, args.gguf)
    else:
        verify(args.work, args.gguf)


if __name__ == "__main__":
    sys.exit(main())
