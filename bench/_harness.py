"""What all benchmarks share: interleaved runs, ratios of medians, a table for people and JSON for programs.

    report = Report("transfer", "GB/s")
    samples = interleave({"ours": put, "raw": raw_put}, pairs=9)
    report.row("put 4 MiB", samples, against=("ours", "raw"))
    report.aim("put_vs_raw", value=0.93, aim=0.8, unit="x")
    return report.finish(arguments.json)  # of a main that is called by `run`

Runs alternate A B A B, so that a machine that slows down slows both. A missed aim is said and exits 0: speed is no
gate on a shared machine. A wrong result raises `Wrong`, and `run` exits 1.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple, NoReturn

PAIRS_MIN = 7


class Wrong(Exception):
    """A measured thing gave a wrong result: nothing about its speed is worth saying."""


class Arguments(NamedTuple):
    """What every benchmark can be asked."""

    json: bool
    full: bool
    extra: Mapping[str, str] = {}  # what only this benchmark can be asked; empty where it was not


class Samples(NamedTuple):
    """Values of one thing measured, in the order measured."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({min(self.values):.3g}-{max(self.values):.3g})"


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with the exit code of `main`; 1 and a line that says so if a result was wrong."""
    try:
        code = main()
    except Wrong as wrong:
        print(f"WRONG RESULT: {wrong}", file=sys.stderr)
        code = 1
    sys.exit(code)


def parse_arguments(description: str, **extra: str) -> Arguments:
    """Reads --json and --full from the command line, and `extra` options, given with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--full", action="store_true", help="as many runs as a publication needs")
    for name, meaning in extra.items():
        parser.add_argument(f"--{name}", default="", metavar=name.upper(), help=meaning)
    known = parser.parse_args()
    return Arguments(known.json, known.full, {name: getattr(known, name) for name in extra})


def interleave(measured: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, Samples]:
    """Each measurement `pairs` times, alternating, after one run of each that does not count."""
    assert pairs >= PAIRS_MIN, f"{pairs} pairs say too little; at least {PAIRS_MIN}"
    for measure in measured.values():
        measure()
    values: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(pairs):
        for name, measure in measured.items():
            values[name].append(measure())
    return {name: Samples(tuple(some)) for name, some in values.items()}


class Report:
    """Rows and aims of one benchmark.

    Args:
        title: printed above the table.
        unit: of all measured values.
    """

    def __init__(self, title: str, unit: str) -> None:
        self._title = title
        self._unit = unit
        self._rows: list[dict[str, object]] = []
        self._lines: list[list[str]] = []
        self._summary: dict[str, dict[str, object]] = {}
        self._notes: list[str] = []
        self._at_most: set[str] = set()

    def row(self, name: str, samples: Mapping[str, Samples], against: tuple[str, str]) -> float:
        """Adds a line that compares two of the samples; the ratio of their medians."""
        ours, other = against
        ratio = samples[ours].median / samples[other].median
        self._rows.append(
            {
                "name": name,
                "unit": self._unit,
                "ratio": ratio,
                **{
                    key: {
                        "median": some.median,
                        "min": min(some.values),
                        "max": max(some.values),
                        "all": some.values,
                    }
                    for key, some in samples.items()
                },
            }
        )
        if not self._lines:
            self._lines.append(["", *(f"{key} {self._unit}" for key in samples), f"{ours}/{other}"])
        self._lines.append([name, *(str(some) for some in samples.values()), f"{ratio:.2f}"])
        return ratio

    def aim(self, name: str, value: float, aim: float, unit: str, *, at_most: bool = False) -> None:
        """Adds an aim: `value` should be at least `aim`, or at most."""
        self._summary[name] = {"value": value, "aim": aim, "unit": unit}
        if at_most:
            self._at_most.add(name)

    def note(self, line: str) -> None:
        """Adds a line below the table: settings, machine, what was pre-faulted."""
        self._notes.append(line)

    def content(self) -> dict[str, object]:
        """Everything, for JSON."""
        return {"rows": self._rows, "summary": self._summary, "notes": self._notes}

    def finish(self, as_json: bool) -> int:
        """Prints everything; the exit code."""
        if as_json:
            print(json.dumps(self.content(), indent=1))
            return 0
        self.show_table()
        self.show_aims()
        return 0

    def show_table(self) -> None:
        """Prints rows and notes."""
        for line in (self._title, *_aligned(self._lines), *self._notes):
            print(line, flush=True)

    def show_aims(self) -> None:
        """Prints each aim, and whether it was met."""
        for name, entry in self._summary.items():
            value, aim = entry["value"], entry["aim"]
            assert isinstance(value, float) and isinstance(aim, float)
            met = value <= aim if name in self._at_most else value >= aim
            bound = "at most" if name in self._at_most else "at least"
            print(f"{name}: {value:.2f} {entry['unit']}, aim {bound} {aim} {'met' if met else 'MISSED'}")


def finish_all(reports: Sequence[Report], as_json: bool) -> int:
    """Prints several reports of one benchmark, all aims last; with --json as one list. The exit code."""
    if as_json:
        print(json.dumps([report.content() for report in reports], indent=1))
        return 0
    for report in reports:
        report.show_table()
        print()
    for report in reports:
        report.show_aims()
    return 0


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(line[n]) for line in lines) for n in range(len(lines[0]))] if lines else []
    return [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
