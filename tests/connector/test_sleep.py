"""Sleep mode: vLLM unmaps the KV cache, and on 0.33 says so before. No block is touched from then until it is back.

Mutants that were tried and are caught: a sleep that does not wait for a scatter; loads that are forgotten instead of
reported; loads begun in the sleep; a save reported quiet although it had begun to write.
"""

import threading
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

from connector.compat import unsupported_engine
from connector.connector import KVStoreConnector
from connector.guard import Breaker
from tests.connector.rig import Rig
from tests.connector.support import HANDSHAKE, Engine, Node
from tests.connector.test_worker import Gate, Hanging, blocks_of, chain, gated, held, no_threads_left
from tests.support import wait_until

__all__ = ["no_threads_left"]


def worker_of(rig: Rig) -> KVStoreConnector:
    """The class that vLLM calls, around the rig's worker half."""
    made = KVStoreConnector.__new__(KVStoreConnector)
    made._worker, made.breaker = rig.worker, Breaker(lambda: 0.0)
    return made


def test_what_is_under_way_is_reported_as_failed_and_never_lands() -> None:
    gate = Gate()
    rig = Rig(wrap=lambda mover: Hanging(mover, gate))
    data = rig.random_objects(2)
    objects = chain(rig, data)
    rig.step(rig.load_job(objects), rig.save_job([(5, 9)]))
    assert gate.reached.wait(10)
    before = rig.engine.bytes_of(range(1, 64))
    worker_of(rig).unregister_kv_caches()
    gate.opened.set()
    wait_until(lambda: rig.network.reads >= 1, what="the pull went on")
    worker_of(rig).restore_kv_caches()
    for _ in range(3):
        rig.step()
    everything = rig.everything()
    assert (everything.finished, everything.invalid) == ({"r"}, blocks_of(objects))
    assert rig.save_report().checksums == (None,)
    assert rig.engine.bytes_of(range(1, 64)) == before


def test_a_copy_under_way_ends_before_the_blocks_go(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    with gated(monkeypatch, "scatter") as gate:
        rig.step(rig.load_job(chain(rig, rig.random_objects(1))))
        assert gate.reached.wait(10)
        falling_asleep = threading.Thread(target=worker_of(rig).unregister_kv_caches)
        falling_asleep.start()
        wait_until(lambda: rig.worker._unmapped)
        assert falling_asleep.is_alive()
        gate.opened.set()
        falling_asleep.join(10)
        assert not falling_asleep.is_alive()
    assert rig.worker._touching == 0


def test_a_save_that_had_begun_may_still_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the node must not give its pages to others at once."""
    rig = Rig()
    with gated(monkeypatch, "gather") as gate:
        rig.step(rig.save_job([(5, 9)]))
        assert gate.reached.wait(10)
        falling_asleep = threading.Thread(target=worker_of(rig).unregister_kv_caches)
        falling_asleep.start()
        wait_until(lambda: rig.worker._unmapped)
        gate.opened.set()
        falling_asleep.join(10)
    rig.step()
    assert (rig.save_report().checksums, rig.save_report().quiet) == ((None,), False)


def test_awake_again_it_loads_and_saves() -> None:
    """Also when vLLM says everything twice, as it may."""
    rig = Rig()
    data = rig.random_objects(1)
    connector = worker_of(rig)
    connector.unregister_kv_caches()
    connector.unregister_kv_caches()
    rig.run(rig.load_job(chain(rig, data), "asleep"), rig.save_job([(5, 9)]))
    assert rig.load_report().valid == 0
    assert (rig.save_report().checksums, rig.save_report().quiet) == ((None,), True)
    connector.restore_kv_caches()
    connector.restore_kv_caches()
    rig.steps.clear()
    rig.run(rig.load_job(chain(rig, data), "awake"), rig.save_job([(5, 9)]))
    assert rig.load_report().valid == 1
    assert held(rig, data) == [True]
    assert rig.save_report().checksums != (None,)
    assert not connector.breaker.errors


def test_a_vllm_that_would_not_tell_is_refused(monkeypatch) -> None:
    """0.32 unmaps the KV cache without a word."""
    engine = Engine(Node())
    assert unsupported_engine(engine.config, engine.kv_cache_config) is None
    asleep = SimpleNamespace(**vars(engine.config))
    asleep.model_config = SimpleNamespace(enable_sleep_mode=True)
    reason = unsupported_engine(asleep, engine.kv_cache_config)
    assert reason == "sleep mode with a vLLM older than 0.33 is not supported yet"
    monkeypatch.setattr(KVConnectorBase_V1, "unregister_kv_caches", lambda self: None, raising=False)
    assert unsupported_engine(asleep, engine.kv_cache_config) is None


def test_workers_that_describe_themselves_again_change_nothing() -> None:
    """As they do on 0.33 when they wake up."""
    node = Node()
    engine = Engine(node)
    namespaces = len(engine.control.manifests)
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): HANDSHAKE})
    assert len(engine.control.manifests) == namespaces
    engine.generate("a", list(range(1, 200)))
    assert len(node.objects) == 3
    engine.assert_nothing_left()
