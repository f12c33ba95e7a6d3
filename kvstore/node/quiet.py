"""Keeps a library's meaningless start messages away from users; everything else it says is passed on.

Mooncake logs in C++ straight to file descriptor 2, before anybody could configure its logger.
"""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

MOONCAKE_NOISE = re.compile(
    rb"Logging before InitGoogleLogging"
    rb"|Local segment descriptor not found"  # looked up before it is made, on every start
    rb"|Using default malloc/free for protocol"
    rb"|No RDMA devices found"  # said with tcp, too
)


@contextlib.contextmanager
def without_noise(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Holds back what this process writes to standard error, then drops the lines that match `noise`."""
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not noise.search(line):
                    os.write(2, line)
