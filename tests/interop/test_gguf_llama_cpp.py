"""llama.cpp reads what we write: the same distributions, texts and token ids as everywhere else."""

import functools
import itertools
import random
import re
import unicodedata

import pytest
import torch

from interop import hf_models
from interop.hf_models import hf_model, logits_of
from interop.llama_cpp import WHEELS, ask
from scratchlm import ModelConfig, TransformerLM, load_model
from scratchlm.errors import ScratchLMError
from scratchlm.interop import gguf_tokenizer, read_hf, write_gguf
from scratchlm.interop.gguf_tokenizer import _PRES
from scratchlm.tokenizer import Tokenizer
from tokenizer.texts import AWKWARD, PROSE, SPECIALS, prose_tokenizer, random_text

EOS = SPECIALS[0]
# Sizes in whole blocks of 32, so that matrices can be quantised.
WIDE = {"vocab_size": 448, "hidden_size": 64, "intermediate_size": 96}
WIDE_GPT2 = {"vocab_size": 448, "n_embd": 64}
WIDE_MOE = {"moe_intermediate_size": 32}
REFUSED = {
    "llama yarn mscale": "always rounds the ends of the ramp",
    "mistral": "sliding window of 7 tokens in a context of 40",
    "mixtral window": "sliding window of 7 tokens",
    "qwen2 window": "sliding window of 7 tokens",
    "qwen3 biases": "biases in the attention of qwen3",
    "qwen3 moe raw": "experts whose weights are not renormalised",
    "qwen3 moe window": "sliding window of 7 tokens",
    "gpt2 n_inner": "activation relu",
    "olmo tied": "biases in the attention of olmo",
}
WRITTEN = [family for family in hf_models.HF_CONFIGS if family not in REFUSED]
STEPS = 8


def plain_tokens(tokenizer):
    """Ids of printable ASCII: greedy text made of them is text, whoever joins the pieces."""
    whole = set(tokenizer.special_tokens.values())
    return [
        i
        for i, piece in tokenizer.vocab.items()
        if i not in whole and piece.isascii() and piece.decode().isprintable()
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Write every family as a GGUF file; keep transformers' greedy path with its log probs."""
    folder, tokenizer = tmp_path_factory.mktemp("gguf"), prose_tokenizer()
    plain, eos = plain_tokens(tokenizer), [tokenizer.special_tokens[EOS]]
    silent = [token for token in range(WIDE["vocab_size"]) if token not in set(plain)]
    prompt = random.Random(0).choices(plain, k=24)
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for table, sizes in (("_SIZES", WIDE), ("_GPT2", WIDE_GPT2), ("_QWEN_MOE", WIDE_MOE)):
            for key, value in sizes.items():
                patch.setitem(getattr(hf_models, table), key, value)
        for family in hf_models.HF_CONFIGS:
            theirs = hf_model(family)
            with torch.no_grad():
                theirs.get_output_embeddings().weight[silent] = 0
            theirs.save_pretrained(folder / family)
            made[family] = greedy(theirs, prompt)
            if family in REFUSED:
                continue
            source, path = read_hf(folder / family), folder / f"{family}.gguf"
            write_gguf(path, source.config, dict(source), tokenizer, eos_token_ids=eos)
    return folder, prompt, made


@torch.no_grad()
def greedy(model, prompt, steps=STEPS):
    ids, rows = list(prompt), []
    for _ in range(steps):
        rows.append(logits_of(model, torch.tensor([ids]))[0, -1].double().log_softmax(-1))
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def kl(expected, found):
    return float((expected.exp() * (expected - found)).sum(-1).max())


@pytest.fixture(scope="module")
def answers(written):
    """What each wheel says of each file."""
    folder, prompt, _ = written
    jobs = [
        {"model": str(folder / f"{family}.gguf"), "prompt": prompt, "steps": STEPS}
        for family in WRITTEN
    ]
    return {wheel: dict(zip(WRITTEN, ask(wheel, jobs), strict=True)) for wheel in WHEELS}


@pytest.mark.parametrize("wheel", WHEELS)
@pytest.mark.parametrize("family", WRITTEN)
def test_llama_cpp_has_the_distributions_and_the_greedy_text_of_transformers(
    family, wheel, written, answers
):
    tokens, expected = written[2][family]
    answer = answers[wheel][family]
    assert answer["tokens"] == tokens
    assert answer["text"] == prose_tokenizer().decode(tokens)
    assert kl(expected, torch.tensor(answer["logprobs"], dtype=torch.float64)) <= 1e-6


@pytest.mark.parametrize("family", WRITTEN)
def test_a_gguf_file_is_read_as_the_model_it_was_written_from(family, written):
    folder, prompt, made = written
    loaded = load_model(folder / f"{family}.gguf")
    tokens, expected = greedy(loaded.model, prompt)
    assert tokens == made[family][0]
    assert kl(made[family][1], expected) <= 1e-11
    assert loaded.tokenizer.fingerprint() == prose_tokenizer().fingerprint()
    assert loaded.eos_ids == (prose_tokenizer().special_tokens[EOS],)


@pytest.mark.parametrize("family", REFUSED)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(family, written, tmp_path):
    source = read_hf(written[0] / family)
    with pytest.raises(ScratchLMError, match=REFUSED[family]):
        write_gguf(tmp_path / "model.gguf", source.config, dict(source))
    assert not list(tmp_path.iterdir())


# Token ids


@functools.cache
def merges_of_any_two():
    """Merges of any two bytes of awkward text: where a text is split shows in its ids."""
    pieces = [bytes([byte]) for byte in sorted(set(AWKWARD.encode()))]
    merges = list(itertools.product(pieces, pieces))
    random.Random(0).shuffle(merges)
    tokens = [bytes([byte]) for byte in range(256)] + [left + right for left, right in merges]
    return dict(enumerate(tokens)), merges


def splitting_tokenizer(pattern, ignore_merges=False, **options):
    """A tokenizer of these merges; where merges are ignored, some tokens have none."""
    vocab, merges = merges_of_any_two()
    merges = merges[::2] if ignore_merges else merges
    return Tokenizer(vocab, merges, SPECIALS, pattern, ignore_merges=ignore_merges, **options)


def files_of_tokenizers(folder):
    """A tiny model for each kind of tokenizer, in a vocabulary with padding."""
    found = {}
    kinds = [("gpt2", False), ("llama3", False), ("llama3", True), ("qwen2", False)]
    for pattern, ignore_merges in kinds:
        tool = {"<tool>": len(merges_of_any_two()[0]) + len(SPECIALS)}
        tokenizer = splitting_tokenizer(pattern, ignore_merges, added_tokens=tool)
        config = ModelConfig(tokenizer.vocab_size + 3, 16, d_model=32, num_layers=1, num_heads=2)
        path = folder / f"{pattern}{'-whole' * ignore_merges}.gguf"
        tensors = TransformerLM(config).state_dict()
        eos = [tokenizer.special_tokens[EOS]]
        write_gguf(path, config, tensors, tokenizer, eos_token_ids=eos)
        found[path] = tokenizer
    return found


def known_everywhere(text):
    """Leave out what llama.cpp is known to split elsewhere.

    Characters younger than its tables may be; and 'ſ, which for Llama 3 and Qwen2 is a contraction
    (a pattern that ignores case), and for llama.cpp is not.
    """
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs"))
    return re.sub("'+ſ", "ſ", text)


TRAPS = [
    "",
    " ",
    "  a   b    ",
    "\n\n\r\n \t\n x\n",
    "it's IT'S they'll we'VE I'd 'tis ''s",
    "1 12 123 1234 12345 ٣٤٥ ½ 1,234.5",
    "東京都に行く。我能吞下玻璃而不伤身体。",
    "👩‍👩‍👧 😀😀 🏳️‍🌈",
    "café cafe\u0301 Straße \u0301",
    "a\0b\x1c\x85\u2028\u3000",
    f"x{EOS}y {EOS}{EOS}<s><s >élan vital<tool> <tool",
    "<|endoftext|", "<|endof<|endoftext|>text|>",
    "a" * 300,
    " " * 300,
    AWKWARD.replace("ſ", ""),
    PROSE,
]  # fmt: skip


def check_token_ids(wheel, folder, count, share):
    """Compare on `count` texts, of which each tokenizer gets one in `share`, and the traps."""
    rng = random.Random(count)
    texts = [known_everywhere(random_text(rng, rng.randrange(60))) for _ in range(count)]
    found = files_of_tokenizers(folder)
    kinds = [(path, special) for path in found for special in (False, True)]
    jobs = [
        {"model": str(path), "texts": TRAPS + texts[n % share :: share], "special": special}
        for n, (path, special) in enumerate(kinds)
    ]
    for job, answer, (path, special) in zip(jobs, ask(wheel, jobs, 3000), kinds, strict=True):
        allowed = "all" if special else ()
        for text, ids in zip(job["texts"], answer, strict=True):
            assert ids == found[path].encode(text, allowed_special=allowed), (path, text)


@pytest.mark.parametrize(("wheel", "count"), [("cyllama", 2_000), ("xllamacpp", 400)])
def test_token_ids_are_llama_cpps(wheel, count, tmp_path):
    check_token_ids(wheel, tmp_path, count, share=8)


def test_every_word_for_a_pre_tokenizer_stands_for_what_we_read(tmp_path, monkeypatch):
    rng, found = random.Random(3), {}
    texts = TRAPS + [known_everywhere(random_text(rng, rng.randrange(60))) for _ in range(200)]
    for word, pre in _PRES.items():
        tokenizer = splitting_tokenizer(pre.pattern, pre.ignore_merges)
        config = ModelConfig(tokenizer.vocab_size, 16, d_model=32, num_layers=1, num_heads=2)
        eos = [tokenizer.special_tokens[EOS]]
        monkeypatch.setattr(gguf_tokenizer, "_pre_word", lambda _, word=word: word)
        tensors, path = TransformerLM(config).state_dict(), tmp_path / f"{word}.gguf"
        write_gguf(path, config, tensors, tokenizer, eos_token_ids=eos)
        found[path] = tokenizer
        assert load_model(path).tokenizer.ignore_merges == pre.ignore_merges
    jobs = [{"model": str(path), "texts": texts, "special": True} for path in found]
    for (path, tokenizer), answer in zip(found.items(), ask("cyllama", jobs), strict=True):
        for text, ids in zip(texts, answer, strict=True):
            assert ids == tokenizer.encode(text), (path, text)


@pytest.mark.slow
@pytest.mark.parametrize(("wheel", "share"), [("cyllama", 1), ("xllamacpp", 8)])
def test_token_ids_of_a_hundred_thousand_texts_are_llama_cpps(wheel, share, tmp_path):
    check_token_ids(wheel, tmp_path, 100_000, share)
