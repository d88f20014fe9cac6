from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest

from relayline.deploy.testing.engines import engine_config
from relayline.deploy.testing.reference import ReferenceModel
from relayline.deploy.testing.tiny_slices import TinyShape, quantized, tiny_weights, write_stage, write_whole
from relayline.stage.engine.artifact import EmbeddingSection, StageArtifact, open_artifact
from relayline.stage.engine.embedding import EmbeddingTable
from relayline.stage.engine.native import NativeEngine
from relayline.wire.common.errors import ArtifactError, InternalError, ProtocolError

SHAPE = TinyShape(n_layers=1, n_embd=256, n_heads=4, n_ff=256)  # 256: one block of a K-quant
TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4"]


def shape_of(type_name: str) -> TinyShape:
    return dataclasses.replace(SHAPE, type=gguf.GGMLQuantizationType[type_name])


@pytest.mark.sampled(8)
@pytest.mark.parametrize("type_name", TYPES)
def test_lookup_equals_the_token_path_bit_for_bit(type_name: str, tmp_path: Path) -> None:
    """One stage that is first and last, fed with looked-up rows, against llama.cpp fed with tokens."""
    shape = shape_of(type_name)
    tokens = np.random.default_rng(1).integers(0, shape.n_vocab, 12, dtype=np.int32)
    with ReferenceModel(write_whole(tmp_path / "whole.gguf", shape), 256, 1) as whole:
        expected = whole.decode(tokens.tolist(), range(12), [0] * 12, [True] * 12)
    with NativeEngine(engine_config(write_stage(tmp_path / "only.gguf", shape, 0, []), 1, 256)) as engine:
        EmbeddingTable(engine.artifact).lookup(tokens, engine.input_rows[:12])
        engine.positions[:12] = range(12)
        engine.decode(12)
        got = np.stack([engine.logits(row) for row in range(12)])
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K", "IQ4_XS"])
def test_rows_are_those_of_the_published_format(type_name: str, tmp_path: Path) -> None:
    shape = shape_of(type_name)
    table = EmbeddingTable(open_artifact(write_stage(tmp_path / "stage.gguf", shape, 0, [])))
    out = np.empty((shape.n_vocab, shape.n_embd), np.float32)
    table.lookup(np.arange(shape.n_vocab, dtype=np.int32), out)
    stored = quantized(tiny_weights(shape)["token_embd.weight"], shape.type)
    assert np.allclose(out, gguf.quants.dequantize(stored, shape.type), rtol=1e-6, atol=0)
    assert (table.n_rows, table.n_embd) == (shape.n_vocab, shape.n_embd)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_repeated_and_unordered_tokens(type_name: str, tmp_path: Path) -> None:
    table = EmbeddingTable(open_artifact(write_stage(tmp_path / "stage.gguf", shape_of(type_name), 0, [])))
    every = np.empty((SHAPE.n_vocab, SHAPE.n_embd), np.float32)
    table.lookup(np.arange(SHAPE.n_vocab, dtype=np.int32), every)
    tokens = np.array([5, SHAPE.n_vocab - 1, 0, 5], np.int32)
    out = np.empty((4, SHAPE.n_embd), np.float32)
    table.lookup(tokens, out)
    assert np.array_equal(out, every[tokens])
    table.lookup(np.empty(0, np.int32), np.empty((0, SHAPE.n_embd), np.float32))


def test_the_family_scale_is_applied(tmp_path: Path) -> None:
    tokens = np.array([3, 7], np.int32)
    plain, scaled = (np.empty((2, SHAPE.n_embd), np.float32) for _ in range(2))
    EmbeddingTable(open_artifact(write_stage(tmp_path / "a.gguf", SHAPE, 0, []))).lookup(tokens, plain)
    EmbeddingTable(open_artifact(write_stage(tmp_path / "b.gguf", SHAPE, 0, [], scale=12.0))).lookup(tokens, scaled)
    assert np.array_equal(scaled, plain * np.float32(12))


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("token", [-1, SHAPE.n_vocab, 2**31 - 1, -(2**31)])
def test_a_token_outside_the_vocabulary_changes_nothing(token: int, type_name: str, tmp_path: Path) -> None:
    table = EmbeddingTable(open_artifact(write_stage(tmp_path / "stage.gguf", shape_of(type_name), 0, [])))
    out = np.full((3, SHAPE.n_embd), 7.0, np.float32)
    with pytest.raises(ProtocolError, match=f"token {token} is outside the vocabulary of {SHAPE.n_vocab}"):
        table.lookup(np.array([1, token, 2], np.int32), out)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "out",
    [
        np.empty((2, SHAPE.n_embd), np.float32),
        np.empty((1, SHAPE.n_embd), np.float64),
        np.empty((1, 2 * SHAPE.n_embd), np.float32)[:, ::2],
    ],
)
def test_an_output_of_another_shape_is_refused(out: np.ndarray, tmp_path: Path) -> None:
    table = EmbeddingTable(open_artifact(write_stage(tmp_path / "stage.gguf", SHAPE, 0, [])))
    with pytest.raises(InternalError, match="contiguous f32"):
        table.lookup(np.array([1], np.int32), out)


def test_rows_of_images_are_taken_as_they_are(tmp_path: Path) -> None:
    table = EmbeddingTable(open_artifact(write_stage(tmp_path / "stage.gguf", SHAPE, 0, [], scale=12.0)))
    rows, out = np.random.default_rng(1).standard_normal((3, 256)).astype(np.float32), np.zeros((3, 256), np.float32)
    table.take(rows, out)
    assert np.array_equal(rows, out)
    with pytest.raises(ProtocolError, match="rows of 255 values came, and this stage takes 256"):
        table.take(rows[:, :255], out)
    with pytest.raises(InternalError, match=r"out must be f32 \[3, 256\]"):
        table.take(rows, out[:2])


def altered(artifact: StageArtifact, **changes: int) -> StageArtifact:
    section = artifact.embedding
    assert section is not None
    return dataclasses.replace(artifact, embedding=dataclasses.replace(section, **changes))


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    artifact = open_artifact(write_stage(tmp_path / "stage.gguf", SHAPE, 0, []))
    assert isinstance(artifact.embedding, EmbeddingSection)
    partial = dataclasses.replace(altered(artifact, type_id=8), n_embd=100)  # q8_0 has blocks of 32
    for wrong, message in (
        (altered(artifact, type_id=4), "unknown ggml type 4"),  # removed from ggml
        (altered(artifact, type_id=9999), "unknown ggml type 9999"),
        (altered(artifact, type_id=26), "i32 cannot be read as numbers"),
        (altered(artifact, rows=SHAPE.n_vocab + 1), "ends before its embedding table"),
        (partial, "not whole blocks"),
        (open_artifact(write_stage(tmp_path / "last.gguf", TinyShape(), 1, [2])), "stage 1 holds no embedding table"),
    ):
        with pytest.raises(ArtifactError, match=message):
            EmbeddingTable(wrong)
