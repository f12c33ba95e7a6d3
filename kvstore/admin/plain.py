"""Frozen snapshots as what JSON has: objects, lists, texts, numbers. Bytes become hexadecimal."""

import dataclasses
from collections.abc import Iterable, Mapping

import msgspec


def plain(value: object) -> object:
    """The same, for JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}
    assert isinstance(value, Iterable), f"{type(value).__name__} has no place in an answer"
    return [plain(each) for each in value]
