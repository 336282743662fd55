/* Scalar types, handles and enumerations.
 *
 * Upstream: ZenDNN 5.1, zendnn_types.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

/* Sizes and values no memory or argument has: "known at execution" */
#define ZENDNN_MAX_NDIMS 12
#define ZENDNN_RNN_MAX_N_PARTS 4
#define ZENDNN_RUNTIME_DIM_VAL -9223372036854775808
#define ZENDNN_RUNTIME_S32_VAL -2147483648
/* The bits of a quiet NaN with this payload: a float scale known at execution. */
#define ZENDNN_RUNTIME_F32_VAL_bits 2143289552
/* Data handles for memory_create, as integers: none, and allocated by the library. Cast to void *. */
#define ZENDNN_MEMORY_NONE 0
#define ZENDNN_MEMORY_ALLOCATE 18446744073709551615

typedef int64_t zendnn_dim_t;
typedef zendnn_dim_t zendnn_dims_t[12];

/* Handles: opaque, one owner each, destroyed by the function of the same name. */
typedef struct zendnn_engine *zendnn_engine_t;
typedef const struct zendnn_engine *const_zendnn_engine_t;
typedef struct zendnn_stream *zendnn_stream_t;
typedef const struct zendnn_stream *const_zendnn_stream_t;
typedef struct zendnn_memory *zendnn_memory_t;
typedef const struct zendnn_memory *const_zendnn_memory_t;
typedef struct zendnn_primitive *zendnn_primitive_t;
typedef const struct zendnn_primitive *const_zendnn_primitive_t;
typedef struct zendnn_primitive_desc *zendnn_primitive_desc_t;
typedef const struct zendnn_primitive_desc *const_zendnn_primitive_desc_t;
typedef struct zendnn_primitive_desc_iterator *zendnn_primitive_desc_iterator_t;
typedef const struct zendnn_primitive_desc_iterator *const_zendnn_primitive_desc_iterator_t;
typedef struct zendnn_primitive_attr *zendnn_primitive_attr_t;
typedef const struct zendnn_primitive_attr *const_zendnn_primitive_attr_t;
typedef struct zendnn_post_ops *zendnn_post_ops_t;
typedef const struct zendnn_post_ops *const_zendnn_post_ops_t;

/* Any of the operation descriptors in descriptors.h. */
typedef void *zendnn_op_desc_t;
typedef const void *const_zendnn_op_desc_t;

typedef enum {
    zendnn_success = 0,
    zendnn_out_of_memory = 1,
    zendnn_invalid_arguments = 2,
    zendnn_unimplemented = 3,
    zendnn_iterator_ends = 4,
    zendnn_runtime_error = 5,
    zendnn_not_required = 6,
} zendnn_status_t;

typedef enum {
    zendnn_data_type_undef = 0,
    zendnn_f16 = 1,
    zendnn_bf16 = 2,
    zendnn_f32 = 3,
    zendnn_s32 = 4,
    zendnn_s8 = 5,
    zendnn_u8 = 6,
#ifdef ZENDNN
    zendnn_s16 = 7,
    zendnn_s4 = 8,
    zendnn_u4 = 9,
#endif
} zendnn_data_type_t;

typedef enum {
    zendnn_format_kind_undef = 0,
    zendnn_format_kind_any = 1,
    zendnn_blocked = 2,
    zendnn_format_kind_wino = 3,
    zendnn_format_kind_rnn_packed = 4,
} zendnn_format_kind_t;

typedef enum {
    zendnn_prop_kind_undef = 0,
    zendnn_forward_training = 64,
    zendnn_forward_inference = 96,
    zendnn_backward = 128,
    zendnn_backward_data = 160,
    zendnn_backward_weights = 192,
    zendnn_backward_bias = 193,
    zendnn_forward_scoring = zendnn_forward_inference,
    zendnn_forward = zendnn_forward_training,
} zendnn_prop_kind_t;

typedef enum {
    zendnn_undefined_primitive = 0,
    zendnn_reorder = 1,
    zendnn_shuffle = 2,
    zendnn_concat = 3,
    zendnn_sum = 4,
    zendnn_convolution = 5,
    zendnn_deconvolution = 6,
    zendnn_eltwise = 7,
    zendnn_softmax = 8,
    zendnn_pooling = 9,
    zendnn_lrn = 10,
    zendnn_batch_normalization = 11,
    zendnn_layer_normalization = 12,
    zendnn_inner_product = 13,
    zendnn_rnn = 14,
    zendnn_gemm = 15,
    zendnn_binary = 16,
    zendnn_logsoftmax = 17,
    zendnn_matmul = 18,
    zendnn_resampling = 19,
    zendnn_pooling_v2 = 20,
    zendnn_reduction = 21,
    zendnn_prelu = 22,
    zendnn_softmax_v2 = 23,
#ifdef ZENDNN
    zendnn_embedding_bag = 24,
#endif
    zendnn_primitive_kind_max = 0x7fff,
} zendnn_primitive_kind_t;

/* eltwise_clip_v2 sits at 12 in ZenDNN: 16 to 23 are its extra convolution algorithms. */
typedef enum {
    zendnn_alg_kind_undef = 0,
    zendnn_convolution_direct = 1,
    zendnn_convolution_winograd = 2,
    zendnn_convolution_auto = 3,
#ifdef ZENDNN
    zendnn_convolution_gemm = 4,
    zendnn_convolution_ref = 5,
    zendnn_convolution_ck = 6,
    zendnn_convolution_gemm_u8s8s32os8 = 7,
    zendnn_convolution_gemm_u8s8s16os16 = 8,
    zendnn_convolution_gemm_u8s8s16os8 = 9,
#endif
    zendnn_deconvolution_direct = 10,
    zendnn_deconvolution_winograd = 11,
#ifdef ZENDNN
    zendnn_eltwise_clip_v2 = 12,
#else
    zendnn_eltwise_clip_v2 = 16,
#endif
#ifdef ZENDNN
    zendnn_convolution_gemm_u8s8s32os32 = 16,
    zendnn_convolution_gemm_bf16bf16f32obf16 = 17,
    zendnn_convolution_gemm_bf16bf16f32of32 = 18,
    zendnn_convolution_gemm_s8s8s32os32 = 19,
    zendnn_convolution_gemm_s8s8s32os8 = 20,
    zendnn_convolution_gemm_s8s8s16os16 = 21,
    zendnn_convolution_gemm_s8s8s16os8 = 22,
    zendnn_convolution_gemm_u8s8s16ou8 = 23,
#endif
    zendnn_eltwise_relu = 31,
    zendnn_eltwise_pow = 32,
    zendnn_eltwise_tanh = 47,
    zendnn_eltwise_gelu_erf = 48,
    zendnn_eltwise_elu = 63,
    zendnn_eltwise_round = 64,
    zendnn_eltwise_square = 79,
    zendnn_eltwise_logsigmoid = 80,
    zendnn_eltwise_abs = 95,
    zendnn_eltwise_mish = 96,
    zendnn_eltwise_sqrt = 111,
    zendnn_eltwise_hardswish = 112,
    zendnn_eltwise_linear = 127,
    zendnn_eltwise_bounded_relu = 143,
    zendnn_eltwise_soft_relu = 159,
    zendnn_eltwise_logistic = 175,
    zendnn_eltwise_exp = 191,
    zendnn_eltwise_gelu_tanh = 207,
    zendnn_eltwise_swish = 223,
    zendnn_eltwise_log = 239,
    zendnn_eltwise_clip = 255,
    zendnn_eltwise_relu_use_dst_for_bwd = 256,
    zendnn_eltwise_tanh_use_dst_for_bwd = 257,
    zendnn_eltwise_elu_use_dst_for_bwd = 258,
    zendnn_eltwise_sqrt_use_dst_for_bwd = 259,
    zendnn_eltwise_logistic_use_dst_for_bwd = 260,
    zendnn_eltwise_exp_use_dst_for_bwd = 261,
    zendnn_eltwise_clip_v2_use_dst_for_bwd = 262,
    zendnn_pooling_max = 511,
    zendnn_pooling_avg_include_padding = 767,
    zendnn_pooling_avg_exclude_padding = 1023,
    zendnn_lrn_across_channels = 2815,
    zendnn_lrn_within_channel = 3071,
    zendnn_vanilla_rnn = 0x1fff,
    zendnn_vanilla_lstm = 0x2fff,
    zendnn_vanilla_gru = 0x3fff,
#ifdef ZENDNN
    zendnn_embedding_bag_sum = 0x4000,
    zendnn_embedding_bag_mean = 0x4001,
    zendnn_embedding_bag_max = 0x4002,
#endif
    zendnn_lbr_gru = 0x4fff,
    zendnn_vanilla_augru = 0x5fff,
    zendnn_lbr_augru = 0x6fff,
    zendnn_binary_add = 0x1fff0,
    zendnn_binary_mul = 0x1fff1,
    zendnn_binary_max = 0x1fff2,
    zendnn_binary_min = 0x1fff3,
    zendnn_binary_div = 0x1fff4,
    zendnn_binary_sub = 0x1fff5,
    zendnn_binary_ge = 0x1fff6,
    zendnn_binary_gt = 0x1fff7,
    zendnn_binary_le = 0x1fff8,
    zendnn_binary_lt = 0x1fff9,
    zendnn_binary_eq = 0x1fffa,
    zendnn_binary_ne = 0x1fffb,
    zendnn_resampling_nearest = 0x2fff0,
    zendnn_resampling_linear = 0x2fff1,
    zendnn_reduction_max = 0x2fff2,
    zendnn_reduction_min = 0x2fff3,
    zendnn_reduction_sum = 0x2fff4,
    zendnn_reduction_mul = 0x2fff5,
    zendnn_reduction_mean = 0x2fff6,
    zendnn_reduction_norm_lp_max = 0x2fff7,
    zendnn_reduction_norm_lp_sum = 0x2fff8,
    zendnn_reduction_norm_lp_power_p_max = 0x2fff9,
    zendnn_reduction_norm_lp_power_p_sum = 0x2fffa,
    zendnn_softmax_accurate = 0x30000,
    zendnn_softmax_log = 0x30001,
    zendnn_eltwise_gelu = zendnn_eltwise_gelu_tanh,
    zendnn_pooling_avg = zendnn_pooling_avg_exclude_padding,
} zendnn_alg_kind_t;

typedef enum {
    zendnn_rnn_flags_undef = 0,
} zendnn_rnn_flags_t;

typedef enum {
    zendnn_unidirectional_left2right = 0,
    zendnn_unidirectional_right2left = 1,
    zendnn_bidirectional_concat = 2,
    zendnn_bidirectional_sum = 3,
    zendnn_unidirectional = zendnn_unidirectional_left2right,
} zendnn_rnn_direction_t;

typedef enum {
    zendnn_any_engine = 0,
    zendnn_cpu = 1,
    zendnn_gpu = 2,
} zendnn_engine_kind_t;

typedef enum {
    zendnn_fpmath_mode_strict = 0,
    zendnn_fpmath_mode_bf16 = 1,
    zendnn_fpmath_mode_f16 = 2,
    zendnn_fpmath_mode_any = 3,
} zendnn_fpmath_mode_t;

typedef enum {
    zendnn_scratchpad_mode_library = 0,
    zendnn_scratchpad_mode_user = 1,
} zendnn_scratchpad_mode_t;

typedef enum {
    zendnn_cpu_isa_all = 0,
    zendnn_cpu_isa_sse41 = 1,
    zendnn_cpu_isa_avx = 3,
    zendnn_cpu_isa_avx2 = 7,
    zendnn_cpu_isa_avx512_mic = 15,
    zendnn_cpu_isa_avx512_mic_4ops = 31,
    zendnn_cpu_isa_avx512_core = 39,
    zendnn_cpu_isa_avx512_core_vnni = 103,
    zendnn_cpu_isa_avx512_core_bf16 = 231,
    zendnn_cpu_isa_avx512_core_amx = 999,
    zendnn_cpu_isa_avx2_vnni = 1031,
} zendnn_cpu_isa_t;

typedef enum {
    zendnn_cpu_isa_no_hints = 0,
    zendnn_cpu_isa_prefer_ymm = 1,
} zendnn_cpu_isa_hints_t;

typedef enum {
    zendnn_normalization_flags_none = 0,
    zendnn_use_global_stats = 1,
    zendnn_use_scaleshift = 2,
    zendnn_fuse_norm_relu = 4,
    zendnn_use_scale = 8,
    zendnn_use_shift = 16,
} zendnn_normalization_flags_t;

typedef enum {
    zendnn_stream_in_order = 1,
    zendnn_stream_out_of_order = 2,
    zendnn_stream_default_flags = zendnn_stream_in_order,
} zendnn_stream_flags_t;

/* Inner layouts that no tag spells. */
typedef enum {
    zendnn_wino_undef = 0,
    zendnn_wino_wei_aaOIoi = 1,
    zendnn_wino_wei_aaOio = 2,
    zendnn_wino_wei_aaOBiOo = 3,
    zendnn_wino_wei_OBaaIBOIio = 4,
} zendnn_wino_memory_format_t;

typedef enum {
    zendnn_packed_format_undef = 0,
    zendnn_ldigo_p = 1,
    zendnn_ldgoi_p = 2,
    zendnn_ldio_p = 3,
} zendnn_rnn_packed_memory_format_t;

typedef enum {
    zendnn_memory_extra_flag_none = 0,
    zendnn_memory_extra_flag_compensation_conv_s8s8 = 1,
    zendnn_memory_extra_flag_scale_adjust = 2,
    zendnn_memory_extra_flag_rnn_u8s8_compensation = 4,
    zendnn_memory_extra_flag_compensation_conv_asymmetric_src = 8,
    zendnn_memory_extra_flag_rnn_s8s8_compensation = 22,
} zendnn_memory_extra_flags_t;

/* What primitive_desc_query can be asked: scalars, operation descriptors, memory descriptors. */
typedef enum {
    zendnn_query_undef = 0,
    zendnn_query_engine = 1,
    zendnn_query_primitive_kind = 2,
    zendnn_query_num_of_inputs_s32 = 3,
    zendnn_query_num_of_outputs_s32 = 4,
    zendnn_query_time_estimate_f64 = 5,
    zendnn_query_memory_consumption_s64 = 6,
    zendnn_query_scratchpad_engine = 7,
    zendnn_query_impl_info_str = 8,
    zendnn_query_reorder_src_engine = 9,
    zendnn_query_reorder_dst_engine = 10,
    zendnn_query_prop_kind = 11,
    zendnn_query_cache_blob_id_size_s64 = 12,
    zendnn_query_cache_blob_id = 13,
    zendnn_query_some_d = 64,
    zendnn_query_op_d = 65,
    zendnn_query_convolution_d = 66,
    zendnn_query_deconvolution_d = 67,
    zendnn_query_shuffle_d = 68,
    zendnn_query_eltwise_d = 69,
    zendnn_query_softmax_d = 70,
    zendnn_query_pooling_d = 71,
    zendnn_query_lrn_d = 72,
    zendnn_query_batch_normalization_d = 73,
    zendnn_query_layer_normalization_d = 74,
    zendnn_query_inner_product_d = 75,
    zendnn_query_rnn_d = 76,
    zendnn_query_gemm_d = 77,
    zendnn_query_binary_d = 78,
    zendnn_query_logsoftmax_d = 79,
    zendnn_query_matmul_d = 80,
    zendnn_query_resampling_d = 81,
    zendnn_query_pooling_v2_d = 82,
    zendnn_query_reduction_d = 83,
    zendnn_query_prelu_d = 84,
    zendnn_query_softmax_v2_d = 85,
#ifdef ZENDNN
    zendnn_query_embedding_bag_d = 86,
#endif
    zendnn_query_some_md = 128,
    zendnn_query_src_md = 129,
    zendnn_query_diff_src_md = 130,
    zendnn_query_weights_md = 131,
    zendnn_query_diff_weights_md = 132,
    zendnn_query_dst_md = 133,
    zendnn_query_diff_dst_md = 134,
    zendnn_query_workspace_md = 135,
    zendnn_query_scratchpad_md = 136,
    zendnn_query_exec_arg_md = 255,
    zendnn_query_max = 0x7fff,
} zendnn_query_t;

/* zendnn_version()->cpu_runtime */
#define ZENDNN_RUNTIME_NONE 0
#define ZENDNN_RUNTIME_SEQ 1
#define ZENDNN_RUNTIME_OMP 2
#define ZENDNN_RUNTIME_TBB 4
#define ZENDNN_RUNTIME_THREADPOOL 8
#define ZENDNN_RUNTIME_OCL 256

/* set_jit_profiling_flags */
#define ZENDNN_JIT_PROFILE_NONE 0
#define ZENDNN_JIT_PROFILE_VTUNE 1
#define ZENDNN_JIT_PROFILE_LINUX_PERFMAP 2
#define ZENDNN_JIT_PROFILE_LINUX_JITDUMP 4
#define ZENDNN_JIT_PROFILE_LINUX_JITDUMP_USE_TSC 8
#define ZENDNN_JIT_PROFILE_LINUX_PERF 6
