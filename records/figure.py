"""The plot of `stats.py plot`. Imported only by that command: matplotlib takes a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from runlog import Curve
from samples import Group

SIZE_INCHES, DPI = (16.0, 12.0), 100  # 1600 x 1200 pixels
# Okabe and Ito's colours, told apart by colour-blind readers; yellow, which vanishes on white, is grey here.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F", "#000000")
DASHES = ((6, 2), (2, 1.5), (6, 2, 1, 2), (1, 1), (8, 3, 2, 3), (4, 4))  # of the published curves
LATE = 21  # validations shown by the two upper panels: the first ones (10.8, 4.3) would flatten all the rest
CLOSE = 0.05  # nats: where final losses lie this close together, the tail gets a line every 0.001

Sample = tuple[str, Group, Curve]  # a PATH's name, its runs, and its curve where its runs have none


def draw(samples: Sequence[Sample], published: Sequence[tuple[str, Curve]], target: float) -> Figure:
    """Loss by step and by minutes, the tail enlarged, and the final losses.

    Each curve panel has one line a log (one for a runs.csv with a curve.csv), one a published curve, and one
    for the target.
    """
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    by_step, by_time, tail, finals = figure.subplots(2, 2).flat
    lines = _lines(samples, published)
    for curve, style in lines:
        steps, losses, times = zip(*curve)
        by_step.plot(steps, losses, **style)
        by_time.plot([math.nan if t is None else t / 6e4 for t in times], losses, **style)
        tail.plot(steps, losses, marker="o", markersize=4, **style)
    for axes, label in ((by_step, "step"), (by_time, "train time (minutes)"), (tail, "step")):
        axes.axhline(target, color="black", linewidth=1.2, linestyle="--", label=f"target {target:g}")
        axes.set(xlabel=label, ylabel="validation loss (nats a token)")
        axes.grid(True, color="0.88")
    by_step.set_title("validation loss by step")
    by_time.set_title("validation loss by train time")
    tail.set_title("the tail, enlarged")
    if lines:
        _limits(by_step, by_time, tail, [curve for curve, _ in lines], target)
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)  # clear of the curves
    _histogram(finals, samples, target)
    return figure


def _lines(samples: Sequence[Sample],
           published: Sequence[tuple[str, Curve]]) -> list[tuple[Curve, dict[str, Any]]]:
    """(curve, style) of every line: dashed for what is published, solid for the user's own, on top."""
    lines: list[tuple[Curve, dict[str, Any]]] = []
    for i, (name, curve) in enumerate(published):
        lines.append((curve, {"color": COLOURS[(i + len(samples)) % len(COLOURS)], "linewidth": 1.6,
                              "linestyle": (0, DASHES[i % len(DASHES)]),
                              "label": f"published: {name}"}))
    for i, (name, group, own) in enumerate(samples):
        curves = [run.curve for run in group.runs if run.curve] or ([own] if own else [])
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": 2.0 if len(curves) < 5 else 0.9}
        lines += [(curve, {**style, "label": "_" if k else name}) for k, curve in enumerate(curves)]
    return lines


def _limits(by_step: Axes, by_time: Axes, tail: Axes, curves: Sequence[Curve], target: float) -> None:
    """Cut the panels to what is worth seeing: the later validations, and the end with a line every 0.001."""
    lowest = min(loss for curve in curves for _, loss, _ in curve)
    highest = max(sorted(loss for _, loss, _ in curve)[:LATE][-1] for curve in curves)
    for axes in (by_step, by_time):
        axes.set_ylim(min(lowest, target) - 0.02, max(highest, target) + 0.05)
    last = max(curve[-1][0] for curve in curves)
    before = min(curve[-min(2, len(curve))][0] for curve in curves)  # at least the last two validations
    tail.set_xlim(min(last * 0.965, before), last * 1.005)
    ends = [curve[-1][1] for curve in curves] + [target]
    tail.set_ylim(min(ends) - 0.002, max(ends) + 0.008)
    if max(ends) - min(ends) < CLOSE:
        tail.yaxis.set_minor_locator(MultipleLocator(0.001))
        tail.grid(True, which="minor", color="0.94")
        tail.set_title("the tail, enlarged: a thin line every 0.001")


def _histogram(axes: Axes, samples: Sequence[Sample], target: float) -> None:
    """Final losses of each sample over common bins, and the target."""
    everything = [loss for _, group, _ in samples for loss in group.losses]
    low, high = min([*everything, target]), max([*everything, target])
    bins = np.linspace(low, high if high > low else low + 1e-3, 31)
    tallest = 0.0
    for i, (name, group, _) in enumerate(samples):
        if group.losses:
            heights, _, _ = axes.hist(group.losses, bins, color=COLOURS[i % len(COLOURS)], alpha=0.35,
                                      label=f"{name}: n {len(group.runs)}, mean {np.mean(group.losses):.6f}")
            axes.hist(group.losses, bins, color=COLOURS[i % len(COLOURS)], histtype="step", linewidth=1.8)
            tallest = max(tallest, float(heights.max()))
    axes.axvline(target, color="black", linewidth=1.2, linestyle="--", label=f"target {target:g}")
    axes.set(xlabel="final validation loss (nats a token)", ylabel="runs", title="final losses",
             ylim=(0, max(tallest, 1) * (1.15 + 0.06 * len(samples))))  # room for the legend above the bars
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(fontsize=9, loc="upper right")
