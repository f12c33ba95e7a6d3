"""What the demo prints: progress while it runs, one table at its end."""

import sys
import time
from dataclasses import dataclass

from deploy.demo.engine import Answer

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """One line of progress with the time since the start."""
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", flush=True)


@dataclass(frozen=True)
class Row:
    """One prompt's results: what a client got, what came from which tier, and what it compares with."""

    prompt: str
    cold: Answer
    local: Answer
    pulled: Answer

    @property
    def from_dram(self) -> int:
        """Tokens pulled that were promised when they were in the node's memory."""
        return self.pulled.pulled - self.pulled.from_nvme

    @property
    def recomputed(self) -> int:
        """Tokens that were not pulled."""
        return self.pulled.prompt_tokens - self.pulled.pulled

    @property
    def speed_up(self) -> float:
        """Time to first token, cold over pulled."""
        return self.cold.first_token_s / self.pulled.first_token_s

    @property
    def identical(self) -> bool:
        """Whether it says what the engine without a store says."""
        return self.pulled.text == self.cold.text


def table(rows: list[Row]) -> str:
    """The rows under their heads, aligned."""
    heads = ["prompt", "tokens", "from DRAM", "from NVMe", "recomputed"]
    heads += ["cold", "pulled in", "local hit", "cold/pulled", "output"]
    lines = [heads]
    for row in rows:
        tokens = (row.pulled.prompt_tokens, row.from_dram, row.pulled.from_nvme, row.recomputed)
        times = [f"{answer.first_token_s:.2f} s" for answer in (row.cold, row.pulled, row.local)]
        output = "identical" if row.identical else "DIFFERS"
        lines.append([row.prompt, *map(str, tokens), *times, f"{row.speed_up:.1f} x", output])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def verdict(claims: list[tuple[str, bool]]) -> int:
    """Prints each claim with its outcome; the exit code of the demo."""
    print()
    for claim, holds in claims:
        print(f"  {'ok  ' if holds else 'FAIL'}  {claim}")
    failed = sum(not holds for _, holds in claims)
    print(
        f"\n{'Everything above holds.' if not failed else f'{failed} of {len(claims)} claims do not hold.'}"
    )
    sys.stdout.flush()
    return 1 if failed else 0
