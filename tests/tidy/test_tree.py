"""The tree checks itself: what no linter of ours can say. Each list that must be empty names the places."""

import ast
import re

import pytest

from tests.tidy.source import ROOT, Source, committed_top_level, imports, rooms, sources

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400
TOP_LEVEL = {
    "pyproject.toml",
    "kvstore",
    "connector",
    "tests",
    "deploy",
    "bench",
    "README.md",
    "Makefile",
    "LICENSE",
    "docs",
}
WAITS = {"time.sleep", "asyncio.sleep"}
SUPPRESSORS = {"suppress", "contextlib.suppress"}
ESCAPES = {"skip", "skipif", "xfail", "importorskip"}


def test_every_file_says_what_it_is_for() -> None:
    assert [s.name for s in sources() if s.text.strip() and not ast.get_docstring(s.tree)] == []


def test_files_are_short() -> None:
    sizes = {s.name: s.text.count("\n") for s in sources("kvstore", "connector")}
    assert {name: lines for name, lines in sizes.items() if lines > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{s.at(node)} {node.name}": node.end_lineno - node.lineno + 1
        for s in sources("kvstore", "connector")
        for node in ast.walk(s.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert {name: lines for name, lines in sizes.items() if lines > FUNCTION_LINES_MAX} == {}


def swallows(node: ast.AST) -> bool:
    """A handler that does nothing, or a suppression of everything."""
    if isinstance(node, ast.ExceptHandler):
        return all(isinstance(s, ast.Pass | ast.Continue) or is_constant(s) for s in node.body)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in SUPPRESSORS:
        return bool({ast.unparse(argument) for argument in node.args} & {"Exception", "BaseException"})
    return False


def is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def swallowed(source: Source) -> list[str]:
    return [source.at(node) for node in ast.walk(source.tree) if swallows(node)]


def test_no_handler_swallows() -> None:
    """What may be ignored is named: contextlib.suppress(TheOneError)."""
    assert [place for s in sources("kvstore", "connector", "bench", "deploy") for place in swallowed(s)] == []


def waits_or_escapes(node: ast.AST) -> bool:
    """A sleep, or a mark that makes a test say nothing."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in WAITS:
        return ast.unparse(node.args[0]) != "0"
    return (
        isinstance(node, ast.Attribute) and node.attr in ESCAPES and ast.unparse(node).startswith("pytest.")
    )


def waits_and_escapes(source: Source) -> list[str]:
    return [source.at(node) for node in ast.walk(source.tree) if waits_or_escapes(node)]


def test_tests_neither_sleep_nor_skip() -> None:
    """A test waits for a condition (tests.support.wait_until), and what cannot run here is not written as a test."""
    assert [x for s in sources("tests") if s.room != "support" for x in waits_and_escapes(s)] == []


def past_the_door(source: Source) -> list[str]:
    """Imports of a file inside another room that its door does not give out, and of a room's own door from inside."""
    found = []
    for node, module, names in imports(source):
        parts = module.split(".")
        if parts[0] != "kvstore" or len(parts) < 2 or parts[1] not in rooms():
            continue
        room = parts[1]
        files = {name for name in names if (ROOT / "kvstore" / room / f"{name}.py").exists()}
        inside = set(parts[2:]) | files
        if source.room != room and inside - door_names(room):
            found.append(f"{source.at(node)} goes past the door of {room}")
        if source.room == room and source.parts[0] == "kvstore" and len(parts) == 2 and set(names) - files:
            found.append(f"{source.at(node)} uses its own door")
    return found


def door_names(room: str) -> set[str]:
    """The names that a room's door gives out on purpose."""
    door = ast.parse((ROOT / "kvstore" / room / "__init__.py").read_text())
    return {
        alias.asname or alias.name
        for node in ast.walk(door)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_room_is_entered_by_its_door() -> None:
    """Other rooms say `from kvstore.tiers import ...`; siblings import files. The tests of a room are inside it."""
    assert [place for s in sources() for place in past_the_door(s)] == []


def test_nothing_else_lies_at_the_top() -> None:
    assert {name for name in committed_top_level() if not name.startswith(".")} - TOP_LEVEL == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "deploy/dev/requirements").glob("*.txt")), ids=lambda path: path.stem
)
def test_requirements_are_pinned_and_name_no_index(path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.+]+", line)] == []


# The checks check: each sees what it is there to see.

BAD = {
    swallowed: ["try: f()\nexcept OSError: pass", "with contextlib.suppress(Exception): f()"],
    waits_and_escapes: [
        "time.sleep(1)",
        "asyncio.sleep(0.1)",
        "pytest.skip('no')",
        "@pytest.mark.xfail\ndef f(): pass",
    ],
    past_the_door: [
        "import kvstore.core.keys",
        "from kvstore.core.keys import chunk_key",
        "from kvstore.core import keys",
    ],
}


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, texts in BAD.items() for text in texts])
def test_a_check_sees_what_it_is_for(check, text) -> None:
    assert check(Source("connector/worker.py", text, ast.parse(text)))


def test_a_room_does_not_use_its_own_door() -> None:
    text = "from kvstore.core import chunk_key"
    assert past_the_door(Source("kvstore/core/geometry.py", text, ast.parse(text)))
    assert not past_the_door(Source("kvstore/store/objects.py", text, ast.parse(text)))
