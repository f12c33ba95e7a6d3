"""Which namespace this engine works in, and from when on.

The manifest needs two things that come at their own pace: the identity of the weights (read from files, in
the background) and the workers' handshakes (after their KV caches were registered). Until both are there, nothing
is looked up or saved; requests may be held back for a moment. Where either says no, the engine does without
the store, and says so in one line.
"""

import secrets
from concurrent.futures import Future
from typing import Any

import msgspec

from connector.compat import logger, model_facts, total_kv_heads
from connector.identity import build_manifest, weights_identity
from connector.metadata import Handshake, Shape
from connector.shape import CPU_MLA, LayoutUnsupported, Whole, put_together
from connector.shared import Shared
from kvstore.core import BadConfiguration, Manifest, Namespace

log = logger(__name__)

_OF_A_RESET = "reset:"  # what the identity of weights begins with that came by a reset


class Session:
    """The engine's namespace. `unsupported` is why there will be none, as half a sentence."""

    def __init__(self, shared: Shared, vllm_config: Any) -> None:
        self.manifest: Manifest | None = None
        self.namespace: Namespace | None = None
        self.unsupported: str | None = None
        self._shared = shared
        self._vllm_config = vllm_config
        self._whole: Whole | None = None
        self._weights: Future[str] = shared.control.call(self._identify_weights)

    def _identify_weights(self) -> str:
        return weights_identity(model_facts(self._vllm_config), self._shared.config.weights_version)

    def refuse(self, reason: str) -> None:
        """From now on this engine does without the store."""
        if self.unsupported is None:
            log.warning("%s: this engine neither saves nor loads KV", reason)
        self.unsupported = reason
        self.namespace = None

    def shake_hands(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the ranks say of their KV caches, by (PP rank, TP rank)."""
        hands = {rank: hand for rank, hand in metadata.items() if isinstance(hand, Handshake)}
        unsupported = next((hand.unsupported for hand in hands.values() if hand.unsupported), None)
        if unsupported is not None:
            self.refuse(unsupported)
        elif len(hands) < self._shared.world_size:
            self.refuse(
                f"only {len(hands)} of {self._shared.world_size} workers have described their KV cache"
            )
        else:
            try:
                self._whole = put_together(hands, total_kv_heads(self._vllm_config))
                if len(self._whole.shape.kinds) != len(self._shared.kinds) - 1:
                    raise LayoutUnsupported("workers and scheduler do not see the same kinds of KV")
                if self.tile_format == CPU_MLA and self._vllm_config.speculative_config is not None:
                    raise LayoutUnsupported("speculative decoding with MLA on CPU is not supported yet")
            except LayoutUnsupported as error:
                self.refuse(str(error))
            self.tick()

    @property
    def shape(self) -> Shape | None:
        """The shape of this engine's objects; None until the workers have told."""
        return None if self._whole is None else self._whole.shape

    @property
    def tile_format(self) -> str:
        """What is inside a tile; empty until the workers have told."""
        return "" if self._whole is None else self._whole.tile_format

    def tick(self) -> None:
        """Opens the namespace once everything is known."""
        if self.manifest is None and self.unsupported is None and self._whole and self._weights.done():
            try:
                weights = self._weights.result()
                manifest = build_manifest(
                    model_facts(self._vllm_config),
                    weights,
                    self._whole,
                    self._shared.config.chunk_tokens,
                    self._shared.kinds,
                )
            except BadConfiguration as error:
                self.refuse(str(error))
                return
            if reason := self._unfit(self._whole.shape, manifest):
                self.refuse(reason)
            else:
                self._open(manifest)

    def _unfit(self, shape: Shape, manifest: Manifest) -> str | None:
        """Why objects of this shape cannot be moved, if they cannot."""
        kinds = manifest.object_kinds
        if kinds.ambiguous:
            return "kinds of KV that a node could not tell apart are not supported yet"
        parts = (shape.of(kind).largest_part_bytes(tokens) for kind, tokens in enumerate(kinds.tokens_max))
        if (size_bytes := max(parts)) > self._shared.config.staging_bytes:
            return (
                f"a worker's part of a chunk takes {size_bytes} bytes, more than staging_bytes in "
                "kv_connector_extra_config"
            )
        return None

    def reset(self) -> None:
        """The weights have changed under the engine: a fresh namespace, shared with nobody."""
        self._shared.epoch += 1
        self._shared.known.clear()
        weights = _OF_A_RESET + secrets.token_hex(16)
        if self.manifest is not None:
            self._open(msgspec.structs.replace(self.manifest, weights=weights))
        else:  # not known yet: what is read from files now is not what the engine computes with
            self._weights = Future()
            self._weights.set_result(weights)

    def _open(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.namespace = manifest.namespace
        self._shared.control.open(manifest)
        if manifest.weights.startswith(_OF_A_RESET):
            log.info(
                "after the reset KV is stored in namespace %s, for this engine alone",
                self.namespace.hex()[:16],
            )
        else:
            log.info("KV is shared with engines of namespace %s", self.namespace.hex()[:16])
        log.debug("its manifest: %s", manifest.encode().decode())
