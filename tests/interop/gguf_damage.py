"""GGUF files by hand: good ones, and thousands that are damaged or lie."""

import random
import struct

HUGE = [0, 1, 7, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63, 2**64 - 1]
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CHARS = dict(
    zip((U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64), "BbHhIifBQqd", strict=True)
)


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(kind, value):
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(
            value_bytes(inner, i) for i in items
        )
    return struct.pack(f"<{CHARS[kind]}", value)


def key_bytes(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value_bytes(kind, value)


def tensor_bytes(name, dims, kind, offset):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def join(keys, tensors, data, *, magic=b"GGUF", version=3, counts=None, alignment=32):
    """Put a file together from raw parts; `counts` may lie."""
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys + tensors)
    return head + bytes(-len(head) % alignment) + data


def skip_value(data, kind, at, places=None):
    """Return where a value ends; note the places of its lengths and counts."""
    places = [] if places is None else places
    if kind == STRING:
        places += [at]
        return at + 8 + struct.unpack("<Q", data[at : at + 8])[0]
    if kind == ARRAY:
        inner, count = struct.unpack("<IQ", data[at : at + 12])
        places += [at + 4]
        at += 12
        for _ in range(count):
            at = skip_value(data, inner, at, places)
        return at
    return at + struct.calcsize(CHARS[kind])


def split(data):
    """Return where the header ends, and the places of its 8-byte lengths and counts."""
    at, places = 24, [8, 16]
    num_tensors, num_keys = struct.unpack("<QQ", data[8:24])
    for _ in range(num_keys):
        at = skip_value(data, STRING, at, places)
        at = skip_value(data, struct.unpack("<I", data[at : at + 4])[0], at + 4, places)
    for _ in range(num_tensors):
        at = skip_value(data, STRING, at, places)
        dims = struct.unpack("<I", data[at : at + 4])[0]
        places += [at + 4 + 8 * n for n in range(dims)] + [at + 8 + 8 * dims]
        at += 4 + 8 * dims + 4 + 8
    return at, places


def mutations(good, count, seed=0):
    """Yield (what, bytes): lies in every length, dimension and offset; then random damage."""
    rng = random.Random(seed)
    header, places = split(good)
    chosen = places if len(places) < 60 else [*places[:30], *rng.sample(places, 20), *places[-30:]]
    for place in chosen:
        (true,) = struct.unpack("<Q", good[place : place + 8])
        for lie in [*rng.sample(HUGE, 6), true + 1, max(0, true - 1), true * 2, true + 32]:
            changed = struct.pack("<Q", min(lie, 2**64 - 1))
            yield f"{lie} at {place}", good[:place] + changed + good[place + 8 :]
    for n in range(count):
        at, kind = rng.randrange(header), n % 6
        if kind == 0:  # a type, a flag, a letter
            yield f"byte {at}", good[:at] + bytes([rng.randrange(256)]) + good[at + 1 :]
        elif kind == 1:
            yield f"cut at {at}", good[: rng.choice([at, rng.randrange(len(good))])]
        elif kind == 2:
            size = rng.randrange(1, 64)
            yield f"hole at {at}", good[:at] + good[at + size :]
        elif kind == 3:
            size = rng.randrange(1, 64)
            yield f"repetition at {at}", good[:at] + good[max(0, at - size) :]
        elif kind == 4:
            yield f"zeros at {at}", good[:at] + bytes(64) + good[at + 64 :]
        else:
            extra = rng.choice([1, 31, 32, 4096])
            yield f"{extra} bytes more", good + bytes(extra)
