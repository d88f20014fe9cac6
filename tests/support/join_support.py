"""Shared by the tests of joining: a split of small files, a coordinator's join port, stages with any introduction."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

from relayline.coordinator.engine.roster import JoinedRoster
from relayline.coordinator.joining.config import JoinConfig, JoiningStage
from relayline.coordinator.joining.port import make_roster, serve_joining
from relayline.coordinator.model.pipeline_file import (
    ArtifactFile,
    PipelineFile,
    Source,
    StageFile,
    load_pipeline,
    store_pipeline,
)
from relayline.stage.joining.client import Member, introduction
from relayline.wire.links.security import PLAINTEXT
from relayline.wire.pb.relayline.v1 import join_pb2 as pb
from relayline.wire.settings.table import EngineSettings

NAMES = ("box1", "box2")
ARTIFACT_BYTES = 3_000_000  # a few chunks


def content(index: int) -> bytes:
    """The bytes of one artifact: long, all different, the same every time."""
    return random.Random(index).randbytes(ARTIFACT_BYTES)


def write_split(directory: Path, *, unread: bool = False) -> PipelineFile:
    """A finished split of two stages, whose files hold no model; `unread`: the content of stages is elsewhere."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {"stage-0.gguf": content(0), "stage-1.gguf": content(1), "tokenizer.gguf": b"tokens"}
    for name, data in files.items():
        is_here = not unread or name == "tokenizer.gguf"
        (directory / name).write_bytes(data if is_here else bytes(len(data)))

    def facts(name: str) -> tuple[str, int, str]:
        return name, len(files[name]), hashlib.sha256(files[name] + b"unread" * unread).hexdigest()

    pipeline = PipelineFile(
        1,
        "a-pipeline",
        Source((), "0" * 64),
        "llama",
        "tiny",
        n_layers=4,
        n_embd=64,
        n_vocab=160,
        ctx_train=0,
        cuts=(2,),
        tokenizer=ArtifactFile(*facts("tokenizer.gguf")),
        stages=(
            StageFile(0, *facts("stage-0.gguf"), 0, 2, unread=unread),
            StageFile(1, *facts("stage-1.gguf"), 2, 4, unread=unread),
        ),
    )
    store_pipeline(directory, pipeline)
    return load_pipeline(directory)


class JoinPort:
    """A coordinator's join port in this process, with a free place for every name."""

    def __init__(self, address: str, roster: JoinedRoster, config: JoinConfig) -> None:
        self.address, self.roster, self.config = address, roster, config

    async def join(self, name: str = "box1", process_id: str = "p1", **changes: object) -> Member:
        """Join as a stage would, with a changed introduction if the test wants one."""
        hello = introduction(name, process_id)
        hello.MergeFrom(pb.StageHello(**changes))  # type: ignore[arg-type]
        return await Member.join(self.address, PLAINTEXT, hello)


@contextlib.asynccontextmanager
async def join_port(
    directory: Path,
    engine: EngineSettings | None = None,
    *,
    unread: bool = False,
    made: PipelineFile | None = None,
    **settings: object,
) -> AsyncIterator[JoinPort]:
    """Run a join port over a split for the length of a with block: over `made`, or one of files without a model."""
    file = made or write_split(directory, unread=unread)
    places = tuple(JoiningStage(name, engine or EngineSettings()) for name in NAMES)
    config = JoinConfig(places, **settings)  # type: ignore[arg-type]
    roster = make_roster(config)
    async with serve_joining(config, directory, file, roster, PLAINTEXT) as (address, _):
        yield JoinPort(address, roster, config)
