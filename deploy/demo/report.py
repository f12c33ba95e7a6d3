"""What the demo prints: progress while it runs, one table at its end."""

import sys
import time
from dataclasses import dataclass

_BEGAN = time.monotonic()


def say(text: str) -> None:
    """One line of progress with the time since the start."""
    print(f"[{time.monotonic() - _BEGAN:5.0f} s] {text}", flush=True)


@dataclass(frozen=True)
class Row:
    """One prompt's results."""

    prompt: str
    prompt_tokens: int
    pulled: int
    recomputed: int
    cold_s: float
    pulled_s: float
    local_s: float
    identical: bool

    @property
    def speed_up(self) -> float:
        """Time to first token, cold over pulled."""
        return self.cold_s / self.pulled_s


def table(rows: list[Row]) -> str:
    """The rows under their heads, aligned."""
    heads = [
        "prompt",
        "tokens",
        "pulled",
        "recomputed",
        "cold",
        "pulled in",
        "local hit",
        "cold/pulled",
        "output",
    ]
    lines = [heads]
    for row in rows:
        cells = [row.prompt, str(row.prompt_tokens), str(row.pulled), str(row.recomputed)]
        cells += [
            f"{row.cold_s:.2f} s",
            f"{row.pulled_s:.2f} s",
            f"{row.local_s:.2f} s",
            f"{row.speed_up:.1f} x",
        ]
        cells.append("identical" if row.identical else "DIFFERS")
        lines.append(cells)
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
