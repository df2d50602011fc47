"""The tests a record claim rests on, as functions of plain numbers.

Only scipy.special is used: importing scipy.stats takes longer than reading a hundred logs. The tests of this
repository compare every function here with scipy.stats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

TARGET = 2.92  # nats: the loss to reach on this track
ALPHA = 0.01  # a claim needs p below this
MAX_RUNS = 1_000_000  # `runs_needed` looks no further


class Degenerate(Exception):
    """Why a test has no answer on these numbers, in one sentence."""


@dataclass(frozen=True)
class TTest:
    """A t statistic, its degrees of freedom and its p value."""
    t: float
    df: float
    p: float


def checked(values: Sequence[float], what: str = "loss") -> np.ndarray:
    """The values as float64. Raises Degenerate where no spread can be had from them."""
    array = np.asarray(values, dtype=np.float64)
    if not np.isfinite(array).all():
        raise Degenerate(f"No test: a {what} is NaN or infinite.")
    if len(array) < 2:
        raise Degenerate(f"No test: a spread takes at least 2 runs; runs here: {len(array)}.")
    return array


def t_test(losses: Sequence[float], target: float = TARGET) -> TTest:
    """One-sided one-sample t-test of `mean < target`. Raises Degenerate for n < 2, zero variance, NaN."""
    x = checked(losses)
    if x.min() == x.max():
        raise Degenerate(f"No test: all {len(x)} losses are {x[0]:.7g}, so their variance is zero. Runs "
                         "differ: these are copies, one seed, or losses rounded too far (to 4 digits, say).")
    t = (x.mean() - target) / (x.std(ddof=1) / math.sqrt(len(x)))
    return TTest(float(t), len(x) - 1, float(special.stdtr(len(x) - 1, t)))


def half_interval(sd: float, n: int, level: float) -> float:
    """Half the width of the t interval of the mean at `level` (0.99: 99 %), in the unit of `sd`."""
    return float(special.stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n)


def welch(a: Sequence[float], b: Sequence[float], what: str, level: float = 0.95) -> dict[str, float]:
    """Welch's two-sided t-test of mean(b) - mean(a), with the interval of that level. Raises Degenerate."""
    x, y = checked(a, what), checked(b, what)
    if x.min() == x.max() and y.min() == y.max():
        raise Degenerate(f"No test: neither side's {what} varies.")
    vx, vy = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    se = math.sqrt(vx + vy)
    # Shares of the variance, not their squares: those underflow where the values hardly vary.
    df = 1 / ((vx / (vx + vy)) ** 2 / (len(x) - 1) + (vy / (vx + vy)) ** 2 / (len(y) - 1))
    difference = float(y.mean() - x.mean())
    half = float(special.stdtrit(df, 0.5 + level / 2)) * se
    return {"mean_a": float(x.mean()), "mean_b": float(y.mean()), "n_a": len(x), "n_b": len(y),
            "difference": difference, "low": difference - half, "high": difference + half,
            "t": difference / se, "df": float(df), "p": float(2 * special.stdtr(df, -abs(difference / se)))}


def describe(values: Sequence[float]) -> dict[str, float | int | None]:
    """n, mean, sd (ddof 1), min, max, median, and the ends of the mean's 99 % interval; None for n = 1."""
    x = np.asarray(values, dtype=np.float64)
    sd = float(x.std(ddof=1)) if len(x) > 1 else None
    half = None if sd is None else half_interval(sd, len(x), 0.99)
    mean = float(x.mean())
    return {"n": len(x), "mean": mean, "sd": sd, "min": float(x.min()), "max": float(x.max()),
            "median": float(np.median(x)), "low": None if half is None else mean - half,
            "high": None if half is None else mean + half}


def bootstrap_p(losses: Sequence[float], size: int, resamples: int, seed: int,
                target: float = TARGET) -> np.ndarray:
    """p of each of `resamples` draws of `size` losses with replacement; NaN where a draw does not vary."""
    x = checked(losses)
    t_test(x, target)  # refuses what no resampling can mend
    rng, p = np.random.default_rng(seed), np.empty(resamples)
    rows = max(1, 2_000_000 // size)  # 16 MB of doubles at a time
    for begin in range(0, resamples, rows):
        draws = x[rng.integers(len(x), size=(min(rows, resamples - begin), size))]
        varies = draws.min(axis=1) < draws.max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            t = (draws.mean(axis=1) - target) / (draws.std(axis=1, ddof=1) / math.sqrt(size))
        p[begin:begin + rows] = np.where(varies, special.stdtr(size - 1, t), np.nan)
    return p


def power(n: int, mean: float, sd: float, target: float = TARGET) -> float:
    """Probability that n runs of normal losses with this mean and sd give p < ALPHA (noncentral t)."""
    shift = (target - mean) / sd * math.sqrt(n)
    return float(1 - special.nctdtr(n - 1, shift, special.stdtrit(n - 1, 1 - ALPHA)))


def runs_needed(probability: float, mean: float, sd: float, target: float = TARGET) -> int | None:
    """Fewest runs that give p < ALPHA with this probability; None where MAX_RUNS are too few."""
    if mean >= target:
        return None
    low, high = 1, 2
    while power(high, mean, sd, target) < probability:
        low, high = high, high * 2
        if high > MAX_RUNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, mean, sd, target) >= probability else (middle, high)
    return high


def peeking(looks: int, simulations: int, seed: int) -> dict[str, float | int]:
    """What stopping at the first p < ALPHA does, with a look after each of runs 2..`looks`, by simulation.

    The simulated runs are of no use (their true mean is the target), so a test at ALPHA claims 1 % of them.
    The t statistic depends on neither target nor spread, so standard normal losses serve. `threshold` is the
    p that one would have to demand at every look for an honest 1 %.
    """
    rng, smallest = np.random.default_rng(seed), np.empty(simulations)
    count = np.arange(2, looks + 1)
    rows = max(1, 1_000_000 // looks)  # 8 MB of doubles an array
    for begin in range(0, simulations, rows):
        x = rng.standard_normal((min(rows, simulations - begin), looks))
        total, squares = x.cumsum(axis=1)[:, 1:], (x * x).cumsum(axis=1)[:, 1:]
        variance = np.maximum(squares - total**2 / count, 1e-300) / (count - 1)
        p = special.stdtr(count - 1, total / np.sqrt(count * variance))
        smallest[begin:begin + rows] = p.min(axis=1)
    rate = float((smallest < ALPHA).mean())
    return {"looks": looks, "simulations": simulations, "false_positive_rate": rate,
            "standard_error": math.sqrt(rate * (1 - rate) / simulations),
            "threshold": float(np.quantile(smallest, ALPHA))}
