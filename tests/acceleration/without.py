"""Run the public functions and the command line, and print what they gave, as JSON.

    python without.py DIRECTORY [block]

With `block`, `scratchlm.accelerate` cannot be imported; its files may also simply be missing.
"""

import contextlib
import importlib
import io
import json
import pkgutil
import sys
import traceback
from pathlib import Path

ROOM = "scratchlm.accelerate"


class Blocked:
    """Answer every import of the room as if it were not there."""

    def find_spec(self, name, path=None, target=None):
        if name == ROOM or name.startswith(ROOM + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block():
    sys.meta_path.insert(0, Blocked())
    sys.modules[ROOM] = None


def import_all():
    """Import every module of the library but that room's; return those that cannot be."""
    import scratchlm

    names = [m.name for m in pkgutil.walk_packages(scratchlm.__path__, "scratchlm.")]
    failed = []
    for name in (name for name in names if not name.startswith(ROOM + ".") and name != ROOM):
        try:
            importlib.import_module(name)
        except ImportError:
            failed.append(name)
    return failed


def command(*words):
    """Run one command line; return its status, stdout and stderr."""
    from scratchlm import cli

    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["scratchlm", *map(str, words)]
    status = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as ended:
            status = ended.code or 0
        except Exception:  # a bug shows where it is
            status = 1
            traceback.print_exc()
    return {"status": status, "out": out.getvalue(), "err": err.getvalue()}


def use_functions():
    """Train a few steps, evaluate, generate, search: by the functions a program calls."""
    import torch

    from scratchlm import TransformerLM
    from scratchlm.inference import GREEDY, beam_search, generate
    from scratchlm.training import Learner, TrainConfig
    from tiny_models import FAMILIES

    found = {}
    for name, config in FAMILIES.items():
        model = TransformerLM(config)
        model.reset_parameters(torch.Generator().manual_seed(0))
        learner = Learner(model, TrainConfig(steps=2, batch_size=2, lr=1e-2))
        ids = torch.arange(18).reshape(2, 9) % config.vocab_size
        losses = []
        for _ in range(2):
            loss = learner.loss(ids, ids.roll(-1, 1))
            loss.backward()
            for optimizer in learner.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        rows = generate(model, [[1, 2, 3], [4]], max_new_tokens=4, sampling=GREEDY, eos_ids=())
        beams = beam_search(model, [1, 2, 3], max_new_tokens=3, num_beams=2, eos_ids=())
        found[name] = {
            "losses": losses,
            "generated": [row.token_ids for row in rows],
            "beams": [beam.token_ids for beam in beams],
        }
    return found


SMALL = ("model.d_model=16", "model.num_heads=2", "model.num_layers=1", "model.context_length=8")


def use_commands(directory):
    """Go from text to a model, its evaluation, a continuation, an export and back."""
    text, run, out = directory / "text.txt", directory / "run", directory / "hf"
    text.write_text("the cat sat on the mat and the dog ran to the hill. " * 60)
    train = ("train", text, "--vocab-size", 270, *SMALL)
    generate = ("generate", "-p", "the", "--max-new-tokens", 3, "--temperature", 0)
    return {
        "train": command(*train, "--steps", 12, "--out", run),
        "resume": command("train", "--resume", "--out", run, "train.steps=14"),
        "evaluate": command("evaluate", run, run / "data", "--json"),
        "generate": command(*generate, run),
        "export": command("export", run, out),
        "generate from the export": command(*generate, out),
        "import": command("import", out, directory / "back"),
        "account": command("account", "gpt2-xl"),
        "verify": command("account", "gpt2-xl", "--verify"),
        "asked for": command(*train, "--steps", 2, "--out", run / "2", "train.accelerate=true"),
        "left out": command(*train, "--steps", 2, "--out", run / "3", "train.accelerate=false"),
        "explain": command("explain", directory / "back"),
    }


def main():
    if "block" in sys.argv:
        block()
    directory = Path(sys.argv[1])
    found = {"functions": use_functions(), "commands": use_commands(directory)}
    found["cannot be imported"] = import_all()
    found["room"] = sorted(name for name, m in sys.modules.items() if name.startswith(ROOM) and m)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
