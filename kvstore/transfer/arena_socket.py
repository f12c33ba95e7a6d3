"""How a node hands its arena to clients on the same host: a memfd over a Unix socket, one message each way.

    client                                       node
    Ask(version, token, writing)   ------->      who is it? (SO_PEERCRED), does it know the token?
    Told(refused, base, bytes) + fd  <-----      the connection stays open as long as both live
    end of file                    <-----        the node has ended, or withdraws its arena

The socket lies in a directory that only its users can enter. Its name is that of one boot of a node, so that
a client cannot take one boot's arena for another's. Who is handed the arena can read, and with `writing`
change, all of it: that is why the kernel is asked who it is.
"""

import fcntl
import hmac
import logging
import os
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvstore.core import BadConfiguration, TransferFailed, limits

log = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".sock"
_ANSWER_S = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_MESSAGE_BYTES_MAX = limits.TOKEN_BYTES_MAX + 256


class Ask(msgspec.Struct, array_like=True, frozen=True):
    """What a client wants: to read the arena, or to write into it."""

    version: int
    token: bytes
    writing: bool


class Told(msgspec.Struct, array_like=True, frozen=True):
    """The answer. Unless it says why not, the file descriptor comes with it."""

    refused: str
    arena_base: int = 0
    arena_bytes: int = 0


class ArenaRefused(TransferFailed):
    """A node on this host does not hand its arena to this process."""


class Handed(NamedTuple):
    """An arena in a client's hands. `fd` is the client's to close; `connection` ends when the node does."""

    fd: int
    arena_base: int
    arena_bytes: int
    connection: socket.socket


class ArenaSocket:
    """A node's end: hands the arena to whom it admits, from a thread of its own.

    Args:
        path: of the socket; its directory is made, for this user alone unless `uids` names others.
        fd: the arena's memfd, sealed; stays the caller's.
        arena_base: the arena's address in the node, which clients' addresses count from.
        token: what a client must know; empty: nothing.
        uids: users that are admitted besides the node's own.

    Raises:
        BadConfiguration: the directory cannot be made or is not safe, or the path is too long.
    """

    def __init__(
        self, path: Path, fd: int, arena_base: int, token: bytes = b"", uids: Collection[int] = ()
    ) -> None:
        self.path = path
        self._told = Told("", arena_base, os.fstat(fd).st_size)
        self._token = token
        self._uids = {os.getuid(), *uids}
        self._clients: set[socket.socket] = set()
        self._writable = fd
        self._readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _prepare(path.parent, shared=len(self._uids) > 1)
            self._listener = _listen(path, 0o666 if len(self._uids) > 1 else 0o600)
        except BaseException:
            os.close(self._readable)
            raise
        self._thread = threading.Thread(target=self._serve, name="arena-socket", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<ArenaSocket {self.path}, {len(self._clients)} clients>"

    def close(self) -> None:
        """Hands out nothing any more, and tells all who have the arena that it has ended."""
        self.path.unlink(missing_ok=True)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        os.close(self._readable)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is not self._listener:
                        self._hear(selector, key.fileobj)
                    elif not self._accept(selector):
                        for client in self._clients:
                            client.close()
                        return

    def _accept(self, selector: selectors.BaseSelector) -> bool:
        """Takes a connection; False when the socket has been closed."""
        try:
            client, _ = self._listener.accept()
        except ConnectionError:
            return True
        except OSError:
            return False
        if len(self._clients) >= limits.CLIENTS_MAX:
            client.close()
            return True
        client.setblocking(False)
        self._clients.add(client)
        selector.register(client, selectors.EVENT_READ)
        return True

    def _hear(self, selector: selectors.BaseSelector, client: object) -> None:
        """A client asks, or has gone."""
        assert isinstance(client, socket.socket)
        data = b""
        with suppress(OSError):
            data = client.recv(_MESSAGE_BYTES_MAX)
            if data:
                self._answer(client, data)
        if not data:
            selector.unregister(client)
            self._clients.discard(client)
            client.close()

    def _answer(self, client: socket.socket, data: bytes) -> None:
        _, uid, _ = _CREDENTIALS.unpack(
            client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        try:
            ask = msgspec.msgpack.decode(data, type=Ask)
        except msgspec.MsgspecError:
            return
        refused = self._refusal(ask, uid)
        if refused:
            log.warning("arena refused uid=%d reason=%r", uid, refused)
            client.send(msgspec.msgpack.encode(Told(refused)))
            return
        fd = self._writable if ask.writing else self._readable
        socket.send_fds(client, [msgspec.msgpack.encode(self._told)], [fd])

    def _refusal(self, ask: Ask, uid: int) -> str:
        if uid not in self._uids:
            return (
                f"it runs as user {os.getuid()}, this process as {uid}, whom transfer.shm_uids does not name"
            )
        if self._token and not hmac.compare_digest(self._token, ask.token):
            return "it asks for a token, and this is another one"
        if ask.version != VERSION:
            return f"it speaks version {VERSION}, not {ask.version}"
        return ""


def ask_for_arena(path: str, token: bytes, *, writing: bool) -> Handed:
    """A client's end: the arena behind a socket, to be read, or to be written.

    Raises:
        ArenaRefused: the node says no, and why.
        TransferFailed: there is no node, or it does not answer.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(path)
        connection.send(msgspec.msgpack.encode(Ask(VERSION, token, writing)))
        data, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES_MAX, 1)
        told = msgspec.msgpack.decode(data, type=Told)
        if told.refused:
            raise ArenaRefused(told.refused)
        if len(fds) != 1 or not _is_safe(fds[0], told.arena_bytes):
            raise TransferFailed(f"what {path} hands out is no sealed memory of a node")
        connection.settimeout(None)
        return Handed(fds[0], told.arena_base, told.arena_bytes, connection)
    except (OSError, msgspec.MsgspecError, TransferFailed) as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TransferFailed):
            raise
        raise TransferFailed(f"no node answers at {path} ({error})") from error


def has_ended(connection: socket.socket) -> bool:
    """Whether the node behind a connection has gone or withdrawn its arena. Does not wait."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_safe(fd: int, size_bytes: int) -> bool:
    """Whether memory of this size is there, and nobody can take it away under a mapping."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return bool(seals & fcntl.F_SEAL_SHRINK) and 0 < size_bytes <= os.fstat(fd).st_size


def _prepare(folder: Path, *, shared: bool) -> None:
    """A directory in which nobody else can put a socket, without those that killed nodes have left."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid not in {0, os.getuid()}:
            raise BadConfiguration(
                f"{folder} for the socket of the arena is not this user's directory: set transfer.shm_dir to another"
            )
        if facts.st_uid == os.getuid():
            folder.chmod(0o711 if shared else 0o700)
        for left in folder.glob(f"*{SUFFIX}"):
            if _is_stale(left):
                left.unlink(missing_ok=True)
    except OSError as error:
        raise BadConfiguration(
            f"the directory {folder} for the socket of the arena cannot be used ({error.strerror}): "
            "set transfer.shm_dir to another, or transfer.shm to false"
        ) from error


def _is_stale(path: Path) -> bool:
    """Whether nobody listens there any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def _listen(path: Path, mode: int) -> socket.socket:
    """A listener that appears under its name only when it listens, so that nobody takes it for a stale one."""
    early = path.with_suffix(".new")
    early.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(early))
        early.chmod(mode)
        listener.listen(64)
        listener.setblocking(False)
        early.rename(path)
    except OSError as error:
        listener.close()
        early.unlink(missing_ok=True)
        raise BadConfiguration(
            f"the socket {path} of the arena cannot be made ({error}): set transfer.shm_dir to another, shorter path"
        ) from error
    return listener
