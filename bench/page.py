"""The page in a real Chromium: from navigation to the first view drawn.

    python bench/page.py

The demo's model (random weights: the time is the same) is served from this process. Each round
opens the page anew with nothing in the browser's cache, at a text of 16 tokens and the table of
its next token; then at 1,024 tokens with all heads of a model of that context. The time is the
page's own clock: 0 where navigation begins, read after the frame that shows the view.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from results import machine, table, versions, write_section
from scratchlm.config import PRESETS
from scratchlm.inference import Loaded
from scratchlm.model import TransformerLM
from scratchlm.serve.run import serving
from scratchlm.tokenizer import Tokenizer

MARK = 1000  # ms


def loaded_of(context: int) -> Loaded:
    """Return the demo's model with a longer context, over bytes."""
    config = PRESETS["demo"].replace(vocab_size=256, context_length=context)
    model = TransformerLM(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    return Loaded(model.eval(), tokenizer, config, Path("demo"))


def times(browser: Any, url: str, tokens: int, rounds: int) -> list[int]:
    """Open the page again and again; return when its view was drawn, in milliseconds."""
    browser.command("Network.setCacheDisabled", cacheDisabled=True)
    found = []
    for _ in range(rounds + 1):  # the first makes what the server keeps
        browser.open("about:blank")
        browser.open(url)
        while not (ready := browser.run("return document.documentElement.dataset.ready")):
            time.sleep(0.05)
        found.append(int(ready))
        count = browser.run("return document.querySelectorAll('#tokens .token').length")
        assert count == tokens + 1, f"{tokens} tokens and the next were to be shown; got {count}"
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    chromium: Any = importlib.import_module("chromium")
    if not chromium.IS_THERE:
        raise SystemExit(f"error: {chromium.MISSING}")
    lines = []
    for tokens, view in ((16, "choices"), (1024, "attention")):
        ids = ".".join(str((7 * i) % 250) for i in range(tokens))
        words = f"at={tokens - 3}&v={view}&t=-1_0_{tokens}_{ids}"
        loaded = loaded_of(max(PRESETS["demo"].context_length, tokens))
        with serving(loaded) as server, chromium.Chromium() as browser:
            took = times(browser, f"{server.url}/#{words}", tokens, options.rounds)
        mark = str(MARK) if tokens == 16 else ""
        lines.append([tokens, view, f"{statistics.median(took):.0f}", max(took), mark])
        print(*lines[-1], sep=" | ", flush=True)
    body = table(["tokens", "view", "median, ms", "most, ms", "mark"], lines)
    if not options.no_write:
        body += f"\n\n{options.rounds} rounds, nothing in the browser's cache."
        where, software = machine(), versions("torch", "starlette", "uvicorn")
        write_section("The page: first view", "python bench/page.py", where, software, body)


if __name__ == "__main__":
    main()
