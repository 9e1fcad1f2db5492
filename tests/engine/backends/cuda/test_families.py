"""Every decoder family on a GPU against the reference: cached prefix, prefill, decode, and batches."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.cuda.device import CudaDevice, CudaOptions
from engine.backends.cuda.operations import CudaOperations, Routes
from engine.kernels import reference
from engine.model_config import Routing
from engine.operations import Router
from engine.sampling_params import SamplingParams
from quant.cuda.backend import CudaBackend
from quant.cuda.experts import ExpertStack
from quant.cuda.linear import CudaLinear
from quant.cuda.matrix import CudaMatrix, PackedMatrix
from quant.kernels import integer_experts
from quant.kernels.integer_rows import IntegerRows
from quant.linear import Use
from quant.quantize import int4
from quant.tensor import PlainTensor, QTensor
from tests.engine.backends.cuda.two_devices import CLOSE, Loaded, TwoDevices, check_close, gpu, load, tokens
from tests.engine.models.expert_families import EXPERT_FAMILIES
from tests.engine.models.family_checkpoints import FAMILIES, make
from tests.support.held_request import HeldRequest

# The output of a delta rule is a product of a query and keys, and is then normalized. If they are nearly orthogonal, as
# in a request of one token, the rounded inputs of the layer decide much of it.
CLOSE_WITH_DELTA_RULES = 1e-2
CLOSE_IN_INTEGERS = 1e-2  # of models without delta rules; inputs are rounded to 8 bits
WITH_DELTA_RULES = ("qwen3.5", "qwen3-next")
CLOSE_WITH_INTEGER_EXPERTS = 5e-4  # of models whose experts are rounded, and chosen alike
NEAR = 0.02  # the largest difference between the sums of scores of two choices that rounding may exchange


@pytest.fixture
def same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the reference choose the experts that the GPU chose, if its own scores of them are nearly as large.

    Rounding exchanges experts with nearly equal scores, and a token's logits are then very different.
    """
    cuda, own = CudaOperations.route, reference.route
    choices: deque[Tensor] = deque()

    def keep_choice(operations: CudaOperations, x: Tensor, router: Router) -> Routes:
        routes = cuda(operations, x, router)
        choices.append(routes.ids.cpu().long())
        return routes

    def follow(
        logits: Tensor, routing: Routing, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not choices:  # a step of the reference alone
            return own(logits, routing, choice_bias, expert_scale)
        ids = choices.popleft()[: len(logits)]  # the GPU may compute more rows than there are tokens
        bias = torch.zeros_like(logits) if choice_bias is None else choice_bias.expand_as(logits)
        every = Routing(routing.experts, routing.experts, routing.score, normalized=False)
        scores = own(logits, every)[1] + bias
        best = own(logits, routing, choice_bias)[0]
        lost = scores.gather(-1, best).sum(-1) - scores.gather(-1, ids).sum(-1)
        assert (lost <= NEAR).all()
        return own(logits, routing, bias.scatter_add(-1, ids, torch.full(ids.shape, 10.0)), expert_scale)

    monkeypatch.setattr(CudaOperations, "route", keep_choice)
    monkeypatch.setattr(reference, "route", follow)


def quantized(backend: CudaBackend, segments: Iterable[QTensor], use: Use = Use.PRODUCTS) -> list[CudaMatrix]:
    """Return the matrices of a layer, in INT4 with groups of 32 where they are used for products only."""
    return unquantized(backend, [_int4(it) if use is Use.PRODUCTS else it for it in segments], use)


def _int4(weight: QTensor) -> QTensor:
    if isinstance(weight, PlainTensor) and weight.values.dim() == 2 and weight.shape[1] % 32 == 0:
        return int4(weight, 32)
    return weight


unquantized = CudaBackend._matrices


def prompt_logits(loaded: Loaded) -> Tensor:
    """Return the logits of a prompt whose tokens are all computed."""
    for pool in loaded.model.kv.pools:
        pool.zero_()
    ids, tables = tuple(tokens(13, loaded.vocab_size)), tuple([3] for _ in loaded.groups)
    return loaded.step((HeldRequest(1, ids, SamplingParams(), block_tables=tables), 13))


def divergence(logits: Tensor, expected: Tensor) -> float:
    """Return the Kullback-Leibler divergence from the expected distribution, in nats."""
    got, wanted = logits.log_softmax(-1), expected.log_softmax(-1)
    return float((wanted.exp() * (wanted - got)).sum())


@pytest.mark.share(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_one_token_are_close_to_those_without_row_kernels(
    tmp_path: Path, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "_matrices", quantized)
    loaded = load(make(tmp_path, name, "folder").path, CudaDevice(gpu(device), CudaOptions()))

    def run() -> Tensor:
        for pool in loaded.model.kv.pools:
            pool.view(torch.uint8).fill_(255)
            pool[0] = 0
        tables = tuple([3] for _ in loaded.groups)
        request, found = HeldRequest(1, tuple(tokens(7, loaded.vocab_size)), SamplingParams(), block_tables=tables), []
        for count in (4, 1, 1, 1):
            found.append(loaded.step((request, count)))
            request.num_computed += count
        return torch.cat(found)

    with_rows = run()
    monkeypatch.setattr(CudaLinear, "takes_rows", False)
    check_close(with_rows, run(), close=CLOSE_WITH_DELTA_RULES if name.startswith(WITH_DELTA_RULES) else CLOSE)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [it for it in FAMILIES if not it.startswith(WITH_DELTA_RULES)])
def test_prompts_in_integers_are_close_to_those_in_bfloat16(
    tmp_path: Path, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "_matrices", quantized)
    loaded = load(make(tmp_path, name, "folder").path, CudaDevice(gpu(device), CudaOptions()))
    expected = prompt_logits(loaded)
    rounded: list[int] = []

    def takes_integers(layer: CudaLinear, count: int) -> bool:
        takes = count > 1 and all(isinstance(it, PackedMatrix) for it in layer.matrices)
        rounded.append(takes)
        return takes

    monkeypatch.setattr(CudaLinear, "takes_integers", takes_integers)
    assert divergence(prompt_logits(loaded), expected) <= CLOSE_IN_INTEGERS
    assert any(rounded)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", [it for it in EXPERT_FAMILIES if not it.startswith(WITH_DELTA_RULES)])
def test_experts_of_prompts_in_integers_are_close_to_those_in_bfloat16(
    tmp_path: Path, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaBackend, "_matrices", quantized)
    monkeypatch.setattr(CudaDevice, "_rounds_prompts", lambda *_: True)
    monkeypatch.setattr(integer_experts, "SLOTS", 16)
    loaded = load(make(tmp_path, name, "folder").path, CudaDevice(gpu(device), CudaOptions()))
    route, multiply = CudaOperations.route, ExpertStack._multiply
    choices: deque[Routes] = deque()
    rounded: list[bool] = []

    def keep_choice(operations: CudaOperations, x: Tensor, router: Router) -> Routes:
        choices.append(route(operations, x, router))
        return choices[-1]

    def note(stack: ExpertStack, matrix: CudaMatrix, x: Tensor | IntegerRows, *others: Any) -> None:
        rounded.append(isinstance(x, IntegerRows))
        multiply(stack, matrix, x, *others)

    monkeypatch.setattr(CudaOperations, "route", keep_choice)
    monkeypatch.setattr(ExpertStack, "_multiply", note)
    got = prompt_logits(loaded)
    assert any(rounded)  # the last layer multiplies one token
    rounded.clear()
    monkeypatch.setattr(CudaOperations, "route", lambda *_: choices.popleft())
    monkeypatch.setattr(ExpertStack, "takes_integers", lambda *_: False)
    assert divergence(got, prompt_logits(loaded)) <= CLOSE_WITH_INTEGER_EXPERTS
    assert not any(rounded)


@pytest.mark.share(3)
@pytest.mark.usefixtures("same_experts")
@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_close_to_the_reference(tmp_path: Path, name: str, device: torch.device) -> None:
    both = TwoDevices.of(make(tmp_path, name, "folder").path, gpu(device))
    close = CLOSE_WITH_DELTA_RULES if name.startswith(WITH_DELTA_RULES) else CLOSE
    check_close(*both.prefill_then_decode(), close=close)
