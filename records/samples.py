"""Gather the runs that a statistic is over: from logs, folders of logs and runs.csv files, each run once.

A runs.csv has the columns val_loss (nats a token) and, unless unknown, train_time_ms; a curve.csv has step,
val_loss and train_time_ms. Both are read as strictly as logs: a row that is not what the first line announces
is refused.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import runlog
from runlog import Curve, LogError, Run, printable

TRACK_TARGETS = (2.92, 3.28)  # nats: this track's loss to reach and the short track's
NEAR = 0.05  # nats: a final loss this near to a track's target belongs to that track
PARALLEL_FROM = 48  # files from which worker processes pay for their start
# fields of train_gpt_medium.py that may differ between runs of a sample: they do not change what is computed
BOOKKEEPING = ("seed", "run_name", "run_id", "log_dir", "compare_with", "save_every", "save_final",
               "keep_checkpoints", "resume", "resume_anyway", "startup_timeout", "step_timeout")
CURVE_HEADER, RUNS_HEADER = ("step", "val_loss", "train_time_ms"), ("val_loss", "train_time_ms")


class UserError(Exception):
    """The user's mistake, in one sentence."""


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


# ---------------------------------------------------------------------------------------------------------
# csv files


def read_rows(path: Path, header: Sequence[str]) -> Iterator[tuple[int, dict[str, float]]]:
    """(line number, numbers) of each row of a csv whose first line is `header`, its last column optional.

    What is not a number, and every cell of a row of the wrong length, is NaN. Raises LogError.
    """
    text = runlog.text_of(runlog.read_bytes(path)).removeprefix("\ufeff")
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        names = [name.strip() for name in next(reader, [])]
        if names not in (list(header), list(header[:-1])):
            found = printable(",".join(names))[:80]
            raise LogError(f"its first line must be {','.join(header)}; it is {found!r}")
        for row in reader:
            if any(cell.strip() for cell in row):
                numbers = [_cell(cell) for cell in row] if len(row) == len(names) else [math.nan] * len(names)
                yield reader.line_num, dict(zip(names, numbers))
    except csv.Error as error:
        raise LogError(f"not a csv: {error}") from error


def _cell(cell: str) -> float:
    text = cell.strip()
    return float(text) if text.isascii() and runlog.NUMBER.fullmatch(text.encode()) else math.nan


def read_runs_csv(path: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """The runs of a runs.csv, and its refused rows. Raises LogError for the file as a whole.

    Where a curve.csv lies beside it, its last step is the number of steps of these runs.
    """
    try:
        steps = read_curve_csv(path.parent / "curve.csv")[-1][0]
    except LogError:
        steps = None
    runs, refused = [], []
    for number, row in read_rows(path, RUNS_HEADER):
        loss, time_ms = row["val_loss"], row.get("train_time_ms")
        name = f"{path.parent.resolve().name}/{path.name}:{number}"
        if not all(map(math.isfinite, row.values())):
            refused.append((name, "not the numbers that the first line announces"))
        elif time_ms is not None and loss > 1000 > time_ms > 0:
            refused.append((name, "the columns are swapped: a loss of thousands and a time of a few ms"))
        elif not 0 < loss < runlog.MAX_LOSS or (time_ms is not None and time_ms <= 0):
            refused.append((name, "not a loss in nats and a time in ms"))
        else:
            runs.append(Run(name=name, loss=loss, time_ms=time_ms, steps=steps))
    if not runs and not refused:
        raise LogError("no run in it")
    return runs, refused


def read_curve_csv(path: Path) -> Curve:
    """The points of a curve.csv. Raises LogError."""
    curve: Curve = []
    for number, row in read_rows(path, CURVE_HEADER):
        step, loss, time_ms = row["step"], row["val_loss"], row.get("train_time_ms")
        whole = math.isfinite(step) and step >= 0 and step == int(step)
        timed = time_ms is None or 0 <= time_ms < math.inf
        if not (whole and timed and 0 < loss < runlog.MAX_LOSS):
            raise LogError(f"line {number} is not a step, a loss and a time")
        if curve and step <= curve[-1][0]:
            raise LogError(f"line {number}: step {int(step)} after step {curve[-1][0]}")
        curve.append((int(step), loss, time_ms))
    if not curve:
        raise LogError("no point in it")
    return curve


# ---------------------------------------------------------------------------------------------------------
# Logs


def logs_in(folder: Path) -> list[Path]:
    """The folder's logs (runlog.SUFFIXES), sorted by name; its subfolders are not searched."""
    try:
        return sorted(p for p in folder.iterdir()
                      if p.name.endswith(runlog.SUFFIXES) and not p.name.startswith(".") and p.is_file())
    except OSError as error:
        raise UserError(f"{folder}: cannot be listed: {error.strerror}") from error


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
        bar = partial(tqdm, unit="log", leave=False, disable=None)  # None: only where stderr is a terminal
        yield from zip(paths, bar(results, "reading logs", len(paths)))


# ---------------------------------------------------------------------------------------------------------
# Groups


def gather(arguments: Sequence[Path], with_curve: bool = False) -> Group:
    """All runs that PATHs (logs, folders of logs, runs.csv) hold, each once. Raises UserError if none counts.

    A folder stands for its logs; if it has none, for its runs.csv.
    """
    group = Group()
    files = [file for path in arguments for file in _files(path, group.notes)]
    seen: dict[tuple[str, object], str] = {}
    for path in (p for p in files if p.suffix == ".csv"):
        try:
            runs, refused = read_runs_csv(path)
        except LogError as error:
            runs, refused = [], [(str(path), str(error))]
        group.refused += refused
        for run in runs:
            _count(group, run, run.name, seen)
    for path, result in read_logs([p for p in files if p.suffix != ".csv"], with_curve):
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


def _files(path: Path, notes: list[str]) -> list[Path]:
    """The files that one PATH stands for. Raises UserError."""
    try:
        is_folder, exists = path.is_dir(), path.exists() or path.is_symlink()
    except OSError as error:  # a folder on the way may not be entered, or the name is too long
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not exists:
        raise UserError(f"{path}: no such file or folder")
    if not is_folder:
        return [path]
    logs, listed = logs_in(path), path / "runs.csv"
    if logs and listed.is_file():
        notes.append(f"{listed} is not counted beside the folder's logs: name it to count it")
    if not logs and not listed.is_file():
        raise UserError(f"{path}: no log ({', '.join(runlog.SUFFIXES)}) and no runs.csv in this folder; "
                        "subfolders are not searched")
    return logs or [listed]


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


def target_of(run: Run) -> float | None:
    """The target of the track whose runs end near this run's loss; None near none."""
    return next((target for target in TRACK_TARGETS if abs(run.loss - target) < NEAR), None)


def _tuned(run: Run) -> str | None:
    """The overrides that change what is computed, as text; None where the log has none or states none."""
    overrides = runlog.header_json(run.facts, "overrides")
    if not isinstance(overrides, dict):
        return run.facts.get("overrides")
    tuned = {name: value for name, value in overrides.items() if name not in BOOKKEEPING}
    return json.dumps(tuned, sort_keys=True)


def _fact(key: str) -> Callable[[Run], object]:
    return lambda run: run.facts.get(key)


def _differences(runs: Sequence[Run]) -> Iterator[str]:
    """Warnings where the runs of one group were not made alike, or are not independent."""
    alike: list[tuple[str, Callable[[Run], object]]] = [
        ("embedded sources", lambda run: run.source_sha), ("recipes", _fact("recipe")),
        ("scales", _fact("scale")), ("overrides", _tuned),
        ("numbers of steps", lambda run: run.steps), ("targets", target_of),
        ("world sizes", _fact("world_size")), ("GPUs", _fact("gpu")), ("PyTorch versions", _fact("pytorch"))]
    for what, key in alike:
        counts = Counter(value for run in runs if (value := key(run)) is not None)
        if len(counts) > 1:
            most = ", ".join(f"{printable(str(v))[:40]} ({k})" for v, k in counts.most_common(4))
            yield f"{what} differ within the group, so these runs are not one sample: {most}"
    for what, key in (("seed", _fact("hyperparameter seed")), ("parent log", _fact("parent")),
                      ("losses at every validation", lambda run: run.losses_sha)):
        shared = [k for v, k in Counter(map(key, runs)).items() if v is not None and k > 1]
        if shared:
            yield f"not independent: {sum(shared)} runs have the same {what} as another"


def _repeats(runs: Sequence[Run]) -> Iterator[str]:
    """Values that occur more than once, and how many such pairs chance alone would give."""
    times = [run.time_ms for run in runs if run.time_ms is not None]
    for what, unit, values in (("val_loss", 1e-6, [run.loss for run in runs]), ("train_time_ms", 1.0, times)):
        repeated = {v: k for v, k in Counter(values).items() if k > 1}
        mean = sum(values) / len(values) if values else 0.0
        sd = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
        if repeated and sd > 0:
            # Two normal values fall within the same unit with probability unit / (2 sqrt(pi) sd).
            chance = math.comb(len(values), 2) * unit / (2 * math.sqrt(math.pi) * sd)
            most = ", ".join(f"{v:.10g} ({k} times)" for v, k in sorted(repeated.items())[:6])
            yield f"{what} repeats: {most}; by chance {chance:.2f} equal pairs are to be expected"


def mean_curve(runs: Sequence[Run]) -> Curve:
    """The mean loss and time at every step at which all the runs were validated."""
    points = [{step: (loss, time_ms) for step, loss, time_ms in run.curve} for run in runs]
    curve: Curve = []
    for step in sorted(set.intersection(*map(set, points))) if points else []:
        losses, times = zip(*(p[step] for p in points))
        curve.append((step, sum(losses) / len(losses), None if None in times else sum(times) / len(times)))
    return curve


def side_of(path: Path) -> tuple[Group, Curve]:
    """What a PATH of `compare` or `plot` stands for: its runs, and the mean curve of its logs.

    The curve of a runs.csv is the curve.csv beside it; a curve.csv is a curve without runs. Raises UserError.
    """
    if path.suffix == ".csv" and path.is_file():
        try:
            if runlog.read_bytes(path).removeprefix(b"\xef\xbb\xbf").startswith(b"step"):
                return Group(), read_curve_csv(path)
        except LogError as error:
            raise UserError(f"{path}: {error}") from error
    group = gather([path], with_curve=True)
    curve = mean_curve(group.runs)
    beside = (path if path.is_dir() else path.parent) / "curve.csv"
    if not curve and beside.is_file():
        try:
            curve = read_curve_csv(beside)
        except LogError as error:
            group.notes.append(f"{beside}: {error}")
    return group, curve
