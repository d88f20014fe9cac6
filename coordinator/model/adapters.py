"""Whether LoRA adapters can be served with a model: before it is split, and when its split is served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relayline.coordinator.model.families import family_of
from relayline.coordinator.model.family import no_orders
from relayline.coordinator.model.gguf_file import open_model
from relayline.coordinator.model.pipeline_file import PipelineFile
from relayline.wire.common.errors import ModelFileError, UsageError
from relayline.wire.model_files.adapters import (
    Adapter,
    AdapterFile,
    check_architecture,
    check_shapes,
    names,
    read_adapter,
)

_MLA = "attn_q attn_q_a attn_q_b attn_kv_a_mqa attn_kv_b attn_k_b attn_v_b"
_INDEXER = "indexer.attn_q_b indexer.attn_k indexer.proj indexer.kpool_gate"
_DELTA = "ssm_beta ssm_f_a ssm_f_b ssm_g_a ssm_g_b attn_k attn_v attn_output"
_STREAMS = "hc_attn_fn hc_ffn_fn"
_DENSE = "ffn_gate ffn_up ffn_down ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_CONV = "ssm_conv1d"  # a convolution's, which is no product
# Matrices that the graphs of llama.cpp 0.3.36's src/models multiply without a look at adapters. llama-server ignores
# such a pair in silence. tests/coordinator/model/test_adapter_matrices.py measures it.
UNTOUCHED: dict[str, str] = {
    "deepseek2": _MLA,
    **dict.fromkeys(("deepseek32", "glm-dsa"), f"{_MLA} {_INDEXER}"),
    "deepseek4": f"{_STREAMS} attn_output_a attn_compressor_ape indexer_compressor_ape ffn_gate_tid2eid",
    "hy_v4": f"{_MLA} {_INDEXER} {_STREAMS} attn_gate",
    "kimi-linear": f"{_MLA} {_DELTA} attn_qkv",
    "kimi-k3": f"{_MLA} {_DELTA} {_DENSE} attn_qkv attn_gate ssm_g ffn_gate_inp ffn_routed_down ffn_routed_up",
    "bailingmoe3": f"{_MLA} {_DELTA} attn_gate",
    "glm5-next": f"{_MLA} {_DELTA} {_INDEXER} {_STREAMS} indexer_compressor_gate indexer_compressor_ape",
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), f"ffn_latent_down ffn_latent_up {_CONV}"),
}


def check_of_split(adapters: Sequence[Adapter], split: PipelineFile, model_names: Sequence[str]) -> None:
    """Raise ModelFileError for an adapter of another model, UsageError for one with a name of the model itself.

    Matrices are held against the model's by each stage.
    """
    for adapter in adapters:
        _check(read_adapter(adapter.path), split.architecture, split.n_layers)
    for name in names(adapters):
        if name in model_names:
            raise UsageError(
                f"--lora {name}=...: the model itself is served under {name!r}; give the adapter another name"
            )


def check_of_model(adapters: Sequence[AdapterFile], model: Path, architecture: str, n_layers: int) -> None:
    """Raise ModelFileError for an adapter of another model than the one that lies here."""
    tensors = open_model(model).tensors
    for adapter in adapters:
        _check(adapter, architecture, n_layers)
        check_shapes(adapter, tensors, range(n_layers))


def _check(adapter: AdapterFile, architecture: str, n_layers: int) -> None:
    check_architecture(adapter, architecture, n_layers)
    untouched = UNTOUCHED.get(architecture, "").split()
    for pair in adapter.pairs:
        if pair.rest.removesuffix(".weight") in untouched:
            raise ModelFileError(
                f"{adapter.path}: changes blk.{pair.layer}.{pair.rest}, where llama.cpp applies no LoRA to "
                f"{architecture}; train an adapter without it"
            )
    if family_of(architecture).row_orders is not no_orders:
        raise ModelFileError(
            f"{adapter.path}: LoRA adapters of {architecture} are not served: its slices hold rows in another order"
        )
