"""Edits do what they say, forward, backward and in generation; the rest is refused."""

import re

import pytest
import torch

from scratchlm import TransformerLM
from scratchlm.inference import GREEDY, beam_search, generate
from scratchlm.inspect import inspect, points
from scratchlm.model import TransformerBlock
from scratchlm.ops import OPS
from tiny_models import FAMILIES, PLAIN, build, ids

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def kept(model, tokens, names=None):
    with inspect(model) as look:
        look.keep(look.points if names is None else names)
        logits = model(tokens)
    return look.cache, logits


def edited(model, tokens, *edits):
    """Run a model with edits, each (method, arguments, keywords)."""
    with inspect(model) as look:
        for method, arguments, part in edits:
            getattr(look, method)(*arguments, **part)
        return model(tokens)


def look_into(model, *steps):
    """Take steps inside a context, each with the look as its argument."""
    with inspect(model) as look:
        for step in steps:
            step(look)


# Against the same change made to the weights


@pytest.mark.parametrize("family", ["plain", "llama", "qwen3", "gpt2", "mixtral"])
def test_zeroing_a_head_is_zeroing_its_columns_of_the_output_projection(family):
    model, changed, tokens = build(FAMILIES[family]), build(FAMILIES[family]), ids(2, 9)
    d = model.config.d_head
    with torch.no_grad():
        changed.layers[1].attn.output_proj.weight[:, 2 * d : 3 * d] = 0
    logits = edited(model, tokens, ("zero", ["layers.1.attn.heads"], {"heads": 2}))
    torch.testing.assert_close(logits, changed(tokens))
    assert not torch.allclose(logits, model(tokens))


def test_scaling_a_neuron_is_scaling_its_column_of_w2():
    model, changed, tokens = build(PLAIN), build(PLAIN), ids(2, 9)
    with torch.no_grad():
        changed.layers[0].ffn.w2.weight[:, 5] *= -3
    logits = edited(model, tokens, ("scale", ["layers.0.ffn.hidden", -3.0], {"units": 5}))
    torch.testing.assert_close(logits, changed(tokens))


def test_adding_to_queries_and_values_is_a_bias():
    config = FAMILIES["gpt2"]
    model, changed, tokens = build(config), build(config), ids(2, 9)
    more = torch.randn(4, 4, dtype=torch.float64)
    with torch.no_grad():
        changed.layers[1].attn.q_proj.bias += more.flatten()
        changed.layers[1].attn.v_proj.bias += 2 * more.flatten()
    value = more[:, None]  # (heads, 1, d_head)
    logits = edited(
        model,
        tokens,
        ("add", ["layers.1.attn.q", value], {}),
        ("add", ["layers.1.attn.v", 2 * value], {}),
    )
    torch.testing.assert_close(logits, changed(tokens))


def test_an_expert_whose_logit_is_low_is_never_asked():
    model, tokens = build(FAMILIES["mixtral"]), ids(2, 9)
    with inspect(model) as look:
        look.set("layers.0.ffn.router", -1e9, units=1)
        look.keep(["layers.0.ffn.router", "layers.0.ffn.out"])
        routes = []
        model.hidden(tokens, routes=routes)
    assert 1 not in routes[0].experts
    assert 1 in routes[1].experts
    torch.testing.assert_close(look.cache["layers.0.ffn.out"], routes[0].output)


def test_uniform_scores_average_over_what_is_visible():
    model, tokens = build(FAMILIES["mistral"]), ids(1, 9)
    with inspect(model) as look:
        look.zero("layers.0.attn.scores", heads=1)
        look.keep("layers.0.attn.weights")
        model(tokens)
    weights = look.cache["layers.0.attn.weights"][0, 1]
    visible = torch.ones(9, 9, dtype=torch.float64).tril().triu(-4)
    torch.testing.assert_close(weights, visible / visible.sum(-1, keepdim=True))


@EVERY_FAMILY
def test_a_head_that_looks_at_one_key_gives_that_keys_value(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    group = model.config.num_heads // model.config.num_kv_heads
    with inspect(model) as look:
        look.set("layers.0.attn.weights", torch.eye(9), heads=[1, 3])
        look.keep(["layers.0.attn.v", "layers.0.attn.heads"])
        model(tokens)
    for head in (1, 3):
        value = look.cache["layers.0.attn.v"][:, head // group]
        torch.testing.assert_close(look.cache["layers.0.attn.heads"][:, head], value)


@EVERY_FAMILY
def test_what_is_not_chosen_keeps_its_bits(family):
    model, tokens = build(FAMILIES[family], dtype=torch.float32), ids(2, 9)
    before, _ = kept(model, tokens)
    for name, point in points(model).items():
        part = {"positions": 6}
        if point.has_heads:
            part["heads"] = 0
        with inspect(model) as look:
            look.scale(name, 0.5, **part)
            look.keep(look.points)
            model(tokens)
        for other, earlier in points(model).items():
            now, was = look.cache[other], before[other]
            axis = earlier.position_axis
            assert torch.equal(now.narrow(axis, 0, 6), was.narrow(axis, 0, 6)), (name, other)
        changed = look.cache[name].narrow(point.position_axis, 6, 1)
        expected = before[name].narrow(point.position_axis, 6, 1).clone()
        half = slice(0, 1) if point.has_heads else slice(None)
        expected[:, half] *= 0.5
        torch.testing.assert_close(changed, expected)


def test_edits_of_a_point_happen_in_order_and_are_kept_after():
    model, tokens = build(PLAIN), ids(1, 5)
    with inspect(model) as look:
        look.set("layers.0.out", 2.0)
        look.add("layers.0.out", 3.0)
        look.scale("layers.0.out", 4.0, units=0)
        look.keep(["layers.0.out", "layers.1.in"])
        model(tokens)
    expected = torch.full((1, 5, 16), 5.0, dtype=torch.float64)
    expected[..., 0] = 20.0
    assert torch.equal(look.cache["layers.0.out"], expected)
    assert torch.equal(look.cache["layers.1.in"], expected)


def test_the_mean_is_that_of_another_run_without_its_padding():
    model, tokens = build(PLAIN), ids(2, 6)
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    with inspect(model) as look:
        look.keep("layers.0.attn.heads")
        model(tokens, attention_mask=mask)
    heads = look.cache["layers.0.attn.heads"].transpose(1, 2)  # (batch, position, heads, d_head)
    expected = heads[mask].mean(0)
    with inspect(model) as again:
        again.mean("layers.0.attn.heads", from_=look.cache, heads=[3])
        again.keep("layers.0.attn.heads")
        model(tokens)
    now = again.cache["layers.0.attn.heads"]
    torch.testing.assert_close(now[:, 3], expected[3].expand(2, 6, 4))
    assert not torch.allclose(now[:, 2], expected[2].expand(2, 6, 4))


# 3. Patching


@EVERY_FAMILY
def test_patching_everything_of_a_into_b_gives_a_and_b_into_b_gives_b(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    one, other = ids(2, 9), ids(2, 9, seed=7)
    (a, logits_a), (b, logits_b) = kept(model, one), kept(model, other)
    assert torch.equal(edited(model, other, ("patch", [], {"from_": a})), logits_a)
    for name in points(model):  # each alone: nothing changes by a bit
        assert torch.equal(edited(model, other, ("patch", [name], {"from_": b})), logits_b), name


@EVERY_FAMILY
def test_patching_the_stream_of_a_layer_gives_all_that_follows(family):
    model = build(FAMILIES[family], dtype=torch.float32)
    one, other = ids(2, 9), ids(2, 9, seed=7)
    a, logits_a = kept(model, one)
    for name in ("embed", "layers.0.in", "layers.0.mid", "layers.0.out", "layers.1.mid", "final"):
        assert torch.equal(edited(model, other, ("patch", [name], {"from_": a})), logits_a), name


def test_a_patch_of_some_positions_is_the_same_as_setting_them():
    model, one, other = build(PLAIN), ids(1, 9), ids(1, 12, seed=7)
    a, _ = kept(model, one)
    value = a["layers.0.attn.v"][:, [1, 2], 3:6]
    part = {"heads": [1, 2], "positions": slice(3, 6)}
    patched = edited(model, other, ("patch", ["layers.0.attn.v"], {"from_": a, **part}))
    assert torch.equal(patched, edited(model, other, ("set", ["layers.0.attn.v", value], part)))
    assert torch.equal(patched[:, :3], model(other)[:, :3])
    assert not torch.equal(patched[:, 3:], model(other)[:, 3:])


# Backward


@EVERY_FAMILY
def test_gradients_flow_through_every_edit(family):
    model, tokens = build(FAMILIES[family]).requires_grad_(False), ids(1, 6)
    for name, point in points(model).items():
        part = {"positions": [4]} if "key" not in point.axes else {"positions": [4], "heads": [1]}

        def loss(factor, shift, name=name, part=part):
            with inspect(model) as look:
                look.scale(name, factor, **part)
                look.add(name, shift, **part)
                return model(tokens)[0, 4:].log_softmax(-1)[:, 3].sum()

        start = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.9, 0.1)]
        assert torch.autograd.gradcheck(loss, start), name


@EVERY_FAMILY
def test_the_gradient_of_a_kept_point_is_that_of_adding_to_it(family):
    model, tokens = build(FAMILIES[family]), ids(2, 6)
    for name in points(model):
        with inspect(model) as look:
            look.keep(name, grad=True)
            before = model.loss(tokens, tokens.roll(-1, 1))
            before.backward()
        gradient = look.cache[name].grad
        assert gradient.any(), name
        shift = torch.full_like(gradient, 1e-10, requires_grad=True)
        with inspect(model) as look:
            look.add(name, shift)
            loss = model.loss(tokens, tokens.roll(-1, 1))
            loss.backward()
        torch.testing.assert_close(gradient, shift.grad, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(before, loss, rtol=0, atol=1e-6)


def test_a_kept_gradient_changes_no_value():
    model, tokens = build(PLAIN, dtype=torch.float32), ids(2, 9)
    with inspect(model) as look:
        look.keep(look.points, grad=True)
        assert torch.equal(model(tokens), kept(model, tokens)[1])


# 5. Generation


def parts_of(model, name, point):
    """Edits that differ from point to point: some positions and heads, or all."""
    one = {"positions": [1, 6]}
    if point.has_heads:
        one["heads"] = [0]
    value = torch.linspace(-1, 1, point.sizes[-1] or 1, dtype=torch.float64)
    add = ("add", [name, value], one) if point.axes[-1] != "key" else ("scale", [name, 0.3], one)
    return [add, ("scale", [name, 0.7], {"positions": slice(2, None)}), ("zero", [name], {})]


@EVERY_FAMILY
def test_edited_steps_with_a_cache_equal_the_edited_full_forward(family):
    model, tokens = build(FAMILIES[family]), ids(2, 9)
    for i, (name, point) in enumerate(points(model).items()):
        edit = parts_of(model, name, point)[(i + len(family)) % 3]
        full = edited(model, tokens, edit)
        with torch.no_grad(), inspect(model) as look:
            getattr(look, edit[0])(*edit[1], **edit[2])
            cache = model.new_cache(2)
            steps = [model(part, cache=cache) for part in tokens.split([4, 1, 3, 1], dim=1)]
        torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["plain", "qwen3", "gpt2", "mistral", "mixtral"])
def test_edited_generation_equals_edited_full_forwards(family):
    model, prompts = build(FAMILIES[family]), [[3, 1, 4, 1, 5], [9, 2, 6]]
    for name, point in points(model).items():
        if name == "logits":  # a position the head is never asked for is refused, see below
            continue
        edit = parts_of(model, name, point)[0]
        with inspect(model) as look:
            getattr(look, edit[0])(*edit[1], **edit[2])
            done = generate(
                *(model, prompts), max_new_tokens=5, sampling=GREEDY, eos_ids=(), num_logprobs=0
            )
        for prompt, row in zip(prompts, done, strict=True):
            tokens = torch.tensor([prompt + row.token_ids])
            with torch.no_grad():
                logits = edited(model, tokens[:, :-1], edit)[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == row.token_ids, name
            best = logits.log_softmax(-1).amax(-1)
            told = torch.tensor([step.logprob for step in row.logprobs], dtype=torch.float64)
            torch.testing.assert_close(best, told, rtol=1e-5, atol=1e-5)


def test_logits_are_edited_in_generation_at_the_positions_that_are_asked_for():
    model = build(PLAIN)
    with inspect(model) as look:
        look.set("logits", 1e4, positions=[5, 6], units=7)
        (done,) = generate(model, [[3, 1, 4, 1, 5]], max_new_tokens=4, sampling=GREEDY, eos_ids=())
    assert done.token_ids[1:3] == [7, 7]
    assert done.token_ids[3] != 7
    with pytest.raises(ValueError, match="never applied at position 2"):
        look_into(
            model,
            lambda look: look.set("logits", 1e4, positions=[2], units=7),
            lambda _: generate(model, [[3, 1, 4, 1, 5]], max_new_tokens=2, sampling=GREEDY),
        )


def test_prompts_of_one_run_can_be_patched_into_a_generation():
    model, prompt = build(PLAIN), [3, 1, 4, 1, 5]
    a, _ = kept(model, torch.tensor([[2, 7, 1, 8, 2]]))
    with inspect(model) as look:
        look.patch("layers.0.out", from_=a)
        (one,) = generate(model, [prompt], max_new_tokens=6, sampling=GREEDY, eos_ids=())
    (other,) = generate(model, [[2, 7, 1, 8, 2]], max_new_tokens=1, sampling=GREEDY, eos_ids=())
    assert one.token_ids[0] == other.token_ids[0]


def test_beam_search_is_edited_too():
    model = build(PLAIN)
    with inspect(model) as look:
        look.set("logits", 1e4, units=7)
        best = beam_search(model, [3, 1, 4], num_beams=3, max_new_tokens=3, eos_ids=())[0]
    assert best.token_ids == [7, 7, 7]


def test_with_a_cache_a_value_is_for_all_rows():
    model = build(PLAIN)
    with pytest.raises(ValueError, match="rows come and go"):
        look_into(
            model,
            lambda look: look.set("layers.0.out", torch.zeros(2, 1, 16)),
            lambda _: generate(model, [[1, 2], [3, 4]], max_new_tokens=2),
        )


# 2. Errors


def near(*names):
    return "near it: .*" + ".*".join(map(re.escape, names))


@pytest.mark.parametrize(
    ("family", "call", "message"),
    [
        ("plain", lambda look: look.keep("layer.0.attn.q"), near("layers.0.attn.q")),
        ("plain", lambda look: look.zero("layers.2.attn.q"), near("layers.1.attn.q")),
        ("plain", lambda look: look.keep("layers.0.attn.query"), near("layers.0.attn.q")),
        ("plain", lambda look: look.keep("layers.*.nothing"), "no point is called"),
        ("plain", lambda look: look.keep([]), "name at least one point"),
        ("gpt2", lambda look: look.keep("layers.0.ffn.gate"), "a MLP has none; near it: layers"),
        ("plain", lambda look: look.keep("layers.0.ffn.router"), "a SwiGLU has none; near it"),
        ("plain", lambda look: look.keep("embed", positions=24), r"\[0, 24\); got 24"),
        ("plain", lambda look: look.keep("embed", positions=-1), r"\[0, 24\); got -1"),
        ("plain", lambda look: look.keep("embed", positions=slice(20, 30)), r"\[0, 24\); got 24"),
        ("plain", lambda look: look.keep("embed", positions=[]), "at least one"),
        ("plain", lambda look: look.keep("embed", positions=[1, 1]), "none twice"),
        ("plain", lambda look: look.keep("embed", heads=0), "this point has no heads"),
        (
            "plain",
            lambda look: look.zero("layers.0.attn.q", heads=4),
            r"heads must lie in \[0, 4\)",
        ),
        (
            "llama",
            lambda look: look.zero("layers.0.attn.k", heads=2),
            r"heads must lie in \[0, 2\)",
        ),
        ("plain", lambda look: look.zero("layers.0.ffn.out", units=16), r"\[0, 16\); got 16"),
        ("plain", lambda look: look.keep("layers.0.attn.weights", units=0), "keys are no units"),
        ("plain", lambda look: look.set("embed", torch.zeros(15)), "d_model of the value must be"),
        ("plain", lambda look: look.set("embed", torch.zeros(1, 1, 1, 16)), "at most the axes"),
        (
            "plain",
            lambda look: look.set("embed", torch.zeros(3, 16), positions=[1, 2]),
            "position of the value must be 1 or 2",
        ),
        ("plain", lambda look: (look.keep("embed"), look.keep("embed")), "is kept already"),
        ("plain", lambda look: look.keep("embed", grad=True, positions=1), "a whole point"),
    ],
)
def test_what_a_model_does_not_have_is_refused_at_once(family, call, message):
    model = build(FAMILIES[family])
    with pytest.raises(ValueError, match=message):
        look_into(model, call)


@pytest.mark.parametrize(
    ("ask", "run", "message"),
    [
        (lambda look: look.zero("embed", positions=7), 5, "position 7 is not in this forward"),
        (lambda look: look.keep("embed", positions=[1, 5]), 5, "position 5 is not in this forward"),
        (lambda look: look.zero("embed", positions=slice(5, None)), 5, "position 5 is not in"),
        (lambda look: look.set("embed", torch.zeros(6, 16)), 5, "position 5 is not in"),
        (lambda look: look.set("embed", torch.zeros(3, 1, 16)), 5, "the value must fit"),
        (lambda look: look.zero("embed"), None, r"zero\('embed'\) was never applied"),
        (lambda look: look.keep("layers.1.out"), None, "never applied: the model did not run"),
        (lambda look: look.cache, None, "nothing has run inside the context"),
        (lambda look: look.keep("embed", grad=True), 5, "no gradient flows here"),
    ],
)
def test_nothing_is_silently_not_applied(ask, run, message):
    model = build(PLAIN).requires_grad_(False)
    with pytest.raises(ValueError, match=message):
        look_into(model, ask, lambda _: None if run is None else model(ids(2, run)))


def test_a_position_that_generation_never_reaches_is_an_error():
    model = build(PLAIN)
    with pytest.raises(ValueError, match="never applied at position 12"):
        look_into(
            model,
            lambda look: look.zero("layers.0.out", positions=[2, 12]),
            lambda _: generate(model, [[1, 2, 3]], max_new_tokens=3, eos_ids=()),
        )


def test_a_padded_row_that_lacks_a_position_is_an_error():
    model, mask = build(PLAIN), torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    with pytest.raises(ValueError, match="whose shortest row has 4 tokens"):
        look_into(
            model,
            lambda look: look.zero("embed", positions=5),
            lambda _: model(ids(2, 6), attention_mask=mask),
        )


def test_a_copy_that_runs_instead_of_the_model_is_noticed():
    import copy

    model = build(PLAIN)
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the model did not run through it"):
        look_into(model, lambda look: look.zero("layers.0.out"), lambda _: other(ids(1, 4)))


def test_a_layer_of_ones_own_has_the_points_it_has():
    class Parallel(TransformerBlock):
        def forward(self, x, token_positions=None, *, context=None):
            return x + self.attn(self.ln1(x), context=context) + self.ffn(self.ln2(x))

    class Nothing(torch.nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    model = TransformerLM(PLAIN)
    model.layers[0] = Parallel(PLAIN, 0)
    model.layers[1].ffn = Nothing()
    there = points(model)
    assert "layers.0.mid" not in there
    assert "layers.0.attn.weights" in there
    assert "layers.1.mid" in there
    assert "layers.1.ffn.out" in there
    assert "layers.1.ffn.hidden" not in there
    with pytest.raises(ValueError, match="this Parallel has a forward of its own"):
        look_into(model, lambda look: look.keep("layers.0.mid"))
    with pytest.raises(ValueError, match="a Nothing has none"):
        look_into(model, lambda look: look.keep("layers.1.ffn.hidden"))


def test_weights_of_an_attention_op_of_ones_own_are_not_made_up():
    def attention(q, k, v, mask=None):
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    model = TransformerLM(PLAIN, ops=OPS["fast"].replace(attention=attention))
    with pytest.raises(ValueError, match="its op attention is user-provided"):
        look_into(model, lambda look: look.keep("layers.0.attn.weights"))
    with inspect(model) as look:
        look.keep("layers.0.attn.heads")
        model(ids(1, 4))


def test_a_kept_tensor_that_is_changed_in_place_is_noticed():
    model = build(PLAIN)
    cache, _ = kept(model, ids(1, 4))
    cache["embed"].zero_()
    with pytest.raises(ValueError, match="embed was changed in place after it was kept"):
        cache["embed"]


def test_a_closed_context_takes_nothing_more():
    model = build(PLAIN)
    with inspect(model) as look:
        look.keep("embed")
        model(ids(1, 4))
    with pytest.raises(ValueError, match="the context is closed"):
        look.zero("embed")


def test_only_our_models_open():
    with pytest.raises(TypeError, match="inspect takes a TransformerLM; got Linear"):
        inspect(torch.nn.Linear(2, 2))


def test_clearing_takes_all_back():
    model, tokens = build(PLAIN), ids(1, 5)
    with inspect(model) as look:
        look.zero("layers.*.out")
        look.clear()
        assert torch.equal(model(tokens), build(PLAIN)(tokens))
