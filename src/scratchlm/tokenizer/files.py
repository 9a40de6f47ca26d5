"""Tokenizers on disk: `tokenizer.json`, GPT-2's `vocab.json` + `merges.txt`, tiktoken's ranks.

`tokenizer.json` is what we write. It is Hugging Face's format (`hf_json.py`), or, for a character
tokenizer, a table of our own with `"type": "characters"` (`characters.py`), which `tokenizers`
refuses rather than misreads.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scratchlm.durable import write_atomically
from scratchlm.errors import ScratchLMError
from scratchlm.tokenizer import characters, hf_json
from scratchlm.tokenizer.bpe import Tokenizer
from scratchlm.tokenizer.bytelevel import from_characters
from scratchlm.tokenizer.characters import CharTokenizer
from scratchlm.tokenizer.vocabulary import check_id
from scratchlm.untrusted import MAX_TOKENIZER_BYTES, read_text

# The pattern is not in a rank file; these are the published files, by the first word of the name.
_TIKTOKEN_PATTERNS = {
    "gpt2": "gpt2",
    "r50k_base": "gpt2",
    "p50k_base": "gpt2",
    "cl100k_base": "gpt4",
    "qwen": "qwen2",
}


AnyTokenizer = Tokenizer | CharTokenizer


def load_tokenizer(
    path: str | Path,
    *,
    pattern: str | None = None,
    special_tokens: Sequence[str] | Mapping[str, int] | None = None,
) -> AnyTokenizer:
    """Load a tokenizer from a directory or a file of one of the kinds above.

    `pattern` and `special_tokens` are for files that do not hold them (`merges.txt`, `.tiktoken`).
    """
    file = _find(Path(path))
    try:
        if file.suffix == ".tiktoken":
            return _load_tiktoken(file, pattern, special_tokens)
        if file.name in ("vocab.json", "merges.txt"):
            return _load_gpt2(file.parent, pattern or "gpt2", special_tokens)
        if pattern or special_tokens:
            raise ValueError("pattern and special_tokens are in the file and cannot be given")
        data = read_json(file)
        if isinstance(data, dict) and data.get("type") == characters.TYPE:
            return characters.from_json(data)
        return hf_json.from_json(data)
    except (ScratchLMError, ValueError, TypeError, OverflowError) as error:
        line = " ".join(str(error).split())
        raise ValueError(line if line.startswith(str(file)) else f"{file}: {line}") from None


def write_tokenizer_json(directory: str | Path, data: dict[str, Any]) -> Path:
    """Write `tokenizer.json` into a directory: beside it first, then renamed into place."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "tokenizer.json"
    write_atomically(target, (json.dumps(data, ensure_ascii=False) + "\n").encode())
    return target


def read_json(file: Path) -> Any:
    """Read a JSON file, refusing a key that stands twice in one table."""

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        read = dict(pairs)
        if len(read) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"{twice!r:.60} stands twice in one table")
        return read

    text = read_text(file, MAX_TOKENIZER_BYTES)
    try:
        return json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply") from None


def _find(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(2, "no such tokenizer file or directory", str(path))
        known = path.suffix in (".json", ".tiktoken") or path.name == "merges.txt"
        if not known:
            raise ValueError(
                f"{path}: a tokenizer file must be tokenizer.json, vocab.json, merges.txt or "
                "end in .tiktoken"
            )
        return path
    if (path / "tokenizer.json").exists():
        return path / "tokenizer.json"
    if (path / "vocab.json").exists() and (path / "merges.txt").exists():
        return path / "vocab.json"
    ranks = sorted(path.glob("*.tiktoken"))
    if len(ranks) == 1:
        return ranks[0]
    found = f"{len(ranks)} .tiktoken files" if ranks else "none of them"
    raise ValueError(
        f"{path}: a tokenizer directory must hold tokenizer.json, vocab.json and merges.txt, or "
        f"one .tiktoken file; found {found}"
    )


def _lines(file: Path) -> list[str]:
    return read_text(file, MAX_TOKENIZER_BYTES).replace("\r\n", "\n").split("\n")


def _load_gpt2(
    folder: Path, pattern: str, special_tokens: Sequence[str] | Mapping[str, int] | None
) -> Tokenizer:
    data = read_json(folder / "vocab.json")
    if not isinstance(data, dict):
        raise TypeError("vocab.json must be a table from token to id")
    vocab: dict[int, bytes] = {}
    for token, i in data.items():
        if check_id(i, repr(token)) in vocab:
            raise ValueError(f"id {i} is given to two tokens, {token!r:.60} is one")
        vocab[i] = from_characters(token)
    merges = []
    for number, line in enumerate(_lines(folder / "merges.txt"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"merges.txt line {number} must be two tokens; got {line!r:.60}")
        merges.append((from_characters(parts[0]), from_characters(parts[1])))
    if special_tokens is None:
        special_tokens = _unmade(vocab, merges)
    return Tokenizer(vocab, merges, special_tokens, pattern)


def _unmade(vocab: Mapping[int, bytes], merges: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """Name the tokens `<…>` that no merge makes: these files do not say which are special."""
    made = {left + right for left, right in merges}
    return [
        piece.decode("utf-8")
        for piece in vocab.values()
        if piece not in made and len(piece) > 2 and piece[:1] == b"<" and piece[-1:] == b">"
    ]


def _load_tiktoken(
    file: Path,
    pattern: str | None,
    special_tokens: Sequence[str] | Mapping[str, int] | None,
) -> Tokenizer:
    pattern = pattern or _TIKTOKEN_PATTERNS.get(file.stem)
    if pattern is None:
        raise ValueError(
            "a .tiktoken file does not hold its pattern; give one "
            f"(known by file name: {', '.join(_TIKTOKEN_PATTERNS)})"
        )
    vocab: dict[int, bytes] = {}
    for number, line in enumerate(_lines(file), start=1):
        if not line:
            continue
        parts = line.split(" ")
        try:
            piece = base64.b64decode(parts[0], validate=True)
            rank = check_id(int(parts[1]), f"line {number}")
        except (IndexError, ValueError, binascii.Error):
            raise ValueError(f"line {number} must be base64 and a rank; got {line!r:.60}") from None
        if len(parts) != 2 or rank in vocab:
            raise ValueError(f"line {number} must be base64 and a new rank; got {line!r:.60}")
        vocab[rank] = piece
    return Tokenizer(vocab, merges_of_ranks(vocab), special_tokens, pattern, ignore_merges=True)


def merges_of_ranks(vocab: Mapping[int, bytes]) -> list[tuple[bytes, bytes]]:
    """List the merges that ranks stand for: any two tokens whose bytes joined are a token.

    tiktoken merges the pair whose joined bytes have the lowest rank; so each token lists every way
    to make it from two tokens, in the order of the ranks.
    """
    rank = {piece: i for i, piece in vocab.items()}
    merges = []
    for _, piece in sorted(vocab.items()):
        splits = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        known = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
        merges += sorted(known, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges
