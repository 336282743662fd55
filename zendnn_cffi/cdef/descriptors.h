/* Operation descriptors: what a primitive is to compute.
 *
 * Upstream: ZenDNN 5.1, zendnn_types.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

/* Each starts with primitive_kind, and primitive_desc_create takes any of them. The library exports no *_desc_init for
 * deconvolution, pooling, normalization, lrn, prelu, reduction, resampling, shuffle and rnn: zero the struct and fill it.
 * Dilations are stored less one. */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, weights_desc, diff_weights_desc, bias_desc, diff_bias_desc,
        dst_desc, diff_dst_desc;
    zendnn_dims_t strides, dilates;
    zendnn_dims_t padding[2];
    zendnn_data_type_t accum_data_type;
#ifdef ZENDNN
    uint8_t reluFused, batchNormFused;
    zendnn_memory_desc_t batchNormScale_desc, batchNormMean_desc, batchNormOffset_desc;
#endif
} zendnn_convolution_desc_t;  /* 8152 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, weights_desc, diff_weights_desc, bias_desc, diff_bias_desc,
        dst_desc, diff_dst_desc;
    zendnn_dims_t strides, dilates;
    zendnn_dims_t padding[2];
    zendnn_data_type_t accum_data_type;
#ifdef ZENDNN
    uint8_t reluFused, batchNormFused;
    zendnn_memory_desc_t batchNormScale_desc, batchNormMean_desc, batchNormOffset_desc;
#endif
} zendnn_deconvolution_desc_t;  /* 8152 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, weights_desc, diff_weights_desc, bias_desc, diff_bias_desc,
        dst_desc, diff_dst_desc;
    zendnn_data_type_t accum_data_type;
} zendnn_inner_product_desc_t;  /* 5648 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_memory_desc_t src_desc, weights_desc, bias_desc, dst_desc;
    zendnn_data_type_t accum_data_type;
} zendnn_matmul_desc_t;  /* 2832 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t data_desc, diff_data_desc;
    float alpha, beta;
} zendnn_eltwise_desc_t;  /* 1432 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc[2];
    zendnn_memory_desc_t dst_desc;
} zendnn_binary_desc_t;  /* 2120 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc, diff_desc;
    int softmax_axis;
} zendnn_softmax_desc_t;  /* 1424 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc, diff_desc;
    int softmax_axis;
} zendnn_logsoftmax_desc_t;  /* 1424 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc;
    int softmax_axis;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t dst_desc, diff_dst_desc;
} zendnn_softmax_v2_desc_t;  /* 2832 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc, weights_desc, diff_data_desc, diff_weights_desc;
} zendnn_prelu_desc_t;  /* 2824 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, dst_desc, diff_dst_desc;
    zendnn_dims_t strides, kernel;
    zendnn_dims_t padding[2];
    zendnn_data_type_t accum_data_type;
} zendnn_pooling_desc_t;  /* 3224 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, dst_desc, diff_dst_desc;
    zendnn_dims_t strides, kernel;
    zendnn_dims_t padding[2];
    zendnn_data_type_t accum_data_type;
    zendnn_dims_t dilation;
} zendnn_pooling_v2_desc_t;  /* 3320 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t data_desc, diff_data_desc;
    zendnn_dim_t local_size;
    float lrn_alpha, lrn_beta, lrn_k;
} zendnn_lrn_desc_t;  /* 1448 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc, diff_data_desc, data_scaleshift_desc, diff_data_scaleshift_desc, stat_desc;
    float batch_norm_epsilon;
    unsigned flags;
} zendnn_batch_normalization_desc_t;  /* 3536 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc, diff_data_desc, data_scaleshift_desc, diff_data_scaleshift_desc, stat_desc;
    float layer_norm_epsilon;
    unsigned flags;
} zendnn_layer_normalization_desc_t;  /* 3536 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, dst_desc;
    float p, eps;
} zendnn_reduction_desc_t;  /* 1424 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t src_desc, diff_src_desc, dst_desc, diff_dst_desc;
    float factors[12];
} zendnn_resampling_desc_t;  /* 2880 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_memory_desc_t data_desc;
    int axis;
    zendnn_dim_t group_size;
} zendnn_shuffle_desc_t;  /* 728 bytes in ZenDNN */

typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t cell_kind;
    zendnn_rnn_direction_t direction;
    zendnn_memory_desc_t src_layer_desc, src_iter_desc, src_iter_c_desc, weights_layer_desc, weights_iter_desc,
        bias_desc, dst_layer_desc, dst_iter_desc, dst_iter_c_desc, weights_peephole_desc,
        weights_projection_desc, diff_src_layer_desc, diff_src_iter_desc, diff_src_iter_c_desc,
        diff_weights_layer_desc, diff_weights_iter_desc, diff_bias_desc, diff_dst_layer_desc,
        diff_dst_iter_desc, diff_dst_iter_c_desc, diff_weights_peephole_desc, diff_weights_projection_desc;
    unsigned flags;
    zendnn_alg_kind_t activation_kind;
    float alpha, beta;
} zendnn_rnn_desc_t;  /* 15520 bytes in ZenDNN */

#ifdef ZENDNN
typedef struct {
    zendnn_primitive_kind_t primitive_kind;
    zendnn_prop_kind_t prop_kind;
    zendnn_alg_kind_t alg_kind;
    zendnn_memory_desc_t input_desc, indices_desc, offsets_desc, weights_desc, dst_desc;
    int32_t padding_idx;
    uint8_t is_weights;
    int32_t num_threads;
    uint32_t scatter_offset, scatter_stride;
} zendnn_embedding_bag_desc_t;  /* 3560 bytes */
#endif
