"""The loop clock: sleep costs at most one step."""

from kvstore.core.limits import CLOCK_STEP_S_MAX
from kvstore.node.clock import LoopClock


def test_it_follows_its_source_and_skips_what_the_process_slept_through() -> None:
    """Mutants: no limit on the step; the limit on the sum instead of the step; `_last` not moved on a long step."""
    readings = iter([100.0, 100.25, 100.5, 160.5, 160.75, 160.75])
    clock = LoopClock(lambda: next(readings))
    assert [clock() for _ in range(5)] == [
        0.25,
        0.5,
        0.5 + CLOCK_STEP_S_MAX,
        0.75 + CLOCK_STEP_S_MAX,
        0.75 + CLOCK_STEP_S_MAX,
    ]
    assert clock.skipped_s == 60.0 - CLOCK_STEP_S_MAX
