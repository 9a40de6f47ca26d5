"""`scratchlm serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from scratchlm.cli.checkpoints import CheckpointOption
from scratchlm.cli.device import Device
from scratchlm.cli.generate import Accelerate, Dtype, ModelArgument, load
from scratchlm.cli.terminal import say
from scratchlm.errors import ScratchLMError

KEY = "SCRATCHLM_API_KEY"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("serve")(serve)


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Another than this machine needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help=f"Asked of every client. Better: the variable {KEY}.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the model. Default: its folder's.")] = None,
    chat_format: Annotated[
        str | None, typer.Option(help="chatml, llama3 or plain. Default: the model's own.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name it may be called by; repeatable.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A web page that may call it; repeatable.")
    ] = None,
    max_rows: Annotated[
        int, typer.Option(min=1, max=65_536, help="Requests that run at once.")
    ] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 256,
    memory: Annotated[
        str | None, typer.Option(help="For keys and values, as 4GiB. Default: what suits.")
    ] = None,
    exact: Annotated[
        bool, typer.Option(help="On a GPU: the same bits in any company, at a cost.")
    ] = False,
    log_requests: Annotated[
        bool, typer.Option(help="Log paths and statuses; never what was said.")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="After SIGTERM, for requests that run.")
    ] = 30.0,
    checkpoint: CheckpointOption = None,
    device: Device = "auto",
    dtype: Dtype = "stored",
    accelerate: Accelerate = True,
) -> None:
    """Serve a model to clients of OpenAI's API. Ctrl-C ends it."""
    try:
        from scratchlm.serve.run import run
        from scratchlm.serve.sizing import make_engine
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "h11", "anyio"):
            raise
        raise ScratchLMError(
            f"serving needs {error.name}; pip install 'scratchlm[serve]' installs it"
        ) from None
    from scratchlm.cli.account_models import parse_bytes
    from scratchlm.serve import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        api_key=api_key or os.environ.get(KEY) or None,
        name=name or Path(model).absolute().name,
        chat_format=chat_format,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        max_queue=max_queue,
        drain_seconds=drain_seconds,
        log_requests=log_requests,
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    if log_requests:
        logging.getLogger("scratchlm.serve").setLevel(logging.INFO)
    loaded = load(model, checkpoint, device, dtype, accelerate)
    size = None if memory is None else parse_bytes(memory)
    run(
        loaded,
        settings,
        engine=make_engine(loaded, max_rows=max_rows, memory=size, exact=exact),
        ready=lambda address: say(f"serving {loaded.source} at {address}"),
    )
