"""Compare the tiles of the card with float32: all products of an 8B Llama, those of experts, and attention over long
contexts.
"""

from collections.abc import Iterator

import torch

from engine.kernels import reference
from engine.kernels.reference import ScoreRule
from engine.kernels.routing import route
from engine.model_config import Routing
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import tiles_of_experts
from quant.kernels.reference import dequantize, expert_product
from tests.engine.kernels.test_paged_attention import Shape, Step, filled, run_attention
from tests.gpu.figures import Figure
from tests.gpu.machine import Machine
from tests.kernels.shapes import LLAMA_8B, TINY, matrices
from tests.kernels.weights import ROWS, fits, weight

KINDS = ("Q4_K", "Q6_K", "Q4_0", "Q8_0", "MXFP4", "int4 g128 zeros", "e4m3 channel", "e4m3 128x128", "BF16")
TOKENS = (1, 2, 4, 8, 16, 32, 100, 512)
EXPERT_KINDS = ("Q4_K", "Q6_K", "MXFP4", "int4 g128 zeros", "e4m3 channel", "BF16")
ROUTING = Routing(8, 2)
EXPERT_TOKENS = (1, 8, 100, 1000)
ERROR = 1 / 64  # of the root mean square of a product: weights and inputs are rounded to bfloat16
FLOAT8_ERROR = 1 / 16  # inputs of many tokens are rounded to e4m3
CLOSE = 2e-2  # of attention
STEPS = (Step((1,), (4000,)), Step((1, 1, 1, 1), (65, 300, 1, 2000)), Step((300,), (700,)))
DRY_STEPS = (Step((1,), (20,)),)
POOLS = (torch.bfloat16, torch.float16, torch.uint8)


def figures(machine: Machine) -> Iterator[Figure]:
    """Yield the largest error of each matrix over all numbers of tokens, and that of attention."""
    model = TINY if machine.dry else LLAMA_8B
    for kind in ("Q4_0",) if machine.dry else KINDS:
        for part, (rows, columns) in matrices(model).items():
            if fits(kind, columns):
                most = FLOAT8_ERROR if kind.startswith("e4m3") else ERROR
                yield Figure(f"{kind}, {part}: error", _product_error(machine, kind, rows, columns), "", most=most)
    for kind in ("Q4_0",) if machine.dry else EXPERT_KINDS:
        most = FLOAT8_ERROR if kind.startswith("e4m3") else ERROR
        yield Figure(f"{kind}, experts: error", _expert_error(machine, kind), "", most=most)
    for deterministic in (False, True):
        for pool in POOLS[:1] if machine.dry else POOLS:
            error = max(_attention_error(machine, it, pool, deterministic) for it in _steps(machine))
            name = f"attention, {str(pool).removeprefix('torch.')}{', deterministic' * deterministic}: error"
            yield Figure(name, error, "", most=CLOSE)


def _steps(machine: Machine) -> tuple[Step, ...]:
    return DRY_STEPS if machine.dry else STEPS


def _product_error(machine: Machine, kind: str, rows: int, columns: int) -> float:
    """Return the largest error relative to the root mean square of the results. The rows of a weight repeat."""
    stored = weight(kind, rows, columns, torch.device("cpu" if machine.dry else "cuda"))
    layer = CudaBackend(
        machine.device, machine.card, deterministic=False, integer_prompts=machine.card.prefers_integers
    ).linear([stored])
    values = dequantize(weight(kind, min(rows, ROWS), columns, torch.device("cpu"))).to(machine.device)
    errors = []
    for tokens in (1, 4) if machine.dry else TOKENS:
        x = torch.randn(tokens, columns, device=machine.device).bfloat16()
        want = (x.float() @ values.mT).repeat(1, -(-rows // len(values)))[:, :rows]
        errors.append(float((layer.forward(x) - want).square().mean().sqrt() / want.square().mean().sqrt()))
    return max(errors)


def _expert_error(machine: Machine, kind: str) -> float:
    """Return the largest error of experts, each with other rows of the same weight."""
    rows, columns = (16, 64) if machine.dry else (ROWS // ROUTING.experts, 2048)
    stored = weight(kind, rows * ROUTING.experts, columns, torch.device("cpu"))
    index = torch.arange(rows * ROUTING.experts).view(ROUTING.experts, rows)
    backend = CudaBackend(
        machine.device, machine.card, deterministic=False, integer_prompts=machine.card.prefers_integers
    )
    stack = backend.stack(([stored.rows(some)] for some in index), ROUTING.experts)
    values = dequantize(stored).view(ROUTING.experts, rows, columns).to(machine.device)
    errors = []
    for tokens in (1, 4) if machine.dry else EXPERT_TOKENS:
        x = torch.randn(tokens, columns, device=machine.device).bfloat16()
        ids, _, _ = route(torch.randn(tokens, ROUTING.experts, device=machine.device), ROUTING)
        want = expert_product(x.float(), values, ids.long())
        got = stack.multiply(x, tiles_of_experts(ids, [stack]), torch.float32)
        errors.append(float((got - want).square().mean().sqrt() / want.square().mean().sqrt()))
    return max(errors)


def _attention_error(machine: Machine, step: Step, pool: torch.dtype, deterministic: bool) -> float:
    heads, kv_heads, head_dim = (2, 1, 32) if machine.dry else (32, 8, 128)
    keys, tables = filled(Shape(heads, kv_heads, head_dim, pool), step.contexts)
    q, rule = torch.randn(step.starts[-1], heads, head_dim).bfloat16(), ScoreRule(head_dim**-0.5)
    got = run_attention(
        q, keys, tables, step, rule, None, machine.device, deterministic=deterministic, card=machine.card
    )
    starts, contexts = torch.tensor(step.starts), torch.tensor(step.contexts)
    want = reference.batch_attention(q.float(), keys, tables, starts, contexts, rule, None)
    return float((got.float() - want.reshape(got.shape)).abs().max())
