"""What the connector needs to know of a vLLM release, read from its source: signatures, and names that exist.

    python -m deploy.dev.vllm_api tests/connector/vllm_api.json vllm-0.32.0*.whl vllm-0.33.0*.whl

Nothing is imported or installed, so a release that has no build for this machine can be read as well: `pip download
--no-deps vllm==0.33.0` brings the wheel. tests/connector/test_versions.py holds the connector against the result.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
INTERFACES = (  # whose methods are overridden or called: by name, with parameters
    f"{CONNECTOR}.v1.base.KVConnectorBase_V1",
    f"{CONNECTOR}.v1.base.SupportsHMA",
    f"{CONNECTOR}.v1.metrics.KVConnectorPromMetrics",
    f"{CONNECTOR}.v1.metrics.KVConnectorStats",
    f"{CONNECTOR}.factory.KVConnectorFactory",
    "vllm.v1.core.block_pool.BlockPool",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks",
    "vllm.v1.core.sched.output.KVConnectorBlockState",
)
NAMESPACES = (  # modules and classes of which only names matter
    f"{CONNECTOR}.factory",
    f"{CONNECTOR}.v1.base",
    f"{CONNECTOR}.v1.base.KVConnectorTransferResults",
    f"{CONNECTOR}.v1.metrics",
    "vllm.config.cache.CacheConfig",
    "vllm.config.compilation.CompilationConfig",
    "vllm.config.kv_transfer.KVTransferConfig",
    "vllm.config.load.LoadConfig",
    "vllm.config.model.ModelConfig",
    "vllm.config.multimodal.MultiModalConfig",
    "vllm.config.parallel.ParallelConfig",
    "vllm.config.speculative.SpeculativeConfig",
    "vllm.config.vllm.VllmConfig",
    "vllm.distributed.parallel_state",
    "vllm.model_executor.layers.mamba.mamba_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock",
    "vllm.v1.core.sched.output.SchedulerOutput",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_interface.AttentionSpec",
    "vllm.v1.kv_cache_interface.FullAttentionSpec",
    "vllm.v1.kv_cache_interface.KVCacheConfig",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec",
    "vllm.v1.kv_cache_interface.KVCacheSpec",
    "vllm.v1.kv_cache_interface.KVQuantMode",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs",
    "vllm.v1.metrics.cache_hit_source",
    "vllm.v1.outputs.KVConnectorOutput",
    "vllm.v1.request",
    "vllm.v1.request.Request",
    "vllm.v1.request.RequestStatus",
    "vllm.v1.utils",
)

Read = Callable[[str], str]
"""The text of a file in the package, or FileNotFoundError."""


Facts = dict[str, dict[str, Any]]
"""`methods`: of interfaces, each as "parameters @decorators". `names`: in modules and classes. Both as one line."""


def facts(read: Read) -> Facts:
    """What this release has of all that is listed above."""
    source = _Source(read)
    return {
        "methods": {path: _methods(source.definition(path)) for path in INTERFACES},
        "names": {path: " ".join(sorted(set(_names(source.definition(path))))) for path in NAMESPACES},
    }


class _Source:
    """Modules, parsed once."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parsed: dict[str, ast.Module] = {}

    def definition(self, path: str) -> ast.Module | ast.ClassDef:
        """The module, or the class in a module, of this dotted name."""
        try:
            return self._module(path)
        except FileNotFoundError:
            module, _, name = path.rpartition(".")
            classes = (node for node in self._module(module).body if isinstance(node, ast.ClassDef))
            return next(node for node in classes if node.name == name)

    def _module(self, path: str) -> ast.Module:
        if path not in self._parsed:
            self._parsed[path] = ast.parse(self._read(path.replace(".", "/") + ".py"))
        return self._parsed[path]


def _methods(node: ast.AST) -> dict[str, str]:
    assert isinstance(node, ast.ClassDef)
    functions = (item for item in node.body if isinstance(item, ast.FunctionDef))
    return {function.name: _signature(function) for function in functions}


def _signature(function: ast.FunctionDef) -> str:
    """Parameters as they are written (`name`, `name=` where it has a default, `*name`, `**name`), then decorators."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    parameters = [a.arg + "=" * (at >= first_default) for at, a in enumerate(positional)]
    if given.vararg:
        parameters.append("*" + given.vararg.arg)
    parameters += [
        a.arg + "=" * (default is not None)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append("**" + given.kwarg.arg)
    return " ".join([*parameters, *(f"@{ast.unparse(decorator)}" for decorator in function.decorator_list)])


def _names(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    """What is defined in a module or class; of a class also what its methods set on `self`."""
    for node in scope.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
    if isinstance(scope, ast.ClassDef):
        stores = (node for node in ast.walk(scope) if isinstance(node, ast.Attribute))
        own = (node for node in stores if isinstance(node.value, ast.Name) and node.value.id == "self")
        yield from (node.attr for node in own if isinstance(node.ctx, ast.Store))


def of_folder(package: Path) -> Read:
    """Reads an unpacked or installed vLLM, given the folder above `vllm`."""
    return lambda path: (package / path).read_text(encoding="utf-8")


def of_wheel(wheel: Path) -> Read:
    """Reads a wheel."""
    archive = zipfile.ZipFile(wheel)

    def read(path: str) -> str:
        try:
            return archive.read(path).decode()
        except KeyError:
            raise FileNotFoundError(path) from None

    return read


def main(out: str, *wheels: str) -> None:
    """Writes the facts of these wheels, by release."""
    releases = {
        Path(wheel).name.split("-")[1].partition("+")[0]: facts(of_wheel(Path(wheel))) for wheel in wheels
    }
    Path(out).write_text(json.dumps(releases, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
