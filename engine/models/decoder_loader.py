"""Loads the decoder of all families: takes weights by name and shape, and joins those that one product computes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.checkpoints.checkpoint import LAYER_EMBEDDINGS
from engine.checkpoints.weights import Weights
from engine.errors import UnsupportedModel
from engine.model_config import Block, LongRopeScaling, ModelConfig, NormPlacement
from engine.models.decoder import Decoder, Layer, LayerEmbeddings, LayerInput
from engine.models.mixer_loader import MixerLoader
from engine.models.mlp_loader import MLPLoader
from engine.models.part_loader import PartLoader
from engine.operations import Norm, Operations
from engine.rope import RotaryTable, rotary_table
from quant.linear import QLinear, Use


def load_decoder(config: ModelConfig, weights: Weights, operations: Operations, context_length: int) -> Decoder:
    """Load a decoder for positions below `context_length`. See `engine.models.load`."""
    config = _resolve_optional_parts(config, weights)
    parts = PartLoader(config, weights, operations.weights)
    tables = _rotary_tables(config, weights, operations, context_length)
    loader = _Loader(parts, MixerLoader(parts, tables), MLPLoader(parts))
    embeddings = weights.load_parallel(loader.table, loader.tables_to_load())
    layers = weights.load_parallel(loader.layer, range(len(config.layers)))
    [own] = weights.load_parallel(loader.layer_embeddings, [config.per_layer])
    return Decoder(config, operations, embeddings[0], tuple(layers), loader.output_norm(), embeddings[-1], own)


def _resolve_optional_parts(config: ModelConfig, weights: Weights) -> ModelConfig:
    """Set the options of the configuration that depend on which weights the checkpoint has."""
    if config.block is None:
        mlp_norm = "blk.0.ffn_norm.weight" in weights
        config = replace(config, block=Block.SEQUENTIAL if mlp_norm else Block.PARALLEL_ONE_NORM)
    if config.optional_head_norm and "blk.0.attn_q_norm.weight" not in weights:
        config = replace(config, head_norm=None)
    return config


def _rotary_tables(
    config: ModelConfig, weights: Weights, operations: Operations, context_length: int
) -> tuple[RotaryTable, ...]:
    """Return one rotary table per rope of the model."""
    factors, to_device = _stored_factors(config, weights, context_length), operations.weights.to_device
    # the factors are of the first rope, that of layers without a window
    tables = (
        rotary_table(rope, None if number else factors, context_length) for number, rope in enumerate(config.ropes)
    )
    return tuple(replace(table, cos=to_device(table.cos), sin=to_device(table.sin)) for table in tables)


def _stored_factors(config: ModelConfig, weights: Weights, context_length: int) -> Tensor | None:
    """Return the rope factors that GGUF stores as tensors: those of LongRoPE, or the scaling of Llama 3.1."""
    rope = config.ropes[0]
    half = (rope.span or rope.dimensions) // 2
    match rope.scaling:
        case LongRopeScaling(short=()) as scaling:
            short, long = (weights.take_vector(f"rope_factors_{kind}.weight", half) for kind in ("short", "long"))
            return long if scaling.is_long(context_length) else short
        case _ if "rope_freqs.weight" in weights:
            factors = weights.take_vector("rope_freqs.weight", half)
            if rope.span and not torch.equal(factors >= NO_TURN, torch.arange(half) >= rope.dimensions // 2):
                raise UnsupportedModel(f"rope_freqs.weight does not rotate the first {rope.dimensions // 2} pairs")
            return factors[: rope.dimensions // 2]
    return None


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads the layers and the tables of a decoder."""

    parts: PartLoader
    mixers: MixerLoader
    mlps: MLPLoader

    def tables_to_load(self) -> list[tuple[str, Use]]:
        """Return the name and use of the embedding, and those of the head unless the two are tied."""
        tied, output = self.parts.config.tied_head, "output.weight"
        if tied:  # some checkpoints contain the tied head as well
            self.parts.weights.drop(output)
        separate = not tied and (tied is False or output in self.parts.weights)
        embedding = "token_embd.weight"
        return [(embedding, Use.ROWS), (output, Use.PRODUCTS)] if separate else [(embedding, Use.ROWS | Use.PRODUCTS)]

    def table(self, named: tuple[str, Use]) -> QLinear:
        name, use = named
        weight = self.parts.weights.take(name, self.parts.config.vocab_size, self.parts.config.hidden)
        return self.parts.backend.linear([weight], use)

    def layer(self, number: int) -> Layer:
        config, mixer, prefix = self.parts.config, self.parts.config.layers[number].mixer, f"blk.{number}."
        before, after = (config.norm_placement in (it, NormPlacement.BOTH) for it in _PLACEMENTS)
        mixer_norm = self.parts.norm(f"{prefix}attn_norm") if before else None
        one_norm = config.block is Block.PARALLEL_ONE_NORM
        loaded, mixer_in, mixer_gate, mixer_out = self.mixers.mixer(prefix, mixer)
        own_input, sum_scale = self._own_input(prefix), self._layer_scale(prefix)
        mlp_post_norm = self.parts.norm(f"{prefix}post_ffw_norm") if after else None
        if own_input:  # the last addition of a layer scales the sum
            own_input = replace(own_input, post_norm=replace(own_input.post_norm, sum_scale=sum_scale))
        elif mlp_post_norm:
            mlp_post_norm = replace(mlp_post_norm, sum_scale=sum_scale)
        return Layer(
            mixer=loaded,
            mixer_norm=mixer_norm,
            mixer_in=mixer_in,
            mixer_gate=mixer_gate,
            mixer_out=mixer_out,
            mixer_post_norm=self.parts.norm(f"{prefix}post_attention_norm") if after else None,
            mlp_norm=self._mlp_norm(prefix) if before and not one_norm else mixer_norm,
            mlp=self.mlps.mlp(f"{prefix}ffn_", config.layers[number].mlp),
            mlp_post_norm=mlp_post_norm,
            experts=self.mlps.separate_experts(prefix, config.layers[number].mlp),
            own_input=own_input,
        )

    def layer_embeddings(self, width: int) -> LayerEmbeddings | None:
        hidden, linear = self.parts.config.hidden, self.parts.backend.linear
        if not width:
            return None
        columns = width * len(self.parts.config.layers)
        table = self.parts.weights.take(LAYER_EMBEDDINGS, self.parts.config.vocab_size, columns)
        projection = self.parts.weights.take("per_layer_model_proj.weight", columns, hidden)
        # The projection is divided by sqrt(hidden) before its norm, and the sum with the table by sqrt(2).
        norm = self.parts.unbiased_norm("per_layer_proj_norm", width, scale=2**-0.5)
        norm = replace(norm, epsilon=norm.epsilon * hidden)
        return LayerEmbeddings(linear([table], Use.ROWS | Use.HOST), linear([projection]), norm, (width / 2) ** 0.5)

    def _own_input(self, prefix: str) -> LayerInput | None:
        width, hidden = self.parts.config.per_layer, self.parts.config.hidden
        if not width:
            return None
        gate = self.parts.linear(prefix, hidden, {"inp_gate": width})
        out = self.parts.linear(prefix, width, {"proj": hidden})
        return LayerInput(gate, out, self.parts.norm(f"{prefix}post_norm"))

    def _layer_scale(self, prefix: str) -> float:
        name = f"{prefix}layer_output_scale.weight"
        if not self.parts.config.scaled_layers or name not in self.parts.weights:
            return 1.0
        return float(self.parts.weights.take_vector(name, 1))

    def _mlp_norm(self, prefix: str) -> Norm:
        """Load the norm of the MLP's input. Some families name it by its position, after attention."""
        other = f"{prefix}post_attention_norm"
        is_other = self.parts.config.norm_placement is NormPlacement.BEFORE and f"{other}.weight" in self.parts.weights
        return self.parts.norm(other if is_other else f"{prefix}ffn_norm")

    def output_norm(self) -> Norm:
        """Load the norm before the head. GGUF files of LFM2 name it by the embedding."""
        other = "token_embd_norm"
        name = other if f"{other}.weight" in self.parts.weights else "output_norm"
        return self.parts.norm(name, scale=self.parts.config.logit_scale)


NO_TURN = 1e20  # a divisor of frequencies from which on the pair does not turn at any position
_PLACEMENTS = (NormPlacement.BEFORE, NormPlacement.AFTER)
