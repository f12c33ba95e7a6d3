"""References on the engine's blocks: what protects a block until its save has ended.

A block with a reference is not given to another request, whatever becomes of the one that filled it. References
are bounded, because blocks that nobody else uses are not free while they are held.
"""

from collections.abc import Sequence
from typing import Any

from connector.compat import pool_has_cached, pool_is_unused


class Pins:
    """References that saves hold on blocks of vLLM's pool.

    Args:
        share: of all blocks that may be held at a time.
    """

    def __init__(self, share: float) -> None:
        self.count = 0
        self._share = share
        self._pool: Any = None

    def bind(self, pool: Any) -> None:
        """The engine's block pool."""
        self._pool = pool

    def take(self, blocks: Sequence[int]) -> bool:
        """Takes a reference on each, if the bound allows it."""
        if self.count + len(blocks) > self._share * self._pool.num_gpu_blocks:
            return False
        assert all(not self._pool.blocks[block].is_null for block in blocks), (
            "a link of blocks that do not exist"
        )
        self._pool.touch([self._pool.blocks[block] for block in blocks])
        self.count += len(blocks)
        return True

    def give_back(self, blocks: Sequence[int]) -> None:
        """Gives a reference on each back."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])
        self.count -= len(blocks)

    def empty_pool(self) -> bool:
        """Whether the pool holds no KV any more, used or cached, once all references have been given back.

        vLLM has tried to empty it before it asks us, in vain where references of ours were in its way.
        """
        if pool_is_unused(self._pool):
            self._pool.reset_prefix_cache()
        return pool_is_unused(self._pool) and not pool_has_cached(self._pool)
