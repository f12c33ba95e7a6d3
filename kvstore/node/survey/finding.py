"""One thing that was looked at."""

from enum import StrEnum

import msgspec


class State(StrEnum):
    """How it is."""

    OK = "ok"
    WARN = "warn"  # it works, but an operator should know
    FAIL = "fail"  # a node would not start, or not do what it is asked for


class Finding(msgspec.Struct, frozen=True):
    """What was looked at, how it is, why, and what helps; `remedy` is empty where nothing needs help."""

    subject: str
    state: State
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    """All is well."""
    return Finding(subject, State.OK, text)


def warn(subject: str, text: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(subject, State.WARN, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(subject, State.FAIL, text, remedy)
