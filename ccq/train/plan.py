"""`ccq plan RECIPE --gpus 8`: memory, speed and time of a run before it is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ccq.bench.results import OWN, SHIPPED
from ccq.files import read_json
from ccq.model.info import ACTIVATION_BYTES, Info, info, size
from ccq.model.loss import LOGITS
from ccq.report.paper import numbers_of
from ccq.train import RunError
from ccq.train.command import parse, recipe_parser
from ccq.train.config import Config, model_config
from ccq.train.data import accumulation

BUDGETS = (15e9, 40e9)  # the paper's, at 500M and 1.3B
REFERENCE = "gla"  # whose speed stands for systems that nobody measured, at equal FLOP/s
NODE = 8  # GPUs that NVLink joins
# bytes/s that a GPU sends: half of NVLink's 900 GB/s both ways together, and 400 Gbit/s between nodes
LINK = {"within a node": 450e9, "between nodes": 50e9}


@dataclass(frozen=True)
class Speed:
    """Tokens/s of one GPU, and where the number is from."""

    rate: float
    source: str


@dataclass(frozen=True)
class Plan:
    config: Config
    gpus: int
    weights: float  # bytes a GPU: masters, gradients, moments, and what is computed with
    activations: float  # bytes a GPU, of a micro-batch
    speed: Speed
    rate: float  # tokens/s of all GPUs
    bound: str  # by what

    @property
    def memory(self) -> float:
        return self.weights + self.activations

    def days(self, tokens: float) -> float:
        return tokens / self.rate / 86400

    def gpu_hours(self, tokens: float) -> float:
        return self.gpus * tokens / self.rate / 3600


def plan(name: str, config: Config, gpus: int) -> Plan:
    """The plan of the recipe called `name`, with `config` as it was changed."""
    accumulate = accumulation(config, gpus)
    length = config.data.length if config.data.source == "tokens" else max(s[0] for s in config.data.slices)
    micro = config.data.batch // gpus // accumulate * length  # tokens
    model = info(model_config(config.model), length)
    speed = speed_of(name, config, model, length)
    compute = micro / speed.rate
    wait, where = (0.0, "") if gpus == 1 else communication(model, gpus)
    return Plan(
        config, gpus,
        weights=weight_bytes(model, config, gpus),
        activations=activation_bytes(model, config, micro),
        speed=speed,
        rate=gpus * micro / max(compute, wait),
        bound="computation" if compute >= wait else f"communication {where}",
    )  # fmt: skip


def weight_bytes(model: Info, config: Config, gpus: int) -> float:
    """fp32 weights, gradients and two moments, shared by the GPUs; and what is computed with, in bf16.

    One GPU keeps bf16 copies of all weights. Of many, each has the embedding and head whole, and two layers (one that
    is computed with, one on its way) with their gradients.
    """
    parameters = model.body + model.embedding
    full = 16.0 * parameters / gpus
    if gpus == 1:
        return full + (2.0 * parameters if config.dtype == "bf16" else 0.0)
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


def communication(model: Info, gpus: int) -> tuple[float, str]:
    """Seconds of FSDP a micro-batch, all of which may hide behind the computation: two gathers, one sum in fp32."""
    where = "within a node" if gpus <= NODE else "between nodes"
    return (model.body + model.embedding) * (2 + 2 + 4) * (gpus - 1) / gpus / LINK[where], where


def measured() -> dict[tuple[str, str, int], Speed]:
    """By system, size and length, from results of `ccq bench train`: the user's own, then those that ship."""
    found = {}
    for path in (*sorted(SHIPPED.glob("train_*.json")), *sorted(OWN.glob("train_*.json"))):
        result = read_json(path, RunError, "a result of `ccq bench train`")
        for row in result["rows"]:
            key = (row["system"].replace("_", "-"), row["size"], row["length"])  # recipes, in older files
            found[key] = Speed(row["tokens_per_second"], f"measured on one {result.get('gpu', 'GPU')} ({path.name})")
    return found


def speed_of(name: str, config: Config, model: Info, length: int) -> Speed:
    """Measured here, else the paper's, else that of GLA-1.3B at the same FLOP/s."""
    from ccq.recipes import recipe

    made = recipe(name.replace("-", "_"))
    system, scale = made.identity.system, made.identity.size
    here = measured()
    same = made.model == config.model
    if same and (system, scale, length) in here:
        return here[system, scale, length]
    paper = {name: rate for name in (system, REFERENCE) for rate in numbers_of("training", name)[:1] if rate}
    if same and scale == "1.3b" and system in paper and length == 4096:
        return Speed(paper[system], "the paper's, a GPU of eight H200 with FSDP")
    other = here.get((REFERENCE, "1.3b", 4096), Speed(paper[REFERENCE], "the paper's"))
    known = info(model_config(recipe(f"{REFERENCE}_1.3b").model), 4096)
    return Speed(
        other.rate * known.train_flops / model.train_flops,
        f"a guess: as many FLOP/s as GLA-1.3B ({other.source}), on the same GPU",
    )


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("plan", (__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8, help="in all (default: %(default)s); more than 8 are nodes")
    options, config = parse(parser, argv)
    if options.gpus < 1:
        parser.error(f"--gpus: expected at least 1, got {options.gpus}")
    for line in describe(plan(options.recipe, config, options.gpus)):
        print(line)
    return 0


def describe(found: Plan) -> list[str]:
    config = found.config
    length = config.data.length if config.data.source == "tokens" else max(s[0] for s in config.data.slices)
    own = config.steps * config.data.batch * length
    lines = [
        f"{found.gpus} GPUs, {config.data.batch} x {length:,} tokens a step in {accumulation(config, found.gpus)} "
        "micro-batches a GPU",
        f"memory a GPU    {size(found.memory)}: weights and optimizer {size(found.weights)}, activations "
        f"{size(found.activations)} (an estimate)",
        f"tokens/s a GPU  {found.speed.rate:,.0f}: {found.speed.source}",
        f"tokens/s        {found.rate:,.0f}, bound by {found.bound}",
    ]
    budgets = [budget for budget in BUDGETS if abs(budget / own - 1) > 0.01]
    for tokens, what in ((own, " (this recipe)"), *((budget, "") for budget in budgets)):
        days, hours = found.days(tokens), found.gpu_hours(tokens)
        lines.append(f"{tokens / 1e9:,.4g}B tokens{what}: {days:,.2f} days, {hours:,.0f} GPU-hours")
    return lines
