"""LMCache's multi-process server, as its documentation says to run it: `lmcache server`, and vLLM's connector to it.

    with LmcacheServer(folder, size_gib=2) as peer:
        Engine(..., store=peer.transfer_config, env=peer.env)

LMCache comes from PyPI into a folder of the bench's own, without what it asks for: that is CUDA, which a machine
without a GPU does not have, and older versions of packages that vLLM has already. Its metrics are off: they need one
of those. `--supported-transfer-mode auto`: with the default, which is CUDA's, a vLLM on CPU waits for ever.
"""

import json
import sys
from pathlib import Path
from typing import Self

from bench._packages import installed
from tests.support.processes import Process, free_port

VERSION = "0.5.6"
HOST = "127.0.0.1"
START_S = 120.0


class LmcacheServer:
    """The server.

    Raises:
        NotToBeHad: LMCache cannot be installed.
    """

    def __init__(self, folder: Path, size_gib: int) -> None:
        self._folder, self._size_gib = folder, size_gib
        self._port = free_port()
        self._home = installed("lmcache", VERSION)
        self.env = {
            "PYTHONPATH": str(self._home),
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "PYTHONHASHSEED": "0",
        }

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        command = [sys.executable, str(self._home / "bin/lmcache"), "server", "--host", HOST]
        command += ["--port", str(self._port), "--http-host", HOST, "--http-port", str(free_port())]
        command += [
            "--l1-size-gb",
            str(self._size_gib),
            "--eviction-policy",
            "LRU",
            "--disable-observability",
        ]
        command += ["--supported-transfer-mode", "auto"]
        self._process = Process(command, self._folder / "lmcache.log", self.env)
        try:
            self._process.wait_for_output("Application startup complete", START_S)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @property
    def transfer_config(self) -> str:
        """The value of --kv-transfer-config."""
        return json.dumps(
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": f"tcp://{HOST}",
                    "lmcache.mp.port": self._port,
                },
            }
        )
