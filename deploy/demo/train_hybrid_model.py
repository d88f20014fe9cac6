"""The hybrid demo model in PyTorch: gated delta nets and gated attention 3:1, and a prediction (MTP) layer.

It computes what llama.cpp's graph of `qwen35` computes, in the form that trains fast: the delta rule runs over chunks
of the text, and within a chunk everything is a matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class HybridShape:
    """Shape of the model; every row length is a multiple of 32, the block size of Q8_0."""

    n_vocab: int = 2048
    n_layers: int = 16  # without the prediction layer
    interval: int = 4  # every so many layers one attends
    width: int = 192
    ffn_width: int = 512
    n_heads: int = 6
    n_kv_heads: int = 2
    head_width: int = 32
    rope_width: int = 16
    n_key_heads: int = 3  # of a delta net
    n_value_heads: int = 6
    state_width: int = 32
    conv_width: int = 4
    context: int = 512
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6

    @property
    def key_width(self) -> int:
        """All key heads of a delta net."""
        return self.n_key_heads * self.state_width

    @property
    def value_width(self) -> int:
        """All value heads of a delta net."""
        return self.n_value_heads * self.state_width

    def attends(self, layer: int) -> bool:
        """Whether the layer attends; the prediction layer, which comes last, does."""
        return layer >= self.n_layers or (layer + 1) % self.interval == 0


class _InverseOfUnitLower(torch.autograd.Function):
    """(1 + a)^-1 for strictly lower triangular a [..., n, n], n = 8 * 2^k.

    Blocks of 8 by their power series, which ends; then blocks of twice the size from two of the half.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        n = a.shape[-1]
        lead = a.shape[:-2]
        a = a.reshape(-1, n, n)
        size = 8
        blocks = a.view(-1, n // size, size, n // size, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
        eye = torch.eye(size, device=a.device, dtype=a.dtype)
        square = blocks @ blocks
        inverse = (eye - blocks) @ (eye + square) @ (eye + square @ square)
        while size < n:
            upper, lower = inverse[:, 0::2], inverse[:, 1::2]
            double = 2 * size
            corner = a.view(-1, n // double, double, n // double, double).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
            corner = -(lower @ corner[..., size:, :size] @ upper)
            top = torch.cat((upper, torch.zeros_like(upper)), -1)
            inverse = torch.cat((top, torch.cat((corner, lower), -1)), -2)
            size = double
        inverse = inverse.reshape(*lead, n, n)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned)


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, chunk: int = 64
) -> torch.Tensor:
    """The gated delta rule over q, k, v [batch, heads, time, width], log_decay and beta [batch, heads, time], all f32.

    State S [width of k, width of v], per token: S = exp(log_decay) S; S += k (beta (v - k S))^T; out = q S.
    """
    n_batch, n_heads, n_time, width = k.shape
    n_chunks = n_time // chunk
    q, k, v = (t.reshape(n_batch, n_heads, n_chunks, chunk, -1) for t in (q, k, v))
    beta = beta.reshape(n_batch, n_heads, n_chunks, chunk, 1)
    total = log_decay.reshape(n_batch, n_heads, n_chunks, chunk).cumsum(-1)
    # Differences above the diagonal are positive and could overflow: masked before the exponential.
    ones = torch.ones(chunk, chunk, device=q.device, dtype=torch.bool)
    apart = (total[..., :, None] - total[..., None, :]).masked_fill(ones.triu(1), float("-inf"))
    decay = apart.exp()
    k_beta = k * beta
    keys = k.transpose(-1, -2)
    mix = (k_beta @ keys * decay).masked_fill(ones.triu(0), 0.0)
    inverse = _InverseOfUnitLower.apply(mix)
    grown = total.exp()[..., None]
    wanted = inverse @ (v * beta)
    known = inverse @ (k_beta * grown)
    inside = q @ keys * decay
    asked = q * grown
    left = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros(n_batch, n_heads, width, v.shape[-1], device=q.device, dtype=q.dtype)
    out = []
    for wanted_c, known_c, inside_c, asked_c, left_c, last_c in zip(
        *(t.unbind(2) for t in (wanted, known, inside, asked, left, last)), strict=True
    ):
        new = wanted_c - known_c @ state
        out.append(asked_c @ state + inside_c @ new)
        state = state * last_c + left_c @ new
    return torch.stack(out, 2).reshape(n_batch, n_heads, n_time, -1)


class Hybrid(torch.nn.Module):
    """One parameter per kind of matrix, stacked over the layers that have it: [n, out, in].

    Stacking lets Muon orthogonalise all layers in one batched product.
    """

    def __init__(self, shape: HybridShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        n_all = shape.n_layers + 1
        self.attending = [layer for layer in range(n_all) if shape.attends(layer)]
        self.recurrent = [layer for layer in range(n_all) if not shape.attends(layer)]
        n_attn, n_rec, width = len(self.attending), len(self.recurrent), shape.width
        q_width, kv_width = shape.n_heads * shape.head_width, shape.n_kv_heads * shape.head_width

        def matrix(n: int, n_out: int, n_in: int, gain: float = 1.0) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(n, n_out, n_in) * gain / math.sqrt(n_in))

        def ones(*size: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.ones(*size))

        self.token_embd = torch.nn.Parameter(torch.randn(shape.n_vocab, width) * 0.02)
        self.output_norm = ones(width)
        self.attn_norm, self.post_attention_norm = ones(n_all, width), ones(n_all, width)
        self.ffn_gate = matrix(n_all, shape.ffn_width, width)
        self.ffn_up = matrix(n_all, shape.ffn_width, width)
        self.ffn_down = matrix(n_all, width, shape.ffn_width, gain=0.1)
        self.attn_q = matrix(n_attn, 2 * q_width, width)  # per head: queries, then gates
        self.attn_k = matrix(n_attn, kv_width, width)
        self.attn_v = matrix(n_attn, kv_width, width)
        self.attn_output = matrix(n_attn, width, q_width, gain=0.1)
        self.attn_q_norm, self.attn_k_norm = ones(n_attn, shape.head_width), ones(n_attn, shape.head_width)
        self.attn_qkv = matrix(n_rec, 2 * shape.key_width + shape.value_width, width)
        self.attn_gate = matrix(n_rec, shape.value_width, width)
        self.ssm_alpha = matrix(n_rec, shape.n_value_heads, width, gain=0.1)
        self.ssm_beta = matrix(n_rec, shape.n_value_heads, width)
        self.ssm_out = matrix(n_rec, width, shape.value_width, gain=0.1)
        self.ssm_norm = ones(n_rec, shape.state_width)
        conv = torch.randn(n_rec, 2 * shape.key_width + shape.value_width, shape.conv_width) * 0.2
        conv[..., -1] += 0.7
        self.ssm_conv1d = torch.nn.Parameter(conv)
        # Heads begin with memories of about 4 to 250 tokens.
        memory = torch.logspace(math.log10(4), math.log10(250), shape.n_value_heads).repeat(n_rec, 1)
        self.ssm_a_log = torch.nn.Parameter(torch.zeros(n_rec, shape.n_value_heads))
        self.ssm_dt = torch.nn.Parameter((1 / memory).expm1().log())
        self.eh_proj = matrix(1, width, 2 * width)
        self.enorm, self.hnorm, self.shared_head_norm = ones(width), ones(width), ones(width)
        half = torch.arange(0, shape.rope_width, 2) / shape.rope_width
        angle = torch.arange(shape.context)[:, None] * shape.rope_base ** -half[None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.shape.norm_eps)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the first rope_width values of x [batch, time, heads, head_width] in pairs (i, i + rope_width / 2)."""
        half = self.shape.rope_width // 2
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = self.cos[: x.shape[1], None], self.sin[: x.shape[1], None]
        return torch.cat((first * cos - second * sin, first * sin + second * cos, rest), -1)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout) if self.training and self.dropout else x

    def _attend(self, h: torch.Tensor, at: int) -> torch.Tensor:
        shape, (n_batch, n_time, _) = self.shape, h.shape
        q, gate = F.linear(h, self.attn_q[at]).view(n_batch, n_time, shape.n_heads, -1).chunk(2, -1)
        k = F.linear(h, self.attn_k[at]).view(n_batch, n_time, shape.n_kv_heads, shape.head_width)
        v = F.linear(h, self.attn_v[at]).view(n_batch, n_time, shape.n_kv_heads, shape.head_width)
        q = self._rotate(self._norm(q, self.attn_q_norm[at])).to(v.dtype)
        k = self._rotate(self._norm(k, self.attn_k_norm[at])).to(v.dtype)
        k, v = (t.repeat_interleave(shape.n_heads // shape.n_kv_heads, dim=2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        mixed = mixed.transpose(1, 2) * torch.sigmoid(gate)
        return F.linear(mixed.reshape(n_batch, n_time, -1), self.attn_output[at])

    def _remember(self, h: torch.Tensor, at: int) -> torch.Tensor:
        shape, (n_batch, n_time, _) = self.shape, h.shape
        mixed = F.linear(h, self.attn_qkv[at]).float()
        padded = F.pad(mixed, (0, 0, shape.conv_width - 1, 0))
        kernel = self.ssm_conv1d[at]
        mixed = F.silu(sum(padded[:, tap : tap + n_time] * kernel[:, tap] for tap in range(shape.conv_width)))
        q, k, v = mixed.split((shape.key_width, shape.key_width, shape.value_width), -1)
        q, k, v = (t.view(n_batch, n_time, -1, shape.state_width).transpose(1, 2) for t in (q, k, v))
        q, k = (t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + shape.norm_eps) for t in (q, k))
        # Value head i reads key head i modulo their number, as ggml repeats them.
        times = shape.n_value_heads // shape.n_key_heads
        q, k = (t.repeat(1, times, 1, 1) for t in (q / math.sqrt(shape.state_width), k))
        speed = F.softplus(F.linear(h, self.ssm_alpha[at]).float() + self.ssm_dt[at])
        log_decay = -(self.ssm_a_log[at].exp() * speed).transpose(1, 2)
        beta = torch.sigmoid(F.linear(h, self.ssm_beta[at]).float()).transpose(1, 2)
        with torch.autocast(h.device.type, enabled=False):
            out = delta_rule(q, k, v, log_decay, beta)
        gate = F.linear(h, self.attn_gate[at]).view(n_batch, n_time, -1, shape.state_width)
        out = self._norm(out.transpose(1, 2), self.ssm_norm[at]) * F.silu(gate)
        return F.linear(out.reshape(n_batch, n_time, -1), self.ssm_out[at])

    def _block(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        h = self._norm(x, self.attn_norm[layer])
        attends = layer in self.attending
        mixed = (
            self._attend(h, self.attending.index(layer)) if attends else self._remember(h, self.recurrent.index(layer))
        )
        x = x + self._drop(mixed)
        h = self._norm(x, self.post_attention_norm[layer])
        h = F.silu(F.linear(h, self.ffn_gate[layer])) * F.linear(h, self.ffn_up[layer])
        return x + self._drop(F.linear(h, self.ffn_down[layer]))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Normed rows of the last layer [batch, time, width], which the head and the prediction layer read."""
        x = F.embedding(tokens, self.token_embd)
        for layer in range(self.shape.n_layers):
            x = self._block(x, layer)
        return self._norm(x, self.output_norm)

    def predicted(self, rows: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The prediction layer's rows from the rows of `hidden` and the token that follows each."""
        e = self._norm(F.embedding(following, self.token_embd), self.enorm)
        x = F.linear(torch.cat((e, self._norm(rows, self.hnorm)), -1), self.eh_proj[0])
        return self._norm(self._block(x, self.shape.n_layers), self.shared_head_norm)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, time, n_vocab] of tokens int64 [batch, time]."""
        return F.linear(self.hidden(tokens), self.token_embd)

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean cross entropies in nats: of the next token, and of the one after it by the prediction layer.

        A target of -1 counts for nothing.
        """
        rows = self.hidden(tokens)
        after = F.pad(targets[:, 1:], (0, 1), value=-1)
        drafted = self.predicted(rows, targets.clamp(min=0))
        return tuple(
            F.cross_entropy(F.linear(h, self.token_embd).float().flatten(0, 1), wanted.flatten(), ignore_index=-1)
            for h, wanted in ((rows, targets), (drafted, after))
        )

    def gguf_values(self) -> dict[str, int | float | list[int]]:
        """Keys of `qwen35` that state the shape."""
        shape = self.shape
        return {
            "context_length": shape.context,
            "embedding_length": shape.width,
            "block_count": shape.n_layers + 1,
            "nextn_predict_layers": 1,
            "feed_forward_length": shape.ffn_width,
            "attention.head_count": shape.n_heads,
            "attention.head_count_kv": shape.n_kv_heads,
            "attention.key_length": shape.head_width,
            "attention.value_length": shape.head_width,
            "attention.layer_norm_rms_epsilon": shape.norm_eps,
            "rope.freq_base": shape.rope_base,
            "rope.dimension_count": shape.rope_width,
            # Sections of time, height and width: in text the three are one number.
            "rope.dimension_sections": [3, 3, 2, 0],
            "ssm.conv_kernel": shape.conv_width,
            "ssm.state_size": shape.state_width,
            "ssm.group_count": shape.n_key_heads,
            "ssm.time_step_rank": shape.n_value_heads,
            "ssm.inner_size": shape.value_width,
            "full_attention_interval": shape.interval,
            "vocab_size": shape.n_vocab,
        }

    def gguf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by its name in a GGUF of `qwen35`."""
        yield "token_embd.weight", self.token_embd
        yield "output_norm.weight", self.output_norm
        recurrent = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out", "ssm_norm", "ssm_conv1d")
        attending = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
        both = ("attn_norm", "post_attention_norm", "ffn_gate", "ffn_up", "ffn_down")
        for kinds, layers in (
            (both, list(range(self.shape.n_layers + 1))), (recurrent, self.recurrent), (attending, self.attending),
        ):  # fmt: skip
            for at, layer in enumerate(layers):
                for kind in kinds:
                    yield f"blk.{layer}.{kind}.weight", getattr(self, kind)[at]
        for at, layer in enumerate(self.recurrent):
            yield f"blk.{layer}.ssm_dt.bias", self.ssm_dt[at]
            yield f"blk.{layer}.ssm_a", -self.ssm_a_log[at].exp()
        last = f"blk.{self.shape.n_layers}.nextn"
        yield f"{last}.eh_proj.weight", self.eh_proj[0]
        for kind in ("enorm", "hnorm", "shared_head_norm"):
            yield f"{last}.{kind}.weight", getattr(self, kind)
