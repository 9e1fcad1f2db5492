"""The runner of devices that compute one step at a time: build the batch of a plan, compute it, and sample."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.backends.device_errors import raising_device_lost, raising_out_of_memory
from engine.batch import build_batch
from engine.config import GroupConfig
from engine.device import LoadedModel
from engine.request import Request
from engine.sampling.drawing import Logits
from engine.sampling.masks import NO_MASKS, MaskThread, PendingMasks, next_position
from engine.sampling.sampler import next_tokens, report_prompt
from engine.step import SampledToken, ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step: its logits, and its parts in the order of the logit rows (see `build_batch`)."""

    logits: Logits
    parts: tuple[ScheduledRequest, ...]
    masks: PendingMasks | None = None  # grammar masks for the tokens to sample, if any are constrained


def first_rows(parts: Sequence[ScheduledRequest]) -> Iterator[tuple[int, ScheduledRequest]]:
    """Yield each part with the index of its first logit row."""
    row = 0
    for part in parts:
        yield row, part
        row += part.num_rows


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """A logit row from which a request samples its next token.

    For a row after drafted tokens, the request is a copy whose reply includes them. The row before must then sample the
    token `after`, or the draft was wrong.
    """

    row: int
    request: Request
    index: int  # index of the token in the reply, counting tokens that a running step has yet to sample
    after: int | None = None


def sampling_rows(parts: Sequence[ScheduledRequest]) -> Iterator[SamplingRow]:
    """Yield the rows from which a step samples. Those of a request are together, in order."""
    for row, part in first_rows(parts):
        if part.samples:
            first, request, before = row + len(part.logprob_positions), part.request, 0
            index = part.start + part.num_known - len(request.prompt_ids)
            yield from (SamplingRow(first, it, index) for it in part.sampling_requests)
            for number, drafted in enumerate(part.draft.samples[1:], 1):
                ahead = replace(request, output_ids=[*request.output_ids, *part.drafted[:drafted]])
                yield SamplingRow(first + number, ahead, index + drafted, after=part.drafted[before])
                before = drafted


def accepted_tokens(rows: Sequence[SamplingRow], sampled: Sequence[SampledToken]) -> list[SampledToken]:
    """Drop the tokens that were sampled after a wrong draft. `sampled` has a token for each of the rows."""
    accepted: list[SampledToken] = []
    right, last = True, None
    for row, token in zip(rows, sampled, strict=True):
        right = row.after is None or (right and last == row.after)
        last = token.token_id
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

    def recover(self) -> None:
        self._masks.finish()
        gc.collect()
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._masks.close()
        close = self._model.close
        del self._model
        close()

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
        self._model.kv.copy(plan.copies(self._groups))
        masks = self._masks.start(plan.scheduled)
        return Ticket(self._model.compute(batch), plan.scheduled, masks)

    def _collect(self, ticket: Ticket) -> list[SampledToken]:
        reports = {
            part.request.id: report_prompt(ticket.logits.values[row:], part.request, part.logprob_positions)
            for row, part in first_rows(ticket.parts)
            if part.logprob_positions
        }
        masks = ticket.masks.result() if ticket.masks else NO_MASKS
        rows = [it for it in sampling_rows(ticket.parts) if next_position(it.request) not in masks.late]
        sampled = next_tokens(ticket.logits, [it.row for it in rows], [it.request for it in rows], masks)
        picked = accepted_tokens(rows, sampled)
        if not reports:
            return picked
        told = [replace(token, prompt_logprobs=reports.pop(token.request_id, ())) for token in picked]
        return told + [SampledToken(request_id, None, prompt_logprobs=report) for request_id, report in reports.items()]
