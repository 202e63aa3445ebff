"""`ccq bench layer`: the paper's per-layer table. fla's layers at the 1.3B shape, alone and with CCQ.

    fla        the layer as fla has it (its Gated DeltaNet normalises q and k, its GLA does not)
    unit       with unit q and k: the control that CCQ is to be set against
    composed   CCQ from fla's ops
    ours       CCQ by this package

CCQ is put where the layer calls its recurrence, so that all else is fla's own code.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ccq.bench import op
from ccq.bench.results import make_parser, write
from ccq.bench.timing import graph_time, wall_time
from ccq.tables import LiveTable

HIDDEN, HEADS, KEY, VALUE = 2048, 6, 256, 512
RECURRENCES: dict[str, Callable] = {}
VARIANTS = ("fla", "unit", "composed", "ours")
# the paper's cells, milliseconds on an H200: fwd+bwd 4K, forward 4K, forward 8K
PAPER = {
    ("gla", "fla"): (2.28, 0.75, 0.96),
    ("gla", "ours"): (3.50, 1.20, 1.37),
    ("gdn", "fla"): (6.26, 1.95, 2.98),
    ("gdn", "ours"): (8.06, 2.24, 3.67),
}


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
    linear = nn.Linear(HEADS * KEY, HEADS, device="cuda") if variant in ("composed", "ours") else None  # fp32
    layer.add_module("ccq_gate", linear)

    def read(q: Tensor, k: Tensor, **rest):
        if variant == "unit" and backbone == "gla":
            q, k = l2norm(q), l2norm(k)
        elif linear is not None:
            if variant == "ours":
                q, k = op.gated(q, k, linear.weight, linear.bias)
            else:
                q, k = op.composed(q, k, linear(q.flatten(2).float()).sigmoid())
            if backbone == "gdn":
                rest["use_qk_l2norm_in_kernel"] = False
        return recurrence(q=q, k=k, **rest)

    def enter(*_: object) -> None:
        setattr(module, name, read)

    layer.register_forward_pre_hook(enter)
    return layer


def calls(layer: nn.Module, length: int, backward: bool) -> Callable[[], None]:
    x = torch.randn(1, length, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
    g = torch.randn_like(x)
    leaves = [x, *layer.parameters()] if backward else []

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def both() -> None:
        torch.autograd.grad(layer(x)[0], leaves, g)

    return both if backward else forward


def peak_memory(call: Callable[[], None]) -> int:
    call()
    torch.cuda.synchronize()
    gc.collect()  # what earlier calls left behind must not be freed in the middle of this one
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("layer", __doc__)
    parser.add_argument("--backbones", default="gla,gdn")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--warm", action="store_true", help="only compile and tune, write nothing")
    parser.add_argument("--note", help="kept in the result file, e.g. how fla was tuned")
    args = parser.parse_args(argv)
    rows = []
    columns = ("layer", "with", "pass", "tokens", "graph ms", "ratio", "wall ms", "ratio", "peak MiB", "ratio",
               "paper ms")  # fmt: skip
    with LiveTable("a layer at the 1.3B shape, batch 1; ratios to the backbone with unit q and k", *columns) as table:
        for backbone in args.backbones.split(","):
            for variant in args.variants.split(","):
                if backbone == "gdn" and variant == "unit":
                    continue  # fla's Gated DeltaNet is that
                layer = make_layer(backbone, variant)
                for column, (backward, length) in enumerate(((True, 4096), (False, 4096), (False, 8192))):
                    call = calls(layer, length, backward)
                    if args.warm:
                        call()
                        torch.cuda.synchronize()
                        continue
                    row: dict = {
                        "backbone": backbone, "variant": variant, "B": 1, "T": length, "dtype": "bfloat16",
                        "pass": "forward and backward" if backward else "forward",
                        "graph_ms": graph_time(call, inner=3)._asdict(), "wall_ms": wall_time(call)._asdict(),
                        "peak_bytes": peak_memory(call),
                        "paper_ms": PAPER.get((backbone, variant), (None, None, None))[column],
                    }  # fmt: skip
                    rows.append(row)
                    control = next(
                        r for r in rows
                        if r["backbone"] == backbone and (r["pass"], r["T"]) == (row["pass"], length)
                        and r["variant"] == ("unit" if backbone == "gla" and variant != "fla" else "fla")
                    )  # fmt: skip
                    graph, wall = row["graph_ms"]["median"], row["wall_ms"]["median"]
                    table.add(
                        backbone, variant, row["pass"], length,
                        f"{graph:.3f}", f"{graph / control['graph_ms']['median']:.3f}",
                        f"{wall:.3f}", f"{wall / control['wall_ms']['median']:.3f}",
                        f"{row['peak_bytes'] / 2**20:.0f}", f"{row['peak_bytes'] / control['peak_bytes']:.3f}",
                        row["paper_ms"] or "-",
                    )  # fmt: skip
    if not args.warm:
        shape = {"hidden": HIDDEN, "heads": HEADS, "key": KEY, "value": VALUE}
        write(args, {"note": args.note, "shape": shape, "rows": rows})
    return 0
