"""`scratchlm train`: from text to a trained model and a report on it."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.terminal import say

if TYPE_CHECKING:
    import torch

    from scratchlm.cli.training_setup import TrainArgs
    from scratchlm.parallel.ranks import Ranks
    from scratchlm.training import Plan, TrainConfig
    from scratchlm.training.choosing import Machine
    from scratchlm.training.loop import RunTasks, Sampler

SECTIONS = ("model.", "train.", "data.")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("train")(train)


def train(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Text files or folders, a folder made by `prepare`, or a token file; then "
            "changes to the config, such as model.d_model=256 or train.lr=1e-3.",
            metavar="DATA... [KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("run"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, or begin it.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="MODEL",
            help="Start from a run, a checkpoint or a Hugging Face folder, with its tokenizer.",
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A model by name; see `scratchlm presets`.")
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="A model of about this many parameters, such as 10M.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A TOML file with the tables model, train and data, or some of them."),
    ] = None,
    ablation: Annotated[
        str | None,
        typer.Option(
            help="Change one thing: no-rope, no-norm, post-norm, silu or tied-embeddings."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Updates to make.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bpe (learnt from the text), char, or a tokenizer's folder.")
    ] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Of the tokenizer that is learnt.")] = None,
    val: Annotated[Path | None, typer.Option(help="A token file to validate on.")] = None,
    val_fraction: Annotated[
        float | None, typer.Option(help="How much of the text to hold out.", show_default="0.1")
    ] = None,
    separator: Annotated[
        str | None, typer.Option(help="Split text files into documents at this text.")
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(help="The text's field in JSON Lines or Parquet.", show_default="text"),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …, or auto.")] = "auto",
    gpus: Annotated[
        int | None,
        typer.Option(help="Train on this many GPUs of this machine, a process each.", min=1),
    ] = None,
    ops: Annotated[str, typer.Option(help="fast, or reference: the formulas as written.")] = "fast",
    accelerate: Annotated[
        bool | None,
        typer.Option(help="Use fused layers and kernels.", show_default="where available"),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="What samples begin with.", show_default="end of text")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A change to the config; may be repeated.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write RUN/tensorboard.")
    ] = False,
) -> None:
    """Train a model, from text or token files, and write a report.

    Ctrl-C saves and stops (exit status 130; SIGTERM 143); --resume goes on from there, bit for bit.
    A second Ctrl-C ends at once.
    """
    from scratchlm.cli.training_setup import TrainArgs, config_tables
    from scratchlm.parallel.launch import launched_rank, relaunch, without_gpus
    from scratchlm.training.settings import parse_overrides

    words = data or []
    changes = [word for word in words if word.startswith(SECTIONS) and "=" in word]
    for word in words:
        if "=" in word and word not in changes and not Path(word).exists():
            raise ValueError(
                f"{word}: no such file; a change to the config begins with "
                f"{', '.join(SECTIONS[:-1])} or {SECTIONS[-1]}, as in train.lr=1e-3"
            )
    overrides = parse_overrides(with_kinds([*changes, *(set_ or [])]))
    set_by_option(overrides.setdefault("train", {}), steps=steps, accelerate=accelerate)
    args = TrainArgs(
        data=[word for word in words if word not in changes],
        out=out,
        preset=preset,
        params=params,
        config=config,
        ablation=ablation,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        val=val,
        val_fraction=val_fraction,
        separator=separator,
        text_field=field,
        start=start,
        overrides=overrides,
    )
    if gpus is not None and launched_rank() is None:
        shared = rank_settings(out, config_tables(args)).backend == "gloo"
        raise typer.Exit(relaunch(gpus, without_gpus(sys.argv[1:]), shared=shared))
    with contextlib.ExitStack() as stack:
        ranks = None
        if launched_rank() is not None:
            ranks = stack.enter_context(join(out, config_tables(args), device))
        status = _train(args, resume, device, ops, prompt, tensorboard, ranks)
    if status:
        raise typer.Exit(status)


def with_kinds(changes: list[str]) -> list[str]:
    """Read model.ffn=moe as model.ffn.type=moe, so that the part's own keys go beside it."""
    kind = r"^\s*(model\.(?:positions|ffn|norm))\s*=(?!\s*\{)"
    return [re.sub(kind, r"\1.type=", change) for change in changes]


def set_by_option(table: dict[str, Any], **options: Any) -> None:
    """Put what options say into a table of settings, which must not say it too."""
    for name, value in options.items():
        if value is not None and name in table:
            raise ValueError(f"give --{name} or train.{name}, not both")
        if value is not None:
            table[name] = value


def join(
    out: Path, tables: dict[str, Any], device: str
) -> contextlib.AbstractContextManager[Ranks]:
    """Join the processes that `torchrun` has started for a run."""
    from scratchlm.parallel.ranks import join_ranks

    settings = rank_settings(out, tables)
    where = choose_device(device).type
    return join_ranks(where, settings.tp, settings.rank_timeout, settings.backend, settings.cp)


def rank_settings(out: Path, tables: dict[str, Any]) -> TrainConfig:
    """Return what must be known of a run's settings before there are ranks."""
    from scratchlm.training import TrainConfig, has_run, read_plan

    begun = read_plan(out).train.to_dict() if has_run(out) else {}
    asked = tables.get("train", {})
    chosen = {name: {**begun, **asked}.get(name) for name in ("tp", "backend", "rank_timeout")}
    return TrainConfig.from_dict({k: value for k, value in chosen.items() if value is not None})


def _train(
    args: TrainArgs,
    resume: bool,
    device: str,
    ops: str,
    prompt: str | None,
    tensorboard: bool,
    ranks: Ranks | None,
) -> int:
    from scratchlm.cli.training_checks import check_place, leaving_nothing, name_unused
    from scratchlm.cli.training_console import TensorBoard
    from scratchlm.cli.training_setup import config_tables, continue_plan, make_plan
    from scratchlm.errors import ScratchLMError
    from scratchlm.ops import OPS
    from scratchlm.training import has_run
    from scratchlm.training.checks import check_overrides

    if tensorboard:
        TensorBoard.require()
    if ops not in OPS:
        raise ValueError(f"--ops must be one of {', '.join(OPS)}; got {ops!r}")
    where = choose_device(device) if ranks is None else ranks.device

    def make() -> tuple[Machine, Plan]:
        begun = has_run(args.out)
        check_place(args.out, resume)
        given = args.overrides if begun else config_tables(args)
        check_overrides(given.get("train", {}), where.type, ranks)
        machine = look_at_machine(where)
        plan = (continue_plan if begun else make_plan)(args, machine, say_progress)
        if plan.tuning is not None:
            raise ScratchLMError(
                f"{args.out} is a run of fine-tuning; `scratchlm finetune` goes on with it"
            )
        name_unused(args.overrides.get("train", {}), plan, ranks, say_progress)
        return machine, plan

    is_first = ranks is None or ranks.is_first
    with leaving_nothing(args.out) if is_first else contextlib.nullcontext():
        machine, plan = plan_for_all(args.out, make, ranks)
        sample, bytes_per_id = _text_tools(plan, prompt)
        return carry_out(
            "train",
            args.out,
            plan,
            machine,
            resume=resume,
            device=where,
            ops=ops,
            sample=sample,
            bytes_per_id=bytes_per_id,
            tensorboard=tensorboard and is_first,
            ranks=ranks,
        )


def plan_for_all(
    out: Path, make: Callable[[], tuple[Machine, Plan]], ranks: Ranks | None
) -> tuple[Machine, Plan]:
    """Look at the machine and the data once, on the first rank, and tell the others."""
    from scratchlm.training.choosing import Machine
    from scratchlm.training.plan import plan_of, plan_tables

    if ranks is None:
        return make()
    told = None
    if ranks.is_first:
        machine, plan = make()
        told = [asdict(machine), plan_tables(out, plan)]
    told = ranks.from_first(told)
    return Machine(**told[0]), plan_of(out, told[1])


def carry_out(
    command: str,
    out: Path,
    plan: Plan,
    machine: Machine,
    *,
    resume: bool,
    device: torch.device,
    ops: str,
    sample: Sampler | None,
    bytes_per_id: torch.Tensor | None,
    tensorboard: bool,
    run_tasks: RunTasks | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Train a plan before the user's eyes, and write the report; return the exit status.

    Of several ranks the first one speaks.
    """
    from scratchlm.cli.attention_picture import attention_section
    from scratchlm.cli.starting import load_start, template_of
    from scratchlm.cli.training_console import TensorBoard, TrainingConsole
    from scratchlm.errors import ScratchLMError
    from scratchlm.training import Watcher, run_plan, watch_signals, write_report

    settings = plan.train.resolved(device.type)
    console = TrainingConsole(settings.steps, settings.tokens_per_step(plan.model))
    speaks = ranks is None or ranks.is_first
    watchers: list[Watcher] = [console] if speaks else []
    board = TensorBoard(out / "tensorboard") if tensorboard else None
    run_tasks = run_tasks or _task_runner(plan)
    with watch_signals(console.stop_notice if speaks else "") as stop:
        with console, contextlib.ExitStack() as at_the_end:
            if board is not None:
                watchers.append(at_the_end.enter_context(contextlib.closing(board)))

            def begin(learner: Any, run: Any, _: object) -> None:
                if speaks:
                    _announce(plan, learner, run.progress.step)
                console.best_loss = run.progress.best_loss
                if board is not None:
                    board.begin(run.progress.step)

            outcome = run_plan(
                out,
                plan,
                resume=resume,
                device=device,
                ops=ops,
                bytes_per_id=bytes_per_id,
                sample=sample,
                run_tasks=run_tasks,
                watchers=tuple(watchers),
                on_begin=begin,
                warn=(lambda message: say_progress(f"warning: {message}"))
                if speaks
                else (lambda message: None),
                should_stop=stop,
                matmul_rate=machine.matmul_rate,
                start=None if plan.start is None else lambda: load_start(plan),
                chat_template=template_of(plan),
                ranks=ranks,
            )
        if not speaks:
            return stop.exit_status if outcome.ended == "interrupted" else 0
        if outcome.ended == "interrupted":
            step = outcome.progress.step
            where_now = f"at step {step:,} and saved" if step else "before the first step"
            say_progress(f"stopped {where_now}; `scratchlm {command} --resume --out {out}` goes on")
            return stop.exit_status
    best = outcome.progress.best_loss
    held_out = "" if best is None else f"; best held-out loss {best:.4f}"
    say_progress(f"{outcome.ended} at step {outcome.progress.step:,}{held_out}")
    has_head = plan.tuning is not None and plan.tuning.head is not None
    users = "predict and export" if has_head else "evaluate, generate and export"
    if outcome.progress.best_step not in (None, outcome.progress.step):
        say_progress(
            f"warning: the held-out loss has risen since step {outcome.progress.best_step:,}, the "
            f"checkpoint that {users} take; fewer steps, a smaller model or train.patience would "
            "save the rest"
        )
    heads = None if has_head else attention_section(out)
    typed = shlex.join(["scratchlm", *sys.argv[1:]])
    try:
        say(write_report(out, sections=[heads] if heads else [], command=typed))
    except ScratchLMError as error:  # the model is trained and saved all the same
        say_progress(f"warning: no report was written: {error}")
    return 0


def say_progress(text: str) -> None:
    """Tell the user how it goes, on stderr."""
    say(text, err=True)


def choose_device(name: str) -> torch.device:
    """Return the device of that name, from now on the current one; auto is a GPU if there is one.

    Kernels are launched, and steps recorded, on the current device, wherever their tensors lie.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", name):
        raise ValueError(f"--device must be cpu, cuda, cuda:N or auto; got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: there is no CUDA device here")
    if device.type == "cuda" and device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            raise ValueError(f"--device {name}: the CUDA devices here end at cuda:{count - 1}")
        torch.cuda.set_device(device)
    return device


def look_at_machine(device: torch.device) -> Machine:
    """Measure what the choice of a model depends on."""
    import torch

    from scratchlm.training import measure_matmul_rate
    from scratchlm.training.choosing import Machine

    is_gpu = device.type == "cuda"
    rate = measure_matmul_rate(device, "bf16" if is_gpu else "fp32")
    memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    return Machine(rate, is_gpu, memory)


def _announce(plan: Plan, learner: Any, step: int) -> None:
    from scratchlm.accounting import count_parameters
    from scratchlm.cli.starting import start_folder
    from scratchlm.ops import native
    from scratchlm.ops.attention import TOKENS_FROM
    from scratchlm.ops.fast import has_fast_attention

    model, settings = plan.model, learner.settings
    say_progress(
        f"model: {count_parameters(model).unique:,} parameters, {model.num_layers} layers, "
        f"d_model {model.d_model}, {model.num_heads} heads, context {model.context_length}, "
        f"vocabulary {model.vocab_size:,}"
    )
    say_progress(
        f"training: {settings.steps:,} steps of {settings.tokens_per_step(model):,} tokens, "
        f"{epochs(plan):.3g} epochs, on {_where(learner)}, {settings.precision}"
        + (f"; starting from {start_folder(plan.start)}" if plan.start and not step else "")
        + (f"; going on from step {step:,}" if step else "")
    )
    on_cpu = learner.device.type == "cpu" and settings.precision == "fp32"
    fast = has_fast_attention(learner.model.ops)
    if on_cpu and fast and model.context_length >= TOKENS_FROM:
        reason = native.why_not()
        if reason is not None:
            say_progress(f"attention: torch's, which is slower; ours is not available: {reason}")


def _where(learner: Any) -> str:
    """Say on what a model learns: a device, or ranks and how it lies over them."""
    ranks, settings = learner.ranks, learner.settings
    if ranks is None:
        return str(learner.device)
    tp = f" × tp {ranks.tensor_size}" if ranks.tensor_size > 1 else ""
    tp += f" × cp {ranks.context_size}" if ranks.context_size > 1 else ""
    return f"{ranks.size} ranks ({settings.parallel or 'zero1'}{tp}, {ranks.device.type})"


def epochs(plan: Plan) -> float:
    """Return how often a run reads its data."""
    from scratchlm.data.examples import Rows, read_examples
    from scratchlm.data.token_file import read_sidecar

    if plan.tuning is not None:
        examples = read_examples(plan.data.train)
        length, packed = plan.train.row_tokens(plan.model), plan.tuning.packed
        rows = len(examples) if plan.tuning.preference else None
        rows = rows or len(Rows(examples, length, packed=packed).rows)
        return plan.train.steps * plan.train.batch_size / rows
    tokens = plan.train.steps * plan.train.tokens_per_step(plan.model)
    return tokens / max(1, read_sidecar(plan.data.train).count)


def _text_tools(plan: Plan, prompt: str | None) -> tuple[Sampler | None, torch.Tensor | None]:
    """Make what needs the tokenizer: samples, and the bytes of each id."""
    from scratchlm.tokenizer import load_tokenizer

    if plan.data.tokenizer is None:
        return None, None
    tokenizer = load_tokenizer(plan.data.tokenizer)
    return make_sampler(plan, tokenizer, prompt), bytes_of_ids(tokenizer, plan.model.vocab_size)


def _task_runner(plan: Plan) -> RunTasks | None:
    """Read the tasks of a run, before anything is trained; return what runs them."""
    if not plan.train.task_files:
        return None
    if plan.data.tokenizer is None:
        raise ValueError("train.tasks needs the tokenizer of the data; there is none")
    from scratchlm.evaluation import Evaluator, read_task
    from scratchlm.inference import Loaded
    from scratchlm.inference.prompts import default_eos_ids
    from scratchlm.tokenizer import load_tokenizer
    from scratchlm.training.metrics import finite

    tasks = [read_task(path) for path in plan.train.task_files]
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ValueError(f"train.tasks must be files of different names; got {', '.join(names)}")
    tokenizer, source = load_tokenizer(plan.data.tokenizer), plan.data.tokenizer
    ends = default_eos_ids(tokenizer)

    def run_tasks(model: Any) -> dict[str, dict[str, dict[str, float | None]]]:
        evaluator = Evaluator(Loaded(model, tokenizer, plan.model, source, ends))
        found = {}
        for task in tasks:
            figures = evaluator.run(task).to_dict()["metrics"]
            found[task.name] = {
                name: {end: finite(value) for end, value in figure.items()}
                for name, figure in figures.items()
            }
        return found

    return run_tasks


def bytes_of_ids(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Return how many bytes of text each id stands for; special tokens stand for none."""
    import torch

    table = torch.zeros(vocab_size, dtype=torch.int64)
    special = set(tokenizer.special_tokens.values())
    for token, text in tokenizer.vocab.items():
        if token < vocab_size and token not in special:
            table[token] = len(text)
    return table


def make_sampler(plan: Plan, tokenizer: Any, prompt: str | None, length: int = 80) -> Sampler:
    """Return what writes a sample: the same one for the same weights and step."""
    from scratchlm.inference import Sampling, generate
    from scratchlm.inference.prompts import default_eos_ids

    ids = tokenizer.encode(prompt) if prompt else list(default_eos_ids(tokenizer))[:1]
    context = plan.model.context_length
    ids = (ids or [0])[-context // 2 :]

    def sample(model: Any, step: int) -> list[str]:
        found = generate(
            model,
            [ids],
            tokenizer=tokenizer,
            max_new_tokens=min(length, context - len(ids)),
            sampling=Sampling(temperature=0.8),
            seed=plan.train.seed + step,
        )
        return [(prompt or "") + found[0].text]

    return sample
