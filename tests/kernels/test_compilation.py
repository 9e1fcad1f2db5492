"""Reading machine code that cuobjdump prints: spills, and accesses to memory before a wait."""

import pytest

from tests.kernels.compilation import faults_before_wait, spills_of

CODE = """
        /*0010*/                   STL [R1], R4 ;                            /* 0x0000000401007387 */
        /*0020*/                   MOV R2, RZ ;                              /* 0x000000ff00027202 */
        /*0030*/                   LDL R5, [R1+0x4] ;                        /* 0x0000040001057983 */
        /*0040*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;      /* 0x000000060408723c */
        /*0050*/              @P0  BRA 0x30 ;                                /* 0xfffffffc00e80947 */
        /*0060*/                   LDL.LU R5, [R1+0x8] ;                     /* 0x0000080001057983 */
        /*0070*/              @!P1 BRA.U !UP0, `(.L_x_1) 0x20 ;              /* 0xfffffffc00e80947 */
        /*0080*/                   LDL R4, [R1] ;                            /* 0x0000000001047983 */
        /*0090*/                   BRA 0x90;                                 /* 0xfffffffc00fc7947 */
"""


def test_spills_of_counts_spills_and_their_share_in_loops() -> None:
    assert spills_of(CODE) == (4, 1 / 3)
    assert spills_of(CODE.replace("LDL R5", "LDS R5")) == (3, 0)
    assert spills_of(CODE.replace("BRA", "RET")) == (4, 0)


EARLY = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   CCTL.E.PF2 [R4] ;
        /*0020*/              @!P0 BRA 0x60 ;
        /*0030*/                   ACQBULK ;
        /*0040*/                   LDG.E R2, desc[UR6][R2.64] ;
        /*0050*/                   EXIT ;
        /*0060*/                   BRA.U UP0, 0x80 ;
        /*0070*/                   ACQBULK ;
        /*0080*/                   ACQBULK ;
        /*0090*/                   STG.E desc[UR6][R2.64], R13 ;
        /*00a0*/                   EXIT ;
"""


def test_code_that_waits_first_has_no_fault() -> None:
    assert faults_before_wait(EARLY) == []


@pytest.mark.parametrize(
    ("wait", "access"),
    [("/*0030*/                   ACQBULK", "LDG.E"), ("/*0080*/                   ACQBULK", "STG.E")],
)
def test_accesses_and_ends_on_a_way_without_a_wait_are_found(wait: str, access: str) -> None:
    found = faults_before_wait(EARLY.replace(wait, wait.replace("ACQBULK", "NOP")))
    assert [it.split()[0] for it in found] == [access, "EXIT"]
