// Weights for the loads of mul_mm_cm2.comp, one and four: dequant_funcs_cm2.glsl includes this file.

#if defined(DATA_A_ITQ)
layout(buffer_reference, std430, buffer_reference_align = 2) buffer decodeBufITQ {
    A_TYPE block;
};

float itq_cm2_weight(const in decodeBufITQ bl, const in float level) {
    return ITQ_SCALE(bl.block) * ITQ_WEIGHT_SCALE * (level - ITQ_ZERO_POINT(bl.block));
}

float16_t dequantFuncITQ(const in decodeBufITQ bl, const in uint blockCoords[2], const in uint coordInBlock[2])
{
    const uint t     = coordInBlock[1];
    const uint index = ITQ_INDEX4(bl.block, t / 4);
    return float16_t(itq_cm2_weight(bl, float(itq_levels[(index >> (8 * (t & 3))) & 0xFF])));
}

f16vec4 dequantFuncITQ_v(const in decodeBufITQ bl, const in uint blockCoords[2], const in uint coordInBlock[2])
{
    const vec4 level = itq_levels4(ITQ_INDEX4(bl.block, coordInBlock[1] / 4), 0);
    return f16vec4(itq_cm2_weight(bl, level.x), itq_cm2_weight(bl, level.y), itq_cm2_weight(bl, level.z),
                   itq_cm2_weight(bl, level.w));
}

#define dequantFuncA dequantFuncITQ
#define dequantFuncA_v dequantFuncITQ_v
#endif
