#!/usr/bin/env python3
"""Statistics that a record claim can rest on: run `python records/stats.py COMMAND --help`.

    summary PATH...        n, mean, sd, interval, t-test and train time of the runs in logs, folders or a runs.csv
    bootstrap PATH...      how p would spread if one had made m runs
    plan PATH...           how many runs a claim needs, what they cost, and what peeking does to the test
    compare A B            Welch's t-tests, the two curves, and who reaches a loss sooner
    plot PATH... -o FILE   curves, the enlarged tail and the final losses
    source LOG             the script embedded in a log, byte for byte
    rerun LOG              the command that repeats a run
    diff LOG1 LOG2         what changed in script, versions and hyperparameters
    table                  the table of records/README.md

The rule of the track: the mean final validation loss is below 2.92 with p < 0.01, by a one-sided one-sample
t-test over runs that were all made and all counted. Deciding the number of runs by looking at p is not that
test: who stops at the first p < 0.01 claims far more than 1 % of the worthless changes (`plan` simulates how many).

Units: losses in nats a token, train times in milliseconds of the training clock unless minutes are named.
A user's mistake ends in one sentence on stderr and exit code 1 (2 for a wrong option). Output is ASCII.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import hashlib
import io
import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

import runlog
from runlog import LogError, Run, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = 2.92  # nats: the loss to reach on this track
ALPHA = 0.01  # a claim needs p below this
TRACK_TARGETS = (2.92, 3.28)  # nats: this track and the short one; a final loss within 0.05 of one belongs to it
RECORDS = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
PARALLEL_FROM = 48  # files from which worker processes pay for their start
MAX_RUNS = 1_000_000  # `plan` looks no further
CURVE_HEADER, RUNS_HEADER = ["step", "val_loss", "train_time_ms"], ["val_loss", "train_time_ms"]

Curve = list[tuple[int, float, float | None]]  # (step, val loss, train time in ms) in order of steps


class UserError(Exception):
    """The user's mistake, in one sentence."""


class Degenerate(Exception):
    """Why a test has no answer on these numbers, in one sentence."""


# ---------------------------------------------------------------------------------------------------------
# Tests. Only scipy.special is used: importing scipy.stats takes longer than reading 100 logs.


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
        raise Degenerate(f"No test: it takes at least 2 runs to estimate a spread, and there {_are(len(array))}.")
    return array


def _are(n: int) -> str:
    return "is 1" if n == 1 else f"are {n}"


def t_test(losses: Sequence[float], target: float = TARGET) -> TTest:
    """One-sided one-sample t-test of `mean < target`. Raises Degenerate for n < 2, zero variance, NaN."""
    x = checked(losses)
    if x.min() == x.max():
        raise Degenerate(f"No test: all {len(x)} losses are {x[0]:.6g}, so their variance is zero; runs differ, "
                         "so these are copies, one seed, or losses rounded too far (to 4 digits, say).")
    t = (x.mean() - target) / (x.std(ddof=1) / math.sqrt(len(x)))
    return TTest(float(t), len(x) - 1, float(special.stdtr(len(x) - 1, t)))


def welch(a: Sequence[float], b: Sequence[float], what: str, level: float = 0.95) -> dict[str, float]:
    """Welch's two-sided t-test of mean(b) - mean(a), with the interval of that level. Raises Degenerate."""
    x, y = checked(a, what), checked(b, what)
    vx, vy = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
    if x.min() == x.max() and y.min() == y.max():
        raise Degenerate(f"No test: neither side's {what} varies.")
    se = math.sqrt(vx + vy)
    df = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
    difference = float(y.mean() - x.mean())
    half = float(special.stdtrit(df, 0.5 + level / 2)) * se
    return {"mean_a": float(x.mean()), "mean_b": float(y.mean()), "n_a": len(x), "n_b": len(y),
            "difference": difference, "low": difference - half, "high": difference + half,
            "t": difference / se, "df": float(df), "p": float(2 * special.stdtr(df, -abs(difference / se)))}


def describe(values: Sequence[float], level: float | None = None) -> dict[str, float | int | None]:
    """n, mean, sd (ddof 1; None for n = 1), min, max, median and, for a level, the interval of the mean."""
    x = np.asarray(values, dtype=np.float64)
    sd = float(x.std(ddof=1)) if len(x) > 1 else None
    out: dict[str, float | int | None] = {"n": len(x), "mean": float(x.mean()), "sd": sd, "min": float(x.min()),
                                          "max": float(x.max()), "median": float(np.median(x))}
    if level is not None:
        half = None if sd is None else float(special.stdtrit(len(x) - 1, 0.5 + level / 2)) * sd / math.sqrt(len(x))
        out["low"] = None if half is None else float(x.mean()) - half
        out["high"] = None if half is None else float(x.mean()) + half
    return out


def bootstrap_p(losses: Sequence[float], size: int, resamples: int, seed: int, target: float = TARGET) -> np.ndarray:
    """p of each of `resamples` draws of `size` losses with replacement; NaN where a draw has zero variance."""
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

    The simulated runs are of no use (their true mean is the target), so a test at ALPHA claims 1 % of them. The
    t statistic does not depend on target or spread: standard normal losses serve. `threshold` is the p that one
    would have to demand at every look for an honest 1 %.
    """
    rng, smallest = np.random.default_rng(seed), np.empty(simulations)
    n = np.arange(1, looks + 1)
    rows = max(1, 1_000_000 // looks)
    for begin in range(0, simulations, rows):
        x = rng.standard_normal((min(rows, simulations - begin), looks))
        total, squares = x.cumsum(axis=1)[:, 1:], (x * x).cumsum(axis=1)[:, 1:]
        count = n[1:]
        variance = np.maximum(squares - total**2 / count, 1e-300) / (count - 1)
        smallest[begin:begin + rows] = special.stdtr(count - 1, total / np.sqrt(count * variance)).min(axis=1)
    rate = float((smallest < ALPHA).mean())
    return {"looks": looks, "simulations": simulations, "false_positive_rate": rate,
            "standard_error": math.sqrt(rate * (1 - rate) / simulations),
            "threshold": float(np.quantile(smallest, ALPHA))}


# ---------------------------------------------------------------------------------------------------------
# Gathering runs


@dataclass
class Group:
    """Counted runs, refused files with their reasons, and what a reader of the numbers must know."""
    runs: list[Run] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [run.loss for run in self.runs]

    @property
    def times(self) -> list[float]:
        return [run.time_ms for run in self.runs if run.time_ms is not None]


def logs_in(folder: Path) -> list[Path]:
    """The folder's logs (runlog.SUFFIXES), sorted by name; its subfolders are not searched."""
    try:
        return sorted(p for p in folder.iterdir() if p.name.endswith(runlog.SUFFIXES) and p.is_file()
                      and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error


def read_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """(line number, numbers) of a csv with at least the first of `wanted` columns. Raises LogError."""
    text = runlog.text_of(runlog.read_bytes(path)).removeprefix("\ufeff")
    try:
        rows = list(csv.reader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise LogError(f"not a csv: {error}") from error
    names = [name.strip() for name in rows[0]] if rows else []
    if names not in (list(wanted), list(wanted[:-1])):
        raise LogError(f"its first line must be {','.join(wanted)}; it is {printable(','.join(names))[:80]!r}")
    for number, row in enumerate(rows[1:], 2):
        if not any(cell.strip() for cell in row):
            continue
        values = [float(cell) if runlog.NUMBER.fullmatch(cell.strip().encode("utf-8", "replace")) else math.nan
                  for cell in row]
        if len(row) != len(names):
            values = [math.nan]
        yield number, dict(zip(names, values))


def read_runs_csv(path: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """Runs of a runs.csv (val_loss,train_time_ms) and its refused rows. Raises LogError for the file as a whole.

    Where a curve.csv lies beside it, its last step is the number of steps of these runs.
    """
    label = f"{path.parent.resolve().name}/{path.name}"
    try:
        steps = read_curve_csv(path.parent / "curve.csv")[-1][0]
    except LogError:
        steps = None
    runs, refused = [], []
    for number, row in read_rows(path, RUNS_HEADER):
        loss, time_ms = row.get("val_loss", math.nan), row.get("train_time_ms")
        name = f"{label}:{number}"
        if not all(map(math.isfinite, row.values())) or not row:
            refused.append((name, "not the numbers that the first line announces"))
        elif time_ms is not None and loss > 1000 > time_ms > 0:
            refused.append((name, "the columns are swapped: a loss of thousands and a time of a few ms"))
        elif not 0 < loss < 100 or (time_ms is not None and time_ms <= 0):
            refused.append((name, "not a loss in nats and a time in ms"))
        else:
            runs.append(Run(name=name, loss=loss, time_ms=time_ms, steps=steps))
    if not runs and not refused:
        raise LogError("no run in it")
    return runs, refused


def read_curve_csv(path: Path) -> Curve:
    """The points of a curve.csv (step,val_loss,train_time_ms). Raises LogError."""
    curve: Curve = []
    for number, row in read_rows(path, CURVE_HEADER):
        values = [row.get(name, math.nan) for name in CURVE_HEADER]
        if not all(map(math.isfinite, values)) or (curve and values[0] <= curve[-1][0]):
            raise LogError(f"line {number} is not a later step with a loss and a time")
        curve.append((int(values[0]), values[1], values[2]))
    if not curve:
        raise LogError("no point in it")
    return curve


def _read(path: Path, with_curve: bool) -> Run | str:
    """A worker's job: the run, or the reason why there is none."""
    try:
        return runlog.read_run(path, with_curve)
    except LogError as error:
        return str(error)


def read_logs(paths: Sequence[Path], with_curve: bool) -> Iterator[tuple[Path, Run | str]]:
    """Runs or reasons of many logs, in order, on all cores; a log's bytes are dropped once it is read."""
    job = partial(_read, with_curve=with_curve)
    if len(paths) < PARALLEL_FROM:
        yield from ((path, job(path)) for path in paths)
        return
    from tqdm import tqdm

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        results = pool.map(job, paths, chunksize=8)
        yield from zip(paths, tqdm(results, "reading logs", len(paths), unit="log", leave=False, disable=None))


def gather(arguments: Sequence[Path], with_curve: bool = False) -> Group:
    """All runs that PATHs (logs, folders of logs, runs.csv) hold, each once. Raises UserError if there are none.

    A folder stands for its logs; if it has none, for its runs.csv.
    """
    group, logs = Group(), []
    for path in arguments:
        if not path.exists() and not path.is_symlink():
            raise UserError(f"{path}: no such file or folder")
        if path.is_dir():
            found, listed = logs_in(path), (path / "runs.csv").is_file()
            if found and listed:
                group.notes.append(f"{path}/runs.csv is not counted beside the folder's logs: name it to count it")
            if not found and not listed:
                raise UserError(f"{path}: no log ({', '.join(runlog.SUFFIXES)}) and no runs.csv in this folder; "
                                "subfolders are not searched")
            logs += found or [path / "runs.csv"]
        else:
            logs.append(path)
    seen: dict[tuple[str, object], str] = {}
    for path in (p for p in logs if p.suffix == ".csv"):
        try:
            runs, refused = read_runs_csv(path)
        except LogError as error:
            runs, refused = [], [(str(path), str(error))]
        group.refused += refused
        for run in runs:
            _count(group, run, run.name, seen)
    for path, result in read_logs([p for p in logs if p.suffix != ".csv"], with_curve):
        if isinstance(result, str):
            group.refused.append((str(path), result))
        else:
            _count(group, result, str(path), seen)
    if not group.runs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in group.refused[:5])
        more = f"; and {len(group.refused) - 5} more" if len(group.refused) > 5 else ""
        raise UserError(f"no run can be counted: {reasons}{more}")
    group.notes += [*_differences(group.runs), *_repeats(group.runs)]
    return group


def _count(group: Group, run: Run, label: str, seen: dict[tuple[str, object], str]) -> None:
    """Add a run unless it has been counted: same body, same uuid, or same loss and time to the last digit."""
    keys: list[tuple[str, object]] = [("the same body as", run.body_sha)] if run.body_sha else []
    keys += [("the same uuid as", run.uuid)] if run.uuid else []
    keys += [("the same loss and train time as", (run.loss, run.time_ms))] if run.time_ms else []
    for key in keys:
        if key in seen:
            group.refused.append((label, f"counted already: {key[0]} {seen[key]}"))
            return
    seen.update((key, label) for key in keys)
    group.runs.append(run)


def target_of(run: Run) -> str | None:
    """The loss that a run was made for: what its header says, else the track whose target its loss is near."""
    near = [t for t in TRACK_TARGETS if abs(run.loss - t) < 0.05]
    return run.facts.get("hyperparameter target_loss") or (f"{near[0]:g}" if near else None)


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """Warnings where the runs of one group were not made alike, or are not independent."""
    alike = {"embedded sources": lambda r: r.source_sha, "numbers of steps": lambda r: r.steps, "targets": target_of,
             **{what: partial(lambda key, r: r.facts.get(key), key) for what, key in (
                 ("recipes", "recipe"), ("scales", "scale"), ("overrides", "overrides"),
                 ("world sizes", "world_size"), ("PyTorch versions", "pytorch"), ("GPUs", "gpu"))}}
    for what, key in alike.items():
        counts = Counter(value for run in runs if (value := key(run)) is not None)
        if len(counts) > 1:
            shown = ", ".join(f"{printable(str(v))[:40]} ({k})" for v, k in counts.most_common(4))
            yield f"{what} differ within the group, so these runs are not one sample: {shown}"
    for what, key in (("the same seed", lambda r: r.facts.get("hyperparameter seed")),
                      ("the same losses at every validation", lambda r: r.losses_sha),
                      ("the same parent log", lambda r: r.facts.get("parent"))):
        repeated = [k for v, k in Counter(key(run) for run in runs).items() if v is not None and k > 1]
        if repeated:
            yield f"not independent: {sum(repeated)} runs share {what} with another"


def _repeats(runs: Sequence[Run]) -> Iterator[str]:
    """Values that occur more than once, and how many such pairs chance alone would give."""
    for what, unit, values in (("val_loss", 1e-6, [run.loss for run in runs]),
                               ("train_time_ms", 1.0, [run.time_ms for run in runs if run.time_ms is not None])):
        repeated = {v: k for v, k in Counter(values).items() if k > 1}
        sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        if repeated and sd > 0:
            # Two normal values fall within the same unit with probability unit / (2 sqrt(pi) sd).
            chance = math.comb(len(values), 2) * unit / (2 * math.sqrt(math.pi) * sd)
            shown = ", ".join(f"{v:.10g} ({k} times)" for v, k in sorted(repeated.items())[:6])
            yield f"{what} repeats: {shown}; by chance {chance:.2f} equal pairs are to be expected"


def mean_curve(runs: Sequence[Run]) -> Curve:
    """The mean loss and time at every step at which all the runs were validated."""
    if not runs:
        return []
    points = [{step: (loss, time_ms) for step, loss, time_ms in run.curve} for run in runs]
    curve: Curve = []
    for step in sorted(set.intersection(*map(set, points))):
        losses, times = zip(*(p[step] for p in points))
        curve.append((step, sum(losses) / len(losses), None if None in times else sum(times) / len(times)))
    return curve


# ---------------------------------------------------------------------------------------------------------
# summary


def summarise(group: Group, target: float) -> dict[str, Any]:
    """All the numbers of `summary`, ready for JSON. Where a test is refused, `refusal` says why."""
    losses, times = group.losses, group.times
    loss = describe(losses, 0.99)
    out: dict[str, Any] = {
        "target": target, "alpha": ALPHA, "loss": loss, "test": None, "refusal": None, "claim": None,
        "train_time_ms": describe(times) if times else None,
        "ms_per_step": _mean(run.time_ms / run.steps for run in group.runs if run.time_ms and run.steps),
        "runs": [{"name": run.name, "val_loss": run.loss, "train_time_ms": run.time_ms, "steps": run.steps,
                  "ms_per_step": run.time_ms / run.steps if run.time_ms and run.steps else None,
                  "peak_mib": run.peak_mib} for run in group.runs],
        "refused": [{"name": name, "reason": reason} for name, reason in group.refused], "notes": list(group.notes)}
    if abs(loss["mean"] - target) > 0.05:
        out["notes"].append(f"the mean loss {loss['mean']:.6f} is far from the target {target:g}: another track, "
                            "another scale, or the wrong --target")
    try:
        test = t_test(losses, target)
        out.update(test=asdict(test), claim=test.p < ALPHA)
    except Degenerate as refusal:
        out["refusal"] = str(refusal)
    return out


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def verdict(s: dict[str, Any]) -> str:
    """One sentence on the claim."""
    if s["refusal"]:
        return s["refusal"]
    p, target = s["test"]["p"], s["target"]
    if s["claim"]:
        return f"p {p:.5g} < {ALPHA:g}: mean loss below {target:g}, if this number of runs was fixed beforehand"
    return f"p {p:.5g} >= {ALPHA:g}: these runs do not show a mean loss below {target:g}"


def summary_facts(s: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of every figure of the summary, for text and markdown alike."""
    loss, time = s["loss"], s["train_time_ms"]
    facts = [("val loss", f"n {loss['n']}  mean {loss['mean']:.6f}  sd {shown(loss['sd'], 7)}  min {loss['min']:.6f}  "
                          f"max {loss['max']:.6f}  median {loss['median']:.6f}")]
    if loss["low"] is not None:
        facts.append(("99 % interval of the mean", f"{loss['low']:.6f} to {loss['high']:.6f}"))
    if s["test"]:
        facts.append(("one-sided t-test", f"mean < {s['target']:g}: t {s['test']['t']:.4f}, {s['test']['df']:g} degrees "
                                          f"of freedom, p {s['test']['p']:.5g}"))
    if time:
        known = "" if time["n"] == loss["n"] else f", known for {time['n']} runs"
        facts.append(("train", f"time {time['mean']:.2f} +- {shown(time['sd'], 2)} ms ({time['mean'] / 6e4:.3f} +- "
                               f"{shown(time['sd'] and time['sd'] / 6e4, 3)} min{known}), "
                               f"{shown(s['ms_per_step'], 2)} ms a step"))
    return [*facts, ("verdict", verdict(s))]


RUN_COLUMNS = ("run", "val_loss", "train_time_ms", "minutes", "ms_a_step", "peak_MiB")


def run_cells(run: dict[str, Any]) -> tuple[str, ...]:
    minutes = run["train_time_ms"] and run["train_time_ms"] / 6e4
    return (printable(run["name"]), shown(run["val_loss"], 6), shown(run["train_time_ms"], 0), shown(minutes, 3),
            shown(run["ms_per_step"], 2), shown(run["peak_mib"], 0))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as a markdown table whose first row is the head; `|` is escaped."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def summary_text(s: dict[str, Any], brief: bool) -> list[str]:
    lines = [] if brief else [*columns([RUN_COLUMNS, *map(run_cells, s["runs"])]), ""]
    facts = summary_facts(s)
    width = max(len(name) for name, _ in facts) + 2
    lines += [f"{name.ljust(width)}{text}" for name, text in facts]
    lines += [f"note: {note}" for note in s["notes"]]
    return lines + [f"refused: {printable(r['name'])}: {r['reason']}" for r in s["refused"]]


def summary_markdown(s: dict[str, Any], brief: bool) -> list[str]:
    lines = markdown_table([("figure", "value"), *summary_facts(s)])
    if not brief:
        lines += ["", *markdown_table([RUN_COLUMNS, *map(run_cells, s["runs"])])]
    if s["notes"]:
        lines += ["", *(f"- note: {note}" for note in s["notes"])]
    return lines + (["", *markdown_table([("refused", "reason"), *((printable(r["name"]), r["reason"])
                                                                  for r in s["refused"])])] if s["refused"] else [])


def command_summary(args: argparse.Namespace) -> None:
    group = gather(args.paths)
    s = summarise(group, args.target)
    if args.csv:
        rows = "".join(f"{run.loss:.6f},{shown(run.time_ms, 0)}\n" for run in group.runs if run.time_ms is not None)
        if len(group.times) != len(group.runs):
            raise UserError("--csv needs the train time of every run, and some logs have none")
        write_new(args.csv, (",".join(RUNS_HEADER) + "\n" + rows).encode(), args.force)
    if args.format == "json":
        emit_json(s)
    else:
        emit((summary_text if args.format == "text" else summary_markdown)(s, args.brief))


# ---------------------------------------------------------------------------------------------------------
# bootstrap and plan


def command_bootstrap(args: argparse.Namespace) -> None:
    group = gather(args.paths)
    p = bootstrap_p(group.losses, args.size, args.resamples, args.seed, args.target)
    usable = p[~np.isnan(p)]
    if len(usable) < 2:
        raise Degenerate("No bootstrap: fewer than 2 resamples have any variance; raise --size.")
    result = {"runs": len(group.runs), "size": args.size, "resamples": args.resamples, "seed": args.seed,
              "target": args.target, "without_variance": int(np.isnan(p).sum()), "p_mean": float(usable.mean()),
              "p_max": float(usable.max()), "p_variance": float(usable.var(ddof=1)),
              "share_below_alpha": float((usable < ALPHA).mean())}
    if args.format == "json":
        emit_json(result)
        return
    lines = [f"{args.resamples} resamples of {args.size} out of {len(group.runs)} runs, seed {args.seed}, "
             f"target {args.target:g}",
             f"p   mean {result['p_mean']:.6g}  max {result['p_max']:.6g}  variance {result['p_variance']:.6g}",
             f"p < {ALPHA:g} in {100 * result['share_below_alpha']:.2f} % of them"]
    if result["without_variance"]:
        lines.append(f"note: {result['without_variance']} resamples of zero variance have no p and are left out")
    emit(lines + [f"note: {note}" for note in group.notes])


def make_plan(mean: float, sd: float, n: int | None, args: argparse.Namespace, minutes: float | None) -> dict[str, Any]:
    """Runs, minutes and money for each probability, and what peeking does over that many runs.

    `n` is the pilot's size; with it, the plan is also made for a true mean at the upper end of the pilot's
    one-sided 80 % interval, for pilots that look good are often lucky.
    """
    each = None if minutes is None else minutes + args.overhead
    cautious = None if n is None else mean + float(special.stdtrit(n - 1, 0.8)) * sd / math.sqrt(n)

    def cost(runs: int | None) -> dict[str, Any]:
        total = None if runs is None or each is None else runs * each
        return {"runs": runs, "minutes": total,
                "money": None if total is None or args.price is None else total / 60 * args.price}

    rows = [{"probability": q, **cost(runs_needed(q, mean, sd, args.target)),
             "cautious": None if cautious is None else cost(runs_needed(q, cautious, sd, args.target))}
            for q in (0.5, 0.8, 0.95)]
    looks = args.looks or min(max(rows[1]["runs"] or 40, 2), 200)
    return {"target": args.target, "mean": mean, "sd": sd, "pilot_runs": n, "cautious_mean": cautious,
            "minutes_a_run": each, "price_an_hour": args.price, "plan": rows,
            "peeking": peeking(looks, args.simulations, args.seed)}


def plan_text(plan: dict[str, Any]) -> list[str]:
    n = plan["pilot_runs"]
    lines = [f"{'given' if n is None else f'pilot of {n} runs'}: mean {plan['mean']:.6f}  sd {plan['sd']:.7f}  "
             f"target {plan['target']:g}"]
    if plan["mean"] >= plan["target"]:
        lines.append("This mean is not below the target: no number of runs will show that it is.")
    head = ["probability of p < 0.01", "runs", "minutes", "money"]
    head += [] if n is None else ["runs, cautious", "minutes", "money"]
    rows = [head]
    for row in plan["plan"]:
        cells = [f"{100 * row['probability']:.0f} %"]
        for cost in (row, row["cautious"])[:1 if n is None else 2]:
            cells += [f"{cost['runs']}" if cost["runs"] else "over 10^6" if plan["mean"] < plan["target"] else "never",
                      shown(cost["minutes"], 0), shown(cost["money"], 2)]
        rows.append(cells)
    lines += columns(rows)
    if n is not None:
        lines.append(f"cautious: the true mean is at the upper end of the pilot's one-sided 80 % interval, "
                     f"{plan['cautious_mean']:.6f}" + ("" if plan["cautious_mean"] < plan["target"] else
                                                       ", which is not below the target"))
    if plan["minutes_a_run"] is not None:
        lines.append(f"a run takes {plan['minutes_a_run']:.2f} minutes of the machine (--minutes, --overhead)")
    peek = plan["peeking"]
    return lines + [
        "WARNING: fix the number of runs before the first one. Stopping at the first p < 0.01 is not a test at 0.01:",
        f"with a look after each of runs 2 to {peek['looks']}, a change worth nothing passes in "
        f"{100 * peek['false_positive_rate']:.2f} +- {100 * peek['standard_error']:.2f} % of the cases instead of 1 % "
        f"({peek['simulations']} simulations);",
        f"an honest 1 % over so many looks needs p < {peek['threshold']:.2g} at the look where one stops."]


def command_plan(args: argparse.Namespace) -> None:
    if (args.mean is None) != (args.sd is None) or (args.mean is None) == (not args.paths):
        raise UserError("plan needs either pilot runs (PATH...) or both --mean and --sd")
    minutes, n, notes = args.minutes, None, []
    if args.paths:
        group = gather(args.paths)
        t_test(group.losses, args.target)  # a pilot without spread has no plan
        pilot = describe(group.losses)
        args.mean, args.sd, n, notes = pilot["mean"], pilot["sd"], pilot["n"], group.notes
        if minutes is None and group.times:
            minutes = sum(group.times) / len(group.times) / 6e4
    if args.price is not None and minutes is None:
        raise UserError("--price needs --minutes, the machine time of one run")
    plan = make_plan(args.mean, args.sd, n, args, minutes)
    if args.format == "json":
        emit_json(plan)
    else:
        emit(plan_text(plan) + [f"note: {note}" for note in notes])


# ---------------------------------------------------------------------------------------------------------
# compare


def side_of(path: Path) -> tuple[Group, Curve]:
    """One side of a comparison: its runs, and the mean curve of its logs or the curve.csv beside its runs.csv."""
    if path.is_file() and path.suffix == ".csv":
        try:
            return Group(), read_curve_csv(path)
        except LogError:
            pass  # not a curve: a runs.csv, or gather says what is wrong
    group = gather([path], with_curve=True)
    curve = mean_curve(group.runs)
    beside = (path if path.is_dir() else path.parent) / "curve.csv"
    if not curve and beside.is_file():
        try:
            curve = read_curve_csv(beside)
        except LogError as error:
            group.notes.append(f"{beside}: {error}")
    return group, curve


def reach(curve: Curve, loss: float) -> tuple[float, float | None] | None:
    """(step, ms) at which the curve first comes down to `loss`, linear between validations; None if it never does."""
    for i, (step, value, time_ms) in enumerate(curve):
        if value > loss:
            continue
        if i == 0:
            return float(step), time_ms
        before_step, before, before_ms = curve[i - 1]
        part = (before - loss) / (before - value)
        time_ms = None if None in (time_ms, before_ms) else before_ms + part * (time_ms - before_ms)
        return before_step + part * (step - before_step), time_ms
    return None


def compare(a: tuple[Group, Curve], b: tuple[Group, Curve], loss: float | None, target: float) -> dict[str, Any]:
    """Welch's tests, the curves at common steps, and the steps and time to `loss` (default: the target where both
    reach it, else the higher of the two final losses)."""
    out: dict[str, Any] = {"tests": {}, "refusals": {}, "curves": [], "reach": None}
    for what, x, y in (("val_loss", a[0].losses, b[0].losses), ("train_time_ms", a[0].times, b[0].times)):
        try:
            out["tests"][what] = welch(x, y, what)
        except Degenerate as refusal:
            out["refusals"][what] = str(refusal)
    in_a = {step: (value, time_ms) for step, value, time_ms in a[1]}
    out["curves"] = [{"step": step, "a": in_a[step][0], "b": value, "difference": value - in_a[step][0],
                      "a_ms": in_a[step][1], "b_ms": time_ms} for step, value, time_ms in b[1] if step in in_a]
    if a[1] and b[1]:
        if loss is None:
            lowest = max(min(value for _, value, _ in curve) for curve in (a[1], b[1]))
            loss = max(target, lowest)
        found = [reach(curve, loss) for curve in (a[1], b[1])]
        out["reach"] = {"loss": loss, **{side: None if f is None else {"step": f[0], "ms": f[1]}
                                         for side, f in zip("ab", found)}}
    return out


def sooner(a: float | None, b: float | None) -> str:
    """How much sooner B is there than A, in per cent of A."""
    if not a or b is None:
        return "-"
    return f"B {abs(1 - b / a) * 100:.2f} % {'sooner' if b <= a else 'later'}"


def compare_text(c: dict[str, Any], names: tuple[str, str]) -> list[str]:
    lines = [f"A = {names[0]}", f"B = {names[1]}", ""]
    for what, digits in (("val_loss", 6), ("train_time_ms", 2)):
        if what in c["refusals"]:
            lines.append(f"{what}: {c['refusals'][what]}")
            continue
        w = c["tests"][what]
        lines += [f"{what}: A {w['mean_a']:.{digits}f} (n {w['n_a']})  B {w['mean_b']:.{digits}f} (n {w['n_b']})  "
                  f"B - A {w['difference']:+.{digits}f}, 95 % interval {w['low']:+.{digits}f} to "
                  f"{w['high']:+.{digits}f}",
                  f"  Welch's two-sided t-test: t {w['t']:.4f}, {w['df']:.2f} degrees of freedom, p {w['p']:.5g}"]
    if not c["curves"]:
        return [*lines, "", "curves: no common steps to compare (curves come from logs or a curve.csv)"]
    rows = [("step", "A", "B", "B - A", "A ms", "B ms")]
    rows += [(str(r["step"]), f"{r['a']:.6f}", f"{r['b']:.6f}", f"{r['difference']:+.6f}", shown(r["a_ms"], 0),
              shown(r["b_ms"], 0)) for r in c["curves"]]
    lines += ["", "curves at common steps", *columns(rows), ""]
    loss, a, b = c["reach"]["loss"], c["reach"]["a"], c["reach"]["b"]
    for side, found in (("A", a), ("B", b)):
        lines.append(f"{side} reaches {loss:g} " + ("never" if found is None else
                     f"at step {found['step']:.1f}, " + (f"{found['ms'] / 1000:.1f} s" if found["ms"] is not None
                                                         else "time unknown")))
    if a and b:
        lines.append(f"same loss: {sooner(a['step'], b['step'])} in steps, {sooner(a['ms'], b['ms'])} in train time")
    return lines


def command_compare(args: argparse.Namespace) -> None:
    a, b = side_of(args.a), side_of(args.b)
    result = compare(a, b, args.loss, args.target)
    notes = [f"{side}: {note}" for side, (group, _) in zip("AB", (a, b)) for note in group.notes]
    notes += [f"{side}: refused {n}: {r}" for side, (group, _) in zip("AB", (a, b)) for n, r in group.refused]
    if args.format == "json":
        emit_json({**result, "notes": notes})
    else:
        emit(compare_text(result, (printable(str(args.a)), printable(str(args.b)))) + [f"note: {n}" for n in notes])


# ---------------------------------------------------------------------------------------------------------
# plot

SIZE_INCHES, DPI = (16.0, 12.0), 100  # 1600 x 1200 pixels
# Okabe and Ito's colours, told apart by colour-blind readers; yellow is left out, it vanishes on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
PUBLISHED_STYLES = ((0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)), (0, (1, 1)), (0, (8, 3, 2, 3)), (0, (4, 4)))


def draw(groups: Sequence[tuple[str, Group, Curve]], published: Sequence[tuple[str, Curve]], target: float) -> Figure:
    """The figure: loss by step, by minutes, the tail with a line every 0.001, and the final losses.

    Each curve panel has one line a log (or one for a runs.csv with a curve.csv), one for each published curve, and
    one for the target.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator

    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    by_step, by_time, tail, finals = figure.subplots(2, 2).flat
    lines: list[tuple[Curve, dict[str, Any]]] = []
    for i, (name, curve) in enumerate(published):
        lines.append((curve, {"color": COLOURS[(i + len(groups)) % len(COLOURS)], "linewidth": 1.6, "alpha": 0.9,
                              "linestyle": PUBLISHED_STYLES[i % len(PUBLISHED_STYLES)], "label": f"published: {name}"}))
    for i, (name, group, own) in enumerate(groups):
        curves = [run.curve for run in group.runs if run.curve] or ([own] if own else [])
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": 2.0 if len(curves) < 5 else 0.9}
        lines += [(curve, {**style, "label": name if k == 0 else "_"}) for k, curve in enumerate(curves)]
    for curve, style in lines:
        steps, losses, times = zip(*curve)
        minutes = [math.nan if t is None else t / 6e4 for t in times]
        by_step.plot(steps, losses, **style)
        by_time.plot(minutes, losses, **style)
        tail.plot(steps, losses, marker="o", markersize=4, **style)
    for axes, label in ((by_step, "step"), (by_time, "train time (minutes)"), (tail, "step")):
        axes.axhline(target, color="black", linewidth=1.2, linestyle="--", label=f"target {target:g}")
        axes.set(xlabel=label, ylabel="validation loss (nats a token)")
        axes.grid(True, color="0.88")
    if lines:
        low = min(min(loss for _, loss, _ in curve) for curve, _ in lines)
        high = max(sorted(loss for _, loss, _ in curve)[min(20, len(curve) - 1)] for curve, _ in lines)
        for axes in (by_step, by_time):  # the first validations (10.8, 4.3) would flatten all the rest
            axes.set_ylim(min(low, target) - 0.02, max(high, target) + 0.05)
        last = max(curve[-1][0] for curve, _ in lines)
        tail.set_xlim(last * 0.965, last * 1.005)
    ends = [curve[-1][1] for curve, _ in lines] + [target]
    tail.set_ylim(min(ends) - 0.002, max(ends) + 0.008)
    if max(ends) - min(ends) < 0.05:  # a line every 0.001 unless the runs end far apart
        tail.yaxis.set_minor_locator(MultipleLocator(0.001))
        tail.grid(True, which="minor", color="0.94")
    by_step.set_title("validation loss by step")
    by_time.set_title("validation loss by train time")
    tail.set_title("the tail, enlarged: a thin line every 0.001")
    _histogram(finals, groups, target)
    by_step.legend(fontsize=9, loc="upper right")
    return figure


def _histogram(axes: Any, groups: Sequence[tuple[str, Group, Curve]], target: float) -> None:
    """Final losses of each group over common bins, and the target."""
    everything = [loss for _, group, _ in groups for loss in group.losses]
    if everything:
        low, high = min([*everything, target]), max([*everything, target])
        bins = np.linspace(low, high if high > low else low + 1e-3, 31)
        for i, (name, group, _) in enumerate(groups):
            if group.losses:
                axes.hist(group.losses, bins, color=COLOURS[i % len(COLOURS)], alpha=0.35, histtype="stepfilled",
                          label=f"{name}: n {len(group.runs)}, mean {np.mean(group.losses):.6f}")
                axes.hist(group.losses, bins, color=COLOURS[i % len(COLOURS)], histtype="step", linewidth=1.8)
    axes.axvline(target, color="black", linewidth=1.2, linestyle="--", label=f"target {target:g}")
    axes.set(xlabel="final validation loss (nats a token)", ylabel="runs", title="final losses")
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.tick_params(axis="x", labelrotation=20)
    axes.legend(fontsize=9, loc="upper right")


def published_curves() -> list[tuple[str, Curve]]:
    """The curve.csv of every folder of records/track_2_medium, in order of their names."""
    found = sorted((RECORDS / "track_2_medium").glob("*/curve.csv"))
    try:
        return [(path.parent.name, read_curve_csv(path)) for path in found]
    except LogError as error:
        raise UserError(f"a published curve is damaged: {error}") from error


def command_plot(args: argparse.Namespace) -> None:
    if args.output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"{args.output}: the plot's name must end in .png, .svg or .pdf")
    groups = []
    for path in args.paths:
        group, curve = side_of(path)
        groups.append((printable(path.resolve().name if path.name in ("", "..") else path.name), group, curve))
        for name, reason in group.refused:
            print(f"refused: {printable(name)}: {reason}", file=sys.stderr)
    figure = draw(groups, published_curves() if args.published else [], args.target)
    stream = io.BytesIO()
    figure.savefig(stream, format=args.output.suffix[1:].lower())
    write_new(args.output, stream.getvalue(), force=True)
    emit([f"wrote {printable(str(args.output))}"])


# ---------------------------------------------------------------------------------------------------------
# source, rerun, diff


def parts_of(path: Path) -> runlog.Parts:
    try:
        return runlog.read_parts(path)
    except LogError as error:
        raise UserError(f"{path}: {error}") from error


def source_of(path: Path) -> bytes:
    source = parts_of(path).source
    if source is None:
        raise UserError(f"{path}: no embedded script in this log")
    return source


def command_source(args: argparse.Namespace) -> None:
    source = source_of(args.log)
    if args.output is None:
        sys.stdout.buffer.write(source)
        return
    write_new(args.output, source, args.force)
    emit([f"wrote {printable(str(args.output))}: {len(source)} bytes, sha256 {hashlib.sha256(source).hexdigest()}"])


def option_text(value: object) -> str:
    """A field's JSON value as it is typed on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ",".join(map(option_text, value))
    return json.dumps(value)


def rerun_command(facts: dict[str, str]) -> str:
    """The command that repeats a run, quoted for a shell, from its header. Raises UserError if facts are missing."""
    missing = [key for key in ("recipe", "world_size", "overrides", "hyperparameter seed") if key not in facts]
    if missing:
        raise UserError(f"the log's header does not state {', '.join(missing)}: not a log of train_gpt_medium.py")
    overrides, seed = runlog.header_json(facts, "overrides"), runlog.header_json(facts, "hyperparameter seed")
    if not isinstance(overrides, dict) or not isinstance(seed, int) or not re.fullmatch(r"\d{1,4}", facts["world_size"]):
        raise UserError("the log's header is damaged: overrides, seed or world_size cannot be read")
    words = ["python", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={facts['world_size']}",
             "train_gpt_medium.py", "--recipe", facts["recipe"]]
    if "scale" in facts:
        words += ["--scale", facts["scale"]]
    for name, value in overrides.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"the log's header is damaged: {printable(name)!r} is not a field's name")
        if name not in ("seed", "resume"):  # the seed follows; a resumed run is repeated from its first step
            words += [f"--{name}", option_text(value)]
    return shlex.join([*words, "--seed", str(seed)])


def command_rerun(args: argparse.Namespace) -> None:
    parts = parts_of(args.log)
    facts = runlog.read_header(parts.header)
    try:
        command = rerun_command(facts)
    except UserError as error:
        raise UserError(f"{args.log}: {error}") from error
    emit([printable(command)])
    here = RECORDS.parent / "train_gpt_medium.py"
    if not here.is_file() or here.read_bytes() != parts.source:
        print("note: train_gpt_medium.py here is not the script of this log; cut that one out first: python "
              f"records/stats.py source {shlex.quote(str(args.log))} -o FILE", file=sys.stderr)
    if "parent" in facts:
        print(f"note: this log continues {printable(facts['parent'])}; the command repeats the whole run from step 0",
              file=sys.stderr)


def diff_lines(a: Path, b: Path) -> list[str]:
    """A unified diff of the embedded scripts, then of the header's facts line by line."""
    left, right = parts_of(a), parts_of(b)
    lines: list[str] = []
    old, new = (runlog.text_of(p.source or b"").split("\n") for p in (left, right))
    changed = list(difflib.unified_diff(old, new, f"{a} (script)", f"{b} (script)", lineterm=""))
    lines += changed or ["script: the same" if left.source is not None else "script: in neither log"]
    facts = [runlog.read_header(p.header) for p in (left, right)]
    rows = [(key, *(f.get(key, "-") for f in facts)) for key in dict.fromkeys([*facts[0], *facts[1]])
            if key not in ("run", "command", "source_sha256") and facts[0].get(key) != facts[1].get(key)]
    lines.append("")
    lines += [f"{key}: {x} -> {y}" for key, x, y in rows] or ["header: the same recipe, versions and hyperparameters"]
    return [printable(line) for line in lines]


def command_diff(args: argparse.Namespace) -> None:
    emit(diff_lines(args.log1, args.log2))


# ---------------------------------------------------------------------------------------------------------
# table


def record_rows(records: Path) -> list[list[str]]:
    """The table's rows, fastest first: folders with a runs.csv, and the quoted times without a folder.

    quoted.csv holds the times as modded-nanogpt's maintainers list them; a folder it does not name is ranked by
    the mean train time of its runs.
    """
    try:
        with open(records / "quoted.csv", newline="", encoding="utf-8") as stream:
            quoted = {row["record"]: row for row in csv.DictReader(stream)}
        minutes = {name: float(row["minutes"]) for name, row in quoted.items()}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{records / 'quoted.csv'}: cannot be read: {error}") from error
    rows: list[tuple[float, list[str]]] = []
    folders = {path.parent.name: path for path in sorted((records / "track_2_medium").glob("*/runs.csv"))}
    for name, path in folders.items():
        s = summarise(gather([path]), TARGET)
        time = s["train_time_ms"] and s["train_time_ms"]["mean"] / 6e4
        listed = minutes.get(name, time)
        if listed is None:
            raise UserError(f"{path}: no train times, and quoted.csv has none for {name}")
        date = re.match(r"\d{4}-\d\d-\d\d", name)
        rows.append((listed, [f"{listed:.2f}", f"[{name}](track_2_medium/{name}/)", date[0] if date else "-",
                              str(s["loss"]["n"]), f"{s['loss']['mean']:.6f}", shown(s["loss"]["sd"], 6),
                              f"{s['test']['p']:.2g}" if s["test"] else "-", shown(time, 2),
                              ", ".join(f"[{kind}](track_2_medium/{name}/{kind})" for kind in ("runs.csv", "curve.csv")
                                        if (path.parent / kind).is_file())]))
    for name in quoted.keys() - folders.keys():
        rows.append((minutes[name], [f"{minutes[name]:.2f}", f"{name} (quoted)", quoted[name]["date"] or "-",
                                     *["-"] * 6]))
    rows.sort(key=lambda row: row[0])
    return [[str(rank), *cells] for rank, (_, cells) in enumerate(rows, 1)]


TABLE_HEAD = ("rank", "minutes", "recipe", "date", "n", "mean loss", "sd", "p", "mean of n, minutes", "log")


def command_table(args: argparse.Namespace) -> None:
    lines = markdown_table([TABLE_HEAD, *record_rows(args.records)])
    readme = args.records / "README.md"
    if not args.write and not args.check:
        emit(lines)
        return
    try:
        old = readme.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{readme}: cannot be read: {error}") from error
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise UserError(f"{readme}: it must have one line {BEGIN} and, later, one line {END}")
    new = old[:old.index(BEGIN)] + BEGIN + "\n" + "\n".join(lines) + "\n" + old[old.index(END):]
    if args.write:
        write_new(readme, new.encode("utf-8"), force=True)
        emit([f"wrote {readme}" if new != old else f"{readme}: up to date"])
    elif new != old:
        raise UserError(f"{readme}: the table is not what `python records/stats.py table --write` makes")
    else:
        emit([f"{readme}: the table is up to date"])


# ---------------------------------------------------------------------------------------------------------
# Output and options


def emit(lines: Iterable[str]) -> None:
    """Lines to stdout; what its encoding lacks is escaped (main sets that up)."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def emit_json(value: dict[str, Any]) -> None:
    emit([json.dumps(value, indent=1, allow_nan=False)])


def write_new(path: Path, data: bytes, force: bool) -> None:
    """Write a file whole or not at all. Raises UserError if it exists (unless `force`) or cannot be written."""
    if path.exists() and not force:
        raise UserError(f"{path}: exists already; --force overwrites it")
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def number(low: float, high: float, kind: type = float) -> Any:
    """An argparse type: a finite number with low <= x <= high."""
    def convert(text: str) -> Any:
        value = kind(text)  # argparse turns a ValueError into its own message
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value
    convert.__name__ = "whole number" if kind is int else "number"
    return convert


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="stats.py", description=__doc__, allow_abbrev=False,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    count = partial(number, kind=int)

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    def paths(command: argparse.ArgumentParser, nargs: str = "+") -> None:
        command.add_argument("paths", metavar="PATH", nargs=nargs, type=Path,
                             help="a log (gzip too), a folder of logs (its runs.csv if it has no log), or a runs.csv")

    def target(command: argparse.ArgumentParser) -> None:
        command.add_argument("--target", type=number(0.01, 100), default=TARGET, metavar="NATS",
                             help="validation loss to be below, in nats a token (default %(default)s)")

    def formats(command: argparse.ArgumentParser, *choices: str) -> None:
        command.add_argument("--format", choices=choices, default="text", help="form of the output (default text)")

    def seed(command: argparse.ArgumentParser) -> None:
        command.add_argument("--seed", type=count(0, 2**63), default=0, help="of the random draws (default 0)")

    c = add("summary", command_summary, "Figures of all the runs in PATHs, each run counted once: mean, sd (ddof 1), 99 % "
            "interval, one-sided t-test of mean < target, train time in ms and minutes; refused logs with the reason.")
    paths(c)
    target(c)
    formats(c, "text", "markdown", "json")
    c.add_argument("--brief", action="store_true", help="leave out the line for each run")
    c.add_argument("--csv", type=Path, metavar="FILE", help="also write the counted runs as a runs.csv "
                   "(val_loss in nats, train_time_ms in ms)")
    c.add_argument("--force", action="store_true", help="let --csv overwrite a file")

    c = add("bootstrap", command_bootstrap, "Draw --size runs with replacement, --resamples times, and test each draw: "
            "mean, max and variance of p, and the share of draws with p < 0.01.")
    paths(c)
    target(c)
    formats(c, "text", "json")
    c.add_argument("--size", type=count(2, 1_000_000), default=40, help="runs in a draw (default %(default)s)")
    c.add_argument("--resamples", type=count(2, 10_000_000), default=1000, help="draws (default %(default)s)")
    seed(c)

    c = add("plan", command_plan, "How many runs give p < 0.01 with probability 50, 80 and 95 %, from pilot runs or from "
            "--mean and --sd, and what they cost. Fix the number before the first run: stopping at the first p < 0.01 "
            "is not a test at 0.01, and plan simulates how often it passes a change that is worth nothing.")
    paths(c, "*")
    target(c)
    formats(c, "text", "json")
    c.add_argument("--mean", type=number(0.01, 100), metavar="NATS", help="expected final loss, in nats a token")
    c.add_argument("--sd", type=number(1e-9, 100), metavar="NATS", help="its standard deviation between runs, in nats")
    c.add_argument("--minutes", type=number(0, 1e6), help="minutes of machine time a run takes (default: the pilot's "
                   "mean train time, which leaves out compilation and validation)")
    c.add_argument("--overhead", type=number(0, 1e6), default=0.0, metavar="MINUTES",
                   help="minutes added to each run for compilation, warm-up and validation (default 0)")
    c.add_argument("--price", type=number(0, 1e9), help="price of an hour of the WHOLE machine (all 8 GPUs), in any "
                   "currency")
    c.add_argument("--looks", type=count(2, 2000), help="runs after which one peeks in the simulation (default: the "
                   "runs for 80 %%, at most 200)")
    c.add_argument("--simulations", type=count(100, 1_000_000), default=20_000, help="simulated series of runs "
                   "(default %(default)s)")
    seed(c)

    c = add("compare", command_compare, "B against A: Welch's t-test on final loss and train time with a 95 % interval "
            "of the difference, the mean curves at common steps, and the steps and seconds to reach a loss.")
    for side in ("a", "b"):
        c.add_argument(side, metavar=side.upper(), type=Path, help="a log, a folder of logs, a runs.csv (with the "
                       "curve.csv beside it) or a curve.csv")
    c.add_argument("--loss", type=number(0.01, 100), metavar="NATS", help="loss to reach, in nats a token (default: "
                   "the target where both reach it, else the higher of the two lowest losses)")
    target(c)
    formats(c, "text", "json")

    c = add("plot", command_plot, "Loss by step and by train time (minutes), the tail enlarged so that 0.001 nats are "
            f"visible, and a histogram of final losses; {SIZE_INCHES[0] * DPI:.0f} x {SIZE_INCHES[1] * DPI:.0f} pixels.")
    paths(c)
    target(c)
    c.add_argument("--published", action="store_true", help="add the published curves of records/track_2_medium")
    c.add_argument("-o", "--output", type=Path, default=Path("curves.png"), metavar="FILE",
                   help=".png, .svg or .pdf; overwritten if it exists (default %(default)s)")

    c = add("source", command_source, "Write the script embedded in a log, byte for byte, to stdout or FILE.")
    c.add_argument("log", metavar="LOG", type=Path)
    c.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it")
    c.add_argument("--force", action="store_true", help="overwrite FILE")

    c = add("rerun", command_rerun, "Print the command that repeats the run of a log of train_gpt_medium.py: recipe, "
            "scale, overrides, seed and world size. It is printed, never run.")
    c.add_argument("log", metavar="LOG", type=Path)

    c = add("diff", command_diff, "What changed from LOG1 to LOG2: a unified diff of the embedded scripts, then recipe, "
            "versions and hyperparameters that differ.")
    c.add_argument("log1", metavar="LOG1", type=Path)
    c.add_argument("log2", metavar="LOG2", type=Path)

    c = add("table", command_table, "The table of records/README.md, from the folders of records/track_2_medium that have "
            "a runs.csv and from the times in quoted.csv; minutes of train time, losses in nats.")
    action = c.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="rewrite the table between the markers in README.md")
    action.add_argument("--check", action="store_true", help="exit with 1 if the committed table differs")
    c.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER", help="the records folder (default: this "
                   "script's)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 1 after a user's mistake (argparse itself exits with 2)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may hold what the terminal cannot show
    args = parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (UserError, Degenerate) as error:
        print(f"stats.py: {printable(str(error))}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head` has read enough; keep the interpreter from flushing into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
