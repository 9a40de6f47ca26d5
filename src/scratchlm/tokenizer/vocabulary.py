"""Validation of vocabularies: all bytes, no token twice, merges only between known tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MAX_ID = (1 << 24) - 1  # far above any vocabulary; a larger id is an error that would cost memory


def check_id(token: object, what: str) -> int:
    """Refuse what cannot be a token id."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"the id of {what} must be an integer; got {token!r:.60}")
    if not 0 <= token <= MAX_ID:
        raise ValueError(f"the id of {what} must be from 0 to {MAX_ID}; got {token}")
    return token


def check_special_tokens(tokens: Sequence[str]) -> list[str]:
    """Refuse special tokens that are empty, doubled, no text, or a single byte."""
    if isinstance(tokens, str):
        raise TypeError(f"special_tokens must be a list of strings; got the string {tokens!r}")
    seen: set[str] = set()
    for token in tokens:
        if not isinstance(token, str):
            raise TypeError(f"a special token must be a string; got {token!r:.60}")
        if not token or token in seen:
            wrong = "is there twice" if token else "must not be empty"
            raise ValueError(f"special token {token!r} {wrong}")
        if any("\ud800" <= c <= "\udfff" for c in token):
            raise ValueError(f"special token {token!r} holds a lone surrogate, which is no text")
        if len(token.encode("utf-8")) == 1:
            raise ValueError(
                f"special token {token!r} is a single byte, which every vocabulary holds already"
            )
        seen.add(token)
    return list(tokens)


def add_special_tokens(
    vocab: dict[int, bytes], tokens: Sequence[str] | Mapping[str, int]
) -> dict[str, int]:
    """Assign ids to special tokens; those missing from the vocabulary get new ones at its end."""
    named: Mapping[str, int] = tokens if isinstance(tokens, Mapping) else {}
    checked = check_special_tokens(list(named) if named else tokens)  # type: ignore[arg-type]
    if not checked:
        return {}
    id_of = {piece: i for i, piece in vocab.items()}
    following = max(vocab, default=-1) + 1
    ids = {}
    for token in checked:
        piece = token.encode("utf-8")
        i = check_id(named[token], repr(token)) if named else id_of.get(piece, following)
        if vocab.setdefault(i, piece) != piece:
            raise ValueError(f"special token {token!r} wants id {i}, which {vocab[i]!r} has")
        following = max(following, i + 1)
        ids[token] = i
    return ids


def check_vocab(vocab: Mapping[int, bytes], whole: Mapping[str, int]) -> dict[bytes, int]:
    """Check a vocabulary and invert it: bytes → id, without special and added tokens."""
    found_whole = set(whole.values())
    id_of: dict[bytes, int] = {}
    for i, piece in vocab.items():
        check_id(i, f"{piece!r:.60}")
        if not isinstance(piece, bytes) or not piece:
            raise TypeError(f"token {i} must be a non-empty bytes object; got {piece!r:.60}")
        if i in found_whole and len(piece) > 1:
            continue
        if id_of.setdefault(piece, i) != i:
            raise ValueError(f"vocab holds {piece!r:.60} twice, as {id_of[piece]} and {i}")
    missing = [byte for byte in range(256) if bytes([byte]) not in id_of]
    if missing:
        raise ValueError(
            f"vocab must hold all 256 bytes; {len(missing)} are missing, the first is "
            f"{missing[0]:#04x}"
        )
    return id_of


def check_merges(
    merges: Sequence[tuple[bytes, bytes]], id_of: Mapping[bytes, int]
) -> tuple[list[tuple[bytes, bytes]], dict[tuple[int, int], tuple[int, int]]]:
    """Check merges and number them: (left id, right id) → (rank, id of the two joined)."""
    table: dict[tuple[int, int], tuple[int, int]] = {}
    checked = []
    for rank, merge in enumerate(merges):
        if len(merge) != 2 or not all(isinstance(side, bytes) for side in merge):
            raise TypeError(f"merge {rank} must be two byte strings; got {merge!r:.60}")
        left, right = merge
        try:
            pair = (id_of[left], id_of[right])
            joined = id_of[left + right]
        except KeyError as error:
            raise ValueError(
                f"merge {rank} joins {left!r:.60} and {right!r:.60}, but the vocabulary has no "
                f"{error.args[0]!r:.60}"
            ) from None
        if pair in table:
            raise ValueError(f"merge {rank} of {left!r:.60} and {right!r:.60} is there twice")
        table[pair] = (rank, joined)
        checked.append((left, right))
    return checked, table
