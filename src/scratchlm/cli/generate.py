"""`scratchlm generate` and `next`: generation in the terminal."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scratchlm.cli.checkpoints import CheckpointOption, say_checkpoint
from scratchlm.cli.device import Device, choose_device
from scratchlm.cli.terminal import read_prompt, say, visible, warn, write_output
from scratchlm.errors import ScratchLMError

if TYPE_CHECKING:
    from scratchlm.config import ModelConfig
    from scratchlm.inference import Loaded, Piece, Sampling
    from scratchlm.model import TransformerLM

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run, a checkpoint, a Hugging Face directory, or a GGUF file."
    ),
]
Accelerate = Annotated[bool, typer.Option(help="Use fused layers and whole-step decoders.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or stored: as on disk.")]
Temperature = Annotated[float, typer.Option(help="Flattens (>1) or sharpens (<1); 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that make up this mass.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely, against the best.")]
Typical = Annotated[float, typer.Option(help="Keep the most typical tokens, up to this mass.")]
Repetition = Annotated[float, typer.Option(help="Divide the logits of tokens already there.")]
Presence = Annotated[float, typer.Option(help="Lower tokens already generated, once.")]
Frequency = Annotated[float, typer.Option(help="Lower tokens already generated, for each time.")]
Bias = Annotated[list[str] | None, typer.Option(metavar="ID=VALUE", help="Add to a logit.")]
MaxNew = Annotated[int | None, typer.Option(help="Default: until the context is full.")]
Seed = Annotated[int | None, typer.Option(help="Sample i draws with seed + i. Default: fresh.")]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="The text; - reads it from stdin.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("generate")(generate)
    app.command("next")(next_)


def generate(
    model: ModelArgument,
    prompt: Prompt = "",
    max_new_tokens: MaxNew = None,
    temperature: Temperature = 1.0,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    typical: Typical = 1.0,
    repetition_penalty: Repetition = 1.0,
    presence_penalty: Presence = 0.0,
    frequency_penalty: Frequency = 0.0,
    logit_bias: Bias = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; repeatable.")] = None,
    ignore_end: Annotated[bool, typer.Option(help="Go on past end-of-text.")] = False,
    seed: Seed = None,
    num_samples: Annotated[
        int, typer.Option(min=1, max=65_536, help="How many continuations.")
    ] = 1,
    beam: Annotated[int | None, typer.Option(help="Search with this many beams instead.")] = None,
    length_penalty: Annotated[float, typer.Option(help="With --beam: score / length^this.")] = 1.0,
    past_context: Annotated[
        str, typer.Option(help="error, or slide: forget the older half when the context is full.")
    ] = "error",
    cache: Annotated[bool, typer.Option(help="Keep keys and values of earlier tokens.")] = True,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="A smaller model that proposes tokens.")
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="off, lookup (the text's own tokens are proposed again), or draft: the default "
            "with --draft."
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="Keys and values in 8 bits: int8 or fp8. Default: in the dtype of the weights."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per sample.")] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and of the best n.")
    ] = None,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    dtype: Dtype = "stored",
    accelerate: Accelerate = True,
) -> None:
    """Continue a text. An empty prompt begins a new document."""
    from scratchlm.inference import Sampling, beam_search, stream

    sampling = make_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical=typical,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_bias(logit_bias or []),
    )
    if logprobs is not None and not as_json:
        raise ValueError("--logprobs needs --json")
    if beam is None and length_penalty != 1.0:
        raise ValueError("--length-penalty needs --beam")
    if draft is not None and speculate not in (None, "draft"):
        raise ValueError(f"--draft has no effect with --speculate {speculate}")
    if beam is not None:
        sampled = sampling != Sampling() or seed is not None
        others: dict[str, object] = {"--stop": stop, "--draft": draft, "--speculate": speculate}
        others |= {"--kv-cache": kv_cache, "--logprobs": logprobs is not None}
        others |= {"--no-cache": not cache, "--past-context": past_context != "error"}
        check_beam(beam, num_samples, sampled, others)
    name_unused(sampling, seed)
    text = read_prompt(prompt)
    loaded = load(model, checkpoint, device, dtype, accelerate)
    common: dict[str, Any] = {
        "tokenizer": loaded.need_tokenizer(),
        "max_new_tokens": max_new_tokens,
        "eos_ids": () if ignore_end else loaded.eos_ids,
    }
    if beam is not None:
        beams = beam_search(
            loaded.model, text, num_beams=beam, length_penalty=length_penalty, **common
        )
        for rank, found in enumerate(beams[:num_samples]):
            _print_whole(rank, text, found.text, asdict(found), as_json)
        return
    drafting = None if draft is None else _draft(draft, loaded, device, dtype)
    with warnings.catch_warnings(record=True, action="always") as warned:
        pieces = stream(
            loaded.model,
            [text] * num_samples,
            sampling=sampling,
            stop=stop or (),
            seed=seed,
            num_logprobs=logprobs,
            past_context=past_context,  # type: ignore[arg-type]
            draft=drafting,
            speculate=speculate,  # type: ignore[arg-type]
            kv_dtype=kv_cache,  # type: ignore[arg-type]
            use_cache=cache,
            accelerate=loaded.accelerate,
            **common,
        )
    for warning in warned:
        warn(warning.message)
    if num_samples == 1 and not as_json:
        _print_as_it_comes(text, pieces)
    else:
        _print_when_done(text, pieces, as_json)


def _draft(name: str, loaded: Loaded, device: str, dtype: str) -> TransformerLM:
    """Load a draft model; its tokens must be the model's."""
    draft = load(name, None, device, dtype, loaded.accelerate)
    ours, its = (one.need_tokenizer() for one in (loaded, draft))
    count = ours.vocab_size
    if its.vocab_size != count or any(ours.decode([i]) != its.decode([i]) for i in range(count)):
        raise ScratchLMError(f"{name}: its tokens are not those of {loaded.source}")
    return draft.model


def check_beam(beam: int, num_samples: int, sampled: bool, others: dict[str, object]) -> None:
    """Refuse options that have no effect with a search."""
    if sampled:
        raise ValueError("--beam searches, it does not sample: leave the sampling options out")
    for option, given in others.items():
        if given:
            raise ValueError(f"{option} has no effect with --beam")
    if num_samples > max(beam, 1):  # the search itself refuses a beam below 1
        raise ValueError(f"--num-samples must not exceed --beam {beam}; got {num_samples}")


def next_(
    model: ModelArgument,
    prompt: Prompt,
    best: Annotated[int, typer.Option("--best", "-n", help="How many tokens to show.")] = 10,
    temperature: Annotated[float, typer.Option(help="Flattens or sharpens.")] = 1.0,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="LAYER.HEAD",
            help="Also show where a head looks from the last token; LAYER alone: all its heads, "
            "averaged.",
        ),
    ] = None,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    dtype: Dtype = "stored",
    accelerate: Accelerate = True,
) -> None:
    """Show the likeliest next tokens, with their probabilities."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from scratchlm.inference import next_tokens

    text = read_prompt(prompt)
    loaded = load(model, checkpoint, device, dtype, accelerate)
    tokenizer = loaded.need_tokenizer()
    if attention is not None:
        _check_head(attention, loaded.config)
    found = next_tokens(loaded.model, text, tokenizer=tokenizer, best=best, temperature=temperature)
    table = Table("token", box=None, pad_edge=False, header_style="dim")
    table.add_column("id", justify="right", style="dim")
    table.add_column("probability", justify="right")
    table.add_column("")
    for candidate in found:
        table.add_row(
            Text(repr(candidate.text)),
            str(candidate.token_id),
            f"{candidate.probability:.2%}",
            Text(draw_bar(candidate.probability / found[0].probability, 30), style="cyan"),
        )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(table)
    rest = max(1 - sum(candidate.probability for candidate in found), 0.0)
    others = loaded.config.vocab_size - len(found)
    console.print(f"{rest:.2%} on the other {others:,} tokens", style="dim")
    if attention is not None:
        _show_attention(console, loaded, text, attention)


def _check_head(where: str, config: ModelConfig) -> None:
    layer, _, head = where.partition(".")
    numbers = [word for word in (layer, head) if word]
    inside = all(word.isdecimal() for word in numbers) and layer and where[-1] != "."
    if not inside or int(layer) >= config.num_layers or int(head or 0) >= config.num_heads:
        raise ValueError(
            f"--attention must be LAYER.HEAD, from 0.0 to {config.num_layers - 1}."
            f"{config.num_heads - 1}, or LAYER; got {where!r}"
        )


def _show_attention(console: Any, loaded: Loaded, text: str, where: str) -> None:
    """Print how much the last token attends to each token of the prompt."""
    from rich.table import Table
    from rich.text import Text

    from scratchlm.inspect import attention_weights

    layer, _, head = where.partition(".")
    tokenizer = loaded.need_tokenizer()
    ids = tokenizer.encode(text)
    weights = attention_weights(loaded.model, ids)[int(layer)]  # (heads, query, key)
    row = (weights[int(head)] if head else weights.mean(0))[-1].tolist()
    which = f"head {where}" if head else f"layer {layer}, all heads"
    table = Table(f"{which} looks at", box=None, pad_edge=False, header_style="dim")
    table.add_column("weight", justify="right")
    table.add_column("")
    for token, weight in zip(ids, row, strict=True):
        bar = Text(draw_bar(weight / max(row), 30), style="cyan")
        table.add_row(Text(repr(tokenizer.decode([token]))), f"{weight:.2%}", bar)
    console.print()
    console.print(table)


# Printing


def _print_as_it_comes(prompt: str, pieces: Iterable[Piece]) -> None:
    terminal = sys.stdout.isatty()
    if terminal:
        typer.secho(visible(prompt), dim=True, nl=False)
    count, begin = 0, time.perf_counter()
    for piece in pieces:
        count += 1
        write_output(piece.text)
    say()
    if terminal:
        rate = count / (time.perf_counter() - begin)
        typer.secho(f"{count} tokens, {rate:.1f} tokens/s", dim=True, err=True)


def _print_when_done(prompt: str, pieces: Iterable[Piece], as_json: bool) -> None:
    """Print complete samples in order, each as soon as it and those before it are finished."""
    from scratchlm.inference import Generation

    growing: dict[int, Generation] = {}
    shown = 0
    for piece in pieces:
        growing.setdefault(piece.row, Generation()).add(piece)
        while shown in growing and growing[shown].finish_reason is not None:
            done = growing.pop(shown)
            _print_whole(shown, prompt, done.text, asdict(done), as_json)
            shown += 1


def _print_whole(index: int, prompt: str, text: str, record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        say(json.dumps({"prompt": prompt, **record}, ensure_ascii=False))
        return
    if index:
        say("---")
    if sys.stdout.isatty():
        typer.secho(visible(prompt), dim=True, nl=False)
    say(text)


def draw_bar(share: float, width: int) -> str:
    """Draw a fraction of `width` cells, to an eighth of a cell."""
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


# Arguments


def make_sampling(**settings: Any) -> Sampling:
    """Return how to sample; imported only where a command needs it."""
    from scratchlm.inference import Sampling

    return Sampling(**settings)


def name_unused(sampling: Sampling, seed: int | None, usual: Sampling | None = None) -> None:
    """Name the options that have no effect where the likeliest token is always taken."""
    usual = make_sampling() if usual is None else usual
    given = {"seed": seed is not None}
    for name in ("top_k", "top_p", "min_p", "typical"):
        given[name] = getattr(sampling, name) != getattr(usual, name)
    for name in [name for name, is_given in given.items() if is_given and not sampling.temperature]:
        warn(f"--{name.replace('_', '-')} has no effect with --temperature 0")


def _bias(given: list[str]) -> dict[int, float]:
    bias = {}
    for entry in given:
        token, _, value = entry.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise ValueError(f"--logit-bias must be ID=VALUE; got {entry!r}") from None
    return bias


def load(model: str, checkpoint: str | None, device: str, dtype: str, accelerate: bool) -> Loaded:
    """Load a model as the options say; warnings go to stderr."""
    import torch

    from scratchlm.inference import load_model

    kinds = {"stored": None, "float32": torch.float32}
    kinds |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"--dtype must be one of {', '.join(kinds)}; got {dtype!r}")

    loaded = load_model(
        model,
        device=choose_device(device),
        dtype=kinds[dtype],
        accelerate=accelerate,
        checkpoint=checkpoint,
        warn=warn,
    )
    say_checkpoint(model, loaded.source)
    return loaded
