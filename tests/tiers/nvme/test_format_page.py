"""docs/FORMAT.md says what the code does: offsets, sizes and names of every field."""

import re

import pytest

from kvstore.tiers.nvme import label, records
from kvstore.tiers.nvme.catalog import _TABLES

SIZES = {"Q": 8, "I": 4, "H": 2, "B": 1}


def rows(repository, heading: str) -> list[tuple[int, int, str]]:
    """(offset, bytes, field) of the table under a heading, where both are numbers."""
    section = (repository / "docs/FORMAT.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", section, re.MULTILINE)
    return [(int(offset), int(size), field) for offset, size, field in found]


def sizes(layout: str) -> list[int]:
    """Sizes of the fields of a struct, padding included."""
    fields = re.findall(r"(\d*)([sxQIHB])", layout)
    return [int(count) if kind in "sx" else SIZES[kind] for count, kind in fields]


@pytest.mark.parametrize(
    ("heading", "layout"), [("Label", label._FIXED.format), ("Record", records._HEAD.format)]
)
def test_the_tables_are_the_structs(repository, heading, layout) -> None:
    at, expected = 0, []
    for size in sizes(layout):
        expected.append((at, size))
        at += size
    told = [(offset, size) for offset, size, _ in rows(repository, heading)]
    assert told[: len(expected)] == expected


def test_the_rest_of_the_label_is_where_it_is_said_to_be(repository) -> None:
    offsets = {field: (offset, size) for offset, size, field in rows(repository, "Label")}
    assert offsets["node_bytes"] == (label._NODE_AT, 2)
    assert offsets["node"] == (label._NODE_AT + 2, label.NODE_BYTES_MAX)
    assert offsets["version"][0] == label._VERSION_AT


def test_every_database_of_the_catalog_is_told_and_every_field_of_its_records(repository) -> None:
    text = (repository / "docs/FORMAT.md").read_text()
    section = text.split("\n## Catalog\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(_TABLES)
    (fields,) = re.findall(r"msgpack array: (.*?), \[slot, slots\]", section)
    assert fields.split(", ") == list(records.Record.__struct_fields__[:-2])
