"""Flags and commands of other servers, and the name that the same thing has here. Pure.

The flags are those of llama-server, Ollama, vLLM and exo, as of 2026.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Sequence

import click

from relayline.wire.settings.setting import Settings, entry_of
from relayline.wire.settings.table import EngineSettings, ServingSettings

# Command -> what to type.
COMMANDS: dict[str, str] = {
    "run": "up", "start": "up", "launch": "up", "ps": "status", "stop": "down", "kill": "down", "list": "cache",
    "ls": "cache", "rm": "cache", "show": "inspect", "download": "pull", "benchmark": "bench", "monitor": "top",
}  # fmt: skip


def _flag(table: type[Settings], name: str) -> str:
    return entry_of(table, name).flag


_HTTP = "--http HOST:PORT"
_MODEL = "the model's path or name without a flag"
# Flag -> what to type.
FLAGS: dict[str, str] = {
    **dict.fromkeys(("--port", "--host", "--listen"), _HTTP),
    **dict.fromkeys(("-m", "--model", "-hf", "--hf-repo", "--hf-file"), _MODEL),
    **dict.fromkeys(("-c", "--ctx-size", "--context-length", "--max-model-len", "--num-ctx"),
                    _flag(EngineSettings, "ctx_tokens")),
    **dict.fromkeys(("-np", "--parallel", "--max-num-seqs"), _flag(EngineSettings, "n_lanes")),
    **dict.fromkeys(("-ngl", "--n-gpu-layers"), _flag(EngineSettings, "gpu_layers")),
    **dict.fromkeys(("-t", "-tb", "--threads-batch"), _flag(EngineSettings, "n_threads")),
    **dict.fromkeys(("-b", "-ub", "--batch-size", "--ubatch-size", "--max-num-batched-tokens"),
                    _flag(EngineSettings, "max_rows")),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"),
                    _flag(EngineSettings, "kv_type")),
    **dict.fromkeys(("-sm",), _flag(EngineSettings, "split_mode")),
    **dict.fromkeys(("-ts",), _flag(EngineSettings, "tensor_split")),
    **dict.fromkeys(("-ncmoe", "--cpu-moe"), _flag(EngineSettings, "n_cpu_moe")),
    **dict.fromkeys(("--swa-full",), f"{_flag(EngineSettings, 'window_cells')} all"),
    **dict.fromkeys(("--lora-scaled",), f"{_flag(ServingSettings, 'lora')} FILE:SCALE"),
    **dict.fromkeys(("--lora-modules", "--enable-lora"), f"{_flag(ServingSettings, 'lora')} NAME=FILE"),
    **dict.fromkeys(("--draft-max", "--spec-type"), _flag(ServingSettings, "draft")),
    **dict.fromkeys(("-md", "--model-draft", "-hfd", "--hf-repo-draft", "--speculative-model", "--speculative-config"),
                    _flag(ServingSettings, "draft_model")),
    **dict.fromkeys(("-ngld", "--gpu-layers-draft"), _flag(ServingSettings, "draft_gpu_layers")),
    **dict.fromkeys(("-td", "--threads-draft"), _flag(ServingSettings, "draft_threads")),
    **dict.fromkeys(("-cd", "--ctx-size-draft"), _flag(ServingSettings, "draft_ctx_tokens")),
    **dict.fromkeys(("--api-key", "--api-key-file"), "--api-keys FILE"),
    **dict.fromkeys(("--ssl-cert-file", "--ssl-certfile"), "--http-cert"),
    **dict.fromkeys(("--ssl-key-file", "--ssl-keyfile"), "--http-key"),
    **dict.fromkeys(("--rpc", "--pipeline-parallel-size", "-pp"), "--stages N, or a manifest that names the hosts"),
    "-v": "--verbose",
}  # fmt: skip


def near_command(name: str, known: Collection[str]) -> str:
    """Return the command of `known` that was probably meant; empty for none."""
    if name.lower() in COMMANDS:
        return COMMANDS[name.lower()]
    return next(iter(difflib.get_close_matches(name.lower(), known, n=1)), "")


def explained(error: click.UsageError, arguments: Sequence[str]) -> str:
    """Return what to say of a mistake in a command line with these arguments, with what to type instead if known."""
    command = error.ctx.command if error.ctx is not None else None
    if command is None:
        return error.format_message()
    if isinstance(error, click.NoSuchOption) and (found := _here(error.option_name, command, arguments)):
        return found
    if "extra argument" in error.message and (found := _one_list(command, arguments)):
        return f"{error.format_message()}; {found}"
    if command.name == "serve" and "extra argument" in error.message:
        return f"{error.format_message()}; `relayline up MODEL` runs a model, `serve` is a coordinator alone"
    return error.format_message()


def _one_list(command: click.Command, arguments: Sequence[str]) -> str:
    """Return how a list is written that was given in several words; empty if none was."""
    takers = (each for each in command.params if each.type.name == "layers" or each.type.name.endswith(",..."))
    flags = {name for each in takers for name in each.opts}
    for at, flag in enumerate(arguments):
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[at + 1 :]))
        if flag in flags and len(values) > 1:
            more = ",..." if len(values) > 2 else ""
            return f"a list has commas and no blanks: {flag} {','.join(value.strip(',') for value in values[:2])}{more}"
    return ""


def _here(option: str, command: click.Command, arguments: Sequence[str]) -> str:
    """Return a sentence on the flag that has another name here; empty if the command has none.

    A command line reads `-ngl` as `-n`, so the whole of it is looked for among the arguments.
    """
    typed = next((one for one in arguments if one in FLAGS and one.startswith(option)), option)
    meant = FLAGS.get(typed, "")
    takes_model = any(isinstance(parameter, click.Argument) for parameter in command.params)
    names = {name for parameter in command.params for name in parameter.opts}
    is_known = takes_model if meant == _MODEL else meant.split(" ")[0] in names
    return f"No such option {typed!r}; here it is {meant}" if is_known else ""
