"""The scheduler half with several ranks: one commit or none, and the least that any of them has loaded.

Mutants that were tried and are caught: a commit at the first report; a commit without runs that nobody wrote; a
commit of runs that two ranks wrote; the most instead of the least that ranks have loaded; no end to waiting for a
report; references kept by a save that was given up; a lease kept by a load that is not reported; reports that are
counted, and not their ranks.
"""

import functools
from types import SimpleNamespace
from typing import Any

from connector.loads import LATE_S as LOAD_LATE_S
from connector.metadata import Rank, Reports, SaveReport
from connector.saves import LATE_S as SAVE_LATE_S
from kvstore.core import MissReason
from tests.connector.support import BLOCK, CHUNK, Engine, Node, prompt

TEXT = prompt(1, 3 * CHUNK + 2 * BLOCK + 5)
STORED = 3 * CHUNK + 2 * BLOCK
OBJECTS = 4
OTHER = prompt(2, 2 * CHUNK + 5)


def test_an_object_is_committed_once_with_the_runs_of_all_ranks() -> None:
    """The node of these tests compares the table with what was written."""
    node = Node()
    writer = Engine(node, ranks=2)
    answer = writer.generate("a", TEXT)
    assert len(node.objects) == OBJECTS
    assert node.calls.count("commit") == node.calls.count("reserve")
    writer.assert_nothing_left()
    reader = Engine(node)  # one rank: the namespace does not know of ranks
    assert reader.control.manifests == writer.control.manifests
    assert reader.generate("b", TEXT) == answer
    assert reader.half.shared.stats.pulled_tokens == STORED
    reader.assert_nothing_left()


def test_if_one_rank_cannot_write_nothing_becomes_visible() -> None:
    node = Node()
    engine = Engine(node, ranks=2)
    engine.worker.fail_saves, engine.worker.failing_rank, engine.worker.quiet = True, 1, False
    answer = engine.generate("a", TEXT)
    assert not node.objects
    assert "abort quiet=False" in node.calls and "commit" not in node.calls
    engine.assert_nothing_left()
    engine.worker.fail_saves = False
    engine.generate("b", OTHER)
    assert len(node.objects) == 2, "other requests are unharmed"
    assert Engine(node, ranks=2).generate("a", TEXT) == answer
    assert len(node.objects) == 2 + OBJECTS, "and what failed is pushed by whoever computes it next"


def test_a_rank_that_does_not_report_its_save_is_not_waited_for() -> None:
    """Until then its blocks are held, for it may read them; afterwards it may as well, but nobody commits that."""
    node = Node()
    engine = Engine(node, ranks=2, save_timeout_s=30.0)
    engine.worker.silent_rank = 1
    engine.submit("a", TEXT)
    for _ in range(20):
        engine.step()
    assert engine.half.saves.pinned_blocks == STORED // BLOCK
    assert node.reserved
    engine.now += 30.0 + SAVE_LATE_S
    for _ in range(2):
        engine.step()
    assert node.reserved, "the reservation's time is not up before that of the ranks"
    engine.now += 1.0
    engine.run()
    assert not node.objects
    assert node.calls.count("abort quiet=False") >= 1
    assert engine.half.shared.stats.dropped["a worker did not report in time"] == OBJECTS
    engine.assert_nothing_left()
    engine.worker.silent_rank = None
    engine.generate("b", OTHER)
    assert not engine.worker.unsaid.saves
    assert len(node.objects) == 2, "what it says now is too late"
    engine.assert_nothing_left()


def test_two_ranks_that_write_the_same_run_commit_nothing() -> None:
    """It would be a bug, and nobody would know whose bytes the table is of."""
    node = Node()
    engine = Engine(node, ranks=2)
    of_ranks = engine.worker._of_ranks_save

    def twice(report: SaveReport) -> dict[Rank, SaveReport]:
        return of_ranks(report) | {Rank(1): report}

    engine.worker._of_ranks_save = twice  # type: ignore[method-assign]
    engine.generate("a", TEXT)
    assert not node.objects
    engine.assert_nothing_left()


def test_runs_that_no_rank_has_written_commit_nothing() -> None:
    """Each replica takes the other one for the writer."""
    node = Node()
    engine = Engine(node, ranks=2)
    engine.worker._of_ranks_save = lambda report: {  # type: ignore[method-assign]
        Rank(0): SaveReport(({},) * len(report.checksums), quiet=True),
        Rank(1): SaveReport(tuple({1: runs[1]} for runs in report.checksums if runs), quiet=True),
    }
    engine.generate("a", TEXT)
    assert not node.objects
    assert "abort quiet=True" in node.calls
    engine.assert_nothing_left()


def test_a_load_is_as_long_as_that_of_its_worst_rank() -> None:
    node = Node()
    answer = Engine(node, ranks=2).generate("a", TEXT)
    for rank in range(2):
        engine = Engine(node, ranks=2)
        engine.worker.fail_load_at, engine.worker.failing_rank = 2, rank
        assert engine.generate("b", TEXT) == answer
        stats = engine.half.shared.stats
        assert (stats.pulled_tokens, stats.misses) == (2 * CHUNK, {MissReason.BAD_COPY: 1})
        engine.assert_nothing_left()


def test_a_rank_that_does_not_report_its_load_costs_the_lease_of_nobody() -> None:
    """vLLM waits for the rank with that request; the node need not."""
    node = Node()
    answer = Engine(node, ranks=2).generate("a", TEXT)
    engine = Engine(node, ranks=2, load_timeout_s=10.0)
    engine.worker.silent_rank = 0
    engine.submit("b", TEXT)
    for _ in range(5):
        engine.step()
    assert node.leases
    engine.now += 10.0 + LOAD_LATE_S + 0.1
    engine.step()
    assert not node.leases
    engine.submit("c", OTHER)
    for _ in range(10):
        engine.step()
    assert len(engine.tokens["c"]) == 2, "other requests go on"
    engine.worker.silent_rank = None
    engine.run()
    assert engine.tokens["b"] == answer
    engine.assert_nothing_left()


def silent_after(engine: Engine, steps: int) -> Reports:
    """What the other rank has reported in some steps of a request; all of it is then heard once more."""
    said: list[Reports] = []
    update = engine.half.update_connector_output

    def listen(output: Any) -> None:
        said.append(output.kv_connector_worker_meta or Reports())
        update(output)

    engine.half.update_connector_output = listen  # type: ignore[method-assign]
    for _ in range(steps):
        engine.step()
    heard = functools.reduce(Reports.aggregate, said)
    update(SimpleNamespace(kv_connector_worker_meta=heard, invalid_block_ids=set()))
    return heard


def test_a_save_that_a_rank_reports_twice_was_not_reported_by_the_other() -> None:
    node = Node()
    engine = Engine(node, ranks=2)
    engine.worker.silent_rank = 1
    engine.submit("a", TEXT)
    heard = silent_after(engine, 6)
    assert [list(reports) for reports in heard.saves.values()] == [[Rank(0)]] * len(heard.saves) != []
    assert not {"commit", "abort quiet=True", "abort quiet=False"} & {*node.calls}
    assert engine.half.saves.pinned_blocks == STORED // BLOCK
    engine.worker.silent_rank = None
    engine.run()
    assert len(node.objects) == OBJECTS
    engine.assert_nothing_left()


def test_a_load_that_a_rank_reports_twice_keeps_its_lease_until_the_other_has_read() -> None:
    node = Node()
    answer = Engine(node, ranks=2).generate("a", TEXT)
    engine = Engine(node, ranks=2)
    engine.worker.silent_rank = 1
    engine.submit("b", TEXT)
    heard = silent_after(engine, 4)
    assert [list(reports) for reports in heard.loads.values()] == [[Rank(0)]]
    assert node.leases and engine.half.loads.under_way == 1
    engine.worker.silent_rank = None
    engine.run()
    assert engine.tokens["b"] == answer
    engine.assert_nothing_left()


def test_of_a_rank_the_first_report_counts() -> None:
    one, other, late = (SaveReport((), quiet=True, moved_bytes=size) for size in (1, 2, 3))
    first, second = Reports(saves={7: {Rank(0): one}}), Reports(saves={7: {Rank(0): late, Rank(1): other}})
    assert first.aggregate(second).saves == {7: {Rank(0): one, Rank(1): other}}
