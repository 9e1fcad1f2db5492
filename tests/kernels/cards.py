"""The cards that kernels are compiled for: one of each supported architecture."""

from quant.kernels.card import Card

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CARDS = (
    Card("NVIDIA A100", (8, 0), 108, 163 * KIB, 40 * MIB, 80 * GIB),
    Card("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * KIB, 6 * MIB, 24 * GIB),
    Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * KIB, 72 * MIB, 24 * GIB),
    Card("NVIDIA H100", (9, 0), 132, 227 * KIB, 50 * MIB, 80 * GIB),
    Card("NVIDIA B200", (10, 0), 148, 227 * KIB, 126 * MIB, 180 * GIB),
    Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * KIB, 96 * MIB, 32 * GIB),
    Card("NVIDIA B300", (10, 3), 148, 227 * KIB, 126 * MIB, 288 * GIB),
    Card("NVIDIA Thor", (11, 0), 20, 227 * KIB, 32 * MIB, 128 * GIB),
    Card("NVIDIA GB10", (12, 1), 48, 99 * KIB, 24 * MIB, 128 * GIB),
)

# Architectures with the same matrix instructions: mma.sync, wgmma, tcgen05. The default check compiles for one card of
# each class.
CLASSES = ((86, 120, 89, 80, 110, 121), (90,), (100, 103))
