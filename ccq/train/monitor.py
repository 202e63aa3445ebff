"""Looking at a model while it trains: validation, the gate, samples. All ranks take part, for the weights are shared.

B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ccq.data.batches import IGNORE, Batch, Source
from ccq.data.counter import key_of
from ccq.data.recall import Recall
from ccq.mixers import QueryCleaner
from ccq.model import CCQForCausalLM
from ccq.model.loss import exact_logits
from ccq.train.config import Config
from ccq.train.world import World


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def call(model: Any, batch: Batch, device: torch.device, **options: Any) -> Any:
    """The model on a batch: the loss at scored positions, no logits. Borders stay on the host, which looks at them."""
    ids, labels = (x.to(device, non_blocking=True) for x in (batch.input_ids, batch.labels))
    if batch.positions is not None:
        total, scored = model.cross_entropy(at_positions(model, batch), labels.flatten())
        return SimpleNamespace(loss=total / scored.clamp(min=1), scored=scored)
    if isinstance(model, PreTrainedModel) and not isinstance(model, CCQForCausalLM):
        # labels are the next tokens already, which its own loss would shift
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scored = (labels != IGNORE).sum()
        total = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
        return SimpleNamespace(loss=total / scored.clamp(min=1), scored=scored)
    return model(ids, targets=labels, cu_seqlens=batch.cu_seqlens, use_cache=False, **options)


def at_positions(model: Any, batch: Batch) -> Float[Tensor, "BP D"]:
    """What the model knows at the positions of a batch that lies on its device: no logits of others are computed."""
    assert batch.positions is not None
    rows, length = batch.input_ids.shape
    at = batch.positions + torch.arange(rows, device=batch.input_ids.device)[:, None] * length
    hidden = model.model(batch.input_ids, use_cache=False, return_dict=True).last_hidden_state
    return hidden.flatten(0, 1).index_select(0, at.flatten())


def validate(model: Any, config: Config, world: World, source: Source) -> dict[str, float]:
    """Perplexity of windows in their order, or loss and accuracy of recall, over all and by kind of sample."""
    recall, runtime = isinstance(source, Recall), config.runtime
    sums = torch.zeros(len(source.counts), 3, dtype=torch.float64, device=world.device)  # loss, right, scored
    with looking(model):
        most = None if recall else runtime.validate_windows
        for kind, batch in source.in_order(runtime.micro_batch, world.rank, world.size, most):
            out = call(model, batch, world.device, output_hidden_states=recall)
            labels = batch.labels.to(world.device)
            asked = labels != IGNORE
            sums[kind, 0] += out.loss.double() * out.scored
            sums[kind, 2] += asked.sum()
            if recall:
                logits = exact_logits(model.lm_head, out.hidden_states[-1][asked])
                sums[kind, 1] += (logits.argmax(-1) == labels[asked]).sum()
    rows = torch.tensor(world.total(*sums.flatten().tolist()), dtype=torch.float64).view(-1, 3)
    loss, right, scored = rows.sum(0).tolist()
    mean = loss / max(scored, 1)
    if not isinstance(source, Recall):
        return {"valid_loss": mean, "valid_perplexity": math.exp(min(mean, 700.0))}
    by_slice = {
        f"valid_accuracy_{s.length}x{s.pairs}": (row[1] / row[2]).item()
        for s, row in zip(source.slices, rows, strict=True)
    }
    return {"valid_loss": mean, "valid_accuracy": right / scored, **by_slice}


def summary(found: dict[str, float]) -> str:
    """What is worth a line of what `validate` found: all but the slices of recall.

    >>> summary({"valid_loss": 1.0, "valid_perplexity": 2.71828, "valid_accuracy_64x4": 0.5})
    'valid_loss 1.0000, valid_perplexity 2.7183'
    """
    return ", ".join(f"{name} {value:.4f}" for name, value in found.items() if not name[-1].isdigit())


class Gates:
    """The cleaners of a model, the lam they used, and how far they turned the queries."""

    def __init__(self, model: nn.Module) -> None:
        self.cleaners = [m for m in model.modules() if isinstance(m, QueryCleaner) and m.clean]
        self.recording = False
        self.latest: Float[Tensor, "kinds layers"] | None = None  # what `collect` found in the last step

    def record(self, on: bool, angle: bool = True) -> None:
        self.recording = on and bool(self.cleaners)
        for cleaner in self.cleaners:
            cleaner.record, cleaner.record_angle = on, on and angle

    def collect(self) -> Float[Tensor, "kinds layers"] | None:
        """Mean lam, and angle where recorded, of each layer in this rank's last forward; they are then forgotten."""
        found = [[x for x in (c.lam, c.angle) if x is not None] for c in self.cleaners]
        for cleaner in self.cleaners:
            cleaner.lam = cleaner.angle = None
        if not any(found):
            return None
        return torch.stack([torch.stack([x.double().mean() for x in kind]) for kind in zip(*found, strict=True)])

    def means(self, world: World) -> dict[str, list[float]]:
        """The same of the last step by name, over ranks; the angle in degrees."""
        latest, self.latest = self.latest, None
        if latest is None:
            return {}
        over = torch.tensor(world.total(*latest.flatten().tolist())).view_as(latest) / world.size
        return dict(zip(("lam", "angle"), over.tolist(), strict=False))


def sample(model: Any, config: Config, world: World, tokenizer: Any, step: int) -> str:
    """Text that follows the prompt (or the start of a text), drawn at temperature 1, the same for the same step.

    Without a cache, since the weights of a layer may lie on other ranks until its forward is called; of one length,
    since compiled code is made for a shape. What follows a position does not reach it.
    """
    prompt = tokenizer(config.runtime.sample_prompt)["input_ids"] if config.runtime.sample_prompt else []
    tokens = [tokenizer.eos_token_id, *prompt]
    length = max(config.runtime.sample_tokens, len(tokens) + 1)
    ids = torch.full((1, length), tokenizer.eos_token_id, device=world.device)
    ids[0, : len(tokens)] = torch.tensor(tokens, device=world.device)
    rng = torch.Generator().manual_seed(key_of("sample", config.seed, step))
    with looking(model):
        for at in range(len(tokens), length):
            keep = torch.tensor([at - 1], device=world.device)
            logits = model(ids, use_cache=False, logits_to_keep=keep).logits[0, -1]
            token = torch.multinomial(logits.double().softmax(-1).cpu(), 1, generator=rng)
            ids[0, at] = world.from_main(int(token))
            if int(ids[0, at]) == tokenizer.eos_token_id:
                return tokenizer.decode(ids[0, 1:at].tolist())
    return tokenizer.decode(ids[0, 1:].tolist())


def tokenizer_of(run: Path) -> Any:
    """The tokenizer that a run keeps, None where it has none."""
    from ccq.data.tokenizer import load_tokenizer
    from ccq.train import folder

    path = run / folder.TOKENIZER
    return load_tokenizer(path) if path.is_dir() else None
