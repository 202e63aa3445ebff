"""The Triton kernels of the operator: the chunkwise algorithm of chunk.py, forward and backward.

BT tokens of one head are a tile, S tokens a chunk. For each chunk one K x K state is kept, for each BN tokens one
running key sum. With x for q (in the forward) or g = dL/dq_clean (in the backward):

    t Sigma_t x_t = sum_{chunk, j<=t} (k_j . x_t - m_t) k_j  +  n [ Sigma_0 x_t + mu_0 (mu_0 . x_t - m_t) ]

where m_t = s_t . x_t / t, and n, mu_0, Sigma_0 are count, mean and covariance before the chunk. So the mean is taken
off the scores before they are rounded, and a state is stored divided by n: it never overflows, and a strong mean costs
it no bits. m_t comes from the row sums of scores that are there anyway: centring needs no product of its own.

    forward    keys (k_bar, 1/|k|, sums) -> running sums -> states -> clean
    backward   keys, running sums, states -> Sigma g, dlam -> finish (dq, w_t, pulls) -> running pulls -> adjoint
               states -> dk

Products are bf16 for bf16, tf32 for fp16 (its mantissa, the range of fp32), three tf32 for fp32; sums are fp32. There
are no atomics: equal inputs give equal bits. Offsets inside a tile are 32 bits, those of tiles 64.

Legend: N sequences of M tokens in all, H key heads, HQ query heads, G = HQ / H, K key size, BK = K rounded up to a
power of two; a state has blocks of BLK x BLK, of which only those on and below the diagonal are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def schedule(pid, tiles, heads, spread, PER: tl.constexpr, LATE: tl.constexpr):
    """Tile and head of a program. A chunk has PER tiles, of which the late (or the early) ones have most to read.

    Tiles of a chunk follow each other, so that its state is found in the cache. Only where there are so few programs
    that the last of them leave most of the chip waiting (`spread`) do those with most to read come first.
    """
    chunks = tiles // PER
    same = chunks * heads  # programs with an equal share
    if (spread != 0) & (pid < same * PER):
        place = pid // same
        if LATE:
            place = PER - 1 - place
        return (pid % same) % chunks * PER + place, (pid % same) // chunks
    elif spread != 0:
        rest = tiles - chunks * PER
        return chunks * PER + (pid - same * PER) % rest, (pid - same * PER) // rest
    else:
        return pid % tiles, pid // tiles


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
def lower_block(index):
    """(i, j), j <= i, of the index-th block of a lower triangle."""
    i = 0
    rest = index
    while rest > i:
        rest -= i + 1
        i += 1
    return i, rest


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    k, k_bar, rnorm, sums, cu, sum_offsets, N, T, H, K, stride, per_sums, eps,
    NORM: tl.constexpr, SUMS: tl.constexpr, VARLEN: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """k_bar and 1/|k| of one tile (if NORM), and the sum of its keys (if SUMS)."""
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
    if SUMS:
        tl.store(sums + (tile.to(tl.int64) * H + h) * K + cols, tl.sum(x, 0), mask=cols < K)


@triton.jit(do_not_specialize=VARYING)
def sums_kernel(
    sums, start, end, tile_offsets, H, K, per_tiles, G,
    START: tl.constexpr, END: tl.constexpr, REVERSE: tl.constexpr, VARLEN: tl.constexpr,
    BB: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """sums[tile] in place to the sum over the tiles before it (after it, if REVERSE), begun at `start`.

    `sums` has G entries for a key head (the query heads that read it); the running sum over all G goes into the first.
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
        through = tl.cumsum(x, 0)
        tl.store(sums + at, carry[None, :] + through - x, mask=mask)
        carry += tl.sum(x, 0)
    if END:
        tl.store(end + nh * K + cols, carry, mask=cols < K)


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
    k, initial, count, cu, sum_offsets, chunk_offsets, sums, totals, states, final,
    T, H, K, NSEG, BLOCKS, per_sums, per_chunks, one,
    VARLEN: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, CENTRED: tl.constexpr, TOTALS: tl.constexpr,
    SEGMENTS: tl.constexpr, BN: tl.constexpr, S: tl.constexpr, BR: tl.constexpr, BLK: tl.constexpr,
    DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One block of C, summed through one segment of one sequence, BR tokens at a time.

    TOTALS: only the segment's own sum is kept. Otherwise it begins with the sums of the segments before, and the
    covariance before each chunk is stored on the way.

    Tensor cores truncate what they add, which in a sum over a million tokens would show: BR tokens are multiplied at a
    time and added in plain fp32. `one` is 1.0, unknown to the compiler, which would else undo this.
    """
    pid = tl.program_id(0)
    i, j = lower_block(pid % BLOCKS)
    segment = (pid // BLOCKS) % NSEG
    h = (pid // (BLOCKS * NSEG)) % H
    n = pid // (BLOCKS * NSEG * H)
    begin, length, first_sum, first_chunk, c_begin, c_end = scan_bounds(
        n, segment, cu, sum_offsets, chunk_offsets, T, NSEG, per_sums, per_chunks, VARLEN, S
    )
    col_i = i * BLK + tl.arange(0, BLK)
    col_j = j * BLK + tl.arange(0, BLK)
    nh = n.to(tl.int64) * H + h
    block = col_i[:, None] * K + col_j[None, :]
    mirror = col_j[:, None] * K + col_i[None, :]
    inside = (col_i < K)[:, None] & (col_j < K)[None, :]
    mirrored = (col_j < K)[:, None] & (col_i < K)[None, :]

    acc = tl.zeros([BLK, BLK], tl.float32)
    seen = begin * 0  # int64
    if INITIAL:
        seen += tl.load(count + n)
    if not TOTALS:
        if INITIAL:
            acc += tl.load(initial + nh * K * K + block, mask=inside, other=0.0)
        if SEGMENTS:
            for before in range(segment):
                acc += tl.load(totals + (nh * NSEG + before) * K * K + block, mask=inside, other=0.0)

    k += (begin * H + h) * K
    for row in range(c_begin * S, c_end * S, BR):  # one loop, not one in another: the loads run ahead through all of it
        if not TOTALS:
            if row % S == 0:
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
        k_i = load_rows(k, row, length, H * K, K, col_i, BR, DT)
        k_j = load_rows(k, row, length, H * K, K, col_j, BR, DT)
        acc = tl.fma(tl.dot(tl.trans(k_i), k_j, input_precision=IP), one, acc)

    if TOTALS:
        tl.store(totals + (nh * NSEG + segment) * K * K + block, acc, mask=inside)
    if FINAL:
        if segment == NSEG - 1:
            tl.store(final + nh * K * K + block, acc, mask=inside)
            if i != j:
                tl.store(final + nh * K * K + mirror, tl.trans(acc), mask=mirrored)


@triton.jit
def tile_bounds(tile, cu, tile_offsets, chunk_offsets, sum_offsets, count, N, T, per_tiles, per_chunks, per_sums,
                VARLEN: tl.constexpr, INITIAL: tl.constexpr, BT: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Of a tile: its sequence n (N: there is none), that one's first token, length and count of earlier tokens;
    where tile and chunk begin in it; the chunk's index and that of the sequence's first key sum."""
    n, rank, begin, length = locate(tile, cu, tile_offsets, N, T, per_tiles, VARLEN)
    inside = tl.minimum(n, N - 1)
    if VARLEN:
        chunk = tl.load(chunk_offsets + inside).to(tl.int64)
        first_sum = tl.load(sum_offsets + inside).to(tl.int64)
    else:
        chunk = n.to(tl.int64) * per_chunks
        first_sum = n.to(tl.int64) * per_sums
    seen = begin * 0
    if INITIAL:
        seen += tl.load(count + inside)
    chunk_begin = rank * BT // S * S
    return n, begin, length, seen, rank * BT, chunk_begin, chunk + chunk_begin // S, first_sum


@triton.jit
def read_state(acc, base, state, state_rows, first, length, H, K, BT: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
               DT: tl.constexpr, IP: tl.constexpr):  # fmt: skip
    """acc + x times a state of `state_rows` rows (K, or 0 where there is none), BS of them at a time."""
    cols = tl.arange(0, BK)
    for b in range(0, state_rows, BS):
        part = b + tl.arange(0, BS)
        x_part = load_rows(base, first, length, H * K, K, part, BT, DT)
        inside = (part < K)[:, None] & (cols < K)[None, :]
        s_part = tl.load(state + part[:, None] * K + cols[None, :], mask=inside, other=0.0).to(DT)
        acc = tl.dot(x_part, s_part, acc, input_precision=IP)
    return acc


@triton.jit
def load_sums(sum_chunk, chunk_begin, tile_begin, length, H, K, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              DT: tl.constexpr):  # fmt: skip
    """The key sums before each BN rows of a tile and before its chunk, [16, BK], to be used in products.

    Rows 2v and 2v + 1 hold sum v in two parts, so that half-precision products keep its bits; the chunk's is the last
    and stands there twice, for `outer_sum`.
    """
    OWN: tl.constexpr = BT // BN
    row = tl.arange(0, 16)
    cols = tl.arange(0, BK)
    v = tl.minimum(row // 2, OWN)
    own = v < OWN
    at = tl.where(own, (tile_begin - chunk_begin) // BN + v, 0) * (H * K)
    there = (row < 2 * OWN + 4) & (~own | (tile_begin + v * BN < length))
    x = tl.load(sum_chunk + at[:, None] + cols[None, :], mask=there[:, None] & (cols < K)[None, :], other=0.0)
    head = x.to(tl.bfloat16).to(tl.float32)
    return tl.where((row % 2 == 0)[:, None], head, x - head).to(DT)


@triton.jit
def row_sums(x, sums, BT: tl.constexpr, BN: tl.constexpr, IP: tl.constexpr):
    """x_t . s for the key sum before each row's own BN keys, and for that before the chunk."""
    OWN: tl.constexpr = BT // BN
    v = tl.arange(0, 16) // 2
    products = tl.dot(x, tl.trans(sums), input_precision=IP)  # [BT, 16]
    block = tl.arange(0, BT) // BN
    before = tl.sum(tl.where(block[:, None] == v[None, :], products, 0.0), 1)
    chunk = tl.sum(tl.where((v == OWN)[None, :], products, 0.0), 1)
    return before, chunk


@triton.jit
def outer_sum(acc, x, sums, BT: tl.constexpr, BN: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr):
    """acc + x_t s of the chunk, for numbers x_t."""
    LAST: tl.constexpr = 2 * (BT // BN)
    col = tl.arange(0, 16)[None, :]
    head = x.to(tl.bfloat16).to(tl.float32)
    parts = tl.where((col == LAST) | (col == LAST + 1), head[:, None], 0.0)
    parts = tl.where((col == LAST + 2) | (col == LAST + 3), (x - head)[:, None], parts)
    return tl.dot(parts.to(DT), sums, acc, input_precision=IP)


@triton.jit
def read_keys(acc, x, before, past, t, k_base, chunk_begin, tile_begin, length, H, K,
              CENTRED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              DT: tl.constexpr, IP: tl.constexpr):  # fmt: skip
    """acc + sum (k_j . x_t - m_t) k_j / past over the chunk's keys up to each row, and m_t.

    BN keys at a time, the latest first: a row's m_t is complete with the block of keys that holds its own.
    """
    cols = tl.arange(0, BK)
    local = tl.arange(0, BT)
    m = tl.zeros([BT], tl.float32)
    for step in range((tile_begin + BT - chunk_begin) // BN):
        offset = BT - BN - step * BN  # from the tile's first row to the block's first key; negative in earlier tiles
        keys = load_rows(k_base, tile_begin + offset, length, H * K, K, cols, BN, DT)
        p = tl.dot(x, tl.trans(keys), input_precision=IP)
        sees = local[:, None] >= offset + tl.arange(0, BN)[None, :]
        if CENTRED:
            total = tl.sum(tl.where(sees, p, 0.0), 1)
            m = tl.where((local >= offset) & (local < offset + BN), (total + before) / t, m)
            p -= m[:, None]
        acc = tl.dot(tl.where(sees, p / past, 0.0).to(DT), keys, acc, input_precision=IP)
    return acc, m


@triton.jit(do_not_specialize=VARYING)
def clean_kernel(
    q, k, lam, states, sums, count, cu, tile_offsets, chunk_offsets, sum_offsets, out, means, other, along,
    N, T, HQ, H, K, per_tiles, per_chunks, per_sums, tiles, spread, eps,
    UNIT: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr, CENTRED: tl.constexpr, CORRECTION: tl.constexpr,
    ALONG: tl.constexpr, UNIT_OTHER: tl.constexpr,
    BT: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """q_clean of one tile (Sigma q itself, if CORRECTION), and m_t.

    ALONG: also -x . Sigma q for rows x of `other` (over |x|, if UNIT_OTHER): with g for q and q for x, dlam.
    """
    tile, hq = schedule(tl.program_id(0), tiles, HQ, spread, S // BT, True)
    h = hq // (HQ // H)
    n, begin, length, seen, tile_begin, chunk_begin, chunk, first_sum = tile_bounds(
        tile, cu, tile_offsets, chunk_offsets, sum_offsets, count, N, T, per_tiles, per_chunks, per_sums,
        VARLEN, INITIAL, BT, S,
    )  # fmt: skip
    if n >= N:
        return
    rows = tile_begin + tl.arange(0, BT)
    cols = tl.arange(0, BK)
    t = (seen + rows + 1).to(tl.float32)
    past = tl.maximum(seen + chunk_begin, 1).to(tl.float32)
    head = (begin * HQ + hq) * K
    sum_chunk = sums + ((first_sum + chunk_begin // BN) * H + h) * K

    if not CORRECTION:
        gate = tl.load(lam + (begin + rows) * HQ + hq, mask=rows < length, other=0.0).to(tl.float32)
    x = load_rows(q + head, tile_begin, length, HQ * K, K, cols, BT, DT)
    before = tl.zeros([BT], tl.float32)
    off = tl.zeros([BT], tl.float32)
    if CENTRED:
        key_sums = load_sums(sum_chunk, chunk_begin, tile_begin, length, H, K, BT, BN, BK, DT)
        before, off = row_sums(x, key_sums, BT, BN, IP)
    scale = tl.full([BT], 1.0, tl.float32)
    if UNIT:
        scale = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) + eps)

    # in units of past |q_t|: to scale the sum on the way would break the chain of products that it is made by
    acc = tl.zeros([BT, BK], tl.float32)
    state_rows = tl.where(INITIAL | (chunk_begin > 0), K, 0)  # a sequence with no past has nothing to read
    acc = read_state(
        acc, q + head, states + (chunk * H + h) * K * K, state_rows, tile_begin, length, HQ, K, BT, BK, BS, DT, IP
    )
    acc, m = read_keys(
        acc, x, before, past, t, k + (begin * H + h) * K, chunk_begin, tile_begin, length, H, K,
        CENTRED, BT, BN, BK, DT, IP,
    )  # fmt: skip
    if CENTRED:
        acc = outer_sum(acc, (off / past - m) / past, key_sums, BT, BN, DT, IP)
        tl.store(means + (begin + rows) * HQ + hq, m * scale, mask=rows < length)
    unit = scale * past / t
    if CORRECTION:
        y = (acc * unit[:, None]).to(out.dtype.element_ty)
        store_rows(out + head, y, tile_begin, length, HQ, K, cols, BT)
        if ALONG:  # from y as it is stored: in half precision it leaves room for x
            o_tile = load_rows(other + head, tile_begin, length, HQ * K, K, cols, BT, DT)
            product = -tl.sum(o_tile.to(tl.float32) * y.to(tl.float32), 1)
            if UNIT_OTHER:
                product *= tl.rsqrt(tl.sum(o_tile.to(tl.float32) * o_tile.to(tl.float32), 1) + eps)
            at = (begin + rows) * HQ + hq
            tl.store(along + at, product.to(along.dtype.element_ty), mask=rows < length)
    else:  # the cast halves what is held beside q; it rounds lam y, not q
        change = (acc * (-gate * unit)[:, None]).to(DT)
        q_tile = load_rows(q + head, tile_begin, length, HQ * K, K, cols, BT, DT)
        clean = q_tile.to(tl.float32) * scale[:, None] + change.to(tl.float32)
        store_rows(out + head, clean, tile_begin, length, HQ, K, cols, BT)


@triton.jit(do_not_specialize=VARYING)
def finish_kernel(
    g, q, lam, m_q, m_g, count, cu, sum_offsets, dq, weighted, pulls, lift_q, lift_w,
    N, T, M, HQ, K, per_sums, eps,
    UNIT: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr, CENTRED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq from Sigma g, for BN rows of a head.

    For dk: w_t = u_t / (t |q_t|), in the place of Sigma g; what to take off the scores k . q and k . w; and the rows'
    pull. A kernel of its own: beside the accumulators of the read the registers have no room for all of this.
    """
    pid = tl.program_id(0)
    hq = pid % HQ
    tile = pid // HQ
    n, rank, begin, length = locate(tile, cu, sum_offsets, N, T, per_sums, VARLEN)
    if n >= N:
        return
    first = rank * BN
    rows = first + tl.arange(0, BN)
    cols = tl.arange(0, BK)
    valid = rows < length
    head = (begin * HQ + hq) * K
    per_row = (begin + rows) * HQ + hq
    seen = begin * 0
    if INITIAL:
        seen += tl.load(count + n)
    t = (seen + rows + 1).to(tl.float32)
    gate = tl.load(lam + per_row, mask=valid, other=0.0).to(tl.float32)
    q_tile = load_rows(q + head, first, length, HQ * K, K, cols, BN, tl.float32)
    g_tile = load_rows(g + head, first, length, HQ * K, K, cols, BN, tl.float32)
    read = load_rows(weighted + head, first, length, HQ * K, K, cols, BN, tl.float32)
    scale = tl.full([BN], 1.0, tl.float32)
    if UNIT:
        scale = tl.rsqrt(tl.sum(q_tile * q_tile, 1) + eps)
    grad = g_tile - gate[:, None] * read  # of the query that was cleaned
    if UNIT:
        grad = scale[:, None] * (grad - q_tile * (scale * scale * tl.sum(q_tile * grad, 1))[:, None])
    store_rows(dq + head, grad, first, length, HQ, K, cols, BN)
    w = g_tile * (-gate * scale / t)[:, None]
    store_rows(weighted + head, w, first, length, HQ, K, cols, BN)
    if CENTRED:
        mean_q = tl.load(m_q + per_row, mask=valid, other=0.0) / scale
        mean_w = tl.load(m_g + per_row, mask=valid, other=0.0) * (-gate * scale / t)
        at = hq.to(tl.int64) * M + begin + rows
        tl.store(lift_q + at, mean_q, mask=valid)
        tl.store(lift_w + at, mean_w, mask=valid)
        pull = tl.sum(w * mean_q[:, None] + q_tile * mean_w[:, None], 0)
        tl.store(pulls + (tile.to(tl.int64) * HQ + hq) * K + cols, -pull, mask=cols < K)


@triton.jit(do_not_specialize=VARYING)
def adjoint_kernel(
    q, weighted, last, cu, sum_offsets, chunk_offsets, totals, states, first,
    T, HQ, H, K, NSEG, BLOCKS, per_sums, per_chunks, one,
    VARLEN: tl.constexpr, LAST: tl.constexpr, FIRST: tl.constexpr, TOTALS: tl.constexpr, SEGMENTS: tl.constexpr,
    S: tl.constexpr, BR: tl.constexpr, BLK: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """One block of R = sum (q u^T + u q^T) / t, from the sequence's end to its beginning, as states_kernel for C."""
    pid = tl.program_id(0)
    i, j = lower_block(pid % BLOCKS)
    segment = (pid // BLOCKS) % NSEG
    h = (pid // (BLOCKS * NSEG)) % H
    n = pid // (BLOCKS * NSEG * H)
    begin, length, _, first_chunk, c_begin, c_end = scan_bounds(
        n, segment, cu, sum_offsets, chunk_offsets, T, NSEG, per_sums, per_chunks, VARLEN, S
    )
    col_i = i * BLK + tl.arange(0, BLK)
    col_j = j * BLK + tl.arange(0, BLK)
    nh = n.to(tl.int64) * H + h
    block = col_i[:, None] * K + col_j[None, :]
    mirror = col_j[:, None] * K + col_i[None, :]
    inside = (col_i < K)[:, None] & (col_j < K)[None, :]
    mirrored = (col_j < K)[:, None] & (col_i < K)[None, :]

    acc = tl.zeros([BLK, BLK], tl.float32)
    if not TOTALS:
        if LAST:  # dC_T + dC_T^T
            acc += tl.load(last + nh * K * K + block, mask=inside, other=0.0)
            acc += tl.trans(tl.load(last + nh * K * K + mirror, mask=mirrored, other=0.0))
        if SEGMENTS:
            for after in range(segment + 1, NSEG):
                acc += tl.load(totals + (nh * NSEG + after) * K * K + block, mask=inside, other=0.0)

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
    if FIRST:
        if segment == 0:
            tl.store(first + nh * K * K + block, acc * 0.5, mask=inside)
            if i != j:
                tl.store(first + nh * K * K + mirror, tl.trans(acc) * 0.5, mask=mirrored)


@triton.jit(do_not_specialize=VARYING)
def dk_kernel(
    q, weighted, k, k_rnorm, dk_bar, lift_q, lift_w, states, pulls, last_sum, cu, tile_offsets, chunk_offsets,
    pull_offsets, dk,
    N, T, M, HQ, H, K, per_tiles, per_chunks, per_pulls, tiles, spread,
    UNIT: tl.constexpr, BAR: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr, CENTRED: tl.constexpr,
    PULL: tl.constexpr, BT: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dk of one tile: R of the later chunks, and the queries of its own chunk that saw these keys."""
    tile, h = schedule(tl.program_id(0), tiles, H, spread, S // BT, False)
    n, begin, length, _, tile_begin, chunk_begin, chunk, pull0 = tile_bounds(
        tile, cu, tile_offsets, chunk_offsets, pull_offsets, None, N, T, per_tiles, per_chunks, per_pulls,
        VARLEN, False, BT, S,
    )  # fmt: skip
    if n >= N:
        return
    chunk_end = tl.minimum(chunk_begin + S, length)
    local = tl.arange(0, BT)
    cols = tl.arange(0, BK)
    head = (begin * H + h) * K
    G = HQ // H
    acc = tl.zeros([BT, BK], tl.float32)
    state_rows = tl.where(LAST | (chunk_end < length), K, 0)  # after the last chunk comes nothing
    acc = read_state(
        acc, k + head, states + (chunk * H + h) * K * K, state_rows, tile_begin, length, H, K, BT, BK, BS, DT, IP
    )

    keys = load_rows(k + head, tile_begin, length, H * K, K, cols, BT, DT)
    steps = (chunk_end - tile_begin + BN - 1) // BN
    for step in range(G * steps):
        hq = h * G + step // steps
        offset = (step % steps) * BN
        late = tile_begin + offset + tl.arange(0, BN)
        x_q = load_rows(q + (begin * HQ + hq) * K, tile_begin + offset, length, HQ * K, K, cols, BN, DT)
        x_w = load_rows(weighted + (begin * HQ + hq) * K, tile_begin + offset, length, HQ * K, K, cols, BN, DT)
        p_q = tl.dot(keys, tl.trans(x_q), input_precision=IP)
        p_w = tl.dot(keys, tl.trans(x_w), input_precision=IP)
        if CENTRED:
            at = hq.to(tl.int64) * M + begin + late
            p_q -= tl.load(lift_q + at, mask=late < length, other=0.0)[None, :]
            p_w -= tl.load(lift_w + at, mask=late < length, other=0.0)[None, :]
        sees = offset + tl.arange(0, BN)[None, :] >= local[:, None]
        acc = tl.dot(tl.where(sees, p_q, 0.0).to(DT), x_w, acc, input_precision=IP)
        acc = tl.dot(tl.where(sees, p_w, 0.0).to(DT), x_q, acc, input_precision=IP)

    grad = acc.to(DT).to(tl.float32)
    if LAST | (chunk_end < length):
        if CENTRED:  # the pull of all later chunks is that after the last of this one
            at = ((pull0 + (chunk_end + PULL - 1) // PULL - 1) * HQ + h * G) * K
            grad += tl.load(pulls + at + cols, mask=cols < K, other=0.0)[None, :]
        elif LAST:
            grad += tl.load(last_sum + (n.to(tl.int64) * H + h) * K + cols, mask=cols < K, other=0.0)[None, :]
    if BAR:
        grad += load_rows(dk_bar + head, tile_begin, length, H * K, K, cols, BT, DT).to(tl.float32)
    if UNIT:
        kn = load_rows(k + head, tile_begin, length, H * K, K, cols, BT, DT)
        rows = tile_begin + local
        r = tl.load(k_rnorm + (begin + rows) * H + h, mask=rows < length, other=0.0)
        along = tl.sum(kn.to(tl.float32) * grad, 1)
        grad = r[:, None] * (grad - kn.to(tl.float32) * along[:, None])
    store_rows(dk + head, grad, tile_begin, length, H, K, cols, BT)
