"""Train the demo model: a small llama on the standard library of the Python that runs this script.

This file is kept next to the model so that anyone can see, and repeat, how it was made. Relayline never imports it,
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
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from train_gguf import heldout_loss, verify, write_model
from train_optimizer import Muon
from train_text import Corpus, answers, prepared_text, train_tokenizer


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


# ------------------------------------------------------------------------------------------------------------ training


def rate_factor(recipe: Recipe, step: int, elapsed_s: float) -> float:
    """Warm-up by steps, then constant, then linear to nearly zero over the last `decay_share` of the time."""
    left = max(0.0, 1.0 - elapsed_s / (60 * recipe.minutes))
    return min(1.0, (step + 1) / recipe.warmup_steps) * min(1.0, max(0.005, left / recipe.decay_share))


def prepare(work: Path, shape: Shape) -> tuple[Tokenizer, dict[str, str], str]:
    """Tokenizer, trained documents and held-out text; tokenizer and text are kept under `work`."""
    trained, text = prepared_text(work)
    path = work / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path)), trained, text
    conversations = [text for _, _, text in answers(trained)]
    tokenizer = train_tokenizer([*trained.values(), *conversations], shape.n_vocab)
    tokenizer.save(str(path))
    return tokenizer, trained, text


class Batches:
    """Rows of a corpus, each kind epoch by epoch, mixed in the shares of the recipe."""

    def __init__(self, corpus: Corpus, recipe: Recipe) -> None:
        self._corpus = corpus
        self._mix(("chat", recipe.chat_share), ("core", recipe.core_share))
        self._finish = (("finish_chat", recipe.finish_chat_share), ("finish", recipe.finish_share))

    def finish(self) -> None:
        """From now on dwell on the modules of FINISH and on chats about them."""
        self._mix(*self._finish)

    def _mix(self, *kinds: tuple[str, float]) -> None:
        shares = dict(kinds)
        shares["whole"] = 1 - sum(shares.values())
        self._rows = [self._forever(kind) for kind in shares]
        self._shares = list(shares.values())

    def _forever(self, kind: str) -> Iterator[np.ndarray]:
        while True:
            rows = self._corpus.epoch(kind)
            self._corpus.rng.shuffle(rows)
            yield from rows

    def next(self, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 [n_rows, context]; a target of -1 counts for nothing."""
        picked = [next(rows) for rows in self._corpus.rng.choices(self._rows, self._shares, k=n_rows)]
        rows = torch.from_numpy(np.stack(picked).astype(np.int64))
        return rows[:, :-1].clamp(min=0).contiguous(), rows[:, 1:].contiguous()


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
        """Continue from the checkpoint, if there is one."""
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
    corpus = Corpus(tokenizer, trained, recipe.seed, shape.context)
    batches = Batches(corpus, recipe)
    run = Run(work, recipe, shape)
    if run.load():
        corpus.rng.seed(recipe.seed + run.step)  # other rows than those at the start
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    loss_of = torch.compile(run.model.loss) if compiled else run.model.loss
    last = time.monotonic()
    saved_at = shown_at = run.elapsed_s
    smooth = None
    is_finishing = False
    while run.elapsed_s < 60 * recipe.minutes:
        if not is_finishing and run.elapsed_s >= 60 * (recipe.minutes - recipe.finish_minutes):
            is_finishing = True
            batches.finish()
        loss = loss_of(*batches.next(recipe.rows_per_batch))
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
    model = averaged(work / "checkpoint.pt")
    per_token, per_byte = heldout_loss(model, tokenizer, text, model.shape.context)
    print(f"PyTorch f32, held out: {per_token:.4f} nats per token, {per_byte:.4f} bits per byte", flush=True)


def averaged(checkpoint: Path) -> Llama:
    """The averaged weights of a checkpoint as a model."""
    saved = torch.load(checkpoint, weights_only=True)
    model = Llama(Shape(**saved["shape"])).eval()
    model.load_state_dict(saved["average"])
    return model


# -------------------------------------------------------------------------------------------------------------- export


def export(work: Path, path: Path) -> None:
    """Write the averaged weights as GGUF: matrices Q8_0, norms F32, no separate head (tied embedding)."""
    model = averaged(work / "checkpoint.pt")
    shape = model.shape
    values = {
        "context_length": shape.context,
        "embedding_length": shape.width,
        "block_count": shape.n_layers,
        "feed_forward_length": shape.ffn_width,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.head_width,
        "vocab_size": shape.n_vocab,
    }

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "token_embd.weight", model.embedding
        yield "output_norm.weight", model.out_norm
        names = {"attn_out": "attn_output"}
        for kind in (
            "attn_norm", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
        ):  # fmt: skip
            for layer, tensor in enumerate(getattr(model, kind).unbind(0)):
                yield f"blk.{layer}.{names.get(kind, kind)}.weight", tensor

    write_model(path, "llama", values, Tokenizer.from_file(str(work / "tokenizer.json")), tensors())


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
        model = averaged(args.work / "checkpoint.pt")
        text = (args.work / "heldout.txt").read_text(encoding="utf-8")
        verify(Tokenizer.from_file(str(args.work / "tokenizer.json")), text, args.gguf, model, model.shape.context)


if __name__ == "__main__":
    sys.exit(main())
