"""`ccq plan RECIPE --gpus 8 --gpu A100`: estimate memory, speed and time of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ccq.bench.results import OWN, SHIPPED
from ccq.files import read_json
from ccq.model.info import ACTIVATION_BYTES, Info, info, size
from ccq.model.loss import LOGITS
from ccq.names import plural, positive
from ccq.recipes import recipe
from ccq.report.paper import numbers_of
from ccq.report.table import human
from ccq.train import RunError
from ccq.train.command import parse, recipe_parser
from ccq.train.config import Config, model_config
from ccq.train.data import accumulation, longest
from ccq.train.gpus import GPUS, named

BUDGETS = (15e9, 40e9)  # the paper's, at 500M and 1.3B
REFERENCE = "gla"  # whose speed stands for systems that nobody measured, at equal FLOP/s
SHORTEST = 1e-3  # seconds of a micro-batch: a smaller model is not faster, its kernels wait to be launched
MEASURED = "H200"  # the GPU that the paper and what ships were measured on
NODE = 8  # GPUs of a node
NETWORK = 50e9  # bytes/s that a GPU sends to other nodes: 400 Gbit/s


@dataclass(frozen=True)
class Speed:
    """Tokens/s of one GPU, and where the number is from."""

    rate: float
    source: str


@dataclass(frozen=True)
class Plan:
    config: Config
    gpus: int
    gpu: str  # of GPUS
    weights: float  # bytes a GPU: masters, gradients, moments, and what is computed with
    activations: float  # bytes a GPU, of a micro-batch
    speed: Speed
    rate: float  # tokens/s of all GPUs
    bound: str  # by what

    @property
    def memory(self) -> float:
        return self.weights + self.activations


def plan(name: str, config: Config, gpus: int, gpu: str | None = None) -> Plan:
    """The plan of the recipe called `name`, with `config` as it was changed; no `gpu` is what was measured."""
    accumulate = accumulation(config, gpus)
    length = longest(config)
    micro = config.data.batch // gpus // accumulate * length  # tokens
    model = info(model_config(config.model), length)
    speed = speed_of(name, config, model, length, gpu)
    compute = max(micro / speed.rate, SHORTEST)
    wait, where = (0.0, "") if gpus == 1 else communication(model, gpus, gpu or MEASURED)
    return Plan(
        config, gpus, gpu or named(speed.source) or MEASURED,
        weights=weight_bytes(model, config, gpus),
        activations=activation_bytes(model, config, micro),
        speed=speed,
        rate=gpus * micro / max(compute, wait),
        bound=f"communication {where}" if compute < wait else "computation" if compute > SHORTEST else "launches",
    )  # fmt: skip


def weight_bytes(model: Info, config: Config, gpus: int) -> float:
    """fp32 weights, gradients and two moments, shared by the GPUs; and what is computed with, in bf16.

    One GPU keeps bf16 copies of all weights, and bf16 gradients where no micro-batches add up. Of many,
    each has the embedding and head whole, and two layers (one that is computed with, one on its way) with their
    gradients.
    """
    parameters = model.body + model.embedding
    full = 16.0 * parameters / gpus
    if gpus == 1:
        return full + (2.0 * parameters if config.dtype == "bf16" and accumulation(config, 1) > 1 else 0.0)
    width = 2.0 if config.dtype == "bf16" else 4.0
    layer = model.body / model.config.num_hidden_layers
    return full + width * (2 * model.embedding + 2 * 2 * layer)


def activation_bytes(model: Info, config: Config, tokens: int) -> float:
    """What a micro-batch leaves for its backward, and a chunk of logits."""
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    each = model.activation_bytes
    if config.runtime.activation_checkpointing:
        each = each / layers + ACTIVATION_BYTES * hidden * layers
    logits = 2.0 * min(LOGITS["cuda"], tokens * model.config.vocab_size)
    return tokens * each * (1 if config.dtype == "bf16" else 2) + logits


def communication(model: Info, gpus: int, gpu: str) -> tuple[float, str]:
    """Seconds of FSDP a micro-batch, all of which may hide behind the computation: two gathers, one sum in fp32."""
    where, speed = ("within a node", GPUS[gpu].link) if gpus <= NODE else ("between nodes", NETWORK)
    return (model.body + model.embedding) * (2 + 2 + 4) * (gpus - 1) / gpus / speed, where


def measured(gpu: str | None) -> dict[tuple[str, str, int], Speed]:
    """By system, size and length: results of `ccq bench train` on this GPU, the user's own before those that ship."""
    found = {}
    for path in (*sorted(SHIPPED.glob("train_*.json")), *sorted(OWN.glob("train_*.json"))):
        result = read_json(path, RunError, "a result of `ccq bench train`")
        if gpu not in (None, named(result.get("gpu", ""))):
            continue
        for row in result["rows"]:
            key = (row["system"].replace("_", "-"), row["size"], row["length"])  # recipes, in older files
            found[key] = Speed(row["tokens_per_second"], f"measured on one {result.get('gpu', 'GPU')} ({path.name})")
    return found


def speed_of(name: str, config: Config, model: Info, length: int, gpu: str | None) -> Speed:
    """Measured here, else the paper's, else that of GLA-1.3B at the same FLOP/s, or share of them on another GPU."""
    made = recipe(name.replace("-", "_"))
    system, scale = made.identity.system, made.identity.size
    here = measured(gpu)
    same = made.model == config.model
    if same and (system, scale, length) in here:
        return here[system, scale, length]
    paper = {name: rate for name in (system, REFERENCE) for rate in numbers_of("training", name)[:1] if rate}
    if same and scale == "1.3b" and system in paper and length == 4096 and gpu in (None, MEASURED):
        return Speed(paper[system], f"the paper's, a GPU of eight {MEASURED} with FSDP")
    key = (REFERENCE, "1.3b", 4096)
    known = gpu in (None, MEASURED) or key in here
    other = (here if known else measured(MEASURED)).get(key, Speed(paper[REFERENCE], "the paper's"))
    flops = other.rate * info(model_config(recipe(f"{REFERENCE}_1.3b").model), 4096).train_flops
    if gpu is None or known:
        told = f"a guess: as many FLOP/s as GLA-1.3B ({other.source}), on the same GPU; small models reach less"
        return Speed(flops / model.train_flops, told)
    share = flops / GPUS[MEASURED].peak
    return Speed(
        share * GPUS[gpu].peak / model.train_flops,
        f"an estimate, nothing is measured on {gpu}: {share:.0%} of the {GPUS[gpu].peak / 1e12:,.0f} TFLOP/s of its "
        f"data sheet, the share that GLA-1.3B reaches on {MEASURED}; `ccq bench train` measures",
    )


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("plan", (__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=positive, default=8, help="GPUs (default: %(default)s); over 8: several nodes")
    known = f"{', '.join(GPUS)} (default: your own results of `ccq bench train`, else {MEASURED})"
    parser.add_argument("--gpu", type=str.upper, choices=tuple(GPUS), metavar="GPU", help=known)
    options, config = parse(parser, argv)
    if config.foreign:
        raise RunError("--init: memory and speed of a model of transformers are not estimated")
    for line in describe(plan(options.recipe, config, options.gpus, options.gpu)):
        print(line)
    return 0


def span(seconds: float) -> str:
    """
    >>> span(4.2), span(400), span(9000), span(2e6)
    ('4.2 seconds', '6.7 minutes', '2.5 hours', '23.1 days')
    """
    for unit, scale in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= (2 * scale if unit != "minutes" else scale):
            return f"{seconds / scale:,.1f} {unit}"
    return f"{seconds:.1f} seconds"


def describe(found: Plan) -> list[str]:
    config = found.config
    length = longest(config)
    fits = found.memory < GPUS[found.gpu].memory
    own = config.steps * config.data.batch * length
    lines = [
        f"{found.gpus} x {found.gpu}, {config.data.batch} x {length:,} tokens a step in "
        f"{plural(accumulation(config, found.gpus), 'micro-batch', 'micro-batches')} a GPU",
        f"memory a GPU    {size(found.memory)} of {size(GPUS[found.gpu].memory)}: weights and optimizer "
        f"{size(found.weights)}, activations {size(found.activations)} (an estimate)"
        + ("" if fits else "; it does not fit: --runtime.micro-batch smaller, or --runtime.activation-checkpointing"),
        f"tokens/s a GPU  {found.speed.rate:,.0f}: {found.speed.source}",
        f"tokens/s        {found.rate:,.0f}, bound by {found.bound}",
    ]
    budgets = [budget for budget in BUDGETS if abs(budget / own - 1) > 0.01 and config.data.source == "tokens"]
    for tokens, what in ((own, " (this recipe)"), *((budget, "") for budget in budgets)):
        seconds = tokens / found.rate
        hours = found.gpus * seconds / 3600
        each = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
        lines.append(f"{human(tokens)} tokens{what}: {span(seconds)}, {each} GPU-hours")
    return lines
