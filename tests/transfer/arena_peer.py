"""A node's side of transfers by shared memory, as a process: `python -m tests.transfer.arena_peer PATH BYTES`.

It makes an arena, offers it at the socket PATH, and says `ready ADDRESS FD`. SIGUSR1: withdraw it, and say so.
"""

import signal
import sys
from pathlib import Path

from kvstore.tiers import Arena
from kvstore.transfer import ArenaSocket


def main() -> None:
    arena = Arena.create(int(sys.argv[2]), lock=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    offered = ArenaSocket(Path(sys.argv[1]), arena.fd, arena.address)
    print("ready", arena.address, arena.fd, flush=True)
    signal.sigwait([signal.SIGUSR1])
    offered.close()
    print("withdrawn", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
