"""The file a learner starts from: every function as a stub, with its formula and shapes."""

from __future__ import annotations

import textwrap

from scratchlm.check.tasks import TASKS, Task
from scratchlm.tokenizer import PATTERNS

HEAD = '''"""A Transformer language model of my own: {count} functions, in teaching order.

Write any of them, in any order, and see where you stand:

    scratchlm check {file}              what is right, what is wrong, and which mistake it is
    scratchlm check {file} softmax      one function
    scratchlm check {file} --hint       a nudge; --hint --hint: a pointer; a third: the line
    scratchlm check {file} --watch      again whenever you save
    scratchlm check {file} --train      train a model with your functions, beside the same model
                                          with the definitions, and draw both curves

A function that is not written yet, or is wrong still, is borrowed from the definition by the
others: `run_swiglu` may call `run_silu` before you have written that. … stands for any number of
leading (batch) dimensions. A result has the dtype of the input. Inputs must not be changed, and
gradients must reach all of them: work on the arguments themselves, not on copies (.data, detach).

To write everything from scratch, as the course has it, use tensors and nn.Parameter, nn.Module and
torch.optim.Optimizer (the base classes), and nothing else of torch.nn, torch.nn.functional or
torch.optim: `--from-scratch` looks.
"""

import math
from collections.abc import Iterable

import regex
import torch
from torch import Tensor

# How a text is cut into words, for BPE: regex.findall(PATTERN, text).
PATTERN = r"""{pattern}"""
'''


def write_stubs(file: str = "my_ops.py") -> str:
    """Return the text of a file of stubs."""
    parts = [HEAD.format(count=len(TASKS), file=file, pattern=PATTERNS["gpt2"])]
    parts += [stub(number, task) for number, task in enumerate(TASKS, 1)]
    return "\n\n".join(parts)


def stub(number: int, task: Task) -> str:
    """Return one function, not written."""
    head = f"def {task.name}({task.arguments}) -> {task.returns}:"
    if len(head) > 100:
        listed = "".join(f"    {argument},\n" for argument in _arguments(task.arguments))
        head = f"def {task.name}(\n{listed}) -> {task.returns}:"
    first, _, rest = task.text.partition("\n")
    text = f"{number}. {first}\n{rest}\n\nExplained in {task.where}."
    docstring = textwrap.indent(text, "    ").strip()
    return f'{head}\n    """{docstring}\n    """\n    raise NotImplementedError\n'


def _arguments(text: str) -> list[str]:
    """Split a list of arguments at its commas, but those inside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
