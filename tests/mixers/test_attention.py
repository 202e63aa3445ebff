"""Softmax attention against a loop over tokens in fp64, in every way its tokens can come."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from helpers import assert_close

from ccq.mixers import Attention, Sequences
from ccq.mixers import attention as module
from ccq.model import CCQConfig
from ccq.ops.choose import Call, choose

N, T, D = 3, 20, 32


def make(kv_heads: int | None = 2, **changes) -> Attention:
    torch.manual_seed(0)
    settings = {"hidden_size": D, "num_heads": 4, "num_kv_heads": kv_heads, "mixer": "attention", "rope_theta": 50.0}
    mixer = Attention(CCQConfig(**{**settings, **changes}), 0).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.3)
    return mixer


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(x: list[float], position: int, theta: float) -> list[float]:
    """RoPE of one head, number by number."""
    half = len(x) // 2
    y = [0.0] * len(x)
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        y[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        y[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return y


def by_loops(mixer: Attention, x: torch.Tensor) -> torch.Tensor:
    """One sequence [T, D], one head and one token after another."""
    q = (x @ mixer.q_proj.weight.mT).unflatten(-1, (mixer.heads, -1))
    k = (x @ mixer.k_proj.weight.mT).unflatten(-1, (mixer.key_heads, -1))
    v = (x @ mixer.v_proj.weight.mT).unflatten(-1, (mixer.key_heads, -1))
    rows = []
    for t in range(x.shape[0]):
        heads = []
        for h in range(mixer.heads):
            read = h // (mixer.heads // mixer.key_heads)
            query = torch.tensor(turned(q[t, h].tolist(), t, mixer.theta), dtype=torch.float64)
            scores = []
            for s in range(t + 1):
                key = torch.tensor(turned(k[s, read].tolist(), s, mixer.theta), dtype=torch.float64)
                scores.append((query @ key).item() / math.sqrt(mixer.size))
            weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
            heads.append(weights @ v[: t + 1, read])
        rows.append(torch.cat(heads) @ mixer.o_proj.weight.mT)
    return torch.stack(rows)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_equals_the_loop(kv_heads):
    mixer, x = make(kv_heads), draw(2, T, D)
    with torch.no_grad():
        y, state = mixer(x, Sequences(2))
        ref = torch.stack([by_loops(mixer, row) for row in x])
    assert state is None
    torch.testing.assert_close(y, ref, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pieces", [[T], [1] * T, [7, 1, 5, 7], [19, 1]])
@pytest.mark.parametrize("decode", [True, False])
def test_pieces_equal_the_whole(pieces, decode):
    mixer, x = make(), draw(N, T, D)
    with torch.no_grad():
        ref = mixer(x, Sequences(N))[0]
        state, got = None, []
        for piece in torch.split(x, pieces, dim=1):
            if decode and state is not None and piece.shape[1] == 1:
                mixer.reserve(state, int(state["length"].max()) + 1)
                got.append(mixer.step(piece[:, 0], state)[:, None])
            else:
                y, state = mixer(piece, Sequences(N), state, output_state=True)
                got.append(y)
    torch.testing.assert_close(torch.cat(got, 1), ref, rtol=1e-10, atol=1e-12)
    assert state["length"].tolist() == [T] * N


def packed(lengths: list[int], seed: int = 1) -> tuple[torch.Tensor, Sequences]:
    borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return draw(1, sum(lengths), D, seed=seed), Sequences(len(lengths), borders, longest=max(lengths))


@pytest.mark.parametrize("lengths", [[5, 1, 0, 9], [0, 0, 3], [7]])
def test_packed_equals_separate(lengths):
    mixer = make()
    x, seqs = packed(lengths)
    with torch.no_grad():
        y, state = mixer(x, seqs, output_state=True)
        assert state["length"].tolist() == lengths
        more, follow = packed([2, 0, 4, 1][: len(lengths)], seed=2)
        z, after = mixer(more, follow, state, output_state=True)
        step = draw(len(lengths), D, seed=3)
        mixer.reserve(after, 20)
        w = mixer.step(step, after)
        for n in range(len(lengths)):
            tokens = [pieces(x, seqs)[n], pieces(more, follow)[n], step[n][None, None]]
            whole = mixer(torch.cat(tokens, 1), Sequences(1))[0]
            got = [pieces(y, seqs)[n], pieces(z, follow)[n], w[n][None, None]]
            torch.testing.assert_close(torch.cat(got, 1), whole, rtol=1e-10, atol=1e-12)


def pieces(x: torch.Tensor, seqs: Sequences) -> list[torch.Tensor]:
    borders = seqs.cu_seqlens.tolist()
    return [x[:, a:b] for a, b in pairwise(borders)]


def test_gradients_through_a_state():
    mixer, x = make(), draw(2, 8, D)

    def loss(*parts: torch.Tensor) -> torch.Tensor:
        state, total = None, 0.0
        for part in parts:
            y, state = mixer(part, Sequences(2), state, output_state=True)
            total = total + y.square().sum()
        return total

    ref = torch.autograd.grad(loss(x), list(mixer.parameters()))
    got = torch.autograd.grad(loss(x[:, :3], x[:, 3:]), list(mixer.parameters()))
    for a, b in zip(ref, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11)


def test_a_state_is_left_as_it_is_by_forward_and_changed_in_place_by_step():
    mixer, x = make(), draw(N, T, D)
    with torch.no_grad():
        _, state = mixer(x, Sequences(N), output_state=True)
        mixer.reserve(state, T + 1)
        kept = copy.deepcopy(state)
        mixer(x, Sequences(N), state, output_state=True)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        where = {name: tensor.data_ptr() for name, tensor in state.items()}
        mixer.step(x[:, 0], state)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == where
    assert state["length"].tolist() == [T + 1] * N


def test_rows_of_different_lengths_step_at_their_own_positions():
    mixer = make()
    x, seqs = packed([5, 1, 9])
    step = draw(3, D, seed=4)
    with torch.no_grad():
        _, state = mixer(x, seqs, output_state=True)
        mixer.reserve(state, 10)
        y = mixer.step(step, state, positions=torch.tensor([5, 1, 9]))
        for n, piece in enumerate(pieces(x, seqs)):
            alone = mixer(torch.cat([piece, step[n][None, None]], 1), Sequences(1))[0][0, -1]
            torch.testing.assert_close(y[n], alone, rtol=1e-10, atol=1e-12)


def test_room_grows_by_more_than_one():
    mixer = make()
    state = mixer.new_state(2, "cpu", torch.float64, max_length=4)
    mixer.reserve(state, 4)
    assert state["k"].shape == (2, 4, 2, 8)
    mixer.reserve(state, 5)
    assert state["k"].shape[1] == state["v"].shape[1] == 4 + module.GROW


def test_long_positions_keep_their_precision():
    """At position 10^6 an angle in fp32 would be off by 0.06; the tables are made in fp64."""
    x = torch.ones(1, 1, 1, 8)
    got = module.rotate(x, torch.tensor([[10**6]]), 10**6 + 1, 10000.0)
    ref = torch.tensor(turned([1.0] * 8, 10**6, 10000.0), dtype=torch.float32)
    torch.testing.assert_close(got[0, 0, 0], ref, rtol=0, atol=1e-6)


def test_bytes_and_flops():
    mixer = make()
    assert mixer.state_bytes(100) == 2 * 100 * 2 * 8 * 8 + 8  # fp64 keys and values, and the length
    assert mixer.flops(99) == 2 * 2 * 4 * 8 * 50


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_on_a_gpu_equals_the_cpu(dtype):
    mixer = make()
    x, seqs = packed([50, 1, 0, 200])
    ref = mixer(x, seqs)[0]
    moved = Sequences(seqs.count, seqs.cu_seqlens.cuda(), longest=seqs.longest)
    leaf = x.to("cuda", dtype).requires_grad_()
    y = copy.deepcopy(mixer).to("cuda", dtype)(leaf, moved)[0]
    # weights, q, k, v and the output are rounded: five times 2^-9 in bf16
    assert_close("y", ref, y.cpu(), 2**-6 if dtype == torch.bfloat16 else 1e-5)
    how = "flash" if dtype == torch.bfloat16 else "torch"
    assert choose("packed_attention", Call.of(leaf.unflatten(-1, (4, 8)))) == how
    y.square().sum().backward()
    assert leaf.grad.isfinite().all()


def test_a_run_without_numbers_leaves_no_table(monkeypatch):
    """Tables are shared by all layers of a process; one without numbers would make every later model one."""
    from torch._subclasses import FakeTensorMode

    monkeypatch.setattr(module, "_TURNS", {})
    with FakeTensorMode():
        cos, _ = module.turns(8, 4, 1e4, torch.float32, torch.device("cpu"))
        assert type(cos) is not torch.Tensor
    cos, _ = module.turns(8, 4, 1e4, torch.float32, torch.device("cpu"))
    assert type(cos) is torch.Tensor
    assert module.turns(8, 4, 1e4, torch.float32, torch.device("cpu"))[0] is cos
