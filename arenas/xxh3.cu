// XXH3-128 (seed 0, default secret) of many pieces of device memory at memory speed.
//
// XXH3 is a chain inside a piece: 1024-byte blocks fold into eight 64-bit accumulators, and a non-linear scramble
// after each block forbids working on the next one first. So the parallelism is across pieces: one warp a piece.
// Inside a block it is a sum: 16 stripes of 64 bytes, each adding to the eight accumulators independently. So:
//
//   lane l loads 16 bytes at l * 16 of each half block (fully coalesced): words 2p and 2p+1 (p = l % 4) of the
//   stripes l / 4 and 8 + l / 4. XXH3 swaps words only inside such a pair, so a lane needs no neighbour to add up;
//   three butterfly steps then sum the eight lanes of equal p, and every lane holds the pair's accumulators.
//
// To hide the latency of memory, DEPTH blocks of a warp are always under way, in registers.
// Any length above 240 bytes (below, XXH3 is another algorithm) and any piece at a multiple of 16 bytes will do.
// Algorithm: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH3 Algorithm Overview".
// This file also compiles as C++ under the emulation of a warp in tests/unit/warp_emulation.hpp.

typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef DEPTH
#define DEPTH 4  // blocks of 1 KiB under way per warp
#endif
#define WARP 32
#define ALL_LANES 0xffffffffu
#define STRIPE_BYTES 64
#define BLOCK_BYTES 1024
#define VECTORS_PER_BLOCK 64  // of 16 bytes
#define SECRET_BYTES 192
#define SCRAMBLE_WORD 16     // the scramble key is the secret's last 64 bytes
#define LAST_STRIPE_SECRET (SECRET_BYTES - STRIPE_BYTES - 7)
#define LOW_SECRET 11
#define HIGH_SECRET (SECRET_BYTES - STRIPE_BYTES - 11)

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define AVALANCHE 0x165667919E3779F9ull

// The specification's default secret as little-endian 64-bit words.
__constant__ u64 SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

struct Span {
    u64 address;     // of a multiple of 16
    u64 size_bytes;  // more than 240
};

struct Pair {
    u64 x, y;
};

// Eight bytes of the secret from any byte offset.
__device__ static inline u64 secret_at(u32 offset) {
    const u32 word = offset / 8, shift = offset % 8 * 8;
    return shift ? SECRET[word] >> shift | SECRET[word + 1] << (64 - shift) : SECRET[word];
}

__device__ static inline Pair secret_pair_at(u32 offset) {
    Pair key = {secret_at(offset), secret_at(offset + 8)};
    return key;
}

// Every word is read once: __ldcs keeps the stream from washing the L2 cache.
__device__ static inline Pair load(const ulonglong2* vector) {
    const ulonglong2 value = __ldcs(vector);
    Pair pair = {value.x, value.y};
    return pair;
}

__device__ static inline u64 load_unaligned(const unsigned char* bytes) {
    u64 word = 0;
    for (int i = 0; i < 8; i++) word |= (u64)bytes[i] << (8 * i);
    return word;
}

__device__ static inline u64 product_of_halves(u64 word) { return (u64)(u32)word * (u32)(word >> 32); }

__device__ static inline void accumulate(Pair& sum, Pair data, Pair key) {
    sum.x += data.y + product_of_halves(data.x ^ key.x);
    sum.y += data.x + product_of_halves(data.y ^ key.y);
}

// The sum over the eight lanes with the same pair of words, in each of them.
__device__ static inline Pair sum_over_stripes(Pair sum) {
#pragma unroll
    for (int distance = 4; distance < WARP; distance *= 2) {
        sum.x += __shfl_xor_sync(ALL_LANES, sum.x, distance);
        sum.y += __shfl_xor_sync(ALL_LANES, sum.y, distance);
    }
    return sum;
}

__device__ static inline u64 scrambled(u64 accumulator, u64 key) {
    return (accumulator ^ accumulator >> 47 ^ key) * PRIME32_1;
}

__device__ static inline u64 folded_product(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

// All four pairs of accumulators merged into one word, in every lane.
__device__ static inline u64 merged(Pair sum, Pair key, u64 start) {
    u64 word = folded_product(sum.x ^ key.x, sum.y ^ key.y);
    word += __shfl_xor_sync(ALL_LANES, word, 1);
    word += __shfl_xor_sync(ALL_LANES, word, 2);
    word += start;
    word = (word ^ word >> 37) * AVALANCHE;
    return word ^ word >> 32;
}

__device__ static inline u64 big_endian(u64 word) {
    u64 swapped = 0;
    for (int i = 0; i < 8; i++) swapped |= (word >> (8 * i) & 0xff) << (56 - 8 * i);
    return swapped;
}

__device__ static inline Pair initial_accumulators(u32 pair) {
    const Pair initial[4] = {
        {PRIME32_3, PRIME64_1}, {PRIME64_2, PRIME64_3}, {PRIME64_4, PRIME32_2}, {PRIME64_5, PRIME32_1}};
    return pair == 0 ? initial[0] : pair == 1 ? initial[1] : pair == 2 ? initial[2] : initial[3];
}

// digests[i] (16 canonical bytes: big-endian, high half first) = XXH3-128 of spans[i], for i < count.
// Launch with 32 threads in x and any number of warps in y; one warp takes one span.
extern "C" __global__ void xxh3_128(const Span* spans, ulonglong2* digests, u32 count) {
    const u32 index = blockIdx.x * blockDim.y + threadIdx.y;
    if (index >= count) return;  // the whole warp leaves together
    const u64 address = spans[index].address, size_bytes = spans[index].size_bytes;
    const u32 lane = threadIdx.x, pair = lane % 4, stripe = lane / 4;

    const Pair low_key = {SECRET[stripe + 2 * pair], SECRET[stripe + 2 * pair + 1]};
    const Pair high_key = {SECRET[8 + stripe + 2 * pair], SECRET[8 + stripe + 2 * pair + 1]};
    const Pair scramble_key = {SECRET[SCRAMBLE_WORD + 2 * pair], SECRET[SCRAMBLE_WORD + 2 * pair + 1]};
    Pair accumulators = initial_accumulators(pair);

    // The last block, even if it is whole, is not scrambled and ends with a stripe of its own.
    const u64 num_blocks = (size_bytes - 1) / BLOCK_BYTES;
    const ulonglong2* vectors = (const ulonglong2*)address + lane;
    Pair low[DEPTH], high[DEPTH];
#pragma unroll
    for (u32 slot = 0; slot < DEPTH; slot++) {
        if (slot < num_blocks) {
            low[slot] = load(vectors + slot * VECTORS_PER_BLOCK);
            high[slot] = load(vectors + slot * VECTORS_PER_BLOCK + WARP);
        }
    }
    for (u64 first = 0; first < num_blocks; first += DEPTH) {
#pragma unroll
        for (u32 slot = 0; slot < DEPTH; slot++) {
            const u64 block = first + slot;
            if (block < num_blocks) {
                Pair sum = {0, 0};
                accumulate(sum, low[slot], low_key);
                accumulate(sum, high[slot], high_key);
                if (block + DEPTH < num_blocks) {
                    low[slot] = load(vectors + (block + DEPTH) * VECTORS_PER_BLOCK);
                    high[slot] = load(vectors + (block + DEPTH) * VECTORS_PER_BLOCK + WARP);
                }
                sum = sum_over_stripes(sum);
                accumulators.x = scrambled(accumulators.x + sum.x, scramble_key.x);
                accumulators.y = scrambled(accumulators.y + sum.y, scramble_key.y);
            }
        }
    }

    const u32 num_stripes = (u32)((size_bytes - 1) % BLOCK_BYTES) / STRIPE_BYTES;
    const ulonglong2* rest = vectors + num_blocks * VECTORS_PER_BLOCK;
    Pair sum = {0, 0};
    if (stripe < num_stripes) accumulate(sum, load(rest), low_key);
    if (8 + stripe < num_stripes) accumulate(sum, load(rest + WARP), high_key);
    if (stripe == 0) {  // the last 64 bytes, which may overlap those before and start anywhere
        const unsigned char* last = (const unsigned char*)(address + size_bytes - STRIPE_BYTES) + 16 * pair;
        const Pair data = {load_unaligned(last), load_unaligned(last + 8)};
        accumulate(sum, data, secret_pair_at(LAST_STRIPE_SECRET + 16 * pair));
    }
    sum = sum_over_stripes(sum);
    accumulators.x += sum.x;
    accumulators.y += sum.y;

    const u64 low_half = merged(accumulators, secret_pair_at(LOW_SECRET + 16 * pair), size_bytes * PRIME64_1);
    const u64 high_half = merged(accumulators, secret_pair_at(HIGH_SECRET + 16 * pair), ~(size_bytes * PRIME64_2));
    if (lane == 0) {
        ulonglong2 digest;
        digest.x = big_endian(high_half);
        digest.y = big_endian(low_half);
        digests[index] = digest;
    }
}
