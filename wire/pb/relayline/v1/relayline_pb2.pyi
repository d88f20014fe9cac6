from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_TOKENS: _ClassVar[Dtype]
    DTYPE_F16: _ClassVar[Dtype]
    DTYPE_F32: _ClassVar[Dtype]

class FrameFlag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_FLAG_UNSPECIFIED: _ClassVar[FrameFlag]
    FRAME_FLAG_PREFILL: _ClassVar[FrameFlag]
    FRAME_FLAG_WANTS_SAMPLE: _ClassVar[FrameFlag]
    FRAME_FLAG_DRAFTED: _ClassVar[FrameFlag]
    FRAME_FLAG_GUESSED: _ClassVar[FrameFlag]
    FRAME_FLAG_OPEN: _ClassVar[FrameFlag]
    FRAME_FLAG_CLOSE: _ClassVar[FrameFlag]
    FRAME_FLAG_TRIM: _ClassVar[FrameFlag]
    FRAME_FLAG_COPY_PREFIX: _ClassVar[FrameFlag]
    FRAME_FLAG_CHECKPOINT: _ClassVar[FrameFlag]
    FRAME_FLAG_MUTUAL: _ClassVar[FrameFlag]
    FRAME_FLAG_GRID: _ClassVar[FrameFlag]
    FRAME_FLAG_WANTS_GUESSES: _ClassVar[FrameFlag]
    FRAME_FLAG_STORE: _ClassVar[FrameFlag]
    FRAME_FLAG_RESTORE: _ClassVar[FrameFlag]
    FRAME_FLAG_EXTEND: _ClassVar[FrameFlag]

class TelemetryLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TELEMETRY_LEVEL_UNSPECIFIED: _ClassVar[TelemetryLevel]
    TELEMETRY_LEVEL_OFF: _ClassVar[TelemetryLevel]
    TELEMETRY_LEVEL_SUMMARY: _ClassVar[TelemetryLevel]
    TELEMETRY_LEVEL_BATCHES: _ClassVar[TelemetryLevel]
    TELEMETRY_LEVEL_FRAMES: _ClassVar[TelemetryLevel]
DTYPE_UNSPECIFIED: Dtype
DTYPE_TOKENS: Dtype
DTYPE_F16: Dtype
DTYPE_F32: Dtype
FRAME_FLAG_UNSPECIFIED: FrameFlag
FRAME_FLAG_PREFILL: FrameFlag
FRAME_FLAG_WANTS_SAMPLE: FrameFlag
FRAME_FLAG_DRAFTED: FrameFlag
FRAME_FLAG_GUESSED: FrameFlag
FRAME_FLAG_OPEN: FrameFlag
FRAME_FLAG_CLOSE: FrameFlag
FRAME_FLAG_TRIM: FrameFlag
FRAME_FLAG_COPY_PREFIX: FrameFlag
FRAME_FLAG_CHECKPOINT: FrameFlag
FRAME_FLAG_MUTUAL: FrameFlag
FRAME_FLAG_GRID: FrameFlag
FRAME_FLAG_WANTS_GUESSES: FrameFlag
FRAME_FLAG_STORE: FrameFlag
FRAME_FLAG_RESTORE: FrameFlag
FRAME_FLAG_EXTEND: FrameFlag
TELEMETRY_LEVEL_UNSPECIFIED: TelemetryLevel
TELEMETRY_LEVEL_OFF: TelemetryLevel
TELEMETRY_LEVEL_SUMMARY: TelemetryLevel
TELEMETRY_LEVEL_BATCHES: TelemetryLevel
TELEMETRY_LEVEL_FRAMES: TelemetryLevel

class HandOverRequest(_message.Message):
    __slots__ = ("change",)
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    change: int
    def __init__(self, change: _Optional[int] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("route_id", "session_id", "lane", "n_tokens", "forms", "data")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORMS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    route_id: int
    session_id: int
    lane: int
    n_tokens: int
    forms: _containers.RepeatedScalarFieldContainer[bytes]
    data: bytes
    def __init__(self, route_id: _Optional[int] = ..., session_id: _Optional[int] = ..., lane: _Optional[int] = ..., n_tokens: _Optional[int] = ..., forms: _Optional[_Iterable[bytes]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoredNote(_message.Message):
    __slots__ = ("key", "note")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    key: int
    note: bytes
    def __init__(self, key: _Optional[int] = ..., note: _Optional[bytes] = ...) -> None: ...

class NotesRequest(_message.Message):
    __slots__ = ("notes", "wants_known")
    NOTES_FIELD_NUMBER: _ClassVar[int]
    WANTS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    notes: _containers.RepeatedCompositeFieldContainer[StoredNote]
    wants_known: bool
    def __init__(self, notes: _Optional[_Iterable[_Union[StoredNote, _Mapping]]] = ..., wants_known: _Optional[bool] = ...) -> None: ...

class NotesResponse(_message.Message):
    __slots__ = ("notes",)
    NOTES_FIELD_NUMBER: _ClassVar[int]
    notes: _containers.RepeatedCompositeFieldContainer[StoredNote]
    def __init__(self, notes: _Optional[_Iterable[_Union[StoredNote, _Mapping]]] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("crl_pem",)
    CRL_PEM_FIELD_NUMBER: _ClassVar[int]
    crl_pem: bytes
    def __init__(self, crl_pem: _Optional[bytes] = ...) -> None: ...

class RevokeResponse(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "software_version", "architecture", "source_sha256", "pipeline_id", "stage_index", "stage_count", "layer_start", "layer_end", "n_embd", "n_vocab", "n_lanes", "ctx_tokens", "max_rows", "instance_id", "decode_curve", "prefill_curve", "context_ns", "context_tiled_ns", "kv_per_lane", "rope_original_tokens", "rewinds", "name", "takes_mutual_rows", "takes_grids", "runs_ahead", "keeps_state", "rewind_rows", "predictions", "takes_guess_wishes", "inner_layers", "adapters", "stores", "stores_on_disk", "restore_token_ns", "stored", "store_from_ns", "keeps_notes", "has_tiles", "place", "takes_lanes_apart", "takes_rows", "options")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SHA256_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    N_EMBD_FIELD_NUMBER: _ClassVar[int]
    N_VOCAB_FIELD_NUMBER: _ClassVar[int]
    N_LANES_FIELD_NUMBER: _ClassVar[int]
    CTX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_CURVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CURVE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_NS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TILED_NS_FIELD_NUMBER: _ClassVar[int]
    KV_PER_LANE_FIELD_NUMBER: _ClassVar[int]
    ROPE_ORIGINAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWINDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAKES_MUTUAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    TAKES_GRIDS_FIELD_NUMBER: _ClassVar[int]
    RUNS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STATE_FIELD_NUMBER: _ClassVar[int]
    REWIND_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    TAKES_GUESS_WISHES_FIELD_NUMBER: _ClassVar[int]
    INNER_LAYERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    STORES_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STORE_FROM_NS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_NOTES_FIELD_NUMBER: _ClassVar[int]
    HAS_TILES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TAKES_LANES_APART_FIELD_NUMBER: _ClassVar[int]
    TAKES_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    architecture: str
    source_sha256: str
    pipeline_id: str
    stage_index: int
    stage_count: int
    layer_start: int
    layer_end: int
    n_embd: int
    n_vocab: int
    n_lanes: int
    ctx_tokens: int
    max_rows: int
    instance_id: str
    decode_curve: _containers.RepeatedCompositeFieldContainer[CostPoint]
    prefill_curve: _containers.RepeatedCompositeFieldContainer[CostPoint]
    context_ns: float
    context_tiled_ns: float
    kv_per_lane: bool
    rope_original_tokens: int
    rewinds: bool
    name: str
    takes_mutual_rows: bool
    takes_grids: bool
    runs_ahead: bool
    keeps_state: bool
    rewind_rows: int
    predictions: int
    takes_guess_wishes: bool
    inner_layers: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedScalarFieldContainer[str]
    stores: bool
    stores_on_disk: bool
    restore_token_ns: float
    stored: _containers.RepeatedCompositeFieldContainer[StoredState]
    store_from_ns: int
    keeps_notes: bool
    has_tiles: bool
    place: Place
    takes_lanes_apart: bool
    takes_rows: bool
    options: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., architecture: _Optional[str] = ..., source_sha256: _Optional[str] = ..., pipeline_id: _Optional[str] = ..., stage_index: _Optional[int] = ..., stage_count: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., n_embd: _Optional[int] = ..., n_vocab: _Optional[int] = ..., n_lanes: _Optional[int] = ..., ctx_tokens: _Optional[int] = ..., max_rows: _Optional[int] = ..., instance_id: _Optional[str] = ..., decode_curve: _Optional[_Iterable[_Union[CostPoint, _Mapping]]] = ..., prefill_curve: _Optional[_Iterable[_Union[CostPoint, _Mapping]]] = ..., context_ns: _Optional[float] = ..., context_tiled_ns: _Optional[float] = ..., kv_per_lane: _Optional[bool] = ..., rope_original_tokens: _Optional[int] = ..., rewinds: _Optional[bool] = ..., name: _Optional[str] = ..., takes_mutual_rows: _Optional[bool] = ..., takes_grids: _Optional[bool] = ..., runs_ahead: _Optional[bool] = ..., keeps_state: _Optional[bool] = ..., rewind_rows: _Optional[int] = ..., predictions: _Optional[int] = ..., takes_guess_wishes: _Optional[bool] = ..., inner_layers: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[str]] = ..., stores: _Optional[bool] = ..., stores_on_disk: _Optional[bool] = ..., restore_token_ns: _Optional[float] = ..., stored: _Optional[_Iterable[_Union[StoredState, _Mapping]]] = ..., store_from_ns: _Optional[int] = ..., keeps_notes: _Optional[bool] = ..., has_tiles: _Optional[bool] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., takes_lanes_apart: _Optional[bool] = ..., takes_rows: _Optional[bool] = ..., options: _Optional[_Iterable[str]] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("host_id", "devices", "cores", "n_threads")
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    N_THREADS_FIELD_NUMBER: _ClassVar[int]
    host_id: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    cores: _containers.RepeatedScalarFieldContainer[int]
    n_threads: int
    def __init__(self, host_id: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., cores: _Optional[_Iterable[int]] = ..., n_threads: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "name", "description")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    description: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class StoredState(_message.Message):
    __slots__ = ("key", "n_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: int
    n_tokens: int
    def __init__(self, key: _Optional[int] = ..., n_tokens: _Optional[int] = ...) -> None: ...

class CostPoint(_message.Message):
    __slots__ = ("n_rows", "cost_ns")
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    COST_NS_FIELD_NUMBER: _ClassVar[int]
    n_rows: int
    cost_ns: int
    def __init__(self, n_rows: _Optional[int] = ..., cost_ns: _Optional[int] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("protocol_version", "route_id", "epoch", "pipeline_id", "stage_index", "next_address", "wire_dtype", "instance_id", "upstream_pass", "next_pass", "upstream_name", "first_address", "back_pass", "pipeline_name", "stage_name", "last_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_PASS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PASS_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_NAME_FIELD_NUMBER: _ClassVar[int]
    FIRST_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BACK_PASS_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    route_id: int
    epoch: int
    pipeline_id: str
    stage_index: int
    next_address: str
    wire_dtype: Dtype
    instance_id: str
    upstream_pass: str
    next_pass: str
    upstream_name: str
    first_address: str
    back_pass: str
    pipeline_name: str
    stage_name: str
    last_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., route_id: _Optional[int] = ..., epoch: _Optional[int] = ..., pipeline_id: _Optional[str] = ..., stage_index: _Optional[int] = ..., next_address: _Optional[str] = ..., wire_dtype: _Optional[_Union[Dtype, str]] = ..., instance_id: _Optional[str] = ..., upstream_pass: _Optional[str] = ..., next_pass: _Optional[str] = ..., upstream_name: _Optional[str] = ..., first_address: _Optional[str] = ..., back_pass: _Optional[str] = ..., pipeline_name: _Optional[str] = ..., stage_name: _Optional[str] = ..., last_name: _Optional[str] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("held", "stored")
    HELD_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldSession]
    stored: _containers.RepeatedCompositeFieldContainer[StoredState]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldSession, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoredState, _Mapping]]] = ...) -> None: ...

class HeldSession(_message.Message):
    __slots__ = ("session_id", "n_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    n_tokens: int
    def __init__(self, session_id: _Optional[int] = ..., n_tokens: _Optional[int] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("protocol_version", "route_id", "epoch", "pipeline_id", "source_sha256", "next_layer", "n_embd", "dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SHA256_FIELD_NUMBER: _ClassVar[int]
    NEXT_LAYER_FIELD_NUMBER: _ClassVar[int]
    N_EMBD_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    route_id: int
    epoch: int
    pipeline_id: str
    source_sha256: str
    next_layer: int
    n_embd: int
    dtype: Dtype
    def __init__(self, protocol_version: _Optional[int] = ..., route_id: _Optional[int] = ..., epoch: _Optional[int] = ..., pipeline_id: _Optional[str] = ..., source_sha256: _Optional[str] = ..., next_layer: _Optional[int] = ..., n_embd: _Optional[int] = ..., dtype: _Optional[_Union[Dtype, str]] = ...) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("epoch", "sequence", "dtype", "n_rows", "width", "sent_ns", "n_frames", "frames", "payload", "row_exponents", "options", "batch_trace", "draft_tokens", "checksum", "open", "part_of_bytes", "part_at", "part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    N_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ROW_EXPONENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PART_OF_BYTES_FIELD_NUMBER: _ClassVar[int]
    PART_AT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    dtype: int
    n_rows: int
    width: int
    sent_ns: int
    n_frames: int
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    payload: bytes
    row_exponents: bytes
    options: _containers.RepeatedCompositeFieldContainer[SessionOptions]
    batch_trace: bytes
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    open: LinkOpen
    part_of_bytes: int
    part_at: int
    part: bytes
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., dtype: _Optional[int] = ..., n_rows: _Optional[int] = ..., width: _Optional[int] = ..., sent_ns: _Optional[int] = ..., n_frames: _Optional[int] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., payload: _Optional[bytes] = ..., row_exponents: _Optional[bytes] = ..., options: _Optional[_Iterable[_Union[SessionOptions, _Mapping]]] = ..., batch_trace: _Optional[bytes] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ..., open: _Optional[_Union[LinkOpen, _Mapping]] = ..., part_of_bytes: _Optional[int] = ..., part_at: _Optional[int] = ..., part: _Optional[bytes] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("session_id", "epoch", "position", "n_rows", "flags", "argument", "checksum", "enqueued_ns", "trace")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    epoch: int
    position: int
    n_rows: int
    flags: int
    argument: int
    checksum: int
    enqueued_ns: int
    trace: bytes
    def __init__(self, session_id: _Optional[int] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., n_rows: _Optional[int] = ..., flags: _Optional[int] = ..., argument: _Optional[int] = ..., checksum: _Optional[int] = ..., enqueued_ns: _Optional[int] = ..., trace: _Optional[bytes] = ...) -> None: ...

class SessionOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "n_logprobs", "wants_logits", "kept", "frequency_penalty", "presence_penalty", "said", "bias_tokens", "biases", "grammar", "baggage", "numbers", "read", "allowed_tokens", "held_back_tokens", "bad_words", "dry_breaker_steps", "dry_sequences", "told", "told_from", "thought_marks", "kept_key")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WANTS_LOGITS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BAGGAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BACK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    DRY_BREAKER_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRY_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    TOLD_FROM_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_MARKS_FIELD_NUMBER: _ClassVar[int]
    KEPT_KEY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n_logprobs: int
    wants_logits: bool
    kept: bool
    frequency_penalty: float
    presence_penalty: float
    said: _containers.RepeatedScalarFieldContainer[int]
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    grammar: str
    baggage: str
    numbers: _containers.ScalarMap[str, float]
    read: _containers.RepeatedScalarFieldContainer[int]
    allowed_tokens: _containers.RepeatedScalarFieldContainer[int]
    held_back_tokens: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenList]
    dry_breaker_steps: _containers.RepeatedScalarFieldContainer[int]
    dry_sequences: _containers.RepeatedCompositeFieldContainer[TokenList]
    told: _containers.RepeatedScalarFieldContainer[int]
    told_from: int
    thought_marks: _containers.RepeatedCompositeFieldContainer[TokenList]
    kept_key: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n_logprobs: _Optional[int] = ..., wants_logits: _Optional[bool] = ..., kept: _Optional[bool] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., said: _Optional[_Iterable[int]] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., grammar: _Optional[str] = ..., baggage: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., read: _Optional[_Iterable[int]] = ..., allowed_tokens: _Optional[_Iterable[int]] = ..., held_back_tokens: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., dry_breaker_steps: _Optional[_Iterable[int]] = ..., dry_sequences: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., told: _Optional[_Iterable[int]] = ..., told_from: _Optional[int] = ..., thought_marks: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ..., kept_key: _Optional[int] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ("accepted", "credit_bytes")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    accepted: LinkAccepted
    credit_bytes: int
    def __init__(self, accepted: _Optional[_Union[LinkAccepted, _Mapping]] = ..., credit_bytes: _Optional[int] = ...) -> None: ...

class LinkAccepted(_message.Message):
    __slots__ = ("credit_bytes", "max_rows")
    CREDIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    credit_bytes: int
    max_rows: int
    def __init__(self, credit_bytes: _Optional[int] = ..., max_rows: _Optional[int] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("route_id", "epoch")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    route_id: int
    epoch: int
    def __init__(self, route_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReturnResponse(_message.Message):
    __slots__ = ("epoch", "stage_index", "samples", "faults", "subscribed", "progress", "summaries", "sequence", "batch_trace", "feeds_back", "dropped_keys", "sent_ns", "checksum")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SUMMARIES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BATCH_TRACE_FIELD_NUMBER: _ClassVar[int]
    FEEDS_BACK_FIELD_NUMBER: _ClassVar[int]
    DROPPED_KEYS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    stage_index: int
    samples: _containers.RepeatedCompositeFieldContainer[Sampled]
    faults: _containers.RepeatedCompositeFieldContainer[SessionFault]
    subscribed: bool
    progress: _containers.RepeatedCompositeFieldContainer[Progress]
    summaries: _containers.RepeatedCompositeFieldContainer[SessionSummary]
    sequence: int
    batch_trace: bytes
    feeds_back: bool
    dropped_keys: _containers.RepeatedScalarFieldContainer[int]
    sent_ns: int
    checksum: int
    def __init__(self, epoch: _Optional[int] = ..., stage_index: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[Sampled, _Mapping]]] = ..., faults: _Optional[_Iterable[_Union[SessionFault, _Mapping]]] = ..., subscribed: _Optional[bool] = ..., progress: _Optional[_Iterable[_Union[Progress, _Mapping]]] = ..., summaries: _Optional[_Iterable[_Union[SessionSummary, _Mapping]]] = ..., sequence: _Optional[int] = ..., batch_trace: _Optional[bytes] = ..., feeds_back: _Optional[bool] = ..., dropped_keys: _Optional[_Iterable[int]] = ..., sent_ns: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class SessionSummary(_message.Message):
    __slots__ = ("session_id", "stage_index", "n_prefill_steps", "n_decode_steps", "prefill_wait_ns", "decode_wait_ns", "wait_max_ns", "batch_rows_sum", "batch_rows_max", "decode_ns", "prefill_decode_ns", "handle_ns", "hop_ns", "n_hops")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    N_PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    N_DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MAX_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_SUM_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_NS_FIELD_NUMBER: _ClassVar[int]
    HOP_NS_FIELD_NUMBER: _ClassVar[int]
    N_HOPS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    stage_index: int
    n_prefill_steps: int
    n_decode_steps: int
    prefill_wait_ns: int
    decode_wait_ns: int
    wait_max_ns: int
    batch_rows_sum: int
    batch_rows_max: int
    decode_ns: int
    prefill_decode_ns: int
    handle_ns: int
    hop_ns: int
    n_hops: int
    def __init__(self, session_id: _Optional[int] = ..., stage_index: _Optional[int] = ..., n_prefill_steps: _Optional[int] = ..., n_decode_steps: _Optional[int] = ..., prefill_wait_ns: _Optional[int] = ..., decode_wait_ns: _Optional[int] = ..., wait_max_ns: _Optional[int] = ..., batch_rows_sum: _Optional[int] = ..., batch_rows_max: _Optional[int] = ..., decode_ns: _Optional[int] = ..., prefill_decode_ns: _Optional[int] = ..., handle_ns: _Optional[int] = ..., hop_ns: _Optional[int] = ..., n_hops: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("session_id", "position")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class Sampled(_message.Message):
    __slots__ = ("session_id", "position", "token", "logprob", "top", "logits", "mirostat_mu", "grant", "guesses", "guess_chances", "embedding")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    GUESS_CHANCES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    token: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    logits: bytes
    mirostat_mu: float
    grant: int
    guesses: _containers.RepeatedScalarFieldContainer[int]
    guess_chances: _containers.RepeatedScalarFieldContainer[float]
    embedding: bytes
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ..., token: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., logits: _Optional[bytes] = ..., mirostat_mu: _Optional[float] = ..., grant: _Optional[int] = ..., guesses: _Optional[_Iterable[int]] = ..., guess_chances: _Optional[_Iterable[float]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class SessionFault(_message.Message):
    __slots__ = ("session_id", "stage_index", "position", "label", "message", "retryable")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    stage_index: int
    position: int
    label: str
    message: str
    retryable: bool
    def __init__(self, session_id: _Optional[int] = ..., stage_index: _Optional[int] = ..., position: _Optional[int] = ..., label: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("route_id", "epoch")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    route_id: int
    epoch: int
    def __init__(self, route_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("with_recent", "route_id", "with_steps", "with_memory")
    WITH_RECENT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_STEPS_FIELD_NUMBER: _ClassVar[int]
    WITH_MEMORY_FIELD_NUMBER: _ClassVar[int]
    with_recent: bool
    route_id: int
    with_steps: bool
    with_memory: bool
    def __init__(self, with_recent: _Optional[bool] = ..., route_id: _Optional[int] = ..., with_steps: _Optional[bool] = ..., with_memory: _Optional[bool] = ...) -> None: ...

class RouteWork(_message.Message):
    __slots__ = ("epoch", "envelopes_in", "envelopes_out", "returned", "is_sending", "session_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_IN_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_OUT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    IS_SENDING_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    envelopes_in: int
    envelopes_out: int
    returned: int
    is_sending: bool
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., envelopes_in: _Optional[int] = ..., envelopes_out: _Optional[int] = ..., returned: _Optional[int] = ..., is_sending: _Optional[bool] = ..., session_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("stage_index", "instance_id", "steps_by_rows", "steps_by_sessions", "n_steps", "n_rows", "n_frames", "busy_ns", "uptime_ns", "recent_wait_ns", "lanes_used", "lanes_total", "queued_rows", "envelopes_in", "envelopes_out", "payload_bytes_in", "payload_bytes_out", "faults_by_label", "close_reasons", "n_padded_rows", "decode_curve", "prefill_curve", "step_start_ns", "step_end_ns", "now_ns", "n_micro_batches", "context_ns", "context_tiled_ns", "kv_per_lane", "n_decode_frames", "decode_held_ns", "lanes_kept", "route", "resident_bytes", "memory_bytes", "memory_free_bytes", "tier_memory_bytes", "tier_disk_bytes", "tier_states", "tier_hits", "tier_misses", "kernels", "runs_ahead", "has_tiles", "place", "takes_lanes_apart", "metrics_address", "metrics_tls")
    class StepsByRowsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class StepsBySessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class FaultsByLabelEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CloseReasonsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    N_STEPS_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    N_FRAMES_FIELD_NUMBER: _ClassVar[int]
    BUSY_NS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_NS_FIELD_NUMBER: _ClassVar[int]
    RECENT_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    LANES_USED_FIELD_NUMBER: _ClassVar[int]
    LANES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_IN_FIELD_NUMBER: _ClassVar[int]
    ENVELOPES_OUT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    FAULTS_BY_LABEL_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASONS_FIELD_NUMBER: _ClassVar[int]
    N_PADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CURVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CURVE_FIELD_NUMBER: _ClassVar[int]
    STEP_START_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_END_NS_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    N_MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_NS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TILED_NS_FIELD_NUMBER: _ClassVar[int]
    KV_PER_LANE_FIELD_NUMBER: _ClassVar[int]
    N_DECODE_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_HELD_NS_FIELD_NUMBER: _ClassVar[int]
    LANES_KEPT_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_STATES_FIELD_NUMBER: _ClassVar[int]
    TIER_HITS_FIELD_NUMBER: _ClassVar[int]
    TIER_MISSES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    RUNS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    HAS_TILES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TAKES_LANES_APART_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_TLS_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    instance_id: str
    steps_by_rows: _containers.ScalarMap[int, int]
    steps_by_sessions: _containers.ScalarMap[int, int]
    n_steps: int
    n_rows: int
    n_frames: int
    busy_ns: int
    uptime_ns: int
    recent_wait_ns: _containers.RepeatedScalarFieldContainer[int]
    lanes_used: int
    lanes_total: int
    queued_rows: int
    envelopes_in: int
    envelopes_out: int
    payload_bytes_in: int
    payload_bytes_out: int
    faults_by_label: _containers.ScalarMap[str, int]
    close_reasons: _containers.ScalarMap[str, int]
    n_padded_rows: int
    decode_curve: _containers.RepeatedCompositeFieldContainer[CostPoint]
    prefill_curve: _containers.RepeatedCompositeFieldContainer[CostPoint]
    step_start_ns: _containers.RepeatedScalarFieldContainer[int]
    step_end_ns: _containers.RepeatedScalarFieldContainer[int]
    now_ns: int
    n_micro_batches: int
    context_ns: float
    context_tiled_ns: float
    kv_per_lane: bool
    n_decode_frames: int
    decode_held_ns: int
    lanes_kept: int
    route: RouteWork
    resident_bytes: int
    memory_bytes: int
    memory_free_bytes: int
    tier_memory_bytes: int
    tier_disk_bytes: int
    tier_states: int
    tier_hits: int
    tier_misses: int
    kernels: str
    runs_ahead: bool
    has_tiles: bool
    place: Place
    takes_lanes_apart: bool
    metrics_address: str
    metrics_tls: bool
    def __init__(self, stage_index: _Optional[int] = ..., instance_id: _Optional[str] = ..., steps_by_rows: _Optional[_Mapping[int, int]] = ..., steps_by_sessions: _Optional[_Mapping[int, int]] = ..., n_steps: _Optional[int] = ..., n_rows: _Optional[int] = ..., n_frames: _Optional[int] = ..., busy_ns: _Optional[int] = ..., uptime_ns: _Optional[int] = ..., recent_wait_ns: _Optional[_Iterable[int]] = ..., lanes_used: _Optional[int] = ..., lanes_total: _Optional[int] = ..., queued_rows: _Optional[int] = ..., envelopes_in: _Optional[int] = ..., envelopes_out: _Optional[int] = ..., payload_bytes_in: _Optional[int] = ..., payload_bytes_out: _Optional[int] = ..., faults_by_label: _Optional[_Mapping[str, int]] = ..., close_reasons: _Optional[_Mapping[str, int]] = ..., n_padded_rows: _Optional[int] = ..., decode_curve: _Optional[_Iterable[_Union[CostPoint, _Mapping]]] = ..., prefill_curve: _Optional[_Iterable[_Union[CostPoint, _Mapping]]] = ..., step_start_ns: _Optional[_Iterable[int]] = ..., step_end_ns: _Optional[_Iterable[int]] = ..., now_ns: _Optional[int] = ..., n_micro_batches: _Optional[int] = ..., context_ns: _Optional[float] = ..., context_tiled_ns: _Optional[float] = ..., kv_per_lane: _Optional[bool] = ..., n_decode_frames: _Optional[int] = ..., decode_held_ns: _Optional[int] = ..., lanes_kept: _Optional[int] = ..., route: _Optional[_Union[RouteWork, _Mapping]] = ..., resident_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_free_bytes: _Optional[int] = ..., tier_memory_bytes: _Optional[int] = ..., tier_disk_bytes: _Optional[int] = ..., tier_states: _Optional[int] = ..., tier_hits: _Optional[int] = ..., tier_misses: _Optional[int] = ..., kernels: _Optional[str] = ..., runs_ahead: _Optional[bool] = ..., has_tiles: _Optional[bool] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., takes_lanes_apart: _Optional[bool] = ..., metrics_address: _Optional[str] = ..., metrics_tls: _Optional[bool] = ...) -> None: ...

class SetTelemetryRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: TelemetryLevel
    def __init__(self, level: _Optional[_Union[TelemetryLevel, str]] = ...) -> None: ...

class SetTelemetryResponse(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: TelemetryLevel
    def __init__(self, level: _Optional[_Union[TelemetryLevel, str]] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("knows_clock", "unix_offset_ns", "uncertainty_ns")
    KNOWS_CLOCK_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_NS_FIELD_NUMBER: _ClassVar[int]
    knows_clock: bool
    unix_offset_ns: int
    uncertainty_ns: int
    def __init__(self, knows_clock: _Optional[bool] = ..., unix_offset_ns: _Optional[int] = ..., uncertainty_ns: _Optional[int] = ...) -> None: ...

class BeatResponse(_message.Message):
    __slots__ = ("now_ns",)
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    now_ns: int
    def __init__(self, now_ns: _Optional[int] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class LogsResponse(_message.Message):
    __slots__ = ("lines",)
    LINES_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    def __init__(self, lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("unix_ms", "level", "text")
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    unix_ms: int
    level: str
    text: str
    def __init__(self, unix_ms: _Optional[int] = ..., level: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class BatchesRequest(_message.Message):
    __slots__ = ("session_ids", "limit", "after_step")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    after_step: int
    def __init__(self, session_ids: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., after_step: _Optional[int] = ...) -> None: ...

class BatchesResponse(_message.Message):
    __slots__ = ("stage_index", "instance_id", "batches", "now_ns", "n_forgotten")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    N_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    instance_id: str
    batches: _containers.RepeatedCompositeFieldContainer[BatchRecord]
    now_ns: int
    n_forgotten: int
    def __init__(self, stage_index: _Optional[int] = ..., instance_id: _Optional[str] = ..., batches: _Optional[_Iterable[_Union[BatchRecord, _Mapping]]] = ..., now_ns: _Optional[int] = ..., n_forgotten: _Optional[int] = ...) -> None: ...

class BatchRecord(_message.Message):
    __slots__ = ("step", "start_ns", "decode_ns", "encode_ns", "predicted_ns", "n_rows", "padded_rows", "close_reason", "queued_rows_before", "queued_rows_after", "bytes_out", "context", "members", "taken_ns")
    STEP_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_NS_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    PADDED_ROWS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_AFTER_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TAKEN_NS_FIELD_NUMBER: _ClassVar[int]
    step: int
    start_ns: int
    decode_ns: int
    encode_ns: int
    predicted_ns: int
    n_rows: int
    padded_rows: int
    close_reason: str
    queued_rows_before: int
    queued_rows_after: int
    bytes_out: int
    context: bytes
    members: _containers.RepeatedCompositeFieldContainer[BatchMember]
    taken_ns: int
    def __init__(self, step: _Optional[int] = ..., start_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ..., predicted_ns: _Optional[int] = ..., n_rows: _Optional[int] = ..., padded_rows: _Optional[int] = ..., close_reason: _Optional[str] = ..., queued_rows_before: _Optional[int] = ..., queued_rows_after: _Optional[int] = ..., bytes_out: _Optional[int] = ..., context: _Optional[bytes] = ..., members: _Optional[_Iterable[_Union[BatchMember, _Mapping]]] = ..., taken_ns: _Optional[int] = ...) -> None: ...

class BatchMember(_message.Message):
    __slots__ = ("session_id", "position", "n_rows", "is_prefill", "wait_ns", "upstream_wait_ns", "sent_ns")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    n_rows: int
    is_prefill: bool
    wait_ns: int
    upstream_wait_ns: int
    sent_ns: int
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ..., n_rows: _Optional[int] = ..., is_prefill: _Optional[bool] = ..., wait_ns: _Optional[int] = ..., upstream_wait_ns: _Optional[int] = ..., sent_ns: _Optional[int] = ...) -> None: ...
