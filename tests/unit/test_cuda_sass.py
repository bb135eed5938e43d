"""scripts/check/sass.py and the figures of scripts/check/cuda.py, on machine code made up for the purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.check import sass

ROOT = Path(__file__).resolve().parents[2]

#: A loop over tiles: a first copy that may be left out, an inner loop of copies, products that may be skipped, an end
#: of a row that mostly is, and a way out in the middle.
KERNEL = """
_Z4testv:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ISETP.GE.AND P1, PT, R0, R9, PT ;
        /*0020*/               @P1 BRA `(.L_x_9) ;
.L_x_1:
        /*0030*/                   BSSY B0, `(.L_x_4) ;
        /*0040*/              @!P2 BRA `(.L_x_2) ;
        /*0050*/                   LDGSTS.E [R4], [R2.64] ;
.L_x_2:
        /*0060*/                   IADD3 R4, R4, 0x80, RZ ;
.L_x_3:
        /*0070*/                   LDGSTS.E [R4], [R2.64] ;
        /*0080*/                   LDGSTS.E [R4+0x80], [R2.64+0x80] ;
        /*0090*/                   IADD3 R4, R4, 0x100, RZ ;
        /*00a0*/              @!P2 BRA `(.L_x_3) ;
        /*00b0*/                   BSYNC B0 ;
.L_x_4:
        /*00c0*/               @P3 BRA `(.L_x_5) ;
        /*00d0*/                   LDS.128 R8, [R0] ;
        /*00e0*/                   PRMT R12, R8, R9, R10 ;
        /*00f0*/                   IDP.4A.S8.S8 R13, R12, R11, R13 ;
        /*0100*/                   LOP3.LUT R12, R12, 0xff, RZ, 0xc0, !PT ;
        /*0110*/               @P0 IDP.4A.S8.S8 R13, R12, R11, R13 ;
.L_x_5:
        /*0120*/              @!P4 BRA P5, `(.L_x_6) ;
        /*0130*/                   SHFL.BFLY PT, R1, R13, 0x1, 0x1f ;
        /*0140*/                   FADD R13, R13, R1 ;
        /*0150*/                   STG.E [R2.64], R13 ;
        /*0160*/               @P6 EXIT ;
.L_x_6:
        /*0170*/               @P1 BRA `(.L_x_1) ;
.L_x_9:
        /*0180*/                   EXIT ;
.L_x_10:
        /*0190*/                   BRA `(.L_x_10);
        /*01a0*/                   NOP ;
"""


@pytest.fixture
def code() -> sass.Code:
    return sass.parse(KERNEL.splitlines())


def test_loops_nest(code: sass.Code) -> None:
    loops = sass.loops_of(sass.blocks_of(code))  # what cannot be reached is none
    assert [len(loop.children) for loop in loops] == [1, 0]
    assert loops[1].parent is loops[0]
    blocks = sass.blocks_of(code)
    sizes = [sum(len(blocks[b].instructions) for b in loop.blocks) for loop in loops]
    assert sizes == [21, 4]


@pytest.mark.parametrize(
    "copied,instructions",
    [(256, 16), (300, 17), (512, 20), (600, 21), (768, 24)],  # the first copy instead of another time around the loop
)
def test_way_through_the_loop(code: sass.Code, copied: int, instructions: int) -> None:
    """Products are not skipped, the end of a row is; inner loops are gone around as often as the copies need."""
    figures = sass.count(code, weights=64, copied=copied)
    assert figures is not None
    assert figures["way_instructions"] == instructions
    assert figures["loop_instructions"] == 21
    assert figures["instructions_a_weight"] == instructions / 2
    assert figures["products_a_weight"] == 2 * 128 / 64
    assert sum(figures["by_pipe"].values()) == pytest.approx(figures["instructions_a_weight"])
    assert figures["by_pipe"]["fma"] == 1


def test_a_call_of_a_label_is_a_branch() -> None:
    code = sass.parse(
        [
            ".L_x_0:",
            "/*0000*/  IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ;",
            "/*0010*/  @P0 CALL.REL.NOINC `(.L_x_1) ;",
            "/*0020*/  BRA `(.L_x_0) ;",
            ".L_x_1:",
            "/*0030*/  EXIT ;",
        ]
    )
    assert [block.next for block in sass.blocks_of(code)] == [[1, 2], [0], []]
    assert len(sass.loops_of(sass.blocks_of(code))) == 1


def test_no_products_no_count() -> None:
    assert sass.count(sass.parse(["/*0000*/  MOV R1, R2 ;", "/*0010*/  EXIT ;"]), weights=1) is None


@pytest.mark.parametrize(
    "line,pipe,products,copied",
    [
        ("/*0000*/  IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ;", "tensor", 16 * 8 * 32, 0),
        ("/*0000*/  HMMA.16816.F32 R4, R8, R12, R4 ;", "tensor", 16 * 8 * 16, 0),
        ("/*0000*/  @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R4], [R2.64] ;", "memory", 0, 512),
        ("/*0000*/  LDGSTS.E.LTC128B [R4], desc[UR4][R2.64] ;", "memory", 0, 128),
        ("/*0000*/  @UP0 UIADD3 UR4, UR4, 0x1, URZ ;", "uniform", 0, 0),
        ("/*0000*/  IDP.4A.S8.S8 R4, R5, R6.reuse, RZ ;", "fma", 128, 0),
        ("/*0000*/  SHF.L.W.U32.HI R4, R5, 0x1, R6 ;", "alu", 0, 0),
    ],
)
def test_instructions(line: str, pipe: str, products: int, copied: int) -> None:
    (instruction,) = sass.parse([line]).instructions
    assert (instruction.pipe, instruction.products, instruction.copied) == (pipe, products, copied)


def test_branches_of_a_table_are_followed() -> None:
    code = sass.parse(
        [
            '/*0000*/  BRX R2 -0x10   (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);',
            ".L_x_1:",
            "/*0010*/  EXIT ;",
            ".L_x_2:",
            "/*0020*/  EXIT ;",
        ]
    )
    assert [block.next for block in sass.blocks_of(code)] == [[1, 2], [], []]


@pytest.mark.parametrize(
    "mangled,name",
    [
        ("_Z13mul_mat_vec_qIL9ggml_type500ELi2ELb0ELb0ELb1EEvPKvS1_", "mul_mat_vec_q<ITQ3_S, 2, 0, 0, 1>"),
        ("_Z20mul_mat_vec_q_itq3_sIL9ggml_type35ELb1EEvPKv", "mul_mat_vec_q_itq3_s<TQ2_0, 1>"),
        ("_Z15quantize_q8_1x4ILb1EEvPKfPvlllllj5uint3", "quantize_q8_1x4<1>"),
        (
            "_Z19dequantize_rows_256I6__halfXadL_Z17dequantize_tq1_0IS0_EvPKvlPT_iEEEvS3_S5_",
            "dequantize_rows_256<TQ1_0, half>",
        ),
    ],
)
def test_names(mangled: str, name: str) -> None:
    instance = sass.instance_of(mangled)
    assert str(instance) == name
    assert sass.is_counted(instance) == (name != "mul_mat_vec_q<ITQ3_S, 2, 0, 0, 1>")


def test_upstreams_types_are_not_counted() -> None:
    assert not sass.is_counted(sass.instance_of("_Z13mul_mat_vec_qIL9ggml_type12ELi2ELb0ELb0ELb0EEvPKvS1_"))
    assert not sass.is_counted(sass.instance_of("_Z13soft_max_f32ILb1EEvPKf"))


def figures(cost: float = 4.0, spills: int = 0, products: float = 2.0) -> dict[str, Any]:
    return {"instructions_a_weight": cost, "spills": spills, "products_a_weight": products}


@pytest.mark.parametrize(
    "new,complaints",
    [
        (figures(), 0),
        (figures(cost=4.11), 0),
        (figures(cost=4.13), 1),
        (figures(cost=1.0), 0),
        (figures(spills=4), 1),
        (figures(cost=8.0, products=4.0), 2),  # the loop was unrolled, and the table does not know
        ({"spills": 0}, 2),  # not counted any more
    ],
)
def test_what_is_worse(new: dict[str, Any], complaints: int) -> None:
    assert len(sass.worse({"a": figures()}, {"a": new})) == complaints


def test_kernels_come_and_go_by_hand() -> None:
    assert sass.worse({"a": figures()}, {"b": figures()}) == ["a: gone", "b: new"]


def test_committed_figures_are_of_counted_kernels() -> None:
    committed = json.loads((ROOT / "docs" / "results" / "cuda_sass.json").read_text())
    kernels = {name.split("<")[0] for name in committed["kernels"]}
    assert set(sass.KERNELS) <= kernels
    assert all(name.rsplit(" ", 1)[1] in ("sm_80", "sm_90", "sm_120") for name in committed["kernels"])


def test_weights_come_from_the_headers() -> None:
    defines = sass.defines_of(ROOT / "ggml-patch" / "src" / "cuda")
    for kernel, how in sass.KERNELS.items():
        instance = sass.Instance(kernel, "ITQ3_S", (1,))
        assert how.weights(instance, defines) % 256 == 0
