"""Second, slow and plain versions of what the data room computes, written from its formulas."""

M = 2**64 - 1


def splitmix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31


def naive_key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix((key + part + 0x9E3779B97F4A7C15) % 2**64)
    return key


def naive_permutation(i: int, n: int, key: int) -> int:
    b = 1
    while 4**b < n:
        b += 1
    while True:
        left, right = divmod(i, 2**b)
        for r in range(8):
            f = splitmix((right + naive_key(key, r)) % 2**64) % 2**b
            left, right = right, left ^ f
        i = left * 2**b + right
        if i < n:
            return i


def naive_row(ids: list[int], eot: int | None, context: int, seed: int, g: int):
    """The g-th row of a run: (inputs, targets), one id at a time."""
    n = len(ids)
    pairs = [(ids[t], ids[t + 1]) for t in range(n - 1)]
    if ids[-1] == eot:
        pairs.append((ids[-1], ids[0]))
    windows = (len(pairs) + context - 1) // context
    epoch, place = divmod(g, windows)
    w = naive_permutation(place, windows, naive_key(seed, epoch, 1))
    offset = naive_key(seed, epoch, 2) % len(pairs)
    inputs, targets = [], []
    for j in range(w * context, w * context + context):
        a, b = pairs[(offset + j) % len(pairs)]
        inputs.append(a)
        targets.append(b if j < len(pairs) else -100)
    return inputs, targets
