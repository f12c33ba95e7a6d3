"""Prefill and decode engines over one node, with proxies in front of them; what was killed comes back on its port."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from deploy.demo.engine import MODEL_NAME, START_S_MAX, Engine, Prompt
from deploy.demo.node import Node
from deploy.demo.proxy import Proxy
from tests.e2e.support import prompt_text, transfer_config, wait_for_nothing_held
from tests.support import free_port, wait_until

BLOCK_TOKENS = 128  # vLLM's block size on CPU
FORGETFUL = ("--no-enable-prefix-caching",)  # an engine that asks the store, whatever it is asked
SMALL = ("--num-gpu-blocks-override", "64")  # so that several fit into the memory of a small machine


class Prompts:
    """Prompts of any length, as token ids, that differ from each other from their first token on."""

    def __init__(self, model: Path, repository: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        texts = [prompt_text(repository, name) for name in ("canal", "lighthouse", "tides")]
        self._text: list[int] = self._tokenizer.encode(" ".join(texts)).ids
        self._numbers = itertools.count(1)

    def cut(self, length: int) -> list[int]:
        """The next prompt, of so many tokens."""
        number = next(self._numbers)
        start = number * 97 % (len(self._text) - length)
        opening: list[int] = self._tokenizer.encode(f"{number}. ").ids
        return [*opening, *self._text[start:]][:length]


@dataclass
class Fleet:
    """The engines by name. Those in `forgetful` have no prefix cache of their own."""

    model: Path
    logs: Path
    node: Node
    exits: contextlib.ExitStack
    prompts: Prompts
    store: str
    forgetful: Sequence[str]
    engines: dict[str, Engine] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)
    _starts: "itertools.count[int]" = field(default_factory=itertools.count)
    _asleep: set[str] = field(default_factory=set)

    def start(self, name: str) -> Engine:
        """Starts an engine, for the first time or again, and does not wait for it."""
        port = self._ports.setdefault(name, free_port())
        flags = (*SMALL, *FORGETFUL) if name in self.forgetful else SMALL
        log = f"{name}-{next(self._starts)}"
        self.engines[name] = Engine(log, self.model, port, self.logs, store=self.store, flags=flags)
        self.exits.callback(self.engines[name].stop)
        self._asleep.add(name)
        return self.engines[name]

    def up(self, names: Sequence[str], least: int = 1) -> list[str]:
        """Those of these engines that serve, once there are so many. Each has been woken up."""
        serving: list[str] = []

        def enough() -> bool:
            serving[:] = [name for name in names if self.engines[name].serves()]
            return len(serving) >= least

        wait_until(enough, START_S_MAX, f"{least} of {', '.join(names)} to serve")
        for name in self._asleep.intersection(serving):
            self.engines[name].complete("Only to wake the engine up.", 2)
            self._asleep.remove(name)
        return serving

    def ensure_up(self) -> None:
        """Returns when all engines serve; what an earlier test has killed comes back."""
        for name, engine in self.engines.items():
            if not engine.running:
                self.start(name)
        self.up(tuple(self.engines), len(self.engines))

    def proxy(self, prefill: Sequence[str], decode: Sequence[str], *flags: str) -> Proxy:
        """A proxy in front of these engines."""
        first, then = ([self.engines[name] for name in names] for names in (prefill, decode))
        proxy = Proxy(first, then, free_port(), self.logs, flags=flags)
        self.exits.callback(proxy.stop)
        proxy.wait_ready()
        return proxy

    def serving(self, proxy: Proxy) -> str:
        """The engine that works on the proxy's only request."""
        for name, engine in self.engines.items():
            if proxy.metric("kvstore_proxy_engine_in_flight", role="decode", engine=engine.url):
                return name
        raise AssertionError("no engine works on a request")

    def wait_for_nothing_left(self, deadline_s: float = 60.0) -> None:
        """Returns when nobody holds anything: no lease, reservation or page at the node, no request or block at an
        engine (vLLM empties its prefix cache only when no block is in use)."""
        wait_for_nothing_held(self.node, deadline_s)
        for engine in self.engines.values():
            wait_until(partial(_is_idle, engine), deadline_s, f"no request at {engine.name}")
            engine.forget_local_prefixes()
        wait_for_nothing_held(self.node, deadline_s)


@contextlib.contextmanager
def running_fleet(
    model: Path,
    repository: Path,
    logs: Path,
    names: Sequence[str],
    forgetful: Sequence[str] = (),
    **settings: object,
) -> Iterator[Fleet]:
    """A node and engines of these names, all up. `settings` are more of the connector's."""
    with contextlib.ExitStack() as exits:
        node = Node(free_port(), free_port(), logs)
        exits.callback(node.stop)
        node.wait_ready()
        prompts, store = Prompts(model, repository), transfer_config(node.control, **settings)
        fleet = Fleet(model, logs, node, exits, prompts, store, forgetful)
        for name in names:
            fleet.start(name)
        fleet.ensure_up()
        yield fleet


def _is_idle(engine: Engine) -> bool:
    return not any(engine.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting"))


def request_of(prompt: Prompt, max_tokens: int, **more: object) -> dict[str, object]:
    """A greedy completion that goes on to its last token."""
    body: dict[str, object] = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens}
    return body | {"temperature": 0, "ignore_eos": True} | more
