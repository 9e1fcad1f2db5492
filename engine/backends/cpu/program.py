"""A step as a program: one instruction per operation of the model, over buffers at fixed addresses.

It is the CPU counterpart of a CUDA graph: a program is recorded once and computes every batch. The step header holds
the values that differ from step to step (tokens, positions, block tables, rows that become logits), and instructions
read it. For every instruction, this module checks that its addresses stay within their memory regions with the largest
batch; nothing is checked when it runs. `operations` records programs and `interpreter` runs them.
"""

import numpy as np
from numpy.typing import NDArray

from engine.backends.cpu.accesses import TOUCHED, scratch_bytes
from engine.backends.cpu.instructions import INSTRUCTION, WORDS, Instruction, Limits, Op
from quant.cpu.arena import Arena


class Program:
    """The instructions recorded so far. `finish` checks them and returns the array that the interpreter runs."""

    def __init__(self, arena: Arena, limits: Limits) -> None:
        self.arena = arena
        self.limits = limits
        self._rows: list[Instruction] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, op: Op, **words: int) -> None:
        """Append an instruction. Words that are not given are 0, except for `barrier`, which is 1."""
        if unknown := words.keys() - set(WORDS):
            raise KeyError(f"unknown instruction words: {sorted(unknown)}")
        self._rows.append({**dict.fromkeys(WORDS, 0), "op": int(op), "barrier": 1, **words})

    def scratch_bytes(self) -> int:
        """Return the scratch memory in bytes that one thread needs for the instructions recorded so far."""
        return max((scratch_bytes(row) for row in self._rows), default=0)

    def finish(self) -> NDArray[np.void]:
        """Return all instructions. Raises IndexError if one could access memory outside of its regions of the arena."""
        if not self._rows[-1]["barrier"] or self._rows[-1]["local"]:
            raise ValueError("the last instruction has no barrier, so threads could read the program after its step")
        ranges = self.arena.address_ranges()
        for number, row in enumerate(self._rows):
            op = Op(row["op"])
            if not 0 <= row["group"] < len(self.limits.num_blocks):
                raise IndexError(f"instruction {number} ({op.name}): group {row['group']} does not exist")
            for name, address, size in TOUCHED[op](row, self.limits):
                if not ranges.contains(address, size):
                    raise IndexError(
                        f"instruction {number} ({op.name}): {name}: {size} bytes are not in one memory region"
                    )
        return np.array([tuple(row[name] for name in WORDS) for row in self._rows], INSTRUCTION)
