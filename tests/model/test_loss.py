"""The chunked loss equals cross-entropy of the logits, and never holds them all."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ccq.model import loss as module
from ccq.model.loss import exact_logits, linear_cross_entropy


def case(m=37, d=16, v=50, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(m, d, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(v, (m,), generator=rng)
    targets[::3] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk", [1, 7, 36, 37, 10**6])  # tokens
@pytest.mark.parametrize("select", [True, False])  # of scored tokens, which only the CPU does
def test_equals_cross_entropy(chunk, select, monkeypatch):
    hidden, weight, targets = case()
    monkeypatch.setitem(module.LOGITS, "cpu", chunk * weight.shape[0])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: not select)
    ref = F.cross_entropy(hidden @ weight.mT, targets, reduction="sum")
    total, scored = linear_cross_entropy(hidden, weight, targets)
    assert scored == (targets != -100).sum()
    torch.testing.assert_close(total, ref, rtol=1e-12, atol=0)
    for a, b in zip(
        torch.autograd.grad(2.5 * ref, (hidden, weight)),
        torch.autograd.grad(2.5 * total, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-13)


def test_gradcheck():
    hidden, weight, targets = case(m=5, d=3, v=4)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets)[0], (hidden, weight))


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient_alone(which):
    hidden, weight, targets = case()
    wanted = (hidden, weight)[which]
    (hidden, weight)[1 - which].requires_grad_(False)
    (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets)[0], wanted)
    (ref,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.mT, targets, reduction="sum"), wanted)
    torch.testing.assert_close(got, ref)


def test_nothing_scored():
    hidden, weight, targets = case()
    total, scored = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    assert (total, scored) == (0, 0)
    assert all(grad.abs().sum() == 0 for grad in torch.autograd.grad(total, (hidden, weight)))


def test_large_logits_do_not_overflow():
    hidden, weight, targets = case(dtype=torch.float32)
    total, _ = linear_cross_entropy(hidden * 1e4, weight, targets)
    ref = F.cross_entropy((hidden * 1e4) @ weight.mT, targets, reduction="sum")
    assert total.isfinite()
    torch.testing.assert_close(total, ref)


def test_logits_of_a_chunk_only(monkeypatch):
    """The largest tensor that is made has a chunk of rows."""
    hidden, weight, targets = case(m=300, d=4, v=100)
    monkeypatch.setitem(module.LOGITS, "cpu", 10 * 100)
    seen = []
    original = module.cross_entropy
    monkeypatch.setattr(
        module, "cross_entropy", lambda logits, *rest: seen.append(logits.shape) or original(logits, *rest)
    )
    linear_cross_entropy(hidden, weight, targets)
    assert seen == [(10, 100)] * 20  # 200 scored tokens


def test_a_second_derivative_is_refused():
    """Its gradient is kept as numbers, so that of the gradient would lack the loss's own part."""
    hidden, weight, targets = case()
    total, _ = linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(total, hidden, create_graph=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_none_is_computed(mode, monkeypatch):
    """Of a head of 32,000 tokens it would be the largest tensor of an evaluation."""
    hidden, weight, targets = case()
    wanted = []
    original = module.cross_entropy
    monkeypatch.setattr(module, "cross_entropy", lambda *a: wanted.append(a[2]) or original(*a))
    expected, _ = linear_cross_entropy(hidden, weight, targets)
    with mode():
        total, _ = linear_cross_entropy(hidden, weight, targets)
    assert total == expected
    assert wanted == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_exact_logits_are_not_rounded_to_half_precision(dtype):
    hidden, weight, _ = case(dtype=dtype)
    head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
    head.weight = torch.nn.Parameter(weight.detach())
    found = exact_logits(head, hidden.detach())
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), hidden.double() @ weight.double().mT, rtol=1e-5, atol=1e-5)


def test_exact_logits_call_a_head_that_is_more_than_its_weight():
    hidden, weight, _ = case()
    head = torch.nn.Linear(16, 50, dtype=torch.float64)
    head.weight = torch.nn.Parameter(weight.detach())
    torch.testing.assert_close(exact_logits(head, hidden), head(hidden))  # its bias
    head.bias = None
    head.register_forward_hook(lambda head, given, logits: 2 * logits)
    torch.testing.assert_close(exact_logits(head, hidden), 2 * hidden @ weight.mT)
