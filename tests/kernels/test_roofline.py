"""Estimates from machine code: the loops that are read, the model of time, and the stored figures."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.machine_loops import innermost_loops, main_loop, straight_code
from tests.kernels.recorded_steps import Work
from tests.kernels.roofline import MANY_WARPS, STORED, faults
from tests.kernels.test_ahead_of_time import run
from tests.kernels.time_model import (
    FIRST_LOAD_SECONDS,
    GAP_SECONDS,
    LAUNCH_SECONDS,
    RATES,
    Kernel,
    clocks,
    seconds,
)

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.U8 R9, desc[UR4][R20.64] ;
        /*0030*/                   LOP3.LUT R10, R7, 0xf000f, RZ, 0xc0, !PT ;
        /*0040*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   HMMA.16816.F32.BF16 R12, R4, R16, R12 ;
        /*0060*/                   IMAD R11, R9, R10, RZ ;
        /*0070*/               @P0 BRA 0x10 ;
        /*0080*/                   LDS R5, [R1] ;
        /*0090*/              @!P1 BRA 0x80 ;
        /*00a0*/                   EXIT ;
"""
H100 = RATES[90]
WORK = Work("Q4_K 4096x4096", None, 256, 100_000, 8_388_608, 8 * 4096 * 4096)


def kernel(**changes: Any) -> Kernel:
    loop = main_loop(CODE)
    assert loop
    return replace(Kernel(loop, loop, registers=56, shared=2048, spills=0, warps=4), **changes)


def test_the_main_loop_has_the_most_multiply_adds() -> None:
    assert [len(loop.body) for loop in innermost_loops(CODE)] in ([7, 2], [2, 7])
    loop = kernel().loop
    assert loop
    assert (loop.pipes["alu"], loop.pipes["imad"], loop.pipes["memory"], loop.barriers) == (1, 1, 2, 1)
    assert loop.matrix == {"HMMA": 16 * 8 * 16}
    assert loop.loaded == 32 * 16


def test_loads_ahead_are_counted_to_the_first_use_of_any_register_of_the_load() -> None:
    def ahead(code: str) -> int | None:
        loop = main_loop(code)
        assert loop
        return loop.loads_ahead

    assert ahead(CODE) == 2  # LOP3 reads R7, which the load of R4 to R7 writes
    assert ahead(CODE.replace("R10, R7", "R10, R8")) == 4  # HMMA reads R4
    before = CODE.replace("R10, R7", "R10, R8").replace("R12, R4, R16", "R12, R22, R16")
    assert (
        ahead(before.replace("/*0010*/                   LDG", "/*0010*/  IADD3 R30, R6, R6, RZ ;\n/*0018*/ LDG")) == 7
    )
    assert ahead(CODE.replace("LDG.E.128.CONSTANT R4", "LDGSTS.E.128 [R4]").replace("LDG.E.U8 R9,", "LDS R9,")) is None


def test_a_loop_takes_the_clocks_of_its_busiest_pipe() -> None:
    loop = kernel().loop
    assert loop
    assert clocks(loop, H100) == 8  # HMMA: 2048 multiply-adds at 256 per clock; the two loads take as many
    assert clocks(loop, RATES[86]) == 32
    three = main_loop(
        CODE.replace("IMAD R11, R9, R10, RZ ;", "IMAD R11, R9, R10, RZ ;" + "\n/*0061*/ MUFU R1, R2 ;" * 2)
    )
    assert three
    assert clocks(three, H100) == 16


def test_time_is_the_longer_one_of_traffic_and_instructions() -> None:
    def microseconds(work: Work) -> float:
        return 1e6 * (seconds(work, kernel(), H100, 132) - LAUNCH_SECONDS)

    loops = 8 * 4096 * 4096 / 2048  # of a warp, for all products
    assert microseconds(WORK) == pytest.approx(1e6 * loops * 8 / (0.75 * 4 * 132 * H100.clock))
    assert microseconds(replace(WORK, traffic=10**9)) == pytest.approx(1e15 / (0.92 * H100.bandwidth))


def test_an_early_start_saves_the_gap_and_prefetched_weights_the_first_wait() -> None:
    def saved(code: str) -> float:
        started = replace(kernel(), whole=straight_code(code + CODE))
        return 1e6 * (seconds(WORK, kernel(), H100, 132) - seconds(WORK, started, H100, 132))

    wait, prefetch = "\n        /*0000*/ ACQBULK ;\n", "\n        /*0000*/ CCTL.E.PF2 [R4] ;\n"
    assert saved(wait) == pytest.approx(1e6 * GAP_SECONDS)
    assert saved(prefetch + wait) == pytest.approx(1e6 * (GAP_SECONDS + FIRST_LOAD_SECONDS))
    assert saved(prefetch) == 0


def test_registers_and_shared_memory_limit_the_warps_of_a_multiprocessor() -> None:
    assert kernel().occupancy(H100) == 36
    assert kernel(registers=57).occupancy(H100) == 32
    assert kernel(shared=98 << 10).occupancy(H100) == 8
    assert kernel(registers=16).occupancy(RATES[86]) == 48


def figures() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(STORED.read_text())["H100"]
    return stored


@pytest.mark.parametrize("name", ["decode_ms", "decode_launches", "prompt_ms"])
def test_a_slower_step_is_a_fault(name: str) -> None:
    stored = figures()
    assert not faults(stored, stored)
    assert not faults(stored | {name: 0.5 * stored[name]}, stored)
    (fault,) = faults(stored | {name: 1.1 * stored[name]}, stored)
    assert fault.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("figure", "change"),
    [("microseconds", 10.0), ("launches", 1), ("instructions", 1.0), ("barriers", 1), ("spills", 1)],
)
def test_a_worse_figure_of_an_operation_is_a_fault(figure: str, change: float) -> None:
    (fault,) = faults(changed("norm", figure, change), figures())
    assert fault.startswith(f"norm: {figure}: ")


def test_fewer_warps_and_later_loads_are_faults_if_few_warps_run() -> None:
    name, known = "attend", changed("attend", "loads_ahead", 13)
    assert known["operations"][name]["warps"] < MANY_WARPS
    assert faults(known, known) == []
    assert [f"{name}: " in it for it in faults(changed(name, "warps", -4, known), known)] == [True]
    assert [f"{name}: " in it for it in faults(changed(name, "loads_ahead", -8, known), known)] == [True]


def test_an_operation_without_stored_figures_is_a_fault() -> None:
    stored = figures()
    operations = stored["operations"] | {"new": stored["operations"]["norm"]}
    assert faults(stored | {"operations": operations}, stored) == ["new: no figures are stored"]


def changed(operation: str, figure: str, change: float, stored: dict[str, Any] | None = None) -> dict[str, Any]:
    stored = stored or figures()
    operations = stored["operations"]
    worse = operations[operation] | {figure: operations[operation][figure] + change}
    return stored | {"operations": operations | {operation: worse}}


@pytest.mark.share(1)
@pytest.mark.parametrize("card", ["3090", "4090", "5090", "H100"])
def test_no_kernel_is_worse_than_its_stored_figures(card: str) -> None:
    done = run("tests.kernels.roofline", "--card", card, "--check")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
