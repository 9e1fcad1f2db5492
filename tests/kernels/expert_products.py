"""Estimate products of experts in prompts on GeForce cards, in 8-bit integers and in bfloat16, without a GPU.

    python -m tests.kernels.expert_products [--card 4090] [--kind Q4_K]

Fails if integers are less than LEAST times as fast for a step of the largest size.

Each line has the time of the experts of a layer in both ways (see `time_model`), without the sum of their results. For
the product of gate and up in integers, it has the instructions and clocks for each matrix instruction, and the warps of
a multiprocessor. The share of the peak is that of all products. Tokens choose experts evenly, so that an expert has
half an empty tile on average.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.kernels.activations import gated
from engine.model_config import Gate, Routing
from quant.cuda.experts import ExpertStack, stacked, tiles_of_experts
from quant.cuda.loading import to_device
from quant.kernels.card import Card
from quant.kernels.integer_rows import IntegerRows, integer_gated
from tests.kernels.cards import CARDS
from tests.kernels.launches import Launch, record_launches
from tests.kernels.recorded_steps import META, Work
from tests.kernels.roofline import Estimate, read_kernels
from tests.kernels.time_model import RATES, clocks
from tests.kernels.weights import weight

TOKENS = (512, 2048, 8192)
LEAST = 1.5
PRODUCTS = ("_batch_kernel", "_integer_experts_kernel")
UNMEASURED = ("_tiles_kernel",)  # the same in both ways


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer."""

    name: str
    kind: str
    routing: Routing
    hidden: int
    width: int


QWEN, GPT_OSS = Routing(128, 8), Routing(32, 4)
MIXTURES = (
    *(Mixture("Qwen3 30B A3B", kind, QWEN, 2048, 768) for kind in ("Q4_K", "Q6_K", "int4 g128")),
    Mixture("gpt-oss 20B", "MXFP4", GPT_OSS, 2880, 2880),
)


@dataclass(frozen=True)
class Prompt:
    """A step of a prompt."""

    mixture: Mixture
    card: Card
    tokens: int

    @property
    def slots(self) -> int:
        return self.tokens * self.mixture.routing.active

    def works(self, *, integers: bool) -> list[Work]:
        """Return the launches of a layer."""
        found: list[Work] = []

        def add(launch: Launch, _: tuple[int, ...], arguments: dict[str, Any]) -> None:
            if launch.name in UNMEASURED:
                return
            tensors = [it for it in arguments.values() if isinstance(it, Tensor)]
            sizes = {it.untyped_storage()._cdata: it.nbytes for it in tensors}
            products = self._multiply_adds(arguments) if launch.name in PRODUCTS else 0
            found.append(Work(launch.name, launch, 1, sum(sizes.values()), max(sizes.values()), products))

        with record_launches(add):
            self._launch(integers=integers)
        return found

    def _launch(self, *, integers: bool) -> None:
        mixture = self.mixture
        gate_up = self._stack(2 * mixture.width, mixture.hidden, integers=integers)
        down = self._stack(mixture.hidden, mixture.width, integers=integers)
        ids = torch.empty(self.tokens, mixture.routing.active, dtype=torch.int32, device=META)
        tiles = tiles_of_experts(ids, (gate_up, down))
        both = gate_up.multiply(torch.empty(self.tokens, mixture.hidden, dtype=torch.bfloat16, device=META), tiles)
        inner: Tensor | IntegerRows = integer_gated(both, "silu") if integers else gated(both, Gate.SILU)
        down.multiply(inner, tiles, torch.float32)

    def _stack(self, rows: int, columns: int, *, integers: bool) -> ExpertStack:
        count = self.mixture.routing.experts
        matrix = to_device(weight(self.mixture.kind, rows, columns, META), META)
        matrices = stacked([[matrix]] * count, count)
        return ExpertStack(matrices, count, self.card, deterministic=False, integer_prompts=integers)

    def _multiply_adds(self, arguments: dict[str, Any]) -> int:
        """Return the multiply-adds of a product, with those of empty slots."""
        used = self.slots + self.mixture.routing.experts * arguments["TOKENS"] // 2
        return int(used * arguments["rows"] * arguments["columns"])


def lines(card: Card, mixtures: Sequence[Mixture] = MIXTURES) -> Iterator[tuple[str, bool]]:
    """Yield a line for each step, and whether it is as fast as it should be."""
    rates = RATES[card.architecture]
    for mixture in mixtures:
        for tokens in TOKENS:
            prompt = Prompt(mixture, card, tokens)
            both = [prompt.works(integers=it) for it in (True, False)]
            kernels = read_kernels([work for works in both for work in works], card.architecture)
            fast, slow = (Estimate(card, works, kernels).seconds for works in both)
            least = 6 * prompt.slots * mixture.hidden * mixture.width / rates.integer_peak(card.multiprocessors)
            kernel = next(kernels[str(it.launch)] for it in both[0] if it.operation == PRODUCTS[1])
            assert kernel.loop
            count = sum(it.multiply_adds > 0 for it in kernel.loop.body)
            name = f"{card.name.split()[-1]}, {mixture.name}, {mixture.kind}, {tokens:5} tokens"
            times = f"integers {1e3 * fast:6.3f} ms, bfloat16 {1e3 * slow:6.3f} ms, {slow / fast:.2f} times as fast"
            loop = f"{len(kernel.loop.body) / count:.1f} instructions, {clocks(kernel.loop, rates) / count:.1f} clocks"
            text = f"{name}: {times}; {loop}, {least / fast:.0%} of the peak, {kernel.occupancy(rates)} warps"
            yield text, tokens < TOKENS[-1] or slow >= LEAST * fast


def main() -> int:
    cards = {card.name.split()[-1]: card for card in CARDS if card.prefers_integers}
    parser = argparse.ArgumentParser(description="Estimate products of experts in prompts.")
    parser.add_argument("--card", choices=cards, action="append", help="default: all")
    parser.add_argument("--kind", choices=[it.kind for it in MIXTURES], help="of the weights; default: all")
    given, fast = parser.parse_args(), True
    mixtures = [it for it in MIXTURES if given.kind in (None, it.kind)]
    for name in given.card or cards:
        for line, is_fast in lines(cards[name], mixtures):
            print(line, "" if is_fast else "FAULT", flush=True)
            fast &= is_fast
    return 0 if fast else 1


if __name__ == "__main__":
    sys.exit(main())
