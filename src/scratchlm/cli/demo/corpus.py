"""The demo's data on disk: corpus, tokenizer, token files; and its entropy floor."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from scratchlm.checkpoint import find_checkpoints, step_of
from scratchlm.cli.demo import SENTENCES, STEPS
from scratchlm.cli.training_checks import check_folder
from scratchlm.config import preset
from scratchlm.data import TokenFile, prepare
from scratchlm.data.stories import END, Entropy, StorySource, to_text, to_words
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer import Tokenizer, load_tokenizer, train_bpe
from scratchlm.training import DataFiles, Plan, TrainConfig, has_run, hold_run, read_plan

if TYPE_CHECKING:
    from scratchlm.cli.demo.trial import Forecast

VOCAB_SIZE = 1_024  # more than these stories need: every word becomes one token
VAL_FRACTION = 0.05

SOURCE = StorySource()  # caches its probabilities

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoArgs:
    """The arguments of the demo."""

    out: Path
    seed: int
    steps: int
    sentences: int

    def command(self) -> str:
        """Return the command line; options at their default are omitted."""
        defaults = {"seed": 0, "steps": STEPS, "sentences": SENTENCES}
        values = {name: getattr(self, name) for name in defaults}
        changed = [
            f" --{name} {values[name]}" for name in defaults if values[name] != defaults[name]
        ]
        return f"scratchlm demo --out {self.out}" + "".join(changed)

    def settings(self) -> TrainConfig:
        """Return how the model is trained."""
        return TrainConfig(
            steps=self.steps,
            batch_size=32,
            seed=self.seed,
            lr=6e-3,
            min_lr=1e-4,
            weight_decay=0.1,
            rows="documents",
            ema=min(0.99, 1 - 10 / max(11, self.steps)),
            precision="fp32",
            eval_every=max(5, self.steps // 15),
        )


@dataclass
class World:
    """The source and what was made from it."""

    out: Path
    source: StorySource
    tokenizer: Tokenizer
    plan: Plan
    entropy: Entropy
    floor: float  # nats per token: the loss of the true distribution on the held-out text
    held_out: list[list[str]] = field(repr=False)  # stories, as words
    begun: bool = False
    finished: bool = False
    forecast: Forecast | None = None

    def start_message(self, step: int) -> str:
        """Describe whether a run starts, resumes, or is finished."""
        if step >= self.plan.train.steps:
            return f"trained already; {self.out} is shown as it is (--fresh starts clean)"
        if self.begun:
            return f"going on with the demo in {self.out} from step {step:,}"
        return f"a new demo in {self.out}"


def make_world(args: DemoArgs, say: Say) -> World:
    """Write corpus, tokenizer and token files, or reuse those of an unfinished demo."""
    check_folder(args.out)
    begun = has_run(args.out)
    if begun:
        plan = _resumed_plan(args)
    else:
        plan = new_plan(args, say)
    assert plan.data.tokenizer is not None
    assert plan.data.val is not None
    tokenizer = load_tokenizer(plan.data.tokenizer)
    assert isinstance(tokenizer, Tokenizer)
    held_out = read_stories(plan.data.val, tokenizer)
    floor = entropy_floor(SOURCE, tokenizer, held_out)
    entropy = SOURCE.entropy(lambda text: len(tokenizer.encode(text)))
    say(
        f"entropy of the source: {entropy.nats:.2f} nats in a story of {entropy.tokens:.1f} tokens:"
        f" {entropy.per_token:.4f} a token"
    )
    say(
        f"the floor: on the {len(held_out):,} held-out stories the truth itself scores {floor:.4f};"
        " no model can expect to do better"
    )
    saved = max(map(step_of, find_checkpoints(args.out)), default=0)
    finished = saved >= plan.train.steps
    return World(args.out, SOURCE, tokenizer, plan, entropy, floor, held_out, begun, finished)


def new_plan(args: DemoArgs, say: Say) -> Plan:
    """Write corpus, tokenizer and token files of a new demo."""
    folder = args.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    stories = SOURCE.stories(args.seed, args.sentences)
    write_atomically(corpus, "".join(map(to_text, stories)).encode())
    sentences = sum(story.count(".") for story in stories)
    say(f"wrote {len(stories):,} stories, {sentences:,} sentences: {corpus}")
    say(f"  {to_text(stories[0][:-1])}")
    vocab, merges = train_bpe(str(corpus), VOCAB_SIZE, [END])
    tokenizer = Tokenizer(vocab, merges, [END])
    prepared = prepare(
        [corpus],
        tokenizer,
        folder,
        val_fraction=VAL_FRACTION,
        split="documents",
        separator=END,
        workers=1,
        overwrite=True,
    )
    if prepared.val is None:
        raise ScratchLMError(f"--sentences {args.sentences}: too few to hold a story out")
    say(
        f"learnt a tokenizer of {tokenizer.vocab_size} tokens; {prepared.train.count:,} tokens to "
        f"train on, {prepared.val.count:,} held out"
    )
    model = preset("demo").replace(vocab_size=tokenizer.vocab_size)
    files = DataFiles(folder / "train.bin", folder / "val.bin", folder / "tokenizer.json")
    return Plan(model, args.settings(), files)


def _resumed_plan(args: DemoArgs) -> Plan:
    """Load the plan of an existing demo; it must match the arguments."""
    plan = read_plan(args.out)
    corpus = args.out / "data" / "corpus.txt"
    if plan.train.rows != "documents" or not corpus.is_file():
        raise ScratchLMError(f"{args.out} holds a run that is no demo; choose another --out")
    for name in ("seed", "steps"):
        before, now = getattr(plan.train, name), getattr(args, name)
        if before != now:
            raise ScratchLMError(_mismatch(args, name, before, now))
    sentences = corpus.read_text(encoding="utf-8").count(".")
    if not 0 <= sentences - args.sentences < 20:  # the last story is complete
        raise ScratchLMError(_mismatch(args, "sentences", f"about {sentences}", args.sentences))
    return plan


def _mismatch(args: DemoArgs, name: str, before: object, now: object) -> str:
    return (
        f"{args.out} holds a demo with --{name} {before}; got {now}: "
        "--fresh starts clean, another --out keeps both"
    )


def remove_demo(out: Path) -> None:
    """Remove the files a demo wrote in a folder, and nothing else."""
    if not has_run(out):
        return
    if not (out / "data" / "corpus.txt").is_file():
        raise ScratchLMError(f"{out} holds a run that is no demo; choose another --out")
    with hold_run(out):
        for name in ("checkpoints", "data"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("config.toml", "metrics.jsonl", "report.html", "loss.png"):
            (out / name).unlink(missing_ok=True)


def read_stories(path: Path, tokenizer: Tokenizer) -> list[list[str]]:
    """Read the stories of a token file back as words, END last."""
    with TokenFile(path, expect_fingerprint=tokenizer.fingerprint()) as file:
        text = tokenizer.decode(file.read(0, len(file)).tolist())
    return [to_words(story + END) for story in text.split(END)[:-1]]


def entropy_floor(source: StorySource, tokenizer: Tokenizer, stories: list[list[str]]) -> float:
    """Return −ln P(stories) per token under the true distribution P."""
    nats = math.fsum(nat for story in stories for nat in source.surprisals(story))
    return nats / sum(len(tokenizer.encode(to_text(story))) for story in stories)
