"""One checkpoint on two devices: on a GPU, which may be interpreted, and on the reference; and how far they differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine import models
from engine.batch import Batch, build_batch
from engine.config import EngineConfig, GroupConfig
from engine.cuda.device import CudaDevice, CudaOptions
from engine.cuda.gpu import Gpu, read_card
from engine.device import Device, LoadedModel
from engine.loading import open_checkpoint
from engine.reference import ReferenceDevice
from engine.request import Request, SamplingParams, ScheduledRequest, StepPlan
from engine.weights import Weights
from quant.kernels.card import Card

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
CHUNK = 3  # tokens of a prompt that are left, behind what is cached
CLOSE = 1e-3  # mean Kullback-Leibler divergence, in nats
GAP = 0.1  # between the two largest logits of the reference: where it is larger, the largest is the same


def gpu(device: torch.device) -> Gpu:
    """That of the fixture `device`."""
    return Gpu(INTERPRETED) if device.type == "cpu" else Gpu(read_card(0))


@dataclass(frozen=True)
class Loaded:
    """A checkpoint on one device."""

    model: LoadedModel
    groups: tuple[GroupConfig, ...]
    vocab_size: int

    def step(self, *parts: tuple[Request, int]) -> Tensor:
        """Logits of the requests that reach their last token."""
        return self.model.compute(self.batch(*parts)).values.clone().cpu()

    def batch(self, *parts: tuple[Request, int]) -> Batch:
        plan = StepPlan(
            tuple(ScheduledRequest(it, it.num_computed, n, it.num_computed + n == it.num_tokens) for it, n in parts)
        )
        return build_batch(plan, vocab_size=self.vocab_size, num_blocks=BLOCKS, groups=self.groups)


def load(path: Path, device: Device) -> Loaded:
    with open_checkpoint(path) as checkpoint:
        model = models.read_config(checkpoint.metadata)
        groups = tuple(GroupConfig(window) for window in model.windows)
        config = EngineConfig(device.name, CONTEXT, BLOCKS, max_step_tokens=32, max_running=4, groups=groups)
        loaded = device.load(model, Weights(checkpoint.path, models.stored_weights(checkpoint)), config)
    for pool in loaded.kv.pools:  # NaN, of whatever type: what nobody has written must not matter
        pool.view(torch.uint8).fill_(255)
        pool[0] = 0
    return Loaded(loaded, groups, model.vocab_size)


@dataclass(frozen=True)
class TwoDevices:
    """What both say, step by step."""

    cuda: Loaded
    reference: Loaded

    @classmethod
    def of(cls, path: Path, gpu: Gpu, options: CudaOptions = CudaOptions()) -> "TwoDevices":  # noqa: B008
        reference = ReferenceDevice(keep_dequantized=True, threads=1)
        return cls(load(path, CudaDevice(gpu, options)), load(path, reference))

    def step(self, *parts: tuple[Request, int]) -> tuple[Tensor, Tensor]:
        """Logits of the GPU and of the reference; the requests' `num_computed` move on."""
        both = self.cuda.step(*parts), self.reference.step(*parts)
        for it, count in parts:
            it.num_computed += count
        return both

    def request(self, ids: Sequence[int], *blocks: int) -> Request:
        return Request(1, tuple(ids), SamplingParams(), block_tables=tuple(list(blocks) for _ in self.cuda.groups))

    def cached(self, length: int, *blocks: int) -> Request:
        """A request with all but its last CHUNK tokens computed, by the reference, and found on both devices."""
        request = self.request(tokens(length, self.cuda.vocab_size), *blocks)
        self.reference.step((request, length - CHUNK))
        for there, found in zip(self.cuda.model.kv.pools, self.reference.model.kv.pools, strict=True):
            there[list(blocks)] = found[list(blocks)].to(there)
        request.num_computed = length - CHUNK
        return request

    def chunks_and_replies(self) -> tuple[Tensor, Tensor]:
        """The rest of a long prompt with a short one; then both reply, with a third of one token. -> float32 [5 rows,
        vocabulary] of each."""
        first, second = self.cached(37, 3, 8, 2), self.request(tokens(4, self.cuda.vocab_size), 7)
        third = self.request(tokens(1, self.cuda.vocab_size), 1)
        prompts = self.step((first, CHUNK), (second, 4))
        first.output_ids.append(1)
        second.output_ids.append(2)
        replies = self.step((first, 1), (third, 1), (second, 1))
        cuda, reference = zip(prompts, replies, strict=True)
        return torch.cat(cuda), torch.cat(reference)


def tokens(count: int, vocab_size: int) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(count)).tolist()


def check_close(cuda: Tensor, reference: Tensor, close: float = CLOSE) -> None:
    wanted, found = reference.log_softmax(-1), cuda.log_softmax(-1)
    divergence = (wanted.exp() * (wanted - found)).sum(-1).mean()
    assert divergence <= close
    best = reference.topk(2).values
    clear = best[:, 0] - best[:, 1] > GAP
    assert torch.equal(cuda.argmax(-1)[clear], reference.argmax(-1)[clear])
