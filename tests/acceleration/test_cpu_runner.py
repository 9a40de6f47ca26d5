"""A step on a CPU: the model's numbers, and the same to the bit whatever else is in the step.

Alone or among others, at once or in chunks, with pages of its own or another request's, on one
thread or two: logits, keys and values of a request are compared with `torch.equal`.
"""

import copy
import random
import shutil
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm import ModelConfig, TransformerLM, acceleration
from scratchlm import config as c
from scratchlm.accelerate.cpu_runner import SOURCE, CPURunner
from scratchlm.accelerate.decoding import why_not_cpu
from scratchlm.inference import drawing
from scratchlm.ops import OPS, native
from scratchlm.paged import LAST, Choice, PagedCache, Step
from tiny_models import FAMILIES, PLAIN, build
from waiting import PATIENCE

assert native.library(SOURCE) is not None, native.why_not(SOURCE)  # no test here without it

CONTEXT = 96
TAKEN = {
    name: config.replace(context_length=CONTEXT)
    for name, config in FAMILIES.items()
    if name != "post-norm"
}
# Sizes that fill no vector and no tile; and sums longer than a block of them.
ODD = PLAIN.replace(
    d_model=37, num_heads=6, num_kv_heads=2, d_head=10, d_ff=51, context_length=CONTEXT
)
DEEP = ODD.replace(d_model=130, d_ff=2_100, ffn=c.MLP("gelu"), num_layers=1)
WIDE_GROUP = ODD.replace(num_heads=20, num_kv_heads=1)  # more heads than queries at once
SHAPES = {**TAKEN, "odd": ODD, "deep": DEEP, "wide group": WIDE_GROUP}
IN_16_BITS = {"qwen3, bfloat16": torch.bfloat16, "gpt2, float16": torch.float16}


class Pool:
    """A runner, its cache and its tables; pages are handed out in a random order."""

    def __init__(self, model, slots=4, page_size=4, fill=0.0, seed=0):
        per_slot = -(-model.config.context_length // page_size)
        self.cache = PagedCache(
            model.config, slots * per_slot, page_size, dtype=model.token_embeddings.weight.dtype
        )
        self.cache.keys.fill_(fill)
        self.cache.values.fill_(fill)
        order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(seed))
        self.tables = order.to(torch.int32).view(slots, per_slot)
        self.last = torch.zeros(slots, dtype=torch.int64)
        self.runner = CPURunner(model, self.cache)

    def read(self, *rows):
        """Read rows (slot, tokens, start); return the logits after each."""
        slots, tokens, starts = zip(*rows, strict=True)
        step = Step(
            tokens=[token for row in tokens for token in row],
            counts=[len(row) for row in tokens],
            starts=list(starts),
            slots=list(slots),
            chooses=[True] * len(rows),
        )
        return self.runner.run(step, self.tables, self.last).clone()

    def kept(self, slot, length):
        """Return keys and values of a slot's first positions."""
        pages = self.tables[slot].long()
        both = torch.stack((self.cache.keys[:, pages], self.cache.values[:, pages]))
        return both.transpose(2, 3).flatten(3, 4)[:, :, :, :length]  # (2, layers, heads, ...)


def prompt(length, seed=0, vocab=PLAIN.vocab_size):
    return random.Random(seed).choices(range(vocab), k=length)


def in_chunks(pool, slot, tokens, size, start=0):
    """Read tokens in chunks; return the logits after the last."""
    for first in range(start, len(tokens), size):
        logits = pool.read((slot, tokens[first : first + size], first))
    return logits


@pytest.fixture(scope="module", params=[*SHAPES, *IN_16_BITS])
def model(request):
    shape, dtype = request.param.split(",")[0], IN_16_BITS.get(request.param, torch.float32)
    return build(SHAPES[shape], dtype=dtype).eval()


# The model's numbers


def test_logits_are_the_model_s_after_every_token(model):
    tokens = prompt(CONTEXT)
    pool = Pool(model)
    got = torch.cat([pool.read((1, [token], p)) for p, token in enumerate(tokens)])
    within = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}
    by = within[model.token_embeddings.weight.dtype]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]))[0].float()
    torch.testing.assert_close(got, expected, atol=by, rtol=by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_of_16_bits_give_the_bits_of_the_same_numbers_in_float32(shape, dtype):
    model = build(SHAPES[shape], dtype=dtype).eval()
    wide = copy.deepcopy(model).float()
    ours, theirs, tokens = Pool(model), Pool(wide), prompt(CONTEXT)
    ours.cache = PagedCache(model.config, ours.cache.num_pages, 4)  # keys in float32, too
    ours.runner = CPURunner(model, ours.cache)
    for start, stop in ((0, 1), (1, 4), (4, 40), (40, CONTEXT)):  # few and many rows of a product
        rows = [(slot, tokens[start:stop], start) for slot in (1, 3)]
        assert torch.equal(ours.read(*rows), theirs.read(*rows)), start
    assert torch.equal(ours.kept(1, CONTEXT), theirs.kept(1, CONTEXT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_of_16_bits_are_rounded_to_the_nearest_ties_to_even(dtype):
    """Numbers of every size, halves between two neighbours, the largest, and what is no number."""
    positive = torch.arange(0, 2**31, 2**31 // 60_000, dtype=torch.int32).view(torch.float32)
    near = torch.randn(4_000).to(dtype).float()
    halfway = (near + near.to(dtype).nextafter(torch.tensor(9.0, dtype=dtype)).float()) / 2
    edges = torch.tensor([65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 3.39e38])
    numbers = torch.cat((positive, halfway, edges))
    config = PLAIN.replace(
        vocab_size=len(numbers),
        d_model=1,
        num_heads=1,
        d_head=2,
        num_layers=1,
        positions=c.NoPositions(),
        norm=c.NoNorm(),
    )
    model = build(config, dtype=torch.float32).eval()
    with torch.no_grad():
        model.token_embeddings.weight.copy_(numbers[:, None])
        model.layers[0].attn.k_proj.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    cache = PagedCache(config, 1, 24, dtype=dtype)
    runner = CPURunner(model, cache)
    tables, last = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    for first in range(0, len(numbers), 24):
        some = range(first, min(first + 24, len(numbers)))
        runner.run(Step(list(some), [len(some)], [0], [0], [False]), tables, last)
        expected = torch.stack((numbers[some], -numbers[some]), -1).to(dtype)
        found = cache.keys[0, 0, 0, : len(some)]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num()), first


def test_it_is_as_exact_as_torch_s_own():
    config = ModelConfig(1000, 256, 256, 4, 4, positions=c.Rotary(1e4, "half"))
    model = TransformerLM(config).eval()
    exact = TransformerLM(config, ops="reference", dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    tokens = prompt(200, vocab=1000)
    with torch.inference_mode():
        wanted = exact(torch.tensor([tokens]))[0, -1]
        theirs = model(torch.tensor([tokens]))[0, -1]
    ours = Pool(model, page_size=16).read((0, tokens, 0))[0]
    assert (ours - wanted).norm() < 1.5 * (theirs - wanted).norm()
    assert (ours - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_are_right_from_end_to_end_of_their_range(activation):
    """A model whose one layer passes numbers of any size through the activation."""
    config = PLAIN.replace(norm=c.NoNorm(), ffn=c.MLP(activation), num_layers=1)
    model = build(config, dtype=torch.float32).eval()
    x = torch.cat((torch.linspace(-20, 20, 25), torch.tensor([-1e4, -90.0, 90.0, 1e4])))
    with torch.inference_mode():
        for weight in (model.layers[0].attn.output_proj.weight, model.layers[0].ffn.w1.weight):
            weight.zero_()
        model.token_embeddings.weight.copy_(x[:, None].expand(-1, config.d_model))
        model.layers[0].ffn.w1.weight[:, 0] = 1.0
        expected = model(torch.arange(len(x))[:, None])[:, 0]
    pool = Pool(model, slots=len(x))
    got = pool.read(*((slot, [slot], 0) for slot in range(len(x))))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocab", [5, 16, 29, 70])
@pytest.mark.parametrize("damage", [None, "ties", "nan", "inf"])
def test_the_tokens_it_chooses_are_the_likeliest_of_its_logits(vocab, damage):
    model = build(PLAIN.replace(vocab_size=vocab), dtype=torch.float32).eval()
    head = model.lm_head.weight
    with torch.no_grad():
        if damage == "ties":
            head.copy_(head[torch.arange(vocab) % 3])
        elif damage is not None:  # one logit of every row: NaN, or infinite with either sign
            head[vocab - 2] = 0.0
            head[vocab - 2, 0] = float(damage)
    pool = Pool(model, slots=9)
    rows = [(slot, prompt(9 + slot, slot, vocab), 0) for slot in range(9)]
    expected = drawing.argmax(pool.read(*rows))
    assert (drawing.NOTHING in expected) == (damage in ("nan", "inf"))
    assert (expected >= 0).any() == (damage != "nan")
    for some in (slice(9), slice(2, 5)):  # rows in units of their own, and few
        step = Step(
            [token for _, row, _ in rows[some] for token in row],
            [len(row) for _, row, _ in rows[some]],
            [0] * len(rows[some]),
            [slot for slot, _, _ in rows[some]],
            [slot != 3 for slot, _, _ in rows[some]],
        )
        chosen = [slot for slot, _, _ in rows[some] if slot != 3]
        choice = Choice([0.0] * len(chosen), [vocab] * len(chosen), [1.0] * len(chosen), [])
        pool.last.fill_(-5)
        tokens = pool.runner.run_and_choose(step, pool.tables, pool.last, choice)
        assert torch.equal(tokens, expected[chosen])
        assert torch.equal(pool.last[chosen], expected[chosen].clamp(min=0))
        assert pool.last[3] == -5


# The same to the bit


def test_chunks_of_any_size_give_the_same_bits(model):
    tokens = prompt(CONTEXT - 2)
    once = Pool(model)
    wanted = once.read((0, tokens, 0))
    for size in (1, 3, 16, 64):
        pool = Pool(model)
        assert torch.equal(in_chunks(pool, 2, tokens, size), wanted), size
        assert torch.equal(pool.kept(2, len(tokens)), once.kept(0, len(tokens))), size


def test_among_63_others_a_request_is_as_it_is_alone(model):
    """All decode, or read prompts in chunks, each in its own time."""
    pool, alone = Pool(model, slots=64), Pool(model)
    draw = random.Random(1)
    prompts = [prompt(draw.randint(1, CONTEXT), seed) for seed in range(64)]
    prompts[17] = prompt(70)
    done, wanted = [0] * 64, {}
    for p in range(70):
        wanted[p + 1] = alone.read((0, prompts[17][p : p + 1], p))
    while done[17] < 70:
        going = [slot for slot in range(64) if done[slot] < len(prompts[slot])]
        draw.shuffle(going)
        counts = [draw.choice((1, 1, 1, 5, 20)) for _ in going]
        rows = [
            (slot, prompts[slot][done[slot] : done[slot] + count], done[slot])
            for slot, count in zip(going, counts, strict=True)
        ]
        logits = pool.read(*rows)
        for slot, tokens, _ in rows:
            done[slot] += len(tokens)
        assert torch.equal(logits[going.index(17)], wanted[done[17]][0])
    assert torch.equal(pool.kept(17, 70), alone.kept(0, 70))


def test_a_prefix_that_another_request_read_gives_the_same_bits(model):
    shared, own = prompt(40), prompt(9, seed=1)
    wanted = Pool(model).read((0, shared + own, 0))
    pool = Pool(model)
    in_chunks(pool, 3, shared + prompt(7, seed=2), 11)
    pool.tables[1, :10] = pool.tables[3, :10]  # ten pages of four
    assert torch.equal(pool.read((1, own, 40)), wanted)


def test_pages_of_any_size_give_the_same_bits(model):
    tokens = prompt(50)
    wanted = Pool(model).read((0, tokens, 0))
    for page_size in (1, 16, 37):
        assert torch.equal(in_chunks(Pool(model, page_size=page_size), 0, tokens, 20), wanted)


def test_what_no_request_has_written_is_never_read(model):
    """Not even to be multiplied by 0: every number of the pool is a NaN at first."""
    tokens = prompt(50)
    clean, poisoned = Pool(model), Pool(model, fill=torch.nan)
    for size in (1, 7, 50):
        wanted = in_chunks(clean, 0, tokens, size)
        assert wanted.isfinite().all()
        assert torch.equal(in_chunks(poisoned, 0, tokens, size), wanted)


# Large enough for two threads

LARGE = ModelConfig(3000, 160, 256, 3, 8, num_kv_heads=4, d_ff=1200)


@pytest.mark.parametrize("ffn", [c.SwiGLU(), c.MoE(9, 3)])
def test_threads_change_no_bit(ffn):
    model = build(LARGE.replace(ffn=ffn), dtype=torch.float32).eval()
    rows = [(slot, prompt(draw, slot, 3000), 0) for slot, draw in enumerate((150, 1, 33, 64))]
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            pool = Pool(model, page_size=16)
            first = pool.read(*rows)
            then = pool.read(*((slot, [7], len(tokens)) for slot, tokens, _ in rows))
            alone = pool.read((1, [9], 2))
            found.append((first, then, alone, pool.kept(0, 150)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_threads_that_come_late_change_no_bit():
    """Each layer lists other rows of its experts; late threads may look at a later layer's."""
    config = LARGE.replace(d_model=128, num_layers=6, d_ff=256, ffn=c.MoE(9, 3))
    pool = Pool(build(config, dtype=torch.float32).eval(), page_size=16)
    rows = [(slot, prompt(draw, slot, 3000), 0) for slot, draw in enumerate((15, 1, 33, 64))]
    found = []

    def read():
        torch.set_num_threads(16)  # more than there are cores
        found.extend(pool.read(*rows) for _ in range(40))

    threads = torch.get_num_threads()
    reading = threading.Thread(target=read, daemon=True)  # which could wait for ever
    try:
        torch.set_num_threads(1)
        alone = pool.read(*rows)
        reading.start()
        reading.join(PATIENCE)
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 40
    assert all(torch.equal(logits, alone) for logits in found)


def test_any_number_of_rows_gives_the_same_bits():
    """1 … 300 tokens in a step: every remainder of a tile, and of a block of tokens."""
    model = build(PLAIN.replace(d_model=48, d_ff=80, context_length=300), dtype=torch.float32)
    tokens = prompt(300)
    by_one = Pool(model, page_size=16)
    wanted = [by_one.read((0, [token], p)) for p, token in enumerate(tokens)]
    pool = Pool(model, page_size=16)
    for length in [*range(1, 140), 191, 192, 193, 255, 256, 257, 300]:
        assert torch.equal(pool.read((1, tokens[:length], 0)), wanted[length - 1]), length
        assert torch.equal(pool.kept(1, length), by_one.kept(0, length)), length


@st.composite
def configs(draw):
    group, kv_heads = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    layout = st.sampled_from(["interleaved", "half"])
    positions = [c.Rotary(1e4, draw(layout)), c.Learned(), c.NoPositions()]
    norms = [c.RMSNorm(), c.LayerNorm(bias=draw(st.booleans())), c.NoNorm()]
    bias = draw(st.booleans())
    chosen = draw(st.integers(1, 4))
    experts = draw(st.integers(chosen, 20)), chosen, draw(st.booleans())
    activation = draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"]))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 70)),
        context_length=64,
        d_model=draw(st.integers(1, 70)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        d_head=2 * draw(st.integers(1, 20)),
        d_ff=draw(st.integers(1, 100)),
        positions=draw(st.sampled_from(positions)),
        norm=draw(st.sampled_from(norms)),
        ffn=draw(st.sampled_from([c.SwiGLU(bias), c.MLP(activation, bias), c.MoE(*experts)])),
        attention=c.Attention(
            qk_norm=draw(st.booleans()),
            bias=draw(st.sampled_from(["none", "qkv", "all"])),
            sliding_window=draw(st.sampled_from([None, None, 1, 3, 17])),
        ),
        tie_embeddings=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(configs(), st.integers(0, 2**30))
def test_random_models_and_chunks(config, seed):
    draw = random.Random(seed)
    model = build(config, dtype=torch.float32, seed=seed).eval()
    tokens, other = (prompt(64, seed + i, config.vocab_size) for i in range(2))
    pool = Pool(model, page_size=draw.choice((1, 4, 16)), fill=torch.nan, seed=seed)
    wanted = Pool(model).read((0, tokens, 0))
    done = 0
    while done < 64:
        count = draw.randint(1, 64 - done)
        size = draw.randint(1, 64)
        rows = [(2, tokens[done : done + count], done), (0, other[:size], 0)]
        logits = pool.read(*rows)
        done += count
    assert torch.equal(logits[0], wanted[0])
    with torch.inference_mode():
        expected = model(torch.tensor([tokens]))[:, -1]
    torch.testing.assert_close(wanted, expected, atol=2e-5, rtol=1e-4)


# What a step says


def test_a_token_may_be_known_to_the_device_alone():
    model = build(PLAIN, dtype=torch.float32)
    pool = Pool(model)
    pool.read((0, [1, 2], 0), (3, [4], 0))
    wanted = pool.read((0, [5], 2), (3, [6], 1))
    pool.last[0], pool.last[3] = 5, 6
    assert torch.equal(pool.read((0, [LAST], 2), (3, [LAST], 1)), wanted)


def test_proposals_have_the_bits_of_tokens_read_one_by_one(model):
    pool, tokens, other = Pool(model), prompt(40), prompt(9, seed=1)
    pool.read((0, tokens[:20], 0))
    expected = [pool.read((0, [t], i)) for i, t in enumerate(tokens[20:], 20)]
    expected.append(pool.read((1, other, 0)))
    again = Pool(model)
    again.read((2, tokens[:20], 0))
    step = Step([*tokens[20:], *other], [20, 9], [20, 0], [2, 1], [True, True], [19, 0])
    assert torch.equal(again.runner.run(step, again.tables, again.last), torch.cat(expected))
    assert torch.equal(again.kept(2, 40), pool.kept(0, 40))


def test_rows_that_do_not_choose_have_no_logits():
    model = build(PLAIN, dtype=torch.float32)
    pool, other = Pool(model), Pool(model)
    step = Step([1, 2, 3, 4], [2, 1, 1], [0, 0, 0], [0, 1, 2], [False, True, False])
    logits = pool.runner.run(step, pool.tables, pool.last).clone()
    wanted = other.read((0, [1, 2], 0), (1, [3], 0), (2, [4], 0))
    assert torch.equal(logits, wanted[1:2])
    assert torch.equal(pool.kept(0, 2), other.kept(0, 2))
    silent = Step([1, 2], [2], [0], [3], [False])
    assert pool.runner.run(silent, pool.tables, pool.last).shape == (0, PLAIN.vocab_size)
    assert torch.equal(pool.kept(3, 2), other.kept(0, 2))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ((0, [29], 0), r"token id must lie in \[0, 29\)"),
        ((0, [-2], 0), "token id"),
        ((0, [1], 24), r"positions in \[0, 24\)"),
        ((0, [1, 2], -1), "positions"),
        ((4, [1], 0), "slot"),
        ((1, [1], 4), "page"),
    ],
    ids=str,
)
def test_what_would_be_read_outside_is_refused(row, match):
    pool = Pool(build(PLAIN, dtype=torch.float32))
    pool.tables[1, 1] = -1
    before = pool.cache.keys.clone()
    with pytest.raises(ValueError, match=match):
        pool.read((2, [3], 0), row)
    assert torch.equal(pool.cache.keys, before)


# Models that change


def zero(module, inputs, output):
    return torch.zeros_like(output)


def test_hooked_replaced_and_patched_modules_are_noticed():
    model = build(PLAIN, dtype=torch.float32)
    runner = Pool(model).runner
    attn = model.layers[1].attn
    assert runner.unchanged
    hook = attn.v_proj.register_forward_hook(zero)
    assert not runner.unchanged
    hook.remove()
    assert runner.unchanged
    attn.v_proj.forward = lambda x: x
    assert not runner.unchanged
    del attn.v_proj.forward
    assert runner.unchanged
    model.layers[0].ffn.ops = OPS["fast"].replace(silu=torch.relu)
    assert not runner.unchanged
    model.layers[0].ffn.ops = OPS["fast"]
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not runner.unchanged
    hook.remove()
    assert runner.unchanged
    attn.v_proj = copy.deepcopy(attn.v_proj)
    assert not runner.unchanged


def test_weights_that_moved_or_changed_are_found():
    model = build(PLAIN, dtype=torch.float32).eval()
    pool = Pool(model)
    before = pool.read((0, [1, 2, 3], 0))
    weight = model.layers[0].attn.q_proj.weight

    def expected():
        with torch.inference_mode():
            return model(torch.tensor([[1, 2, 3]]))[:, -1]

    with torch.no_grad():
        weight.mul_(2)  # where it lies
    assert pool.runner.unchanged
    assert not torch.allclose(pool.read((0, [1, 2, 3], 0)), before)
    weight.data = weight.data * 3  # elsewhere
    assert pool.runner.unchanged
    torch.testing.assert_close(pool.read((0, [1, 2, 3], 0)), expected(), atol=1e-5, rtol=1e-5)
    model.layers[0].ln1.weight = torch.nn.Parameter(torch.randn(16))
    assert pool.runner.unchanged
    torch.testing.assert_close(pool.read((0, [1, 2, 3], 0)), expected(), atol=1e-5, rtol=1e-5)
    model.double()
    assert not pool.runner.unchanged


def test_norms_and_biases_of_16_bits_are_read_anew_in_every_step():
    model = build(FAMILIES["gpt2"], dtype=torch.bfloat16).eval()
    pool = Pool(model)
    for vector in (model.layers[0].ln1.weight, model.layers[1].ffn.w1.bias, model.ln_final.bias):
        before = pool.read((0, [1, 2, 3], 0))
        with torch.no_grad():
            vector.mul_(2)
        assert pool.runner.unchanged
        after = pool.read((0, [1, 2, 3], 0))
        assert not torch.equal(after, before)
        assert torch.equal(after, Pool(model).read((0, [1, 2, 3], 0)))


def test_other_models_are_not_taken():
    def runner_of(model):
        cache = PagedCache(model.config, 4, 4)
        return acceleration.make_runner(model, cache, max_rows=4, exact=True)

    assert isinstance(runner_of(build(PLAIN, dtype=torch.float32)), CPURunner)
    assert runner_of(build(PLAIN, dtype=torch.float64)) is None
    for family in ("post-norm",):
        model = build(FAMILIES[family], dtype=torch.float32)
        assert runner_of(model) is None
        with pytest.raises(ValueError, match="does not take"):
            CPURunner(model, PagedCache(model.config, 4, 4))


def test_without_a_compiler_there_is_no_runner(monkeypatch, tmp_path):
    native._loaded.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    try:
        model = build(PLAIN, dtype=torch.float32)
        assert "no C++ compiler" in why_not_cpu(model)
        cache = PagedCache(PLAIN, 4, 4)
        assert acceleration.make_runner(model, cache, max_rows=1, exact=False) is None
    finally:
        native._loaded.cache_clear()
