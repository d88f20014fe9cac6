"""The text of both demo models: the standard library of the Python that runs this, its tokenizer and training rows.

The text is every .py file of the library without its tests, tables and bundled packages, the language reference that
`pydoc_data` carries, and a question-and-answer set cut from docstrings and functions. No network is used.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import math
import platform
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
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
# Modules that readers know. They are trained on more often, and the questions and answers are about them. A tenth of
# the text, seen often, gives a model of this size something to say; all of it, seen two or three times, does not.
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


def split_like_qwen2(tokenizer: Tokenizer) -> None:
    """Let the tokenizer split and join text as llama.cpp does for "qwen2"."""
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def train_tokenizer(texts: list[str], n_vocab: int) -> Tokenizer:
    """Byte-level BPE whose control tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    split_like_qwen2(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer that `write_tokenizer` has written into a GGUF."""
    fields = gguf.GGUFReader(path).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in merges]))
    split_like_qwen2(tokenizer)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def prepared_text(work: Path) -> tuple[dict[str, str], str]:
    """Trained documents and held-out text; the latter is kept under `work`, with facts about both."""
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
    return trained, text


class Corpus:
    """Token windows of `context + 1`, epoch by epoch; chats are packed whole and padded with -1.

    Sources are tokenised in pieces that end at random places, often behind a space. A prompt ends anywhere too
    (`def `, say), in the middle of what would be one token in running text, and the model has to go on from there.
    """

    def __init__(self, tokenizer: Tokenizer, trained: dict[str, str], seed: int, context: int) -> None:
        self._row = context + 1
        self._eot = tokenizer.token_to_id(EOT)
        self.rng = random.Random(seed)
        self._tokenizer = tokenizer
        named = FINISH | {"shutil"}
        found = answers(trained)
        self._answers = {
            "chat": found,
            "finish_chat": [one for one in found if re.split(r"[. ]", one[1].removeprefix("the "))[0] in named],
        }
        self._texts = {
            "core": [text for name, text in trained.items() if module_name(name) in CORE],
            "whole": list(trained.values()),
            "finish": [text for name, text in trained.items() if module_name(name) in FINISH],
        }

    def epoch(self, kind: str) -> list[np.ndarray]:
        """Every row of one kind once: `chat`, `core`, `whole`, or `finish_chat` and `finish` for the closing part.

        No two epochs are equal: wordings of questions and ends of tokens are drawn anew.
        """
        return self._pack_chats(self._answers[kind]) if kind in self._answers else self._cut_sources(self._texts[kind])

    def _pieces(self, text: str) -> Iterator[str]:
        first = 0
        while first < len(text):
            last = first + self.rng.randrange(1, 2 * MEAN_PIECE_CHARS)
            if self.rng.random() < 0.6:
                last = text.find(" ", last) + 1 or len(text)
            yield text[first:last]
            first = last

    def _cut_sources(self, texts: list[str]) -> list[np.ndarray]:
        self.rng.shuffle(texts)
        ids: list[int] = []
        for text in texts:
            ids.append(self._eot)
            for encoded in self._tokenizer.encode_batch(list(self._pieces(text)), add_special_tokens=False):
                ids += encoded.ids
        stream = np.array(ids[self.rng.randrange(self._row) :], np.int16)
        return [stream[first:][: self._row] for first in range(0, len(stream) - self._row, self._row - 1)]

    def _tokens_of(self, conversation: list[tuple[str, str]]) -> np.ndarray:
        ids = [self._eot]
        for marker, text in conversation:
            ids.append(self._tokenizer.token_to_id(marker))
            ids += self._tokenizer.encode(text, add_special_tokens=False).ids
            ids.append(self._tokenizer.token_to_id(END))
        return np.array(ids, np.int16)

    def _pack_chats(self, found: list[tuple[str, str, str]]) -> list[np.ndarray]:
        conversations = chats(found, self.rng)
        self.rng.shuffle(conversations)
        rows, row, used = [], np.full(self._row, -1, np.int16), 0
        for conversation in conversations:
            ids = self._tokens_of(conversation)[: self._row]
            if used + len(ids) > self._row:
                rows.append(row)
                row, used = np.full(self._row, -1, np.int16), 0
            row[used : used + len(ids)] = ids
            used += len(ids)
        return rows


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
