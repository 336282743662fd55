/* Version, engines, streams, settings and gemm.
 *
 * Upstream: ZenDNN 5.1, zendnn.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

typedef struct {
    int major, minor, patch;
    const char *hash;
    unsigned cpu_runtime, gpu_runtime;
} zendnn_version_t;  /* 32 bytes */

const zendnn_version_t *zendnn_version(void);

/* Engines and streams. */
zendnn_status_t zendnn_engine_create(zendnn_engine_t *engine, zendnn_engine_kind_t kind, size_t index);
zendnn_status_t zendnn_engine_destroy(zendnn_engine_t engine);
size_t zendnn_engine_get_count(zendnn_engine_kind_t kind);
zendnn_status_t zendnn_engine_get_kind(zendnn_engine_t engine, zendnn_engine_kind_t *kind);
zendnn_status_t zendnn_stream_create(zendnn_stream_t *stream, zendnn_engine_t engine, unsigned flags);
zendnn_status_t zendnn_stream_destroy(zendnn_stream_t stream);
zendnn_status_t zendnn_stream_get_engine(const_zendnn_stream_t stream, zendnn_engine_t *engine);
zendnn_status_t zendnn_stream_wait(zendnn_stream_t stream);

/* Instruction sets. */
zendnn_cpu_isa_t zendnn_get_effective_cpu_isa(void);
zendnn_status_t zendnn_set_max_cpu_isa(zendnn_cpu_isa_t isa);
zendnn_cpu_isa_hints_t zendnn_get_cpu_isa_hints(void);
zendnn_status_t zendnn_set_cpu_isa_hints(zendnn_cpu_isa_hints_t isa_hints);

/* Process-wide settings. */
zendnn_status_t zendnn_get_primitive_cache_capacity(int *capacity);
zendnn_status_t zendnn_set_primitive_cache_capacity(int capacity);
zendnn_status_t zendnn_get_default_fpmath_mode(zendnn_fpmath_mode_t *mode);
zendnn_status_t zendnn_set_default_fpmath_mode(zendnn_fpmath_mode_t mode);
zendnn_status_t zendnn_set_verbose(int level);
zendnn_status_t zendnn_set_jit_dump(int enable);
zendnn_status_t zendnn_set_jit_profiling_flags(unsigned flags);
zendnn_status_t zendnn_set_jit_profiling_jitdumpdir(const char *dir);

/* Row-major gemm, trans letters N or T. */
zendnn_status_t zendnn_sgemm(char transa, char transb, zendnn_dim_t M, zendnn_dim_t N, zendnn_dim_t K,
    float alpha, const float *A, zendnn_dim_t lda, const float *B, zendnn_dim_t ldb, float beta, float *C,
    zendnn_dim_t ldc);
zendnn_status_t zendnn_gemm_u8s8s32(char transa, char transb, char offsetc, zendnn_dim_t M, zendnn_dim_t N,
    zendnn_dim_t K, float alpha, const uint8_t *A, zendnn_dim_t lda, uint8_t ao, const int8_t *B,
    zendnn_dim_t ldb, int8_t bo, float beta, int32_t *C, zendnn_dim_t ldc, const int32_t *co);
zendnn_status_t zendnn_gemm_s8s8s32(char transa, char transb, char offsetc, zendnn_dim_t M, zendnn_dim_t N,
    zendnn_dim_t K, float alpha, const int8_t *A, zendnn_dim_t lda, int8_t ao, const int8_t *B,
    zendnn_dim_t ldb, int8_t bo, float beta, int32_t *C, zendnn_dim_t ldc, const int32_t *co);
/* Exported, in no public header. */
zendnn_status_t zendnn_gemm_bf16bf16f32(char transa, char transb, zendnn_dim_t M, zendnn_dim_t N,
    zendnn_dim_t K, float alpha, const uint16_t *A, zendnn_dim_t lda, const uint16_t *B, zendnn_dim_t ldb,
    float beta, float *C, zendnn_dim_t ldc);
