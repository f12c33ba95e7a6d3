"""The worker half that gathers saves layer by layer: `layerwise` in `kv_connector_extra_config`.

    step n     handle_preemptions   memory for what this step completes
               save_kv_layer        a thread copies that layer of it, while the engine computes the next
               wait_for_save        all layers have been asked for
    step n+1   its save is hashed and sent from there

The plain half gathers in step n+1. So does this one wherever what was gathered early is not there or not whole: no
room, a layer whose hook was not called (CUDA graphs that are not piecewise skip it), a model of several kinds of KV.
"""

from collections.abc import Mapping
from typing import Any

from connector.compat import logger
from connector.copies import Fence
from connector.early import EarlyObjects
from connector.metadata import Jobs, SaveObject
from connector.pinning import host_memory
from connector.tensors import KVCaches
from connector.worker import WorkerHalf

log = logger(__name__)


class LayerwiseHalf(WorkerHalf):
    """The connector of one worker, with early gathers in as much memory again as staging has."""

    _early: EarlyObjects | None = None
    _step: Jobs | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `WorkerHalf`."""
        super().register_kv_caches(kv_caches)
        if isinstance(self._caches, KVCaches) and self._mover is not None:
            self._early = EarlyObjects(self._caches, self._mover.staging.size_bytes, host_memory)
        elif self._mover is not None:
            log.warning("layerwise has no effect: the model has more than one kind of KV")

    def begin_saves(self, jobs: Jobs) -> None:
        """See `WorkerHalf`. The first call of a step comes before its forward pass, the second behind."""
        if self._early is not None:
            if jobs is self._step:
                self._early.close()
            else:
                self._step = jobs
                shape = jobs.shape or self._shape
                self._early.begin(jobs.coming if shape is not None and shape.writes(self._rank) else ())
        super().begin_saves(jobs)

    def save_layer(self, name: str) -> None:
        """The engine has computed this layer of the step, or has asked its device to."""
        if self._early is not None:
            self._early.layer(name)

    def leave_blocks(self) -> None:
        """See `WorkerHalf`."""
        if self._early is not None:
            self._early.stop()
        super().leave_blocks()

    def return_to_blocks(self) -> None:
        """See `WorkerHalf`."""
        super().return_to_blocks()
        if self._early is not None:
            self._early.go_on()

    def shutdown(self) -> None:
        """See `WorkerHalf`."""
        if self._early is not None:
            self._early.stop()
        super().shutdown()

    def _fill(self, wanted: SaveObject, out: memoryview, after: Fence) -> None:
        if self._early is None or not self._early.take(wanted.offer, out):
            super()._fill(wanted, out, after)
