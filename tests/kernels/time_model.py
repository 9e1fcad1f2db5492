"""A model of the time of a launch on a card: memory traffic, instructions of the busiest pipe, and the launch itself.

A scheduler issues one instruction per clock, and each pipe takes some clocks for an instruction of a warp. Rates are
those of NVIDIA's tuning guides and of published measurements. The rate of the half-rate instructions, and the shares
that are reached in practice, are assumptions. Waits for memory are not modeled. An early start shortens the launch: the
gap before it is gone, and the first load if weights are prefetched.
"""

from dataclasses import dataclass

from tests.kernels.machine_loops import Loop
from tests.kernels.recorded_steps import Work

SCHEDULERS = 4  # per multiprocessor
REACHED_TRAFFIC = 0.92  # share of the bandwidth that a copy reaches
REACHED_ISSUE = 0.75  # share of the busiest pipe's clocks that a loop reaches
REACHED_LIBRARY = 0.75  # share of the peak that the library's product reaches
LAUNCH_SECONDS = 2.5e-6  # of a kernel in a CUDA graph: its start, and its last programs
# what an early start saves of that, measured with a pair of empty kernels in a graph (pegainfer issue 569)
GAP_SECONDS = 0.96e-6
FIRST_LOAD_SECONDS = 0.34e-6  # what prefetched weights save in addition: the latency of memory, 600 clocks on an H100
REGISTERS = 65536  # of a multiprocessor
RESERVED = 1 << 10  # bytes of shared memory that each program takes in addition
CLOCKS = {"alu": 2.0, "fma": 1.0, "slow": 8.0, "memory": 4.0}  # of a scheduler for an instruction of a warp
IMAD_CLOCKS = 2.0
WAIT, PREFETCH = "ACQBULK", "CCTL"  # instructions: griddepcontrol.wait, and prefetch to the L2 cache


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a card. Matrix rates are multiply-adds per clock and scheduler."""

    clock: float  # Hz
    bandwidth: float  # bytes/s
    tensor: dict[str, int]  # by matrix instruction, with sums in float32 or int32
    warps: int  # most warps of a multiprocessor
    shared: int  # bytes of shared memory of a multiprocessor

    def peak(self, multiprocessors: int) -> float:
        """Operations per second of bfloat16 products."""
        return 2 * SCHEDULERS * multiprocessors * self.clock * self.tensor.get("HGMMA", self.tensor["HMMA"])

    def integer_peak(self, multiprocessors: int) -> float:
        """Operations per second of products of 8-bit integers."""
        return 2 * SCHEDULERS * multiprocessors * self.clock * self.tensor["IMMA"]


GEFORCE = {"HMMA": 64, "IMMA": 256, "QMMA": 128, "OMMA": 256}
HOPPER = {"HMMA": 256, "IMMA": 512, "HGMMA": 512, "IGMMA": 1024, "QGMMA": 1024}
RATES = {  # by architecture; the clocks are those of RTX 3090, RTX 4090, H100 SXM, and RTX 5090
    86: Rates(1.695e9, 936e9, GEFORCE, 48, 100 << 10),
    89: Rates(2.52e9, 1008e9, GEFORCE, 48, 100 << 10),
    90: Rates(1.755e9, 3350e9, HOPPER, 64, 228 << 10),
    120: Rates(2.41e9, 1792e9, GEFORCE, 48, 100 << 10),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The machine code of a launch."""

    loop: Loop | None  # the main loop
    whole: Loop  # all instructions
    registers: int  # per thread
    shared: int  # bytes per program
    spills: int
    warps: int  # per program

    @property
    def starts_early(self) -> bool:
        return any(it.name == WAIT for it in self.whole.body)

    @property
    def prefetches(self) -> bool:
        return any(it.name == PREFETCH for it in self.whole.body)

    def occupancy(self, rates: Rates) -> int:
        """Return the number of warps that a multiprocessor holds."""
        per_warp = 32 * -(-self.registers // 8) * 8
        programs = min(
            rates.warps // self.warps,
            REGISTERS // (per_warp * self.warps),
            rates.shared // (self.shared + RESERVED),
        )
        return programs * self.warps


def matrix_clocks(loop: Loop, rates: Rates) -> float:
    """Return the clocks of a scheduler's matrix unit for one run of a loop by a warp."""
    return sum(count / rates.tensor[name] for name, count in loop.matrix.items())


def clocks(loop: Loop, rates: Rates) -> float:
    """Return the clocks of a scheduler for one run of a loop by a warp: those of the busiest pipe."""
    pipes = loop.pipes
    busy = [pipes[pipe] * cost for pipe, cost in CLOCKS.items()]
    return max(len(loop.body), matrix_clocks(loop, rates), pipes["fma"] + IMAD_CLOCKS * pipes["imad"], *busy)


def runs(work: Work, kernel: Kernel) -> float:
    """Return the number of times that a warp runs the main loop, over all warps.

    Matrix instructions must cover all multiply-adds of the launch, and wide loads the largest tensor.
    """
    loop = kernel.loop
    if loop is None:
        return 0.0
    by_products = work.multiply_adds / loop.matrix.total() if loop.matrix else 0.0
    by_loads = work.streamed / loop.loaded if loop.loaded else 0.0
    return max(by_products, by_loads)


def seconds(work: Work, kernel: Kernel | None, rates: Rates, multiprocessors: int) -> float:
    """Return the time of a launch in a CUDA graph. `kernel` is None for a function of torch."""
    traffic = work.traffic / (REACHED_TRAFFIC * rates.bandwidth)
    if kernel is None:
        busy = 2 * work.multiply_adds / (REACHED_LIBRARY * rates.peak(multiprocessors))
        return max(traffic, busy) + LAUNCH_SECONDS
    loop_clocks = runs(work, kernel) * clocks(kernel.loop, rates) if kernel.loop else 0.0
    if not loop_clocks:
        loop_clocks = work.programs * kernel.warps * clocks(kernel.whole, rates)
    busy = loop_clocks / (REACHED_ISSUE * SCHEDULERS * multiprocessors * rates.clock)
    saved = (GAP_SECONDS + FIRST_LOAD_SECONDS * kernel.prefetches) * kernel.starts_early
    return max(traffic, busy) + LAUNCH_SECONDS - saved
