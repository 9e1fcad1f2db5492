"""Records the instructions of recurrent layers: short convolutions and gated delta rules."""

import torch
from torch import Tensor

from engine.backends.cpu.buffers import Buffers, Rows, check_multiple
from engine.backends.cpu.instructions import Op, float_bits
from engine.backends.cpu.program import Program
from engine.kernels.reference import DELTA_EPSILON
from engine.kv.cache import LayerState
from engine.operations import DeltaRule
from quant.cpu.activations import GROUP, Form


class RecurrentRecorder:
    """Records into the program of `CpuOperations`."""

    def __init__(self, program: Program, buffers: Buffers) -> None:
        self._program = program
        self._buffers = buffers
        self._factors: dict[int, tuple[Tensor, Tensor]] = {}  # key_dim -> factors of normalized queries and keys

    def convolve(self, x: Rows, state: LayerState, weight: Tensor, *, plain: bool) -> Rows:
        """Record a convolution with `weight`, float32 [taps, width]. `plain` is as in `instructions.WORDS`."""
        taps, width = weight.shape
        check_multiple(f"A convolution of {width} channels", width, GROUP)
        out = self._buffers.take(Form.FLOAT, width)
        self._program.append(
            Op.CONVOLVE, groups=width // GROUP, taps=taps, plain=plain, **_state_words(state),
            vector=self._buffers.constant(weight).address, **x.words("x"), **out.words("out"),
        )  # fmt: skip
        return out

    def delta_rule(self, x: Rows, state: LayerState, delta: DeltaRule) -> Rows:
        """Record a delta rule. See `engine.operations.Operations.delta_rule`."""
        shape, first = delta.config, x.buffer.region.address
        for name, size in (("keys", shape.key_dim), ("values", shape.value_dim)):
            check_multiple(f"A head with {name} of {size} elements", size, GROUP)
        mixed = self.convolve(x, state, delta.conv, plain=True)
        rates = self._rates(x, first + 4 * (shape.conv_width + shape.width), delta)
        q_factors, k_factors = self._length_factors(shape.key_dim)
        out = self._buffers.take(Form.FLOAT, shape.width)
        matrices = _state_words(state, (shape.taps - 1) * shape.conv_width)
        self._program.append(
            Op.DELTA, key_heads=shape.key_heads, value_heads=shape.value_heads, key_dim=shape.key_dim,
            value_dim=shape.value_dim, tiled=shape.tiled, **matrices, **mixed.words("x"), **out.words("out"),
            gate=first + 4 * shape.conv_width, gate_stride=x.buffer.stride,
            rates=rates.buffer.region.address, rates_stride=rates.buffer.stride,
            q_norm=self._buffers.constant(q_factors).address, k_norm=self._buffers.constant(k_factors).address,
            length_epsilon=float_bits(DELTA_EPSILON / shape.key_dim),
            vector=self._buffers.constant(delta.norm.weight).address, epsilon=float_bits(delta.norm.epsilon),
        )  # fmt: skip
        return out

    def _rates(self, x: Rows, logits: int, delta: DeltaRule) -> Rows:
        """Record the step sizes and decays. `logits` is their address in the first row of x."""
        heads = delta.config.value_heads
        out = self._buffers.take(Form.FLOAT, -(-2 * heads // GROUP) * GROUP)
        self._program.append(
            Op.DELTA_RATES, value_heads=heads, rate=self._buffers.constant(delta.rate).address,
            bias=self._buffers.constant(delta.time_bias).address,
            **{**x.words("x"), "x": logits}, **out.words("out"),
        )  # fmt: skip
        return out

    def _length_factors(self, key_dim: int) -> tuple[Tensor, Tensor]:
        """Return the factors of q and k after division by the root of their mean squares, float32 [key_dim] each.

        They make both vectors of length 1, and scale q by 1 / sqrt(key_dim).
        """
        if key_dim not in self._factors:
            self._factors[key_dim] = torch.full((key_dim,), 1 / key_dim), torch.full((key_dim,), key_dim**-0.5)
        return self._factors[key_dim]


def _state_words(state: LayerState, first: int = 0) -> dict[str, int]:
    """Return the instruction words of the states from element `first` on."""
    return {
        "group": state.group,
        "cache": state.pool.data_ptr() + 4 * first,
        "block_bytes": state.pool.stride(0) * state.pool.itemsize,
    }
