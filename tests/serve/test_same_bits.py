"""The same request and seed give the same tokens and log-probabilities in any company."""

import random
import threading
from pathlib import Path

import pytest
import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import Rotary
from scratchlm.inference import Loaded
from serve.tiny_server import ask, tiny_engine, tiny_loaded, tiny_server
from waiting import wait_until

SHARED = list(range(7, 7 + 100))  # six pages of a prompt that others begin with too
ASKED = {
    "prompt": [*SHARED, 1, 2, 3],
    "seed": 11,
    "max_tokens": 60,
    "logprobs": 3,
    "n": 2,
    "ignore_eos": True,
    "temperature": 0.9,
    "frequency_penalty": 0.3,
}


def answer_of(server, **more):
    found = ask(server, "/v1/completions", {**ASKED, **more})
    assert found.status == 200
    return found.json["choices"]


@pytest.fixture(scope="module")
def alone():
    with tiny_server(engine=tiny_engine(num_pages=64)) as server:
        return answer_of(server)


def company(rng, index):
    """A request that runs beside: some begin as ours does, some are cut off soon."""
    begin = SHARED if index % 3 == 0 else []
    prompt = [*begin, *(rng.randrange(256) for _ in range(rng.randrange(1, 120)))]
    return {"prompt": prompt, "max_tokens": rng.randrange(20, 200), "seed": index, "logprobs": 1}


def among_others(loaded=None, **options):
    """Ask among 64 others: pages of theirs not found, possibly found, surely found."""
    rng = random.Random(0)
    engine = tiny_engine(loaded, max_rows=24, **options)
    with tiny_server(loaded, engine) as server:
        others = [
            threading.Thread(target=ask, args=(server, "/v1/completions", company(rng, i)))
            for i in range(64)
        ]
        for other in others:
            other.start()
        thread = server.service.thread
        wait_until(lambda: thread.num_open > 10 or not any(other.is_alive() for other in others))
        answers = [answer_of(server, user="nobody else"), answer_of(server)]
        for other in others:
            other.join()
        answers.append(answer_of(server))  # its pages may have been given to others
        found = engine.scheduler.num_found
        answers.append(answer_of(server))
        assert engine.scheduler.num_found > found
    return answers


def test_alone_and_among_64_others_with_pages_found_and_without(alone):
    # Too few pages for all: some are put back and computed again while ours runs.
    for answer in among_others(num_pages=200, max_tokens_per_step=48):
        assert answer == alone


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_so_it_is_on_a_gpu_with_exact():
    tokenizer = tiny_loaded().tokenizer
    config = ModelConfig(tokenizer.vocab_size, 512, 256, 2, 4, positions=Rotary(layout="half"))
    torch.manual_seed(0)
    model = TransformerLM(config, device="cuda", dtype=torch.bfloat16).eval().requires_grad_(False)
    loaded = Loaded(model, tokenizer, config, Path("gpu"), (256,))
    options = {"page_size": 64, "num_pages": 60, "exact": True}
    with tiny_server(loaded, tiny_engine(loaded, **options)) as server:
        wanted = answer_of(server)
    for answer in among_others(loaded, **options):
        assert answer == wanted


def test_a_stream_has_the_same_bits(alone):
    with tiny_server() as server:
        events = ask(server, "/v1/completions", {**ASKED, "stream": True}).events
    for wanted in alone:
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == wanted["index"]]
        logprobs = [c["logprobs"] for c in choices if c["logprobs"]]
        assert [x for one in logprobs for x in one["token_logprobs"]] == wanted["logprobs"][
            "token_logprobs"
        ]
        assert "".join(c["text"] for c in choices) == wanted["text"]
