"""The catalog: one LMDB environment per device, so that a start need not read the whole record region.

It repeats what the records on the device say, and adds what they cannot: which slots are *doubtful*, that
is free here while the device may still hold a record in them. A slot becomes doubtful, durably, before a
record is written to it or its record is to go; so after a crash exactly these slots are looked at, and no
record of an object that was never reported, or was freed, comes back. docs/FORMAT.md has the argument.

Every value carries a checksum of its own (LMDB has none). Whatever is wrong with the environment is
`CatalogDamaged` when it is opened or read: it is set aside and made anew from the records. Files that were
cut short are found before LMDB maps them; damage that ends the process leaves a mark that it was being
read, and the next start sets it aside: never a crash loop.

One thread writes (`begin`, `finish`), any thread reads tables; growing the map waits for readers.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import lmdb
import msgspec
from xxhash import xxh3_64_intdigest

from kvstore.core import Extent, KVStoreError, limits
from kvstore.tiers.nvme.device import DeviceDown
from kvstore.tiers.nvme.records import Record

_CHECKSUM_BYTES = 8
_TABLES = ("objects", "tables", "doubtful", "meta")
_READING = "being-read"  # a file that is there while the environment is walked

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)

Writes = Iterable[tuple[Record, bytes]]


class CatalogDamaged(KVStoreError):
    """The catalog is missing, broken, or not of this device's last mount; the records know everything."""


class Catalog:
    """The objects of one device by key, their payloads, and the doubtful slots."""

    def __init__(self, folder: Path, map_bytes_max: int, *, new: bool) -> None:
        """Opens the environment, or makes a new one. Values are not looked at yet.

        Raises:
            CatalogDamaged
        """
        self.folder = folder
        self._map_bytes_max = max(map_bytes_max, limits.CATALOG_MAP_BYTES_MIN)
        self._reading = threading.Lock()
        if new != (not (folder / "data.mdb").exists()):
            raise CatalogDamaged(f"{folder} {'is there already' if new else 'is missing'}")
        if (folder / _READING).exists():
            raise CatalogDamaged(f"{folder} was being read when the process ended")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._env = lmdb.open(
                str(folder), map_size=self._map_bytes(), max_dbs=len(_TABLES), max_readers=512
            )
        except (lmdb.Error, OSError) as error:
            raise CatalogDamaged(f"{folder} cannot be opened: {error}") from error
        try:
            self._check_length()
            self._dbs = {name: self._env.open_db(name.encode()) for name in _TABLES}
        except (lmdb.Error, OSError) as error:
            self._env.close()
            raise CatalogDamaged(f"{folder} cannot be opened: {error}") from error

    # --- reading ------------------------------------------------------------------------------------

    def load(self) -> tuple[list[Record], list[Extent]]:
        """All records, and the doubtful slots. Until `proved`, the end of the process counts as damage.

        Raises:
            CatalogDamaged: a value is not what was written.
        """
        (self.folder / _READING).touch()
        try:
            with self._env.begin() as txn:
                records = [
                    _decode_record(bytes(key), value) for key, value in txn.cursor(self._dbs["objects"])
                ]
                doubtful = [
                    Extent(int.from_bytes(slot, "big"), int.from_bytes(_checked(slot, value), "big"))
                    for slot, value in txn.cursor(self._dbs["doubtful"])
                ]
        except lmdb.Error as error:
            raise CatalogDamaged(f"{self.folder} cannot be read: {error}") from error
        return records, doubtful

    def proved(self) -> None:
        """It was read and written without ending the process."""
        (self.folder / _READING).unlink(missing_ok=True)

    def payload(self, record: Record) -> bytes | None:
        """The payload of a record: an object's table, a namespace's manifest. None: it is not to be had here."""
        key = _name(record)
        with self._reading:
            try:
                with self._env.begin() as txn:
                    value = txn.get(key, db=self._dbs["tables"])
            except lmdb.Error:
                return None
        if value is None:
            return None
        try:
            data = _checked(key, value)
        except CatalogDamaged:
            return None
        return data[8:] if data[:8] == record.sequence.to_bytes(8, "big") else None

    def meta(self, name: str) -> bytes:
        """A value of the catalog itself; empty when there is none.

        Raises:
            CatalogDamaged
        """
        try:
            with self._env.begin() as txn:
                value = txn.get(name.encode(), db=self._dbs["meta"])
        except lmdb.Error as error:
            raise CatalogDamaged(f"{self.folder} cannot be read: {error}") from error
        return b"" if value is None else _checked(name.encode(), value)

    # --- writing: each call is durable when it returns --------------------------------------------------

    def begin(self, slots: Iterable[Extent], freed: Iterable[Record]) -> None:
        """Before the device changes: these slots are doubtful, these objects are no more.

        Raises:
            DeviceDown: the catalog cannot be written; which of it became durable is not known.
        """
        freed = list(freed)
        doubtful = [*slots, *(record.slots for record in freed)]

        def change(txn: lmdb.Transaction) -> None:
            for start, count in doubtful:
                self._put(txn, "doubtful", start.to_bytes(8, "big"), count.to_bytes(8, "big"))
            for record in freed:
                self._delete(txn, record)

        self._commit(change, self._map_bytes_max + self._map_bytes_max // 4)

    def finish(self, written: Writes, slots: Iterable[Extent]) -> None:
        """After the device has changed: these objects are there, nothing about these slots is doubtful.

        Raises:
            DeviceDown: as `begin`.
        """
        written, slots = list(written), list(slots)

        def change(txn: lmdb.Transaction) -> None:
            for start, _ in slots:
                txn.delete(start.to_bytes(8, "big"), db=self._dbs["doubtful"])
            for record, payload in written:
                key = _name(record)
                self._put(txn, "objects", key, _encoder.encode(record))
                self._put(txn, "tables", key, record.sequence.to_bytes(8, "big") + payload)

        self._commit(change, self._map_bytes_max)

    def set_meta(self, **values: bytes) -> None:
        """Sets values of the catalog itself.

        Raises:
            DeviceDown: as `begin`.
        """

        def change(txn: lmdb.Transaction) -> None:
            for name, value in values.items():
                self._put(txn, "meta", name.encode(), value)

        self._commit(change, self._map_bytes_max)

    def close(self) -> None:
        """Ends it; everything that was written is durable already."""
        self.proved()
        self._env.close()

    def _commit(self, change: Callable[[lmdb.Transaction], None], map_bytes_max: int) -> None:
        while True:
            try:
                with self._env.begin(write=True) as txn:
                    change(txn)
                return
            except lmdb.MapFullError as error:
                self._grow(error, map_bytes_max)
            except lmdb.Error as error:
                raise DeviceDown(f"the catalog in {self.folder} cannot be written: {error}") from error

    def _put(self, txn: lmdb.Transaction, table: str, key: bytes, data: bytes) -> None:
        checksum = xxh3_64_intdigest(key + data).to_bytes(_CHECKSUM_BYTES, "little")
        txn.put(key, checksum + data, db=self._dbs[table])

    def _delete(self, txn: lmdb.Transaction, record: Record) -> None:
        """Deletes a record, not a newer one of the same key."""
        key = _name(record)
        value = txn.get(key, db=self._dbs["objects"])
        if value is None or _decode_record(key, bytes(value)).sequence != record.sequence:
            return
        txn.delete(key, db=self._dbs["objects"])
        txn.delete(key, db=self._dbs["tables"])

    def _map_bytes(self) -> int:
        """Twice what there is, so that growing is rare."""
        data = self.folder / "data.mdb"
        used = data.stat().st_size if data.exists() else 0
        return min(max(limits.CATALOG_MAP_BYTES_MIN, 2 * used), max(self._map_bytes_max, used))

    def _grow(self, full: lmdb.MapFullError, map_bytes_max: int) -> None:
        """Makes the map larger. What frees may go past what puts may use: LMDB copies what it deletes from."""
        size = self._env.info()["map_size"]
        if size >= map_bytes_max:
            raise DeviceDown(f"the catalog in {self.folder} has reached its bound of {size} bytes") from full
        with self._reading:
            self._env.set_mapsize(min(2 * size, map_bytes_max))

    def _check_length(self) -> None:
        """A file that was cut would end the process where LMDB touches what is missing.

        Raises:
            OSError: it was cut.
        """
        need_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        size_bytes = (self.folder / "data.mdb").stat().st_size
        if need_bytes > size_bytes:
            raise OSError(f"data.mdb was cut to {size_bytes} of {need_bytes} bytes")


def set_aside(folder: Path) -> Path | None:
    """Moves an environment out of the way, in place of an earlier one; where it is now, None when there is none."""
    if not folder.exists():
        return None
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def _name(record: Record) -> bytes:
    return bytes([record.kind]) + record.key


def _decode_record(name: bytes, value: bytes) -> Record:
    try:
        return _decoder.decode(_checked(name, value))
    except msgspec.DecodeError as error:
        raise CatalogDamaged(f"the catalog's entry {name.hex()[:16]} cannot be read: {error}") from error


def _checked(key: bytes, value: bytes) -> bytes:
    data = value[_CHECKSUM_BYTES:]
    if xxh3_64_intdigest(key + data).to_bytes(_CHECKSUM_BYTES, "little") != value[:_CHECKSUM_BYTES]:
        raise CatalogDamaged(f"the catalog's entry {key.hex()[:16]} does not match its checksum")
    return data
