"""The GGUF writing that both recipes share, and the comparison of the written file with the PyTorch model."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import gguf
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from train_text import CHAT_TEMPLATE, END, EOT, SPECIALS, documents, heldout_rows

# Logits f32 [batch, time, n_vocab] of tokens int64 [batch, time].
Logits = Callable[[torch.Tensor], torch.Tensor]


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


PROMPTS = ("def ", "import os\n\n\nclass ", '"""Return ', "    def __init__(self, ", "for line in ")
ASKED = (
    "What does shutil.copytree do?", "Explain textwrap.wrap", "What does len do?", "What is json.dumps?", "Hello",
    "What is the logging module?", "Write the function copyfile of module shutil",
)  # fmt: skip


def write_model(
    path: Path,
    architecture: str,
    values: Mapping[str, int | float | list[int]],
    tokenizer: Tokenizer,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Write a GGUF: matrices Q8_0; vectors, and rows shorter than a block of Q8_0, F32. It is called as its file is.

    `values` are the architecture's own keys, without its name before them.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_description(
        f"Small demo model for relayline, trained on the standard library of CPython {platform.python_version()}"
    )
    writer.add_license("PSF-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    write_tokenizer(writer, tokenizer)
    for name, tensor in tensors:
        found = tensor.detach().float().contiguous().numpy()
        is_short = found.ndim == 1 or found.shape[-1] % 32
        kind = gguf.GGMLQuantizationType.F32 if is_short else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(found, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{path}: {path.stat().st_size:,} bytes")


@torch.no_grad()
def heldout_loss(logits: Logits, tokenizer: Tokenizer, text: str, context: int) -> tuple[float, float]:
    """(nats per token, bits per byte) of the held-out text."""
    inputs, targets = heldout_rows(tokenizer, text, context)
    nats = 0.0
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        nats += float(F.cross_entropy(logits(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum"))
    return nats / int((targets >= 0).sum()), nats / math.log(2) / len(text.encode())


def verify(tokenizer: Tokenizer, text: str, path: Path, logits: Logits, context: int) -> None:
    """Hold the GGUF, as llama.cpp runs it, to tokenizer and PyTorch model; print losses and greedy samples."""
    import llama_cpp

    _, held_out = documents()
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

    per_token, per_byte = heldout_loss(logits, tokenizer, text, context)
    print(f"PyTorch f32, held out: {per_token:.4f} nats per token, {per_byte:.4f} bits per byte", flush=True)
    inputs, targets = heldout_rows(tokenizer, text, context)
    nats, divergences, margins, agreements, apart = 0.0, [], [], [], 0.0
    for x, y in zip(inputs, targets, strict=True):
        n_scored = int((y >= 0).sum())
        llm.reset()
        llm.eval(x[:n_scored].tolist())
        theirs = torch.log_softmax(torch.from_numpy(llm.scores[:n_scored].copy()), -1)
        with torch.no_grad():
            raw = logits(x[None])[0, :n_scored]
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
