"""Thousands of damaged and hostile directories, made from a few good ones by a seeded hand.

A mutation is (name, {file: bytes or None}): files to write over the good directory; None removes.
"""

import itertools
import json
import random
import struct

HUGE = [0, 1, 7, 2**16, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
ODD_VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    1.5,
    -0.0,
    1e300,
    "",
    "x",
    "\ud800",
    "a\nb",
    "../x",
    "x" * 5000,
    [],
    [1],
    [None],
    {},
    {"a": 1},
    [[[[]]]],
]
ODD_NUMBERS = [-1, 0, 1, 3, 2**20, 2**31, 2**40, 2**41, 2**63, 2**64, 10**40, 1.0, "8", None, True]
DTYPES = ["F64", "F16", "BF16", "I64", "I8", "U8", "BOOL", "F8_E4M3", "F4", "f32", "", "F32\n"]


def split_file(data):
    """Cut a safetensors file into its header as a dict, and its bytes."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(header, body):
    """Put a file together again, header as a dict or as raw text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def byte_flips(file, data, rng, count, begin=0, end=None):
    """Change single bytes between two offsets."""
    end = len(data) if end is None else end
    for _ in range(count):
        at, bit = rng.randrange(begin, end), 1 << rng.randrange(8)
        changed = bytearray(data)
        changed[at] = changed[at] ^ bit if rng.random() < 0.7 else rng.randrange(256)
        yield f"{file}: byte {at}", {file: bytes(changed)}


def truncations(file, data, rng, count):
    """Cut a file at its ends, its seams and in between; and make it longer."""
    (length,) = struct.unpack("<Q", data[:8])
    seams = [0, 1, 7, 8, 9, 8 + length - 1, 8 + length, 8 + length + 1, len(data) - 1]
    for at in seams + [rng.randrange(len(data)) for _ in range(count)]:
        yield f"{file}: cut at {at}", {file: data[:at]}
    for extra in (b"\0", b"\0" * 4096, data):
        yield f"{file}: {len(extra)} bytes more", {file: data + extra}


def header_lengths(file, data):
    """Lie about the header's length."""
    (length,) = struct.unpack("<Q", data[:8])
    for claim in [*HUGE, length - 1, length + 1, length + 2, len(data), len(data) - 8]:
        yield f"{file}: header of {claim}", {file: struct.pack("<Q", claim) + data[8:]}


def header_edits(file, data, rng, count):
    """Change one thing in a header that stays valid JSON."""
    for number in range(count):
        header, body = split_file(data)
        _EDITS[number % len(_EDITS)](header, rng)
        yield f"{file}: header edit {number}", {file: join_file(header, body)}


def _two(header, rng):
    return rng.sample([name for name in header if name != "__metadata__"], 2)


def _odd_dtype(header, rng):
    header[_two(header, rng)[0]]["dtype"] = rng.choice(DTYPES + ODD_VALUES)


def _odd_size(header, rng):
    shape = header[_two(header, rng)[0]]["shape"]
    shape[rng.randrange(len(shape))] = rng.choice(ODD_NUMBERS)


def _odd_shape(header, rng):
    entry = header[_two(header, rng)[0]]
    shapes = [entry["shape"] + [1], [2**20] * 4, [0, 2**40], [2**40] * 9]
    entry["shape"] = rng.choice(ODD_VALUES + shapes)


def _odd_offset(header, rng):
    header[_two(header, rng)[0]]["data_offsets"][rng.randrange(2)] = rng.choice(ODD_NUMBERS)


def _overlap(header, rng):
    one, other = _two(header, rng)
    header[one]["data_offsets"] = list(header[other]["data_offsets"])


def _shift(header, rng):
    entry, by = header[_two(header, rng)[0]], rng.choice([-4, -1, 1, 4])
    entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def _rename(header, rng):
    one, _ = _two(header, rng)
    header[rng.choice(["", "x", one + ".", one.upper(), "\ud800", "../" + one])] = header.pop(one)


def _exchange(header, rng):
    one, other = _two(header, rng)
    header[one], header[other] = header[other], header[one]


def _odd_entry(header, rng):
    one, _ = _two(header, rng)
    where = rng.choice([header, header[one]])
    where[rng.choice(["__metadata__", "extra", one, "dtype", "shape"])] = rng.choice(ODD_VALUES)


def _remove(header, rng):
    one, _ = _two(header, rng)
    where = rng.choice([header, header[one]])
    where.pop(one if where is header else rng.choice(list(where)))


_EDITS = [_odd_dtype, _odd_size, _odd_shape, _odd_offset, _overlap]
_EDITS += [_shift, _rename, _exchange, _odd_entry, _remove]


def header_texts(file, data):
    """Headers that are no such JSON at all."""
    header, body = split_file(data)
    text = json.dumps(header).encode()
    name = next(name for name in header if name != "__metadata__")
    twice = text[:-1] + b", " + json.dumps({name: header[name]}).encode()[1:]
    texts = {
        "empty": b"",
        "spaces": b" " * 64,
        "no object": b"[]",
        "nothing in it": b"{}",
        "deep lists": b'{"a":' + b"[" * 100_000,
        "deep objects": b'{"a":' * 100_000,
        "a million numbers": b'{"a":[' + b"1," * 500_000 + b"1]}",
        "long number": b'{"a":' + b"9" * 100_000 + b"}",
        "nan": text.replace(b"[0,", b"[NaN,").replace(b"[0 ,", b"[NaN,"),
        "infinity": b'{"a":Infinity}',
        "name twice": twice,
        "utf-16": text.decode().encode("utf-16"),
        "bad utf-8": text.replace(b"model", b"mod\xff\xfe"),
        "byte order mark": b"\xef\xbb\xbf" + text,
        "space first": b" " + text,
        "space after": text + b" " * 100,
        "nul after": text + b"\0",
        "many empty names": b"{" + b",".join(b'"%d":{}' % i for i in range(20_000)) + b"}",
    }
    for what, content in texts.items():
        yield f"{file}: header {what}", {file: join_file(content, body)}


def index_edits(file, text, rng, count):
    """Change one thing in an index."""
    shards = sorted(set(json.loads(text)["weight_map"].values()))
    bad_names = [
        "../model.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "a/b.safetensors",
        "a\\b.safetensors",
        "missing.safetensors",
        "config.json",
        "\0.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        "/dev/zero",
        "../" * 40 + "dev/zero.safetensors",
        *shards,
        *ODD_VALUES,
    ]
    for number in range(count):
        index = json.loads(text)
        names = index["weight_map"]
        one = rng.choice(list(names))
        kind = number % 5
        if kind <= 1:
            names[one] = rng.choice(bad_names)
        elif kind == 2:
            names[rng.choice(["absent.weight", "", one + "x"])] = rng.choice(shards + bad_names)
        elif kind == 3:
            names.pop(one)
        else:
            index[rng.choice(["weight_map", "metadata"])] = rng.choice(ODD_VALUES)
        yield f"{file}: edit {number}", {file: json.dumps(index).encode()}
    for shard in shards:
        yield f"{file}: without {shard}", {shard: None}
    for one, other in itertools.pairwise(shards):
        yield f"{file}: {one} as {other}", {one: ("copy", other)}


def config_edits(file, text, every):
    """Give every key of a config odd values, and some keys that change a model."""
    table = json.loads(text)
    for number, key in enumerate(table):
        for value in [*ODD_VALUES, 2**24, 2**27][number % every :: every]:
            yield f"{file}: {key}={value!r:.20}", {file: json.dumps({**table, key: value}).encode()}
        rest = {name: value for name, value in table.items() if name != key}
        yield f"{file}: without {key}", {file: json.dumps(rest).encode()}
    for key in ("logit_softcap", "quantization_config", "auto_map", "rope_scaling", "layer_types"):
        for value in ODD_VALUES:
            yield f"{file}: {key}={value!r:.20}", {file: json.dumps({**table, key: value}).encode()}
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "num_experts", "num_local_experts")
    for key in sizes:
        for value in (3, 2**14, 2**20, 2**24):
            yield f"{file}: {key}={value}", {file: json.dumps({**table, key: value}).encode()}


def all_mutations(good):
    """Yield (directory's name, mutation's name, files) for the good directories given."""
    rng = random.Random(20240601)
    single = {name: files for name, files in good.items() if "model.safetensors" in files}
    for where, files in single.items():
        data, config = files["model.safetensors"], files["config.json"]
        (length,) = struct.unpack("<Q", data[:8])
        weights = "model.safetensors"
        for mutation in (
            *byte_flips(weights, data, rng, 200, 0, 8 + length),
            *byte_flips(weights, data, rng, 40, 8 + length),
            *truncations(weights, data, rng, 40),
            *header_lengths(weights, data),
            *header_edits(weights, data, rng, 150),
            *header_texts(weights, data),
            *byte_flips("config.json", config, rng, 60),
        ):
            yield where, *mutation
    for where, files in good.items():
        if "model.safetensors.index.json" in files:
            index = files["model.safetensors.index.json"]
            for mutation in (
                *index_edits("model.safetensors.index.json", index, rng, 150),
                *byte_flips("model.safetensors.index.json", index, rng, 100),
            ):
                yield where, *mutation
    for where, every in (("llama", 1), ("qwen3_moe", 3)):
        for mutation in config_edits("config.json", good[where]["config.json"], every):
            yield where, *mutation
