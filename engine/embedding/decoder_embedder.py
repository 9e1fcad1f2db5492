"""A decoder that answers a text with a vector: the state of its last token, as Qwen3-Embedding does it.

The same engine computes it that would write text, so that texts are batched, and a beginning that several have in
common is computed once. In place of the head stands the identity, so that a row of logits is a state; in place of the
sampler, a runner that keeps the row. Looks like an `engine.embedding.encoder.Encoder` to whoever uses it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import models
from engine.backends.runner import ModelRunner, Ticket
from engine.checkpoints.checkpoint import Checkpoint, StoredWeight
from engine.checkpoints.weights import LoadProgress, Weights
from engine.config import ModelConfig
from engine.core import Engine
from engine.counters import EngineState
from engine.errors import EngineError
from engine.load_options import LoadOptions
from engine.loading import OutputStage, load_engine
from engine.request import Request, TokenEvent
from engine.sampling_params import SamplingParams
from engine.step import SampledToken
from engine.thread import EngineThread
from quant.tensor import PlainTensor, QTensor

HEAD = "output.weight"
_ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)  # ends with the step that has the vector


def _without_head(config: ModelConfig) -> ModelConfig:
    return replace(config, tied_head=False, logit_scale=1.0, logit_softcap=0.0)


class HeadlessWeights(Weights):
    """A checkpoint's weights, with the identity for its head."""

    def __init__(
        self, path: Path, stored: Mapping[str, StoredWeight], progress: LoadProgress | None = None, threads: int = 1
    ) -> None:
        super().__init__(path, stored, progress, threads)
        self.drop(HEAD)

    def __contains__(self, name: str) -> bool:
        return name == HEAD or super().__contains__(name)

    def take(self, name: str, *shape: int) -> QTensor:
        return _identity(shape[-1]) if name == HEAD else super().take(name, *shape)

    def matrix_samples(self) -> list[QTensor]:
        return [*super().matrix_samples(), _identity(32)]


def _identity(width: int) -> PlainTensor:
    return PlainTensor((width, width), "F32", torch.eye(width))


class EmbeddingRunner:
    """Runs plans as the runner that it is made around; of each request whose prompt is read it keeps the vector.

    What it says was sampled means nothing.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.vectors: dict[int, Tensor] = {}  # by request, float32 [hidden], of length 1
        self._runner = runner
        self.launch, self.recover = runner.launch, runner.recover

    def collect(self, ticket: Ticket) -> list[SampledToken]:
        asked: list[Request] = []
        reading = [part for part in ticket.parts if part.samples]
        for row, part in enumerate(reading):
            vector = F.normalize(ticket.logits.values[row], dim=0).cpu()
            if not torch.isfinite(vector).all():
                raise EngineError(
                    "The model computed values that are not numbers", "Its weights may be damaged: pull it again."
                )
            for request in (part.request, *part.followers):
                self.vectors[request.id] = vector
                asked.append(request)
        return [SampledToken(request.id, 0) for request in asked]


class DecoderEmbedder:
    """A loaded decoder with an engine of its own. Safe for several callers at a time."""

    ranks = False

    def __init__(self, engine: Engine[Any], runner: EmbeddingRunner, hidden: int) -> None:
        self.hidden = hidden
        self.vocab_size = engine.vocab_size
        self.context_length = engine.config.context_length - 1  # the engine has room for a next token
        self.threads = engine.config.max_running  # texts that are computed together
        self._engine = engine
        self._vectors = runner.vectors
        self._futures: dict[int, Future[Tensor]] = {}  # by request
        self._thread = EngineThread(engine, self._tell)
        self._thread.start()

    def submit(self, ids: Sequence[int], second: int | None = None) -> "Future[Tensor]":
        """The vector of one text, float32 [hidden]; a future that is cancelled ends its request.

        Raises PromptTooLong; IndexError for an id that is not in the vocabulary; EngineError when it does not run;
        ValueError for two texts.
        """
        if second is not None:
            raise ValueError("a decoder reads one text at a time")
        future: Future[Tensor] = Future()

        def register(request: Request) -> None:
            self._futures[request.id] = future
            future.add_done_callback(partial(self._left, request.id))

        self._thread.submit(tuple(ids), [_ONE], frozenset(), before=register)
        return future

    def encode(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The vectors of texts, float32 [texts, hidden]. Raises what `submit` raises."""
        futures = [self.submit(ids) for ids in sequences]
        return torch.stack([future.result() for future in futures]) if futures else torch.empty(0, self.hidden)

    def state(self) -> EngineState:
        """What is going on; any thread may ask."""
        return self._engine.state()

    def close(self) -> None:
        """Texts that are waiting are given up; returns when the step under way has ended."""
        self._thread.stop()

    def _left(self, request_id: int, future: "Future[Tensor]") -> None:
        if future.cancelled():
            self._thread.abort(request_id)

    def _tell(self, events: Sequence[TokenEvent]) -> None:
        """On the engine's thread."""
        for event in events:
            if event.finish is None:
                continue
            future, vector = self._futures.pop(event.request_id), self._vectors.pop(event.request_id, None)
            if not future.set_running_or_notify_cancel():
                continue
            if vector is None:
                future.set_exception(EngineError(f"There is no vector: {event.error or 'the model is being stopped'}"))
            else:
                future.set_result(vector)


def load_decoder_embedder(
    checkpoint: Checkpoint, options: LoadOptions, progress: LoadProgress | None = None
) -> DecoderEmbedder:
    """The embedder for an open checkpoint of a decoder family.

    Raises UnsupportedModel, UnsupportedTier, ModelFileError or OutOfMemory; nothing stays allocated then.
    """
    made: list[EmbeddingRunner] = []

    def wrapped(runner: ModelRunner) -> EmbeddingRunner:
        made.append(EmbeddingRunner(runner))
        return made[0]

    engine = load_engine(checkpoint, options, progress, OutputStage(_without_head, HeadlessWeights, wrapped))
    return DecoderEmbedder(engine, made[0], models.read_config(checkpoint.metadata).hidden)
