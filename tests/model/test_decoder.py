"""What every system must hold, whichever way its tokens come: at once, in pieces, padded, packed, one by one."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import LAYERS
from model_helpers import CLOSE, SYSTEMS, make_model, relative, shared_model, tokens

from ccq.model import CCQConfig, CCQForCausalLM, CCQModel

each_system = pytest.mark.parametrize("system", SYSTEMS)


@pytest.fixture(autouse=True)
def no_gradients(request):
    """Off, unless the test is about them."""
    with torch.set_grad_enabled("gradient" in request.node.name or "loss" in request.node.name):
        yield


@each_system
def test_cached_equals_uncached(system):
    model, ids = shared_model(system), tokens(2, 140)
    full = model(ids, use_cache=False).logits
    assert full.std() > 0.3  # logits of some size, so that CLOSE says something
    for pieces in ([37] + [1] * 103, [1, 62, 1, 64, 12], [65, 75], [128, 12]):  # 64 is a chunk
        cache, got = None, []
        for piece in torch.split(ids, pieces, dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            got.append(out.logits)
        assert (torch.cat(got, 1) - full).abs().max() < CLOSE
        assert cache.get_seq_length() == 140
        assert cache.lengths.tolist() == [140, 140]


@each_system
@pytest.mark.parametrize("batch", [1, 4])
def test_padded_rows_equal_rows_alone(system, batch):
    model, ids = shared_model(system), tokens(batch, 70)
    left, right = [9, 0, 69, 3][:batch], [2, 5, 0, 0][:batch]
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : left[row]] = 0
        mask[row, 70 - right[row] :] = 0
    out = model(ids, attention_mask=mask)
    after = model(tokens(batch, 3, seed=1), past_key_values=out.past_key_values).logits
    assert out.past_key_values.lengths.tolist() == (mask.sum(1) + 3).tolist()
    for row in range(batch):
        real = ids[row : row + 1, left[row] : 70 - right[row]]
        alone = model(torch.cat([real, tokens(batch, 3, seed=1)[row : row + 1]], 1)).logits[0]
        assert (out.logits[row, left[row] : 70 - right[row]] - alone[:-3]).abs().max() < CLOSE
        assert (after[row] - alone[-3:]).abs().max() < CLOSE
        assert out.logits[row][mask[row] == 0].abs().sum() == 0


@each_system
def test_padding_in_later_calls(system):
    """A row may pause: it gets padding while others get tokens, also one token at a time, also from the start."""
    model, ids = shared_model(system), tokens(3, 12)
    columns = [(slice(0, 6), [1, 1, 0]), (slice(6, 7), [1, 0, 0]), (slice(7, 12), [1, 1, 1])]
    cache, got, real = None, [[], [], []], [[], [], []]
    for piece, active in columns:
        mask = torch.tensor(active)[:, None].expand(3, piece.stop - piece.start)
        out = model(ids[:, piece], attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        for row in range(3):
            if active[row]:
                got[row].append(out.logits[row])
                real[row].append(ids[row, piece])
    for row in range(3):
        alone = model(torch.cat(real[row])[None]).logits[0]
        assert (torch.cat(got[row]) - alone).abs().max() < CLOSE
    assert cache.lengths.tolist() == [12, 11, 5]
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("system", ["transformer", "ccq-gated-deltanet"])
def test_a_batch_of_padding_changes_nothing(system):
    model = shared_model(system)
    out = model(tokens(2, 3), attention_mask=torch.zeros(2, 3))
    assert out.logits.abs().sum() == 0
    ids, cache = tokens(2, 5), out.past_key_values
    after = [model(ids[:, :1], past_key_values=cache).logits, model(ids[:, 1:], past_key_values=cache).logits]
    torch.testing.assert_close(torch.cat(after, 1), model(ids).logits, rtol=0, atol=CLOSE)


@each_system
def test_packed_equals_separate(system):
    model, ids = shared_model(system), tokens(1, 90)
    borders = torch.tensor([0, 1, 3, 3, 68, 90])
    packed = model(ids, cu_seqlens=borders, use_cache=True)
    ones = model(ids, cu_seqlens=borders, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(ones, packed.logits)
    follow = torch.tensor([0, 2, 2, 2, 3, 4])  # some of the sequences go on
    after = model(ids[:, :4], cu_seqlens=follow, past_key_values=packed.past_key_values).logits
    for n in range(5):
        row, more = ids[:, borders[n] : borders[n + 1]], ids[:, follow[n] : follow[n + 1]]
        if row.shape[1] + more.shape[1] == 0:
            continue
        alone = model(torch.cat([row, more], 1)).logits[:, : row.shape[1] + more.shape[1]]
        assert (packed.logits[:, borders[n] : borders[n + 1]] - alone[:, : row.shape[1]]).abs().sum() < CLOSE * 256
        assert (after[:, follow[n] : follow[n + 1]] - alone[:, row.shape[1] :]).abs().sum() < CLOSE * 256


@each_system
def test_causal(system):
    model, ids = shared_model(system), tokens(1, 80)
    changed = ids.clone()
    changed[:, 66] = (changed[:, 66] + 1) % 256
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(after[:, :66], before[:, :66], rtol=0, atol=1e-6)
    assert (after[:, 66:] - before[:, 66:]).abs().amax(-1).min() > 1e-4  # and it is seen by all that follow


@each_system
def test_gradients_with_checkpointing_are_equal(system):
    model, ids = make_model(system).train(), tokens(2, 20)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    assert all(grad.abs().sum() > 0 for grad in plain)  # every parameter matters
    model.gradient_checkpointing_enable()
    assert model.model.layers[0].gradient_checkpointing
    for ref, got in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(got, ref)


@pytest.mark.parametrize("system", ["transformer", "ccq-gated-deltanet", "ccq-mamba2"])
def test_gradients_flow_through_padding_and_cache(system):
    """The gradient of a loss over pieces, padded rows and a single token is that of the whole."""
    model, ids = make_model(system, num_hidden_layers=1).double(), tokens(2, 12)
    whole = model(ids, targets=ids).loss
    ref = torch.autograd.grad(whole, list(model.parameters()))
    first = model(ids[:, :7], targets=ids[:, :7], use_cache=True)
    padded = F.pad(ids[:, 7:11], (0, 2))
    mask = F.pad(torch.ones(2, 4), (0, 2))
    second = model(padded, attention_mask=mask, targets=padded, past_key_values=first.past_key_values)
    third = model(ids[:, 11:], targets=ids[:, 11:], past_key_values=second.past_key_values)
    assert (first.scored, second.scored, third.scored) == (14, 8, 2)
    pieces = (first.loss * 14 + second.loss * 8 + third.loss * 2) / 24
    got = torch.autograd.grad(pieces, list(model.parameters()))
    for a, b in zip(ref, got, strict=True):
        assert relative(a, b) < 1e-10


def the_compilers_own_warnings(test):
    """It imports what is deprecated, and makes an instance of our autograd function where it should not."""
    for words in ("`torch.jit.*deprecated", ".*should not be instantiated"):
        test = pytest.mark.filterwarnings(f"ignore:{words}:DeprecationWarning")(test)
    return test


def compiled_equals_eager(system, backend, layers):
    model, ids = make_model(system, num_hidden_layers=layers), tokens(2, 70)
    ref = model(ids, labels=ids, logits_to_keep=0)
    grads = torch.autograd.grad(ref.loss, list(model.parameters()))
    out = torch.compile(model, backend=backend, fullgraph=True)(ids, labels=ids, logits_to_keep=0)
    torch.testing.assert_close(out.logits, ref.logits, rtol=0, atol=CLOSE)
    for a, b in zip(grads, torch.autograd.grad(out.loss, list(model.parameters())), strict=True):
        assert relative(a, b) < CLOSE


@the_compilers_own_warnings
def test_compiled_gradients_equal_eager(fresh_compiler):
    compiled_equals_eager("ccq-gla", "aot_eager", layers=1)


@pytest.mark.slow
@the_compilers_own_warnings
@each_system
def test_compiled_gradients_equal_eager_for_all(system, fresh_compiler):
    compiled_equals_eager(system, "inductor", layers=1)


@pytest.mark.gpu
@each_system
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_on_a_gpu_equal_those_on_a_cpu(system, fused, monkeypatch):
    """Whichever kernels run there; fp32, of which tensor cores keep ten bits.

    What is a sum of many terms that cancel (the gradients of A_log, two numbers) may err by more than the others, but
    by no more than a few times what it changes by when the weights themselves are rounded to ten bits.
    """
    monkeypatch.setattr("ccq.ops.choose.PLAIN", frozenset() if fused else LAYERS)
    model, ids = make_model(system), tokens(2, 150)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    ref = model(ids, attention_mask=mask, labels=ids, logits_to_keep=0)
    gradients = torch.autograd.grad(ref.loss, list(model.parameters()))
    rounded = copy.deepcopy(model)
    for p in rounded.parameters():
        p.data = (p.data.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    shifted = rounded(ids, attention_mask=mask, labels=ids, logits_to_keep=0).loss
    shifted = torch.autograd.grad(shifted, list(rounded.parameters()))
    model.cuda()
    got = model(ids.cuda(), attention_mask=mask.cuda(), labels=ids.cuda(), logits_to_keep=0)
    assert relative(ref.logits, got.logits.cpu()) < 1e-2
    torch.testing.assert_close(got.loss.cpu(), ref.loss, rtol=1e-3, atol=0)
    on_gpu = torch.autograd.grad(got.loss, list(model.parameters()))
    for (name, _), a, b, c in zip(model.named_parameters(), gradients, on_gpu, shifted, strict=True):
        assert relative(a, b.cpu()) < max(3e-2, 4 * relative(a, c)), name


def test_hidden_states_are_those_of_the_layers():
    model, ids = shared_model("ccq-gla"), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1
    x = model.model.embed_tokens(ids) * mask[..., None]
    torch.testing.assert_close(out.hidden_states[0], x)
    torch.testing.assert_close(model.lm_head(out.hidden_states[-1]), out.logits)
    step = model(ids[:, :1], past_key_values=out.past_key_values, output_hidden_states=True)  # not the decode step
    assert [x.shape for x in step.hidden_states] == [(2, 1, 64)] * 3


def test_logits_to_keep():
    model, ids = shared_model("gla"), tokens(2, 9)
    full = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, full[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, full[:, [0, 5]])
    torch.testing.assert_close(model(ids, targets=ids, logits_to_keep=0).logits, full)
    torch.testing.assert_close(model(ids, labels=ids, logits_to_keep=2).logits, full[:, -2:])


@pytest.mark.parametrize("switch", [None, True, False])
def test_labels_give_logits_except_in_training(switch):
    model, ids = make_model("gla", logits_with_loss=switch), tokens(2, 9)
    full = model(ids).logits
    for training in (False, True):
        model.train(training)
        calls = []
        hook = model.lm_head.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        assert model(ids, targets=ids).logits is None
        assert len(calls) == 1  # a head with a hook is called for the loss, and for nothing else
        hook.remove()
        out = model(ids, labels=ids)
        if switch is False or (switch is None and training):
            assert out.logits is None
        else:
            assert out[1] is out.logits
            torch.testing.assert_close(out.logits, full)
        assert model(ids).logits is not None


def test_loss_over_num_items_in_batch_adds_up():
    model, ids = make_model("ccq-gla"), tokens(3, 9)
    labels = ids.clone()
    labels[0, 2:] = -100  # 1 token is scored in the first row, 8 in the second, none in the third
    labels[2] = -100
    whole = model(ids, labels=labels)
    assert whole.scored == 9
    for items in (9, torch.tensor(9)):
        parts = [model(ids[[row]], labels=labels[[row]], num_items_in_batch=items).loss for row in range(3)]
        torch.testing.assert_close(sum(parts), whole.loss)
    torch.testing.assert_close(model(ids, labels=labels, num_items_in_batch=18).loss, whole.loss / 2)
    assert model(ids, num_items_in_batch=9).loss is None  # Trainer passes it beside no labels, where it smooths them


def test_embeddings_in_place_of_tokens():
    model, ids = shared_model("ccq-gla"), tokens(2, 9)
    torch.testing.assert_close(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


def test_tuples_for_those_who_want_them():
    model, ids = shared_model("gla"), tokens(1, 4)
    loss, logits, cache = model(ids, labels=ids, use_cache=True, return_dict=False)[:3]
    assert loss.ndim == 0
    assert torch.equal(logits, model(ids).logits)
    assert cache.get_seq_length() == 4
    assert torch.equal(model.model(ids, return_dict=False)[0], model.model(ids).last_hidden_state)


@pytest.mark.parametrize("system", ["transformer", "ccq-gated-deltanet"])
def test_loss_equals_cross_entropy_of_the_logits(system):
    model, ids = make_model(system), tokens(2, 12)
    labels = ids.clone()
    labels[0, 3:6] = -100
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[1, -3:] = 0

    logits = model(ids, attention_mask=mask).logits
    scored = [(0, t) for t in range(2, 11) if t + 1 not in (3, 4, 5)] + [(1, t) for t in range(8)]
    rows, columns = torch.tensor(scored).T
    ref = F.cross_entropy(logits[rows, columns], labels[rows, columns + 1])
    out = model(ids, attention_mask=mask, labels=labels)
    assert out.scored == len(scored)
    assert out.past_key_values is None
    torch.testing.assert_close(out.loss, ref)
    parameters = list(model.parameters())
    for a, b in zip(torch.autograd.grad(ref, parameters), torch.autograd.grad(out.loss, parameters), strict=True):
        assert relative(a, b) < 1e-5


def test_labels_may_be_of_32_bits_as_tokens_may():
    model, ids = shared_model("ccq-gla"), tokens(2, 9)
    for name in ("labels", "targets"):
        assert torch.equal(model(ids.int(), **{name: ids.int()}).loss, model(ids, **{name: ids}).loss)


def test_loss_of_packed_sequences_does_not_cross_their_borders():
    model, ids = make_model("ccq-gla"), tokens(1, 12)
    borders = torch.tensor([0, 5, 5, 6, 12])
    out = model(ids, cu_seqlens=borders, labels=ids)
    alone = [model(ids[:, a:b], labels=ids[:, a:b]) for a, b in ((0, 5), (6, 12))]
    assert out.scored == 4 + 5
    torch.testing.assert_close(out.loss, (alone[0].loss * 4 + alone[1].loss * 5) / 9)


def test_lam_zero_is_the_unit_norm_backbone():
    for cleaned, backbone in (("ccq-gla", "gla-unit"), ("ccq-gated-deltanet", "gated-deltanet")):
        model = make_model(cleaned, fixed_lam=0.0)
        plain = make_model(backbone)
        plain.load_state_dict(model.state_dict())
        ids = tokens(1, 70)
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", ["500m", "1.3b"])
@pytest.mark.parametrize(
    "system", ["transformer", "mamba2", "gla", "gla-hedgehog", "gated-deltanet", "ccq-gla", "ccq-gated-deltanet"]
)
def test_parameter_counts_of_the_paper(system, scale):
    with torch.device("meta"):
        model = CCQForCausalLM(CCQConfig.preset(f"{system}-{scale}"))
    low, high = {"500m": (480e6, 530e6), "1.3b": (1.30e9, 1.42e9)}[scale]
    assert low <= sum(parameter.numel() for parameter in model.parameters()) <= high


@pytest.mark.parametrize(
    ("system", "mebibytes"),
    [("gla", 63.0), ("gated-deltanet", 63.0), ("ccq-gla", 94.6), ("ccq-gated-deltanet", 94.6)],
)
def test_state_bytes_of_the_paper(system, mebibytes):
    with torch.device("meta"):
        model = CCQModel(CCQConfig.preset(f"{system}-1.3b", conv_size=None))  # the paper does not count the convolution
    layers = [layer.mixer for layer in model.blocks()]
    assert sum(mixer.state_bytes(4096) for mixer in layers) / 2**20 == pytest.approx(mebibytes, abs=0.05)
    assert all(mixer.state_bytes(4096) == mixer.state_bytes(10**6) for mixer in layers)


@each_system
def test_state_bytes_are_those_of_the_cache(system):
    model = shared_model(system)
    cache = model(tokens(3, 33), use_cache=True).past_key_values
    assert cache.nbytes == 3 * sum(layer.mixer.state_bytes(33) for layer in model.model.blocks())


@pytest.mark.parametrize("system", ["transformer", "ccq-gla"])
def test_bad_calls_are_named(system):
    model, ids = shared_model(system), tokens(2, 5)
    cache = model(ids).past_key_values
    for call, error, words in (
        ({"input_ids": torch.tensor([[1, 256]])}, ValueError, "got 256 at \\[0, 1\\]"),
        ({"input_ids": torch.tensor([[-1]])}, ValueError, "got -1"),
        ({"input_ids": ids[:, :0]}, ValueError, "the prompt is empty"),
        ({"input_ids": ids[0]}, ValueError, "expected shape \\[B, T\\]"),
        ({"input_ids": ids.float()}, TypeError, "expected integers"),
        ({"input_ids": ids.to(torch.uint8)}, TypeError, "expected integers of 32 or 64 bits, got torch.uint8"),
        ({}, ValueError, "expected one of them, got none"),
        ({"input_ids": ids, "inputs_embeds": ids}, ValueError, "got both"),
        (
            {"input_ids": ids, "attention_mask": torch.ones(2, 6)},
            ValueError,
            "attention_mask: expected shape \\[2, 5\\]",
        ),
        ({"input_ids": ids, "cu_seqlens": torch.tensor([0, 5])}, ValueError, "batch of 2"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 4])}, ValueError, "end at T = 5"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 4, 3, 5])}, ValueError, "no decrease"),
        ({"input_ids": ids[:1], "cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "int32 or int64"),
        ({"input_ids": ids[:1], "cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: expected an integer tensor, got list"),
        (
            {"input_ids": ids[:1], "cu_seqlens": torch.tensor([0, 5]), "attention_mask": torch.zeros(1, 5)},
            ValueError,
            "no padding",
        ),
        ({"input_ids": ids[:1], "past_key_values": cache}, ValueError, "1 sequences, got one of 2"),
        ({"input_ids": ids[:1, :1], "past_key_values": cache}, ValueError, "1 sequences, got one of 2"),
        ({"input_ids": ids, "past_key_values": ()}, TypeError, "expected a CCQCache, got tuple"),
        ({"input_ids": ids, "labels": ids[:, 1:]}, ValueError, "labels: expected shape \\(2, 5\\)"),
        ({"input_ids": ids, "labels": ids, "targets": ids}, ValueError, "got both"),
        ({"input_ids": ids, "position_idz": ids}, TypeError, "forward: there is no argument 'position_idz'"),
    ):
        with pytest.raises(error, match=words):
            model(**call)
    assert cache.get_seq_length() == 5  # a refused call leaves the cache as it was


def test_a_model_checks_its_config_again():
    config = CCQConfig.preset("gla-tiny")
    config.mixer = "gladiator"
    with pytest.raises(ValueError, match="Did you mean 'gla'"):
        CCQForCausalLM(config)


def test_a_copied_model_is_its_own():
    model = make_model("ccq-gla")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert model(tokens(1, 3)).logits.abs().sum() > 0


class Adapter(torch.nn.Module):
    """As adapters are: it has the weight of what it stands for, and adds to it."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("kind", ["adapter", "bias", "hook", "another forward"])
def test_loss_is_of_the_head_as_it_is_called(kind):
    model, ids = make_model("gla"), tokens(2, 9)
    head = model.lm_head
    if kind == "adapter":
        model.lm_head = Adapter(head)
    elif kind == "bias":
        model.lm_head = torch.nn.Linear(head.in_features, head.out_features)
    elif kind == "hook":
        head.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        plain = head.forward
        head.forward = lambda x: 3 * plain(x)
    before = F.linear(model(ids, output_hidden_states=True).hidden_states[-1], head.weight)
    logits = model(ids).logits
    assert (logits - before).abs().max() > 0.1  # it does something
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected)
    assert out.scored == 16
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.lm_head.parameters())


def test_config_asks_for_hidden_states():
    model = make_model("gla", output_hidden_states=True)
    assert len(model(tokens(1, 4)).hidden_states) == model.config.num_hidden_layers + 1
    assert model(tokens(1, 4), output_hidden_states=False).hidden_states is None
    assert len(model.model(tokens(1, 4)).hidden_states) == model.config.num_hidden_layers + 1


def test_attentions_are_refused():
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        shared_model("gla")(tokens(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        shared_model("transformer").generate(
            tokens(1, 4), max_new_tokens=1, output_attentions=True, return_dict_in_generate=True
        )


def test_trainer_of_transformers_finds_one_argument_of_labels():
    """It evaluates no loss where a batch lacks any argument with "label" in its name."""
    from transformers.utils.generic import find_labels

    assert find_labels(CCQForCausalLM) == ["labels"]


@each_system
def test_to_double_and_to_half(system):
    """What stays in fp32 in a half-precision model does so from fp64 too."""
    model = make_model(system).double().half()
    wide = {p.dtype for p in model.parameters()}
    assert wide <= {torch.float16, torch.float32}
    assert make_model(system).half().state_dict().keys() == model.state_dict().keys()
    for name, tensor in make_model(system).half().state_dict().items():
        assert model.state_dict()[name].dtype == tensor.dtype, name
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("made_by", "words"),
    [
        ("ccq-gla", "got covariance, recurrent: the cache of another model"),
        ("transformer", "got k, length, v"),
        ("three layers", "expected a cache of 2 layers, got one of 3"),
    ],
)
def test_cache_of_another_model_is_refused(made_by, words):
    other = make_model("gla", num_hidden_layers=3) if made_by == "three layers" else shared_model(made_by)
    cache = other(tokens(2, 4), use_cache=True).past_key_values
    for count in (1, 3):
        with pytest.raises(ValueError, match=words):
            shared_model("gla")(tokens(2, count), past_key_values=cache)


def test_blocks_that_leave_their_sum_open_keep_no_more_than_others():
    """Tensors of the size of the stream that are alive while the last block's mixer works, and while its MLP does."""
    model, ids, counts = make_model("ccq-gla", num_hidden_layers=3), tokens(2, 13), []

    def count(*_):
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of deprecated attributes that it looks at
            alive = {x.data_ptr() for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape == (2, 13, 64)}
        counts.append(len(alive))

    model.model.layers[2].mixer.register_forward_pre_hook(count)
    model.model.layers[2].mlp.register_forward_pre_hook(count)
    model(ids)
    model.model.layers[0].register_forward_hook(lambda *_: None)  # now each adds its own
    model(ids)
    assert counts[:2] == counts[2:]


class Around(torch.nn.Module):
    """Stands in the place of a block."""

    def __init__(self, block, seen):
        super().__init__()
        self.block, self.seen = block, seen
        self.mixer = block.mixer

    def forward(self, *arguments):
        self.seen.append(arguments[0])
        return self.block(*arguments)


@pytest.mark.parametrize("kind", ["forward hook", "backward hook", "another forward", "stand-in", "compiled"])
def test_whoever_waits_for_a_call_of_a_block_gets_gradients_and_values_to_see(kind):
    """Blocks leave their last sum to the next norm, but not where somebody looks at them. Bit for bit the same."""
    model, ids = make_model("ccq-gla", num_hidden_layers=3).train(), tokens(2, 9)

    def results():
        loss = model(ids, labels=ids).loss
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    alone, seen = results(), []
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    results()
    assert len(seen) == 1
    model.model.layers[0]._forward_hooks.clear()
    streams = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    torch.testing.assert_close(seen.pop(), streams[1], rtol=0, atol=0)  # x + y, and not one of them

    block = model.model.layers[1]
    if kind == "forward hook":
        block.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    elif kind == "backward hook":
        block.register_full_backward_hook(lambda module, d_inputs, d_outputs: seen.append(d_outputs[0]))
    elif kind == "another forward":
        forward = block.forward
        block.forward = lambda *arguments: seen.append(arguments[0]) or forward(*arguments)
    elif kind == "stand-in":
        model.model.layers[1] = Around(block, seen)
    else:
        block._compiled_call_impl = lambda *arguments: seen.append(arguments[0]) or block.forward(*arguments)
    again = results()
    assert len(seen) == 1
    if kind != "backward hook":
        torch.testing.assert_close(seen[0], streams[1], rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))
