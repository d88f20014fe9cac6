"""Every bound of the wire in one place, with its reason. Relations between bounds are asserted below.

A bound that a user may lower is a configuration field whose default and ceiling come from here.
"""

from __future__ import annotations

PROTOCOL_VERSION = 7  # raised on any incompatible change of the contract; checked in every handshake
CALLS_PER_CONNECTION_MAX = 128  # running calls; further calls of a caller wait at its end. Links have a few each
HEALTH_CALLS_MAX = 128  # of a port, running calls: any peer that gets through the handshake may ask for its health

N_EMBD_MAX = 65_536  # values of the widest rows accepted; Kimi K3 hands on up to 64,512
ROWS_PER_ENVELOPE_MAX = 2_048  # rows of one native step, hence of one envelope; also the ceiling of --max-rows
ROWS_PER_FRAME_MAX = ROWS_PER_ENVELOPE_MAX  # a single prefill chunk may fill a step
FRAMES_PER_ENVELOPE_MAX = 4_096  # every session of a full pipeline, plus one control frame for each
SESSIONS_PER_LINK_MAX = 2_048  # sessions one route may have open on a stage; the ceiling of --lanes
PENALTY_MAX = 2.0  # of frequency and presence, either way; as the OpenAI API has it
BIAS_MAX = 100.0  # of a token's logit, either way; as the OpenAI API has it
PENALTY_TOKENS_MAX = 1_024  # latest tokens of a stream that its penalties look at
SAMPLER_TOKENS_MAX = 1_024  # tokens of each list that a session is sampled by: allowed, held back, of all bad words
THOUGHT_MARK_TOKENS_MAX = 31  # of each of the two marks around thoughts; the longest has 30 bytes
LAST_WORDS_BYTES_MAX = 192  # UTF-8 of what is said where thoughts are too long, before the mark of their end
LAST_WORDS_TOKENS_MAX = LAST_WORDS_BYTES_MAX + 1  # a token has a byte at least; some vocabularies put a blank before
DRY_BREAKERS_MAX = 14_336  # tokens that break a repetition, of one session; they travel as steps of one or two bytes
LOGIT_BIAS_MAX = 300  # tokens of one logit_bias; the OpenAI API's ceiling
GRAMMAR_BYTES_MAX = 64 * 1024  # UTF-8 of one session's grammar; most have one KiB
# Ways in which a grammar may be understood at once. The worst grammars cost their cube for a token: 300 some 12 ms. An
# object of 64 properties that may all be left out needs as many.
GRAMMAR_ITEMS_MAX = 300
GRAMMAR_STEP_ITEMS_MAX = 5_000  # of the same for all tokens that may come next: under 10 ms. Honest grammars have 1,000
# Of a grammar that is one regular expression: then each way costs the same, and vocabularies of 256,000 tokens have as
# many tokens behind which it may be complete. 30,000 take 6 ms.
GRAMMAR_EXPRESSION_ITEMS_MAX = 60_000
GRAMMAR_LEXER_FUEL_MAX = 50_000  # llguidance's measure of work on regular expressions, for one token: under 20 ms
GRAMMAR_TOKENS_MAX = 32_768  # tokens that a session with a grammar may generate: each of its opens carries them all
PLAIN_OPTIONS_BYTES_MAX = 7_168  # serialized SessionOptions of one open frame, of a session without a grammar
OPTIONS_BYTES_MAX = 256 * 1024  # of any session
TOLD_TOKENS_MAX = 32_768  # of a prompt, for prediction layers: fewer where the other options leave less room
OPTIONS_PER_ENVELOPE_BYTES_MAX = 2 * 1024 * 1024  # of all open frames of one envelope; further ones follow in another
CTX_TOKENS_MAX = 1 << 20  # tokens per stream
STORED_STATES_MAX = 1_024  # in a stage's tier; an answer to Describe names them all, in 20 bytes each
STORED_TOKENS_MAX = 8 << 20  # of all stored prefixes together whose tokens a coordinator remembers, in 4 bytes each
NOTE_BYTES_MAX = (
    4_096  # what a coordinator notes about one stored prefix: a mark of 12 bytes for every 128 of 32,768 tokens
)
NOTES_BYTES_MAX = (
    1024 * 1024
)  # of all that a stage keeps; the oldest go first. One answer holds them all, and their keys
STORED_WRITES_MAX = 4  # states on their way to a disk; one more is kept in memory alone
STORED_READS_MAX = 4  # states that were read from a disk and wait for their sessions
GRANT_STEPS_MAX = 256  # steps for which stages continue a stream by themselves; ceiling of --grant-steps
DRAFT_TOKENS_MAX = 31  # tokens drafted behind one row; with it they are half a tile of attention; ceiling of --draft
DRAFT_AHEAD_MAX = 16  # guesses of a draft model behind a stream's known tokens
DRAFT_SEQUENCES_MAX = 32  # streams that a draft model holds cells of, ended ones included
DRAFT_STREAMS_MAX = 16  # that it drafts for at once: a decision for so many takes 0.2 ms of the event loop
DRAFT_FRAME_BYTES_MAX = 16 * 1024 * 1024  # one frame to or from its process
DRAFT_BACKLOG_BYTES_MAX = 64 * 1024 * 1024  # what may wait for it to read
DRAFT_START_S = 600.0  # for the process to load the model
DRAFT_RESTARTS_MAX = 5  # of the process in a row without a guess between; then there are no guesses of it any more
DRAFT_RESTART_PAUSE_S = 2.0
DRAFTED_ROWS_MAX = 32  # rows that drafts may add to one envelope: the last stage has room for their logits
SCORED_ROWS_MAX = DRAFTED_ROWS_MAX  # rows of one frame of a prompt whose own tokens are scored, each by its logits

# An envelope holds at most the payload of a full step in the exact (f32) dtype, plus headers and options.
HEADERS_BYTES_MAX = 3 * 1024 * 1024
ENVELOPE_BYTES_MAX = ROWS_PER_ENVELOPE_MAX * N_EMBD_MAX * 4 + HEADERS_BYTES_MAX
# For one message of any call. gRPC's Python binding holds a message up to three times before it delivers it, so this
# bounds the memory that a peer can claim before a check. A larger envelope travels in parts, see wire.envelopes.parts.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
PART_BYTES_MAX = MESSAGE_BYTES_MAX // 2  # of an envelope's data in one message
# For messages that the protobuf library reads, see wire.envelopes.messages:
MESSAGE_COST_BYTES_MAX = (
    5 * 1024 * 1024
)  # memory that reading one may take beyond its own size; what takes more is refused. All batches of a stage: 4.6 MiB
MESSAGE_FIELDS_MAX = 1 << 21  # fields of one message; checking so many takes about 10 ms
UNARY_BYTES_MAX = 64 * 1024  # of a request, an answer, a handshake, a report; but for these, which are longer:
ORDER_BYTES_MAX = 4 * 1024 * 1024  # a stage's order holds pipeline.json, some hundred bytes for each layer and tensor
STATUS_BYTES_MAX = 512 * 1024  # an answer with recent waits and step intervals holds ten thousand of up to ten bytes
NOTES_ANSWER_BYTES_MAX = NOTES_BYTES_MAX + 20 * STORED_STATES_MAX
BATCHES_BYTES_MAX = 4 * 1024 * 1024  # an answer with all batches that a stage remembers
HAND_OVER_PART_BYTES = 1024 * 1024  # of a lane's cells in one message, as layers change hands
# For lanes to change hands; between them as long as reading them again takes. New requests wait until then, and are
# refused after --lost-wait, 15 s by default.
HAND_OVER_S_MIN, HAND_OVER_S_MAX = 2.0, 10.0
HAND_OVERS_MAX = 256  # stages that one stage gives lanes to, or takes them from, in one change
FETCH_CHUNK_BYTES_MAX = 1024 * 1024  # a piece of an artifact with its surrounding message
RETURN_BYTES_MAX = 4 * 1024 * 1024  # of one message to the coordinator; a sample with all logits of 1e6 tokens fits
RETURN_SPLIT_BYTES = RETURN_BYTES_MAX // 2  # a step that has more to say says it in several messages
BYTES_IN_FLIGHT_DEFAULT = 64 * 1024 * 1024  # credit window of one link: payload sent but not yet decoded
# A receiver returns credit when it owes this part of the window: rarely enough that steady decode needs hardly any
# replies. A sender lets any envelope go while less than this part is in flight, since that much may never come back.
CREDIT_HELD_DIVISOR = 4
ERROR_TEXT_BYTES_MAX = 2_000  # longer native messages are cut; percent-encoded it still fits gRPC's 8 KiB of metadata
PEER_TEXT_CHARS_MAX = ERROR_TEXT_BYTES_MAX  # of what another process says, in a log, an answer or on a terminal
PEER_NAME_CHARS_MAX = 128  # of a name that it says: of a stage, a host, a version, an instance
LOG_LINES_KEPT = 200  # of a process's log, for those who ask for them from elsewhere
LOG_LINE_CHARS_MAX = 500
LOGS_BYTES_MAX = LOG_LINES_KEPT * (4 * LOG_LINE_CHARS_MAX + 64)  # of an answer with them
LOG_VALUE_CHARS_MAX = 4_000  # of one line's text and of each of its fields, from any source
STORED_RESPONSES_MAX = 1_024  # of /v1/responses, kept for clients that continue them
STORED_RESPONSES_BYTES_MAX = 64 * 1024 * 1024  # of all of them
CONVERSATIONS_MAX = 1_024  # of /v1/conversations
CONVERSATIONS_BYTES_MAX = 64 * 1024 * 1024  # of all of them
CONVERSATION_BYTES_MAX = 16 * 1024 * 1024  # of one that takes more items: as long as a body with all of them may be
CONVERSATION_ITEMS_MAX = 16_384  # of one that takes more, like a chat's messages
BACKGROUND_RESPONSES_MAX = 128  # of /v1/responses that wait or run without a connection
BACKGROUND_RESPONSES_PER_KEY_MAX = BACKGROUND_RESPONSES_MAX // 2  # of one API key
UNFINISHED_RESPONSES_BYTES_MAX = 256 * 1024 * 1024  # of requests for these, where they are kept on the disk
# Of their answers there, all together. With all else of that directory it fits the 1 GiB of a rendered volume.
UNFINISHED_ANSWERS_BYTES_MAX = 512 * 1024 * 1024
RECORDED_EVENTS_BYTES_MAX = 2 * 1024 * 1024  # of one of these, the latest; about 8,000 tokens, or 1,000 with logprobs
UNREAD_EVENTS_BYTES_MAX = 4 * 1024 * 1024  # of one, while a client that reads them has not got them yet
LOGPROBS_MAX = 20  # the OpenAI API's ceiling for top_logprobs

HANDSHAKE_TIMEOUT_S = 10.0  # both ends are up when a handshake starts, so this covers a slow link only
DRAIN_TIMEOUT_S = 30.0  # running requests may finish for this long after SIGTERM
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 10_000  # until the peer's kernel acknowledges sent data
# For the peer itself to answer a ping. Pings queue behind data, so a short time here would cut slow, busy links. It is
# for links without `Watch`, which notices sooner.
PING_TIMEOUT_MS = 60_000
BEAT_EVERY_S = 1.0  # between heartbeats of one end of a link
QUIET_AFTER_S = 5.0  # of silence before a host is reported as not answering
LOST_AFTER_S = 9.0  # of silence, after which a peer is taken for lost; with what follows from it, within 12 s

# Of the relay, see wire.links.carrying and coordinator.relay:
RELAYED_STAGES_MAX = 256  # as many as a pipeline has members
RELAYED_CONNECTIONS_MAX = 128  # to one relayed stage; its neighbours have about ten, and two for each hand-over
RELAYED_PER_ADDRESS_MAX = 32  # of these from one address beyond this machine
RELAYED_UNANSWERED_MAX = 32  # of these that the stage has sent nothing on: strangers, and handshakes that begin
RELAY_DOOR_KEPT_S = 120.0  # that a stage without a tunnel keeps its port, where another stage needs the room
RELAY_PIECE_BYTES = 128 * 1024  # read from a connection at once, and carried in one message
# Of one connection, each way, at each end: read and not carried yet. gRPC's own windows come on top.
RELAY_BUFFER_BYTES = 2 * RELAY_PIECE_BYTES
RELAY_WINDOW_BYTES = 4 * 1024 * 1024  # of one connection, that gRPC takes while its reader is slow
RELAY_PICK_UP_S = 10.0  # for a stage to dial out for a connection that has come
RELAY_START_S = 8.0  # for the relay's process to listen; less than stages wait for the order, HANDSHAKE_TIMEOUT_S

# Of images and audio in chats, see coordinator.media:
MEDIA_PER_REQUEST_MAX = 16
MEDIA_BYTES_MAX = 11 * 1024 * 1024  # of one as a file; in base64 it fits a body
MEDIA_ADDRESS_CHARS_MAX = 8 * 1024  # of an address in place of one
MEDIA_FETCH_S = 15.0  # for one that its client named by an address
MEDIA_FETCHED_BYTES_MAX = 32 * 1024 * 1024  # of all such files of a request
MEDIA_FETCHING_MAX = 8  # requests whose files are fetched, or wait to be encoded; others wait for them
MEDIA_REDIRECTS_MAX = 4
IMAGE_PIXELS_MAX = 40_000_000  # of one as its header says, before anything is unpacked
AUDIO_SECONDS_MAX = 1_800  # of one as its header says, and again once it is unpacked
AUDIO_UNPACKED_BYTES_MAX = 1024 * 1024 * 1024  # more memory than this is not there for unpacking one
VIDEO_FETCHED_BYTES_MAX = MEDIA_FETCHED_BYTES_MAX  # of one video that its client named by an address
VIDEO_PIXELS_MAX = 9_000_000  # of one picture of a video
VIDEO_SECONDS_MAX = 1_800
VIDEO_FRAMES_READ_MAX = 120_000  # pictures that are unpacked to choose from; 30 minutes of 60 a second have fewer
VIDEO_FRAMES_MAX = 1_024  # pictures of one video that a model may look at, whatever the setting
VIDEO_FRAMES_BYTES_MAX = 512 * 1024 * 1024  # of these, unpacked; of large ones, fewer are looked at
VIDEO_UNPACKED_BYTES_MAX = 2 * 1024 * 1024 * 1024  # more memory than this is not there for unpacking one
VIDEO_READ_S = 120.0  # for unpacking one
VIDEO_ENCODE_S = 1_200.0  # of one video, unpacked before
ENCODER_START_S = 600.0  # for the process that encodes to load a projector
IMAGE_ENCODE_S = 300.0  # of one image
AUDIO_ENCODE_S = 1_200.0  # of one audio file
MEDIA_ROWS_KEPT_BYTES = 256 * 1024 * 1024  # of encoded media, kept for chats that send them again with each turn
MEDIA_ROWS_BYTES_MAX = 1024 * 1024 * 1024  # of these, and those of all requests that wait or run

# Of enrolment, see wire.links.enrolment:
INVITATION_S = 24 * 3600  # how long the token of a join line is good: a day, so that a host may be set up tomorrow
ENROL_BYTES_MAX = 16 * 1024  # of a request and of an answer: a certificate request, or two certificates
ENROL_WRONG_MAX = 8  # wrong tokens from one address within ENROL_WRONG_S; later ones are not examined
ENROL_WRONG_S = 60.0
ENROL_ADDRESSES_MAX = (
    1_024  # addresses with wrong tokens that are remembered; the one longest silent is forgotten first
)
ENROL_CONNECTIONS_MAX = 64  # at once; a host needs one, for less than a second
ENROL_ANSWER_S = 10.0  # for an answer to a host that enrols
JOIN_CODE_S = 30 * 60  # how long the short code of a join line is good: to walk to the other machine and type it
JOIN_CODE_WRONG_MAX = 5  # wrong tries, then the code is void; each has a chance of one in a million
JOIN_CODE_EXCHANGES_MAX = 32  # that have begun and not ended; the oldest is forgotten first
JOIN_CODE_EXCHANGE_S = 30.0  # from the first call of an exchange to its second
JOIN_CODE_BEGUN_MAX = 60  # exchanges within JOIN_CODE_BEGUN_S, since each takes 8 ms of a core
JOIN_CODE_BEGUN_S = 60.0
NEARBY_MAX = 64  # pipelines that a search of the local network returns
NEARBY_ADDRESSES_MAX = 4  # of one pipeline, said and taken: a host asks one after the other
NEARBY_SEARCH_S = 10.0  # for all pipelines together to say whether they have a code; addresses of one share it
NEARBY_TEXT_BYTES_MAX = 120  # of a name in an announcement
NEARBY_CLOSE_S = 5.0  # for an announcement to be taken back
CLOCK_SKEW_MAX_S = 1_800.0  # between a host's clock and the coordinator's; certificates are dated back by an hour

assert ROWS_PER_FRAME_MAX <= ROWS_PER_ENVELOPE_MAX
assert BYTES_IN_FLIGHT_DEFAULT <= ENVELOPE_BYTES_MAX
assert ENVELOPE_BYTES_MAX < 2**31  # protobuf counts the bytes of a message in 32 bits, signed
assert HEADERS_BYTES_MAX + 4 * ROWS_PER_ENVELOPE_MAX <= MESSAGE_BYTES_MAX  # token rows never travel in parts
assert FRAMES_PER_ENVELOPE_MAX >= 2 * SESSIONS_PER_LINK_MAX
# 256 bytes cover a frame record, the envelope's header, row exponents and draft tokens, spread over the frames.
assert HEADERS_BYTES_MAX >= FRAMES_PER_ENVELOPE_MAX * 256 + OPTIONS_PER_ENVELOPE_BYTES_MAX
# A token of a vocabulary of up to 2^28 takes four bytes, a bias four more.
assert PLAIN_OPTIONS_BYTES_MAX >= 4 * PENALTY_TOKENS_MAX + 8 * LOGIT_BIAS_MAX + 512
assert OPTIONS_BYTES_MAX >= PLAIN_OPTIONS_BYTES_MAX + 4 * TOLD_TOKENS_MAX
# The end of the prompt, and three lists of tokens; of bad words each is a message.
LISTS_BYTES_MAX = 4 * PENALTY_TOKENS_MAX + 3 * 4 * SAMPLER_TOKENS_MAX + 4 * SAMPLER_TOKENS_MAX
# Breakers that stand closer than 128 apart take one byte; of a vocabulary of 2^20 few more than 8,192 do not.
LISTS_BYTES_MAX += 8 * SAMPLER_TOKENS_MAX + 2 * DRY_BREAKERS_MAX
LISTS_BYTES_MAX += 4 * (2 * THOUGHT_MARK_TOKENS_MAX + LAST_WORDS_TOKENS_MAX)
assert OPTIONS_BYTES_MAX >= PLAIN_OPTIONS_BYTES_MAX + 4 * GRAMMAR_TOKENS_MAX + GRAMMAR_BYTES_MAX + LISTS_BYTES_MAX
assert OPTIONS_PER_ENVELOPE_BYTES_MAX >= 8 * OPTIONS_BYTES_MAX  # some sessions always open together
assert 3 * ERROR_TEXT_BYTES_MAX < 8 * 1024
assert 4 * BEAT_EVERY_S <= QUIET_AFTER_S < LOST_AFTER_S <= 12 - 2 * BEAT_EVERY_S
assert (
    max(RETURN_BYTES_MAX, BATCHES_BYTES_MAX, NOTES_ANSWER_BYTES_MAX) <= ORDER_BYTES_MAX <= MESSAGE_BYTES_MAX
)  # which every channel takes
