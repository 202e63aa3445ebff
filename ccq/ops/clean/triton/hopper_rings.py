"""What the kernels of hopper.py are made of: how TMA sees tensors, rings of buffers between warps, tiles in turn, and
the read of a state."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

FLAT = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
BLOCK, PACKED_BLOCK = (gl.NVMMASharedLayout(128, 16, rank) for rank in (3, 4))  # of 64 rows, as products take them
FAR = gl.constexpr(2**30)  # see rows_of


def rows_of(x: Tensor, packed: bool) -> TensorDescriptor:
    """[N, T, H, K], to be moved 64 tokens of a head at a time.

    Past the end of a tensor TMA reads zeros and stores nothing. A packed sequence ends where the next one begins, so
    each is seen as the end of a tensor of FAR rows: token r of L is row FAR - L + r. Two more coordinates bring that to
    its place: the token after the last, in steps of a row, and FAR, in steps of a row back. (No stride may be negative,
    but with 2^34 numbers less a row it is the same: addresses have 64 bits, and FAR times 2^34 is 2^64.)
    """
    if x.storage_offset() * x.element_size() % 16:  # TMA takes no such address
        x = x.clone()
    n, length, heads, size = x.shape
    row, far = heads * size, int(FAR)
    if packed:
        shape, strides = [far + 1, length + 1, far, row], [2**34 - row, row, row, 1]
        return TensorDescriptor(x, shape, strides, [1, 1, 64, size], PACKED_BLOCK)
    return TensorDescriptor(x, [n, length, row], [length * row, row, 1], [1, 64, size], BLOCK)


def states_of(x: Tensor, packed: bool) -> TensorDescriptor:
    """[chunks, H, K, K], 64 rows at a time, with as many dimensions as `rows_of`: they take the same buffers."""
    size = x.shape[-1]
    lead = [1, 1] if packed else [1]
    strides = [x.numel()] * len(lead) + [size, 1]
    block = PACKED_BLOCK if packed else BLOCK
    return TensorDescriptor(x, [*lead, x.numel() // size, size], strides, [*lead, 64, size], block)


@gluon.aggregate
class Ring:
    """Buffers of 64 rows that one warp fills and others read, in turn."""

    buffers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SIZE: gl.constexpr
    K: gl.constexpr

    @gluon.jit
    def create(SIZE: gl.constexpr, K: gl.constexpr, readers: gl.constexpr, tensor):
        buffers = gl.allocate_shared_memory(gl.bfloat16, [SIZE] + tensor.block_shape, tensor.layout)
        ready = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SIZE):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=readers)
        return Ring(buffers, ready, empty, SIZE, K)  # type: ignore[call-arg]

    @gluon.jit
    def put(self, item, tensor, where, row, col):
        """Fetch the item-th, 64 rows of a sequence (`where`: Tiles.rows), once all have released what was there."""
        lead, first = where
        at = item % self.SIZE
        mbarrier.wait(self.empty.index(at), (item // self.SIZE & 1) ^ 1)
        mbarrier.expect(self.ready.index(at), tensor.block_type.nbytes)
        tma.async_load(tensor, lead + (first + row, col), self.ready.index(at), self.buffers.index(at))

    @gluon.jit
    def put_two(self, item, tensor, where, row, col):
        """The 128 rows of a tile."""
        self.put(item, tensor, where, row, col)
        self.put(item + 1, tensor, where, row + 64, col)

    @gluon.jit
    def put_state(self, item, states, row):
        """A state, as K / 64 items; returns the one after."""
        for i in range(self.K // 64):
            if len(states.block_shape) == 4:  # of packed sequences
                self.put(item, states, ((0, 0), 0), row + i * 64, 0)
            else:
                self.put(item, states, ((0,), 0), row + i * 64, 0)
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
    def send(self, item, tensor, where, row, col):
        """Move what was written over the item-th to its rows of a sequence."""
        lead, first = where
        fence_async_shared()
        tma.async_store(tensor, lead + (first + row, col), self.buffers.index(item % self.SIZE))
        tma.store_wait(0)

    @gluon.jit
    def store(self, item, tensor, where, row, col):
        """The same, and release it."""
        self.send(item, tensor, where, row, col)
        self.release(item)

    @gluon.jit
    def skip(self, item):
        """An item for the other reader. To wait for it keeps the turns of the two in step."""
        self.get(item)
        self.release(item)


@gluon.aggregate
class Tiles:
    """Which tiles a program takes, and where they lie. Of packed sequences: how many, and the tables of launch.Grid."""

    T: gl.tensor
    heads: gl.tensor
    per_tiles: gl.tensor
    per_chunks: gl.tensor
    tiles: gl.tensor
    N: gl.tensor | gl.constexpr
    cu: gl.tensor | gl.constexpr
    tile_offsets: gl.tensor | gl.constexpr
    chunk_offsets: gl.tensor | gl.constexpr
    sum_offsets: gl.tensor | gl.constexpr
    S: gl.constexpr
    PACKED: gl.constexpr

    @gluon.jit
    def create(T, heads, per_tiles, per_chunks, tiles, tables, S: gl.constexpr):
        """`tiles`: if packed, the most there can be. How many there are is known only here."""
        N, cu, tile_offsets, chunk_offsets, sum_offsets = tables
        PACKED: gl.constexpr = cu is not None
        if PACKED:
            tiles = gl.load(tile_offsets + N).to(gl.int32)
        return Tiles(  # type: ignore[call-arg]
            T, heads, per_tiles, per_chunks, tiles, N, cu, tile_offsets, chunk_offsets, sum_offsets, S, PACKED
        )

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
    def sequence(self, tile):
        """The last packed sequence that begins at a tile or before it: empty ones are stepped over."""
        low, high = tile * 0, self.N
        while high - low > 1:
            middle = (low + high) // 2
            right = gl.load(self.tile_offsets + middle) <= tile
            low = gl.where(right, middle, low)
            high = gl.where(right, high, middle)
        return low

    @gluon.jit
    def place(self, turn):
        """Of a tile: sequence, head, first row; the chunk's first row; the sequence's length."""
        at = turn * gl.num_programs(0) + self.slot(turn)
        tile = at % self.tiles
        if self.PACKED:
            n = self.sequence(tile)
            row = (tile - gl.load(self.tile_offsets + n)).to(gl.int32) * 128
            length = (gl.load(self.cu + n + 1) - gl.load(self.cu + n)).to(gl.int32)
        else:
            row = tile % self.per_tiles * 128
            n = tile // self.per_tiles
            length = self.T
        chunk_row = row // self.S * self.S
        return n, at // self.tiles, row, chunk_row, length

    @gluon.jit
    def rows(self, n, length):
        """Where TMA finds a sequence: the coordinates before that of a row, and what to add to that one."""
        if self.PACKED:
            return (FAR, gl.load(self.cu + n + 1).to(gl.int32)), FAR - length
        else:
            return (n,), 0

    @gluon.jit
    def chunk(self, n, chunk_row):
        """The index of a chunk."""
        if self.PACKED:
            return gl.load(self.chunk_offsets + n).to(gl.int32) + chunk_row // self.S
        else:
            return n * self.per_chunks + chunk_row // self.S

    @gluon.jit
    def first_token(self, n):
        if self.PACKED:
            return gl.load(self.cu + n).to(gl.int64)
        else:
            return n.to(gl.int64) * self.T

    @gluon.jit
    def first_sum(self, n, per_sums):
        """The index of a sequence's first key sum (dk: of its first pull)."""
        if self.PACKED:
            return gl.load(self.sum_offsets + n).to(gl.int64)
        else:
            return n.to(gl.int64) * per_sums


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
