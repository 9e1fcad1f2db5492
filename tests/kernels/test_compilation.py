"""Counting spills in machine code that cuobjdump prints."""

from tests.kernels.compilation import spills_of

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
