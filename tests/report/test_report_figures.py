"""Models of different sizes are never drawn into one panel, and a figure has no panel that shows nothing."""

import pytest
from made_results import evaluation, trials
from matplotlib.figure import Figure as Canvas

from ccq.figures import save
from ccq.report import figures
from ccq.report.collect import collect
from ccq.report.page import build
from ccq.report.results import Results


@pytest.fixture
def two_sizes(tmp_path):
    """Needles of two sizes, the smaller with other lengths."""
    for size, lengths in (("nano", (1024, 8192)), ("pico", (512, 1024))):
        for system in ("gla", "ccq-gla"):
            groups = {f"niah_single_{task}/{n}": (50.0, "mean") for task in (1, 2) for n in lengths}
            told = {"hash": size, "count": 4, "requests": 4}
            trials(tmp_path, "niah", {system: groups}, (0,), size, samples=told)
    return collect([tmp_path])


def test_each_size_has_panels_of_its_own(two_sizes):
    figure = figures.needles(Results(two_sizes))
    assert [panel.title for panel in figure.panels] == [
        f"S-NIAH-{task}, {size}" for size in ("nano", "pico") for task in ("1: pass-key", "2: number")
    ]
    axes = Canvas().subplots()
    figure.panels[-1].draw(axes)
    assert [list(line.get_xdata()) for line in axes.get_lines()] == [[512, 1024]] * 2
    assert list(figure.legend) == ["GLA", "CCQ-GLA"]


def test_a_place_without_a_panel_stays_empty(two_sizes, tmp_path, monkeypatch):
    figure = figures.needles(Results(two_sizes))  # four panels, three beside each other
    shown = []
    monkeypatch.setattr(Canvas, "savefig", lambda self, *_, **__: shown.append([x.get_visible() for x in self.axes]))
    save(figure, tmp_path / "x.png")
    assert shown == [[True] * 4 + [False] * 2]


def test_only_models_of_one_size_must_be_asked_the_same(two_sizes):
    assert not any("the same samples" in note for note in two_sizes.notices())


def test_the_papers_other_systems_are_missed_at_nano_and_not_below(two_sizes):
    missed = [row.label.text for block in build(two_sizes).tables["niah"].blocks if block.folded for row in block.rows]
    assert {"Gated DeltaNet, nano", "Mamba2, nano"} < set(missed)
    assert not any("pico" in label for label in missed)


def test_a_quick_look_at_lengths_is_drawn_on_the_same_text(tmp_path):
    """The first windows of each length are more text the longer they are: what falls there may be due to the text."""
    groups = {f"pg19{view}/{n}": (30.0 + 9 * bool(view), "perplexity") for view in ("", "/same") for n in (4096, 8192)}
    for quick in (False, True):
        both = {"gla": groups, "ccq-gla": groups}
        trials(tmp_path, "length", both, (0,), quick_look=quick, limit=2 if quick else None)
        results = Results(collect([tmp_path]))
        figure = figures.extrapolation(results)
        axes = Canvas().subplots()
        figure.panels[0].draw(axes)
        where = f"length:pg19{'/same' if quick else ''}/4096"
        expected = [results.estimate(row, where).value for row in results.rows("length")]
        assert [line.get_ydata()[0] for line in axes.get_lines()] == expected
        assert ("the same 2,048 tokens at every length" in figure.caption) == quick
    trials(tmp_path, "length", both, (0,))  # asked whole: the quick look of another seed changes nothing
    evaluation(tmp_path / "b", "length", groups, "gla-nano-seed1", quick_look=True, limit=2)
    assert "the same 2,048" not in figures.extrapolation(Results(collect([tmp_path]))).caption
