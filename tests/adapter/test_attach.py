"""`ccq.attach` as its users meet it: what is touched and what is not, saving, training, and the commands."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
import transformers
from tiny_models import closed, in_plain_torch, make, module_of, opened, tokens
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache, Trainer, TrainingArguments
from transformers.utils import logging as reports

import ccq
from ccq.adapter import AttachError, attached, layers
from ccq.cli import main

IDS = tokens(2, 20)


@pytest.fixture
def model():
    return make("qwen3_next")


@torch.no_grad()
def logits(model, **options):
    return model(IDS, use_cache=False, **options).logits


def test_the_layers_that_were_asked_for_get_gates(model):
    assert ccq.attach(model, layers=[2, 0], gate_init=0.25) is model
    assert sorted(attached(model)) == [0, 2]
    names = [name for name, _ in model.named_parameters() if "cleaner" in name]
    assert names == [f"model.layers.{i}.linear_attn.cleaner.{x}" for i in (0, 2) for x in ("gate_weight", "gate_bias")]
    cleaner = model.model.layers[0].linear_attn.cleaner
    assert cleaner.gate_weight.shape == (2, 16)  # a lam for each key head, not for each value head
    torch.testing.assert_close(torch.sigmoid(cleaner.gate_bias), torch.full((2,), 0.25))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [3]}, r"expected layers of \[0, 1, 2\].*got \[3\]"),
        ({"layers": []}, "expected at least one"),
        ({"gate_init": 1.5}, "gate_init"),
        ({"normalize": "one"}, "normalize"),
        ({"step": "scale"}, "step"),
        ({"steps": 9}, "steps"),
        ({"covariance_decay": "some"}, "covariance_decay"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_left_alone(model, options, said):
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=said):
        ccq.attach(model, **options)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not hasattr(model.config, "ccq_adapter")


def test_a_model_without_such_layers_is_refused_by_name():
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(AttachError, match=r"LlamaForCausalLM has no layer.*transformers 5.*LlamaAttention"):
        ccq.attach(llama)
    with pytest.raises(AttachError, match="no cleaning attached"):
        ccq.detach(llama)


def test_a_layer_that_calls_other_functions_than_are_known_is_refused(model, monkeypatch):
    cls = type(model.model.layers[0].linear_attn)

    def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
        return another_rule(hidden_states)  # noqa: F821

    monkeypatch.setattr(cls, "forward", forward)
    with pytest.raises(AttachError, match="has no layer that ccq knows"):
        ccq.attach(model)


def test_a_model_is_attached_to_whole_or_not_at_all(model):
    model.model.layers[1].linear_attn.to("meta")  # as accelerate leaves what it offloads
    with pytest.raises(AttachError, match="offloaded"):
        ccq.attach(model)
    assert not attached(model)
    assert not hasattr(model.config, "ccq_adapter")
    ccq.attach(model, layers=[0])


def test_a_forward_that_someone_else_replaced_is_refused(model):
    model.model.layers[2].linear_attn.forward = lambda *args, **kwargs: None
    with pytest.raises(AttachError, match="was replaced"):
        ccq.attach(model)
    assert not attached(model)


def test_layers_may_be_named_twice_and_by_numbers_of_numpy(model, tmp_path):
    ccq.attach(model, layers=np.array([2, 0, 0]))
    assert sorted(attached(model)) == model.config.ccq_adapter["layers"] == [0, 2]
    model.save_pretrained(tmp_path)
    ccq.detach(model)


def test_a_pickled_model_cleans_and_can_be_detached(model, tmp_path, monkeypatch):
    in_plain_torch(model, monkeypatch)
    ref = logits(opened(ccq.attach(model)))
    torch.save(model, tmp_path / "model.pt")
    for again in (pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits(again), ref)
        ccq.detach(again)
        assert not torch.equal(logits(again), ref)
    assert torch.equal(logits(model), ref)


def test_twice_is_refused(model):
    with pytest.raises(AttachError, match="already has cleaning"):
        ccq.attach(ccq.attach(model))


def test_other_models_never_notice(model, monkeypatch):
    module = in_plain_torch(model, monkeypatch)
    before = dict(vars(module))
    beside, other = make("qwen3_next"), make("qwen3_next")
    beside.config = beside.model.config = other.config = other.model.config = model.config  # models may share one
    expected = logits(model)
    opened(ccq.attach(model))
    mine = logits(model)
    assert not torch.equal(mine, expected)
    assert torch.equal(logits(beside), expected)
    assert not hasattr(beside.config, "ccq_adapter")
    opened(ccq.attach(other, layers=[0]), seed=1)
    theirs = logits(other)
    assert not torch.equal(theirs, mine)
    assert torch.equal(logits(model), mine)
    assert torch.equal(logits(beside), expected)
    assert vars(module) == before
    assert model.config.ccq_adapter["layers"] == [0, 1, 2]
    assert other.config.ccq_adapter["layers"] == [0]
    assert model.model.config is model.config, "inside a model the config stays one"


def test_on_a_cpu_an_installed_kernel_is_not_called(model, monkeypatch):
    module = module_of(model)
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        theirs = inspect.unwrap(getattr(module, name))

        def kernel(*args, **kwargs):
            raise RuntimeError("0 active drivers")

        kernel.__wrapped__ = theirs
        monkeypatch.setattr(module, name, kernel)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        logits(model)
    assert logits(ccq.attach(model)).isfinite().all()


@torch.no_grad()
def test_a_copy_is_a_model_of_its_own(model):
    opened(ccq.attach(model))
    twin, expected = copy.deepcopy(model), logits(model)
    assert torch.equal(logits(twin), expected)
    closed(twin)
    assert not torch.equal(logits(twin), expected)
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_accelerate_may_have_been_there_before(model):
    from accelerate import dispatch_model

    expected = logits(opened(ccq.attach(copy.deepcopy(model))))
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    ccq.attach(model)
    assert torch.equal(logits(opened(model)), expected)
    ccq.detach(model)
    assert "cleaner" not in dict(model.model.layers[0].linear_attn.named_children())


def test_half_precision_leaves_the_gates_alone(model):
    ccq.attach(model.bfloat16())
    assert {p.dtype for n, p in model.named_parameters() if "cleaner" in n} == {torch.float32}
    assert {p.dtype for n, p in model.half().named_parameters() if "cleaner" in n} == {torch.float32}
    assert logits(model.bfloat16()).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_cache_that_is_reset_or_reordered_is_one_of_those_tokens(model, kind):
    opened(ccq.attach(model))
    expected = logits(model)
    cache = StaticCache(model.config, max_cache_len=32) if kind == "static" else None
    cache = model(IDS[:, :12], past_key_values=cache, use_cache=True).past_key_values
    again = model(IDS[:, 12:], past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(again, expected[:, 12:], rtol=0, atol=1e-6)
    if kind == "static":
        cache.reset()
    else:
        cache = model(IDS[:, :12].flip(0), use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        again = model(IDS[:, 12:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(again, expected[:, 12:], rtol=0, atol=1e-6)
        return
    got = model(IDS, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_cache_from_before_is_refused(model, monkeypatch):
    in_plain_torch(model, monkeypatch)
    cache = model(IDS, use_cache=True).past_key_values
    ccq.attach(model)
    with pytest.raises(ValueError, match="filled with cleaning attached"):
        model(IDS[:, :1], past_key_values=cache, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"step": "projected", "steps": 2}, {"covariance_decay": "backbone"}, {"covariance_decay": "learned"}]
)
def test_other_reads_train_prefill_and_decode(model, options):
    opened(ccq.attach(model, **options))
    expected = logits(model)
    cache = model(IDS[:, :12], use_cache=True).past_key_values
    got = [model(IDS[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(12, 20)]
    torch.testing.assert_close(torch.cat(got, 1), expected[:, 12:], rtol=0, atol=1e-6)
    plain = opened(ccq.attach(make("qwen3_next")))
    assert (logits(plain) - expected).abs().max() > 1e-5


@torch.no_grad()
def test_compiled_it_still_cleans(model, fresh_compiler):
    layer = opened(ccq.attach(model)).model.layers[0].linear_attn
    x = torch.randn(1, 9, 32)
    expected = layer(x)
    assert torch.equal(torch.compile(layer, backend="eager")(x), expected)
    assert not torch.equal(closed(model).model.layers[0].linear_attn(x), expected)


def trainer_of(model, folder, **options):
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, learning_rate=0.05, lr_scheduler_type="constant",
        report_to="none", use_cpu=True, dataloader_pin_memory=False, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(4, 24)]
    return Trainer(model, arguments, train_dataset=rows)


def test_trainer_trains_the_gates_alone_saves_and_resumes(model, tmp_path):
    ccq.attach(model, gate_init=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "cleaner" in name
    trainer = trainer_of(model, tmp_path, max_steps=6, save_steps=3, gradient_checkpointing=True)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("cleaner" not in name), name
    resumed = ccq.attach(make("qwen3_next"), gate_init=0.5)
    for name, parameter in resumed.named_parameters():
        parameter.requires_grad = "cleaner" in name
    arguments = {"max_steps": 6, "save_steps": 3, "gradient_checkpointing": True}
    trainer_of(resumed, tmp_path, **arguments).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for ours, theirs in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    loaded = ccq.pretrained.load_model(str(tmp_path / "checkpoint-6"))
    assert torch.equal(logits(loaded), logits(model.eval()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model and its tokenizer, one with an adapter for it, and one with both in one."""
    folder = tmp_path_factory.mktemp("saved")
    model = make("qwen3_next", vocab_size=8192)
    model.save_pretrained(folder / "base")
    ccq.pretrained.load_tokenizer("gla-pico").save_pretrained(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    opened(ccq.attach(model, layers=[0, 2]))
    ccq.save_adapter(model, folder / "adapter")
    model.save_pretrained(folder / "whole")
    ccq.pretrained.load_tokenizer("gla-pico").save_pretrained(folder / "whole")
    return folder, model


def test_load_knows_an_adapter_and_a_model_that_was_saved_with_gates(saved, monkeypatch):
    folder, model = saved
    in_plain_torch(model, monkeypatch)  # one of its layers is left as it is
    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    loaded, tokenizer = ccq.load(str(folder / "adapter"))
    assert (reports.get_verbosity(), reports.is_progress_bar_enabled()) == (level, bars)  # silent while it loads
    assert tokenizer("a b").input_ids
    assert torch.equal(logits(loaded), logits(model.eval()))
    assert sorted(attached(loaded)) == [0, 2]
    assert torch.equal(logits(ccq.pretrained.load_model(str(folder / "whole"))), logits(model))
    half = ccq.pretrained.load_model(str(folder / "adapter"), dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert torch.equal(attached(half)[0].cleaner.gate_weight, attached(model)[0].cleaner.gate_weight)
    assert ccq.pretrained.load_config(str(folder / "adapter")).model_type == "qwen3_next"


def test_gates_that_peft_trained_are_an_adapter_too(tmp_path):
    peft = pytest.importorskip("peft")
    model = ccq.attach(make("qwen3_5"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["cleaner"]))
    with torch.no_grad():
        for name, x in wrapped.named_parameters():
            if "modules_to_save" in name:
                x.normal_()
    ccq.save_adapter(wrapped, tmp_path)
    loaded, trained = ccq.load_adapter(make("qwen3_5"), tmp_path), attached(wrapped)
    for index, layer in attached(loaded).items():
        assert torch.equal(layer.cleaner.gate_weight, trained[index].cleaner.gate_weight)
        assert layer.cleaner.gate_weight.any()


def test_the_text_of_a_model_that_sees_is_loaded_with_its_gates(tmp_path):
    """Saved with its eyes it is another kind of model, in whose config the text's is a part."""
    delta = make("qwen3_5").config
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16,
            "deepstack_visual_indexes": []}  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=delta.to_dict(), vision_config=eyes)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base").eval()
    opened(ccq.attach(model))
    model.save_pretrained(tmp_path / "whole")
    ccq.save_adapter(model, tmp_path / "adapter")
    for name in ("whole", "adapter"):
        loaded = ccq.pretrained.load_model(str(tmp_path / name))
        assert loaded.config.model_type == "qwen3_5_text"
        assert torch.equal(logits(loaded), logits(model))
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base").eval()
    assert torch.equal(logits(ccq.load_adapter(again, tmp_path / "adapter")), logits(model))


def test_gates_that_no_config_tells_of_are_not_dropped(tmp_path):
    model = make("qwen3_next")
    ccq.attach(model.model)  # not the model that is saved
    model.save_pretrained(tmp_path)
    with pytest.raises(ccq.shipped.ModelError, match="has gates, and no ccq_adapter in its config"):
        ccq.pretrained.load_model(str(tmp_path))


def test_a_model_with_gates_on_the_hub(saved, tmp_path, monkeypatch):
    """A name, whose files lie in the cache of the Hub."""
    folder, model = saved
    cache = tmp_path / "models--me--it"
    shutil.copytree(folder / "whole", cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("a" * 40)
    for place in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(place, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = ccq.pretrained.load_model("me/it")
    in_plain_torch(model, monkeypatch)
    assert torch.equal(logits(loaded), logits(model.eval()))


def test_an_adapter_that_does_not_fit_is_refused(saved, tmp_path):
    folder, model = saved
    with pytest.raises(AttachError, match="expected the gates of layers"):
        ccq.load_adapter(make("qwen3_next", linear_num_key_heads=4), folder / "adapter")
    with pytest.raises(AttachError, match="already has cleaning"):
        ccq.load_adapter(model, folder / "adapter")
    with pytest.raises(AttachError, match="expected an adapter"):
        ccq.load_adapter(make("qwen3_next"), folder / "base")
    with pytest.raises(AttachError, match="nothing to save"):
        ccq.save_adapter(make("qwen3_next"), tmp_path)
    ccq.save_adapter(ccq.attach(make("qwen3_next")), tmp_path)
    with pytest.raises(ccq.shipped.ModelError, match="does not name its base model"):
        ccq.load(str(tmp_path))
    for other in (folder / "base", folder / "adapter", tmp_path):  # saved over its own model, none could be loaded
        with pytest.raises(FileExistsError, match=r"one with an older adapter of this model. Choose another$"):
            ccq.save_adapter(ccq.attach(make("mamba2")), other)
    ccq.save_adapter(model, folder / "adapter")
    config = json.loads((folder / "whole" / "config.json").read_text())
    stripped = tmp_path / "stripped"  # what a tool that drops unknown weights makes of it
    make("qwen3_next", vocab_size=8192).save_pretrained(stripped)
    (stripped / "config.json").write_text(json.dumps(config))
    with pytest.raises(ccq.shipped.ModelError, match="expected the gates of layers"):
        ccq.pretrained.load_model(str(stripped))


def test_eval_and_analyze_take_an_adapter(saved, tmp_path, capsys, monkeypatch):
    folder, model = saved
    in_plain_torch(model, monkeypatch)  # one of its layers is left as it is
    for name in ("adapter", "whole"):
        out = tmp_path / name
        asked = ["--suite", "length", "--tasks", "book", "--lengths", "64", "--limit", "2", "--device", "cpu"]
        assert main(["eval", str(folder / name), *asked, "--out", str(out)]) == 0
        gate = ["--sentences", "4", "--variants", "3", "--device", "cpu"]
        assert main(["analyze", "gate", str(folder / name), *gate, "--out", str(out)]) == 0
        found = json.loads((out / f"gate_{name}.json").read_text())
        assert found["layers"] == [0, 2]
        assert all(0 < x < 1 for row in found["lam"]["retrieval"] for x in row)
    both = [json.loads((tmp_path / name / "length.json").read_text()) for name in ("adapter", "whole")]
    assert both[0]["scores"] == both[1]["scores"]


@pytest.mark.gpu
@torch.no_grad()
def test_through_the_kernels_of_fla(model):
    model = make("qwen3_next", linear_key_head_dim=64, linear_value_head_dim=64).bfloat16().cuda()
    ids = tokens(2, 200).cuda()
    expected = model(ids, use_cache=False).logits
    ccq.attach(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected) is False
    closed(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    opened(model)
    whole = model(ids, use_cache=False).logits.float()
    cache = model(ids[:, :150], use_cache=True).past_key_values
    got = torch.cat(
        [model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(150, 200)], 1
    )
    assert (got.float() - whole[:, 150:]).abs().mean() < 0.02 * whole.abs().mean()
    alone = copy.deepcopy(model).float().cpu()(ids.cpu(), use_cache=False).logits
    assert (whole.cpu() - alone).abs().mean() < 0.02 * alone.abs().mean()


@torch.no_grad()
def test_the_covariance_beside_mamba2_decays_by_its_bounded_time_steps(monkeypatch):
    model = ccq.attach(make("mamba2", time_step_limit=(0.02, 0.03)), covariance_decay="backbone")
    decays, clean = [], layers.Call.clean

    def noted(call, raw, q, k, g, *rest):
        decays.append(g)
        return clean(call, raw, q, k, g, *rest)

    monkeypatch.setattr(layers.Call, "clean", noted)
    model(IDS, use_cache=False)
    for g, layer in zip(decays, attached(model).values(), strict=True):
        time = g / -layer.A_log.exp()
        assert (time.min().item(), time.max().item()) == pytest.approx((0.02, 0.03))  # of some tokens it is between


@torch.no_grad()
def test_the_last_columns_of_a_mask_are_those_of_a_call(model, monkeypatch):
    """transformers cuts the mask of all tokens itself; versions that do not hand it to a layer as it is."""
    module = module_of(opened(ccq.attach(model)))
    theirs = module.apply_mask_to_padding_states
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda x, mask: theirs(x, mask[:, -x.shape[1] :]))
    layer = attached(model)[0]
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]])  # 5 came before
    of_all, of_call, of_first = (layer(x, attention_mask=part) for part in (mask, mask[:, 5:], mask[:, :7]))
    assert torch.equal(of_all, of_call)
    assert not torch.allclose(of_first, of_call, atol=1e-5)
    with pytest.raises(RuntimeError, match="size of tensor"):
        layer(x, attention_mask=mask[:, :4])  # of fewer tokens than there are
