"""The scheduler half: lives in the engine's scheduling loop, decides what is loaded and saved.

It is the engine's only client of the nodes' control protocol, through `Control`, whose answers it polls: no
hook waits. What it plans travels to the worker half as `Jobs`, what became of it comes back as `Reports`.
    asks.py    "how many tokens can you bring?"  lookup, lease, promise
    loads.py   promise and blocks -> job -> reports
    saves.py   completed chunks -> reservation -> job -> reports -> commit
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from connector.asks import NOTHING, Answer, Asks
from connector.boundaries import with_pieces, worth_saving
from connector.compat import CacheHitSource, block_size_of, logger, unsupported_engine, was_aborted
from connector.config import Config
from connector.control import Control, ReportLine
from connector.growth import Growth
from connector.guard import Breaker, harmless
from connector.handoff import Ignored, describe_format, read_note, write_note
from connector.hints import Hints, read_hints
from connector.hybrid_asks import HybridAsks
from connector.keys import AdapterDigests, Chain
from connector.kinds import kinds_of
from connector.loads import Loads
from connector.metadata import Jobs, LoadMore, LoadReport, Rank, Reports, SaveJob, SaveReport
from connector.metrics import EngineStats
from connector.offers import Tables
from connector.requests import Ask, RequestState
from connector.saves import Saves
from connector.session import Session
from connector.shape import CPU_MLA
from connector.shared import Shared
from connector.stats import Cause
from connector.whole_asks import LastTokenAsks
from kvstore.core import BadConfiguration, MissReason, Namespace

log = logger(__name__)


class SchedulerHalf:
    """Answers the scheduler's hooks. Used by one thread.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: the engine's KV cache, as the scheduler sees it.
        config: the user's settings; `save` and `load` already reflect the engine's role.
        control: the store.
        breaker: opens when this code fails repeatedly.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        config: Config,
        control: Control,
        breaker: Breaker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.breaker = breaker
        unsupported = unsupported_engine(vllm_config, kv_cache_config)
        block_tokens = 1 if unsupported else block_size_of(kv_cache_config)
        if config.chunk_tokens % block_tokens:
            raise BadConfiguration(
                f"chunk_tokens {config.chunk_tokens} is not a multiple of the engine's block size {block_tokens}"
            )
        world_size = vllm_config.parallel_config.world_size
        kinds = () if unsupported else kinds_of(kv_cache_config.kv_cache_groups)
        self.shared = Shared(control, config, clock, block_tokens, world_size, kinds, len(kinds) > 1)
        self.session = Session(self.shared, vllm_config)
        self.asks = HybridAsks(self.shared) if len(kinds) > 1 else Asks(self.shared)
        self.loads = Loads(self.shared)
        self.saves = Saves(self.shared)
        self.states: dict[str, RequestState] = {}
        self._adapters = AdapterDigests()
        self._old_blocks = False  # the engine may have KV of other weights in blocks that requests can hit
        if unsupported is not None:
            self.session.refuse(unsupported)

    # --- requests come and go -------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Learns of a request, and asks early what is stored for it."""
        if request.resumable:  # its prompt grows while it runs: not a prompt that others could have
            return
        state = self.states[request.request_id] = RequestState(request, hints=self._hints_of(request))
        if self.session.unsupported is not None or self.breaker.open or self._old_blocks:
            return
        if request.lora_request is not None:
            digest = functools.partial(self._adapters.digest, request.lora_request)
            state.adapter = self.shared.control.call(digest)
        if self._prepare(state) and self._may_ask(request) and self._why_not_load(state) is None:
            self.asks.look_up(state)

    def _hints_of(self, request: Any) -> Hints:
        hints, bad = read_hints(request.kv_transfer_params)
        for line in bad:
            self.shared.stats.say_once(
                f"hint {line.split()[0]}", f"request {request.request_id}: {line}; ignored"
            )
        return hints

    def request_finished(self, request: Any, tables: Tables) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request. Its blocks may go: saves hold references of their own."""
        state = self.states.pop(request.request_id, None)
        if state is None:
            return False, None
        self.asks.close(state.ask)
        self.loads.abandon(state)
        namespace = self.session.namespace
        current = namespace is not None and state.epoch == self.shared.epoch
        if not self._may_save or not current or was_aborted(request):
            return False, None
        links = self.saves.finish(state, tables)
        num_links, nodes = self.saves.covered(links)
        assert self.session.manifest is not None
        return False, write_note(self.session.manifest, links[:num_links], nodes)

    def _prepare(self, state: RequestState) -> bool:
        """Whether the request's keys are known, in the present namespace."""
        if state.links is not None and state.epoch == self.shared.epoch:
            return True
        self.session.tick()
        namespace = self.session.namespace
        if namespace is None or (state.adapter is not None and not state.adapter.done()):
            return False
        self.asks.close(state.ask)
        state.handoff = state.foreign = None
        state.ask, state.offered = Ask(), 0  # also a new deadline for what comes now
        state.growth, state.grown, state.rests_until = None, [], 0
        state.epoch = self.shared.epoch
        if state.adapter is not None and (state.adapter.exception() or state.adapter.result() is None):
            state.links = ()
            state.no_load = MissReason.LAYOUT_UNSUPPORTED
            return True
        adapter = (state.adapter and state.adapter.result()) or ""
        config = self.shared.config
        chain = Chain(state.request, namespace, config.chunk_tokens, self.shared.block_tokens, adapter)
        if len(self.shared.kinds) > 1:
            self._prepare_pieces(state, chain)
            self._take_note(state, namespace)
            return True
        live = state.hints.live
        state.links = chain.resumed_prompt(live) if live else chain.prompt()
        if config.write_back and state.request.prompt_embeds is None:
            state.growth = Growth(chain, state.links, live=live is not None)
        if not live:
            self._take_note(state, namespace)
        return True

    def _prepare_pieces(self, state: RequestState, chain: Chain) -> None:
        """The prompt up to where it can be taken up again; what is generated is not saved."""
        kinds = self.shared.kinds
        state.pieced = 0
        state.links = with_pieces(chain.prompt(state.prompt_tokens - 1), kinds)
        state.worth = worth_saving(state.links, kinds, self.shared.config.retention_tokens)

    def _take_note(self, state: RequestState, namespace: Namespace) -> None:
        """The hand-off that the request carries, if any."""
        assert self.session.manifest is not None and state.links is not None
        own_format = describe_format(self.session.manifest)
        note = read_note(state.request.kv_transfer_params, namespace, state.links, own_format)
        if isinstance(note, Ignored):
            self.shared.stats.say_once(
                f"hand-off {note.kind}",
                f"request {state.request_id}: its hand-off is ignored, {note.line}; later ones silently",
            )
            state.foreign = note.reason
        else:
            state.handoff = note

    # --- loads ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Answer:
        """Tokens that the store promises beyond the local ones; None: ask again."""
        state = self.states.get(request.request_id)
        if state is None or not self._may_ask(request):
            return NOTHING
        if (reason := self._why_not_load(state)) is not None:
            self.asks.close(state.ask)
            state.ask.computed = num_computed_tokens
            return self.asks.refuse(state, reason)
        if not self._prepare(state):
            return self.asks.wait(state, self.shared.config.lookup_timeout_s, MissReason.PENDING_TIMEOUT)
        self.asks.look_up(state)
        return self.asks.match(state, num_computed_tokens)

    def _may_ask(self, request: Any) -> bool:
        return self.shared.config.load and not request.skip_reading_prefix_cache

    def _why_not_load(self, state: RequestState) -> MissReason | None:
        if self.session.unsupported is not None:
            return MissReason.LAYOUT_UNSUPPORTED
        if self.breaker.open:
            return MissReason.BREAKER_OPEN
        if self._old_blocks:
            return MissReason.MANIFEST_DIFFERS
        if state.load is not None:  # the scheduler says that it has ended, the reports are still on their way
            return MissReason.LOAD_FAILED_BEFORE
        return state.no_load

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The scheduler's decision: load this many tokens into these blocks, or (0) nothing."""
        state = self.states.get(request.request_id)
        if state is None:
            return
        ask, state.ask = state.ask, Ask()
        if num_external_tokens > 0:
            self.loads.start(state, ask, blocks.get_block_ids(), num_external_tokens)
            return
        self.asks.close(ask)
        if ask.computed is not None and not state.was_preempted:
            queried = state.prompt_tokens - ask.computed
            self.shared.stats.count(ReportLine(state.request_id, queried, 0, 0, ask.reason))

    def hit_sources(self, request: Any, num_tokens: int) -> dict[CacheHitSource, int]:
        """Where the tokens that have just been promised to vLLM come from."""
        state = self.states.get(request.request_id)
        disk = min(num_tokens, self.loads.disk_tokens(state)) if state is not None else 0
        sources = {CacheHitSource.HOST: num_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    # --- every step -----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> Jobs:
        """The step's jobs. Loads go whatever happens to saves."""
        jobs = Jobs(loads=self.loads.take_ready())
        jobs.more.extend(self._more_of_loads())
        self._begin_step(scheduler_output)
        self._tick()
        jobs.saves.extend(self._ready_saves())
        self._plan_saves(scheduler_output)
        jobs.coming.extend(self.saves.take_coming())
        if jobs.loads or jobs.saves or jobs.coming:
            jobs.shape = self.session.shape
        return jobs

    def take_stats(self) -> EngineStats | None:
        """What was counted since the last call, for vLLM's metrics."""
        stats, numbers = self.shared.stats, self.shared.cost.numbers
        if not stats.fresh.is_empty():
            if numbers.prefill_tokens_per_s is not None:
                stats.fresh.show("prefill_tokens_per_second", numbers.prefill_tokens_per_s)
            for (node, tier), rate in numbers.pull_bytes_per_s.items():
                stats.fresh.show("pull_bytes_per_second", rate, f"{node} {tier}")
        return stats.take_fresh()

    @harmless(lambda: None)
    def _begin_step(self, scheduler_output: Any) -> None:
        shared, drafts = self.shared, scheduler_output.scheduled_spec_decode_tokens
        shared.steps.begin(shared.clock(), scheduler_output.num_scheduled_tokens, drafts)

    def step_ended(self) -> None:
        """The scheduler has taken a step's output, the oldest one's under way."""
        if (prefilled := self.shared.steps.end(self.shared.clock())) is not None:
            self.shared.cost.prefilled(*prefilled)

    @harmless(lambda: None)
    def _tick(self) -> None:
        if self.breaker.open:
            self.saves.give_up_all(Cause.INTERNAL_ERRORS)
        self.session.tick()
        self.shared.leases.tick()
        self.loads.tick()
        self.saves.tick()
        for stage, seconds in self.shared.control.take_timings():
            self.shared.stats.fresh.observe(stage, seconds)
        if lines := self.shared.stats.take_lines():
            self.shared.control.report(lines)

    @harmless(list[LoadMore])
    def _more_of_loads(self) -> list[LoadMore]:
        return self.loads.take_more()

    @harmless(list[SaveJob])
    def _ready_saves(self) -> list[SaveJob]:
        return self.saves.take_ready()

    @property
    def _may_save(self) -> bool:
        return self.shared.config.save and not self.breaker.open and not self._old_blocks

    @harmless(lambda: None)
    def _plan_saves(self, scheduler_output: Any) -> None:
        if not self._may_save or self.session.manifest is None:
            return
        self.saves.offers.geometries = self.session.manifest.object_kinds.geometries
        for request_id in scheduler_output.num_scheduled_tokens:
            if (state := self.states.get(request_id)) is not None:
                self._prepare(state)
        self.saves.plan(scheduler_output, self.states)

    def update_connector_output(self, output: Any) -> None:
        """What the workers say of blocks that were not loaded, and of jobs that ended."""
        if output.invalid_block_ids:
            self._roll_back()
        reports = output.kv_connector_worker_meta
        if not isinstance(reports, Reports):
            return
        for job, read in reports.read.items():
            self._load_progressed(job, read)
        for job, loads in reports.loads.items():
            self._load_reported(job, loads)
        for job, saves in reports.saves.items():
            self._save_reported(job, saves)

    @harmless(lambda: None)
    def _roll_back(self) -> None:
        for state in self.states.values():
            self.saves.roll_back(state)

    @harmless(lambda: None)
    def _load_progressed(self, job: int, read: dict[Rank, int]) -> None:
        self.loads.progressed(job, read)

    @harmless(lambda: None)
    def _load_reported(self, job: int, reports: dict[Rank, LoadReport]) -> None:
        self.loads.reported(job, reports)

    @harmless(lambda: None)
    def _save_reported(self, job: int, reports: dict[Rank, SaveReport]) -> None:
        self.saves.reported(job, reports)

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests must go on stepping, so that saves come to their end."""
        if self.breaker.open:  # no step may come that would end them, and their blocks must not stay taken
            self.saves.give_up_all(Cause.INTERNAL_ERRORS)
            return False
        return self.saves.pending

    # --- the engine's life ----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, pool: Any) -> None:
        """The pool whose blocks saves hold references on."""
        self.saves.offers.pins.bind(pool)

    def shake_hands(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the ranks say of their KV caches."""
        self.session.shake_hands(metadata)
        if self.session.tile_format == CPU_MLA:
            self.shared.whole_hits = True
            self.asks = LastTokenAsks(self.shared)

    def reset_cache(self) -> bool:
        """Nothing that was stored so far is valid for this engine any more; others keep it.

        vLLM has tried to empty its block pool just before. Where it could not, requests go on to hit blocks of the
        old weights: False, and nothing is saved or loaded until a reset finds the pool empty.
        """
        self._old_blocks = True  # unless everything below succeeds
        self.session.reset()
        for state in self.states.values():
            self.asks.close(state.ask)
            state.void(self.shared.epoch)
        empty = self.saves.leave_no_block(Cause.RESET)
        if not empty and self.session.unsupported is None:
            log.warning(
                "the reset left KV blocks of running requests: this engine neither saves nor loads KV until its "
                "cache is reset while no request runs"
            )
        self._old_blocks = not empty
        return empty or self.session.unsupported is not None

    def shutdown(self) -> None:
        """Ends the conversation with the store. What was being written there ends by itself."""
        for lease in list(self.shared.leases.held):
            self.shared.leases.release(lease)
        self.shared.control.close()
