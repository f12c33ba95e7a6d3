"""Running a node: from a configuration to an exit code."""

import asyncio
import contextlib
import logging
import signal

from kvstore.core import KVStoreError
from kvstore.node.assemble import Node, assemble
from kvstore.node.garbage import collect_the_young
from kvstore.node.logs import flush_logs, start_logging
from kvstore.node.sections import Config

log = logging.getLogger(__name__)

PUBLISH_S_MAX = 30.0  # then the node is ready, and its first pass goes on
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: Config) -> int:
    """Runs a node until SIGTERM or SIGINT; 0 when it has stopped in order. A second
    signal ends it at once.

    Raises:
        KVStoreError: it could not be started; one line with cause and remedy.
    """
    start_logging(config.log)
    try:
        asyncio.run(_run(config))
    except KVStoreError:
        raise
    except Exception:
        log.exception("the node ends because of a bug of its own")
        return 1
    finally:
        flush_logs()
    return 0


async def _run(config: Config) -> None:
    stop = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, number, stop)
    async with assemble(config) as node, asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(work, name=name) for name, work in node.background.items()]
        background.append(tasks.create_task(collect_the_young(), name="garbage"))
        starting = tasks.create_task(_be_ready(node))
        await stop.wait()
        starting.cancel()
        node.ready(False)
        for task in background:
            task.cancel()
    log.info("stopped")


async def _be_ready(node: Node) -> None:
    """Ready means: engines find here what was found on the devices. An index that is down is no reason to wait."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(node.published(), PUBLISH_S_MAX)
    node.ready(True)
    print(node.banner, flush=True)  # noqa: T201  (what the user came for)


def _on_signal(number: signal.Signals, stop: asyncio.Event) -> None:
    """The first signal asks for an orderly end; from then on each has its default effect."""
    log.info("stopping signal=%s", number.name)
    for each in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(each)
        signal.signal(each, signal.SIG_DFL)
    stop.set()
