"""Damage files from outside, thousands of times, and see that readers refuse them or take them.

    python tests/faults/mutations.py DIRECTORY COUNT SEED

A reader may succeed, or raise what is for the user (`cli/errors.py`), in one line; nothing else.
Each read has a time limit, and the process a bound on its memory. The last line printed is a JSON
summary.
"""

import json
import random
import resource
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from torch import Tensor

from checkpoint.ranks import cut_all, with_ranks
from rewriting import rewrite
from scratchlm import ModelConfig, TransformerLM
from scratchlm import checkpoint as ckpt
from scratchlm.cli.account_models import find_model
from scratchlm.cli.errors import is_for_the_user, one_line
from scratchlm.config import load_config, preset, to_json, to_toml
from scratchlm.config.lora import LoRA
from scratchlm.data import TokenFile, iter_documents
from scratchlm.data.conversations import Encoder, Example
from scratchlm.data.examples import read_examples, write_examples
from scratchlm.data.labelled import find_labels
from scratchlm.evaluation import read_task
from scratchlm.inference import load_model
from scratchlm.interop import read_hf
from scratchlm.interop.peft import Adapter, read_peft, write_peft
from scratchlm.tokenizer import load_tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate
from scratchlm.training import read_metrics, read_plan
from scratchlm.training.lora import adapter_tensors, apply_lora
from scratchlm.untrusted import read_json
from tokenizer.chat_templates import CHATML

SECONDS, MEMORY = 300, 3 << 30  # for one read; for the process
NUMBERS = [b"0", b"-1", b"1e308", b"NaN", b"2147483648", b"18446744073709551616", b"1" * 400]
PIECES = [
    b"null",
    b"[]",
    b"{}",
    b'""',
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\xff\xfe",
    b"\x00",
    b"\\ud800",
]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Change a file in one or a few places."""
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(out) + 1)
        kind = chance.randrange(7)
        if kind == 0 and out:  # a bit
            out[min(at, len(out) - 1)] ^= 1 << chance.randrange(8)
        elif kind == 1:  # an end
            del out[at:]
        elif kind == 2:  # a hole
            del out[at : at + chance.randrange(1, 64)]
        elif kind == 3:  # a repetition
            out[at:at] = out[max(0, at - chance.randrange(1, 64)) : at]
        elif kind == 4:  # another number in a number's place
            digits = [i for i in range(len(out)) if 48 <= out[i] <= 57]
            if digits:
                i = chance.choice(digits)
                out[i : i + 1] = chance.choice(NUMBERS)
        elif kind == 5:  # another value
            out[at : at + chance.randrange(8)] = chance.choice(PIECES)
        else:  # zeros, as a file system leaves after a power cut
            out[at : at + 512] = bytes(min(512, max(0, len(out) - at)))
    return bytes(out)


def readers(here: Path) -> dict[str, tuple[Path, object]]:
    """Name every kind of file, with who reads it."""
    step = here / "run" / "checkpoints" / "step-00000001"
    return {
        "checkpoint manifest.json": (
            step / "manifest.json",
            lambda p: ckpt.verify_checkpoint(step),
        ),
        "checkpoint config.json": (step / "config.json", load_config),
        "checkpoint model.safetensors": (step / "model.safetensors", lambda p: load_model(step)),
        "checkpoint pieces": (here / "pieces.json", lambda p: load_model(with_pieces(here, p))),
        "hf config.json": (here / "hf" / "config.json", lambda p: read_hf(here / "hf")),
        "hf model.safetensors": (
            here / "hf" / "model.safetensors",
            lambda p: dict(read_hf(here / "hf").tensors()),
        ),
        "GGUF": (here / "m.gguf", load_model),
        "GGUF quantised": (here / "q.gguf", load_model),
        "tokenizer.json": (here / "tokenizer.json", load_tokenizer),
        "vocab.json": (here / "gpt2" / "vocab.json", lambda p: load_tokenizer(here / "gpt2")),
        "merges.txt": (here / "gpt2" / "merges.txt", lambda p: load_tokenizer(here / "gpt2")),
        "config.toml": (here / "c.toml", load_config),
        "config.json": (here / "c.json", lambda p: find_model(str(p))),
        "run config.toml": (here / "run" / "config.toml", lambda p: read_plan(here / "run")),
        "metrics.jsonl": (here / "run" / "metrics.jsonl", lambda p: read_metrics(here / "run")),
        "token file sidecar": (here / "data" / "train.json", lambda p: read_tokens(here)),
        "token file": (here / "data" / "train.bin", lambda p: read_tokens(here)),
        "JSON Lines": (here / "text.jsonl", lambda p: list(iter_documents([p]))),
        "Parquet": (here / "text.parquet", lambda p: list(iter_documents([p]))),
        **{name: (here / name, partial(read, here)) for name, read in TUNING_READERS.items()},
    }


# What fine-tuning and evaluation read, by file.
TUNING_READERS = {
    "peft/adapter_config.json": lambda here, *_: read_peft(here / "peft", CONFIG),
    "peft/adapter_model.safetensors": lambda here, *_: read_peft(here / "peft", CONFIG),
    "named/tokenizer_config.json": lambda here, *_: render(here / "named"),
    "jinja/chat_template.jinja": lambda here, *_: render(here / "jinja"),
    "chats.jsonl": lambda here, *_: read_chats(here, "chats.jsonl"),
    "chats.parquet": lambda here, *_: read_chats(here, "chats.parquet"),
    "labelled.jsonl": lambda here, *_: find_labels(here / "labelled.jsonl"),
    "train.examples": lambda here, *_: read_examples(here / "train.examples"),
    "task.jsonl": lambda here, *_: read_task(here / "task.jsonl"),
}
CONFIG = ModelConfig(vocab_size=270, context_length=8, d_model=8, num_layers=1, num_heads=2)
CHAT = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "9 <b>"}]


def render(folder: Path) -> None:
    """Write a chat down with the template of a folder, if it still has one."""
    template = ChatTemplate.from_directory(folder)
    if template is not None:
        template.render(CHAT, add_generation_prompt=True, tools=[{"name": "f"}])


def read_chats(here: Path, name: str) -> None:
    tokenizer = load_tokenizer(here / "tokenizer.json")
    encoder = Encoder(tokenizer, ChatTemplate({"default": PLAIN}), 256)
    list(encoder.read(here / name, 500))


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"


def write_tuning_files(here: Path) -> None:
    """Write one good file of each kind that fine-tuning and evaluation read."""
    import pyarrow
    import pyarrow.parquet

    model, lora = TransformerLM(CONFIG), LoRA(2, targets=("q_proj", "w2"))
    apply_lora(model, lora)
    write_peft(here / "peft", CONFIG, Adapter(lora, adapter_tensors(model)))
    for name in ("named", "jinja"):
        (here / name).mkdir()
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": PLAIN}]
    table = {"chat_template": named, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (here / "named" / "tokenizer_config.json").write_text(json.dumps(table))
    (here / "jinja" / "chat_template.jinja").write_text(CHATML)
    records = [{"messages": CHAT}, {"messages": CHAT * 2}]
    (here / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), here / "chats.parquet")
    labelled = [{"text": "good", "label": 1}, {"text": "bad", "label": "no"}]
    (here / "labelled.jsonl").write_text("".join(json.dumps(one) + "\n" for one in labelled))
    write_examples(here / "train.examples", [Example([1, 2, 3], [False, True, True])] * 3, "t")
    case = {"context": "Rome is in", "choices": [" France", " Italy"], "answer": 1}
    (here / "task.jsonl").write_text(f"{json.dumps(case)}\n" * 2)


def read_tokens(here: Path) -> None:
    with TokenFile(here / "data" / "train") as tokens:
        tokens.validate()


def with_pieces(here: Path, pieces: Path) -> Path:
    """Return the sharded checkpoint with these pieces in its manifest, and a hash that is right."""
    path = here / "sharded"
    manifest = json.loads((path / ckpt.MANIFEST).read_text())
    manifest.pop("sha256")
    manifest["pieces"] = read_json(pieces, 1 << 20)
    manifest["sha256"] = ckpt.manifest_digest(manifest)
    (path / ckpt.MANIFEST).write_text(json.dumps(manifest))
    return path


def write_shards(here: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Write a checkpoint of two ranks, and its pieces in a file of their own."""

    def write(exchange: ckpt.Exchange) -> Path:
        pieces = cut_all(weights, exchange.rank, exchange.size)
        return ckpt.write_sharded(
            here / "sharded", exchange=exchange, model=pieces, training_state=None, config=config
        )

    (path, _) = with_ranks(2, write)
    (here / "pieces.json").write_text(json.dumps(ckpt.read_manifest(path)["pieces"]))


def make_world(here: Path) -> None:
    """Write one good file of each kind."""
    import pyarrow
    import pyarrow.parquet

    from scratchlm.interop import write_gguf, write_hf
    from scratchlm.tokenizer import train_bpe
    from scratchlm.tokenizer.bpe import Tokenizer
    from scratchlm.training import DataFiles, Plan, TrainConfig
    from scratchlm.training.plan import write_plan
    from training.tiny import write_data

    here.mkdir(parents=True)
    text = here / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    config = CONFIG
    Tokenizer(*train_bpe(text, 270, ["<|endoftext|>"]), ["<|endoftext|>"]).save(here)
    weights, file = TransformerLM(config).state_dict(), here / "tokenizer.json"
    ckpt.write_checkpoint(
        ckpt.checkpoint_path(here / "run", 1), model=weights, config=config, tokenizer_file=file
    )
    write_shards(here, config, weights)
    write_hf(here / "hf", config, weights, file)
    write_gguf(here / "m.gguf", config, weights, load_tokenizer(file), eos_token_ids=[256])
    wide = config.replace(d_model=32)
    write_gguf(here / "q.gguf", wide, TransformerLM(wide).state_dict(), quantize="q8_0")
    data = write_data(here / "data")
    plan = Plan(config, TrainConfig(), DataFiles(data / "train.bin", data / "val.bin", file))
    write_plan(here / "run", plan)
    clock = {"seconds": 0.1, "tokens_per_second": 5.0, "memory_bytes": 9}
    line = {"step": 1, "loss": 1.5, "lr": 0.1, "grad_norm": 1.0, "tokens": 9, "clock": clock}
    (here / "run" / "metrics.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    (here / "gpt2").mkdir()
    table = json.loads(file.read_text())["model"]
    (here / "gpt2" / "vocab.json").write_text(json.dumps(table["vocab"], ensure_ascii=False))
    merges = [m if isinstance(m, str) else " ".join(m) for m in table["merges"]]
    (here / "gpt2" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (here / "c.toml").write_text(to_toml(preset("qwen3-30b-a3b")))
    (here / "c.json").write_text(to_json(preset("qwen3-30b-a3b")))
    (here / "text.jsonl").write_text('{"text": "one document"}\n{"text": "another, größer"}\n')
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["one document", "another"]}), here / "text.parquet"
    )
    write_tuning_files(here)


def main(directory: Path, count: int, seed: int) -> None:
    here = directory / "here"
    make_world(here)
    for path, read in readers(here).values():
        read(path)  # each is good, and what is imported late is imported
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + (32 << 30), MEMORY + (32 << 30)))
    chance, summary = random.Random(seed), {"tried": 0, "refused": 0}
    kinds = readers(here)
    signal.signal(signal.SIGALRM, hung)
    before = peak_mb()
    for number in range(count):
        name = list(kinds)[number % len(kinds)]
        path, read = kinds[name]
        good = path.read_bytes()
        bad = mutate(good, chance)
        rewrite(path, bad)
        signal.alarm(SECONDS)
        try:
            read(path)
        except Exception as error:
            if not is_for_the_user(error) or "\n" in one_line(error):
                raise SystemExit(f"{name}, {number}: {error!r} for {bad[:300]!r}") from error
            summary["refused"] += 1
        finally:
            signal.alarm(0)
            rewrite(path, good)
        summary["tried"] += 1
    grown = peak_mb() - before
    assert grown < 1024, f"memory grew by {grown} MB"
    print(json.dumps({**summary, "grown_mb": grown}))


def peak_mb() -> int:
    """Return the most memory this process has had; getrusage counts the parent's, too."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


def hung(*_: object) -> None:
    raise SystemExit(f"a read took longer than {SECONDS} seconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
