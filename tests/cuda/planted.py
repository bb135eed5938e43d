"""Mistakes in the sources that the tests of the products must find, one at a time.

Each is a file, what stands there once, and what takes its place in the emulated device: emulate::fault is the number of
the mistake that is made, counted from 1, and 0 for none.
"""

from __future__ import annotations

FAULTS = (
    # Upstream's driver of MMQ: a wrong place in the buffer of the parts of tiles; no barrier between loading a tile and
    # the product; parts of tiles that nobody adds up.
    (
        "mmq.cuh",
        "sum[j0/nwarps] += tmp_last_tile[bidx*(J*I) + j*I + i];",
        "sum[j0/nwarps] += tmp_last_tile[bidx*(J*I) + j*I + (emulate::fault == 1 ? I - 1 - i : i)];",
    ),
    (
        "mmq.cuh",
        "__syncthreads();\n\n        vec_dot(tile_x, tile_y, sum, 0);",
        "if (emulate::fault != 2) {\n__syncthreads();\n}\n        vec_dot(tile_x, tile_y, sum, 0);",
    ),
    (
        "mmq.cuh",
        "    if (!any_fixup) {\n",
        "    if (!any_fixup || emulate::fault == 3) {\n",
    ),
    # Our tiles: a wrong stride; no barrier between the raw blocks and the weights that are written over them; the scale
    # of the neighbour.
    (
        "itq-mmq.cuh",
        "[kbx0 + i_src * stride].qs",
        "[kbx0 + i_src * (stride + (emulate::fault == 4))].qs",
    ),
    (
        "itq-mmq.cuh",
        "ggml_cuda_syncwarp();  // both lanes of a row have read it",
        "if (emulate::fault != 5) { ggml_cuda_syncwarp(); }",
    ),
    (
        "itq-mmq.cuh",
        "const float * scales = x_f + tile_x::scale(i0 + n * tile_A::I + tile_C::get_i(2 * l));",
        "const float * scales = x_f + tile_x::scale((i0 + n * tile_A::I + tile_C::get_i(2 * l)) ^ "
        "(emulate::fault == 6));",
    ),
    # Upstream's driver of MMVQ: no barrier before the parts of the warps are added; the activations of another expert.
    (
        "mmvq.cu",
        "    __syncthreads();\n    if (threadIdx.y > 0) {\n        return;",
        "    if (emulate::fault != 7) {\n__syncthreads();\n}\n    if (threadIdx.y > 0) {\n        return;",
    ),
    (
        "mmvq.cu",
        "channel_y = fastmodulo(channel_dst, nchannels_y);\n\n    const block_q8_1 * y",
        "channel_y = emulate::fault == 8 ? 0 : fastmodulo(channel_dst, nchannels_y);\n\n    const block_q8_1 * y",
    ),
    # Our functions for MMVQ: the selectors before the first chunk are 0.
    (
        "itq-vecdot.cuh",
        "return k == 0 ? itq_word_before(last)",
        "return k == 0 ? (emulate::fault == 9 ? 0 : itq_word_before(last))",
    ),
    # Blocks of 64: no selector word before the second chunk; the scale of the other of two blocks; activations from
    # behind the end of a row.
    (
        "itq-vecdot.cuh",
        ": itq_load_word<block>(x.sel, k - 1);",
        ": emulate::fault == 10 ? 0 : itq_load_word<block>(x.sel, k - 1);",
    ),
    (
        "itq-mmq.cuh",
        "* MMQ_TILE_Y_K + g * scale_steps];",
        "* MMQ_TILE_Y_K + (emulate::fault == 11 ? nscales - 1 - g : g) * scale_steps];",
    ),
    (
        "itq-quantize.cuh",
        "(points == 64 ? ITQ_VALUES * lane : 0)",
        "(points == 64 && emulate::fault != 12 ? ITQ_VALUES * lane : 0)",
    ),
    # Blocks of 64 on tensor cores: a column of the product adds up all four blocks; the scale of the other of two
    # blocks; no selector word before the second chunk; garbage behind the end of a row; one of two parts of a sum.
    (
        "itq-mma.cuh",
        "if (at.active) {",
        "if (at.active || emulate::fault == 13) {",
    ),
    (
        "itq-mma.cuh",
        "at.two[l], 4)",
        "at.two[emulate::fault == 14 ? 1 - l : l], 4)",
    ),
    (
        "itq-fragment.cuh",
        "k == 0 ? itq_word_before(last >> at.turn) : v[words - 2];",
        "k == 0 ? itq_word_before(last >> at.turn) : emulate::fault == 15 ? 0 : v[words - 2];",
    ),
    (
        "itq-mma.cuh",
        "*word = 0;",
        "*word = emulate::fault == 16 ? ~0u : 0;",
    ),
    (
        "itq-mma.cuh",
        "part[0] + part[1];",
        "part[0] + (emulate::fault == 17 ? 0 : part[1]);",
    ),
    # The table of subsets: read before all of it is there; of the byte before, what is of the byte itself.
    (
        "itq-mma.cuh",
        "__syncthreads();\n    }\n    if (!ids)",
        "if (emulate::fault != 18) {\n__syncthreads();\n}\n    }\n    if (!ids)",
    ),
    (
        "itq-fragment.cuh",
        "= of_8.next;",
        "= emulate::fault == 19 ? of_8.own : of_8.next;",
    ),
)
