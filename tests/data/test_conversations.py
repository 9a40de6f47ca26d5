"""Fine-tuning data: what is learnt, what is refused, and how examples share rows."""

import contextlib
import json
import os
from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from inference.tiny import byte_tokenizer
from scratchlm import ModelConfig, TransformerLM
from scratchlm.data.batches import IGNORE_INDEX
from scratchlm.data.conversations import Encoder, Example, default_template
from scratchlm.data.examples import (
    ExampleBatches,
    ExampleValidation,
    Rows,
    pack,
    read_examples,
    write_examples,
)
from scratchlm.data.records import read_records
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer.chat_encoding import encode_chat
from scratchlm.tokenizer.chat_template import ChatTemplate
from tokenizer.chat_templates import CALLED, CHATML, LLAMA3, MARKED, MISTRAL, SAID, TOOLS

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "No."},
]


def encoder(template=None, special=MARKERS):
    tokenizer = byte_tokenizer(*special)
    eos = tokenizer.special_tokens[special[0]]
    chosen = default_template(tokenizer, eos) if template is None else ChatTemplate(template)
    return Encoder(tokenizer, chosen, eos)


def learnt(encoder, example):
    """The texts that are learnt, piece by piece."""
    pieces, last = [], False
    for token, learns in zip(example.ids, example.learns, strict=True):
        if learns and not last:
            pieces.append([])
        if learns:
            pieces[-1].append(token)
        last = learns
    return [encoder.tokenizer.decode(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("template", "special", "end"),
    [
        (None, MARKERS, "<|im_end|>"),
        ({"default": CHATML}, MARKERS, "<|im_end|>"),
        ({"default": MARKED}, MARKERS, "<|im_end|>"),
        ({"default": LLAMA3}, HEADERS, "<|eot_id|>"),
        (None, HEADERS, "<|eot_id|>"),
    ],
)
def test_only_what_the_assistant_says_is_learnt(template, special, end):
    encode = encoder(template, special)
    (example,) = encode.chat(CHAT)
    assert learnt(encode, example) == [f"Hello.{end}", f"No.{end}"]
    whole = encode.tokenizer.decode(example.ids)
    assert whole == encode.template.render(CHAT)
    plain = encoder(None, ("<|endoftext|>",))
    (example,) = plain.chat(CHAT)
    assert learnt(plain, example) == [" Hello.<|endoftext|>", " No.<|endoftext|>"]


def test_the_prompt_of_an_answer_is_what_the_model_is_asked_with():
    encode = encoder({"default": CHATML})
    (example,) = encode.chat(CHAT[:3])
    prompt = example.ids[: example.learns.index(True)]
    assert prompt == encode_chat(encode.template, CHAT[:2], encode.tokenizer)


def test_a_template_that_rewrites_the_past_gives_one_example_for_each_answer():
    encode = encoder({"default": CHATML})
    examples = encode.chat([*SAID, {"role": "assistant", "content": "Now."}])
    assert [learnt(encode, one) for one in examples] == [
        ["<think>\nhm\n</think>\n\nFine, thanks.<|im_end|>"],
        ["Now.<|im_end|>"],
    ]
    assert "hm" not in encode.tokenizer.decode(examples[1].ids)


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_of_a_chat_that_begins_with_an_answer_the_answer_alone_is_learnt(template, tools):
    encode = encoder({"default": template}, (*MARKERS, *HEADERS))
    end = "<|im_end|>" if template is CHATML else "<|eot_id|>"
    greeting = {"role": "assistant", "content": "Welcome."}
    (example,) = encode.chat([greeting], tools)
    assert learnt(encode, example) == [f"Welcome.{end}"]
    (example,) = encode.chat([greeting, *CHAT[1:3]], tools)
    assert learnt(encode, example) == [f"Welcome.{end}", f"Hello.{end}"]


def test_an_answer_is_learnt_after_the_prompt_it_is_asked_with():
    # Mistral's template writes the system's words before the last question alone, if that is last.
    template = ChatTemplate({"default": MISTRAL}, {"bos_token": "<s>", "eos_token": "</s>"})
    encode = replace(encoder(None, ("</s>", "<s>")), template=template)
    for turn, example in zip((2, 4), encode.chat(CHAT), strict=True):
        at = example.learns.index(True)
        assert example.ids[:at] == encode_chat(template, CHAT[:turn], encode.tokenizer)
        assert "Be brief." in encode.tokenizer.decode(example.ids[:at])
        assert learnt(encode, example) == [f" {CHAT[turn]['content']}</s>"]
    (example,) = encode.chat([CHAT[0], *CALLED[:2]])
    asked = encode_chat(template, [CHAT[0], CALLED[0]], encode.tokenizer)
    assert example.ids[: example.learns.index(True)] == asked
    assert learnt(encode, example) == ["[TOOL_CALLS] weather</s>"]


def test_a_prompt_that_no_answer_follows_is_refused():
    # As of DeepSeek-R1: what was thought is left out later, and the prompt begins a thought.
    opened = CHATML.replace(
        "'<|im_start|>assistant\\n' }}", "'<|im_start|>assistant\\n<think>\\n' }}"
    )
    assert opened != CHATML
    with pytest.raises(ValueError, match="does not write an answer after its generation prompt"):
        encoder({"default": opened}).chat(CHAT)


def test_tools_reach_the_template_and_their_answers_are_not_learnt():
    encode = encoder({"default": CHATML})
    (example,) = encode.encode({"messages": CALLED, "tools": TOOLS})
    said = learnt(encode, example)
    assert said[-1] == "Clear.<|im_end|>"
    assert '"name": "weather"' in said[0]
    assert "sky" not in "".join(said)
    assert "Say the weather" in encode.tokenizer.decode(example.ids)


def test_pairs_and_plain_text():
    encode = encoder()
    (example,) = encode.encode({"prompt": "2+2=", "completion": "4"})
    assert encode.tokenizer.decode(example.ids) == "2+2=4<|endoftext|>"
    assert learnt(encode, example) == ["4<|endoftext|>"]
    (example,) = encode.encode({"text": "abc"})
    assert encode.tokenizer.decode(example.ids) == "<|endoftext|>abc<|endoftext|>"
    assert learnt(encode, example) == ["abc<|endoftext|>"]
    forged = encode.pair("<|im_start|>", "<|im_end|>")
    assert sum(token >= 256 for token in forged.ids) == 1  # the end of the text


ASKED = {"role": "user", "content": "hi"}
YES, NO = ({"role": "assistant", "content": said} for said in ("yes", "no"))


@pytest.mark.parametrize("prompt", [None, "hi", [ASKED]])
@pytest.mark.parametrize("repeated", [True, False])
def test_preferences_share_their_prompt_which_stands_there_once(prompt, repeated):
    encode = encoder({"default": CHATML})
    before = [ASKED] if repeated or prompt is None else []
    record = {"prompt": prompt, "chosen": [*before, YES], "rejected": [*before, NO]}
    record["messages"] = record["chosen"]  # which data for several purposes hold, too
    for example, answer in zip(encode.encode(record, preference=True), ("yes", "no"), strict=True):
        assert learnt(encode, example) == [f"{answer}<|im_end|>"]
        at = example.learns.index(True)
        assert example.ids[:at] == encode_chat(encode.template, [ASKED], encode.tokenizer)


def test_preferences_of_texts_share_their_prompt():
    encode = encoder()
    record = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    expected = [encode.pair("hi", "yes"), encode.pair("hi", "no")]
    assert encode.encode(record, preference=True) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "hi", "chosen": "yes"}, "rejected is missing"),
        ({"chosen": [ASKED, YES], "rejected": [NO]}, "must answer the same prompt"),
        ({"prompt": "hi", "chosen": "yes", "rejected": [NO]}, "must answer the same prompt"),
        ({"chosen": [ASKED], "rejected": [NO]}, "chosen must end with the assistant's answer"),
        (
            {"prompt": "hi", "chosen": [YES], "rejected": [NO], "tools": TOOLS},
            "template has no place for tools",
        ),
    ],
)
def test_a_wrong_preference_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        encoder().encode(record, preference=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ('{"text": "a", "text": "b"}', "the key 'text' stands twice"),
        ('{"messages": [{"role": "user", "role": "tool"}]}', "the key 'role' stands twice"),
        ('{"text": "a", "weight": NaN}', "NaN is not a JSON value"),
        ("[1]", "a JSON object was expected"),
        ('{"x": 1}', "it has 'x'"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "role of message 1"),
        ('{"messages": [{"role": "user", "content": 3}]}', "content of message 1"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "answer of the assistant"),
        (json.dumps({"messages": [{**one, "weight": 0} for one in CHAT]}), "weight of message 1"),
        ('{"prompt": "x", "completion": 3}', "completion must be text"),
        ('{"text": "\\ud800"}', "half a surrogate"),
        (json.dumps({"text": "x" * 99}), "101 tokens do not fit in rows of 64"),
        ('{"prompt": "x", "chosen": "a", "rejected": "b"}', "are for --preference dpo"),
        (json.dumps({"messages": CHAT, "tools": "[]"}), "tools must be a list of objects"),
        (json.dumps({"messages": CHAT, "tools": ["weather"]}), "tools must be a list of objects"),
        (json.dumps({"messages": CHAT, "tools": TOOLS}), "template has no place for tools"),
        (json.dumps({"messages": CALLED}), "template has no place for tool_calls"),
        (json.dumps({"text": "a", "tools": TOOLS}), "tools are for chats"),
        ('{"text": ""}', "text must not be empty"),
    ],
)
def test_a_wrong_record_is_named_by_its_line(line, message, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ScratchLMError, match=rf"data\.jsonl: line 3: .*{message}") as refused:
        list(encoder().read(path, 64))
    assert "\n" not in str(refused.value)


def test_a_line_without_an_end_is_refused_by_its_length(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"text": "good"}\n')
    os.truncate(path, 1 << 40)
    with pytest.raises(ScratchLMError, match="line 2: must be shorter than"):
        list(read_records(path))


def test_parquet_gives_what_json_lines_give(tmp_path):
    records = [{"messages": CHAT}, {"messages": CHAT[:3]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    encode = encoder()
    assert list(encode.read(tmp_path / "a.parquet", 500)) == list(
        encode.read(tmp_path / "a.jsonl", 500)
    )
    with pytest.raises(ScratchLMError, match=r"a\.parquet: row 1: .* do not fit"):
        list(encode.read(tmp_path / "a.parquet", 10))


def test_columns_that_nothing_asks_for_may_hold_anything(tmp_path):
    text = pyarrow.array(["a", "b"])
    others = {"when": [datetime(2026, 1, 1)] * 2, "picture": [b"\xff"] * 2}
    for columns, message in (
        ({"text": text, **others}, None),
        ({"text": [b"a", b"b"]}, "row 1: text must be text; got bytes"),
        ({"text": ["a", None]}, "row 2: .* it has none"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        expected = contextlib.nullcontext()
        if message is not None:
            expected = pytest.raises(ScratchLMError, match=message)
        with expected:
            assert len(list(encoder().read(tmp_path / "a.parquet", 64))) == 2
    table = pyarrow.Table.from_arrays([text, text], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ScratchLMError, match="the column 'text' stands twice"):
        list(encoder().read(tmp_path / "a.parquet", 64))


# Rows


def some_examples(tmp_path, count=40, seed=0, vocab=90):
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        size = int(random.integers(3, 30))
        prompt = int(random.integers(1, size - 1))
        learns = [False] * prompt + [True] * (size - prompt)
        made.append(Example(random.integers(0, vocab, size).tolist(), learns))
    return made, write_examples(tmp_path / "examples", made, "tokenizer")


def test_examples_survive_the_disk_and_damage_shows(tmp_path):
    made, _ = some_examples(tmp_path)
    read = read_examples(tmp_path / "examples")
    for index, example in enumerate(made):
        ids, learns = read[index]
        assert ids.tolist() == example.ids
        assert learns.tolist() == example.learns
    whole = (tmp_path / "examples").read_bytes()
    for damaged in (whole[:-1], whole[:-3] + b"abc", b"", b"x" * 99):
        (tmp_path / "examples").write_bytes(damaged)
        with pytest.raises(ScratchLMError, match="damaged"):
            read_examples(tmp_path / "examples")


def test_packing_keeps_every_example_whole_and_wastes_little():
    lengths = np.random.default_rng(1).integers(2, 50, 500)
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert all(lengths[row].sum() <= 64 for row in rows)
    assert lengths.sum() / (64 * len(rows)) > 0.95
    with pytest.raises(ScratchLMError, match="do not fit in rows of 64"):
        pack(np.array([65]), 64)


def test_batches_are_a_function_of_the_step_and_an_epoch_has_every_row_once(tmp_path):
    _, examples = some_examples(tmp_path)
    batches = ExampleBatches(examples, 48, 3, seed=7)
    again = ExampleBatches(examples, 48, 3, seed=7)
    for step, batch in enumerate(batches.iterate(0, 9)):
        assert torch.equal(batch.inputs, again.batch(step).inputs)
    rows = len(batches.rows)
    taken = [row for step in range(rows) for row in batches.chosen(step)]
    for epoch in range(3):
        assert sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    total = sum(batch.num_targets() for batch in ExampleValidation(examples, 48, 5))
    assert total == examples.learns.sum()


def model_of(positions):
    from scratchlm import config as c

    kind = {"rope": c.Rotary(), "learned": c.Learned()}[positions]
    torch.manual_seed(0)
    return TransformerLM(
        ModelConfig(
            vocab_size=90, context_length=64, d_model=32, num_layers=2, num_heads=4, positions=kind
        )
    )


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_packed_document_is_read_as_it_is_alone(positions, tmp_path):
    _, examples = some_examples(tmp_path)
    model, packed = model_of(positions), Rows(examples, 64)
    alone = Rows(examples, 64, packed=False)
    shared = [row for row in range(len(packed.rows)) if len(packed.rows[row]) > 1]
    assert shared
    for row in shared:
        batch = packed.read([row])
        logits = model(batch.inputs, document_ids=batch.document_ids)[0]
        start = 0
        for index in packed.rows[row]:
            size = len(examples[index][0]) - 1
            own = alone.read([index])
            expected = model(own.inputs)[0, :size]
            torch.testing.assert_close(logits[start : start + size], expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(batch.targets[0, start : start + size], own.targets[0, :size])
            start += size
        assert (batch.targets[0, start:] == IGNORE_INDEX).all()


def test_another_document_in_the_row_changes_no_bit(tmp_path):
    _, examples = some_examples(tmp_path)
    model, packed = model_of("rope"), Rows(examples, 64)
    row = next(row for row in range(len(packed.rows)) if len(packed.rows[row]) > 1)
    batch = packed.read([row])
    second = batch.document_ids[0] == 1
    changed = batch.inputs.clone()
    changed[0, batch.document_ids[0] == 0] = 5
    before = model(batch.inputs, document_ids=batch.document_ids)[0, second]
    assert torch.equal(model(changed, document_ids=batch.document_ids)[0, second], before)


def test_prompts_get_exactly_zero_gradient(tmp_path):
    _, examples = some_examples(tmp_path)
    batch = Rows(examples, 64).read([0, 1])
    model = model_of("rope")
    hidden = model.hidden(batch.inputs, document_ids=batch.document_ids).detach().requires_grad_()
    model.head_loss(hidden, batch.targets).backward()
    ignored = batch.targets == IGNORE_INDEX
    assert ignored.any()
    assert (hidden.grad[ignored] == 0).all()
    assert (hidden.grad[~ignored].abs().amax(-1) > 0).all()
