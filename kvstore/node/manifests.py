"""Keeps the manifests of this boot's namespaces in the index, so that "0 hits" can be explained by comparing two.

For diagnosis only: nothing waits for it, and an index that is down costs nothing but a later attempt.
"""

import asyncio
from collections import OrderedDict

from kvstore.core import IndexDown, Namespace, limits
from kvstore.index import Index

RETRY_S = 5.0
AGAIN_S = 86_400.0  # the index forgets a manifest after a week


class Manifests:
    """The manifests that engines said Hello with."""

    def __init__(self, index: Index, *, retry_s: float = RETRY_S, again_s: float = AGAIN_S) -> None:
        self._index = index
        self._retry_s = retry_s
        self._again_s = again_s
        self._known: OrderedDict[Namespace, bytes] = OrderedDict()
        self._unsaid: set[Namespace] = set()
        self._wake = asyncio.Event()

    def remember(self, namespace: Namespace, manifest: bytes) -> None:
        """A namespace was opened; again and again, for all that matters. From the control loop only."""
        if namespace in self._known:
            return
        self._known[namespace] = manifest
        self._unsaid.add(namespace)
        if len(self._known) > limits.NAMESPACES_MAX:
            forgotten, _ = self._known.popitem(last=False)
            self._unsaid.discard(forgotten)
        self._wake.set()

    async def run(self) -> None:
        """Tells the index until cancelled."""
        while True:
            self._wake.clear()
            await self._say()
            try:
                async with asyncio.timeout(self._retry_s if self._unsaid else self._again_s):
                    await self._wake.wait()
            except TimeoutError:
                self._unsaid = set(self._known)

    async def _say(self) -> None:
        try:
            for namespace in sorted(self._unsaid):
                manifest = self._known.get(namespace)  # it may have been forgotten meanwhile
                if manifest is not None:
                    await self._index.put_manifest(namespace, manifest)
                self._unsaid.discard(namespace)
        except IndexDown:
            return  # the publisher logs and counts that; what is unsaid stays so
