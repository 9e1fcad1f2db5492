"""Runs a recorded program with a team of threads: the only code of ours that runs within a step.

Work is claimed from one atomic counter an instruction, in ranges that get smaller towards the end, so that a slow core
takes less of it. Between instructions the threads meet in a barrier that spins shortly and then yields. Which thread
computed something never shows in the result. `enter` is the one compiled entry point: everything else is compiled into
it, so that there is one piece of machine code to keep. Nothing is checked here: the recorder did.
"""

import os
from enum import IntEnum
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.backends.cpu.program import HEADER, INSTRUCTION, Record, Records
from engine.backends.cpu.units import compute, count_units
from quant.cpu.kernel import inlined, jit
from quant.cpu.vector import I64, Emit


class Command(IntEnum):
    """What `enter` is called for."""

    ANNOUNCE = 0  # tell the team about a step -> bit mask of the workers that sleep and must be woken
    RUN = 1  # compute a step as thread 0
    SERVE = 2  # a worker's life -> the number of the last job when it should sleep, -1 when it should end


class Shared(IntEnum):
    """Byte offsets of what the threads share, a cache line each. Read from and written to by compiled code alone."""

    ARRIVED = 0
    GENERATION = 64
    JOB = 128  # number of the step times MAX_THREADS, plus how many threads take part
    STOP = 192
    PARKED = 256  # + 64 * thread: 1 when it sleeps


MAX_THREADS = 1024
SPINS = 2000  # before a waiting thread yields its core
CHUNKS = 4  # of a thread's share of an instruction
IDLE_SPINS = 20_000  # spins without a job before a worker sleeps: about a millisecond

_ARRIVED, _GENERATION, _JOB = int(Shared.ARRIVED), int(Shared.GENERATION), int(Shared.JOB)
_STOP, _PARKED = int(Shared.STOP), int(Shared.PARKED)
_ANNOUNCE, _RUN = int(Command.ANNOUNCE), int(Command.RUN)

# Found by name when the cached machine code is loaded; an address would not be the same in the next process.
_yield_core = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


# -- the smallest pieces


@inlined
def _add(e: Emit, address: Any, value: Any) -> ir.Value:
    """Atomically add -> what was there before."""
    return e.b.atomic_rmw("add", e.b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@inlined
def _get(e: Emit, address: Any) -> ir.Value:
    return e.b.load_atomic(e.b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@inlined
def _set(e: Emit, address: Any, value: Any) -> None:
    e.b.store_atomic(value, e.b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@inlined
def _pause(e: Emit) -> None:
    e.pause()


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to anything, which `carray` takes."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: list[ir.Value]) -> ir.Value:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


# -- threads


@jit
def _claim(tickets: int, i: int, count: int, units: int, thread: int, threads: int) -> tuple[int, int]:
    """The next range of instruction i's units, first and last; empty when all are taken.

    Every thread has a share of its own, side by side so that memory is read in order, and takes it in CHUNKS; then it
    helps others with theirs.
    """
    for k in range(threads):
        owner = (thread + k) % threads
        begin, end = units * owner // threads, units * (owner + 1) // threads
        size, ticket = (end - begin + CHUNKS - 1) // CHUNKS, tickets + 8 * (owner * count + i)
        if k == 0 or begin + size * _get(ticket) < end:
            first = begin + size * _add(ticket, 1)
            if first < end:
                return first, min(first + size, end)
    return units, units


@jit
def _barrier(shared: int, threads: int) -> None:
    generation = _get(shared + _GENERATION)  # read before arriving
    if _add(shared + _ARRIVED, 1) == threads - 1:
        _set(shared + _ARRIVED, 0)
        _set(shared + _GENERATION, generation + 1)
        return
    tries = 0
    while _get(shared + _GENERATION) == generation:
        tries += 1
        if tries < SPINS:
            _pause()
        else:
            _yield_core()


@jit
def _replay(program: Records, h: Record, tickets: int, shared: int, thread: int, threads: int) -> None:
    """Thread `thread`'s part of a step."""
    for i in range(len(program)):
        a = program[i]
        units = count_units(a, h)
        alone = threads == 1 or (h.local != 0 and a.local != 0)
        if alone:
            compute(a, h, 0, units, thread)
            continue
        first, last = _claim(tickets, i, len(program), units, thread, threads)
        while first < last:
            compute(a, h, first, last, thread)
            first, last = _claim(tickets, i, len(program), units, thread, threads)
        if a.barrier:
            _barrier(shared, threads)


@jit
def _announce(tickets: int, count: int, shared: int, job: int, threads: int) -> int:
    """Tell about a job, then look who sleeps. `_serve` does it the other way round, so that no wake-up is lost."""
    for i in range(threads * count):
        _set(tickets + 8 * i, 0)
    _set(shared + _JOB, job * MAX_THREADS + threads)
    mask = 0
    for thread in range(1, threads):
        if _get(shared + _PARKED + 64 * thread) != 0:
            _set(shared + _PARKED + 64 * thread, 0)
            mask |= 1 << thread
    return mask


@jit
def _serve(program: Records, h: Record, tickets: int, shared: int, thread: int, seen: int) -> int:
    tries = 0
    while True:
        job = _get(shared + _JOB)
        if job != seen:
            if _get(shared + _STOP) != 0:
                return -1
            seen, tries = job, 0
            if thread < job % MAX_THREADS:
                _replay(program, h, tickets, shared, thread, job % MAX_THREADS)
        elif tries < IDLE_SPINS:
            tries += 1
            _pause()
        else:
            _set(shared + _PARKED + 64 * thread, 1)
            if _get(shared + _JOB) == seen:
                return seen
            _set(shared + _PARKED + 64 * thread, 0)
            tries = 0


def enter(
    command: int,
    program_address: int,
    count: int,
    header_address: int,
    tickets: int,
    shared: int,
    thread: int,
    threads: int,
    job: int,
) -> int:
    """Everything compiled, behind one door: see Command. `job` is a step's number, or the last one a worker saw."""
    program = numba.carray(_pointer(program_address), count, INSTRUCTION)
    header = numba.carray(_pointer(header_address), 1, HEADER)[0]
    if command == _ANNOUNCE:
        return _announce(tickets, count, shared, job, threads)
    if command == _RUN:
        _replay(program, header, tickets, shared, thread, threads)
        return 0
    return _serve(program, header, tickets, shared, thread, job)


ENTER_SIGNATURE = types.int64(*[types.int64] * 9)
