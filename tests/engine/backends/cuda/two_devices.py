"""One checkpoint on a GPU, which may be interpreted, and on the reference device, for a comparison of their results."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine import models
from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.gpu import Gpu, read_card
from engine.backends.reference import ReferenceDevice
from engine.batch import Batch, build_batch
from engine.checkpoints.checkpoint import Checkpoint
from engine.checkpoints.weights import Weights
from engine.config import EngineConfig, GroupConfig
from engine.device import Device, LoadedModel
from engine.kernels.reference import as_floats
from engine.kv.budget import group_config
from engine.loading import open_checkpoint
from engine.sampling_params import SamplingParams
from engine.step import StepPlan
from quant.kernels.card import Card
from tests.support.held_request import HeldRequest

INTERPRETED = Card(
    name="interpreted",
    capability=(8, 9),
    multiprocessors=4,
    shared_memory=99 << 10,
    l2_bytes=4 << 20,
    memory_bytes=1 << 30,
    interpreted=True,
)
BLOCKS = 12
CONTEXT = 64
CLOSE = 1e-3  # mean Kullback-Leibler divergence, in nats
GAP = 0.1  # if the two largest reference logits differ by more, both devices must have the same largest logit


def gpu(device: torch.device) -> Gpu:
    """Return the GPU for the fixture `device`."""
    return Gpu(INTERPRETED) if device.type == "cpu" else Gpu(read_card(0))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint on one device."""

    model: LoadedModel
    groups: tuple[GroupConfig, ...]
    vocab_size: int

    def step(self, *parts: tuple[HeldRequest, int]) -> Tensor:
        """Run a step of (request, number of tokens) parts, and return the logits of the requests whose prompt is
        complete.
        """
        return self.model.compute(self.batch(*parts)).values.clone().cpu()

    def batch(self, *parts: tuple[HeldRequest, int]) -> Batch:
        plan = StepPlan(tuple(it.next_part(n) for it, n in parts))
        return build_batch(plan, vocab_size=self.vocab_size, num_blocks=BLOCKS, groups=self.groups)


def load(path: Path, device: Device) -> Loaded:
    with open_checkpoint(path) as checkpoint:
        return load_checkpoint(checkpoint, device)


def load_checkpoint(checkpoint: Checkpoint, device: Device) -> Loaded:
    model = models.read_config(checkpoint.metadata)
    groups = tuple(group_config(cache) for cache in model.caches)
    config = EngineConfig(device.name, CONTEXT, BLOCKS, max_step_tokens=32, max_running=8, groups=groups)
    loaded = device.load(model, Weights(checkpoint.path, models.stored_weights(checkpoint)), config)
    for pool in loaded.kv.pools:  # bytes of NaN in every dtype, so that reading an unwritten block is noticed
        pool.view(torch.uint8).fill_(255)
        pool[0] = 0
    return Loaded(loaded, groups, model.vocab_size)


@dataclass(frozen=True)
class TwoDevices:
    """A checkpoint on both devices, which run the same steps."""

    cuda: Loaded
    reference: Loaded

    @classmethod
    def of(cls, path: Path, gpu: Gpu, options: CudaOptions = CudaOptions()) -> "TwoDevices":  # noqa: B008
        reference = ReferenceDevice(keep_dequantized=True, threads=1)
        return cls(load(path, CudaDevice(gpu, options)), load(path, reference))

    def step(self, *parts: tuple[HeldRequest, int]) -> tuple[Tensor, Tensor]:
        """Run a step. Returns the logits of the GPU and of the reference, and advances `num_computed`."""
        both = self.cuda.step(*parts), self.reference.step(*parts)
        for it, count in parts:
            it.num_computed += count
        return both

    def request(self, ids: Sequence[int], *blocks: int) -> HeldRequest:
        return HeldRequest(1, tuple(ids), SamplingParams(), block_tables=tuple(list(blocks) for _ in self.cuda.groups))

    def cached(self, computed: int, left: int, *blocks: int) -> HeldRequest:
        """Return a request with `computed` cached tokens, which the reference computes for both devices, and `left`
        more tokens.
        """
        request = self.request(tokens(computed + left, self.cuda.vocab_size), *blocks)
        self.reference.step((request, computed))
        for pool, source in zip(self.cuda.model.kv.pools, self.reference.model.kv.pools, strict=True):
            as_floats(pool)[list(blocks)] = source[list(blocks)].to(as_floats(pool))
        request.num_computed = computed
        return request

    def prefill_and_decode(self) -> tuple[Tensor, Tensor]:
        """Run the end of a long prompt and a decode step of another request in one batch.

        Return float32 [2 rows, vocabulary] of each device.
        """
        first, second = self.cached(16, 3, 3, 8), self.cached(4, 1, 7)
        return self.step((first, 3), (second, 1))

    def prefill_then_decode(self) -> tuple[Tensor, Tensor]:
        """Prefill two requests, then decode them in one batch with a third.

        Return float32 [5 rows, vocabulary] of each device.
        """
        first, second = self.cached(34, 3, 3, 8, 2), self.request(tokens(4, self.cuda.vocab_size), 7)
        third = self.request(tokens(1, self.cuda.vocab_size), 1)
        prompts = self.step((first, 3), (second, 4))
        first.output_ids.append(1)
        second.output_ids.append(2)
        replies = self.step((first, 1), (third, 1), (second, 1))
        cuda, reference = zip(prompts, replies, strict=True)
        return torch.cat(cuda), torch.cat(reference)


def tokens(count: int, vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def check_close(cuda: Tensor, reference: Tensor, close: float = CLOSE) -> None:
    wanted, source = reference.log_softmax(-1), cuda.log_softmax(-1)
    divergence = (wanted.exp() * (wanted - source)).sum(-1).mean()
    assert divergence <= close
    best = reference.topk(2).values
    distinct = best[:, 0] - best[:, 1] > GAP
    assert torch.equal(cuda.argmax(-1)[distinct], reference.argmax(-1)[distinct])
