"""The runner: computes a step's plan. Two calls, so that a device may still be busy between them.

`launch` starts the computation and returns a ticket, `collect` waits for it and gives the sampled tokens. Refuses to
know which requests exist beyond the plan it is given.
"""

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine.batch import build_batch
from engine.kv_cache import KVCache
from engine.models import Model
from engine.request import SampledToken, ScheduledRequest, StepPlan, TokenLogprobs
from engine.sampler import report_prompt, sample

TicketT = TypeVar("TicketT")


class Runner(Protocol[TicketT]):
    """Computes plans in the order they are launched; tickets are collected in that order too."""

    def launch(self, plan: StepPlan) -> TicketT:
        """Start a step. With steps before it under way, it follows them on the device."""
        ...

    def collect(self, ticket: TicketT) -> list[SampledToken]:
        """Wait for a step: what it found for each part of its plan that samples or reports."""
        ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: its parts, and the logits of their rows, one part's behind another's (see `build_batch`)."""

    logits: Tensor
    parts: tuple[ScheduledRequest, ...]


class ModelRunner:
    """Runs plans on one model and its KV cache, one step at a time (depth 1)."""

    def __init__(self, model: Model, kv: KVCache) -> None:
        self._model = model
        self._kv = kv

    def launch(self, plan: StepPlan) -> Ticket:
        batch = build_batch(plan, vocab_size=self._model.config.vocab_size, num_blocks=self._kv.num_blocks)
        with torch.inference_mode():
            logits = self._model.forward(batch, self._kv)
        return Ticket(logits, plan.scheduled)

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        picking: list[int] = []  # rows that the next token of a request is picked from
        reports: dict[int, tuple[TokenLogprobs, ...]] = {}
        row = 0
        with torch.inference_mode():
            for part in ticket.parts:
                if part.reported:
                    reports[part.request.id] = report_prompt(ticket.logits[row:], part.request, part.reported)
                    row += len(part.reported)
                if part.samples:
                    picking.append(row)
                    row += 1
            requests = [part.request for part in ticket.parts if part.samples]
            picked = sample(ticket.logits[picking], requests) if requests else []
        told = [replace(token, prompt_logprobs=reports.pop(token.request_id, ())) for token in picked]
        return told + [SampledToken(request_id, None, prompt_logprobs=report) for request_id, report in reports.items()]
