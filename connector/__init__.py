"""The vLLM connector: prefill pushes KV into the store, decode pulls it."""
