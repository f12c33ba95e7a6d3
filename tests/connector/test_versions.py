"""The connector against the vLLM releases that it knows, and what it is under any other one.

`vllm_api.json` holds facts of both releases (`python -m deploy.dev.vllm_api`); only one of them is installed.
Mutants that were tried and are caught: a parameter of a hook renamed; an abstract hook left out; a hook's property
made a method; a name in `connector.compat` that only one release has; the sleep hooks renamed.
"""

import ast
import inspect
import json
from abc import abstractmethod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, supports_hma
from vllm.v1.outputs import KVConnectorOutput

import connector
from connector.bystander import bystander
from connector.connector import KVStoreConnector
from connector.metrics import EngineStats, PromMetrics
from connector.versions import VERSIONS, unsupported_version
from deploy.dev.vllm_api import CONNECTOR, Facts, facts, of_folder
from tests.connector.support import CHUNK, Engine, Node, prompt

RELEASES: dict[str, Facts] = json.loads((Path(__file__).parent / "vllm_api.json").read_text())
SINCE = {"unregister_kv_caches": "0.33.0", "restore_kv_caches": "0.33.0"}
"""Hooks that not all of these releases have."""

READ = {
    "vllm.config.cache.CacheConfig": "cache_dtype",
    "vllm.config.compilation.CompilationConfig": "static_forward_context",
    "vllm.config.kv_transfer.KVTransferConfig": "is_kv_consumer is_kv_producer kv_connector_extra_config "
    "kv_load_failure_policy",
    "vllm.config.load.LoadConfig": "download_dir load_format",
    "vllm.config.model.ModelConfig": "disable_sliding_window dtype enable_sleep_mode get_total_num_kv_heads "
    "hf_config max_model_len model model_class_overrides model_weights multimodal_config quantization revision "
    "use_mla",
    "vllm.config.multimodal.MultiModalConfig": "mm_processor_kwargs video_pruning_rate",
    "vllm.config.parallel.ParallelConfig": "decode_context_parallel_size pipeline_parallel_size "
    "prefill_context_parallel_size tensor_parallel_size world_size",
    "vllm.config.speculative.SpeculativeConfig": "draft_load_config draft_model_config draft_parallel_config "
    "kv_cache_dtype method parallel_drafting uses_draft_kv_cache",
    "vllm.config.vllm.VllmConfig": "cache_config compilation_config load_config model_config parallel_config "
    "speculative_config",
    "vllm.v1.core.kv_cache_utils.KVCacheBlock": "block_hash is_null ref_cnt",
    "vllm.v1.core.sched.output.SchedulerOutput": "kv_connector_block_state num_scheduled_tokens "
    "scheduled_spec_decode_tokens",
    "vllm.v1.kv_cache_interface.AttentionSpec": "kv_quant_mode num_head_slots page_size_padded state_content_bytes",
    "vllm.v1.kv_cache_interface.FullAttentionSpec": "attention_chunk_size non_causal sliding_window",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups num_blocks",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "is_eagle_group kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface.KVQuantMode": "FP8_PER_TENSOR NONE",
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.v1.outputs.KVConnectorOutput": "invalid_block_ids kv_connector_worker_meta",
    "vllm.v1.request.Request": "all_token_ids cache_salt kv_transfer_params lora_request mm_features "
    "num_computed_tokens num_preemptions num_prompt_tokens prompt_embeds request_id resumable "
    "skip_reading_prefix_cache status",
    "vllm.v1.request.RequestStatus": "FINISHED_ABORTED FINISHED_ERROR FINISHED_IGNORED",
    f"{CONNECTOR}.v1.base.KVConnectorTransferResults": "finished_recving",
}
"""What the connector reads of vLLM's objects."""

CALLED = {
    "vllm.v1.core.block_pool.BlockPool.free_blocks": "self ordered_blocks",
    "vllm.v1.core.block_pool.BlockPool.get_num_free_blocks": "self",
    "vllm.v1.core.block_pool.BlockPool.reset_prefix_cache": "self",
    "vllm.v1.core.block_pool.BlockPool.touch": "self blocks",
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks.get_block_ids": "self allow_none= group_ids=",
    "vllm.v1.core.sched.output.KVConnectorBlockState.get_block_ids": "self req_id",
    f"{CONNECTOR}.factory.KVConnectorFactory.register_connector": "cls name module_path class_name @classmethod",
}
"""What it calls, as it is declared."""

release_of = pytest.mark.parametrize("release", list(RELEASES))


def hooks_of(release: str) -> dict[str, str]:
    methods = RELEASES[release]["methods"]
    return methods[f"{CONNECTOR}.v1.base.SupportsHMA"] | methods[f"{CONNECTOR}.v1.base.KVConnectorBase_V1"]


def declared(owner: type[Any], name: str) -> str:
    """A method of a class, in the words of `vllm_api.json`, without what it overrides by."""
    given = inspect.getattr_static(owner, name)
    if isinstance(given, property):
        return "self @property"
    function = inspect.unwrap(given.__func__ if isinstance(given, classmethod) else given)
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    words = [
        stars.get(p.kind, "") + p.name + "=" * (p.default is not p.empty)
        for p in inspect.signature(function).parameters.values()
    ]
    return " ".join(words + ["@classmethod"] * isinstance(given, classmethod))


# --- known releases -----------------------------------------------------------------------------------


def test_each_supported_release_was_read() -> None:
    assert [f"{release.rpartition('.')[0]}." for release in RELEASES] == list(VERSIONS)


def test_what_was_read_of_the_installed_release_is_what_is_installed() -> None:
    """So the reader can be trusted with the release that is not."""
    installed = facts(of_folder(Path(vllm.__file__).parent.parent))
    assert installed == RELEASES[vllm.__version__.partition("+")[0]]


@release_of
def test_each_overridden_hook_is_declared_as_this_release_calls_it(release) -> None:
    hooks = hooks_of(release)
    ours = {
        name: declared(KVStoreConnector, name)
        for name, item in vars(KVStoreConnector).items()
        if not name.startswith("_") and (inspect.isfunction(item) or isinstance(item, classmethod | property))
    }
    missing = {name for name, since in SINCE.items() if since > release}
    assert len(ours) > 20
    assert set(ours) - set(hooks) == missing
    theirs = {name: hooks[name].replace(" @abstractmethod", "") for name in ours if name in hooks}
    assert {name: words for name, words in ours.items() if name not in missing} == theirs


@release_of
def test_metrics_are_declared_as_this_release_calls_them(release) -> None:
    for ours, name in ((EngineStats, "KVConnectorStats"), (PromMetrics, "KVConnectorPromMetrics")):
        theirs = RELEASES[release]["methods"][f"{CONNECTOR}.v1.metrics.{name}"]
        both = [method for method in theirs if method in vars(ours) and method != "__init__"]
        assert both
        for method in both:
            assert declared(ours, method) == theirs[method], method


@release_of
def test_nothing_that_this_release_demands_is_left_out(release) -> None:
    demanded = {name for name, words in hooks_of(release).items() if "@abstractmethod" in words}
    assert demanded and all(
        getattr(KVStoreConnector, name).__module__ == "connector.connector" for name in demanded
    )


@release_of
def test_this_release_has_what_the_connector_imports(release, repository) -> None:
    names = RELEASES[release]["names"]
    wanted = [
        (node.module, alias.name)
        for file in (repository / "connector").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("vllm")
        and file.stem != "bystander"
        for alias in node.names
    ]
    assert len(wanted) > 15
    elsewhere = {"vllm.distributed": "vllm.distributed.parallel_state"}  # whose names it passes on
    for module, name in wanted:
        assert name in names[elsewhere.get(str(module), str(module))].split(), f"{module}.{name}"


@release_of
def test_this_release_has_what_the_connector_reads(release) -> None:
    names = RELEASES[release]["names"]
    spec = (
        names["vllm.v1.kv_cache_interface.KVCacheSpec"]
        + " "
        + names["vllm.v1.kv_cache_interface.AttentionSpec"]
    )
    for owner, read in READ.items():
        inherited = spec if owner.endswith("Spec") else ""
        assert set(read.split()) <= {*names[owner].split(), *inherited.split()}, owner


@release_of
def test_this_release_has_what_the_connector_calls(release) -> None:
    for path, words in CALLED.items():
        owner, _, method = path.rpartition(".")
        assert RELEASES[release]["methods"][owner][method] == words, path


# --- other releases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.33.0", True),
        ("0.34.0", False),
        ("0.31.9", False),
    ],
)
def test_versions(version, good) -> None:
    reason = unsupported_version(version)
    assert (reason is None) == good
    assert good or f"knows vLLM 0.32.x and 0.33.x, not {version}" in str(reason)


@pytest.fixture
def unknown(monkeypatch) -> None:
    """The installed vLLM is of a release that is not known."""
    monkeypatch.setattr("connector.unsupported_version", lambda: "this connector knows vLLM 0.32.x, not 9")
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop("KVStoreConnector", None)
    connector.register()


class Quiet(Engine):
    """An engine whose connector has no half."""

    def _first_half(self) -> Any:
        self.worker.step = lambda jobs: KVConnectorOutput()  # type: ignore[method-assign]
        return None


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("by_path", [True, False])
def test_under_another_release_the_engine_serves_on_without_the_store(
    by_path, monkeypatch, caplog_vllm
) -> None:
    node, text = Node(), prompt(1, 3 * CHUNK)
    module = "connector" if by_path else None
    engine = Quiet(node, module_path=module)
    assert type(engine.connector).__name__ == "KVStoreConnector"
    assert not isinstance(engine.connector, KVStoreConnector)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(engine.generate("a", text)) == 2
    assert node.calls == []
    assert not engine.scheduler.requires_kv_delivery
    lines = [
        record.getMessage() for record in caplog_vllm.records if "without the store" in record.getMessage()
    ]
    assert lines == ["this connector knows vLLM 0.32.x, not 9: this engine does without the store"]


def test_a_hook_that_a_later_release_demands_does_not_stop_the_engine(monkeypatch) -> None:
    class Later(base.KVConnectorBase_V1):
        @abstractmethod
        def another_hook(self, what: str) -> None: ...

    monkeypatch.setattr(base, "KVConnectorBase_V1", Later)
    kind = bystander("KVStoreConnector", "a later release")
    assert not inspect.isabstract(kind)
    made = kind(SimpleNamespace(kv_transfer_config=SimpleNamespace()), base.KVConnectorRole.WORKER, None)
    assert made.another_hook("x") is None
    assert made.get_num_new_matched_tokens(None, 0) == (0, False)
    assert supports_hma(kind)


def test_a_release_without_such_connectors_is_said_in_one_line(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, f"{CONNECTOR}.v1.base", ModuleType("base"))
    monkeypatch.setattr(f"{CONNECTOR}.v1.base", ModuleType("base"))
    with pytest.raises(ImportError, match=r"^a release of long ago$"):
        bystander("KVStoreConnector", "a release of long ago")
