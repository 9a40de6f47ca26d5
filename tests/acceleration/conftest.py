"""Which fusions ran; and Triton's interpreter, with less of it done twice.

What the interpreter computes and refuses is the same.
"""

import functools
import operator
import os

import numpy as np
import pytest

from scratchlm.accelerate import Fusion

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    @functools.cache
    def languages(fn):
        """Return the modules of the language that a function sees."""
        known = (interpreter.tl, core)
        return [one for one in known if any(value is one for value in fn.__globals__.values())]

    def call(self, *arguments, **keywords):
        """Call a function inside a kernel, which has replaced the language's operations."""
        if any(core.is_builtin(language.load) for language in languages(self.fn)):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*arguments, **keywords)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def check_overflow(self, lhs, rhs, binary_op):
        """Refuse integers that do not fit, by NumPy and not by the language again."""
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            assert kind == rhs.type.scalar
            found = getattr(operator, binary_op.__name__)(
                *(side.handle.data.astype(np.int64) for side in (lhs, rhs))
            )
            fits = (found <= kind.get_int_max_value()) & (found >= kind.get_int_min_value())
            assert fits.all(), f"int{kind.int_bitwidth} overflow detected: {binary_op.__name__}"

    interpreter.InterpretedFunction.__call__ = call
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow


@pytest.fixture
def ran(monkeypatch):
    """The names of the fusions that have run."""
    names, runs = [], Fusion.runs

    def listened(self, *given):
        answer = runs(self, *given)
        names.extend([self.name] if answer else [])
        return answer

    monkeypatch.setattr(Fusion, "runs", listened)
    return names
