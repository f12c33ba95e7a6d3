"""What a setting is: its kind, its names in file, environment and flags, and how its text is read.

Every setting is declared once, in `config.py`; the file format, the `KVSTORE_*` names, the flags,
`kvstore config` and the table in docs/CONFIGURATION.md are all derived from that declaration.
"""

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

Value = str | int | float | bool
T = TypeVar("T", bound=Value)


class Kind(NamedTuple):
    """A kind of value: what is expected, in words, and how a TOML value or a text becomes it.

    `parse` raises ValueError for anything else; its text may add a reason.
    """

    expected: str
    parse: Callable[[object], Value]


class Setting(NamedTuple):
    """One declared setting. `default_text` says what an empty default means."""

    section: str
    key: str
    kind: Kind
    default: Value
    default_text: str
    meaning: str
    flag: str

    @property
    def name(self) -> str:
        """As in messages: `dram.size_bytes`."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"KVSTORE_{self.section}_{self.key}".upper()


def setting(kind: Kind, default: T, meaning: str, *, default_text: str = "", flag: str = "") -> T:
    """Declares a field of a section."""
    metadata = {"kind": kind, "meaning": meaning, "default_text": default_text, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


def declared(section: str, section_type: type) -> tuple[Setting, ...]:
    """The settings that a section's dataclass declares."""
    return tuple(
        Setting(
            section=section,
            key=field.name,
            kind=field.metadata["kind"],
            default=cast(Value, field.default),
            default_text=field.metadata["default_text"],
            meaning=field.metadata["meaning"],
            flag=field.metadata["flag"] or f"--{section}-{field.name}".replace("_", "-"),
        )
        for field in dataclasses.fields(section_type)
    )


# --- kinds ------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError
    return raw


def _size(raw: object) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    match = _SIZE.fullmatch(_text(raw).strip())
    if match is None:
        raise ValueError
    return int(Fraction(match[1]) * _UNITS[(match[2] or "").lower()])


def _uids(raw: object) -> str:
    if any(not word.strip().isdecimal() for word in _text(raw).split(",") if raw):
        raise ValueError
    return _text(raw)


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = _text(raw).strip().lower()
    if word not in _YES + _NO:
        raise ValueError
    return word in _YES


def _seconds(raw: object) -> float:
    if isinstance(raw, bool):
        raise ValueError
    seconds = float(raw) if isinstance(raw, int | float) else float(_text(raw))
    if not 0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _address(raw: object) -> str:
    host, port = split_address(_text(raw))
    return join_address(host, port)


def split_address(text: str) -> tuple[str, int]:
    """("host", port) of "host:port"; IPv6 hosts stand in brackets.

    Raises:
        ValueError: it is not an address.
    """
    parts = urlsplit(f"//{text}")
    if parts.hostname is None or parts.port is None or parts.netloc != text or "@" in text:
        raise ValueError
    return parts.hostname, parts.port


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_password(url: str) -> str:
    """A URL that may be shown."""
    return re.sub(r"(?<=:)[^:@/]*(?=@)|(?<=password=)[^&]*", "***", url)


TEXT = Kind("a text", _text)
SIZE = Kind('a size in bytes, such as 8589934592 or "8GiB"', _size)
UIDS = Kind('user ids such as "1000,1001"', _uids)
SWITCH = Kind("true or false", _switch)
SECONDS = Kind("a number of seconds above 0", _seconds)
ADDRESS = Kind('an address such as "127.0.0.1:7400" (port 0: any free port)', _address)


def count(least: int, most: int) -> Kind:
    """A whole number within bounds."""

    def parse(raw: object) -> int:
        if isinstance(raw, bool | float):
            raise ValueError
        number = raw if isinstance(raw, int) else int(_text(raw))
        if not least <= number <= most:
            raise ValueError
        return number

    return Kind(f"a whole number from {least} to {most}", parse)


def choice(*words: str) -> Kind:
    """One of a few words."""

    def parse(raw: object) -> str:
        if raw not in words:
            raise ValueError
        return str(raw)

    return Kind(f"one of {', '.join(words)}", parse)
