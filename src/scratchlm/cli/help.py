"""`--help`: options in groups, with examples, for a terminal of 80 columns; no name is ever cut."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

WIDTH = 24  # of the column of names; a longer name has the line for itself
METAVARS = {"integer": "N", "int": "N", "float": "X", "text": "TEXT", "str": "TEXT", "path": "PATH"}

COMMANDS = {
    "Begin": ("demo", "presets", "config"),
    "Train": ("tokenizer", "prepare", "train", "finetune", "evaluate", "compare"),
    "Use": ("generate", "chat", "next", "predict", "serve"),
    "Look inside and learn": ("inspect", "check"),
    "Know what it costs and what runs": ("account", "explain"),
    "Exchange": ("import", "export", "merge", "quantize"),
}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "seed"),
)
_MEANS = ("checkpoint", "device", "dtype", "accelerate", "ops", "cache")
GROUPS: dict[str, dict[str, Sequence[str]]] = {
    "train": {
        "The run": ("out", "resume", "steps", "set_", "config"),
        "The model": ("start", "preset", "params", "ablation"),
        "The data": ("tokenizer", "vocab_size", "val", "val_fraction", "separator", "field"),
        "What is shown": ("prompt", "tensorboard"),
        "The machine": (*_MEANS, "gpus"),
    },
    "evaluate": {
        "Held-out text": ("context_length", "batch_size"),
        "lm-evaluation-harness": (
            *("lm_eval", "include_path", "num_fewshot", "limit", "chat_template"),
        ),
        "Output": ("as_json", "plot", "cases"),
        "The model": _MEANS,
    },
    "finetune": {
        "The run": ("out", "resume", "epochs", "steps"),
        "The adapter": (
            *("full", "rank", "alpha", "dropout", "targets", "rslora", "dora", "quantize"),
        ),
        "The data": ("pack", "val", "val_fraction", "preference", "beta", "task"),
        "What is shown": ("tensorboard",),
        "The machine": ("device", "gpus", "accelerate"),
    },
    "generate": {
        "What to write": ("prompt", "max_new_tokens", "num_samples", "stop", "ignore_end"),
        "Sampling": _SAMPLING,
        "Search": ("beam", "length_penalty"),
        "Speculation": ("draft", "speculate"),
        "Output": ("as_json", "logprobs"),
        "The model": (*_MEANS, "kv_cache", "past_context"),
    },
    "chat": {
        "The conversation": ("system", "format_", "max_new_tokens"),
        "Sampling": _SAMPLING,
        "The model": _MEANS,
    },
    "serve": {
        "Where it listens": ("host", "port", "api_key", "allow_host", "allow_origin"),
        "What it serves": ("name", "chat_format", "checkpoint"),
        "How much at once": ("max_rows", "max_queue", "memory", "drain_seconds", "log_requests"),
        "The machine": ("device", "dtype", "accelerate", "exact"),
    },
    "account": {
        "What is computed": (
            *("phase", "batch", "context", "prompt", "new_tokens", "cache"),
            *("documents", "convention"),
        ),
        "How": (
            *("dtype", "quantize", "optimizer", "checkpointing", "attention", "loss"),
            *("accumulate", "lora", "targets"),
        ),
        "Where, and for how much": ("gpu", "tokens", "mfu", "price"),
        "On several GPUs": ("gpus", "parallel", "tp", "micro_batches", "link", "plans"),
        "Several models": ("compare", "sweep", "fits"),
        "Output": ("verify", "legend", "json", "csv", "plot", "html"),
    },
}
EXAMPLES: dict[str, Sequence[str]] = {
    "demo": ("scratchlm demo --out runs/demo",),
    "train": (
        "scratchlm train my.txt --out runs/mine",
        "scratchlm train my.txt --out runs/mine --resume",
        "scratchlm train my.txt --params 5M train.lr=1e-3 model.num_layers=6",
        "scratchlm train my.txt --from runs/mine --out runs/tuned",
        "scratchlm config --train",
    ),
    "finetune": (
        "scratchlm finetune runs/mine chats.jsonl --out runs/tuned",
        "scratchlm finetune path/to/Qwen3-0.6B chats.jsonl --rank 32 --out runs/tuned",
        "scratchlm finetune runs/tuned pairs.jsonl --preference dpo --out runs/liked",
        "scratchlm finetune runs/mine rated.jsonl --task classification --out reviews",
        "scratchlm finetune --resume --out runs/tuned",
    ),
    "evaluate": (
        "scratchlm evaluate runs/mine held-out.txt",
        "scratchlm evaluate runs/mine held-out.txt --checkpoint last",
        "scratchlm evaluate runs/mine runs/other capitals.jsonl --plot tasks.png",
        "scratchlm evaluate runs/mine --lm-eval my_task --include-path tasks",
    ),
    "predict": (
        'scratchlm predict runs/reviews --text "I liked it"',
        "scratchlm predict runs/reviews reviews.jsonl --json",
    ),
    "compare": ("scratchlm compare runs/mine runs/other",),
    "generate": (
        'scratchlm generate runs/mine --prompt "Once upon a time"',
        'scratchlm generate runs/mine -p "Once" --num-samples 3 --seed 1',
        'scratchlm generate runs/mine -p "Once" --temperature 0 --json',
    ),
    "chat": ("scratchlm chat runs/mine --format plain",),
    "next": (
        'scratchlm next runs/mine --prompt "The cat sat on the"',
        'scratchlm next runs/mine --prompt "The cat sat on the" --attention 0.1',
    ),
    "inspect": (
        'scratchlm inspect runs/mine -p "The cat sat on the" --lens',
        'scratchlm inspect runs/mine -p "The cat sat" --attention 0.1 --html page.html',
        'scratchlm inspect runs/mine -p "The cat sat on the" --attribute " mat"',
        'scratchlm inspect runs/mine -p "The cat" --ablate layers.1.attn.heads:3',
    ),
    "check": (
        "scratchlm check --init my_ops.py",
        "scratchlm check my_ops.py softmax attention --hint",
        "scratchlm check my_ops.py --train",
    ),
    "explain": ("scratchlm explain gpt2 --batch 8", "scratchlm explain runs/mine --no-training"),
    "serve": (
        "scratchlm serve runs/mine",
        "scratchlm serve path/to/Qwen3-0.6B --port 9000 --max-rows 16",
    ),
    "account": (
        "scratchlm account gpt2-xl --phase training --batch 8",
        "scratchlm account runs/mine",
        "scratchlm account --compare gpt2 llama3.2-1b",
        "scratchlm account gpt2-xl --fits 24GiB",
        "scratchlm account llama3-8b --gpus 64 --parallel fsdp --tp 4",
        "scratchlm account llama3.2-1b --lora 16 --batch 8 --context 1024",
    ),
    "quantize": ("scratchlm quantize runs/mine --to q4_k --out small",),
    "prepare": ("scratchlm prepare corpus/ --tokenizer tok --out data",),
    "config": ("scratchlm config gpt2", "scratchlm config --train"),
    "import": (
        "scratchlm import path/to/Llama-3.2-1B imported",
        "scratchlm import model.gguf imported",
    ),
    "export": (
        "scratchlm export runs/mine to-transformers",
        "scratchlm export runs/mine mine.gguf --quantize q8_0",
        "scratchlm export runs/tuned to-peft --adapter",
    ),
    "merge": ("scratchlm merge runs/tuned merged",),
    "tokenizer train": ("scratchlm tokenizer train corpus.txt --vocab-size 8192 --out tok",),
    "tokenizer encode": ('scratchlm tokenizer encode --tokenizer tok "Hello, wörld!"',),
    "tokenizer decode": ("scratchlm tokenizer decode --tokenizer tok 72 101 108",),
    "tokenizer show": ('scratchlm tokenizer show --tokenizer tok "Hello, wörld!"',),
}


class App(typer.Typer):
    """Commands whose help is ours."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=HelpGroup, add_completion=False, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Add a command, as `typer.Typer` does."""
        return super().command(name, **{"cls": HelpCommand, **options})


class HelpCommand(TyperCommand):
    """A command with its options in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, arguments, options in groups, examples."""
        formatter.write("\n".join(_command_help(self, ctx)) + "\n")

    def invoke(self, ctx: Any) -> Any:
        """Run the command; `main` says that Ctrl-C stopped it, where Typer would say nothing."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort() from None


class HelpGroup(TyperGroup):
    """A group of commands, in groups."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, description, commands, options."""
        lines = [f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]...", ""]
        lines += [*_paragraphs(self.help or ""), ""]
        listed = {name for names in COMMANDS.values() for name in names}
        groups = dict(COMMANDS) if ctx.parent is None else {}
        others = [name for name in self.commands if name not in listed or not groups]
        for title, names in [*groups.items(), ("Commands" if not groups else "More", others)]:
            rows = [(n, _first_sentence(self.commands[n])) for n in names if n in self.commands]
            lines += _section(title, rows)
        lines += _section("Options", [_option_row(p, ctx) for p in self.get_params(ctx)])
        lines.append(f"{ctx.command_path} COMMAND --help says the rest.")
        formatter.write("\n".join(lines) + "\n")


def _command_help(command: Any, ctx: Any) -> list[str]:
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    options = {param.name: param for param in params if param.param_type_name == "option"}
    names = [_argument_name(argument, ctx) for argument in arguments]
    lines = [" ".join(["Usage:", ctx.command_path, *names, "[OPTIONS]"]), ""]
    lines += [*_paragraphs(command.help or ""), ""]
    lines += _section("Arguments", [(_metavar(a, ctx), _help(a, ctx)) for a in arguments])
    path = ctx.command_path.partition(" ")[2]
    for title, members in GROUPS.get(path, {}).items():
        found = [options.pop(name) for name in members if name in options]
        lines += _section(title, [_option_row(param, ctx) for param in found])
    title = "Other options" if path in GROUPS else "Options"
    lines += _section(title, [_option_row(param, ctx) for param in options.values()])
    if path in EXAMPLES:
        lines += ["Examples:", *(f"  {line}" for line in EXAMPLES[path]), ""]
    if command.epilog:
        lines += [*_paragraphs(command.epilog), ""]
    return lines[:-1]


def _section(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    lines = two_columns(rows, indent=2)
    return [f"{title}:", *lines, ""] if lines else []


def two_columns(rows: Iterable[tuple[str, str]], indent: int) -> list[str]:
    """Write names with what they are; a long name has a line for itself."""
    lines: list[str] = []
    room = _columns() - WIDTH - indent
    for name, text in rows:
        wrapped = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        if len(name) > WIDTH - 2:
            lines.append(" " * indent + name)
        else:
            lines.append(f"{'':<{indent}}{name:<{WIDTH}}{wrapped.pop(0)}".rstrip())
        lines += [" " * (WIDTH + indent) + line for line in wrapped]
    return lines


def _columns() -> int:
    return min(max(shutil.get_terminal_size((80, 24)).columns, 60), 100)


def _paragraphs(text: str) -> list[str]:
    blocks = [" ".join(block.split()) for block in text.replace("\b", "").split("\n\n")]
    wrapped = ["\n".join(textwrap.wrap(b, _columns(), break_on_hyphens=False)) for b in blocks if b]
    return "\n\n".join(wrapped).splitlines()


def _first_sentence(command: Any) -> str:
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _metavar(param: Any, ctx: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    if param.param_type_name == "argument":
        return str(param.name).upper().rstrip("_")
    kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(member.value for member in kind)
    older = getattr(getattr(param, "type", None), "name", "text")  # of Typer before its own types
    return METAVARS.get(getattr(kind, "__name__", older).lower().partition(" ")[0], "TEXT")


def _argument_name(argument: Any, ctx: Any) -> str:
    name = _metavar(argument, ctx)
    name = name if "..." in name or argument.nargs != -1 else f"{name}..."
    return name if argument.required else f"[{name}]"


def _option_row(param: Any, ctx: Any) -> tuple[str, str]:
    names = ", ".join(sorted(param.opts, key=len))
    if param.secondary_opts:
        names += " / " + ", ".join(param.secondary_opts)
    elif not (param.is_flag or getattr(param, "count", False)):
        names += f" {_metavar(param, ctx)}"
    return names, _help(param, ctx)


def _help(param: Any, ctx: Any) -> str:
    """Return a parameter's help and its default."""
    text, shown, default = getattr(param, "help", None) or "", param.show_default, param.default
    if isinstance(shown, str):
        return f"{text} Default: {shown}."
    if param.required and param.param_type_name == "option":
        return f"{text} Required."
    plain = isinstance(default, (bool, int, float, str)) or type(default).__module__ == "pathlib"
    if not shown or not plain or default is False or default == "":
        return text
    if isinstance(default, bool):
        return f"{text} Default: yes." if param.secondary_opts else text
    return f"{text} Default: {default}."
