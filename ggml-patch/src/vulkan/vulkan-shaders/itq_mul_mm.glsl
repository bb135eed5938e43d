// Eight consecutive weights for load_a_to_shmem of mul_mm_funcs.glsl.

    const uint idx    = pos_a + col * p.stride_a / LOAD_VEC_A + row;
    const uint k_pair = row * LOAD_VEC_A / 2;
    const uint ib     = idx / (QUANT_K / 8);
    const uint q      = 2 * (idx % (QUANT_K / 8));

    const float scale = ITQ_SCALE(data_a[ib]) * ITQ_WEIGHT_SCALE;
    const float zero  = scale * ITQ_ZERO_POINT(data_a[ib]);
    const vec4  v0    = scale * itq_levels4(ITQ_INDEX4(data_a[ib], q), 0) - zero;
    const vec4  v1    = scale * itq_levels4(ITQ_INDEX4(data_a[ib], q + 1), 0) - zero;

    store_a(col, k_pair,     FLOAT_TYPEV2(v0.xy));
    store_a(col, k_pair + 1, FLOAT_TYPEV2(v0.zw));
    store_a(col, k_pair + 2, FLOAT_TYPEV2(v1.xy));
    store_a(col, k_pair + 3, FLOAT_TYPEV2(v1.zw));
