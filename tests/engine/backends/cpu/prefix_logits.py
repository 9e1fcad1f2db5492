"""Check that the bits of a token's logits depend only on the tokens up to it.

They must not depend on the batch, the chunking of the prompt, cached prefixes, preemption, or the number of threads.
Logits that are computed again for the same tokens must have the same bytes, so a run checks itself.
"""

import hashlib
import random
from collections.abc import Sequence

from torch import Tensor

from engine.backends.cpu.device import CpuStep
from engine.backends.runner import ModelRunner, Ticket
from engine.batch import Batch
from engine.device import Compute
from engine.request import Request
from engine.sampling.drawing import Logits
from engine.step import SampledToken, StepPlan
from tests.engine.backends.cpu.recorded import poison


class PrefixLogits:
    """Digests of logits by token prefix. `again` counts the logits that were compared with an earlier digest."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], bytes] = {}
        self.again = 0

    def __len__(self) -> int:
        return len(self._known)

    def see(self, request: Request, positions: Sequence[int], rows: Tensor) -> None:
        """Record the logit rows of a request's tokens at these positions, or compare them with the recorded ones."""
        assert len(positions) == len(rows)
        for position, row in zip(positions, rows, strict=True):
            prefix = tuple(request.token_ids(0, position + 1))
            digest = hashlib.sha256(row.numpy().tobytes()).digest()
            self.again += prefix in self._known
            assert self._known.setdefault(prefix, digest) == digest, f"request {request.id}, position {position}"


class CheckedRunner:
    """A runner that checks the logits of every step with PrefixLogits."""

    failed_captures = preparations = 0  # no graphs and no kernels to compile

    def __init__(self, runner: ModelRunner, seen: PrefixLogits) -> None:
        self._runner = runner
        self._seen = seen

    def launch(self, plan: StepPlan) -> Ticket:
        ticket, first = self._runner.launch(plan), 0
        for part in plan.scheduled:
            positions = [*part.logprob_positions, *([part.stop - 1] if part.samples else [])]
            self._seen.see(part.request, positions, ticket.logits.values[first : first + len(positions)])
            first += len(positions)
        assert first == len(ticket.logits.values)
        return ticket

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        return self._runner.collect(ticket)

    def recover(self) -> None:
        self._runner.recover()

    def close(self) -> None:
        self._runner.close()


def perturbed_compute(step: CpuStep, rng: random.Random) -> Compute:
    """Return a function that computes with random thread counts, from buffers full of NaN, and checks all guards."""

    def compute(batch: Batch) -> Logits:
        poison(step)
        step.fill(batch)
        # mostly one thread, because on a busy machine several threads wait for time slices
        step.workers.run(len(batch.token_ids), rng.choice([1, 1, 1, 1, 2, 3]))
        step.arena.check_guards()
        return step.logits(len(batch.logit_rows))

    return compute
