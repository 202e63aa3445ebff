"""The cache: what transformers does with it, and what people do."""

from __future__ import annotations

import copy

import pytest
import torch
from model_helpers import CLOSE, SYSTEMS, make_model, shared_model, tokens
from torch.utils import _pytree as pytree

from ccq.model import CCQCache

each_system = pytest.mark.parametrize("system", SYSTEMS)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def filled(system, batch=3, length=12):
    model = shared_model(system)
    return model, model(tokens(batch, length), use_cache=True).past_key_values


@each_system
def test_reordered_states_are_those_of_the_rows(system):
    model, cache = filled(system)
    order = torch.tensor([2, 0, 0, 1])
    cache.reorder_cache(order)
    assert cache.batch_size == 4
    more = tokens(4, 5, seed=1)
    whole = torch.cat([tokens(3, 12)[order], more], 1)
    got = torch.cat(
        [model(more[:, :1], past_key_values=cache).logits, model(more[:, 1:], past_key_values=cache).logits], 1
    )
    torch.testing.assert_close(got, model(whole).logits[:, 12:], rtol=0, atol=CLOSE)


@each_system
def test_selected_and_repeated(system):
    _, cache = filled(system)
    other = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    other.batch_select_indices(torch.tensor([0, 0, 1, 1, 2, 2]))
    for a, b in zip(pytree.tree_leaves(cache.states), pytree.tree_leaves(other.states), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cache.lengths, other.lengths)
    assert cache.get_seq_length() == other.get_seq_length() == 12


@each_system
def test_copies_are_apart(system):
    model, cache = filled(system)
    copies = [copy.deepcopy(cache), cache.clone(), cache.to("cpu"), cache.to("meta")]
    assert {x.device.type for x in pytree.tree_leaves(copies.pop().states)} == {"meta"}
    step = tokens(3, 1, seed=2)
    ref = model(step, past_key_values=cache).logits  # in place: only this one moves on
    assert cache.get_seq_length() == 13
    for other in copies:
        assert other.get_seq_length() == 12
        assert other.lengths.tolist() == [12] * 3
        assert torch.equal(model(step, past_key_values=other).logits, ref)


@pytest.mark.parametrize("system", ["ccq-gla", "ccq-gated-deltanet", "ccq-mamba2", "mesa-2"])
def test_a_recurrent_state_may_be_kept_in_bf16(system):
    """Half as large, the covariance untouched, near in what it predicts. Mesa solves with its state, and keeps fp32."""
    models = make_model(system), make_model(system, state_dtype="bfloat16")
    models[1].load_state_dict(models[0].state_dict())
    ids = tokens(2, 24)
    caches = [model(ids[:, :12], use_cache=True).past_key_values for model in models]
    for step in (ids[:, t : t + 1] for t in range(12, 16)):
        full, half = (model(step, past_key_values=cache).logits for model, cache in zip(models, caches, strict=True))
        assert 0 < (full - half).abs().max() < 0.05 or system == "mesa-2"
    full, half = (model(ids[:, 16:], past_key_values=x).logits for model, x in zip(models, caches, strict=True))
    torch.testing.assert_close(half, full, rtol=0, atol=0.05)  # several tokens from a kept state
    kept = torch.float32 if system == "mesa-2" else torch.bfloat16
    for layer, state in zip(models[1].model.blocks(), caches[1].states, strict=True):
        made = layer.mixer.new_state(2, "cpu", torch.float32)
        assert state["recurrent"].dtype == made["recurrent"].dtype == kept
        if "covariance" in state:
            assert state["covariance"].second_moment.dtype == torch.float32
    recurrent = [sum(state["recurrent"].nbytes for state in cache.states) for cache in caches]
    assert recurrent[0] == recurrent[1] * (1 if system == "mesa-2" else 2)


def test_a_state_in_bf16_goes_on_in_an_fp64_model():
    model, ids = make_model("ccq-gla", state_dtype="bfloat16").double(), tokens(1, 12)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    several = model(ids[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(several, model(ids).logits[:, 4:], rtol=0, atol=0.05)


@each_system
def test_states_are_fp32_whatever_the_model_is(system):
    """Stored in bf16 they would forget, slowly and without an error; keys and values are no sums."""
    model = make_model(system)
    for kind, high in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        states = [layer.mixer.new_state(1, "cpu", kind) for layer in model.model.blocks()]
        for path, x in pytree.tree_flatten_with_path(states)[0]:
            name = pytree.keystr(path)
            if "count" in name or "length" in name:
                assert x.dtype == torch.int64
            elif "recurrent" in name or "covariance" in name:
                assert x.dtype == high
            else:
                assert x.dtype == kind
    got = model.double()(tokens(1, 4)).past_key_values.states
    new = [layer.mixer.new_state(1, "cpu", torch.float64, 4) for layer in model.model.blocks()]
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(new), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_crop_is_refused():
    _, cache = filled("ccq-gla")
    assert not cache.is_croppable
    with pytest.raises(NotImplementedError, match=r"cannot give back the tokens it has absorbed.*deepcopy"):
        cache.crop(1)
    with pytest.raises(NotImplementedError, match="mixers of ccq"):
        cache.update(None, None, 0)


def test_an_empty_cache():
    cache = CCQCache()
    assert (len(cache), bool(cache), cache.get_seq_length(), cache.batch_size, cache.nbytes) == (0, True, 0, -1, 0)
    assert not cache.has_previous_state()
    assert not cache.is_initialized
    with pytest.raises(ValueError, match="the cache is empty"):
        _ = cache.rows
    model = shared_model("ccq-gla")
    out = model(tokens(1, 6), past_key_values=cache)  # is filled, not ignored: the prompt must not be dropped
    assert out.past_key_values is cache
    torch.testing.assert_close(out.logits, model(tokens(1, 6)).logits)
    assert cache.get_seq_length() == 6
    assert repr(cache) == "CCQCache(2 layers, 1 sequences, 6 tokens seen)"


def test_reset_is_empty_again():
    model, cache = filled("ccq-gated-deltanet")
    cache.reset()
    torch.testing.assert_close(
        model(tokens(2, 4), past_key_values=cache).logits, model(tokens(2, 4)).logits, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("system", ["transformer", "ccq-gla"])
def test_a_cache_made_in_inference_mode_can_be_decoded_outside_of_it(system):
    model = make_model(system)
    with torch.inference_mode():
        cache = model(tokens(1, 6)).past_key_values
        first = model(tokens(1, 1), past_key_values=cache).logits
    second = model(tokens(1, 1), past_key_values=cache).logits
    whole = model(torch.cat([tokens(1, 6), tokens(1, 1), tokens(1, 1)], 1)).logits
    torch.testing.assert_close(torch.cat([first, second], 1), whole[:, 6:], rtol=0, atol=CLOSE)


@pytest.mark.parametrize("system", ["gla", "ccq-gla", "ccq-gated-deltanet", "ccq-mamba2"])
def test_size_does_not_depend_on_length(system):
    model = shared_model(system)
    assert model(tokens(1, 3)).past_key_values.nbytes == model(tokens(1, 200)).past_key_values.nbytes


def test_decoding_does_not_copy_states():
    """In place: the memory of a state is the same before and after."""
    model, cache = filled("ccq-gated-deltanet")
    before = [x.data_ptr() for x in pytree.tree_leaves(cache.states)]
    for _ in range(3):
        model(tokens(3, 1), past_key_values=cache)
    assert [x.data_ptr() for x in pytree.tree_leaves(cache.states)] == before
