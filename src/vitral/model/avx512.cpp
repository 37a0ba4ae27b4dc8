// Dense layers, GELU and attention of a ViT in bf16 on a processor with AVX512_BF16. avx512.py builds and calls it.
//
// One instruction (vdpbf16ps) takes 16 pairs of numbers from each side and adds the two products of every pair to one of
// 16 sums in fp32. So in all that follows a matrix on the left gives one pair at a time, along what is summed over, to
// all 16 lanes, and is read as it lies; a matrix on the right is laid out before: the pairs of 16 columns side by side.
// Sums do not depend on the number of threads.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace {

using bf16 = uint16_t;
using pair = uint32_t __attribute__((may_alias, aligned(2)));  // two bf16, of which the first is the lower half

constexpr long LANES = 16, ROWS = 6, PANEL = 64;
// 6 × 4 vectors of sums, 4 of the right matrix and one of the left are 29 of the 32 registers.

long blocks(long n, long size) { return (n + size - 1) / size; }
long up(long n, long size) { return blocks(n, size) * size; }

// --- products ---------------------------------------------------------------------------------------------------------

struct Left {
  const pair* at;
  long row, step;  // from a row to the next, and from a pair to the next
  Left from(long r) const { return {at + r * row, row, step}; }
};

Left rows_of(const bf16* x, long stride) { return {(const pair*)x, stride / 2, 1}; }

struct Right {
  const pair* at;
  long width;  // columns that lie side by side: from a pair to the next
  Right from(long column) const { return {at + column, width}; }
};

template <int M, int V, class End>
inline void tile(Left a, Right b, long depth, long row, long column, const End& end) {
  __m512 sums[M][V];
#pragma GCC unroll 6
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[m][v] = end.begin(row + m, column + v * LANES);
  for (long k = 0; k < depth; ++k) {
    __m512bh right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) right[v] = (__m512bh)_mm512_loadu_si512(b.at + k * b.width + v * LANES);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(a.at[m * a.row + k * a.step]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[m][v] = _mm512_dpbf16_ps(sums[m][v], left, right[v]);
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

// a b for a (rows, …), b (…, columns): every 16 sums begin with and go to `end`; `depth` counts pairs.
template <class End>
void product(Left a, long rows, Right b, long columns, long depth, const End& end) {
  for (long c = 0, left = columns / LANES; left > 0;) {
    const long take = left > 4 && left < 8 ? blocks(left, 2) : std::min(left, 4L);  // 5 as 3 and 2, not as 4 and 1
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
  float* out;
  long stride;
  bool add;
  __m512 begin(long r, long c) const { return add ? _mm512_loadu_ps(out + r * stride + c) : _mm512_setzero_ps(); }
  void operator()(long r, long c, __m512 y) const { _mm512_storeu_ps(out + r * stride + c, y); }
};

// out (rows, columns), in fp32, = a b, or is added to.
void multiply(Left a, long rows, Right b, long columns, long depth, float* out, long stride, bool add = false) {
  product(a, rows, b, columns, depth, Kept{out, stride, add});
}

// --- laying out -------------------------------------------------------------------------------------------------------

__m512 widened(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
__m512 read(const bf16* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }
void write(bf16* at, __m512 x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x)); }

__m512i side_by_side(__m512i halves) {  // of 16 numbers, and 16 behind them, pairs
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, halves);
}

__m512i pairs(__m512 first, __m512 second) { return side_by_side((__m512i)_mm512_cvtne2ps_pbh(second, first)); }

// 16 numbers of two rows, pair by pair, rounded if they are fp32; without the second one zeros.
__m512i pairs_of(const bf16* x, const bf16* next) {
  const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)x));
  const __m256i second = next ? _mm256_loadu_si256((const __m256i*)next) : _mm256_setzero_si256();
  return side_by_side(_mm512_inserti64x4(first, second, 1));
}
__m512i pairs_of(const float* x, const float* next) {
  return pairs(_mm512_loadu_ps(x), next ? _mm512_loadu_ps(next) : _mm512_setzero_ps());
}

__mmask16 first_of(long n) { return (__mmask16)(n <= 0 ? 0 : n < LANES ? (1u << n) - 1 : 0xffff); }

// Up to 16 pairs of one row.
__m512i row_of(const bf16* x, long count) { return _mm512_maskz_loadu_epi32(first_of(count), x); }
__m512i row_of(const float* x, long count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_of(2 * count), x);
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(first_of(2 * count - LANES), x + LANES), low);
}

// Rows far apart are no pattern that a processor foresees.
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

// (16, columns ≤ 16) pairs, of which `rows` are there, → (columns, 16)
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
  for (int i = 0; i < 16; ++i) {  // quarters of rows: first within halves, then across them
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

// --- functions of numbers ---------------------------------------------------------------------------------------------

__m512 all(float x) { return _mm512_set1_ps(x); }

// 2^x to 3e-6 of it, for x that is not −∞ (NaN stays NaN): a least-maximum polynomial, and powers of two.
__m512 exp2(__m512 x) {
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = all(9.570102e-3f);
  for (float c : {5.5917861e-2f, 2.4024745e-1f, 6.9312181e-1f, 9.9999926e-1f}) y = _mm512_fmadd_ps(y, rest, all(c));
  return _mm512_scalef_ps(y, whole);
}

// The same where x may be −∞. NaN stays NaN: of max's operands it is the second.
__m512 exp2_or_0(__m512 x) { return exp2(_mm512_max_ps(all(-150), x)); }

constexpr float LOG2E = 1.44269504f;

struct Gate {
  __m512 value, slope;  // of Φ(x) in x Φ(x)
};

// Φ by erf: Abramowitz and Stegun 7.1.26, to 1e-7.
Gate by_erf(__m512 x) {
  const __m512 size = _mm512_abs_ps(x);
  const __m512 t = _mm512_div_ps(all(1), _mm512_fmadd_ps(size, all(0.3275911f * 0.70710678f), all(1)));
  __m512 y = all(1.061405429f);
  for (float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) y = _mm512_fmadd_ps(y, t, all(c));
  const __m512 bell = exp2_or_0(_mm512_mul_ps(_mm512_mul_ps(x, x), all(-0.5f * LOG2E)));
  const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(y, t), bell), all(0.5f));
  const __mmask16 negative = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ);
  return {_mm512_mask_sub_ps(tail, (__mmask16)~negative, all(1), tail), _mm512_mul_ps(bell, all(0.39894228f))};
}

// Φ as 1 / (1 + exp(−2u)) with u = √(2/π) (x + 0.044715 x³), which is (1 + tanh u) / 2.
Gate by_tanh(__m512 x) {
  const __m512 square = _mm512_mul_ps(x, x);
  const __m512 u = _mm512_mul_ps(x, _mm512_fmadd_ps(square, all(0.044715f * 1.59576912f), all(1.59576912f)));
  const __m512 value = _mm512_div_ps(all(1), _mm512_add_ps(all(1), exp2_or_0(_mm512_mul_ps(u, all(-LOG2E)))));
  const __m512 inner = _mm512_fmadd_ps(square, all(3 * 0.044715f * 1.59576912f), all(1.59576912f));
  return {value, _mm512_mul_ps(_mm512_mul_ps(value, _mm512_sub_ps(all(1), value)), inner)};
}

enum Activation : long { NONE, ERF, TANH };

__m512 gelu(__m512 x, long activation) {
  return _mm512_mul_ps(x, (activation == TANH ? by_tanh(x) : by_erf(x)).value);
}

// --- memory of a thread -------------------------------------------------------------------------------------------------

class Scratch {  // kept from call to call
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

// Rows of x (rows, columns), a range of pairs, as panels of `panel` columns, each (pairs, panel).
template <class T>
void pack_rows(const T* x, long rows, long columns, long panel, long count, long from, long to, pair* out) {
  for (long j = from; j < to; ++j)  // row by row, as they lie
    for (long c = 0; c < columns; c += panel)
      interleave(x + 2 * j * columns + c, columns, rows - 2 * j, std::min(panel, columns - c), out + c * count + j * panel,
                 panel, 1);
}

constexpr long TOGETHER = 16;  // pairs of rows that are laid out by one thread at a time

template <class T>
void pack_transposed(const T* w, long depth, long columns, pair* out, int threads) {
  const long count = depth / 2;
#pragma omp parallel for num_threads(threads)
  for (long j = 0; j < count; j += TOGETHER)
    pack_rows(w, depth, columns, PANEL, count, j, std::min(count, j + TOGETHER), out);
}

}  // namespace

// w (columns, depth), fp32 if it is not bf16, as the right side of x wᵀ: panels of 64 columns, each (depth / 2, 64).
extern "C" void pack_weight(const void* w, int fp32, long columns, long depth, pair* out, int threads) {
  fp32 ? pack((const float*)w, columns, depth, out, threads) : pack((const bf16*)w, columns, depth, out, threads);
}

// w (depth, columns) as the right side of x w.
extern "C" void pack_transposed_weight(const void* w, int fp32, long depth, long columns, pair* out, int threads) {
  fp32 ? pack_transposed((const float*)w, depth, columns, out, threads)
       : pack_transposed((const bf16*)w, depth, columns, out, threads);
}

namespace {

template <class Then>
struct Finished {
  const float* bias;
  bf16* out;
  long stride;
  Then then;
  __m512 begin(long, long c) const { return _mm512_load_ps(bias + c); }
  void operator()(long r, long c, __m512 y) const { write(out + r * stride + c, then(y, r * stride + c)); }
};

template <class Then>
void dense_as(const bf16* x, const pair* packed, const bf16* bias, bf16* out, long rows, long columns, long depth,
              int threads, Then then) {
  const long panels = blocks(columns, PANEL), size = up(blocks(rows, blocks(rows, 96)), ROWS), chunks = blocks(rows, size);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (long task = 0; task < chunks * panels; ++task) {
    alignas(64) float shift[PANEL];
    const long column = task % panels * PANEL, wide = std::min(PANEL, columns - column);
    const long first = task / panels * size, last = std::min(rows, first + size);
    for (long c = 0; c < wide; c += LANES) _mm512_store_ps(shift + c, bias ? read(bias + column + c) : all(0));
    const long at = first * columns + column;
    auto here = [&](__m512 y, long i) { return then(y, at + i); };
    product(rows_of(x + first * depth, depth), last - first, {packed + column * (depth / 2), PANEL}, wide, depth / 2,
            Finished<decltype(here)>{shift, out + at, columns, here});
  }
}

}  // namespace

// out (rows, columns) = activation(x (rows, depth) · packed + bias) + other. `before`, if there is one, is what enters
// the activation. There is an activation or something to add, not both.
extern "C" void dense(const bf16* x, const pair* packed, const bf16* bias, const bf16* other, bf16* before, bf16* out,
                      long rows, long columns, long depth, long activation, int threads) {
  if (!rows) return;
  auto run = [&](auto then) { dense_as(x, packed, bias, out, rows, columns, depth, threads, then); };
  if (activation)
    run([=](__m512 y, long i) {
      if (before) write(before + i, y);
      return gelu(y, activation);
    });
  else if (other)
    run([=](__m512 y, long i) { return _mm512_add_ps(y, read(other + i)); });
  else
    run([](__m512 y, long) { return y; });
}

constexpr long CHUNK = 96;  // outputs whose gradients one thread computes at a time

// Rows of g and of x that `weight_gradient` lays out at a time.
extern "C" long weight_gradient_rows(long rows) { return up(blocks(rows, std::max(1L, blocks(rows, 2048))), 2); }

// The gradient (columns, depth), in fp32, of a layer's weight, gᵀ x for g (rows, columns) and x (rows, depth), and if
// `bias` is there the sum of g over rows. `left` and `right` are for `weight_gradient_rows` rows of g and x.
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

// (x − mean) / √(variance + eps) · weight + bias of every row.
extern "C" void layer_norm(const bf16* x, const bf16* weight, const bf16* bias, bf16* out, long rows, long columns,
                           float eps, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long r = 0; r < rows; ++r) {
    const bf16* from = x + r * columns;
    __m512 sum = all(0), squares = all(0);
    for (long c = 0; c < columns; c += LANES) sum = _mm512_add_ps(sum, read(from + c));
    const __m512 mean = all(_mm512_reduce_add_ps(sum) / columns);
    for (long c = 0; c < columns; c += LANES) {
      const __m512 rest = _mm512_sub_ps(read(from + c), mean);
      squares = _mm512_fmadd_ps(rest, rest, squares);
    }
    const __m512 factor = all(1 / std::sqrt(_mm512_reduce_add_ps(squares) / columns + eps));
    for (long c = 0; c < columns; c += LANES) {
      const __m512 unit = _mm512_mul_ps(_mm512_sub_ps(read(from + c), mean), factor);
      write(out + r * columns + c, _mm512_fmadd_ps(unit, read(weight + c), read(bias + c)));
    }
  }
}

// The gradient of x (count) from that of GELU(x).
extern "C" void gelu_backward(const bf16* gradient, const bf16* x, bf16* out, long count, long activation, int threads) {
#pragma omp parallel for num_threads(threads)
  for (long i = 0; i < count; i += LANES) {
    const __m512 y = read(x + i);
    const Gate gate = activation == TANH ? by_tanh(y) : by_erf(y);
    write(out + i, _mm512_mul_ps(read(gradient + i), _mm512_fmadd_ps(y, gate.slope, gate.value)));
  }
}

// --- attention ----------------------------------------------------------------------------------------------------------

struct Attention {
  long pictures, heads, queries, keys, width;
  long q[3], k[3], v[3], out[3];  // from a picture, a head, a token to the next
  float scale;
  int threads;
};

namespace {

template <class T>
T* head(T* x, const long* strides, long picture, long head) {
  return x + picture * strides[0] + head * strides[1];
}

// Scores lie with keys as rows, so that what belongs to one query is in one lane.
struct Softmax {
  float *greatest, *sum;  // of each query
};

// exp of scores (keys, queries), rounded and in pairs of keys; scores times `factor` are logarithms to base 2.
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

// What the queries [from, to) of one head gather; `lse` (logarithms to base 2 of their sums) may be missing.
void gather(const Attention& a, const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, long from, long to) {
  const long d = a.width, count = blocks(a.keys, 2);
  scratch.reserve(sizeof(float) * (QUERIES * (d / 2 + d + 2) + count * (d + 3 * QUERIES)) + 1024);
  pair *turned = scratch.take<pair>(QUERIES * d / 2), *values = scratch.take<pair>(count * d);
  pair* raised = scratch.take<pair>(count * QUERIES);
  float *scores = scratch.take<float>(2 * count * QUERIES), *mixed = scratch.take<float>(QUERIES * d);
  const Softmax softmax{scratch.take<float>(QUERIES), scratch.take<float>(QUERIES)};
  fetch(v, a.v[2], a.keys, d), fetch(k, a.k[2], a.keys, d), fetch(q + from * a.q[2], a.q[2], to - from, d);
  interleave(v, a.v[2], a.keys, d, values, d, count);
  for (long first = from, left = blocks(to - from, QUERIES); left > 0; --left) {
    const long n = std::min(blocks(blocks(to - first, LANES), left) * LANES, to - first), wide = up(n, LANES);
    turn(q + first * a.q[2], a.q[2], n, d, turned, wide);
    multiply(rows_of(k, a.k[2]), a.keys, {turned, wide}, wide, d / 2, scores, wide);
    raise(scores, a.keys, wide, a.scale * LOG2E, raised, softmax);
    multiply({raised, 1, wide}, n, {values, d}, d, count, mixed, d);
    for (long i = 0; i < n; ++i) {
      if (lse) lse[first + i] = softmax.greatest[i] + std::log2(softmax.sum[i]);
      const __m512 share = all(1 / softmax.sum[i]);
      for (long c = 0; c < d; c += LANES)
        write(out + (first + i) * a.out[2] + c, _mm512_mul_ps(_mm512_loadu_ps(mixed + i * d + c), share));
    }
    first += n;
  }
}

}  // namespace

// softmax(q kᵀ · scale) v
extern "C" void attention(const Attention* a, const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse) {
  const long heads = a->pictures * a->heads;
  if (!heads || !a->queries) return;
  const long parts = std::min(blocks(2 * a->threads, heads), blocks(a->queries, QUERIES));  // of few heads
  const long size = up(blocks(a->queries, parts), LANES);
#pragma omp parallel for num_threads(a->threads) schedule(dynamic)
  for (long task = 0; task < heads * parts; ++task) {
    const long one = task / parts, b = one / a->heads, h = one % a->heads, from = task % parts * size;
    gather(*a, head(q, a->q, b, h), head(k, a->k, b, h), head(v, a->v, b, h), head(out, a->out, b, h),
           lse ? lse + one * a->queries : nullptr, from, std::min(a->queries, from + size));
  }
}

namespace {

struct Gradients {
  bf16 *q, *k, *v;
};

constexpr long MOST_QUERIES = 256;  // at a time, on the way back: what belongs to them fits into the second cache

struct Way {  // what the way back through one head keeps, for up to 256 queries
  pair *q_turned, *g_turned, *q_pairs, *g_pairs, *k_pairs;
  pair *p, *s, *s_pairs;  // (keys, queries) rounded: softmax, gradient of scores, and that with keys in pairs
  float *lse, *inner, *scores, *through;
  float *sum_q, *sum_k, *sum_v;
};

Way reserve(long keys, long queries, long d) {
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
void through_softmax(const Attention& a, const bf16* k, const bf16* v, long wide, const Way& w) {
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

// The gradients of one head's queries, keys and values, which lie as those do.
void gather_backward(const Attention& a, const bf16* q, const bf16* k, const bf16* v, const bf16* out, const bf16* g,
                     const float* lse, Gradients to) {
  const long d = a.width, count = blocks(a.keys, 2);
  const Way w = reserve(a.keys, up(std::min(a.queries, MOST_QUERIES), LANES), d);
  fetch(k, a.k[2], a.keys, d), fetch(v, a.v[2], a.keys, d), fetch(q, a.q[2], a.queries, d);
  fetch(out, a.out[2], a.queries, d), fetch(g, a.out[2], a.queries, d);
  interleave(k, a.k[2], a.keys, d, w.k_pairs, d, count);
  for (long first = 0; first < a.queries; first += MOST_QUERIES) {
    const long n = std::min(MOST_QUERIES, a.queries - first), wide = up(n, LANES);
    const bf16 *queries = q + first * a.q[2], *gradients = g + first * a.out[2], *mixed = out + first * a.out[2];
    turn(queries, a.q[2], n, d, w.q_turned, wide), turn(gradients, a.out[2], n, d, w.g_turned, wide);
    interleave(queries, a.q[2], n, d, w.q_pairs, d, wide / 2), interleave(gradients, a.out[2], n, d, w.g_pairs, d, wide / 2);
    for (long i = 0; i < wide; ++i) {  // of queries that are not there no exp is left
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

// The gradients of q, k and v, which lie as those do, from `g`, that of `out`, which lies as that does.
extern "C" void attention_backward(const Attention* a, const bf16* q, const bf16* k, const bf16* v, const bf16* out,
                                   const bf16* g, const float* lse, bf16* of_q, bf16* of_k, bf16* of_v) {
#pragma omp parallel for num_threads(a->threads) schedule(dynamic)
  for (long task = 0; task < a->pictures * a->heads; ++task) {
    const long b = task / a->heads, h = task % a->heads;
    gather_backward(*a, head(q, a->q, b, h), head(k, a->k, b, h), head(v, a->v, b, h), head(out, a->out, b, h),
                    head(g, a->out, b, h), lse + task * a->queries,
                    {head(of_q, a->q, b, h), head(of_k, a->k, b, h), head(of_v, a->v, b, h)});
  }
}
