"""The commented manifest that `relayline init` writes. Pure: facts of a machine in, text out."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

N_STAGES = 2  # on processors; stages on one GPU would take turns
MEMORY_SHARE = 0.8  # of the machine, for all its stages; the rest is the system's and the coordinator's


@dataclasses.dataclass(frozen=True, slots=True)
class MachineFacts:
    """The inputs of a machine's first manifest."""

    n_cores: int
    """Cores that processes started here may run on."""
    memory_gib: float
    """Memory of the machine."""
    has_gpu_build: bool
    """Whether llama.cpp was built to put layers on a GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageHost:
    """A stage of several machines, and its host."""

    name: str
    host: str
    """As the user wrote it."""
    is_here: bool
    """Whether it is the machine of the facts."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model to name, and its known facts."""

    path: str
    """Its form in the manifest."""
    about: str
    """One line for a comment: a description, or a hint."""
    is_on_hub: bool = False
    """Whether `path` is an hf:// reference."""


def pipeline_name(model_path: str) -> str:
    """Return a DNS label made of a model's file name, without quantisation and shard endings where they are plain."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", model_path.rpartition("/")[2], flags=re.IGNORECASE)
    label = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return label if label[:1].isalpha() else f"model-{label}".strip("-")


def starter_text(machine: MachineFacts, model: ModelChoice, schema: str, hosts: Sequence[StageHost] = ()) -> str:
    """Return the manifest's text: its stages, everything else as a comment with its default.

    Without `hosts` there are two stages here, or one with a GPU. `schema` is where an editor finds the JSON Schema.
    """
    n_usual = 1 if machine.has_gpu_build else N_STAGES
    places = hosts or [StageHost(f"stage-{index}", "", is_here=True) for index in range(n_usual)]
    n_here = max(1, sum(place.is_here for place in places))
    n_threads = max(1, machine.n_cores // n_here)
    memory_gib = max(0.5, round(MEMORY_SHARE * machine.memory_gib / n_here * 2) / 2)
    stages = "".join(_stage(place, n_threads, memory_gib, on_gpu=machine.has_gpu_build) for place in places)
    return _TEMPLATE.format(
        schema=schema,
        n_cores=machine.n_cores,
        memory_gib=f"{machine.memory_gib:.1f}",
        gpu="layers may go to a GPU" if machine.has_gpu_build else "no GPU in this build of llama.cpp",
        name=pipeline_name(model.path.partition("@")[0] if model.is_on_hub else model.path),
        source=(_ON_HUB if model.is_on_hub else _HERE).format(json.dumps(model.path, ensure_ascii=False)),
        about=model.about,
        stages=stages,
    )


def _stage(place: StageHost, n_threads: int, memory_gib: float, *, on_gpu: bool) -> str:
    lines = [f"    - name: {place.name}"]
    if place.host:
        lines.append(f"      host: {json.dumps(place.host)}")
    if place.is_here:
        lines.append(f"      threads: {n_threads:<14} # 0: this machine's cores divided by the stages on it")
        lines.append(f"      memoryGib: {memory_gib:<12g} # what the planner may use here")
    else:
        lines.append("      # memoryGib: 16            # what the planner may use there; default: free memory")
    lines.append(
        "      device: gpu" if place.is_here and on_gpu else "      # device: gpu              # cpu is the default"
    )
    return "\n".join([*lines, ""])


_HERE = """\
    path: {}
    # hf: hf://org/repo/file.gguf        # instead of path: from the Hugging Face hub
    # download: layers                   # with hf: each stage gets its own layers, and no machine the whole model
"""
_ON_HUB = """\
    hf: {}
    # download: layers                   # each stage gets its own layers, and no machine the whole model
    # path: model.gguf                   # instead of hf: a file here
"""
_TEMPLATE = """\
# yaml-language-server: $schema={schema}
# Made by `relayline init` on a machine with {n_cores} cores and {memory_gib} GiB; {gpu}.
#   relayline plan THIS_FILE     its plan, in numbers
#   relayline up THIS_FILE       start it
# Lines that are commented out show the defaults.
apiVersion: relayline.dev/v1alpha1
kind: Pipeline
metadata:
  name: {name}
spec:
  model:
    # {about}
{source}    # sha256: ...                        # refuse any other file

  # context:
  #   tokens: 8192             # per stream, prompt and answer together; default: as the model and the memory allow
  #   lanes: 32                # streams at once; each reserves its tokens on every stage; default: as memory allows
  #   kvType: f16
  #   kvLayout: auto           # per-lane (faster on CPUs for long streams) or unified
  #   prefixLanes: 8           # free lanes for the prefix cache, for example for the next turn of a chat

  stages:
{stages}    # A stage on another machine; there, run the command that `relayline up` prints:
    # - name: box2
    #   host: 192.168.1.12
    #   memoryGib: 16
    #   layers: auto             # the planner chooses; or write [first, last + 1]
    #   link: {{roundTripMs: 0.2, bandwidthGbps: 1}}   # to the next stage

  # coordinator:
  #   host: localhost            # with stages on other machines: this machine's address
  #   http: {{host: 127.0.0.1, port: 8080}}
  #   queue: 256                 # requests that may wait for a lane; further ones get 429
  #   apiKeysFile: keys.txt      # one key per line
  #   allowHosts: [chat.example] # hosts whose web pages may use the API; also further names of this server

  # wire:
  #   dtype: f16                 # f32 is exact and twice the bytes
  #   tls: {{mode: auto}}          # mutual TLS as soon as a stage is on another machine

  # telemetry:
  #   level: summary             # off, summary, batches, frames
  #   otlpEndpoint: http://127.0.0.1:4317
"""
