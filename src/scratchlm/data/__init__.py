"""From text to batches: `prepare` makes token files, `TokenFile` and `Batches` read them.

The names are resolved on first use: preparing text needs no torch, and its worker processes
should not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scratchlm.data.batches import IGNORE_INDEX as IGNORE_INDEX
    from scratchlm.data.batches import Batch as Batch
    from scratchlm.data.batches import Batches as Batches
    from scratchlm.data.batches import ValidationBatches as ValidationBatches
    from scratchlm.data.plan import Progress as Progress
    from scratchlm.data.preparation import Prepared as Prepared
    from scratchlm.data.preparation import prepare as prepare
    from scratchlm.data.preparation import tokenizer_fingerprint as tokenizer_fingerprint
    from scratchlm.data.sources import iter_documents as iter_documents
    from scratchlm.data.token_file import TokenFile as TokenFile
    from scratchlm.data.token_file import TokenFileInfo as TokenFileInfo
    from scratchlm.data.token_file import write_token_file as write_token_file

_MODULE_OF = {
    "prepare": "preparation",
    "Prepared": "preparation",
    "tokenizer_fingerprint": "preparation",
    "Progress": "plan",
    "iter_documents": "sources",
    "TokenFile": "token_file",
    "TokenFileInfo": "token_file",
    "write_token_file": "token_file",
    "Batches": "batches",
    "ValidationBatches": "batches",
    "Batch": "batches",
    "IGNORE_INDEX": "batches",
}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(f"scratchlm.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'scratchlm.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
