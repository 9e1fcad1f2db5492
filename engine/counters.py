"""Counters and state of an engine, as plain numbers for metrics. Imports no torch.

Only the engine's thread writes them. Any thread may read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.draft import NO_DRAFTS, DraftCounts, Source
from engine.request import NO_TOKENS, ServiceClass, TokenSources


@dataclass(slots=True)
class Counters:
    """Totals since the engine was created."""

    prompt_tokens: int = 0  # prompt tokens of all requests; each request is counted once, when it first starts
    prompts: TokenSources = NO_TOKENS  # sources of the prompt tokens
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_misses: int = 0  # restores from files that failed, after which the tokens were computed
    computed_tokens: int = 0  # tokens that steps have computed, in prompts and replies, including recomputed ones
    generated_tokens: int = 0
    swapped_out: int = 0  # preemptions that copied the request's blocks to the host pools
    recomputed: int = 0  # preemptions that dropped the request's blocks
    failed_steps: int = 0
    drafts: Mapping[Source, DraftCounts] = field(default_factory=lambda: dict.fromkeys(Source, NO_DRAFTS))


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot of an engine."""

    running: int
    waiting: tuple[int, ...]  # number of waiting requests, indexed by the value of ServiceClass
    swapped: int  # number of waiting requests whose blocks are in the host pool
    kv_blocks: int  # number of blocks that could be allocated if no request held any
    kv_blocks_held: int  # number of blocks that requests hold
    kv_blocks_cached: int  # number of blocks that no request holds and whose content can be reused
    host_blocks: int
    host_blocks_used: int
    counters: Counters
    decode_seconds: float = 0.0  # average seconds of a step with one token; 0: not measured
    failed_captures: int = 0  # steps on a GPU that could not be captured as CUDA graphs; each ran slower

    def waiting_in(self, service: ServiceClass) -> int:
        return self.waiting[service]
