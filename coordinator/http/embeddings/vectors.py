"""From pooled hidden rows to the vectors of an answer. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayline.coordinator.http.embeddings.asking import AnswerOptions
from relayline.coordinator.http.replies import shapes
from relayline.wire.common.errors import InvalidRequestError

_LARGEST = 32_760.0  # of llama-server's norm 0, which fits 16-bit integers


def vector_of(row: bytes, options: AnswerOptions) -> npt.NDArray[np.float32]:
    """Return the vector of one prompt from its pooled row (f32): cut where fewer dimensions are asked for, normed.

    Raises InvalidRequestError for more dimensions than the model has.
    """
    values = np.frombuffer(row, np.float32)
    if options.dimensions > values.size:
        text = f"dimensions: at most {values.size}, got {options.dimensions}"
        raise InvalidRequestError(text, param="dimensions")
    values = values[: options.dimensions] if options.dimensions else values
    size = _size(values.astype(np.float64), options.norm)
    return (values / size).astype(np.float32) if size > 0 else np.zeros_like(values)


def _size(values: npt.NDArray[np.float64], norm: int) -> float:
    """Return what values are divided by: llama.cpp's `common_embd_normalize`."""
    if norm < 0:
        return 1.0
    if norm == 0:
        return float(np.abs(values).max()) / _LARGEST
    return float(np.linalg.norm(values, norm))


def openai_reply(model: str, rows: Sequence[bytes], options: AnswerOptions, n_prompt_tokens: int) -> bytes:
    """Return OpenAI's body."""
    data = []
    for index, row in enumerate(rows):
        vector = vector_of(row, options)
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if options.is_base64 else vector.tolist()
        data.append(shapes.Embedding(shown, index))
    usage = shapes.EmbeddingsUsage(n_prompt_tokens, n_prompt_tokens)
    return shapes.encode(shapes.Embeddings(data, model, usage))


def llama_reply(rows: Sequence[bytes], options: AnswerOptions) -> bytes:
    """Return llama-server's own body: of each prompt a list of one vector."""
    return shapes.encode(
        [{"index": index, "embedding": [vector_of(row, options).tolist()]} for index, row in enumerate(rows)]
    )


def ollama_reply(
    model: str, rows: Sequence[bytes], options: AnswerOptions, n_prompt_tokens: int, took_ns: int
) -> bytes:
    """Return Ollama's body."""
    vectors = [vector_of(row, options).tolist() for row in rows]
    counts = {"total_duration": took_ns, "load_duration": 0, "prompt_eval_count": n_prompt_tokens}
    return shapes.encode({"model": model, "embeddings": vectors, **counts})


def ollama_vector(row: bytes, options: AnswerOptions) -> bytes:
    """Return the body of Ollama's older form, of one vector."""
    return shapes.encode({"embedding": vector_of(row, options).tolist()})
