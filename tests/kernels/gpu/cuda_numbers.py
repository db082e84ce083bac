"""CUDA's functions on numbers, in C++ for the CPU: part of what `cuda_on_cpu` puts before a kernel.

Written from CUDA's documentation of each function. E4M3 is searched in the list of its numbers, so
that nothing here is computed the way a kernel computes it.
"""

NUMBERS = """
struct alignas(2) uchar2 { uchar x, y; };
struct alignas(4) uchar4 { uchar x, y, z, w; };
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }

static inline uint __vmaxu2(uint x, uint y) {
  return std::max(x >> 16, y >> 16) << 16 | std::max(x & 0xFFFF, y & 0xFFFF);
}
static inline uint __vminu2(uint x, uint y) {
  return std::min(x >> 16, y >> 16) << 16 | std::min(x & 0xFFFF, y & 0xFFFF);
}
static inline uint __byte_perm(uint x, uint y, uint selector) {
  const uint64_t bytes = (uint64_t)y << 32 | x;
  uint found = 0;
  for (int at = 0; at < 4; ++at)
    found |= (uint)(bytes >> (selector >> 4 * at & 7) * 8 & 0xFF) << 8 * at;
  return found;
}

struct fp8_e4_t { uchar bits; };
struct alignas(2) fp8_e4_2_t { fp8_e4_t items[2]; };
struct alignas(4) fp8_e4_4_t { fp8_e4_t items[4]; };
struct alignas(8) fp8_e4_8_t { fp8_e4_t items[8]; };
struct alignas(16) fp8_e4_16_t { fp8_e4_t items[16]; };
typedef ushort __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
static inline double e4m3_number(int code) {
  return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
}
static inline uint e4m3_code(float x) {
  const uint sign = std::signbit(x) ? 0x80 : 0;
  if (std::isnan(x)) return 0x7F;
  const double magnitude = std::fabs((double)x);
  uint code = 0;
  while (code < 0x7E && e4m3_number(code + 1) <= magnitude) ++code;
  if (code == 0x7E) return sign | code;
  const double middle = (e4m3_number(code) + e4m3_number(code + 1)) / 2;
  if (magnitude > middle || (magnitude == middle && code % 2)) ++code;
  return sign | code;
}
static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(
    float2 x, __nv_saturation_t, __nv_fp8_interpretation_t) {
  return e4m3_code(x.x) | e4m3_code(x.y) << 8;
}

struct bfloat16_t { ushort bits; };
struct alignas(4) __nv_bfloat162 { ushort x, y; };
static inline ushort bfloat16_bits(float x) {
  if (std::isnan(x)) return 0x7FFF;
  const uint bits = __float_as_uint(x), rest = bits & 0xFFFF, whole = bits >> 16;
  return whole + (rest > 0x8000 || (rest == 0x8000 && whole % 2));
}
static inline __nv_bfloat162 __float22bfloat162_rn(float2 x) {
  return {bfloat16_bits(x.x), bfloat16_bits(x.y)};
}
"""
