"""The operator in Triton: which kernels run, on which grid. What they compute is said in __init__.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ccq.ops.choose import Call, choose
from ccq.ops.clean.chunk import Gradients, Past, Saved, contiguous, kept_dtype
from ccq.ops.clean.reference import Read
from ccq.ops.clean.state import weight_of
from ccq.ops.clean.triton import reads
from ccq.ops.clean.triton.configs import Config, cdiv, pick, power_of_2
from ccq.ops.clean.triton.reads import clean_kernel, dk_kernel, finish_kernel, turn_kernel
from ccq.ops.clean.triton.scans import adjoint_kernel, keys_kernel, states_kernel, sums_kernel, weights_kernel
from ccq.ops.precision import EPS

Y, SCALED, PROJECTED = (x.value for x in (reads.Y, reads.SCALED, reads.PROJECTED))


class Grid:
    """What every launch of one pass needs to know: sizes, tables of packed sequences, dtypes of products."""

    def __init__(self, config: Config, q: Tensor, k: Tensor, count: Tensor | None, cu_seqlens: Tensor | None):
        batch, self.length, self.key_heads, self.size = k.shape
        self.query_heads = q.shape[2]
        self.block_k = block_size(self.size)
        self.config, self.device, self.tokens = config, q.device, batch * self.length
        self.cu, self.count = cu_seqlens, count
        # Triton's interpreter multiplies bf16 as if it were integers
        self.product = tl.bfloat16 if q.dtype == torch.bfloat16 and q.is_cuda else tl.float32
        self.precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        self.state_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
        self.sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        cuts = (config.BT, config.S, config.BN)
        self.per_tiles, self.per_chunks, self.per_sums = (cdiv(self.length, cut) for cut in cuts)
        if cu_seqlens is None:
            self.tiles, self.chunks, self.sums = (batch * cdiv(self.length, cut) for cut in cuts)
            self.tables: tuple[Tensor | None, ...] = (None, None, None)
        else:  # how many there are is known only on the device, and asking would wait: launch for the most there can be
            self.tiles, self.chunks, self.sums = (self.length // cut + self.sequences for cut in cuts)
            self.tables = tuple(offsets(cu_seqlens, cut) for cut in cuts)
        self.tile_offsets, self.chunk_offsets, self.sum_offsets = self.tables
        across = cdiv(self.size, config.BLK)
        self.blocks = across * (across + 1) // 2
        # where heads and blocks are too few for the chip, a sequence is scanned in segments, their sums first
        programs = self.sequences * self.key_heads * self.blocks
        self.segments = max(1, min(MOST_SEGMENTS, 2 * processors(self.device) // programs, self.per_chunks))

    def sizes(self) -> tuple[int, ...]:
        """Arguments that the kernels over tiles share."""
        spread = self.tiles * self.query_heads <= 4 * processors(self.device)
        return (
            self.sequences, self.length, self.tokens, self.query_heads, self.key_heads, self.size,
            self.per_tiles, self.per_chunks, self.per_sums, self.tiles, int(spread),
        )  # fmt: skip

    def programs(self, heads: int) -> int:
        """For kernels that stay and take tile after tile: one a multiprocessor."""
        return min(self.tiles * heads, processors(self.device))

    def tile_options(self, centred: bool) -> dict:
        c = self.config
        return {
            "VARLEN": self.cu is not None, "CENTRED": centred,
            "BT": c.BT, "S": c.S, "BN": c.BN, "BK": self.block_k, "BS": c.BS,
            "DT": self.product, "IP": self.precision, "num_warps": c.warps, "num_stages": c.stages,
        }  # fmt: skip

    def row_warps(self, rows: int, elements: int) -> int:
        """Warps for the kernels that go through rows without products, with `elements` to a warp."""
        return min(8, max(1, rows * self.block_k // elements))

    def scan(self, launch, like: Tensor) -> None:
        """Run a scan kernel: the sums of the segments first where there are several, then the states."""
        c = self.config
        several = self.segments > 1
        shape = (self.sequences, self.key_heads, self.segments, self.size, self.size)
        totals = like.new_empty(shape if several else 0, dtype=torch.float32)
        kept = like.new_empty(shape[:3] if several else 0, dtype=torch.float32)
        sizes = (self.key_heads, self.size, self.segments, self.blocks, self.per_sums, self.per_chunks, 1.0)
        options = {
            "VARLEN": self.cu is not None, "S": c.S, "BR": c.BR, "BLK": c.BLK,
            "DT": self.product, "IP": self.precision, "num_warps": c.scan_warps, "num_stages": c.scan_stages,
        }  # fmt: skip
        programs = (self.sequences * self.key_heads * self.segments * self.blocks,)
        if several:
            launch(programs, (totals, kept), sizes, TOTALS=True, SEGMENTS=False, **options)
        launch(programs, (totals, kept), sizes, TOTALS=False, SEGMENTS=several, **options)


FEW, PER_WARP = 8, 256  # rows at a time where many tensors pass by, and numbers of one to a warp: registers are few
LONGEST_SCAN = 4096  # tokens at once of what is scanned by one program a head
MOST_SEGMENTS = 8  # each adds up the segments before it: more would cost more than they spread


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16


def block_size(key_size: int) -> int:
    """BK: the smallest power of two that holds a key and that a product takes."""
    return max(16, power_of_2(key_size))


def pick_grid(name: str, q: Tensor, k: Tensor, past: Past, hopper: bool) -> Grid:
    """The grid of a pass; `hopper`: of the kernels of hopper.py, if they take it."""
    work = q.shape[0] * q.shape[1] * q.shape[2]
    call = Call.of(q, length=q.shape[1], packed=past.cu_seqlens is not None)
    hopper = hopper and choose("clean_query", call, "triton") == "hopper"
    config = pick(name, q.dtype, block_size(q.shape[-1]), work, interpreted=not q.is_cuda, hopper=hopper)
    return Grid(config, q, k, past.seen, past.cu_seqlens)


def offsets(cu_seqlens: Tensor, size: int) -> Tensor:
    """[N + 1] how many tiles of `size` tokens the sequences before each one have."""
    tiles = (cu_seqlens.diff() + (size - 1)) // size
    return torch.nn.functional.pad(tiles.cumsum(0), (1, 0))


class Decay(NamedTuple):
    """What the log-decays of a call come to. [Hk, B T] both, a sequence's tokens behind one another."""

    through: Tensor | None = None  # their running sum, begun anew every PERIOD tokens
    weights: Any = None  # n_t


def run_weights(
    grid: Grid, log_decay: Tensor, start: Tensor | None, x: Tensor | None = None, reverse: bool = False
) -> tuple[Decay, Tensor]:
    """n_t = gamma_t n_{t-1} + x_t (1 without x), and n behind the last token; from the last to the first, `reverse`."""
    made = Decay(*(log_decay.new_empty(grid.key_heads, grid.tokens, dtype=torch.float32) for _ in range(2)))
    end = log_decay.new_empty(grid.sequences, grid.key_heads, dtype=torch.float32)
    weights_kernel[(grid.sequences * grid.key_heads,)](
        log_decay, x, start, *made, end, grid.cu, grid.length, grid.tokens, grid.key_heads,
        START=start is not None, X=x is not None, END=True, REVERSE=reverse, VARLEN=grid.cu is not None,
        BL=min(LONGEST_SCAN, max(256, power_of_2(grid.length))), num_warps=8 if grid.length > 1024 else 4,
    )  # fmt: skip
    return made, end


class Keys(NamedTuple):
    """What the scans need of the keys."""

    stat: Tensor  # those of the statistics
    rnorm: Tensor  # 1/|k|, where they were made unit
    sums: Tensor  # [sums, Hk, K] of BN keys each, then of all before
    faded: Tensor  # with a decay: times the root of what is left of them at the end of their chunk
    fades: Tensor  # [sums, Hk] with a decay: what BN tokens leave of a sum


def prepare_keys(grid: Grid, k: Tensor, norm: bool, sums: bool, decay: Decay) -> Keys:
    """The keys made unit (with `norm`, else k itself) and their sums. Here alone k may be a part of a wider tensor."""
    decayed = decay.through is not None
    k_bar = torch.empty_like(k, memory_format=torch.contiguous_format) if norm else k
    rnorm = k.new_empty(k.shape[:-1] if norm else 0, dtype=torch.float32)
    key_sums = k.new_empty((grid.sums, grid.key_heads, grid.size) if sums else 0, dtype=torch.float32)
    faded = torch.empty_like(k, memory_format=torch.contiguous_format) if decayed else k_bar
    fades = k.new_empty((grid.sums, grid.key_heads) if decayed else 0, dtype=torch.float32)
    if norm or sums or decayed:
        keys_kernel[(grid.sums * grid.key_heads,)](
            k, k_bar, rnorm, key_sums, decay.through, faded, fades, grid.cu, grid.sum_offsets,
            grid.sequences, grid.length, grid.tokens, grid.key_heads, grid.size, k.stride(1), grid.per_sums, EPS,
            NORM=norm, SUMS=sums, DECAY=decayed, VARLEN=grid.cu is not None, BN=grid.config.BN, S=grid.config.S,
            BK=grid.block_k, num_warps=grid.row_warps(grid.config.BN, 1024),
        )  # fmt: skip
    return Keys(k_bar, rnorm, key_sums, faded, fades)


def run_sums(
    grid: Grid, sums: Tensor, fades: Tensor, start: Tensor | None, end: Tensor | None, groups: int, reverse: bool
) -> Tensor:
    """The sum of all entries before each one (after it, if `reverse`); that of all of them into `end`."""
    columns, decayed = min(grid.block_k, 64), fades.numel() > 0
    out = torch.empty_like(sums) if decayed else sums
    sums_kernel[(grid.sequences * grid.key_heads, cdiv(grid.size, columns))](
        sums, fades, out, start, end, grid.sum_offsets, grid.key_heads, grid.size, grid.per_sums, groups,
        START=start is not None, END=end is not None, REVERSE=reverse, DECAY=decayed, VARLEN=grid.cu is not None,
        BB=64, BC=columns,
    )  # fmt: skip
    return out


def key_states(
    grid: Grid, keys: Keys, decay: Decay, second_moment: Tensor | None, centred: bool, final: Tensor | None
) -> Tensor:
    """The covariance before each chunk; C after the last one into `final`."""
    states = keys.stat.new_empty(grid.chunks, grid.key_heads, grid.size, grid.size, dtype=grid.state_dtype)

    def launch(programs, totals, sizes, **options):
        states_kernel[programs](
            keys.faded, second_moment, grid.count, *decay, grid.cu, grid.sum_offsets, grid.chunk_offsets, keys.sums,
            *totals, states, final,
            grid.length, grid.tokens, *sizes, INITIAL=grid.count is not None,
            FINAL=final is not None and not options["TOTALS"], CENTRED=centred, DECAY=decay.through is not None,
            BN=grid.config.BN, **options,
        )  # fmt: skip

    grid.scan(launch, keys.stat)
    return states


class Rows(NamedTuple):
    """Where the tiles' results go beside x_clean."""

    kept: Tensor | None = None  # y of a projected step
    other: Tensor | None = None  # its product with -Sigma x goes into `along`; over its norm, if `unit_other`
    along: Tensor | None = None
    unit_other: bool = False


def read_tiles(
    grid: Grid, x: Tensor, keys: Keys, lam: Tensor | None, step: int, decay: Decay, states: Tensor,
    centred: bool, unit: bool, dtype: torch.dtype, rows: Rows,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_clean (Sigma x itself for the step Y) from the states of `key_states`; and m_t, the mean of the scores."""
    out = torch.empty_like(x, dtype=dtype)
    means = x.new_empty(x.shape[:-1] if centred else 0, dtype=torch.float32)
    if grid.config.hopper:
        from ccq.ops.clean.triton import hopper

        hopper.clean(grid, x, keys, lam, step, decay, states, out, means, rows, centred, unit)
        return out, means
    clean_kernel[(grid.tiles * grid.query_heads,)](
        x, keys.stat, lam, states, keys.sums, grid.count, *decay, grid.cu, *grid.tables, out, rows.kept, means,
        rows.other, rows.along, *grid.sizes(), EPS,
        STEP=step, KEEP=rows.kept is not None, UNIT=unit, INITIAL=grid.count is not None,
        DECAY=decay.through is not None, ALONG=rows.other is not None, UNIT_OTHER=rows.unit_other,
        **grid.tile_options(centred),
    )  # fmt: skip
    return out, means


class Adjoint(NamedTuple):
    """What the keys' gradient needs of the queries."""

    weighted: Tensor  # [B, T, Hq, K] w_t = dy_t / (t |q_t|)
    reaching: Tensor  # with a decay: as they reach the beginning of their chunk
    pulls: Tensor  # [sums, Hq, K] of the mean, BN rows each
    lift_q: Tensor  # [Hq, B T] to take off the scores k_j . q_t
    lift_w: Tensor  # and k_j . w_t
    through_n: Tensor  # [Hq, B T] the gradient of n_t, where that of the decay is wanted


def finish(
    grid: Grid, chunk: int, g: Tensor, saved: Saved, step: int, decay: Decay, m_g: Tensor, read: Tensor, how: Read,
    decays: bool,
) -> tuple[Tensor, Adjoint]:  # fmt: skip
    """dq, and what the keys' gradient needs, from `read` = Sigma g, whose memory is used again.

    `chunk`: the tokens of a chunk of the pass that makes dk.
    """
    q, decayed = saved.q, decay.through is not None
    dq = torch.empty_like(q)
    lifts = [q.new_empty((grid.query_heads, grid.tokens) if how.centred else 0, dtype=torch.float32) for _ in range(2)]
    pulls = q.new_empty((grid.sums, grid.query_heads, grid.size) if how.centred else 0, dtype=torch.float32)
    reaching = torch.empty_like(read) if decayed else read
    through_n = q.new_empty((grid.query_heads, grid.tokens) if decays else 0, dtype=torch.float32)
    rows = min(FEW, grid.config.BN)
    adjoint = Adjoint(read, reaching, pulls, lifts[0], lifts[1], through_n)
    finish_kernel[(grid.sums * grid.query_heads,)](
        g, q, saved.lam, saved.y, saved.means, m_g, grid.count, *decay, grid.cu, grid.sum_offsets, dq, *adjoint,
        grid.sequences, grid.length, grid.tokens, grid.query_heads, grid.key_heads, grid.size, grid.per_sums, EPS,
        STEP=step, UNIT=how.normalize == "unit", VARLEN=grid.cu is not None, INITIAL=grid.count is not None,
        CENTRED=how.centred, DECAY=decayed, DECAYS=decays, BN=grid.config.BN, BR=rows, S=chunk, BK=grid.block_k,
        num_warps=grid.row_warps(rows, PER_WARP),
    )  # fmt: skip
    return dq, adjoint


def turn(grid: Grid, g: Tensor, saved: Saved, unit: bool) -> tuple[Tensor, Tensor]:
    """The gradients of y and lam of a projected step."""
    assert saved.lam is not None
    dy, dlam = torch.empty_like(g, dtype=grid.state_dtype), torch.empty_like(saved.lam)
    rows = min(FEW, grid.config.BN)
    turn_kernel[(cdiv(grid.tokens, rows) * grid.query_heads,)](
        g, saved.q, saved.lam, saved.y, dy, dlam, grid.tokens, grid.query_heads, grid.size, EPS,
        UNIT=unit, BN=rows, BK=grid.block_k, num_warps=grid.row_warps(rows, PER_WARP),
    )  # fmt: skip
    return dy, dlam


def adjoint_states(
    grid: Grid, q: Tensor, weighted: Tensor, decay: Decay, last: Tensor | None, first: Tensor | None
) -> Tensor:
    """R after each chunk, begun at `last`; half of what it is before the first one into `first`."""
    states = q.new_empty(grid.chunks, grid.key_heads, grid.size, grid.size, dtype=grid.state_dtype)

    def launch(programs, totals, sizes, **options):
        adjoint_kernel[programs](
            q, weighted, last, decay.through, grid.cu, grid.sum_offsets, grid.chunk_offsets, *totals, states, first,
            grid.length, grid.tokens, grid.query_heads, *sizes,
            LAST=last is not None, FIRST=first is not None and not options["TOTALS"],
            DECAY=decay.through is not None, **options,
        )  # fmt: skip

    grid.scan(launch, q)
    return states


def dk_tiles(
    grid: Grid, pull_grid: Grid, q: Tensor, k: Tensor, k_rnorm: Tensor | None, dk_bar: Tensor | None,
    adjoint: Adjoint, decay: Decay, states: Tensor, last_sum: Tensor | None, centred: bool, scaled: Tensor | None,
) -> Tensor:  # fmt: skip
    """dk from the states of `adjoint_states`; through the norm where `k_rnorm` is given.

    Into `scaled` the gradient of scaling what each token adds to C and s, for that of the decay.
    """
    dk = torch.empty_like(k)
    if grid.config.hopper:
        from ccq.ops.clean.triton import hopper

        hopper.dk(grid, pull_grid, q, k, k_rnorm, dk_bar, adjoint, decay, states, last_sum, dk, centred)
        return dk
    n, length, tokens, query_heads, key_heads, size, per_tiles, per_chunks, _, tiles, spread = grid.sizes()
    dk_kernel[(tiles * key_heads,)](
        q, adjoint.weighted, k, k_rnorm, dk_bar, adjoint.lift_q, adjoint.lift_w, states, adjoint.pulls, last_sum,
        decay.through, scaled, grid.cu, grid.tile_offsets, grid.chunk_offsets, pull_grid.sum_offsets, dk,
        n, length, tokens, query_heads, key_heads, size, per_tiles, per_chunks, pull_grid.per_sums, tiles, spread,
        UNIT=k_rnorm is not None, BAR=dk_bar is not None, LAST=last_sum is not None, DECAY=decay.through is not None,
        DECAYS=scaled is not None, PULL=pull_grid.config.BN, **grid.tile_options(centred),
    )  # fmt: skip
    return dk


def begin(
    name: str, q: Tensor, k: Tensor, log_decay: Tensor | None, past: Past, hopper: bool
) -> tuple[Grid, Decay, Tensor | None]:
    """The grid of a pass, and what its decay comes to, with the weight after the last token."""
    if log_decay is None:
        return pick_grid(name, q, k, past, hopper), Decay(), None
    if past.seen is not None:
        past = past._replace(seen=weight_of(past.seen, k.shape[2], torch.float32).contiguous())
    grid = pick_grid(name, q, k, past, hopper)
    return grid, *run_weights(grid, log_decay, past.seen)


def forward(
    q: Tensor, k: Tensor, lam: Tensor | None, log_decay: Tensor | None, past: Past, how: Read,
    output_final_state: bool = True, keep_y: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As `chunk.forward`."""
    q, lam, log_decay = contiguous(q, lam, log_decay)
    past = Past(*contiguous(*past))
    if how.normalize == "none" or not in_rows(k):
        k = k.contiguous()
    step = Y if lam is None else PROJECTED if how.step == "projected" else SCALED
    grid, decay, weight = begin("clean", q, k, log_decay, past, hopper=lam is not None)  # y by itself is fp32
    keys = prepare_keys(grid, k, how.normalize != "none", how.centred or output_final_state, decay)
    final = empty_state(grid, k, output_final_state)
    if how.centred or output_final_state:
        keys = keys._replace(sums=run_sums(grid, keys.sums, keys.fades, past.key_sum, final[1], 1, reverse=False))
    states = key_states(grid, keys, decay, past.second_moment, how.centred, final[0])
    dtype = torch.float32 if lam is None else q.dtype
    kept = torch.empty_like(q, dtype=kept_dtype(q.dtype)) if keep_y and step == PROJECTED else None
    unit = how.normalize == "unit"
    out, means = read_tiles(grid, q, keys, lam, step, decay, states, how.centred, unit, dtype, Rows(kept))
    return out, keys.stat, keys.rnorm, means, kept, *final, weight


def backward(grads: Gradients, saved: Saved, past: Past, how: Read, decays: bool = True) -> tuple[Tensor | None, ...]:
    """As `chunk.backward`."""
    g, dk_bar, d_second_moment, d_key_sum, d_weight = contiguous(*grads)
    saved, past = Saved(*contiguous(*saved)), Past(*contiguous(*past))
    q, k, lam, centred, unit = saved.q, saved.k, saved.lam, how.centred, how.normalize == "unit"
    hopper, decays = lam is not None, decays and saved.log_decay is not None
    grid, decay, weight = begin("clean", q, k, saved.log_decay, past, hopper)
    key_grid = pick_grid("dk", q, k, past._replace(seen=grid.count), hopper and not decays)
    if (d_second_moment is None) != (d_key_sum is None):
        zeros = [torch.zeros_like(x) for x in empty_state(grid, k, True) if x is not None]
        d_second_moment = zeros[0] if d_second_moment is None else d_second_moment
        d_key_sum = zeros[1] if d_key_sum is None else d_key_sum
    again = decays and d_second_moment is not None  # the final state, which the gradient of the decay asks for
    keys = prepare_keys(grid, k, how.normalize == "stats", centred or again, decay)
    last = empty_state(grid, k, again)
    if centred or again:
        keys = keys._replace(sums=run_sums(grid, keys.sums, keys.fades, past.key_sum, last[1], 1, reverse=False))
    states = key_states(grid, keys, decay, past.second_moment, centred, last[0])
    step, dlam, rows = Y, None, Rows()
    x = g  # whose product with Sigma is needed
    if saved.y is not None:
        step = PROJECTED
        x, dlam = turn(grid, g, saved, unit)
    elif lam is not None:
        step, dlam = SCALED, torch.empty_like(lam)
        rows = Rows(None, q, dlam, unit)
    else:
        x = g = g.to(grid.state_dtype)
    read, means_g = read_tiles(grid, x, keys, None, Y, decay, states, centred, False, grid.state_dtype, rows)
    stat, fades = keys.stat, keys.fades
    del states, keys, x  # memory for what follows
    dq, adjoint = finish(grid, key_grid.config.S, g, saved, step, decay, means_g, read, how, decays)

    first: tuple[Tensor | None, Tensor | None] = empty_state(grid, k, past.second_moment is not None)
    groups = grid.query_heads // grid.key_heads
    if centred or (d_key_sum is not None and fades.numel()):
        pulls = adjoint.pulls
        if not centred:
            pulls = pulls.new_zeros(grid.sums, grid.query_heads, grid.size)
        pulls = run_sums(grid, pulls, fades, d_key_sum, first[1], groups, reverse=True)
        adjoint = adjoint._replace(pulls=pulls)
    elif first[1] is not None:
        first = (first[0], first[1].zero_() if d_key_sum is None else d_key_sum.clone())
    states = adjoint_states(key_grid, q, adjoint.reaching, decay, d_second_moment, first[0])
    scaled = torch.empty_like(decay.weights) if decays and decay.weights is not None else None
    rnorm = None if how.normalize == "none" else saved.k_rnorm
    dk = dk_tiles(key_grid, grid, q, stat, rnorm, dk_bar, adjoint, decay, states, d_key_sum, centred, scaled)
    d_first = d_log_decay = None
    if scaled is not None and saved.log_decay is not None:
        through_n = adjoint.through_n.view(grid.key_heads, groups, -1).sum(1)
        behind, d_first = run_weights(grid, saved.log_decay, d_weight, through_n, reverse=True)
        scaled += behind.weights
        whole = scaled.new_zeros(grid.sequences, grid.key_heads)
        if d_second_moment is not None:
            whole += (d_second_moment * last[0]).sum((-1, -2)) + (d_key_sum * last[1]).sum(-1)
        if d_weight is not None:
            whole += d_weight * weight
        flat = torch.zeros_like(saved.log_decay)
        summed = run_weights(grid, flat, -whole, scaled, reverse=True)[0].weights
        d_log_decay = torch.neg(summed.view(grid.key_heads, *k.shape[:2]).permute(1, 2, 0), out=flat)
    return dq, dk, dlam, *first, d_first, d_log_decay


def empty_state(grid: Grid, like: Tensor, wanted: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not wanted:
        return None, None
    shape = (grid.sequences, grid.key_heads, grid.size)
    return like.new_empty(*shape, grid.size, dtype=torch.float32), like.new_empty(shape, dtype=torch.float32)


def in_rows(k: Tensor) -> bool:
    """Whether the tokens of all sequences lie equally far apart, each whole: a part of a fused projection, say."""
    batch, length, _, size = k.shape
    return k.stride()[2:] == (size, 1) and (batch == 1 or k.stride(0) == length * k.stride(1))
