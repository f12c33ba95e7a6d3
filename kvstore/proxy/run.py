"""Running a proxy: from a configuration to an exit code."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
from aiohttp import web

from kvstore import __version__
from kvstore.core import KVStoreError
from kvstore.proxy.call import Caller
from kvstore.proxy.config import ProxyConfig
from kvstore.proxy.engine import Engines, Role
from kvstore.proxy.job import Means
from kvstore.proxy.metrics import ProxyMetrics
from kvstore.proxy.server import Front

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
READY = "kvstore proxy is ready"
SHUTDOWN_S = 10.0  # for answers under way; then their clients are cut off, and engines with them


def run(config: ProxyConfig) -> int:
    """Runs a proxy until SIGTERM or SIGINT; 0 when it has stopped in order. A second signal ends it at once.

    Raises:
        KVStoreError: it cannot listen; one line with cause and remedy.
    """
    try:
        asyncio.run(_run(config))
    except KVStoreError:
        raise
    except Exception:
        log.exception("the proxy ends because of a bug of its own")
        return 1
    return 0


async def _run(config: ProxyConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, number, stop)
    async with serving(config) as (address, engines):
        print(banner(config, address, engines), flush=True)  # noqa: T201  (what the user came for)
        await stop.wait()
    log.info("stopped")


@asynccontextmanager
async def serving(config: ProxyConfig) -> AsyncIterator[tuple[tuple[str, int], Engines]]:
    """A proxy while it runs, with the address that it listens on. Its engines have been checked once."""
    async with AsyncExitStack() as stack:
        # A connection per request: closing it is what cancels the request at the engine, and an idle one that the
        # engine closes at the same moment would look like a death.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_s),
                headers={"Accept-Encoding": "identity", "User-Agent": f"kvstore-proxy/{__version__}"},
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        )
        engines = Engines(config, session)
        metrics = ProxyMetrics(lambda: engines.all)
        front = Front(Means(config, engines, Caller(config, session), metrics))
        await engines.check_all()
        runner = web.AppRunner(
            front.application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=SHUTDOWN_S,
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, *config.listen).start()
        except OSError as error:
            host, port = config.listen
            raise KVStoreError(
                f"cannot listen on {host}:{port}: {error.strerror}; take another with --listen"
            ) from None
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watch = tasks.create_task(engines.watch(), name="health checks")
        stack.callback(watch.cancel)
        yield runner.addresses[0][:2], engines


def banner(config: ProxyConfig, address: tuple[str, int], engines: Engines) -> str:
    """What `kvstore proxy` says when it is ready."""
    host, port = address
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lines = [f"kvstore {__version__}, proxy on {url}"]
    for role in Role:
        lines += [
            f"  {role:<8} {engine.url} ({'up' if engine.up else 'down'})" for engine in engines.of(role)
        ]
    if not config.prefill:
        lines.append("  warning: no --prefill: decode engines compute their prompts themselves")
    lines.append(
        f"  clients   OPENAI_BASE_URL={url}/v1{', with the token as API key' if config.token else ''}"
    )
    lines.append(f"{READY}; SIGTERM or Ctrl-C stops it")
    return "\n".join(lines)


def _on_signal(number: signal.Signals, stop: asyncio.Event) -> None:
    """The first signal asks for an orderly end; from then on each has its default effect."""
    log.info("stopping signal=%s", number.name)
    for each in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(each)
        signal.signal(each, signal.SIG_DFL)
    stop.set()
