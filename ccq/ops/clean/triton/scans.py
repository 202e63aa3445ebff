"""What goes along the sequence: unit keys and their sums, C before each chunk, and its adjoint after each.

The equations and the legend stand in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

PERIOD = tl.constexpr(256)  # of tokens, after which the running sum of log-decays begins anew; chunks divide it
LEAST_DECAY = tl.constexpr(-100.0)  # of a token: exp of less is 0 in fp32, and -inf - -inf would be NaN
# sizes that vary from call to call: compiled once for all of them
VARYING = ["N", "T", "M", "NSEG", "BLOCKS", "per_tiles", "per_sums", "per_chunks", "per_pulls", "tiles", "spread"]


@triton.jit
def locate(tile, cu, offsets, N, T, per_sequence, VARLEN: tl.constexpr):
    """Sequence of a tile, its rank in there, and the sequence's first token and length; n = N past the last tile."""
    if VARLEN:
        low = 0
        high = N + 1
        while high - low > 1:  # the last n with offsets[n] <= tile: empty sequences are stepped over
            middle = (low + high) // 2
            right = tl.load(offsets + middle) <= tile
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle)
        n = low
        rank = tile - tl.load(offsets + n).to(tl.int32)
        begin = tl.load(cu + n).to(tl.int64)
        length = tl.load(cu + tl.minimum(n + 1, N)).to(tl.int64) - begin
        return n, rank, begin, length.to(tl.int32)
    else:
        n = tile // per_sequence
        return n, tile % per_sequence, n.to(tl.int64) * T, T


@triton.jit
def load_rows(base, first, length, stride, K, cols, ROWS: tl.constexpr, DT: tl.constexpr):
    """Rows first, first + 1, ... of one head, `stride` apart, columns cols; zero outside. Only the scalar offset needs
    64 bits."""
    local = tl.arange(0, ROWS)
    mask = (local < length - first)[:, None] & (cols < K)[None, :]
    at = local[:, None] * stride + cols[None, :]
    return tl.load(base + tl.cast(first, tl.int64) * stride + at, mask=mask, other=0.0).to(DT)


@triton.jit
def store_rows(base, x, first, length, H, K, cols, ROWS: tl.constexpr):
    local = tl.arange(0, ROWS)
    mask = (local < length - first)[:, None] & (cols < K)[None, :]
    at = local[:, None] * (H * K) + cols[None, :]
    tl.store(base + tl.cast(first, tl.int64) * (H * K) + at, x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def decay_before(through, row):
    """The running log-decay of one sequence before its token `row`; 0 where a period begins."""
    row = tl.cast(row, tl.int32)
    return tl.load(through + row - 1, mask=row % PERIOD != 0, other=0.0)


@triton.jit
def weight_before(weights, start, row, INITIAL: tl.constexpr):
    """n before a token: that of the sequence's start, `start`, where there is none earlier; 1 for none at all."""
    row = tl.cast(row, tl.int32)
    n = tl.load(weights + row - 1, mask=row > 0, other=0.0)
    if INITIAL:
        n = tl.where(row > 0, n, tl.load(start))
    return tl.where(n > 0, n, 1.0)


@triton.jit
def after_decay(decay_a, sum_a, decay_b, sum_b):
    """Two stretches of sum <- decay * sum + x, one after the other."""
    return decay_a * decay_b, sum_a * decay_b + sum_b


@triton.jit(do_not_specialize=VARYING)
def weights_kernel(
    log_decay, x, start, through, out, end, cu, T, M, H,
    START: tl.constexpr, X: tl.constexpr, END: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Of one head of one sequence: n_t = gamma_t n_{t-1} + x_t, x = 1 or given, and the running log-decay.

    REVERSE: n_t = x_t + gamma_{t+1} n_{t+1}, begun behind the last token; gamma of the first goes into `end`.
    [H, M] in and out, log_decay [M, H].
    """
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    begin = n.to(tl.int64) * T
    length = T
    if VARLEN:
        begin = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1) - begin).to(tl.int32)
    log_decay += begin * H + h
    at = h.to(tl.int64) * M + begin
    carry = tl.zeros([1], tl.float32)
    if START:
        carry += tl.load(start + n * H + h)
    for block in range(0, length, BL):
        local = block + tl.arange(0, BL)
        valid = local < length
        row = local
        here = local
        if REVERSE:
            row = length - 1 - local
            here = length - local  # the token whose decay lies between
        inside = valid & (here < length)
        g = tl.maximum(tl.load(log_decay + here.to(tl.int64) * H, mask=inside, other=0.0).to(tl.float32), LEAST_DECAY)
        if not REVERSE:
            sums = tl.cumsum(tl.reshape(g, (BL // PERIOD, PERIOD)), 1)
            tl.store(through + at + row, tl.reshape(sums, (BL,)), mask=valid)
        if X:
            add = tl.load(x + at + row, mask=valid, other=0.0)
        else:
            add = tl.where(valid, 1.0, 0.0)
        decay, total = tl.associative_scan((tl.exp(g), add), 0, after_decay)
        total += decay * carry
        tl.store(out + at + row, total, mask=valid)
        last = tl.minimum(block + BL, length) - 1
        carry = tl.zeros([1], tl.float32) + tl.sum(tl.where(local == last, total, 0.0), 0)
    if END:
        if REVERSE:
            carry *= tl.exp(tl.maximum(tl.load(log_decay, mask=length > 0, other=0.0).to(tl.float32), LEAST_DECAY))
        tl.store(end + n * H + h + tl.arange(0, 1), carry)


@triton.jit
def lower_block(index):
    """(i, j), j <= i, of the index-th block of a lower triangle."""
    i = 0
    rest = index
    while rest > i:
        rest -= i + 1
        i += 1
    return i, rest


@triton.jit
def block_bounds(i, j, K, BLK: tl.constexpr):
    """Of block (i, j) of a K x K state: its rows and columns, where it and its mirror image lie, and what is inside."""
    col_i = i * BLK + tl.arange(0, BLK)
    col_j = j * BLK + tl.arange(0, BLK)
    block = col_i[:, None] * K + col_j[None, :]
    mirror = col_j[:, None] * K + col_i[None, :]
    inside = (col_i < K)[:, None] & (col_j < K)[None, :]
    mirrored = (col_j < K)[:, None] & (col_i < K)[None, :]
    return col_i, col_j, block, mirror, inside, mirrored


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    k, k_bar, rnorm, sums, through, faded, fades, cu, sum_offsets, N, T, M, H, K, stride, per_sums, eps,
    NORM: tl.constexpr, SUMS: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr, BN: tl.constexpr,
    S: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k_bar and 1/|k| of one tile (if NORM), and the sum of its keys (if SUMS).

    DECAY: the sum is that at the tile's end, and what is left of an earlier one goes into `fades`; `faded` are the keys
    times the root of what is left of them at the end of their chunk, so that C is a product of them alone.
    """
    pid = tl.program_id(0)
    h = pid % H
    tile = pid // H
    n, rank, begin, length = locate(tile, cu, sum_offsets, N, T, per_sums, VARLEN)
    if n >= N:
        return
    rows = rank * BN + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    base = (begin * H + h) * K
    x = load_rows(k + begin * stride + h * K, rank * BN, length, stride, K, cols, BN, tl.float32)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) + eps)
        tl.store(rnorm + (begin + rows) * H + h, r, mask=rows < length)
        x = (x * r[:, None]).to(k_bar.dtype.element_ty)
        store_rows(k_bar + base, x, rank * BN, length, H, K, cols, BN)
        x = x.to(tl.float32)
    if DECAY:
        through += h.to(tl.int64) * M + begin
        now = tl.load(through + rows, mask=rows < length, other=0.0)
        chunk_end = tl.load(through + tl.minimum(rank * BN // S * S + S, length) - 1)
        shrunk = x * tl.exp(0.5 * (chunk_end - now))[:, None]
        store_rows(faded + base, shrunk, rank * BN, length, H, K, cols, BN)
        tile_end = tl.load(through + tl.minimum(rank * BN + BN, length) - 1)
        x *= tl.exp(tile_end - now)[:, None]
        tl.store(fades + tile.to(tl.int64) * H + h, tl.exp(tile_end - decay_before(through, rank * BN)))
    if SUMS:
        tl.store(sums + (tile.to(tl.int64) * H + h) * K + cols, tl.sum(x, 0), mask=cols < K)


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    sums, fades, out, start, end, tile_offsets, H, K, per_tiles, G,
    START: tl.constexpr, END: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr, VARLEN: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Into out[tile] the sum over the tiles before it (after it, if REVERSE), begun at `start`.

    `sums` has G entries for a key head (the query heads that read it); the running sum over all G goes into the first.
    `out` may be `sums` itself, but with DECAY, where a tile is read when that before it is written already.
    """
    h = tl.program_id(0) % H
    n = tl.program_id(0) // H
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    if VARLEN:
        first = tl.load(tile_offsets + n).to(tl.int64)
        tiles = (tl.load(tile_offsets + n + 1) - first).to(tl.int32)
    else:
        first = n.to(tl.int64) * per_tiles
        tiles = per_tiles
    nh = n.to(tl.int64) * H + h
    carry = tl.zeros([BC], tl.float32)
    if START:
        carry += tl.load(start + nh * K + cols, mask=cols < K, other=0.0)
    for block in range(0, tiles, BB):
        rank = block + tl.arange(0, BB)
        tile = rank
        if REVERSE:
            tile = tiles - 1 - rank
        at = ((first + tile)[:, None] * (H * G) + h * G) * K + cols[None, :]
        mask = (rank < tiles)[:, None] & (cols < K)[None, :]
        x = tl.zeros([BB, BC], tl.float32)
        for member in range(G):
            x += tl.load(sums + at + member * K, mask=mask, other=0.0)
        if DECAY:
            fade = tl.load(fades + (first + tile) * H + h, mask=rank < tiles, other=1.0)
            decay, total = tl.associative_scan((fade[:, None] + tl.zeros([BB, BC], tl.float32), x), 0, after_decay)
            total += decay * carry[None, :]
            # what comes out behind a tile is what the next one begins with
            step = tl.where(REVERSE, -1, 1) * (H * G * K)
            tl.store(out + at + step, total, mask=mask & (rank < tiles - 1)[:, None])
            if block == 0:
                tl.store(out + at, carry[None, :] + tl.zeros([BB, BC], tl.float32), mask=mask & (rank == 0)[:, None])
            carry = tl.sum(tl.where((rank == tl.minimum(block + BB, tiles) - 1)[:, None], total, 0.0), 0)
        else:
            through = tl.cumsum(x, 0)
            tl.store(out + at, carry[None, :] + through - x, mask=mask)
            carry += tl.sum(x, 0)
    if END:
        tl.store(end + nh * K + cols, carry, mask=cols < K)


@triton.jit
def scan_place(pid, H, NSEG, BLOCKS):
    """Block (i, j), segment, head and sequence of a program that scans."""
    i, j = lower_block(pid % BLOCKS)
    return i, j, (pid // BLOCKS) % NSEG, (pid // (BLOCKS * NSEG)) % H, pid // (BLOCKS * NSEG * H)


@triton.jit
def scan_bounds(n, segment, cu, sum_offsets, chunk_offsets, T, NSEG, per_sums, per_chunks,
                VARLEN: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Of sequence n: first token, length, first key sum and first chunk; and the chunks that a segment of it covers."""
    if VARLEN:
        begin = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1) - begin).to(tl.int32)
        first_sum = tl.load(sum_offsets + n).to(tl.int64)
        first_chunk = tl.load(chunk_offsets + n).to(tl.int64)
    else:
        begin = n.to(tl.int64) * T
        length = T
        first_sum = n.to(tl.int64) * per_sums
        first_chunk = n.to(tl.int64) * per_chunks
    chunks = (length + S - 1) // S
    here = (chunks + NSEG - 1) // NSEG
    c_begin = tl.minimum(segment * here, chunks)
    return begin, length, first_sum, first_chunk, c_begin, tl.minimum(c_begin + here, chunks)


@triton.jit(do_not_specialize=VARYING)
def states_kernel(
    k, initial, count, through, weights, cu, sum_offsets, chunk_offsets, sums, totals, kept, states, final,
    T, M, H, K, NSEG, BLOCKS, per_sums, per_chunks, one,
    VARLEN: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, CENTRED: tl.constexpr, TOTALS: tl.constexpr,
    SEGMENTS: tl.constexpr, DECAY: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BLK: tl.constexpr,
    DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One block of C, summed through one segment of one sequence, BR tokens at a time.

    TOTALS: only the segment's own sum is kept. Otherwise it begins with the sums of the segments before, and the
    covariance before each chunk is stored on the way.

    Tensor cores truncate what they add, which in a sum over a million tokens would show: BR tokens are multiplied at a
    time and added in plain fp32. `one` is 1.0, unknown to the compiler, which would else undo this.

    DECAY: k are the keys as they are at the end of their chunk; C fades where a chunk begins, once its state is stored,
    and what a segment leaves of an earlier C goes into `kept`.
    """
    i, j, segment, h, n = scan_place(tl.program_id(0), H, NSEG, BLOCKS)
    begin, length, first_sum, first_chunk, c_begin, c_end = scan_bounds(
        n, segment, cu, sum_offsets, chunk_offsets, T, NSEG, per_sums, per_chunks, VARLEN, S
    )
    nh = n.to(tl.int64) * H + h
    col_i, col_j, block, mirror, inside, mirrored = block_bounds(i, j, K, BLK)

    acc = tl.zeros([BLK, BLK], tl.float32)
    seen = begin * 0  # int64
    if INITIAL and not DECAY:
        seen += tl.load(count + n)
    if not TOTALS:
        if INITIAL:
            acc += tl.load(initial + nh * K * K + block, mask=inside, other=0.0)
        if SEGMENTS:
            for earlier in range(segment):
                if DECAY:
                    acc *= tl.load(kept + nh * NSEG + earlier)
                acc += tl.load(totals + (nh * NSEG + earlier) * K * K + block, mask=inside, other=0.0)
    left = 1.0
    if DECAY:
        through += h.to(tl.int64) * M + begin
        weights += h.to(tl.int64) * M + begin
        start = weights
        if INITIAL:
            start = count + nh

    k += (begin * H + h) * K
    for row in range(c_begin * S, c_end * S, BR):  # one loop, not one in another: the loads run ahead through all of it
        if not TOTALS:
            if row % S == 0:
                if DECAY:
                    inv = 1.0 / weight_before(weights, start, row, INITIAL)
                else:
                    inv = 1.0 / tl.maximum(seen + row, 1).to(tl.float32)
                sigma = acc * inv
                if CENTRED:
                    at = ((first_sum + row // BN) * H + h) * K
                    mean_i = tl.load(sums + at + col_i, mask=col_i < K, other=0.0) * inv
                    mean_j = tl.load(sums + at + col_j, mask=col_j < K, other=0.0) * inv
                    sigma -= mean_i[:, None] * mean_j[None, :]
                at = ((first_chunk + row // S) * H + h) * K * K
                tl.store(states + at + block, sigma.to(states.dtype.element_ty), mask=inside)
                if i != j:
                    tl.store(states + at + mirror, tl.trans(sigma).to(states.dtype.element_ty), mask=mirrored)
        if DECAY:
            if row % S == 0:
                fade = tl.exp(tl.load(through + tl.minimum(row + S, length) - 1) - decay_before(through, row))
                acc *= fade
                left *= fade
        k_i = load_rows(k, row, length, H * K, K, col_i, BR, DT)
        k_j = load_rows(k, row, length, H * K, K, col_j, BR, DT)
        acc = tl.fma(tl.dot(tl.trans(k_i), k_j, input_precision=IP), one, acc)

    if TOTALS:
        tl.store(totals + (nh * NSEG + segment) * K * K + block, acc, mask=inside)
        if DECAY:
            if (i == 0) & (j == 0):
                tl.store(kept + nh * NSEG + segment, left)
    if FINAL:
        if segment == NSEG - 1:
            tl.store(final + nh * K * K + block, acc, mask=inside)
            if i != j:
                tl.store(final + nh * K * K + mirror, tl.trans(acc), mask=mirrored)


@triton.jit(do_not_specialize=VARYING)
def adjoint_kernel(
    q, weighted, last, through, cu, sum_offsets, chunk_offsets, totals, kept, states, first,
    T, M, HQ, H, K, NSEG, BLOCKS, per_sums, per_chunks, one,
    VARLEN: tl.constexpr, LAST: tl.constexpr, FIRST: tl.constexpr, TOTALS: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAY: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BLK: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One block of R = sum (q u^T + u q^T) / t, from the sequence's end to its beginning, as states_kernel for C.

    DECAY: `weighted` are as they reach the beginning of their chunk.
    """
    i, j, segment, h, n = scan_place(tl.program_id(0), H, NSEG, BLOCKS)
    begin, length, _, first_chunk, c_begin, c_end = scan_bounds(
        n, segment, cu, sum_offsets, chunk_offsets, T, NSEG, per_sums, per_chunks, VARLEN, S
    )
    nh = n.to(tl.int64) * H + h
    col_i, col_j, block, mirror, inside, mirrored = block_bounds(i, j, K, BLK)

    acc = tl.zeros([BLK, BLK], tl.float32)
    if not TOTALS:
        if LAST:  # dC_T + dC_T^T
            acc += tl.load(last + nh * K * K + block, mask=inside, other=0.0)
            acc += tl.trans(tl.load(last + nh * K * K + mirror, mask=mirrored, other=0.0))
        if SEGMENTS:
            for nearer in range(NSEG - 1 - segment):
                later = NSEG - 1 - nearer
                if DECAY:
                    acc *= tl.load(kept + nh * NSEG + later)
                acc += tl.load(totals + (nh * NSEG + later) * K * K + block, mask=inside, other=0.0)
    left = 1.0
    if DECAY:
        through += h.to(tl.int64) * M + begin

    G = HQ // H
    per_chunk = G * (S // BR)
    for step in range((c_end - c_begin) * per_chunk):
        c = c_end - 1 - step // per_chunk
        inner = step % per_chunk
        if not TOTALS:
            if inner == 0:
                at = ((first_chunk + c) * H + h) * K * K
                tl.store(states + at + block, acc.to(states.dtype.element_ty), mask=inside)
                if i != j:
                    tl.store(states + at + mirror, tl.trans(acc).to(states.dtype.element_ty), mask=mirrored)
        if DECAY:
            if inner == 0:
                fade = tl.exp(tl.load(through + tl.minimum(c * S + S, length) - 1) - decay_before(through, c * S))
                acc *= fade
                left *= fade
        head = (begin * HQ + h * G + inner // (S // BR)) * K
        row = c * S + (inner % (S // BR)) * BR
        q_i = load_rows(q + head, row, length, HQ * K, K, col_i, BR, DT)
        w_j = load_rows(weighted + head, row, length, HQ * K, K, col_j, BR, DT)
        part = tl.dot(tl.trans(q_i), w_j, input_precision=IP)
        w_i = load_rows(weighted + head, row, length, HQ * K, K, col_i, BR, DT)
        q_j = load_rows(q + head, row, length, HQ * K, K, col_j, BR, DT)
        acc = tl.fma(tl.dot(tl.trans(w_i), q_j, part, input_precision=IP), one, acc)

    if TOTALS:
        tl.store(totals + (nh * NSEG + segment) * K * K + block, acc, mask=inside)
        if DECAY:
            if (i == 0) & (j == 0):
                tl.store(kept + nh * NSEG + segment, left)
    if FIRST:
        if segment == 0:
            tl.store(first + nh * K * K + block, acc * 0.5, mask=inside)
            if i != j:
                tl.store(first + nh * K * K + mirror, tl.trans(acc) * 0.5, mask=mirrored)
