"""Count the compiled variants of kernels that serving a model takes, without a GPU.

    python -m tests.kernels.variants

Triton compiles a kernel once for each combination of types, constants, and properties of its arguments. The models are
8B Llamas in Q4_K_M and in FP8 on an H100, in steps with many numbers of tokens. Prints the variants of each kernel, and
fails if a product has more variants than tiles.
"""

import sys
from collections import Counter

import torch

from quant.cuda.linear import CudaLinear
from quant.cuda.loading import to_device
from tests.kernels.calls import CALLS, Setting, blank
from tests.kernels.cards import CARDS
from tests.kernels.launches import Launch, record_launches
from tests.kernels.shapes import LLAMA_8B, matrices
from tests.kernels.weights import weight

TOKENS = (1, 2, 3, 4, 5, 8, 11, 16, 17, 30, 32, 48, 100, 256, 257, 500, 512)
FLOAT8 = ("e4m3 channel", "e4m3 128x128")
# kinds of the matrices in Q4_K_M, in which half of the layers have some in Q6_K, and in FP8
KINDS = {
    "qkv": ("Q4_K", *FLOAT8),
    "out": ("Q4_K", *FLOAT8),
    "gate_up": ("Q4_K", *FLOAT8),
    "down": ("Q4_K", "Q6_K", *FLOAT8),
    "head": ("Q6_K",),
}
PRODUCTS = (
    "_product_kernel",
    "_vector_kernel",
    "_batch_kernel",
    "_unpack_kernel",
    "_float8_matmul_kernel",
    "_float8_batch_kernel",
)
META = torch.device("meta")


def collect() -> list[Launch]:
    """Return the distinct launches of steps with all numbers of tokens."""
    card, sizes = CARDS[3], matrices(LLAMA_8B)
    layers = [
        CudaLinear([to_device(weight(kind, *sizes[name], META), META)], card, deterministic=False)
        for name, kinds in KINDS.items()
        for kind in kinds
    ]
    others = [call for call in CALLS if call.__name__ != "_products"]
    with record_launches() as launches:
        for tokens in TOKENS:
            for layer in layers:
                layer.multiply(blank(tokens, layer.inputs))
                layer.multiply(blank(tokens, layer.inputs), add_to=blank(tokens, layer.outputs, dtype=torch.float32))
            for call in others:
                call(Setting(card, LLAMA_8B, tokens, deterministic=False, thorough=False))
    return list(launches.values())


def main() -> int:
    launches = collect()
    for name, count in Counter(launch.name for launch in launches).most_common():
        print(f"{count:4} {name}")
    products = [launch for launch in launches if launch.name in PRODUCTS]
    needed = {(launch.name, repr(sorted(launch.details)), launch.tile, str(launch)) for launch in products}
    print(f"{len(launches):4} in all; products and unpacking: {len(products)}, of which {len(needed)} differ in code")
    return 0 if len(products) == len(needed) else 1


if __name__ == "__main__":
    sys.exit(main())
