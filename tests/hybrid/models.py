"""Tiny models with random weights, one for each way in which models keep several kinds of KV; seconds to make.

Weights are such that every kind matters: states that hardly decay, logits that do not saturate. Sizes are such that
vLLM keeps blocks of 128 tokens, and that a window or a chunk of local attention ends inside the prompts of the tests.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

VOCABULARY = 2_048
SEED = 30

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4_096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


class Tiny(NamedTuple):
    """A model, and what vLLM must be told about it.

    Args:
        config: its configuration.
        kinds: of its KV, the full one first.
        flags: arguments of vLLM's `LLM`.
        stories: what is played beside the usual (`tests.hybrid.stage`).
        last_token: a hit must leave exactly one token to compute (`connector.whole_asks`).
    """

    config: Callable[[], Any]
    kinds: int = 2
    flags: dict[str, Any] = {}  # noqa: RUF012 - read only
    stories: tuple[str, ...] = ()
    last_token: bool = False


def _gemma3() -> Any:
    layers = [*["sliding_attention"] * 2, "full_attention"] * 2
    return transformers.Gemma3TextConfig(
        **{**_BASE, "tie_word_embeddings": True},
        num_hidden_layers=6,
        sliding_window=64,
        layer_types=layers,
        query_pre_attn_scalar=32,
    )


def _gpt_oss() -> Any:
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return transformers.GptOssConfig(
        **_BASE,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_parameters={**yarn, "original_max_position_embeddings": 1_024, "rope_theta": 10_000.0},
    )


def _llama4() -> Any:
    return transformers.Llama4TextConfig(
        **{**_BASE, "intermediate_size": 128},
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        num_experts_per_tok=1,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=512,
        use_qk_norm=True,
        rope_parameters=_ROPE,
    )


def _qwen3_next() -> Any:
    """Attention pages as large as states, or vLLM would raise the block size."""
    return transformers.Qwen3NextConfig(
        **{**_BASE, "head_dim": 256, "num_key_value_heads": 4},
        num_hidden_layers=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts_per_tok=2,
        num_experts=4,
        mlp_only_layers=[],
    )


def _granite4() -> Any:
    base = {name: value for name, value in _BASE.items() if name != "head_dim"}
    return transformers.GraniteMoeHybridConfig(
        **base,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        num_local_experts=0,
        shared_intermediate_size=256,
        num_experts_per_tok=0,
        position_embedding_type="rope",
    )


def _deepseek_v2() -> Any:
    """Ranks of the latent vector are those that vLLM's decode kernel on CPU is made for."""
    base = {name: value for name, value in _BASE.items() if name != "head_dim"}
    return transformers.DeepseekV2Config(
        **{**base, "num_key_value_heads": 4},
        num_hidden_layers=3,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )


_STATES = {"prefix_cache_retention_interval": 256, "max_num_batched_tokens": 256}

MODELS = {
    "gemma3": Tiny(_gemma3, stories=("disk",)),
    "gpt-oss": Tiny(_gpt_oss, stories=("wider", "narrower")),
    "gpt-oss-fp8": Tiny(_gpt_oss, flags={"kv_cache_dtype": "fp8"}),
    "llama4": Tiny(_llama4),
    "qwen3-next": Tiny(_qwen3_next, flags={**_STATES, "dtype": "bfloat16"}),
    # vLLM's CPU scan of Mamba2 lacks the states inside a step of more than one block.
    "granite4": Tiny(_granite4, flags={**_STATES, "max_num_batched_tokens": 128}),
    # Of prompts that vLLM computes at the same time its reference backend gives other logprobs than of each alone.
    "deepseek-v2": Tiny(_deepseek_v2, kinds=1, flags={"max_num_seqs": 1}, last_token=True),
}


def make_model(name: str, target: Path) -> None:
    """Writes the model's folder: whole, or not at all."""
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name].config())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _fill(name, parameter_name, parameter)
    model.save_pretrained(unfinished)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def _fill(model: str, name: str, parameter: Any) -> None:
    if parameter.dim() >= 2 and "conv1d" not in name:
        embedding = 0.1 if model == "gemma3" else 0.5  # tied embeddings would saturate the logits
        parameter.normal_(0, embedding if "embed" in name else 0.08)
    if name.endswith("A_log"):
        parameter.fill_(-5.0)  # a state that decayed would prove nothing
    if name.endswith("dt_bias"):
        parameter.fill_(0.0)
