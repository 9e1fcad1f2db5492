"""A full, a windowed, and a recurrent layer that compute with integers, so that the expected results are exact.

The tests cover the scheduler's groups, the batch, the pools, and copies between pools.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.backends.runner import ModelRunner, Ticket
from engine.batch import Batch
from engine.config import BLOCK_SIZE, EngineConfig, GroupConfig, Preemption
from engine.core import Engine
from engine.device import LoadedModel
from engine.kv.cache import KVCache, KVGroup, LayerBlock
from engine.kv.threaded_transfer import ThreadedTransfer
from engine.mixer_config import CacheConfig
from engine.sampling.drawing import Logits
from engine.sampling_params import SamplingParams

VOCABULARY, PRIME, WINDOW = 4000, 1_000_003, 21
GROUPS = (GroupConfig(), GroupConfig(window=WINDOW), GroupConfig(recurrent=True))


def token_value(tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the number that a layer stores for a token."""
    return (tokens * 31 + positions * 17 + 7) % PRIME


class ToyLayers:
    """One layer per KV group. A block stores one number per token; the recurrent layer stores its state."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv
        kv.pools[2][0] = 1  # the initial state

    def __call__(self, batch: Batch) -> Logits:
        ids, positions = torch.tensor(batch.token_ids), torch.tensor(batch.positions)
        for group in range(2):
            self.kv.pools[group].view(-1)[torch.tensor(batch.slot_mappings[group])] = token_value(ids, positions)
        found = torch.zeros(len(ids), dtype=torch.int64)
        for request, (start, stop) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
            source, target = batch.block_tables[2][request]
            state_value = self.kv.pools[2][target]
            state_value[:] = self.kv.pools[2][source]
            for row in range(start, stop):
                state_value[:] = (state_value * 29 + ids[row]) % PRIME
                found[row] = state_value.view(-1)[0]
                for group, window in ((0, 1 << 20), (1, WINDOW)):
                    end = batch.positions[row] + 1
                    found[row] += self._sum(group, batch.block_tables[group][request], max(0, end - window), end)
        logits = torch.nn.functional.one_hot(found % VOCABULARY, VOCABULARY).float()
        return Logits(logits[torch.tensor(batch.logit_rows, dtype=torch.int64)])

    def _sum(self, group: int, table: Sequence[int], start: int, end: int) -> Tensor:
        slots = [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(start, end)]
        return self.kv.pools[group].view(-1)[torch.tensor(slots)].sum()


def expected(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens, state = list(prompt), 1
    for position in range(len(prompt) + count):
        if position == len(tokens):
            kept = [(token * 31 + at * 17 + 7) % PRIME for at, token in enumerate(tokens)]
            tokens.append((state + sum(kept) + sum(kept[-WINDOW:])) % VOCABULARY)
        state = (state * 29 + tokens[position]) % PRIME
    return tokens[len(prompt) :]


def toy_engine(preemption: Preemption) -> Engine[Ticket]:
    block = LayerBlock((BLOCK_SIZE,), torch.int64)
    layers = [KVGroup((number,), CacheConfig(1, BLOCK_SIZE), block) for number in range(3)]
    kv = KVCache(layers, [24] * 3, [16] * 3)
    for pool in (*kv.pools, *kv.host_pools):
        pool[:] = -1
    config = EngineConfig(
        "toy", 300, 24, max_step_tokens=32, max_running=6, groups=GROUPS, host_blocks=16, preemption=preemption
    )
    runner = ModelRunner(LoadedModel(ToyLayers(kv), kv), VOCABULARY, GROUPS)
    return Engine(config, VOCABULARY, runner, ThreadedTransfer(kv))


@pytest.mark.parametrize("preemption", Preemption)
def test_three_kinds_of_layers_are_exact_with_little_memory(preemption: Preemption) -> None:
    rng = random.Random(preemption.value)
    engine = toy_engine(preemption)
    prefix = tuple(rng.randrange(VOCABULARY) for _ in range(64))
    requests = []
    for _ in range(24):
        prompt = (
            *prefix[: rng.choice([0, 32, 64])],
            *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))),
        )
        params = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 60))
        family = [engine.request(prompt, params, frozenset()) for _ in range(rng.choice([1, 1, 2]))]
        engine.add(*family)
        requests += family
    while engine.has_work:
        engine.step()
    engine.assert_empty()
    for request in requests:
        assert request.output_ids == expected(request.prompt_ids, len(request.output_ids))
        assert len(request.output_ids) == request.params.max_tokens
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_cached for request in requests) > 0
