"""A Llama with random weights and four KV heads, so that TP and PP of 2 divide it; SmolLM2's three heads do not.

The tokenizer is SmolLM2's. Weights are drawn from a fixed seed and larger than usual, so that logits lie far enough
apart for greedy tokens to be the same whatever the order of additions.
"""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def make_model(target: Path, tokenizer: Path, positions: int = 4_096) -> None:
    """Writes the model's folder; `tokenizer` is a folder that has one, `positions` the longest sequence."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=512,
        intermediate_size=1_024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=positions,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(unfinished)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, unfinished / name)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)  # whole or absent
