// out = inᵀ of items of 2 or 4 bytes, in tiles of 8 × 8 that stay in registers.
//
// Three perfect shuffles (a₀ a₃₂ a₁ a₃₃ …) of the 64 items of a tile transpose it: each moves one of
// the three bits of the column to the row. Compilers make vector instructions of them. Tiles are
// visited in squares of one cache line a side, so that lines are written whole.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr long SIDE = 8, HALF = SIDE * SIDE / 2;

template <class Item>
void shuffle(Item* to, const Item* from) {
    for (long k = 0; k < HALF; k++) {
        to[2 * k] = from[k];
        to[2 * k + 1] = from[k + HALF];
    }
}

template <class Item>
struct Transpose {
    const Item* in;
    long in_stride;
    Item* out;
    long out_stride;

    void tile(long row, long column) const {
        Item a[SIDE * SIDE], b[SIDE * SIDE];
        for (long i = 0; i < SIDE; i++)
            std::memcpy(a + i * SIDE, in + (row + i) * in_stride + column, SIDE * sizeof(Item));
        shuffle(b, a);
        shuffle(a, b);
        shuffle(b, a);
        for (long i = 0; i < SIDE; i++)
            std::memcpy(out + (column + i) * out_stride + row, b + i * SIDE, SIDE * sizeof(Item));
    }

    void part(long row, long column, long last_row, long last_column) const {
        for (long c = column; c < last_column; c++)
            for (long r = row; r < last_row; r++)
                out[c * out_stride + r] = in[r * in_stride + c];
    }

    void all(long rows, long columns) const {
        constexpr long LINE = 64 / sizeof(Item);
        for (long c0 = 0; c0 < columns; c0 += LINE)
            for (long r0 = 0; r0 < rows; r0 += LINE)
                for (long c = c0; c < std::min(c0 + LINE, columns); c += SIDE)
                    for (long r = r0; r < std::min(r0 + LINE, rows); r += SIDE) {
                        if (r + SIDE <= rows && c + SIDE <= columns)
                            tile(r, c);
                        else
                            part(r, c, std::min(r + SIDE, rows), std::min(c + SIDE, columns));
                    }
    }
};

template <class Item>
void transpose_of(
    const void* in, long in_stride, void* out, long out_stride, long rows, long columns) {
    Transpose<Item>{(const Item*)in, in_stride, (Item*)out, out_stride}.all(rows, columns);
}

}  // namespace

extern "C" void transpose(const void* in, long in_stride, void* out, long out_stride, long rows,
                          long columns, long item_bytes) {
    auto run = item_bytes == 2 ? transpose_of<uint16_t> : transpose_of<uint32_t>;
    run(in, in_stride, out, out_stride, rows, columns);
}
