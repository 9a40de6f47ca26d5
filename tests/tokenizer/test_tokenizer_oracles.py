"""The same ids as tiktoken for the same ranks, and as `tokenizers` for the same file."""

import json
import random
import unicodedata

import pytest
import tiktoken
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.tokenizer import PATTERNS, Tokenizer, load_tokenizer
from scratchlm.tokenizer.bytelevel import to_characters
from scratchlm.tokenizer.files import merges_of_ranks
from scratchlm.tokenizer.splitting import kinds_of_characters
from tokenizer.texts import PROSE, SPECIALS, prose_tokenizer, random_text, texts

TIKTOKENS_OWN = {"gpt2": tiktoken_ext.openai_public.r50k_pat_str}


def as_tiktoken(tokenizer, pattern_text):
    special = dict(tokenizer.special_tokens)
    ranks = {p: i for i, p in tokenizer.vocab.items() if i not in special.values()}
    return tiktoken.Encoding(
        "ours", pat_str=pattern_text, mergeable_ranks=ranks, special_tokens=special
    )


def sample(count, length, seed=0):
    rng = random.Random(seed)
    return [random_text(rng, rng.randrange(length)) for _ in range(count)]


def known_everywhere(text):
    """Leave out characters younger than the tables of the other libraries may be."""
    return "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs"))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ids_are_tiktokens(pattern):
    tokenizer = prose_tokenizer(pattern)
    encodings = [as_tiktoken(tokenizer, PATTERNS[pattern])]
    if pattern in TIKTOKENS_OWN:
        encodings.append(as_tiktoken(tokenizer, TIKTOKENS_OWN[pattern]))
    for text in [PROSE * 3, *map(known_everywhere, sample(1000, 60))]:
        for encoding in encodings:
            assert tokenizer.encode(text, allowed_special=()) == encoding.encode_ordinary(text)
    one = "a<|endoftext|><|endoftext|> <s>b"
    assert tokenizer.encode(one) == encoding.encode(one, allowed_special="all")


def test_gpt4_is_tiktokens_own_pattern():
    source = tiktoken_ext.openai_public.cl100k_base.__code__.co_consts
    (own,) = [c for c in source if isinstance(c, str) and r"\p{N}{1,3}" in c]
    tokenizer = prose_tokenizer("gpt4")
    encoding = as_tiktoken(tokenizer, own)
    for text in map(known_everywhere, sample(1000, 60, seed=1)):
        assert tokenizer.encode(text, allowed_special=()) == encoding.encode_ordinary(text)


@settings(max_examples=200)
@given(
    order=st.permutations(["ab", "bc", "abc", "aa", "aaa", "cab", "bcab", "aab", "ca", "abca"]),
    words=st.lists(st.text("abc", max_size=20), max_size=8),
)
def test_ids_are_tiktokens_for_any_ranks_that_build_up(order, words):
    # Ranks as training gives them: a token is made of two earlier ones.
    ranks = {bytes([i]): i for i in range(256)}
    for token in map(str.encode, order):
        if any(token[:k] in ranks and token[k:] in ranks for k in range(1, len(token))):
            ranks[token] = len(ranks)
    vocab = {i: token for token, i in ranks.items()}
    tokenizer = Tokenizer(vocab, merges_of_ranks(vocab), ignore_merges=True)
    encoding = tiktoken.Encoding(
        "any", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks, special_tokens={}
    )
    text = " ".join(words)
    assert tokenizer.encode(text) == encoding.encode_ordinary(text)


def test_a_tiktoken_file_gives_tiktokens_ids(tmp_path):
    import base64

    base = prose_tokenizer("gpt4")
    encoding = as_tiktoken(base, PATTERNS["gpt4"])
    ordinary = {i: p for i, p in base.vocab.items() if i not in base.special_tokens.values()}
    path = tmp_path / "cl100k_base.tiktoken"
    lines = [f"{base64.b64encode(p).decode()} {i}\n" for i, p in ordinary.items()]
    path.write_text("".join(lines))
    for loaded in (
        load_tokenizer(path, special_tokens=base.special_tokens),
        load_tokenizer(tmp_path, special_tokens=base.special_tokens),
    ):
        assert loaded.pattern == "gpt4"
        for text in [PROSE, "<s>a", *map(known_everywhere, sample(500, 60))]:
            assert loaded.encode(text) == encoding.encode(text, allowed_special="all")
    saved = loaded.save(tmp_path / "saved")
    theirs = tokenizers.Tokenizer.from_file(str(saved))
    for text in [PROSE, *map(known_everywhere, sample(300, 60))]:
        assert theirs.encode(text).ids == loaded.encode(text)
    (tmp_path / "mine.tiktoken").write_text("".join(lines))
    with pytest.raises(ValueError, match="does not hold its pattern"):
        load_tokenizer(tmp_path / "mine.tiktoken")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("normalization", [None, "NFC"])
def test_ids_are_hugging_faces_for_the_file_we_write(tmp_path, pattern, normalization):
    base = prose_tokenizer(pattern)
    ours = Tokenizer(base.vocab, base.merges, SPECIALS, pattern, normalization=normalization)
    theirs = tokenizers.Tokenizer.from_file(str(ours.save(tmp_path)))
    assert theirs.get_vocab_size() == ours.vocab_size
    again = load_tokenizer(tmp_path)
    assert again.fingerprint() == ours.fingerprint()
    nfc = tokenizers.normalizers.NFC()
    passed_over = 0
    for text in [PROSE * 3, "".join(SPECIALS) * 2, *map(known_everywhere, sample(1000, 60))]:
        if normalization and nfc.normalize_str(text) != unicodedata.normalize("NFC", text):
            passed_over += 1  # two young combining marks, which older tables do not order
            continue
        ids = ours.encode(text)
        assert theirs.encode(text).ids == ids
        assert again.encode(text) == ids
        assert theirs.decode(ids, skip_special_tokens=False) == ours.decode(ids)
    assert passed_over < 5


def gpt2_like():
    """What `tokenizers` itself trains and writes: ids in its own order, GPT-2's bytes."""
    theirs = tokenizers.ByteLevelBPETokenizer()
    theirs.train_from_iterator([PROSE] * 3, vocab_size=400, special_tokens=["<|endoftext|>"])
    return theirs


def test_a_file_tokenizers_wrote_gives_its_ids(tmp_path):
    theirs = gpt2_like()
    theirs.save(str(tmp_path / "tokenizer.json"))
    theirs.save_model(str(tmp_path))
    whole = load_tokenizer(tmp_path / "tokenizer.json")
    pair = load_tokenizer(tmp_path / "vocab.json")
    assert load_tokenizer(tmp_path / "merges.txt").fingerprint() == pair.fingerprint()
    assert pair.special_tokens == whole.special_tokens == {"<|endoftext|>": 0}
    for text in [PROSE, "a<|endoftext|>b", *map(known_everywhere, sample(1000, 60))]:
        assert whole.encode(text) == pair.encode(text) == theirs.encode(text).ids
    # What we write of it is read alike, although its special token comes first.
    again = tokenizers.Tokenizer.from_file(str(whole.save(tmp_path / "again")))
    assert again.encode(PROSE + "<|endoftext|>").ids == whole.encode(PROSE + "<|endoftext|>")


def llama3_file():
    """Write a file with all that Llama 3's has: a Split, whole words, a template, added tokens."""
    base = prose_tokenizer("llama3")
    data = json.loads(gpt2_like().to_str())
    n = 420 - len(SPECIALS)
    data["model"] |= {
        "vocab": {to_characters(base.vocab[i]): i for i in range(n)},
        "merges": [" ".join(map(to_characters, pair)) for pair in base.merges],
        "ignore_merges": True,
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [
        {"id": n, "content": "<|begin_of_text|>", "special": True, **flags},
        {"id": n + 1, "content": "<|eot_id|>", "special": True, **flags},
        {"id": n + 2, "content": "<tool_call>", "special": False, **flags},
    ]
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": PATTERNS["llama3"]},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    bos = {"id": "<|begin_of_text|>", "ids": [n], "tokens": ["<|begin_of_text|>"]}
    first = {"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    template = {"type": "TemplateProcessing", "single": [first, a], "pair": [first, a, first, b]}
    template["special_tokens"] = {"<|begin_of_text|>": bos}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    data["post_processor"] = {
        "type": "Sequence",
        "processors": [{**level, "use_regex": True}, template],
    }
    data["decoder"] = {**level, "use_regex": True}
    return data


def test_a_llama3_file_gives_hugging_faces_ids(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(llama3_file()))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    ours = load_tokenizer(path)
    assert ours.ignore_merges
    assert ours.added_tokens == {"<tool_call>": 417}
    for text in [PROSE, "<tool_call>x<|eot_id|>", *map(known_everywhere, sample(800, 60))]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(text).ids
    # A special token may be disallowed; an added one is always found.
    assert 416 not in ours.encode("<|eot_id|>", allowed_special=())
    assert ours.encode("<tool_call>", allowed_special=()) == [417]
    again = load_tokenizer(ours.save(tmp_path / "again"))
    assert again.fingerprint() == ours.fingerprint()
    assert again.template == ours.template
    reread = tokenizers.Tokenizer.from_file(str(tmp_path / "again" / "tokenizer.json"))
    assert reread.encode(PROSE).ids == theirs.encode(PROSE).ids


def test_ignore_merges_matters(tmp_path):
    data = llama3_file()
    del data["model"]["merges"][5:]
    for flag in (True, False):
        data["model"]["ignore_merges"] = flag
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(data))
        theirs = tokenizers.Tokenizer.from_file(str(path))
        ours = load_tokenizer(path)
        for text in [PROSE, "the they that"]:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@settings(max_examples=100)
@given(text=texts)
def test_an_unnamed_pattern_gives_hugging_faces_ids(tmp_path_factory, text):
    text = known_everywhere(text)
    base = prose_tokenizer()
    ours = Tokenizer(base.vocab, base.merges, pattern=r"\p{L}{1,2}|\s|[0-9]")
    path = ours.save(tmp_path_factory.mktemp("unnamed"))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    assert theirs.encode(text).ids == ours.encode(text)


def test_character_classes_equal_those_of_other_libraries():
    # Where the tables of Unicode differ by version, only characters unknown to Python do.
    kinds = kinds_of_characters()
    split = {
        0: tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{L}"), "removed"),
        1: tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "removed"),
        3: tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\s"), "removed"),
    }
    characters = [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    for kind, remover in split.items():
        text = "".join(map(chr, characters))
        kept = "".join(piece for piece, _ in remover.pre_tokenize_str(text))
        assert kept == "".join(chr(c) for c in characters if kinds[c] != kind)
