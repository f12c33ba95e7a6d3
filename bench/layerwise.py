"""What gathering saves layer by layer gains and costs: the worker half of the connector, plain and layerwise.

A step computes 16 layers of 1,024 tokens (products of matrices, one thread): 64 MiB of KV in four objects, which the
next step saves into a node by shared memory. On CPU, what is gathered while a layer computes competes with it for
cores and memory, which a GPU's copy engine does not. No vLLM.

    python bench/layerwise.py [--full] [--json]
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

import torch

from bench._harness import Report, Wrong, interleave, parse_arguments, run
from connector.layerwise import LayerwiseHalf
from connector.metadata import Coming, Jobs, SaveJob, SaveObject, Shape
from connector.worker import WorkerHalf
from kvstore.client import Client, ClientConfig, Grant, open_mover
from kvstore.core import Extent, Key, Manifest, Namespace, chunk_key, limits
from kvstore.wire import ReserveItem
from tests.connector.caches import full_spec, make_engine, vllm_config
from tests.support.node import running_node

LAYERS, HEADS, HEAD_SIZE, BLOCK_TOKENS = 16, 8, 64, 32
OBJECTS, BLOCKS = 4, 8  # and blocks of each
SIDE = 768
SAVE_S_MAX = 60.0


class Worker:
    """One worker, and steps of an engine that computes and saves."""

    def __init__(self, half: type[WorkerHalf], control: str) -> None:
        self.engine = make_engine([full_spec(BLOCK_TOKENS, HEADS, HEAD_SIZE)] * LAYERS, 1 + OBJECTS * BLOCKS)
        staging = partial(open_mover, control, transfer="shm", staging_bytes=128 * limits.MIB)
        self.half = half(staging, vllm_config(), self.engine.config)
        self.half.register_kv_caches(self.engine.tensors)
        self._numbers = count(1)
        self._matrix = torch.rand(SIDE, SIDE)
        self.geometry = self.engine.understood().geometry
        self.object_bytes = self.geometry.object_bytes(BLOCKS * BLOCK_TOKENS)
        self.coming: list[Coming] = []

    @property
    def shape(self) -> Shape:
        """Of its objects."""
        return Shape(self.geometry, (0, LAYERS), 1)

    def forward_s(self) -> float:
        """Seconds of a pass over all layers."""
        self.coming = [
            Coming(next(self._numbers), tuple(range(1 + at * BLOCKS, 1 + (at + 1) * BLOCKS)))
            for at in range(OBJECTS)
        ]
        jobs = Jobs(shape=self.shape, coming=self.coming)
        began = time.perf_counter()
        self.half.begin_saves(jobs)
        for name in self.engine.tensors:
            torch.mm(self._matrix, self._matrix)
            if isinstance(self.half, LayerwiseHalf):
                self.half.save_layer(name)
        self.half.begin_saves(jobs)
        return time.perf_counter() - began

    def save_s(self, job: SaveJob) -> float:
        """Seconds of saving what the pass computed."""
        began = time.perf_counter()
        self.half.begin_saves(Jobs(saves=[job], shape=self.shape))
        while True:
            self.half.get_transfer_results(set())
            reports = self.half.build_connector_worker_meta()
            if reports is not None:
                break
            if time.perf_counter() > began + SAVE_S_MAX:
                raise Wrong("a save was not reported")
            time.sleep(0.0002)
        [report] = reports.saves[job.job].values()
        if None in report.checksums:
            raise Wrong("a save failed")
        return time.perf_counter() - began


class Store:
    """A node's pages for jobs."""

    def __init__(self, stack: ExitStack, control: str, worker: Worker) -> None:
        self._loop = stack.enter_context(asyncio.Runner())
        self._client = Client(ClientConfig(node=control))
        self._loop.run(self._client.start())
        stack.callback(lambda: self._loop.run(self._client.close()))
        hand = worker.half.get_handshake_metadata()
        manifest = Manifest(
            weights="bench",
            model={},
            kv_dtype=hand.kv_dtype,
            tile_format=hand.tile_format,
            chunk_tokens=BLOCKS * BLOCK_TOKENS,
            unit_tokens=hand.unit_tokens,
            lanes=worker.geometry.lanes,
        )
        self._namespace: Namespace = self._loop.run(self._client.open(manifest))
        self._jobs = count(1)

    def job(self, coming: Sequence[Coming], object_bytes: int) -> tuple[SaveJob, list[Grant]]:
        """Pages for these, under new keys."""
        keys = [chunk_key(Key(self._namespace), list(os.urandom(8))) for _ in coming]
        items = [ReserveItem(key, Key(self._namespace), 0, object_bytes, False) for key in keys]
        grants = list(self._loop.run(self._client.reserve(self._namespace, items, 60.0)).grants)
        objects = []
        for one, grant in zip(coming, grants, strict=True):
            if grant.granted is None:
                raise Wrong(f"no room: {grant.answer}")
            extents = tuple(Extent(*extent) for extent in grant.granted.extents)
            objects.append(
                SaveObject(
                    grant.item.key,
                    grant.granted.generation,
                    extents,
                    object_bytes,
                    one.blocks,
                    offer=one.offer,
                )
            )
        address = grants[0].address
        assert address is not None
        return SaveJob(next(self._jobs), address, tuple(objects), SAVE_S_MAX), grants

    def give_back(self, grants: Sequence[Grant]) -> None:
        """Nothing of them is published."""
        self._loop.run(self._client.abort(self._namespace, grants, quiet=True))


def forward_ms(worker: Worker) -> float:
    """Milliseconds of a pass."""
    return 1e3 * worker.forward_s()


def save_ms(worker: Worker, store: Store) -> float:
    """Milliseconds from the end of a pass to that of its save, with the pages at hand."""
    worker.forward_s()
    job, grants = store.job(worker.coming, worker.object_bytes)
    taken_s = worker.save_s(job)
    store.give_back(grants)
    return 1e3 * taken_s


def main() -> int:
    """Measures and prints; the exit code."""
    arguments = parse_arguments(__doc__ or "")
    torch.set_num_threads(1)
    report = Report("Saves of 64 MiB, gathered behind the pass or layer by layer in it", "ms")
    with ExitStack() as stack:
        node = stack.enter_context(running_node(dram_size_bytes=str(limits.GIB)))
        workers = {
            "plain": Worker(WorkerHalf, node.control),
            "layerwise": Worker(LayerwiseHalf, node.control),
        }
        for worker in workers.values():
            stack.callback(worker.half.shutdown)
        store = Store(stack, node.control, workers["plain"])
        rows: dict[str, dict[str, Callable[[], float]]] = {
            "the save behind the pass": {n: partial(save_ms, w, store) for n, w in workers.items()},
            "the pass": {n: partial(forward_ms, w) for n, w in workers.items()},
        }
        for name, measured in rows.items():
            samples = interleave(measured, 25 if arguments.full else 9)
            report.row(name, samples, against=("layerwise", "plain"))
    report.note("on CPU, without the step in between in which a layerwise gather could end unseen")
    return report.finish(arguments.json)


if __name__ == "__main__":
    run(main)
