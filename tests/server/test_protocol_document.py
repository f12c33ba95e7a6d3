"""docs/PROTOCOL.md says what the code does: calls, fields, codes, reasons, bounds, life of a copy, golden vectors."""

import hashlib
import json
import re
import typing

import msgspec
import pytest
from xxhash import xxh3_64_hexdigest

from kvstore import wire
from kvstore.core import (
    LIFE,
    Key,
    Manifest,
    MissReason,
    chunk_key,
    decode_manifest,
    encode_extras,
    limits,
    seal,
)
from kvstore.server.control import CODES
from kvstore.wire import AcquireAnswer, CommitAnswer, ReplyBody, RequestBody, ReserveAnswer
from tests.conftest import REPOSITORY

TEXT = (REPOSITORY / "docs/PROTOCOL.md").read_text()


def table(*header: str) -> list[list[str]]:
    """The rows of the table with these first columns."""
    lines = TEXT.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| " + " | ".join(header) + " |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def block(kind: str) -> str:
    (text,) = re.findall(rf"```{kind}\n(.*?)\n```", TEXT, re.DOTALL)
    return str(text)


def fields(struct: type[msgspec.Struct]) -> str:
    return ", ".join(struct.__struct_fields__)


def names(union: object) -> set[str]:
    return {kind.__name__ for kind in typing.get_args(union)}


def test_every_call_is_listed_with_its_fields_and_its_answer() -> None:
    rows = table("call", "fields", "answer")
    assert {row[0] for row in rows} == names(RequestBody)
    assert {row[0]: row[1] for row in rows} == {row[0]: fields(getattr(wire, row[0])) for row in rows}
    assert {row[2] for row in rows} == names(ReplyBody) - {"Failed"}


@pytest.mark.parametrize("header", ["part of a call", "reply", "answer per key"])
def test_every_other_message_is_listed_with_its_fields(header) -> None:
    rows = table(header, "fields")
    assert {row[0]: row[1] for row in rows} == {row[0]: fields(getattr(wire, row[0])) for row in rows}
    expected = {
        "part of a call": {"ReserveItem", "CommitItem", "ReportItem"},
        "reply": names(ReplyBody),
        "answer per key": names(ReserveAnswer) | names(CommitAnswer) | names(AcquireAnswer),
    }
    assert {row[0] for row in rows} == expected[header]


def test_the_envelopes_are_described() -> None:
    described = {row[0]: re.sub(r" \(.*?\)", "", row[1]) for row in table("envelope", "fields")}
    assert described == {"request": fields(wire.Request), "reply": fields(wire.Reply)}


def test_every_call_says_what_happens_when_it_is_said_again() -> None:
    listed = [name for row in table("call", "when it is said again") for name in row[0].split(", ")]
    assert sorted(listed) == sorted(names(RequestBody))


def test_the_life_of_a_copy_is_the_table_in_the_code() -> None:
    life = [
        [state, event, following] for state, events in LIFE.items() for event, following in events.items()
    ]
    assert table("state", "event", "next state") == life


def test_every_code_of_a_failure_is_explained() -> None:
    documented = {row[0] for row in table("code", "meaning")}
    assert documented == {*CODES.values(), "version", "too_large", "internal"}
    docstring = wire.Failed.__doc__ or ""
    assert documented == set(re.findall(r"[a-z_]+", docstring.split("Codes: ")[1]))


def test_every_reason_is_listed() -> None:
    listed = TEXT.split("names in metrics:")[1].split(".\n")[0]
    assert [word.strip() for word in listed.split(",")] == [reason.value for reason in MissReason]


def test_bounds_are_those_of_the_code() -> None:
    for name, value, _ in table("bound", "value"):
        assert float(value) == getattr(limits, name), name


def test_the_golden_manifest_gives_the_golden_namespace() -> None:
    manifest = decode_manifest(block("manifest").encode())
    assert manifest.encode().decode() == block("manifest")
    assert manifest.namespace.hex() == block("namespace")
    by_hand = hashlib.sha256(b"kvstore.namespace.v1\0" + block("manifest").encode())
    assert by_hand.hexdigest() == block("namespace")


def test_the_golden_keys_come_out_by_hand_and_by_the_code() -> None:
    namespace = bytes.fromhex(block("namespace"))
    extras = [tuple(extra) for extra in json.loads(block("extras"))]
    assert encode_extras(reversed(extras)).decode() == block("extras")
    first = chunk_key(Key(namespace), range(256))
    assert first.hex() == block("key") == by_hand(namespace, list(range(256)), b"")
    assert chunk_key(first, [7, 8, 9], extras).hex() == block("tail")
    assert block("tail") == by_hand(first, [7, 8, 9], block("extras").encode())


def test_the_golden_table_has_the_golden_seal() -> None:
    table = bytes.fromhex(block("table"))
    assert (
        seal(table).hex()
        == block("seal")
        == (len(table) // 8).to_bytes(4, "big").hex() + xxh3_64_hexdigest(table)
    )


def by_hand(parent: bytes, tokens: list[int], extras: bytes) -> str:
    """The key as the page describes it, written anew."""
    words = b"".join(number.to_bytes(4, "little") for number in [len(tokens), *tokens])
    return hashlib.sha256(b"kvstore.key.v1\0" + parent + words + extras).hexdigest()


def test_another_manifest_is_another_namespace() -> None:
    changed = json.loads(block("manifest")) | {"kv_dtype": "float16"}
    assert msgspec.convert(changed, Manifest).namespace.hex() != block("namespace")
