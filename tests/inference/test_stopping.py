"""Stop strings: whatever the cuts, what is shown equals the text up to the first stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratchlm.inference.stopping import StopStrings


def shown(pieces, strings):
    stop = StopStrings(strings)
    out = []
    for piece in pieces:
        out.append(stop.push(piece))
        if stop.found is not None:
            return "".join(out), True
    return "".join(out) + stop.finish(), False


@given(
    st.lists(st.text("ab\n", max_size=3), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=500, deadline=None)
def test_no_part_of_a_stop_string_is_shown_however_the_text_is_chunked(pieces, strings):
    text = "".join(pieces)
    # The definition: read on until a stop string is complete, then cut before it.
    expected = text, False
    for end in range(len(text) + 1):
        hits = [text[:end].find(s) for s in strings if s in text[:end]]
        if hits:
            expected = text[: min(hits)], True
            break
    assert shown(pieces, strings) == expected


def test_a_tail_that_may_become_a_stop_string_is_held_back_and_then_released():
    stop = StopStrings(["\nUser:"])
    assert stop.push("Hi\nUs") == "Hi"
    assert stop.push("ed car") == "\nUsed car"
    assert stop.push("\nUser") == ""
    assert stop.push(": x") == ""
    assert stop.found == "\nUser:"
    assert stop.push("more") == ""


@pytest.mark.parametrize("wrong", [[""], [3], ["a", ""]])
def test_an_empty_stop_string_is_refused(wrong):
    with pytest.raises(ValueError, match="a stop string must be a text that is not empty"):
        StopStrings(wrong)
