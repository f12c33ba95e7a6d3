"""A TCP proxy whose replies can be held back: a server that is slow, without being touched."""

import asyncio
import contextlib
from typing import Self

from kvstore.client import LoopThread


class SlowProxy:
    """Listens on a free loopback port and forwards to `port`; what comes back waits for `reply_delay_s`."""

    def __init__(self, port: int) -> None:
        self.reply_delay_s = 0.0
        self.delayed = 0
        self._target = port

    def __enter__(self) -> Self:
        self._loop = LoopThread("slow-proxy")
        self._server = self._loop.run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._loop.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, back, slow=False), self._pump(there, writer, slow=True))

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, slow: bool) -> None:
        loop = asyncio.get_running_loop()
        with (
            contextlib.suppress(ConnectionError),
            contextlib.closing(target),
        ):  # then the other half ends as well
            while data := await source.read(1 << 16):
                if slow and self.reply_delay_s:
                    self.delayed += 1
                    loop.call_later(self.reply_delay_s, target.write, data)
                else:
                    target.write(data)
                    await target.drain()
