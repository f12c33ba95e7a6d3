"""Say what stands in a node's way on this machine: devices, links, memory, Redis, ports, Mooncake."""

import argparse
import asyncio
from collections import Counter

import msgspec

from kvstore.cli.settings import add_settings, load
from kvstore.node import Finding, State, survey_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The same flags as `serve`, and how to say it."""
    parser.add_argument("--json", action="store_true", help="Print findings as JSON.")
    parser.add_argument("--no-transfer", action="store_true", help="Do not try Mooncake.")
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Prints findings; 1 when one of them is a failure."""
    config = load(options).config
    findings = asyncio.run(survey_machine(config, transfer=not options.no_transfer))
    count = Counter(finding.state for finding in findings)
    if options.json:
        counts = {str(state): count[state] for state in State}
        print(msgspec.json.encode({"node": config.node.id, "findings": findings, "counts": counts}).decode())
    else:
        for finding in findings:
            print(_line(finding))
        print(", ".join(f"{count[state]} {state}" for state in State))
    return 1 if count[State.FAIL] else 0


def _line(finding: Finding) -> str:
    text = f"{finding.state:<5} {finding.subject}: {finding.text}"
    return f"{text}\n      -> {finding.remedy}" if finding.remedy else text
