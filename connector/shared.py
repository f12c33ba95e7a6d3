"""What the parts of the scheduler half have in common."""

from collections.abc import Callable
from dataclasses import dataclass, field

from connector.config import Config
from connector.control import Control
from connector.cost import Cost, LoadPolicy
from connector.kinds import Kind
from connector.known import Known
from connector.leases import Leases
from connector.paths import Paths
from connector.stats import Stats
from connector.steps import Steps


@dataclass(slots=True)
class Shared:
    """One engine's view of the store.

    Args:
        control: the store.
        config: the user's settings.
        clock: seconds, monotonic.
        block_tokens: tokens of an engine block.
        world_size: ranks that report every job.
        kinds: of the model's KV, the full one first.
        whole_hits: of a hit in part nothing is of use.
        epoch: counts namespaces: keys, leases and saves of an earlier one are void.
    """

    control: Control
    config: Config
    clock: Callable[[], float]
    block_tokens: int
    world_size: int
    kinds: tuple[Kind, ...]
    whole_hits: bool = False
    epoch: int = 0
    stats: Stats = field(default_factory=Stats)
    steps: Steps = field(default_factory=Steps)
    cost: Cost = field(init=False)
    known: Known = field(init=False)
    leases: Leases = field(init=False)
    paths: Paths = field(init=False)

    def __post_init__(self) -> None:
        self.cost = Cost(LoadPolicy(self.config.load_policy))
        self.known = Known(self.clock)
        self.leases = Leases(self.control, self.clock)
        self.paths = Paths(self.clock)
