/* The operation descriptor initialisers the library exports.
 *
 * Upstream: ZenDNN 5.1, zendnn.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

zendnn_status_t zendnn_convolution_forward_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_prop_kind_t prop_kind, zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *bias_desc,
    const zendnn_memory_desc_t *dst_desc, const zendnn_dims_t strides, const zendnn_dims_t padding_l,
    const zendnn_dims_t padding_r);
zendnn_status_t zendnn_dilated_convolution_forward_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_prop_kind_t prop_kind, zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *bias_desc,
    const zendnn_memory_desc_t *dst_desc, const zendnn_dims_t strides, const zendnn_dims_t dilates,
    const zendnn_dims_t padding_l, const zendnn_dims_t padding_r);
#ifdef ZENDNN
zendnn_status_t zendnn_fused_convolution_forward_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_prop_kind_t prop_kind, zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *bias_desc,
    const zendnn_memory_desc_t *dst_desc, const zendnn_dims_t strides, const zendnn_dims_t padding_l,
    const zendnn_dims_t padding_r, bool reluFused, bool batchNormFused,
    const zendnn_memory_desc_t *batchNormScale_desc, const zendnn_memory_desc_t *batchNormMean_desc,
    const zendnn_memory_desc_t *batchNormOffset_desc);
#endif
zendnn_status_t zendnn_convolution_backward_data_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *diff_src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *diff_dst_desc,
    const zendnn_dims_t strides, const zendnn_dims_t padding_l, const zendnn_dims_t padding_r);
zendnn_status_t zendnn_dilated_convolution_backward_data_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *diff_src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *diff_dst_desc,
    const zendnn_dims_t strides, const zendnn_dims_t dilates, const zendnn_dims_t padding_l,
    const zendnn_dims_t padding_r);
zendnn_status_t zendnn_convolution_backward_weights_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *diff_weights_desc, const zendnn_memory_desc_t *diff_bias_desc,
    const zendnn_memory_desc_t *diff_dst_desc, const zendnn_dims_t strides, const zendnn_dims_t padding_l,
    const zendnn_dims_t padding_r);
zendnn_status_t zendnn_dilated_convolution_backward_weights_desc_init(zendnn_convolution_desc_t *conv_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *diff_weights_desc, const zendnn_memory_desc_t *diff_bias_desc,
    const zendnn_memory_desc_t *diff_dst_desc, const zendnn_dims_t strides, const zendnn_dims_t dilates,
    const zendnn_dims_t padding_l, const zendnn_dims_t padding_r);
zendnn_status_t zendnn_inner_product_forward_desc_init(zendnn_inner_product_desc_t *ip_desc,
    zendnn_prop_kind_t prop_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *bias_desc,
    const zendnn_memory_desc_t *dst_desc);
zendnn_status_t zendnn_inner_product_backward_data_desc_init(zendnn_inner_product_desc_t *ip_desc,
    const zendnn_memory_desc_t *diff_src_desc, const zendnn_memory_desc_t *weights_desc,
    const zendnn_memory_desc_t *diff_dst_desc);
zendnn_status_t zendnn_inner_product_backward_weights_desc_init(zendnn_inner_product_desc_t *ip_desc,
    const zendnn_memory_desc_t *src_desc, const zendnn_memory_desc_t *diff_weights_desc,
    const zendnn_memory_desc_t *diff_bias_desc, const zendnn_memory_desc_t *diff_dst_desc);
zendnn_status_t zendnn_matmul_desc_init(zendnn_matmul_desc_t *matmul_desc, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *bias_desc,
    const zendnn_memory_desc_t *dst_desc);
zendnn_status_t zendnn_eltwise_forward_desc_init(zendnn_eltwise_desc_t *eltwise_desc,
    zendnn_prop_kind_t prop_kind, zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *data_desc,
    float alpha, float beta);
zendnn_status_t zendnn_eltwise_backward_desc_init(zendnn_eltwise_desc_t *eltwise_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *diff_data_desc,
    const zendnn_memory_desc_t *data_desc, float alpha, float beta);
zendnn_status_t zendnn_binary_desc_init(zendnn_binary_desc_t *binary_desc, zendnn_alg_kind_t alg_kind,
    const zendnn_memory_desc_t *src0_desc, const zendnn_memory_desc_t *src1_desc,
    const zendnn_memory_desc_t *dst_desc);
zendnn_status_t zendnn_softmax_forward_desc_init(zendnn_softmax_desc_t *softmax_desc,
    zendnn_prop_kind_t prop_kind, const zendnn_memory_desc_t *data_desc, int softmax_axis);
zendnn_status_t zendnn_softmax_backward_desc_init(zendnn_softmax_desc_t *softmax_desc,
    const zendnn_memory_desc_t *diff_data_desc, const zendnn_memory_desc_t *data_desc, int softmax_axis);
zendnn_status_t zendnn_logsoftmax_forward_desc_init(zendnn_logsoftmax_desc_t *logsoftmax_desc,
    zendnn_prop_kind_t prop_kind, const zendnn_memory_desc_t *data_desc, int logsoftmax_axis);
zendnn_status_t zendnn_logsoftmax_backward_desc_init(zendnn_logsoftmax_desc_t *logsoftmax_desc,
    const zendnn_memory_desc_t *diff_data_desc, const zendnn_memory_desc_t *data_desc, int logsoftmax_axis);
zendnn_status_t zendnn_softmax_v2_forward_desc_init(zendnn_softmax_v2_desc_t *softmax_desc,
    zendnn_prop_kind_t prop_kind, zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *src_desc,
    const zendnn_memory_desc_t *dst_desc, int softmax_axis);
zendnn_status_t zendnn_softmax_v2_backward_desc_init(zendnn_softmax_v2_desc_t *softmax_desc,
    zendnn_alg_kind_t alg_kind, const zendnn_memory_desc_t *diff_src_desc,
    const zendnn_memory_desc_t *diff_dst_desc, const zendnn_memory_desc_t *dst_desc, int softmax_axis);
#ifdef ZENDNN
zendnn_status_t zendnn_embedding_bag_desc_init(zendnn_embedding_bag_desc_t *desc, zendnn_prop_kind_t prop_kind,
    zendnn_alg_kind_t alg_kind, uint32_t num_threads, const zendnn_memory_desc_t *input_desc,
    const zendnn_memory_desc_t *indices_desc, const zendnn_memory_desc_t *offsets_desc,
    const zendnn_memory_desc_t *weights_desc, const zendnn_memory_desc_t *dst_desc, int32_t padding_idx,
    uint32_t scatter_stride, uint32_t scatter_offset);
#endif
