"""The tree as the tidy checks see it: files, their syntax trees, and the imports in them."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvstore", "connector", "tests", "bench", "deploy", "docs")


@dataclass(frozen=True)
class Source:
    """One Python file. `name` is its path from the root, `room` its room of kvstore or of the tests of that room."""

    name: str
    text: str
    tree: ast.Module

    @property
    def parts(self) -> tuple[str, ...]:
        return Path(self.name).parts

    @property
    def room(self) -> str | None:
        return self.parts[1] if self.parts[0] in ("kvstore", "tests") and len(self.parts) > 2 else None

    def at(self, node: ast.AST) -> str:
        return f"{self.name}:{getattr(node, 'lineno', 0)}"


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """All Python files under `folders`, of the whole tree by default."""
    paths = sorted(path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py"))
    texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    return tuple(Source(name, text, ast.parse(text, name)) for name, text in texts)


def rooms() -> set[str]:
    """The rooms of kvstore that have a door."""
    return {door.parent.name for door in (ROOT / "kvstore").glob("*/__init__.py")}


def imports(source: Source) -> list[tuple[ast.stmt, str, tuple[str, ...]]]:
    """Each import as (statement, module, names taken from it)."""
    found: list[tuple[ast.stmt, str, tuple[str, ...]]] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node, node.module, tuple(alias.name for alias in node.names)))
    return found


def committed_top_level() -> set[str]:
    """What git holds at the top of the tree."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {Path(line).parts[0] for line in listing.stdout.splitlines()}
