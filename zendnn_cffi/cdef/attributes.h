/* Primitive attributes and post-ops.
 *
 * Upstream: ZenDNN 5.1, zendnn.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

/* Attributes: scratchpad mode, scales and zero points, post-ops. */
zendnn_status_t zendnn_primitive_attr_create(zendnn_primitive_attr_t *attr);
zendnn_status_t zendnn_primitive_attr_clone(zendnn_primitive_attr_t *attr,
    const_zendnn_primitive_attr_t existing_attr);
zendnn_status_t zendnn_primitive_attr_destroy(zendnn_primitive_attr_t attr);
zendnn_status_t zendnn_primitive_attr_get_fpmath_mode(const_zendnn_primitive_attr_t attr,
    zendnn_fpmath_mode_t *mode);
zendnn_status_t zendnn_primitive_attr_get_output_scales(const_zendnn_primitive_attr_t attr, zendnn_dim_t *count,
    int *mask, const float **scales);
zendnn_status_t zendnn_primitive_attr_get_post_ops(const_zendnn_primitive_attr_t attr,
    const_zendnn_post_ops_t *post_ops);
zendnn_status_t zendnn_primitive_attr_get_rnn_data_qparams(const_zendnn_primitive_attr_t attr, float *scale,
    float *shift);
zendnn_status_t zendnn_primitive_attr_get_rnn_weights_projection_qparams(const_zendnn_primitive_attr_t attr,
    zendnn_dim_t *count, int *mask, const float **scales);
zendnn_status_t zendnn_primitive_attr_get_rnn_weights_qparams(const_zendnn_primitive_attr_t attr,
    zendnn_dim_t *count, int *mask, const float **scales);
zendnn_status_t zendnn_primitive_attr_get_scales(zendnn_primitive_attr_t attr, int arg, zendnn_dim_t *count,
    int *mask, const float **scales);
zendnn_status_t zendnn_primitive_attr_get_scratchpad_mode(const_zendnn_primitive_attr_t attr,
    zendnn_scratchpad_mode_t *mode);
zendnn_status_t zendnn_primitive_attr_get_zero_points(const_zendnn_primitive_attr_t attr, int arg,
    zendnn_dim_t *count, int *mask, const int32_t **zero_points);
#ifdef ZENDNN
zendnn_status_t zendnn_primitive_attr_set_autoTunerEnable(zendnn_primitive_attr_t attr, bool autoTunerFlag);
#endif
zendnn_status_t zendnn_primitive_attr_set_fpmath_mode(zendnn_primitive_attr_t attr, zendnn_fpmath_mode_t mode);
zendnn_status_t zendnn_primitive_attr_set_output_scales(zendnn_primitive_attr_t attr, zendnn_dim_t count,
    int mask, const float *scales);
#ifdef ZENDNN
/* A C++ std::string by value, that is a pointer to a 32-byte libstdc++ object. A char * kills the process. */
zendnn_status_t zendnn_primitive_attr_set_plugin_op_name(zendnn_primitive_attr_t attr, void *plugin_op_name);
#endif
zendnn_status_t zendnn_primitive_attr_set_post_ops(zendnn_primitive_attr_t attr,
    const_zendnn_post_ops_t post_ops);
zendnn_status_t zendnn_primitive_attr_set_rnn_data_qparams(zendnn_primitive_attr_t attr, const float scale,
    const float shift);
zendnn_status_t zendnn_primitive_attr_set_rnn_weights_projection_qparams(zendnn_primitive_attr_t attr,
    zendnn_dim_t count, int mask, const float *scales);
zendnn_status_t zendnn_primitive_attr_set_rnn_weights_qparams(zendnn_primitive_attr_t attr, zendnn_dim_t count,
    int mask, const float *scales);
zendnn_status_t zendnn_primitive_attr_set_scales(zendnn_primitive_attr_t attr, int arg, zendnn_dim_t count,
    int mask, const float *scales);
#ifdef ZENDNN
zendnn_status_t zendnn_primitive_attr_set_scales_mask(zendnn_primitive_attr_t attr, int arg, int mask,
    int ndims, const zendnn_dims_t group_dims, zendnn_data_type_t data_type);
#endif
zendnn_status_t zendnn_primitive_attr_set_scratchpad_mode(zendnn_primitive_attr_t attr,
    zendnn_scratchpad_mode_t mode);
#ifdef ZENDNN
zendnn_status_t zendnn_primitive_attr_set_woq_weight_scale(zendnn_primitive_attr_t attr, int mask, int ndims,
    const zendnn_dims_t group_dims, zendnn_data_type_t data_type);
#endif
zendnn_status_t zendnn_primitive_attr_set_zero_points(zendnn_primitive_attr_t attr, int arg, zendnn_dim_t count,
    int mask, const int32_t *zero_points);

/* Post-ops: applied to the result in the order in which they were appended, 32 at most. */
zendnn_status_t zendnn_post_ops_create(zendnn_post_ops_t *post_ops);
zendnn_status_t zendnn_post_ops_destroy(zendnn_post_ops_t post_ops);
int zendnn_post_ops_len(const_zendnn_post_ops_t post_ops);
zendnn_primitive_kind_t zendnn_post_ops_get_kind(const_zendnn_post_ops_t post_ops, int index);
zendnn_status_t zendnn_post_ops_append_binary(zendnn_post_ops_t post_ops, zendnn_alg_kind_t alg_kind,
    const zendnn_memory_desc_t *src1_desc);
#ifdef ZENDNN
zendnn_status_t zendnn_post_ops_append_dw(zendnn_post_ops_t post_ops, zendnn_data_type_t weights_data_type,
    zendnn_data_type_t bias_data_type, zendnn_data_type_t dst_data_type, zendnn_dim_t kernel_size,
    zendnn_dim_t stride_size, zendnn_dim_t padding_l_size, zendnn_dim_t count, int mask, const float *scales);
#endif
zendnn_status_t zendnn_post_ops_append_dw_k3s1p1(zendnn_post_ops_t post_ops,
    zendnn_data_type_t weights_data_type, zendnn_data_type_t bias_data_type, zendnn_data_type_t dst_data_type,
    zendnn_dim_t count, int mask, const float *scales);
zendnn_status_t zendnn_post_ops_append_dw_k3s2p1(zendnn_post_ops_t post_ops,
    zendnn_data_type_t weights_data_type, zendnn_data_type_t bias_data_type, zendnn_data_type_t dst_data_type,
    zendnn_dim_t count, int mask, const float *scales);
zendnn_status_t zendnn_post_ops_append_eltwise(zendnn_post_ops_t post_ops, float scale,
    zendnn_alg_kind_t alg_kind, float alpha, float beta);
zendnn_status_t zendnn_post_ops_append_prelu(zendnn_post_ops_t post_ops, int mask);
zendnn_status_t zendnn_post_ops_append_sum(zendnn_post_ops_t post_ops, float scale);
zendnn_status_t zendnn_post_ops_append_sum_v2(zendnn_post_ops_t post_ops, float scale,
    zendnn_data_type_t data_type);
zendnn_status_t zendnn_post_ops_append_sum_v3(zendnn_post_ops_t post_ops, float scale, int32_t zero_point,
    zendnn_data_type_t data_type);
zendnn_status_t zendnn_post_ops_get_params_binary(const_zendnn_post_ops_t post_ops, int index,
    zendnn_alg_kind_t *alg_kind, const zendnn_memory_desc_t **src1_desc);
#ifdef ZENDNN
zendnn_status_t zendnn_post_ops_get_params_dw(const_zendnn_post_ops_t post_ops, int index,
    zendnn_data_type_t *weights_data_type, zendnn_data_type_t *bias_data_type,
    zendnn_data_type_t *dst_data_type, zendnn_dim_t *kernel_size, zendnn_dim_t *stride_size,
    zendnn_dim_t *padding_l_size, zendnn_dim_t *count, int *mask, const float **scales);
#endif
zendnn_status_t zendnn_post_ops_get_params_dw_k3s1p1(const_zendnn_post_ops_t post_ops, int index,
    zendnn_data_type_t *weights_data_type, zendnn_data_type_t *bias_data_type,
    zendnn_data_type_t *dst_data_type, zendnn_dim_t *count, int *mask, const float **scales);
zendnn_status_t zendnn_post_ops_get_params_dw_k3s2p1(const_zendnn_post_ops_t post_ops, int index,
    zendnn_data_type_t *weights_data_type, zendnn_data_type_t *bias_data_type,
    zendnn_data_type_t *dst_data_type, zendnn_dim_t *count, int *mask, const float **scales);
zendnn_status_t zendnn_post_ops_get_params_eltwise(const_zendnn_post_ops_t post_ops, int index, float *scale,
    zendnn_alg_kind_t *alg_kind, float *alpha, float *beta);
zendnn_status_t zendnn_post_ops_get_params_prelu(const_zendnn_post_ops_t post_ops, int index, int *mask);
zendnn_status_t zendnn_post_ops_get_params_sum(const_zendnn_post_ops_t post_ops, int index, float *scale);
zendnn_status_t zendnn_post_ops_get_params_sum_v2(const_zendnn_post_ops_t post_ops, int index, float *scale,
    zendnn_data_type_t *data_type);
zendnn_status_t zendnn_post_ops_get_params_sum_v3(const_zendnn_post_ops_t post_ops, int index, float *scale,
    int32_t *zero_point, zendnn_data_type_t *data_type);
