"""Bytes as printable characters, the way GPT-2's files write tokens.

A byte that prints in Latin-1 stands for itself; the other 68 take the characters from U+0100 on, in
order. So a space is Ġ (U+0120) and a line end Ċ (U+010A).
"""

from __future__ import annotations

_PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTING)]
CHARACTER = {byte: chr(byte) for byte in _PRINTING}
CHARACTER |= {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}
_BYTE = {character: byte for byte, character in CHARACTER.items()}


def to_characters(piece: bytes) -> str:
    """Write bytes as printable characters."""
    return "".join([CHARACTER[byte] for byte in piece])


def from_characters(text: str) -> bytes:
    """Read bytes back; a character that stands for no byte is refused."""
    try:
        return bytes([_BYTE[character] for character in text])
    except KeyError as error:
        raise ValueError(
            f"token {text!r:.60} holds {error.args[0]!r}, which stands for no byte"
        ) from None
