"""A process that answers at once and does nothing else: what a question costs beside a load, whoever is asked.

    with Echo(num_callers=1) as echo:
        ask = Caller(echo.address)  # in any process
        ask()  # one question and its answer, over loopback TCP, one thread on either side

What a node takes longer than this is its own; what this takes is the machine, its scheduler and the load.
"""

import socket
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Self

QUESTION = bytes(200)  # as long as a Hello
HOST = "127.0.0.1"


class Echo:
    """The process, for so many callers, and where it listens."""

    address: tuple[str, int]

    def __init__(self, num_callers: int) -> None:
        self._num_callers = num_callers

    def __enter__(self) -> Self:
        context = get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, self._num_callers), daemon=True)
        with ExitStack() as stack:
            process.start()
            there.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            self.address = here.recv()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Caller:
    """One connection to it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __call__(self) -> None:
        """Asks, and waits for the answer."""
        self._socket.sendall(QUESTION)
        left = len(QUESTION)
        while left:
            came = len(self._socket.recv(left))
            assert came, "the echo has ended"
            left -= came


def serve(pipe: Connection, num_callers: int) -> None:
    """Answers, each caller in a thread of its own; one that does not ask costs nothing."""
    with socket.create_server((HOST, 0)) as listener:
        pipe.send(listener.getsockname())
        threads = [Thread(target=answer, args=listener.accept()[:1]) for _ in range(num_callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def answer(caller: socket.socket) -> None:
    """Until the caller has gone."""
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with caller:
        while asked := caller.recv(len(QUESTION)):
            caller.sendall(asked)
