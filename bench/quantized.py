"""Quantised weights beside llama.cpp: speed on a CPU, quality of a trained model, a GPU.

    python bench/quantized.py speed [--shape "124 M"] [--threads 1 2] [--rounds 3] [--files DIR]
    python bench/quantized.py quality --text FILE [--model RUN]
    python bench/quantized.py gpu [--shape "7 B"]

speed: both read the same GGUF file, each in a process of its own, by turns; the best of the rounds
counts. Ours is `load_model` and `stream`, greedy; llama.cpp (through cyllama) is fed one token
after the other, without choosing any. Files are written first, or kept in DIR for the next time.

quality: of a run, or of a small model that is trained here on the text's first nine tenths, a few
minutes; measured on its end. Each format with the bytes our quantiser gives, with those of
llama.cpp's (`ggml_quantize_chunk`, out of the xllamacpp wheel) by the same rule, and with the file
that llama.cpp makes of the model by its own rule (through cyllama): all run by our engine.

gpu: `generate` of one row, greedy, beside the same shape in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from results import machine, table, versions, write_section
from scratchlm import ModelConfig, TransformerLM, acceleration, generate, load_model, preset, stream
from scratchlm.config import Rotary
from scratchlm.errors import ScratchLMError
from scratchlm.inference import Sampling
from scratchlm.interop import write_gguf
from scratchlm.model.layers import Linear
from scratchlm.ops.quantized import quantize
from scratchlm.quantization import convert
from scratchlm.quantization.convert import held_bytes, quantize_model
from scratchlm.quantization.layers import QuantizedLinear
from scratchlm.quantization.rule import bytes_per_row, choose

PROMPT, NEW, CONTEXT = 512, 64, 1024
HALF = Rotary(layout="half")
SHAPES = {
    "1 M": ModelConfig(512, CONTEXT, 256, 2, 4, positions=HALF),
    "124 M": ModelConfig(50_304, CONTEXT, 768, 12, 12, d_ff=2048, positions=HALF,
                         tie_embeddings=True),
    "0.6 B": preset("qwen3-0.6b").replace(context_length=CONTEXT),
}  # fmt: skip
GPU_SHAPES = {
    "GPT-2 XL": preset("gpt2-xl"),
    "7 B": ModelConfig(32_000, 4096, 4096, 32, 32, d_ff=11_008, positions=HALF),
}
GPU_MARKS = {"int8": "1.7", "q4_0": "2.5", "q4_k": "2.5"}
WIDE = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMATS = (*WIDE, "q8_0", "q6_k", "q4_k_m", "q4_k", "q4_0")
GREEDY = Sampling(temperature=0.0)
Measure = Callable[[int, int], dict[str, float]]  # of threads and the tokens of a prompt
GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q6_k": 14}
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k": 14, "q4_k_m": 15, "q6_k": 18}  # llama.cpp's numbers
TRAINED = (
    *("--vocab-size", "512", "--steps", "600", "model.d_model=256", "model.num_layers=4"),
    *("model.num_heads=4", "model.d_ff=768", "model.context_length=128", "train.batch_size=8"),
    "train.lr=2e-3",
)


# Speed on a CPU


def write_model(path: Path, config: ModelConfig, format: str) -> Path:
    """Write a random model as a GGUF file.

    Of a matrix to quantise only a few rows are, and stand for the others: speed does not depend on
    what they hold.
    """
    torch.manual_seed(0)
    state = TransformerLM(config).state_dict()
    if format in WIDE:
        return write_gguf(path, config, state, dtype=WIDE[format])
    for choice in choose(config, format):
        if choice.format is not None:
            weight = state.pop(choice.name)
            few = quantize(weight[:16], choice.format)
            repeated = few.repeat(-(-len(weight) // 16), 1)[: len(weight)]
            state[choice.stored_name] = repeated
    return write_gguf(path, config, state)


def load_ours(path: str) -> Measure:
    """Return what measures our tokens a second, of a prompt and of decoding."""
    model = load_model(path).model
    options = {"sampling": GREEDY, "eos_ids": []}

    def measure(threads: int, count: int) -> dict[str, float]:
        torch.set_num_threads(threads)
        generate(model, [[7] * 8], max_new_tokens=2, **options)
        begin = time.perf_counter()
        generate(model, [[7] * count], max_new_tokens=1, **options)
        read = time.perf_counter()
        times = [time.perf_counter() for _ in stream(model, [[7]], max_new_tokens=NEW, **options)]
        return {"prompt": count / (read - begin), "decode": (NEW - 1) / (times[-1] - times[0])}

    return measure


def load_theirs(path: str) -> Measure:
    """Return what measures the same of llama.cpp."""
    import cyllama.llama.llama_cpp as llama

    llama.disable_logging()
    llama.ggml_backend_load_all()
    model = llama.LlamaModel(path)

    def measure(threads: int, count: int) -> dict[str, float]:
        params = llama.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT, PROMPT, PROMPT
        params.n_threads = params.n_threads_batch = threads
        context = llama.LlamaContext(model, params)

        def read(tokens: int, at: int) -> None:
            batch = llama.LlamaBatch(n_tokens=tokens, embd=0, n_seq_max=1)
            for n in range(tokens):
                batch.add(7, at + n, [0], n == tokens - 1)
            context.decode(batch)
            context.synchronize()

        read(8, 0)
        context.kv_cache_clear()
        begin = time.perf_counter()
        read(count, 0)
        middle = time.perf_counter()
        context.kv_cache_clear()
        read(1, 0)
        start = time.perf_counter()
        for n in range(1, NEW):
            read(1, n)
        end = time.perf_counter()
        return {"prompt": count / (middle - begin), "decode": (NEW - 1) / (end - start)}

    return measure


class Child:
    """A process that has loaded a model, and measures when it is told to: never two at once."""

    def __init__(self, who: str, path: Path) -> None:
        command = [sys.executable, __file__, "child", who, str(path)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._answer()

    def measure(self, threads: int, count: int) -> dict[str, float]:
        """Return tokens a second."""
        assert self.process.stdin is not None
        print(threads, count, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("a child has ended")

    def close(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def answer(who: str, path: str) -> None:
    """Be a child."""
    measure = (load_ours if who == "ours" else load_theirs)(path)
    print("{}", flush=True)
    for line in sys.stdin:
        threads, count = map(int, line.split())
        print(json.dumps(measure(threads, count)), flush=True)


def speed(shape: str, formats: list[str], threads: list[int], rounds: int, folder: Path) -> str:
    """Measure both, by turns."""
    rows, config, count = [], SHAPES[shape], PROMPT // 4 if shape == "0.6 B" else PROMPT
    for format in formats:
        path = folder / f"{shape.replace(' ', '')}-{format}.gguf"
        if not path.exists():
            write_model(path, config, format)
        bits = 8 * path.stat().st_size / _num_weights(TransformerLM(config, device="meta"))
        children = [Child(who, path) for who in ("ours", "theirs")]
        for number in threads:
            found: list[list[dict[str, float]]] = [[], []]
            for _ in range(rounds):
                for child, rates in zip(children, found, strict=True):
                    rates.append(child.measure(number, count))
            rows.append([format, f"{bits:.2f}", number, *_best(*found)])
            print(shape, *rows[-1], sep=" | ", flush=True)
        for child in children:
            child.close()
    header = ["format", "bits", "threads"]
    for what in ("decode", "prompt"):
        header += [f"{what}, ours", f"{what}, llama.cpp", "×"]
    body = table(header, rows)
    body += f"\n\nTokens/s: {NEW} tokens one by one, and a prompt of {count}; best of {rounds} "
    body += f"rounds. llama.cpp's wheel: {_their_instructions()}. "
    return body + f"Load average at the end: {os.getloadavg()[0]:.1f}."


def _their_instructions() -> str:
    import xllamacpp

    return str(xllamacpp.get_system_info()).strip(" |").replace(" |", ",").replace(" = 1", "")


def _num_weights(model: TransformerLM) -> int:
    return sum(weight.numel() for weight in model.parameters())


def _best(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[str]:
    found = []
    for what in ("decode", "prompt"):
        rates = [max(one[what] for one in runs) for runs in (ours, theirs)]
        found += [*(f"{rate:,.1f}" for rate in rates), f"{rates[0] / rates[1]:.2f}"]
    return found


# Quality


def llama_cpp_quantize(weight: torch.Tensor, format: str) -> torch.Tensor:
    """Return the bytes that llama.cpp's own quantiser gives."""
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    chunk = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so")))).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    rows, width = weight.shape
    source = weight.float().contiguous()
    out = torch.empty(rows, bytes_per_row(format, width), dtype=torch.uint8)
    sizes = [ctypes.c_int64(n) for n in (0, rows, width)]
    addresses = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, out)]
    assert chunk(GGML_TYPES[format], *addresses, *sizes, None) == out.numel()
    return out


@torch.no_grad()
def log_probabilities(model: TransformerLM, rows: torch.Tensor) -> torch.Tensor:
    """Return those of every next token."""
    return torch.cat([model(part).log_softmax(-1) for part in rows.split(8)])


def train(text: str, folder: Path) -> Path:
    """Train a small model whose rows are whole blocks of 256."""
    words = ["train", text, "--out", str(folder / "run"), "--device", "cpu", *TRAINED]
    code = "from scratchlm.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, *words], check=True)
    return folder / "run"


def llama_cpp_file(source: Path, to: str) -> Path:
    """Let llama.cpp quantise a file by its own rule."""
    import cyllama.llama.llama_cpp as llama

    llama.disable_logging()
    params = llama.LlamaModelQuantizeParams()
    params.ftype, params.nthread = FILE_TYPES[to], 1
    out = source.with_name(f"{to}.gguf")
    llama.model_quantize(str(source), str(out), params)
    return out


@torch.no_grad()
def quality(path: str | None, text: str, length: int = 128, most: int = 128) -> str:
    """Compare each format with the wide model, ours and llama.cpp's bytes."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        loaded = load_model(path or train(text, folder), dtype=torch.float32, accelerate=False)
        ids = loaded.need_tokenizer().encode(Path(text).read_text(encoding="utf-8"))
        ids = ids[-most * length :]
        rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
        wide = log_probabilities(loaded.model, rows)
        source = write_gguf(folder / "wide.gguf", loaded.config, loaded.model.state_dict())
        weights = _num_weights(loaded.model)
        lines = [["wide", "", "32.00", "0", "100.00 %", f"{_perplexity(wide, rows):.3f}"]]
        for to, by, model in _quantised(loaded.model, source):
            found = log_probabilities(model, rows)
            divergence = (wide.exp() * (wide - found)).sum(-1).mean()
            agree = (found.argmax(-1) == wide.argmax(-1)).float().mean()
            bits = 8 * held_bytes(model) / weights
            lines.append([to, by, f"{bits:.2f}", f"{divergence:.3e}", f"{agree:.2%}",
                          f"{_perplexity(found, rows):.3f}"])  # fmt: skip
            print(*lines[-1], sep=" | ", flush=True)
    config, what = loaded.config, "a run" if path else f"trained on {Path(text).name}"
    body = table(["format", "bytes by", "bits", "KL", "same top-1", "perplexity"], lines)
    body += f"\n\n{weights / 1e6:.1f} M weights, {config.num_layers} layers of {config.d_model}, "
    body += f"{what}; measured on the last {rows.numel():,} tokens of {Path(text).name}. "
    return body + "KL in nats a token, from the wide model's distributions."


def _quantised(wide: TransformerLM, source: Path) -> Iterator[tuple[str, str, TransformerLM]]:
    """Yield (format, whose bytes, model)."""
    for to in ("q8_0", "q6_k", "q4_k_m", "q4_k", "q4_0", "nf4", "int8", "fp8"):
        quantisers = {"ours": quantize}
        if to in FILE_TYPES:
            quantisers["llama.cpp, the same rule"] = llama_cpp_quantize  # type: ignore[assignment]
        for by, quantiser in quantisers.items():
            convert.quantize = quantiser  # type: ignore[attr-defined]
            model = copy.deepcopy(wide)
            quantize_model(model, to)
            yield to, by, model
        convert.quantize = quantize  # type: ignore[attr-defined]
        if to in FILE_TYPES:
            file = llama_cpp_file(source, to)
            try:
                model = load_model(file, dtype=torch.float32, accelerate=False).model
            except ScratchLMError as error:  # where rows are no whole blocks it has other types
                print(f"left out: {error}", flush=True)
                continue
            yield to, "llama.cpp, its own rule", model


def _perplexity(log_probs: torch.Tensor, rows: torch.Tensor) -> float:
    chosen = log_probs[:, :-1].gather(-1, rows[:, 1:, None])
    return math.exp(-chosen.mean())


# A GPU


@torch.no_grad()
def gpu(shapes: list[str]) -> str:
    """Measure `generate`, one row, greedy, beside the same model in bfloat16."""
    lines = []
    for shape in shapes:
        config, base = GPU_SHAPES[shape], 0.0
        for to in ("bf16", "int8", "q8_0", "q4_0", "q4_k"):
            model = TransformerLM(config, device="cuda", dtype=torch.bfloat16).eval()
            model.requires_grad_(False)
            if to != "bf16":
                quantize_model(model, to)
                acceleration.lay_out(model, torch.device("cuda"))
            acceleration.accelerate(model)
            size = read_bytes(model)
            rate = time_generate(model)
            base = base or rate
            lines.append([shape, to, f"{size / 1e9:.2f}", f"{rate:,.1f}", f"{rate / base:.2f}",
                          GPU_MARKS.get(to, ""), f"{size * rate / 1e9:,.0f}"])  # fmt: skip
            print(*lines[-1], sep=" | ", flush=True)
            del model
            torch.cuda.empty_cache()
    header = ["shape", "weights", "GB read", "generate, tokens/s", "× bf16", "mark", "GB/s"]
    return table(header, lines)


def read_bytes(model: TransformerLM) -> int:
    """Return the bytes of all matrices that a step of one row multiplies by."""
    size = 0
    for module in dict.fromkeys([*model.modules(), model.lm_head]):
        table_of = module.tied_to[0] if hasattr(module, "tied_to") else module
        if hasattr(module, "tied_to") or isinstance(module, (Linear, QuantizedLinear)):
            stored = table_of.stored if hasattr(table_of, "stored") else table_of.weight
            size += stored.nbytes
    return size


def time_generate(model: TransformerLM, new: int = 128) -> float:
    """Return tokens a second of one request, by the public door."""
    options = {"sampling": GREEDY, "eos_ids": []}
    generate(model, [[7] * 8], max_new_tokens=8, **options)
    times = [time.perf_counter() for _ in stream(model, [[7] * 8], max_new_tokens=new, **options)]
    return (new - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("speed")
    one.add_argument("--shape", nargs="+", default=["124 M", "0.6 B"], choices=SHAPES)
    one.add_argument("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    one.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--files", type=Path)
    two = modes.add_parser("quality")
    two.add_argument("--model")
    two.add_argument("--text", required=True)
    three = modes.add_parser("gpu")
    three.add_argument("--shape", nargs="+", default=list(GPU_SHAPES), choices=GPU_SHAPES)
    child = modes.add_parser("child")
    child.add_argument("who", choices=("ours", "theirs"))
    child.add_argument("path")
    args = parser.parse_args()
    given = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    command = "python bench/quantized.py " + shlex.join(given)
    where, with_ = machine(), versions("torch", "cyllama", "xllamacpp")
    if args.mode == "child":
        answer(args.who, args.path)
    elif args.mode == "speed":
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.files or Path(temporary)
            for shape in args.shape:
                body = speed(shape, args.format, args.threads, args.rounds, folder)
                title = f"Quantised weights on a CPU, {shape}"
                write_section(title, command, where, with_, body)
    elif args.mode == "quality":
        body = quality(args.model, args.text)
        write_section("Quality of quantised weights", command, where, with_, body)
    else:
        body = gpu(args.shape)
        name = torch.cuda.get_device_name()
        write_section("Quantised weights on a GPU", command, name, with_, body)


if __name__ == "__main__":
    main()
