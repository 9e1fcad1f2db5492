"""What an engine has done so far and what it holds now, as plain numbers for whoever watches it. No torch.

Written on the engine's thread alone, read from any. Refuses to know what is made of the numbers.
"""

from dataclasses import dataclass

from engine.request import NO_TOKENS, ServiceClass, TokenSources


@dataclass(slots=True)
class Counters:
    """Since the engine was made; they only grow."""

    prompt_tokens: int = 0  # of requests that were admitted for the first time
    prompts: TokenSources = NO_TOKENS  # where those tokens were found
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    disk_misses: int = 0  # restores from files that failed; the tokens were computed
    computed_tokens: int = 0  # tokens that steps computed, prompts and replies, again after a preemption
    generated_tokens: int = 0
    swapped_out: int = 0  # preemptions that copied the request's blocks to the host pools
    recomputed: int = 0  # preemptions that dropped the request's blocks
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """One look at an engine."""

    running: int
    waiting: tuple[int, ...]  # requests of each ServiceClass that wait, by its value
    swapped: int  # of the waiting ones, those whose blocks are in the host pool
    kv_blocks: int  # blocks there are to hand out
    kv_blocks_held: int  # by requests
    kv_blocks_cached: int  # held by nobody, with content that may be used again
    host_blocks: int
    host_blocks_used: int
    counters: Counters

    def waiting_in(self, service: ServiceClass) -> int:
        return self.waiting[service]
