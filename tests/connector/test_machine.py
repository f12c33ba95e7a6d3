"""The scheduler half under vLLM's real scheduler, whatever happens, in any order (tests/connector/storm.py).

After every step: no exception inside a hook, no reference on a block that nobody owns, saves within their share of
the pool, calls to the store within a bound that does not grow with time, nothing read that is not leased, no wrong
token. At the end: every request is over; no lease, reservation, reference, job or memo is left; counts are vLLM's.

Mutants of the connector that were tried and are caught: an answer that nobody wants keeps its lease; a lease goes
when its load begins, or never; a failed load is not remembered; a load, or a save, that is not reported stays;
references are not taken, or not given back; an idle engine sleeps with its saves; requests are not forgotten; the
salt, or the embeddings, are not in the key; a readmitted request counts again. (Reports that are counted and not
their ranks: test_ranks.py.)
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.connector.storm import FAULTS, KINDS, Shape, Storm

SOAK = os.environ.get("SOAK") == "1"
EXAMPLES = 2_000 if SOAK else 25
STEPS = 50

HAPPENED = (
    "ahead", "chunked prefills", "preemptions", "loads", "loads failed", "committed", "evicted", "spilled", "resets",
    "reports lost", "reports doubled", "loads doubled while a rank is silent",
    "saves doubled while a rank is silent", "aborted waiting", "aborted waiting_for_remote_kvs",
    "aborted running", "exact counts", "missed never_stored",
)  # fmt: skip

picks = st.integers(0, 15)
shapes = st.builds(
    Shape,
    num_blocks=st.sampled_from([36, 50, 80]),
    max_batched=st.sampled_from([48, 96, 256]),
    ahead=st.booleans(),
    caching=st.sampled_from([False, False, True]),
    ranks=st.sampled_from([1, 2]),
    write_back=st.booleans(),
)

requests = st.fixed_dictionaries(
    {
        "text": picks,
        "kind": st.sampled_from(KINDS),
        "tokens": st.integers(1, 40),
        "copies": st.sampled_from([1, 1, 1, 3]),
        "note": picks,
    }
)


class Machine(RuleBasedStateMachine):
    """The acts as rules; Hypothesis finds and shrinks."""

    adapters: ClassVar[Path]
    tally: ClassVar[Counter[str]] = Counter()

    storm: Storm

    @initialize(kinds=st.lists(shapes, min_size=1, max_size=2))
    def start(self, kinds: list[Shape]) -> None:
        self.storm = Storm(kinds, self.adapters, self.tally)

    @rule(which=picks, some=st.lists(requests, min_size=1, max_size=4), times=st.integers(0, 4))
    def arrive(self, which: int, some: list[dict[str, Any]], times: int) -> None:
        """Requests come, and steps are made in which all is well."""
        self.submit(which, some)
        self.storm.step(which, times, (), 0)

    @rule(
        which=picks,
        some=st.lists(requests, max_size=2),
        times=st.integers(1, 6),
        faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3),
        pick=picks,
    )
    def trouble(self, which: int, some: list[dict[str, Any]], **arguments) -> None:
        """Requests come while something is wrong, and steps are made in which it is."""
        self.submit(which, some)
        self.storm.step(which, **arguments)

    @rule(which=picks, times=st.integers(1, 8))
    def run(self, which: int, times: int) -> None:
        self.storm.step(which, times, (), 0)

    @rule(what=st.sampled_from(["abort"] * 6 + ["evict"] * 6 + ["spill"] * 6 + ["reset"]), which=picks)
    def mishap(self, what: str, which: int) -> None:
        getattr(self.storm, what)(which)

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1, 6.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.storm.wait(seconds)

    def submit(self, which: int, some: list[dict[str, Any]]) -> None:
        for request in some:
            self.storm.submit(which, **request)

    def teardown(self) -> None:
        if hasattr(self, "storm"):  # else the machine did not even start
            self.storm.calm()
            self.storm.read_back()


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """Two LoRA adapters, as far as the connector looks at them."""
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes([number]))
    return tmp_path


@pytest.mark.timeout(36_000 if SOAK else 250)
def test_whatever_happens_in_whatever_order(adapters: Path) -> None:
    Machine.adapters = adapters
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=not SOAK,  # so that what is asserted of the whole run holds of every run
            suppress_health_check=list(HealthCheck),
        ),
    )
    tally = Machine.tally
    print(f"{EXAMPLES} runs: {sorted(tally.items())}")
    assert 2 * tally["promised"] >= tally["requests"] > 200, "hits are what most of it is about"
    assert all(tally[what] for what in (*FAULTS, *KINDS, *HAPPENED)), "something never happened"
