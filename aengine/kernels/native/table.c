/* The kernel table of one instruction set; compiled once for each, like the kernels. */
#include "internal.h"
#include "quantised.h"
#include "tile.h"

int AE_FN(pack)(ae_context *, const ae_pack_args *);
int AE_FN(linear)(ae_context *, const ae_linear_args *);
int AE_FN(pack_quantised)(ae_context *, const ae_pack_quantised_args *);
int AE_FN(unpack)(ae_context *, const ae_unpack_args *);
int AE_FN(embed_packed)(ae_context *, const ae_embed_packed_args *);
int AE_FN(rms_norm)(ae_context *, const ae_rms_norm_args *);
int AE_FN(add)(ae_context *, const ae_add_args *);
int AE_FN(glu)(ae_context *, const ae_glu_args *);
int AE_FN(rope)(ae_context *, const ae_rope_args *);
int AE_FN(attention)(ae_context *, const ae_attention_args *);
int AE_FN(mul)(ae_context *, const ae_mul_args *);
int AE_FN(scale_positions)(ae_context *, const ae_scale_positions_args *);
int AE_FN(short_conv)(ae_context *, const ae_short_conv_args *);
int AE_FN(mixture)(ae_context *, const ae_mixture_args *);
int AE_FN(sample)(ae_context *, const ae_sample_args *);
int AE_FN(logprobs)(ae_context *, const ae_logprobs_args *);

#define AE_STRING2(x) #x
#define AE_STRING(x) AE_STRING2(x)

const ae_kernels AE_FN(ae_kernels) = {
    .name = AE_STRING(AE_ISA),
    .panel = AE_NR,
    .code_panel = AE_PANEL,
    .pack = AE_FN(pack),
    .linear = AE_FN(linear),
    .pack_quantised = AE_FN(pack_quantised),
    .unpack = AE_FN(unpack),
    .embed_packed = AE_FN(embed_packed),
    .rms_norm = AE_FN(rms_norm),
    .add = AE_FN(add),
    .glu = AE_FN(glu),
    .rope = AE_FN(rope),
    .attention = AE_FN(attention),
    .mul = AE_FN(mul),
    .scale_positions = AE_FN(scale_positions),
    .short_conv = AE_FN(short_conv),
    .mixture = AE_FN(mixture),
    .sample = AE_FN(sample),
    .logprobs = AE_FN(logprobs),
};
