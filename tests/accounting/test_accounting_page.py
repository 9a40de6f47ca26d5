"""The account's page in a real browser: its numbers are those of `account()` and of the CLI."""

import json
import math
import random
import re
import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from chromium import IS_THERE, MISSING, Chromium
from scratchlm import config as c
from scratchlm.accounting import (
    CHECKPOINTING,
    CONVENTIONS,
    MACHINES,
    OPTIMIZERS,
    PARALLEL,
    PHASES,
    PRECISIONS,
    Execution,
    Setup,
    account,
    plans,
)
from scratchlm.accounting.expr import number_text
from scratchlm.accounting.page import account_page
from scratchlm.cli import app
from scratchlm.cli.account_tables import exact, human, seconds_text
from scratchlm.config import ModelConfig, preset

BASE = ModelConfig(1_000, 512, d_model=256, num_layers=4, num_heads=8)
MODELS = {
    "dense": preset("cs336-gpt2-xl"),
    "gqa": preset("llama3-8b"),
    "moe": preset("qwen3-30b-a3b"),
    "tied": preset("qwen3-0.6b"),
    "released": preset("gpt2"),
    "window": BASE.replace(num_kv_heads=2, attention=c.Attention(sliding_window=128, bias="qkv")),
    "post": BASE.replace(norm_placement="post", positions=c.Sinusoidal(), ffn=c.MLP("relu")),
}
browser_test = [
    pytest.mark.browser,
    pytest.mark.skipif(not IS_THERE, reason=MISSING),
]

# Set fields as a person does, widget by widget.
SET = """
for (const [key, value] of Object.entries(arguments[0])) {
  const widget = document.getElementById(value === null ? key + "-auto" : key);
  if (value === null) widget.checked = true;
  else if (typeof value === "boolean") widget.checked = value;
  else widget.value = String(value);
  widget.dispatchEvent(new Event("input", {bubbles: true}));
}
"""
# Open every row, then read what the page shows.
READ = """
return (async () => {
const all = (where) => [...document.querySelectorAll(where)];
const text = (id) => document.getElementById(id).textContent;
await new Promise(requestAnimationFrame);
if (document.getElementById("results").hidden) return {refusal: text("refusal")};
for (;;) {
  const closed = all('#results button[aria-expanded="false"]');
  if (!closed.length) break;
  for (const button of closed) button.click();
  await new Promise(requestAnimationFrame);
}
const rows = (id) => all(`#${id} tr[data-path]`).map((row) =>
  [row.dataset.path, row.dataset.value, Number(row.dataset.share),
   ...[...row.querySelectorAll("td")].map((cell) => cell.textContent)]);
const named = (where, key) =>
  Object.fromEntries(all(where).map((e) => [e.dataset[key], e.dataset.value]));
return {
  refusal: text("refusal"),
  counts: named("[data-count]", "count"),
  conventions: named("[data-convention]", "convention"),
  moments: named("[data-moment]", "moment"),
  cards: Object.fromEntries(all(".card").map((card) => [card.id, card.dataset.value])),
  tables: Object.fromEntries(["parameters", "flops", "memory", "serving", "sent"].map((name) =>
    [name, rows(`${name}-table`)])),
  projected: JSON.parse(document.getElementById("several").dataset.values ?? "null"),
  several: !document.getElementById("several").hidden,
  plans: all("[data-plan]").map((row) => [row.dataset.plan,
    row.querySelector(".good, .bad").textContent, ...JSON.parse(row.dataset.values)]),
  time: all("#time-table tr[data-path]").map((row) => [row.dataset.path, row.dataset.value,
    row.dataset.bound, row.nextSibling.firstChild.firstChild.data,
    row.nextSibling.firstChild.lastChild.data]),
  seconds: document.getElementById("time").dataset.value,
  mfu: document.getElementById("time").dataset.mfu,
  run: {...document.getElementById("run").dataset},
  shown: document.getElementById("results").innerText,
  command: text("command"),
  config: text("config"),
};
})();
"""


@pytest.fixture(scope="module")
def browser():
    with Chromium() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write a page once for each model."""
    written = {}

    def page(name):
        if name not in written:
            written[name] = tmp_path_factory.mktemp("pages") / f"{name}.html"
            written[name].write_text(account_page(name, MODELS[name]), encoding="utf-8")
        return written[name].as_uri()

    return page


def same(shown, expected):
    """Compare a number of the page: whole ones exactly, others to 1e-12."""
    if isinstance(expected, int):
        return shown == str(expected)
    return math.isclose(float(shown), expected, rel_tol=1e-12)


def paths(item, above="", share=1.0):
    path = f"{above}/{item.name}" if above else item.name
    yield path, item, share
    for child in item.children:
        yield from paths(child, path, share * child.share)


def assert_same_tree(shown, tree, text):
    expected = list(paths(tree))
    assert [row[0] for row in shown] == [path for path, _, _ in expected]
    for (path, value, share, symbols, numbers, figure, percent), (_, item, part) in zip(
        shown, expected, strict=True
    ):
        assert same(value, item.value), (path, value, item.value)
        assert math.isclose(share, part, rel_tol=1e-9, abs_tol=1e-15), path
        if not item.children or len(item.symbols) <= 40:
            assert (symbols, numbers) == (item.symbols, item.numbers), path
        assert (figure, percent) == (text(item.value), f"{part:.1%}"), path


def assert_same_account(shown, result, convention):
    assert shown["refusal"] == ""
    counts, held, time, run = result.parameters, result.memory, result.roofline, result.training
    for name, value in shown["counts"].items():
        assert same(value, getattr(counts, name)), name
    assert len(shown["counts"]) == 6
    assert_same_tree(shown["tables"]["parameters"], counts.tree, exact)
    assert_same_tree(shown["tables"]["flops"], result.flops[convention], exact)
    assert shown["conventions"] == {name: str(i.value) for name, i in result.flops.items()}
    assert_same_tree(shown["tables"]["memory"], held.training, lambda v: human(v, "bytes"))
    assert_same_tree(shown["tables"]["serving"], held.serving, lambda v: human(v, "bytes"))
    assert shown["moments"] == {name: str(value) for name, value in held.moments.items()}
    assert shown["cards"]["card-kv"] == str(held.kv_cache)
    assert same(shown["cards"]["card-memory"], held.training.value)
    assert len(shown["time"]) == len(time.parts)
    for (name, seconds, bound, symbols, numbers), part in zip(
        shown["time"], time.parts, strict=True
    ):
        assert (name, bound, symbols, numbers) == (
            part.name,
            part.bound,
            part.symbols,
            part.numbers,
        )
        assert same(seconds, part.seconds)
    assert same(shown["seconds"], time.seconds)
    assert same(shown["mfu"], time.mfu.value)
    assert f"MFU {time.mfu}" in shown["shown"]
    assert same(shown["run"]["seconds"], float(run.seconds.value))
    assert same(shown["run"]["dollars"], run.dollars)
    assert f"{run.mfu.value:.2f} ({run.mfu.convention} FLOPs of {run.mfu.peak})" in shown["shown"]
    assert_same_projection(shown, result)


def assert_same_projection(shown, result):
    found = result.projection
    assert shown["several"] == (found is not None)
    if found is not None:
        assert_same_tree(shown["tables"]["sent"], found.sent, lambda v: human(v, "bytes"))
        steps = (found.step, found.overlapped, found.tokens, found.tokens_overlapped)
        for seconds, item in zip(shown["projected"], steps, strict=True):
            assert same(seconds, float(item.value))
            assert item is found.step or f"{item.symbols} = {item.numbers}" in shown["shown"]


def assert_same_plans(shown, expected):
    assert len(shown) == len(expected)
    for (name, fits, memory, *figures), plan in zip(shown, expected, strict=True):
        made = plan.projection
        assert name == f"{plan.setup.gpus} {plan.name}"
        assert (fits, memory) == ("fits" if plan.fits else "too large", str(plan.memory)), name
        values = (made.sent.value, made.share, made.tokens.value, made.tokens_overlapped.value)
        for figure, value in zip(figures, values, strict=True):
            assert same(figure, float(value)), name


def drawn(name, rng):
    """Draw a setting: what to set on the page, and the account it stands for."""
    config = MODELS[name]
    head, kv = rng.choice([8, 32, 64, 128]), rng.choice([1, 2, 4])
    heads = kv * rng.choice([1, 2, 3, 8])
    fields = {
        "num_layers": rng.randint(1, 130),
        "d_model": head * heads,
        "num_heads": heads,
        "num_kv_heads": kv,
        "d_head": rng.choice([None, 64, 96]),
        "d_ff": rng.randint(1, 30_000) * 16,
        "vocab_size": rng.randint(1, 300_000),
        "tie_embeddings": rng.random() < 0.5,
    }
    page = {key: value for key, value in fields.items()}
    ffn = config.ffn
    if rng.random() < 0.4:
        experts = rng.randint(1, 200)
        kind = ffn if isinstance(ffn, c.MoE) else c.MoE(8, 2)
        ffn = replace(kind, num_experts=experts, experts_per_token=rng.randint(1, min(9, experts)))
        page |= {"ffn": "moe", "num_experts": experts, "experts_per_token": ffn.experts_per_token}
    else:
        ffn = c.SwiGLU() if isinstance(ffn, c.MoE) else ffn
        page["ffn"] = "dense"
    config = replace(config, ffn=ffn, **fields)
    work, setup = drawn_setup(rng, config)
    gpu, convention = rng.choice(sorted(MACHINES)), rng.choice(CONVENTIONS)
    mfu = rng.choice([0.25, 0.4, 0.55])
    page |= {**work, "gpu": gpu, "convention": convention, "mfu": mfu}
    link = None if page["link"] is None else page["link"] * 1e9
    means = {"machine": gpu, "convention": convention, "mfu": mfu, "link": link}
    return page, account(config, setup, **means), convention


def drawn_setup(rng, config):
    context = rng.choice([16, 1_000, 4_096, 131_072])
    page = {
        "phase": rng.choice(PHASES),
        "batch": rng.choice([1, 2, 7, 64, 1_000]),
        "context": context,
        "cache": rng.choice([None, 0, 5_000]),
        "dtype": rng.choice(sorted(PRECISIONS)),
        "optimizer": rng.choice(OPTIMIZERS),
        "checkpointing": rng.choice(CHECKPOINTING),
        "attention": rng.choice(["fused", "unfused"]),
        "loss": rng.choice(["fused", "unfused"]),
        "accumulate": rng.random() < 0.5,
        "parallel": rng.choice(PARALLEL),
        "micro_batches": rng.choice([1, 1, 3]),
    }
    # tensor parallelism must divide every size drawn above
    tp = rng.choice([1, config.num_kv_heads])
    if page["parallel"] == "none" or getattr(config.ffn, "num_experts", 0) % tp:
        tp = 1
    page["gpus"] = {"none": 1, "tp": tp}.get(page["parallel"], tp * rng.choice([2, 3, 64]))
    page["tp"] = tp if page["parallel"] != "tp" else 1
    execution = Execution(page["attention"], page["loss"], page["checkpointing"])
    words = {"dtype": "precision"}
    fields = {
        words.get(key, key): value
        for key, value in page.items()
        if key not in ("attention", "loss", "checkpointing")
    }
    if page["parallel"] == "tp":
        fields["tp"] = None
    return {**page, "link": rng.choice([None, 12.5])}, Setup(**fields, execution=execution)


class TestInTheBrowser:
    pytestmark = browser_test

    @pytest.mark.parametrize("name", MODELS)
    def test_the_page_opens_with_the_account_of_its_model(self, browser, pages, name):
        browser.open(pages(name))
        result = account(MODELS[name], machine="h100-sxm")
        assert_same_account(browser.run(READ), result, "full")
        assert browser.complaints() == []

    @pytest.mark.parametrize("name", MODELS)
    def test_any_setting_gives_the_account_of_that_setting(self, browser, pages, name):
        rng = random.Random(f"settings of {name}")
        browser.open(pages(name))
        for _ in range(5):
            page, result, convention = drawn(name, rng)
            browser.run(SET, page)
            assert_same_account(browser.run(READ), result, convention)

    def test_tensor_parallelism_shows_the_share_of_one_rank(self, browser, pages):
        browser.open(pages("moe"))
        browser.run(SET, {"gpus": 4, "parallel": "tp", "phase": "training", "vocab_size": 1_001})
        config = MODELS["moe"].replace(vocab_size=1_001)
        result = account(config, phase="training", gpus=4, parallel="tp", machine="h100-sxm")
        assert_same_account(browser.run(READ), result, "full")

    @pytest.mark.parametrize(
        ("name", "work", "cuts"),
        [
            ("gqa", {"batch": 2, "phase": "training", "micro_batches": 4}, {1, 8}),
            ("moe", {"checkpointing": "block", "context": 4_097, "gpu": "a100-40"}, {1, 4}),
            ("dense", {"link": 25.0, "tp": 5, "gpus": 5, "mfu": 0.7}, {1}),
            ("post", {"dtype": "fp32"}, {1, 8}),
        ],
    )
    def test_plans_are_those_of_python(self, browser, pages, name, work, cuts):
        browser.open(pages(name))
        browser.run(SET, work)
        shown = browser.run(READ)
        means = {"gpu": "h100-sxm", "mfu": 0.4, "link": None}
        means |= {key: work[key] for key in means if key in work}
        fields = {key: value for key, value in work.items() if key not in means}
        execution = Execution(checkpointing=fields.pop("checkpointing", "none"))
        precision = fields.pop("dtype", "bf16-mixed")
        setup = Setup(**fields, precision=precision, execution=execution)
        link = None if means["link"] is None else means["link"] * 1e9
        expected = plans(MODELS[name], setup, MACHINES[means["gpu"]], means["mfu"], link)
        assert_same_plans(shown["plans"], expected)
        assert {plan.setup.tp for plan in expected} == cuts

    def test_counts_beyond_what_floats_hold_are_exact(self, browser, pages):
        browser.open(pages("dense"))
        sizes = {"num_layers": 12_345, "d_model": 1_000_001, "d_head": 128, "d_ff": 3_999_999}
        browser.run(SET, {**sizes, "batch": 99_991, "context": 1_000_003, "phase": "training"})
        config = replace(MODELS["dense"], **sizes)
        setup = Setup("training", batch=99_991, context=1_000_003)
        flops = account(config, setup).flops["full"]
        assert flops.value > 2**90
        shown = browser.run(READ)
        assert shown["conventions"]["full"] == str(flops.value)
        assert_same_account(shown, account(config, setup, machine="h100-sxm"), "full")

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("dense", {"batch": 8, "phase": "training", "checkpointing": "block", "gpus": 8}),
            ("gqa", {"gpus": 64, "parallel": "fsdp", "tp": 4, "micro_batches": 2, "link": 20}),
            ("dense", {"num_layers": 40, "d_model": 1_664, "num_heads": 26, "gpu": "h200"}),
            ("moe", {"num_experts": 60, "tie_embeddings": True, "accumulate": True, "mfu": 0.3}),
            ("window", {"ffn": "moe", "phase": "decode", "cache": 300, "price": 2.5}),
        ],
    )
    def test_the_command_it_shows_gives_the_same_numbers(
        self, browser, pages, name, fields, tmp_path, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        browser.open(pages(name))
        browser.run(SET, fields)
        shown = browser.run(READ)
        (tmp_path / "base.json").write_text(c.to_json(MODELS[name]))
        (tmp_path / "model.json").write_text(shown["config"])
        words = shlex.split(shown["command"])[1:]
        words = ["base.json" if word == name else word for word in words]
        answer = CliRunner().invoke(app, [*words, "--json"])
        assert answer.exit_code == 0, answer.output
        printed = json.loads(answer.stdout)
        unique = printed["parameters"]["unique"]
        assert shown["counts"]["unique"] == str(unique)
        totals = {name: str(tree["value"]) for name, tree in printed["flops"].items()}
        assert shown["conventions"] == totals
        assert shown["moments"] == {k: str(v) for k, v in printed["memory"]["moments"].items()}
        assert same(shown["cards"]["card-memory"], printed["memory"]["training"]["value"])
        assert same(shown["seconds"], printed["roofline"]["seconds"])
        if shown["several"]:
            step = printed["projection"]["step"]["value"]
            assert same(shown["projected"][0], float(step))

    def test_a_slider_moves_its_number_and_the_results(self, browser, pages):
        browser.open(pages("dense"))
        browser.run(
            """const slider = document.getElementById("num_layers-slider");
            slider.value = 11; slider.dispatchEvent(new Event("input", {bubbles: true}));"""
        )
        expected = account(replace(MODELS["dense"], num_layers=12))
        assert browser.run(READ)["counts"]["unique"] == str(expected.parameters.unique)
        assert browser.run("return document.getElementById('num_layers').value") == "12"

    def test_an_arrow_key_moves_a_slider(self, browser, pages):
        browser.show(1280, 900)
        browser.open(pages("dense"))
        browser.run("document.getElementById('batch-slider').focus()")
        key = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
        browser.command("Input.dispatchKeyEvent", type="keyDown", **key)
        browser.command("Input.dispatchKeyEvent", type="keyUp", **key)
        expected = account(MODELS["dense"], batch=2).flops["full"].value
        assert browser.run(READ)["conventions"]["full"] == str(expected)

    def test_the_machine_it_was_made_on_can_be_measured(self, browser, tmp_path):
        here = replace(MACHINES["l4"], name="this machine (2 threads)", bf16=None, measured=True)
        here = replace(here, bandwidth=1.25e10, fp16=None, fp32=7.3e10, price=None)
        page = tmp_path / "here.html"
        page.write_text(account_page("gpt2", preset("gpt2"), machine=here), encoding="utf-8")
        browser.open(page.as_uri())
        shown = browser.run(READ)
        assert shown["command"] == "scratchlm account gpt2 --gpu this"
        line = account(preset("gpt2"), machine=here).roofline
        assert same(shown["seconds"], line.seconds)
        assert f"MFU {line.mfu}" in shown["shown"]
        assert shown["run"]["dollars"] == ""

    def test_changing_the_width_updates_linked_sizes(self, browser, pages):
        browser.open(pages("gqa"))
        browser.run(SET, {"d_model": 8_192})
        browser.run(READ)
        sizes = browser.run(
            """return ["d_head", "d_ff", "num_kv_heads"]
            .map((id) => document.getElementById(id).value)"""
        )
        assert sizes == ["256", "28672", "8"]

    def test_the_url_restores_a_setting(self, browser, pages):
        browser.open(pages("gqa"))
        fields = {"batch": 3, "d_head": 64, "phase": "decode", "accumulate": True, "gpu": "l4"}
        browser.run(SET, fields)
        before = browser.run(READ)
        wait = "return new Promise((then) => setTimeout(() => then(location.hash), 300))"
        address = browser.run(wait)  # it is written when the hand rests
        assert address == "#phase=decode&batch=3&d_head=64&accumulate=true&gpu=l4"
        browser.open("about:blank")
        browser.open(pages("gqa") + address)
        assert browser.run(READ) == before

    @pytest.mark.parametrize(
        ("name", "fields"),
        [
            ("dense", {"num_heads": 24}),
            ("dense", {"d_model": 1_601, "d_head": 63}),
            ("dense", {"batch": 0}),
            ("dense", {"d_model": 1_048_577, "d_head": 64}),
            ("dense", {"batch": 2**40 + 1}),
            ("gqa", {"num_kv_heads": 5}),
            ("gqa", {"d_head": 31}),
            ("moe", {"experts_per_token": 129}),
            ("moe", {"gpus": 3, "parallel": "tp"}),
            ("moe", {"gpus": 8, "parallel": "tp"}),
            ("moe", {"gpus": 64, "parallel": "fsdp", "tp": 8}),
            ("gqa", {"gpus": 12, "parallel": "zero1", "tp": 8}),
            ("gqa", {"gpus": 8, "link": 0}),
            ("post", {"d_model": 255, "d_head": 32}),
            ("dense", {"mfu": 1.5}),
            ("dense", {"price": -1}),
        ],
    )
    def test_the_page_refuses_with_the_messages_of_python(self, browser, pages, name, fields):
        browser.open(pages(name))
        browser.run(SET, fields)
        message = browser.run(READ)["refusal"]
        assert browser.run("return document.getElementById('results').hidden")
        with pytest.raises(ValueError) as refused:
            self.asked(MODELS[name], fields)
        assert re.sub(r"(\d)\.0\b", r"\1", str(refused.value)) == message
        browser.run("document.getElementById('reset').click()")
        assert browser.run(READ)["refusal"] == ""

    @staticmethod
    def asked(config, fields):
        money = {k: float(v) for k, v in fields.items() if k in ("mfu", "price", "link")}
        work = {k: v for k, v in fields.items() if k in ("batch", "gpus", "parallel", "tp")}
        sizes = {k: v for k, v in fields.items() if k not in {**money, **work}}
        if {"experts_per_token", "num_experts"} & set(sizes):
            sizes = {"ffn": replace(config.ffn, **sizes)}
        return account(config.replace(**sizes), **work, machine="h100-sxm", **money)

    @pytest.mark.parametrize("typed", ["", "1.5"])
    def test_an_incomplete_number_is_one_error_line(self, browser, pages, typed):
        browser.open(pages("dense"))
        browser.run(SET, {"batch": typed})
        assert browser.run(READ)["refusal"].startswith("batch must be a whole number; got ")

    @pytest.mark.parametrize("width", [390, 1280])
    def test_the_page_has_no_horizontal_overflow(self, browser, pages, width):
        browser.show(width, 900)
        browser.open(pages("moe") + "#phase=training")
        browser.run(READ)
        browser.run("for (const box of document.querySelectorAll('details')) box.open = true")
        assert browser.run("return document.documentElement.scrollWidth") == width
        unnamed = browser.run(
            """return [...document.querySelectorAll("input, select")]
            .filter((field) => !field.labels.length && !field.ariaLabel).map((field) => field.id)"""
        )
        assert unnamed == []

    def test_numbers_are_printed_as_the_terminal_prints_them(self, browser, pages):
        browser.open(pages("dense"))
        rng = random.Random(0)
        values = [0.0, 0.5, 1.5, 2.5, 12.25, 12.35, 0.125, 99.95, 999.5, 1e5, 1e-7, 123_456.5]
        values += [rng.uniform(0, 1) * 10 ** rng.randint(-8, 20) for _ in range(200)]
        values += [rng.randrange(2**12) / 2 ** rng.randint(0, 12) * 1024 for _ in range(200)]
        expected = [
            [number_text(v), exact(v), human(v), human(v, "bytes"), seconds_text(v), f"{v:.1%}"]
            for v in values
        ]
        shown = browser.run(
            """return arguments[0].map((v) => [numberText(v), exact(v), human(v), bytesText(v),
            secondsText(v), percent(v).replaceAll(",", "")])""",
            values,
        )
        assert shown == expected

    def test_quotients_of_large_whole_numbers_are_the_nearest_float(self, browser, pages):
        browser.open(pages("dense"))
        rng = random.Random(1)
        pairs = [(rng.getrandbits(rng.randint(1, 120)), rng.randint(1, 2**70)) for _ in range(300)]
        pairs += [(2**53 + 1, 1), (2**54 + 3, 2), (1, 3), (0, 7), (10**30 + 1, 10**30)]
        pairs.append(((2**53 + 1) * 2**80 + 1, 2**81))  # a little more than half way between two
        shown = browser.run(
            "return arguments[0].map(([a, b]) => quotient(BigInt(a), BigInt(b)))",
            [[str(a), str(b)] for a, b in pairs],
        )
        assert shown == [a / b for a, b in pairs]


def test_the_page_is_self_contained():
    page = account_page("dense", MODELS["dense"])
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://(?!.*arxiv)""", page)
    assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", page)
    assert "default-src 'none'" in page


def test_a_name_cannot_break_out_of_the_page():
    page = account_page("</script><script>alert(1)</script>", BASE)
    assert page.count("<script>alert") == 0
    assert "&lt;script&gt;alert(1)" in page


def test_the_flag_writes_the_page(tmp_path):
    where = tmp_path / "page.html"
    answer = CliRunner().invoke(app, ["account", "gpt2", "--batch", "4", "--html", str(where)])
    assert answer.exit_code == 0, answer.output
    setup = Setup(batch=4)
    assert where.read_text(encoding="utf-8") == account_page("gpt2", preset("gpt2"), setup)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--html", "page.txt"], "a page must end in .html; got page.txt"),
        (["--html", "page.html", "--sweep", "batch=1..4"], "--html has no effect beside --sweep"),
        (["--html", "page.html", "--documents", "512,512"], "documents and html exclude"),
        (["--html", "page.html", "--mfu", "0"], "mfu must lie in (0, 1]; got 0.0"),
        (["--html", "no/such/folder/page.html"], "No such file"),
    ],
)
def test_invalid_page_arguments_are_refused(more, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["account", "gpt2", *more])
    assert says in str(answer.exception)
    assert not list(tmp_path.iterdir())
