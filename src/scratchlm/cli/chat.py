"""`scratchlm chat`: a conversation in the terminal, and its commands."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption
from scratchlm.cli.device import Device
from scratchlm.cli.errors import one_line
from scratchlm.cli.generate import (
    Accelerate,
    Dtype,
    MinP,
    ModelArgument,
    Repetition,
    Seed,
    Temperature,
    TopK,
    TopP,
    load,
    make_sampling,
    name_unused,
)
from scratchlm.cli.terminal import say, write_output
from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError

if TYPE_CHECKING:
    from scratchlm.inference import Conversing, Loaded, Message, Sampling


TOP_P = 0.95


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("chat")(chat)


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="What the model is told beforehand.")] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="template, chatml, llama3 or plain. Default: the model's."),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="The longest answer.")] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = TOP_P,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    seed: Seed = None,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    dtype: Dtype = "stored",
    accelerate: Accelerate = True,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands."""
    from scratchlm.inference import Message, chat_format

    sampling = make_sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    name_unused(sampling, seed, make_sampling(top_p=TOP_P))
    loaded = load(model, checkpoint, device, dtype, accelerate)
    chosen = chat_format(loaded.need_tokenizer(), format_, loaded.chat_template)
    messages: list[Message] = [] if system is None else [Message("system", system)]
    if sys.stdin.isatty():
        import readline  # noqa: F401 (input() gets a line one can edit, and a history)

        say(f"{loaded.source}  format {chosen.name}", err=True)
        say("Ctrl-C stops, Ctrl-D leaves, /help lists the commands", err=True)
    while (line := _next_line()) is not None:
        if not line.strip():
            continue
        if line.startswith("/"):
            after = chat_command(line, messages)
            if after is None:
                return
            messages = after
            continue
        try:
            messages = _answer(
                loaded, chosen, [*messages, Message("user", line)], sampling, max_new_tokens, seed
            )
        except (
            ValueError,
            ScratchLMError,
        ) as error:  # a message that does not fit: report it and continue
            say(f"error: {one_line(error)}", err=True)


CHAT_COMMANDS = {
    "/help": "list the commands",
    "/system TEXT": "tell the model something beforehand, and begin anew",
    "/reset": "forget the conversation, not what was told beforehand",
    "/save FILE": "write the conversation to a file, one JSON object a line",
    "/exit": "leave, like Ctrl-D",
}


def chat_command(line: str, messages: list[Message]) -> list[Message] | None:
    """Carry out a line that begins with a slash; return the conversation after it, or None."""
    from scratchlm.errors import did_you_mean
    from scratchlm.inference import Message

    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    told = [message for message in messages if message.role == "system"]
    if word in ("/exit", "/quit"):
        return None
    if word == "/reset":
        say("(forgotten)", err=True)
        return told
    if word == "/system":
        if rest:
            return [Message("system", rest)]
        say(told[0].text if told else "(nothing was told beforehand)", err=True)
    elif word == "/save":
        _save_chat(rest, messages)
    elif word == "/help":
        for name, meaning in CHAT_COMMANDS.items():
            say(f"{name:<14}{meaning}", err=True)
    else:
        near = did_you_mean(word, [name.partition(" ")[0] for name in CHAT_COMMANDS])
        say(f"error: no command {word}{near or '; /help lists them'}", err=True)
    return messages


def _save_chat(name: str, messages: list[Message]) -> None:
    """Write a conversation; an existing file is left alone."""
    if not name:
        say("error: where to? /save FILE", err=True)
        return
    lines = [json.dumps(asdict(message), ensure_ascii=False) + "\n" for message in messages]
    if Path(name).exists():
        say(f"error: {name}: exists already and is not overwritten", err=True)
        return
    try:
        write_atomically(Path(name), "".join(lines).encode())
    except (OSError, ScratchLMError) as error:
        say(f"error: {one_line(error)}", err=True)
        return
    count = "1 message" if len(messages) == 1 else f"{len(messages)} messages"
    say(f"(wrote {count} to {name})", err=True)


def _next_line() -> str | None:
    """Read the user's next line; None at Ctrl-D."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                say()
            return None
        except KeyboardInterrupt:
            say("\nCtrl-D leaves", err=True)


def _answer(
    loaded: Loaded,
    chat: Conversing,
    messages: list[Message],
    sampling: Sampling,
    max_new_tokens: int | None,
    seed: int | None,
) -> list[Message]:
    """Stream the model's answer; return the conversation with the answer."""
    from scratchlm.inference import Message, stream, what_fits

    tokenizer, context = loaded.need_tokenizer(), loaded.config.context_length
    # Without --max-new-tokens an answer gets at least a quarter of the context.
    reserve = max_new_tokens or max(context // 4, 1)
    kept = what_fits(chat, messages, tokenizer, context - reserve)
    if len(kept) < len(messages):
        say("(the oldest turns no longer fit the context and are forgotten)", err=True)
    pieces: list[str] = []
    try:
        for piece in stream(
            loaded.model,
            chat.encode(kept, tokenizer),
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=chat.stop,
            eos_ids={*loaded.eos_ids, *chat.end_ids(tokenizer)},
            seed=None if seed is None else seed + len(messages),
            accelerate=loaded.accelerate,
        ):
            pieces.append(piece.text)
            write_output(piece.text)
            if piece.finish_reason == "length":
                write_output(" […]")
    except KeyboardInterrupt:
        write_output(" [stopped]")
    say()
    return [*kept, Message("assistant", "".join(pieces))]
