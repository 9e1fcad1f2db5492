"""Launch every kernel that serving a model takes, so that all of them can be recorded and compiled in advance.

The kernel of a product depends on the range of the number of tokens (`quant.kernels.tiles`, `quant.cuda.experts`), and
that of attention on the number of tokens of a request. A second kernel merges the parts of long contexts. Tokens,
contexts, and samples are meaningless here.
"""

from collections.abc import Iterator

import numpy as np
import torch

from engine.backends.cuda.batch_tensors import BatchLimits
from engine.backends.cuda.graph_sizes import SMALLEST_CONTEXT, GraphSize, GraphSizes
from engine.backends.cuda.step import CudaStep, largest_batch
from engine.batch import Batch
from engine.config import BLOCK_SIZE
from engine.kernels.attention_tiles import Tiles, decode_tiles, padded_tiles, query_tiles
from engine.kernels.pending_tokens import fill_pending_tokens
from engine.kernels.sampling import sample
from engine.kernels.sampling_rows import SampleTarget, build_rows
from engine.kernels.step_logits import StepLogits
from engine.model_config import ExpertConfig, ModelConfig
from engine.request import Request
from engine.sampling.masks import NO_MASKS, Masks
from engine.sampling_params import SamplingParams
from quant.cuda.experts import first_numbers_of_tokens
from quant.kernels.tiles import MOST_TOKENS, TOKENS

LIBRARY_TOKENS = MOST_TOKENS + 16  # smallest multiple of 16 tokens for which a library multiplies
DRAWN = SamplingParams(temperature=1, top_k=20, top_p=0.9)
REPORTED = SamplingParams(temperature=1, presence_penalty=1.0, logprobs=2)


def launch_every_kernel(step: CudaStep, limits: BatchLimits, model: ModelConfig) -> None:
    """Launch the kernels of steps of all sizes, and those of all kinds of sampling."""
    for batch, tiles in _steps(step, limits, model):
        logits = step.launch_without_graph(batch, tiles)
    with torch.inference_mode(), step.gpu.current():
        _launch_sampling(logits.first(1), model.vocab_size)


def _steps(step: CudaStep, limits: BatchLimits, model: ModelConfig) -> Iterator[tuple[Batch, Tiles]]:
    longest = limits.table_blocks * BLOCK_SIZE
    for requests in sorted({min(number, limits.requests) for number in (1, *TOKENS, limits.requests)}):
        for context in sorted({1, min(SMALLEST_CONTEXT, longest), longest}):
            batch = largest_batch(requests, requests, limits.groups)
            yield batch, decode_tiles(requests, context, step.queries)
    for size in GraphSizes(GraphSize(limits.requests, longest)).largest_first:
        if size.queries > 1:
            batch = largest_batch(size.tokens, size.rows, limits.groups)
            yield batch, padded_tiles(batch.query_starts, size.requests, size.queries, size.context, step.queries)
    routings = {layer.mlp.routing for layer in model.layers if isinstance(layer.mlp, ExpertConfig)}
    of_experts = [number for it in routings for number in first_numbers_of_tokens(it.experts, it.active)]
    numbers = (*_doublings(limits.tokens), LIBRARY_TOKENS, *of_experts)
    for tokens in sorted({min(number, limits.tokens, longest) for number in numbers}):
        for context in sorted({tokens, longest}):
            batch = largest_batch(tokens, 1, limits.groups)
            yield batch, query_tiles(batch.query_starts, [context], step.queries)


def _doublings(tokens: int) -> list[int]:
    """Return numbers of tokens with all tiles of products of 8-bit floats: a larger tile needs twice the tokens."""
    return [1 << exponent for exponent in range(4, tokens.bit_length())]


def _launch_sampling(logits: StepLogits, vocab_size: int) -> None:
    device = logits.values.device
    masked = Masks(np.full((1, -(-vocab_size // 32)), -1, np.int32), {(0, 0): 0}, {})
    for params, masks in ((DRAWN, NO_MASKS), (REPORTED, NO_MASKS), (DRAWN, masked)):
        rows = build_rows([SampleTarget(0, Request(0, (0,), params), 0)], vocab_size, masks)
        sampled = sample(logits, rows.to(device))
    index = torch.zeros(1, dtype=torch.int32, device=device)
    fill_pending_tokens(sampled.columns.token_ids, index, index, torch.zeros_like(index, dtype=torch.int64))
