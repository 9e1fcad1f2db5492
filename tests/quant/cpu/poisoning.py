"""Fill regions of an arena with NaN, so that reading uninitialized memory changes the results."""

from quant.cpu.arena import Arena


def poison(arena: Arena, *names: str) -> None:
    """Fill the regions of these names with NaN."""
    for region, _ in arena._regions:
        if region.name in names:
            region.bytes[:] = 0xFF
