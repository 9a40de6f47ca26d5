"""`scratchlm inspect` as a user meets it: the terminal, the page, errors on one line."""

import re

import pytest
import torch
from typer.testing import CliRunner

import chromium
from inference.test_generate_command import save
from inference.tiny import byte_tokenizer
from scratchlm.cli import app
from scratchlm.inference import load_model
from scratchlm.inspect import PARTS, inspect
from scratchlm.inspect.page import inspect_page
from scratchlm.inspect.report import report

PROMPT = "<b>ab ab"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), byte_tokenizer())


@pytest.fixture(scope="module")
def model(run):
    return load_model(run).model


def call(run, *arguments):
    return CliRunner().invoke(app, ["inspect", run, "-p", PROMPT, *arguments])


def ids():
    return torch.tensor([byte_tokenizer().encode(PROMPT)])


def test_the_lens_is_printed_where_nothing_else_is_asked_for(run, model):
    shown = call(run)
    assert shown.exit_code == 0
    assert call(run, "--lens").stdout == shown.stdout
    with torch.no_grad(), inspect(model) as look:
        look.keep(["embed", "layers.*.out"])
        model(ids())
    probability, best = look.lens()[:, 0, -1].double().softmax(-1).max(-1)
    names = ["embed", "layers.0.out", "layers.1.out"]
    for name, p, token in zip(names, probability.tolist(), best.tolist(), strict=True):
        text = byte_tokenizer().decode([token])
        line = next(line for line in shown.stdout.splitlines() if line.startswith(name))
        assert repr(text)[1:-1] in line or not text.isascii()
        assert f"{p:.1%}" in line


def test_a_head_is_shown_with_where_it_looks(run, model):
    shown = call(run, "--attention", "1.2").stdout
    with torch.no_grad(), inspect(model) as look:
        look.keep("layers.1.attn.weights", heads=2)
        model(ids())
    weights = look.cache["layers.1.attn.weights"][0, 0, -1]
    weight, key = weights.max(-1)
    assert f"{weight:.2f} {int(key)} {PROMPT[int(key)]!r}" in shown.splitlines()[-1]
    assert "lens" not in shown


def test_shares_are_shown_and_add_up(run, model):
    shown = call(run, "--attribute", "b", "--against", "#97").stdout
    with torch.no_grad(), inspect(model) as look:
        look.keep(PARTS)
        logits = model(ids())[0, -1]
    attribution = look.cache.attribute(ord("b"), against=97)
    assert f"{float(logits[98] - logits[97]):+.4f}" in shown
    for part, share in attribution.top(10):
        assert re.search(rf"{re.escape(part)} +{re.escape(f'{share:+.4f}')}", shown)
    assert "The final norm's scale is held fixed." in shown


def test_an_ablation_shows_before_and_after(run, model):
    shown = call(run, "--ablate", "layers.0.attn.heads:0,3", "--ablate", "layers.1.ffn.out")
    assert "without layers.0.attn.heads:0,3, layers.1.ffn.out" in shown.stdout
    with torch.no_grad():
        before = model(ids())[0, -1].double().softmax(-1)
        with inspect(model) as look:
            look.zero("layers.0.attn.heads", heads=[0, 3])
            look.zero("layers.1.ffn.out")
            after = model(ids())[0, -1].double().softmax(-1)
    best = int(before.argmax())
    assert re.search(rf"{before[best]:.2%} +{after[best]:.2%}", shown.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attribute", "xyz"], "'xyz' is 3 tokens: 'x', 'y', 'z'"),
        (["--attribute", "#999"], r"token must lie in \[0, 257\); got 999"),
        (["--against", "a"], "--against needs --attribute"),
        (["--attention", "one"], "--attention must be LAYER.HEAD, as in 1.0; got 'one'"),
        (["--attention", "2.0"], "layers go from 0 to 1, heads from 0 to 3; got '2.0'"),
        (["--ablate", "layers.7.out"], "no point is called 'layers.7.out'; near it: layers.1.out"),
        (["--ablate", "layers.0.out:1"], "this point has no heads"),
        (["--ablate", "layers.0.attn.heads:x"], r"--ablate must be POINT\[:HEADS\]"),
    ],
)
def test_a_wrong_argument_is_one_line(run, arguments, message):
    failed = call(run, *arguments)
    assert failed.exit_code != 0
    assert re.search(message, str(failed.exception))
    assert isinstance(failed.exception, ValueError)


def test_the_page_holds_what_was_seen_and_loads_nothing(run, tmp_path):
    page = tmp_path / "page.html"
    assert call(run, "--html", str(page), "--ablate", "layers.1.ffn.out").exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=|url\(|<b>ab", text)


@pytest.mark.browser
@pytest.mark.skipif(not chromium.IS_THERE, reason=chromium.MISSING)
def test_the_page_draws_lens_attention_and_shares(model, tmp_path):
    tokens = ids()[0].tolist()
    found = report(model, tokens, lambda token: byte_tokenizer().decode([token]))
    path = tmp_path / "page.html"
    path.write_text(inspect_page("<tiny>", found, (1, 2)), encoding="utf-8")
    with chromium.Chromium() as browser:
        browser.open(path.as_uri())
        drawn = browser.run("""
            const n = data.tokens.length, canvas = document.getElementById("pattern");
            const box = canvas.getBoundingClientRect(), size = box.height / n;
            const at = {clientX: box.right - (n - 0.5) * size, clientY: box.bottom - 0.5 * size};
            canvas.dispatchEvent(new MouseEvent("mousemove", at));
            return {
              name: document.getElementById("name").textContent,
              prompt: document.getElementById("prompt").textContent,
              lens: document.querySelectorAll("#lens tr").length,
              shares: document.querySelectorAll("#shares tr").length,
              head: [document.getElementById("layer").value, document.getElementById("head").value],
              pointed: document.getElementById("pointed").textContent,
            };""")
        assert browser.complaints() == []
    assert drawn["name"] == "<tiny>"
    assert drawn["prompt"] == PROMPT
    assert drawn["lens"] == 1 + 3
    assert drawn["shares"] == len(found.attribution.parts)
    assert drawn["head"] == ["1", "2"]
    weight = found.weights[1][2, -1, 0]
    last = len(tokens) - 1
    assert drawn["pointed"] == f'"b" ({last}) looks at "<" (0): {float(weight):.2f}'
