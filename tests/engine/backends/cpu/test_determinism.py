"""The bits of a token's logits do not depend on how the engine computes them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.backends.cpu.device import CpuStep
from engine.backends.runner import ModelRunner, Ticket
from engine.config import BLOCK_SIZE, EngineConfig
from engine.core import Engine
from engine.device import LoadedModel
from engine.request import Origin, Request
from engine.sampling_params import SamplingParams
from tests.engine.backends.cpu.prefix_logits import CheckedRunner, PrefixLogits, perturbed_compute
from tests.engine.backends.cpu.recorded import advance, load_step, sequence, spoil
from tests.engine.models.tiny_llama import MIXES, make
from tests.support.held_request import HeldRequest

VOCABULARY = 300
CONFIG = EngineConfig("cpu", context_length=512, num_blocks=120, max_step_tokens=256, max_running=16, threads=3)

# name: (heads, KV heads, head dimension, hidden size, mix of weight types)
MODELS = {
    "one KV head for three, Q4_1": (3, 1, 64, 96, "Q4_1"),
    "one KV head each, Q4_0": (2, 2, 32, 64, "Q4_0"),
    "one KV head for two, Q8_0": (4, 2, 32, 128, "Q8_0"),
    "wide heads, F16": (2, 2, 96, 64, "F16"),
    "every type": (6, 1, 32, 96, "every type"),
}


@pytest.fixture(params=[torch.float16, torch.int8])
def kv_type(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads, kv_heads, head_dim, hidden, mix = MODELS[request.param]
    return make(
        tmp_path_factory.mktemp("tiny"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=VOCABULARY,
        types=MIXES[mix],
        tied=mix == "every type",
    ).path


def prompts(rng: random.Random, vocabulary: int, lengths: list[int]) -> list[list[int]]:
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


@dataclass
class Blocks:
    """The free blocks of a pool. A block is filled with NaN when it is released."""

    step: CpuStep
    rng: random.Random

    def __post_init__(self) -> None:
        self.pool = self.step._kv.pools[0]
        spoil(self.pool)
        self.free = list(range(1, len(self.pool)))

    def take(self, tokens: int) -> list[int]:
        """Take random blocks for a number of tokens."""
        taken = self.rng.sample(self.free, -(-tokens // BLOCK_SIZE))
        self.free = [block for block in self.free if block not in taken]
        return taken

    def give_back(self, request: HeldRequest) -> None:
        for block in request.block_table:
            spoil(self.pool[block])
        self.free += request.block_table


@dataclass
class Steps:
    """Runs requests without a scheduler: the test chooses the tokens of each step."""

    step: CpuStep
    seen: PrefixLogits
    rng: random.Random
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.step, self.rng)
        self.compute = perturbed_compute(self.step, self.rng)

    def request(self, ids: list[int]) -> HeldRequest:
        return sequence(self.rng.randrange(1 << 30), ids, self.blocks.take(len(ids)))

    def run(self, parts: list[tuple[HeldRequest, int]]) -> None:
        """Run one step, and check the logits of each of its tokens."""
        starts = [it.num_computed for it, _ in parts]
        rows = self.compute(advance(parts, vocab_size=self.vocabulary, num_blocks=len(self.blocks.pool))).values
        first = 0
        for start, (it, count) in zip(starts, parts, strict=True):
            self.seen.see(it, range(start, start + count), rows[first : first + count])
            first += count
            if it.num_computed == len(it.prompt_ids):
                self.blocks.give_back(it)

    def one_by_one(self, ids: list[int]) -> None:
        it = self.request(ids)
        for _ in ids:
            self.run([(it, 1)])

    def whole(self, ids: list[int]) -> None:
        self.run([(self.request(ids), len(ids))])

    def random_chunks(self, prompts: list[list[int]], *, together: int) -> None:
        """Run all prompts, up to `together` at a time, in steps with random chunks."""
        waiting, running = self.rng.sample(prompts, len(prompts)), list[HeldRequest]()
        while waiting or running:
            while waiting and len(running) < together:
                running.append(self.request(waiting.pop()))
            budget, parts = 256, list[tuple[HeldRequest, int]]()
            for it in self.rng.sample(running, self.rng.randint(1, len(running))):
                left = len(it.prompt_ids) - it.num_computed
                count = min(budget, left, self.rng.choice([1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 40, 150]))
                if count:
                    parts.append((it, count))
                    budget -= count
            self.run(parts)
            running = [it for it in running if it.num_computed < len(it.prompt_ids)]


@pytest.mark.share(1, "path")
def test_logit_bits_depend_only_on_the_tokens_before(path: Path, cpu_kernels: Path, kv_type: torch.dtype) -> None:
    """Prompts run token by token, whole, and in chunks; alone and with up to 15 other requests; with one to three
    threads.
    """
    rng = random.Random(11)
    tokens = prompts(rng, VOCABULARY, [1, 2, 5, 16, 17, 31, 129])
    steps = Steps(load_step(path, cpu_kernels, CONFIG, kv_type=kv_type), PrefixLogits(), rng)
    for ids in tokens:
        steps.one_by_one(ids)
    known = len(steps.seen)
    for ids in tokens:
        steps.whole(ids)
    for together in (1, 3, 16):
        steps.random_chunks(tokens, together=together)
    steps.random_chunks([ids[: rng.randint(1, len(ids))] for ids in tokens * 3], together=16)
    assert len(steps.seen) == known
    assert steps.seen.again > 4 * known


def test_prefix_logits_detects_a_changed_block(path: Path, cpu_kernels: Path, kv_type: torch.dtype) -> None:
    """A deliberate fault: a block gets the keys and values of another prompt, and the check must fail."""
    rng = random.Random(12)
    steps = Steps(load_step(path, cpu_kernels, CONFIG, kv_type=kv_type), PrefixLogits(), rng)
    (ids,) = prompts(rng, VOCABULARY, [40])
    steps.one_by_one(ids)
    it = steps.request(ids)
    steps.run([(it, 20)])
    steps.blocks.pool[it.block_table[0]].view(torch.uint8).bitwise_xor_(1)
    with pytest.raises(AssertionError, match="position 2"):
        steps.run([(it, 20)])


# -- through the scheduler


@dataclass
class Traffic:
    """Random prompts with common prefixes and repetitions, many of which end near block boundaries."""

    rng: random.Random
    vocabulary: int
    longest: int

    def __post_init__(self) -> None:
        self.roots = prompts(self.rng, self.vocabulary, [self.longest] * 4)

    def prompt(self) -> tuple[int, ...]:
        root = self.rng.choice(self.roots)
        cut = self.rng.choice([1, 7, 15, 16, 17, 32, 33, self.longest])
        return tuple(root[:cut]) if self.rng.random() < 0.5 else (*root[:cut], self.rng.randrange(8))

    def params(self) -> SamplingParams:
        """Return greedy or random sampling. There are only two seeds, so that replies repeat as well."""
        shapes = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)]
        return replace(
            self.rng.choice(shapes),
            seed=self.rng.randrange(2),
            max_tokens=self.rng.randint(1, 20),
            prompt_logprobs=0 if self.rng.random() < 0.1 else None,
        )


def checked_engine(
    step: CpuStep, config: EngineConfig, vocabulary: int, seen: PrefixLogits, seed: int
) -> Engine[Ticket]:
    runner = ModelRunner(LoadedModel(perturbed_compute(step, random.Random(seed)), step._kv), vocabulary)
    return Engine(config, vocabulary, CheckedRunner(runner, seen))


def run_to_end(engine: Engine[Ticket]) -> None:
    while engine.has_work:
        engine.step()
    engine.assert_empty()


def submit(engine: Engine[Ticket], prompt: tuple[int, ...], params: SamplingParams, salt: str = "") -> Request:
    request = engine.request(prompt, params, frozenset(), Origin(cache_salt=salt))
    engine.add(request)
    return request


def serve(engine: Engine[Ticket], traffic: Traffic, count: int) -> Iterator[Request]:
    """Submit `count` requests, and run steps in between."""
    for _ in range(count):
        yield submit(engine, traffic.prompt(), traffic.params())
        for _ in range(traffic.rng.choice([0, 0, 0, 0, 1, 5])):
            engine.step()
    run_to_end(engine)


def check_traffic(
    path: Path, code_cache: Path, config: EngineConfig, traffic: Traffic, count: int, kv_type: torch.dtype
) -> None:
    """Run random traffic. Then run some of its requests alone, without a cache, with different chunk sizes."""
    step, seen = load_step(path, code_cache, config, kv_type=kv_type), PrefixLogits()
    spoil(step._kv.pools[0])
    served = list(serve(checked_engine(step, config, traffic.vocabulary, seen, 1), traffic, count))
    assert any(request.num_cached for request in served)
    assert any(request.num_preemptions for request in served)
    known, again_in_traffic = len(seen), seen.again
    for number, request in enumerate(served[:: max(1, count // 30)]):
        spoil(step._kv.pools[0])
        budget = traffic.rng.choice([1, 7, config.max_step_tokens])
        alone = checked_engine(step, replace(config, max_step_tokens=budget), traffic.vocabulary, seen, number)
        again = submit(alone, request.prompt_ids, request.params)
        run_to_end(alone)
        assert again.output_ids == request.output_ids
    assert len(seen) == known
    assert again_in_traffic
    assert seen.again - again_in_traffic > count


@pytest.mark.share(1, "path")
def test_logit_bits_are_unchanged_by_scheduling(path: Path, cpu_kernels: Path, kv_type: torch.dtype) -> None:
    """The traffic has batches, chunks, cached prefixes, and preemption. The requests need far more blocks than the pool
    has.

    Its blocks start as NaN.
    """
    config = replace(CONFIG, num_blocks=20, max_step_tokens=40, context_length=256)
    check_traffic(path, cpu_kernels, config, Traffic(random.Random(13), VOCABULARY, 90), 24, kv_type)


@pytest.mark.share(1)
def test_smollm2_logit_bits_are_unchanged_by_scheduling(
    short_smollm2: Path, cpu_kernels: Path, kv_type: torch.dtype
) -> None:
    """Prefixes are cached or computed, requests are preempted, and up to 16 requests run at a time."""
    config = replace(CONFIG, num_blocks=14, max_step_tokens=128, context_length=256)
    check_traffic(short_smollm2, cpu_kernels, config, Traffic(random.Random(14), 49152, 70), 14, kv_type)


@pytest.mark.share(1)
def test_smollm2_logit_bits_are_the_same_in_any_chunks(
    short_smollm2: Path, cpu_kernels: Path, kv_type: torch.dtype
) -> None:
    rng = random.Random(15)
    tokens = prompts(rng, 49152, [3, 17, 40, 70])
    steps = Steps(
        load_step(short_smollm2, cpu_kernels, CONFIG, kv_type=kv_type),
        PrefixLogits(),
        rng,
        vocabulary=49152,
    )
    for ids in tokens:
        steps.one_by_one(ids)
    known = len(steps.seen)
    steps.whole(tokens[-1])
    steps.random_chunks(tokens * 3, together=12)
    assert len(steps.seen) == known
    assert steps.seen.again > 3 * known
