"""The shape of the small models of Gemma 4, for files of random weights: tensors, and metadata."""

from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGUFWriter
from gguf.constants import GGUFValueType

MATRIX = ""  # the type of a tensor whose type depends on the mix


@dataclass(frozen=True)
class Gemma4Shape:
    """Heads have 256 elements in layers with a window, and 512 in the others."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    shared: int  # number of the last layers, which have no keys and values
    interval: int  # one layer of this many has no window
    wide: bool  # whether the MLPs of those last layers have twice the width
    vocabulary: int = 262_144
    per_layer: int = 256
    window: int = 512
    context: int = 8192
    architecture: str = "gemma4"

    def is_local(self, number: int) -> bool:
        return (number + 1) % self.interval != 0

    def mlp_width(self, number: int) -> int:
        return self.mlp_hidden * (2 if self.wide and not self.has_keys(number) else 1)

    def has_keys(self, number: int) -> bool:
        return number < self.layers - self.shared

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield the name, shape, and type of every tensor."""
        hidden, own = self.hidden, self.per_layer
        yield "token_embd.weight", (self.vocabulary, hidden), MATRIX
        yield "per_layer_token_embd.weight", (self.vocabulary, own * self.layers), MATRIX
        yield "per_layer_model_proj.weight", (own * self.layers, hidden), "BF16"
        yield "per_layer_proj_norm.weight", (own,), "F32"
        yield "rope_freqs.weight", (256,), "F32"
        for number in range(self.layers):
            layer, head_dim = f"blk.{number}.", 256 if self.is_local(number) else 512
            q, kv, mlp = self.heads * head_dim, self.kv_heads * head_dim, self.mlp_width(number)
            norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
            yield from ((f"{layer}{name}.weight", (hidden,), "F32") for name in norms)
            yield f"{layer}layer_output_scale.weight", (1,), "F32"
            yield f"{layer}attn_q.weight", (q, hidden), MATRIX
            yield f"{layer}attn_q_norm.weight", (head_dim,), "F32"
            if self.has_keys(number):
                yield from ((f"{layer}attn_{it}.weight", (kv, hidden), MATRIX) for it in "kv")
                yield f"{layer}attn_k_norm.weight", (head_dim,), "F32"
            yield f"{layer}attn_output.weight", (hidden, q), MATRIX
            yield from ((f"{layer}ffn_{it}.weight", (mlp, hidden), MATRIX) for it in ("gate", "up"))
            yield f"{layer}ffn_down.weight", (hidden, mlp), MATRIX
            yield f"{layer}inp_gate.weight", (own, hidden), "BF16"
            yield f"{layer}proj.weight", (hidden, own), "BF16"
        yield "output_norm.weight", (hidden,), "F32"

    def add_metadata(self, writer: GGUFWriter) -> None:
        writer.add_name("Random weights")
        writer.add_block_count(self.layers)
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        widths = [self.mlp_width(number) for number in range(self.layers)]
        writer.add_key_value(f"{self.architecture}.feed_forward_length", widths, GGUFValueType.ARRAY)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(512)
        writer.add_value_length(512)
        writer.add_key_length_swa(256)
        writer.add_value_length_swa(256)
        writer.add_rope_dimension_count(512)
        writer.add_rope_dimension_count_swa(256)
        writer.add_rope_freq_base(1_000_000.0)
        writer.add_rope_freq_base_swa(10_000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_sliding_window(self.window)
        writer.add_sliding_window_pattern([self.is_local(number) for number in range(self.layers)])
        writer.add_shared_kv_layers(self.shared)
        writer.add_embedding_length_per_layer_input(self.per_layer)
        writer.add_final_logit_softcapping(30.0)
        writer.add_vocab_size(self.vocabulary)
