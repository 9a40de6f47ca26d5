"""The server: beside `transformers serve`, and what HTTP costs beside the engine alone.

    python bench/serve.py                           on a CPU: users, http; on a GPU: workload
    python bench/serve.py --only users --users 1 4  beside the peer, by what a user sees
    python bench/serve.py --only workload --shape tiny --requests 16 --lengths 10 40

users: 1, 4, 16 users at once stream greedy answers of 32 tokens to prompts of 64 bytes, from a
model of 100 million random weights: time to the first token, between tokens, in all; medians.
All servers load the same directory, one after the other. http and workload: the same requests
given to the engine directly, and over loopback by streaming clients in processes of their own, in
turn: tokens of answers per second, and the processor's time that HTTP takes. workload is that of
bench/engine.py; after it, one request with its seed is asked alone and among 64 others.

users can be asked by another generator of load: --generator load_locust (`pip install locust`).
The peer needs fastapi: `pip install 'transformers[serving]'`, or --peer-path, a folder it is in.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import gc
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import SHAPES, build, random_ids
from load import LoadError, Seen, load, medians, rate
from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accounting.pool import bytes_per_page
from scratchlm.inference import Engine, Loaded, Sampling
from scratchlm.serve import ServeSettings
from scratchlm.serve.run import serving
from scratchlm.tokenizer import Tokenizer

USERS = (1, 4, 16)
PROMPT, NEW = 64, 32
ROUNDS = {"users": 2, "http": 9, "workload": 2}
SIZES = {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 2304}  # 100 million
SMALL = {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 192}  # to try this file


# Beside transformers


def write_model(folder: Path, sizes: dict[str, int]) -> None:
    """Write a random Llama over bytes, with no end token, as Hugging Face directories are."""
    import transformers

    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    tokenizer.save(folder)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=sizes["d_model"],
        intermediate_size=sizes["d_ff"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        num_key_value_heads=sizes["num_heads"],
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # logits of 0: greedy answers are text, and every token of it is seen
        model.lm_head.weight[[i for i in range(256) if not 32 <= i < 127]] = 0
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024})
    )


@contextlib.contextmanager
def started(command: Sequence[str], more: dict[str, str]) -> Iterator[str]:
    """Run a server in a process of its own until the block ends."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **more},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    said = log.read().decode(errors="replace").strip().splitlines()
                    raise LoadError(f"it ended before it served: {' '.join(said[-1:])}")
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=1).close()
                    break
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


def bodies(users: int, rounds: int, model: str, new: int) -> list[list[dict[str, Any]]]:
    """Return what each user asks, one after the other."""
    rng = random.Random(0)

    def body() -> dict[str, Any]:
        prompt = "".join(rng.choice("abcdefgh ") for _ in range(PROMPT))
        return {
            "model": model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    return [[body() for _ in range(rounds)] for _ in range(users)]


def figures_of(found: Sequence[Seen]) -> list[str]:
    """Return what users saw: medians in milliseconds, and tokens per second of all."""
    begin, end = min(seen.began for seen in found), max(seen.ended for seen in found)
    times = [f"{1e3 * seconds:.1f}" for seconds in medians(found)]
    return [*times, f"{NEW * len(found) / (end - begin):.0f}"]


def users_of(
    command: Sequence[str], more: dict[str, str], model: str, options: argparse.Namespace
) -> dict[int, list[str]]:
    """Start a server, let more and more users ask it; what failed stands in a figure's place."""
    found: dict[int, list[str]] = {}
    try:
        with started(command, more) as url:
            load(url, bodies(1, 1, model, 4))  # makes what is kept
            for users in options.users:
                asked = bodies(users, options.rounds, model, NEW)
                seen = load(url, asked, generator=options.generator)
                found[users] = figures_of(seen)
                print(users, *found[users], sep=" | ", flush=True)
    except LoadError as error:
        for users in options.users:
            found.setdefault(users, [f"failed: {error}".replace("|", "/")[:200], "", "", ""])
    return found


def users_table(options: argparse.Namespace) -> str:
    sizes = SMALL if options.shape == "tiny" else SIZES
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    peer = {**threads, "HF_HUB_OFFLINE": "1"}
    if options.peer_path:
        path = os.environ.get("PYTHONPATH", "")
        peer["PYTHONPATH"] = f"{options.peer_path}:{path}" if path else options.peer_path
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, sizes)
        main = [sys.executable, "-c"]
        ours = [*main, "from scratchlm.cli import main; main()", "serve", name, "--device", "cpu"]
        theirs = [*main, "from transformers.cli.transformers import main; main()", "serve", name]
        theirs += ["--device", "cpu"]
        servers = {
            "transformers": (theirs, peer, name),
            "transformers, continuous batching": ([*theirs, "--continuous-batching"], peer, name),
            "ours": (ours, threads, folder.name),
        }
        found = {}
        for who, server in servers.items():
            print(who, flush=True)
            found[who] = users_of(*server, options)
    lines = [[users, who, *found[who][users]] for users in options.users for who in servers]
    header = ["users", "server", "to the first token, ms", "between tokens, ms", "in all, ms"]
    return table([*header, "tokens/s"], lines)


# Beside the engine alone


def work_of(
    config: ModelConfig, requests: int, lengths: tuple[int, int]
) -> list[tuple[list[int], int]]:
    """Return prompts and lengths of answers, as bench/engine.py has them."""
    rng = random.Random(0)
    return [
        (random_ids(rng, rng.randint(*lengths), config.vocab_size), rng.randint(*lengths))
        for _ in range(requests)
    ]


def make_engine(model: TransformerLM, work: list[tuple[list[int], int]], exact: bool) -> Engine:
    longest = max(len(prompt) + new for prompt, new in work)
    page = bytes_per_page(model.config, 64, model.token_embeddings.weight.element_size())
    memory = min(len(work) * -(-longest // 64) * page, 64 << 30)
    return Engine(model, memory=memory, max_rows=len(work), exact=exact)


def alone_rate(engine: Engine, work: list[tuple[list[int], int]]) -> float:
    """Tokens per second, all requests submitted to the engine at once."""
    begin = time.perf_counter()
    handles = [
        engine.submit(prompt, max_new_tokens=new, sampling=Sampling(0.6), eos_ids=(), seed=i)
        for i, (prompt, new) in enumerate(work)
    ]
    engine.run()
    took = time.perf_counter() - begin
    assert all(handle.done for handle in handles)
    engine.forget_prefixes()
    return sum(new for _, new in work) / took


def served(url: str, work: list[tuple[list[int], int]], processes: int) -> Served:
    """Ask for the same over HTTP, every answer streamed."""
    asked = [
        [
            {
                "prompt": prompt,
                "max_tokens": new,
                "temperature": 0.6,
                "seed": i,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ]
        for i, (prompt, new) in enumerate(work)
    ]
    begin = server_seconds()
    found = load(url, asked, processes=processes)
    took, tokens = server_seconds() - begin, sum(new for _, new in work)
    assert sum(seen.tokens for seen in found) == tokens
    return Served(rate(found), took / tokens, sum(seen.cpu for seen in found) / tokens)


class Served(NamedTuple):
    """Tokens per second, and the processor's seconds for each besides the engine's."""

    rate: float
    server: float  # of the thread that reads requests and writes events
    clients: float


def server_seconds() -> float:
    """Return the processor time that the server's thread has had so far."""
    (thread,) = (one for one in threading.enumerate() if one.name == "server")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def compared(
    engine: Engine, loaded: Loaded, work: list[tuple[list[int], int]], options: argparse.Namespace
) -> list[str]:
    """Run the engine alone and behind the server in turn; return medians over the rounds."""
    settings = ServeSettings(port=0, max_queue=len(work))
    alone: list[float] = []
    over: list[Served] = []

    def behind_the_server() -> None:
        with serving(loaded, settings, engine=engine) as server:
            over.append(served(server.url, work, options.processes))
        engine.forget_prefixes()

    parts = [lambda: alone.append(alone_rate(engine, work)), behind_the_server]
    if engine.device.type == "cuda":  # what is compiled and recorded is so by the whole work
        alone_rate(engine, work)
        behind_the_server()
        over.clear()
    else:
        alone_rate(engine, [(prompt[:64], 8) for prompt, _ in work])
    for i in range(options.rounds):
        for part in parts[:: -1 if i % 2 else 1]:
            part()
    shares = [one.rate / of for one, of in zip(over, alone, strict=True)]
    median = statistics.median
    return [
        f"{median(alone):.0f}",
        f"{median(one.rate for one in over):.0f}",
        f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})",
        "0.95",
        f"{1e6 * median(one.server for one in over):.0f}",
        f"{1e6 * median(one.clients for one in over):.0f}",
    ]


def http_table(options: argparse.Namespace, device: str) -> str:
    """The engine alone and behind the server, alternating, in one process."""
    lengths = tuple(options.lengths)
    name = options.shape or ("qwen3-0.6b" if device == "cuda" else None)
    if name is None:
        config = ModelConfig(256, 1024, **{k: v for k, v in SIZES.items()})
    else:
        config = SHAPES[name]
    model = build(config.replace(context_length=2 * lengths[1] + 64), device)
    work = work_of(model.config, options.requests, lengths)
    words = {i: f" word{i}".encode() for i in range(256, model.config.vocab_size)}
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | words, [])
    loaded = Loaded(model, tokenizer, model.config, Path("bench"))
    lines, same = [], ""
    for exact in (False, True) if device == "cuda" else (False,):
        engine = make_engine(model, work, exact)
        what = "ours, exact=True" if exact else "ours"
        lines.append([what, *compared(engine, loaded, work, options)])
        print(*lines[-1], sep=" | ", flush=True)
        if options.part == "workload" and (exact or device == "cpu"):
            with serving(loaded, ServeSettings(port=0, max_queue=200), engine=engine) as server:
                same = same_bits(server.url, model.config)
        del engine
        gc.collect()  # its pool, before the next one's
    note = f"{options.requests} requests, prompt and answer {lengths[0]} to {lengths[1]} tokens, "
    note += f"{name or '100 M parameters'}, every answer streamed to one of {options.processes} "
    note += f"client processes; medians of {options.rounds} alternating rounds, the share's range "
    note += "beside it.\n\n"
    header = ["", "engine alone, tokens/s", "over loopback, tokens/s", "share", "mark"]
    header += ["server's thread, µs/token", "clients, µs/token"]
    return f"{note}{table(header, lines)}\n\n{same}"


def same_bits(url: str, config: ModelConfig, others: int = 64) -> str:
    """Ask the same alone, among others, and among others with its prefix found; compare all."""
    rng = random.Random(1)

    def body(prompt: list[int], seed: int, user: str = "") -> dict[str, Any]:
        return {
            "prompt": prompt,
            "max_tokens": 48,
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": seed,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
            "user": user,  # finds no page of another user's
        }

    def ask(asked: dict[str, Any]) -> Any:
        data, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", data, kind)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)["choices"][0]

    length = min(200, config.context_length // 2)
    prompt = random_ids(rng, length, config.vocab_size)
    crowd = [
        body(random_ids(rng, rng.randint(2, length), config.vocab_size), i) for i in range(others)
    ]
    found = [ask(body(prompt, 7))]
    with concurrent.futures.ThreadPoolExecutor(others + 1) as pool:
        for user in ("", "another"):
            asked = [*crowd[: others // 2], body(prompt, 7, user), *crowd[others // 2 :]]
            found.append(list(pool.map(ask, asked))[others // 2])
    same = all(one == found[0] for one in found)
    return (
        f"One request and seed alone, among {others} others with its prefix found, and without: "
        f"tokens and log-probabilities {'identical to the bit' if same else 'DIFFER'}."
    )


TITLES = {
    "users": "beside transformers serve, by what a user sees",
    "http": "what HTTP costs beside the engine alone",
    "workload": "the engine's workload over loopback",
}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(TITLES))
    parser.add_argument("--shape", choices=list(SHAPES))
    parser.add_argument("--users", type=int, nargs="*", default=list(USERS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--lengths", type=int, nargs=2)
    parser.add_argument("--processes", type=int, default=4 if device == "cuda" else 1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--generator", choices=("load", "load_locust"), default="load")
    parser.add_argument("--peer-path", help="a folder with fastapi, for the peer")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked_rounds = options.rounds
    usual = ["workload"] if device == "cuda" else ["users", "http"]
    for part in [options.only] if options.only else usual:
        if part != "users":
            large = part == "workload"
            options.requests = options.requests or (256 if large else 16)
            options.lengths = options.lengths or ((100, 1024) if large else (16, 64))
        options.part, options.rounds = part, asked_rounds or ROUNDS[part]
        body = users_table(options) if part == "users" else http_table(options, device)
        print(body)
        if options.no_write:
            continue
        where = torch.cuda.get_device_name() if device == "cuda" else machine()
        body += (
            f"\n\nThreads: {options.threads}. Load average at the end: {os.getloadavg()[0]:.1f}."
        )
        by = "" if options.generator == "load" or part != "users" else ", asked by locust"
        how = f" --generator {options.generator}" if by else ""
        write_section(
            f"The server: {TITLES[part]}{by}",
            f"python bench/serve.py --only {part}{how}",
            where,
            versions("torch", "starlette", "uvicorn", "transformers"),
            body,
        )


if __name__ == "__main__":
    main()
