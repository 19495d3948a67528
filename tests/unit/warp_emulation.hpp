// A warp of 32 lanes on a CPU, so that arenas/xxh3.cu itself (not a copy of its algorithm) runs without a GPU.
//
// Each lane is a fiber with a stack of its own. A shuffle is where lanes meet: a lane leaves its value on the board
// and lets the next lane run; when its turn comes again, every other lane has left its own. Two boards take turns,
// because a lane may already post to the next one while others still read this one.
//
// Program: stdin = u32 count, u32 warps per block, then per piece u64 size, u64 skipped bytes before it, its bytes;
// stdout = 16 bytes per piece.

#include <sys/mman.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __constant__ static const

struct ulonglong2 {
    unsigned long long x, y;
};
struct Index {
    unsigned x, y;
};

static Index threadIdx, blockIdx, blockDim;

static const int LANES = 32;
static ucontext_t lanes[LANES], finished;
static unsigned long long boards[2][LANES];
static int shuffles_done[LANES];
static unsigned running;

static void run_lane(unsigned lane) {
    const unsigned from = running;
    running = lane;
    threadIdx.x = lane;
    swapcontext(&lanes[from], &lanes[lane]);
}

static unsigned long long __shfl_xor_sync(unsigned, unsigned long long value, int distance) {
    const unsigned lane = running;
    unsigned long long* board = boards[shuffles_done[lane]++ % 2];
    board[lane] = value;
    run_lane((lane + 1) % LANES);
    if (shuffles_done[(lane + LANES - 1) % LANES] < shuffles_done[lane]) {
        fprintf(stderr, "lane %u passed a shuffle that another lane did not reach\n", lane);
        abort();
    }
    return board[lane ^ distance];
}

static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

static ulonglong2 __ldcs(const ulonglong2* from) {
    if ((uintptr_t)from % 16) abort();  // a GPU faults
    return *from;
}

#include KERNEL

static const Span* spans;
static ulonglong2* digests;
static unsigned num_spans;

static void lane_main() {
    xxh3_128(spans, digests, num_spans);
    if (running + 1 < (unsigned)LANES) run_lane(running + 1);  // lanes end in order; the last returns to `finished`
}

static void run_warp() {
    static std::vector<std::vector<char>> stacks(LANES, std::vector<char>(64 << 10));
    memset(shuffles_done, 0, sizeof shuffles_done);
    for (int lane = 0; lane < LANES; lane++) {
        getcontext(&lanes[lane]);
        lanes[lane].uc_stack.ss_sp = stacks[lane].data();
        lanes[lane].uc_stack.ss_size = stacks[lane].size();
        lanes[lane].uc_link = &finished;
        makecontext(&lanes[lane], lane_main, 0);
    }
    running = 0;
    threadIdx.x = 0;
    swapcontext(&finished, &lanes[0]);
}

template <typename T>
static T take() {
    T value;
    if (fread(&value, sizeof value, 1, stdin) != 1) exit(2);
    return value;
}

// Bytes that end where an unreadable page begins, so that reading one byte too many is a crash here as well.
static unsigned char* guarded(size_t skipped, size_t size) {
    const size_t page = 4096, pages = (skipped + size + page - 1) / page * page;
    unsigned char* base = (unsigned char*)mmap(nullptr, pages + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + pages, page, PROT_NONE)) exit(3);
    const size_t begin = pages - size;
    return base + (skipped ? skipped : begin - begin % 16);
}

int main() {
    num_spans = take<uint32_t>();
    blockDim.y = take<uint32_t>();
    std::vector<Span> table(num_spans);
    std::vector<ulonglong2> results(num_spans);
    for (Span& span : table) {
        const uint64_t size = take<uint64_t>(), skipped = take<uint64_t>();
        unsigned char* bytes = guarded(skipped, size);
        if (fread(bytes, 1, size, stdin) != size) exit(2);
        span.address = (u64)(uintptr_t)bytes;
        span.size_bytes = size;
    }
    spans = table.data();
    digests = results.data();
    const unsigned num_blocks = (num_spans + blockDim.y - 1) / blockDim.y;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++)
        for (threadIdx.y = 0; threadIdx.y < blockDim.y; threadIdx.y++) run_warp();
    return fwrite(results.data(), 16, num_spans, stdout) == num_spans ? 0 : 4;
}
