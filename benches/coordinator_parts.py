"""The cost of a token in each part of the coordinator: `python -m benches.coordinator_parts [--quick] [--out FILE]`.

The production parts run in a loop, without sockets, on answers as one stage would give them. Time is virtual; only
processor time is measured. Caches are warm here. In a process that waits between steps, on a host that does other
work, each part takes two to three times as long. So these figures are for shares, and for the most that one conductor
could do.

Cold, a function costs what its code and data cost to fetch, so the calls of Python functions are counted as well: they
are the same on every host.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from benches.arguments import numbers
from benches.coordinator import STEPS_MS, STREAMS, STREAMS_QUICK
from benches.origin import origin
from relayline.coordinator.engine.conductor import Conductor, ConductorConfig
from relayline.coordinator.engine.epoch_facts import EpochFacts
from relayline.coordinator.engine.instructions import Dispatch, Generated, Instruction, Send, Tell
from relayline.coordinator.engine.token_sender import within_bounds, write_tokens
from relayline.coordinator.http.edge.sse import data_frame
from relayline.coordinator.http.replies.choice import ChoiceState, Ending, Speller
from relayline.coordinator.http.replies.dialect import Header
from relayline.coordinator.http.replies.openai_dialects import ChatDialect
from relayline.coordinator.model.pipeline_file import load_pipeline
from relayline.coordinator.observe.observer import Observer
from relayline.coordinator.schedule.config import ScheduleConfig
from relayline.coordinator.schedule.overhead import ROUND_TRIPS_MIN, WINDOWS_KEPT, Held
from relayline.coordinator.schedule.stage_cost import StageCost
from relayline.coordinator.sessions.frame import Frame
from relayline.coordinator.sessions.generation import GenerationRequest, SamplingParams, TokenEvent
from relayline.coordinator.sessions.request_log import SessionRecord
from relayline.coordinator.text.tokenizer import Tokenizer
from relayline.deploy.models.splits import split_for
from relayline.deploy.testing.paths import DEMO_MODEL
from relayline.wire.common.curve import CostCurve
from relayline.wire.envelopes.buffers import BufferPool
from relayline.wire.envelopes.dtypes import DTYPE_TOKENS
from relayline.wire.envelopes.returns import ReturnReader, ReturnWriter
from relayline.wire.pb.relayline.v1 import relayline_pb2 as pb

PARTS = ("read", "decided", "encoded", "observed", "written")
LABELS = {
    "read": "a stage's answer is read and checked",
    "decided": "and conductor and scheduler decide what leaves",
    "encoded": "and the next envelope is written",
    "observed": "and telemetry counts the token",
    "written": "and its text is an event of the client's stream",
}
STEPS, STEPS_QUICK, WARM_STEPS, WINDOW_STEPS = 300, 30, 10, 10
ROUNDS, ROUNDS_QUICK = 3, 1
N_PROMPT, EPOCH = 24, 1
MS = 1e6


class Readers:
    """The clients' side: one streamed chat for each session."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._answers = tokenizer, dict[int, tuple[ChoiceState, ChatDialect]]()
        self.n_bytes = 0

    def open(self, session_id: int) -> None:
        """A session begins."""
        header = Header(f"chatcmpl-{session_id:032x}", 1_790_000_000, "demo", "relayline-1", False, False)
        state = ChoiceState(self._tokenizer.piece, Ending(), wants_logprobs=False, wants_tokens=False)
        self._answers[session_id] = state, ChatDialect(header, Speller(self._tokenizer), -1)

    def tell(self, session_id: int, event: TokenEvent) -> None:
        """Write a token's event."""
        state, dialect = self._answers[session_id]
        self.n_bytes += len(data_frame(dialect.growth_event(0, state.on_event(event))))


class Loop:
    """One coordinator without sockets, up to one of PARTS."""

    def __init__(self, n_streams: int, part: str, tokenizer: Tokenizer, n_vocab: int) -> None:
        self._does = {name: name == "decided" for name in PARTS}  # until all streams decode
        points = [(float(rows), float(took)) for rows, took in (point.split(":") for point in STEPS_MS.split(","))]
        curve = CostCurve((int(rows), took_ms * MS) for rows, took_ms in points)
        facts = EpochFacts(n_streams, 1 << 20, {}, ("a",), [StageCost(curve, curve, 512)])
        config = ConductorConfig(ScheduleConfig(draft=0), ("stage-0",), n_vocab, share=False)
        self.conductor = Conductor(config, tokenizer.is_end, itertools.count(1), 0)
        self.observer, self.readers = Observer(), Readers(tokenizer)
        self._pool, self._sequence = BufferPool(DTYPE_TOKENS, 1), itertools.count(1)
        self._writer, self._reader = ReturnWriter(), ReturnReader("the stage")
        self._tokens = [token for token in range(n_vocab) if tokenizer.piece(token).isalpha()][:64]
        self.now_ns = 0
        self.sent: list[Frame] = []
        self.conductor.begin_epoch()
        self._carry(self.conductor.connected(facts, 0))
        for index in range(n_streams):
            self._open(index)
        while self.conductor.scheduler.n_decoding < n_streams:
            self.take(self.answer())
        self._does = {name: PARTS.index(name) <= PARTS.index(part) for name in PARTS}

    def _open(self, index: int) -> None:
        prompt = (*range(N_PROMPT), self._tokens[index % len(self._tokens)])
        sampling = SamplingParams(temperature=0.0)
        request = GenerationRequest(f"r{index}", prompt, 1 << 19, sampling, ignore_eos=True, cache_prompt=False)
        opened, instructions = self.conductor.open(request, self.now_ns)
        self.observer.admitted(SessionRecord(), opened.session_id, request, self.now_ns)
        self.readers.open(opened.session_id)
        self._carry(instructions)

    def answer(self) -> bytes:
        """Return the stage's answer to all frames that have left since the last one."""
        message, (frames, self.sent) = pb.ReturnResponse(epoch=EPOCH), (self.sent, [])
        for frame in frames:
            if frame.tokens:
                position = frame.position + len(frame.tokens)
                token = self._tokens[(position + frame.session_id) % len(self._tokens)]
                message.samples.add(session_id=frame.session_id, position=position, token=token)
        (data,) = self._writer.write(message)
        self._frames = frames
        return data

    def take(self, data: bytes) -> int:
        """Take an answer; returns its tokens. This is what is measured."""
        message = self._reader.read(data)
        if self._does["decided"]:
            self._carry(self.conductor.returned(message, self.now_ns))
        else:
            self.sent = [frame._replace(position=frame.position + 1) for frame in self._frames]
        return len(message.samples)

    def _carry(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction.frames)
            elif isinstance(instruction, Dispatch):
                self._carry(self.conductor.dispatch(self.now_ns))
            elif isinstance(instruction, Generated) and self._does["observed"]:
                record, position = self.observer.record_of(instruction.session_id), instruction.position
                reason, is_drafted = instruction.finish_reason, instruction.is_drafted
                self.observer.token(record, position, reason, self.now_ns, is_drafted=is_drafted)
            elif isinstance(instruction, Tell) and isinstance(instruction.event, TokenEvent) and self._does["written"]:
                self.readers.tell(instruction.session_id, instruction.event)

    def _send(self, frames: Sequence[Frame]) -> None:
        self.sent += frames
        if self._does["observed"]:
            self.observer.sent(frames, self.now_ns)
        for part in within_bounds(frames) if self._does["encoded"] else ():
            buffer = self._pool.lease(len(part), sum([len(frame.tokens) for frame in part]))
            context, record_of = bytes(25), self.observer.record_of
            write_tokens(buffer, part, EPOCH, next(self._sequence), context, record_of, self.now_ns)
            self._pool.give_back(buffer)


def token_us(loop: Loop, n_steps: int, clock: Callable[[], int] = time.process_time_ns) -> float:
    """Return the processor time of a token: of the best WINDOW_STEPS steps in a row, since other work only adds."""
    windows = list[float]()
    for _ in range(WARM_STEPS):
        loop.take(loop.answer())
    for _ in range(max(1, n_steps // WINDOW_STEPS)):
        n_tokens = taken_ns = 0
        for _ in range(WINDOW_STEPS):
            data = loop.answer()
            loop.now_ns += 14_000_000
            began_ns = clock()
            n_tokens += loop.take(data)
            taken_ns += clock() - began_ns
        windows.append(taken_ns / 1e3 / max(1, n_tokens))
    return min(windows)


def calls(loop: Loop, n_steps: int) -> float:
    """Return the calls of Python functions of a step."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    for _ in range(n_steps):
        data = loop.answer()
        loop.now_ns += 14_000_000
        sys.setprofile(count)
        try:
            loop.take(data)
        finally:
            sys.setprofile(None)
    return counted / n_steps


def stand(loop: Loop) -> None:
    """Take the loop to where it is after some seconds: the overhead of a round trip has been measured."""
    scheduler = loop.conductor.scheduler
    for window in range(WINDOWS_KEPT + 1):
        scheduler.refresh(scheduler.planner.stages, [Held(window * 1_000, window * 3_000_000_000)])
        for _ in range(ROUND_TRIPS_MIN):
            loop.now_ns += 14_000_000
            loop.take(loop.answer())


def measure(streams: Sequence[int], n_steps: int, n_rounds: int) -> dict[str, Any]:
    """Return the measurement in the form of benches/results, but for machine, date and commit."""
    directory = split_for(DEMO_MODEL, 1, None, None)
    file = load_pipeline(directory)
    tokenizer = Tokenizer.load(directory / file.tokenizer.file)
    rows = []
    for part in PARTS:
        values = [
            min(token_us(Loop(n_streams, part, tokenizer, file.n_vocab), n_steps) for _ in range(n_rounds))
            for n_streams in streams
        ]
        rows.append({"id": part, "label": LABELS[part], "values": [round(value, 1) for value in values]})
    for part in PARTS:
        values = []
        for n_streams in streams:
            loop = Loop(n_streams, part, tokenizer, file.n_vocab)
            stand(loop)
            values.append(round(calls(loop, WINDOW_STEPS)))
        rows.append({"id": f"{part}_calls", "label": f"Python calls a step: {LABELS[part]}", "values": values})
    return {
        "corner": "us of processor time a token, without sockets; streams",
        "columns": [str(n_streams) for n_streams in streams],
        "rows": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the results if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.coordinator_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few streams and steps: checks the bench itself")
    parser.add_argument("--streams", type=numbers, default=(), help="such as 1,8,64")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the measurement to this file")
    parser.add_argument("--machine", default="busy", help="its name in benches/results/machines.json")
    options = parser.parse_args(argv)
    streams = options.streams or (STREAMS_QUICK if options.quick else STREAMS)
    found = measure(streams, *((STEPS_QUICK, ROUNDS_QUICK) if options.quick else (STEPS, ROUNDS)))
    table = Table(str(found["corner"]), *found["columns"])
    for row in found["rows"]:
        table.add_row(row["label"], *map(str, row["values"]))
    Console().print(table)
    if options.out:
        head = origin("benches.coordinator_parts", options.machine)
        options.out.write_text(json.dumps(head | found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
