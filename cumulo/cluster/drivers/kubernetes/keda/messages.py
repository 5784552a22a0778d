"""The messages of KEDA's external scaler (externalscaler.proto) as bytes: nine fields of protobuf, written and read
by hand, so that no generated code is needed. Used by scaler.py.

Wire format: protobuf.dev/programming-guides/encoding. Fields that are not known are passed over.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from cumulo.errors import CumuloError

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class ScaledObjectRef:
    name: str
    namespace: str
    metadata: dict[str, str] = field(default_factory=dict)  # of the trigger, as in the manifest


def read_object(data: bytes) -> ScaledObjectRef:
    name = namespace = ""
    metadata: dict[str, str] = {}
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            name = value.decode()
        elif number == 2:
            namespace = value.decode()
        elif number == 3:
            pair = {at: part.decode() for at, part in _fields(value) if isinstance(part, bytes)}
            metadata[pair.get(1, "")] = pair.get(2, "")
    return ScaledObjectRef(name, namespace, metadata)


def read_metrics_request(data: bytes) -> tuple[ScaledObjectRef, str]:
    """The object, and the metric that is asked for."""
    found, metric = ScaledObjectRef("", ""), ""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            found = read_object(value)
        elif number == 2 and isinstance(value, bytes):
            metric = value.decode()
    return found, metric


def write_active(active: bool) -> bytes:
    return _number(1, int(active))


def write_spec(metric: str, target: int) -> bytes:
    """What a replica should have of the metric."""
    return _bytes(1, _bytes(1, metric.encode()) + _number(2, target) + _double(3, float(target)))


def write_value(metric: str, value: int) -> bytes:
    return _bytes(1, _bytes(1, metric.encode()) + _number(2, value) + _double(3, float(value)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _LENGTH:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise CumuloError(f"a protobuf message has a field of wire type {kind}, which does not exist")
        if at + size > len(data):
            raise CumuloError("a protobuf message ends in the middle of a field")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise CumuloError("a protobuf message ends in the middle of a number")


def _key(number: int, kind: int) -> bytes:
    return bytes([number << 3 | kind])


def _number(number: int, value: int) -> bytes:
    """Zero is the default, and left out. Negative numbers do not occur."""
    if not value:
        return b""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return _key(number, _VARINT) + bytes([*found, value])


def _double(number: int, value: float) -> bytes:
    return _key(number, _FIXED64) + struct.pack("<d", value) if value else b""


def _bytes(number: int, value: bytes) -> bytes:
    size = _number(1, len(value))[1:] or b"\0"
    return _key(number, _LENGTH) + size + value
