from relayline.wire.pb.relayline.v1 import relayline_pb2 as _relayline_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArtifactPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ARTIFACT_PHASE_UNSPECIFIED: _ClassVar[ArtifactPhase]
    ARTIFACT_PHASE_FETCHING: _ClassVar[ArtifactPhase]
    ARTIFACT_PHASE_LOADING: _ClassVar[ArtifactPhase]
    ARTIFACT_PHASE_MEASURING: _ClassVar[ArtifactPhase]

class LayerChangeStep(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_CHANGE_STEP_UNSPECIFIED: _ClassVar[LayerChangeStep]
    LAYER_CHANGE_STEP_PREPARE: _ClassVar[LayerChangeStep]
    LAYER_CHANGE_STEP_SWITCH: _ClassVar[LayerChangeStep]
    LAYER_CHANGE_STEP_DROP: _ClassVar[LayerChangeStep]
ARTIFACT_PHASE_UNSPECIFIED: ArtifactPhase
ARTIFACT_PHASE_FETCHING: ArtifactPhase
ARTIFACT_PHASE_LOADING: ArtifactPhase
ARTIFACT_PHASE_MEASURING: ArtifactPhase
LAYER_CHANGE_STEP_UNSPECIFIED: LayerChangeStep
LAYER_CHANGE_STEP_PREPARE: LayerChangeStep
LAYER_CHANGE_STEP_SWITCH: LayerChangeStep
LAYER_CHANGE_STEP_DROP: LayerChangeStep

class JoinRequest(_message.Message):
    __slots__ = ("hello", "progress", "serving", "failure", "prepared", "measured", "sleeping", "alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: StageHello
    progress: ArtifactProgress
    serving: StageServing
    failure: StageFailure
    prepared: StagePrepared
    measured: HostMeasured
    sleeping: StageSleeping
    alive: StageAlive
    def __init__(self, hello: _Optional[_Union[StageHello, _Mapping]] = ..., progress: _Optional[_Union[ArtifactProgress, _Mapping]] = ..., serving: _Optional[_Union[StageServing, _Mapping]] = ..., failure: _Optional[_Union[StageFailure, _Mapping]] = ..., prepared: _Optional[_Union[StagePrepared, _Mapping]] = ..., measured: _Optional[_Union[HostMeasured, _Mapping]] = ..., sleeping: _Optional[_Union[StageSleeping, _Mapping]] = ..., alive: _Optional[_Union[StageAlive, _Mapping]] = ...) -> None: ...

class StageHello(_message.Message):
    __slots__ = ("protocol_version", "software_version", "name", "process_id", "host", "moves", "measures", "beats", "stands_by", "hands_over", "is_relayed", "sleeps", "takes_unread")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    MEASURES_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    IS_RELAYED_FIELD_NUMBER: _ClassVar[int]
    SLEEPS_FIELD_NUMBER: _ClassVar[int]
    TAKES_UNREAD_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    software_version: str
    name: str
    process_id: str
    host: HostFacts
    moves: bool
    measures: bool
    beats: bool
    stands_by: bool
    hands_over: bool
    is_relayed: bool
    sleeps: bool
    takes_unread: bool
    def __init__(self, protocol_version: _Optional[int] = ..., software_version: _Optional[str] = ..., name: _Optional[str] = ..., process_id: _Optional[str] = ..., host: _Optional[_Union[HostFacts, _Mapping]] = ..., moves: _Optional[bool] = ..., measures: _Optional[bool] = ..., beats: _Optional[bool] = ..., stands_by: _Optional[bool] = ..., hands_over: _Optional[bool] = ..., is_relayed: _Optional[bool] = ..., sleeps: _Optional[bool] = ..., takes_unread: _Optional[bool] = ...) -> None: ...

class StageAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostFacts(_message.Message):
    __slots__ = ("hostname", "system", "n_cores", "memory_bytes", "memory_available_bytes", "processor", "engine_version")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_FIELD_NUMBER: _ClassVar[int]
    N_CORES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    system: str
    n_cores: int
    memory_bytes: int
    memory_available_bytes: int
    processor: str
    engine_version: str
    def __init__(self, hostname: _Optional[str] = ..., system: _Optional[str] = ..., n_cores: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., processor: _Optional[str] = ..., engine_version: _Optional[str] = ...) -> None: ...

class Survey(_message.Message):
    __slots__ = ("slices", "link_bytes")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedCompositeFieldContainer[SurveySlice]
    link_bytes: int
    def __init__(self, slices: _Optional[_Iterable[_Union[SurveySlice, _Mapping]]] = ..., link_bytes: _Optional[int] = ...) -> None: ...

class SurveySlice(_message.Message):
    __slots__ = ("header", "size_bytes", "layer_bytes", "head_bytes", "budget_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    size_bytes: int
    layer_bytes: int
    head_bytes: int
    budget_ms: int
    def __init__(self, header: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., layer_bytes: _Optional[int] = ..., head_bytes: _Optional[int] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class HostMeasured(_message.Message):
    __slots__ = ("slices", "round_trip_ns", "bytes_per_s", "failure", "took_ns", "is_doubtful", "is_relayed", "in_service")
    SLICES_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TOOK_NS_FIELD_NUMBER: _ClassVar[int]
    IS_DOUBTFUL_FIELD_NUMBER: _ClassVar[int]
    IS_RELAYED_FIELD_NUMBER: _ClassVar[int]
    IN_SERVICE_FIELD_NUMBER: _ClassVar[int]
    slices: _containers.RepeatedCompositeFieldContainer[SliceCosts]
    round_trip_ns: int
    bytes_per_s: float
    failure: StageFailure
    took_ns: int
    is_doubtful: bool
    is_relayed: bool
    in_service: float
    def __init__(self, slices: _Optional[_Iterable[_Union[SliceCosts, _Mapping]]] = ..., round_trip_ns: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., failure: _Optional[_Union[StageFailure, _Mapping]] = ..., took_ns: _Optional[int] = ..., is_doubtful: _Optional[bool] = ..., is_relayed: _Optional[bool] = ..., in_service: _Optional[float] = ...) -> None: ...

class SliceCosts(_message.Message):
    __slots__ = ("decode", "prefill")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    decode: _containers.RepeatedCompositeFieldContainer[_relayline_pb2.CostPoint]
    prefill: _containers.RepeatedCompositeFieldContainer[_relayline_pb2.CostPoint]
    def __init__(self, decode: _Optional[_Iterable[_Union[_relayline_pb2.CostPoint, _Mapping]]] = ..., prefill: _Optional[_Iterable[_Union[_relayline_pb2.CostPoint, _Mapping]]] = ...) -> None: ...

class ArtifactProgress(_message.Message):
    __slots__ = ("phase", "done_bytes", "total_bytes", "trouble")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    phase: ArtifactPhase
    done_bytes: int
    total_bytes: int
    trouble: str
    def __init__(self, phase: _Optional[_Union[ArtifactPhase, str]] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., trouble: _Optional[str] = ...) -> None: ...

class StageServing(_message.Message):
    __slots__ = ("host", "port", "instance_id")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    instance_id: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class StagePrepared(_message.Message):
    __slots__ = ("change", "is_ready", "done_bytes", "total_bytes", "failure", "trouble")
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    change: int
    is_ready: bool
    done_bytes: int
    total_bytes: int
    failure: StageFailure
    trouble: str
    def __init__(self, change: _Optional[int] = ..., is_ready: _Optional[bool] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., failure: _Optional[_Union[StageFailure, _Mapping]] = ..., trouble: _Optional[str] = ...) -> None: ...

class StageSleeping(_message.Message):
    __slots__ = ("failure",)
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    failure: StageFailure
    def __init__(self, failure: _Optional[_Union[StageFailure, _Mapping]] = ...) -> None: ...

class StageFailure(_message.Message):
    __slots__ = ("label", "message")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    label: str
    message: str
    def __init__(self, label: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Rest(_message.Message):
    __slots__ = ("is_asleep", "route_id")
    IS_ASLEEP_FIELD_NUMBER: _ClassVar[int]
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    is_asleep: bool
    route_id: int
    def __init__(self, is_asleep: _Optional[bool] = ..., route_id: _Optional[int] = ...) -> None: ...

class LayerChange(_message.Message):
    __slots__ = ("number", "step", "keeps", "hand_over", "hand_over_ms")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: LayerChangeStep
    keeps: bool
    hand_over: HandOver
    hand_over_ms: int
    def __init__(self, number: _Optional[int] = ..., step: _Optional[_Union[LayerChangeStep, str]] = ..., keeps: _Optional[bool] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., hand_over_ms: _Optional[int] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("gives", "takes")
    GIVES_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    gives: _containers.RepeatedCompositeFieldContainer[GivenLayers]
    takes: _containers.RepeatedCompositeFieldContainer[TakenLayers]
    def __init__(self, gives: _Optional[_Iterable[_Union[GivenLayers, _Mapping]]] = ..., takes: _Optional[_Iterable[_Union[TakenLayers, _Mapping]]] = ...) -> None: ...

class GivenLayers(_message.Message):
    __slots__ = ("layer_start", "layer_end", "to", "shown_pass")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    SHOWN_PASS_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_end: int
    to: str
    shown_pass: str
    def __init__(self, layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., to: _Optional[str] = ..., shown_pass: _Optional[str] = ...) -> None: ...

class TakenLayers(_message.Message):
    __slots__ = ("layer_start", "layer_end", "address", "shown_pass")
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHOWN_PASS_FIELD_NUMBER: _ClassVar[int]
    layer_start: int
    layer_end: int
    address: str
    shown_pass: str
    def __init__(self, layer_start: _Optional[int] = ..., layer_end: _Optional[int] = ..., address: _Optional[str] = ..., shown_pass: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("stage_index", "stage_count", "pipeline_id", "artifact", "pipeline_json", "engine", "telemetry", "ticket", "coordinator", "listen_port", "adapters", "drafter", "change", "survey", "stands_by", "beats", "relay_port", "rest", "notice")
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    STAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_ID_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_JSON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    LISTEN_PORT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    SURVEY_FIELD_NUMBER: _ClassVar[int]
    STANDS_BY_FIELD_NUMBER: _ClassVar[int]
    BEATS_FIELD_NUMBER: _ClassVar[int]
    RELAY_PORT_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    stage_index: int
    stage_count: int
    pipeline_id: str
    artifact: ArtifactFile
    pipeline_json: bytes
    engine: EngineSettings
    telemetry: TelemetryOrder
    ticket: bytes
    coordinator: str
    listen_port: int
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterFile]
    drafter: Drafter
    change: LayerChange
    survey: Survey
    stands_by: bool
    beats: bool
    relay_port: int
    rest: Rest
    notice: str
    def __init__(self, stage_index: _Optional[int] = ..., stage_count: _Optional[int] = ..., pipeline_id: _Optional[str] = ..., artifact: _Optional[_Union[ArtifactFile, _Mapping]] = ..., pipeline_json: _Optional[bytes] = ..., engine: _Optional[_Union[EngineSettings, _Mapping]] = ..., telemetry: _Optional[_Union[TelemetryOrder, _Mapping]] = ..., ticket: _Optional[bytes] = ..., coordinator: _Optional[str] = ..., listen_port: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[AdapterFile, _Mapping]]] = ..., drafter: _Optional[_Union[Drafter, _Mapping]] = ..., change: _Optional[_Union[LayerChange, _Mapping]] = ..., survey: _Optional[_Union[Survey, _Mapping]] = ..., stands_by: _Optional[bool] = ..., beats: _Optional[bool] = ..., relay_port: _Optional[int] = ..., rest: _Optional[_Union[Rest, _Mapping]] = ..., notice: _Optional[str] = ...) -> None: ...

class ArtifactFile(_message.Message):
    __slots__ = ("file", "size_bytes", "sha256", "path", "unread")
    FILE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    file: str
    size_bytes: int
    sha256: str
    path: str
    unread: bool
    def __init__(self, file: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., path: _Optional[str] = ..., unread: _Optional[bool] = ...) -> None: ...

class AdapterFile(_message.Message):
    __slots__ = ("file", "name", "scale")
    FILE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    file: ArtifactFile
    name: str
    scale: float
    def __init__(self, file: _Optional[_Union[ArtifactFile, _Mapping]] = ..., name: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class Drafter(_message.Message):
    __slots__ = ("layers", "file")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    file: ArtifactFile
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., file: _Optional[_Union[ArtifactFile, _Mapping]] = ...) -> None: ...

class EngineSettings(_message.Message):
    __slots__ = ("ctx_tokens", "n_lanes", "n_threads", "gpu_layers", "max_rows", "prefill_rows", "kv_type", "policy", "calibrate", "kv_layout", "more")
    class MoreEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CTX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_LANES_FIELD_NUMBER: _ClassVar[int]
    N_THREADS_FIELD_NUMBER: _ClassVar[int]
    GPU_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    KV_TYPE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    CALIBRATE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    ctx_tokens: int
    n_lanes: int
    n_threads: int
    gpu_layers: int
    max_rows: int
    prefill_rows: int
    kv_type: str
    policy: str
    calibrate: bool
    kv_layout: str
    more: _containers.ScalarMap[str, str]
    def __init__(self, ctx_tokens: _Optional[int] = ..., n_lanes: _Optional[int] = ..., n_threads: _Optional[int] = ..., gpu_layers: _Optional[int] = ..., max_rows: _Optional[int] = ..., prefill_rows: _Optional[int] = ..., kv_type: _Optional[str] = ..., policy: _Optional[str] = ..., calibrate: _Optional[bool] = ..., kv_layout: _Optional[str] = ..., more: _Optional[_Mapping[str, str]] = ...) -> None: ...

class TelemetryOrder(_message.Message):
    __slots__ = ("level", "otlp_endpoint", "sampler_ratio", "metrics_port")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    OTLP_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_RATIO_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    level: _relayline_pb2.TelemetryLevel
    otlp_endpoint: str
    sampler_ratio: float
    metrics_port: int
    def __init__(self, level: _Optional[_Union[_relayline_pb2.TelemetryLevel, str]] = ..., otlp_endpoint: _Optional[str] = ..., sampler_ratio: _Optional[float] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("ticket", "offset", "sha256", "end")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    offset: int
    sha256: str
    end: int
    def __init__(self, ticket: _Optional[bytes] = ..., offset: _Optional[int] = ..., sha256: _Optional[str] = ..., end: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
