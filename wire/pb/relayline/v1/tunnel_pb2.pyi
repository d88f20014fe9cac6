from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenRequest(_message.Message):
    __slots__ = ("name", "wanted_port", "measure")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WANTED_PORT_FIELD_NUMBER: _ClassVar[int]
    MEASURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    wanted_port: int
    measure: bool
    def __init__(self, name: _Optional[str] = ..., wanted_port: _Optional[int] = ..., measure: _Optional[bool] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("port", "ticket", "measured")
    PORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    port: int
    ticket: bytes
    measured: WayMeasured
    def __init__(self, port: _Optional[int] = ..., ticket: _Optional[bytes] = ..., measured: _Optional[_Union[WayMeasured, _Mapping]] = ...) -> None: ...

class WayMeasured(_message.Message):
    __slots__ = ("round_trip_ns", "bytes_per_s")
    ROUND_TRIP_NS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    round_trip_ns: int
    bytes_per_s: float
    def __init__(self, round_trip_ns: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class CarryRequest(_message.Message):
    __slots__ = ("ticket", "data", "ended")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    data: bytes
    ended: bool
    def __init__(self, ticket: _Optional[bytes] = ..., data: _Optional[bytes] = ..., ended: _Optional[bool] = ...) -> None: ...

class CarryResponse(_message.Message):
    __slots__ = ("data", "ended")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ended: bool
    def __init__(self, data: _Optional[bytes] = ..., ended: _Optional[bool] = ...) -> None: ...
