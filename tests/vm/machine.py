"""A machine while it runs."""

import re
import subprocess
import sys
import threading
from pathlib import Path

from tests.vm.kernel import Kernel
from tests.vm.packages import program

_END = re.compile(r"MACHINE ENDS WITH (\d+)")


def boot(kernel: Kernel, image: Path, *, memory_mib: int, timeout_s: float, log: Path) -> int:
    """Runs a machine to its end, with its console here and in `log`; the exit code of its command.

    A machine that takes longer than `timeout_s`, or ends without a word, is 1.
    """
    command = [
        *(
            program("qemu-system-x86_64"),
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-M",
            "q35",
            "-smp",
            "2",
        ),
        *("-m", str(memory_mib), "-kernel", str(kernel.image), "-initrd", str(image)),
        *("-append", "console=ttyS0 quiet loglevel=1 panic=-1 rdinit=/init random.trust_cpu=on"),
        *("-display", "none", "-no-reboot", "-nodefaults", "-serial", "stdio"),
    ]
    code = 1
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as machine,
    ):
        timer = threading.Timer(timeout_s, machine.kill)
        timer.start()
        assert machine.stdout is not None
        for raw in machine.stdout:
            line = raw.decode(errors="replace").rstrip()
            file.write(f"{line}\n")
            if found := _END.search(line):
                code = int(found[1])
                continue
            print(line, flush=True)
        if not timer.is_alive():
            print(f"the machine was ended after {timeout_s:g} s", file=sys.stderr)
            code = 1
        timer.cancel()
    return code
