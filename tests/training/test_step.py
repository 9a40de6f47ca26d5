"""One step: accumulation is the big batch, and what is not finite changes nothing."""

import contextlib
import types
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from scratchlm import ModelConfig, TransformerLM, acceleration
from scratchlm.accelerate import accelerate
from scratchlm.accelerate.models import AcceleratedTransformerLM
from scratchlm.config import MoE
from scratchlm.data import IGNORE_INDEX, Batch
from scratchlm.errors import ScratchLMError
from scratchlm.training import Learner, TrainConfig, backward, build_model, evaluate, take_step
from scratchlm.training.apply import apply_precision
from scratchlm.training.checks import check_applicable
from scratchlm.training.evaluation import merge_batches
from scratchlm.training.recording import PLAIN_STEPS, RecordedBackward
from training.tiny import MODEL, make_learner, state_of


def make_batch(rows=6, seed=0, vocab_size=12, ignore=()):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (rows, MODEL.context_length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for row, start in ignore:
        targets[row, start:] = IGNORE_INDEX
    return Batch(ids[:, :-1], targets)


def gradients(config, batch, micro, **more):
    settings = TrainConfig(batch_size=len(batch.inputs), micro_batch_size=micro, **more)
    model = build_model(config, 0, "cpu").double()
    learner = Learner(model, settings)
    loss = backward(learner, batch)
    return loss, {name: p.grad for name, p in learner.parameters.items()}


@settings(max_examples=25, deadline=None)
@given(
    micro=st.integers(1, 5),
    cuts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=6),
    z_loss=st.sampled_from([0.0, 1e-2]),
)
def test_accumulation_equals_the_big_batch_however_the_targets_fall(micro, cuts, z_loss):
    batch = make_batch(ignore=cuts)
    loss, whole = gradients(MODEL, batch, 6, z_loss=z_loss)
    loss_in_parts, in_parts = gradients(MODEL, batch, micro, z_loss=z_loss)
    torch.testing.assert_close(loss_in_parts, loss, rtol=1e-12, atol=1e-14)
    for name, gradient in whole.items():
        torch.testing.assert_close(in_parts[name], gradient, rtol=1e-10, atol=1e-13)


def test_a_mean_of_means_would_not_do():
    """The claim above can fail: unweighted micro-batches give another gradient."""
    batch = make_batch(ignore=[(0, 0), (1, 1)])
    _, whole = gradients(MODEL, batch, 6)
    parts = [Batch(batch.inputs[i : i + 2], batch.targets[i : i + 2]) for i in (0, 2, 4)]
    means = [gradients(MODEL, part, 2)[1] for part in parts]
    name = "lm_head.weight"
    unweighted = sum(mean[name] for mean in means) / 3
    assert (unweighted - whole[name]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", ["block", "attention", "ffn"])
@pytest.mark.parametrize("ffn", [MODEL.ffn, MoE(4, 2)])
def test_activation_checkpointing_changes_no_gradient_and_no_name(policy, ffn):
    config = MODEL.replace(ffn=ffn, num_layers=2)
    batch = make_batch()
    loss, plain = gradients(config, batch, 3)
    same_loss, same = gradients(config, batch, 3, checkpointing=policy)
    assert torch.equal(loss, same_loss)
    assert plain.keys() == same.keys()
    for name in plain:
        assert torch.equal(plain[name], same[name]), name


def test_activation_checkpointing_keeps_less():
    def kept(policy, layers=None):
        config = MODEL.replace(num_layers=4)
        settings = TrainConfig(checkpointing=policy, checkpointed_layers=layers)
        learner = Learner(build_model(config, 0, "cpu"), settings)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t, lambda t: t
        ):
            batch = make_batch()
            learner.loss(batch.inputs, batch.targets)
        return sum(sizes)

    assert kept("block") < kept("ffn") < kept("none")
    assert kept("attention") < kept("none")
    assert kept("block") == kept("block", 4) < kept("block", 3) < kept("block", 1)
    assert kept("block", 0) == kept("none")


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_what_is_not_finite_stops_before_the_update_and_names_the_step(where):
    learner = make_learner(TrainConfig(batch_size=6, ema=0.9))
    take_step(learner, make_batch(), 1, 1e-3)
    if where == "weight":
        with torch.no_grad():
            learner.model.lm_head.weight[0, 0] = torch.inf
    else:
        learner.model.ln_final.weight.register_hook(lambda grad: grad * torch.inf)
    before = {name: tensor.clone() for name, tensor in state_of(learner).items()}
    with pytest.raises(ScratchLMError, match=r"step 2: the (loss|gradient norm) is (nan|inf)"):
        take_step(learner, make_batch(), 2, 1e-3)
    for name, tensor in state_of(learner).items():
        assert torch.equal(tensor, before[name]), name


def test_mixed_precision_is_near_full_precision():
    batch = make_batch()
    losses = {}
    for precision in ("fp32", "bf16-mixed"):
        learner = make_learner(TrainConfig(batch_size=6, precision=precision))
        for step in range(1, 11):
            losses[precision] = take_step(learner, batch, step, 3e-3).loss
        assert all(p.dtype == torch.float32 for p in learner.parameters.values())
    assert losses["fp32"] != losses["bf16-mixed"]
    assert losses["bf16-mixed"] == pytest.approx(losses["fp32"], rel=2e-2)


def test_the_average_follows_its_formula():
    learner = make_learner(TrainConfig(batch_size=6, ema=0.5))
    average = {name: p.detach().clone() for name, p in learner.parameters.items()}
    for step in range(1, 15):
        take_step(learner, make_batch(seed=step), step, 1e-2)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, p in learner.parameters.items():
            average[name] = decay * average[name] + (1 - decay) * p.detach()
    for name in average:
        torch.testing.assert_close(learner.average[name], average[name])
    raw = learner.model.lm_head.weight.detach().clone()
    with learner.best_weights() as model:
        assert torch.equal(model.lm_head.weight, learner.average["lm_head.weight"])
        assert not torch.equal(model.lm_head.weight, raw)
    assert torch.equal(learner.model.lm_head.weight, raw)


def test_compiled_blocks_keep_the_names_of_the_state_dict():
    learner = Learner(build_model(MODEL, 0, "cpu"), TrainConfig(compile="block"))
    assert set(learner.model.state_dict()) == set(build_model(MODEL, 0, "cpu").state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["block", "model"])
def test_a_compiled_model_trains_alike(how):
    losses = {}
    for choice in ("off", how):
        learner = make_learner(TrainConfig(batch_size=6, compile=choice))
        for step in range(1, 6):
            losses[choice] = take_step(learner, make_batch(), step, 3e-3).loss
    assert losses[how] == pytest.approx(losses["off"], rel=1e-4)


def test_first_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    one = build_model(MODEL, 3, "cpu").state_dict()
    torch.manual_seed(6)
    same, other = (build_model(MODEL, seed, "cpu").state_dict() for seed in (3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


# Evaluation


def test_evaluation_is_the_mean_over_targets_and_bits_over_bytes():
    model = build_model(MODEL, 0, "cpu")
    batches = [make_batch(seed=1), make_batch(rows=3, seed=2, ignore=[(0, 2), (1, 0)])]
    bytes_per_id = torch.arange(12)
    found = evaluate(model, batches, bytes_per_id=bytes_per_id)
    total = count = num_bytes = 0
    for batch in batches:
        logs = torch.log_softmax(model(batch.inputs).double(), dim=-1)
        for row, target_row in zip(logs, batch.targets, strict=True):
            for log, target in zip(row, target_row, strict=True):
                if target != IGNORE_INDEX:
                    total, count = total - log[target].item(), count + 1
                    num_bytes += int(target)
    assert found.targets == count
    assert found.loss == pytest.approx(total / count, rel=1e-6)
    assert found.perplexity == pytest.approx(2.718281828459045 ** (total / count), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(total / 0.6931471805599453 / num_bytes, rel=1e-6)
    assert evaluate(model, batches, max_batches=1).targets == 48
    assert evaluate(model, batches, should_stop=lambda: True) is None
    assert evaluate(model, batches).bits_per_byte is None
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(model, [])


def test_evaluation_on_a_cpu_reads_no_padding():
    model, read = build_model(MODEL, 0, "cpu"), []
    batch = make_batch(rows=4, seed=3, ignore=[(0, 2)])
    targets = batch.targets.clone()
    targets[2:], targets[:, 5:] = IGNORE_INDEX, IGNORE_INDEX
    model.layers[0].register_forward_pre_hook(lambda _, args: read.append(args[0].shape[:2]))
    found = evaluate(model, [replace(batch, targets=targets)])
    assert read == [(2, 5)]
    assert found.targets == 7
    mean = model.loss(batch.inputs[:2, :5], batch.targets[:2, :5], ignore_index=IGNORE_INDEX)
    assert found.loss == pytest.approx(mean.item(), rel=1e-6)


def test_a_uniform_byte_model_needs_eight_bits_per_byte():
    config = ModelConfig(vocab_size=256, context_length=8, d_model=8, num_layers=1, num_heads=2)
    model = build_model(config, 0, "cpu")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    batch = make_batch(vocab_size=256)
    found = evaluate(model, [batch], bytes_per_id=torch.ones(256, dtype=torch.int64))
    assert found.bits_per_byte == pytest.approx(8.0)


def test_settings_are_resolved_by_device():
    assert TrainConfig().resolved("cuda").precision == "bf16-mixed"
    settings = TrainConfig(steps=400, lr=1.0).resolved("cpu")
    assert (settings.precision, settings.min_lr, settings.warmup_steps) == ("fp32", 0.1, 20)
    assert settings == replace(settings).resolved("cpu")


@torch._dynamo.config.patch(recompile_limit=1)
def test_all_layers_share_one_compiled_graph():
    """Whatever is recomputed: compiling a deep model costs what compiling one layer costs."""
    config = ModelConfig(32, 8, d_model=16, num_layers=12, num_heads=2, d_ff=32)
    tokens = torch.randint(32, (2, 8))
    for policy in ("none", "ffn", "selective", "block"):
        torch._dynamo.reset()
        counter = CompileCounter()
        learner = Learner(build_model(config, 0, "cpu"), TrainConfig(checkpointing=policy))
        for layer in learner.model.layers:
            layer.compile(backend=counter, fullgraph=True)
        for _ in range(2):
            learner.loss(tokens, tokens).backward()
        assert counter.frame_count == 1


@pytest.mark.parametrize("tokens", [1, 16, 24, 1000])
def test_merged_batches_hold_the_same_rows_in_no_more_than_so_many_tokens(tokens):
    rows = [make_batch(n, seed=n) for n in (2, 2, 1)] + [Batch(*[torch.zeros(1, 3).long()] * 2)]
    merged = list(merge_batches(rows, tokens))
    for name in ("inputs", "targets"):
        flat = [[getattr(b, name).flatten() for b in batches] for batches in (rows, merged)]
        assert torch.equal(*(torch.cat(parts) for parts in flat))
    whole = [len(b.inputs) for b in merged]
    assert whole == {1: [2, 2, 1, 1], 16: [2, 2, 1, 1], 24: [2, 3, 1], 1000: [5, 1]}[tokens]


class FakeGraph:
    """Stands in for a CUDA graph: what was recorded is run again on replay."""

    def __init__(self):
        self.work = None

    def replay(self):
        self.work()


@contextlib.contextmanager
def fake_graphs(monkeypatch, learner):
    """Record on a CPU: a graph replays `learner.backward` into the gradients it was recorded with.

    What a graph really does with it is shown on a GPU.
    """

    @contextlib.contextmanager
    def capture(graph, **options):
        recorded = learner.recorded
        yield
        accumulated = [p.grad for p in recorded.parameters]
        for gradient in accumulated:
            gradient.zero_()  # a capture computes nothing

        def again():
            before = [p.grad for p in recorded.parameters]
            assert all(b is a for b, a in zip(before, accumulated, strict=True)), "not lent"
            if not recorded.accumulates:
                for gradient in accumulated:
                    gradient.zero_()
            recorded._loss.copy_(learner._backward(recorded._batch, recorded._weight))

        graph.work = again

    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    yield


def recording_learner(micro, warn=None):
    config = ModelConfig(32, 8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
    learner = Learner(
        build_model(config, 0, "cpu"), TrainConfig(batch_size=5, micro_batch_size=micro)
    )
    plain = Learner(
        build_model(config, 0, "cpu"), TrainConfig(batch_size=5, micro_batch_size=micro)
    )
    learner.recorded = RecordedBackward(
        learner.backward,
        list(learner.parameters.values()),
        accumulates=micro != 5,
        warn=warn or pytest.fail,
    )
    return learner, plain


def some_batch(step):
    tokens = torch.randint(32, (5, 9), generator=torch.Generator().manual_seed(step))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@pytest.mark.parametrize("micro", [5, 2], ids=["whole batches", "micro-batches, the last shorter"])
def test_recorded_steps_are_the_plain_ones(monkeypatch, micro):
    learner, plain = recording_learner(micro)
    with fake_graphs(monkeypatch, learner):
        for step in range(6):
            results = [take_step(who, some_batch(step), step, 1e-2) for who in (learner, plain)]
            assert results[0] == results[1]
            assert (learner.recorded._graph is not None) == (step >= PLAIN_STEPS)
    for ours, theirs in zip(learner.parameters.values(), plain.parameters.values(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("micro", [5, 2])
def test_where_recording_fails_one_line_says_so_and_training_goes_on(monkeypatch, micro):
    told = []
    learner, plain = recording_learner(micro, told.append)

    @contextlib.contextmanager
    def fails(graph, **options):
        yield
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    with fake_graphs(monkeypatch, learner):
        monkeypatch.setattr(torch.cuda, "graph", fails)
        for step in range(5):
            results = [take_step(who, some_batch(step), step, 1e-2) for who in (learner, plain)]
            assert results[0] == results[1]
    assert len(told) == 1
    assert told[0].startswith("train.cuda_graph: recording failed, ")
    assert told[0].endswith(": operation not permitted when stream is capturing")


def test_where_compiling_fails_one_line_says_so_and_training_goes_on(monkeypatch):
    told = []
    config = ModelConfig(32, 8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
    plain = Learner(build_model(config, 0, "cpu"), TrainConfig(batch_size=5))

    def no_compiler(self, *args, **options):
        raise RuntimeError("no working\nC compiler")

    def compile_badly(self, **options):
        self._compiled_call_impl = no_compiler

    monkeypatch.setattr(torch.nn.Module, "compile", compile_badly)
    settings = TrainConfig(batch_size=5, compile="block")
    learner = Learner(build_model(config, 0, "cpu"), settings, warn=told.append)
    for step in range(3):
        results = [take_step(who, some_batch(step), step, 1e-2) for who in (learner, plain)]
        assert results[0] == results[1]
    assert told == [
        "train.compile: compiling failed, layers run as they are: no working C compiler"
    ]


def test_an_error_of_ones_own_is_not_taken_for_the_compilers(monkeypatch):
    settings = TrainConfig(batch_size=5, compile="block")
    config = ModelConfig(32, 8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    learner = Learner(build_model(config, 0, "cpu"), settings, warn=lambda text: None)

    def broken(*args):
        raise ZeroDivisionError("mine")

    learner.model.layers[0].register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError, match="mine"):
        take_step(learner, some_batch(0), 0, 1e-2)


def test_on_a_gpu_blocks_are_compiled_and_steps_recorded_by_default():
    there, here = TrainConfig().resolved("cuda"), TrainConfig().resolved("cpu")
    assert (there.compile, there.cuda_graph, there.precision) == ("block", True, "bf16-mixed")
    assert (here.compile, here.cuda_graph, here.precision) == ("off", False, "fp32")
    chosen = TrainConfig(compile="off", cuda_graph=False).resolved("cuda")
    assert (chosen.compile, chosen.cuda_graph) == ("off", False)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("micro", [4, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-residual", "fp8"])
def test_a_recorded_run_takes_the_steps_of_a_plain_one(precision, micro):
    config = ModelConfig(64, 32, d_model=64, num_layers=2, num_heads=2, d_ff=128)
    losses = []
    for cuda_graph in (False, True):
        settings = TrainConfig(
            batch_size=4, micro_batch_size=micro, precision=precision, cuda_graph=cuda_graph
        )
        learner = Learner(build_model(config, 0, "cuda"), settings)
        steps = []
        for step in range(8):
            tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(step))
            batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            steps.append(take_step(learner, batch, step, 1e-3).loss)
        losses.append(steps)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][0] != losses[0][-1]


@pytest.mark.parametrize("precision", ["bf16-residual", "fp8"])
def test_a_model_trained_low_still_answers_in_full_precision(precision):
    """Samples are drawn from it as training goes on, outside autocast."""
    config = ModelConfig(32, 8, d_model=16, num_layers=2, num_heads=2, d_ff=32)
    tokens = torch.randint(32, (2, 8))
    model = build_model(config, 0, "cpu")
    with torch.no_grad():
        plain = model(tokens)
        for prepare in (accelerate, acceleration.plain):
            apply_precision(prepare(model), precision)
            torch.testing.assert_close(model(tokens), plain)
            with torch.autocast("cpu", torch.bfloat16):
                assert model.hidden(tokens).dtype == torch.bfloat16
            if precision == "fp8":  # for accelerated models
                break


# Settings that cannot apply

REFUSED = {
    "cuda_graph": ({"cuda_graph": True}, "cpu", "train.cuda_graph needs a CUDA device"),
    "shares": ({"shares": 2}, "cuda", "train.shares is for a CPU; the model is on cuda"),
    "fp8": ({"precision": "fp8"}, "cpu", "train.precision=fp8 needs a CUDA device"),
    "fp8, plain": (
        {"precision": "fp8", "accelerate": False},
        "cuda",
        "train.precision=fp8 needs train.accelerate",
    ),
    "checkpointed_layers": (
        {"checkpointed_layers": 1},
        "cpu",
        "train.checkpointed_layers needs train.checkpointing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_apply_is_refused_by_name(case):
    settings, device, message = REFUSED[case]
    with pytest.raises(ScratchLMError, match=message) as caught:
        check_applicable(TrainConfig(**settings).resolved(device), device)
    assert "\n" not in str(caught.value)
    if device == "cpu":  # a Learner asks before it changes the model
        model = build_model(MODEL, 0, "cpu")
        with pytest.raises(ScratchLMError, match=message):
            Learner(model, TrainConfig(**settings))
        assert type(model) is TransformerLM


def test_settings_that_can_apply_are_not_refused():
    for choice, device in (
        ({}, "cpu"),
        ({"shares": 2, "batch_size": 4}, "cpu"),
        ({"cuda_graph": True, "batch_size": 4}, "cuda"),
        ({"cuda_graph": True, "batch_size": 4, "micro_batch_size": 2}, "cuda"),
        ({"precision": "fp8"}, "cuda"),
        ({"checkpointed_layers": 1, "checkpointing": "block"}, "cpu"),
    ):
        check_applicable(TrainConfig(**choice).resolved(device), device)


def test_acceleration_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(acceleration, "is_available", lambda: False)
    with pytest.raises(ScratchLMError, match=r"train\.accelerate needs scratchlm\.accelerate"):
        check_applicable(TrainConfig(accelerate=True).resolved("cpu"), "cpu")
    check_applicable(TrainConfig().resolved("cpu"), "cpu")


@pytest.mark.parametrize("accelerated", [True, False])
def test_a_learner_accelerates_its_model_unless_told_not_to(accelerated):
    model = build_model(MODEL, 0, "cpu")
    if not accelerated:
        accelerate(model)
    Learner(model, TrainConfig(accelerate=accelerated))
    assert (type(model) is AcceleratedTransformerLM) == accelerated
    assert (type(model) is TransformerLM) != accelerated
