"""The runner of a GPU. A step is launched while the previous one is still running, and is sampled on the GPU.

A launch never waits. The last token of a continuing request may still be pending then: it is copied into the batch on
the GPU from the previous step's samples. A graph also draws tokens; those of requests that need more than the logits
are sampled after the step. Tokens are copied to the host in one small transfer, after which an event is recorded;
collecting a step waits for its event.

Grammar masks are computed by a thread while the step runs. A request whose next token depends on the previous one on
the host (see `needs_reply`) is not launched ahead.
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.cuda.batch_tensors import PendingTokens
from engine.backends.cuda.gpu import Gpu, GpuEvent
from engine.backends.cuda.kernel_compilation import FirstLaunches
from engine.backends.cuda.step import CudaStep
from engine.backends.device_errors import raising_device_lost, raising_out_of_memory
from engine.backends.runner import SamplingRow, accepted_tokens, first_rows, sampling_rows
from engine.batch import Batch, build_batch
from engine.config import GroupConfig
from engine.kernels.sampling import sample
from engine.kernels.sampling_rows import Sampled, SampleTarget, build_draws, build_rows, is_plain, to_sampled_tokens
from engine.kernels.step_logits import StepLogits
from engine.kv.blocks import NULL_BLOCK
from engine.request import Request, TokenLogprobs
from engine.sampling.masks import NO_MASKS, Masks, MaskThread
from engine.sampling.sampler import report_prompt
from engine.sampling_params import SamplingParams
from engine.step import SampledToken, ScheduledRequest, StepPlan


@dataclass(frozen=True, slots=True)
class CudaTicket:
    """A launched step on a GPU, with its samples."""

    parts: tuple[ScheduledRequest, ...]
    logits: Tensor | None  # logits on the GPU, kept only if the step reports log-probabilities of a prompt
    rows: list[SamplingRow]
    targets: list[SampleTarget]  # those of the rows
    masks: Masks
    sampled: Tensor  # int64 [targets], on the GPU
    on_host: Sampled  # the same tokens, which are being copied to the host
    event: GpuEvent  # recorded after the copy


class CudaRunner:
    """See `engine.step.Runner`."""

    def __init__(self, step: CudaStep, vocab_size: int, groups: Sequence[GroupConfig]) -> None:
        self._step = step
        self._gpu: Gpu = step.gpu
        self._vocab_size = vocab_size
        self._groups = groups
        self._masks = MaskThread(vocab_size)
        self._last: CudaTicket | None = None  # the last launched step
        self._first_launches = FirstLaunches()
        self._first_launches.watch()

    @property
    def preparations(self) -> int:
        return self._first_launches.count + self._step.captures

    def launch(self, plan: StepPlan) -> CudaTicket:
        with self._running():
            self._last = self._launch(plan)
            return self._last

    def collect(self, ticket: CudaTicket) -> list[SampledToken]:
        with self._running():
            ticket.event.wait()
            return self._collect(ticket)

    @property
    def failed_captures(self) -> int:
        return self._step.failed_captures

    def recover(self) -> None:
        self._masks.finish()
        with self._running():
            self._step.recover()
            gc.collect()
            self._gpu.drop_caches()

    def close(self) -> None:
        self._masks.close()
        self._last = None
        self._step.close()

    def prepare(self) -> None:
        """Capture the graphs of all sizes, and compile the kernels of greedy and random sampling.

        Call this before any request exists, because it writes to block 1.
        """
        self._step.capture()
        for params in (SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=20, top_p=0.9)):
            tables = tuple([NULL_BLOCK + 1] for _ in self._groups)
            part = ScheduledRequest(Request(0, (0,), params), 0, 1, samples=True, block_tables=tables)
            self.collect(self.launch(StepPlan((part,))))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Return a context in which this thread uses the GPU, and errors are those of the engine."""
        lost = raising_device_lost(self._gpu.synchronize)
        with raising_out_of_memory(), torch.inference_mode(), self._gpu.current(), lost:
            yield

    def _launch(self, plan: StepPlan) -> CudaTicket:
        blocks = self._step.kv.num_blocks
        batch = build_batch(plan, vocab_size=self._vocab_size, num_blocks=blocks, groups=self._groups)
        self._step.kv.copy(plan.copies(self._groups))
        reports = any(part.logprob_positions for part in plan.scheduled)
        computed = self._masks.start(plan.scheduled)
        rows = list(sampling_rows(plan.scheduled))
        targets = _targets(rows)
        are_plain = _are_plain(targets)
        draws = build_draws(targets, self._vocab_size) if are_plain and not _are_greedy(targets) else None
        logits = self._step.launch(batch, self._pending_tokens(plan, batch), draws, kept=reports)
        # the GPU computes the logits meanwhile, and nothing can be sampled before it ends
        masks = computed.result_within(self._gpu.record_event().is_reached) if computed else NO_MASKS
        if masks.late:
            rows = [it for it in rows if (it.request.id, it.index) not in masks.late]
            targets = _targets(rows)
        if are_plain and (draws is None or logits.is_drawn):
            # the next step overwrites these tokens, after they are copied to the host and to its batch
            sampled = Sampled.of(logits.tokens[: len(targets)])
        else:
            sampled = self._sample(logits, targets, masks)
        return CudaTicket(
            parts=plan.scheduled,
            logits=logits.values if reports else None,
            rows=rows,
            targets=targets,
            masks=masks,
            sampled=sampled.columns.token_ids,
            on_host=self._copy_to_host(sampled),
            event=self._gpu.record_event(),
        )

    def _pending_tokens(self, plan: StepPlan, batch: Batch) -> PendingTokens:
        """Return the tokens of the plan that the previous step is still sampling. Each is the last token of its
        request.
        """
        pending = [
            (batch.query_starts[number + 1] - 1, part)
            for number, part in enumerate(plan.scheduled)
            if part.needs_pending_token
        ]
        if not pending:
            return PendingTokens([], [])
        if self._last is None:
            raise RuntimeError("a step needs pending tokens, but no previous step is running")
        rows = {target.request.id: row for row, target in enumerate(self._last.targets)}
        return PendingTokens(
            [index for index, _ in pending], [rows[part.request.id] for _, part in pending], self._last.sampled
        )

    def _sample(self, logits: StepLogits, targets: list[SampleTarget], masks: Masks) -> Sampled:
        if not targets:
            return Sampled.blank(0, None, self._gpu.device)
        rows = build_rows(targets, self._vocab_size, masks)
        staging = self._gpu.staging(len(rows.buffer), dtype=torch.uint8)
        staging.copy_(rows.buffer)
        return sample(logits, rows.over(staging.to(self._gpu.device, non_blocking=True)))

    def _copy_to_host(self, sampled: Sampled) -> Sampled:
        staging = self._gpu.staging(len(sampled.buffer), dtype=torch.uint8)
        return sampled.over(staging.copy_(sampled.buffer, non_blocking=True))

    def _collect(self, ticket: CudaTicket) -> list[SampledToken]:
        sampled = to_sampled_tokens(ticket.on_host, ticket.targets, ticket.masks)
        tokens = accepted_tokens(ticket.rows, sampled)
        reports = self._reports(ticket)
        if not reports:
            return tokens
        tokens = [replace(token, prompt_logprobs=reports.pop(token.request_id, ())) for token in tokens]
        return tokens + [SampledToken(number, None, prompt_logprobs=report) for number, report in reports.items()]

    def _reports(self, ticket: CudaTicket) -> dict[int, tuple[TokenLogprobs, ...]]:
        if ticket.logits is None:
            return {}
        return {
            part.request.id: report_prompt(ticket.logits[row:], part.request, part.logprob_positions)
            for row, part in first_rows(ticket.parts)
            if part.logprob_positions
        }


def _targets(rows: Iterable[SamplingRow]) -> list[SampleTarget]:
    return [SampleTarget(it.row, it.request, it.index) for it in rows]


def _are_plain(targets: Sequence[SampleTarget]) -> bool:
    """Whether a draw from each of the logit rows, in order, gives the tokens."""
    in_order = all(target.source == row for row, target in enumerate(targets))
    return bool(targets) and in_order and all(map(is_plain, targets))


def _are_greedy(targets: Sequence[SampleTarget]) -> bool:
    return all(target.request.params.temperature == 0 for target in targets)
