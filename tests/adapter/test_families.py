"""What must hold of cleaning that is attached to a model, whatever its family."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import FAMILIES, clean_by_hand, closed, in_plain_torch, make, opened, tokens

import ccq
from ccq.adapter import attached

STEPS = 2e-7  # of prefill against single steps; fp32 rounds by 6e-8 of the largest, and logits here are up to 1
every_family = pytest.mark.parametrize("family", FAMILIES)


def close(got, expected, times=1.0):
    torch.testing.assert_close(got, expected, rtol=0, atol=times * STEPS * max(1.0, expected.abs().max().item()))


def padded(ids, columns=(3, 5)):
    """Rows of `ids` without their first tokens, so many as `columns` says, padded on the left; and their mask."""
    width = ids.shape[1] + max(columns)
    rows, mask = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width, dtype=torch.long)
    for row, left_out in enumerate(columns):
        begin = max(columns) + left_out
        rows[row, begin:], mask[row, begin:] = ids[row, left_out:], 1
    return rows, mask


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_lambda_zero_is_the_model_to_the_last_bit(family, dtype, monkeypatch):
    model = make(family).to(dtype)
    in_plain_torch(model, monkeypatch)
    cleaned = closed(ccq.attach(copy.deepcopy(model)))
    ids = tokens(2, 70)
    assert torch.equal(cleaned(ids).logits, model(ids).logits)
    rows, mask = padded(ids)
    assert torch.equal(cleaned(rows, attention_mask=mask).logits, model(rows, attention_mask=mask).logits)
    asked = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (m.generate(ids[:, :9], **asked).logits for m in (cleaned, model))
    assert torch.equal(torch.stack(ours), torch.stack(theirs))


def difference_of_steps(model, ids):
    """The largest difference of the logits after a prefill of 40 tokens, a second one and single steps from one go."""
    whole = model(ids, use_cache=False).logits
    cache = model(ids[:, :40], use_cache=True)
    name = "cache_params" if "cache_params" in cache else "past_key_values"
    cache = {name: cache[name], "use_cache": True}
    pieces = [model(ids[:, 40:66], **cache).logits]
    pieces += [model(ids[:, t : t + 1], **cache).logits for t in range(66, 70)]
    return (torch.cat(pieces, 1) - whole[:, 40:]).abs().max().item(), whole


@every_family
@torch.no_grad()
def test_single_steps_continue_a_prefill(family, monkeypatch):
    model = make(family)
    in_plain_torch(model, monkeypatch)
    ids = tokens(2, 70)
    theirs, before = difference_of_steps(model, ids)
    ours, after = difference_of_steps(opened(ccq.attach(model)), ids)
    # some models err more by themselves (Bamba by 7e-2): nothing is added to that
    assert ours < max(STEPS * max(1.0, before.abs().max().item()), 2 * theirs)
    assert (after - before).abs().max() > 1e-3, "the gates do nothing here"


@every_family
def test_it_is_the_definition_and_so_are_the_gradients_of_the_gates(family, monkeypatch):
    model = make(family, initializer_range=0.2)  # loud enough for gradients
    module = in_plain_torch(model, monkeypatch)
    cleaned = opened(ccq.attach(copy.deepcopy(model)))
    ids = tokens(2, 23)
    weight = torch.randn(2, 23, 64, generator=torch.Generator().manual_seed(1))
    got = cleaned(ids, use_cache=False).logits
    (got * weight).sum().backward()
    gates = {
        index: [x.detach().clone().requires_grad_() for x in (layer.cleaner.gate_weight, layer.cleaner.gate_bias)]
        for index, layer in attached(cleaned).items()
    }
    CLEANED_BY_HAND[family](module, monkeypatch, iter(gates.values()))
    expected = model(ids, use_cache=False).logits
    (expected * weight).sum().backward()
    close(got, expected, times=200)
    for index, layer in attached(cleaned).items():
        for parameter, truth in zip((layer.cleaner.gate_weight, layer.cleaner.gate_bias), gates[index], strict=True):
            assert truth.grad.abs().max() > 0
            torch.testing.assert_close(parameter.grad, truth.grad, rtol=1e-4, atol=1e-4 * truth.grad.abs().max())
    theirs = dict(model.named_parameters())
    for name, parameter in cleaned.named_parameters():
        if "cleaner" not in name and parameter.grad is not None:
            truth = theirs[name].grad
            torch.testing.assert_close(parameter.grad, truth, rtol=1e-3, atol=1e-4 * truth.abs().max(), msg=name)


def delta_rule_by_hand(name):
    """Clean what a gated delta rule is called with, in a model that nothing is attached to."""

    def patch(module, monkeypatch, gates):
        theirs = getattr(module, name)

        def rule(query, key, value, *, use_qk_l2norm_in_kernel, **options):
            weight, bias = next(gates)
            heads = len(bias)
            q, k = (x.unflatten(2, (heads, -1))[:, :, :, 0] for x in (query, key))
            unit_q, unit_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q_clean = clean_by_hand(q, unit_q, k, weight, bias)
            repeats = query.shape[2] // heads
            q_clean, unit_k = (x.repeat_interleave(repeats, 2) for x in (q_clean, unit_k))
            return theirs(q_clean, unit_k, value, use_qk_l2norm_in_kernel=False, **options)

        monkeypatch.setattr(module, name, rule)

    return patch


def scan_by_hand(module, monkeypatch, gates):
    """Mamba2: C is the query and B the key, as they are; unit keys in Sigma_t only."""
    theirs = module.mamba2_chunk_scan

    def scan(x, dt, A, B, C, **options):
        return theirs(x, dt, A, B, clean_by_hand(C, C, B, *next(gates)), **options)

    monkeypatch.setattr(module, "mamba2_chunk_scan", scan)


CLEANED_BY_HAND = {
    **dict.fromkeys(FAMILIES, scan_by_hand),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"), delta_rule_by_hand("torch_chunk_gated_delta_rule")
    ),
    "kimi_linear": delta_rule_by_hand("chunk_kimi_delta_attention"),
}


@every_family
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(family):
    model = opened(ccq.attach(make(family)))
    ids = tokens(2, 30)
    rows, mask = padded(ids)
    got = model(rows, attention_mask=mask).logits
    for row, left_out in enumerate((3, 5)):
        begin = 5 + left_out
        alone = model(ids[row : row + 1, left_out:]).logits[0]
        close(got[row, begin:], alone, times=5)
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    together = model.generate(rows, attention_mask=mask, **asked)[:, rows.shape[1] :]
    for row, left_out in enumerate((3, 5)):
        alone = model.generate(ids[row : row + 1, left_out:], **asked)[0, ids.shape[1] - left_out :]
        assert torch.equal(together[row], alone)


@every_family
@torch.no_grad()
def test_beams_take_their_covariance_along(family):
    model = opened(ccq.attach(make(family)))
    asked = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = tokens(2, 12)
    assert torch.equal(model.generate(ids, **asked), model.generate(ids, use_cache=False, **asked))


LENGTHS, BORDERS = (20, 1, 20), torch.tensor([0, 20, 21, 41], dtype=torch.int32)
NUMBERS = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(LENGTHS))[None]
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


@every_family
@torch.no_grad()
def test_a_layer_keeps_packed_sequences_apart(family):
    layer = next(iter(attached(opened(ccq.attach(make(family)))).values()))
    x = torch.randn(1, 41, 32, generator=torch.Generator().manual_seed(0))
    separate = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    empty = torch.cat([BORDERS[:2], BORDERS[1:]])  # one of the sequences has no token
    for told in ({"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS}, {"seq_idx": NUMBERS}, {"cu_seqlens": empty}):
        assert torch.equal(layer(x, **told), separate)
    assert not torch.allclose(layer(x), separate, atol=1e-5)


@every_family
@torch.no_grad()
def test_packed_equals_separate_or_is_refused(family):
    model = opened(ccq.attach(make(family)))
    ids = tokens(1, 41)
    packed = {"position_ids": POSITIONS, "use_cache": False}
    if family == "mamba2":  # transformers' model keeps positions to itself, and all else that it is told
        with pytest.raises(ValueError, match="Mamba2Model does not receive them"):
            model(ids, **packed)
        return
    separate = torch.cat([model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1)], 1)
    if family != "granitemoehybrid":  # its attention does not see positions that start again
        for told in ({}, {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS}, {"seq_idx": NUMBERS}):
            close(model(ids, **packed, **told).logits, separate, times=5)
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids, position_ids=POSITIONS, use_cache=True)
    with pytest.raises(ValueError, match="batch of 1"):
        model(ids.repeat(2, 1), position_ids=POSITIONS.repeat(2, 1), use_cache=False)
    close(model(ids[:, :20], use_cache=False).logits, separate[:, :20])  # what was refused leaves nothing behind


@every_family
@torch.no_grad()
def test_a_saved_adapter_is_what_was_attached(family, tmp_path):
    ids = tokens(1, 20)
    model = opened(ccq.attach(make(family)))
    expected = model(ids).logits
    ccq.save_adapter(model, tmp_path / "adapter")
    assert torch.equal(ccq.load_adapter(make(family), tmp_path / "adapter")(ids).logits, expected)
    model.save_pretrained(tmp_path / "whole")
    assert torch.equal(ccq.load_adapter(make(family), tmp_path / "whole")(ids).logits, expected)


@every_family
@torch.no_grad()
def test_detached_it_is_the_model_that_it_was(family, monkeypatch):
    model = make(family)
    in_plain_torch(model, monkeypatch)
    ids, before = tokens(1, 20), dict(model.state_dict())
    expected, config = model(ids).logits, model.config.to_dict()
    classes = [type(module) for module in model.modules()]
    ccq.detach(opened(ccq.attach(model)))
    assert torch.equal(model(ids).logits, expected)
    assert [type(module) for module in model.modules()] == classes
    assert model.config.to_dict() == config
    assert model.state_dict().keys() == before.keys()
    assert not any(module._forward_pre_hooks for module in model.modules())
