/* BLIS: set-up, information, and sgemm/dgemm in the two spellings builds come with.
 *
 * Declarations for cffi's ABI mode: facts of BLIS 0.7 (blis.h, typed API) and of AOCL-BLIS 5.1. No build exports all of
 * these: AOCL-BLIS linked into ZenDNN has *_blis_impl and not the typed bli_sgemm, plain BLIS the other way round. What
 * is absent is named when it is used. dim_t and inc_t are 64 bits wide in every x86-64 build.
 */

typedef int64_t dim_t;
typedef int64_t inc_t;

typedef enum {
    BLIS_NO_TRANSPOSE = 0x0,
    BLIS_TRANSPOSE = 0x8,
    BLIS_CONJ_NO_TRANSPOSE = 0x10,
    BLIS_CONJ_TRANSPOSE = 0x18,
} trans_t;

/* Set-up is automatic on the first call; both may be called any number of times. */
void bli_init(void);
void bli_finalize(void);

const char *bli_info_get_version_str(void);
dim_t bli_info_get_int_type_size(void);
dim_t bli_info_get_blas_int_type_size(void);
int bli_arch_query_id(void);
const char *bli_arch_string(int id);

void bli_thread_set_num_threads(dim_t n_threads);
dim_t bli_thread_get_num_threads(void);

/* C = alpha * op(A) @ op(B) + beta * C, each matrix with a row and a column stride in elements. */
void bli_sgemm(trans_t transa, trans_t transb, dim_t m, dim_t n, dim_t k, const float *alpha,
    const float *a, inc_t rs_a, inc_t cs_a, const float *b, inc_t rs_b, inc_t cs_b,
    const float *beta, float *c, inc_t rs_c, inc_t cs_c);
void bli_dgemm(trans_t transa, trans_t transb, dim_t m, dim_t n, dim_t k, const double *alpha,
    const double *a, inc_t rs_a, inc_t cs_a, const double *b, inc_t rs_b, inc_t cs_b,
    const double *beta, double *c, inc_t rs_c, inc_t cs_c);

/* The Fortran BLAS functions by their AOCL-BLIS names: column major, everything by address, LP64 integers. */
void sgemm_blis_impl(const char *transa, const char *transb, const int *m, const int *n, const int *k,
    const float *alpha, const float *a, const int *lda, const float *b, const int *ldb,
    const float *beta, float *c, const int *ldc);
void dgemm_blis_impl(const char *transa, const char *transb, const int *m, const int *n, const int *k,
    const double *alpha, const double *a, const int *lda, const double *b, const int *ldb,
    const double *beta, double *c, const int *ldc);
