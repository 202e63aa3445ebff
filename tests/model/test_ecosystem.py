"""What docs/ecosystem.md says of other people's tools: each is run as its users run it, on a tiny model of ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from model_helpers import CLOSE, make_model, relative, shared_model, tokens
from tiny_tokenizer import BOS, EOS, PAD, VOCABULARY, byte_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, pipeline

QUIET = {
    "report_to": "none", "use_cpu": True, "dataloader_pin_memory": False, "disable_tqdm": True, "optim": "sgd",
    "learning_rate": 1.0, "max_grad_norm": 0, "lr_scheduler_type": "constant",
}  # fmt: skip
TEXTS = ("the quick brown fox", "jumps", "over the lazy dog, and on", "again and again")
few_systems = pytest.mark.parametrize("system", ["ccq-gla", "ccq-mamba2", "transformer"])


def text_model(system="ccq-gla", **changes):
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return make_model(system, vocab_size=VOCABULARY, **special, **changes)


@pytest.fixture
def folder(tmp_path):
    """A model with its tokenizer, as `ccq export` leaves them."""
    text_model().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# TRL


def first_step(folder, system, **options) -> torch.Tensor:
    """By how much the first step of TRL's SFT moves each weight."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset

    model = text_model(system).double()
    before = [p.detach().clone() for p in model.parameters()]
    options = {"max_length": 64, **QUIET, **options}
    config = trl.SFTConfig(
        str(folder), max_steps=1, save_strategy="no", per_device_train_batch_size=4, bf16=False,
        gradient_checkpointing=False, **options,
    )  # fmt: skip
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    trl.SFTTrainer(model, config, train_dataset=rows, processing_class=byte_tokenizer()).train()
    return torch.cat([(p.detach() - q).flatten() for p, q in zip(model.parameters(), before, strict=True)])


@few_systems
def test_trl_packs_what_separate_rows_give(system, tmp_path):
    ref = first_step(tmp_path, system)
    assert ref.norm() > 0.1
    for options in ({"packing": True}, {"padding_free": True, "max_length": None}):
        assert relative(ref, first_step(tmp_path, system, **options)) < 1e-6  # TRL's own loss is in fp32


# PEFT


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="peft is not installed")


@pytest.mark.parametrize(
    ("system", "targets"),
    [("ccq-gla", {"q_proj", "v_proj"}), ("transformer", {"q_proj", "v_proj"}), ("ccq-mamba2", {"in_proj"})],
)
@pytest.mark.parametrize("dora", [False, True])
def test_lora_on_its_default_targets(system, targets, dora, peft, tmp_path):
    """It starts as the model, trains nothing else, steps as it prefills, and is the same merged, and loaded again."""
    model, ids = make_model(system), tokens(2, 12)
    with torch.no_grad():
        ref = model(ids).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, use_dora=dora, task_type="CAUSAL_LM"))
    found = {name.split(".")[-1] for name, m in adapted.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert found == targets
    assert all("lora_" in name for name, p in adapted.named_parameters() if p.requires_grad)
    torch.testing.assert_close(adapted.eval()(ids).logits, ref, rtol=0, atol=CLOSE)

    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # B is zero at first: A learns from the second step on
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    with torch.no_grad():
        trained = adapted(ids).logits
        assert relative(ref, trained) > 1e-3
        first = adapted(ids[:, :8])
        steps = [adapted(ids[:, t : t + 1], past_key_values=first.past_key_values).logits for t in range(8, 12)]
        torch.testing.assert_close(torch.cat(steps, 1), trained[:, 8:], rtol=0, atol=CLOSE)
        adapted.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(make_model(system), tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, trained, rtol=0, atol=CLOSE)
        torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, trained, rtol=0, atol=CLOSE)


def test_lora_trains_gates_beside_it(peft, tmp_path):
    model, ids = make_model("ccq-gla"), tokens(2, 12)
    config = peft.LoraConfig(r=4, target_modules="all-linear", modules_to_save=["cleaner"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    assert not any("lm_head" in name for name, p in adapted.named_parameters() if p.requires_grad)
    gates = [p for name, p in adapted.named_parameters() if "cleaner" in name and p.requires_grad]
    adapted(ids, labels=ids).loss.backward()
    assert len(gates) == 4
    assert all(p.grad.abs().max() > 0 for p in gates)
    with torch.no_grad():
        for p in gates:
            p.add_(0.3)
        trained = adapted.eval()(ids).logits
        adapted.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(make_model("ccq-gla"), tmp_path).eval()
        torch.testing.assert_close(again(ids).logits, trained, rtol=0, atol=CLOSE)


# transformers and accelerate


def test_trainer_resumes_to_the_same_weights(tmp_path):
    """Four steps in one go, and two, a checkpoint and two more: the same bits."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]

    def trained(folder, steps, resume=False):
        model = make_model("ccq-gla")
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=steps, per_device_train_batch_size=2, save_steps=2,
            **QUIET | {"optim": "adamw_torch", "learning_rate": 1e-2},
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model.state_dict()

    ref = trained("whole", 4)
    trained("parts", 2)
    got = trained("parts", 4, resume=True)
    assert all(torch.equal(x, got[name]) for name, x in ref.items())


@few_systems
def test_device_map_spreads_and_offloads(system, tmp_path):
    """Half of the layers wait on the disk and come when they are called: prefill, steps and generation."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, ids = shared_model(system), tokens(2, 12)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    places |= {f"model.layers.{i}": "disk" for i in range(1, model.config.num_hidden_layers)}
    how = {"device_map": places, "offload_folder": str(tmp_path / "offloaded")}
    spread = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **how).eval()
    assert any(p.is_meta for p in spread.parameters())
    with torch.no_grad():
        torch.testing.assert_close(spread(ids).logits, model(ids).logits, rtol=0, atol=CLOSE)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(spread.generate(ids, **how), model.generate(ids, **how))


def test_pipeline_writes_what_generate_writes(folder):
    writer = pipeline("text-generation", model=str(folder), device="cpu")
    how = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    found = writer(["one", "a longer prompt"], batch_size=2, **how)  # padded on the left
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer()
    for prompt, [row] in zip(("one", "a longer prompt"), found, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        alone = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert row["generated_text"] == tokenizer.decode(alone, skip_special_tokens=True)


# lm_eval


def test_lm_eval_as_its_users_call_it(folder):
    """`--model hf`: log-likelihoods of continuations, batched and padded, and text until a stop word."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    judge = get_model("hf").create_from_arg_string(f"pretrained={folder}", {"batch_size": 2, "device": "cpu"})
    pairs = [("the quick", " brown"), ("a", " b"), ("", "x"), ("the quick brown fox jumps", " over")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    found = judge.loglikelihood(asked, disable_tqdm=True)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), byte_tokenizer()
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before = tokenizer(context)["input_ids"] or [BOS]
        after = tokenizer(continuation)["input_ids"]
        with torch.no_grad():
            said = model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        assert total == pytest.approx(said.gather(1, torch.tensor(after)[:, None]).sum().item(), abs=1e-3)
        assert greedy == (said.argmax(-1).tolist() == after)
    ask = Instance("generate_until", {}, ("the quick", {"until": ["\n"], "max_gen_toks": 5}), 0)
    ids = tokenizer("the quick", return_tensors="pt")["input_ids"]
    alone = tokenizer.decode(model.generate(ids, max_new_tokens=5, do_sample=False)[0, 9:], skip_special_tokens=True)
    assert judge.generate_until([ask], disable_tqdm=True) == [alone.split("\n")[0]]


# torchao


@few_systems
def test_torchao_keeps_the_function_in_int8(system, monkeypatch):
    """It is the model with weights rounded to 8 bits a row, in prefill and in steps."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "aside")  # where the Makefile puts it
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, plain, ids = make_model(system), make_model(system), tokens(2, 12)
    with torch.no_grad():
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        for ours, theirs in zip(plain.modules(), model.modules(), strict=True):
            if isinstance(ours, nn.Linear):
                assert type(theirs.weight) is not nn.Parameter
                rounded = theirs.weight.dequantize()
                assert ((rounded - ours.weight).abs() <= ours.weight.abs().amax(1, keepdim=True) / 127).all()
                ours.weight.copy_(rounded)
        whole = model(ids).logits
        assert relative(plain(ids).logits, whole) < 1e-5
        first = model(ids[:, :8])
        steps = [model(ids[:, t : t + 1], past_key_values=first.past_key_values).logits for t in range(8, 12)]
        torch.testing.assert_close(torch.cat(steps, 1), whole[:, 8:], rtol=0, atol=CLOSE)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))
