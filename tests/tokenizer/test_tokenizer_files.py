"""Files: what is read, what is refused by name, and that nothing half-written is left behind."""

import copy
import json
import os
import random
import subprocess
import sys
import textwrap

import pytest

from rewriting import rewrite
from scratchlm.tokenizer import CharTokenizer, Tokenizer, load_tokenizer
from scratchlm.tokenizer.bytelevel import CHARACTER, from_characters, to_characters
from scratchlm.tokenizer.hf_json import from_json
from scratchlm.tokenizer.hf_json_writing import to_json
from tokenizer.texts import PROSE, SPECIALS, prose_tokenizer


def good(pattern="qwen2"):
    base = prose_tokenizer(pattern)
    tokenizer = Tokenizer(
        base.vocab, base.merges, SPECIALS, pattern, template=([base.special_tokens["<s>"]], [])
    )
    return to_json(tokenizer)


def test_byte_level_characters_round_trip():
    assert len(set(CHARACTER.values())) == 256
    assert from_characters(to_characters(bytes(range(256)))) == bytes(range(256))
    assert to_characters(b" a\n") == "ĠaĊ"


def edit(path, value):
    """Give a change to the good file: set (or with `...` delete) what stands at a path."""

    def change(data):
        *way, last = path
        for step in way:
            data = data[step]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return change


LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
REFUSED = [
    (["truncation"], {"max_length": 5}, "truncation"),
    (["padding"], {"pad_id": 0}, "padding"),
    (["extra"], 1, "unknown field 'extra'"),
    (["model", "type"], "Unigram", "model type 'Unigram'"),
    (["model", "dropout"], 0.1, "dropout"),
    (["model", "byte_fallback"], True, "byte_fallback"),
    (["model", "end_of_word_suffix"], "</w>", "end_of_word_suffix"),
    (["model", "continuing_subword_prefix"], "##", "continuing_subword_prefix"),
    (["model", "ignore_merges"], "yes", "ignore_merges"),
    (["model", "vocab"], [], "vocab must be a table"),
    (["model", "vocab", "a"], ..., "where the next is 414"),
    (["model", "vocab", "a"], "97", "integer"),
    (["model", "vocab", "a"], True, "integer"),
    (["model", "vocab", "a"], 98, "id 98 is given to both"),
    (["model", "vocab", "a"], 10**12, "from 0 to"),
    (["model", "vocab", "a"], -1, "from 0 to"),
    (["model", "vocab", "\u4e2d"], 999, "where the next is 416"),
    (["model", "merges"], None, "merges must be a list"),
    (["model", "merges", 3], "Ġthe", "merge 3 must be two tokens"),
    (["model", "merges", 3], ["x", "y", "z"], "merge 3 must be two tokens"),
    (["model", "merges", 3], [1, 2], "merge 3 must be two tokens"),
    (["model", "merges", 3], "q q", "the vocabulary has no b'qq'"),
    (["normalizer"], {"type": "Lowercase"}, "normalizer 'Lowercase'"),
    (["normalizer"], {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 2}, "Sequence"),
    (["pre_tokenizer"], None, "pre_tokenizer must be a table"),
    (["pre_tokenizer"], {"type": "Whitespace"}, "pre_tokenizer 'Whitespace'"),
    (["pre_tokenizer"], {**LEVEL, "add_prefix_space": True}, "add_prefix_space"),
    (["pre_tokenizer"], {**LEVEL, "use_regex": False}, "use_regex"),
    (["pre_tokenizer", "pretokenizers", 0, "behavior"], "Removed", "Isolated"),
    (["pre_tokenizer", "pretokenizers", 0, "invert"], True, "inverted"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"String": " "}, "Regex"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": "(a"}, "regular expression"),
    (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": r"\d{1,3}+"}, "counted repeat"),
    (["pre_tokenizer", "pretokenizers", 1], ..., "pre_tokenizer"),
    (["post_processor"], {"type": "RobertaProcessing"}, "RobertaProcessing"),
    (["post_processor", "processors", 1, "single"], [], "hold the text once"),
    (["decoder"], {"type": "WordPiece"}, "decoder 'WordPiece'"),
    (["added_tokens", 0, "lstrip"], True, "lstrip"),
    (["added_tokens", 0, "rstrip"], True, "rstrip"),
    (["added_tokens", 0, "single_word"], True, "single_word"),
    (["added_tokens", 0, "id"], 5, "another token has"),
    (["added_tokens", 0, "id"], None, "integer"),
    (["added_tokens", 0, "id"], 4200, "where the next is 415"),
    (["added_tokens", 0, "content"], "", "content must be a string"),
    (["added_tokens", 1, "content"], SPECIALS[0], "twice"),
    (["added_tokens", 0, "special"], 1, "special must be true or false"),
    (["added_tokens", 2, "content"], "<other>", "'<s>', which is no added token"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, path, value, message):
    data = good()
    edit(path, value)(data)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(("token", "message"), [("a", "0x61"), ("中", "stands for no byte")])
def test_a_vocabulary_without_special_tokens_is_checked_too(token, message):
    data = good()
    data["added_tokens"] = []
    data["post_processor"] = None
    vocab = data["model"]["vocab"]
    if token in vocab:
        del vocab[token]
    else:
        vocab[token] = len(vocab)
    with pytest.raises(ValueError, match=message):
        from_json(data)


def test_a_normalized_added_token_beside_a_normalizer_is_refused():
    data = good()
    data["added_tokens"][0]["normalized"] = True
    from_json(copy.deepcopy(data))  # without a normalizer it makes no difference
    data["normalizer"] = {"type": "NFC"}
    with pytest.raises(ValueError, match="is normalized"):
        from_json(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "must be a table"),
        (b"null", "must be a table"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 1e400}, "merges": []}}', "integer"),
        (b'{"type": "characters"}', "version must be 1"),
        (b'{"type": "characters", "version": 1, "characters": ["ab"], "special_tokens": []}', "1"),
    ],
)
def test_files_that_are_not_tokenizers_are_refused(tmp_path, content, message):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def mutate(rng, data, text):
    """Break a file in one of the ways files break."""
    kind = rng.randrange(5)
    if kind == 0:  # cut short
        return text[: rng.randrange(len(text))]
    if kind == 1:  # a few bytes flipped
        raw = bytearray(text.encode())
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw)
    if kind == 2:  # a slice lost or doubled
        a, b = sorted(rng.randrange(len(text)) for _ in range(2))
        return text[:a] + text[min(b, a + 50) :] if rng.random() < 0.5 else text[:b] + text[a:]
    broken = copy.deepcopy(data)
    junk = [None, True, -1, 10**30, 1.5, "", "中", "Ġ" * 9, [], {}, [1, 2], {"type": "X"}, "\ud800"]
    for _ in range(rng.randrange(1, 4)):  # a value, somewhere, replaced, lost or moved
        at = broken
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
                at = at[key]
                continue
            choice = rng.randrange(3)
            if choice == 0:
                at[key] = rng.choice(junk)
            elif choice == 1:
                del at[key]
            elif isinstance(at, list):
                at.insert(0, at[key])
            else:
                at[rng.choice(["x", "a", "Ġthe"])] = at[key]
            break
    return json.dumps(broken)


def test_two_thousand_mutated_files_load_or_give_one_clear_line(tmp_path):
    rng = random.Random(0)
    sources = []
    for pattern in ("gpt2", "qwen2"):
        base = prose_tokenizer(pattern, 300)
        tokenizer = Tokenizer(base.vocab, base.merges, SPECIALS, pattern, normalization="NFC")
        sources.append(to_json(tokenizer))
    CharTokenizer.of_text(["some text"], ["<s>"]).save(tmp_path)
    sources.append(json.loads((tmp_path / "tokenizer.json").read_text()))
    texts = [json.dumps(data, ensure_ascii=False) for data in sources]
    file = tmp_path / "tokenizer.json"
    refused = []
    for _ in range(2000):
        which = rng.randrange(3)
        broken = mutate(rng, sources[which], texts[which])
        rewrite(file, broken if isinstance(broken, bytes) else broken.encode("utf-8", "replace"))
        try:
            tokenizer = load_tokenizer(file)
        except ValueError as error:
            refused.append(str(error))
            continue
        # What loads works. (A character tokenizer may have lost a character.)
        if isinstance(tokenizer, Tokenizer):
            assert tokenizer.decode(tokenizer.encode("the naïve cat 12")) == "the naïve cat 12"
    assert len(refused) > 1000
    for line in refused:
        assert "\n" not in line
        assert line.startswith(str(file))
        assert len(line) < 400


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "ranks.tiktoken"])
def test_mutated_files_of_the_other_kinds_give_one_clear_line(tmp_path, name):
    import base64

    base = prose_tokenizer(vocab_size=320)
    vocab = {to_characters(piece): i for i, piece in base.vocab.items()}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    merges = [" ".join(map(to_characters, pair)) for pair in base.merges]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    ranks = [f"{base64.b64encode(p).decode()} {i}" for i, p in base.vocab.items()]
    (tmp_path / "ranks.tiktoken").write_text("\n".join(ranks))
    file = tmp_path / name
    pattern = "gpt2"
    assert load_tokenizer(file, pattern=pattern).vocab_size == 320
    text = file.read_text()
    rng = random.Random(0)
    refused = []
    for _ in range(200):
        kind = rng.randrange(3)
        if kind == 0:
            file.write_text(text[: rng.randrange(len(text))])
        elif kind == 1:
            raw = bytearray(text.encode())
            raw[rng.randrange(len(raw))] = rng.randrange(256)
            file.write_bytes(bytes(raw))
        else:
            a = rng.randrange(len(text))
            file.write_text(text[:a] + rng.choice([" ", "\n", "9", "é", "=="]) + text[a:])
        try:
            load_tokenizer(file, pattern=pattern)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not any("\n" in line for line in refused)


def test_paths_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such tokenizer"):
        load_tokenizer(tmp_path / "missing")
    with pytest.raises(ValueError, match="found none of them"):
        load_tokenizer(tmp_path)
    other = tmp_path / "model.safetensors"
    other.write_text("")
    with pytest.raises(ValueError, match="a tokenizer file must be"):
        load_tokenizer(other)
    for name in ("a.tiktoken", "b.tiktoken"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=r"found 2 \.tiktoken files"):
        load_tokenizer(tmp_path)
    prose_tokenizer().save(tmp_path)
    with pytest.raises(ValueError, match="cannot be given"):
        load_tokenizer(tmp_path, pattern="gpt4")


def test_saving_replaces_whole_or_not_at_all(tmp_path, monkeypatch):
    tokenizer = prose_tokenizer()
    path = tokenizer.save(tmp_path / "new" / "folder")
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(OSError, match="disk full"):
        CharTokenizer("ab").save(path.parent)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["tokenizer.json"]


def test_a_kill_while_saving_leaves_the_old_file(tmp_path):
    path = prose_tokenizer().save(tmp_path)
    before = path.read_bytes()
    script = """
        import os, signal, sys
        from scratchlm.tokenizer import CharTokenizer
        os.replace = lambda a, b: os.kill(os.getpid(), signal.SIGKILL)
        CharTokenizer("ab").save(sys.argv[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -9
    assert path.read_bytes() == before
    assert load_tokenizer(tmp_path).encode(PROSE) == prose_tokenizer().encode(PROSE)
