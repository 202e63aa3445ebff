"""Kernels and layers alone on a GPU, beside the backbone and a lower bound that is measured in the same run:

    ccq bench layer        # the paper's per-layer table: fla's layers, alone and with CCQ
    ccq bench op           # the operator, beside the same composed of fla's ops (--composed)
    ccq bench decode-op    # one token of a layer's state, with and without cleaning

layer:
    fla        the layer as fla has it (its Gated DeltaNet normalises q and k, its GLA does not)
    unit       with unit q and k: the control that CCQ is to be set against
    composed   CCQ from fla's ops
    ours       CCQ by this package
    projected  the projected step over a covariance that decays with the memory, by this package
CCQ is put where the layer calls its recurrence, so that all else is fla's own code.

op: the floor is the larger of two times: the FLOPs that the chunkwise algorithm needs over the rate of a large bf16
product, and the bytes that must move (q, k, lam in, q_clean, k_bar out, and the same again with gradients) over the
bandwidth of a large elementwise kernel.

decode-op:
    fla        fla's fused recurrent kernel, which writes its states to new memory
    unit       `decode_step` with unit q and k and no cleaning: the backbone's own update and read
    ours       `decode_step` with gate and cleaning
    projected  the same with the projected step, the covariance decaying with the memory

Its floor is the states' bytes, read once and written once (of the covariance the lower triangle), over that bandwidth.
Each call works on one of several copies of the states, so that none is found in the cache.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ccq.bench.results import NOTE, graph_time, make_parser, run, wall_time
from ccq.bench.tables import BACKBONES, LAYERS, RANGE, beside, changed, find, newest, noted, quoted, timed
from ccq.ops import Cleaning, CovarianceState, Gate, clean_query, decode_step
from ccq.report.collect import Collection
from ccq.report.paper import load
from ccq.report.table import NOT_IN_PAPER, NOT_RUN, Block, Cell, Row, Table, marks, row_kind
from ccq.systems import SYSTEMS

VARIANTS = ("fla", "unit", "composed", "ours", "projected")
WITH_CCQ = ("composed", "ours", "projected")
ALONE = {"gla": "unit", "gdn": "fla"}  # with unit q and k; fla's Gated DeltaNet has them
LAYER_PASSES = (("forward and backward", 4096), ("forward", 4096), ("forward", 8192))
SHAPE = {"hidden": 2048, "heads": 6, "key": 256, "value": 512}  # the paper's
RECURRENCES: dict[str, Callable] = {}
PASSES = ("forward", "forward and backward")
CHUNK = 64  # of the FLOP count: the least that a product's tile allows


def both_passes(function: Callable, leaves: list[Tensor], gradients) -> tuple[Callable, Callable]:
    """A call of the function, and one that also asks for the gradients of what it is given."""

    def forward() -> None:
        with torch.no_grad():
            function(*leaves)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, gradients)

    return forward, both


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


def make_layer(backbone: str, variant: str, hidden: int, heads: int, key: int, value: int) -> nn.Module:
    """An fla layer whose recurrence gets q and k through `variant`."""
    import fla.layers.gated_deltanet as gdn
    import fla.layers.gla as gla
    from fla.modules.norm.l2norm import l2norm

    torch.manual_seed(0)
    module, name = (gla, "chunk_gla") if backbone == "gla" else (gdn, "chunk_gated_delta_rule")
    if backbone == "gla":
        layer: nn.Module = gla.GatedLinearAttention(
            hidden_size=hidden, expand_k=heads * key / hidden, expand_v=heads * value / hidden, num_heads=heads
        )
    else:
        layer = gdn.GatedDeltaNet(hidden_size=hidden, head_dim=key, num_heads=heads, expand_v=value / key)
    layer = layer.cuda().bfloat16()
    recurrence = RECURRENCES.setdefault(name, getattr(module, name))  # fla's own, whatever an earlier layer put there
    linear = nn.Linear(heads * key, heads, device="cuda") if variant in WITH_CCQ else None  # fp32
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


def calls_of_layer(layer: nn.Module, length: int, hidden: int, backward: bool) -> Callable[[], None]:
    x = torch.randn(1, length, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=backward)
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


def measured_layers(args, shape: dict[str, int]) -> Iterator[dict]:
    for backbone in args.backbones.split(","):
        for variant in args.variants.split(","):
            if (backbone, variant) == ("gdn", "unit"):
                continue  # fla's Gated DeltaNet is that
            layer = make_layer(backbone, variant, **shape)
            for name, length in LAYER_PASSES:
                call = calls_of_layer(layer, length, shape["hidden"], name != "forward")
                yield {
                    "backbone": backbone, "variant": variant, "B": 1, "T": length, "dtype": "bfloat16", "pass": name,
                    "graph_ms": graph_time(call, inner=3), "wall_ms": wall_time(call),
                    "peak_bytes": peak_memory(call),
                }  # fmt: skip


def bench_layer(argv: Sequence[str]) -> None:
    options = {"backbones": ",".join(BACKBONES), "variants": ",".join(VARIANTS), "note": NOTE}
    sizes = {name: (size, "default: %(default)s, the paper's") for name, size in SHAPE.items()}
    args = make_parser("layer", "Layers of fla, alone and with CCQ.", **options, **sizes).parse_args(argv)

    def control(row: dict) -> dict:
        alone = ALONE[row["backbone"]] if row["variant"] != "fla" else "fla"
        return {"backbone": row["backbone"], "variant": alone, "T": row["T"], "pass": row["pass"]}

    shape = {name: getattr(args, name) for name in SHAPE}
    title = "a layer, beside the backbone with unit q and k"
    run(args, title, measured_layers(args, shape), control, shape=shape)


def times(ratio: float) -> str:
    return f"{ratio:.2f}×"


def papers(system: str, backbone: str, heading: str) -> Cell:
    """A cell of the paper's table of layers; with CCQ over the backbone, in brackets."""
    cell, values = quoted("layer", system, heading), load().tables["layer"].value
    one, two = (values("1.3b", name, heading) for name in (system, backbone))
    return replace(cell, text=f"{cell.text} ({times(one / two)})") if one and two and system != backbone else cell


def heading(name: str, length: int) -> str:
    return f"{name}, {length // 1024}K"


def layer_tables(found: Collection) -> list[Table]:
    """The paper's per-layer table, with what was measured here beside it."""
    sources = [source for source in found.of("bench", "layer") if source.content["shape"] == SHAPE]
    rows = []
    for backbone, variant in ((b, v) for b in BACKBONES for v in VARIANTS if (b, v) != ("gdn", "unit")):
        if variant == "projected" and find(sources, backbone=backbone, variant=variant) is None:
            continue  # not in the paper, and not run
        name = LAYERS.get((backbone, variant), LAYERS[backbone, "ours"])
        alone, ratio = {"variant": ALONE[backbone]}, times if variant in WITH_CCQ else None
        milliseconds = changed("graph_ms", ".2f", ratio=ratio)
        gigabytes = changed("peak_bytes", ".2f", 2**-30, " GiB", ratio)
        line = []
        for column, length in LAYER_PASSES:
            at = {"backbone": backbone, "variant": variant, "T": length, "pass": column}
            known = variant in ("fla", "unit", "ours")
            told = papers(name, BACKBONES[backbone], heading(column, length)) if known else NOT_IN_PAPER
            line += [told, beside(sources, milliseconds, alone, **at)]
        line.append(beside(sources, gigabytes, alone, **at | {"pass": LAYER_PASSES[0][0], "T": LAYER_PASSES[0][1]}))
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


def floor_seconds(tokens: int, size: int, backward: bool, ceilings: dict[str, float]) -> float:
    """FLOPs: k k^T below the diagonal and a read of it, scores and their sum over half a chunk; three times with
    backward."""
    flop = (size * size + 2 * size * size + 2 * CHUNK * size) * (3 if backward else 1)
    moved = 2 * size * (9 if backward else 4) + 4
    return tokens * max(flop / ceilings["flop_per_s"], moved / ceilings["byte_per_s"])


def measure_ceilings() -> dict[str, float]:
    """FLOP/s of a large bf16 product and bytes/s (read and written) of a large elementwise kernel."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    return {
        "flop_per_s": 2 * 8192**3 / (1e-3 * graph_time(lambda: a @ b, inner=3)["median"]),
        "byte_per_s": 2 * x.nbytes / (1e-3 * graph_time(lambda: torch.add(x, 1.0, out=y), inner=3)["median"]),
    }


FUNCTIONS: dict[str, Callable] = {
    "ours": ours, "with gate": ours, "projected, decayed": projected, "composed": composed
}  # fmt: skip


def borders(length: int, document: int) -> Tensor:
    """Of documents of half to one and a half times `document` tokens, packed into `length`."""
    generator = torch.Generator().manual_seed(0)
    ends, end = [0], 0
    while end < length:
        end = min(length, end + int(torch.randint(document // 2, 3 * document // 2, (), generator=generator)))
        ends.append(end)
    return torch.tensor(ends, device="cuda")


def calls(name: str, batch: int, length: int, heads: int, size: int, document: int = 0) -> tuple[Callable, Callable]:
    """Forward, and forward with backward, of one of FUNCTIONS on fixed inputs; of packed documents, if given."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, length, heads, size)
    q, k, g, h = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4))
    lam = [torch.rand(shape[:-1], device="cuda", generator=generator)]
    if name in ("with gate", "projected, decayed"):
        lam = [torch.randn(heads, heads * size, device="cuda") / size, torch.zeros(heads, device="cuda")]
    function = FUNCTIONS[name]
    if name == "projected, decayed":  # the backbone's decay, which gets no gradient from here
        log_decay = torch.nn.functional.logsigmoid(torch.randn(shape[:-1], device="cuda", generator=generator) + 4)
        function = functools.partial(function, log_decay=log_decay)
    if document:
        function = functools.partial(function, cu_seqlens=borders(length, document))
    return both_passes(function, [x.requires_grad_() for x in (q, k, *lam)], [g, h])


def operators(args, ceilings: dict[str, float]) -> Iterator[dict]:
    for shape in args.shapes.split(","):
        batch, length = map(int, shape.split("x"))
        for name in FUNCTIONS if args.composed else list(FUNCTIONS)[:-1]:
            how = (batch, length, args.heads, args.key_size, args.packed)
            for backward, call in enumerate(calls(name, *how)):
                floor = floor_seconds(batch * length * args.heads, args.key_size, bool(backward), ceilings)
                yield {
                    "name": name, "pass": PASSES[backward], "B": batch, "T": length, "H": args.heads,
                    "K": args.key_size, "dtype": "bfloat16", "ms": graph_time(call, inner=3),
                    "floor_ms": 1e3 * floor, **({"packed": args.packed} if args.packed else {}),
                }  # fmt: skip


def bench_op(argv: Sequence[str]) -> None:
    shapes = ("1x4096,8x4096,1x8192,1x65536", "BxT, ... (%(default)s)")
    also = (False, "also the one composed from fla's ops")
    packed = (0, "tokens of a document on average, packed into one row (default: not packed)")
    options = {"shapes": shapes, "heads": 6, "key_size": 256, "composed": also, "packed": packed, "note": NOTE}
    parser = make_parser("op", "The operator alone, beside a lower bound.", **options)
    args = parser.parse_args(argv)
    if args.packed and (args.composed or any(not shape.startswith("1x") for shape in args.shapes.split(","))):
        parser.error("--packed: expected shapes of one row, as 1x32768, and no --composed")
    rates = measure_ceilings()
    title = f"milliseconds; floor at {rates['flop_per_s'] / 1e12:.0f} TFLOP/s, {rates['byte_per_s'] / 1e12:.2f} TB/s"
    run(args, title, operators(args, rates), timing="CUDA graph", ceilings=rates)


def op_tables(found: Collection) -> list[Table]:
    """The cleaning alone, of the newest file."""
    source = newest(found, "op")
    if source is None:
        return []
    beside = {"projected, decayed": "projected, decayed, gate", "composed": "composed from fla"}
    measured = {r["name"] for r in source.content["rows"]}
    beside = {name: heading for name, heading in beside.items() if name in measured}
    rows = []
    for batch, length in dict.fromkeys((r["B"], r["T"]) for r in source.content["rows"]):
        here = {(r["name"], r["pass"]): r for r in source.content["rows"] if (r["B"], r["T"]) == (batch, length)}
        times = {key: changed("ms", scale=1e3)(row, None) for key, row in here.items()}
        shown = (("ours", PASSES[0]), ("with gate", PASSES[0]), ("ours", PASSES[1]))
        cells = [timed(*times[key], source) if key in times else NOT_RUN for key in shown]
        for name in beside:
            both = [times[name, which][0] for which in PASSES if (name, which) in times]
            cells.append(timed(", ".join(both), "", source) if both else NOT_RUN)
        floors = [1e3 * here["ours", which]["floor_ms"] for which in PASSES]
        cells.append(timed(", ".join(f"{floor:.0f}" for floor in floors), "", source))
        rows.append(Row(Cell(f"batch {batch}, {length:,} tokens"), cells))
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}, {first['dtype']}{noted([source])}. Two "
        "numbers: forward, forward and backward. The floor is the larger of the FLOPs over the rate of a large "
        f"product, and the bytes over the bandwidth of a large copy. {marks([source])}",
        RANGE,
    ]
    head = ["cleaning alone, µs", "forward", "with the gate", "forward and backward", *beside.values(), "floor"]
    return [Table("op", "Cleaning alone, microseconds (not in the paper)", head, [Block("", rows)], notes)]


STEPS = ("fla", "unit", "ours", "projected")
CACHE = 60 * 2**20  # bytes of an H200's L2


class Layer:
    """Inputs of one token and `copies` of the states of one layer."""

    def __init__(self, backbone: str, batch: int, heads: int, key: int, value: int):
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        self.backbone = backbone
        self.q, self.k, self.v = normal(batch, heads, key), normal(batch, heads, key), normal(batch, heads, value)
        decay = (batch, heads, key) if backbone == "gla" else (batch, heads)
        self.g = torch.nn.functional.logsigmoid(normal(*decay, dtype=torch.float32))
        self.beta = None if backbone == "gla" else normal(batch, heads).sigmoid()
        self.gate = (normal(heads, heads * key, dtype=torch.float32) / 50, torch.full((heads,), -4.6, device="cuda"))
        recurrent = 4 * batch * heads * key * value
        self.copies = max(2, -(-2 * CACHE // recurrent))
        self.states = [
            (
                torch.zeros(batch, heads, key, value, device="cuda"),
                CovarianceState.zeros(batch, heads, key, device="cuda"),
                CovarianceState.zeros(batch, heads, key, device="cuda", decayed=True),
            )
            for _ in range(self.copies)
        ]
        self.turn = itertools.cycle(self.states)

    def bytes(self, cleaned: bool) -> int:
        """What must move: the states in and out, of the symmetric C_t one triangle."""
        recurrent, covariance, _ = self.states[0]
        size = self.q.shape[-1]
        triangle = covariance.second_moment.nbytes * (size + 1) / (2 * size)
        return int(2 * (recurrent.nbytes + (triangle + covariance.key_sum.nbytes if cleaned else 0)))

    def step(self, variant: str) -> torch.Tensor:
        recurrent, covariance, decayed = next(self.turn)
        if variant == "fla":
            return self.fla(recurrent)
        cleaning = None
        if variant == "ours":
            cleaning = Cleaning(covariance, gate=self.gate)
        elif variant == "projected":
            cleaning = Cleaning(decayed, gate=self.gate, step="projected", log_decay=self.g)
        return decode_step(self.q, self.k, self.v, recurrent, self.g, self.beta, unit_qk=True, cleaning=cleaning)

    def fla(self, recurrent: torch.Tensor) -> torch.Tensor:
        """fla's kernel at T = 1, with its own normalisation for Gated DeltaNet."""
        from fla.modules.norm.l2norm import l2norm
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.gla import fused_recurrent_gla

        q, k, v, g = (x.unsqueeze(1) for x in (self.q, self.k, self.v, self.g))
        start = {"initial_state": recurrent, "output_final_state": True}
        if self.beta is None:
            return fused_recurrent_gla(l2norm(q), l2norm(k), v, g, **start)
        beta = self.beta.unsqueeze(1)
        return fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, use_qk_l2norm_in_kernel=True, **start)


@torch.no_grad()
def steps(args) -> Iterator[dict]:
    for backbone in args.backbones.split(","):
        for batch in map(int, args.batches.split(",")):
            layer = Layer(backbone, batch, args.heads, args.key_size, args.value_size)
            for variant in args.variants.split(","):
                timing = graph_time(functools.partial(layer.step, variant), inner=4 * layer.copies, repeats=20)
                moved = layer.bytes(variant in ("ours", "projected"))
                yield {
                    "backbone": backbone, "variant": variant, "B": batch, "H": args.heads, "K": args.key_size,
                    "V": args.value_size, "dtype": "bfloat16", "ms": timing, "bytes": moved,
                    "byte_per_s": moved / (1e-3 * timing["median"]), "copies": layer.copies,
                }  # fmt: skip


def bench_decode_op(argv: Sequence[str]) -> None:
    args = make_parser(
        "decode-op", "One token of a layer's state, with and without cleaning.", backbones=",".join(BACKBONES),
        variants=",".join(STEPS), batches="1,8,32,128", heads=6, key_size=256, value_size=512,
    ).parse_args(argv)  # fmt: skip
    title = "one token of a layer, beside the backbone with unit q and k"
    run(
        args, title, steps(args), lambda row: {"backbone": row["backbone"], "B": row["B"], "variant": "unit"},
        timing="CUDA graph", ceilings=measure_ceilings(),
    )  # fmt: skip


def decode_op_tables(found: Collection) -> list[Table]:
    """A layer's state update and read for one token, of the newest file."""
    source = newest(found, "decode-op")
    if source is None:
        return []
    batches = sorted({r["B"] for r in source.content["rows"]})
    copy = source.content["ceilings"]["byte_per_s"]
    rows = []
    for (backbone, variant), name in LAYERS.items():
        if not any((r["backbone"], r["variant"]) == (backbone, variant) for r in source.content["rows"]):
            continue
        by = {"fla": ", by fla", "unit": ", by ccq"}.get(variant, "")

        def cell(row: dict, unit: dict | None, by: str = by) -> tuple[str, str]:
            text, small = changed("ms", ".1f", 1e3, ratio=None if by else times)(row, unit)
            return f"{text}, {row['byte_per_s'] / copy:.0%}", small

        at = {"backbone": backbone, "variant": variant}
        line = [beside([source], cell, {"variant": "unit"}, **at, B=batch) for batch in batches]
        label = SYSTEMS[SYSTEMS[name].family if by else name].label + by
        rows.append(Row(Cell(label), line, row_kind(name)))
    first = source.content["rows"][0]
    notes = [
        f"CUDA-graph time on one GPU, {first['H']} heads of {first['K']}/{first['V']}, {first['dtype']} inputs, fp32 "
        f"states, none of them in the cache. In brackets: over the backbone by ccq. In percent: of the "
        f"{copy / 1e12:.1f} TB/s at which this GPU copies, counting each state once in and once out. {marks([source])}",
        RANGE,
    ]
    head = ["one token of a layer, µs", *(f"batch {batch}" for batch in batches)]
    title = "One token of a layer, microseconds (not in the paper)"
    return [Table("decode-op", title, head, [Block("", rows)], notes)]
