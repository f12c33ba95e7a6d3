"""Every reason for which an engine goes without the store stands in docs/CONNECTOR.md, with why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROWS = {
    "models without any layer that attends to all tokens": (
        "a model without attention",
        "a model without attention over all tokens",
        "KV of kind {} alone is not supported yet",
    ),
    "decode and prefill context parallelism": (
        "decode context parallelism",
        "prefill context parallelism",
    ),
    "sleep mode with vLLM 0.32": ("sleep mode with a vLLM older than 0.33",),
    "kinds of layers that are named nowhere": (
        "a KV cache group of layers that look back differently far",
        "a KV cache of kind {} is not supported yet",
    ),
    "groups that vLLM itself does not transfer": ("a KV cache group that vLLM does not transfer",),
    "several KV cache groups with different block sizes, with pipeline parallelism, with MLA": (
        "MLA beside other KV",
    ),
    "several KV cache groups with different block sizes": (
        "a model whose KV cache groups differ in block size",
    ),
    "with pipeline parallelism": ("pipeline parallelism of a model with several KV cache groups",),
    "or with [layers of drafts]": (
        "KV of drafts beside several KV cache groups",
        "draft layers beside several KV cache groups are not supported yet",
    ),
    "speculative decoding by `dflash`, `dspark`, `extract_hidden_states`": (
        "KV of speculative decoding by {}",
    ),
    "draft models of another tensor parallel size": (
        "a draft model of another tensor parallel size than the model",
    ),
    "recurrent states in another mode than `align`": (
        "speculative decoding with a recurrent state",
        "a recurrent state in cache mode {} is not supported yet: leave prefix caching on, and "
        "--mamba-cache-mode at align",
    ),
    "or replicated over ranks": (
        "a recurrent state that is replicated, compressed or speculative is not supported yet",
    ),
    "windows that vLLM manages like full attention": (
        "attention that is not causal, or over a window or chunks without groups of their own "
        "(--disable-hybrid-kv-cache-manager), is not supported yet",
    ),
    "padded or compressed pages": ("compressed or padded KV pages are not supported yet",),
    "KV quantised per token": ("KV quantised as {} is not supported yet",),
    "backends that pack KV in their own way": (
        "KV that an attention backend packs in its own way is not supported yet",
    ),
    "layers of one engine that differ in dtype": (
        "layers whose tiles differ in kind are not supported: {}",
        "layers of different block size, dtype or kind are not supported yet",
    ),
    "MLA on CPU with AMX, or with speculative decoding": (
        "speculative decoding with MLA on CPU is not supported yet",
    ),
    "kernel blocks smaller than `--block-size` on CPU": (
        "kernel blocks smaller than --block-size are not supported on CPU",
    ),
    "devices other than CPU and CUDA": ("KV on a device of kind {} is not supported yet",),
    "attention backends on GPU that are not in": (
        "what the attention backend {} keeps per token is not known here",
    ),
    "on CPU another layout than LBHNC": (
        "the tokens of a head are not contiguous in layer {} (strides in bytes: {}); use the KV "
        "cache layout LBHNC: unset VLLM_KV_CACHE_LAYOUT",
    ),
    "layers with different numbers of heads": (
        "{} KV heads of a layer on each of {} ranks are not provably the {} heads of the model",
    ),
    "tensors that are not what vLLM says of them, pipeline stages that do not hold consecutive layers": (
        "workers and scheduler do not see the same kinds of KV",
        "the workers have different kinds of KV",
        "{} workers are not {} stages of {}",
        "the workers' KV caches have different formats: {}",
        "the pipeline's stages do not hold consecutive layers",
        "the workers of one pipeline stage have different layers, or none",
        "a model with {} KV cache groups has more than one kind of KV",
        "vLLM registered no tensor for layer {}",
        "tensors do not hold the {} blocks that vLLM announced",
        "layer {} is no [blocks, heads, tokens, content]: {}",
        "the content of a token is not contiguous in layer {}",
        "layer {} has {} heads, tokens and bytes, not {}",
        "layer {} does not have one state in each block",
        "tiles overlap (shape {}, strides in bytes {})",
    ),
    "workers that have not all described their KV cache": (
        "only {} of {} workers have described their KV cache",
    ),
    "kinds that a node could not tell apart": (
        "kinds of KV that a node could not tell apart are not supported yet",
    ),
    "a worker's part of a chunk is larger than `staging_bytes`": (
        "a worker's part of a chunk takes {} bytes, more than staging_bytes in kv_connector_extra_config",
    ),
}
"""Words of a row of the page, and the reasons in the code that it explains."""


def reasons(file: Path) -> Iterator[str]:
    """The reasons for a refusal in a file: what functions that look for one say, and what is raised or refused."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef(name="unsupported_engine" | "unsupported_spec" | "_unfit"):
                yield from said(node)
            case ast.FunctionDef(name=name) if name.startswith("_unsupported"):
                yield from said(node)
            case ast.Call(func=ast.Name(id="LayoutUnsupported") | ast.Attribute(attr="refuse"), args=[what]):
                yield from said(what)
            case _:
                pass


def said(node: ast.AST) -> Iterator[str]:
    """Sentences in a piece of code, with {} where a value goes; without its docstring."""
    match node:
        case ast.JoinedStr():
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            texts = ["".join(map(str, parts))]
        case ast.Constant(value=str() as text):
            texts = [text]
        case ast.Expr(value=ast.Constant()):
            texts = []
        case _:
            for child in ast.iter_child_nodes(node):
                yield from said(child)
            return
    yield from (text for text in texts if len(text.split()) > 2 and text != "{} is not supported yet")


def test_every_refusal_is_documented(repository: Path) -> None:
    found = {reason for file in (repository / "connector").glob("*.py") for reason in reasons(file)}
    assert found == {reason for reasons in ROWS.values() for reason in reasons}


@pytest.mark.parametrize("words", ROWS)
def test_the_row_is_there(repository: Path, words: str) -> None:
    page = (repository / "docs/CONNECTOR.md").read_text()
    table = page.partition("## What is refused, and why")[2].partition("\n## ")[0]
    assert words in table
