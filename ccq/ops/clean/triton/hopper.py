"""The reads of the operator for Hopper, in Gluon: what reads.clean_kernel and reads.dk_kernel compute, for bf16.

A program has two warp groups that multiply, each 64 rows of a tile of 128, and one warp that fetches what they read, by
TMA, through rings of buffers. So the state and the keys come once for 128 rows, and what one warp group does beside its
products hides behind those of the other. Programs stay and take tile after tile: the next one's rows are fetched while
this one's are computed. docs/kernels.md says what that brings.

Gluon is Triton's lower level (triton.experimental.gluon), and Triton does not interpret it: in tests/ops
clean/test_hopper.py runs this source with PyTorch in its place, test_compile.py compiles it, `pytest -m gpu` compares
it with fp64. The functions that share a program must have one signature.

N sequences of T tokens, H key heads, HQ query heads, K key size; a chunk has S tokens, a key sum 64, a tile 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ccq.ops.clean.reference import LEAST
from ccq.ops.clean.triton.hopper_rings import FLAT, Ring, Tiles, read_state, rows_of, states_of
from ccq.ops.precision import EPS

if TYPE_CHECKING:
    from ccq.ops.clean.triton.launch import Adjoint, Decay, Grid, Keys, Rows

Y, SCALED, PROJECTED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)  # as in reads.py
SMALLEST = gl.constexpr(LEAST)
PERIOD = gl.constexpr(256)  # of scans.py
LOG2_E = gl.constexpr(1.4426950408889634)
FAINT = gl.constexpr(1e-12)  # of a past: what is left of it counts as this much at least, so that it can be divided by
NEVER = gl.constexpr(-1e30)  # the running log-decay of a token that is not there: it sees nothing
ROWS = 3  # buffers of x: the two in use, and one of the next tile
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of 64 numbers, one to a thread


@gluon.aggregate
class CleanModes:
    """What is computed of a query."""

    STEP: gl.constexpr
    KEEP: gl.constexpr
    INITIAL: gl.constexpr
    CENTRED: gl.constexpr
    DECAY: gl.constexpr
    UNIT: gl.constexpr
    ALONG: gl.constexpr
    UNIT_OTHER: gl.constexpr


@gluon.jit
def decay_before(through, row, length):
    """The running log-decay of one sequence before its token `row`; 0 where a period begins, and past its end."""
    inside = (row % PERIOD != 0) & (row <= length)
    return gl.load(through + gl.where(inside, row - 1, 0)) * inside.to(gl.float32)


@gluon.jit
def exp(x):
    """In two instructions: Gluon's own takes six, to round numbers below 1e-38 well."""
    code: gl.constexpr = "ex2.approx.ftz.f32 $0, $1;"
    return gl.inline_asm_elementwise(code, "=r,r", [LOG2_E * x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def anew(x):
    """x, of which the compiler does not know that it has seen it: what depends on it is computed once more."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.float32, is_pure=False, pack=1)


@gluon.jit
def scores_of(x, keys):
    """x . k of 64 rows and 64 keys; the product is still under way."""
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    p = gl.zeros([64, 64], gl.float32, square)
    return warpgroup_mma(x, keys.permute([1, 0]), p, use_acc=False, is_async=True)


@gluon.jit
def read_keys(acc, scores, keys, left: gl.constexpr):
    """acc + scores times the keys."""
    acc = warpgroup_mma(gl.convert_layout(scores.to(gl.bfloat16), left), keys, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def fetch_clean(tensors, rings, key_sums, tiles, heads, pointers, modes):
    """All tiles of a program, in the order in which `read_clean` reads."""
    x, k, states, other, _, _ = tensors
    x_ring, ring = rings
    HQ, H = heads
    K: gl.constexpr = ring.K
    item = 0
    for turn in range(tiles.turns()):
        n, hq, row, chunk_row, length = tiles.place(turn)
        chunk = tiles.chunk(n, chunk_row)
        h = hq // (HQ // H)
        where = tiles.rows(n, length)
        x_ring.put_two(2 * turn, x, where, row, hq * K)
        if modes.INITIAL or chunk_row > 0:
            item = ring.put_state(item, states, (chunk * H + h) * K)
        for i in range((row + 128 - chunk_row) // 64):
            ring.put(item, k, where, row + 64 - i * 64, h * K)
            item += 1
        if modes.ALONG:
            ring.put_two(item, other, where, row, hq * K)
            item += 2


@gluon.jit
def read_clean(tensors, rings, key_sums, tiles, heads, pointers, modes, W: gl.constexpr):
    """The W-th 64 rows of all tiles of a program; the steps are those of reads.clean_kernel."""
    out, kept = tensors[4], tensors[5]
    x_ring, ring = rings
    lam, sums, count, through, weights, means, along, per_sums, tokens, eps = pointers
    HQ, H = heads
    K: gl.constexpr = ring.K
    # layouts of products: [64, K], [64, 64] and [64, 16]; of their left side in registers; and of what loads key sums
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    even: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [4, 1], [1, 0])
    wide_row: gl.constexpr = gl.SliceLayout(1, wide)
    square_row: gl.constexpr = gl.SliceLayout(1, square)
    narrow_row: gl.constexpr = gl.SliceLayout(1, narrow)
    local = gl.arange(0, 64, wide_row)
    column_of: gl.constexpr = gl.SliceLayout(0, square)
    sees = gl.arange(0, 64, square_row)[:, None] >= gl.arange(0, 64, column_of)[None, :]
    lane = gl.arange(0, 64, LANES)
    # Rows 2v and 2v + 1 hold a key sum in two parts, as in reads.load_sums: that before the 64 rows (v = 0), and that
    # before the chunk, twice.
    sum_row = gl.arange(0, 16, gl.SliceLayout(1, even))
    sum_col = gl.arange(0, K, gl.SliceLayout(0, even))
    v = sum_row // 2
    product_v = gl.arange(0, 16, gl.SliceLayout(0, narrow)) // 2
    part = gl.arange(0, 16, gl.SliceLayout(0, left)) // 2
    own_sums = key_sums.index(W)

    item = 0
    for turn in range(tiles.turns()):
        n, hq, row, chunk_row, length = tiles.place(turn)
        h = hq // (HQ // H)
        begin = row + W * 64
        rows = begin + local
        valid = rows < length
        per_row = (tiles.first_token(n) + rows) * HQ + hq
        sequence = h.to(gl.int64) * tokens + tiles.first_token(n)
        if modes.STEP != Y:
            gate = gl.load(lam + per_row, mask=valid, other=0.0).to(gl.float32)
        if modes.DECAY:
            decays = through + sequence
            t = gl.load(weights + sequence + rows, mask=valid, other=1.0)
            now = gl.load(decays + rows, mask=valid, other=0.0)
            chunk_start = decay_before(decays, chunk_row, length)  # asked for now, needed after the state
            own_start = decay_before(decays, begin, length)
            coming = gl.load(decays + (begin + lane), mask=begin + lane < length, other=0.0)
            earlier = gl.where(chunk_row > 0, chunk_row - 1, 0)
            n0 = gl.load(weights + sequence + earlier)
            if modes.INITIAL:
                n0 = gl.where(chunk_row > 0, n0, gl.load(count + n * H + h))
            n0 = gl.where(n0 > 0, n0, 1.0)
        else:
            seen = n.to(gl.int64) * 0
            if modes.INITIAL:
                seen += gl.load(count + n)
            t = (seen + rows + 1).to(gl.float32)
            n0 = gl.maximum(seen + chunk_row, 1).to(gl.float32)
        blocks = 0
        if modes.INITIAL or chunk_row > 0:  # a sequence with no past has no state to read
            blocks = K // 64
        if modes.CENTRED:  # asked for now, needed after the state
            at = sums + ((tiles.first_sum(n, per_sums) + chunk_row // 64) * H + h) * K
            before_rows = gl.where(v == 0, (begin - chunk_row) // 64, 0) * (H * K)
            there = (v < 3) & ((v > 0) | (begin < length))
            s = gl.load(at + before_rows[:, None] + sum_col[None, :], mask=there[:, None], other=0.0)

        x = x_ring.get(2 * turn + W)
        scale = gl.full([64], 1.0, gl.float32, wide_row)
        if modes.UNIT:
            q = x.load(wide).to(gl.float32)
            scale = gl.rsqrt(gl.sum(q * q, 1) + eps)
        acc = gl.zeros([64, K], gl.float32, wide)  # in units of past |q_t|
        acc, item = read_state(acc, x, ring, item, blocks)
        past = gl.full([64], 1.0, gl.float32, wide_row) * n0
        if modes.DECAY:
            left_of_past = exp(gl.minimum(now - chunk_start, 0.0))
            past = past * gl.maximum(left_of_past, FAINT)
            fade = exp(gl.minimum(now - own_start, 0.0))
            now_square = gl.convert_layout(now, square_row)

        before = gl.zeros([64], gl.float32, narrow_row)
        off = gl.zeros([64], gl.float32, narrow_row)
        if modes.CENTRED:
            high = s.to(gl.bfloat16).to(gl.float32)
            own_sums.store(gl.where((sum_row % 2 == 0)[:, None], high, s - high).to(gl.bfloat16))
            fence_async_shared()
            products = gl.zeros([64, 16], gl.float32, narrow)
            products = warpgroup_mma(x, own_sums.permute([1, 0]), products, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=(products,))
            before = gl.sum(gl.where((product_v == 0)[None, :], products, 0.0), 1)
            off = gl.sum(gl.where((product_v == 1)[None, :], products, 0.0), 1)
            if modes.DECAY:
                before = before * gl.convert_layout(fade, narrow_row)

        if W == 0:  # the keys of the later 64 rows
            ring.skip(item)
            item += 1
        # The rows' own keys first: with them m is complete. A decay is loaded a block ahead, by one thread a key, and
        # handed to those that hold its column while the product runs. What is left of a key at a row is computed twice,
        # from numbers handed over twice: to keep 64 x 64 of them would take registers that the sum needs.
        keys = ring.get(item)
        p = scores_of(x, keys)
        if modes.DECAY:
            then = coming
            key = begin - 64 + lane
            coming = gl.load(decays + key, mask=(key >= chunk_row) & (key < length), other=0.0)
        p = warpgroup_mma_wait(0, deps=(p,))
        m = gl.zeros([64], gl.float32, square_row)
        if modes.CENTRED:
            own = p
            if modes.DECAY:
                own = p * exp(now_square[:, None] - gl.convert_layout(then, column_of)[None, :])
            own = gl.where(sees, own, 0.0)
            m = (gl.convert_layout(before, square_row) + gl.sum(own, 1)) / gl.convert_layout(t, square_row)
            p = p - m[:, None]
        if modes.DECAY:
            p = p * exp(now_square[:, None] - gl.convert_layout(anew(then), column_of)[None, :])
        share = 1.0 / gl.convert_layout(past, square_row)
        acc = read_keys(acc, gl.where(sees, p * share[:, None], 0.0), keys, left)
        ring.release(item)
        item += 1
        if modes.DECAY:  # of an earlier key: what is left of it where the rows begin, and of that at each row
            share = share * gl.convert_layout(fade, square_row)
        for i in range(1, (begin + 64 - chunk_row) // 64):
            keys = ring.get(item)
            p = scores_of(x, keys)
            if modes.DECAY:
                left_of_key = gl.convert_layout(exp(gl.minimum(own_start - coming, 0.0)), column_of)
                key = begin - (i + 1) * 64 + lane
                coming = gl.load(decays + key, mask=(key >= chunk_row) & (key < length), other=0.0)
            p = warpgroup_mma_wait(0, deps=(p,)) * share[:, None] - (m * share)[:, None]
            if modes.DECAY:
                p = p * left_of_key[None, :]
            acc = read_keys(acc, p, keys, left)
            ring.release(item)
            item += 1

        if modes.CENTRED:
            mean = gl.convert_layout(m, narrow_row)
            outer = (off / n0 - mean) / gl.convert_layout(past, narrow_row)
            if modes.DECAY:
                outer = outer * gl.convert_layout(left_of_past, narrow_row)
            outer_high = gl.convert_layout(outer.to(gl.bfloat16).to(gl.float32), gl.SliceLayout(1, left))
            outer_low = gl.convert_layout(outer, gl.SliceLayout(1, left)) - outer_high
            parts = gl.where((part == 1)[None, :], outer_high[:, None], 0.0)
            parts = gl.where((part == 2)[None, :], outer_low[:, None], parts)
            acc = warpgroup_mma(parts.to(gl.bfloat16), own_sums, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            gl.store(means + per_row, gl.convert_layout(mean, wide_row) * scale, mask=valid)
        unit = scale * past / t
        if modes.STEP == Y:
            acc = acc * unit[:, None]
            x.store(acc.to(gl.bfloat16))
            if modes.ALONG:
                if W == 1:
                    ring.skip(item)
                    item += 1
                o = ring.get(item).load(wide).to(gl.float32)
                product = -gl.sum(o * acc, 1)
                if modes.UNIT_OTHER:
                    product *= gl.rsqrt(gl.sum(o * o, 1) + eps)
                gl.store(along + per_row, product.to(along.dtype.element_ty), mask=valid)
                fence_async_shared()
                ring.release(item)
                item += 1
                if W == 0:
                    ring.skip(item)
                    item += 1
        else:
            # the sign at the gate: subtracted from a query that is not scaled, Triton 3.8's assembler takes the
            # products for dead and leaves them out
            size = -gate * unit
            q = x.load(wide)
            if modes.STEP == PROJECTED:
                squares = gl.sum(acc * acc, 1) * unit * unit + SMALLEST
                size = size * gl.sum(q.to(gl.float32) * acc, 1) * scale * unit / squares
                if modes.KEEP:  # to hold it beside y would take registers that are not there
                    fence_async_shared()
                    q = x.load(wide)
            clean = q.to(gl.float32) * scale[:, None] + acc * size[:, None]
            x.store(clean.to(gl.bfloat16))
            if modes.KEEP:  # y goes the same way, when q_clean is gone
                x_ring.send(2 * turn + W, out, tiles.rows(n, length), begin, hq * K)
                x.store((acc * unit[:, None]).to(gl.bfloat16))
        if modes.KEEP:
            x_ring.store(2 * turn + W, kept, tiles.rows(n, length), begin, hq * K)
        else:
            x_ring.store(2 * turn + W, out, tiles.rows(n, length), begin, hq * K)


@gluon.jit
def read_clean_first(tensors, rings, key_sums, tiles, heads, pointers, modes):
    read_clean(tensors, rings, key_sums, tiles, heads, pointers, modes, 0)


@gluon.jit
def read_clean_second(tensors, rings, key_sums, tiles, heads, pointers, modes):
    read_clean(tensors, rings, key_sums, tiles, heads, pointers, modes, 1)


VARYING = ["N", "T", "tokens", "HQ", "H", "per_tiles", "per_chunks", "per_sums", "tiles"]


@gluon.jit(do_not_specialize=VARYING)
def clean_hopper_kernel(
    x, k, states, other, out, kept, lam, sums, count, through, weights, means, along,
    N, cu, tile_offsets, chunk_offsets, sum_offsets, T, tokens, HQ, H, per_tiles, per_chunks, per_sums, tiles, eps,
    K: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    STEP: gl.constexpr, KEEP: gl.constexpr, INITIAL: gl.constexpr, CENTRED: gl.constexpr, DECAY: gl.constexpr,
    UNIT: gl.constexpr, ALONG: gl.constexpr, UNIT_OTHER: gl.constexpr,
):  # fmt: skip
    """q_clean, or Sigma x (for Y) with -other . Sigma x (if ALONG), and m_t: as reads.clean_kernel."""
    tensors = (x, k, states, other, out, kept)
    rings = (Ring.create(ROWS, K, 1, x), Ring.create(STAGES, K, 2, x))
    key_sums = gl.allocate_shared_memory(gl.bfloat16, [2, 16, K], FLAT)
    fence_async_shared()
    tables = (N, cu, tile_offsets, chunk_offsets, sum_offsets)
    place = Tiles.create(T, HQ, per_tiles, per_chunks, tiles, tables, S)
    pointers = (lam, sums, count, through, weights, means, along, per_sums, tokens, eps)
    modes = CleanModes(STEP, KEEP, INITIAL, CENTRED, DECAY, UNIT, ALONG, UNIT_OTHER)  # type: ignore[call-arg]
    # registers: 2 x 128 x 240 and 128 x 24 of the 384 x 168 that the kernel has
    gl.warp_specialize(
        [
            (read_clean_first, (tensors, rings, key_sums, place, (HQ, H), pointers, modes)),
            (read_clean_second, (tensors, rings, key_sums, place, (HQ, H), pointers, modes)),
            (fetch_clean, (tensors, rings, key_sums, place, (HQ, H), pointers, modes)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.aggregate
class KeyModes:
    """What is computed of a key's gradient."""

    UNIT: gl.constexpr
    BAR: gl.constexpr
    LAST: gl.constexpr
    CENTRED: gl.constexpr
    DECAY: gl.constexpr
    PULL: gl.constexpr


@gluon.jit
def fetch_dk(tensors, rings, tiles, heads, pointers, modes):
    """All tiles of a program, in the order in which `read_dk` reads."""
    x, q, w, states, bar, _ = tensors
    x_ring, ring = rings
    HQ, H = heads
    K: gl.constexpr = ring.K
    item = 0
    for turn in range(tiles.turns()):
        n, h, row, chunk_row, length = tiles.place(turn)
        chunk = tiles.chunk(n, chunk_row)
        chunk_end = gl.minimum(chunk_row + tiles.S, length)
        where = tiles.rows(n, length)
        x_ring.put_two(2 * turn, x, where, row, h * K)
        if modes.LAST or chunk_end < length:
            item = ring.put_state(item, states, (chunk * H + h) * K)
        for g in range(HQ // H):
            for late in range(row, gl.maximum(chunk_end, row + 65), 64):
                ring.put(item, q, where, late, (h * (HQ // H) + g) * K)
                ring.put(item + 1, w, where, late, (h * (HQ // H) + g) * K)
                item += 2
        if modes.BAR:
            ring.put_two(item, bar, where, row, h * K)
            item += 2


@gluon.jit
def read_queries(acc, x, ring, item, lifts, decays, late, length, fades, modes, OWN: gl.constexpr):
    """acc with what 64 queries from `late` on say to the keys x: those of the keys' own tokens, if OWN, or later ones.

    `fades`, of the running decay: that at the keys, that after the last of them, and what is left of each key there.
    """
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ring.K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    column_of: gl.constexpr = gl.SliceLayout(0, square)
    seen = gl.arange(0, 64, column_of)[None, :] >= gl.arange(0, 64, gl.SliceLayout(1, square))[:, None]
    # asked for by one thread a query, and handed to those that hold its column when the products are there: until then
    # they would take registers
    lane = gl.arange(0, 64, LANES)
    inside = lane < length - late
    lift_q, lift_w = lifts
    then, own_end, of_key = fades
    if modes.DECAY:
        now = gl.load(decays + late + lane, mask=inside, other=NEVER)
        if not OWN:
            now = exp(gl.minimum(now - own_end, 0.0))
    if modes.CENTRED:
        off_q = gl.load(lift_q + late + lane, mask=inside, other=0.0)
        off_w = gl.load(lift_w + late + lane, mask=inside, other=0.0)
    x_q = ring.get(item)
    p_q = scores_of(x, x_q)
    x_w = ring.get(item + 1)
    p_w = scores_of(x, x_w)
    p_q, p_w = warpgroup_mma_wait(0, deps=(p_q, p_w))
    if modes.CENTRED:
        p_q -= gl.convert_layout(off_q, column_of)[None, :]
        p_w -= gl.convert_layout(off_w, column_of)[None, :]
    if modes.DECAY:
        here = gl.convert_layout(now, column_of)
        if OWN:
            reach = exp(here[None, :] - then[:, None])
        else:  # what is left of a key after its rows, of that at each query
            reach = of_key[:, None] * here[None, :]
        p_q = p_q * reach
        p_w = p_w * reach
    if OWN:
        p_q = gl.where(seen, p_q, 0.0)
        p_w = gl.where(seen, p_w, 0.0)
    acc = warpgroup_mma(gl.convert_layout(p_q.to(gl.bfloat16), left), x_w, acc, is_async=True)
    acc = warpgroup_mma(gl.convert_layout(p_w.to(gl.bfloat16), left), x_q, acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    ring.release(item)
    ring.release(item + 1)
    return acc


@gluon.jit
def read_dk(tensors, rings, tiles, heads, pointers, modes, W: gl.constexpr):
    """The W-th 64 rows of all tiles of a program; the steps are those of reads.dk_kernel."""
    out = tensors[5]
    x_ring, ring = rings
    HQ, H = heads
    k_rnorm, lift_q, lift_w, pulls, last_sum, through, per_sums, tokens = pointers
    K: gl.constexpr = ring.K
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    square: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    local = gl.arange(0, 64, gl.SliceLayout(1, wide))
    cols = gl.arange(0, K, gl.SliceLayout(0, wide))
    G = HQ // H

    item = 0
    for turn in range(tiles.turns()):
        n, h, row, chunk_row, length = tiles.place(turn)
        chunk_end = gl.minimum(chunk_row + tiles.S, length)
        begin = row + W * 64
        blocks = 0
        later = modes.LAST or chunk_end < length
        if later:
            blocks = K // 64
        x = x_ring.get(2 * turn + W)
        acc, item = read_state(gl.zeros([64, K], gl.float32, wide), x, ring, item, blocks)
        rows = begin + local
        fade = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, wide))  # of a key until the end of its chunk
        decays, then_square, own_end, of_key = through, 0.0, 0.0, 0.0
        if modes.DECAY:
            decays = through + h.to(gl.int64) * tokens + tiles.first_token(n)
            then = gl.load(decays + rows, mask=rows < length, other=0.0)
            fade = exp(gl.minimum(gl.load(decays + (chunk_end - 1)) - then, 0.0))
            acc = acc * fade[:, None]
            then_square = gl.convert_layout(then, gl.SliceLayout(1, square))
            own_end = gl.load(decays + gl.minimum(begin + 63, length - 1))
            of_key = exp(gl.minimum(own_end - then_square, 0.0))
        for g in range(G):
            if W == 1:
                ring.skip(item)
                ring.skip(item + 1)
                item += 2
            at = (h * G + g).to(gl.int64) * tokens + tiles.first_token(n)
            lifts = (lift_q + at, lift_w + at)
            fades = (then_square, own_end, of_key)
            acc = read_queries(acc, x, ring, item, lifts, decays, begin, length, fades, modes, True)
            item += 2
            for late in range(begin + 64, gl.maximum(chunk_end, row + 65), 64):
                acc = read_queries(acc, x, ring, item, lifts, decays, late, length, fades, modes, False)
                item += 2

        if modes.CENTRED or (modes.DECAY and modes.LAST):
            at = ((tiles.first_sum(n, per_sums) + (chunk_end + modes.PULL - 1) // modes.PULL - 1) * HQ + h * G) * K
            acc += gl.load(pulls + at + cols, mask=(cols >= 0) & later, other=0.0)[None, :] * fade[:, None]
        elif modes.LAST:
            acc += gl.load(last_sum + (n.to(gl.int64) * H + h) * K + cols)[None, :]
        if modes.BAR:
            if W == 1:
                ring.skip(item)
                item += 1
            acc += ring.get(item).load(wide).to(gl.float32)
            fence_async_shared()
            ring.release(item)
            item += 1
            if W == 0:
                ring.skip(item)
                item += 1
        if modes.UNIT:
            r = gl.load(k_rnorm + (tiles.first_token(n) + rows) * H + h, mask=rows < length, other=0.0)
            along = gl.sum(x.load(wide).to(gl.float32) * acc, 1)
            fence_async_shared()
            acc = r[:, None] * (acc - x.load(wide).to(gl.float32) * along[:, None])
        x.store(acc.to(gl.bfloat16))
        x_ring.store(2 * turn + W, out, tiles.rows(n, length), begin, h * K)


@gluon.jit
def read_dk_first(tensors, rings, tiles, heads, pointers, modes):
    read_dk(tensors, rings, tiles, heads, pointers, modes, 0)


@gluon.jit
def read_dk_second(tensors, rings, tiles, heads, pointers, modes):
    read_dk(tensors, rings, tiles, heads, pointers, modes, 1)


@gluon.jit(do_not_specialize=VARYING)
def dk_hopper_kernel(
    x, q, w, states, bar, out, k_rnorm, lift_q, lift_w, pulls, last_sum, through,
    N, cu, tile_offsets, chunk_offsets, sum_offsets, T, tokens, HQ, H, per_tiles, per_chunks, per_sums, tiles,
    K: gl.constexpr, S: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
    UNIT: gl.constexpr, BAR: gl.constexpr, LAST: gl.constexpr, CENTRED: gl.constexpr, DECAY: gl.constexpr,
    PULL: gl.constexpr,
):  # fmt: skip
    """dk: as reads.dk_kernel."""
    tensors = (x, q, w, states, bar, out)
    rings = (Ring.create(ROWS, K, 1, x), Ring.create(STAGES, K, 2, x))
    fence_async_shared()
    tables = (N, cu, tile_offsets, chunk_offsets, sum_offsets)
    place = Tiles.create(T, H, per_tiles, per_chunks, tiles, tables, S)
    pointers = (k_rnorm, lift_q, lift_w, pulls, last_sum, through, per_sums, tokens)
    modes = KeyModes(UNIT, BAR, LAST, CENTRED, DECAY, PULL)  # type: ignore[call-arg]
    gl.warp_specialize(
        [
            (read_dk_first, (tensors, rings, place, (HQ, H), pointers, modes)),
            (read_dk_second, (tensors, rings, place, (HQ, H), pointers, modes)),
            (fetch_dk, (tensors, rings, place, (HQ, H), pointers, modes)),
        ],
        [4, 1],
        [240, 24],
    )


def clean(
    grid: Grid, x: Tensor, keys: Keys, lam: Tensor | None, step: int, decay: Decay, states: Tensor, out: Tensor,
    means: Tensor, beside: Rows, centred: bool, unit: bool,
) -> None:  # fmt: skip
    """See launch.read_tiles."""
    packed = grid.cu is not None
    rows, made = rows_of(x, packed), rows_of(out, packed)
    clean_hopper_kernel[(grid.programs(grid.query_heads),)](
        rows, rows_of(keys.stat, packed), states_of(states, packed),
        rows if beside.other is None else rows_of(beside.other, packed), made,
        made if beside.kept is None else rows_of(beside.kept, packed), lam, keys.sums, grid.count, *decay, means,
        beside.along, grid.sequences if packed else None, grid.cu, *grid.tables, grid.length, grid.tokens,
        grid.query_heads, grid.key_heads, grid.per_tiles, grid.per_chunks, grid.per_sums, grid.tiles, EPS,
        K=grid.size, S=grid.config.S, STAGES=grid.config.stages, ROWS=ROWS,
        STEP=step, KEEP=beside.kept is not None, INITIAL=grid.count is not None, CENTRED=centred,
        DECAY=decay.through is not None, UNIT=unit, ALONG=beside.other is not None, UNIT_OTHER=beside.unit_other,
        num_warps=4, maxnreg=168,
    )  # fmt: skip


def dk(
    grid: Grid, pull_grid: Grid, q: Tensor, k: Tensor, k_rnorm: Tensor | None, dk_bar: Tensor | None, adjoint: Adjoint,
    decay: Decay, states: Tensor, last_sum: Tensor | None, out: Tensor, centred: bool,
) -> None:  # fmt: skip
    """See launch.dk_tiles."""
    packed = grid.cu is not None
    rows = rows_of(k, packed)
    dk_hopper_kernel[(grid.programs(grid.key_heads),)](
        rows, rows_of(q, packed), rows_of(adjoint.weighted, packed), states_of(states, packed),
        rows if dk_bar is None else rows_of(dk_bar, packed), rows_of(out, packed), k_rnorm, adjoint.lift_q,
        adjoint.lift_w, adjoint.pulls, last_sum, decay.through,
        grid.sequences if packed else None, grid.cu, *grid.tables[:2], pull_grid.sum_offsets, grid.length, grid.tokens,
        grid.query_heads, grid.key_heads, grid.per_tiles, grid.per_chunks, pull_grid.per_sums, grid.tiles,
        K=grid.size, S=grid.config.S, STAGES=grid.config.stages, ROWS=ROWS,
        UNIT=k_rnorm is not None, BAR=dk_bar is not None, LAST=last_sum is not None, CENTRED=centred,
        DECAY=decay.through is not None, PULL=pull_grid.config.BN, num_warps=4, maxnreg=168,
    )  # fmt: skip
