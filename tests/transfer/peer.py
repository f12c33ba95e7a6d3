"""A node's side of a Mooncake transfer, as a process of its own: `python -m tests.transfer.peer FILE BYTES
HOST PROTOCOL DEVICES`.

It maps the file, registers it, and says `ready SEGMENT ADDRESS`. SIGUSR1: unregister, and say so.
"""

import signal
import sys
from pathlib import Path

from kvstore.transfer import MooncakeTransfer
from tests.contracts.transfer_memory import Memory


def main() -> None:
    path, size_bytes = Path(sys.argv[1]), int(sys.argv[2])
    memory = Memory(size_bytes, path)
    host, protocol, devices = sys.argv[3:]
    transfer = MooncakeTransfer(host, protocol, devices)
    transfer.register(memory.address, size_bytes)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    sys.stdout.write(f"ready {transfer.segment} {memory.address}\n")  # whole, also where nothing is buffered
    sys.stdout.flush()
    signal.sigwait([signal.SIGUSR1])
    transfer.unregister(memory.address)
    print("unregistered", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
