"""The published figures to all printed digits, every formula against scipy.stats, degenerate samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as oracle
from stats_helpers import RECORDS, SMOOTHED, SNOO

import stats
from inference import (ALPHA, Degenerate, bootstrap_p, describe, half_interval, peeking, power, runs_needed,
                       t_test,
                       welch)
from samples import Group, gather, mean_curve
from stats import reach


def losses_of(folder: Path) -> list[float]:
    return gather([folder / "runs.csv"]).losses


# ---------------------------------------------------------------------------------------------------------
# Published figures


def test_snoo_summary_prints_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert stats.main(["summary", str(SNOO / "runs.csv")]) == 0
    text = capsys.readouterr().out
    for figure in ("n 30 ", "mean 2.919616 ", "sd 0.0007156 ", "min 2.917969 ", "max 2.921223 ",
                   "p 0.0032016\n",
                   "time 1404029.93 +- 1523.80 ms (23.400 +- 0.025 min)", "248.94 ms a step",
                   "p 0.0032016 < 0.01: mean loss below 2.92"):
        assert figure in text, figure
    assert "val_loss repeats: 2.91906 (2 times)" in text
    assert "train_time_ms repeats: 1405181 (2 times), 1405527 (2 times)" in text
    assert stats.main(["summary", str(SNOO)]) == 0
    assert capsys.readouterr().out == text, "the folder stands for its runs.csv"


def test_smoothed_snoo_summary_prints_the_published_figures(capsys: pytest.CaptureFixture[str]) -> None:
    stats.main(["summary", str(SMOOTHED), "--brief"])
    text = capsys.readouterr().out
    assert "n 160  mean 2.919547  sd 0.0007976 " in text
    assert len(text.splitlines()) < 10


def test_bootstrap_gives_the_published_share(capsys: pytest.CaptureFixture[str]) -> None:
    losses = losses_of(SMOOTHED)
    for seed in range(5):  # published: 85.40 % of 1000 draws of 40
        assert (bootstrap_p(losses, 40, 1000, seed) < ALPHA).mean() == pytest.approx(0.85, abs=0.03)
    stats.main(["bootstrap", str(SMOOTHED), "--size", "40", "--resamples", "1000", "--seed", "0", "--format",
                "json"])
    result = json.loads(capsys.readouterr().out)
    p = bootstrap_p(losses, 40, 1000, 0)
    assert result["share_below_alpha"] == (p < ALPHA).mean()
    assert (result["p_mean"], result["p_max"]) == (p.mean(), p.max())
    assert result["p_variance"] == pytest.approx(p.var(ddof=1))


def test_a_hundred_thousand_resamples_are_vectorised_and_repeatable() -> None:
    losses = losses_of(SMOOTHED)
    p = bootstrap_p(losses, 40, 100_000, 3)  # takes below a second; draw by draw it would take minutes
    assert p.shape == (100_000,)
    np.testing.assert_array_equal(p[:50_000], bootstrap_p(losses, 40, 50_000, 3))


@pytest.mark.parametrize("folder", sorted((RECORDS / "track_2_medium").glob("*/")), ids=lambda p: p.name)
def test_every_recipes_readme_states_the_figures_of_its_csv(folder: Path) -> None:
    s, text = stats.summarise(gather([folder]), 2.92), (folder / "README.md").read_text()
    text = " ".join(text.split())
    loss, time = s["loss"], s["train_time_ms"]
    for figure in (f"{loss['n']} runs: mean {loss['mean']:.6f}, sd {loss['sd']:.7f}, min {loss['min']:.6f}, "
                   f"max {loss['max']:.6f}, p = ", f"train time {time['mean']:.2f} +- {time['sd']:.2f} ms "
                   f"({time['mean'] / 6e4:.2f} min"):
        assert figure in text, figure
    stated = float(text.split("p = ")[1].split()[0])
    assert stated == pytest.approx(s["test"]["p"], rel=0.05)
    assert f"modded-nanogpt, `records/track_2_medium`, record `{folder.name}`" in text


# ---------------------------------------------------------------------------------------------------------
# scipy.stats as the oracle

finite = st.floats(2.0, 4.0).map(lambda x: round(x, 6))
sample = st.lists(finite, min_size=2, max_size=40).filter(lambda x: max(x) > min(x))


@settings(max_examples=150, deadline=None)
@given(sample, st.floats(2, 4))
def test_t_test_and_interval_agree_with_scipy(losses: list[float], target: float) -> None:
    ours, theirs = t_test(losses, target), oracle.ttest_1samp(losses, target, alternative="less")
    assert (ours.t, ours.df, ours.p) == pytest.approx((theirs.statistic, theirs.df, theirs.pvalue), rel=1e-9)
    d, interval = describe(losses), oracle.ttest_1samp(losses, 0).confidence_interval(0.99)
    assert (d["low"], d["high"]) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert (d["n"], d["min"], d["max"]) == (len(losses), min(losses), max(losses))
    assert (d["mean"], d["sd"], d["median"]) == pytest.approx(
        (np.mean(losses), np.std(losses, ddof=1), np.median(losses)))


@settings(max_examples=150, deadline=None)
@given(sample, sample)
def test_welch_agrees_with_scipy(a: list[float], b: list[float]) -> None:
    ours, theirs = welch(a, b, "loss"), oracle.ttest_ind(b, a, equal_var=False)
    assert (ours["t"], ours["df"], ours["p"]) == pytest.approx(
        (theirs.statistic, theirs.df, theirs.pvalue), rel=1e-7, abs=1e-12)
    interval = theirs.confidence_interval(0.95)
    assert (ours["low"], ours["high"]) == pytest.approx((interval.low, interval.high), rel=1e-7, abs=1e-9)


def test_bootstrap_p_is_the_t_test_of_each_draw() -> None:
    losses = losses_of(SNOO)
    p = bootstrap_p(losses, 7, 50, 5)
    draws = np.array(losses)[np.random.default_rng(5).integers(30, size=(50, 7))]
    np.testing.assert_allclose(p, oracle.ttest_1samp(draws, 2.92, axis=1, alternative="less").pvalue,
                               rtol=1e-9)


@pytest.mark.parametrize("n, mean, sd", [(2, 2.9, 0.01), (5, 2.9195, 0.0007), (30, 2.9196, 0.0007),
                                         (40, 2.92, 0.001),
                                         (400, 2.9199, 0.0008)])
def test_power_agrees_with_scipys_noncentral_t_and_with_simulation(n: int, mean: float, sd: float) -> None:
    shift = (2.92 - mean) / sd * math.sqrt(n)
    assert power(n, mean, sd) == pytest.approx(oracle.nct.sf(oracle.t.isf(0.01, n - 1), n - 1, shift),
                                               abs=1e-8)
    draws = np.random.default_rng(0).normal(mean, sd, size=(4000, n))
    share = (oracle.ttest_1samp(draws, 2.92, axis=1, alternative="less").pvalue < 0.01).mean()
    assert power(n, mean, sd) == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("mean, sd, probability", [(2.9196, 0.0007, 0.8), (2.9, 0.001, 0.5),
                                                   (2.9199, 0.0008, 0.95)])
def test_runs_needed_is_the_fewest(mean: float, sd: float, probability: float) -> None:
    n = runs_needed(probability, mean, sd)
    assert power(n, mean, sd) >= probability
    assert n == 2 or power(n - 1, mean, sd) < probability


def test_no_number_of_runs_shows_what_is_not_so() -> None:
    assert runs_needed(0.5, 2.92, 0.001) is None
    assert runs_needed(0.5, 2.93, 0.001) is None
    assert runs_needed(0.95, 2.9199999, 0.001) is None, "more than a million runs"


def test_peeking_agrees_with_a_plain_simulation() -> None:
    ours = peeking(12, 20_000, 1)
    x = np.random.default_rng(99).normal(2.92, 0.0007, size=(20_000, 12))
    smallest = np.min([oracle.ttest_1samp(x[:, :n], 2.92, axis=1, alternative="less").pvalue
                       for n in range(2, 13)], axis=0)
    assert ours["false_positive_rate"] == pytest.approx((smallest < 0.01).mean(), abs=0.006)
    assert ours["false_positive_rate"] > 0.03, "peeking is far from a test at 0.01"
    assert (smallest < ours["threshold"]).mean() == pytest.approx(0.01, abs=0.003)
    assert peeking(2, 20_000,
                   1)["false_positive_rate"] == pytest.approx(0.01, abs=0.003), "one look is the test"


def test_half_interval_is_scipys() -> None:
    assert half_interval(0.5, 9, 0.6) == pytest.approx(oracle.t.ppf(0.8, 8) * 0.5 / 3)


# ---------------------------------------------------------------------------------------------------------
# No number where there is none


@pytest.mark.parametrize("losses, words", [
    ([], "runs here: 0"), ([2.919], "runs here: 1"), ([2.9196] * 3, "variance is zero"),
    ([0.1] * 10, "variance is zero"),
    ([2.9, math.nan], "NaN"), ([2.9, math.inf, 2.8], "NaN or infinite")])
def test_degenerate_samples_get_a_sentence_and_no_number(losses: list[float], words: str) -> None:
    for test in (t_test, lambda x: bootstrap_p(x, 5, 10, 0)):
        with pytest.raises(Degenerate, match=words):
            test(losses)


def test_welch_refuses_where_neither_side_varies() -> None:
    with pytest.raises(Degenerate, match="neither side"):
        welch([2.9, 2.9], [2.8, 2.8], "val_loss")
    with pytest.raises(Degenerate, match="runs here: 1"):
        welch([2.9], [2.8, 2.7], "val_loss")
    assert welch([2.9, 2.9], [2.8, 2.7], "val_loss")["df"] == pytest.approx(1)


@pytest.mark.parametrize("rows, words",
                         [("2.9196\n", "No test: a spread takes at least 2 runs; runs here: 1."),
                                         ("2.9196\n2.9196\n2.9196\n", "rounded too far (to 4 digits, say)")])
@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_summary_refuses_a_degenerate_test_and_still_counts(rows: str, words: str, form: str, tmp_path: Path,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.csv").write_text("val_loss\n" + rows)
    assert stats.main(["summary", str(tmp_path), "--format", form]) == 0
    text = capsys.readouterr().out
    assert words in text
    assert "p 0" not in text
    if form == "json":
        s = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert s["test"] is None and s["claim"] is None and s["loss"]["n"] == len(rows.split())


def test_resamples_that_do_not_vary_have_no_p(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p = bootstrap_p([2.9, 2.91], 2, 4000, 0)
    assert np.isnan(p).mean() == pytest.approx(0.5, abs=0.05)
    (tmp_path / "runs.csv").write_text("val_loss\n2.9\n2.91\n")
    assert stats.main(["bootstrap", str(tmp_path), "--size", "2"]) == 0
    assert "resamples do not vary, have no p and are left out" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------
# Curves

CURVE = [(0, 10.0, 0.0), (100, 4.0, 1000.0), (200, 3.0, 2100.0)]


@pytest.mark.parametrize("loss, expected", [(10.0, (0.0, 0.0)), (11.0, (0.0, 0.0)), (7.0, (50.0, 500.0)),
                                            (4.0, (100.0, 1000.0)), (3.25, (175.0, 1825.0)),
                                            (3.0, (200.0, 2100.0)),
                                            (2.99, None)])
def test_reach_interpolates_between_validations(loss: float, expected: tuple[float, float] | None) -> None:
    assert reach(CURVE, loss) == expected
    untimed = reach([(s, x, None) for s, x, _ in CURVE], 7.0)
    assert untimed == (50.0, None)
    assert reach([], loss) is None


def test_mean_curve_is_over_common_steps() -> None:
    runs = gather([SNOO]).runs[:2]
    runs[0].curve, runs[1].curve = CURVE, [(0, 10.0, 0.0), (150, 3.5, 1500.0), (200, 3.2, None)]
    assert mean_curve(runs) == [(0, 10.0, 0.0), (200, 3.1, None)]
    assert mean_curve([]) == []


def test_compare_against_numbers_worked_out_by_hand() -> None:
    faster = [(0, 10.0, 0.0), (100, 3.5, 900.0), (200, 2.9, 1800.0)]
    c = stats.compare((Group(), CURVE), (Group(), faster), None, 2.92)
    assert c["reach"]["loss"] == 3.0, "the higher of the two lowest losses, for A never sees 2.92"
    assert c["reach"]["a"] == {"step": 200.0, "ms": 2100.0}
    assert c["reach"]["b"]["step"] == pytest.approx(100 + 100 * 0.5 / 0.6)
    assert [row["difference"] for row in c["curves"]] == pytest.approx([0.0, -0.5, -0.1])
    text = "\n".join(stats.compare_text(c, ("a", "b")))
    assert "same loss: B 8.33 % sooner in steps, B 21.43 % sooner in train time" in text
    assert c["refusals"]["val_loss"] == "No test: a spread takes at least 2 runs; runs here: 0."
