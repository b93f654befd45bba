// Tiles of one instruction set, of which skinny_gemm.h defines Lanes and OUTPUTS: it includes this once for each.

constexpr int TALLEST = sizeof OUTPUTS / sizeof *OUTPUTS - 1;

// `fetches`: the next tile's weights are asked for meanwhile, into the second-level cache. A read of memory that the
// processor foresees ends at a page, and a row of a weight is seldom longer.
template <int ROWS, int WIDTH, bool FETCHES>
SKINNY_INLINE void compute_tile(const Task& task, int64_t row, int64_t output) {
    const int64_t inputs = task.inputs, whole = inputs / LANES * LANES;
    const float *rows = task.rows + row * inputs, *weight = task.weight + output * inputs, *next = weight + WIDTH * inputs;
    Lanes sums[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < WIDTH; o++) sums[r][o] = zeros();
    for (int64_t at = 0; at < whole; at += LANES) {
        Lanes weights[WIDTH];
#pragma GCC unroll 8
        for (int o = 0; o < WIDTH; o++) weights[o] = load(weight + o * inputs + at);
        if (FETCHES)
#pragma GCC unroll 8
            for (int o = 0; o < WIDTH; o++) _mm_prefetch((const char*)(next + o * inputs + at), _MM_HINT_T1);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const Lanes given = load(rows + r * inputs + at);
#pragma GCC unroll 8
            for (int o = 0; o < WIDTH; o++) sums[r][o] = multiply_add(given, weights[o], sums[r][o]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int o = 0; o < WIDTH; o++) {
            float sum = add_up(sums[r][o]);
            if (whole < inputs) sum += add_rest(rows + r * inputs + whole, weight + o * inputs + whole, inputs - whole);
            store(task, row + r, output + o, sum);
        }
}

template <int ROWS, int WIDTH>
__attribute__((noinline)) static void compute_columns(const Task& task, int64_t row, int64_t output, bool fetches) {
    if (fetches) return compute_tile<ROWS, WIDTH, true>(task, row, output);
    compute_tile<ROWS, WIDTH, false>(task, row, output);
}

template <int ROWS>
static void compute_rows(int64_t rows, const Task& task, int64_t row, int64_t begin, int64_t end, bool fetches) {
    if constexpr (ROWS > 0) {
        if (rows < ROWS) return compute_rows<ROWS - 1>(rows, task, row, begin, end, fetches);
        constexpr int WIDTH = OUTPUTS[ROWS];
        for (; begin + WIDTH <= end; begin += WIDTH) compute_columns<ROWS, WIDTH>(task, row, begin, fetches);
        for (; begin < end; begin++) compute_columns<ROWS, 1>(task, row, begin, fetches);
    }
}

// Outputs from `begin` to `end`, a tile's width at a time for all rows: the first rows fetch the weights.
static void compute(const Task& task, int64_t begin, int64_t end) {
    const int64_t tiles = (task.count + TALLEST - 1) / TALLEST, height = (task.count + tiles - 1) / tiles;
    const int64_t width = OUTPUTS[height];
    for (int64_t output = begin; output < end; output += width) {
        const int64_t stop = output + width < end ? output + width : end;
        for (int64_t row = 0; row < task.count; row += height) {
            const int64_t rows = task.count - row < height ? task.count - row : height;
            compute_rows<TALLEST>(rows, task, row, output, stop, row == 0);
        }
    }
}
