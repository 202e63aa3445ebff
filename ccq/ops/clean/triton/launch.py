"""The operator in Triton: which kernels run, on which grid. What they compute is said in __init__.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ccq.ops.choose import Call, choose
from ccq.ops.clean.chunk import Gradients, Past, Saved
from ccq.ops.clean.triton.configs import Config, cdiv, pick, power_of_2
from ccq.ops.clean.triton.reads import clean_kernel, dk_kernel, finish_kernel
from ccq.ops.clean.triton.scans import adjoint_kernel, keys_kernel, states_kernel, sums_kernel
from ccq.ops.precision import EPS, inv_norm, unit_backward


class Grid:
    """What every launch of one pass needs to know: sizes, tables of packed sequences, dtypes of products."""

    def __init__(self, config: Config, q: Tensor, k: Tensor, count: Tensor | None, cu_seqlens: Tensor | None):
        batch, self.length, self.key_heads, self.size = k.shape
        self.query_heads = q.shape[2]
        self.block_k = block_size(self.size)
        self.config, self.device = config, q.device
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
            self.sequences, self.length, self.query_heads, self.key_heads, self.size,
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

    def row_warps(self, elements: int) -> int:
        """Warps for the kernels that go through BN rows without products, with `elements` to a warp."""
        return min(8, max(1, self.config.BN * self.block_k // elements))

    def scan(self, launch, like: Tensor) -> None:
        """Run a scan kernel: the sums of the segments first where there are several, then the states."""
        c = self.config
        several = self.segments > 1
        shape = (self.sequences, self.key_heads, self.segments, self.size, self.size)
        totals = like.new_empty(shape if several else 0, dtype=torch.float32)
        sizes = (self.key_heads, self.size, self.segments, self.blocks, self.per_sums, self.per_chunks, 1.0)
        options = {
            "VARLEN": self.cu is not None, "S": c.S, "BR": c.BR, "BLK": c.BLK,
            "DT": self.product, "IP": self.precision, "num_warps": c.scan_warps, "num_stages": c.scan_stages,
        }  # fmt: skip
        programs = (self.sequences * self.key_heads * self.segments * self.blocks,)
        if several:
            launch(programs, totals, sizes, TOTALS=True, SEGMENTS=False, **options)
        launch(programs, totals, sizes, TOTALS=False, SEGMENTS=several, **options)


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


def prepare_keys(grid: Grid, k: Tensor, norm: bool, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The key of the statistics and 1/|k| (k itself and nothing, without `norm`); the sums of BN keys each.

    Here alone k may be a part of a wider tensor.
    """
    k_bar = torch.empty_like(k, memory_format=torch.contiguous_format) if norm else k
    rnorm = k.new_empty(k.shape[:-1] if norm else 0, dtype=torch.float32)
    key_sums = k.new_empty((grid.sums, grid.key_heads, grid.size) if sums else 0, dtype=torch.float32)
    if norm or sums:
        keys_kernel[(grid.sums * grid.key_heads,)](
            k, k_bar, rnorm, key_sums, grid.cu, grid.sum_offsets,
            grid.sequences, grid.length, grid.key_heads, grid.size, k.stride(1), grid.per_sums, EPS,
            NORM=norm, SUMS=sums, VARLEN=grid.cu is not None, BN=grid.config.BN, BK=grid.block_k,
            num_warps=grid.row_warps(1024),
        )  # fmt: skip
    return k_bar, rnorm, key_sums


def run_sums(
    grid: Grid, sums: Tensor, table: Tensor | None, per_sequence: int,
    start: Tensor | None, end: Tensor | None, groups: int, reverse: bool,
) -> None:  # fmt: skip
    """In place: the sum of all entries before each one (after it, if `reverse`); that of all of them into `end`."""
    columns = min(grid.block_k, 64)
    sums_kernel[(grid.sequences * grid.key_heads, cdiv(grid.size, columns))](
        sums, start, end, table, grid.key_heads, grid.size, per_sequence, groups,
        START=start is not None, END=end is not None, REVERSE=reverse, VARLEN=grid.cu is not None, BB=64, BC=columns,
    )  # fmt: skip


def key_states(
    grid: Grid, k: Tensor, sums: Tensor, second_moment: Tensor | None, centred: bool, final: Tensor | None
) -> Tensor:
    """The covariance before each chunk; C after the last one into `final`."""
    states = k.new_empty(grid.chunks, grid.key_heads, grid.size, grid.size, dtype=grid.state_dtype)

    def launch(programs, totals, sizes, **options):
        states_kernel[programs](
            k, second_moment, grid.count, grid.cu, grid.sum_offsets, grid.chunk_offsets, sums, totals, states, final,
            grid.length, *sizes, INITIAL=grid.count is not None, FINAL=final is not None and not options["TOTALS"],
            CENTRED=centred, BN=grid.config.BN, **options,
        )  # fmt: skip

    grid.scan(launch, k)
    return states


def read_tiles(
    grid: Grid, x: Tensor, k: Tensor, lam: Tensor | None, states: Tensor, sums: Tensor,
    centred: bool, unit: bool, dtype: torch.dtype,
    other: Tensor | None = None, along: Tensor | None = None, unit_other: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x_clean (Sigma x itself without `lam`) from the states of `key_states`; and m_t, the mean of the scores.

    With `other`, its product with -Sigma x goes into `along`.
    """
    out = torch.empty_like(x, dtype=dtype)
    means = x.new_empty(x.shape[:-1] if centred else 0, dtype=torch.float32)
    if grid.config.hopper:
        from ccq.ops.clean.triton import hopper

        hopper.clean(grid, x, k, lam, states, sums, out, means, other, along, centred, unit, unit_other)
        return out, means
    clean_kernel[(grid.tiles * grid.query_heads,)](
        x, k, lam, states, sums, grid.count, grid.cu, *grid.tables, out, means, other, along, *grid.sizes(), EPS,
        UNIT=unit, INITIAL=grid.count is not None, CORRECTION=lam is None, ALONG=other is not None,
        UNIT_OTHER=unit_other, **grid.tile_options(centred),
    )  # fmt: skip
    return out, means


class Adjoint(NamedTuple):
    """What the keys' gradient needs of the queries."""

    weighted: Tensor  # [B, T, Hq, K] w_t = u_t / (t |q_t|)
    pulls: Tensor  # [sums, Hq, K] of the mean, BN rows each
    lift_q: Tensor  # [Hq, B T] to take off the scores k_j . q_t
    lift_w: Tensor  # and k_j . w_t


def finish(
    grid: Grid, g: Tensor, q: Tensor, lam: Tensor, m_q: Tensor, m_g: Tensor, read: Tensor, centred: bool, unit: bool
) -> tuple[Tensor, Adjoint]:
    """dq, and what the keys' gradient needs, from `read` = Sigma g, whose memory is used again."""
    dq = torch.empty_like(q)
    tokens = q.shape[0] * q.shape[1]
    lifts = q.new_empty((2, grid.query_heads, tokens) if centred else (2, 0), dtype=torch.float32)
    pulls = q.new_empty((grid.sums, grid.query_heads, grid.size) if centred else 0, dtype=torch.float32)
    adjoint = Adjoint(read, pulls, *lifts)
    finish_kernel[(grid.sums * grid.query_heads,)](
        g, q, lam, m_q, m_g, grid.count, grid.cu, grid.sum_offsets, dq, *adjoint,
        grid.sequences, grid.length, tokens, grid.query_heads, grid.size, grid.per_sums, EPS,
        UNIT=unit, VARLEN=grid.cu is not None, INITIAL=grid.count is not None, CENTRED=centred,
        BN=grid.config.BN, BK=grid.block_k, num_warps=grid.row_warps(2048),
    )  # fmt: skip
    return dq, adjoint


def adjoint_states(grid: Grid, q: Tensor, weighted: Tensor, last: Tensor | None, first: Tensor | None) -> Tensor:
    """R after each chunk, begun at `last`; half of what it is before the first one into `first`."""
    states = q.new_empty(grid.chunks, grid.key_heads, grid.size, grid.size, dtype=grid.state_dtype)

    def launch(programs, totals, sizes, **options):
        adjoint_kernel[programs](
            q, weighted, last, grid.cu, grid.sum_offsets, grid.chunk_offsets, totals, states, first,
            grid.length, grid.query_heads, *sizes,
            LAST=last is not None, FIRST=first is not None and not options["TOTALS"], **options,
        )  # fmt: skip

    grid.scan(launch, q)
    return states


def dk_tiles(
    grid: Grid, pull_grid: Grid, q: Tensor, k: Tensor, k_rnorm: Tensor | None, dk_bar: Tensor | None,
    adjoint: Adjoint, states: Tensor, last_sum: Tensor | None, centred: bool,
) -> Tensor:  # fmt: skip
    """dk from the states of `adjoint_states`; through the norm where `k_rnorm` is given."""
    dk = torch.empty_like(k)
    if grid.config.hopper:
        from ccq.ops.clean.triton import hopper

        hopper.dk(grid, pull_grid, q, k, k_rnorm, dk_bar, adjoint, states, last_sum, dk, centred)
        return dk
    n, length, query_heads, key_heads, size, per_tiles, per_chunks, _, tiles, spread = grid.sizes()
    dk_kernel[(tiles * key_heads,)](
        q, adjoint.weighted, k, k_rnorm, dk_bar, adjoint.lift_q, adjoint.lift_w, states, adjoint.pulls, last_sum,
        grid.cu, grid.tile_offsets, grid.chunk_offsets, pull_grid.sum_offsets, dk,
        n, length, k.shape[0] * k.shape[1], query_heads, key_heads, size, per_tiles, per_chunks, pull_grid.per_sums,
        tiles, spread,
        UNIT=k_rnorm is not None, BAR=dk_bar is not None, LAST=last_sum is not None, PULL=pull_grid.config.BN,
        **grid.tile_options(centred),
    )  # fmt: skip
    return dk


def forward(
    q: Tensor, k: Tensor, lam: Tensor | None, past: Past, centred: bool, normalize: str, output_final_state: bool = True
) -> tuple[Tensor | None, ...]:
    """As `chunk.forward`."""
    q, lam = contiguous(q, lam)
    past = Past(*contiguous(*past))
    if normalize == "none" or not in_rows(k):
        k = k.contiguous()
    grid = pick_grid("clean", q, k, past, hopper=lam is not None)  # y by itself is fp32
    k_stat, k_rnorm, sums = prepare_keys(grid, k, normalize != "none", centred or output_final_state)
    final = empty_state(grid, k, output_final_state)
    if centred or output_final_state:
        run_sums(grid, sums, grid.sum_offsets, grid.per_sums, past.key_sum, final[1], groups=1, reverse=False)
    states = key_states(grid, k_stat, sums, past.second_moment, centred, final[0])
    dtype = torch.float32 if lam is None else q.dtype
    out, means = read_tiles(grid, q, k_stat, lam, states, sums, centred, normalize == "unit", dtype)
    return out, k_stat, k_rnorm, means, *final


def backward(grads: Gradients, saved: Saved, past: Past, centred: bool, normalize: str) -> tuple[Tensor | None, ...]:
    """As `chunk.backward`."""
    g, dk_bar, d_second_moment, d_key_sum = contiguous(*grads)
    q, k, k_rnorm, means, lam = contiguous(*saved)
    past = Past(*contiguous(*past))
    hopper, unit = lam is not None, normalize == "unit"
    grid = pick_grid("clean", q, k, past, hopper)
    if (d_second_moment is None) != (d_key_sum is None):
        zeros = k.new_zeros(grid.sequences, grid.key_heads, grid.size, grid.size, dtype=torch.float32)
        d_second_moment = zeros if d_second_moment is None else d_second_moment
        d_key_sum = zeros[..., 0].contiguous() if d_key_sum is None else d_key_sum
    k_stat, _, sums = prepare_keys(grid, k, normalize == "stats", centred)
    if centred:
        run_sums(grid, sums, grid.sum_offsets, grid.per_sums, past.key_sum, None, groups=1, reverse=False)
    states = key_states(grid, k_stat, sums, past.second_moment, centred, None)
    if lam is None:  # dy: as if lam were -1, but without the query that y is taken off
        g = g.to(grid.state_dtype)
        read, means_g = read_tiles(grid, g, k_stat, None, states, sums, centred, False, grid.state_dtype)
        del states, sums  # memory for what follows
        dlam, q_rnorm = None, inv_norm(q)
        dq = unit_backward(read, q * q_rnorm, q_rnorm) if unit else read.clone()  # `finish` uses its memory again
        dq = dq.to(q.dtype)
        minus = q.new_full(q.shape[:-1], -1.0, dtype=torch.float32)
        _, adjoint = finish(grid, g, q, minus, means, means_g, read, centred, unit)
    else:
        dlam = torch.empty_like(lam)
        read, means_g = read_tiles(grid, g, k_stat, None, states, sums, centred, False, grid.state_dtype, q, dlam, unit)
        del states, sums
        dq, adjoint = finish(grid, g, q, lam, means, means_g, read, centred, unit)

    first: tuple[Tensor | None, Tensor | None] = empty_state(grid, k, past.second_moment is not None)
    if centred:
        groups = grid.query_heads // grid.key_heads
        run_sums(grid, adjoint.pulls, grid.sum_offsets, grid.per_sums, d_key_sum, first[1], groups, reverse=True)
    elif first[1] is not None:
        first = (first[0], first[1].zero_() if d_key_sum is None else d_key_sum.clone())
    key_grid = pick_grid("dk", q, k, past, hopper)
    states = adjoint_states(key_grid, q, adjoint.weighted, d_second_moment, first[0])
    dk = dk_tiles(
        key_grid, grid, q, k_stat, None if normalize == "none" else k_rnorm, dk_bar, adjoint, states, d_key_sum, centred
    )  # fmt: skip
    return dq, dk, dlam, *first


def empty_state(grid: Grid, like: Tensor, wanted: bool) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not wanted:
        return None, None
    shape = (grid.sequences, grid.key_heads, grid.size)
    return like.new_empty(*shape, grid.size, dtype=torch.float32), like.new_empty(shape, dtype=torch.float32)


def in_rows(k: Tensor) -> bool:
    """Whether the tokens of all sequences lie equally far apart, each whole: a part of a fused projection, say."""
    batch, length, _, size = k.shape
    return k.stride()[2:] == (size, 1) and (batch == 1 or k.stride(0) == length * k.stride(1))


def contiguous(*tensors: Tensor | None) -> list:
    return [None if x is None else x.contiguous() for x in tensors]
