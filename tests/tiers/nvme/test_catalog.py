"""The catalog on real LMDB: what was written is loaded, bounds hold, and nothing damaged is believed."""

import os

import lmdb
import pytest

from kvstore.core import Extent, limits
from kvstore.tiers.nvme.catalog import Catalog, CatalogDamaged, set_aside
from kvstore.tiers.nvme.device import DeviceDown
from kvstore.tiers.nvme.records import Kind
from tests.tiers.nvme.test_records import record
from tests.tiers.nvme.things import key_of

MAP_BYTES = 64 * limits.MIB


def numbered(n: int, **changes):
    return record(key=key_of(n), sequence=n, slots=Extent(n, 1), **changes)


@pytest.fixture
def catalog(tmp_path):
    catalog = Catalog(tmp_path / "c", MAP_BYTES, new=True)
    yield catalog
    catalog.close()


def reopened(catalog: Catalog) -> Catalog:
    catalog.close()
    return Catalog(catalog.folder, MAP_BYTES, new=False)


def test_what_was_finished_is_loaded_and_what_was_freed_is_not(catalog, tmp_path) -> None:
    namespace = numbered(9, kind=Kind.NAMESPACE, extents=())
    catalog.begin([Extent(n, 1) for n in range(3)], [])
    catalog.finish([(numbered(n), b"table%d" % n) for n in range(3)], [Extent(n, 1) for n in range(3)])
    catalog.finish([(namespace, b"manifest")], ())
    catalog.begin([Extent(7, 2)], [numbered(1)])
    catalog = reopened(catalog)
    records, doubtful = catalog.load()
    assert sorted(records, key=lambda record: record.sequence) == [numbered(0), numbered(2), namespace]
    assert sorted(doubtful) == [Extent(1, 1), Extent(7, 2)]
    assert catalog.payload(numbered(2)) == b"table2"
    assert catalog.payload(namespace) == b"manifest"
    assert catalog.payload(numbered(1)) is None
    catalog.close()


def test_a_freed_record_does_not_take_a_newer_one_of_its_key_along(catalog) -> None:
    old, new = record(sequence=1), record(sequence=2, slots=Extent(20, 1))
    catalog.finish([(old, b"old")], ())
    catalog.finish([(new, b"new")], ())
    catalog.begin((), [old])
    assert catalog.load() == ([new], [old.slots])
    assert (catalog.payload(new), catalog.payload(old)) == (b"new", None)


def test_a_namespace_and_an_object_of_the_same_digest_are_two_things(catalog) -> None:
    one, other = record(), record(kind=Kind.NAMESPACE, extents=())
    catalog.finish([(one, b"table"), (other, b"manifest")], ())
    catalog.begin((), [one])
    assert catalog.load()[0] == [other]


def test_meta_is_kept(catalog) -> None:
    assert catalog.meta("mount") == b""
    catalog.set_meta(mount=b"12345678", previous=b"")
    catalog = reopened(catalog)
    assert (catalog.meta("mount"), catalog.meta("previous")) == (b"12345678", b"")
    catalog.close()


def test_the_map_grows_to_its_bound_and_no_further(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(limits, "CATALOG_MAP_BYTES_MIN", 256 * limits.KIB)
    catalog = Catalog(tmp_path / "c", limits.MIB, new=True)
    stored = 0

    def fill() -> None:
        nonlocal stored
        while stored < 10_000:
            catalog.finish([(numbered(stored + n), b"t" * 2_048) for n in range(8)], ())
            stored += 8

    with pytest.raises(DeviceDown, match="has reached its bound of 1048576 bytes"):
        fill()
    assert 8 < stored < 10_000
    assert catalog._env.info()["map_size"] == limits.MIB
    catalog.close()
    catalog = Catalog(tmp_path / "c", limits.MIB, new=False)
    assert len(catalog.load()[0]) == stored, "a commit that failed must leave nothing"
    catalog.begin((), [numbered(n) for n in range(0, stored, 2)])  # LMDB needs room to delete, too
    assert len(catalog.load()[0]) == stored // 2
    catalog.close()


def test_missing_and_new_are_told_apart(tmp_path) -> None:
    with pytest.raises(CatalogDamaged, match="is missing"):
        Catalog(tmp_path / "c", MAP_BYTES, new=False)
    Catalog(tmp_path / "c", MAP_BYTES, new=True).close()
    with pytest.raises(CatalogDamaged, match="is there already"):
        Catalog(tmp_path / "c", MAP_BYTES, new=True)


def test_a_value_that_was_changed_is_found(catalog) -> None:
    catalog.finish([(numbered(1), b"table")], ())
    name = bytes([Kind.OBJECT]) + numbered(1).key
    for table in ("objects", "tables"):
        with catalog._env.begin(write=True) as txn:
            value = bytearray(txn.get(name, db=catalog._dbs[table]))
            value[-1] ^= 1
            txn.put(name, bytes(value), db=catalog._dbs[table])
    assert catalog.payload(numbered(1)) is None
    with pytest.raises(CatalogDamaged, match="does not match its checksum"):
        catalog.load()


def test_a_cut_file_is_found_before_lmdb_touches_what_is_missing(catalog) -> None:
    catalog.finish([(numbered(n), b"t" * 3_000) for n in range(100)], ())
    catalog.close()
    file = catalog.folder / "data.mdb"
    os.truncate(file, file.stat().st_size - 8_192)
    with pytest.raises(CatalogDamaged, match="was cut to"):
        Catalog(catalog.folder, MAP_BYTES, new=False)


def test_a_process_that_ends_while_it_reads_leaves_a_mark(catalog) -> None:
    catalog.load()
    assert (catalog.folder / "being-read").exists()
    catalog.proved()
    assert not (catalog.folder / "being-read").exists()
    catalog.load()
    catalog.close()
    assert not (catalog.folder / "being-read").exists(), "an orderly end is no damage"


def test_lmdb_failing_to_write_is_a_device_that_is_down(catalog, monkeypatch) -> None:
    class Failing:
        def begin(self, **_: object) -> None:
            raise lmdb.DiskError("No space left on device")

        def close(self) -> None:
            pass

    real = catalog._env
    monkeypatch.setattr(catalog, "_env", Failing())
    with pytest.raises(DeviceDown, match="No space left"):
        catalog.set_meta(mount=b"1")
    monkeypatch.setattr(catalog, "_env", real)


def test_what_is_set_aside_replaces_what_was_before(tmp_path) -> None:
    folder = tmp_path / "c"
    assert set_aside(folder) is None
    for text in ("one", "two"):
        folder.mkdir()
        (folder / "data.mdb").write_text(text)
        aside = set_aside(folder)
        assert aside is not None
        assert (aside / "data.mdb").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["c.damaged"]
