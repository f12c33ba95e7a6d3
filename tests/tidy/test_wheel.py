"""What a user gets with `pip install`."""

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.tidy.source import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(Path(built))


def read(wheel: zipfile.ZipFile, suffix: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(suffix)]
    return wheel.read(name).decode()


def test_the_wheel_holds_kvstore_and_connector_only(wheel) -> None:
    top = {Path(name).parts[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"kvstore", "connector"}
    committed = {str(p.relative_to(ROOT)) for f in ("kvstore", "connector") for p in (ROOT / f).rglob("*.py")}
    assert committed <= set(wheel.namelist())


def test_type_checkers_see_our_types(wheel) -> None:
    assert {"kvstore/py.typed", "connector/py.typed"} <= set(wheel.namelist())


def test_the_command_and_the_plugin_are_declared(wheel) -> None:
    declared = read(wheel, "entry_points.txt")
    assert "kvstore = kvstore.cli:main" in declared
    assert "[vllm.general_plugins]\nkvstore = connector:register" in declared
