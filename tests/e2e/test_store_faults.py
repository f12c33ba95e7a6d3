"""One engine outlives whatever becomes of its store: the same tokens, no restart, and hits again by themselves.

The baseline is computed by the same engine before there is a store. A fault hits a load in flight by construction:
`Forwarder.on_reply` sees the node's promise come back and stops the node before it passes the promise on, so that the
load begins and cannot end. It is proved by what the stopped node has not read at its Mooncake port, and by vLLM's own
counters: tokens were promised to a load, and did not come. A store that always misses fails there, and at every
`assert_hits`. In the end no step of the engine has spent more than 100 ms in the connector, by its own histogram.
"""

from pathlib import Path

import pytest

from tests.e2e.stage import CHUNK_TOKENS, LOOKUP_TIMEOUT_S, on_loopback
from tests.e2e.support import wait_for_nothing_held
from tests.support import wait_until

pytestmark = pytest.mark.e2e


def test_an_engine_outlives_its_store(model_path: Path, repository: Path, tmp_path: Path) -> None:
    with on_loopback(model_path, repository, tmp_path) as (stage, redis):
        stage.assert_in_time(stage.ask("no store yet"), LOOKUP_TIMEOUT_S)
        stage.start_node()
        stage.node.wait_ready()
        stage.assert_hits("a store appears")

        stage.ask_frozen("frozen during a load")
        stage.thaw()
        stage.assert_hits("thawed")
        wait_for_nothing_held(stage.node, 60)

        redis.kill()
        wait_until(lambda: stage.node.gauge("kvstore_index_up") == 0, 30, "the node to miss its Redis")
        assert stage.ask("Redis killed").answer.pulled == CHUNK_TOKENS
        redis.restart()
        stage.assert_hits("Redis restarted")

        stage.ask_frozen("killed during a load, and restarted at once", then=stage.restart_node)
        stage.node.wait_ready()
        stage.assert_hits("restarted")
        wait_for_nothing_held(stage.node, 60)
        stage.assert_no_step_waited()
