"""What the kernels of hopper.py are made of: rings of buffers between warps, tiles in turn, and the read of a state."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.aggregate
class Ring:
    """Buffers of 64 rows that one warp fills and others read, in turn."""

    buffers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SIZE: gl.constexpr
    K: gl.constexpr

    @gluon.jit
    def create(SIZE: gl.constexpr, K: gl.constexpr, readers: gl.constexpr, layout: gl.constexpr):
        buffers = gl.allocate_shared_memory(gl.bfloat16, [SIZE, 1, 64, K], layout)
        ready = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SIZE):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=readers)
        return Ring(buffers, ready, empty, SIZE, K)  # type: ignore[call-arg]

    @gluon.jit
    def put(self, item, tensor, n, row, col):
        """Fetch the item-th: 64 rows of a tensor, once all have released what was there."""
        at = item % self.SIZE
        mbarrier.wait(self.empty.index(at), (item // self.SIZE & 1) ^ 1)
        mbarrier.expect(self.ready.index(at), tensor.block_type.nbytes)
        tma.async_load(tensor, [n, row, col], self.ready.index(at), self.buffers.index(at))

    @gluon.jit
    def put_two(self, item, tensor, n, row, col):
        """The 128 rows of a tile."""
        self.put(item, tensor, n, row, col)
        self.put(item + 1, tensor, n, row + 64, col)

    @gluon.jit
    def put_state(self, item, states, row):
        """A state, as K / 64 items; returns the one after."""
        for i in range(self.K // 64):
            self.put(item, states, 0, row + i * 64, 0)
            item += 1
        return item

    @gluon.jit
    def get(self, item):
        """The item-th, [64, K], once it is there."""
        at = item % self.SIZE
        mbarrier.wait(self.ready.index(at), item // self.SIZE & 1)
        return self.buffers.index(at).reshape([64, self.K])

    @gluon.jit
    def release(self, item):
        mbarrier.arrive(self.empty.index(item % self.SIZE), count=1)

    @gluon.jit
    def send(self, item, tensor, n, row, col):
        """Move what was written over the item-th to its rows of a tensor."""
        fence_async_shared()
        tma.async_store(tensor, [n, row, col], self.buffers.index(item % self.SIZE))
        tma.store_wait(0)

    @gluon.jit
    def store(self, item, tensor, n, row, col):
        """The same, and release it."""
        self.send(item, tensor, n, row, col)
        self.release(item)

    @gluon.jit
    def skip(self, item):
        """An item for the other reader. To wait for it keeps the turns of the two in step."""
        self.get(item)
        self.release(item)


@gluon.aggregate
class Tiles:
    """Which tiles a program takes, and where they lie."""

    T: gl.tensor
    heads: gl.tensor
    per_tiles: gl.tensor
    per_chunks: gl.tensor
    tiles: gl.tensor
    S: gl.constexpr

    @gluon.jit
    def slot(self, turn):
        """The program's place in a turn, there and back: some tiles of a chunk have more to read than others, and one
        program would get nothing but those."""
        pid = gl.program_id(0)
        return gl.where(turn % 2 == 0, pid, gl.num_programs(0) - 1 - pid)

    @gluon.jit
    def turns(self):
        whole = self.tiles * self.heads // gl.num_programs(0)
        return whole + (self.slot(whole) < self.tiles * self.heads % gl.num_programs(0)).to(gl.int32)

    @gluon.jit
    def place(self, turn):
        """Sequence, head, first row; the chunk's first row, and its index."""
        at = turn * gl.num_programs(0) + self.slot(turn)
        row = at % self.tiles % self.per_tiles * 128
        n = at % self.tiles // self.per_tiles
        chunk_row = row // self.S * self.S
        return n, at // self.tiles, row, chunk_row, n * self.per_chunks + chunk_row // self.S


@gluon.jit
def read_state(acc, x, ring, item, blocks):
    """acc + x times a state of `blocks` * 64 rows (K, or none), and the item after it."""
    parts = x._reinterpret(gl.bfloat16, [ring.K // 64, 64, 64], FLAT)
    for i in range(blocks):
        acc = warpgroup_mma(parts.index(i), ring.get(item), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        ring.release(item)
        item += 1
    return acc, item
