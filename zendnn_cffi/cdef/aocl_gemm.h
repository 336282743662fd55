/* AOCL-BLIS low precision gemm (LPGEMM): the aocl_gemm addon.
 *
 * Declarations for cffi's ABI mode: facts of amd/blis addon/aocl_gemm as linked in ZenDNN 5.1, checked
 * on the binary. bf16 is uint16_t bits.
 */

#define AOCL_MAX_POST_OPS 8
#define AOCL_MAX_PRE_OPS 1

typedef enum {
    RELU = 0,
    PRELU = 1,
    GELU_TANH = 2,
    GELU_ERF = 3,
    CLIP = 4,
    SWISH = 5,
    TANH = 6,
    SIGMOID = 7,
} AOCL_ELT_ALGO_TYPE;

typedef enum {
    SUM = 1,
    ELTWISE = 2,
    BIAS = 3,
    SCALE = 4,
    MATRIX_ADD = 5,
    MATRIX_MUL = 6,
} AOCL_POST_OP_TYPE;

typedef enum {
    AOCL_GEMM_F32 = 0,
    AOCL_GEMM_BF16 = 1,
    AOCL_GEMM_INT8 = 2,
    AOCL_GEMM_UINT8 = 3,
    AOCL_GEMM_INT4 = 4,
    AOCL_GEMM_INT32 = 5,
    NULLTYPE = 6,
} AOCL_PARAMS_STORAGE_TYPES;

/* Parameters are pointers to one float: PRELU and SWISH read *alpha, CLIP *alpha and *beta. */
typedef struct {
    void *alpha;
    void *beta;
    AOCL_ELT_ALGO_TYPE algo_type;
} aocl_eltwise_algo;  /* 24 bytes */

/* Also SCALE: result = acc * scale_factor + zero_point, lengths 1 or N each, both given. */
typedef struct {
    uint8_t is_power_of_2;
    void *scale_factor;
    void *buff;
    void *zero_point;
    dim_t scale_factor_len;
    dim_t zero_point_len;
    AOCL_PARAMS_STORAGE_TYPES zp_stor_type;
    AOCL_PARAMS_STORAGE_TYPES sf_stor_type;
} aocl_post_op_sum;  /* 56 bytes */

typedef struct {
    uint8_t is_power_of_2;
    void *scale_factor;
    dim_t scale_factor_len;
    aocl_eltwise_algo algo;
} aocl_post_op_eltwise;  /* 48 bytes */

/* N values. Before SCALE in accumulator units, after it in real units. */
typedef struct {
    void *bias;
    AOCL_PARAMS_STORAGE_TYPES stor_type;
} aocl_post_op_bias;  /* 16 bytes */

/* ldm is the row stride in elements; scale_factor of length 1 or N must be given. */
typedef struct {
    void *matrix;
    void *scale_factor;
    dim_t scale_factor_len;
    dim_t ldm;
    AOCL_PARAMS_STORAGE_TYPES stor_type;
} aocl_post_op_matrix_add;  /* 40 bytes */

typedef struct {
    void *matrix;
    void *scale_factor;
    dim_t scale_factor_len;
    dim_t ldm;
    AOCL_PARAMS_STORAGE_TYPES stor_type;
} aocl_post_op_matrix_mul;  /* 40 bytes */

typedef struct {
    void *zero_point;
    dim_t zero_point_len;
    AOCL_PARAMS_STORAGE_TYPES zero_point_type;
} aocl_pre_op_zp;  /* 24 bytes */

typedef struct {
    void *scale_factor;
    dim_t scale_factor_len;
    AOCL_PARAMS_STORAGE_TYPES scale_factor_type;
} aocl_pre_op_sf;  /* 24 bytes */

/* For s4 weights: scales [K / group_size, N] and optional zero points. */
typedef struct {
    aocl_pre_op_zp *b_zp;
    aocl_pre_op_sf *b_scl;
    dim_t seq_length;
    dim_t group_size;
} aocl_pre_op;  /* 32 bytes */

typedef struct {
    dim_t group_size;
    dim_t seq_length;
    aocl_pre_op_sf *a_scl;
    aocl_pre_op_sf *b_scl;
    aocl_pre_op_zp *a_zp;
    aocl_pre_op_zp *b_zp;
} aocl_group_post_op;  /* 48 bytes */

typedef struct {
    dim_t group_size;
} AOCL_SYMM_STAT_QUANT;  /* 8 bytes */

/* seq_vector orders the post-ops; each entry takes the next unused one of the array of its kind. 8 at most. */
typedef struct {
    aocl_post_op_sum *sum;
    aocl_post_op_eltwise *eltwise;
    aocl_post_op_bias *bias;
    aocl_post_op_matrix_add *matrix_add;
    aocl_post_op_matrix_mul *matrix_mul;
    dim_t seq_length;
    AOCL_POST_OP_TYPE *seq_vector;
    aocl_pre_op *pre_ops;
    aocl_group_post_op *post_op_grp;
    dim_t num_eltwise;
} aocl_post_op;  /* 80 bytes */

/* C = post_ops(alpha * A @ B + beta * C). order 'r' rows or 'c' columns, trans 'n' or 't', mem_format 'n' plain or
 * 'r' reordered (B only, rows only). All return void: a refused call prints on stderr and leaves C as it was. */
void aocl_batch_gemm_f32f32f32of32(const char *order, const char *transa, const char *transb, const dim_t *m,
    const dim_t *n, const dim_t *k, const float *alpha, const float **a, const dim_t *lda, const float **b,
    const dim_t *ldb, const float *beta, float **c, const dim_t *ldc, dim_t group_count,
    const dim_t *group_size, const char *mem_format_a, const char *mem_format_b, aocl_post_op **post_op);
void aocl_gemm_bf16bf16f32obf16(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, float alpha,
    const uint16_t *a, dim_t lda, char mem_format_a, const uint16_t *b, dim_t ldb, char mem_format_b,
    float beta, uint16_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_bf16bf16f32of32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, float alpha,
    const uint16_t *a, dim_t lda, char mem_format_a, const uint16_t *b, dim_t ldb, char mem_format_b,
    float beta, float *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_bf16s4f32obf16(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, float alpha,
    const uint16_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, float beta,
    uint16_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_bf16s4f32of32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, float alpha,
    const uint16_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, float beta,
    float *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_f32f32f32of32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, float alpha,
    const float *a, dim_t lda, char mem_format_a, const float *b, dim_t ldb, char mem_format_b, float beta,
    float *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_s8s8s32obf16(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const int8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    uint16_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_s8s8s32of32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const int8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    float *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_s8s8s32os32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const int8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    int32_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_s8s8s32os8(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const int8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    int8_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_s8s8s32ou8(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const int8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    uint8_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_u8s8s32obf16(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const uint8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    uint16_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_u8s8s32of32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const uint8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    float *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_u8s8s32os32(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const uint8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    int32_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_u8s8s32os8(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const uint8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    int8_t *c, dim_t ldc, aocl_post_op *post_op);
void aocl_gemm_u8s8s32ou8(char order, char transa, char transb, dim_t m, dim_t n, dim_t k, int32_t alpha,
    const uint8_t *a, dim_t lda, char mem_format_a, const int8_t *b, dim_t ldb, char mem_format_b, int32_t beta,
    uint8_t *c, dim_t ldc, aocl_post_op *post_op);

/* Reordered B: its size in bytes (mat_type 'B'), the reorder itself, and back. ldb is that of the plain matrix. */
size_t aocl_get_reorder_buf_size_bf16bf16f32of32(char order, char trans, char mat_type, dim_t k, dim_t n);
size_t aocl_get_reorder_buf_size_bf16s4f32of32(char order, char trans, char mat_type, dim_t k, dim_t n);
size_t aocl_get_reorder_buf_size_f32f32f32of32(char order, char trans, char mat_type, dim_t k, dim_t n);
size_t aocl_get_reorder_buf_size_s8s8s32os32(char order, char trans, char mat_type, dim_t k, dim_t n);
size_t aocl_get_reorder_buf_size_s8s8s32os32_sym_quant(char order, char trans, char mat_type, dim_t k, dim_t n,
    AOCL_SYMM_STAT_QUANT *meta_data);
size_t aocl_get_reorder_buf_size_u8s8s32os32(char order, char trans, char mat_type, dim_t k, dim_t n);
void aocl_reorder_bf16bf16f32of32(char order, char trans, char mat_type, const uint16_t *input,
    uint16_t *output, dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_bf16bf16f32of32_reference(char order, char trans, char mat_type, const uint16_t *input,
    uint16_t *output, dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_bf16s4f32of32(char order, char trans, char mat_type, const int8_t *input, int8_t *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_f32f32f32of32(char order, char trans, char mat_type, const float *input, float *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_f32f32f32of32_reference(char order, char trans, char mat_type, const float *input,
    float *output, dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_f32obf16(char order, char trans, char mat_type, const float *input, uint16_t *output, dim_t k,
    dim_t n, dim_t ldb);
void aocl_reorder_s8s8s32os32(char order, char trans, char mat_type, const int8_t *input, int8_t *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_reorder_s8s8s32os32_sym_quant(char order, char trans, char mat_type, const int8_t *input,
    int8_t *output, dim_t k, dim_t n, dim_t ldb, AOCL_SYMM_STAT_QUANT *meta_data);
void aocl_reorder_u8s8s32os32(char order, char trans, char mat_type, const int8_t *input, int8_t *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_unreorder_bf16bf16f32of32(char order, char mat_type, const uint16_t *reordered, uint16_t *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_unreorder_bf16bf16f32of32_reference(char order, char mat_type, const uint16_t *reordered,
    uint16_t *output, dim_t k, dim_t n, dim_t ldb);
void aocl_unreorder_f32f32f32of32_reference(char order, char mat_type, const float *reordered, float *output,
    dim_t k, dim_t n, dim_t ldb);
void aocl_unreorder_s8s8s32os32_reference(char order, char mat_type, const int8_t *reordered, int8_t *output,
    dim_t k, dim_t n, dim_t ldb);

/* In place on n values. softmax returns x / sum(exp(x)), which is not softmax: not used by us. */
void aocl_gemm_gelu_erf_f32(dim_t n, float *x, dim_t incx);
void aocl_gemm_gelu_tanh_f32(dim_t n, float *x, dim_t incx);
void aocl_gemm_softmax_f32(dim_t n, float *x, dim_t incx);
