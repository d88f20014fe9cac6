"""The head of a reranker: the tensor that llama.cpp makes scores with, and the key that tells a coordinator of it."""

from __future__ import annotations

RANK_HEAD = "cls.output.weight"  # a row of the model's width for each label
LABELS_KEY = "relayline.labels"  # in tokenizer.gguf: how many labels there are; absent where the model has no such head
LABELS_MAX = 256  # of one head; rerankers have two, yes and no
