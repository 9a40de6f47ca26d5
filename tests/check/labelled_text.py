"""Learners' files for BPE training and encoding."""

from check.learner import Learner

TEXT = [
    Learner(
        "train_bpe",
        """
def run_train_bpe(input_path, vocab_size, special_tokens):
    text = open(input_path, "rb").read().decode()
    pieces = [text]
    if special_tokens:
        pieces = regex.split("|".join(regex.escape(s) for s in special_tokens), text)
    words = {}
    for piece in pieces:
        for word in regex.findall(PATTERN, piece):
            key = tuple(bytes([b]) for b in word.encode())
            words[key] = words.get(key, 0) + 1
    merges = []
    room = vocab_size - 256 - len(special_tokens)
    while len(merges) < room:
        stats = {}
        for key, n in words.items():
            for pair in zip(key, key[1:]):
                stats[pair] = stats.get(pair, 0) + n
        if not stats:
            break
        best = sorted(stats, key=lambda p: (stats[p], p))[-1]
        merges.append(best)
        again = {}
        for key, n in words.items():
            out, i = [], 0
            while i < len(key):
                if i + 1 < len(key) and (key[i], key[i + 1]) == best:
                    out.append(key[i] + key[i + 1])
                    i += 2
                else:
                    out.append(key[i])
                    i += 1
            again[tuple(out)] = again.get(tuple(out), 0) + n
        words = again
    tokens = [s.encode() for s in special_tokens] + [bytes([i]) for i in range(256)]
    tokens += [a + b for a, b in merges]
    return {i: token for i, token in enumerate(tokens)}, merges
""",
        [
            (
                "a tie is broken the wrong way",
                "sorted(stats, key=lambda p: (stats[p], p))[-1]",
                "max(stats, key=stats.get)",
            ),
            (
                "a tie is broken by ids, not by bytes",
                "sorted(stats, key=lambda p: (stats[p], p))[-1]",
                "max(stats, key=lambda p: (stats[p], [([bytes([b]) for b in range(256)]"
                " + [a + b for a, b in merges]).index(t) for t in p]))",
            ),
            (
                "a word's pairs are counted once, however often it occurs",
                "words.get(key, 0) + 1",
                "1",
            ),
            (
                "a pair counts once in a word",
                "in zip(key, key[1:])",
                "in set(zip(key, key[1:]))",
            ),
            (
                "the text is not cut into words: merges cross them",
                "regex.findall(PATTERN, piece)",
                "[piece]",
            ),
            (
                "words are cut at white space, which is lost",
                "regex.findall(PATTERN, piece)",
                "piece.split()",
            ),
            ("special tokens are not cut out", "if special_tokens:", "if False:"),
            (
                "special tokens are removed, and their neighbours join",
                "    words = {}\n",
                '    pieces = ["".join(pieces)]\n    words = {}\n',
            ),
            (
                "the vocabulary's size does not count the special tokens",
                " - len(special_tokens)",
                "",
            ),
            (
                "the special tokens are not in the vocabulary",
                "[s.encode() for s in special_tokens] + ",
                "",
            ),
            (
                "characters are merged, not bytes",
                "tuple(bytes([b]) for b in word.encode())",
                "tuple(c.encode() for c in word)",
            ),
            (
                "pairs that occur once are not merged",
                "if not stats:",
                "if not stats or max(stats.values()) < 2:",
            ),
        ],
        {(6, 7)},  # a text that was not cut has no pieces to join
    ),
    Learner(
        "tokenizer",
        """
class Tokenizer:
    def __init__(self, vocab, merges, special_tokens):
        self.vocab, self.merges = vocab, merges
        self.special = sorted(special_tokens or [], key=lambda s: -len(s))
        self.back = {v: k for k, v in vocab.items()}
        self.rank = {pair: i for i, pair in enumerate(merges)}
    def encode(self, text):
        parts = [text]
        if self.special:
            parts = regex.split("(" + "|".join(map(regex.escape, self.special)) + ")", text)
        ids = []
        for part in parts:
            if part in self.special:
                ids.append(self.back[part.encode()])
                continue
            for word in regex.findall(PATTERN, part):
                ids.extend(self.back[t] for t in self.word([bytes([b]) for b in word.encode()]))
        return ids
    def word(self, ts):
        for pair in self.merges:
            i = 0
            while i < len(ts) - 1:
                if (ts[i], ts[i + 1]) == pair:
                    ts[i:i + 2] = [ts[i] + ts[i + 1]]
                i += 1
        return ts
    def encode_iterable(self, texts):
        for text in texts:
            yield from self.encode(text)
    def decode(self, ids):
        return b"".join(self.vocab[i] for i in ids).decode("utf-8", "replace")
def get_tokenizer(vocab, merges, special_tokens=None):
    return Tokenizer(vocab, merges, special_tokens)
""",
        [
            (
                "the leftmost pair is merged, not the one learnt first",
                "        for pair in self.merges:\n",
                """        while True:
            found = [i for i in range(len(ts) - 1) if (ts[i], ts[i + 1]) in self.rank]
            if not found:
                return ts
            ts[found[0]:found[0] + 2] = [ts[found[0]] + ts[found[0] + 1]]
        for pair in self.merges:
""",
            ),
            (
                "nothing is merged",
                "        for pair in self.merges:\n",
                "        for pair in []:\n",
            ),
            (
                "the text is not cut into words: merges cross them",
                "in regex.findall(PATTERN, part)",
                "in [part]",
            ),
            (
                "words are cut at white space, which is lost",
                "in regex.findall(PATTERN, part)",
                "in part.split()",
            ),
            ("special tokens are encoded as text", "if self.special:", "if False:"),
            (
                "special tokens are dropped",
                "                ids.append(self.back[part.encode()])\n",
                "",
            ),
            ("of two special tokens the shorter one wins", "-len(s)", "len(s)"),
            (
                "tokens are decoded one by one",
                'b"".join(self.vocab[i] for i in ids).decode("utf-8", "replace")',
                '"".join(self.vocab[i].decode("utf-8", "replace") for i in ids)',
            ),
            ("invalid UTF-8 is an error, or lost", '"utf-8", "replace"', '"utf-8"'),
            (
                "encode_iterable yields lists, not ids",
                "yield from self.encode(text)",
                "yield self.encode(text)",
            ),
            (
                "a merge is applied once, not wherever it occurs",
                "+ ts[i + 1]]\n",
                "+ ts[i + 1]]\n                    break\n",
            ),
        ],
        {
            (0, 1),
            (0, 10),
            (1, 2),
            (1, 10),
            (4, 5),
            (4, 6),
            (5, 6),
        },  # no merges or no special tokens to treat wrongly
    ),
]
