"""AdamW in one pass against PyTorch's own in fp64; a training step that takes it against one that does not; and who
holds the weights that it changes."""

import gc
import weakref

import pytest
import torch
from helpers import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import small, steps_of

from ccq.train import adamw
from ccq.train.optimizer import squared_norms
from ccq.train.trainer import Trainer
from ccq.train.world import World

SHAPES = [(3, 5), (2048,), (4, 1030), (1,)]


def draw(shape, seed, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def optimizer_of(parameters, **options):
    """Two groups: one decays, the other learns at half the rate."""
    groups = [
        {"params": parameters[:2], "weight_decay": 0.3, "scale": 1.0},
        {"params": parameters[2:], "weight_decay": 0.0, "scale": 0.5},
    ]
    made = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-6, **options)
    for x in parameters:
        made.state[x] = {
            "step": torch.zeros((), device=x.device),
            "exp_avg": torch.zeros_like(x),
            "exp_avg_sq": torch.zeros_like(x),
        }
    return made


def follows(copy, master):
    """Rounded to nearest on a GPU; Triton's interpreter cuts digits off."""
    if copy.device.type == "cuda":
        return torch.equal(copy, master.detach().to(copy.dtype))
    return bool(((copy.float() - master).abs() <= 2**-7 * master.abs()).all())


def check(dtype, device="cpu", betas=(0.9, 0.95)):
    """Five steps, the third of which is not finite and clips by another factor each time."""
    masters = [torch.nn.Parameter(draw(shape, seed, device)) for seed, shape in enumerate(SHAPES)]
    copies = [] if dtype == torch.float32 else [(x.detach().to(dtype), x) for x in masters[1:]]
    exact = [torch.nn.Parameter(x.detach().double()) for x in masters]
    ours, truth = optimizer_of(masters), optimizer_of(exact, foreach=False)
    for group in (*ours.param_groups, *truth.param_groups):
        group["betas"] = betas
    copy_of = {master: copy for copy, master in copies}
    for step in range(5):
        finite, lr, factor = step != 2, 0.1 / (step + 1), 1.0 / (step + 1)
        for at, (x, y) in enumerate(zip(masters, exact, strict=True)):
            gradient = draw(x.shape, 100 * step + at, device, dtype if x in copy_of else torch.float32)
            copy_of.get(x, x).grad = gradient if finite else gradient * float("nan")
            y.grad = gradient.double() * factor
        before = [t.clone() for x in masters for t in (x, *ours.state[x].values())]
        adamw.update(ours, copies, torch.tensor(finite, device=device), torch.tensor(lr, device=device), factor)
        if not finite:
            after = [t for x in masters for t in (x, *ours.state[x].values())]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            continue
        for group in truth.param_groups:
            group["lr"] = lr * group["scale"]
        truth.step()
        for x, y in zip(masters, exact, strict=True):
            assert_close(f"weights {tuple(x.shape)} at step {step}", y, x, 2e-6)
            for name, state in truth.state[y].items():
                assert_close(f"{name} at step {step}", state.double(), ours.state[x][name], 2e-6)
        assert all(follows(copy, x) for copy, x in copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_pytorchs(dtype):
    check(dtype)


def test_without_a_mean():
    check(torch.float32, betas=(0.0, 0.95))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_pytorchs_on_a_gpu(dtype):
    check(dtype, "cuda")


def test_the_host_reads_nothing(monkeypatch):
    """It would wait for the GPU, and no CUDA graph could be made."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert function != torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    x = torch.nn.Parameter(draw((4, 6), 0, "cpu"))
    optimizer = optimizer_of([x])
    x.grad = draw((4, 6), 1, "cpu")
    monkeypatch.setattr(adamw, "adamw_kernel", {(1,): lambda *arguments, **sizes: None})  # interpreted, it reads
    with Watch():
        squared_norms([x.grad, x.grad.bfloat16()])
        adamw.update(optimizer, [], torch.tensor(True), torch.tensor(0.1), torch.tensor(1.0))
    assert optimizer.state[x]["step"] == 1


def test_a_gradient_that_lies_otherwise_is_put_in_order():
    x = torch.nn.Parameter(draw((4, 6), 0, "cpu"))
    other = torch.nn.Parameter(x.detach().clone())
    gradient = draw((6, 4), 1, "cpu").mT
    for parameter, given in ((x, gradient), (other, gradient.contiguous())):
        parameter.grad = given
        adamw.update(optimizer_of([parameter]), [], torch.tensor(True), torch.tensor(0.1), 1.0)
    assert gradient.stride() != x.stride()
    assert torch.equal(x, other)


def test_a_parameter_without_gradient_stays_and_counts_no_step():
    x, still = (torch.nn.Parameter(draw((4,), seed, "cpu")) for seed in (0, 1))
    optimizer, kept = optimizer_of([x, still]), still.detach().clone()
    x.grad = draw((4,), 2, "cpu")
    adamw.update(optimizer, [], torch.tensor(True), torch.tensor(0.1), 1.0)
    assert torch.equal(still, kept)
    assert [optimizer.state[p]["step"].item() for p in (x, still)] == [1, 0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_step_takes_it_where_the_backward_left_the_gradient(accumulate):
    """bf16 copies: in one micro-batch no master gets a gradient; the weights that come out are those of PyTorch's."""
    world = World(0, 1, torch.device("cpu"))
    pair = [Trainer(small("ccq-gated-deltanet", dtype="bf16", clip=0.5), world) for _ in range(2)]
    pair[1].one_pass = True
    seen = []
    update = adamw.update

    def watch(optimizer, copies, *numbers):
        seen.append({copy.grad is None for copy, _ in copies} | {master.grad is not None for _, master in copies})
        update(optimizer, copies, *numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "update", watch)
        (plain,), (ours,) = (steps_of(trainer, 1, accumulate=accumulate) for trainer in pair)
    assert seen == [{accumulate > 1}]
    assert (ours.loss, ours.norm) == (plain.loss, pytest.approx(plain.norm, rel=1e-6))
    assert ours.norm > 0.5  # it is clipped
    trained = pair[1].prepared
    assert all(x.grad is None for pair in trained.copies for x in pair)
    assert all(follows(copy, master) for copy, master in trained.copies)
    for name, x in trained.masters.items():
        assert_close(name, pair[0].prepared.masters[name].double(), x, 1e-5)


def test_a_trainer_that_nobody_holds_is_freed():
    """With its weights: a benchmark makes one after the other."""
    trainer = Trainer(small("ccq-gla", dtype="bf16"), World(0, 1, torch.device("cpu")))
    steps_of(trainer, 1)
    held = [weakref.ref(x) for x in (trainer.model, *trainer.prepared.masters.values())]
    del trainer
    gc.collect()
    assert not any(ref() is not None for ref in held)
