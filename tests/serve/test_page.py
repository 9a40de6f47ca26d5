"""The page in a real Chromium: its numbers are the Python API's, and it does what it says."""

import contextlib
import io
import json
import re

import pytest
import torch

import chromium
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accounting import account
from scratchlm.config import MoE
from scratchlm.inference import Sampling, generate, next_tokens
from scratchlm.inspect import PARTS, attention_weights, inspect
from scratchlm.serve import look_inside, look_tokens
from scratchlm.serve.page_files import POLICY, offline_page
from scratchlm.serve.subject import Subject
from serve.page_in_browser import EVIL, address_of, axe, evil_tokenizer, page_of, save_run
from serve.tiny_server import ask, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not chromium.IS_THERE, reason=chromium.MISSING),
]
IDS = [*b"ab ab abc a"]
VIEWS = ("choices", "attention", "lens", "attribution", "ablation", "patch", "cost", "cache")
ADDRESS = address_of(IDS, at=8, o="ba ba ba")  # eight tokens before the chosen one


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def subject(loaded):
    return Subject.of(loaded.model, loaded.tokenizer, "tiny")


@pytest.fixture(scope="module")
def opened(loaded):
    with page_of(loaded) as page:
        yield page


@pytest.fixture
def page(opened):
    opened.browser.show(1280, 900)
    opened.browser.complaints()  # of the test before
    yield opened
    assert opened.browser.complaints() == []


def percent(p):
    """As the page writes it."""
    if 0.9995 <= p < 1:
        return "> 99.9 %"
    if 0 < p < 0.00005:
        return "< 0.01 %"
    return f"{100 * p:.{2 if p < 0.1 else 1}f} %"


def quoted(text):
    return json.dumps(text, ensure_ascii=False)


# Writing


def write(page, text, **settings):
    page.open(address_of(IDS, **settings).partition("&t=")[0])
    page.run("document.getElementById('prompt').value = arguments[0]", text)
    page.click("#run")
    page.wait("document.querySelectorAll('#tokens .token').length > 1")
    page.settle()


def test_a_text_is_continued_as_the_engine_continues_it(page, loaded):
    write(page, "ab ab", max_tokens=12, temperature=1.1, top_k=20, seed=7, frequency_penalty=0.3)
    sampling = Sampling(temperature=1.1, top_k=20, frequency_penalty=0.3)
    (wrote,) = generate(
        loaded.model,
        "ab ab",
        tokenizer=loaded.tokenizer,
        max_new_tokens=12,
        sampling=sampling,
        seed=7,
    )
    assert page.ids() == [*b"ab ab", *wrote.token_ids]
    page.wait("document.getElementById('live').textContent")
    assert page.problem() == ""


def test_a_conversation_goes_through_the_models_format(page, loaded):
    page.open("mode=chat&max_tokens=6&temperature=0&seed=1")
    page.run("document.getElementById('message').value = 'ab?'")
    page.click("#send")
    page.settle()
    messages = [{"role": "user", "content": "ab?"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, "seed": 1}
    answer = ask(page.server, "/v1/chat/completions", {**body, "return_token_ids": True}).json
    shown = page.run(
        "return [...document.querySelectorAll('#messages span')].map((e) => e.textContent)"
    )
    assert shown == ["ab?", answer["choices"][0]["message"]["content"]]
    given = ask(page.server, "/tokenize", {"messages": messages}).json["tokens"]
    assert page.ids() == [*given, *answer["choices"][0]["token_ids"]]


@pytest.fixture(scope="module")
def mixture_page(tmp_path_factory):
    """The page of a model with experts and a long context."""
    ffn = MoE(num_experts=4, experts_per_token=2)
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2}
    model = TransformerLM(ModelConfig(evil_tokenizer().vocab_size, 4096, **sizes, ffn=ffn))
    model.reset_parameters(torch.Generator().manual_seed(1))
    with page_of(save_run(tmp_path_factory.mktemp("mixture"), model=model), num_pages=600) as page:
        yield page


def test_the_stop_button_ends_the_writing_and_frees_its_pages(mixture_page):
    page, pieces = mixture_page, []
    page.server.service.thread.listeners.append(lambda _, news: pieces.extend(news.pieces))
    page.open("max_tokens=4000&p=ab&temperature=0")
    page.run("document.getElementById('run').click()")
    page.wait("document.querySelectorAll('#tokens .token').length > 5")
    page.run("document.getElementById('stop').click()")
    page.settle()
    wait_until(lambda: page.server.service.engine.is_idle)
    assert page.server.service.engine.pool.num_held == 0
    assert len(pieces) >= 5
    assert all(piece.finish_reason is None for piece in pieces)  # it did not end by itself
    assert page.problem() == ""


def test_experts_are_shown_with_their_weights(mixture_page):
    page, model = mixture_page, mixture_page.server.service.loaded.model
    page.open(address_of(IDS, at=7, v="experts"))
    routes = []
    with torch.no_grad():
        model.hidden(torch.tensor([IDS]), routes=routes)
    for row, routed in zip(page.cells("#view table"), routes, strict=True):
        chosen = routed.probabilities.gather(1, routed.experts)
        chosen = chosen / chosen.sum(-1, keepdim=True)
        assert row[1:] == [
            "".join(f"{e}: {percent(w)}" for e, w in zip(*pair, strict=True))
            for pair in zip(routed.experts.tolist()[4:], chosen.tolist()[4:], strict=True)
        ]
    page.run(axe() + "; window.axe = axe")
    assert violations(page) == []


def test_a_refusal_is_shown_in_one_line(page):
    page.open("p=" + "a" * 97)
    page.click("#run")
    page.wait("!document.getElementById('problem').hidden")
    assert "context" in page.problem()
    assert page.run("return document.querySelectorAll('#tokens .token').length") == 0


# Tokens and choices


UNITS = {
    "%": 0.01,
    "kFLOP": 1e3,
    "MFLOP": 1e6,
    "kB": 1e3,
    "MB": 1e6,
    "ms": 1e-3,
    "µs": 1e-6,
    "ns": 1e-9,
}


def is_shown_as(text, value):
    """Whether a number is what is shown of it, to the last digit shown."""
    sign, digits, exponent, unit = re.fullmatch(
        r"([<>+−-]?) ?([\d.]+)((?:e[+-]\d+)?) ?(\S*)", text
    ).groups()
    scale = UNITS.get(unit, 1) * float("1" + (exponent or "e0"))
    if sign in ("<", ">"):
        bound = float(digits) * scale
        return 0 < value < bound if sign == "<" else bound <= value < 1
    shown = (-1 if sign in ("−", "-") else 1) * float(digits) * scale
    last = scale * 10.0 ** -len(digits.partition(".")[2])
    return abs(value - shown) <= 0.51 * last + 1e-12 * abs(value)


def explanations(page, selector):
    """Click every number a selector finds; yield what it shows, and its dialog's value."""
    count = page.run("return document.querySelectorAll(arguments[0]).length", selector)
    assert count, selector
    for at in range(count):
        page.run(
            "document.getElementById('formula').close();"
            "document.getElementById('formula-name').textContent = '';"
            "window.asked = document.querySelectorAll(arguments[0])[arguments[1]]; asked.click()",
            selector,
            at,
        )
        page.wait("document.getElementById('formula-name').textContent")
        value = float(page.text("#formula .result").removeprefix("= "))
        assert page.run("return document.querySelectorAll('#formula mark').length") == 1
        yield page.run("return window.asked.textContent"), value
    page.run("document.getElementById('formula').close()")


@pytest.mark.parametrize(
    ("view", "selectors"),
    [
        ("choices", ["#view p .asked", ".choices tbody tr:nth-child(2) .asked"]),
        ("lens", [".lens tbody tr:nth-child(-n+3) td:nth-child(3) .asked"]),
        (
            "attention",
            [".pair tr:nth-child(2) .asked", "details:last-child tr:nth-child(7) .asked"],
        ),
        ("attribution", ["#view .asked"]),
        ("ablation", ["#bits .asked", "#ablated tbody tr:nth-child(2) .asked"]),
        ("patch", ["#patched p .asked", "#patched tr:nth-child(3) .asked"]),
        ("cost", [".figures .asked", "#view tr:nth-child(2) .asked"]),
        ("tokens", ["#tokens-table tbody tr:nth-child(5) .asked"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_number_with_a_dotted_line_is_explained_by_its_own_value(page, view, selectors):
    """As it is shown, so it is computed."""
    settings = {"top_k": 200, "temperature": 0.7, "repetition_penalty": 1.3, "given": 4}
    page.open(address_of(IDS, at=8, o="ba ba ba", e="head:1:2:0.5:1", a=97, **settings))
    if view == "tokens":
        page.ids()  # opens the table
    else:
        page.view(view)
    for selector in selectors:
        for shown, value in explanations(page, selector):
            assert is_shown_as(shown, value), (selector, shown, value)


def test_every_number_shown_can_be_asked(page, mixture_page):
    """In tables and figures; but places, ids and counts, which nothing computes."""
    page.open(f"{ADDRESS}&e=head%3A1%3A2%3A0.5%3A1&top_k=9&repetition_penalty=1.3")
    page.ids()  # opens the table
    for view in VIEWS:
        page.view(view)
        assert mute_numbers(page) == [], view
    mixture_page.open(address_of(IDS, at=7, v="experts"))
    assert mute_numbers(mixture_page) == []
    load = "#view .scroller:nth-of-type(2) tbody tr:nth-child(3) .asked"
    for shown, value in explanations(mixture_page, load):
        assert is_shown_as(shown, value)


def mute_numbers(page):
    """Return the numbers in tables and figures that cannot be asked where they come from."""
    page.run("for (const d of document.querySelectorAll('#view details')) d.open = true")
    page.settle()
    return page.run(
        "const counts = ['position', 'id', 'layer', 'expert', 'pages', 'tokens'];"
        "const head = (c) => c.closest('table').tHead.rows[0].cells[c.cellIndex].textContent;"
        "return [...document.querySelectorAll('main td.number, .figures:not(.counts) dd')]"
        ".filter((c) => /\\d/.test(c.textContent) && !c.querySelector('button.asked'))"
        ".filter((c) => c.tagName === 'DD' || !counts.includes(head(c)))"
        ".map((c) => c.textContent)"
    )


@pytest.mark.parametrize("colour", ["probability", "surprise", "entropy"])
def test_tokens_show_what_the_model_thought_of_them(page, subject, colour):
    page.open(address_of(IDS, at=3, c=colour, n=1))
    shown = page.run(
        "return [...document.querySelectorAll('.token small')].map((e) => e.textContent)"
    )
    read = look_tokens.read(subject, IDS)["tokens"][1:]
    form = percent if colour == "probability" else "{:.2f} bits".format
    assert shown == [form(token[colour]) for token in read]
    shades = page.run("return [...document.querySelectorAll('.token')].map((e) => e.className)")
    levels = [int(re.search(r"shade-(\d+)", name).group(1)) for name in shades[1:-1]]
    order = sorted(range(len(read)), key=lambda i: read[i][colour])
    assert [levels[i] for i in order] == sorted(levels)


def test_alternatives_show_both_probabilities_and_who_removed_whom(page, subject, loaded):
    words = {"top_k": 6, "top_p": 0.7, "temperature": 0.9, "repetition_penalty": 1.2, "seed": 3}
    page.open(address_of(IDS, at=8, given=4, **words))
    sampling = Sampling(temperature=0.9, top_k=6, top_p=0.7, repetition_penalty=1.2)
    found = look_tokens.choices(subject, IDS, 8, sampling=sampling, num_prompt=4, seed=3, best=12)
    raw = {c.token_id: c.probability for c in next_tokens(loaded.model, IDS[:8], best=260)}
    names = {"top_k": "top-k", "top_p": "top-p"}
    for row, cells in zip(found["rows"], page.cells("table.choices"), strict=True):
        assert cells[0] == quoted(row["text"])
        assert cells[1] == percent(raw[row["id"]])
        gone = row["removed_by"]
        assert cells[2] == (f"removed by {names[gone]}" if gone else percent(row["after"]))
        assert cells[4:6] == [str(row["rank"]), "–" if gone else str(row["rank_after"])]
        assert cells[6] == f"{row['logit']:.3f}"
    assert {row["removed_by"] for row in found["rows"]} == {None, "top_k", "top_p"}
    assert f"which selects {quoted(found['draw']['text'])}" in page.text("#view")


def test_another_choice_grows_a_branch_that_reuses_the_cached_beginning(page, loaded, subject):
    page.open(address_of(IDS, at=10, max_tokens=5, temperature=0, seed=1))
    token = page.run("return document.querySelectorAll('.go')[3].getAttribute('aria-label')")
    before = page.server.service.engine.scheduler.num_found
    for _ in range(2):  # the first time the beginning is computed, the second time it is there
        page.run("document.querySelectorAll('.go')[3].click()")
        page.wait("document.querySelector('#tree .branch')")
        page.settle()
        if _ == 0:
            grown = page.ids()
            page.run("document.querySelectorAll('#tree .branch')[0].click()")
            page.settle()
            page.run("document.querySelectorAll('#tokens .token')[10].click()")
            page.settle()
    assert grown[:10] == IDS[:10]
    chosen = json.loads(token.removeprefix("Continue with "))
    assert subject.text(grown[10]) == chosen
    options = {"max_new_tokens": 5, "sampling": Sampling(temperature=0)}
    (wrote,) = generate(loaded.model, [grown[:11]], tokenizer=loaded.tokenizer, **options)
    assert grown[11:] == wrote.token_ids
    assert page.run("return document.querySelectorAll('#tree .branch').length") == 3
    assert page.server.service.engine.scheduler.num_found >= before + 8  # a whole page


def test_a_script_in_a_token_stays_text(page, loaded):
    evil = loaded.tokenizer.special_tokens[EVIL]
    ids = [97, evil, 98, evil]
    page.open(address_of(ids, at=3, n=1, o="abcd"[:3]))
    for view in VIEWS:
        page.view(view)
        assert EVIL in page.text("#tokens")
        page.run("for (const d of document.querySelectorAll('details')) d.open = true")
        assert page.run("return window.hacked ?? null") is None
        assert page.run("return document.querySelectorAll('main script, main img').length") == 0


# Inside


def test_a_heads_weights_are_those_of_the_python_api(page, loaded):
    page.open(address_of(IDS, at=7, v="attention", l=1, h=2))
    weights = attention_weights(loaded.model, IDS)
    page.run("document.querySelectorAll('#view details')[0].open = true")
    page.wait("document.querySelector('#view details table')")
    cells = page.cells("#view details table")
    assert [row[2] for row in cells] == [f"{w:.4f}" for w in weights[1, 2, 7, :8].tolist()]
    drawn = page.run(
        "const c = document.getElementById('pattern');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        ".filter((_, i) => i % 4 === 0)"
    )
    order = weights[1, 2].flatten().argsort(descending=True).tolist()
    reds = [drawn[i] for i in order]
    assert reds == sorted(reds)  # the larger the weight, the darker in the light scheme
    assert page.run("return document.querySelectorAll('#heads .head').length") == 8


def test_heads_are_sorted_by_what_they_do(page, subject):
    page.open(address_of(IDS, at=7, v="attention", s="induction"))
    scores = {
        (h["layer"], h["head"]): h["induction"] for h in look_inside.heads(subject, IDS)["heads"]
    }
    names = page.run(
        "return [...document.querySelectorAll('#heads .head span')].map((e) => e.textContent)"
    )
    found = [scores[tuple(map(int, name.split(".")))] for name in names]
    assert found == sorted(found, reverse=True)


def test_the_lens_shows_the_python_apis_guesses(page, loaded):
    page.open(address_of(IDS, at=7, v="lens"))
    with torch.no_grad(), inspect(loaded.model) as look:
        look.keep(["embed", "layers.*.out"])
        loaded.model(torch.tensor([IDS]))
    table = look.lens()[:, 0, 2:10].double().softmax(-1).flip(0)  # eight fit beside each other
    for row, p in zip(page.cells("table.lens"), table, strict=True):
        assert [re.search(r"([<>] )?[\d.]+ %$", cell).group() for cell in row[1:]] == [
            percent(float(q)) for q in p.max(-1).values
        ]


def test_shares_add_up_to_the_logit_shown(page, loaded):
    page.open(address_of(IDS, at=7, v="attribution", a=97))
    with torch.no_grad(), inspect(loaded.model) as look:
        look.keep(PARTS)
        loaded.model(torch.tensor([IDS[:7]]))
    found = look.cache.attribute(IDS[7], against=97)
    cells = page.cells("#view table")
    for (part, share), row in zip(found.top(), cells, strict=False):
        assert row[0] == part
        assert row[1] == f"{'−' if share < 0 else '+'}{abs(share):.4f}"
    assert cells[-1][0] == "sum"
    total = sum(float(row[1].replace("−", "-")) for row in cells[:-1])
    assert total == pytest.approx(float(cells[-1][1].replace("−", "-")), abs=1e-3)
    assert f"{float(found.logit[0]):.4f}" in page.text("#view p")


def test_an_ablation_changes_the_table_at_once_and_off_restores_the_bits(page, subject):
    page.open(address_of(IDS, at=7, v="ablation", l=1, h=3))
    own = look_inside.ablate(subject, IDS[:7], [])["bits"][0]
    own_bits = f"The logits are the model's own, bit for bit (SHA-256 {own}…)."
    assert page.text("#bits") == own_bits
    page.click("#edit-add")

    def expect(factor):
        edit = look_inside.Scaling("layers.1.attn.heads", factor, heads=[3])
        found = look_inside.ablate(subject, IDS[:7], [edit] if factor != 1 else [])
        page.wait(f"document.getElementById('bits').textContent.includes('{found['bits'][1]}')")
        shown = [(row[0], row[1], row[2]) for row in page.cells("#ablated table")]
        assert shown == [
            (quoted(r["text"]), percent(r["before"]), percent(r["after"])) for r in found["rows"]
        ]

    expect(0)
    slide = (
        "const s = document.querySelector('#edits input[type=range]'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('input'))"
    )
    for factor in (0.5, 2, 1):
        page.run(slide, factor)
        expect(factor)
    page.run(slide, 0)
    expect(0)
    page.click("#edits input[type=checkbox]")
    expect(1)
    assert page.text("#bits") == own_bits


@pytest.mark.parametrize(("text", "digits"), [("ba ba ba", 2), ("aa ab ab", 3)])
def test_patches_between_two_prompts_are_a_heat_map_of_the_sweep(page, subject, text, digits):
    """Where the prompts differ by 0.01 in all, two digits would show one number in all colours."""
    page.open(address_of(IDS, at=8, o=text, v="patch"))
    other = [*text.encode()]
    against = look_inside.ablate(subject, other, [], best=1)["rows"][0]["id"]
    found = look_inside.patch(subject, IDS[:8], other, IDS[8], against=against)
    shown = [row[1:] for row in page.cells("#patched table")]
    assert shown == [[f"{v:.{digits}f}" for v in row] for row in zip(*found["values"], strict=True)]


def test_a_click_on_a_number_shows_its_formula_and_its_line(page, loaded):
    page.open(address_of(IDS, at=7))
    shown = page.text(".choices tbody .asked")
    page.click(".choices tbody .asked")
    page.wait("document.getElementById('formula').open")
    best = next_tokens(loaded.model, IDS[:7], best=1)[0]
    value = float(page.text("#formula .result").removeprefix("= "))
    assert value == pytest.approx(best.probability, rel=1e-5)
    assert percent(value) == shown
    marked = page.text("#formula mark")
    assert re.fullmatch(r" *\d+ +return \(weights / total.*\n", marked)
    page.press("Escape")
    page.wait("!document.getElementById('formula').open")


def test_the_cost_is_that_of_the_account(page, loaded):
    page.open(address_of(IDS, at=7, given=2, v="cost", m="a100-80"))
    found = account(loaded.config, machine="a100-80", precision="fp32", phase="decode", cache=6)
    assert [row[-1] for row in page.cells("#view details table")] == [
        str(item.value) for depth, item in found.flops["causal"].walk() if depth
    ]
    assert is_shown_as(page.text(".figures div:nth-child(3) dd"), found.roofline.seconds)


# Taking it along


@pytest.mark.parametrize("view", VIEWS)
def test_a_link_reopens_the_view(page, view):
    page.open(f"{ADDRESS}&v={view}&c=entropy&temperature=0.5&e=head%3A1%3A2%3A0.5%3A1")
    first = page.text("#view"), page.text("#tokens"), page.run("return location.hash")
    page.run("document.getElementById('link').click()")
    link = page.run("return document.querySelector('#share textarea').value")
    page.open(link.partition("#")[2])
    assert (page.text("#view"), page.text("#tokens")) == first[:2]
    assert page.run("return document.getElementById('set-temperature').value") == "0.5"


@pytest.mark.parametrize(
    "words",
    [
        "t=5_0_1_97&t=0_5_1_98&t=-1_0_2_97.98&t=0_1_1_99&b=3",  # a branch of itself
        f"{ADDRESS}&v=constructor&c=constructor",
        f"{ADDRESS}&v=attention&s=constructor",
        f"{ADDRESS}&v=ablation&e=constructor%3A0%3A0%3A0%3A1",
        f"{ADDRESS}&v=patch&w=constructor",
    ],
)
def test_an_address_that_makes_no_sense_opens_the_page_all_the_same(page, words):
    page.open(words)
    assert page.problem() == ""
    assert page.text("#view .error") is None
    assert page.run("return document.querySelectorAll('#tokens .token').length") > 1


def test_the_exported_file_shows_the_same_offline(page, loaded, tmp_path):
    ids = [*IDS[:4], loaded.tokenizer.special_tokens[EVIL], *IDS[4:]]
    page.open(address_of(ids, at=8, v="attention", l=1, h=1, o="ba ba ba"))
    page.run(
        "const old = URL.createObjectURL; URL.createObjectURL = (blob) => {"
        " blob.text().then((t) => { window.exported = t; }); return old.call(URL, blob); };"
        "document.getElementById('export').click()"
    )
    page.wait("window.exported")
    shown = {}
    views = [view for view in VIEWS if view != "cache"]
    for view in views:
        page.view(view)
        shown[view] = page.text("#view")
    path = tmp_path / "kept.html"
    path.write_text(page.run("return window.exported"), encoding="utf-8")
    page.browser.open(path.as_uri())
    page.wait("document.documentElement.dataset.ready")
    for view in views:
        page.view(view)
        assert page.text("#view") == shown[view], view
    assert not page.run("return document.getElementById('offline-note').hidden")
    assert EVIL in page.text("#tokens")
    assert page.run("return window.hacked ?? null") is None
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return document.getElementById('run').disabled")


def said_by_python(page):
    """Run the view as Python; return what it prints."""
    page.run("document.getElementById('python').click()")
    page.wait("document.getElementById('share').open")
    script = page.run("return document.querySelector('#share textarea').value")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "the view", "exec"), {})
    return printed.getvalue()


def test_every_view_as_python_prints_the_numbers_shown(page):
    for view in VIEWS:
        page.open(f"{ADDRESS}&v={view}&l=1&h=2&e=head%3A1%3A2%3A0%3A1")
        said = said_by_python(page)
        if view == "choices":
            for row, line in zip(page.cells("table.choices"), said.splitlines(), strict=True):
                before, after = line.split()[-2:]
                assert [percent(float(before)), percent(float(after))] == row[1:3]
        elif view == "attention":
            weights = {row[2] for row in page.cells("#view .pair table")}
            assert weights <= set(said.split())
        elif view == "attribution":
            for row in page.cells("#view table")[:-1]:
                assert row[1].replace("−", "-") in said
        elif view == "ablation":
            for row, line in zip(page.cells("#ablated table"), said.splitlines(), strict=False):
                assert [percent(float(p)) for p in line.split()[-2:]] == row[1:3]
        elif view == "cost":
            assert f"{float(said.split()[0]) / 1e3:.3g} kFLOP" == page.text(".figures dd")
        elif view == "lens":
            for row, line in zip(page.cells("table.lens"), said.splitlines()[::-1], strict=True):
                found = [percent(float(p)) for p in re.findall(r"([\d.]+)[\"\']", line)]
                assert found == [cell[-len(p) :] for cell, p in zip(row[1:], found, strict=True)]
        elif view == "patch":
            layers = [line.split()[1:] for line in said.splitlines()]
            shown = [row[1:] for row in page.cells("#patched table")]
            assert shown == [[f"{float(v):.2f}" for v in row] for row in zip(*layers, strict=True)]
        else:
            assert said


def test_experts_as_python_are_those_shown(mixture_page):
    page = mixture_page
    page.open(address_of(IDS, at=7, v="experts"))
    *_, load = lines = said_by_python(page).splitlines()
    shown = page.cells("#view table")
    for layer, row in enumerate(shown):
        of_layer = [line for line in lines if line.startswith(f"layers.{layer}.")][4:-1]
        for cell, line in zip(row[1:], of_layer, strict=True):
            pairs = re.findall(r"(\d+): ([\d.]+)", line)
            assert cell == "".join(f"{expert}: {percent(float(p))}" for expert, p in pairs)
    loads = page.cells("#view .scroller:nth-of-type(2) table")
    assert [row[-1] for row in loads] == [percent(float(p)) for p in load.split()[2:]]


# Whoever looks, and wherever


def test_the_page_asks_nobody_else_and_says_so(page):
    page.open(ADDRESS)
    urls = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert all(url.startswith(page.server.url + "/") for url in urls)
    answer = ask(page.server, "/")
    assert answer.headers["content-security-policy"] == POLICY
    assert "unsafe" not in POLICY
    policy = re.search(r'Security-Policy" content="([^"]*)"', offline_page()).group(1)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert ask(page.server, "/page/../look_routes.py").status == 404


SCREENS = [(1280, "light"), (360, "dark")]
FURTHER = [(1280, "dark"), (360, "light")]


@pytest.mark.parametrize(
    ("width", "scheme"),
    [*SCREENS, *(pytest.param(*screen, marks=pytest.mark.slow) for screen in FURTHER)],
)
def test_axe_reports_nothing_and_nothing_is_cut(page, width, scheme):
    page.browser.show(width, 800, scheme)
    page.open(f"{ADDRESS}&n=1&e=head%3A1%3A2%3A0.5%3A1")
    page.run(axe() + "; window.axe = axe")
    for view in VIEWS:
        page.view(view)
        page.run("for (const d of document.querySelectorAll('#view details')) d.open = true")
        if view == "choices":
            page.run("document.querySelector('.choices .asked').click()")
            page.wait("document.getElementById('formula').open")
        assert violations(page) == [], view
        page.run("document.getElementById('formula').close()")
        assert page.run("return document.documentElement.scrollWidth") <= width, view
        if view == "choices":  # what one came for is seen without moving the table
            seen = "return document.querySelector('.go').getBoundingClientRect().right"
            assert page.run(seen) <= width


def violations(page):
    """Return what axe-core finds wrong with what is shown."""
    page.run("window.found = null; axe.run().then((r) => { window.found = r.violations; })")
    page.wait("window.found")
    return page.run(
        "return window.found.map((v) => [v.id, v.nodes.map((n) => n.html.slice(0, 150))])"
    )


def test_the_page_can_be_used_by_keyboard_alone(page):
    page.open(address_of(IDS, at=3))

    def focused():
        return page.run("const e = document.activeElement; return e.id || e.className")

    seen = []
    for _ in range(60):
        page.press("Tab")
        seen.append(focused())
        if "token" in seen[-1]:
            break
    assert {"skip", "link", "theme", "prompt", "run", "colour"} <= set(seen)
    page.press("ArrowRight", "ArrowRight")
    page.settle()
    assert "token 5," in page.run("return document.activeElement.getAttribute('aria-label')")
    assert page.run("return document.querySelector('.token[aria-current]').textContent") == "␣"
    while not focused().startswith("tab-"):
        page.press("Tab")
    page.press("ArrowRight")
    page.settle()
    assert focused() == "tab-attention"
    assert page.text("[role=tab][aria-selected=true]") == "Attention"
    page.press("Tab")
    assert focused() == "view"


def test_the_colours_can_be_switched_against_the_systems(page):
    page.browser.show(1280, 800, "dark")
    page.open(ADDRESS)
    dark = page.run("return getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    light = page.run("return getComputedStyle(document.body).backgroundColor")
    page.open(ADDRESS)
    assert page.run("return getComputedStyle(document.body).backgroundColor") == light != dark
    page.run("localStorage.clear()")


def test_a_thousand_tokens_and_all_heads_are_drawn(tmp_path, capsys):
    """What it takes is printed; no time decides."""
    ids = [(7 * i) % 250 for i in range(1024)]
    with page_of(save_run(tmp_path, 1024)) as page:
        page.open(address_of(ids[:16], at=3))
        first = page.run("return document.documentElement.dataset.ready")
        page.open(address_of(ids, at=900))
        many = page.run("return document.documentElement.dataset.ready")
        page.run(
            "window.gap = 0; let last = performance.now(); const tick = () => {"
            "const now = performance.now(); window.gap = Math.max(window.gap, now - last);"
            "last = now; requestAnimationFrame(tick); }; requestAnimationFrame(tick)"
        )
        page.view("attention")
        page.wait("document.getElementById('pattern')?.width === 1024")
        gap = page.run("return Math.round(window.gap)")
        assert page.run("return document.querySelectorAll('#tokens .token').length") == 1025
        assert page.run("return document.querySelectorAll('#heads canvas').length") == 8
    with capsys.disabled():
        print(f"\nfirst view {first} ms, of 1,024 tokens {many} ms, longest pause {gap} ms")
