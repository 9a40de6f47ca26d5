"""Looking changes nothing, shows what is there, and leaves the model as it was."""

import contextlib
import gc

import pytest
import torch

from acceleration.as_gpu import take_for_a_gpu
from interop.hf_models import hf_model, import_model, token_ids
from scratchlm import TransformerLM
from scratchlm.accelerate import accelerate, explain
from scratchlm.inference import GREEDY, generate
from scratchlm.inspect import KINDS, inspect, points
from scratchlm.model import SequenceClassifier
from scratchlm.ops import OPS
from tiny_models import FAMILIES, PLAIN, build, ids

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def keep_all(model, *args, **kwargs):
    """Run a model with every point kept; return the cache and what it gave."""
    with inspect(model) as look:
        look.keep(look.points)
        output = model(*args, **kwargs)
    return look.cache, output


# 1. Not a bit


@EVERY_FAMILY
@pytest.mark.parametrize("ops", ["fast", "reference"])
def test_keeping_every_point_changes_no_bit_of_the_logits(family, ops):
    for dtype in (torch.float32, torch.bfloat16):
        model, tokens = build(FAMILIES[family], ops, dtype), ids(2, 13)
        before = model(tokens)
        _, after = keep_all(model, tokens)
        assert torch.equal(before, after)
        assert torch.equal(before, model(tokens))


def test_a_long_row_goes_through_the_same_kernel_as_unobserved():
    model = build(PLAIN.replace(context_length=200, num_kv_heads=2), dtype=torch.float32)
    tokens = ids(2, 150)  # our own CPU attention, from 48 tokens on
    before = model(tokens)
    cache, after = keep_all(model, tokens)
    assert torch.equal(before, after)
    assert torch.equal(cache["logits"], before)


@EVERY_FAMILY
def test_looking_changes_no_bit_of_a_gradient(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    model.loss(tokens, tokens).backward()
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with inspect(model) as look:
        look.keep(look.points)
        model.loss(tokens, tokens).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("family", ["plain", "qwen3", "gpt2", "mistral", "mixtral"])
def test_looking_changes_no_bit_of_a_generation(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    options = {"max_new_tokens": 6, "sampling": GREEDY, "num_logprobs": 3, "accelerate": False}
    before = generate(model, prompts, **options)
    with inspect(model) as look:
        look.keep(look.points)
        after = generate(model, prompts, **options)
    assert before == after


@EVERY_FAMILY
def test_the_model_is_left_as_it_was(family):
    model = build(FAMILIES[family])

    def state():
        hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
        return (
            [type(m) for m in model.modules()],
            hooks,
            [vars(m).get("ops") for m in model.modules()],
        )

    before = state()
    keep_all(model, ids(1, 4))
    assert state() == before
    with contextlib.suppress(RuntimeError), inspect(model) as look:
        look.keep(look.points)
        raise RuntimeError("on purpose")
    assert state() == before


def test_acceleration_steps_aside_only_for_the_layers_looked_into(monkeypatch):
    take_for_a_gpu(monkeypatch)
    model = accelerate(build(PLAIN.replace(num_layers=3), dtype=torch.float32))

    def running():
        rows = [row for row in explain(model) if row.fusion not in ("cpu_runner", "gpu_runner")]
        return {(row.layer, row.fusion) for row in rows if row.reason is None}

    before = running()
    reasons = {
        "layers.1.ffn.gate": ("layers.1.ffn", "w1 is hooked"),
        "layers.1.attn.k": ("layers.1.attn", "a LookedIntoAcceleratedAttention is not ours"),
        "layers.1.mid": ("layers.1", "ln2 is hooked"),
        "logits": ("", "lm_head is hooked"),
    }
    for point, (layer, reason) in reasons.items():
        with inspect(model) as look:
            look.keep(point)
            model.loss(ids(1, 4), ids(1, 4)).backward()
            aside = before - running()
            assert {name for name, _ in aside} == {layer}, point
            said = [row.reason for row in explain(model) if (row.layer, row.fusion) in aside]
            assert any(reason in text for text in said), (point, said)
    plain = ("embed", "layers.1.in", "layers.1.attn.heads", "layers.1.attn.out", "layers.1.ffn.out")
    for point in (*plain, "layers.1.attn.weights", "layers.1.out", "final"):
        with inspect(model) as look:
            look.keep(point)
            model.loss(ids(1, 4), ids(1, 4)).backward()
            assert running() == before, point
    with inspect(model) as look:  # the one fusion that forms no weights to look at
        look.keep("layers.1.attn.weights")
        whole = [row for row in explain(model) if row.fusion == "qkv_rope_attention"]
        assert ["is user-provided" in row.reason for row in whole] == [False, True, False]
        model(ids(1, 4))
    assert running() == before


def test_whole_step_decoders_step_aside_and_say_so():
    model = accelerate(build(PLAIN, dtype=torch.float32))
    reason = {row.fusion: row.reason for row in explain(model)}
    assert reason["cpu_runner"] is None
    with inspect(model) as look:
        look.keep("layers.1.out")
        reason = {row.fusion: row.reason for row in explain(model)}
        assert "layers.0 that is hooked" in reason["cpu_runner"]
        generate(model, [[1, 2, 3]], max_new_tokens=4, sampling=GREEDY)
        assert look.cache["layers.1.out"].shape == (1, 6, 16)  # every token but the last


# What is shown is what is there


@EVERY_FAMILY
def test_points_fit_together_by_the_models_formulas(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    cache, logits = keep_all(model, tokens)
    close = torch.testing.assert_close
    close(cache["embed"], cache["layers.0.in"])
    for i, block in enumerate(model.layers):
        at = {name.split(".", 2)[2]: cache[name] for name in cache if f"layers.{i}." in name}
        attn, ffn, group = (
            block.attn,
            block.ffn,
            model.config.num_heads // model.config.num_kv_heads,
        )
        keys = at["attn.k"].repeat_interleave(group, 1)
        values = at["attn.v"].repeat_interleave(group, 1)
        scores = at["attn.q"] @ keys.mT / attn.d_head**0.5
        hidden = at["attn.scores"] == -torch.inf
        window = model.config.attention.sliding_window or 99
        distance = torch.arange(9)[:, None] - torch.arange(9)
        assert torch.equal(hidden[0, 0], (distance < 0) | (distance >= window))
        close(at["attn.scores"].masked_fill(hidden, 0), scores.masked_fill(hidden, 0))
        close(at["attn.weights"], at["attn.scores"].softmax(-1))
        close(at["attn.heads"], at["attn.weights"] @ values)
        out = at["attn.heads"].transpose(1, 2).flatten(2) @ attn.output_proj.weight.T
        if attn.output_proj.bias is not None:
            out = out + attn.output_proj.bias
        close(at["attn.out"], out)
        if block.post_norm:
            close(at["mid"], block.ln1(at["in"] + at["attn.out"]))
            close(at["out"], block.ln2(at["mid"] + at["ffn.out"]))
            x = at["mid"]
        else:
            close(at["mid"], at["in"] + at["attn.out"])
            close(at["out"], at["mid"] + at["ffn.out"])
            x = block.ln2(at["mid"])
        close(at["ffn.out"], ffn(x))
        if "ffn.router" in at:
            weights, experts = at["ffn.router"].softmax(-1).topk(ffn.experts_per_token)
            weights = weights / weights.sum(-1, keepdim=True)
            close((at["ffn.experts"] * weights[..., None]).sum(-2), at["ffn.out"])
            close(at["ffn.gate"], torch.einsum("bsd,bscfd->bscf", x, ffn.w1.weight[experts]))
            back = torch.einsum("bscf,bscdf->bscd", at["ffn.hidden"], ffn.w2.weight[experts])
            close(back, at["ffn.experts"])
        else:
            close(ffn.w2(at["ffn.hidden"]), at["ffn.out"])
            if "ffn.gate" in at:
                close(at["ffn.gate"], ffn.w1(x))
    close(cache["final"], model.ln_final(at["out"]))
    close(cache["logits"], logits)
    assert torch.equal(cache["logits"], logits)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "mixtral"])
def test_stream_and_weights_are_those_of_transformers(family, tmp_path):
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path)
    tokens = token_ids()
    with torch.no_grad():
        told = theirs(tokens, output_hidden_states=True, output_attentions=True)
    cache, _ = keep_all(import_model(tmp_path), tokens)
    for i, weights in enumerate(told.attentions):
        torch.testing.assert_close(cache[f"layers.{i}.attn.weights"], weights)
        torch.testing.assert_close(cache[f"layers.{i}.in"], told.hidden_states[i])
    torch.testing.assert_close(cache["final"], told.hidden_states[-1], rtol=1e-4, atol=1e-4)


@EVERY_FAMILY
def test_axes_and_sizes_are_as_the_table_says(family):
    model = build(FAMILIES[family])
    cache, _ = keep_all(model, ids(2, 9))
    for name, point in points(model).items():
        assert len(point.axes) == cache[name].ndim
        at_run = {"batch": 2, "position": 9, "key": 9}
        sizes = zip(point.axes, point.sizes, cache[name].shape, strict=True)
        assert all(at_run.get(axis, size) == got for axis, size, got in sizes), name
    assert {point.kind for f in FAMILIES for point in points(build(FAMILIES[f])).values()} == {
        *KINDS
    }


# Parts of a point


@EVERY_FAMILY
def test_a_part_is_the_part_of_the_whole(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    whole, _ = keep_all(model, tokens)
    for name, point in points(model).items():
        part = {"positions": [7, 2]}
        expected = whole[name].index_select(point.position_axis, torch.tensor([7, 2]))
        if point.has_heads:
            part["heads"] = 0 if model.config.num_kv_heads == 1 else [1, 0]
            expected = expected[:, [0] if model.config.num_kv_heads == 1 else [1, 0]]
        if point.axes[-1] != "key":
            part["units"] = slice(1, 3)
            expected = expected[..., 1:3]
        with inspect(model) as look:
            look.keep(name, **part)
            model(tokens)
        torch.testing.assert_close(look.cache[name], expected, rtol=1e-12, atol=1e-12)


def test_with_padding_a_position_is_the_rows_own():
    model, rows = build(FAMILIES["llama"]), [ids(1, 9)[0], ids(1, 5, seed=1)[0]]
    for left in (True, False):
        pad = torch.zeros(4, dtype=torch.int64)
        short = torch.cat((pad, rows[1]) if left else (rows[1], pad))
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, slice(0, 4) if left else slice(5, 9)] = False
        with inspect(model) as look:
            look.keep("layers.1.out", positions=[4, 0])
            look.keep("layers.1.attn.weights", positions=[2])
            look.add("layers.0.out", 1.0, positions=2)
            model(torch.stack((rows[0], short)), attention_mask=mask)
        padded = look.cache
        for i, row in enumerate(rows):
            with inspect(model) as look:
                look.keep("layers.1.out", positions=[4, 0])
                look.keep("layers.1.attn.weights", positions=[2])
                look.add("layers.0.out", 1.0, positions=2)
                model(row[None])
            torch.testing.assert_close(padded["layers.1.out"][i], look.cache["layers.1.out"][0])
            seen = padded["layers.1.attn.weights"][i]
            seen = seen[..., 4:] if left and i else seen
            torch.testing.assert_close(
                seen[..., :3], look.cache["layers.1.attn.weights"][0, ..., :3]
            )


# Generation


@pytest.mark.parametrize("family", ["plain", "qwen2", "gpt2", "mistral", "mixtral"])
def test_kept_in_generation_is_what_the_full_forward_has(family):
    model = build(FAMILIES[family])
    with inspect(model) as look:
        look.keep(look.points)
        (done,) = generate(model, [[3, 1, 4, 1, 5]], max_new_tokens=5, sampling=GREEDY, eos_ids=())
    steps, read = look.cache, torch.tensor([[3, 1, 4, 1, 5, *done.token_ids[:-1]]])
    whole, _ = keep_all(model, read)
    for name in whole:
        if name == "logits":  # generation asks for the last column alone
            assert steps.positions(name).tolist() == [[4, 5, 6, 7, 8]]
            torch.testing.assert_close(steps[name], whole[name][:, 4:])
        else:
            torch.testing.assert_close(steps[name], whole[name])
            assert steps.positions(name).tolist() == [[*range(9)]]


# 6. What it costs


@contextlib.contextmanager
def frozen():
    """Leave out of the count what there was before."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def alive():
    """Count the bytes of all new tensors, each storage once."""
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values()
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["plain", "llama", "mixtral"])
def test_a_kept_point_costs_its_own_bytes_and_no_more(family):
    model, tokens = build(FAMILIES[family], dtype=torch.float32), ids(2, 13)
    with torch.no_grad(), frozen():
        model(tokens)
        for name, point in points(model).items():
            part = {"positions": 3, **({"heads": 1} if point.has_heads else {})}
            for chosen in ({}, part):
                before = alive()
                with inspect(model) as look:
                    look.keep(name, **chosen)
                    model(tokens)
                cache = look.cache
                del look
                assert alive() - before == cache.nbytes == cache[name].nbytes, (name, chosen)
                del cache


# Other models


def test_a_model_with_another_head_has_no_logits_point():
    model = SequenceClassifier(PLAIN, 3)
    with inspect(model) as look:
        look.keep("layers.*.attn.weights")
        model(ids(2, 5))
        with pytest.raises(ValueError, match="a SequenceClassifier has no LM head"):
            look.keep("logits")


def test_a_users_softmax_is_the_one_shown():
    def softmax(x, dim=-1):
        return x.softmax(dim) / 2

    model = TransformerLM(PLAIN, ops=OPS["fast"].replace(softmax=softmax))
    cache, _ = keep_all(model, ids(1, 5))
    torch.testing.assert_close(cache["layers.0.attn.weights"].sum(-1), torch.full((1, 4, 5), 0.5))


def test_two_looks_at_once_see_the_same():
    model = build(PLAIN)
    with inspect(model) as outer, inspect(model) as inner:
        outer.keep(["layers.0.attn.weights", "layers.0.attn.q"])
        inner.keep(["layers.0.attn.weights", "layers.0.attn.q"])
        model(ids(1, 6))
    for name in outer.cache:
        assert torch.equal(outer.cache[name], inner.cache[name])


def test_a_layer_that_is_computed_again_in_the_backward_pass_is_kept_once():
    from torch.utils.checkpoint import checkpoint

    model, tokens = build(PLAIN), ids(1, 6)
    whole, _ = keep_all(model, tokens)
    forwards = [block.forward for block in model.layers]
    for block in model.layers:

        def again(x, *args, original=block.forward, **kwargs):
            return checkpoint(original, x, *args, use_reentrant=False, **kwargs)

        block.forward = again
    with inspect(model) as look:
        look.keep(["layers.0.in", "layers.1.attn.q"])
        model.loss(tokens, tokens).backward()
    for name in look.cache:
        assert torch.equal(look.cache[name], whole[name])
    for block, forward in zip(model.layers, forwards, strict=True):
        block.forward = forward
