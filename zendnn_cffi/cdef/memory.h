/* Memory descriptors and memory objects.
 *
 * Upstream: ZenDNN 5.1, zendnn_types.h, zendnn.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

typedef struct {
    zendnn_dims_t strides;
    int inner_nblks;
    zendnn_dims_t inner_blks, inner_idxs;
} zendnn_blocking_desc_t;  /* 296 bytes */

typedef struct {
    zendnn_wino_memory_format_t wino_format;
    int r, alpha, ic, oc, ic_block, oc_block, ic2_block, oc2_block;
    float adj_scale;
    size_t size;
} zendnn_wino_desc_t;  /* 48 bytes */

typedef struct {
    zendnn_rnn_packed_memory_format_t format;
    int n_parts, n, ldb;
    int parts[4];
    size_t part_pack_size[4];
    unsigned pack_part[4];
    size_t offset_compensation, size;
    char reserved[200];
} zendnn_rnn_packed_desc_t;  /* 296 bytes */

typedef struct {
    uint64_t flags;
    int compensation_mask;
    float scale_adjust;
    int asymm_compensation_mask;
    char reserved[60];
} zendnn_memory_extra_desc_t;  /* 80 bytes */

/* Which member counts is format_kind's to say. Upstream leaves the union without a name. */
typedef union {
    zendnn_blocking_desc_t blocking;
    zendnn_wino_desc_t wino_desc;
    zendnn_rnn_packed_desc_t rnn_packed_desc;
} zendnn_format_desc_u;  /* 296 bytes */

typedef struct {
    int ndims;
    zendnn_dims_t dims;
    zendnn_data_type_t data_type;
    zendnn_dims_t padded_dims, padded_offsets;
    zendnn_dim_t offset0;
    zendnn_format_kind_t format_kind;
    zendnn_format_desc_u format_desc;
    zendnn_memory_extra_desc_t extra;
#ifdef ZENDNN
    uint8_t is_memory_const, is_inplace;
#endif
} zendnn_memory_desc_t;  /* 704 bytes in ZenDNN */

#ifdef ZENDNN  /* the binary takes two more arguments than oneDNN: pass 0, 0 unless the buffer never changes */
zendnn_status_t zendnn_memory_desc_init_by_tag(zendnn_memory_desc_t *memory_desc, int ndims,
    const zendnn_dims_t dims, zendnn_data_type_t data_type, zendnn_format_tag_t tag, bool is_memory_const,
    bool is_inplace);
#else
zendnn_status_t zendnn_memory_desc_init_by_tag(zendnn_memory_desc_t *memory_desc, int ndims,
    const zendnn_dims_t dims, zendnn_data_type_t data_type, zendnn_format_tag_t tag);
#endif
#ifdef ZENDNN
zendnn_status_t zendnn_memory_desc_init_by_strides(zendnn_memory_desc_t *memory_desc, int ndims,
    const zendnn_dims_t dims, zendnn_data_type_t data_type, const zendnn_dims_t strides, bool is_memory_const,
    bool is_inplace);
#else
zendnn_status_t zendnn_memory_desc_init_by_strides(zendnn_memory_desc_t *memory_desc, int ndims,
    const zendnn_dims_t dims, zendnn_data_type_t data_type, const zendnn_dims_t strides);
#endif
zendnn_status_t zendnn_memory_desc_init_submemory(zendnn_memory_desc_t *memory_desc,
    const zendnn_memory_desc_t *parent_memory_desc, const zendnn_dims_t dims, const zendnn_dims_t offsets);
zendnn_status_t zendnn_memory_desc_reshape(zendnn_memory_desc_t *out_memory_desc,
    const zendnn_memory_desc_t *in_memory_desc, int ndims, const zendnn_dims_t dims);
zendnn_status_t zendnn_memory_desc_permute_axes(zendnn_memory_desc_t *out_memory_desc,
    const zendnn_memory_desc_t *in_memory_desc, const int *permutation);
int zendnn_memory_desc_equal(const zendnn_memory_desc_t *lhs, const zendnn_memory_desc_t *rhs);
size_t zendnn_memory_desc_get_size(const zendnn_memory_desc_t *memory_desc);
size_t zendnn_data_type_size(zendnn_data_type_t data_type);

zendnn_status_t zendnn_memory_create(zendnn_memory_t *memory, const zendnn_memory_desc_t *memory_desc,
    zendnn_engine_t engine, void *handle);
zendnn_status_t zendnn_memory_destroy(zendnn_memory_t memory);
zendnn_status_t zendnn_memory_get_memory_desc(const_zendnn_memory_t memory,
    const zendnn_memory_desc_t **memory_desc);
zendnn_status_t zendnn_memory_get_engine(const_zendnn_memory_t memory, zendnn_engine_t *engine);
zendnn_status_t zendnn_memory_get_data_handle(const_zendnn_memory_t memory, void **handle);
zendnn_status_t zendnn_memory_set_data_handle(zendnn_memory_t memory, void *handle);
zendnn_status_t zendnn_memory_set_data_handle_v2(zendnn_memory_t memory, void *handle, zendnn_stream_t stream);
zendnn_status_t zendnn_memory_map_data(const_zendnn_memory_t memory, void **mapped_ptr);
zendnn_status_t zendnn_memory_unmap_data(const_zendnn_memory_t memory, void *mapped_ptr);
/* Exported, in no public header. */
zendnn_status_t zendnn_impl_zero_pad(const_zendnn_memory_t memory, zendnn_stream_t stream);
