"""Triton's interpreter, made quicker where that changes no number: most of its time goes into three things.

- It looks for overflows of every sum and product of integers, one operation in nine others. The tensors of tests are
  too small for one.
- It scans element by element. Here all elements at one place of the axis are combined at once, in the same order.
- Each call of a function within a kernel puts the interpreter's functions in the place of Triton's language again.

And two mistakes with bf16 are mended: it multiplies tiles as the integers that hold their bits, and it cuts fp32 off
where a GPU rounds to nearest.
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


def of_bf16(x):
    return (x.data.astype(np.uint32) << 16).view(np.float32) if x.data.dtype == np.uint16 else x.data


def to_bf16(x):
    """The bits of fp32 numbers, rounded to the nearest of bf16, ties to even; a NaN stays one."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def quicken():
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter.ScanOps.generic_scan = generic_scan

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(of_bf16(a), of_bf16(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    convert = interpreter._convert_float

    def convert_float(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return to_bf16(x)
        return convert(x, source, target, rounding)

    interpreter._convert_float = convert_float

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
