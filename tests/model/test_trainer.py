"""transformers' Trainer takes our models as it takes its own: the same loss, the same steps, predictions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_helpers import make_model, relative, tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ccq.model import CCQForCausalLM

LENGTHS = (3, 12, 5, 9, 12, 4, 2, 11)  # of 8 rows of 12: they score from 1 to 11 tokens


def padded_rows() -> list[dict]:
    rows = []
    for ids, length in zip(tokens(len(LENGTHS), 12), LENGTHS, strict=True):
        mask = (torch.arange(12) < length).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return rows


def batch_of(rows: list[dict]) -> dict:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trainer_of(model, folder, batch=8, accumulate=1, compute_metrics=None, **options) -> Trainer:
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        gradient_accumulation_steps=accumulate, max_steps=1, optim="sgd", learning_rate=1.0, max_grad_norm=0,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", use_cpu=True, dataloader_pin_memory=False,
        disable_tqdm=True, **options,
    )  # fmt: skip
    rows = padded_rows()
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=compute_metrics)


def first_step(model, folder, batch: int, accumulate: int, **options) -> torch.Tensor:
    """By how much the first step of plain gradient descent moves each weight."""
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    trainer_of(model, folder, batch, accumulate, **options).train()
    return torch.cat([p.detach().flatten() for p in model.parameters()]) - before


def smoothed_by_hand(model, epsilon: float) -> torch.Tensor:
    """(1 - epsilon) nll + epsilon (mean over the vocabulary of -log p), mean over the tokens that have a next one."""
    batch = batch_of(padded_rows())
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=epsilon)


def test_smoothed_loss_is_that_of_the_next_token(tmp_path, monkeypatch):
    model = make_model("ccq-gla")
    trainer = trainer_of(model, tmp_path, label_smoothing_factor=0.1)
    expected = smoothed_by_hand(model, 0.1)
    torch.testing.assert_close(trainer.compute_loss(model, batch_of(padded_rows())), expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)

    monkeypatch.delitem(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "ccq")  # what the registration is for
    assert abs(trainer.compute_loss(model, batch_of(padded_rows())) - expected) > 0.01


def test_first_step_does_not_depend_on_how_a_batch_is_cut(tmp_path, monkeypatch):
    def step(batch, accumulate, **options):
        return first_step(make_model("ccq-gla").double(), tmp_path, batch, accumulate, **options)

    model = make_model("ccq-gla").double()
    batch = batch_of(padded_rows())
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    expected = -torch.cat([g.flatten() for g in gradients])
    assert relative(expected, step(8, 1)) < 1e-9
    assert relative(expected, step(2, 4)) < 1e-9
    smoothed = step(8, 1, label_smoothing_factor=0.1)
    assert relative(smoothed, step(2, 4, label_smoothing_factor=0.1)) < 1e-9

    monkeypatch.setattr(CCQForCausalLM, "accepts_loss_kwargs", False)  # micro-batches then weigh the same
    assert relative(expected, step(2, 4)) > 0.05


def test_trainer_counts_items_as_for_llama(tmp_path):
    theirs = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    )
    for model in (make_model("ccq-gla"), theirs):
        trainer = trainer_of(model, tmp_path)
        assert trainer.model_accepts_loss_kwargs
        assert trainer._get_num_items_in_batch([batch_of(padded_rows())], torch.device("cpu")) == sum(LENGTHS) - 8


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_predictions_are_the_logits(tmp_path, smoothing):
    model, seen = make_model("ccq-gla"), []

    def accuracy(found) -> dict:
        guess, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
        seen.append(found.predictions)
        return {"accuracy": float((guess == labels)[labels != -100].mean())}

    trainer = trainer_of(model, tmp_path, compute_metrics=accuracy, label_smoothing_factor=smoothing)
    found = trainer.predict(padded_rows())
    batch = batch_of(padded_rows())
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(torch.from_numpy(found.predictions), logits)
    scored = batch["labels"][:, 1:] != -100
    right = (logits[:, :-1].argmax(-1) == batch["labels"][:, 1:])[scored].float().mean()
    assert found.metrics["test_accuracy"] == trainer.evaluate()["eval_accuracy"] == pytest.approx(right.item())
    assert found.metrics["test_loss"] == pytest.approx(smoothed_by_hand(model, smoothing).item(), rel=1e-5)
    assert len(seen) == 2
