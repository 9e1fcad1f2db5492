"""Loads the MLPs of layers: dense ones, and mixtures of experts with their routers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.model_config import ExpertConfig, MLPConfig
from engine.models.decoder import SeparateExperts
from engine.models.part_loader import PartLoader
from engine.operations import ExpertBiases, ExpertMLP, GatedMLP, Norm, Router
from quant.kernels.reference import dequantize


@dataclass(frozen=True, slots=True)
class MLPLoader:
    """Loads MLPs. Names of weights start with `prefix`, such as `blk.3.`."""

    parts: PartLoader

    def mlp(self, prefix: str, mlp: MLPConfig | ExpertConfig) -> GatedMLP | ExpertMLP:
        if isinstance(mlp, MLPConfig):
            return self._gated_mlp(prefix, mlp.hidden)
        if mlp.separate:
            return self._gated_mlp(prefix, mlp.shared_hidden)
        shared = self._gated_mlp(prefix, mlp.shared_hidden, "_shexp") if mlp.shared_hidden else None
        biases = self._expert_biases(prefix, mlp) if mlp.biased else None
        return ExpertMLP(self._router(prefix, mlp), self._experts(prefix, mlp), shared, biases)

    def separate_experts(self, prefix: str, mlp: MLPConfig | ExpertConfig) -> SeparateExperts | None:
        if isinstance(mlp, MLPConfig) or not mlp.separate:
            return None
        rule, hidden, count = self.parts.config.norm, self.parts.config.hidden, mlp.routing.experts
        scale = self.parts.weights.take_vector(f"{prefix}ffn_gate_inp.scale", hidden) * hidden**-0.5
        factors = self.parts.vector(f"{prefix}ffn_down_exps.scale", count)
        router = replace(self._router(f"{prefix}ffn_", mlp), scale=factors)
        return SeparateExperts(
            router_norm=Norm(self.parts.backend.to_device(scale), rule.epsilon),
            norm=self.parts.norm(f"{prefix}pre_ffw_norm_2"),
            mlp=ExpertMLP(router, self._experts(f"{prefix}ffn_", mlp)),
            post_norm=self.parts.norm(f"{prefix}post_ffw_norm_2"),
            mlp_post_norm=self.parts.norm(f"{prefix}post_ffw_norm_1"),
        )

    def _gated_mlp(self, prefix: str, width: int, suffix: str = "") -> GatedMLP:
        hidden, gate_up = self.parts.config.hidden, self._gate_up(prefix, width, suffix)
        down = {f"down{suffix}": hidden}
        return GatedMLP(self.parts.linear(prefix, hidden, gate_up), self.parts.linear(prefix, width, down))

    def _experts(self, prefix: str, experts: ExpertConfig) -> tuple[GatedMLP, ...]:
        hidden, width, count = self.parts.config.hidden, experts.hidden, experts.routing.experts
        suffixes = [f".{number}" for number in range(count)]
        gate_up = (self.parts.segments(prefix, hidden, self._gate_up(prefix, width, it)) for it in suffixes)
        if experts.interleaved:
            gate_up = ([self.parts.weights.rows(it, _in_halves(2 * width)) for it in weights] for weights in gate_up)
        down = (self.parts.segments(prefix, width, {f"down{it}": hidden}) for it in suffixes)
        layers = [self.parts.backend.experts(segments, count) for segments in (gate_up, down)]
        return tuple(map(GatedMLP, *layers))

    def _expert_biases(self, prefix: str, experts: ExpertConfig) -> ExpertBiases:
        hidden, width = self.parts.config.hidden, experts.hidden
        gate_up, down = [], []
        for expert in range(experts.routing.experts):
            names = self._gate_up(prefix, width, f".{expert}", kind="bias")
            biases = (self.parts.weights.take_vector(f"{prefix}{it}.bias", size) for it, size in names.items())
            joined = torch.cat(list(biases))
            gate_up.append(joined[_in_halves(2 * width)] if experts.interleaved else joined)
            down.append(self.parts.weights.take_vector(f"{prefix}down.{expert}.bias", hidden))
        to_device = self.parts.backend.to_device
        return ExpertBiases(to_device(torch.stack(gate_up)), to_device(torch.stack(down)))

    def _gate_up(self, prefix: str, width: int, suffix: str, kind: str = "weight") -> Mapping[str, int]:
        """Return the names and outputs of an MLP's gate and up. They may be separate, or one weight called `gate_up`,
        or `up` in old dense models.
        """
        gate, up, fused = (f"{name}{suffix}" for name in ("gate", "up", "gate_up"))
        if f"{prefix}{gate}.{kind}" in self.parts.weights:
            return {gate: width, up: width}
        return {fused if f"{prefix}{fused}.{kind}" in self.parts.weights else up: 2 * width}

    def _router(self, prefix: str, experts: ExpertConfig) -> Router:
        hidden, count = self.parts.config.hidden, experts.routing.experts
        rows = [self.parts.weights.take(f"{prefix}gate_inp.weight", count, hidden)]
        if experts.shared_gate:
            rows.append(self.parts.weights.take_row(f"{prefix}gate_inp_shexp.weight", hidden))
        choice, bias = f"{prefix.removesuffix('ffn_')}exp_probs_b.bias", f"{prefix}gate_inp.bias"
        choice_bias = None
        if choice in self.parts.weights:
            stored = dequantize(self.parts.weights.take_row(choice, count)).flatten()
            choice_bias = self.parts.backend.to_device(stored)
        logit_bias = self.parts.vector(bias, count) if experts.biased else None
        return Router(experts.routing, self.parts.backend.linear(rows), choice_bias, logit_bias)


def _in_halves(rows: int) -> Tensor:
    """Return the even numbers below `rows`, then the odd ones, int64."""
    return torch.arange(rows).view(-1, 2).T.flatten()
