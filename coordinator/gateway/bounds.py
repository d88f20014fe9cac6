"""The bounds of a gateway, with their reasons. Times in seconds."""

from __future__ import annotations

NS = 1_000_000_000  # of a second

BACKENDS_MAX = 64  # pipelines behind one gateway; each is asked for its state every second
MODELS_PER_BACKEND_MAX = 64  # names under which one pipeline serves its model
PREFIXES_PER_BACKEND_MAX = 16_384  # beginnings of conversations that were sent there; 100 bytes each
HELD_MAX = 65_536  # ids of stored responses and of conversations whose pipeline is remembered
CHAIN_MAX = 64  # places of one conversation at which its beginning is known again
CHAIN_FIRST = 8  # of them at the front, where instructions end that many conversations share; the rest at the end
OUTSTANDING_MAX = 448  # requests that a gateway has at one pipeline: that lets 512 connections of one address in
TRIES_MAX = 4  # pipelines that are tried for one request, while its client has not been sent anything
REFUSAL_BYTES_MAX = 64 * 1024  # of an error that is held back while another replica is tried
ANSWER_BYTES_MAX = 4 << 20  # of a pipeline's own description
ID_BYTES_MAX = 4_096  # of the beginning of an answer in which its id is looked for
ID_CHARS_MAX = 200  # of a stored response's or a conversation's id that is looked for
PIECE_BYTES = 64 * 1024  # of an answer, written at once
PARSED_INLINE_BYTES = 64 * 1024  # of a body that is parsed on the event loop: a tenth of a millisecond

POLL_S = 1.0  # between two questions for a pipeline's state
POLL_TIMEOUT_S = 3.0  # for one; a coordinator asks its stages for up to two seconds
CONNECT_TIMEOUT_S = 2.0
LOST_AFTER_S = 10.0  # without an answer: then requests that still run there end
LEAVE_TIMEOUT_S = 600.0  # for the requests of a removed pipeline; then they end
READY_TIMEOUT_S = 60.0  # for a pipeline that says it serves until a request can start there: its stages may be away
READY_POLL_S = 0.1  # between two questions then
LOAD_ANSWER_S = 1.0  # that /models/load waits for a refusal; its client then looks at the model's status
STATUS_EVERY_S = 0.5  # between two looks at the models' status for the clients of /models/sse
RETRY_AFTER_S = 2  # for clients, where no replica lives: the time after which a new one is noticed

# Where not all pipelines may be awake at once:
WAITING_MAX = 256  # requests that wait until their pipeline may wake; each holds its body
WAIT_MAX_S = 300.0  # for that: a large model frees its memory and loads in a minute or two, after its running requests
TURN_S = 10.0  # that a request waits while others keep every awake pipeline busy; then one of those takes no new ones
FALL_MAX_S = 120.0  # for a pipeline that was told to sleep after its running requests
SLEEP_TIMEOUT_S = 30.0  # for its answer to that: its stages have ten seconds to free their memory
SLEEP_AGAIN_S = 5.0  # after one did not fall asleep, until it is told again; doubled each time
SLEEP_AGAIN_MAX_S = 120.0  # for that, and at once where its requests did not end

assert SLEEP_AGAIN_S < SLEEP_AGAIN_MAX_S < WAIT_MAX_S
assert CHAIN_FIRST < CHAIN_MAX
assert POLL_S + POLL_TIMEOUT_S < LOST_AFTER_S
