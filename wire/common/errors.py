"""Every error relayline raises on purpose: one root, leaves that answer two questions, one status table.

The questions are *whose fault is it* (`fault`) and *may the same thing be tried again* (`retryable`). `label` is the
stable short name that travels on the wire, in metrics and in HTTP bodies; it never changes once released.

House rules for this file:
* A leaf exists only if some code or person acts differently on it. The text carries the detail.
* `STATUS` alone maps these errors to gRPC and HTTP. What the web server refuses by itself, such as a body that is too
  large, is no error of this file: it has its status where it is found (`coordinator.http.edge.errors.HttpRefusal`).
* Messages are one line: what is wrong, then what to do.
"""

from __future__ import annotations

import copy
import enum
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    import grpc


class Fault(enum.Enum):
    """The party that must change something before the operation can succeed."""

    CLIENT = "client"  # the caller of the HTTP API
    OPERATOR = "operator"  # the person who typed the command, wrote the manifest or made the file
    PEER = "peer"  # the process on the other end of a link
    SERVER = "server"  # this process


class RelaylineError(Exception):
    """Root of all deliberate errors. Not raised itself."""

    label: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = Fault.SERVER
    retryable: ClassVar[bool] = False
    retry_after_s: int | None = None
    """In how many seconds it is worth trying again, where that is known."""
    stage_index: int | None = None
    """Of the stage whose connection brought the error to the coordinator, where one did."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        """`retry_after_s`: as the attribute; None leaves what the leaf says."""
        if type(self) is RelaylineError:
            raise TypeError("raise a leaf of RelaylineError, not the root")
        super().__init__(message)
        self.message = message
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


# --- the operator's input ---------------------------------------------------------------------------------------------


class UsageError(RelaylineError):
    """A flag, a combination of flags or a configuration value that cannot be used. Exit code 2."""

    label, fault = "usage", Fault.OPERATOR


class CutError(UsageError):
    """Cuts that this model does not allow: out of range, out of order, or not on the family's period."""

    label = "bad_cut"


class ModelFileError(RelaylineError):
    """A model file that cannot be read as GGUF: wrong magic, truncated, a shard missing."""

    label, fault = "bad_model_file", Fault.OPERATOR


class UnsupportedArchitectureError(RelaylineError):
    """A readable model of a family that has not been certified for splitting."""

    label, fault = "unsupported_architecture", Fault.OPERATOR


class ArtifactError(RelaylineError):
    """A stage artifact or pipeline.json that is missing, altered or does not fit its neighbours."""

    label, fault = "bad_artifact", Fault.OPERATOR


class StartError(RelaylineError):
    """A process that cannot start: port taken, stage unreachable, child died before it was ready."""

    label, fault = "cannot_start", Fault.OPERATOR


# --- the HTTP client's request ----------------------------------------------------------------------------------------


class InvalidRequestError(RelaylineError):
    """A request that can never succeed as sent. `param` names the offending field, if one does."""

    label, fault = "invalid_request", Fault.CLIENT

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of_field(cls, param: str, problem: str) -> Self:
        """Return the error of a field: its name stands before the problem."""
        return cls(f"{param}: {problem}", param)


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens do not fit the tokens that one stream may hold.

    The messages are OpenAI's, word for word: LangChain, LiteLLM, Continue and others look for them before they fall
    back to a longer context or cut their history.
    """

    label = "context_length_exceeded"

    @classmethod
    def of_request(cls, ctx_tokens: int, n_prompt: int, n_completion: int, param: str | None = None) -> Self:
        """Return the error of a prompt that leaves too little room for the completion, all in tokens."""
        return cls(
            f"This model's maximum context length is {ctx_tokens} tokens. However, you requested "
            f"{n_prompt + n_completion} tokens ({n_prompt} in the {param or 'prompt'}, {n_completion} in the "
            f"completion). Please reduce the length of the {param or 'prompt'} or completion.",
            param,
        )

    @classmethod
    def of_prompt(cls, ctx_tokens: int, size: str, param: str) -> Self:
        """Return the error of a prompt that alone is too long; `size` gives its length with a unit."""
        return cls(
            f"This model's maximum context length is {ctx_tokens} tokens. However, your {param} resulted in {size}. "
            f"Please reduce the length of the {param}.",
            param,
        )


class ModelNotFoundError(InvalidRequestError):
    """The request names a model that this pipeline does not serve."""

    label = "model_not_found"


class ResponseNotFoundError(InvalidRequestError):
    """The request names a stored response that is not here, or not any more."""

    label = "response_not_found"


class ConversationNotFoundError(InvalidRequestError):
    """The request names a conversation that is not here, or not any more, or an item that it does not have."""

    label = "conversation_not_found"


class ConversationLockedError(InvalidRequestError):
    """The request would change a conversation that a response goes on with now. It may be sent again after that one.

    The code and the status are OpenAI's: its Agents SDK looks for both before it tries again.
    """

    label = "conversation_locked"


class FileNotStoredError(InvalidRequestError):
    """The request names a file or a batch that is not here, or is another key's."""

    label = "file_not_found"


class NotServedError(RelaylineError):
    """The request asks for something that this model, or its stages, cannot give."""

    label, fault = "not_implemented", Fault.OPERATOR


class OverloadedError(RelaylineError):
    """All lanes and queue places are taken now. `retry_after_s` says when to come back (whole seconds)."""

    label, fault, retryable = "overloaded", Fault.SERVER, True
    retry_after_s = 1


class RateLimitError(RelaylineError):
    """The API key's bound of tokens per minute is used up. `retry_after_s` says when to come back (whole seconds)."""

    label, fault, retryable = "rate_limited", Fault.CLIENT, True
    retry_after_s = 1


class NotReadyError(RelaylineError):
    """The pipeline is still loading, or draining."""

    label, fault, retryable = "not_ready", Fault.SERVER, True


# --- links and stages -------------------------------------------------------------------------------------------------


class ProtocolError(RelaylineError):
    """Bytes or a message order that the wire contract forbids. Nothing was changed by them."""

    label, fault = "protocol", Fault.PEER


class ChecksumError(ProtocolError):
    """A frame whose payload does not match its checksum."""

    label, retryable = "checksum", True


class HandshakeError(RelaylineError):
    """Two ends that do not belong together: version, model, layer range, width or dtype differ."""

    label, fault = "handshake", Fault.OPERATOR


class VersionError(HandshakeError):
    """A stage of another protocol than its coordinator's. It waits: the older one may be upgraded just now."""

    label, retryable = "other_version", True


class UnauthenticatedError(RelaylineError):
    """A peer that is refused, or refuses us: certificate, name, join token, or TLS on one side only."""

    label, fault = "unauthenticated", Fault.OPERATOR


class PlaceTakenError(RelaylineError):
    """A stage that wants a place which another process holds. Worth a few tries: that one may be on its way out."""

    label, fault, retryable = "place_taken", Fault.OPERATOR, True


class StaleEpochError(RelaylineError):
    """A frame of an epoch that this stage has left behind."""

    label, fault = "stale_epoch", Fault.PEER


class PositionGapError(RelaylineError):
    """A frame that starts above the lane's next position. Nothing changed; replay from that position."""

    label, fault, retryable = "position_gap", Fault.PEER, True


class SessionError(RelaylineError):
    """A frame for a session that is not open here, or an open for one that already is."""

    label, fault = "bad_session", Fault.PEER


class LaneLimitError(RelaylineError):
    """No free lane, or no KV cells left for this session."""

    label, retryable = "no_lane", True


class NumericError(RelaylineError):
    """A native decode that produced NaN or infinity for this session."""

    label = "not_finite"


class NativeError(RelaylineError):
    """llama.cpp refused to load or to decode. The message carries its own last log lines."""

    label = "native"


class StageLostError(RelaylineError):
    """A stage or a link to it went away while a session was running."""

    label, fault, retryable = "stage_lost", Fault.SERVER, True


class RequestCancelledError(RelaylineError):
    """A request that somebody who looks after the pipeline has ended. It is not retried by itself."""

    label, fault = "request_cancelled", Fault.OPERATOR


class InternalError(RelaylineError):
    """A broken invariant of ours. The text is for the bug report."""

    label = "internal"


# label -> (name of the gRPC status on a link, HTTP status at the coordinator's API).
STATUS: dict[str, tuple[str, int]] = {
    UsageError.label: ("INVALID_ARGUMENT", 400),
    CutError.label: ("INVALID_ARGUMENT", 400),
    ModelFileError.label: ("FAILED_PRECONDITION", 500),
    UnsupportedArchitectureError.label: ("FAILED_PRECONDITION", 500),
    ArtifactError.label: ("FAILED_PRECONDITION", 500),
    StartError.label: ("FAILED_PRECONDITION", 500),
    InvalidRequestError.label: ("INVALID_ARGUMENT", 400),
    ContextLengthError.label: ("INVALID_ARGUMENT", 400),
    ModelNotFoundError.label: ("NOT_FOUND", 404),
    ResponseNotFoundError.label: ("NOT_FOUND", 404),
    ConversationNotFoundError.label: ("NOT_FOUND", 404),
    ConversationLockedError.label: ("ABORTED", 400),
    FileNotStoredError.label: ("NOT_FOUND", 404),
    NotServedError.label: ("UNIMPLEMENTED", 501),
    OverloadedError.label: ("RESOURCE_EXHAUSTED", 429),
    RateLimitError.label: ("RESOURCE_EXHAUSTED", 429),
    NotReadyError.label: ("UNAVAILABLE", 503),
    ProtocolError.label: ("INVALID_ARGUMENT", 502),
    ChecksumError.label: ("DATA_LOSS", 502),
    HandshakeError.label: ("FAILED_PRECONDITION", 503),
    VersionError.label: ("FAILED_PRECONDITION", 503),
    UnauthenticatedError.label: ("UNAUTHENTICATED", 503),
    PlaceTakenError.label: ("ALREADY_EXISTS", 503),
    StaleEpochError.label: ("ABORTED", 503),
    PositionGapError.label: ("FAILED_PRECONDITION", 503),
    SessionError.label: ("FAILED_PRECONDITION", 500),
    LaneLimitError.label: ("RESOURCE_EXHAUSTED", 429),
    NumericError.label: ("INTERNAL", 500),
    NativeError.label: ("INTERNAL", 500),
    StageLostError.label: ("UNAVAILABLE", 503),
    RequestCancelledError.label: ("CANCELLED", 499),
    InternalError.label: ("INTERNAL", 500),
}


def leaves(root: type[RelaylineError] = RelaylineError) -> dict[str, type[RelaylineError]]:
    """Return every leaf by its label, so that a label from the wire becomes a typed error again."""
    found: dict[str, type[RelaylineError]] = {}
    for child in root.__subclasses__():
        found.setdefault(child.label, child)
        for label, leaf in leaves(child).items():
            found.setdefault(label, leaf)
    return found


def from_wire(label: str, message: str) -> RelaylineError:
    """Rebuild a typed error from its wire form. An unknown label (a newer peer) becomes InternalError."""
    leaf = leaves().get(label, InternalError)
    return leaf(message)


def again(error: RelaylineError) -> RelaylineError:
    """Return a copy of an error that is kept, for raising: it would keep all that it passed on its way alive."""
    return copy.copy(error)


def grpc_status(error: RelaylineError) -> grpc.StatusCode:
    """Return the gRPC status that carries this error on a link."""
    import grpc  # takes longer to load than the rest of `relayline --version`, which needs errors and no gRPC

    return grpc.StatusCode[STATUS[error.label][0]]


def http_status(error: RelaylineError) -> int:
    """Return the HTTP status that carries this error to an API client."""
    return STATUS[error.label][1]
