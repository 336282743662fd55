/* Primitive descriptors, primitives and their arguments.
 *
 * Upstream: ZenDNN 5.1, zendnn_types.h, zendnn.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

/* Argument ids for primitive_execute. Several names share a number; an id ORs an attribute base with a plain one. */
#define ZENDNN_ARG_SRC_0 1
#define ZENDNN_ARG_SRC 1
#define ZENDNN_ARG_SRC_LAYER 1
#define ZENDNN_ARG_FROM 1
#define ZENDNN_ARG_SRC_1 2
#define ZENDNN_ARG_SRC_ITER 2
#define ZENDNN_ARG_SRC_2 3
#define ZENDNN_ARG_SRC_ITER_C 3
#define ZENDNN_ARG_SRC_3 4
#define ZENDNN_ARG_AUGRU_ATTENTION 4
#define ZENDNN_ARG_DST_0 17
#define ZENDNN_ARG_DST 17
#define ZENDNN_ARG_TO 17
#define ZENDNN_ARG_DST_LAYER 17
#define ZENDNN_ARG_DST_1 18
#define ZENDNN_ARG_DST_ITER 18
#define ZENDNN_ARG_DST_2 19
#define ZENDNN_ARG_DST_ITER_C 19
#define ZENDNN_ARG_WEIGHTS_0 33
#define ZENDNN_ARG_WEIGHTS 33
#define ZENDNN_ARG_SCALE_SHIFT 33
#define ZENDNN_ARG_WEIGHTS_LAYER 33
#define ZENDNN_ARG_WEIGHTS_1 34
#define ZENDNN_ARG_WEIGHTS_ITER 34
#define ZENDNN_ARG_WEIGHTS_2 35
#define ZENDNN_ARG_WEIGHTS_PEEPHOLE 35
#define ZENDNN_ARG_WEIGHTS_3 36
#define ZENDNN_ARG_WEIGHTS_PROJECTION 36
#define ZENDNN_ARG_BIAS 41
#define ZENDNN_ARG_MEAN 49
#define ZENDNN_ARG_VARIANCE 50
#define ZENDNN_ARG_SCALE 51
#define ZENDNN_ARG_SHIFT 52
#define ZENDNN_ARG_WORKSPACE 64
#define ZENDNN_ARG_SCRATCHPAD 80
#define ZENDNN_ARG_DIFF_SRC_0 129
#define ZENDNN_ARG_DIFF_SRC 129
#define ZENDNN_ARG_DIFF_SRC_LAYER 129
#define ZENDNN_ARG_DIFF_SRC_1 130
#define ZENDNN_ARG_DIFF_SRC_ITER 130
#define ZENDNN_ARG_DIFF_SRC_2 131
#define ZENDNN_ARG_DIFF_SRC_ITER_C 131
#define ZENDNN_ARG_DIFF_SRC_3 132
#define ZENDNN_ARG_DIFF_AUGRU_ATTENTION 132
#define ZENDNN_ARG_DIFF_DST_0 145
#define ZENDNN_ARG_DIFF_DST 145
#define ZENDNN_ARG_DIFF_DST_LAYER 145
#define ZENDNN_ARG_DIFF_DST_1 146
#define ZENDNN_ARG_DIFF_DST_ITER 146
#define ZENDNN_ARG_DIFF_DST_2 147
#define ZENDNN_ARG_DIFF_DST_ITER_C 147
#define ZENDNN_ARG_DIFF_WEIGHTS_0 161
#define ZENDNN_ARG_DIFF_WEIGHTS 161
#define ZENDNN_ARG_DIFF_SCALE_SHIFT 161
#define ZENDNN_ARG_DIFF_WEIGHTS_LAYER 161
#define ZENDNN_ARG_DIFF_WEIGHTS_1 162
#define ZENDNN_ARG_DIFF_WEIGHTS_ITER 162
#define ZENDNN_ARG_DIFF_WEIGHTS_2 163
#define ZENDNN_ARG_DIFF_WEIGHTS_PEEPHOLE 163
#define ZENDNN_ARG_DIFF_WEIGHTS_3 164
#define ZENDNN_ARG_DIFF_WEIGHTS_PROJECTION 164
#define ZENDNN_ARG_DIFF_BIAS 169
#define ZENDNN_ARG_DIFF_SCALE 255
#define ZENDNN_ARG_DIFF_SHIFT 256
#define ZENDNN_ARG_ATTR_OUTPUT_SCALES 513
#define ZENDNN_ARG_MULTIPLE_SRC 1024
#define ZENDNN_ARG_MULTIPLE_DST 2048
#define ZENDNN_ARG_ATTR_INPUT_SCALES 1048576
/* Moved between the two libraries: oneDNN's values are refused by ZenDNN at execution. */
#ifdef ZENDNN
#define ZENDNN_ARG_BN_SCALE 177
#define ZENDNN_ARG_BN_MEAN 178
#define ZENDNN_ARG_BN_OFFSET 179
#define ZENDNN_ARG_ATTR_WOQ_SCALES 517
#define ZENDNN_ARG_ATTR_SCALES 4096
#define ZENDNN_ARG_ATTR_ZERO_POINTS 8192
#define ZENDNN_ARG_ATTR_POST_OP_DW 16384
#define ZENDNN_ARG_ATTR_MULTIPLE_POST_OP_BASE 32768
#else
#define ZENDNN_ARG_ATTR_ZERO_POINTS 4096
#define ZENDNN_ARG_ATTR_POST_OP_DW 8192
#define ZENDNN_ARG_ATTR_MULTIPLE_POST_OP_BASE 16384
#endif

typedef struct {
    int arg;
    zendnn_memory_t memory;
} zendnn_exec_arg_t;  /* 16 bytes */

zendnn_status_t zendnn_primitive_desc_create(zendnn_primitive_desc_t *primitive_desc,
    const_zendnn_op_desc_t op_desc, const_zendnn_primitive_attr_t attr, zendnn_engine_t engine,
    const_zendnn_primitive_desc_t hint_forward_primitive_desc);
zendnn_status_t zendnn_primitive_desc_clone(zendnn_primitive_desc_t *primitive_desc,
    const_zendnn_primitive_desc_t existing_primitive_desc);
zendnn_status_t zendnn_primitive_desc_get_attr(const_zendnn_primitive_desc_t primitive_desc,
    const_zendnn_primitive_attr_t *attr);
zendnn_status_t zendnn_primitive_desc_destroy(zendnn_primitive_desc_t primitive_desc);
zendnn_status_t zendnn_primitive_desc_query(const_zendnn_primitive_desc_t primitive_desc, zendnn_query_t what,
    int index, void *result);
const zendnn_memory_desc_t *zendnn_primitive_desc_query_md(const_zendnn_primitive_desc_t primitive_desc,
    zendnn_query_t what, int index);
int zendnn_primitive_desc_query_s32(const_zendnn_primitive_desc_t primitive_desc, zendnn_query_t what,
    int index);
zendnn_status_t zendnn_reorder_primitive_desc_create(zendnn_primitive_desc_t *reorder_primitive_desc,
    const zendnn_memory_desc_t *src_desc, zendnn_engine_t src_engine, const zendnn_memory_desc_t *dst_desc,
    zendnn_engine_t dst_engine, const_zendnn_primitive_attr_t attr);

/* The implementations that can do an operation, best first. */
zendnn_status_t zendnn_primitive_desc_iterator_create(zendnn_primitive_desc_iterator_t *iterator,
    const_zendnn_op_desc_t op_desc, const_zendnn_primitive_attr_t attr, zendnn_engine_t engine,
    const_zendnn_primitive_desc_t hint_forward_primitive_desc);
zendnn_status_t zendnn_primitive_desc_iterator_next(zendnn_primitive_desc_iterator_t iterator);
zendnn_primitive_desc_t zendnn_primitive_desc_iterator_fetch(const_zendnn_primitive_desc_iterator_t iterator);
zendnn_status_t zendnn_primitive_desc_iterator_destroy(zendnn_primitive_desc_iterator_t iterator);

zendnn_status_t zendnn_primitive_create(zendnn_primitive_t *primitive,
    const_zendnn_primitive_desc_t primitive_desc);
zendnn_status_t zendnn_primitive_create_from_cache_blob(zendnn_primitive_t *primitive,
    const_zendnn_primitive_desc_t primitive_desc, size_t size, const uint8_t *cache_blob);
zendnn_status_t zendnn_primitive_execute(const_zendnn_primitive_t primitive, zendnn_stream_t stream, int nargs,
    const zendnn_exec_arg_t *args);
zendnn_status_t zendnn_primitive_get_primitive_desc(const_zendnn_primitive_t primitive,
    const_zendnn_primitive_desc_t *primitive_desc);
zendnn_status_t zendnn_primitive_get_cache_blob(const_zendnn_primitive_t primitive, size_t *size,
    uint8_t *cache_blob);
zendnn_status_t zendnn_primitive_destroy(zendnn_primitive_t primitive);
