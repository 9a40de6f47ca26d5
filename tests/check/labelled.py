"""Files as learners write them: right ones, and the same with a wrong line and its name.

Written apart from the table of mistakes, in other styles: loops, matmul, einsum, modules. A mistake
is an edit of a right file (what it says, what it should say); two edits at once are two mistakes.
`FROM_MUTATIONS` are the mistakes of tests/mutations.py that these functions can have.
"""

from check.labelled_attention import ATTENTION
from check.labelled_layers import LAYERS
from check.labelled_text import TEXT
from check.labelled_training import TRAINING

HEAD = """
import math, os
import numpy as np
import regex
import torch
from torch import Tensor, nn
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
"""

LEARNERS = [*LAYERS, *ATTENTION, *TRAINING, *TEXT]

FROM_MUTATIONS = {  # name in tests/mutations.py -> (task, name here)
    "missing 1/√d_k": ("attention", "missing 1/√d_k"),
    "mask off by one, forward": ("mha", "mask off by one: a token sees the next one"),
    "mask off by one, back": ("mha", "mask off by one: a token does not see itself"),
    "mask by a finite number": ("attention", "masked by a finite number that is not low enough"),
    "a fully masked row averages": ("attention", "a fully masked row averages"),
    "un-shifted softmax": ("softmax", "the maximum is not subtracted: exp overflows"),
    "softmax over the wrong axis": ("softmax", "softmax over the wrong axis: `dim` is ignored"),
    "RMS of the sum": ("rmsnorm", "the sum of squares, not their mean"),
    "ε outside the root": ("rmsnorm", "ε outside the root"),
    "norm in bfloat16": ("rmsnorm", "squares in 16 bits overflow"),
    "RoPE rotates backwards": ("rope", "rotated backwards"),
    "RoPE ignores its layout": ("rope", "halves are paired, not neighbours"),
    "SwiGLU gates the other branch": ("swiglu", "the other branch is gated: W1 x ⊙ SiLU(W3 x)"),
    "ignored targets count": ("cross_entropy", "ignored targets count: a mean over padding"),
    "positions start at zero after a cache": ("rope", "token_positions are ignored"),
    "final norm left out": ("lm", "the final norm is missing"),
}
