"""The sizes of steps that are captured as CUDA graphs: one table of requests and tokens per request.

A batch is padded to the smallest size that it fits. Steps with several tokens per request verify drafts, or compute
tokens that a grammar forces. They are captured for few requests only, because drafts pay in small batches, and up to 16
tokens, because the kernels of products take about the same time for any number of tokens up to 16.

Contexts are rounded up to a few sizes, because the grid of an attention kernel depends on the longest context. Steps
with several tokens per request have two, because few requests fill the GPU with parts of a long context anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch

# tokens per request -> numbers of requests
SHAPES = {
    1: (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    2: (1, 2, 4, 8),
    4: (1, 2, 4),
    8: (1, 2),
}
SMALLEST_CONTEXT = 1024  # smallest context size in tokens
CONTEXT_FACTOR = 4  # ratio of consecutive context sizes


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The largest batch that one graph can run."""

    requests: int
    context: int  # maximum context length of a request, in tokens
    queries: int = 1  # maximum number of tokens of a request

    @property
    def tokens(self) -> int:
        """Number of tokens in every batch of this size, including padding."""
        return self.requests * self.queries

    @property
    def rows(self) -> int:
        """Number of requests in every batch of this size, including padding requests.

        With several tokens per request, one more holds the padding tokens: a real request has only its own tokens, so
        that padding changes neither its attention nor its states.
        """
        return self.requests if self.queries == 1 else self.requests + 1

    def padded_starts(self, starts: Sequence[int]) -> NDArray[np.int32]:
        """Return the query starts of a padded batch, int32 [rows + 1].

        Each padding request has one token while there are padding tokens left. The last one has the rest.
        """
        padding = self.rows + 1 - len(starts)
        if not padding:
            return np.asarray(starts, np.int32)
        padded = np.minimum(starts[-1] + 1 + np.arange(padding), self.tokens)
        padded[-1] = self.tokens
        return np.concatenate((np.asarray(starts, np.int32), padded), dtype=np.int32, casting="same_kind")


class GraphSizes:
    """The sizes of one model's graphs."""

    def __init__(self, largest: GraphSize) -> None:
        """`largest`: the largest number of requests in a step, and the longest context. A step may have at least as
        many tokens as requests.
        """
        limit = largest.requests
        shapes = {(min(requests, limit), 1) for requests in SHAPES[1]} | {(limit, 1)}
        for queries, numbers in SHAPES.items():
            shapes |= {(requests, queries) for requests in numbers if queries > 1 and requests * queries <= limit}
        self._shapes = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
        contexts = tuple(_contexts(largest.context))
        ends = tuple(sorted({contexts[0], contexts[-1]}))
        self._contexts = {queries: contexts if queries == 1 else ends for queries in SHAPES}

    @property
    def largest_first(self) -> list[GraphSize]:
        """All sizes. A graph that is captured later reuses the memory of larger ones."""
        return [
            GraphSize(requests, context, queries)
            for requests, queries in reversed(self._shapes)
            for context in reversed(self._contexts[queries])
        ]

    def fitting(self, batch: Batch) -> GraphSize | None:
        """Return the smallest size that a batch fits, or None if there is none."""
        requests, tokens = len(batch.context_lengths), len(batch.token_ids)
        longest = max(stop - start for start, stop in pairwise(batch.query_starts)) if tokens > requests else 1
        fits = (it for it in self._shapes if requests <= it[0] and longest <= it[1])
        shape = next(fits, None)
        # only graphs of several tokens per request select rows
        if shape is None or (shape[1] == 1 and len(batch.logit_rows) < tokens):
            return None
        requests, queries = shape
        most = max(batch.context_lengths)
        return GraphSize(requests, next(context for context in self._contexts[queries] if context >= most), queries)


def _contexts(largest: int) -> Iterator[int]:
    context = SMALLEST_CONTEXT
    while context < largest:
        yield context
        context *= CONTEXT_FACTOR
    yield largest
