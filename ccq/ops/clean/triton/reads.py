"""What each tile of tokens does with the states: y = Sigma_t x, q_clean, dq and dk.

The equations and the legend stand in __init__.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ccq.ops.clean.reference import LEAST
from ccq.ops.clean.triton.scans import PERIOD, VARYING, decay_before, load_rows, locate, store_rows, weight_before

SMALLEST = tl.constexpr(LEAST)  # added to y . y
# what is made of y = Sigma q, and so what its gradient is
Y, SCALED, PROJECTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
        seen += tl.load(count + inside).to(tl.int64)
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
def read_keys(acc, x, before, past, t, now, through, k_base, chunk_begin, tile_begin, length, H, K,
              CENTRED: tl.constexpr, DECAY: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
              DT: tl.constexpr, IP: tl.constexpr):  # fmt: skip
    """acc + sum (k_j . x_t - m_t) k_j / past over the chunk's keys up to each row, and m_t.

    BN keys at a time, the latest first: a row's m_t is complete with the block of keys that holds its own. DECAY: each
    key counts as much as is left of it; `now` is the running log-decay at the rows.
    """
    cols = tl.arange(0, BK)
    local = tl.arange(0, BT)
    m = tl.zeros([BT], tl.float32)
    for step in range((tile_begin + BT - chunk_begin) // BN):
        offset = BT - BN - step * BN  # from the tile's first row to the block's first key; negative in earlier tiles
        keys = load_rows(k_base, tile_begin + offset, length, H * K, K, cols, BN, DT)
        p = tl.dot(x, tl.trans(keys), input_precision=IP)
        sees = local[:, None] >= offset + tl.arange(0, BN)[None, :]
        if DECAY:
            key = tile_begin + offset + tl.arange(0, BN)
            then = tl.load(through + key, mask=key < length, other=0.0)
            left = tl.exp(tl.minimum(now[:, None] - then[None, :], 0.0))
            if CENTRED:
                total = tl.sum(tl.where(sees, p * left, 0.0), 1)
                m = tl.where((local >= offset) & (local < offset + BN), (total + before) / t, m)
                p -= m[:, None]
            p *= left
        elif CENTRED:
            total = tl.sum(tl.where(sees, p, 0.0), 1)
            m = tl.where((local >= offset) & (local < offset + BN), (total + before) / t, m)
            p -= m[:, None]
        acc = tl.dot(tl.where(sees, p / past, 0.0).to(DT), keys, acc, input_precision=IP)
    return acc, m


@triton.jit(do_not_specialize=VARYING)
def clean_kernel(
    q, k, lam, states, sums, count, through, weights, cu, tile_offsets, chunk_offsets, sum_offsets, out, kept, means,
    other, along, N, T, M, HQ, H, K, per_tiles, per_chunks, per_sums, tiles, spread, eps,
    STEP: tl.constexpr, KEEP: tl.constexpr, UNIT: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr,
    CENTRED: tl.constexpr, DECAY: tl.constexpr, ALONG: tl.constexpr, UNIT_OTHER: tl.constexpr,
    BT: tl.constexpr, S: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr,
    DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """q_clean of one tile (Sigma q itself, for Y), and m_t.

    ALONG: also -x . Sigma q for rows x of `other` (over |x|, if UNIT_OTHER): with g for q and q for x, dlam.
    KEEP: also y of a projected step.
    """
    tile, hq = schedule(tl.program_id(0), tiles, HQ, spread, S // BT, True)
    h = hq // (HQ // H)
    n, begin, length, seen, tile_begin, chunk_begin, chunk, first_sum = tile_bounds(
        tile, cu, tile_offsets, chunk_offsets, sum_offsets, count, N, T, per_tiles, per_chunks, per_sums,
        VARLEN, INITIAL and not DECAY, BT, S,
    )  # fmt: skip
    if n >= N:
        return
    rows = tile_begin + tl.arange(0, BT)
    cols = tl.arange(0, BK)
    now = tl.zeros([BT], tl.float32)
    if DECAY:
        through += h.to(tl.int64) * M + begin
        weights += h.to(tl.int64) * M + begin
        now = tl.load(through + rows, mask=rows < length, other=0.0)
        t = tl.load(weights + rows, mask=rows < length, other=1.0)
        start = weights
        if INITIAL:
            start = count + n * H + h
        n0 = weight_before(weights, start, chunk_begin, INITIAL)
        past = 1.0  # with a decay the sum is scaled on the way
    else:
        t = (seen + rows + 1).to(tl.float32)
        n0 = tl.maximum(seen + chunk_begin, 1).to(tl.float32)
        past = n0
    head = (begin * HQ + hq) * K
    sum_chunk = sums + ((first_sum + chunk_begin // BN) * H + h) * K

    if STEP != Y:
        gate = tl.load(lam + (begin + rows) * HQ + hq, mask=rows < length, other=0.0).to(tl.float32)
    x = load_rows(q + head, tile_begin, length, HQ * K, K, cols, BT, DT)
    before = tl.zeros([BT], tl.float32)
    off = tl.zeros([BT], tl.float32)
    if CENTRED:
        key_sums = load_sums(sum_chunk, chunk_begin, tile_begin, length, H, K, BT, BN, BK, DT)
        before, off = row_sums(x, key_sums, BT, BN, IP)
        if DECAY:
            block = rows // BN * BN
            then = tl.load(through + block - 1, mask=(block % PERIOD != 0) & (block <= length), other=0.0)
            before *= tl.exp(tl.minimum(now - then, 0.0))
    scale = tl.full([BT], 1.0, tl.float32)
    if UNIT:
        scale = tl.rsqrt(tl.sum(x.to(tl.float32) * x.to(tl.float32), 1) + eps)

    # in units of past |q_t|: to scale the sum on the way would break the chain of products that it is made by
    acc = tl.zeros([BT, BK], tl.float32)
    state_rows = tl.where(INITIAL | (chunk_begin > 0), K, 0)  # a sequence with no past has nothing to read
    acc = read_state(
        acc, q + head, states + (chunk * H + h) * K * K, state_rows, tile_begin, length, HQ, K, BT, BK, BS, DT, IP
    )
    left = tl.full([BT], 1.0, tl.float32)
    if DECAY:
        left = tl.exp(tl.minimum(now - decay_before(through, chunk_begin), 0.0))
        acc *= (left * n0)[:, None]
    acc, m = read_keys(
        acc, x, before, past, t, now, through, k + (begin * H + h) * K, chunk_begin, tile_begin, length, H, K,
        CENTRED, DECAY, BT, BN, BK, DT, IP,
    )  # fmt: skip
    if CENTRED:
        acc = outer_sum(acc, left * (off / n0 - m) / past, key_sums, BT, BN, DT, IP)
        tl.store(means + (begin + rows) * HQ + hq, m * scale, mask=rows < length)
    unit = scale * past / t
    if STEP == Y:
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
        size = -gate * unit
        q_tile = load_rows(q + head, tile_begin, length, HQ * K, K, cols, BT, DT)
        if STEP == PROJECTED:
            squares = tl.sum(acc * acc, 1) * unit * unit + SMALLEST
            size *= tl.sum(q_tile.to(tl.float32) * acc, 1) * scale * unit / squares
            if KEEP:
                store_rows(kept + head, acc * unit[:, None], tile_begin, length, HQ, K, cols, BT)
        change = (acc * size[:, None]).to(DT)
        clean = q_tile.to(tl.float32) * scale[:, None] + change.to(tl.float32)
        store_rows(out + head, clean, tile_begin, length, HQ, K, cols, BT)


@triton.jit
def projected_backward(g, q, y, gate):
    """As reference.projected_backward, for unit q where it is one: what goes to q, to y, and to lam."""
    size = tl.sum(y * y, 1) + SMALLEST
    share = tl.sum(q * y, 1) / size
    moved = tl.sum(g * y, 1)
    d_share = -gate * moved / size
    dy = (-gate * share)[:, None] * g + d_share[:, None] * (q - (2 * share)[:, None] * y)
    return g + d_share[:, None] * y, dy, -share * moved


@triton.jit(do_not_specialize=VARYING)
def turn_kernel(g, q, lam, kept, dy, dlam, M, HQ, K, eps, UNIT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The gradients of y and lam of a projected step, for BN rows of a head."""
    pid = tl.program_id(0)
    hq = pid % HQ
    first = (pid // HQ).to(tl.int64) * BN  # borders of sequences mean nothing here
    local = tl.arange(0, BN)
    cols = tl.arange(0, BK)
    rows = tl.minimum(M - first, BN).to(tl.int32)
    head = (first * HQ + hq) * K
    per_row = (first + local) * HQ + hq
    gate = tl.load(lam + per_row, mask=local < rows, other=0.0).to(tl.float32)
    q_tile = load_rows(q + head, 0, rows, HQ * K, K, cols, BN, tl.float32)
    if UNIT:
        q_tile *= tl.rsqrt(tl.sum(q_tile * q_tile, 1) + eps)[:, None]
    g_tile = load_rows(g + head, 0, rows, HQ * K, K, cols, BN, tl.float32)
    y_tile = load_rows(kept + head, 0, rows, HQ * K, K, cols, BN, tl.float32)
    _, turned, d_gate = projected_backward(g_tile, q_tile, y_tile, gate)
    store_rows(dy + head, turned, 0, rows, HQ, K, cols, BN)
    tl.store(dlam + per_row, d_gate.to(dlam.dtype.element_ty), mask=local < rows)


@triton.jit(do_not_specialize=VARYING)
def finish_kernel(
    g, q, lam, kept, m_q, m_g, count, through, weights, cu, sum_offsets, dq, weighted, reaching, pulls, lift_q, lift_w,
    through_n, N, T, M, HQ, H, K, per_sums, eps,
    STEP: tl.constexpr, UNIT: tl.constexpr, VARLEN: tl.constexpr, INITIAL: tl.constexpr, CENTRED: tl.constexpr,
    DECAY: tl.constexpr, DECAYS: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, S: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq from Sigma g (of a projected step: from Sigma dy), for BN rows of a head, BR at a time.

    For dk: w_t = dy_t / (t |q_t|), in the place of Sigma g; what to take off the scores k . q and k . w; and the rows'
    pull. A kernel of its own: beside the accumulators of the read the registers have no room for all of this.
    DECAY: also w_t as it reaches the beginning of its chunk of S, and the pull as it reaches that of its tile. DECAYS:
    also the gradient of n_t.
    """
    pid = tl.program_id(0)
    hq = pid % HQ
    tile = pid // HQ
    n, rank, begin, length = locate(tile, cu, sum_offsets, N, T, per_sums, VARLEN)
    if n >= N:
        return
    cols = tl.arange(0, BK)
    head = (begin * HQ + hq) * K
    seen = begin * 0
    if INITIAL and not DECAY:
        seen += tl.load(count + n)
    if DECAY:
        sequence = (hq // (HQ // H)).to(tl.int64) * M + begin
        through += sequence
        weights += sequence
        chunk_start = decay_before(through, rank * BN // S * S)
        tile_start = decay_before(through, rank * BN)
    pulled = tl.zeros([BR, BK], tl.float32)  # added up over rows once, at the end: there warps wait for each other
    for first in range(rank * BN, rank * BN + BN, BR):  # of all BN rows at once there would be more than registers hold
        rows = first + tl.arange(0, BR)
        valid = rows < length
        per_row = (begin + rows) * HQ + hq
        at = hq.to(tl.int64) * M + begin + rows
        if DECAY:
            now = tl.load(through + rows, mask=valid, other=0.0)
            t = tl.load(weights + rows, mask=valid, other=1.0)
        else:
            t = (seen + rows + 1).to(tl.float32)
        q_tile = load_rows(q + head, first, length, HQ * K, K, cols, BR, tl.float32)
        g_tile = load_rows(g + head, first, length, HQ * K, K, cols, BR, tl.float32)
        read = load_rows(weighted + head, first, length, HQ * K, K, cols, BR, tl.float32)
        if CENTRED:  # asked for before anything is stored: behind that it would wait
            mean_q = tl.load(m_q + per_row, mask=valid, other=0.0)
            mean_w = tl.load(m_g + per_row, mask=valid, other=0.0)
        scale = tl.full([BR], 1.0, tl.float32)
        if UNIT:
            scale = tl.rsqrt(tl.sum(q_tile * q_tile, 1) + eps)
        share = scale / t  # of Sigma g's means and of g in w_t
        if STEP == Y:
            grad = read
            w = g_tile * share[:, None]
        else:
            gate = tl.load(lam + per_row, mask=valid, other=0.0).to(tl.float32)
        if STEP == SCALED:
            grad = g_tile - gate[:, None] * read  # of the query that was cleaned
            share *= -gate
            w = g_tile * share[:, None]
        if STEP == PROJECTED:
            y_tile = load_rows(kept + head, first, length, HQ * K, K, cols, BR, tl.float32)
            grad, dy, _ = projected_backward(g_tile, q_tile * scale[:, None], y_tile, gate)
            grad += read
            w = dy * share[:, None]
        if UNIT:
            grad = scale[:, None] * (grad - q_tile * (scale * scale * tl.sum(q_tile * grad, 1))[:, None])
        store_rows(dq + head, grad, first, length, HQ, K, cols, BR)
        store_rows(weighted + head, w, first, length, HQ, K, cols, BR)
        if DECAY:
            chunk = tl.exp(tl.minimum(now - chunk_start, 0.0))
            store_rows(reaching + head, w * chunk[:, None], first, length, HQ, K, cols, BR)
        d_n = tl.zeros([BR], tl.float32)
        if DECAYS:  # - q . Sigma dy / t
            d_n = -tl.sum(q_tile * read, 1) * share
        if CENTRED:
            mean_q /= scale
            mean_w *= share
            tl.store(lift_q + at, mean_q, mask=valid)
            tl.store(lift_w + at, mean_w, mask=valid)
            pull = w * mean_q[:, None] + q_tile * mean_w[:, None]
            if DECAY:
                pull *= tl.exp(tl.minimum(now - tile_start, 0.0))[:, None]
            pulled += pull
            d_n += mean_q * mean_w
        if DECAYS:
            tl.store(through_n + at, d_n, mask=valid)
    if CENTRED:
        tl.store(pulls + (tile.to(tl.int64) * HQ + hq) * K + cols, -tl.sum(pulled, 0), mask=cols < K)


@triton.jit(do_not_specialize=VARYING)
def dk_kernel(
    q, weighted, k, k_rnorm, dk_bar, lift_q, lift_w, states, pulls, last_sum, through, scaled, cu, tile_offsets,
    chunk_offsets, pull_offsets, dk,
    N, T, M, HQ, H, K, per_tiles, per_chunks, per_pulls, tiles, spread,
    UNIT: tl.constexpr, BAR: tl.constexpr, LAST: tl.constexpr, VARLEN: tl.constexpr, CENTRED: tl.constexpr,
    DECAY: tl.constexpr, DECAYS: tl.constexpr, PULL: tl.constexpr, BT: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BS: tl.constexpr, DT: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """dk of one tile: R of the later chunks, and the queries of its own chunk that saw these keys.

    DECAYS: also the gradient of scaling what a token adds to C and s, but for that of n.
    """
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
    own = tile_begin + local
    then = tl.zeros([BT], tl.float32)
    left = tl.full([BT], 1.0, tl.float32)  # of a key at the end of its chunk
    inner = tl.zeros([BT], tl.float32)
    if DECAY:
        through += h.to(tl.int64) * M + begin
        then = tl.load(through + own, mask=own < length, other=0.0)
        left = tl.exp(tl.minimum(tl.load(through + chunk_end - 1) - then, 0.0))
        acc *= left[:, None]
        if DECAYS:
            inner = 0.5 * tl.sum(acc * keys.to(tl.float32), 1)
    steps = (chunk_end - tile_begin + BN - 1) // BN
    for step in range(G * steps):
        hq = h * G + step // steps
        offset = (step % steps) * BN
        late = tile_begin + offset + tl.arange(0, BN)
        x_q = load_rows(q + (begin * HQ + hq) * K, tile_begin + offset, length, HQ * K, K, cols, BN, DT)
        x_w = load_rows(weighted + (begin * HQ + hq) * K, tile_begin + offset, length, HQ * K, K, cols, BN, DT)
        p_q = tl.dot(keys, tl.trans(x_q), input_precision=IP)
        p_w = tl.dot(keys, tl.trans(x_w), input_precision=IP)
        sees = offset + tl.arange(0, BN)[None, :] >= local[:, None]
        off_q = tl.zeros([1, BN], tl.float32)
        off_w = tl.zeros([1, BN], tl.float32)
        if CENTRED:
            at = hq.to(tl.int64) * M + begin + late
            off_q = tl.load(lift_q + at, mask=late < length, other=0.0)[None, :]
            off_w = tl.load(lift_w + at, mask=late < length, other=0.0)[None, :]
            p_q -= off_q
            p_w -= off_w
        if DECAY:
            now = tl.load(through + late, mask=late < length, other=0.0)
            reach = tl.exp(tl.minimum(now[None, :] - then[:, None], 0.0))
            if DECAYS:
                inner += tl.sum(tl.where(sees & (late < length)[None, :], (p_q * p_w - off_q * off_w) * reach, 0.0), 1)
            p_q *= reach
            p_w *= reach
        acc = tl.dot(tl.where(sees, p_q, 0.0).to(DT), x_w, acc, input_precision=IP)
        acc = tl.dot(tl.where(sees, p_w, 0.0).to(DT), x_q, acc, input_precision=IP)

    grad = acc.to(DT).to(tl.float32)
    if LAST | (chunk_end < length):
        if CENTRED | (DECAY & LAST):  # the pull of all later chunks is that after the last of this one
            at = ((pull0 + (chunk_end + PULL - 1) // PULL - 1) * HQ + h * G) * K
            later = tl.load(pulls + at + cols, mask=cols < K, other=0.0)[None, :] * left[:, None]
            grad += later
            if DECAYS:
                inner += tl.sum(later * keys.to(tl.float32), 1)
        elif LAST:
            grad += tl.load(last_sum + (n.to(tl.int64) * H + h) * K + cols, mask=cols < K, other=0.0)[None, :]
    if DECAYS:
        tl.store(scaled + h.to(tl.int64) * M + begin + own, inner, mask=own < length)
    if BAR:
        grad += load_rows(dk_bar + head, tile_begin, length, H * K, K, cols, BT, DT).to(tl.float32)
    if UNIT:
        kn = load_rows(k + head, tile_begin, length, H * K, K, cols, BT, DT)
        rows = tile_begin + local
        r = tl.load(k_rnorm + (begin + rows) * H + h, mask=rows < length, other=0.0)
        along = tl.sum(kn.to(tl.float32) * grad, 1)
        grad = r[:, None] * (grad - kn.to(tl.float32) * along[:, None])
    store_rows(dk + head, grad, tile_begin, length, H, K, cols, BT)
