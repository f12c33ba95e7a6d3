"""Manifests reach the index, late if need be, and never hold anything up."""

import asyncio
from contextlib import asynccontextmanager

from kvstore.core import IndexDown, Manifest, Namespace
from kvstore.index import InProcessIndex
from kvstore.node.manifests import Manifests
from tests.support import wait_until_async


class Shaky(InProcessIndex):
    """Down for the first `failures` calls."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.puts = 0

    async def put_manifest(self, namespace: Namespace, manifest: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise IndexDown("down")
        self.puts += 1
        await super().put_manifest(namespace, manifest)


def a_manifest(weights: str) -> Manifest:
    return Manifest(
        weights=weights,
        model={},
        kv_dtype="f",
        tile_format="t",
        chunk_tokens=1,
        unit_tokens=1,
        lanes=((1, 1, 1),),
    )


@asynccontextmanager
async def running(manifests: Manifests):
    task = asyncio.create_task(manifests.run())
    yield
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), task


async def test_every_namespace_is_said_once() -> None:
    index = Shaky(0)
    manifests = Manifests(index)
    async with running(manifests):
        for manifest in (a_manifest("a"), a_manifest("b"), a_manifest("a")):
            manifests.remember(manifest.namespace, manifest.encode())
            await wait_until_async(lambda: not manifests._unsaid)
    assert index.puts == 2
    for manifest in (a_manifest("a"), a_manifest("b")):
        assert await index.manifest(manifest.namespace) == manifest.encode()


async def test_an_index_that_is_down_is_told_later() -> None:
    """Mutant: what failed once is not tried again."""
    index = Shaky(3)
    manifests = Manifests(index, retry_s=0.001)
    manifest = a_manifest("a")
    manifests.remember(manifest.namespace, manifest.encode())
    async with running(manifests):
        await wait_until_async(lambda: index.puts)
    assert index.failures == 0


async def test_it_is_said_again_before_the_index_forgets() -> None:
    index = Shaky(0)
    manifests = Manifests(index, again_s=0.001)
    manifest = a_manifest("a")
    manifests.remember(manifest.namespace, manifest.encode())
    async with running(manifests):
        await wait_until_async(lambda: index.puts >= 3)
