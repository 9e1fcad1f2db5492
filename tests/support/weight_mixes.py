"""The types of a model's matrices in llama.cpp's Q4_K_M mix."""

Q4_K_M = "Q4_K_M"


def kind_in_mix(name: str, layers: int) -> str:
    """Return the quantization type of a matrix, given its name in GGUF files."""
    last = name.rpartition(".")[2]
    if last == "output":
        return "Q6_K"
    if last in ("attn_v", "ffn_down"):
        return "Q6_K" if gets_more_bits(int(name.split(".")[1]), layers) else "Q4_K"
    return "Q4_K"


def gets_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down are Q6_K: in the first and last eighth of the layers, and in every third between
    them.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
