"""Train the hybrid demo model: a small qwen35 with a prediction layer, on the text of the first demo model.

This file is kept next to the model so that anyone can see, and repeat, how it was made. Relayline never imports it,
PyTorch is not a dependency of relayline, and no test or CI job runs it.

    python3.11 -m venv train-venv && train-venv/bin/pip install torch==2.11.0 numpy gguf tokenizers llama-cpp-python
    cd deploy/demo
    train-venv/bin/python train_hybrid.py prepare --work train-work
    train-venv/bin/python train_hybrid.py train   --work train-work
    train-venv/bin/python train_hybrid.py export  --work train-work --gguf relayline-demo-hybrid.gguf
    train-venv/bin/python train_hybrid.py verify  --work train-work --gguf relayline-demo-hybrid.gguf

`prepare` reads the library, and the tokenizer out of the first demo model, and writes `rows.npz`: several epochs of
rows. `train` needs that file, numpy and PyTorch alone, so that it can run on another machine, in three minutes on a
GPU. It writes `hybrid-main.npz` before its closing part and `hybrid.npz` at its end. `verify` (the only part that needs
llama-cpp-python) holds the exported file to the PyTorch model.

The recipe, from front to back:

* text, questions and tokenizer: those of the first model; see train_text.py.
* model: 16 layers; every fourth attends, with a gate on what it has read; the others are gated delta nets. A further
  layer predicts the token after the next from the last layer's row and the next token (multi-token prediction).
* loss: cross entropy of the next token, and a quarter of the prediction layer's.
* optimiser: Muon for the matrices, AdamW for the rest; constant rate, then linear decay. The exported weights are an
  exponential average of the trained ones.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from train_hybrid_model import Hybrid, HybridShape
from train_optimizer import Muon

STARTED_S = time.monotonic()
# Epochs of each kind of rows: short kinds are drawn from more often than long ones.
EPOCHS = {"chat": 12, "core": 10, "whole": 4, "finish_chat": 30, "finish": 30}


@dataclass(frozen=True)
class HybridRecipe:
    """How long and how fast to train: until `seconds` or `max_steps` are used up, whichever comes first."""

    seconds: float = 185.0
    max_steps: int = 1600
    rows_per_batch: int = 64
    seed: int = 21
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 50
    decay_share: float = 0.6
    average_decay: float = 0.98
    dropout: float = 0.1
    draft_weight: float = 0.25  # of the prediction layer's loss
    finish_share: float = 0.06  # of the whole run
    shares: tuple[tuple[str, float], ...] = (("chat", 0.15), ("core", 0.3), ("whole", 0.55))
    finish_shares: tuple[tuple[str, float], ...] = (("finish_chat", 0.15), ("finish", 0.5), ("whole", 0.35))


def prepare(work: Path, recipe: HybridRecipe, shape: HybridShape) -> None:
    """Write tokenizer, held-out text and rows under `work`."""
    from train_text import Corpus, heldout_rows, prepared_text, tokenizer_of

    trained, text = prepared_text(work)
    tokenizer = tokenizer_of(Path(__file__).with_name("relayline-demo.gguf"))
    tokenizer.save(str(work / "tokenizer.json"))
    corpus = Corpus(tokenizer, trained, recipe.seed, shape.context)
    rows = {
        kind: np.concatenate([np.stack(corpus.epoch(kind)) for _ in range(n_epochs)])
        for kind, n_epochs in EPOCHS.items()
    }
    inputs, targets = (t.numpy().astype(np.int16) for t in heldout_rows(tokenizer, text, shape.context))
    np.savez_compressed(work / "rows.npz", heldout_inputs=inputs, heldout_targets=targets, **rows)
    print({kind: found.shape for kind, found in rows.items()})


class Rows:
    """Prepared rows on the device; every group is drawn without replacement, epoch by epoch."""

    def __init__(self, path: Path, device: str, seed: int) -> None:
        with np.load(path) as saved:
            self._groups = {name: saved[name] for name in saved.files}
        self._rng = np.random.default_rng(seed)
        self._device = device
        self.heldout = tuple(
            torch.from_numpy(self._groups.pop(name).astype(np.int64)).to(device)
            for name in ("heldout_inputs", "heldout_targets")
        )
        if device == "cpu":
            self.heldout = tuple(t[:4] for t in self.heldout)
        self._on_device = {name: torch.from_numpy(rows).to(device) for name, rows in self._groups.items()}
        self._orders: dict[str, list[int]] = {name: [] for name in self._groups}

    def batch(self, shares: tuple[tuple[str, float], ...], n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 [n_rows, context]."""
        counts = self._rng.multinomial(n_rows, [share for _, share in shares])
        parts = []
        for (name, _), count in zip(shares, counts, strict=True):
            order = self._orders[name]
            if len(order) < count:
                order.extend(self._rng.permutation(len(self._groups[name])).tolist())
            picked = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64).to(self._device)
            parts.append(self._on_device[name][picked])
        rows = torch.cat(parts).long()
        return rows[:, :-1].clamp(min=0).contiguous(), rows[:, 1:].contiguous()


class Run:
    """Weights, their average and optimiser states."""

    def __init__(self, recipe: HybridRecipe, shape: HybridShape, device: str) -> None:
        self.recipe, self.device = recipe, device
        self.model = Hybrid(shape, recipe.dropout).to(device)
        self.averaged = Hybrid(shape).to(device).eval()
        self.averaged.load_state_dict(self.model.state_dict())
        parameters = list(self.model.parameters())
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 3 and name != "ssm_conv1d"]
        chosen = {id(p) for p in matrices}
        self._others = [p for p in parameters if id(p) not in chosen]
        self._optimizers = [
            Muon(matrices, lr=recipe.muon_rate, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(
                self._others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda"
            ),
        ]
        self.step = 0

    def losses(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Both losses; gradients lie in the parameters afterwards."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            main, draft = self.model.losses(x, y)
        (main + self.recipe.draft_weight * draft).backward()
        return torch.stack((main.detach(), draft.detach()))

    def stepper(self, rows: Rows, shares: tuple[tuple[str, float], ...]) -> Callable[[], torch.Tensor]:
        """A call that fills the gradients from one batch: a CUDA graph where that can be had, else step by step."""
        n_rows = self.recipe.rows_per_batch

        def plain() -> torch.Tensor:
            self.model.zero_grad(set_to_none=True)
            return self.losses(*rows.batch(shares, n_rows))

        if self.device != "cuda" or os.environ.get("NO_GRAPH"):
            return plain
        x, y = rows.batch(shares, n_rows)
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.model.zero_grad(set_to_none=True)
                    self.losses(x, y)
            torch.cuda.current_stream().wait_stream(side)
            self.model.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = self.losses(x, y)
        except Exception as error:  # a graph is only speed
            print(f"no CUDA graph: {error!r}", flush=True)
            torch.cuda.synchronize()
            return plain

        def replay() -> torch.Tensor:
            new_x, new_y = rows.batch(shares, n_rows)
            x.copy_(new_x)
            y.copy_(new_y)
            graph.replay()
            return found.clone()

        return replay

    def update(self, factor: float) -> None:
        """One step from the gradients."""
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        for optimizer, rate in zip(self._optimizers, (self.recipe.muon_rate, self.recipe.adam_rate), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        keep = min(self.recipe.average_decay, (self.step + 1) / (self.step + 10))
        average = [p.detach() for p in self.averaged.parameters()]
        torch._foreach_lerp_(average, [p.detach() for p in self.model.parameters()], 1 - keep)
        self.step += 1

    def save(self, path: Path) -> None:
        """Write the averaged weights: matrices f16, vectors f32."""
        arrays = {}
        for name, p in self.averaged.named_parameters():
            values = p.detach().float().cpu().numpy()
            is_big = (values.ndim == 3 and name != "ssm_conv1d") or name == "token_embd"
            arrays[name] = values.astype(np.float16) if is_big else values
        scratch = path.with_suffix(".tmp.npz")
        np.savez_compressed(scratch, shape=np.array(json.dumps(asdict(self.averaged.shape))), **arrays)
        scratch.replace(path)
        print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


@torch.no_grad()
def heldout_loss(model: Hybrid, heldout: tuple[torch.Tensor, torch.Tensor], device: str) -> tuple[float, float]:
    """Nats per token of the head and of the prediction layer."""
    sums, counts = [0.0, 0.0], [0, 0]
    for x, y in zip(heldout[0].split(21), heldout[1].split(21), strict=True):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            rows = model.hidden(x)
            drafted = model.predicted(rows, y.clamp(min=0))
        after = F.pad(y[:, 1:], (0, 1), value=-1)
        for at, (h, wanted) in enumerate(((rows, y), (drafted, after))):
            logits = F.linear(h.float(), model.token_embd)
            sums[at] += float(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum"))
            counts[at] += int((wanted >= 0).sum())
    return sums[0] / counts[0], sums[1] / counts[1]


def train(work: Path, recipe: HybridRecipe, shape: HybridShape, show_every_s: float) -> None:
    """Train until time or steps are used up."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        print(torch.cuda.get_device_name(), flush=True)
    torch.manual_seed(recipe.seed)
    rows = Rows(work / "rows.npz", device, recipe.seed)
    run = Run(recipe, shape, device)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, device {device}", flush=True)
    fill = run.stepper(rows, recipe.shares)
    ready_s = time.monotonic() - STARTED_S
    print(f"ready after {ready_s:.1f} s", flush=True)
    smooth, shown_s, shown_step, is_finishing = None, ready_s, 0, False
    factor = 1.0
    while True:
        elapsed_s = time.monotonic() - STARTED_S
        done = max((elapsed_s - ready_s) / (recipe.seconds - ready_s), run.step / recipe.max_steps)
        if elapsed_s - shown_s > show_every_s and smooth is not None:
            torch.cuda.synchronize() if device == "cuda" else None
            main, draft = heldout_loss(run.averaged, rows.heldout, device)
            speed = (run.step - shown_step) * recipe.rows_per_batch * shape.context / (elapsed_s - shown_s)
            print(
                f"{elapsed_s:6.1f} s step {run.step} loss {smooth[0]:.4f} draft {smooth[1]:.4f} rate {factor:.3f} "
                f"{speed:,.0f} tok/s heldout {main:.4f} draft {draft:.4f}",
                flush=True,
            )
            shown_s, shown_step = elapsed_s, run.step
        if done >= 1.0:
            break
        if not is_finishing and done >= 1 - recipe.finish_share:
            is_finishing = True
            main, draft = heldout_loss(run.averaged, rows.heldout, device)
            print(f"before closing: heldout {main:.4f} draft {draft:.4f}", flush=True)
            run.save(work / "hybrid-main.npz")
            run.model.dropout = 0.0
            fill = run.stepper(rows, recipe.finish_shares)
        losses = fill()
        warm = min(1.0, (run.step + 1) / recipe.warmup_steps)
        factor = warm * min(1.0, max(0.005, (1 - done) / recipe.decay_share))
        run.update(factor)
        # The device is asked only now and then, so that it always has work.
        if run.step % 10 == 1:
            values = losses.tolist()
            if not np.isfinite(values).all():
                print(f"step {run.step}: losses {values}", flush=True)
            smooth = values if smooth is None else [0.8 * a + 0.2 * b for a, b in zip(smooth, values, strict=True)]
    main, draft = heldout_loss(run.averaged, rows.heldout, device)
    print(f"end: step {run.step} heldout {main:.4f} draft {draft:.4f}", flush=True)
    run.save(work / "hybrid.npz")
    print(f"done after {time.monotonic() - STARTED_S:.1f} s", flush=True)


def trained_model(path: Path) -> Hybrid:
    """The model that `train` has saved."""
    with np.load(path) as saved:
        arrays = {name: torch.from_numpy(saved[name].astype(np.float32)) for name in saved.files if name != "shape"}
        model = Hybrid(HybridShape(**json.loads(str(saved["shape"])))).eval()
    model.load_state_dict(arrays)
    return model


def export_or_verify(action: str, work: Path, path: Path, weights: Path) -> None:
    """Write the weights as GGUF, or hold that to them."""
    from tokenizers import Tokenizer
    from train_gguf import verify, write_model

    model = trained_model(weights)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    if action == "export":
        write_model(path, "qwen35", model.gguf_values(), tokenizer, model.gguf_tensors())
        return
    inputs, targets = (
        torch.from_numpy(np.load(work / "rows.npz")[f"heldout_{n}"].astype(np.int64)) for n in ("inputs", "targets")
    )
    main, draft = heldout_loss(model, (inputs, targets), "cpu")
    print(f"PyTorch f32, held out: {main:.4f} nats per token, {draft:.4f} by the prediction layer")
    verify(tokenizer, (work / "heldout.txt").read_text(encoding="utf-8"), path, model, model.shape.context)


def main() -> None:
    """Command line; see the top of this file."""
    default = HybridRecipe()
    parser = argparse.ArgumentParser(description="Train, export and check the hybrid demo model")
    parser.add_argument("action", choices=("prepare", "train", "export", "verify"))
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for rows, tokenizer, weights and held-out text"
    )
    parser.add_argument("--gguf", type=Path, help="the file that export writes and verify reads")
    parser.add_argument("--weights", type=Path, help="of export and verify (default: hybrid.npz under --work)")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="wall time of train")
    parser.add_argument("--max-steps", type=int, default=default.max_steps)
    parser.add_argument("--rows-per-batch", type=int, default=default.rows_per_batch)
    parser.add_argument("--show-every", type=float, default=15.0, help="seconds between two lines of train")
    args = parser.parse_args()
    recipe = HybridRecipe(seconds=args.seconds, max_steps=args.max_steps, rows_per_batch=args.rows_per_batch)
    if args.action == "prepare":
        prepare(args.work, recipe, HybridShape())
    elif args.action == "train":
        train(args.work, recipe, HybridShape(), args.show_every)
    elif args.gguf is None:
        parser.error("--gguf is needed")
    else:
        export_or_verify(args.action, args.work, args.gguf, args.weights or args.work / "hybrid.npz")


if __name__ == "__main__":
    main()
