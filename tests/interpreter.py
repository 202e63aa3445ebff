"""Triton's interpreter, made quicker where that changes no number: most of its time goes into three things.

- It looks for overflows of every sum and product of integers, one operation in nine others. The tensors of tests are
  too small for one.
- It scans element by element. Here all elements at one place of the axis are combined at once, in the same order.
- Each call of a function within a kernel puts the interpreter's functions in the place of Triton's language again.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np


def generic_scan(self, inputs):
    """`ScanOps.generic_scan` of Triton: for each of `inputs` what `combine_fn` makes of its elements up to there."""
    steps = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
    dtypes = [x.dtype for x in inputs]

    def at(i):
        return [self.to_tensor(np.atleast_1d(x[i]), dtype) for x, dtype in zip(steps, dtypes, strict=True)]

    through = [at(0)]
    for i in range(1, len(steps[0])):
        combined = self.combine_fn.fn(*through[-1], *at(i))
        through.append(list(combined) if isinstance(combined, tuple) else [combined])
    shape = inputs[0].handle.data.shape
    made = []
    for column, dtype in zip(zip(*through, strict=True), dtypes, strict=True):
        rows = np.stack([x.handle.data for x in column])
        whole = np.moveaxis(rows.reshape([len(rows), *np.delete(shape, self.axis)]), 0, self.axis)
        made.append(self.to_tensor(whole, dtype))
    return made


def quicken():
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.ScanOps.generic_scan = generic_scan

    @functools.cache
    def patch_core():
        interpreter._patch_lang(tl.sum.fn)

    def call(self, *args, **options):
        """A function within a kernel. The launch has changed `tl`; those of Triton itself see `tl.core` alone, which
        no launch changes back."""
        if tl not in self.fn.__globals__.values():
            patch_core()
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
