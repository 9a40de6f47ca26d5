"""The server: beside `transformers serve`, and what HTTP costs beside the engine alone.

    python bench/serve.py                           on a CPU: users, http; on a GPU: workload
    python bench/serve.py --only users --users 1 4  beside the peer, by what a user sees
    python bench/serve.py --only workload --shape tiny --requests 16 --lengths 10 40

users: 1, 4, 16 users at once stream greedy answers of 32 tokens to prompts of 64 bytes, from a
model of 100 million random weights: time to the first token, between tokens, in all; medians.
Both servers load the same directory. http and workload: the same requests given to the engine
directly, and over loopback by streaming clients in processes of their own: tokens of answers per
second. workload is that of bench/engine.py.

users can be asked by another generator of load: --generator load_locust (`pip install locust`).
The peer needs fastapi: `pip install 'transformers[serving]'`, or --peer-path, a folder it is in.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import SHAPES, build, random_ids
from load import Seen, load, medians, rate
from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM
from scratchlm.accounting.pool import bytes_per_page
from scratchlm.inference import Engine, Loaded, Sampling
from scratchlm.serve import ServeSettings
from scratchlm.serve.run import serving
from scratchlm.tokenizer import Tokenizer

USERS = (1, 4, 16)
PROMPT, NEW, ROUNDS = 64, 32, 3
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
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024})
    )


@contextlib.contextmanager
def started(command: Sequence[str], port: int, more: dict[str, str]) -> Iterator[str]:
    """Run a server in a process of its own until the block ends."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            for _ in range(600):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"error: {command[:3]} ended: {log.read()[-2000:].decode()}")
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=1).close()
                    break
                time.sleep(0.2)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


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


def users_table(options: argparse.Namespace) -> str:
    sizes = SMALL if options.shape == "tiny" else SIZES
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    peer = {**threads, "HF_HUB_OFFLINE": "1"}
    if options.peer_path:
        path = os.environ.get("PYTHONPATH", "")
        peer["PYTHONPATH"] = f"{options.peer_path}:{path}" if path else options.peer_path
    lines = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, sizes)
        main = [sys.executable, "-c"]
        ours = [*main, "from scratchlm.cli import main; main()", "serve", name, "--device", "cpu"]
        theirs = [*main, "from transformers.cli.transformers import main; main()", "serve", name]
        theirs += ["--device", "cpu", *(["--continuous-batching"] if options.batching else [])]
        ports = {"ours": free_port(), "theirs": free_port()}
        with (
            started([*ours, "--port", str(ports["ours"])], ports["ours"], threads) as our_url,
            started([*theirs, "--port", str(ports["theirs"])], ports["theirs"], peer) as their_url,
        ):
            servers = (("transformers", their_url, name), ("ours", our_url, folder.name))
            for _, url, model in servers:
                load(url, bodies(1, 1, model, 4))  # makes what is kept
            for users in options.users:
                for who, url, model in servers:
                    asked = bodies(users, options.rounds, model, NEW)
                    found = load(url, asked, generator=options.generator)
                    lines.append([users, who, *figures_of(found)])
                    print(*lines[-1], sep=" | ", flush=True)
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


def served_rate(url: str, work: list[tuple[list[int], int]], processes: int) -> float:
    """Tokens per second of the same requests over HTTP, every answer streamed."""
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
    found = load(url, asked, processes=processes)
    assert sum(seen.tokens for seen in found) == sum(new for _, new in work)
    return rate(found)


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
    lines = []
    for exact in (False, True) if device == "cuda" else (False,):
        engine = make_engine(model, work, exact)
        loaded = Loaded(model, tokenizer, model.config, Path("bench"))
        settings = ServeSettings(port=0, max_queue=len(work))
        alone, served = [], []
        alone_rate(engine, [(prompt[:64], 8) for prompt, _ in work])  # makes what is kept
        for _ in range(options.rounds):
            alone.append(alone_rate(engine, work))
            with serving(loaded, settings, engine=engine) as server:
                served.append(served_rate(server.url, work, options.processes))
            engine.forget_prefixes()
        share = max(served) / max(alone)
        what = "ours, exact=True" if exact else "ours"
        lines.append([what, f"{max(alone):.0f}", f"{max(served):.0f}", f"{share:.3f}", "0.95"])
        print(*lines[-1], sep=" | ", flush=True)
    note = f"{options.requests} requests, prompt and answer {lengths[0]} to {lengths[1]} tokens, "
    note += f"{name or '100 M parameters'}, every answer streamed to one of {options.processes} "
    note += f"client processes; the best of {options.rounds} alternating rounds.\n\n"
    header = ["", "engine alone, tokens/s", "over loopback, tokens/s", "share", "mark"]
    return note + table(header, lines)


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
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--lengths", type=int, nargs=2)
    parser.add_argument("--processes", type=int, default=4 if device == "cuda" else 1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--generator", choices=("load", "load_locust"), default="load")
    parser.add_argument("--batching", action="store_true", help="the peer's continuous batching")
    parser.add_argument("--peer-path", help="a folder with fastapi, for the peer")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for part in (
        [options.only]
        if options.only
        else ["workload"]
        if device == "cuda"
        else [
            "users",
            "http",
        ]
    ):
        if part != "users":
            large = part == "workload"
            options.requests = options.requests or (256 if large else 16)
            options.lengths = options.lengths or ((100, 1024) if large else (16, 64))
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
