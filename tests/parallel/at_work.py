"""What one rank of a test does; started by `launching.py`, it forks so many processes.

The processes form worlds one after the other: the first N of them, with a port of its own each.
What the first rank finds is written to OUT as JSON.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from parallel.saved import ROWS, SAVED
from scratchlm import config as c
from scratchlm import generate
from scratchlm.checkpoint import TRAINING_STATE, checkpoint_path, read_tensors, write_sharded
from scratchlm.config.lora import LoRA
from scratchlm.data import Batch
from scratchlm.data.conversations import Example
from scratchlm.data.examples import write_examples
from scratchlm.errors import ScratchLMError
from scratchlm.model import TransformerLM
from scratchlm.parallel import tensor
from scratchlm.parallel.ranks import join_ranks
from scratchlm.parallel.tensor import TensorParallel
from scratchlm.training import (
    DataFiles,
    Learner,
    Plan,
    Start,
    TrainConfig,
    Watcher,
    build_model,
    run_plan,
    take_step,
)
from scratchlm.training.parts import (
    fill,
    first_weights,
    load_pieces,
    model_pieces,
    training_state_pieces,
)
from scratchlm.training.tuning import Tuning
from tiny_models import PLAIN
from training.tiny import MODEL as TINY
from training.tiny import log_of, run_training

PROCESS, COUNT = 0, int(os.environ["COUNT"])
PORTS = iter(os.environ["PORTS"].split(","))

# Sides that nothing divides, groups of heads, unequal numbers of targets in every row.
MODEL = PLAIN.replace(vocab_size=101, d_model=24, num_kv_heads=2, d_ff=37)
MODELS = {
    "plain": MODEL,
    "tied": MODEL.replace(tie_embeddings=True),
    "qwen3": MODEL.replace(attention=c.Attention(qk_norm=True), tie_embeddings=True),
    "gpt2": MODEL.replace(
        norm=c.LayerNorm(),
        ffn=c.MLP(bias=True),
        positions=c.Learned(),
        attention=c.Attention(bias="all"),
    ),
    "experts": MODEL.replace(ffn=c.MoE(4, 2, load_balance_weight=0.05)),
    "window": MODEL.replace(attention=c.Attention(sliding_window=5)),
    "post-norm": MODEL.replace(norm_placement="post"),
}
SEQ = 16
tensor.SLICE_ELEMENTS = 1_500  # several slices of logits, the last one shorter


@contextlib.contextmanager
def world(size, tp=1, cp=1, timeout=900):
    """Join the first `size` processes; the others get None."""
    port = next(PORTS)
    if size <= PROCESS:
        yield None
        return
    # as on machines of two ranks each
    os.environ.update(RANK=str(PROCESS), WORLD_SIZE=str(size), MASTER_PORT=port)
    os.environ["LOCAL_WORLD_SIZE"] = str(2 if size % 2 == 0 else size)
    with join_ranks("cpu", tp, timeout, context_size=cp) as ranks:
        yield ranks


def batch_of(step, seq=SEQ, documents=False):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 101, (ROWS, seq + 1), generator=generator)
    inputs, targets = ids[:, :-1], ids[:, 1:].clone()
    for row in range(ROWS):
        targets[row, (5 * row + step) % seq + 1 :] = -100  # 1 to seq of them count
    ends = torch.rand(ROWS, seq, generator=generator) < 0.2
    return Batch(inputs, targets, ends.long().cumsum(-1) if documents else None)


def curve(settings, model, ranks=None, steps=6, seq=SEQ):
    """Train; return (loss, gradient norm) of each step, and the learner."""
    if ranks is not None and settings.has_collectives:  # as a run does it: without values, then cut
        learner = Learner(TransformerLM(model, device="meta"), settings, ranks=ranks)
        fill(learner, first_weights(model, 0))
    else:
        learner = Learner(build_model(model, 0, "cpu"), settings, ranks=ranks)
    found = []
    for step in range(1, steps + 1):
        batch = batch_of(step, seq, settings.document_mask)
        if ranks is not None:
            low, high = (ROWS * (ranks.row_rank + n) // ranks.row_size for n in (0, 1))
            documents = None if batch.document_ids is None else batch.document_ids[low:high]
            batch = Batch(batch.inputs[low:high], batch.targets[low:high], documents)
        result = take_step(learner, batch, step, 3e-3)
        found.append((result.loss, result.grad_norm))
    return found, learner


# ranks, tp, model, settings
CASES = {
    "zero1, 1": (1, 1, "plain", {}),
    "zero1, 2": (2, 1, "plain", {}),
    "zero1, 2, tied": (2, 1, "tied", {}),
    "zero1, 2, muon": (2, 1, "plain", {"optimizer": "muon", "fast_optimizer": False}),
    "zero1, 2, written out": (2, 1, "gpt2", {"fast_optimizer": False}),
    "zero1, 2, experts": (2, 1, "experts", {}),
    "zero1, 2, micro-batches": (2, 1, "plain", {"micro_batch_size": 3}),
    "zero1, 2, checkpointing": (2, 1, "plain", {"checkpointing": "block"}),
    "zero1, 2, moments": (2, 1, "plain", {"moment": "bf16"}),
    "zero1, 3": (3, 1, "plain", {}),
    "zero1, 4": (4, 1, "tied", {}),
    "zero1, 8": (8, 1, "plain", {}),
    "fsdp, 2": (2, 1, "plain", {"parallel": "fsdp"}),
    "fsdp, 3, tied": (3, 1, "tied", {"parallel": "fsdp", "micro_batch_size": 2}),
    "fsdp, 2, experts": (2, 1, "experts", {"parallel": "fsdp"}),
    "fsdp, 4, checkpointing": (4, 1, "gpt2", {"parallel": "fsdp", "checkpointing": "block"}),
    "tp 2": (2, 2, "plain", {}),
    "tp 2, tied, norms of heads": (2, 2, "qwen3", {}),
    "tp 2, biases, learned positions": (2, 2, "gpt2", {}),
    "tp 2, experts": (2, 2, "experts", {}),
    "tp 2, post-norm": (2, 2, "post-norm", {}),
    "tp 2, recomputed": (2, 2, "plain", {"checkpointing": "block"}),
    "tp 2, z-loss": (2, 2, "plain", {"z_loss": 1e-3}),
    "tp 2, odd sequences": (2, 2, "plain", {"seq": 15}),
    "zero1 × tp 2": (4, 2, "qwen3", {}),
    "fsdp × tp 2": (4, 2, "plain", {"parallel": "fsdp"}),
    "cp 2": (2, 1, "plain", {"cp": 2, "seq": 15, "micro_batch_size": 5}),
    "cp 2, documents": (2, 1, "qwen3", {"cp": 2, "document_mask": True}),
    "cp 2, window": (2, 1, "window", {"cp": 2}),
    "cp 2, biases, learned positions": (2, 1, "gpt2", {"cp": 2, "checkpointing": "block"}),
    "zero1 × cp 2": (4, 1, "tied", {"cp": 2, "document_mask": True, "seq": 13}),
    "cp 4": (4, 1, "plain", {"cp": 4}),
    "hsdp, 2 machines": (4, 1, "tied", {"parallel": "hsdp"}),
    "hsdp × tp 2": (4, 2, "plain", {"parallel": "hsdp"}),
    "fsdp × tp 2, experts": (4, 2, "experts", {"parallel": "fsdp"}),
    "fsdp, 1": (1, 1, "plain", {"parallel": "fsdp"}),
    "fsdp, 8": (8, 1, "plain", {"parallel": "fsdp"}),
    "zero1 × tp 2, 8": (8, 2, "plain", {}),
    "fsdp × tp 2, 8": (8, 2, "plain", {"parallel": "fsdp"}),
}


# What `make test` leaves to `make test-slow`.
LONG_ONLY = {
    *("zero1, 2, tied", "zero1, 2, written out", "zero1, 2, checkpointing", "zero1, 2, moments"),
    *(
        "zero1, 4",
        "zero1, 8",
        "fsdp, 2",
        "fsdp, 4, checkpointing",
        "tp 2",
        "tp 2, post-norm",
        "tp 2, z-loss",
    ),
    *("tp 2, recomputed", "hsdp × tp 2", "fsdp × tp 2, experts", "cp 2", "cp 4", "cp 2, window"),
    *("fsdp, 1", "fsdp, 8", "zero1 × tp 2, 8", "fsdp × tp 2, 8"),
}


def curves(out, steps=6, left_out=frozenset()):
    """Train each case on its ranks, those of one world together; then once more on one process."""
    chosen = {name: case for name, case in CASES.items() if name not in left_out}
    found = {}
    grids = {name: (*case[:2], case[3].get("cp", 1)) for name, case in chosen.items()}
    for grid in dict.fromkeys(grids.values()):
        with world(*grid) as ranks:
            for name, (*_, model, more) in chosen.items():
                if ranks is not None and grids[name] == grid:
                    settings, seq = settings_of(more, steps, tp=grid[1])
                    found[name], _ = curve(settings, MODELS[model], ranks, steps, seq)
    write(out / "together.json", found)
    alone = {}
    for name, (size, tp, model, more) in list(chosen.items())[PROCESS::COUNT]:
        # One process takes the same rows at a time, so that experts see the same.
        rows = more.get("micro_batch_size", ROWS * tp * more.get("cp", 1) // size)
        one = {**more, "micro_batch_size": rows, "parallel": None, "cp": 1}
        settings, seq = settings_of(one, steps)
        alone[name], _ = curve(settings, MODELS[model], None, steps, seq)
    (out / f"alone-{PROCESS}.json").write_text(json.dumps(alone))


def settings_of(more, steps, **also):
    given = {name: value for name, value in more.items() if name != "seq"}
    settings = TrainConfig(steps=steps, batch_size=ROWS, warmup_steps=0, **given, **also)
    return settings, more.get("seq", SEQ)


def precision(out):
    """Weights that products read are bfloat16 on both ranks, float32 where they are updated."""
    settings, found = TrainConfig(batch_size=ROWS, warmup_steps=0, precision="bf16-mixed"), {}
    settings = replace(settings, steps=6, micro_batch_size=3)
    for kind in ("zero1", "fsdp"):
        with world(2) as ranks:
            together, learner = curve(replace(settings, parallel=kind), MODEL, ranks)
            if ranks.is_first:
                alone, _ = curve(settings, MODEL)
                dtypes = {n: str(p.dtype) for n, p in learner.model.named_parameters()}
                updated = {str(p.dtype) for p in learner.layout.updated.values()}
                found[kind] = [alone, together, dtypes, sorted(updated)]
    write(out, found)


def resumes(out, sizes=((1, 2, 4), (1, 2, 3, 4)), kinds=({}, {"parallel": "fsdp"})):
    """Save with N ranks at step 4, go on with M: state by hash, and the log."""
    data, found = out.parent / "data", {}
    for kind in kinds:
        label = kind.get("parallel", "zero1")
        for n in sizes[0]:
            begun = out.parent / f"{label}-{n}"
            with world(n) as ranks:
                if ranks is not None:
                    stop = StopAt(4)
                    run_training(
                        *(begun, data, replace(SAVED, **kind)),
                        ranks=ranks,
                        watchers=(stop,),
                        should_stop=lambda stop=stop: stop.asked,
                    )
            for m in sizes[1]:
                with world(m) as ranks:
                    if ranks is None:
                        continue
                    copy = out.parent / f"{label}-{n}-{m}"
                    if ranks.is_first:
                        shutil.copytree(begun, copy)
                    ranks.from_first(None)
                    again = resave(copy, ranks, replace(SAVED, **kind))
                    run_training(copy, data, replace(SAVED, **kind), ranks=ranks)
                    if ranks.is_first:
                        before = hashes(checkpoint_path(begun, 4))
                        found[f"{label} {n} → {m}"] = [before, again, log_of(copy)]
    write(out, found)


def shared_sequences(out):
    """Train a run from its files with two ranks that share each sequence, and with one process."""
    files = DataFiles(*(out.parent / "data" / f"{name}.bin" for name in ("train", "val")))
    model = TINY.replace(context_length=7)  # which four chunks do not divide
    plan = Plan(model, SAVED, files)
    with world(2, cp=2) as ranks:
        together = replace(plan, train=replace(plan.train, cp=2))
        told = []
        run_plan(out.parent / "cp-2", together, ranks=ranks, run_tasks=print, warn=told.append)
    if PROCESS == 0:
        run_plan(out.parent / "cp-1", plan)
        write(out, [*(log_of(out.parent / f"cp-{n}") for n in (1, 2)), told])


class StopAt(Watcher):
    """Ask for a stop after a step, as Ctrl-C does."""

    def __init__(self, step):
        self.step, self.asked = step, False

    def stepped(self, record):
        self.asked |= record["step"] == self.step


def resave(directory, ranks, settings):
    """Read a checkpoint onto these ranks, write it again, return its hashes."""
    learner = Learner(build_model(TINY, 0, "cpu"), settings, ranks=ranks)
    load_pieces(learner, checkpoint_path(directory, 4))
    path = directory / "again" / "step-00000004"
    write_sharded(
        path,
        exchange=ranks,
        model=model_pieces(learner),
        training_state=training_state_pieces(learner),
        config=TINY,
    )
    return hashes(path) if ranks.is_first else None


def hashes(path):
    tables = {**read_tensors(path), **read_tensors(path, file=TRAINING_STATE)}
    return {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in sorted(tables.items())
    }


def faults(out):
    """A loss that is not a number on one rank is named; so is a model that ranks cannot share."""
    found = {}
    with world(2) as ranks:
        settings = TrainConfig(steps=6, batch_size=ROWS, warmup_steps=0)
        learner = Learner(build_model(MODEL, 0, "cpu"), settings, ranks=ranks)
        if ranks.rank == 1:  # a broken GPU, say
            learner.model.layers[0].register_forward_hook(lambda m, i, y: y * math.nan)
        try:
            take_step(learner, batch_of(1), 1, 1e-3)
        except ScratchLMError as error:
            found["not finite"] = str(error)
        said = ranks.gather("said", found)
        assert said[0] == said[1], said
    with world(2, tp=2) as ranks:
        for name, model in {"heads": MODEL.replace(num_kv_heads=1), "width": MODEL}.items():
            try:
                TensorParallel(build_model(model, 0, "cpu"), ranks)
            except ScratchLMError as error:
                found[name] = str(error)
        for name, more in {
            "ema": {"ema": 0.9},
            "muon": {"optimizer": "muon"},
            "cp × tp": {"cp": 2},
            "cp × fsdp": {"tp": 1, "cp": 2, "parallel": "fsdp"},
        }.items():
            chosen = TrainConfig(**{"batch_size": ROWS, "tp": 2, **more})
            try:
                Learner(build_model(MODEL, 0, "cpu"), chosen, ranks=ranks)
            except ScratchLMError as error:
                found[name] = str(error)
    write(out, found)


def tuning(out):
    """Two ranks learn an adapter as one process does that takes half the rows at a time."""
    folder, found = out.parent / "tuning", {}
    files = [folder / f"{name}.examples" for name in ("train", "val")]
    start = Start(build_model(TINY, 0, "cpu").state_dict(), (0,), folder, "base")
    settings = replace(SAVED, steps=6, eval_every=3, row_length=8)
    plan = Plan(TINY, settings, DataFiles(*files), start=folder, tuning=Tuning(LoRA(2)))
    with world(2) as ranks:
        if ranks.is_first:
            folder.mkdir()
            draw = random.Random(0)
            rows = [[draw.randrange(12) for _ in range(draw.randrange(3, 8))] for _ in range(40)]
            examples = [Example(ids, [False, *[True] * (len(ids) - 1)]) for ids in rows]
            write_examples(files[0], examples, "t")
            write_examples(files[1], examples[:9], "t")
        ranks.from_first(None)
        run_plan(folder / "two", plan, start=lambda: start, ranks=ranks)
        for name, wrong in {
            "pairs": replace(plan, tuning=Tuning(LoRA(2), packed=False, preference="dpo")),
            "fsdp": replace(plan, train=replace(settings, parallel="fsdp")),
        }.items():
            try:
                run_plan(folder / name, wrong, start=lambda: start, ranks=ranks)
            except ScratchLMError as error:
                found[name] = str(error)
    if PROCESS == 0:
        alone = replace(plan, train=replace(settings, micro_batch_size=ROWS // 2))
        run_plan(folder / "one", alone, start=lambda: start)
        for name in ("one", "two"):
            found[name] = [log_of(folder / name), hashes(checkpoint_path(folder / name, 6))]
    write(out, found)


def generation(out):
    """All ranks make the same calls, and get what one process gets."""
    found = {}
    for name in ("plain", "gpt2", "experts"):
        alone = build_model(MODELS[name], 0, "cpu").eval().requires_grad_(False)
        prompts = [[1, 2, 3], [5, 6, 7, 8, 9]]
        expected = [each.token_ids for each in generate(alone, prompts, max_new_tokens=9, seed=1)]
        with world(2, tp=2) as ranks:
            model = build_model(MODELS[name], 0, "cpu").eval().requires_grad_(False)
            TensorParallel(model, ranks)
            answers = [
                each.token_ids for each in generate(model, prompts, max_new_tokens=9, seed=1)
            ]
            found[name] = [expected, *ranks.gather("answers", answers)]
    write(out, found)


def write(out, found):
    if PROCESS == 0:
        out.write_text(json.dumps(found))


def be_process(number):
    """Fork a child that does the work; return its process id."""
    global PROCESS
    pid = os.fork()
    if pid:
        return pid
    PROCESS, status = number, 1
    try:
        main(sys.argv[1], Path(sys.argv[2]))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(work, out):
    torch.set_num_threads(1)
    match work:
        case "long-curves":
            curves(out, steps=50)
        case "resumes":
            resumes(out / "resumes.json")
        case "all":  # for four processes
            curves(out, 3, LONG_ONLY)
            resumes(out / "resumes.json", ((2,), (3,)))  # 3: the last has nothing to evaluate
            if PROCESS < 2:
                precision(out / "precision.json")
                shared_sequences(out / "cp.json")
                faults(out / "faults.json")
                generation(out / "generation.json")
                tuning(out / "tuning.json")


if __name__ == "__main__":
    left = {be_process(number) for number in range(COUNT)}
    while left:
        pid, status = os.wait()
        left.remove(pid)
        if status:
            os._exit(1)  # the others would wait for it
