/* Names of enumerators, as the library spells them.
 *
 * Upstream: ZenDNN 5.1, zendnn_debug.h. Our own declarations for cffi's ABI mode, from facts of the
 * C API; the binary is checked against them on loading. `zendnn_` is a prefix the generator replaces: with `dnnl_`
 * this is oneDNN 2.6, and every difference between the two stands here once, under #ifdef ZENDNN. See build_ffi.py.
 */

const char *zendnn_alg_kind2str(zendnn_alg_kind_t v);
const char *zendnn_cpu_isa2str(zendnn_cpu_isa_t v);
const char *zendnn_cpu_isa_hints2str(zendnn_cpu_isa_hints_t v);
const char *zendnn_dt2str(zendnn_data_type_t v);
const char *zendnn_engine_kind2str(zendnn_engine_kind_t v);
const char *zendnn_fmt_kind2str(zendnn_format_kind_t v);
const char *zendnn_fmt_tag2str(zendnn_format_tag_t v);
const char *zendnn_fpmath_mode2str(zendnn_fpmath_mode_t v);
const char *zendnn_prim_kind2str(zendnn_primitive_kind_t v);
const char *zendnn_prop_kind2str(zendnn_prop_kind_t v);
const char *zendnn_rnn_direction2str(zendnn_rnn_direction_t v);
const char *zendnn_rnn_flags2str(zendnn_rnn_flags_t v);
const char *zendnn_runtime2str(unsigned v);
const char *zendnn_scratchpad_mode2str(zendnn_scratchpad_mode_t v);
const char *zendnn_status2str(zendnn_status_t v);
