"""What the page does with an answer that fails, or that nobody waits for any more."""

import pytest

import chromium
from serve.page_in_browser import page_of, save_run

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not chromium.IS_THERE, reason=chromium.MISSING),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with page_of(save_run(tmp_path_factory.mktemp("run"), 4096), num_pages=600) as page:
        yield page


def messages(page):
    return page.run(
        "return [...document.querySelectorAll('#messages span')].map((e) => e.textContent)"
    )


def send(page, text):
    page.run("document.getElementById('message').value = arguments[0]", text)
    page.run("document.getElementById('send').click()")


def test_a_message_whose_answer_failed_can_be_sent_again(page):
    page.open("mode=chat&max_tokens=3&temperature=0")
    page.run(
        "const real = window.fetch; window.fetch = (path, options) => path.includes('/chat/')"
        ' ? Promise.resolve(new Response(\'{"error":{"message":"queue full"}}\', {status: 429}))'
        " : real(path, options); window.restore = () => { window.fetch = real; }"
    )
    send(page, "ab?")
    page.wait("document.getElementById('problem').textContent")
    page.settle()
    assert page.problem() == "queue full"
    assert messages(page) == []
    assert page.run("return document.getElementById('message').value") == "ab?"
    page.run("window.restore()")
    page.click("#send")
    assert len(messages(page)) == 2
    assert messages(page)[0] == "ab?"


def test_a_new_conversation_gives_up_the_answer_that_is_being_written(page):
    page.open("mode=chat&max_tokens=4000&temperature=0")
    send(page, "ab?")
    page.wait("document.querySelectorAll('#tokens .token').length > 40")
    page.run("document.getElementById('new-chat').click()")
    page.settle()
    assert page.problem() == ""
    assert messages(page) == []
    assert page.run("return document.querySelectorAll('#tokens .token').length") == 0


def test_a_branch_that_is_shown_gets_no_tokens_of_one_that_is_being_written(page):
    page.open("max_tokens=2&temperature=0&p=ab")
    page.click("#run")
    first = page.ids()
    page.run(
        "const e = document.getElementById('set-max_tokens');"
        "e.value = 4000; e.dispatchEvent(new Event('change'))"
    )
    page.settle()
    page.run("document.querySelector('.go:not([disabled])').click()")
    page.wait("document.querySelectorAll('#tokens .token').length > 20")
    page.run("document.querySelector('#tree .branch').click()")
    page.settle()
    assert page.problem() == ""
    assert page.run("return document.querySelectorAll('#tokens .token').length") == len(first) + 1
    assert page.ids() == first
