"""Clients people have, unchanged: openai, curl, Open WebUI's calls, LangChain, lm-eval."""

import asyncio
import json
import shutil
import subprocess
import sys
import warnings

import httpx
import openai
import pytest
import torch

from inference.tiny import END, byte_tokenizer, tiny_model
from scratchlm.evaluation.running import Evaluator
from scratchlm.inference import GREEDY, Loaded, generate, likelihoods
from serve.tiny_server import NAME, tiny_engine, tiny_loaded, tiny_server
from waiting import wait_until

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def server():
    with tiny_server(api_key="secret") as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as one:
        yield one


def test_openai_lists_the_model(client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_openai_chats_whole_and_streamed_alike(client):
    options = {"model": NAME, "messages": MESSAGES, "seed": 5, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage == whole.usage


def test_openai_reads_logprobs(client):
    chat = client.chat.completions.create(
        model=NAME, messages=MESSAGES, seed=5, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for token in content:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.logprob
        assert all(best.bytes for best in token.top_logprobs)
    text = client.completions.create(
        model=NAME, prompt=["a", "b"], n=2, max_tokens=4, logprobs=2, seed=1
    )
    assert [len(choice.logprobs.tokens) for choice in text.choices] == [4, 4, 4, 4]


def test_openai_embeds_the_mean_of_the_last_hidden_states(client):
    loaded = tiny_loaded()
    for options in ({}, {"encoding_format": "float"}):  # the first is base64 on the way
        found = client.embeddings.create(model=NAME, input=["Hello", "other"], **options)
        hidden = loaded.model.hidden(torch.tensor([list(b"Hello")]))[0]
        torch.testing.assert_close(
            torch.tensor(found.data[0].embedding), hidden.mean(0), atol=1e-5, rtol=1e-5
        )
    assert found.usage.prompt_tokens == 10


def test_openai_raises_its_own_errors(client, server):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="x", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_can_leave_a_stream(client, server):
    stream = client.completions.create(
        model=NAME, prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: server.service.engine.pool.num_held == 0)


def test_openai_asks_many_at_once_and_each_gets_its_own(server):
    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            asked = [
                client.completions.create(model=NAME, prompt=[i, i + 1], seed=i, max_tokens=9)
                for i in range(20)
            ]
            return await asyncio.gather(*asked)

    loaded = tiny_loaded()
    prompts, seeds = [[i, i + 1] for i in range(20)], list(range(20))
    wanted = generate(
        loaded.model,
        prompts,
        tokenizer=loaded.tokenizer,
        seed=seeds,
        max_new_tokens=9,
        eos_ids=loaded.eos_ids,
    )
    assert [a.choices[0].text for a in asyncio.run(ask_all())] == [w.text for w in wanted]


def test_curl_asks_and_streams(server):
    command = ["curl", "-sSN", f"{server.url}/v1/chat/completions"]
    command += ["-H", "Authorization: Bearer secret", "-H", "Content-Type: application/json"]
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 5}
    assert shutil.which("curl"), "curl is a client that must be tried"

    def curl(**more):
        data = json.dumps({**body, **more})
        return subprocess.run([*command, "-d", data], capture_output=True, check=True).stdout

    assert json.loads(curl())["choices"][0]["message"]["role"] == "assistant"
    assert curl(stream=True).rstrip().endswith(b"data: [DONE]")


def test_open_webui_finds_the_model_and_streams_a_chat(server):
    """The two calls of its OpenAI connection, with the headers and fields it sends."""
    headers = {"Authorization": "Bearer secret", "X-OpenWebUI-User-Name": "me"}
    with httpx.Client(base_url=f"{server.url}/v1", headers=headers) as client:
        models = client.get("/models").json()["data"]
        body = {"model": models[0]["id"], "messages": MESSAGES}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", "/chat/completions", json={**body, **options}) as response:
            kind = response.headers["content-type"]
            lines = [line for line in response.iter_lines() if line]
        title = client.post("/chat/completions", json={**body, "max_completion_tokens": 9})
    assert kind.startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    *events, usage = [json.loads(line[6:]) for line in lines[:-1]]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["usage"]["total_tokens"] > 0
    assert title.json()["choices"][0]["message"]["role"] == "assistant"


def test_langchain_invokes_and_streams(server):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from langchain_openai import ChatOpenAI

        chat = ChatOpenAI(
            model=NAME, base_url=f"{server.url}/v1", api_key="secret", max_tokens=9, seed=3
        )
        whole = chat.invoke([("system", "Be brief."), ("human", "Hello!")])
        pieces = list(chat.stream([("system", "Be brief."), ("human", "Hello!")]))
    assert "".join(piece.content for piece in pieces) == whole.content
    assert whole.usage_metadata["output_tokens"] == 9


LM_EVAL = """
import json, logging, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
url, pairs = sys.argv[1], json.loads(sys.argv[2])
model = LocalCompletionsAPI(base_url=url + "/v1/completions", model="tiny", batch_size=4,
                            tokenizer_backend="remote", max_length=256)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
likely = model.loglikelihood(asked, disable_tqdm=True)
until = {"until": ["."], "max_gen_toks": 12}
written = model.generate_until(
    [Instance("generate_until", {}, (pairs[0][0], until), 0)], disable_tqdm=True)
print(json.dumps([likely, written]))
"""
PAIRS = [("The cat sat", " on the mat"), ("Once", " upon"), ("2 + 2 =", " 4"), ("a", "b" * 30)]


def test_lm_eval_reads_the_likelihoods_that_evaluate_counts_with():
    tokenizer = byte_tokenizer(END)
    model = tiny_model(tokenizer.vocab_size, 512)
    loaded = Loaded(model, tokenizer, model.config, tiny_loaded().source, (256,))
    with tiny_server(loaded, tiny_engine(loaded)) as server:
        command = [sys.executable, "-c", LM_EVAL, server.url, json.dumps(PAIRS)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    likely, written = json.loads(done.stdout.splitlines()[-1])
    pairs = [tuple(map(tokenizer.encode, pair)) for pair in PAIRS]
    ours = likelihoods(Evaluator(loaded).engine, pairs)  # what `scratchlm evaluate` counts with
    for one, (context, continuation), (logprob, is_greedy) in zip(ours, pairs, likely, strict=True):
        assert logprob == pytest.approx(one.total, abs=1e-12)
        assert is_greedy == one.is_greedy
        ids = [*context, *continuation]
        table = model(torch.tensor([ids]))[0].double().log_softmax(-1)
        by_model = sum(table[i - 1, ids[i]].item() for i in range(len(context), len(ids)))
        assert logprob == pytest.approx(by_model, abs=1e-4)
    ids = tokenizer.encode(PAIRS[0][0])
    [wanted] = generate(
        model, [ids], tokenizer=tokenizer, max_new_tokens=12, stop=["."], sampling=GREEDY
    )
    assert written == [wanted.text]
