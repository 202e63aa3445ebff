"""`ccq bench layer`: the paper's per-layer table. fla's layers at the 1.3B shape, alone and with CCQ.

    fla        the layer as fla has it (its Gated DeltaNet normalises q and k, its GLA does not)
    unit       with unit q and k: the control that CCQ is to be set against
    composed   CCQ from fla's ops
    ours       CCQ by this package
    projected  the projected step over a covariance that decays with the memory, by this package

CCQ is put where the layer calls its recurrence, so that all else is fla's own code.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ccq.bench.results import NOTE, graph_time, make_parser, run, wall_time
from ccq.bench.tables import BACKBONES, LAYERS, RANGE, beside, changed, find, noted, quoted, times
from ccq.ops import Gate, clean_query
from ccq.report.collect import Collection
from ccq.report.paper import load
from ccq.report.table import NOT_IN_PAPER, Block, Cell, Row, Table, marks, row_kind
from ccq.systems import SYSTEMS

HIDDEN, HEADS, KEY, VALUE = 2048, 6, 256, 512
RECURRENCES: dict[str, Callable] = {}
VARIANTS = ("fla", "unit", "composed", "ours", "projected")
CLEANED = ("composed", "ours", "projected")
ALONE = {"gla": "unit", "gdn": "fla"}  # with unit q and k; fla's Gated DeltaNet has them
PASSES = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))


def composed(q: Tensor, k: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """CCQ from what fla offers: its linear attention without decay, with the keys as values, and PyTorch around it."""
    from fla.modules.norm.l2norm import l2norm
    from fla.ops.simple_gla import chunk_simple_gla

    q, k = l2norm(q), l2norm(k)
    total = chunk_simple_gla(q, k, k, scale=1.0)[0].float()
    t = torch.arange(1, q.shape[1] + 1, device=q.device, dtype=torch.float32)[:, None, None]
    key_sum = k.float().cumsum(1)
    y = total / t - key_sum * (key_sum * q).sum(-1, keepdim=True) / t.square()
    return (q - lam[..., None] * y).to(q.dtype), k


def ours(q: Tensor, k: Tensor, *lam: Tensor, **how) -> tuple[Tensor, Tensor]:
    """With lam, or with weight and bias of the gate."""
    return clean_query(q, k, Gate(*lam) if len(lam) == 2 else lam[0], backend="triton", **how)[:2]


projected = functools.partial(ours, step="projected")  # over a covariance that forgets, with log_decay


def make_layer(backbone: str, variant: str) -> nn.Module:
    """An fla layer whose recurrence gets q and k through `variant`."""
    import fla.layers.gated_deltanet as gdn
    import fla.layers.gla as gla
    from fla.modules.norm.l2norm import l2norm

    torch.manual_seed(0)
    module, name = (gla, "chunk_gla") if backbone == "gla" else (gdn, "chunk_gated_delta_rule")
    if backbone == "gla":
        layer: nn.Module = gla.GatedLinearAttention(
            hidden_size=HIDDEN, expand_k=HEADS * KEY / HIDDEN, expand_v=HEADS * VALUE / HIDDEN, num_heads=HEADS
        )
    else:
        layer = gdn.GatedDeltaNet(hidden_size=HIDDEN, head_dim=KEY, num_heads=HEADS, expand_v=VALUE / KEY)
    layer = layer.cuda().bfloat16()
    recurrence = RECURRENCES.setdefault(name, getattr(module, name))  # fla's own, whatever an earlier layer put there
    linear = nn.Linear(HEADS * KEY, HEADS, device="cuda") if variant in CLEANED else None  # fp32
    layer.add_module("ccq_gate", linear)

    def read(q: Tensor, k: Tensor, **rest):
        if variant == "unit" and backbone == "gla":
            q, k = l2norm(q), l2norm(k)
        elif linear is not None:
            if variant == "composed":
                q, k = composed(q, k, linear(q.flatten(2).float()).sigmoid())
            elif variant == "ours":
                q, k = ours(q, k, linear.weight, linear.bias)
            else:
                with torch.no_grad():
                    g = rest["g"].float()
                    if backbone == "gdn":  # fla makes the decay in its kernel
                        g = -rest["A_log"].float().exp() * nn.functional.softplus(g + rest["dt_bias"])
                q, k = projected(q, k, linear.weight, linear.bias, log_decay=g.mean(-1) if g.ndim == 4 else g)
            if backbone == "gdn":
                rest["use_qk_l2norm_in_kernel"] = False
        return recurrence(q=q, k=k, **rest)

    layer.register_forward_pre_hook(lambda *_: setattr(module, name, read))
    return layer


def both_passes(function: Callable, leaves: list[Tensor], gradients) -> tuple[Callable, Callable]:
    """A call of the function, and one that also asks for the gradients of what it is given."""

    def forward() -> None:
        with torch.no_grad():
            function(*leaves)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, gradients)

    return forward, both


def calls(layer: nn.Module, length: int, backward: bool) -> Callable[[], None]:
    x = torch.randn(1, length, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    g = torch.randn_like(x)
    return both_passes(lambda x, *_: layer(x)[0], [x, *layer.parameters()], g)[backward]


def peak_memory(call: Callable[[], None]) -> int:
    call()
    torch.cuda.synchronize()
    gc.collect()  # what earlier calls left behind must not be freed in the middle of this one
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(args) -> Iterator[dict]:
    for backbone in args.backbones.split(","):
        for variant in args.variants.split(","):
            if (backbone, variant) == ("gdn", "unit"):
                continue  # fla's Gated DeltaNet is that
            layer = make_layer(backbone, variant)
            for name, length in PASSES:
                call = calls(layer, length, name != "forward")
                yield {
                    "backbone": backbone, "variant": variant, "B": 1, "T": length, "dtype": "bfloat16", "pass": name,
                    "graph_ms": graph_time(call, inner=3), "wall_ms": wall_time(call),
                    "peak_bytes": peak_memory(call),
                }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = {"backbones": ",".join(BACKBONES), "variants": ",".join(VARIANTS), "note": NOTE}
    args = make_parser("layer", __doc__, **options).parse_args(argv)

    def control(row: dict) -> dict:
        alone = ALONE[row["backbone"]] if row["variant"] != "fla" else "fla"
        return {"backbone": row["backbone"], "variant": alone, "T": row["T"], "pass": row["pass"]}

    title = "a layer at the 1.3B shape, beside the backbone with unit q and k"
    shape = {"hidden": HIDDEN, "heads": HEADS, "key": KEY, "value": VALUE}
    return run(args, title, measured(args), control, shape=shape)


def heading(name: str, length: int) -> str:
    return f"{name}, {length // 1024}K"


def tables(found: Collection) -> list[Table]:
    """The paper's per-layer table, with what was measured here beside it."""
    sources = found.of("bench", "layer")
    rows = []
    for backbone, variant in ((b, v) for b in BACKBONES for v in VARIANTS if (b, v) != ("gdn", "unit")):
        if variant == "projected" and find(sources, backbone=backbone, variant=variant) is None:
            continue  # not in the paper, and not run
        name = LAYERS.get((backbone, variant), LAYERS[backbone, "ours"])
        alone, ratio = {"variant": ALONE[backbone]}, times if variant in CLEANED else None
        milliseconds = changed("graph_ms", ".2f", ratio=ratio)
        gigabytes = changed("peak_bytes", ".2f", 2**-30, " GiB", ratio)
        line = []
        for column, length in PASSES:
            at = {"backbone": backbone, "variant": variant, "T": length, "pass": column}
            known = variant in ("fla", "unit", "ours")
            told = quoted("layer", name, heading(column, length), BACKBONES[backbone]) if known else NOT_IN_PAPER
            line += [told, beside(sources, milliseconds, alone, **at)]
        line.append(beside(sources, gigabytes, alone, **at | {"pass": PASSES[0][0], "T": PASSES[0][1]}))
        composed = variant == "composed"
        label = SYSTEMS[name].label + (", composed from fla" if composed else "")
        rows.append(Row(Cell(label), line, "" if composed else row_kind(name)))
    notes = []
    if sources:
        notes.append(
            f"Here: CUDA-graph time of one GPU, the median; in brackets over the backbone with unit q and k"
            f"{noted(sources)}. {marks(sources)} The paper's is wall clock on one H200, its ratios over GLA without "
            "unit q and k."
        )
        notes.append(RANGE)
    paper = load().tables["layer"]
    head = ["one layer, ms", *(part for c in paper.columns for part in (f"{c.heading}, paper", "here")), "peak memory"]
    return [Table("layer", f"{paper.title} ({paper.label})", head, [Block("", rows)], notes)]
