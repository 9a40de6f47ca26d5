"""The standing suite: what `docs/reliability.md` promises, tried again and again.

Short forms run in `make test`, long ones in `make test-slow`; each records a row of the table that
the run ends with.
"""

import json
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from faults import kill_preparation
from forked import run_forked
from rewriting import rewrite
from scratchlm import ModelConfig, TransformerLM
from scratchlm import checkpoint as ckpt
from scratchlm.accelerate import accelerate
from scratchlm.config.lora import LoRA
from scratchlm.errors import ScratchLMError
from scratchlm.inference import Sampling, generate
from scratchlm.interop.peft import Adapter, read_peft, write_peft
from scratchlm.ops import native
from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.training.lora import adapter_tensors, apply_lora
from test_architecture import SRC
from training import killer

HERE = Path(__file__).parent
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CONFIG = ModelConfig(vocab_size=23, context_length=32, d_model=8, num_layers=2, num_heads=2)


def script(name, *arguments, **more):
    """Run a script of this folder (or of another) and return the summary it prints last."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SRC.parent), **more},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_a_fork(work, log):
    """Do work in a copy of this process, which need not import; return the summary it prints."""
    status = run_forked(lambda: work() or 0, log)
    assert status == 0, log.read_text()[-3000:]
    return json.loads(log.read_text().splitlines()[-1])


# Kills


@FORKS
@pytest.mark.parametrize("kills", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_kills_of_training_lose_nothing(tmp_path, tried, kills):
    found = in_a_fork(lambda: killer.main(tmp_path / "runs", kills, kills), tmp_path / "log")
    assert found["kills"] >= kills
    assert found["in_a_write"] >= (60 if kills >= 400 else 1)
    tried("kills of training, log and state bit-identical", found["kills"],
          f"{found['in_a_write']} inside a write")  # fmt: skip


FINE_TUNING = ("lora", "qlora", "full", "dpo", "head")


@FORKS
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("lora", 8),
        *(pytest.param(kind, 100, marks=pytest.mark.slow) for kind in FINE_TUNING),
    ],
)
def test_kills_of_fine_tuning_lose_nothing(tmp_path, tried, kind, kills):
    (tmp_path / "runs").mkdir()
    work = partial(killer.main, tmp_path / "runs", kills, kills, kind)
    found = in_a_fork(work, tmp_path / "log")
    assert found["kills"] >= kills
    tried(f"kills of fine-tuning ({kind}), log and state bit-identical", found["kills"],
          f"{found['in_a_write']} inside a write")  # fmt: skip


@FORKS
@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_of_preparation_lose_nothing(tmp_path, tried, kills):
    work = partial(kill_preparation.main, tmp_path / "runs", kills, kills)
    found = in_a_fork(work, tmp_path / "log")
    assert found["in_work"] >= kills // 4
    tried("kills of preparation, token files bit-identical", found["kills"],
          f"{found['in_work']} with work begun")  # fmt: skip


# Failing calls


@pytest.fixture(scope="module")
def preload(tmp_path_factory):
    """Build the library that lets a call fail."""
    try:
        compiler = native._compiler()
    except OSError as error:
        pytest.skip(str(error))
    library = tmp_path_factory.mktemp("preload") / "failing_calls.so"
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared")
    source = str(HERE / "failing_calls.cpp")
    subprocess.run([compiler, *flags, "-o", str(library), source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize(
    ("kills", "names"), [(4, ("quantize", "merge")), pytest.param(300, (), marks=pytest.mark.slow)]
)
def test_kills_of_commands_that_write_leave_all_or_nothing(tmp_path, tried, preload, kills, names):
    found = script("kill_writers.py", tmp_path, kills, kills, *names, LD_PRELOAD=str(preload))
    assert found["beside"] >= max(1, kills // 8)
    tried(f"kills of {found['commands']} commands that write; whole, or nothing there",
          found["kills"], f"{found['beside']} inside a write")  # fmt: skip


QUICK = ("tokenizer train", "import", "account --html", "quantize")


@pytest.mark.parametrize(
    ("stride", "names"), [(8, QUICK), pytest.param(1, (), marks=pytest.mark.slow)]
)
def test_a_failing_call_leaves_nothing_torn_and_the_command_goes_on(
    tmp_path, tried, preload, stride, names
):
    found = script("failing_calls.py", tmp_path, stride, *names, LD_PRELOAD=str(preload))
    assert all(found.values())
    every = "every call" if stride == 1 else f"every {stride}th call"
    tried(f"failing calls in {len(found)} commands that write", sum(found.values()), every)


# Damage


@pytest.mark.parametrize("count", [560, pytest.param(40_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_in_one_line_or_taken(tmp_path, tried, count):
    found = script("mutations.py", tmp_path, count, count)
    assert found["tried"] == count
    assert found["refused"] > count // 2
    note = f"{found['refused']:,} refused; memory grew by {found['grown_mb']} MB"
    tried("mutated files of 28 kinds, no crash, no hang", count, note)


def small_adapter():
    model, lora = TransformerLM(CONFIG), LoRA(1, targets=("q_proj",), dora=True)
    apply_lora(model, lora)
    return lora, adapter_tensors(model)


@pytest.mark.parametrize("kind", ["model", "adapter"])
@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_a_checkpoint_is_seen(tmp_path, tried, stride, kind):
    weights, more = TransformerLM(CONFIG).state_dict(), {}
    if kind == "adapter":
        lora, tensors = small_adapter()
        weights = {f"{name}.default": tensor for name, tensor in tensors.items()}
        record = {"lora": lora.to_dict(), "base": "base", "base_fingerprint": "0"}
        template = ChatTemplate({"default": "{{ messages }}"}).to_bytes()
        more = {"metadata": {"adapter": record}, "tokenizer_config": template}
    path = ckpt.write_checkpoint(tmp_path / "step-00000001", model=weights, config=CONFIG, **more)
    chance, flips = random.Random(0), 0
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for at in range(0, len(good), stride):
            flipped = bytearray(good)
            flipped[at] ^= 1 << chance.randrange(8)
            rewrite(file, flipped)
            flips += 1
            try:
                manifest = ckpt.verify_checkpoint(path)
            except ScratchLMError:
                continue
            # Only white space of the manifest may differ: it says the same.
            assert file.name == ckpt.MANIFEST, f"{file.name}, byte {at}"
            rewrite(file, good)
            assert manifest == ckpt.verify_checkpoint(path)
        rewrite(file, good)
    tried(f"flipped bytes of a checkpoint ({kind}), all seen that matter", flips)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_of_an_exported_adapter_is_seen(tmp_path, tried, stride):
    """PEFT's format has no hash of its own; what we write carries one."""
    adapter, path = Adapter(*small_adapter()), tmp_path / "adapter"
    write_peft(path, CONFIG, adapter)
    chance, flips = random.Random(0), 0
    good = {file: file.read_bytes() for file in sorted(path.iterdir())}
    expected = read_peft(path, CONFIG)
    for file, content in good.items():
        for at in range(0, len(content), stride):
            flipped = bytearray(content)
            flipped[at] ^= 1 << chance.randrange(8)
            rewrite(file, flipped)
            flips += 1
            try:
                found = read_peft(path, CONFIG)
            except ScratchLMError:
                continue
            # What is left says the same: white space, a word that only PEFT reads.
            for name, tensor in expected.tensors.items():
                assert torch.equal(found.tensors[name], tensor), f"{file.name}, byte {at}"
            assert found.scales == expected.scales
        rewrite(file, content)
    tried("flipped bytes of an exported adapter, all seen that matter", flips)


# One model, many users


def test_eight_threads_generate_as_one_does(tried):
    torch.manual_seed(0)
    model = accelerate(TransformerLM(CONFIG).eval())
    prompts = [[i, i + 1, i + 2] for i in range(8)]

    def answer(i):
        found = generate(
            model, [prompts[i]], max_new_tokens=20, sampling=Sampling(), seed=i, eos_ids=()
        )
        return found[0].token_ids

    alone = [answer(i) for i in range(8)]
    together, errors = [[] for _ in range(8)], []

    def work(i):
        try:
            for _ in range(4):
                together[i].append(answer(i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert together == [[one] * 4 for one in alone]
    tried("calls of generate by eight threads, each as alone", 32)


@pytest.mark.parametrize("accelerated", [False, True])
def test_an_error_in_the_middle_of_a_step_leaves_cache_and_model_as_they_were(tried, accelerated):
    torch.manual_seed(0)
    model = TransformerLM(CONFIG).eval()
    if accelerated:
        accelerate(model)
    tokens, more = torch.randint(23, (2, 6)), torch.randint(23, (2, 3))
    with torch.no_grad():
        wanted = model(torch.cat((tokens, more), dim=1))[:, 6:]
        cache = model.new_cache(2)
        model(tokens, cache=cache)

        def fail(*_):
            raise RuntimeError("in the middle")

        for place in (model.layers[1].attn.output_proj, model.layers[0].ffn, model.ln_final):
            handle = place.register_forward_hook(fail)
            length = cache.length
            with pytest.raises(RuntimeError, match="in the middle"):
                model(more, cache=cache)
            handle.remove()
            assert cache.length == length
        got = model(more, cache=cache)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    tried("errors in the middle of a step, cache as it was", 3)


def test_functional_transforms_of_a_whole_model_work(tried):
    from torch.func import functional_call, grad, jvp

    tokens = torch.randint(23, (2, 9))
    count = 0
    for build in (lambda m: m, accelerate):
        torch.manual_seed(0)
        model = build(TransformerLM(CONFIG))
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, model=model):
            logits = functional_call(model, weights, (tokens,))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

        found = grad(loss)(weights)
        model.zero_grad()
        loss(dict(model.named_parameters())).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, atol=1e-5, rtol=1e-4)
        direction = {name: torch.randn_like(p) for name, p in weights.items()}
        _, slope = jvp(loss, (weights,), (direction,))
        along = sum((direction[name] * found[name]).sum() for name in weights)
        torch.testing.assert_close(slope, along, atol=1e-4, rtol=1e-3)
        count += 2
    tried("functional transforms of a whole model (grad, jvp)", count)


# Generation sees what was changed


@pytest.mark.parametrize("change", ["subclass of the last norm", "patched forward", "global hook"])
def test_a_changed_model_generates_with_the_cache_as_without(change, tried):
    from scratchlm.model import RMSNorm

    torch.manual_seed(0)
    model = accelerate(TransformerLM(CONFIG).eval())
    handle = None

    class Twice(RMSNorm):
        def forward(self, x):
            return super().forward(x) * -2 + x

    if change == "subclass of the last norm":
        mine = Twice(8)
        mine.load_state_dict(model.ln_final.state_dict())
        model.ln_final = mine
    elif change == "patched forward":
        ffn, forward = model.layers[1].ffn, model.layers[1].ffn.forward
        ffn.forward = lambda x, *more: forward(x, *more) * 3
    else:
        handle = torch.nn.modules.module.register_module_forward_hook(
            lambda module, inputs, output: output * 1.5 if isinstance(module, RMSNorm) else None
        )
    try:
        options = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.0), "eos_ids": ()}
        cached, uncached = (
            generate(model, [[1, 2, 3]], use_cache=use, **options)[0].token_ids
            for use in (True, False)
        )
    finally:
        if handle is not None:
            handle.remove()
    assert cached == uncached
    plain = generate(accelerate(fresh()), [[1, 2, 3]], **options)[0].token_ids
    assert cached != plain  # the change was seen
    tried("changed models, generation with the cache as without", 1)


def fresh():
    torch.manual_seed(0)
    return TransformerLM(CONFIG).eval()
