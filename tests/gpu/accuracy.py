"""Distance of the GPU's logits from the reference backend, on a small model with random weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.backends.runner import ModelRunner, Ticket
from engine.load_options import LoadOptions
from engine.loading import NEXT_TOKEN, OutputStage, load_engine
from engine.model_config import ModelConfig
from engine.sampling_params import SamplingParams
from engine.step import SampledToken, StepPlan
from tests.gpu.engine import BF16, FP8, INT4, options_of, random_checkpoint
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine
from tests.gpu.random_checkpoint import RandomCheckpoint
from tests.kernels.shapes import TINY, layer
from tests.kernels.weights import ROWS

SMALL = replace(TINY, layers=(layer(16, 4, 32, 2048),) * 4, hidden=1024, vocab_size=4096)
CPU = torch.device("cpu")
SPREAD = 3.0  # standard deviation to which logits are scaled, as in trained models
MAX_KL = 1e-3
MAX_FLOAT8_KL = 2e-2  # prompts round the inputs of products to e4m3
GAP = 0.1  # the best token must be the same if the two best reference logits differ by more


@dataclass
class RecordingRunner:
    """A runner that records the logits of all steps."""

    runner: ModelRunner
    rows: list[Tensor] = field(default_factory=list)
    failed_captures = preparations = 0  # no graphs and no kernels to compile

    def launch(self, plan: StepPlan) -> Ticket:
        return self.runner.launch(plan)

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        self.rows.append(ticket.logits.values.float().cpu().clone())
        return self.runner.collect(ticket)

    def recover(self) -> None:
        self.runner.recover()

    def close(self) -> None:
        self.runner.close()


def figures(machine: Machine) -> Iterator[Figure]:
    model, tokens = (TINY, 8) if machine.dry else (SMALL, 512)
    for mix, name in (INT4, FP8, BF16):
        checkpoints = [random_checkpoint(machine, model, mix, device) for device in (machine.device, CPU)]
        plain = LoadOptions(backend="reference", context_length=tokens + 16)
        got, want = (
            _logits(checkpoints[0], model, tokens, options_of(machine)),
            _logits(checkpoints[1], model, tokens, plain),
        )
        unit = SPREAD / float(want.std())
        got, want = unit * got, unit * want
        most = MAX_FLOAT8_KL if name == FP8[1] else MAX_KL
        yield Figure(f"{name}: mean KL to the reference", _divergence(want, got), "nats", most=most)
        least = None if name == FP8[1] else 1.0
        yield Figure(f"{name}: equal best tokens where the gap is above {GAP}", agreement(want, got), "", least=least)


def _logits(checkpoint: RandomCheckpoint, model: ModelConfig, tokens: int, options: LoadOptions) -> Tensor:
    """Return the logits of every prompt position, float32 [tokens, vocabulary]."""
    runners: list[RecordingRunner] = []

    def record(runner: ModelRunner) -> RecordingRunner:
        runners.append(RecordingRunner(runner))
        return runners[-1]

    ending = OutputStage(NEXT_TOKEN.config, NEXT_TOKEN.weights, record)
    engine = load_engine(checkpoint, options, output=ending)
    generator = torch.Generator().manual_seed(tokens)
    prompt = torch.randint(model.vocab_size, (tokens,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    engine.add(engine.request(tuple(prompt), params, frozenset()))
    while engine.has_work:
        engine.step()
    return torch.cat(runners[0].rows)


def _divergence(want: Tensor, got: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence in nats."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def agreement(want: Tensor, got: Tensor) -> float:
    """Return the share of equal best tokens where the gap is clear, or 0 if it is clear nowhere.

    Only the first logits count: later rows of the random head repeat the first, so that best logits are equal.
    """
    want, got = want[:, :ROWS], got[:, :ROWS]
    best = want.topk(2).values
    distinct = best[:, 0] - best[:, 1] > GAP
    return float((want.argmax(-1) == got.argmax(-1))[distinct].float().mean()) if distinct.any() else 0.0
