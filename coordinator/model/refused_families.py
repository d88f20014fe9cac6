"""Architectures of the pinned llama.cpp that cannot be cut, each with the reason that `inspect` gives.

A name stands here or in the table of `families.py`; `python -m tests.families --report` holds both to llama.cpp's list.
"""

from __future__ import annotations

_RWKV = "its first layer normalises its input or passes its values to all others, so no other layer can be first"
_DIFFUSION = "it is a diffusion model, which fills in many tokens at once; stages generate one after another"
_ENCODER = "it is an encoder, which gives embeddings of whole texts and no next token"
_SPEECH = "it makes sound and no text"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "arwkv7", "rwkv6", "rwkv7",
        ),
        _RWKV,
    ),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(
        (
            "bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert",
            "neo-bert", "nomic-bert", "nomic-bert-moe", "t5encoder",
        ),
        _ENCODER,
    ),
    **dict.fromkeys(("pockettts", "qwen3tts", "wavtokenizer-dec"), _SPEECH),
    "baichuan": "llama.cpp takes the kind of its positions from the number of layers in the file, 32 or 40",
    "chameleon": "llama.cpp masks a fixed part of its vocabulary, which no stage but the last has",
    "clip": "it is a projector for images or sound, which is a part of a model and not one",
    "cogvlm": "llama.cpp chooses its weights for text by the token ids that it is given, and stages are given rows",
    "dflash": "it is a draft model that fills in blocks of tokens, for which stages have no driver",
    "dots3note": "it has indexers and sliding windows at once, and llama.cpp aborts where a slice lacks one of them",
    "eagle3": "it is a draft model, and reads the inner rows of the model that is served; give it with --draft-model",
    "gemma3n": "its later layers share cells by a number counted from the first layer in the file",
    "gemma4-assistant": "it is a draft model that reads the cells of another model's last layers, which are on a stage",
    "gptj": "llama.cpp knows its name, but cannot load it",
    "graniteswitch": "it chooses adapters by token id, and no stage but the first knows tokens",
    "hrm_text": "it runs through all of its layers several times, and a stage runs its own once",
    "minicpm3": "the scale of its layers follows from the number of layers in the file",
    "minimax-01": "the slopes of its attention follow from the number of layers in the file",
    "plamo2": "llama.cpp aborts on it, whole or in stages, with more than one sequence",
    "plm": "llama.cpp aborts on it, whole or in stages",
    "qwen4exp": "some of its layers look token ids up, and all hand on several rows for each token",
    "rwkv6qwen2": "llama.cpp mixes its lanes up where a step has one row of each, whole or in stages",
    "t5": "it is an encoder and a decoder in one, and stages run decoders only",
    "talkie": "each of its layers adds the embedding of the token once more, which stages do not forward",
}  # fmt: skip
