"""The head of a reranker in a model's file: whether there is one, and whether stages can score with it.

llama.cpp reads it for some families (`Family.ranks`), keeps it behind the last layer, and makes scores of the last
row of a prompt: llm_graph_context::build_pooling, pooling type RANK.
"""

from __future__ import annotations

from relayline.coordinator.model.family import Family
from relayline.coordinator.model.gguf_file import GgufModel
from relayline.wire.common.errors import ModelFileError
from relayline.wire.model_files.rank_head import LABELS_MAX, RANK_HEAD

OUTPUT_LABELS = "classifier.output_labels"
CLASSIFIER_POOLING = "classifier.pooling_type"
_MEAN = 1  # LLAMA_POOLING_TYPE_MEAN


def labels_of(model: GgufModel, family: Family, n_embd: int) -> int:
    """Return how many labels the model's head that ranks tells apart; 0: it has none, or its family has none.

    Raises ModelFileError for a head of another shape than the model states.
    """
    tensor = model.tensors.get(RANK_HEAD)
    if tensor is None or not family.ranks:
        return 0
    entry = model.entries.get(f"{family.architecture}.{OUTPUT_LABELS}")
    n_labels = (entry.length if entry is not None else 0) or 1  # llama_model_base::load_hparams
    if tensor.dims != (n_embd, n_labels) or n_labels > LABELS_MAX:
        text = f"{RANK_HEAD} has shape {list(tensor.dims)}, but {n_labels} labels of {n_embd} values are stated"
        raise ModelFileError(f"{model.path}: {text}, of at most {LABELS_MAX}")
    return n_labels


def scoring_labels(n_labels: int) -> int:
    """Return how many labels the model is scored by: of one alone llama.cpp makes the same score for every text."""
    return n_labels if n_labels > 1 else 0


def rank_refusal(model: GgufModel, family: Family, n_labels: int) -> str | None:
    """Return why stages cannot score with the model's head; None: they can, or there is none that scores."""
    if scoring_labels(n_labels) and model.integer(f"{family.architecture}.{CLASSIFIER_POOLING}", 0) == _MEAN:
        return "its head that ranks reads the mean of a text's rows, and stages score the last one"
    return None
