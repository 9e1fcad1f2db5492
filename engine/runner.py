"""The runner: computes a step's plan. Two calls, so that a device may still be busy between them.

`launch` starts the computation and returns a ticket, `collect` waits for it and gives the sampled tokens. Refuses to
know which requests exist beyond the plan it is given.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.models import Model
from engine.request import Request, SampledToken, StepPlan
from engine.sampler import sample

TicketT = TypeVar("TicketT")


class Runner(Protocol[TicketT]):
    """Computes plans in the order they are launched; tickets are collected in that order too."""

    def launch(self, plan: StepPlan) -> TicketT:
        """Start a step. With steps before it under way, it follows them on the device."""
        ...

    def collect(self, ticket: TicketT) -> list[SampledToken]:
        """Wait for a step: one token for each part of its plan that samples, in the plan's order."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: its logits, one row for each of `requests`."""

    logits: Tensor
    requests: tuple[Request, ...]


class ModelRunner:
    """Runs plans on one model and its KV cache, one step at a time (depth 1)."""

    def __init__(self, model: Model, kv: KVCache) -> None:
        self._model = model
        self._kv = kv

    def launch(self, plan: StepPlan) -> Ticket:
        batch = build_batch(plan, vocab_size=self._model.config.vocab_size, num_blocks=self._kv.num_blocks)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._kv)
        return Ticket(logits, tuple(part.request for part in plan.scheduled if part.samples))

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        with torch.inference_mode():
            return sample(ticket.logits, ticket.requests) if ticket.requests else []
