"""The runner of devices that compute one step at a time: build the batch of a plan, compute it, and sample."""

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import torch

from engine.backends.device_errors import raising_device_lost, raising_out_of_memory
from engine.batch import build_batch
from engine.config import GroupConfig
from engine.device import LoadedModel
from engine.request import Request
from engine.sampling.drawing import Logits
from engine.sampling.masks import NO_MASKS, Masks, MaskThread
from engine.sampling.sampler import next_tokens, report_prompt
from engine.step import SampledToken, ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: its logits, and its parts in the order of the logit rows (see `build_batch`)."""

    logits: Logits
    parts: tuple[ScheduledRequest, ...]
    masks: "Future[Masks] | None" = None  # grammar masks for the tokens to sample, if any are constrained


def first_rows(parts: Sequence[ScheduledRequest]) -> Iterator[tuple[int, ScheduledRequest]]:
    """Yield each part with the index of its first logit row."""
    row = 0
    for part in parts:
        yield row, part
        row += part.num_rows


def sampling_rows(parts: Sequence[ScheduledRequest]) -> Iterator[tuple[int, Request]]:
    """Yield each (logit row, request that samples its next token from the row), in the order of the rows.

    For the row of a drafted token, the request is a copy whose reply includes the drafts up to this one.
    """
    for row, part in first_rows(parts):
        if part.samples:
            first, request = row + len(part.logprob_positions), part.request
            yield from ((first, it) for it in part.sampling_requests)
            for number in range(1, len(part.drafted) + 1):
                yield first + number, replace(request, output_ids=[*request.output_ids, *part.drafted[:number]])


def accepted_tokens(parts: Sequence[ScheduledRequest], sampled: Sequence[SampledToken]) -> list[SampledToken]:
    """Drop the tokens that were sampled after a wrong draft. `sampled` is in the order of `sampling_rows`."""
    accepted: list[SampledToken] = []
    tokens = iter(sampled)
    for part in parts:
        accepted += islice(tokens, part.samples * len(part.sampling_requests))
        right = True
        for drafted, token in zip(part.drafted, islice(tokens, len(part.drafted)), strict=True):
            right = right and accepted[-1].token_id == drafted
            if right:
                accepted.append(token)
    return accepted


class ModelRunner:
    """Runs plans on one device, one step at a time."""

    preparations = 0

    failed_captures = 0  # no graphs

    def __init__(self, model: LoadedModel, vocab_size: int, groups: Sequence[GroupConfig] = (GroupConfig(),)) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._groups = groups
        self._masks = MaskThread(vocab_size)

    @staticmethod
    def recover() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def launch(self, plan: StepPlan) -> Ticket:
        with self.converting_errors():
            return self._launch(plan)

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        with self.converting_errors():
            return self._collect(ticket)

    @contextmanager
    def converting_errors(self) -> Iterator[None]:
        """Convert the errors of torch that mean exhausted memory or a lost device to OutOfMemory and DeviceLost."""
        with raising_out_of_memory(), raising_device_lost(self._model.synchronize):
            yield

    def _launch(self, plan: StepPlan) -> Ticket:
        blocks = self._model.kv.num_blocks
        batch = build_batch(plan, vocab_size=self._vocab_size, num_blocks=blocks, groups=self._groups)
        self._model.kv.copy(copy for part in plan.scheduled for copy in part.copies)
        masks = self._masks.start([it for part in plan.scheduled if part.samples for it in part.sampling_requests])
        return Ticket(self._model.compute(batch), plan.scheduled, masks)

    def _collect(self, ticket: Ticket) -> list[SampledToken]:
        reports = {
            part.request.id: report_prompt(ticket.logits.values[row:], part.request, part.logprob_positions)
            for row, part in first_rows(ticket.parts)
            if part.logprob_positions
        }
        sampling = list(sampling_rows(ticket.parts))
        masks = ticket.masks.result() if ticket.masks else NO_MASKS
        rows, requests = [row for row, _ in sampling], [request for _, request in sampling]
        picked = accepted_tokens(ticket.parts, next_tokens(ticket.logits, rows, requests, masks))
        if not reports:
            return picked
        told = [replace(token, prompt_logprobs=reports.pop(token.request_id, ())) for token in picked]
        return told + [SampledToken(request_id, None, prompt_logprobs=report) for request_id, report in reports.items()]
