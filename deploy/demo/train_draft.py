"""Train the demo's draft model: a llama of a tenth of the demo model's weights, which guesses what that one writes.

Like `train.py`, this file is kept next to the model so that anyone can see, and repeat, how it was made. It needs what
`train.py` needs.

    train-venv/bin/python deploy/demo/train_draft.py write  --work draft-work
    train-venv/bin/python deploy/demo/train_draft.py train  --work draft-work --minutes 28
    train-venv/bin/python deploy/demo/train_draft.py export --work draft-work --gguf relayline-demo-draft.gguf
    train-venv/bin/python deploy/demo/train_draft.py check  --gguf relayline-demo-draft.gguf

`write` lets the demo model answer questions and go on with pieces of its training text, mostly greedily, and notes for
every token of these texts the likeliest tokens behind it. `train` teaches these to the draft model. `check` counts how
often its likeliest token is the demo model's, on greedy answers to questions of `train_gguf.py` and on held-out text.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llama_cpp import llama_cpp as llama
from tokenizers import Tokenizer
from train import Recipe, Run, Shape, export
from train_gguf import ASKED, PROMPTS
from train_text import (
    ASSISTANT,
    CORE,
    END,
    EOT,
    FINISH,
    USER,
    answers,
    chats,
    documents,
    heldout_text,
    module_name,
    tokenizer_of,
)

DEMO = Path(__file__).with_name("relayline-demo.gguf")
SHAPE = Shape(n_layers=2, width=96, ffn_width=192, n_heads=3, n_kv_heads=1)
RECIPE = Recipe(minutes=28.0, seed=22, rows_per_batch=2, decay_share=0.6)
ROW = SHAPE.context
N_LIKELIEST = 12  # tokens behind each token, with their probabilities
N_AT_ONCE = 64  # texts that the demo model writes at once
SAMPLED_ONE_IN, TEMPERATURE = 5, 0.7  # of the texts are not greedy
N_ASKED, N_CONTINUED, N_READ = 700, 700, 200  # texts: answers, texts that the demo model goes on with, and reads
ANSWER_TOKENS = 220


class Text(NamedTuple):
    """Tokens, and the likeliest ones behind each: ids and probabilities [n, N_LIKELIEST]."""

    tokens: np.ndarray
    ids: np.ndarray
    chances: np.ndarray


class Writer:
    """The demo model in llama.cpp, N_AT_ONCE texts at once."""

    def __init__(self, path: Path = DEMO) -> None:
        params = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(bytes(path), params)
        self._vocab = llama.llama_model_get_vocab(self._model)
        self._n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = N_AT_ONCE * ROW, N_AT_ONCE
        params.n_batch, params.n_ubatch = N_AT_ONCE * ROW, ROW
        params.n_threads = params.n_threads_batch = 1
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(N_AT_ONCE * ROW, 0, 1)
        self._rng = np.random.default_rng(RECIPE.seed)

    def write(self, prompts: Sequence[Sequence[int]], n_tokens: int, temperatures: Sequence[float]) -> list[Text]:
        """Go on with prompts, at most N_AT_ONCE of them, each by n_tokens or until its end."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        texts = [list(prompt)[-(ROW - n_tokens) :] for prompt in prompts]
        heard: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in texts]
        fresh = {at: list(enumerate(tokens)) for at, tokens in enumerate(texts)}
        while fresh:
            logits = self._decode(fresh)
            ids, chances = _likeliest(logits)
            row, following = 0, {}
            for at, rows in fresh.items():
                mine = slice(row, row + len(rows))
                row = mine.stop
                heard[at].append((ids[mine], chances[mine]))
                token = self._picked(logits[row - 1], temperatures[at])
                is_over = bool(llama.llama_vocab_is_eog(self._vocab, token))
                if len(texts[at]) - min(len(prompts[at]), ROW - n_tokens) < n_tokens and not is_over:
                    following[at] = [(len(texts[at]), token)]
                    texts[at].append(token)
            fresh = following
        return [
            Text(np.array(text, np.int16), *(np.concatenate(part) for part in zip(*each, strict=True)))
            for text, each in zip(texts, heard, strict=True)
        ]

    def _decode(self, fresh: dict[int, list[tuple[int, int]]]) -> np.ndarray:
        """Decode rows (position, token) of texts; return their logits [n, n_vocab]."""
        batch, n_rows = self._batch, 0
        for at, rows in fresh.items():
            for position, token in rows:
                batch.token[n_rows], batch.pos[n_rows], batch.logits[n_rows] = token, position, True
                batch.n_seq_id[n_rows], batch.seq_id[n_rows][0] = 1, at
                n_rows += 1
        batch.n_tokens = n_rows
        assert llama.llama_decode(self._context, batch) == 0
        return np.ctypeslib.as_array(llama.llama_get_logits(self._context), (n_rows, self._n_vocab))

    def _picked(self, logits: np.ndarray, temperature: float) -> int:
        if not temperature:
            return int(logits.argmax())
        return int((logits / temperature + self._rng.gumbel(size=len(logits))).argmax())


def _likeliest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = np.argpartition(logits, -N_LIKELIEST, axis=1)[:, -N_LIKELIEST:]
    best = logits.max(1, keepdims=True)
    whole = np.exp(logits - best).sum(1, keepdims=True)
    chances = np.exp(np.take_along_axis(logits, ids, 1) - best) / whole
    return ids.astype(np.int16), chances.astype(np.float16)


# ---------------------------------------------------------------------------------------------------------------- text


def asked(tokenizer: Tokenizer, conversation: Sequence[tuple[str, str]]) -> list[int]:
    """The tokens of a conversation without its last answer, as the chat template has them."""
    ids: list[int] = []
    for marker, text in conversation:
        if marker != ASSISTANT:
            ids += [tokenizer.token_to_id(marker), *tokenizer.encode(text, add_special_tokens=False).ids]
            ids.append(tokenizer.token_to_id(END))
    return [*ids, tokenizer.token_to_id(ASSISTANT)]


def prompts_of(tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Prompts, each with the number of tokens to write behind it."""
    rng = random.Random(RECIPE.seed)
    trained, _ = documents()
    found = answers(trained)
    for conversation in rng.sample(chats(found, rng), N_ASKED):
        yield asked(tokenizer, conversation), ANSWER_TOKENS
    kinds = (
        [text for name, text in trained.items() if module_name(name) in FINISH],
        [text for name, text in trained.items() if module_name(name) in CORE],
        list(trained.values()),
    )
    for at in range(N_CONTINUED + N_READ):
        texts = rng.choices(kinds, (0.3, 0.3, 0.4))[0]
        text = rng.choices(texts, [len(each) for each in texts])[0]
        first = rng.randrange(len(text))
        is_read = at >= N_CONTINUED
        ids = tokenizer.encode(text[first : first + 3_000], add_special_tokens=False).ids
        n_prompt = ROW - 1 if is_read else rng.choice((3, 8, 24, 64, 128, 250))
        if len(ids) >= 2:
            yield ids[:n_prompt], 0 if is_read else ANSWER_TOKENS


def write(work: Path) -> None:
    """Let the demo model write, and keep what it wrote in rows of ROW tokens, texts behind one another."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(DEMO)
    tokenizer.save(str(work / "tokenizer.json"))
    writer, rng = Writer(), random.Random(RECIPE.seed)
    waiting: dict[int, list[list[int]]] = {}
    texts: list[Text] = []

    began_s = time.monotonic()

    def flush(n_tokens: int) -> None:
        prompts = waiting.pop(n_tokens, [])
        temperatures = [0.0 if rng.randrange(SAMPLED_ONE_IN) else TEMPERATURE for _ in prompts]
        if prompts:
            texts.extend(writer.write(prompts, n_tokens, temperatures))
            print(f"{time.monotonic() - began_s:.0f} s: {len(texts):,} texts", flush=True)

    for prompt, n_tokens in prompts_of(tokenizer):
        waiting.setdefault(n_tokens, []).append(prompt)
        if len(waiting[n_tokens]) == N_AT_ONCE:
            flush(n_tokens)
    for n_tokens in list(waiting):
        flush(n_tokens)
    rng.shuffle(texts)
    n_tokens = sum(len(text.tokens) for text in texts)
    print(f"{len(texts):,} texts, {n_tokens:,} tokens in {time.monotonic() - began_s:.0f} s", flush=True)
    eot = Text(
        np.array([tokenizer.token_to_id(EOT)], np.int16),
        np.zeros((1, N_LIKELIEST), np.int16),
        np.zeros((1, N_LIKELIEST), np.float16),  # what follows it is not taught
    )
    parts = [part for text in texts for part in (eot, text)]
    joined = [np.concatenate(kind) for kind in zip(*parts, strict=True)]
    n_rows = len(joined[0]) // ROW
    tokens, ids, chances = (each[: n_rows * ROW].reshape(n_rows, ROW, *each.shape[1:]) for each in joined)
    np.savez(work / "texts.npz", tokens=tokens, ids=ids, chances=chances)


# ------------------------------------------------------------------------------------------------------------ training


def loss_of(run: Run, tokens: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy with the demo model's likeliest tokens, in nats per token that is taught."""
    logits = run.model(tokens)
    given = torch.log_softmax(logits, -1).gather(-1, ids)
    return -(given * chances).sum() / (chances.sum(-1) > 0).sum()


def train(work: Path, recipe: Recipe, n_threads: int) -> None:
    """Train until the wall time is used up; started again on the same `work`, with the time that is left."""
    torch.set_num_threads(n_threads)
    torch.manual_seed(recipe.seed)
    texts = np.load(work / "texts.npz")
    tokens, ids, chances = (texts[name] for name in ("tokens", "ids", "chances"))
    rng = np.random.default_rng(recipe.seed)
    run = Run(work, recipe, SHAPE)
    if run.load():
        rng = np.random.default_rng(recipe.seed + run.step)  # other rows than those at the start
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, {tokens.size:,} tokens", flush=True)
    order: list[int] = []
    smooth, shown_at, last = None, run.elapsed_s, time.monotonic()
    while run.elapsed_s < 60 * recipe.minutes:
        if len(order) < recipe.rows_per_batch:
            order = rng.permutation(len(tokens)).tolist()
        rows = [order.pop() for _ in range(recipe.rows_per_batch)]
        loss = loss_of(
            run,
            torch.from_numpy(tokens[rows].astype(np.int64)),
            torch.from_numpy(ids[rows].astype(np.int64)),
            torch.from_numpy(chances[rows].astype(np.float32)),
        )
        loss.backward()
        factor = run.update()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        now = time.monotonic()
        run.elapsed_s, last = run.elapsed_s + now - last, now
        if run.elapsed_s - shown_at > 30:
            print(f"{run.elapsed_s:6.0f} s step {run.step} loss {smooth:.4f} rate {factor:.3f}", flush=True)
            shown_at = run.elapsed_s
            if run.step % 4 == 0:
                run.save()
                last = time.monotonic()
    run.save()


# --------------------------------------------------------------------------------------------------------------- check


def check(path: Path) -> None:
    """Print how often the draft model's likeliest token is the demo model's."""
    tokenizer = tokenizer_of(DEMO)
    writer, draft = Writer(), Writer(path)
    questions = [asked(tokenizer, [(USER, text)]) for text in ASKED]
    begun = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
    _, held_out = documents()
    read = tokenizer.encode(heldout_text(held_out), add_special_tokens=False).ids
    pieces = [read[first : first + 64] for first in range(0, len(read) - 64, len(read) // N_AT_ONCE)][:N_AT_ONCE]
    for what, prompts in (("questions", questions), ("begun texts", begun), ("held-out text, continued", pieces)):
        written = writer.write(prompts, ANSWER_TOKENS, [0.0] * len(prompts))
        guessed = draft.write([text.tokens.tolist() for text in written], 0, [0.0] * len(prompts))
        n_right = n_all = 0
        for prompt, text, guess in zip(prompts, written, guessed, strict=True):
            first = len(prompt) - 1
            best = np.take_along_axis(guess.ids, guess.chances.argmax(1)[:, None], 1)[first:-1, 0]
            n_right, n_all = n_right + int((best == text.tokens[first + 1 :]).sum()), n_all + len(best)
        print(f"{what}: {n_right} of {n_all} greedy tokens guessed right ({n_right / n_all:.1%})")


def main() -> None:
    """Command line; see the top of this file."""
    parser = argparse.ArgumentParser(description="Train, export and check the demo's draft model")
    parser.add_argument("action", choices=("write", "train", "export", "check"))
    parser.add_argument("--work", type=Path, help="folder for texts, tokenizer and checkpoint")
    parser.add_argument("--gguf", type=Path, help="the file that export writes and check reads")
    parser.add_argument("--minutes", type=float, default=RECIPE.minutes, help="wall time to train")
    parser.add_argument("--threads", type=int, default=1)
    args: Any = parser.parse_args()
    if args.action == "write":
        write(args.work)
    elif args.action == "train":
        train(args.work, Recipe(**{**vars(RECIPE), "minutes": args.minutes}), args.threads)
    elif args.action == "export":
        export(args.work, args.gguf)
    else:
        check(args.gguf)


if __name__ == "__main__":
    sys.exit(main())
