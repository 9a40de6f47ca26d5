"""The routes around generation: the tokenizer's, metrics, the document of the API, the command."""

import json
import re
import sys

import pytest

from scratchlm.cli.serve import serve
from scratchlm.errors import ScratchLMError
from serve.tiny_server import NAME, ask, tiny_engine, tiny_loaded, tiny_server


@pytest.fixture(scope="module")
def server():
    with tiny_server() as running:
        yield running


def test_text_becomes_tokens_and_tokens_text(server):
    text = "Añ日🙂<|endoftext|>"
    found = ask(server, "/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert found["tokens"] == tiny_loaded().tokenizer.encode(text)
    assert found["count"] == len(found["tokens"])
    assert found["token_strs"][0] == "A"
    assert found["token_strs"][1] == r"bytes:\xc3"
    assert found["max_model_len"] == 512
    assert ask(server, "/detokenize", {"tokens": found["tokens"]}).json == {"prompt": text}
    assert ask(server, "/tokenize", {"prompt": ""}).json["tokens"] == []


def test_a_chat_becomes_tokens(server):
    fields = {"messages": [{"role": "user", "content": "Hi"}]}
    counted = ask(server, "/tokenize", fields).json["count"]
    answer = ask(server, "/v1/chat/completions", {**fields, "max_tokens": 1}).json
    assert counted == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a" * 513}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 7}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "xml"}, "encoding_format"),
    ],
)
def test_these_routes_refuse_by_name_too(server, path, body, field):
    answer = ask(server, path, body)
    assert (answer.status, answer.error["param"]) == (400, field)


def test_what_a_client_needs_to_know_of_the_tokenizer(server):
    found = ask(server, "/tokenizer_info").json
    assert found["eos_token"] == "<|endoftext|>"
    assert found["vocab_size"] == 259
    assert found["special_tokens"]["<|im_end|>"] == 258


def values_of(text, name):
    """Return a metric's values, by its labels besides the model's name."""
    found = {}
    for labels, value in re.findall(rf"(?m)^{re.escape(name)}\{{(.*?)\}} (\S+)$", text):
        rest = labels.replace(f'model_name="{NAME}"', "").strip(",")
        found[rest] = float(value)
    return found


def test_metrics_count_what_was_asked():
    engine = tiny_engine()
    with tiny_server(engine=engine) as server:
        body = {"prompt": list(range(40)), "max_tokens": 10, "ignore_eos": True}
        for _ in range(3):
            assert ask(server, "/v1/completions", body).status == 200
        ask(server, "/v1/completions", {**body, "stop_token_ids": list(range(16))})
        text = ask(server, "/metrics").body.decode()
    assert values_of(text, "vllm:prompt_tokens_total") == {"": 160}
    generated = values_of(text, "vllm:generation_tokens_total")[""]
    assert 31 <= generated <= 40
    reasons = values_of(text, "vllm:request_success_total")
    assert sum(reasons.values()) == 4
    assert reasons['finished_reason="length"'] >= 3
    assert values_of(text, "vllm:num_requests_running") == {"": 0}
    assert values_of(text, "vllm:num_requests_waiting") == {"": 0}
    assert values_of(text, "vllm:kv_cache_usage_perc") == {"": 0}
    assert values_of(text, "vllm:prefix_cache_hits_total") == {"": 3 * 32}
    assert values_of(text, "vllm:time_to_first_token_seconds_count") == {"": 4}
    assert values_of(text, "vllm:inter_token_latency_seconds_count") == {"": generated - 4}
    buckets = list(values_of(text, "vllm:e2e_request_latency_seconds_bucket").values())
    assert buckets == sorted(buckets)
    assert buckets[-1] == 4


def test_the_document_has_every_route_and_every_field(server):
    found = ask(server, "/openapi.json").json
    assert found["openapi"].startswith("3.1")
    for path, table in server.service.fields.items():
        body = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["schema"]["properties"]) == set(table)
        assert body["schema"]["additionalProperties"] is False
    for path in found["paths"]:
        assert ask(server, path, method="DELETE").status == 405


def test_what_is_not_there_is_said_in_json(server):
    answer = ask(server, "/v1/nothing")
    assert answer.status == 404
    assert answer.error["type"] == "not_found_error"
    assert ask(server, f"/v1/models/{NAME}").json["id"] == NAME
    assert ask(server, "/v1/models/other").status == 404


def test_a_model_without_a_tokenizer_takes_ids():
    loaded = tiny_loaded()
    bare = type(loaded)(loaded.model, None, loaded.config, loaded.source)
    with tiny_server(bare, tiny_engine(bare)) as server:
        body = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True, "logprobs": 1}
        [choice] = ask(server, "/v1/completions", body).json["choices"]
        assert len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            answer = ask(server, path, body)
            assert answer.status == 400, (path, body)
            json.dumps(answer.error)


def test_the_command_names_the_extra_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("run", "server"):
        monkeypatch.delitem(sys.modules, f"scratchlm.serve.{name}", raising=False)
    with pytest.raises(ScratchLMError, match=r"uvicorn; pip install 'scratchlm\[serve\]'"):
        serve("runs/mine")
