"""Write random models of two sizes as GGUF files, for comparisons with llama.cpp.

Vocabularies are padded with tokens nobody uses: speed does not depend on what the words are.

    python bench/gguf_files.py DIRECTORY [--shapes 124m 0.6b] [--formats f16 q8_0 q4_0 q4_k_m]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from scratchlm import ModelConfig, TransformerLM
from scratchlm.config import preset
from scratchlm.interop import write_gguf
from scratchlm.tokenizer import Tokenizer

SHAPES = {
    "124m": ModelConfig(50_257, 1_024, 768, 12, 12, d_ff=2_048, tie_embeddings=True),
    "0.6b": preset("qwen3-0.6b"),
}
FORMATS = ("f32", "f16", "q8_0", "q6_k", "q4_k_m", "q4_k", "q4_0")
_FLOATS = {"f32": torch.float32, "f16": torch.float16}


def write_files(folder: Path, shapes: list[str], formats: list[str]) -> list[Path]:
    """Write a file for each shape and format that is not there yet; return their paths."""
    paths = []
    for shape in shapes:
        wanted = {format: folder / f"{shape}-{format}.gguf" for format in formats}
        paths += list(wanted.values())
        missing = {format: path for format, path in wanted.items() if not path.exists()}
        if not missing:
            continue
        torch.manual_seed(0)
        config, tokenizer = SHAPES[shape], _bytes_tokenizer()
        weights = TransformerLM(config).state_dict()
        for format, path in missing.items():
            begin = time.perf_counter()
            write_gguf(
                path,
                config,
                weights,
                tokenizer,
                _FLOATS.get(format),
                quantize=None if format in _FLOATS else format,
                eos_token_ids=list(tokenizer.special_tokens.values()),
            )
            seconds, size = time.perf_counter() - begin, path.stat().st_size
            print(f"{path}: {size / 1e6:,.0f} MB in {seconds:.1f} s", flush=True)
    return paths


def _bytes_tokenizer() -> Tokenizer:
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["f16", "q8_0", "q4_0"])
    words = parser.parse_args()
    write_files(words.folder, words.shapes, words.formats)
