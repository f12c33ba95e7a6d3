"""Kinds: the objects of models whose layers do not all attend to all tokens.

Layers that see a window, the present chunk of local attention, or a state of all that came before, need only what
belongs to the end of a prefix. That is kept in objects of their own, at some ends of chunks and tails, whose
children they are. What such an object means is the connector's business; a namespace says how long the objects
of each kind may be and what their runs are:

    kind 0      chunks and tails: attention over all tokens         `Manifest.lanes`
    kind 1 ...  as in `Manifest.kinds`

Nobody says of which kind an object is. Its size and its table do, as far as that matters: where two kinds have
equally many runs, the runs of an object are equal parts of it in either.
"""

from typing import NamedTuple

from kvstore.core.geometry import Geometry, Part
from kvstore.core.limits import CHECKSUM_BYTES


class ObjectKinds(NamedTuple):
    """The geometries of a namespace's kinds, and the tokens of the largest object of each."""

    geometries: tuple[Geometry, ...]
    tokens_max: tuple[int, ...]

    @property
    def largest_bytes(self) -> int:
        """Size of the largest object of any kind."""
        return max(
            geometry.object_bytes(tokens)
            for geometry, tokens in zip(self.geometries, self.tokens_max, strict=True)
        )

    def allow(self, size_bytes: int) -> bool:
        """Whether an object of any kind can have this size."""
        return any(self._allows(kind, size_bytes) for kind in range(len(self.geometries)))

    def geometry_of(self, size_bytes: int, table_bytes: int) -> Geometry | None:
        """That of an object of this size, whose table has so many bytes; None: no object is like that."""
        for kind, geometry in enumerate(self.geometries):
            if geometry.num_runs * CHECKSUM_BYTES == table_bytes and self._allows(kind, size_bytes):
                return geometry
        return None

    def whole(self, size_bytes: int, table_bytes: int) -> Part:
        """The part that is the whole of an object that was committed with a table of so many bytes."""
        geometry = self.geometry_of(size_bytes, table_bytes)
        assert geometry is not None, f"{size_bytes} bytes with a table of {table_bytes} are no object"
        return geometry.whole(size_bytes)

    @property
    def ambiguous(self) -> bool:
        """Whether size and table may not tell what an object's runs are."""
        uneven = {geometry.num_runs for geometry in self.geometries if not _even(geometry)}
        counts = [geometry.num_runs for geometry in self.geometries]
        return any(counts.count(number) > 1 for number in uneven)

    def _allows(self, kind: int, size_bytes: int) -> bool:
        geometry, tokens = self.geometries[kind], self.tokens_max[kind]
        return geometry.units_of(size_bytes) is not None and size_bytes <= geometry.object_bytes(tokens)


def _even(geometry: Geometry) -> bool:
    """Whether all runs of an object are of one size."""
    return len({group.unit_bytes for group in geometry.lanes}) == 1
