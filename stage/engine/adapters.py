"""The LoRA adapters of a loaded slice, and which of them a step's rows are computed with."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from llama_cpp import llama_cpp as llama

from relayline.stage.engine import ggml
from relayline.stage.engine.artifact import StageArtifact
from relayline.wire.common.errors import ModelFileError, NativeError, ProtocolError
from relayline.wire.common.files import naming
from relayline.wire.common.scratch import scratch_directory
from relayline.wire.common.texts import file_error_text
from relayline.wire.model_files.adapters import (
    Adapter,
    check_architecture,
    check_shapes,
    choices,
    read_adapter,
    write_part,
)
from relayline.wire.model_files.gguf_header import Tensor, read_header

log = logging.getLogger("relayline.stage")


class Adapters:
    """The adapters of one model. Its memory is the model's, and is freed with it."""

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters, self._choices = tuple(adapters), choices(adapters)
        self._used = 0
        self._loaded: dict[int, Any] = {}  # by index; an adapter that changes none of the slice's layers is not loaded

    def load(self, model: Any, artifact: StageArtifact) -> None:
        """Load those parts that change the slice's layers. Call it before the model gets its context, whose graph has
        room for the adapters that it finds.

        Raises ModelFileError for a file that is damaged or was made for another model, NativeError for memory.
        """
        if not self._adapters:
            return
        tensors = {tensor.name: tensor for tensor in read_header(artifact.path).tensors}
        for index, adapter in enumerate(self._adapters):
            self._load(model, artifact, index, adapter, tensors)

    def _load(
        self, model: Any, artifact: StageArtifact, index: int, adapter: Adapter, tensors: Mapping[str, Tensor]
    ) -> None:
        layers = range(artifact.layer_start, artifact.layer_end)
        first = artifact.n_placeholders
        file = read_adapter(adapter.path)
        check_architecture(file, artifact.architecture, artifact.source_layers)
        check_shapes(file, tensors, layers, first)
        try:
            with scratch_directory("relayline-lora-") as directory:
                path = directory / "part.gguf"
                with naming(path), path.open("wb") as part:
                    n_changed = write_part(file, layers, part, first)
                if n_changed:
                    ggml.LOG.watch()
                    self._loaded[index] = llama.llama_adapter_lora_init(model, os.fsencode(path))
        except OSError as error:
            text = f"its part for this stage cannot be written: {file_error_text(error)}"
            raise NativeError(f"{adapter.path}: {text}; TMPDIR=DIRECTORY puts it elsewhere") from error
        if n_changed and not self._loaded[index]:
            raise ModelFileError(f"{adapter.path}: cannot be loaded: {ggml.LOG.reason('llama.cpp gave no reason')}")
        log.info(
            "LoRA adapter loaded",
            extra={"fields": {"path": adapter.path, "name": adapter.name, "changes_here": n_changed}},
        )

    def begin(self, context: Any) -> None:
        """Have a new context compute with the adapters of every request."""
        self._apply(context, 0)

    def use(self, context: Any, choice: int) -> None:
        """Have the next step computed with the adapters of a choice. Raises ProtocolError for one that is not there.

        Another choice than the last step's costs llama.cpp a new graph.
        """
        if choice == self._used:
            return
        if choice >= len(self._choices):
            raise ProtocolError(f"a session wants adapter {choice} of a stage with {len(self._choices) - 1}")
        self._apply(context, choice)

    def _apply(self, context: Any, choice: int) -> None:
        wanted = [index for index in self._choices[choice] if index in self._loaded]
        handles = (llama.llama_adapter_lora_p_ctypes * len(wanted))(*(self._loaded[index] for index in wanted))
        scales = (ctypes.c_float * len(wanted))(*(self._adapters[index].scale for index in wanted))
        if code := llama.llama_set_adapters_lora(context, handles, len(wanted), scales):
            raise NativeError(f"llama.cpp cannot use LoRA adapter {choice}: code {code}")
        self._used = choice
