// What a step does on a CPU: pages of keys and values and the weights of a few tokens' products are read in place, once; what
// is done to single tokens in between is one pass each.
// A plain C interface for native.py. Vectors are the compiler's own, so one source serves every instruction set.
//
// Invariant: a token's result does not depend on what else is in the batch or on the number of threads. Work is cut into fixed
// pieces whose number depends on the row alone, and pieces are summed in their order.
//
// 16-bit numbers are bfloat16; all sums are float32.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>
#if defined(__linux__) && defined(_OPENMP)
#include <omp.h>
#include <sched.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 3;  // 32 registers: 8 tokens by 3 columns of sums stay in them
#elif defined(__AVX2__) || defined(__AVX__)
constexpr int LANES = 8, COLUMNS = 1;
#else
constexpr int LANES = 4, COLUMNS = 2;
#endif
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Int __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half __attribute__((vector_size(LANES * 2)));

constexpr int TOKENS = 8;              // rows of x that are multiplied together
constexpr int64_t SHARE = 128 << 10;   // bytes of weights that a thread takes at a time
constexpr int64_t PIECE = 512;         // slots of a row that one thread reads for one KV head
constexpr int64_t BLOCK = 128;         // slots whose scores are held at once; divides PIECE
constexpr float NEVER = -std::numeric_limits<float>::infinity();

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline Vec load(const uint16_t* p) {
    Half h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, Int) << 16);
}
template <class T> inline Vec load_some(const T* p, int64_t count) {  // zeros behind
    T held[LANES] = {};
    std::memcpy(held, p, count * sizeof(T));
    return load(held);
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline float narrow(float x, const float*) { return x; }
inline uint16_t narrow(float x, const uint16_t*) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widen(float x) { return x; }
inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

template <int N> struct Lanes { typedef float Type __attribute__((vector_size(N * 4))); };
template <int N> inline float sum_lanes(const typename Lanes<N>::Type& v) {  // halves onto one another
    typename Lanes<N / 2>::Type low, high;
    std::memcpy(&low, &v, sizeof low);
    std::memcpy(&high, (const char*)&v + sizeof low, sizeof high);
    return sum_lanes<N / 2>(low + high);
}
template <> inline float sum_lanes<2>(const Lanes<2>::Type& v) { return v[0] + v[1]; }
inline float sum(Vec v) { return sum_lanes<LANES>(v); }

// The sums of four vectors to four places.
inline void sums(const Vec* v, float* to) {
#if defined(__AVX512F__)
    typedef float Four __attribute__((vector_size(16)));
#define BOTH(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
    const Vec ab = BOTH(v[0], v[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   BOTH(v[0], v[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const Vec cd = BOTH(v[2], v[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                   BOTH(v[2], v[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    Vec all = BOTH(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
              BOTH(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    all += BOTH(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    const Four done = BOTH(all, all, 0, 4, 8, 12) + BOTH(all, all, 1, 5, 9, 13);
#undef BOTH
    std::memcpy(to, &done, sizeof done);
#else
    for (int i = 0; i < 4; i++) to[i] = sum(v[i]);
#endif
}

inline Vec exponential(Vec x) {  // within 2 units in the last place; 0 below -87
    const Vec magic = Vec{} + 12582912.0f;  // adding it rounds to an integer
    Vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    Vec r = x - n * 0.693145752f - n * 1.42860677e-6f;  // ln 2 in two parts
    Vec y = 1.0f + r * (1.0f + r * (1 / 2.0f + r * (1 / 6.0f + r * (1 / 24.0f + r * (1 / 120.0f + r * (1 / 720.0f + r * (1 / 5040.0f)))))));
    Vec power = (Vec)(((Int)shifted - (Int)magic + 127) << 23);
    return x < -87.0f ? Vec{} : y * power;
}

// -- y = x w' + bias

template <class T, int M, int N>
inline void tile(const T* x, int64_t step, const T* w, const T* bias, T* y, int64_t width, int64_t depth) {
    Vec total[N][M] = {};
    int64_t i = 0;
    for (; i + LANES <= depth; i += LANES) {
        Vec column[N];
        for (int n = 0; n < N; n++) {
            __builtin_prefetch(w + (n + N) * depth + i);  // the next tile
            column[n] = load(w + n * depth + i);
        }
        for (int m = 0; m < M; m++) {
            Vec row = load(x + m * step + i);
            for (int n = 0; n < N; n++) total[n][m] += row * column[n];
        }
    }
    if (i < depth)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) total[n][m] += load_some(x + m * step + i, depth - i) * load_some(w + n * depth + i, depth - i);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) y[m * width + n] = narrow(sum(total[n][m]) + (bias ? widen(bias[n]) : 0.0f), y);
}

template <class T, int M>
void columns(const T* x, int64_t step, const T* w, const T* bias, T* y, int64_t width, int64_t depth, int64_t from, int64_t to) {
    int64_t n = from;
    for (; n + COLUMNS <= to; n += COLUMNS) tile<T, M, COLUMNS>(x, step, w + n * depth, bias ? bias + n : bias, y + n, width, depth);
    for (; n < to; n++) tile<T, M, 1>(x, step, w + n * depth, bias ? bias + n : bias, y + n, width, depth);
}

template <class T>
void linear(const T* x, int64_t step, const T* w, const T* bias, T* y, int64_t rows, int64_t width, int64_t depth, int threads) {
    using Columns = void (*)(const T*, int64_t, const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t);
    static const Columns of[] = {columns<T, 1>, columns<T, 2>, columns<T, 3>, columns<T, 4>,
                                 columns<T, 5>, columns<T, 6>, columns<T, 7>, columns<T, 8>};
    const int64_t share = std::max<int64_t>(COLUMNS, SHARE / int64_t(depth * sizeof(T)) / COLUMNS * COLUMNS);
    const int64_t shares = (width + share - 1) / share;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < shares; i++)
        for (int64_t m = 0; m < rows; m += TOKENS)
            of[std::min<int64_t>(TOKENS, rows - m) - 1](x + m * step, step, w, bias, y + m * width, width, depth, i * share,
                                                        std::min(width, (i + 1) * share));
}

// -- what is done to each token by itself

constexpr int64_t FEW = 16;  // tokens that are not worth a second thread

// x / root mean square * weight, each rounded as the model's dtype is.
template <class T> void norm(const T* x, const T* weight, T* y, int64_t size, float eps) {
    Vec squares{};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load(x + i) * load(x + i);
    if (i < size) squares += load_some(x + i, size - i) * load_some(x + i, size - i);
    const float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
    for (int64_t j = 0; j < size; j++) y[j] = narrow(widen(narrow(widen(x[j]) * scale, y)) * widen(weight[j]), y);
}

template <class T>
void norms(const T* x, int64_t step, const T* weight, T* y, int64_t tokens, int64_t size, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++) norm(x + t * step, weight, y + t * size, size, eps);
}

// Heads of a token, normed where there are weights (heads by dim), then their halves turned by the token's angles.
template <class T>
void turn(const T* x, int64_t step, const T* weight, const T* cosine, const T* sine, T* y, int64_t tokens, int64_t heads, int64_t dim,
          float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const T *from = x + t * step + h * dim, *c = cosine + t * dim / 2, *s = sine + t * dim / 2;
            T* to = y + (t * heads + h) * dim;
            if (weight)
                norm(from, weight + h * dim, to, dim, eps);
            else
                std::copy(from, from + dim, to);
            for (int64_t i = 0; i < dim / 2; i++) {
                const float a = widen(to[i]), b = widen(to[i + dim / 2]), cos = widen(c[i]), sin = widen(s[i]);
                to[i] = narrow(a * cos - b * sin, to);
                to[i + dim / 2] = narrow(b * cos + a * sin, to);
            }
        }
}

// silu(first half) * second half.
template <class T> void gate(const T* x, T* y, int64_t tokens, int64_t size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens > FEW)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = std::min<int64_t>(LANES, size - i);
            const Vec g = load_some(x + 2 * t * size + i, count), up = load_some(x + (2 * t + 1) * size + i, count);
            const Vec low = -g < 88.0f ? -g : Vec{} + 88.0f;
            float lane[LANES];
            store(lane, g / (1.0f + exponential(low)));
            for (int64_t j = 0; j < count; j++) y[t * size + i + j] = narrow(widen(narrow(lane[j], y)) * up[j], y);
        }
}

// Keys and values of new tokens into their pages.
template <class T>
void put(T* pages, const int64_t* entries, const int64_t* offsets, const T* k, int64_t k_step, const T* v, int64_t v_step, int64_t tokens,
         int64_t heads, int64_t page_size, int64_t dim, int64_t page_step) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            T* place = pages + entries[t] * page_step + (h * 2 * page_size + offsets[t]) * dim;
            std::copy(k + t * k_step + h * dim, k + t * k_step + (h + 1) * dim, place);
            std::copy(v + t * v_step + h * dim, v + t * v_step + (h + 1) * dim, place + page_size * dim);
        }
}

// -- attention

struct Rows {  // what paged_attention was given, see native.py
    const int32_t *entries, *lens, *starts;
    const int64_t *rows, *firsts;
    int64_t num_rows, table_step, q_step, q_head_step, num_kv_heads, group, page_size, dim, page_step;
    float scale;

    int64_t first(int64_t row) const { return firsts ? firsts[row] : row; }  // token
    int64_t tokens(int64_t row) const { return first(row + 1) - first(row); }
    int64_t start(int64_t token) const { return starts ? starts[token] : 0; }
    int64_t least_start(int64_t row) const {
        int64_t least = start(first(row));
        for (int64_t t = first(row) + 1; t < first(row + 1); t++) least = std::min(least, start(t));
        return least;
    }
};

struct Item { int64_t row, head, piece, place; };  // place: of its first query in the arrays of parts

struct Parts {  // of each piece: values summed by unnormalised weights, their sum, the largest score
    std::unique_ptr<float[]> values, totals, tops;
};

template <int Q, int K, class T>
inline void score(const float* q, int64_t q_step, const T* k, int64_t dim, float* out) {
    Vec total[Q][K] = {};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        Vec key[K];
        for (int j = 0; j < K; j++) key[j] = load(k + j * dim + d);
        for (int i = 0; i < Q; i++) {
            Vec query = load(q + i * q_step + d);
            for (int j = 0; j < K; j++) total[i][j] += query * key[j];
        }
    }
    if (d < dim)
        for (int j = 0; j < K; j++) {
            Vec key = load_some(k + j * dim + d, dim - d);
            for (int i = 0; i < Q; i++) total[i][j] += load(q + i * q_step + d) * key;
        }
    for (int i = 0; i < Q; i++) {
        if constexpr (K == 4)
            sums(total[i], out + i * BLOCK);
        else
            for (int j = 0; j < K; j++) out[i * BLOCK + j] = sum(total[i][j]);
    }
}

template <int Q, class T>
void scores(const float* q, int64_t q_step, const T* k, int64_t count, int64_t dim, float* out) {
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) score<Q, 4>(q, q_step, k + j * dim, dim, out + j);
    for (; j < count; j++) score<Q, 1>(q, q_step, k + j * dim, dim, out + j);
}

template <int Q, int D, class T>
inline void weigh(const float* weights, const T* v, int64_t count, int64_t dim, int64_t rest, float* out, int64_t out_step) {
    Vec total[Q][D];
    for (int i = 0; i < Q; i++)
        for (int d = 0; d < D; d++) total[i][d] = load(out + i * out_step + d * LANES);
    for (int64_t j = 0; j < count; j++) {
        Vec value[D];
        for (int d = 0; d < D; d++) value[d] = rest ? load_some(v + j * dim, rest) : load(v + j * dim + d * LANES);
        for (int i = 0; i < Q; i++)
            for (int d = 0; d < D; d++) total[i][d] += weights[i * BLOCK + j] * value[d];
    }
    for (int i = 0; i < Q; i++)
        for (int d = 0; d < D; d++) store(out + i * out_step + d * LANES, total[i][d]);
}

template <int Q, class T>
void values(const float* weights, const T* v, int64_t count, int64_t dim, float* out, int64_t out_step) {
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) weigh<Q, 4>(weights, v + d, count, dim, 0, out + d, out_step);
    for (; d + LANES <= dim; d += LANES) weigh<Q, 1>(weights, v + d, count, dim, 0, out + d, out_step);
    if (d < dim) weigh<Q, 1>(weights, v + d, count, dim, dim - d, out + d, out_step);
}

template <class T> struct Worker {  // one thread's scratch
    const Rows& in;
    const T *q, *pages;
    int64_t padded;  // dim, in whole vectors
    std::vector<float> queries, weights;

    Worker(const Rows& rows, const T* q_, const T* pages_) : in(rows), q(q_), pages(pages_), padded((rows.dim + LANES - 1) / LANES * LANES) {}

    void take_queries(const Item& item) {  // scaled, zeros behind
        const int64_t count = in.tokens(item.row) * in.group;
        queries.assign(count * padded, 0.0f);
        weights.resize(count * BLOCK);
        for (int64_t i = 0; i < count; i++) {
            const T* source = q + (in.first(item.row) + i / in.group) * in.q_step + (item.head * in.group + i % in.group) * in.q_head_step;
            for (int64_t d = 0; d < in.dim; d++) queries[i * padded + d] = widen(source[d]) * in.scale;
        }
    }

    const T* keys(const Item& item, int64_t slot) const {
        const int64_t entry = in.entries[in.rows[item.row] * in.table_step + slot / in.page_size];
        return pages + entry * in.page_step + (item.head * 2 * in.page_size + slot % in.page_size) * in.dim;
    }

    // Calls each(page's keys from the slot on, index in the block, count) for the runs of slots [from, to) that lie in one page.
    template <class Each> void runs(const Item& item, int64_t from, int64_t to, Each each) {
        for (int64_t slot = from; slot < to;) {
            const int64_t count = std::min(in.page_size - slot % in.page_size, to - slot);
            each(keys(item, slot), slot - from, count);
            slot += count;
        }
    }

    void run(const Item& item, Parts& parts) {
        take_queries(item);
        const int64_t tokens = in.tokens(item.row), count = tokens * in.group, length = in.lens[item.row];
        float *sums = parts.values.get() + item.place * padded, *totals = parts.totals.get() + item.place, *tops = parts.tops.get() + item.place;
        std::fill(sums, sums + count * padded, 0.0f);
        std::fill(totals, totals + count, 0.0f);
        std::fill(tops, tops + count, NEVER);
        const int64_t end = std::min(length, (item.piece + 1) * PIECE), least = in.least_start(item.row);
        for (int64_t base = item.piece * PIECE; base < end; base += BLOCK) {
            const int64_t from = std::max(base, least), to = std::min(end, base + BLOCK);
            if (from >= to) continue;
            runs(item, from, to, [&](const T* k, int64_t at, int64_t n) {
                for (int64_t i = 0; i < count; i += 4) {
                    const float* some = &queries[i * padded];
                    float* out = &weights[i * BLOCK + at];
                    switch (std::min<int64_t>(4, count - i)) {
                        case 1: scores<1>(some, padded, k, n, in.dim, out); break;
                        case 2: scores<2>(some, padded, k, n, in.dim, out); break;
                        case 3: scores<3>(some, padded, k, n, in.dim, out); break;
                        default: scores<4>(some, padded, k, n, in.dim, out);
                    }
                }
            });
            for (int64_t i = 0; i < count; i++) {
                const int64_t token = i / in.group;
                const int64_t low = in.start(in.first(item.row) + token) - from, high = length - tokens + token + 1 - from;
                soften(&weights[i * BLOCK], std::max<int64_t>(0, low), std::min(to - from, high), to - from, sums + i * padded, totals[i], tops[i]);
            }
            runs(item, from, to, [&](const T* k, int64_t at, int64_t n) {
                const T* v = k + in.page_size * in.dim;
                for (int64_t i = 0; i < count; i += 4) {
                    const float* some = &weights[i * BLOCK + at];
                    float* out = sums + i * padded;
                    switch (std::min<int64_t>(4, count - i)) {
                        case 1: values<1>(some, v, n, in.dim, out, padded); break;
                        case 2: values<2>(some, v, n, in.dim, out, padded); break;
                        case 3: values<3>(some, v, n, in.dim, out, padded); break;
                        default: values<4>(some, v, n, in.dim, out, padded);
                    }
                }
            });
        }
    }

    // A query's scores of a block to weights; only [low, high) of its slots are seen. What was summed before shrinks.
    void soften(float* line, int64_t low, int64_t high, int64_t slots, float* sums, float& total, float& top) {
        for (int64_t j = 0; j < std::min(low, slots); j++) line[j] = NEVER;
        for (int64_t j = std::max<int64_t>(0, high); j < BLOCK; j++) line[j] = NEVER;
        Vec most = Vec{} + top;
        for (int64_t j = 0; j < slots; j += LANES) {
            const Vec some = load(line + j);
            most = some > most ? some : most;
        }
        float largest = most[0];
        for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
        if (largest == NEVER) {
            std::fill(line, line + BLOCK, 0.0f);
            return;
        }
        if (largest > top) {
            const float shrink = std::exp(top - largest);
            total *= shrink;
            for (int64_t d = 0; d < padded; d++) sums[d] *= shrink;
            top = largest;
        }
        Vec seen{};
        for (int64_t j = 0; j < slots; j += LANES) {
            Vec weight = exponential(load(line + j) - top);
            store(line + j, weight);
            seen += weight;
        }
        total += sum(seen);
    }
};

template <class T>
void attend(const Rows& in, const T* q, const T* pages, T* out, float* lse, int threads) {
    std::vector<Item> items;
    std::vector<int64_t> begins;  // first item of each (row, head)
    int64_t queries = 0;
    for (int64_t row = 0; row < in.num_rows; row++)
        for (int64_t head = 0; head < in.num_kv_heads; head++) {
            begins.push_back(items.size());
            for (int64_t piece = in.least_start(row) / PIECE; piece * PIECE < in.lens[row]; piece++) {
                items.push_back({row, head, piece, queries});
                queries += in.tokens(row) * in.group;
            }
        }
    begins.push_back(items.size());
    const int64_t padded = (in.dim + LANES - 1) / LANES * LANES;
    Parts parts{std::unique_ptr<float[]>(new float[queries * padded]), std::unique_ptr<float[]>(new float[queries]),
                std::unique_ptr<float[]>(new float[queries])};
#pragma omp parallel num_threads(threads)
    {
        Worker<T> worker(in, q, pages);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++) worker.run(items[i], parts);
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < in.num_rows * in.num_kv_heads; pair++) {
            const int64_t row = pair / in.num_kv_heads, head = pair % in.num_kv_heads, num_heads = in.num_kv_heads * in.group;
            for (int64_t i = 0; i < in.tokens(row) * in.group; i++) {
                const int64_t place = (in.first(row) + i / in.group) * num_heads + head * in.group + i % in.group;
                float top = NEVER, total = 0;
                for (int64_t j = begins[pair]; j < begins[pair + 1]; j++) top = std::max(top, parts.tops[items[j].place + i]);
                std::vector<float> merged(in.dim, 0.0f);
                for (int64_t j = begins[pair]; j < begins[pair + 1] && top != NEVER; j++) {
                    const int64_t from = items[j].place + i;
                    const float share = std::exp(parts.tops[from] - top);
                    total += share * parts.totals[from];
                    for (int64_t d = 0; d < in.dim; d++) merged[d] += share * parts.values[from * padded + d];
                }
                for (int64_t d = 0; d < in.dim; d++) out[place * in.dim + d] = narrow(total > 0 ? merged[d] / total : 0.0f, out);
                lse[place] = top + std::log(total);
            }
        }
    }
}

}  // namespace

// One function for each dtype, named like linear_float32.
#define EXPORT(T, NAME)                                                                                                            \
    void linear_##NAME(const T* x, int64_t step, const T* w, const T* bias, T* y, int64_t rows, int64_t width, int64_t depth,     \
                       int threads) {                                                                                             \
        linear(x, step, w, bias, y, rows, width, depth, threads);                                                                 \
    }                                                                                                                             \
    void attend_##NAME(const Rows* in, const T* q, const T* pages, T* out, float* lse, int threads) {                             \
        attend(*in, q, pages, out, lse, threads);                                                                                 \
    }                                                                                                                             \
    void norm_##NAME(const T* x, int64_t step, const T* weight, T* y, int64_t tokens, int64_t size, float eps, int threads) {     \
        norms(x, step, weight, y, tokens, size, eps, threads);                                                                    \
    }                                                                                                                             \
    void turn_##NAME(const T* x, int64_t step, const T* weight, const T* cosine, const T* sine, T* y, int64_t tokens,             \
                     int64_t heads, int64_t dim, float eps, int threads) {                                                        \
        turn(x, step, weight, cosine, sine, y, tokens, heads, dim, eps, threads);                                                 \
    }                                                                                                                             \
    void gate_##NAME(const T* x, T* y, int64_t tokens, int64_t size, int threads) { gate(x, y, tokens, size, threads); }          \
    void put_##NAME(T* pages, const int64_t* entries, const int64_t* offsets, const T* k, int64_t k_step, const T* v,             \
                    int64_t v_step, int64_t tokens, int64_t heads, int64_t page_size, int64_t dim, int64_t page_step) {           \
        put(pages, entries, offsets, k, k_step, v, v_step, tokens, heads, page_size, dim, page_step);                             \
    }

extern "C" {
EXPORT(float, float32)
EXPORT(uint16_t, bfloat16)

// Binds thread i of the caller's team to cores[i]; 0 in `bound` where the system does not, and then every thread is as it was.
void pin(const int32_t* cores, int threads, int32_t* bound) {
#if defined(__linux__) && defined(_OPENMP)
    cpu_set_t before;
    int failed = sched_getaffinity(0, sizeof before, &before);
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cores[omp_get_thread_num()], &one);
        failed += omp_get_num_threads() != threads || sched_setaffinity(0, sizeof one, &one);
    }
    if (failed) {
#pragma omp parallel num_threads(threads)
        sched_setaffinity(0, sizeof before, &before);
    }
    *bound = !failed;
#else
    *bound = 0;
#endif
}
}
