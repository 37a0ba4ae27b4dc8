// Dense layers, GELU and attention of a ViT in bf16 on a CPU with AVX512_BF16, and its dense layers in int8.
// cpu_library.py compiles it, cpu.py calls it.
//
// One instruction (vdpbf16ps) takes 16 pairs of bf16 from each side and adds the two products of every pair to one of 16
// fp32 sums. So throughout, the left matrix is read in its own layout, and one pair along the summed dimension is
// broadcast to all 16 lanes. The right matrix is packed before: the pairs of 16 columns are adjacent. Another instruction
// (vpdpbusd) does the same with four bytes for two bf16, unsigned on the left and signed on the right, with int32 sums.
// So a "pair" may hold four bytes. Sums do not depend on the number of threads.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace {

using bf16 = uint16_t;
using pair = uint32_t __attribute__((may_alias, aligned(2)));  // two bf16, the first in the lower half

constexpr long LANES = 16, ROWS = 6, PANEL = 64;
// 6 × 4 vectors of sums, 4 of the right matrix and one of the left use 29 of the 32 registers.

long blocks(long n, long size) { return (n + size - 1) / size; }
long up(long n, long size) { return blocks(n, size) * size; }

// --- products ---------------------------------------------------------------------------------------------------------

struct Left {
  const pair* at;
  long row, step;  // strides between rows and between pairs
  Left from(long r) const { return {at + r * row, row, step}; }
};

template <class T>
constexpr long EACH = sizeof(pair) / sizeof(T);  // elements in a pair: two bf16, or four bytes

template <class T>
Left rows_of(const T* x, long stride) {
  return {(const pair*)x, stride / EACH<T>, 1};
}

struct Right {
  const pair* at;
  long width;  // number of adjacent columns, the stride between pairs
  Right from(long column) const { return {at + column, width}; }
};

// Integer sums are __m512, too: GCC 12 would copy __m512i sums between registers and to memory in each step.
template <bool Integers>
__m512 add(__m512 sum, __m512i left, __m512i right) {
  if constexpr (!Integers) return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right);
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right));
  return sum;
}

template <int M, int V, class End>
inline void tile(Left a, Right b, long depth, long row, long column, const End& end) {
  __m512 sums[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[m][v] = end.begin(row + m, column + v * LANES);
  for (long k = 0; k < depth; ++k) {
    __m512i right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = _mm512_loadu_si512(b.at + k * b.width + v * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512i left = _mm512_set1_epi32(a.at[m * a.row + k * a.step]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[m][v] = add<End::INTEGERS>(sums[m][v], left, right[v]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) end(row + m, column + v * LANES, sums[m][v]);
}

template <int V, class End>
void tiles(Left a, long rows, Right b, long depth, long column, const End& end) {
  long r = 0;
  for (; r + ROWS <= rows; r += ROWS) tile<ROWS, V>(a.from(r), b, depth, r, column, end);
  if ((rows - r) & 4) tile<4, V>(a.from(r), b, depth, r, column, end), r += 4;
  if ((rows - r) & 2) tile<2, V>(a.from(r), b, depth, r, column, end), r += 2;
  if ((rows - r) & 1) tile<1, V>(a.from(r), b, depth, r, column, end);
}

// a b for a (rows, …), b (…, columns). `end` gives the initial value of 16 sums and receives them. `depth` counts pairs.
template <class End>
void product(Left a, long rows, Right b, long columns, long depth, const End& end) {
  for (long c = 0, left = columns / LANES; left > 0;) {
    const long take = left > 4 && left < 8 ? blocks(left, 2) : std::min(left, 4L);  // 5 is 3 + 2, not 4 + 1
    switch (take) {
      case 4: tiles<4>(a, rows, b.from(c), depth, c, end); break;
      case 3: tiles<3>(a, rows, b.from(c), depth, c, end); break;
      case 2: tiles<2>(a, rows, b.from(c), depth, c, end); break;
      default: tiles<1>(a, rows, b.from(c), depth, c, end);
    }
    left -= take, c += take * LANES;
  }
}

struct Kept {
  static constexpr bool INTEGERS = false;
  float* out;
  long stride;
  bool add;
  __m512 begin(long r, long c) const { return add ? _mm512_loadu_ps(out + r * stride + c) : _mm512_setzero_ps(); }
  void operator()(long r, long c, __m512 y) const { _mm512_storeu_ps(out + r * stride + c, y); }
};

// out (rows, columns) fp32 = a b, or += with `add`.
void multiply(Left a, long rows, Right b, long columns, long depth, float* out, long stride, bool add = false) {
  product(a, rows, b, columns, depth, Kept{out, stride, add});
}

// --- packing ----------------------------------------------------------------------------------------------------------

__m512 widened(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
__m512 read(const float* x) { return _mm512_loadu_ps(x); }
__m512 read(const bf16* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }
void write(bf16* at, __m512 x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x)); }

__m512i side_by_side(__m512i halves) {  // interleave two halves of 16 bf16 into 16 pairs
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

__m512i pairs(__m512 first, __m512 second) { return side_by_side((__m512i)_mm512_cvtne2ps_pbh(second, first)); }

// Interleave 16 elements of two rows into pairs; fp32 is rounded. A missing second row is zeros.
__m512i pairs_of(const bf16* x, const bf16* next) {
  const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)x));
  const __m256i second = next ? _mm256_loadu_si256((const __m256i*)next) : _mm256_setzero_si256();
  return side_by_side(_mm512_inserti64x4(first, second, 1));
}
__m512i pairs_of(const float* x, const float* next) {
  return pairs(_mm512_loadu_ps(x), next ? _mm512_loadu_ps(next) : _mm512_setzero_ps());
}

__mmask16 first_of(long n) { return (__mmask16)(n <= 0 ? 0 : n < LANES ? (1u << n) - 1 : 0xffff); }

// Load up to 16 pairs of one row.
__m512i row_of(const bf16* x, long count) { return _mm512_maskz_loadu_epi32(first_of(count), x); }
__m512i row_of(const float* x, long count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_of(2 * count), x);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(first_of(2 * count - LANES), x + LANES), low);
}

// Prefetch rows: hardware prefetchers do not follow large strides.
void fetch(const bf16* x, long stride, long rows, long columns) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < columns; c += 32) _mm_prefetch((const char*)(x + r * stride + c), _MM_HINT_T1);
}

// x (rows, columns) → (pairs of rows, columns). Missing rows are zeros.
template <class T>
void interleave(const T* x, long stride, long rows, long columns, pair* out, long width, long count) {
  for (long j = 0; j < count; ++j)
    for (long c = 0; c < columns; c += LANES) {
      const T* at = x + 2 * j * stride + c;
      const bool both = 2 * j + 1 < rows, one = 2 * j < rows;
      _mm512_storeu_si512(out + j * width + c, one ? pairs_of(at, both ? at + stride : nullptr) : _mm512_setzero_si512());
    }
}

// (16, columns ≤ 16) pairs, of which the first `rows` rows exist, → (columns, 16)
template <class T>
void transpose(const T* x, long stride, long rows, long columns, pair* out, long width) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = i < rows ? row_of(x + i * stride, columns) : _mm512_setzero_si512();
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 16; ++i) {  // quarters of rows: first within halves, then across
    const int from = i / 8 * 8 + i % 4;
    b[i] = i % 8 < 4 ? _mm512_shuffle_i32x4(a[from], a[from + 4], 0x88) : _mm512_shuffle_i32x4(a[from], a[from + 4], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
  }
  for (int i = 0; i < columns; ++i) _mm512_storeu_si512(out + i * width, a[i]);
}

// x (rows, columns) → (pairs of columns, width ≥ rows, a multiple of 16). Missing rows are zeros.
template <class T>
void turn(const T* x, long stride, long rows, long columns, pair* out, long width) {
  for (long r = 0; r < width; r += LANES)
    for (long c = 0; c < columns / 2; c += LANES)
      transpose(x + r * stride + 2 * c, stride, std::min(LANES, rows - r), std::min(LANES, columns / 2 - c),
                out + c * width + r, width);
}

// --- elementwise functions --------------------------------------------------------------------------------------------

__m512 all(float x) { return _mm512_set1_ps(x); }

// 2^x with a relative error of 3e-6, for x above −∞ (NaN stays NaN): a minimax polynomial and a power of two.
__m512 exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = all(9.570102e-3f);
  for (float c : {5.5917861e-2f, 2.4024745e-1f, 6.9312181e-1f, 9.9999926e-1f}) y = _mm512_fmadd_ps(y, rest, all(c));
  return _mm512_scalef_ps(y, whole);
}

constexpr float LOG2E = 1.44269504f;

enum Activation : long { NONE, ERF, TANH };

// GELU(x) = x Φ(x) and its derivative. In the tanh form Φ(x) is (1 + tanh u) / 2 with u = √(2/π) (x + 0.044715 x³).
double phi(double x, bool tanh) {
  return tanh ? 1 / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))) : std::erfc(-x * M_SQRT1_2) / 2;
}
double gelu(double x, bool tanh) { return x * phi(x, tanh); }

template <class F>
double slope(F f, double x) {
  return (f(x + 1e-4) - f(x - 1e-4)) / 2e-4;
}

// Approximation of a function of |x| that is 0 from 5.5 on: 31 cubic Hermite pieces.
class Curve {
  static constexpr int PIECES = 31;
  static constexpr double WIDTH = 5.5 / PIECES;
  alignas(64) float c[4][PIECES + 1] = {};

 public:
  template <class F>
  explicit Curve(F f) {
    for (int i = 0; i < PIECES; ++i) {
      const double from = i * WIDTH, to = from + WIDTH, first = f(from), last = f(to);
      const double rise = slope(f, from) * WIDTH, then = slope(f, to) * WIDTH;
      c[0][i] = first, c[1][i] = rise;
      c[2][i] = 3 * (last - first) - 2 * rise - then, c[3][i] = 2 * (first - last) + rise + then;
    }
  }
  __m512 operator()(__m512 x) const {  // NaN stays NaN: min returns its second operand
    const __m512 place = _mm512_min_ps(all(PIECES + 0.5), _mm512_mul_ps(_mm512_abs_ps(x), all(1 / WIDTH)));
    const __m512 whole = _mm512_roundscale_ps(place, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
    const __m512i piece = _mm512_cvttps_epi32(place);
    const __m512 rest = _mm512_sub_ps(place, whole);
    auto of = [&](int k) { return _mm512_permutex2var_ps(_mm512_load_ps(c[k]), piece, _mm512_load_ps(c[k] + LANES)); };
    return _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(of(3), rest, of(2)), rest, of(1)), rest, of(0));
  }
};

// max(x, 0) − GELU(x), and the distance of the derivative to 0 or 1: both are even functions of x.
Curve lack(bool tanh) {
  return Curve([=](double x) { return -gelu(-x, tanh); });
}
Curve bend(bool tanh) {
  return Curve([=](double x) { return slope([=](double y) { return gelu(y, tanh); }, -x); });
}
const Curve lacks[] = {lack(false), lack(true)}, bends[] = {bend(false), bend(true)};

// Error below 5e-6.
__m512 gelu(__m512 x, long activation) {
  return _mm512_sub_ps(_mm512_max_ps(x, all(0)), lacks[activation - ERF](x));
}

// Error below 1e-5.
__m512 gelu_slope(__m512 x, long activation) {
  const __m512 y = bends[activation - ERF](x);
  return _mm512_mask_sub_ps(y, _mm512_cmp_ps_mask(x, all(0), _CMP_GE_OQ), all(1), y);
}

// --- scratch memory of a thread -----------------------------------------------------------------------------------------

class Scratch {  // reused between calls
  char *memory = nullptr, *at = nullptr;
  size_t size = 0;

 public:
  ~Scratch() { std::free(memory); }
  void reserve(size_t bytes) {
    if (bytes > size) std::free(memory), memory = (char*)std::aligned_alloc(64, size = up(bytes, 4096));
    at = memory;
  }
  template <class T>
  T* take(long count) {
    T* here = (T*)at;
    at += up(count * sizeof(T), 64);
    return here;
  }
};
thread_local Scratch scratch;

// --- dense layers -------------------------------------------------------------------------------------------------------

template <class T>
void pack(const T* w, long columns, long depth, pair* out, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long c = 0; c < columns; c += PANEL)
    turn(w + c * depth, depth, std::min(PANEL, columns - c), depth, out + c * (depth / 2), PANEL);
}

// Pack the pairs of rows [from, to) of x (rows, columns) into panels of `panel` columns, each (pairs, panel).
template <class T>
void pack_rows(const T* x, long rows, long columns, long panel, long count, long from, long to, pair* out) {
  for (long j = from; j < to; ++j)  // row by row, in memory order
    for (long c = 0; c < columns; c += panel)
      interleave(x + 2 * j * columns + c, columns, rows - 2 * j, std::min(panel, columns - c), out + c * count + j * panel,
                 panel, 1);
}

constexpr long TOGETHER = 16;  // pairs of rows that a thread packs at a time

template <class T>
void pack_transposed(const T* w, long depth, long columns, pair* out, int threads) {
  const long count = depth / 2;
#pragma omp parallel for num_threads(threads)
  for (long j = 0; j < count; j += TOGETHER)
    pack_rows(w, depth, columns, PANEL, count, j, std::min(count, j + TOGETHER), out);
}

}  // namespace

// Pack w (columns, depth), fp32 or bf16, as the right side of x wᵀ: panels of 64 columns, each (depth / 2, 64).
extern "C" void pack_weight(const void* w, int fp32, long columns, long depth, pair* out, int threads) {
  fp32 ? pack((const float*)w, columns, depth, out, threads) : pack((const bf16*)w, columns, depth, out, threads);
}

// Pack w (depth, columns) as the right side of x w.
extern "C" void pack_transposed_weight(const void* w, int fp32, long depth, long columns, pair* out, int threads) {
  fp32 ? pack_transposed((const float*)w, depth, columns, out, threads)
       : pack_transposed((const bf16*)w, depth, columns, out, threads);
}

struct Layer {  // a dense layer with a packed weight; the members after `bias` are for int8 only
  const pair* packed;
  const bf16* bias;                                 // may be missing
  const int32_t* start = nullptr;                   // initial sums: the contribution of the input's zero point
  const float *factor = nullptr, *shift = nullptr;  // of the sums: scale, then bias
  float finer = 0, zero = 0;                        // quantized input: x · finer + zero
};

namespace {

// From sums to outputs, for up to 64 columns.
class OfHalves {
  alignas(64) float shift[PANEL];

 public:
  static constexpr bool INTEGERS = false;
  OfHalves(const Layer& w, long column, long wide) {
    for (long c = 0; c < wide; c += LANES) _mm512_store_ps(shift + c, w.bias ? read(w.bias + column + c) : all(0));
  }
  __m512 begin(long c) const { return _mm512_load_ps(shift + c); }
  __m512 number(__m512 sum, long) const { return sum; }
};

class OfBytes {
  const int32_t* start;
  const float *factor, *shift;

 public:
  static constexpr bool INTEGERS = true;
  OfBytes(const Layer& w, long column, long)
      : start(w.start + column), factor(w.factor + column), shift(w.shift + column) {}
  __m512 begin(long c) const { return _mm512_loadu_ps(start + c); }
  __m512 number(__m512 sum, long c) const {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)sum), _mm512_loadu_ps(factor + c), _mm512_loadu_ps(shift + c));
  }
};

OfHalves sums_of(const bf16*, const Layer& w, long column, long wide) { return {w, column, wide}; }
OfBytes sums_of(const uint8_t*, const Layer& w, long column, long wide) { return {w, column, wide}; }

// Destinations of outputs: `to(i, 16 values)`.
struct Halves {
  bf16* at;
  void operator()(long i, __m512 y) const { write(at + i, y); }
};
struct Floats {
  float* at;
  void operator()(long i, __m512 y) const { _mm512_storeu_ps(at + i, y); }
};
struct Bytes {
  uint8_t* at;
  float finer, zero;
  void operator()(long i, __m512 y) const {
    y = _mm512_min_ps(_mm512_max_ps(_mm512_fmadd_ps(y, all(finer), all(zero)), all(0)), all(255));
    _mm_storeu_si128((__m128i*)(at + i), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y)));
  }
};

Halves to_number(bf16* at) { return {at}; }
Floats to_number(float* at) { return {at}; }
Halves to_enter(bf16* at, const Layer&) { return {at}; }
Bytes to_enter(uint8_t* at, const Layer& w) { return {at, w.finer, w.zero}; }

struct Columns {  // outputs [from, last) of a layer; from is a multiple of 64
  long from, last;
  long stride;  // between rows of the output
};

template <class S>
struct After {  // epilogue of a product: GELU, then a sum
  long activation = NONE;
  const S* other = nullptr;
  bf16* before = nullptr;  // optional output: the input of GELU
};

template <class Numbers, class S, class To>
struct Finished {
  const Numbers& numbers;
  const After<S>& after;
  const To& to;
  long row, column, stride;
  static constexpr bool INTEGERS = Numbers::INTEGERS;
  __m512 begin(long, long c) const { return numbers.begin(c); }
  void operator()(long r, long c, __m512 sum) const {
    const long i = (row + r) * stride + column + c;
    __m512 y = numbers.number(sum, c);
    if (after.before) write(after.before + i, y);
    if (after.activation) y = gelu(y, after.activation);
    if (after.other) y = _mm512_add_ps(y, read(after.other + i));
    to(i, y);
  }
};

// to(x (rows, depth) · wᵀ + bias, after the epilogue).
template <class T, class S, class To>
void dense_to(const T* x, const Layer& w, long rows, Columns columns, long depth, int threads, To to, After<S> after) {
  if (!rows) return;
  const long first = columns.from / PANEL, panels = blocks(columns.last, PANEL) - first, pairs = depth / EACH<T>;
  const long size = up(blocks(rows, blocks(rows, 96)), ROWS), chunks = blocks(rows, size);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long task = 0; task < chunks * panels; ++task) {
    const long column = (first + task % panels) * PANEL, wide = std::min(PANEL, columns.last - column);
    const long row = task / panels * size, here = std::min(size, rows - row);
    const auto numbers = sums_of(x, w, column, wide);
    product(rows_of(x + row * depth, depth), here, {w.packed + column * pairs, PANEL}, wide, pairs,
            Finished<decltype(numbers), S, To>{numbers, after, to, row, column, columns.stride});
  }
}

}  // namespace

// out (rows, columns) = activation(x (rows, depth) · packed + bias) + other. `before`, if not null, receives the input
// of the activation.
extern "C" void dense(const bf16* x, const pair* packed, const bf16* bias, const bf16* other, bf16* before, bf16* out,
                      long rows, long columns, long depth, long activation, int threads) {
  dense_to(x, {packed, bias}, rows, {0, columns, columns}, depth, threads, Halves{out},
           After<bf16>{activation, other, before});
}

enum Kind : long { BF16, FP32, UINT8 };

// The same for int8. `kind` is the type of the output; uint8 outputs are y · finer + zero.
extern "C" void dense_integers(const uint8_t* x, const Layer* w, const float* other, void* out, long kind, float finer,
                               float zero, long rows, long columns, long depth, long activation, int threads) {
  auto run = [&](auto to) {
    dense_to(x, *w, rows, {0, columns, columns}, depth, threads, to, After<float>{activation, other});
  };
  if (kind == BF16) run(Halves{(bf16*)out});
  if (kind == FP32) run(Floats{(float*)out});
  if (kind == UINT8) run(Bytes{(uint8_t*)out, finer, zero});
}

constexpr long CHUNK = 96;  // outputs whose gradients one thread computes at a time

// Rows of g and x that `weight_gradient` packs at a time.
extern "C" long weight_gradient_rows(long rows) { return up(blocks(rows, std::max(1L, blocks(rows, 2048))), 2); }

// Gradient (columns, depth) fp32 of a layer's weight, gᵀ x for g (rows, columns) and x (rows, depth), and if `bias` is
// not null the sum of g over rows. `left` and `right` are scratch for `weight_gradient_rows` rows of g and x.
extern "C" void weight_gradient(const bf16* g, const bf16* x, float* weight, float* bias, pair* left, pair* right,
                                long rows, long columns, long depth, int threads) {
  const pair one = 0x3f803f80;
  const long size = weight_gradient_rows(rows), panels = blocks(depth, PANEL);
  for (long first = 0; first < rows; first += size) {
    const long here = std::min(size, rows - first), count = blocks(here, 2);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
      for (long j = 0; j < count; j += TOGETHER) {
        const long to = std::min(count, j + TOGETHER);
        pack_rows(g + first * columns, here, columns, CHUNK, count, j, to, left);
        pack_rows(x + first * depth, here, depth, PANEL, count, j, to, right);
      }
#pragma omp for schedule(dynamic)
      for (long task = 0; task < blocks(columns, CHUNK) * panels; ++task) {
        const long r = task / panels * CHUNK, c = task % panels * PANEL, high = std::min(CHUNK, columns - r);
        multiply({left + r * count, 1, CHUNK}, high, {right + c * count, PANEL}, std::min(PANEL, depth - c), count,
                 weight + r * depth + c, depth, first > 0);
        if (bias && c == 0) multiply({&one, 0, 0}, 1, {left + r * count, CHUNK}, high, count, bias + r, high, first > 0);
      }
    }
  }
}

struct Norm {
  const bf16 *weight, *bias;
  float eps;
};

namespace {

template <class T, class To>
void norm_to(const T* x, const Norm& n, To to, long rows, long columns, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long r = 0; r < rows; ++r) {
    const T* from = x + r * columns;
    __m512 sum = all(0), squares = all(0);
    for (long c = 0; c < columns; c += LANES) sum = _mm512_add_ps(sum, read(from + c));
    const __m512 mean = all(_mm512_reduce_add_ps(sum) / columns);
    for (long c = 0; c < columns; c += LANES) {
      const __m512 rest = _mm512_sub_ps(read(from + c), mean);
      squares = _mm512_fmadd_ps(rest, rest, squares);
    }
    const __m512 factor = all(1 / std::sqrt(_mm512_reduce_add_ps(squares) / columns + n.eps));
    for (long c = 0; c < columns; c += LANES) {
      const __m512 unit = _mm512_mul_ps(_mm512_sub_ps(read(from + c), mean), factor);
      to(r * columns + c, _mm512_fmadd_ps(unit, read(n.weight + c), read(n.bias + c)));
    }
  }
}

}  // namespace

// (x − mean) / √(variance + eps) · weight + bias for every row.
extern "C" void layer_norm(const bf16* x, const bf16* weight, const bf16* bias, bf16* out, long rows, long columns,
                           float eps, int threads) {
  norm_to(x, {weight, bias, eps}, Halves{out}, rows, columns, threads);
}

// Gradient of x (count) from that of GELU(x).
extern "C" void gelu_backward(const bf16* gradient, const bf16* x, bf16* out, long count, long activation, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i += LANES) {
    write(out + i, _mm512_mul_ps(read(gradient + i), gelu_slope(read(x + i), activation)));
  }
}

// --- attention ----------------------------------------------------------------------------------------------------------

struct Attention {
  long images, heads, queries, keys, width;
  long q[3], k[3], v[3], out[3];  // strides between images, heads and tokens
  float scale;
  int threads;
};

namespace {

template <class T>
T* head(T* x, const long* strides, long image, long head) {
  return x + image * strides[0] + head * strides[1];
}

// Scores have keys as rows, so that all scores of a query are in one lane.
struct Softmax {
  float *greatest, *sum;  // of each query
};

// exp of scores (keys, queries), rounded, in pairs of keys. Scores times `factor` are base-2 logarithms.
void raise(const float* scores, long keys, long queries, float factor, pair* out, Softmax of) {
  const long stride = queries;
  for (long c = 0; c < queries; c += LANES) {
    __m512 most = all(-INFINITY), sum = _mm512_setzero_ps();
    for (long r = 0; r < keys; ++r) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + r * stride + c));
    most = _mm512_mul_ps(most, all(factor));
    auto power = [&](long r) { return exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores + r * stride + c), all(factor), most)); };
    for (long r = 0; r < keys; r += 2) {
      const __m512 first = power(r), second = r + 1 < keys ? power(r + 1) : _mm512_setzero_ps();
      sum = _mm512_add_ps(sum, _mm512_add_ps(first, second));
      _mm512_storeu_si512(out + r / 2 * stride + c, pairs(first, second));
    }
    _mm512_storeu_ps(of.greatest + c, most);
    _mm512_storeu_ps(of.sum + c, sum);
  }
}

constexpr long QUERIES = 64;

// Attention of the queries [from, last) of one head, to(`at` + …). `lse` (base-2 log-sum-exp of the scores) may be
// null.
template <class To>
void gather(const Attention& a, const bf16* q, const bf16* k, const bf16* v, To to, long at, float* lse, long from,
            long last) {
  const long d = a.width, count = blocks(a.keys, 2);
  scratch.reserve(sizeof(float) * (QUERIES * (d / 2 + d + 2) + count * (d + 3 * QUERIES)) + 1024);
  pair *turned = scratch.take<pair>(QUERIES * d / 2), *values = scratch.take<pair>(count * d);
  pair* raised = scratch.take<pair>(count * QUERIES);
  float *scores = scratch.take<float>(2 * count * QUERIES), *mixed = scratch.take<float>(QUERIES * d);
  const Softmax softmax{scratch.take<float>(QUERIES), scratch.take<float>(QUERIES)};
  fetch(v, a.v[2], a.keys, d), fetch(k, a.k[2], a.keys, d), fetch(q + from * a.q[2], a.q[2], last - from, d);
  interleave(v, a.v[2], a.keys, d, values, d, count);
  for (long first = from, left = blocks(last - from, QUERIES); left > 0; --left) {
    const long n = std::min(blocks(blocks(last - first, LANES), left) * LANES, last - first), wide = up(n, LANES);
    turn(q + first * a.q[2], a.q[2], n, d, turned, wide);
    multiply(rows_of(k, a.k[2]), a.keys, {turned, wide}, wide, d / 2, scores, wide);
    raise(scores, a.keys, wide, a.scale * LOG2E, raised, softmax);
    multiply({raised, 1, wide}, n, {values, d}, d, count, mixed, d);
    for (long i = 0; i < n; ++i) {
      if (lse) lse[first + i] = softmax.greatest[i] + std::log2(softmax.sum[i]);
      const __m512 share = all(1 / softmax.sum[i]);
      for (long c = 0; c < d; c += LANES)
        to(at + (first + i) * a.out[2] + c, _mm512_mul_ps(_mm512_loadu_ps(mixed + i * d + c), share));
    }
    first += n;
  }
}

template <class To>
void attend(const Attention& a, const bf16* q, const bf16* k, const bf16* v, To to, float* lse) {
  const long heads = a.images * a.heads;
  if (!heads || !a.queries) return;
  const long parts = std::min(blocks(2 * a.threads, heads), blocks(a.queries, QUERIES));  // for few heads
  const long size = up(blocks(a.queries, parts), LANES);
#pragma omp parallel for num_threads(a.threads) schedule(dynamic)
  for (long task = 0; task < heads * parts; ++task) {
    const long one = task / parts, b = one / a.heads, h = one % a.heads, from = task % parts * size;
    gather(a, head(q, a.q, b, h), head(k, a.k, b, h), head(v, a.v, b, h), to, b * a.out[0] + h * a.out[1],
           lse ? lse + one * a.queries : nullptr, from, std::min(a.queries, from + size));
  }
}

}  // namespace

// softmax(q kᵀ · scale) v
extern "C" void attention(const Attention* a, const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse) {
  attend(*a, q, k, v, Halves{out}, lse);
}

namespace {

struct Gradients {
  bf16 *q, *k, *v;
};

constexpr long MOST_QUERIES = 256;  // per iteration of backward, so that their data fits the L2 cache

struct Workspace {  // of the backward of one head, for up to 256 queries
  pair *q_turned, *g_turned, *q_pairs, *g_pairs, *k_pairs;
  pair *p, *s, *s_pairs;  // (keys, queries) rounded: softmax, gradient of scores, and that with keys in pairs
  float *lse, *inner, *scores, *through;
  float *sum_q, *sum_k, *sum_v;
};

Workspace reserve(long keys, long queries, long d) {
  const long count = blocks(keys, 2);
  scratch.reserve(sizeof(float) * (queries * (2 * d + 2 + d) + count * (d + 3 * queries) + 2 * keys * d) +
                  sizeof(float) * 2 * ROWS * queries + 4096);
  auto some = [](long n) { return scratch.take<pair>(n); };
  auto sums = [](long n) { return scratch.take<float>(n); };
  const long half = queries * d / 2, table = count * queries, each = ROWS * queries;
  return {some(half), some(half), some(half), some(half), some(count * d), some(table), some(table), some(table),
          sums(queries), sums(queries), sums(each), sums(each), sums(queries * d), sums(keys * d), sums(keys * d)};
}

// p = exp(scores − lse) and the gradient of scores, p ∘ (g vᵀ − (g · out)) · scale, for `wide` queries.
void through_softmax(const Attention& a, const bf16* k, const bf16* v, long wide, const Workspace& w) {
  const __m512 factor = all(a.scale * LOG2E), scale = all(a.scale);
  for (long r = 0; r < a.keys; r += ROWS) {
    const long rows = std::min(ROWS, a.keys - r);
    multiply(rows_of(k + r * a.k[2], a.k[2]), rows, {w.q_turned, wide}, wide, a.width / 2, w.scores, wide);
    multiply(rows_of(v + r * a.v[2], a.v[2]), rows, {w.g_turned, wide}, wide, a.width / 2, w.through, wide);
    for (long c = 0; c < wide; c += LANES) {
      const __m512 lse = _mm512_loadu_ps(w.lse + c), inner = _mm512_loadu_ps(w.inner + c);
      __m512 before = _mm512_setzero_ps();
      for (long i = 0; i < rows; ++i) {
        const long at = (r + i) * wide + c;
        const __m512 p = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(w.scores + i * wide + c), factor, lse));
        const __m512 direct = _mm512_sub_ps(_mm512_loadu_ps(w.through + i * wide + c), inner);
        const __m512 s = _mm512_mul_ps(_mm512_mul_ps(p, scale), direct);
        write((bf16*)w.p + at, p), write((bf16*)w.s + at, s);
        if (i % 2) _mm512_storeu_si512(w.s_pairs + (r + i) / 2 * wide + c, pairs(before, s));
        before = s;
      }
      if (rows % 2) _mm512_storeu_si512(w.s_pairs + (r + rows) / 2 * wide + c, pairs(before, _mm512_setzero_ps()));
    }
  }
}

void store(const float* sums, long rows, long d, bf16* out, long stride) {
  for (long r = 0; r < rows; ++r)
    for (long c = 0; c < d; c += LANES) write(out + r * stride + c, _mm512_loadu_ps(sums + r * d + c));
}

// Gradients of q, k and v of one head, in the layout of q, k and v.
void gather_backward(const Attention& a, const bf16* q, const bf16* k, const bf16* v, const bf16* out, const bf16* g,
                     const float* lse, Gradients to) {
  const long d = a.width, count = blocks(a.keys, 2);
  const Workspace w = reserve(a.keys, up(std::min(a.queries, MOST_QUERIES), LANES), d);
  fetch(k, a.k[2], a.keys, d), fetch(v, a.v[2], a.keys, d), fetch(q, a.q[2], a.queries, d);
  fetch(out, a.out[2], a.queries, d), fetch(g, a.out[2], a.queries, d);
  interleave(k, a.k[2], a.keys, d, w.k_pairs, d, count);
  for (long first = 0; first < a.queries; first += MOST_QUERIES) {
    const long n = std::min(MOST_QUERIES, a.queries - first), wide = up(n, LANES);
    const bf16 *queries = q + first * a.q[2], *gradients = g + first * a.out[2], *mixed = out + first * a.out[2];
    turn(queries, a.q[2], n, d, w.q_turned, wide), turn(gradients, a.out[2], n, d, w.g_turned, wide);
    interleave(queries, a.q[2], n, d, w.q_pairs, d, wide / 2), interleave(gradients, a.out[2], n, d, w.g_pairs, d, wide / 2);
    for (long i = 0; i < wide; ++i) {  // for missing queries exp is 0
      __m512 inner = _mm512_setzero_ps();
      for (long c = 0; i < n && c < d; c += LANES)
        inner = _mm512_fmadd_ps(read(mixed + i * a.out[2] + c), read(gradients + i * a.out[2] + c), inner);
      w.inner[i] = _mm512_reduce_add_ps(inner), w.lse[i] = i < n ? lse[first + i] : 1e30f;
    }
    through_softmax(a, k, v, wide, w);
    const Left p{w.p, wide / 2, 1}, s{w.s, wide / 2, 1};
    multiply(p, a.keys, {w.g_pairs, d}, d, wide / 2, w.sum_v, d, first > 0);
    multiply(s, a.keys, {w.q_pairs, d}, d, wide / 2, w.sum_k, d, first > 0);
    multiply({w.s_pairs, 1, wide}, n, {w.k_pairs, d}, d, count, w.sum_q, d);
    store(w.sum_q, n, d, to.q + first * a.q[2], a.q[2]);
  }
  store(w.sum_k, a.keys, d, to.k, a.k[2]), store(w.sum_v, a.keys, d, to.v, a.v[2]);
}

}  // namespace

// Gradients of q, k and v from `g`, that of `out`; all in the layout of their tensors.
extern "C" void attention_backward(const Attention* a, const bf16* q, const bf16* k, const bf16* v, const bf16* out,
                                   const bf16* g, const float* lse, bf16* of_q, bf16* of_k, bf16* of_v) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic)
  for (long task = 0; task < a->images * a->heads; ++task) {
    const long b = task / a->heads, h = task % a->heads;
    gather_backward(*a, head(q, a->q, b, h), head(k, a->k, b, h), head(v, a->v, b, h), head(out, a->out, b, h),
                    head(g, a->out, b, h), lse + task * a->queries,
                    {head(of_q, a->q, b, h), head(of_k, a->k, b, h), head(of_v, a->v, b, h)});
  }
}

// --- fused blocks for prediction ----------------------------------------------------------------------------------------

struct Block {  // pre-norm, with GELU
  long width, heads, hidden, activation;
  float scale;
  Norm norms[2];
  Layer qkv, proj, fc1, fc2;
};

namespace {

thread_local Scratch between;  // between layers; attention uses `scratch`

constexpr long AT_ONCE = 1536;  // rows that pass all layers at a time, so that intermediate results stay in a cache
long together(long images, long rows) { return std::min(images, std::max(1L, AT_ONCE / std::max(1L, rows))); }

// x (images, tokens, width) + attention, for the first `wanted` tokens of each image; `other` are those tokens of x.
template <class T, class S>
void attention_branch(const Block& b, const S* x, const S* other, S* out, long images, long tokens, long wanted,
                  int threads) {
  const long D = b.width, d = D / b.heads, some = together(images, tokens);
  between.reserve(some * tokens * D * (2 * sizeof(T) + 3 * sizeof(bf16)) + 1024);
  T *normed = between.take<T>(some * tokens * D), *mixed = between.take<T>(some * tokens * D);
  bf16* qkv = between.take<bf16>(some * tokens * 3 * D);
  for (long first = 0; first < images; first += some) {
    const long n = std::min(some, images - first), at = first * wanted * D;
    norm_to(x + first * tokens * D, b.norms[0], to_enter(normed, b.qkv), n * tokens, D, threads);
    const long from = wanted < tokens ? D / PANEL * PANEL : 0;  // q of other tokens is not needed
    auto project = [=, &b](long row, long rows, long begin, long end) {
      dense_to(normed + row * D, b.qkv, rows, {begin, end, 3 * D}, D, threads, Halves{qkv + row * 3 * D}, After<S>{});
    };
    project(0, n * tokens, from, 3 * D);
    for (long i = 0; from && i < n; ++i) project(i * tokens, wanted, 0, from);
    const Attention a{n, b.heads, wanted, tokens, d, {tokens * 3 * D, d, 3 * D}, {tokens * 3 * D, d, 3 * D},
                      {tokens * 3 * D, d, 3 * D}, {wanted * D, d, D}, b.scale, threads};
    attend(a, qkv, qkv + D, qkv + 2 * D, to_enter(mixed, b.proj), nullptr);
    dense_to(mixed, b.proj, n * wanted, {0, D, D}, D, threads, to_number(out + at), After<S>{NONE, other + at});
  }
}

// x (rows, width) + MLP(x)
template <class T, class S>
void mlp_branch(const Block& b, const S* x, S* out, long rows, int threads) {
  const long D = b.width, some = std::min(rows, AT_ONCE);
  between.reserve(some * (D + b.hidden) * sizeof(T) + 1024);
  T *normed = between.take<T>(some * D), *hidden = between.take<T>(some * b.hidden);
  for (long first = 0; first < rows; first += some) {
    const long n = std::min(some, rows - first), at = first * D;
    norm_to(x + at, b.norms[1], to_enter(normed, b.fc1), n, D, threads);
    dense_to(normed, b.fc1, n, {0, b.hidden, b.hidden}, D, threads, to_enter(hidden, b.fc2), After<S>{b.activation});
    dense_to(hidden, b.fc2, n, {0, D, D}, b.hidden, threads, to_number(out + at), After<S>{NONE, x + at});
  }
}

}  // namespace

// Equation 2 for the first `wanted` tokens, `other`, of each image in x (images, tokens, width). In bf16, or in int8 with
// `integers`, where x, `other` and out are fp32.
extern "C" void block_attention(const Block* b, int integers, const void* x, const void* other, void* out, long images,
                                long tokens, long wanted, int threads) {
  if (integers)
    attention_branch<uint8_t>(*b, (const float*)x, (const float*)other, (float*)out, images, tokens, wanted, threads);
  else
    attention_branch<bf16>(*b, (const bf16*)x, (const bf16*)other, (bf16*)out, images, tokens, wanted, threads);
}

// Equation 3 for x (rows, width).
extern "C" void block_mlp(const Block* b, int integers, const void* x, void* out, long rows, int threads) {
  if (integers)
    mlp_branch<uint8_t>(*b, (const float*)x, (float*)out, rows, threads);
  else
    mlp_branch<bf16>(*b, (const bf16*)x, (bf16*)out, rows, threads);
}

// Equation 1, `x_p E`: images (batch, channels, rows · p, columns · q) to (batch, rows · columns, width).
extern "C" void patches(const bf16* images, const pair* packed, const bf16* bias, bf16* out, long batch, long channels,
                        long rows, long columns, long p, long q, long width, int threads) {
  const long depth = channels * p * q, count = rows * columns, some = together(batch, count);
  between.reserve(some * count * depth * sizeof(bf16));
  bf16* flat = between.take<bf16>(some * count * depth);
  for (long first = 0; first < batch; first += some) {
    const long n = std::min(some, batch - first);
#pragma omp parallel for num_threads(threads)
    for (long task = 0; task < n * rows; ++task) {  // one row of patches
      const bf16* from = images + ((first + task / rows) * channels * rows + task % rows) * p * columns * q;
      for (long c = 0; c < channels; ++c)
        for (long u = 0; u < p; ++u) {
          const bf16* line = from + (c * rows * p + u) * columns * q;
          bf16* at = flat + task * columns * depth + (c * p + u) * q;
          for (long j = 0; j < columns; ++j) std::copy_n(line + j * q, q, at + j * depth);
        }
    }
    dense_to(flat, {packed, bias}, n * count, {0, width, width}, depth, threads, Halves{out + first * count * width},
             After<bf16>{});
  }
}
