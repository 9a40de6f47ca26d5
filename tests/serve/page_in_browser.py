"""The page in a real Chromium, on a tiny model that is served from this process."""

import contextlib
import importlib.util
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import chromium
from inference.tiny import END, byte_tokenizer, tiny_model
from inference.tiny import save_run as write_run
from scratchlm import TransformerLM
from scratchlm.inference import Loaded, load_model
from scratchlm.serve.run import Running
from serve.tiny_server import tiny_engine, tiny_server
from waiting import PATIENCE

EVIL = "<script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"
MARKS = ("<|im_start|>", "<|im_end|>")


@cache
def evil_tokenizer():
    """One token per byte, markers of ChatML, and a token that is a script."""
    return byte_tokenizer(END, *MARKS, EVIL)


def save_run(path: Path, context_length: int = 96, model: TransformerLM | None = None) -> Loaded:
    """Write a run to disk, and load it as a user would."""
    tokenizer = evil_tokenizer()
    model = model or tiny_model(tokenizer.vocab_size, context_length)
    return load_model(write_run(path, model, tokenizer))


def address_of(ids, **words):
    """Return the address of a text, as the page writes it."""
    from urllib.parse import urlencode

    given = words.pop("given", len(ids))
    tree = f"-1_0_{given}_" + ".".join(map(str, ids))
    return urlencode({**words, "t": tree})


@dataclass
class Page:
    """A browser at the page of a server."""

    browser: chromium.Chromium
    server: Running

    def open(self, words: str = "") -> None:
        """Load the page anew at this address, and wait until it is drawn."""
        self.browser.open("about:blank")
        self.browser.open(f"{self.server.url}/#{words}")
        self.wait("document.documentElement.dataset.ready")
        self.settle()

    def run(self, script: str, *arguments):
        return self.browser.run(script, *arguments)

    def wait(self, condition: str) -> None:
        """Wait for something that must come."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, (condition, self.problem(), self.browser.complaints())
            time.sleep(0.01)

    def settle(self) -> None:
        """Wait until no view is being drawn and nothing is being written."""
        self.wait(
            "document.getElementById('view').getAttribute('aria-busy') !== 'true' && "
            "document.getElementById('stop').disabled"
        )

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)
        self.settle()

    def view(self, name: str) -> None:
        self.click(f"#tab-{name}")

    def text(self, selector: str) -> str:
        return self.run(
            "return document.querySelector(arguments[0])?.textContent ?? null", selector
        )

    def cells(self, selector: str) -> list[list[str]]:
        """Return a table's body, cell by cell."""
        return self.run(
            "return [...document.querySelector(arguments[0]).tBodies[0].rows]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))",
            selector,
        )

    def problem(self) -> str:
        return self.text("#problem") or ""

    def ids(self) -> list[int]:
        """Return the tokens of the branch that is shown, read off its table."""
        self.run("document.querySelector('#tokens-table details').open = true")
        self.wait("document.querySelector('#tokens-table table')")
        return [int(row[2]) for row in self.cells("#tokens-table table")]

    def press(self, *keys: str) -> None:
        """Press keys as a person would."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, " ": 32}
        for key in keys:
            about = {"key": key, "code": "Space" if key == " " else key}
            about |= {"windowsVirtualKeyCode": codes[key]}
            text = {"text": "\r" if key == "Enter" else key} if key in ("Enter", " ") else {}
            self.browser.command("Input.dispatchKeyEvent", type="keyDown", **about, **text)
            self.browser.command("Input.dispatchKeyEvent", type="keyUp", **about)


@contextlib.contextmanager
def page_of(loaded: Loaded, **engine):
    """Serve a model and open a browser."""
    engine = {"num_pages": 256, "page_size": 8, "max_rows": 8, **engine}
    with (
        tiny_server(loaded, tiny_engine(loaded, **engine), name="tiny") as server,
        chromium.Chromium() as browser,
    ):
        yield Page(browser, server)


def axe() -> str:
    """Return the source of axe-core, which the package axe-core-python carries."""
    found = importlib.util.find_spec("axe_core_python")
    assert found is not None, "the test extra lacks axe-core-python"
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")
