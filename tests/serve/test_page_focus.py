"""Whoever uses the page by keyboard stays where they are when a part of it is drawn anew."""

import pytest

import chromium
from serve.page_in_browser import address_of, page_of, save_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not chromium.IS_THERE, reason=chromium.MISSING),
]
IDS = [*b"ab ab abc a"]
SELECT = "e.selectedIndex = 1; e.dispatchEvent(new Event('change'))"
# view, what has the focus, what is done with it
USES = {
    "sort of heads": ("attention", "#view select", SELECT),
    "a head": ("attention", "#heads button:nth-child(3)", "e.click()"),
    "another logit": ("attribution", "#view select", SELECT),
    "an edit on or off": ("ablation", "#edits input[type=checkbox]", "e.click()"),
    "a kind of patch": ("patch", "#view select", SELECT),
    "a machine": ("cost", "#view select", SELECT),
    "pages again": ("cache", "#view button", "e.click()"),
    "a tab": ("lens", "#tab-lens", "e.click()"),
    "a branch": ("lens", "#tree li li .branch", "e.click()"),
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with page_of(save_run(tmp_path_factory.mktemp("run"))) as page:
        yield page


@pytest.mark.parametrize("name", USES)
def test_what_has_the_focus_keeps_it(page, name):
    view, selector, use = USES[name]
    tree = address_of(IDS, at=8, v=view, o="ba ba ba", e="head:1:2:0.5:1")
    page.open(f"{tree}&t=0_4_5_98.99.100")
    page.run(f"const e = document.querySelector(arguments[0]); e.focus(); {use}", selector)
    page.settle()
    assert page.run("return document.activeElement.matches(arguments[0])", selector)


def test_where_it_is_gone_the_view_has_the_focus(page):
    page.open(address_of(IDS, at=8, v="ablation", e="head:1:2:0.5:1"))
    page.run("const e = document.querySelector('#edits button'); e.focus(); e.click()")
    page.settle()
    assert page.run("return document.activeElement.id") == "view"
