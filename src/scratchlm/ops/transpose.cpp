// out = inᵀ of items of 2 or 4 bytes, in square tiles that stay in registers.
//
// A tile's rows are vectors of 16 bytes. Each round interleaves the rows of its halves, and log₂ SIDE
// rounds transpose it. Tiles are visited in squares of one cache line a side, so that lines are
// written whole. What is not finite is looked for on the way: in a few rows at a time, from end to
// end, which brings them into the cache at the rate of the memory.

#include <algorithm>
#include <cstdint>
#include <utility>

namespace {

constexpr long ROWS = 128;  // at a time: they stay in the cache until they are transposed

template <class Item>
struct Transpose {
    typedef Item Row __attribute__((vector_size(16)));
    typedef Item AnyRow __attribute__((vector_size(16), may_alias, aligned(alignof(Item))));
    static constexpr int SIDE = 16 / sizeof(Item), LINE = 64 / sizeof(Item);

    const Item* in;
    long in_stride;
    Item* out;
    long out_stride;

    template <int HALF, int... I>
    static Row zip(Row a, Row b, std::integer_sequence<int, I...>) {
#if defined(__clang__) || __GNUC__ >= 12
        return __builtin_shufflevector(a, b, (HALF * SIDE / 2 + I / 2 + I % 2 * SIDE)...);
#else
        return __builtin_shuffle(a, b, Row{(Item)(HALF * SIDE / 2 + I / 2 + I % 2 * SIDE)...});
#endif
    }

    void tile(long row, long column) const {
        constexpr std::make_integer_sequence<int, SIDE> lanes;
        Row a[SIDE], b[SIDE];
        for (int i = 0; i < SIDE; i++) a[i] = *(const AnyRow*)(in + (row + i) * in_stride + column);
        for (int n = 1; n < SIDE; n *= 2) {
            for (int i = 0; i < SIDE; i++) b[i] = a[i];
            for (int i = 0; i < SIDE / 2; i++) {
                a[2 * i] = zip<0>(b[i], b[i + SIDE / 2], lanes);
                a[2 * i + 1] = zip<1>(b[i], b[i + SIDE / 2], lanes);
            }
        }
        for (int i = 0; i < SIDE; i++) *(AnyRow*)(out + (column + i) * out_stride + row) = a[i];
    }

    void part(long row, long column, long last_row, long last_column) const {
        for (long c = column; c < last_column; c++)
            for (long r = row; r < last_row; r++)
                out[c * out_stride + r] = in[r * in_stride + c];
    }

    void panel(long row, long last_row, long columns) const {
        for (long c0 = 0; c0 < columns; c0 += LINE)
            for (long r0 = row; r0 < last_row; r0 += LINE)
                for (long c = c0; c < std::min(c0 + LINE, columns); c += SIDE)
                    for (long r = r0; r < std::min(r0 + LINE, last_row); r += SIDE) {
                        if (r + SIDE <= last_row && c + SIDE <= columns)
                            tile(r, c);
                        else
                            part(r, c, std::min(r + SIDE, last_row), std::min(c + SIDE, columns));
                    }
    }

    // The largest exponents; one of NaN or infinity is all ones.
    void look(long row, long last_row, long columns, Item exponent, Item (&top)[LINE]) const {
        for (long r = row; r < last_row; r++) {
            const Item* at = in + r * in_stride;
            long c = 0;
            for (; c + LINE <= columns; c += LINE)
                for (int k = 0; k < LINE; k++) top[k] = std::max<Item>(top[k], at[c + k] & exponent);
            for (; c < columns; c++) top[0] = std::max<Item>(top[0], at[c] & exponent);
        }
    }

    bool all(long rows, long columns, Item exponent) const {
        Item top[LINE] = {};
        for (long r = 0; r < rows; r += ROWS) {
            long last = std::min(r + ROWS, rows);
            look(r, last, columns, exponent, top);
            panel(r, last, columns);
        }
        return *std::max_element(top, top + LINE) != exponent;
    }
};

template <class Item>
bool transpose_of(const void* in, long in_stride, void* out, long out_stride, long rows,
                  long columns, long exponent) {
    Transpose<Item> work{(const Item*)in, in_stride, (Item*)out, out_stride};
    return work.all(rows, columns, (Item)exponent);
}

}  // namespace

// Returns whether all items are finite, given the bits of their exponent.
extern "C" int transpose(const void* in, long in_stride, void* out, long out_stride, long rows,
                         long columns, long item_bytes, long exponent) {
    auto run = item_bytes == 2 ? transpose_of<uint16_t> : transpose_of<uint32_t>;
    return run(in, in_stride, out, out_stride, rows, columns, exponent);
}
