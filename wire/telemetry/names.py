"""Every name that leaves relayline in a span or a metric: one list, so that boards, docs and tests cannot drift apart.

OpenTelemetry's own names are spelled out here rather than imported: the GenAI conventions are still in development and
their constants in the Python package are marked as moved. Our own names begin with `relayline.`.
"""

from __future__ import annotations

from typing import Final

# --- resources: who speaks --------------------------------------------------------------------------------------------

SERVICE_STEM: Final = "relayline"  # OTEL_SERVICE_NAME says another
SERVICE_COORDINATOR: Final = "coordinator"  # service.name is STEM-coordinator, STEM-stage-0, STEM-stage-1, ...
SERVICE_STAGE: Final = "stage"
RESOURCE_SERVICE_NAME: Final = "service.name"
RESOURCE_SERVICE_NAMESPACE: Final = "service.namespace"  # the pipeline's name
RESOURCE_SERVICE_INSTANCE: Final = "service.instance.id"
RESOURCE_SERVICE_VERSION: Final = "service.version"
RESOURCE_STAGE_NAME: Final = "relayline.stage.name"  # as the manifest names it
RESOURCE_STAGE_LAYERS: Final = "relayline.stage.layers"  # first and last, as in "0-2"
RESOURCE_CLOCK: Final = "relayline.clock"  # whose wall clock spans are stamped with; absent: the host's own
CLOCK_COORDINATOR: Final = "coordinator"
RESOURCE_CLOCK_OFFSET: Final = "relayline.clock.offset_s"  # the offset added to this host's own wall clock
RESOURCE_CLOCK_UNCERTAINTY: Final = "relayline.clock.uncertainty_s"  # the offset is right to within so much
SCOPE: Final = "relayline"  # instrumentation scope of every span

# --- spans ------------------------------------------------------------------------------------------------------------

# The HTTP server span is named by convention: "{method} {route}".
SPAN_TOKENIZE: Final = "tokenize"
SPAN_MEDIA: Final = "media"  # all images and audio of a request, until their rows are in its prompt
SPAN_FETCH: Final = "fetch"  # one file, from the address that the request names
SPAN_COUNT: Final = "count rows"  # of one file, so that a prompt that cannot fit is refused before anything is encoded
SPAN_ENCODE: Final = "encode"  # one file
SPAN_GRAMMAR: Final = "grammar"  # made of the shape or the tools that the answer must fit
SPAN_QUEUE: Final = "queue"  # waiting for a lane
SPAN_PREFILL: Final = "prefill"
SPAN_PREFILL_CHUNK: Final = "prefill chunk"
SPAN_DECODE: Final = "decode"
SPAN_RECOVERY: Final = "recovery"  # from the loss of a stage or link until the session resumes
SPAN_BATCHES: Final = "batches"  # one stage's work on one phase of a request; an event per batch
SPAN_SEND: Final = "send"  # of a pass: from the choice of its rows until its envelope has left for stage 0
SPAN_RETURN: Final = "return"  # of a pass: from the arrival of its tokens until what follows from them has left
# A trace of passes has a root named SPAN_PASSES and a size. A batch or a frame is named by its phase and a size. Jaeger
# shows these names in its rows and in its list of operations, so they are few.
SPAN_PASSES: Final = "passes"
PHASE_DECODE: Final = "decode"
PHASE_PREFILL: Final = "prefill"
PHASE_MIXED: Final = "mixed"
PHASES: Final = (PHASE_DECODE, PHASE_PREFILL, PHASE_MIXED)
_EXACT_TO = 8
_RANGES = ((9, 16), (17, 32), (33, 64))
_SIZES: Final = (
    *(f"×{n}" for n in range(1, _EXACT_TO + 1)),
    *(f"×{low}-{high}" for low, high in _RANGES),
    f"×{_RANGES[-1][1] + 1}+",
)


def size_of(n_streams: int) -> str:
    """Return a number of streams in short form: exact up to 8, then in doublings, such as "×5" and "×9-16"."""
    if n_streams <= _EXACT_TO:
        return _SIZES[max(1, n_streams) - 1]
    return next((f"×{low}-{high}" for low, high in _RANGES if n_streams <= high), _SIZES[-1])


_BY_SIZE: Final = {
    phase: [f"{phase} {size_of(n)}" for n in range(_RANGES[-1][1] + 2)] for phase in (*PHASES, SPAN_PASSES)
}


def sized(phase: str, n_streams: int) -> str:
    """Return the name of a batch, a frame's span or a root of passes: "decode ×5"."""
    named = _BY_SIZE[phase]
    return named[min(n_streams, len(named) - 1)]


BATCH_NAMES: Final = frozenset(f"{phase} {size}" for phase in PHASES for size in _SIZES)
PASSES_NAMES: Final = frozenset(f"{SPAN_PASSES} {size}" for size in _SIZES)

# --- attributes by convention -----------------------------------------------------------------------------------------

HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
CLIENT_ADDRESS: Final = "client.address"
# One value each, not a list as in the conventions: Jaeger cannot search a list by one of its items.
HTTP_REQUEST_ID: Final = "http.request.header.x-request-id"  # the caller's own
HTTP_RESPONSE_ID: Final = "http.response.header.x-request-id"  # from the answer, hence always present
BAGGAGE: Final = "baggage."  # from the caller's W3C baggage, by its keys
ERROR_TYPE: Final = "error.type"
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_PROVIDER: Final = "relayline"  # value of gen_ai.provider.name
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_OUTPUT_TYPE: Final = "gen_ai.output.type"  # "json" where the request asked for JSON, else "text"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"  # where there were any
GEN_AI_USAGE_REASONING_TOKENS: Final = "gen_ai.usage.reasoning.output_tokens"  # where there were any
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # only with telemetry content on
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"  # only with telemetry content on

# --- our attributes: a request ----------------------------------------------------------------------------------------

ATTR_REQUEST_ID: Final = "relayline.request.id"
ATTR_REQUEST_BATCH: Final = "relayline.request.batch_id"  # of /v1/batches, if it is a request of one
ATTR_API_KEY_NAME: Final = "relayline.api_key.name"  # as in the file of keys; never the key
ATTR_SESSION_ID: Final = "relayline.session.id"  # hexadecimal text: 64-bit numbers do not fit every store

# --- our attributes: a batch span -------------------------------------------------------------------------------------

ATTR_BATCH_ID: Final = "relayline.batch.id"  # "<stage_index>:<step>"
ATTR_BATCH_STEP: Final = "relayline.batch.step"  # native steps of this process, from 1
ATTR_BATCH_ROWS: Final = "relayline.batch.rows"
ATTR_BATCH_FRAMES: Final = "relayline.batch.frames"
ATTR_BATCH_SESSIONS: Final = "relayline.batch.sessions"
ATTR_BATCH_PREFILL_ROWS: Final = "relayline.batch.prefill_rows"
ATTR_BATCH_PADDED_ROWS: Final = "relayline.batch.padded_rows"
ATTR_BATCH_PHASE: Final = "relayline.batch.phase"  # decode | prefill | mixed
ATTR_BATCH_CLOSE_REASON: Final = "relayline.batch.close_reason"
ATTR_BATCH_QUEUED_ROWS_BEFORE: Final = "relayline.batch.queued_rows_before"
ATTR_BATCH_QUEUED_ROWS_AFTER: Final = "relayline.batch.queued_rows_after"
ATTR_BATCH_AHEAD: Final = "relayline.batch.ahead"  # the rows were computed before they were asked for
ATTR_BATCH_ADAPTER: Final = "relayline.batch.adapter"  # name of the LoRA adapter that requests chose; none without one
ATTR_BATCH_GRANTED: Final = "relayline.batch.granted"  # rows of streams that stages continue by themselves
ATTR_BATCH_COMPUTED_IN: Final = "relayline.batch.computed_in"  # the step that computed them, where it is another
ATTR_BATCH_PREDICTED_NS: Final = "relayline.batch.predicted_ns"
ATTR_BATCH_DECODE_NS: Final = "relayline.batch.decode_ns"  # the measured cost
ATTR_BATCH_ENCODE_NS: Final = "relayline.batch.encode_ns"  # sampling, on the last stage
ATTR_BATCH_BYTES_OUT: Final = "relayline.batch.bytes_out"
ATTR_BATCH_WAIT_MAX_NS: Final = "relayline.batch.wait_max_ns"
ATTR_BATCH_ERROR: Final = "relayline.batch.error"  # label of the error when the native decode failed
# Per member frame, arrays in the same order: which session, from where, how many rows, how long it waited.
ATTR_MEMBER_SESSIONS: Final = "relayline.batch.member.sessions"
ATTR_MEMBER_POSITIONS: Final = "relayline.batch.member.positions"
ATTR_MEMBER_ROWS: Final = "relayline.batch.member.rows"
ATTR_MEMBER_WAITS_NS: Final = "relayline.batch.member.waits_ns"
ATTR_STAGE_INDEX: Final = "relayline.stage.index"
ATTR_STAGE_NAME: Final = "relayline.stage.name"  # as in the manifest; stage-INDEX where it has no other
ATTR_STAGE_COUNT: Final = "relayline.stage.count"
ATTR_LAYER_START: Final = "relayline.stage.layer_start"
ATTR_LAYER_END: Final = "relayline.stage.layer_end"  # exclusive
ATTR_PIPELINE_ID: Final = "relayline.pipeline.id"
ATTR_POLICY: Final = "relayline.policy.name"
ATTR_POLICY_MAX_ROWS: Final = "relayline.policy.max_rows"
ATTR_POLICY_PREFILL_ROWS: Final = "relayline.policy.prefill_rows"
ATTR_POLICY_LANES_USED: Final = "relayline.policy.lanes_used"
ATTR_POLICY_PAD_TARGET: Final = "relayline.policy.pad_target_rows"

# --- our attributes: links and frames ---------------------------------------------------------------------------------

ATTR_LINK: Final = "relayline.link"  # the meaning of a link, one of:
LINK_MEMBER: Final = "member"  # to the request that a frame of the batch belongs to
LINK_UPSTREAM_BATCH: Final = "upstream_batch"  # to another batch of the stage before, besides the parent
LINK_BATCH: Final = "batch"  # from a frame to its batch; from a request's `batches` to its first in a trace of passes
LINK_PASSES: Final = "passes"  # from a request's phase to the root of a trace of passes that it was in
ATTR_FRAME_POSITION: Final = "relayline.frame.position"  # absolute position of its first row
ATTR_FRAME_ROWS: Final = "relayline.frame.rows"
ATTR_FRAME_PREFILL: Final = "relayline.frame.prefill"
ATTR_FRAME_WAIT_NS: Final = "relayline.frame.wait_ns"  # from arrival at the stage to the start of its step
ATTR_FRAME_UPSTREAM_WAIT_NS: Final = "relayline.frame.upstream_wait_ns"  # between the sender's queue and its departure

# --- our attributes: the decode span of a request ---------------------------------------------------------------------

# Times that people read are in seconds, as the conventions have it.
ATTR_PROMPT_TOKENS: Final = "relayline.prompt_tokens"
ATTR_GENERATED_TOKENS: Final = "relayline.generated_tokens"
ATTR_FINISH_REASON: Final = "relayline.finish_reason"
ATTR_TTFT: Final = "relayline.ttft_s"
ATTR_ITL_MEAN: Final = "relayline.itl_mean_s"
ATTR_ITL_P50: Final = "relayline.itl_p50_s"
ATTR_ITL_P95: Final = "relayline.itl_p95_s"
ATTR_ITL_MAX: Final = "relayline.itl_max_s"
ATTR_RECOVERIES: Final = "relayline.recoveries"
ATTR_DRAFTED: Final = "relayline.drafts.tokens"  # guesses that were sent, where there were any
ATTR_ACCEPTED: Final = "relayline.drafts.accepted_tokens"  # those of them that were right
# Per stage, arrays in stage order, from the stages' SessionSummary:
ATTR_STAGE_BATCH_ROWS_MEAN: Final = "relayline.stages.batch_rows_mean"
ATTR_STAGE_BATCH_ROWS_MAX: Final = "relayline.stages.batch_rows_max"
ATTR_STAGE_WAIT_SUM: Final = "relayline.stages.wait_sum_s"
ATTR_STAGE_WAIT_MAX: Final = "relayline.stages.wait_max_s"
ATTR_STAGE_DECODE: Final = "relayline.stages.decode_s"
ATTR_STAGE_STEPS: Final = "relayline.stages.steps"
ATTR_STAGE_HOP: Final = "relayline.stages.hop_s"  # decode frames under way to it
ATTR_STAGE_HANDLE: Final = "relayline.stages.handle_s"  # placing decode rows, and encoding them; at the last, sampling
# Where the time of the decode phase went. These six add up to it:
ATTR_TIME_COMPUTE: Final = "relayline.time.compute_s"  # of all stages, as the next three
ATTR_TIME_QUEUE: Final = "relayline.time.queue_s"
ATTR_TIME_HANDLE: Final = "relayline.time.handle_s"
ATTR_TIME_HOPS: Final = "relayline.time.hops_s"
ATTR_TIME_BACK: Final = "relayline.time.back_s"  # from the last stage to the coordinator
ATTR_TIME_COORDINATOR: Final = "relayline.time.coordinator_s"  # the rest: its turns, and waiting for the group

# --- our attributes: a stage's `batches` span of a request, and the events of batches ---------------------------------

ATTR_BATCHES: Final = "relayline.batches"  # how many
ATTR_BATCHES_GROUPED: Final = "relayline.batches.grouped"  # of these, older ones that share an event with others
ATTR_WAIT: Final = "relayline.wait_s"  # waits of its frames, summed
ATTR_WAIT_MAX: Final = "relayline.wait_max_s"
ATTR_DECODE: Final = "relayline.decode_s"  # inside native decode, summed
ATTR_ROWS_MEAN: Final = "relayline.batch_rows_mean"  # rows of its batches, mates included
ATTR_ROWS_MAX: Final = "relayline.batch_rows_max"
ATTR_STREAMS_MEAN: Final = "relayline.batch_streams_mean"
EVENT_CLOSED: Final = "closed"  # begins the name of the event with which a batch stopped waiting
EVENT_DECODED: Final = "decoded"
EVENT_ATTR_REASON: Final = "reason"
EVENT_ATTR_ROWS: Final = "rows"
EVENT_ATTR_WAITED: Final = "waited_s"
EVENT_ATTR_MEASURED: Final = "measured_s"
EVENT_ATTR_PREDICTED: Final = "predicted_s"
EVENT_ATTR_CAUSE: Final = "cause"

# --- our attributes: the root of a trace of passes --------------------------------------------------------------------

ATTR_PASSES: Final = "relayline.passes"
ATTR_PASSES_TOKENS: Final = "relayline.passes.tokens"  # that came back, also those computed in vain under grants
ATTR_PASSES_ROWS: Final = "relayline.passes.rows"  # that left
ATTR_PASSES_STREAMS: Final = "relayline.passes.streams"  # different ones
ATTR_PASSES_STREAMS_MAX: Final = "relayline.passes.streams_max"  # of the largest
ATTR_PASSES_BUSY: Final = "relayline.passes.stage_busy"  # array in stage order: share of the time in native decode
ATTR_PASSES_OVERLAP: Final = "relayline.passes.overlap"  # share of the busy time in which two or more stages worked
ATTR_PASSES_UNANSWERED: Final = "relayline.passes.unanswered"  # frames that nothing came back for in time
ATTR_PASS_ROWS: Final = "relayline.pass.rows"
ATTR_PASS_STREAMS: Final = "relayline.pass.streams"
ATTR_PASS_TOKENS: Final = "relayline.pass.tokens"
ATTR_LOST_STAGE: Final = "relayline.lost.stage"  # index of the stage that was lost, where it is known
ATTR_LOST_CAUSE: Final = "relayline.lost.cause"

# --- metrics of a stage, at its own /metrics. Every one carries the label `stage` ------------------------------------
# Names are families: counters are exposed with `_total`, histograms with `_bucket`, `_sum` and `_count`.

LABEL_STAGE: Final = "stage"
LABEL_CLOSE_REASON: Final = "reason"
LABEL_DIRECTION: Final = "direction"  # in | out
LABEL_PLACE: Final = "place"  # memory | disk
LABEL_OUTCOME: Final = "outcome"  # hit | miss
LABEL_ERROR: Final = "label"
LABEL_TRACE: Final = "trace_id"  # of an exemplar: the second of passes that it was in

METRIC_BATCH_INFO: Final = "relayline_batch_stage_info"  # labels: layers, pipeline, policy, version
METRIC_BATCH_ROWS: Final = "relayline_batch_rows"  # histogram: rows of a native step, padding left out
METRIC_BATCH_SESSIONS: Final = "relayline_batch_sessions"  # histogram: member frames of a native step
METRIC_FRAME_WAIT: Final = "relayline_frame_wait_seconds"  # histogram
METRIC_STEPS: Final = "relayline_steps"
METRIC_ROWS: Final = "relayline_rows"
METRIC_ROWS_AHEAD: Final = "relayline_rows_ahead"
METRIC_ROWS_DROPPED: Final = "relayline_rows_ahead_dropped"
METRIC_PADDED_ROWS: Final = "relayline_padded_rows"
METRIC_MICRO_BATCHES: Final = "relayline_micro_batches"
METRIC_CLOSE_REASONS: Final = "relayline_batch_close"  # by reason
METRIC_STEP_SECONDS: Final = "relayline_step_seconds"  # inside native decode
METRIC_STEP_PREDICTED_SECONDS: Final = "relayline_step_predicted_seconds"  # of steps that had a prediction
METRIC_STEP_MEASURED_SECONDS: Final = "relayline_step_measured_seconds"  # of the same steps
METRIC_ENCODE_SECONDS: Final = "relayline_encode_seconds"
METRIC_LINK_BYTES: Final = "relayline_link_bytes"  # payload bytes by direction
METRIC_LINK_ENVELOPES: Final = "relayline_link_envelopes"  # by direction
METRIC_LINK_IN_FLIGHT: Final = "relayline_link_in_flight_bytes"
HELP_LINK_IN_FLIGHT: Final = (  # see wire.common.bounds.CREDIT_HELD_DIVISOR
    "Payload bytes sent to the next stage and not yet credited back; up to a quarter of the window even when idle"
)
METRIC_LINK_WINDOW: Final = "relayline_link_window_bytes"  # credit granted by the downstream neighbour
HELP_LINK_WINDOW: Final = "Payload bytes that may be sent without a credit"
METRIC_QUEUED_ROWS: Final = "relayline_queued_rows"
METRIC_QUEUED_FRAMES: Final = "relayline_queued_frames"
METRIC_LANES_USED: Final = "relayline_lanes_used"
METRIC_LANES_KEPT: Final = "relayline_lanes_kept"
METRIC_LANES_LIMIT: Final = "relayline_lanes_limit"
METRIC_TIER_BYTES: Final = "relayline_tier_bytes"
METRIC_TIER_STATES: Final = "relayline_tier_states"
METRIC_TIER_LOOKUPS: Final = "relayline_tier_lookups"
METRIC_FAULTS: Final = "relayline_faults"  # by label
METRIC_EPOCHS: Final = "relayline_epochs"  # connections by a coordinator: beyond the first they are recoveries
METRIC_SPANS_EXPORTED: Final = "relayline_spans_exported"
METRIC_SPANS_DROPPED: Final = "relayline_spans_dropped"
METRIC_TELEMETRY_LEVEL: Final = "relayline_telemetry_level"  # 0 off, 1 summary, 2 batches, 3 frames

# --- our attributes: spans of the coordinator -------------------------------------------------------------------------

ATTR_CHOICE: Final = "relayline.choice.index"  # of a request with several choices
ATTR_SHARED_WITH: Final = "relayline.shared_with"  # id of the request that opened the session which this one reads
ATTR_LINKS_DROPPED: Final = "relayline.passes.links_dropped"  # traces of passes that the span could not link to
ATTR_MEDIA_FILES: Final = "relayline.media.files"
ATTR_MEDIA_ROWS: Final = "relayline.media.rows"  # of all files at `media`; below it, of one
ATTR_MEDIA_KEPT: Final = "relayline.media.kept_files"  # whose rows were there from an earlier request
ATTR_MEDIA_WAIT: Final = "relayline.media.wait_s"  # for the encoder, which works on one file at a time
ATTR_MEDIA_FILE: Final = "relayline.media.file"  # its number in the request, from 0
ATTR_MEDIA_KIND: Final = "relayline.media.kind"  # image | audio | video
ATTR_MEDIA_BYTES: Final = "relayline.media.bytes"
ATTR_CHUNK_POSITION: Final = "relayline.chunk.position"
ATTR_CHUNK_ROWS: Final = "relayline.chunk.rows"
ATTR_CHUNKS: Final = "relayline.chunks"  # prefill chunks that a prompt was cut into
ATTR_QUEUE: Final = "relayline.queue_s"
ATTR_STAGES_REPORTED: Final = "relayline.stages.reported"  # stages that have summed the session up in time
ATTR_STAGE_PREFILL_WAIT: Final = "relayline.stages.prefill_wait_s"
ATTR_STAGE_DECODE_WAIT: Final = "relayline.stages.decode_wait_s"
EVENT_PAUSED: Final = "paused"  # a stage or link was lost
EVENT_HELD: Final = "held"  # a stage or link was lost before it had a lane: it starts once that is back
EVENT_RESUMED: Final = "resumed"  # starts again from its history at a new epoch
EVENT_WOKEN: Final = "woken"  # it has waited for the stages to load, see coordinator.engine.sleep
EVENT_REPLAYED: Final = "replayed"  # replayed from its history after a failure of only this session
LINK_SESSION: Final = "session"  # from a request that shares a session to the span that describes the session

# --- metrics of the coordinator, with the label `model_name`; the stems are those of vLLM ----------------------------

LABEL_MODEL: Final = "model_name"
LABEL_FINISHED: Final = "finished_reason"
METRIC_RUNNING: Final = "relayline_num_requests_running"
METRIC_WAITING: Final = "relayline_num_requests_waiting"
METRIC_KV_USAGE: Final = "relayline_kv_cache_usage_perc"  # 0..1: tokens that running streams hold of all that fit
METRIC_TTFT: Final = "relayline_time_to_first_token_seconds"
METRIC_ITL: Final = "relayline_inter_token_latency_seconds"
METRIC_E2E: Final = "relayline_e2e_request_latency_seconds"
METRIC_QUEUE: Final = "relayline_request_queue_time_seconds"
METRIC_PREFILL: Final = "relayline_request_prefill_time_seconds"
METRIC_DECODE: Final = "relayline_request_decode_time_seconds"
METRIC_REQUEST_PROMPT: Final = "relayline_request_prompt_tokens"
METRIC_REQUEST_GENERATION: Final = "relayline_request_generation_tokens"
METRIC_PROMPT_TOKENS: Final = "relayline_prompt_tokens"
METRIC_GENERATION_TOKENS: Final = "relayline_generation_tokens"
METRIC_PREFIX_QUERIES: Final = "relayline_prefix_cache_queries"  # in tokens, as vLLM counts them
METRIC_PREFIX_HITS: Final = "relayline_prefix_cache_hits"
METRIC_MEDIA_QUERIES: Final = "relayline_mm_cache_queries"  # in files, as vLLM counts them
METRIC_MEDIA_HITS: Final = "relayline_mm_cache_hits"
METRIC_MEDIA_SECONDS: Final = "relayline_media_file_seconds"  # by LABEL_STEP and LABEL_KIND: work on one file
METRIC_MEDIA_WAIT: Final = "relayline_media_wait_seconds"  # of one request's files for the encoder, summed
LABEL_STEP: Final = "step"  # fetch | count rows | encode
LABEL_KIND: Final = "kind"  # image | audio | video
METRIC_DRAFTS: Final = "relayline_spec_decode_num_drafts"
METRIC_DRAFT_TOKENS: Final = "relayline_spec_decode_num_draft_tokens"
METRIC_ACCEPTED_TOKENS: Final = "relayline_spec_decode_num_accepted_tokens"
METRIC_SUCCESS: Final = "relayline_request_success"
METRIC_REPLAYS: Final = "relayline_request_replays"
METRIC_RECOVERIES: Final = "relayline_recoveries"
METRIC_ASLEEP: Final = "relayline_asleep"
METRIC_SLEEPS: Final = "relayline_sleeps"
METRIC_WAKES: Final = "relayline_wakes"  # by LABEL_OUTCOME: woken | failed
METRIC_WAKE_TIME: Final = "relayline_last_wake_duration_seconds"
METRIC_LANES: Final = "relayline_lanes"
METRIC_EPOCH: Final = "relayline_epoch"
METRIC_GROUP_FLIGHTS: Final = "relayline_group_flights"
METRIC_GROUP_ROWS: Final = "relayline_group_rows"
METRIC_SHARED: Final = "relayline_shared_requests"
METRIC_OFFLINE_BATCHES: Final = "relayline_offline_batches"  # by LABEL_STATE: running | waiting
METRIC_OFFLINE_REQUESTS: Final = "relayline_offline_requests"  # by LABEL_STATE: waiting | done | failed
LABEL_STATE: Final = "state"
METRIC_GRANTS: Final = "relayline_grants"  # by LABEL_EVENT: given | extended | ended
METRIC_GRANT_ROWS: Final = "relayline_grant_rows"  # by LABEL_OUTCOME: used | vain
LABEL_EVENT: Final = "event"
LABEL_KEY: Final = "api_key"  # the name of an API key, of the first coordinator.observe.usage.NAMES_MAX
METRIC_KEY_RUNNING: Final = "relayline_api_key_streams_running"
METRIC_KEY_WAITING: Final = "relayline_api_key_streams_waiting"
METRIC_KEY_REQUESTS: Final = "relayline_api_key_requests"
METRIC_KEY_PROMPT: Final = "relayline_api_key_prompt_tokens"
METRIC_KEY_CACHED: Final = "relayline_api_key_cached_tokens"
METRIC_KEY_COMPLETION: Final = "relayline_api_key_completion_tokens"

# --- metrics of the coordinator, with the label `stages`: so many computing at once -----------------------------------

LABEL_STAGES: Final = "stages"
METRIC_OVERLAP: Final = "relayline_overlap_ratio"
METRIC_CERTIFICATE_EXPIRES: Final = "relayline_certificate_expires_timestamp_seconds"  # of stages too
HELP_CERTIFICATE_EXPIRES: Final = "When this process's certificate ends, Unix time"

# --- the stages' reports to the coordinator, at the coordinator's /metrics, with the label `stage` -----------------
# For users who scrape the coordinator alone; histograms are at the stages' own /metrics. The coordinator's link to
# stage 0 has METRIC_LINK_* with stage="coordinator".

STAGE_COORDINATOR: Final = "coordinator"
METRIC_STAGE_UP: Final = "relayline_stage_up"
METRIC_RELAY_CONNECTIONS: Final = "relayline_relay_connections"
METRIC_RELAY_REFUSED: Final = "relayline_relay_refused_connections"
METRIC_RELAY_BYTES: Final = "relayline_relay_bytes"  # by LABEL_DIRECTION: in | out, as the stage sees it
METRIC_STAGE_STEPS: Final = "relayline_stage_steps"
METRIC_STAGE_ROWS: Final = "relayline_stage_rows"
METRIC_STAGE_FRAMES: Final = "relayline_stage_frames"
METRIC_STAGE_PADDED_ROWS: Final = "relayline_stage_padded_rows"
METRIC_STAGE_MICRO_BATCHES: Final = "relayline_stage_micro_batches"
METRIC_STAGE_BUSY: Final = "relayline_stage_busy_seconds"
METRIC_STAGE_ENVELOPES_IN: Final = "relayline_stage_envelopes_received"
METRIC_STAGE_ENVELOPES_OUT: Final = "relayline_stage_envelopes_sent"
METRIC_STAGE_BYTES_IN: Final = "relayline_stage_payload_received_bytes"
METRIC_STAGE_BYTES_OUT: Final = "relayline_stage_payload_sent_bytes"
METRIC_STAGE_CLOSED: Final = "relayline_stage_batches_closed"  # by reason
METRIC_STAGE_FAULTS: Final = "relayline_stage_session_faults"  # by label
METRIC_STAGE_LANES_USED: Final = "relayline_stage_lanes_used"
METRIC_STAGE_LANES_KEPT: Final = "relayline_stage_lanes_kept"
METRIC_STAGE_QUEUED_ROWS: Final = "relayline_stage_queued_rows"
METRIC_STAGE_WAIT_P50: Final = "relayline_stage_wait_p50_seconds"
METRIC_STAGE_WAIT_P95: Final = "relayline_stage_wait_p95_seconds"
