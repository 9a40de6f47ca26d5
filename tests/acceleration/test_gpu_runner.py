"""A step on a GPU: the model's numbers, whatever else is in the step; with `exact`, to the bit.

Without a GPU the kernels run one by one in Triton's interpreter; on one, decoding is recorded.
"""

import random
import warnings

import pytest
import torch

from acceleration.gpu import compiled_lines
from scratchlm import acceleration
from scratchlm.accelerate import flat_forward, gpu_decode, gpu_runner
from scratchlm.accelerate.gpu_decode import GPUStep
from scratchlm.accelerate.gpu_runner import GPURunner, length_bucket, row_bucket, why_not_pages
from scratchlm.accelerate.kernels.triton.decode_tiles import Tile
from scratchlm.inference import GREEDY, generate
from scratchlm.paged import LAST, Choice, PagedCache, Step
from tiny_models import FAMILIES, PLAIN, build

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TAKEN = [name for name in FAMILIES if name not in ("mixtral", "post-norm")]
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
CONTEXT = 96


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter takes milliseconds for each."""
    if not CUDA:
        monkeypatch.setattr(gpu_decode, "choose_tile", lambda *_: Tile(16, 4))
        monkeypatch.setattr(gpu_runner, "TOKEN_BUCKETS", (4, 20))


def make(family, dtype=torch.float32, layers=1, **more):
    config = FAMILIES[family].replace(num_layers=layers, context_length=CONTEXT, **more)
    return build(config, dtype=dtype).to(DEVICE)


class Pool:
    """A runner, its cache and its tables; pages are handed out in a random order."""

    def __init__(self, model, slots=8, page_size=16, fill=float("nan"), **options):
        per_slot = -(-model.config.context_length // page_size)
        dtype = model.token_embeddings.weight.dtype
        self.cache = PagedCache(
            model.config, slots * per_slot, page_size, device=DEVICE, dtype=dtype
        )
        self.cache.keys.fill_(fill)  # what is read without having been written shows
        self.cache.values.fill_(fill)
        order = torch.randperm(slots * per_slot, generator=torch.Generator().manual_seed(3))
        self.tables = order.to(torch.int32).view(slots, per_slot)
        self.last = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # recording must not fall back
            self.runner = GPURunner(model, self.cache, max_rows=slots, **options)

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

    def decode(self, *rows):
        """Read one token of each (slot, token, start), as a row that decodes does."""
        for slot, token, _ in rows:
            self.last[slot] = token
        return self.read(*((slot, [LAST], start) for slot, _, start in rows))

    def kept(self, slot, length):
        """Return keys and values of a slot's first positions: (2, layers, kv_heads, length, d)."""
        pages = self.tables[slot].long().to(DEVICE)
        both = torch.stack((self.cache.keys[:, pages], self.cache.values[:, pages]))
        return both.transpose(2, 3).flatten(3, 4)[:, :, :, :length]


def texts(count, longest, vocab=PLAIN.vocab_size, seed=0):
    draw = random.Random(seed)
    return [draw.choices(range(vocab), k=max(4, longest - 5 * i)) for i in range(count)]


@torch.inference_mode()
def expected_after(model, tokens):
    """The logits after some tokens, and the keys and values of all of them."""
    cache = model.new_cache(1)
    logits = model(torch.tensor([tokens], device=DEVICE), cache=cache)[0, -1]
    both = torch.stack((cache.keys, cache.values))[:, :, 0, :, : len(tokens)]
    return logits, both


def assert_near(got, expected):
    torch.testing.assert_close(got.float(), expected.float(), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("family", "rows"), [*((family, 1) for family in TAKEN), *((family, 5) for family in TAKEN)]
)
def test_prompts_and_decoded_tokens_have_the_models_numbers(family, rows):
    model = make(family)
    pool, all_tokens = Pool(model), texts(rows, 19)
    prompts = [(slot, tokens[:-2], 0) for slot, tokens in enumerate(all_tokens)]
    found = [pool.read(*prompts)]
    for back in (2, 1):
        step = [(slot, t[-back], len(t) - back) for slot, t in enumerate(all_tokens)]
        found.append(pool.decode(*step))
    for slot, tokens in enumerate(all_tokens):
        for logits, back in zip(found, (2, 1, 0), strict=True):
            expected, kept = expected_after(model, tokens[: len(tokens) - back])
            assert_near(logits[slot], expected)
        assert_near(pool.kept(slot, len(tokens)), kept)


@pytest.mark.parametrize("slots", [8, 3])
def test_proposals_have_the_models_numbers_beside_a_prompt_and_a_decoding_row(slots):
    """Also where there are more of them than rows, which recordings have no room for."""
    model = make("qwen3")
    pool, (one, two, three) = Pool(model, slots=slots), texts(3, 19)
    pool.read((0, one[:-5], 0), (1, two[:-1], 0))
    pool.last[1] = two[-1]
    step = Step(
        [*one[-5:], LAST, *three],
        counts=[5, 1, len(three)],
        starts=[len(one) - 5, len(two) - 1, 0],
        slots=[0, 1, 2],
        chooses=[True, True, False],
        num_proposed=[4, 0, 0],
    )
    logits = pool.runner.run(step, pool.tables, pool.last)
    expected = [expected_after(model, one[: len(one) - back])[0] for back in (4, 3, 2, 1, 0)]
    expected.append(expected_after(model, two)[0])
    assert len(logits) == len(expected)
    for got, right in zip(logits, expected, strict=True):
        assert_near(got, right)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2"])
def test_a_prompt_in_pieces_beside_decoding_rows_is_the_prompt_alone(family):
    model = make(family)
    pool = Pool(model)
    long, short = texts(2, 40)
    pool.read((1, short[:-6], 0))
    at, back = 0, 6
    for size in (1, 16, 7, 16):
        pool.last[1] = short[-back]
        logits = pool.read((0, long[at : at + size], at), (1, [LAST], len(short) - back))
        at, back = at + size, back - 1
    assert at == len(long)
    for slot, tokens in ((0, long), (1, short[: len(short) - back])):
        expected, kept = expected_after(model, tokens)
        assert_near(logits[slot], expected)
        assert_near(pool.kept(slot, len(tokens)), kept)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_split_keys_are_combined_to_the_same(family, monkeypatch):
    monkeypatch.setattr(flat_forward, "SPLIT_KEYS", (16, 16))
    model = make(family)
    pool, all_tokens = Pool(model), texts(6, 39)
    pool.read(*((slot, tokens[:-1], 0) for slot, tokens in enumerate(all_tokens)))
    step = [(slot, tokens[-1], len(tokens) - 1) for slot, tokens in enumerate(all_tokens)]
    table = torch.zeros(3, 6)
    assert pool.runner._forward.decoding_tiles(table, CONTEXT).splits == 6
    for slot, logits in enumerate(pool.decode(*step)):
        assert_near(logits, expected_after(model, all_tokens[slot])[0])


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompts_split_keys_are_combined_to_the_same(family, monkeypatch):
    monkeypatch.setattr(flat_forward, "SPLIT_KEYS", (16, 16))
    monkeypatch.setattr(flat_forward, "PROMPT_KEYS", 48)
    monkeypatch.setattr(flat_forward.FlatForward, "block_q", lambda *_: 4)
    model = make(family)
    pool, (long, short) = Pool(model), texts(2, 41)
    tiles = pool.runner._forward.prompt_tiles(torch.zeros(3, 1), 8, CONTEXT)
    assert (tiles.splits, tiles.split_keys) == (2, 64)
    monkeypatch.setattr(flat_forward.FlatForward, "prompt_tiles", lambda f, t, *_: f_tiles(t))

    def f_tiles(table):
        return flat_forward.Tiles(table, 4, splits=3, split_keys=16)

    pool.read((0, long[:32], 0), (1, short[:30], 0))
    logits = pool.read((0, long[32:], 32), (1, short[30:], 30))
    for slot, tokens in enumerate((long, short)):
        assert_near(logits[slot], expected_after(model, tokens)[0])


def test_a_step_of_a_bucket_seen_before_is_the_step_as_it_comes():
    """At its second use a bucket is recorded, with more of everything than the step has."""
    model, (long, short, other) = make("qwen3"), texts(3, 33)
    found = []
    for steps_before in (0, 2):
        pool = Pool(model)
        for _ in range(steps_before):
            pool.read((0, long[:17], 0))
        assert len([r for r in pool.runner._recorded.values() if r]) == (steps_before > 1)
        pool.read((1, short[:3], 0))
        pool.last[1] = short[3]
        found.append(pool.read((0, long[:15], 0), (1, [LAST], 3), (2, other[:2], 0)))
    assert_near(found[1], found[0])
    assert_near(found[0][0], expected_after(model, long[:15])[0])
    assert_near(found[0][1], expected_after(model, short[:4])[0])


@pytest.mark.parametrize("proposed", [True, False])
def test_more_rows_or_logits_than_requests_have_their_numbers_beside_a_recorded_bucket(proposed):
    """Proposals are many logits of a row, scored tokens many rows: a recording has no room."""
    model, (tokens, other) = make("llama"), texts(2, 11)
    pool = Pool(model, slots=2)
    for _ in range(2):  # recorded
        pool.read((0, other, 0))
    pool.read((1, tokens[:4], 0))
    rest, count = tokens[4:], len(tokens) - 4
    if proposed:
        step = Step(
            [*other, *rest], [len(other), count], [0, 4], [0, 1], [True] * 2, [0, count - 1]
        )
        found = pool.runner.run(step, pool.tables, pool.last)
    else:
        found = pool.read((0, other, 0), *((1, [t], at) for at, t in enumerate(rest, 4)))
    expected = [expected_after(model, other)[0]]
    expected += [expected_after(model, tokens[:end])[0] for end in range(5, len(tokens) + 1)]
    assert_near(found, torch.stack(expected))


def test_every_row_may_have_one_token_that_the_host_knows_in_a_recorded_bucket():
    model, all_tokens = make("llama"), texts(5, 6)
    pool = Pool(model, slots=5)
    for _ in range(2):
        pool.read(*((slot, tokens[:3], 0) for slot, tokens in enumerate(all_tokens)))
    found = pool.read(*((slot, tokens[3:4], 3) for slot, tokens in enumerate(all_tokens)))
    assert_near(found, torch.stack([expected_after(model, t[:4])[0] for t in all_tokens]))


def test_a_step_that_chooses_has_the_tokens_of_its_logits():
    model, (long, short) = make("llama"), texts(2, 12)
    pool = Pool(model)
    choice = Choice([0.0, 1.0], [5, 1], [1.0, 1.0], [0.0, 0.5])  # both the argmax
    step = Step([*long, *short], [len(long), len(short)], [0, 0], [2, 1], [True, True])
    for _ in range(2):  # as it comes, then by a bucket
        logits = pool.runner.run(step, pool.tables, pool.last).clone()
        tokens = pool.runner.run_and_choose(step, pool.tables, pool.last, choice)
        assert tokens.tolist() == logits.argmax(dim=-1).tolist() == pool.last[[2, 1]].tolist()
    kept = pool.last.clone()
    step = Step([LAST] * 2, [1] * 2, [len(long), len(short)], [2, 1], [True] * 2)
    pool.last[[2, 1]] = 3
    logits = pool.runner.run(step, pool.tables, pool.last).clone()
    tokens = pool.runner.run_and_choose(step, pool.tables, pool.last, choice)
    assert tokens.tolist() == logits.argmax(dim=-1).tolist() == pool.last[[2, 1]].tolist()
    others = [0, 3, 4, 5, 6, 7]  # rows that are not there choose nothing
    assert pool.last[others].tolist() == kept[others].tolist()


def test_two_layers_in_low_precision_are_as_near_to_float64_as_the_model_is():
    low = torch.bfloat16 if CUDA else torch.float16  # whose products the interpreter has right
    model, tokens = make("qwen3", low, layers=2), texts(1, 20)[0]
    truth = build(model.config, dtype=low).double().to(DEVICE)
    with torch.inference_mode():
        exact = truth(torch.tensor([tokens], device=DEVICE))[0, -1]
        own = model(torch.tensor([tokens], device=DEVICE))[0, -1]
    for slots in (1, 5):  # by vectors, and by matrices
        pool = Pool(model)
        pool.read(*((slot, tokens[:-1], 0) for slot in range(slots)))
        logits = pool.decode(*((slot, tokens[-1], len(tokens) - 1) for slot in range(slots)))
        error, own_error = ((x.double() - exact).norm() / exact.norm() for x in (logits[0], own))
        assert error < 1.5 * own_error + 1e-3
        assert error < 2e-2


def matmul_row_by_row(a, b, **options):
    """Multiply so that a row's sums do not depend on its place; a BLAS may not, on some CPUs."""
    return (a[:, :, None] * b[None]).sum(axis=1, **options)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_exact_numbers_depend_on_nothing_else_in_the_step(family, monkeypatch):
    if not CUDA:
        monkeypatch.setattr("numpy.matmul", matmul_row_by_row)  # the interpreter's `tl.dot`
    dtype = torch.bfloat16 if CUDA else torch.float32
    model = make(family, dtype, d_model=80, d_ff=136)
    tokens, *others = texts(6, 30)
    alone = Pool(model, exact=True)
    first = alone.read((3, tokens[:-1], 0))
    last = alone.decode((3, tokens[-1], 29))
    crowd = Pool(model, exact=True, slots=9)
    for at, size in ((0, 16), (16, 5), (21, 1), (22, 7)):  # in pieces, beside others
        beside = [(slot, other[: at % 7 + 1], 0) for slot, other in enumerate(others)]
        logits = crowd.read(*beside, (8, tokens[at : at + size], at))
    assert torch.equal(logits[-1], first[0])
    more = [(slot, 1, 2) for slot in range(len(others))]
    assert torch.equal(crowd.decode((8, tokens[-1], 29), *more)[0], last[0])
    assert torch.equal(crowd.kept(8, 30), alone.kept(3, 30))


def test_a_runner_keeps_no_hold_of_autograd():
    """It would tie a parameter's gradient to the stream that the runner was made on."""
    model = make("llama").requires_grad_(True)
    acceleration.join_weights(model)
    forward = Pool(model).runner._forward
    products = [p for layer in forward.layers for p in layer if hasattr(p, "weights")]
    assert any(len(p.weights) < len(p.sizes) for p in products)  # some are joined
    assert all(weight.grad_fn is None for p in products for weight in p.weights)


def test_weights_that_are_changed_or_moved_are_followed():
    model, tokens = make("llama"), texts(1, 12)[0]
    pool = Pool(model)

    def check():
        pool.read((0, tokens[:-1], 0))
        assert_near(pool.decode((0, tokens[-1], 11))[0], expected_after(model, tokens)[0])

    check()
    model.lm_head.weight.data.mul_(2)  # in place: a recording sees it
    check()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.01  # elsewhere: recorded anew
    check()


def test_the_runner_notices_a_hook_and_a_replaced_layer():
    model = make("gpt2")
    runner = Pool(model).runner
    assert runner.unchanged
    handle = model.layers[0].ffn.w1.register_forward_hook(lambda *_: None)
    assert not runner.unchanged
    handle.remove()
    assert runner.unchanged
    model.layers[0].attn.v_proj = torch.nn.Identity()
    assert not runner.unchanged


def test_buckets_hold_what_they_are_for():
    assert [row_bucket(n, 256) for n in (1, 3, 5, 17, 64, 65, 250)] == [1, 4, 8, 32, 64, 128, 256]
    assert row_bucket(5, 6) == 6
    assert row_bucket(7, 6) == 7  # more than it was told: still right
    for keys in (1, 256, 257, 1000, 5000):
        assert length_bucket(keys, 4096) >= keys
    assert [length_bucket(n, 4096) for n in (1, 257, 1025, 4096)] == [256, 512, 2048, 4096]
    assert length_bucket(90, 96) == 96


def test_pages_that_kernels_cannot_read_and_models_they_do_not_take_are_refused():
    config = FAMILIES["plain"]
    assert why_not_pages(PagedCache(config, 1, 48)) is None
    assert why_not_pages(PagedCache(config, 1, 24)) == "pages of no multiple of 16 tokens"
    cache = PagedCache(config, 1, 16, kv_dtype="int8")
    assert why_not_pages(cache) == "keys and values in int8"
    model = build(FAMILIES["mixtral"], dtype=torch.float32)
    with pytest.raises(ValueError, match="does not take MoE in the config"):
        GPUStep(model, PagedCache(model.config, 1, 16), rows=1, max_kv_len=16)
    with pytest.raises(ValueError, match="takes 1 to 4 rows; got 5"):
        GPUStep(make("plain"), PagedCache(config, 1, 16), rows=5, max_kv_len=16)


def test_every_kernel_compiles_for_a_hopper_gpu_without_spilling():
    lines = [line.split() for line in compiled_lines("compile_runner.py", "qwen3")]
    spilled = {name for name, spills in lines if int(spills)}
    assert not spilled
    assert {name for name, _ in lines} == {
        *("embed", "add_norm", "gate", "norm_rope_write", "paged_attention", "combine_splits"),
        *("_invariant_linear_kernel", "group_maxima", "collect", "draw"),
    }


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_neither_pdl_nor_recording_changes_the_result(family, rows):
    model, all_tokens = make(family, layers=2), texts(rows, 40)
    found = []
    for options in ({}, {"pdl": False}, {"graph": False}, {"graph": False, "pdl": False}):
        pool = Pool(model, **options)
        pool.read(*((slot, tokens[:-2], 0) for slot, tokens in enumerate(all_tokens)))
        steps = [[(s, t[-b], len(t) - b) for s, t in enumerate(all_tokens)] for b in (2, 1)]
        found.append(torch.stack([pool.decode(*step) for step in steps]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=1e-6)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4], [5, 6], [7, 8, 9], [3, 1]]])
def test_fifty_greedy_tokens_are_those_of_the_plain_path(prompts, exact, monkeypatch):
    torch.manual_seed(0)
    config = FAMILIES["llama"].replace(context_length=64, d_model=128, d_ff=320, vocab_size=500)
    model = build(config, dtype=torch.float32).cuda()
    if exact:
        make_runner = acceleration.make_runner
        monkeypatch.setattr(
            acceleration, "make_runner", lambda *a, **k: make_runner(*a, **{**k, "exact": True})
        )
    fast = generate(model, prompts, max_new_tokens=50, sampling=GREEDY)
    monkeypatch.setattr(acceleration, "make_runner", lambda *_, **__: None)
    plain = generate(model, prompts, max_new_tokens=50, sampling=GREEDY)
    assert [row.token_ids for row in fast] == [row.token_ids for row in plain]


def test_rows_of_one_slot_that_follow_each_other_have_the_models_numbers():
    """As scored tokens are read: the logits after each, in one step."""
    model = make("llama")
    pool, (tokens, other) = Pool(model), texts(2, 23)
    rows = [(3, tokens[:9], 0), *((3, [token], at) for at, token in enumerate(tokens[9:], 9))]
    found = pool.read((1, other, 0), *rows)
    expected = [expected_after(model, other)[0]]
    expected += [expected_after(model, tokens[:end])[0] for end in range(9, len(tokens) + 1)]
    assert_near(found, torch.stack(expected))
