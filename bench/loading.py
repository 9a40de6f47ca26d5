"""Load the same checkpoint with scratchlm, with safetensors alone, and with transformers.

All in one process, in turns, from files in the page cache. transformers maps a file and leaves the
reading to the first use, so every loader is timed until each weight has been looked at once.
Memory is shown by tests/interop/test_loading_memory.py, each load in a process of its own.

    python bench/loading.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from results import machine, table, versions, write_section
from scratchlm import TransformerLM
from scratchlm.config import ModelConfig, Rotary, preset
from scratchlm.inference.loading import load_model
from scratchlm.interop import read_hf, write_hf

ROUNDS = 7
CONFIGS = {
    "Llama": ModelConfig(
        vocab_size=32_000,
        context_length=2048,
        d_model=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        d_ff=2048,
        positions=Rotary(5e5, "half"),
    ),
    "GPT-2 124M, transposed": preset("gpt2"),
}


def ours(path: Path) -> Iterable[Tensor]:
    return load_model(path).model.parameters()


def unchecked(path: Path) -> Iterable[Tensor]:
    return dict(read_hf(path).tensors(allow_nonfinite=True)).values()


def plain(path: Path) -> Iterable[Tensor]:
    return [tensor.clone() for tensor in load_file(path / "model.safetensors").values()]


def theirs(path: Path) -> Iterable[Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).parameters()


LOADERS: dict[str, Callable[[Path], Iterable[Tensor]]] = {
    "scratchlm, a model": ours,
    "scratchlm, tensors": unchecked,
    "safetensors, tensors": plain,
    "transformers, a model": theirs,
}


def seconds(load: Callable[[Path], Iterable[Tensor]], path: Path) -> float:
    start = time.perf_counter()
    tensors = list(load(path))
    for tensor in tensors:
        tensor.detach().view(torch.int64).sum()  # the bytes, without a conversion of them
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    rows = []
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model"
            state = TransformerLM(config, dtype=torch.bfloat16).state_dict()
            write_hf(path, config, state)
            size = sum(tensor.nbytes for tensor in state.values())
            times: dict[str, list[float]] = {loader: [] for loader in LOADERS}
            for number in range(ROUNDS + 1):
                for loader, load in LOADERS.items():
                    took = seconds(load, path)
                    if number:  # the first round wakes everything up
                        times[loader].append(took)
        ratios = zip(times["transformers, a model"], times["scratchlm, a model"], strict=True)
        ratio = statistics.median(one / other for one, other in ratios)
        middle = [f"{statistics.median(every):.2f} s" for every in times.values()]
        rows.append((f"{name}, {size / 1e9:.2f} GB", *middle, f"**{ratio:.2f}×**"))
        print(*rows[-1], sep="  ")
    write_section(
        "Loading a checkpoint, CPU",
        "python bench/loading.py",
        machine(),
        versions("torch", "transformers", "safetensors"),
        f"bfloat16, one thread, median of {ROUNDS} turns in one process, from the page cache, "
        "until every weight has been looked at once.\n\n"
        + table(("checkpoint", *LOADERS, "transformers : scratchlm"), rows),
    )


if __name__ == "__main__":
    main()
