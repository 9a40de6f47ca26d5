"""A step of the GPU decoder equals the model's, and leaves the cache as the model would.

Without a GPU the kernels run one by one in Triton's interpreter; on one, recorded as a graph.
"""

import warnings

import pytest
import torch

from scratchlm import acceleration
from scratchlm.accelerate import gpu_decode
from scratchlm.accelerate.decoding import why_not_gpu, why_not_model
from scratchlm.accelerate.graph_decoder import GraphDecoder
from scratchlm.accelerate.kernels.triton.decode_tiles import MAX_ROWS, KVSplits, Tile
from scratchlm.inference import generate
from scratchlm.inference.sampling import GREEDY
from tiny_models import FAMILIES, build, ids

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# Few programs: the interpreter takes milliseconds for each.
TILES = {name: Tile(16, 4) for name in ("qkv", "out", "gate", "up", "down", "head")}
TAKEN = [name for name in FAMILIES if name not in ("mixtral", "post-norm")]
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


def make(family, dtype=torch.float32, layers=1):
    config = FAMILIES[family].replace(num_layers=layers)
    return build(config, dtype=dtype).to(DEVICE)


def decoder_for(model, cache, **options):
    options = {"tiles": TILES, "graph": CUDA, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # recording must not fall back
        return GraphDecoder(model, cache, **options)


def filled(model, rows, tokens, capacity=13):
    """Return a cache that holds six tokens of every row, fewer in row 1."""
    cache = model.new_cache(rows, capacity)
    mask = None
    if rows > 1:
        mask = torch.ones(rows, 6, dtype=torch.bool, device=DEVICE)
        mask[1, :4] = False
    model(tokens[:, :6], cache=cache, attention_mask=mask)
    return cache


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("family", TAKEN)
@torch.inference_mode()
def test_steps_equal_the_model(family, rows):
    model, tokens = make(family), ids(rows, 9).to(DEVICE)
    cache, expected_cache = filled(model, rows, tokens), filled(model, rows, tokens)
    splits = KVSplits(4, 4, 2) if family in ("llama", "mistral") else None
    decoder = decoder_for(model, cache, kv_splits=splits)
    for i in (6, 7):
        logits = decoder.step(tokens[:, i])
        expected = model(tokens[:, i : i + 1], cache=expected_cache)[:, 0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert cache.length == expected_cache.length
    assert cache.lengths.tolist() == expected_cache.lengths.tolist()
    torch.testing.assert_close(cache.keys, expected_cache.keys, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(cache.values, expected_cache.values, atol=1e-5, rtol=1e-4)
    # and the model reads on from there
    got, wanted = (model(tokens[:, 8:], cache=c) for c in (cache, expected_cache))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2])
@torch.inference_mode()
def test_long_rows_are_attended_by_several_programs_with_the_same_result(rows, monkeypatch):
    """Up to eight keys by one program; then by three, whose results the projection combines."""
    splits = {8: KVSplits(8, 4, 1), 13: KVSplits(8, 4, 3, deferred_combine=True)}
    monkeypatch.setattr(gpu_decode, "choose_kv_splits", lambda *sizes: splits)
    model, tokens = make("llama"), ids(rows, 12).to(DEVICE)
    cache, expected_cache = filled(model, rows, tokens), filled(model, rows, tokens)
    decoder = decoder_for(model, cache)
    max_kv_lens, first = [], None
    for i in range(6, 12):
        logits = decoder.step(tokens[:, i])
        first = logits.clone() if first is None else first
        max_kv_lens.append(decoder.max_kv_len)
        expected = model(tokens[:, i : i + 1], cache=expected_cache)[:, 0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert max_kv_lens == [8, 8, 13, 13, 13, 13]
    before = filled(model, rows, tokens)  # the cache goes back to where it was
    cache.length, cache._row_lengths = before.length, before._row_lengths
    torch.testing.assert_close(decoder.step(tokens[:, 6]), first)
    assert decoder.max_kv_len == 8
    late = decoder_for(model, expected_cache)  # bound when rows are too long for one program
    assert not CUDA or list(late._recorded) == [13]


@torch.inference_mode()
def test_two_layers_in_bfloat16_are_as_near_to_float64_as_the_model_is():
    model, tokens = make("qwen3", torch.bfloat16, layers=2), ids(1, 9).to(DEVICE)
    exact = build(FAMILIES["qwen3"], dtype=torch.bfloat16).double().to(DEVICE)
    truth = exact(tokens[:, :8])[:, -1]
    cache, plain = filled(model, 1, tokens), filled(model, 1, tokens)
    decoder = decoder_for(model, cache)
    for i in (6, 7):
        logits = decoder.step(tokens[:, i])
        own = model(tokens[:, i : i + 1], cache=plain)[:, 0]
    error, own_error = ((x.double() - truth).norm() / truth.norm() for x in (logits, own))
    assert error < 1.5 * own_error + 1e-3
    assert error < 2e-2


@torch.inference_mode()
def test_the_decoder_follows_the_cache_and_the_weights_wherever_they_go():
    model, tokens = make("llama"), ids(2, 9).to(DEVICE)
    cache, plain = filled(model, 2, tokens), filled(model, 2, tokens)
    decoder = decoder_for(model, cache)

    def both(column):
        got = decoder.step(column).clone()
        wanted = model(column[:, None], cache=plain)[:, 0]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)

    both(tokens[:, 6])
    for kept in (cache, plain):
        kept.select_rows(torch.tensor([1], device=DEVICE))  # other memory, fewer rows
    both(tokens[:1, 7])
    for kept in (cache, plain):
        kept.reset()
        model(tokens[:1, :3], cache=kept)
    both(tokens[:1, 3])
    model.lm_head.weight.data.mul_(2)  # in place: a recording sees it
    both(tokens[:1, 4])
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.01  # elsewhere: recorded anew
    both(tokens[:1, 5])


@torch.inference_mode()
def test_greedy_steps_feed_themselves():
    model, tokens = make("plain"), ids(2, 6).to(DEVICE)
    cache, plain = filled(model, 2, tokens), filled(model, 2, tokens)
    decoder = decoder_for(model, cache, greedy=True)
    column = tokens[:, 0]
    decoder.step(column)
    for _ in range(2):
        column = model(column[:, None], cache=plain)[:, 0].argmax(dim=-1)
        assert decoder.ids.tolist() == column.tolist()
        decoder.step(None)


@torch.inference_mode()
def test_a_full_cache_and_a_wrong_batch_are_refused_in_one_line():
    model, tokens = make("plain"), ids(1, 6).to(DEVICE)
    decoder = decoder_for(model, filled(model, 1, tokens, capacity=6))
    with pytest.raises(ValueError, match="the cache has room for 6 tokens"):
        decoder.step([3])
    decoder = decoder_for(model, filled(model, 1, tokens))
    with pytest.raises(ValueError, match="one token of each of 1 rows"):
        decoder.step([3, 4])
    assert decoder.cache.length == 6


def test_a_model_it_does_not_take_is_refused_with_the_reason():
    def reason(family, *ops, dtype=torch.float32):
        return why_not_model(build(FAMILIES[family], *ops, dtype=dtype))

    assert reason("mixtral") == "MoE in the config"
    assert reason("post-norm") == "post-norm blocks"
    assert "float32" in reason("plain", dtype=torch.float64)
    assert reason("plain", "reference") == "user-provided ops in the model"
    assert why_not_gpu(build(FAMILIES["plain"], dtype=torch.float32)) == "a model on cpu"
    model = build(FAMILIES["mixtral"], dtype=torch.float32)
    with pytest.raises(ValueError, match="does not take MoE in the config"):
        GraphDecoder(model, model.new_cache(1), graph=False, pdl=False)


class Zero(torch.nn.Module):
    def forward(self, x):
        return torch.zeros_like(x)


CHANGES = {
    "hooked": lambda attn: attn.v_proj.register_forward_hook(lambda m, x, y: torch.zeros_like(y)),
    "replaced": lambda attn: setattr(attn, "v_proj", Zero()),
    "q_proj replaced": lambda attn: setattr(attn, "q_proj", Zero()),
    "patched": lambda attn: setattr(attn.v_proj, "forward", torch.zeros_like),
}


@pytest.mark.parametrize("fed", [False, True], ids=["given tokens", "its own tokens"])
@pytest.mark.parametrize("how", CHANGES)
@torch.inference_mode()
def test_a_module_changed_between_two_steps_is_called(how, fed):
    model, tokens = make("gpt2"), ids(2, 9).to(DEVICE)
    cache, expected_cache = filled(model, 2, tokens), filled(model, 2, tokens)
    decoder = decoder_for(model, cache, greedy=True)
    decoder.step(tokens[:, 6])
    model(tokens[:, 6:7], cache=expected_cache)
    CHANGES[how](model.layers[0].attn)
    column = decoder.ids.tolist()
    for i in (7, 8):
        column = column if fed else tokens[:, i].tolist()
        logits = decoder.step(None if fed else column).clone()
        expected = model(torch.tensor(column, device=DEVICE)[:, None], cache=expected_cache)[:, 0]
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        assert cache.lengths.tolist() == expected_cache.lengths.tolist()
        column = expected.argmax(dim=-1).tolist()
        assert decoder.ids.tolist() == column


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("family", TAKEN)
@pytest.mark.parametrize("rows", [1, 3, 7])
@torch.inference_mode()
def test_neither_pdl_nor_recording_changes_the_result(family, rows):
    model, tokens = make(family, layers=2), ids(rows, 9).to(DEVICE)
    found = []
    for options in ({}, {"pdl": False}, {"graph": False}, {"graph": False, "pdl": False}):
        decoder = decoder_for(model, filled(model, rows, tokens), tiles=None, **options)
        found.append(torch.stack([decoder.step(tokens[:, i]).clone() for i in (6, 7, 8)]))
    rounding = 0 if rows <= MAX_ROWS else 1e-5  # more rows: products of the library's choosing
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=rounding, rtol=rounding)


@needs_cuda
@pytest.mark.cuda
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]]])
def test_fifty_greedy_tokens_are_those_of_the_plain_path(prompts, monkeypatch):
    torch.manual_seed(0)
    config = FAMILIES["llama"].replace(context_length=64, d_model=128, d_ff=320, vocab_size=500)
    model = build(config, dtype=torch.float32).cuda()
    fast = generate(model, prompts, max_new_tokens=50, sampling=GREEDY)
    monkeypatch.setattr(acceleration, "make_decoder", lambda model, cache: None)
    plain = generate(model, prompts, max_new_tokens=50, sampling=GREEDY)
    assert [row.token_ids for row in fast] == [row.token_ids for row in plain]
