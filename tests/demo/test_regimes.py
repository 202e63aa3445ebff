import contextlib
import io

import pytest
import torch

from ccq.demo import regimes as demo

OFF, INSIDE, DISJOINT = range(3)


def closed_form(memory: demo.Memory, step: str = "scaled") -> tuple[torch.Tensor, torch.Tensor]:
    """Margins and ranks from Sigma written out in fp64, with no operator in between: [regimes, lam]."""
    k, q = (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (memory.keys, memory.query))
    margins, ranks = [], []
    for keys, query in zip(k, q, strict=True):
        centred = keys - keys.mean(0)
        sigma = centred.T @ centred / len(keys)
        y = sigma @ query
        along = 1 if step == "scaled" else (query @ y) / (y @ y)
        for lam in demo.LAM:
            scores = keys @ (query - lam * along * y)
            others = torch.cat([scores[: demo.NEEDLE], scores[demo.NEEDLE + 1 :]])
            margins.append(scores[demo.NEEDLE] - others.max())
            ranks.append(1 + (others > scores[demo.NEEDLE]).sum())
    shape = (len(demo.REGIMES), len(demo.LAM))
    return torch.stack(margins).view(shape), torch.stack(ranks).view(shape)


@pytest.mark.parametrize("step", demo.STEPS)
@pytest.mark.parametrize("seed", range(5))
def test_margins_equal_the_closed_form(seed, step):
    memory = demo.make_memory(seed)
    result = demo.clean(memory, step)
    margin, rank = closed_form(memory, step)
    torch.testing.assert_close(result.margin.double(), margin, rtol=0, atol=2e-6 if step == "scaled" else 1e-5)
    assert torch.equal(result.rank, rank)


@pytest.mark.parametrize("seed", range(20))
def test_needle_wins_where_it_should_and_only_there(seed):
    margin = demo.clean(demo.make_memory(seed)).margin
    assert margin[OFF, 0] < 0 < margin[OFF, -1]
    assert margin[INSIDE, -1] < 0 < margin[INSIDE, 0]
    assert abs(margin[DISJOINT, -1] - margin[DISJOINT, 0]) < 0.02


def test_margin_grows_with_lam_in_the_favourable_regime_and_falls_in_the_other():
    steps = demo.clean(demo.make_memory(0)).margin.diff(dim=1)
    assert (steps[OFF] > 0).all()
    assert (steps[INSIDE] < 0).all()


def test_covariance_has_two_dominant_directions():
    spectrum = demo.clean(demo.make_memory(0)).spectrum[OFF]
    assert spectrum[0] > 2 * spectrum[1] > 10 * spectrum[2]
    assert 0 < spectrum.sum() < 1  # unit keys, less their mean


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run, its folder and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "not" / "there"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert demo.main([str(folder), "3"]) == 0
    return folder, text.getvalue()


def test_the_figure_is_there(run):
    folder, _ = run
    assert (folder / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "scores.png").stat().st_size > 20_000


def test_text_is_honest_and_has_the_margins(run):
    text = " ".join(run[1].split())
    assert "constructed example" in text
    assert "cleaning does harm" in text
    for step in demo.STEPS:
        margin, rank = closed_form(demo.make_memory(3), step)
        for lam in demo.SHOWN:
            at = demo.LAM.index(lam)
            assert " ".join(f"{margin[r, at]:+.3f} ({rank[r, at]})" for r in range(len(demo.REGIMES))) in text
    assert "needle off the" in text
    assert text.index("the paper's step: q - lam y") < text.index("the projected step: q - lam (q . y) / (y . y) y")
