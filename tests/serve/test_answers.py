"""What is answered is what the engine generates, whole or streamed, and every field counts."""

import itertools
import json
import math
import threading
from dataclasses import replace
from unittest import mock

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as completion_params
import pytest
import torch

from inference.tiny import END, byte_tokenizer, scripted_model, tiny_model
from scratchlm.inference import Engine, Loaded, Message, Sampling, chat_format, generate
from scratchlm.inference.rows import Row
from scratchlm.serve import engine_thread, generation
from scratchlm.serve.openai_format import AnswerStream
from scratchlm.serve.server import Connection
from scratchlm.tokenizer import Tokenizer
from scratchlm.tokenizer.chat_template import ChatTemplate
from serve.tiny_server import (
    NAME,
    ask,
    connect,
    events_in,
    raw_request,
    read_all,
    tiny_engine,
    tiny_loaded,
    tiny_server,
)

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server():
    with tiny_server() as running:
        yield running


def complete(server, **fields):
    answer = ask(server, "/v1/completions", {"prompt": PROMPT, "seed": 7, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def expected(prompt=PROMPT, n=1, seed=7, max_new_tokens=16, **options):
    loaded = tiny_loaded()
    ids = loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return generate(
        loaded.model,
        [ids] * n,
        tokenizer=loaded.tokenizer,
        max_new_tokens=max_new_tokens,
        seed=[seed + i for i in range(n)],
        eos_ids=options.pop("eos_ids", loaded.eos_ids),
        **options,
    )


OPTIONS = {
    "temperature": ({"temperature": 0.5}, {"sampling": Sampling(0.5)}),
    "greedy": ({"temperature": 0}, {"sampling": Sampling(0.0)}),
    "top_k": ({"top_k": 3}, {"sampling": Sampling(top_k=3)}),
    "no top_k": ({"top_k": -1}, {}),
    "top_p": ({"top_p": 0.3}, {"sampling": Sampling(top_p=0.3)}),
    "min_p": ({"min_p": 0.5}, {"sampling": Sampling(min_p=0.5)}),
    "typical_p": ({"typical_p": 0.3}, {"sampling": Sampling(typical=0.3)}),
    "presence": (
        {"temperature": 0, "presence_penalty": 2},
        {"sampling": Sampling(0.0, presence_penalty=2)},
    ),
    "frequency": (
        {"temperature": 0, "frequency_penalty": -2},
        {"sampling": Sampling(0.0, frequency_penalty=-2)},
    ),
    "repetition": (
        {"temperature": 0, "repetition_penalty": 3},
        {"sampling": Sampling(0.0, repetition_penalty=3)},
    ),
    "bias": ({"logit_bias": {"65": 100}}, {"sampling": Sampling(logit_bias={65: 100.0})}),
    "seed": ({"seed": -5}, {"seed": -5}),
    "max_tokens": ({"max_tokens": 40}, {"max_new_tokens": 40}),
    "stop_token_ids": ({"temperature": 0, "max_tokens": 99, "stop_token_ids": [32, 90, 101]}, None),
    "ignore_eos": ({"logit_bias": {"256": 100}, "ignore_eos": True}, None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_field_changes_the_answer_as_it_changes_the_engine(server, name):
    fields, options = OPTIONS[name]
    if name == "stop_token_ids":
        options = {"sampling": Sampling(0.0), "max_new_tokens": 99, "eos_ids": {256, 32, 90, 101}}
    if name == "ignore_eos":
        options = {"sampling": Sampling(logit_bias={256: 100.0}), "eos_ids": ()}
    [wanted] = expected(**options)
    [choice] = complete(server, return_token_ids=True, **fields)["choices"]
    assert choice["token_ids"] == wanted.token_ids
    assert choice["text"] == wanted.text


def test_prompts_may_be_texts_or_ids_one_or_many_each_n_times(server):
    ids = [list(PROMPT.encode()), [1, 2, 3]]
    several = complete(server, prompt=ids, n=2, return_token_ids=True)["choices"]
    loaded = tiny_loaded()
    wanted = generate(
        loaded.model,
        [ids[0], ids[0], ids[1], ids[1]],
        max_new_tokens=16,
        seed=[7, 8, 9, 10],
        eos_ids=loaded.eos_ids,
    )
    assert [c["token_ids"] for c in several] == [w.token_ids for w in wanted]
    assert [c["index"] for c in several] == [0, 1, 2, 3]
    texts = complete(server, prompt=[PROMPT, "other"])["choices"]
    assert texts[0]["text"] == complete(server, prompt=ids[0])["choices"][0]["text"]


def test_usage_counts_each_prompt_once(server):
    usage = complete(server, prompt=[[1, 2, 3], [4]], n=2, ignore_eos=True)["usage"]
    assert usage == {"prompt_tokens": 4, "completion_tokens": 64, "total_tokens": 68}


def test_logprobs_are_those_of_the_engine(server):
    [wanted] = expected(num_logprobs=3)
    [choice] = complete(server, logprobs=3)["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"] == [one.logprob for one in wanted.logprobs]
    for top, one in zip(found["top_logprobs"], wanted.logprobs, strict=True):
        assert set(top.values()) == {value for _, value in one.best} | {one.logprob}
    assert found["text_offset"][0] == 0


def test_an_echo_has_the_prompt_and_its_logprobs(server):
    [choice] = complete(server, echo=True, logprobs=0, max_tokens=4)["choices"]
    assert choice["text"].startswith(PROMPT)
    logprobs = choice["logprobs"]["token_logprobs"]
    assert logprobs[0] is None
    assert len(logprobs) == len(PROMPT) + 4
    loaded = tiny_loaded()
    ids = loaded.tokenizer.encode(PROMPT)
    table = loaded.model(torch.tensor([ids]))[0].double().log_softmax(-1)
    for at, value in enumerate(logprobs[1 : len(ids)], 1):
        assert math.isclose(value, table[at - 1, ids[at]].item(), abs_tol=1e-5)
    [alone] = complete(server, echo=True, logprobs=0, max_tokens=0)["choices"]
    assert alone["text"] == PROMPT
    assert alone["logprobs"]["token_logprobs"] == logprobs[: len(ids)]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_streamed_echo_is_the_whole_echo(server, max_tokens):
    fields = {"prompt": [PROMPT, "other"], "echo": True, "logprobs": 2, "max_tokens": max_tokens}
    fields |= {"seed": 7, "return_token_ids": True}
    whole = complete(server, **fields)["choices"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = ask(server, "/v1/completions", {**fields, **options}).events
    assert events[-1]["usage"]["completion_tokens"] == 2 * max_tokens
    for wanted in whole:
        of_it = [
            choice
            for event in events
            for choice in event["choices"]
            if choice["index"] == wanted["index"]
        ]
        assert "".join(choice["text"] for choice in of_it) == wanted["text"]
        assert of_it[0]["prompt_token_ids"] == wanted["prompt_token_ids"]
        for name, values in wanted["logprobs"].items():
            assert [x for c in of_it if c["logprobs"] for x in c["logprobs"][name]] == values
        reasons = [choice["finish_reason"] for choice in of_it]
        assert reasons == [None] * (len(of_it) - 1) + ["length"]


@pytest.mark.parametrize("prompt", ["añb", ""])
def test_offsets_are_places_in_the_text_and_a_begin_of_text_has_none(prompt):
    byte_level = byte_tokenizer(END)
    tokenizer = Tokenizer(byte_level.vocab, [], byte_level.special_tokens, template=((256,), ()))
    model = tiny_model(tokenizer.vocab_size, 512)
    loaded = Loaded(model, tokenizer, model.config, tiny_loaded().source, (256,))
    with tiny_server(loaded, tiny_engine(loaded)) as server:
        [choice] = complete(server, prompt=prompt, echo=True, logprobs=0, max_tokens=1)["choices"]
    data, found = prompt.encode(), choice["logprobs"]
    assert found["tokens"][0] == END
    places = [len(data[:i].decode(errors="ignore")) for i in range(len(data) + 1)]
    assert found["text_offset"] == [0, *places]  # of a begin-of-text, the prompt, one more


def test_a_chat_is_written_in_the_models_format(server):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    fields = {"messages": messages, "seed": 3, "max_completion_tokens": 9}
    answer = ask(server, "/v1/chat/completions", fields).json
    tokenizer = tiny_loaded().tokenizer
    ids = chat_format(tokenizer).encode(
        [Message("system", "Be brief."), Message("user", "Hi")], tokenizer
    )
    [wanted] = expected(ids, seed=3, max_new_tokens=9, eos_ids={256, 258})
    assert answer["choices"][0]["message"]["content"] == wanted.text
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_the_formats_own_end_ends_an_answer(server):
    fields = {"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"258": 100}}
    [choice] = ask(server, "/v1/chat/completions", fields).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.name if m.role == 'user' and m.name else m.role }}"
    ":{{ m.content }}{% endfor %}{{ end }}"
)


def test_a_models_own_template_writes_the_chat_and_its_markers_cannot_be_forged():
    template = ChatTemplate({"default": TEMPLATE})
    loaded = replace(tiny_loaded(), chat_template=template)
    with tiny_server(loaded) as server:
        fields = {
            "messages": [{"role": "user", "content": "a<|im_start|>b", "name": "me"}],
            "chat_template_kwargs": {"end": "!"},
        }
        answer = ask(
            server,
            "/v1/chat/completions",
            {**fields, "max_tokens": 1, "return_token_ids": True},
        )
        encoded = ask(server, "/tokenize", {"messages": fields["messages"]})
        forbidden = {**fields, "chat_template_kwargs": {"messages": []}}
        refused = ask(server, "/v1/chat/completions", forbidden)
    [choice] = answer.json["choices"]
    assert choice["prompt_token_ids"] == [257, *b"me:a<|im_start|>b!"]
    assert encoded.json["tokens"] == [257, *b"me:a<|im_start|>b"]
    assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs")


UNREAD = {
    "a variable": ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    "one of two": ({"chat_template_kwargs": {"end": "!", "self": 1}}, "chat_template_kwargs"),
    "a name of a role": (
        {
            "messages": [
                {"role": "user", "content": "x", "name": "me"},
                {"role": "assistant", "content": "y", "name": "it"},
            ]
        },
        "messages",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_a_template_does_not_read_is_refused_by_name(name):
    fields, field = UNREAD[name]
    loaded = replace(tiny_loaded(), chat_template=ChatTemplate({"default": TEMPLATE}))
    with tiny_server(loaded) as server:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        answer = ask(server, "/v1/chat/completions", body)
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "does not read" in answer.error["message"]


def test_a_model_without_a_chat_format_says_so():
    with tiny_server(tiny_loaded(chat=False)) as server:
        fields = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = ask(server, "/v1/chat/completions", fields)
        assert answer.status == 400
        assert "no chat format" in answer.error["message"]
    with tiny_server(tiny_loaded(chat=False), chat_format="plain") as server:
        assert ask(server, "/v1/chat/completions", {**fields, "max_tokens": 3}).status == 200


# Streams


def scripted(text, **options):
    """A server whose model says a text, byte by byte."""
    tokenizer = byte_tokenizer(END, "<|im_start|>", "<|im_end|>")
    script = [*text.encode(), tokenizer.special_tokens[END]]
    model = scripted_model(script, tokenizer.vocab_size)
    loaded = Loaded(model, tokenizer, model.config, tiny_loaded().source, (256,))
    engine = Engine(model, tokenizer=tokenizer, num_pages=64, max_rows=1, accelerate=False)
    return tiny_server(loaded, engine, **options)


def text_of(event):
    [choice] = event["choices"]
    return choice["delta"].get("content") if "delta" in choice else choice["text"]


def test_a_stream_is_role_first_then_text_then_one_end():
    with scripted("Hello") as server:
        fields = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 50}
        events = ask(server, "/v1/chat/completions", fields).events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(text_of(e) or "" for e in events) == "Hello"
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert len({e["id"] for e in events}) == 1
    assert not any("usage" in e for e in events)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_usage_chunk_comes_last_and_only_if_asked_for(server, route):
    what = (
        {"prompt": "a"}
        if route == "/v1/completions"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    fields = {**what, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5}
    events = ask(server, route, {**fields, "ignore_eos": True}).events
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    fields["stream_options"] = {"include_usage": None}  # as left out
    assert not any("usage" in event for event in ask(server, route, fields).events)


def test_a_stream_never_shows_half_a_character():
    with scripted("añ日🙂b") as server:
        events = ask(server, "/v1/completions", {"prompt": "x", "stream": True}).events
    texts = [text_of(e) for e in events]
    assert "".join(texts) == "añ日🙂b"
    assert "\ufffd" not in "".join(texts)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_is_never_shown_not_even_in_part(stream):
    with scripted("one two STOP three") as server:
        fields = {"prompt": "x", "stop": ["STOP", "never"], "stream": stream, "max_tokens": 99}
        answer = ask(server, "/v1/completions", fields)
    events = answer.events if stream else [answer.json]
    assert "".join(text_of(e) for e in events) == "one two "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream_of_n_choices_is_the_answer_of_n_choices(server):
    fields = {"n": 3, "max_tokens": 12, "logprobs": 2, "return_token_ids": True}
    whole = complete(server, **fields)
    events = ask(
        server, "/v1/completions", {"prompt": PROMPT, "seed": 7, "stream": True, **fields}
    ).events
    for wanted in whole["choices"]:
        of_it = [e["choices"][0] for e in events if e["choices"][0]["index"] == wanted["index"]]
        assert "".join(c["text"] for c in of_it) == wanted["text"]
        assert [i for c in of_it for i in c.get("token_ids", ())] == wanted["token_ids"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            streamed = [x for c in of_it if c["logprobs"] for x in c["logprobs"][name]]
            assert streamed == wanted["logprobs"][name]
        assert [c["finish_reason"] for c in of_it if c["finish_reason"]] == ["length"]


STREAMED = {"prompt": PROMPT, "seed": 7, "ignore_eos": True, "return_token_ids": True, "n": 3}


def streamed_ids(events):
    found = {}
    for event in events:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return [found[index] for index in sorted(found)]


def test_what_cannot_be_written_at_once_is_written_later_in_order(server):
    """As where a client reads slowly: every third time the connection takes nothing more."""
    real, turns, refused = Connection.write_chunk, itertools.count(), []

    def write_chunk(connection, data):
        if not data and next(turns) % 3 == 0:
            refused.append(connection)
            return False
        return real(connection, data)

    fields = {**STREAMED, "max_tokens": 60}
    whole = [choice["token_ids"] for choice in complete(server, **fields)["choices"]]
    with mock.patch.object(Connection, "write_chunk", write_chunk):
        events = ask(server, "/v1/completions", {**fields, "stream": True}).events
    assert streamed_ids(events) == whole
    assert refused  # the first turn is; how many more there are depends on the machine's load


def test_tokens_wait_while_the_loop_has_enough_to_do_and_none_is_lost(server):
    """As where writing events takes long: the next come with the end of the answer."""
    fields = {**STREAMED, "max_tokens": 60}
    whole = [choice["token_ids"] for choice in complete(server, **fields)["choices"]]
    with mock.patch.object(engine_thread, "EVENTS_SHARE", 1e9):
        events = ask(server, "/v1/completions", {**fields, "stream": True}).events
    server.service.thread._next_delivery = 0.0
    assert streamed_ids(events) == whole
    assert len(events) <= 3 * 5  # of each choice: the prompt, at most two of tokens twice, the end


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks(server):
    body = json.dumps({**STREAMED, "max_tokens": 20, "stream": True}).encode()
    with connect(server) as client:
        client.sendall(raw_request("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, data = read_all(client).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    whole = complete(server, **STREAMED, max_tokens=20)["choices"]
    assert streamed_ids(events_in(data)) == [choice["token_ids"] for choice in whole]


def test_a_bug_in_writing_one_stream_ends_that_stream_alone(server):
    real, met = AnswerStream.pieces, threading.Event()

    def pieces(writer, index, found):
        if writer.request.texts[0] == "a bug":
            met.set()
            raise RuntimeError("a bug")
        return real(writer, index, found)

    fields = {**STREAMED, "max_tokens": 90}
    with mock.patch.object(AnswerStream, "pieces", pieces), connect(server) as other:
        body = json.dumps({**fields, "prompt": "a bug", "stream": True}).encode()
        other.sendall(raw_request("/v1/completions", body))
        events = ask(server, "/v1/completions", {**fields, "stream": True}).events
        ended = read_all(other)
    whole = complete(server, **fields)["choices"]
    assert streamed_ids(events) == [choice["token_ids"] for choice in whole]
    assert met.is_set()
    assert b"[DONE]" not in ended


def test_an_error_in_the_middle_is_an_event_and_the_end(server):
    real = Row.take

    def take(row, token, logprob):
        if row.step == 4:
            raise RuntimeError("a bug")
        return real(row, token, logprob)

    fields = {"prompt": PROMPT, "seed": 7, "ignore_eos": True, "return_token_ids": True}
    with mock.patch.object(Row, "take", take):
        events = ask(server, "/v1/completions", {**fields, "stream": True}).events
        whole = ask(server, "/v1/completions", fields)
    [wanted] = complete(server, **fields)["choices"]
    shown = [token for e in events[:-1] for token in e["choices"][0].get("token_ids", ())]
    assert shown == wanted["token_ids"][:4]
    assert events[-1]["error"]["type"] == "server_error"
    assert whole.status == 500
    assert "a bug" not in whole.body.decode()


# Fields


NEUTRAL = {"model", "messages", "prompt", "stream"}


def params_of(module, name):
    found = getattr(module, name)
    return sorted(set(found.__annotations__) - NEUTRAL)


ODD = {"nothing like": ["what", "is", "asked"]}


@pytest.mark.parametrize("field", params_of(chat_params, "CompletionCreateParamsBase"))
def test_no_field_of_openais_chat_is_ignored(server, field):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, field: ODD}
    answer = ask(server, "/v1/chat/completions", body)
    if field == "chat_template_kwargs":
        return
    assert answer.status == 400
    assert answer.error["param"] == field
    assert field in answer.error["message"]


@pytest.mark.parametrize("field", params_of(completion_params, "CompletionCreateParamsBase"))
def test_no_field_of_openais_completions_is_ignored(server, field):
    answer = ask(server, "/v1/completions", {"prompt": "x", "max_tokens": 1, field: ODD})
    assert answer.status == 400
    assert answer.error["param"] == field


REFUSED = {
    "unknown": ({"surprise": 1}, "surprise"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "mixed prompts": ({"prompt": ["a", [1]]}, "prompt"),
    "an id beyond": ({"prompt": [259]}, "prompt"),
    "a truth as id": ({"prompt": [True]}, "prompt"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt"),
    "a lone surrogate as user": ({"user": "\ud800"}, "user"),
    "a tiny penalty": ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    "too long": ({"prompt": [1] * 510}, "max_tokens"),
    "much too long": ({"prompt": "a" * 100_000}, "prompt"),
    "too many choices": ({"n": 129}, "n"),
    "too many prompts × n": ({"prompt": ["a", "b"], "n": 100}, "n"),
    "too many stops": ({"stop": ["a"] * 17}, "stop"),
    "an empty stop": ({"stop": ""}, "stop"),
    "a long stop": ({"stop": "a" * 257}, "stop"),
    "temperature": ({"temperature": -1}, "temperature"),
    "tiny temperature": ({"temperature": 1e-9}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "a text": ({"top_p": "0.5"}, "top_p"),
    "bias": ({"logit_bias": {"999": 1}}, "logit_bias"),
    "bias twice": ({"logit_bias": {"9": 1, "09": 2}}, "logit_bias"),
    "bias too strong": ({"logit_bias": {"9": 101}}, "logit_bias"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "the best of many": ({"best_of": 2}, "best_of"),
    "the best of too few": ({"best_of": 1, "n": 2}, "best_of"),
    "suffix": ({"suffix": "end"}, "suffix"),
    "options without stream": ({"stream_options": {}}, "stream_options"),
    "options": ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
    "nothing": ({"max_tokens": 0}, "max_tokens"),
    "a setting of nothing": (
        {"echo": True, "max_tokens": 0, "temperature": 1e-9},
        "temperature",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(server, name):
    fields, field = REFUSED[name]
    answer = ask(server, "/v1/completions", {"prompt": "x", **fields})
    assert answer.status == 400
    assert answer.error["param"] == field
    assert answer.error["type"] == "invalid_request_error"


CHATS_REFUSED = {
    "no messages": ({"messages": []}, "messages"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    "a tool's answer": ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
    ),
    "a call": (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages",
    ),
    "a name": ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages"),
    "tools": ({"tools": [{"type": "function"}]}, "tools"),
    "a format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "two limits": ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    "tops alone": ({"top_logprobs": 3}, "top_logprobs"),
    "more than can fit": ({"messages": [{"role": "user", "content": "a" * 99_999}]}, "messages"),
    "a template's variable": ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
}


@pytest.mark.parametrize("name", CHATS_REFUSED)
def test_what_a_chat_cannot_honour_is_refused_by_name(server, name):
    fields, field = CHATS_REFUSED[name]
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    answer = ask(server, "/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == field


def test_null_is_as_left_out(server):
    table = server.service.fields["/v1/completions"]
    empty = {name: None for name, field in table.items() if not field.required}
    del empty["seed"]
    assert complete(server, **empty)["choices"] == complete(server)["choices"]


def test_the_logprobs_of_echoed_prompts_are_bounded(server):
    body = {"prompt": [[1] * 500] * 20, "n": 6, "echo": True, "max_tokens": 1, "logprobs": 1}
    with mock.patch.object(generation, "MOST_ECHOED", 20 * 500 * 6 * 2 - 1):
        refused = ask(server, "/v1/completions", body)
        alone = ask(server, "/v1/completions", {**body, "prompt": [1] * 500})
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert alone.status == 200


def test_another_model_is_not_found(server):
    answer = ask(server, "/v1/completions", {"prompt": "x", "model": "gpt-4"})
    assert answer.status == 404
    assert answer.error["code"] == "model_not_found"
    assert ask(server, "/v1/completions", {"prompt": "x", "model": NAME}).status == 200


def many_names(count):
    """Names of which the last stands there twice: that is told in one pass."""
    return ("{" + "".join(f'"{i}":0,' for i in range(count)) + '"x":0,"x":0}').encode()


BODIES = {
    "no JSON": b"{",
    "not an object": b"[]",
    "a name twice": b'{"prompt": "a", "prompt": "b"}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "∞": b'{"prompt": "a", "user": null, "seed": Infinity}',
    "deep": b'{"messages": [{"role": "user", "content": ' + b"[" * 30 + b"]" * 30 + b"}]}",
    "very deep": b"[" * 200_000,
    "bytes": b"\xff\xfe\x00",
    "a lone surrogate as bytes": b'{"prompt": "a", "user": "\xed\xa0\x80"}',
    "UTF-16": '{"prompt": "a", "user": "\\ud800"}'.encode("utf-16"),
    "a name twice among many": many_names(100_000),
    "a long number": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "an empty body": b"",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_not_a_plain_object_is_refused(server, name):
    answer = ask(server, "/v1/completions", BODIES[name])
    assert answer.status == 400, answer.body
    assert answer.error["message"].startswith("the body must")


def test_users_do_not_share_pages_of_prompts():
    engine = tiny_engine()
    with tiny_server(engine=engine) as server:
        ids = list(range(64))

        def found_after(user):
            before = engine.scheduler.num_found
            assert ask(server, "/v1/completions", {"prompt": ids, "user": user}).status == 200
            return engine.scheduler.num_found - before

        assert found_after("a") == 0
        assert found_after("b") == 0
        assert found_after("a") > 0
