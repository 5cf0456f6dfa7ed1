// Groups of elements to codes and back: coder.py and floats.py on a GPU, with the same bits.
//
// A thread takes one group: consecutive threads take consecutive groups of a cell, so that codes and scales lie side by
// side, and elements do where their stride is not 1. No shared memory and no barriers, so the threads may run in any
// order: the tests compile this very file for the host and run them one after another.

struct Cell {
    long long source;  // of the cell in its first block, in bytes from the payload's begin
    long long block;   // bytes from one block to the next
    long long scales, minima, codes;  // in bytes from the encoded object's begin
    long long groups;  // of the cell
    long long run, across, stride;  // see Cut in cuts.py
    long long outer;   // pieces of run * stride elements in one block of the cell
};

#ifdef __CUDACC_RTC__
// CuPy has NVRTC flush subnormals to zero and lets it fuse products and sums; these instructions do neither.
#define EXACT(name, instruction)                                            \
    __device__ float name(float a, float b) {                               \
        float c;                                                            \
        asm(instruction " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));         \
        return c;                                                           \
    }
EXACT(add, "add.rn.f32")
EXACT(subtract, "sub.rn.f32")
EXACT(multiply, "mul.rn.f32")
EXACT(divide, "div.rn.f32")
__device__ unsigned bits_of(float value) { return __float_as_uint(value); }
__device__ float of_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ unsigned nearest(float value) { return __float2uint_rn(value); }
#else
static float add(float a, float b) { return a + b; }
static float subtract(float a, float b) { return a - b; }
static float multiply(float a, float b) { return a * b; }
static float divide(float a, float b) { return a / b; }
static unsigned bits_of(float value) { unsigned bits; __builtin_memcpy(&bits, &value, 4); return bits; }
static float of_bits(unsigned bits) { float value; __builtin_memcpy(&value, &bits, 4); return value; }
static unsigned nearest(float value) { return (unsigned)__builtin_rintf(value); }
#endif

// 2**120 and its inverse, 2**112 and its inverse: what lies between the exponents of float32 and of e4m3 and float16.
constexpr unsigned E4M3 = (127u + 120) << 23, E4M3_INVERSE = (127u - 120) << 23;
constexpr unsigned HALF = (127u + 112) << 23, HALF_INVERSE = (127u - 112) << 23;

__device__ unsigned shrink(unsigned bits, unsigned drop, unsigned sign) {
    bits = (bits + (1u << (drop - 1))) >> drop;
    return (bits & (sign - 1)) | (bits >> (drop == 20 ? 4 : 3) & sign);
}

__device__ unsigned expand(unsigned bits, unsigned drop, unsigned sign) {
    return (bits + (bits & sign) * (drop == 20 ? 15 : 7)) << drop;
}

__device__ float widen(const char* element, int kind) {
    if (kind == 3) return *(const float*)element;
    const unsigned bits = *(const unsigned short*)element;
    return kind == 1 ? of_bits(bits << 16) : multiply(of_bits(expand(bits, 13, 0x8000)), of_bits(HALF));
}

__device__ void narrow(float value, char* element, int kind) {
    if (kind == 3) *(float*)element = value;
    else if (kind == 1) *(unsigned short*)element = (bits_of(value) + 0x8000) >> 16;
    else *(unsigned short*)element = shrink(bits_of(multiply(value, of_bits(HALF_INVERSE))), 13, 0x8000);
}

__device__ unsigned up(float value) {
    const unsigned bits = ((bits_of(value) & 0x7FFFFFFF) + 0xFFFF) >> 16;
    return bits < 0x80 ? 0x80 : bits;
}

__device__ unsigned down(float value) {
    const unsigned bits = bits_of(value);
    return (bits + (bits >> 31 ? 0xFFFF : 0)) >> 16;
}

// Scales and minima may stand at odd addresses.
__device__ void put(char* at, unsigned number) {
    at[0] = (char)number;
    at[1] = (char)(number >> 8);
}

__device__ float get(const char* at) {
    return of_bits(((unsigned)(unsigned char)at[0] | (unsigned)(unsigned char)at[1] << 8) << 16);
}

// Comparisons of numbers flush subnormals, those of whole numbers do not.
__device__ int ordered(float value) {
    const int bits = (int)bits_of(value);
    return bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

__device__ float unordered(int order) { return of_bits((unsigned)(order < 0 ? order ^ 0x7FFFFFFF : order)); }

// The elements of one group. What is counted here is within one cell: 32 bits hold it, and divide faster.
struct Group {
    long long first;  // of its first element, in bytes from the cell's begin
    long long block;
    unsigned size, run, step;  // step: bytes from one element to the next

    __device__ Group(const Cell& cell, unsigned group, int kind) : block(cell.block), run((unsigned)cell.run) {
        const unsigned width = kind == 3 ? 4 : 2, stride = (unsigned)cell.stride, outer = (unsigned)cell.outer;
        const unsigned piece = group / stride;
        size = run * (unsigned)cell.across;
        step = stride * width;
        first = piece / outer * cell.across * block + (piece % outer * run * stride + group % stride) * width;
    }

    __device__ long long at(unsigned i) const { return first + i / run * block + i % run * step; }
};

extern "C" __global__ void kvcore_quant_encode(
    const char* payload, char* encoded, const Cell* cells, long long count, long long tiles, int kind, int form,
    float limit, int* bad
) {
    for (long long item = blockIdx.x; item < count * tiles; item += gridDim.x) {
        const Cell cell = cells[item / tiles];
        const unsigned index = (unsigned)(item % tiles) * blockDim.x + threadIdx.x;
        if (index >= cell.groups) continue;
        const Group group(cell, index, kind);
        const char* source = payload + cell.source;
        int least = 0x7FFFFFFF, most = -0x7FFFFFFF;
        bool good = true;
#pragma unroll 1
        for (unsigned i = 0; i < group.size; i++) {
            const float value = widen(source + group.at(i), kind);
            good = good && value < limit && value > -limit;
            const int order = ordered(value);
            least = order < least ? order : least;
            most = order > most ? order : most;
        }
        if (!good) bad[item / tiles] = 1;
        const float high = unordered(most), low = unordered(least);
        char* codes = encoded + cell.codes + index;
        if (form == 1) {
            const float negated = of_bits(bits_of(low) ^ 0x80000000u);
            const float amount = ordered(high) > ordered(negated) ? high : negated;
            const unsigned scale = up(divide(amount, 448.0f));
            put(encoded + cell.scales + 2 * index, scale);
            const float inverse = divide(of_bits(E4M3_INVERSE), of_bits(scale << 16));
#pragma unroll 1
        for (unsigned i = 0; i < group.size; i++) {
                const float value = multiply(widen(source + group.at(i), kind), inverse);
                codes[i * cell.groups] = (char)shrink(bits_of(value), 20, 0x80);
            }
        } else {
            const unsigned minimum = down(add(low, 0.0f));  // which of two zeros is the lesser must not matter
            const float base = of_bits(minimum << 16);
            const unsigned scale = up(divide(subtract(high, base), 15.0f));
            put(encoded + cell.scales + 2 * index, scale);
            put(encoded + cell.minima + 2 * index, minimum);
            const float inverse = divide(1.0f, of_bits(scale << 16));
#pragma unroll 1
        for (unsigned i = 0; i < group.size / 2; i++) {
                const float first = subtract(widen(source + group.at(i), kind), base);
                const float other = subtract(widen(source + group.at(i + group.size / 2), kind), base);
                codes[i * cell.groups] = (char)(nearest(multiply(first, inverse)) | nearest(multiply(other, inverse)) << 4);
            }
        }
    }
}

extern "C" __global__ void kvcore_quant_decode(
    char* payload, const char* encoded, const Cell* cells, long long count, long long tiles, int kind, int form
) {
    for (long long item = blockIdx.x; item < count * tiles; item += gridDim.x) {
        const Cell cell = cells[item / tiles];
        const unsigned index = (unsigned)(item % tiles) * blockDim.x + threadIdx.x;
        if (index >= cell.groups) continue;
        const Group group(cell, index, kind);
        char* target = payload + cell.source;
        const char* codes = encoded + cell.codes + index;
        const float scale = get(encoded + cell.scales + 2 * index);
        if (form == 1) {
            const float factor = multiply(scale, of_bits(E4M3));
#pragma unroll 1
        for (unsigned i = 0; i < group.size; i++) {
                const unsigned code = (unsigned char)codes[i * cell.groups];
                narrow(multiply(of_bits(expand(code, 20, 0x80)), factor), target + group.at(i), kind);
            }
        } else {
            const float base = get(encoded + cell.minima + 2 * index);
#pragma unroll 1
        for (unsigned i = 0; i < group.size / 2; i++) {
                const unsigned pair = (unsigned char)codes[i * cell.groups];
                narrow(add(multiply((float)(pair & 15), scale), base), target + group.at(i), kind);
                narrow(add(multiply((float)(pair >> 4), scale), base), target + group.at(i + group.size / 2), kind);
            }
        }
    }
}
