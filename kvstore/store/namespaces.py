"""Namespaces that were opened in this boot: what sizes their objects may have."""

from collections import OrderedDict

from kvstore.core import (
    BadRequest,
    Namespace,
    NamespaceUnknown,
    ObjectKinds,
    Overloaded,
    decode_manifest,
    limits,
    namespace_of,
    pages_for,
)


class OpenNamespace:
    """A namespace, and how its objects lie in pages."""

    __slots__ = (
        "_page_bytes",
        "_pages",
        "chunk_bytes",
        "chunk_pages",
        "floor_pages",
        "id",
        "kinds",
        "num_objects",
    )

    def __init__(self, namespace: Namespace, kinds: ObjectKinds, page_bytes: int) -> None:
        self.id = namespace
        self.kinds = kinds
        self.chunk_bytes = kinds.largest_bytes
        self.chunk_pages = pages_for(self.chunk_bytes, page_bytes)
        self.floor_pages = limits.OBJECTS_PER_CLIENT_MIN * self.chunk_pages
        self.num_objects = 0
        self._page_bytes = page_bytes
        self._pages: dict[int, int] = {}  # size of an object -> its pages

    def allows(self, size_bytes: int) -> bool:
        """Whether objects of this namespace may have this size."""
        return size_bytes in self._pages or self.kinds.allow(size_bytes)

    def pages_of(self, size_bytes: int) -> int:
        """Pages of an object of this size.

        Raises:
            BadRequest: no object of this namespace has this size.
        """
        pages = self._pages.get(size_bytes)
        if pages is None:
            if not self.kinds.allow(size_bytes):
                units = " or ".join(str(geometry.bytes_per_unit) for geometry in self.kinds.geometries)
                raise BadRequest(
                    f"no object of this namespace has {size_bytes} bytes: at most {self.chunk_bytes}, "
                    f"a multiple of {units}"
                )
            pages = self._pages[size_bytes] = pages_for(size_bytes, self._page_bytes)
        return pages


class Namespaces:
    """The open namespaces, by when they were last opened; at most `NAMESPACES_MAX`."""

    def __init__(self, page_count: int, page_bytes: int) -> None:
        self._page_count = page_count
        self._page_bytes = page_bytes
        self._open: OrderedDict[Namespace, OpenNamespace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, namespace: Namespace, manifest_bytes: bytes) -> str:
        """Makes a namespace known. Returns advice when the arena is too small for it, else an empty string.

        Raises:
            BadRequest: the manifest is not one, or hashes to another digest.
            Overloaded: too many namespaces hold objects.
        """
        manifest = decode_manifest(manifest_bytes)
        if namespace_of(manifest_bytes) != namespace:
            raise BadRequest(
                f"the manifest hashes to {namespace_of(manifest_bytes).hex()[:16]}, not to the namespace "
                f"{namespace.hex()[:16]} it came with: client and node must run compatible versions"
            )
        if namespace not in self._open:
            self._make_room()
            self._open[namespace] = OpenNamespace(namespace, manifest.object_kinds, self._page_bytes)
        self._open.move_to_end(namespace)
        return self._advice(self._open[namespace])

    def find(self, namespace: Namespace) -> OpenNamespace | None:
        """An open namespace, if it is."""
        return self._open.get(namespace)

    def get(self, namespace: Namespace) -> OpenNamespace:
        """An open namespace.

        Raises:
            NamespaceUnknown: it was not opened in this boot.
        """
        opened = self._open.get(namespace)
        if opened is None:
            raise NamespaceUnknown(
                f"the namespace {namespace.hex()[:16]} is not known to this boot: say Hello again"
            )
        return opened

    def _advice(self, opened: OpenNamespace) -> str:
        object_pages = opened.floor_pages // limits.OBJECTS_PER_CLIENT_MIN
        need_pages = object_pages * limits.OBJECTS_IN_ARENA_MIN
        if self._page_count >= need_pages:
            return ""
        need_mib, have_mib = (pages_mib(pages, self._page_bytes) for pages in (need_pages, self._page_count))
        return (
            f"the arena of {have_mib} MiB holds {self._page_count // object_pages} chunks of this model "
            f"({opened.chunk_bytes / limits.MIB:.1f} MiB each): too few to be of use, "
            f"give the node at least {need_mib} MiB"
        )

    def _make_room(self) -> None:
        if len(self._open) < limits.NAMESPACES_MAX:
            return
        unused = next((opened.id for opened in self._open.values() if not opened.num_objects), None)
        if unused is None:
            raise Overloaded(
                f"{limits.NAMESPACES_MAX} namespaces hold objects on this node, another one is not served: "
                "drop the objects of models that are not used any more, or add nodes"
            )
        del self._open[unused]


def pages_mib(pages: int, page_bytes: int) -> int:
    """Size of so many pages in MiB, rounded up."""
    return -(-pages * page_bytes // limits.MIB)
