"""The report says what the log says, and needs nothing but itself."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import image

import chromium
from scratchlm.cli.attention_picture import draw_attention
from scratchlm.data import write_token_file
from scratchlm.errors import ScratchLMError
from scratchlm.training import DataFiles, Plan, Section, read_metrics, run_plan, write_report
from scratchlm.training.plan import epochs
from scratchlm.training.plots import Curves, draw_run
from scratchlm.training.report import duration, picture_html, table
from training.tiny import MODEL, SETTINGS, write_data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    data = write_data(directory / "data")
    plan = Plan(MODEL, SETTINGS, DataFiles(data / "train.bin", data / "val.bin"))
    run_plan(
        directory / "run",
        plan,
        sample=lambda model, step: [f"<b>step</b> & {step}"],
        matmul_rate=1e9,
    )
    return directory / "run"


def test_a_report_holds_figures_picture_samples_accounting_and_config(run):
    page = write_report(run, floor=0.69, sections=[Section("A & B", "<p id='mine'>own</p>")])
    text = page.read_text()
    best = min(line["val_loss"] for line in read_metrics(run) if "val_loss" in line)
    assert f"<b>{best:.4f}</b><span>best held-out loss</span>" in text
    assert f"<b>{best / 0.69 - 1:+.2%}</b><span>above the entropy floor</span>" in text
    assert "MFU (full)" in text
    assert "A &amp; B" in text
    assert "<p id='mine'>own</p>" in text
    assert "&lt;b&gt;step&lt;/b&gt; &amp; 60" in text  # what a model writes is not markup
    parameters = re.search(r"<td>parameters</td><td>([\d,]+)</td><td>([\d,]+)</td>", text)
    assert parameters[1] == parameters[2]
    assert "eval_every = 10" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert (run / "loss.png").stat().st_size > 10_000


def test_an_unfinished_run_can_be_reported_and_an_empty_one_cannot(run, tmp_path):
    with pytest.raises(ScratchLMError, match=r"no config\.toml there"):
        write_report(tmp_path)
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    with pytest.raises(ScratchLMError, match=r"no metrics\.jsonl there"):
        write_report(tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0])
    with pytest.raises(ScratchLMError, match="nothing to report"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    assert "no checkpoint" in write_report(tmp_path).read_text()


def test_one_step_and_no_evaluation_can_be_drawn(run):
    records = [line for line in read_metrics(run) if "loss" in line][:1]
    assert draw_run(records).startswith(b"\x89PNG")
    curves = Curves.of(records)
    assert curves.smooth_loss() == curves.loss


def test_smoothing_leaves_a_constant_loss_unchanged():
    curves = Curves(list(range(500)), [2.5] * 500, [], [], [], [])
    assert curves.smooth_loss() == pytest.approx([2.5] * 500)


def test_smoothing_has_no_lag():
    """A mean of the past alone would lie above a falling line."""
    line = [5.0 - 0.004 * i for i in range(1000)]
    curves = Curves(list(range(1000)), line, [], [], [], [])
    assert curves.smooth_loss() == pytest.approx(line)


def test_smoothing_leaves_no_noise_at_the_ends():
    noisy = [2.0 + (0.5 if i % 2 else -0.5) for i in range(1000)]
    smooth = Curves(list(range(1000)), noisy, [], [], [], []).smooth_loss()
    assert max(abs(value - 2.0) for value in smooth) < 0.2


def test_a_report_says_how_the_run_was_made(run):
    page = write_report(run, command="scratchlm train 'my file.txt'").read_text()
    text = re.sub(r"<[^>]+>", " ", page)
    lines = [line for line in read_metrics(run) if "val_loss" in line]
    best = min(lines, key=lambda line: line["val_loss"])["step"]
    assert "scratchlm train &#x27;my file.txt&#x27;" in page
    assert f"step {best:,}, the best" in text
    assert "600 tokens; 3.2 epochs" in text  # 60 steps of 4 · 8 tokens
    assert re.search(r"scratchlm \d+\.\d+\.\d+, torch \d+\.\d+", text)
    assert re.search(r"\d+ cores, \d+ threads", text)
    assert "prefers-color-scheme: dark" in page
    assert '<source media="(max-width: 600px)"' in page


def test_epochs_are_those_that_were_read(tmp_path):
    """By a run that ended early; of documents with a row each, not of their padding."""
    ids = np.array([3, 4, 11] * 50)
    known = {"vocab_size": 12, "tokenizer": "t", "end_of_text": 11, "documents": 50}
    write_token_file(tmp_path / "train", ids, **known)
    settings = replace(SETTINGS, steps=100, rows="documents", eval_every=1, patience=1, lr=0.0)
    files = DataFiles(tmp_path / "train.bin", tmp_path / "train.bin")
    plan = Plan(MODEL, settings, files)
    assert epochs(plan) == 100 * 4 / 50
    run_plan(tmp_path / "run", plan)
    steps = [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line][-1]
    assert steps < 100, "it did not end early: it shows nothing"
    assert f"150 tokens; {steps * 4 / 50:.3g} epochs" in write_report(tmp_path / "run").read_text()


# Words that lie on two lines though a line has room for them, at a hyphen or elsewhere.
_CUT_WORDS = """
const cut = [], nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (nodes.nextNode()) {
  const node = nodes.currentNode;
  if (node.parentElement.closest("pre, blockquote")) continue;
  for (const word of node.data.matchAll(/\\S+/g)) {
    const range = document.createRange();
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) cut.push(word[0]);
  }
}
return cut;
"""


_SCROLLED = """
return [...document.querySelectorAll("section, section :not(pre)")]
  .filter((box) => getComputedStyle(box).overflowX != "visible")
  .filter((box) => box.scrollWidth > box.clientWidth + 1)
  .map((box) => box.outerHTML.slice(0, 80));
"""


@pytest.mark.skipif(not chromium.IS_THERE, reason=chromium.MISSING)
def test_on_a_phone_no_word_of_a_report_is_cut_and_nothing_overflows(run):
    command = "scratchlm train text.txt --tensorboard --params 100k --out runs/mine --resume"
    figures = [("the truth's own score on all of these stories", "0.3590 nats", "657 stories")]
    source = Section("Source", table(("the source", "", ""), figures))
    weights = torch.eye(24).expand(2, 6, 24, 24).tolist()  # (layers, heads, query, key)
    pictures = (draw_attention(weights), draw_attention(weights, narrow=True))
    heads = Section("Where the heads look", picture_html("attention", *pictures))
    page = write_report(run, command=command, sections=[source, heads])
    with chromium.Chromium() as browser:
        for scheme in ("light", "dark"):
            browser.show(390, 900, scheme)
            browser.open(page.as_uri())
            assert browser.run(_CUT_WORDS) == []
            assert browser.run("return document.documentElement.scrollWidth") == 390
            assert browser.run(_SCROLLED) == []


def test_on_a_phone_every_head_is_wide_enough_to_be_seen():
    weights = torch.eye(24).expand(2, 7, 24, 24).tolist()
    wide, narrow = (
        image.imread(io.BytesIO(draw_attention(weights, narrow=narrow)), format="png")
        for narrow in (False, True)
    )
    assert narrow.shape[1] <= 400 < wide.shape[1]
    assert narrow.shape[0] > wide.shape[0]  # the heads go on in further rows
    diagonal = (narrow[..., 2] > narrow[..., 0] + 0.2).any(0)  # columns of pixels with blue
    starts = (diagonal[1:] > diagonal[:-1]).sum()
    assert starts == 4, "four heads in a row"


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.14, "3.1 s"), (245, "4:05 min"), (10_930, "3:02:10 h")]
)
def test_durations_are_formatted_in_seconds_minutes_and_hours(seconds, text):
    assert duration(seconds) == text


def test_deterministic_kernels_are_enabled_and_restored(tmp_path):
    import torch

    data = write_data(tmp_path / "data")
    settings = replace(SETTINGS, steps=2, deterministic=True)
    seen = []
    run_plan(
        tmp_path / "run",
        Plan(MODEL, settings, DataFiles(data / "train.bin")),
        on_begin=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()),
    )
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
