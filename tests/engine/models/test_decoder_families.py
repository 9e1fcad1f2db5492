"""Every decoder family against transformers, from folders and GGUF files, in batches over the paged cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import models
from engine.backends.reference import ReferenceDevice, ReferenceOperations
from engine.batch import build_batch
from engine.checkpoints.weights import Weights
from engine.kv.blocks import NULL_BLOCK
from engine.kv.budget import group_config
from engine.kv.cache import KVCache, kv_groups
from engine.loading import open_checkpoint
from engine.model_config import Block, ModelConfig
from engine.models import Model
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family import CONTEXT, VOCABULARY
from tests.engine.models.family_checkpoints import (
    FAMILIES,
    TinyModel,
    make,
    make_normalized_stablelm,
    make_two_norms,
    make_wrapped_gemma,
    make_wrapped_gemma4,
    make_wrapped_qwen,
)
from tests.support.held_request import HeldRequest

Change = Callable[[ModelConfig], ModelConfig]

BLOCKS = 40
SOURCES = [
    (name, source)
    for name, family in FAMILIES.items()
    for source in ["folder", *["fused"] * (name in EXPERT_FAMILIES), *["gguf"] * bool(family.gguf)]
]


@pytest.fixture(scope="module", params=SOURCES, ids=" as ".join)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make(tmp_path_factory.mktemp("tiny"), *request.param)


@pytest.fixture(autouse=True)
def _one_thread(_own_threads: None) -> None:
    """Use one thread: threads would wait for each other on tiny tensors."""
    torch.set_num_threads(1)


def load(path: Path, change: Change = lambda config: config) -> Model:
    with open_checkpoint(path) as checkpoint:
        config = change(models.read_config(checkpoint.metadata))
        weights = Weights(checkpoint.path, models.stored_weights(checkpoint))
        return models.load(config, weights, ReferenceOperations(keep_dequantized=True), CONTEXT)


class Run:
    """A loaded model with a KV cache that is NaN where nothing was written."""

    def __init__(self, path: Path, change: Change = lambda config: config) -> None:
        self.model = load(path, change)
        groups = kv_groups(self.model.config, ReferenceDevice(keep_dequantized=True, threads=1).layer_block)
        self._groups = [group_config(cache) for cache in self.model.config.caches]
        self._kv = KVCache(groups, [BLOCKS] * len(groups))
        for pool in self._kv.pools:
            pool.fill_(torch.nan)
            pool[NULL_BLOCK] = 0  # the state before the first token

    def request(self, ids: Sequence[int], blocks: Sequence[int]) -> HeldRequest:
        return HeldRequest(1, tuple(ids), SamplingParams(), block_tables=tuple(list(blocks) for _ in self._groups))

    def step(self, *parts: tuple[HeldRequest, int]) -> Tensor:
        """Run a step. Returns the logits of requests that reach their last token, and advances `num_computed`."""
        plan = StepPlan(tuple(it.next_part(n) for it, n in parts))
        with torch.inference_mode():
            batch = build_batch(plan, vocab_size=VOCABULARY, num_blocks=BLOCKS, groups=self._groups)
            logits: Tensor = self.model.forward(batch, self._kv)
        for it, count in parts:
            it.num_computed += count
        return logits


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(tiny: TinyModel, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = tiny.reference(torch.tensor([list(ids)])).logits[0, -1]
    return logits


def close(logits: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.share(20)
def test_logits_equal_transformers(tiny: TinyModel) -> None:
    run = Run(tiny.path)
    ids = prompt(150, seed=1)
    close(run.step((run.request(ids, range(5, 15)), 150))[0], expected(tiny, ids))


@pytest.mark.share(20)
def test_chunks_and_batches_give_equal_bits(tiny: TinyModel) -> None:
    run, ids = Run(tiny.path), prompt(150, seed=2)
    whole = run.step((run.request(ids, range(1, 11)), 150))[0]
    first = run.request(ids, [29, 13, 27, 11, 30, 22, 15, 18, 39, 12])
    others = [
        run.request(prompt(length, length), blocks) for length, blocks in ((70, range(31, 37)), (90, range(1, 7)))
    ]
    while first.num_computed < 150:
        parts = [(it, min(33, it.num_tokens - it.num_computed)) for it in (others[0], first, others[1])]
        logits = run.step(*[part for part in parts if part[1]])
    assert torch.equal(logits[0], whole)
    for step in range(8):
        first.output_ids.append(step * 7 % VOCABULARY)
        logits = run.step((first, 1))
    close(logits[0], expected(tiny, [*ids, *first.output_ids]))


@pytest.mark.parametrize("make_wrapped", [make_wrapped_gemma, make_wrapped_gemma4, make_wrapped_qwen])
def test_text_part_of_a_multimodal_model_equals_transformers(
    tmp_path: Path, make_wrapped: Callable[[Path], TinyModel]
) -> None:
    tiny, ids = make_wrapped(tmp_path), prompt(60, seed=3)
    run = Run(tiny.path)
    close(run.step((run.request(ids, range(1, 5)), 60))[0], expected(tiny, ids))


def test_head_norms_in_a_gguf_file_equal_transformers(tmp_path: Path) -> None:
    tiny, ids = make_normalized_stablelm(tmp_path / "tiny.gguf"), prompt(60, seed=4)
    run = Run(tiny.path)
    close(run.step((run.request(ids, range(1, 5)), 60))[0], expected(tiny, ids))


def test_parallel_block_with_two_norms_equals_transformers(tmp_path: Path) -> None:
    tiny, ids = make_two_norms(tmp_path), prompt(60, seed=5)
    run = Run(tiny.path, lambda config: replace(config, block=Block.PARALLEL))
    close(run.step((run.request(ids, range(1, 5)), 60))[0], expected(tiny, ids))
