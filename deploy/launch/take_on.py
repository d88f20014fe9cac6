"""One more stage for a pipeline that runs: a place at the coordinator, credentials, and a process or a line for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayline.deploy.launch.own_tls import JOIN_DIR, make_own_tls, make_stage_tokens, makes_stage_tokens
from relayline.deploy.launch.process_id import send_signal
from relayline.deploy.launch.state import MORE_SIGNAL
from relayline.deploy.manifest import Manifest, Stage
from relayline.wire.common.errors import StartError
from relayline.wire.common.files import write_again

if TYPE_CHECKING:
    from relayline.deploy.launch.control import Launched


def with_more(running: Manifest, stages: Sequence[Stage]) -> Manifest:
    """Return the settled manifest of the running pipeline with these stages added, which hold nothing yet."""
    spec = running.spec.model_copy(update={"spares": (*running.spares, *stages)})
    return running.model_copy(update={"spec": spec}).with_directory(running.directory)


def start_more(launched: Launched, running: Manifest, stages: Sequence[Stage]) -> None:
    """Have the supervisor of a pipeline start these stages of this machine. Raises StartError, UsageError."""
    directory, more = launched.directory, with_more(running, stages)
    if more.uses_tls and str(more.spec.wire.tls.directory).startswith(str(directory.tls)):
        make_own_tls(more, directory.tls)
    if makes_stage_tokens(more):
        make_stage_tokens(more, directory.path / JOIN_DIR)
    text = json.dumps(more.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2)
    write_again(directory.more, text.encode() + b"\n")
    if not send_signal(launched.state.supervisor, MORE_SIGNAL):
        raise StartError(f"the supervisor of {launched.state.name} has ended; `relayline up` starts it again")
