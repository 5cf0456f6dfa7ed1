// Blocks of paged KV to and from dense memory: an arena slot, or a buffer that mirrors a part of one.
//
// A work item is one block of one layer; a thread block takes every gridDim.x-th. No shared memory and no barriers, so
// the threads may run in any order: the tests compile this very file for the host and run them one after another.

struct Layer {
    long long address;      // of block 0
    long long stride;       // bytes from one block to the next
    long long at;           // where this layer's blocks begin in an object
    long long block_bytes;
    long long segment;      // bytes of one contiguous piece of a block
    const long long* offsets;  // of the segments within a block; their count is block_bytes / segment
    long long bits;         // address, stride, segment and offsets, ORed: what they are all multiples of
};

struct Row {
    long long base;         // address of the object that the block belongs to, as if all of it were there
    long long index;        // the block's place in the object
    long long block;        // the engine's block id
};

struct alignas(16) Word16 { unsigned long long low, high; };

constexpr unsigned UNROLL = 4;  // loads in flight per thread, before their stores

template <typename Word, bool SCATTER>
__device__ void copy(const Layer& layer, char* dense, char* paged) {
    const unsigned words = layer.block_bytes / sizeof(Word), per_segment = layer.segment / sizeof(Word);
    const long long* __restrict__ offsets = layer.offsets;
    Word held[UNROLL];
    for (unsigned first = threadIdx.x; first < words; first += UNROLL * blockDim.x) {
        Word* from[UNROLL];
        Word* to[UNROLL];
#pragma unroll
        for (unsigned i = 0; i < UNROLL; i++) {
            const unsigned word = first + i * blockDim.x;
            if (word < words) {
                const unsigned segment = word / per_segment;
                Word* there = (Word*)(paged + offsets[segment]) + (word - segment * per_segment);
                Word* here = (Word*)dense + word;
                from[i] = SCATTER ? here : there;
                to[i] = SCATTER ? there : here;
                held[i] = *from[i];
            }
        }
#pragma unroll
        for (unsigned i = 0; i < UNROLL; i++)
            if (first + i * blockDim.x < words) *to[i] = held[i];
    }
}

template <bool SCATTER>
__device__ void run(const Row* rows, long long count, const Layer* layers, long long depth) {
    for (long long item = blockIdx.x; item < count * depth; item += gridDim.x) {
        const Layer layer = layers[item % depth];
        const Row row = rows[item / depth];
        char* dense = (char*)(row.base + layer.at + row.index * layer.block_bytes);
        char* paged = (char*)(layer.address + row.block * layer.stride);
        const unsigned odd = (unsigned)((long long)dense | layer.bits) & 15;
        if (odd == 0) copy<Word16, SCATTER>(layer, dense, paged);
        else if ((odd & 7) == 0) copy<unsigned long long, SCATTER>(layer, dense, paged);
        else if ((odd & 3) == 0) copy<unsigned, SCATTER>(layer, dense, paged);
        else if ((odd & 1) == 0) copy<unsigned short, SCATTER>(layer, dense, paged);
        else copy<unsigned char, SCATTER>(layer, dense, paged);
    }
}

extern "C" __global__ void kvcore_gather(const Row* rows, long long count, const Layer* layers, long long depth) {
    run<false>(rows, count, layers, depth);
}

extern "C" __global__ void kvcore_scatter(const Row* rows, long long count, const Layer* layers, long long depth) {
    run<true>(rows, count, layers, depth);
}
