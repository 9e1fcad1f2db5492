"""Runs a recorded program on a thread pool. Within a step, no Python code runs.

Threads claim units of an instruction from atomic counters, in ranges of a quarter of a thread's share, so that a slow
core computes fewer units. Between instructions they meet in a barrier that spins briefly and then yields the core.
Results do not depend on which thread computes a unit. `enter` is the only compiled entry point, so one piece of machine
code is cached. Nothing is checked here: `program` checks every address when the program is recorded.
"""

import os
from typing import Any

import numba
from llvmlite import ir
from numba import types

from engine.backends.cpu.instructions import HEADER, INSTRUCTION
from engine.backends.cpu.units import compute, count_units
from engine.cpu_threads import MAX_THREADS, Command, Shared
from quant.cpu.kernel import inlined, jit, pointer
from quant.cpu.vector import I64, Emit

SPINS = 2000  # spins before a thread in a barrier yields its core
CHUNKS = 4  # claims per thread and instruction
IDLE_SPINS = 20_000  # spins without a job before a worker sleeps, about 1 ms

_ARRIVED, _GENERATION, _JOB = int(Shared.ARRIVED), int(Shared.GENERATION), int(Shared.JOB)
_STOP, _PROGRAM, _PARKED = int(Shared.STOP), int(Shared.PROGRAM), int(Shared.PARKED)
_ANNOUNCE, _RUN = int(Command.ANNOUNCE), int(Command.RUN)

# The function is resolved by name when cached machine code is loaded, because its address differs between processes.
_yield_core = types.ExternalFunction("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32())


# -- atomics


@inlined
def _add(e: Emit, address: Any, value: Any) -> ir.Value:
    """Atomically add. Returns the previous value."""
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


# -- threads


@jit
def _claim(tickets: int, i: int, count: int, units: int, thread: int, threads: int) -> tuple[int, int]:
    """Return the next range of units of instruction i as (first, last). The range is empty if all units are claimed.

    Each thread has a contiguous share of the units, so that memory is read in order, and claims it in CHUNKS ranges.
    Afterwards it claims from the shares of other threads.
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
    # must be read before arriving, because the last thread that arrives increments it
    generation = _get(shared + _GENERATION)
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
def _replay(
    program_address: int, count: int, header_address: int, tickets: int, shared: int, thread: int, threads: int
) -> None:
    """Run a program as `thread`: claim and compute units of every instruction."""
    program = numba.carray(pointer(program_address), count, INSTRUCTION)
    h = numba.carray(pointer(header_address), 1, HEADER)[0]
    for i in range(count):
        a = program[i]
        units = count_units(a, h)
        alone = threads == 1 or (h.local != 0 and a.local != 0)
        if alone:
            compute(a, h, 0, units, thread)
            continue
        first, last = _claim(tickets, i, count, units, thread, threads)
        while first < last:
            compute(a, h, first, last, thread)
            first, last = _claim(tickets, i, count, units, thread, threads)
        # also after the last instruction: the next step overwrites the header, and may be one of another program
        if a.barrier:
            _barrier(shared, threads)


@jit
def _announce(program: int, count: int, header: int, tickets: int, shared: int, job: int, threads: int) -> int:
    """Publish a job, then look for sleeping workers.

    `_serve` first marks itself as sleeping and then looks for a job, so no wake-up is lost. All workers of the previous
    job have read their program's words, because they have arrived at its last barrier.
    """
    for i in range(threads * count):
        _set(tickets + 8 * i, 0)
    _set(shared + _PROGRAM, program)
    _set(shared + _PROGRAM + 8, count)
    _set(shared + _PROGRAM + 16, header)
    _set(shared + _PROGRAM + 24, tickets)
    _set(shared + _JOB, job * MAX_THREADS + threads)
    mask = 0
    for thread in range(1, threads):
        if _get(shared + _PARKED + 64 * thread) != 0:
            _set(shared + _PARKED + 64 * thread, 0)
            mask |= 1 << thread
    return mask


@jit
def _serve(shared: int, thread: int, seen: int) -> int:
    tries, words = 0, shared + _PROGRAM
    while True:
        job = _get(shared + _JOB)
        if job != seen:
            if _get(shared + _STOP) != 0:
                return -1
            seen, tries = job, 0
            if thread < job % MAX_THREADS:
                program, count, header, tickets = _get(words), _get(words + 8), _get(words + 16), _get(words + 24)
                _replay(program, count, header, tickets, shared, thread, job % MAX_THREADS)
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
    program: int,
    count: int,
    header: int,
    tickets: int,
    shared: int,
    thread: int,
    threads: int,
    job: int,
) -> int:
    """The compiled entry point; see Command. `job` is the number of the step to compute, or a worker's last job.

    `program` and `header` are addresses. A worker gets none: it reads those of each job.
    """
    if command == _ANNOUNCE:
        return _announce(program, count, header, tickets, shared, job, threads)
    if command == _RUN:
        _replay(program, count, header, tickets, shared, thread, threads)
        return 0
    return _serve(shared, thread, job)


ENTER_SIGNATURE = types.int64(*[types.int64] * 9)
