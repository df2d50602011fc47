#!/usr/bin/env python3
"""Statistics that a record claim can rest on: run `python records/stats.py COMMAND --help`.

    summary PATH...        n, mean, sd, interval, t-test and train time of runs
    bootstrap PATH...      how p would spread if one had made m runs
    plan PATH...           how many runs a claim needs, what they cost, and what peeking does to the test
    compare A B            Welch's t-tests, the two curves, and who reaches a loss sooner
    plot PATH... -o FILE   curves, the enlarged tail and the final losses
    source LOG             the script embedded in a log, byte for byte
    rerun LOG              the command that repeats a run
    diff LOG1 LOG2         what changed in script, versions and hyperparameters
    table                  the table of records/README.md

A PATH is a log (gzip too), a folder of logs (its runs.csv if it has no log), or a runs.csv.

The rule of the track: the mean final validation loss is below 2.92 with p < 0.01, by a one-sided one-sample
t-test over runs that were all made and all counted. Deciding the number of runs by looking at p is not that
test: who stops at the first p < 0.01 passes far more than 1 % of worthless changes; `plan` simulates that.

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
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import runlog
from inference import (ALPHA, TARGET, Degenerate, bootstrap_p, describe, half_interval, peeking, runs_needed,
                       t_test, welch)
from runlog import Curve, LogError, printable
from samples import NEAR, RUNS_HEADER, Group, UserError, gather, read_curve_csv, side_of

RECORDS = Path(__file__).resolve().parent
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"  # of the table in README.md


# ---------------------------------------------------------------------------------------------------------
# Output


def emit(lines: Iterable[str]) -> None:
    """Lines to stdout; what its encoding lacks is escaped (main sets that up)."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def emit_json(value: dict[str, Any]) -> None:
    emit([json.dumps(value, indent=1, allow_nan=False)])


def warn(text: str) -> None:
    print(printable(text), file=sys.stderr)


def write_file(path: Path, data: bytes, force: bool) -> None:
    """Write a file whole or not at all. Raises UserError if it exists (unless `force`) or cannot be."""
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not force:
            raise UserError(f"{path}: exists already; --force overwrites it")
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned text: the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
            for row in rows]


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as a markdown table whose first row is the head; `|` is escaped."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


# ---------------------------------------------------------------------------------------------------------
# summary

RUN_COLUMNS = ("run", "val_loss", "train_time_ms", "minutes", "ms_a_step", "peak_MiB")


def summarise(group: Group, target: float) -> dict[str, Any]:
    """All the numbers of `summary`, ready for JSON. Where the test is refused, `refusal` says why."""
    loss, notes = describe(group.losses), list(group.notes)
    if abs(loss["mean"] - target) > NEAR:
        notes.append(f"the mean loss {loss['mean']:.6f} is far from the target {target:g}: another track or "
                     "scale, or the wrong --target")
    runs = [{"name": run.name, "val_loss": run.loss, "train_time_ms": run.time_ms, "steps": run.steps,
             "ms_per_step": run.time_ms / run.steps if run.time_ms and run.steps else None,
             "peak_mib": run.peak_mib} for run in group.runs]
    per_step = [run["ms_per_step"] for run in runs if run["ms_per_step"]]
    test = refusal = None
    try:
        test = t_test(group.losses, target)
    except Degenerate as error:
        refusal = str(error)
    return {"target": target, "alpha": ALPHA, "loss": loss, "test": asdict(test) if test else None,
            "refusal": refusal, "claim": test.p < ALPHA if test else None,
            "train_time_ms": describe(group.times) if group.times else None,
            "ms_per_step": sum(per_step) / len(per_step) if per_step else None, "runs": runs,
            "refused": [{"name": name, "reason": reason} for name, reason in group.refused], "notes": notes}


def verdict(s: dict[str, Any]) -> str:
    """One sentence on the claim."""
    if s["refusal"]:
        return s["refusal"]
    p, target = s["test"]["p"], s["target"]
    if s["claim"]:
        return f"p {p:.5g} < {ALPHA:g}: mean loss below {target:g}, if the number of runs was fixed before"
    return f"p {p:.5g} >= {ALPHA:g}: these runs do not show a mean loss below {target:g}"


def summary_facts(s: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of every figure of the summary, for text and markdown alike."""
    loss, time, test = s["loss"], s["train_time_ms"], s["test"]
    facts = [("val loss", f"n {loss['n']}  mean {loss['mean']:.6f}  sd {shown(loss['sd'], 7)}  "
                          f"min {loss['min']:.6f}  max {loss['max']:.6f}  median {loss['median']:.6f}")]
    if loss["low"] is not None:
        facts.append(("99 % interval of the mean", f"{loss['low']:.6f} to {loss['high']:.6f}"))
    if test:
        facts.append(("one-sided t-test", f"mean < {s['target']:g}: t {test['t']:.4f}, "
                                          f"{test['df']:g} degrees of freedom, p {test['p']:.5g}"))
    if time:
        known = "" if time["n"] == loss["n"] else f", known for {time['n']} runs"
        ms, minutes = f"{time['mean']:.2f}", f"{time['mean'] / 6e4:.3f}"
        if time["sd"] is not None:
            ms, minutes = f"{ms} +- {time['sd']:.2f}", f"{minutes} +- {time['sd'] / 6e4:.3f}"
        step = shown(s["ms_per_step"], 2)
        facts.append(("train", f"time {ms} ms ({minutes} min{known}), {step} ms a step"))
    return [*facts, ("verdict", verdict(s))]


def run_cells(run: dict[str, Any]) -> tuple[str, ...]:
    time = run["train_time_ms"]
    return (printable(run["name"]), shown(run["val_loss"], 6), shown(time, 0), shown(time and time / 6e4, 3),
            shown(run["ms_per_step"], 2), shown(run["peak_mib"], 0))


def summary_text(s: dict[str, Any], brief: bool) -> list[str]:
    lines = [] if brief else [*columns([RUN_COLUMNS, *map(run_cells, s["runs"])]), ""]
    facts = summary_facts(s)
    width = max(len(name) for name, _ in facts) + 2
    lines += [f"{name.ljust(width)}{text}" for name, text in facts]
    lines += [f"note: {printable(note)}" for note in s["notes"]]
    return lines + [f"refused: {printable(r['name'])}: {r['reason']}" for r in s["refused"]]


def summary_markdown(s: dict[str, Any], brief: bool) -> list[str]:
    lines = markdown_table([("figure", "value"), *summary_facts(s)])
    if not brief:
        lines += ["", *markdown_table([RUN_COLUMNS, *map(run_cells, s["runs"])])]
    if s["notes"]:
        lines += ["", *(f"- note: {printable(note)}" for note in s["notes"])]
    if s["refused"]:
        refused = [(printable(r["name"]), r["reason"]) for r in s["refused"]]
        lines += ["", *markdown_table([("refused", "reason"), *refused])]
    return lines


def command_summary(args: argparse.Namespace) -> None:
    group = gather(args.paths)
    s = summarise(group, args.target)
    if args.csv:
        if len(group.times) != len(group.runs):
            raise UserError("--csv needs the train time of every run, and some logs have none")
        rows = [",".join(RUNS_HEADER), *(f"{run.loss:.6f},{run.time_ms:.0f}" for run in group.runs)]
        write_file(args.csv, "".join(f"{row}\n" for row in rows).encode(), args.force)
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
              "target": args.target, "without_variance": len(p) - len(usable), "p_mean": float(usable.mean()),
              "p_max": float(usable.max()), "p_variance": float(usable.var(ddof=1)),
              "share_below_alpha": float((usable < ALPHA).mean()), "notes": group.notes}
    if args.format == "json":
        emit_json(result)
        return
    lines = [f"{args.resamples} resamples of {args.size} out of {len(group.runs)} runs, seed {args.seed}, "
             f"target {args.target:g}",
             f"p: mean {result['p_mean']:.6g}  max {result['p_max']:.6g}  variance "
             f"{result['p_variance']:.6g}",
             f"p < {ALPHA:g} in {100 * result['share_below_alpha']:.2f} % of them"]
    if result["without_variance"]:
        lines.append(f"note: {result['without_variance']} resamples do not vary, have no p and are left out")
    emit(lines + [f"note: {printable(note)}" for note in group.notes])


def make_plan(mean: float, sd: float, n: int | None, minutes: float | None,
              args: argparse.Namespace) -> dict[str, Any]:
    """Runs, minutes and money for each probability, and what peeking does over that many runs.

    `n` is the pilot's size. With it the plan is also made for a true mean at the upper end of the pilot's
    one-sided 80 % interval: pilots that look good are often lucky. `minutes` is the machine time of a run.
    """
    cautious = None if n is None else mean + half_interval(sd, n, 0.6)  # two-sided 60 %: 80 % to one side

    def cost(runs: int | None) -> dict[str, Any]:
        total = None if runs is None or minutes is None else runs * minutes
        return {"runs": runs, "minutes": total,
                "money": None if total is None or args.price is None else total / 60 * args.price}

    rows = [{"probability": q, **cost(runs_needed(q, mean, sd, args.target)),
             "cautious": None if cautious is None else cost(runs_needed(q, cautious, sd, args.target))}
            for q in (0.5, 0.8, 0.95)]
    looks = args.looks or min(max(rows[1]["runs"] or 40, 2), 200)
    return {"target": args.target, "mean": mean, "sd": sd, "pilot_runs": n, "cautious_mean": cautious,
            "minutes_a_run": minutes, "price_an_hour": args.price, "plan": rows,
            "peeking": peeking(looks, args.simulations, args.seed)}


def plan_text(plan: dict[str, Any]) -> list[str]:
    n, cautious, target = plan["pilot_runs"], plan["cautious_mean"], plan["target"]
    lines = [f"{'given' if n is None else f'pilot of {n} runs'}: mean {plan['mean']:.6f}  "
             f"sd {plan['sd']:.7f}  target {target:g}"]
    if plan["mean"] >= target:
        lines.append("This mean is not below the target: no number of runs will show that it is.")
    means = [plan["mean"]] + ([] if n is None else [cautious])
    rows = [["probability of p < 0.01", "runs", "minutes", "money",
             *([] if n is None else ["runs, cautious", "minutes", "money"])]]
    for row in plan["plan"]:
        cells = [f"{100 * row['probability']:.0f} %"]
        for mean, cost in zip(means, (row, row["cautious"])):
            cells += [str(cost["runs"] or ("over 10^6" if mean < target else "never")),
                      shown(cost["minutes"], 0), shown(cost["money"], 2)]
        rows.append(cells)
    lines += columns(rows)
    if n is not None:
        lines.append("cautious: if the true mean is at the upper end of the pilot's one-sided 80 % interval, "
                     f"{cautious:.6f}" + (", which is not below the target" if cautious >= target else ""))
    if plan["minutes_a_run"] is not None:
        lines.append(f"a run takes {plan['minutes_a_run']:.2f} machine minutes (--minutes, --overhead)")
    peek = plan["peeking"]
    rate, error = 100 * peek["false_positive_rate"], 100 * peek["standard_error"]
    return [*lines,
            "WARNING: fix the number of runs before the first one. Stopping at the first p < 0.01 is not a "
            "test at 0.01:",
            f"with a look after each of runs 2 to {peek['looks']}, a change worth nothing passes in "
            f"{rate:.2f} +- {error:.2f} % of cases, not in 1 % ({peek['simulations']} simulations);",
            f"an honest 1 % over these looks needs p < {peek['threshold']:.2g} at the look where one stops."]


def command_plan(args: argparse.Namespace) -> None:
    given = (args.mean is not None) + (args.sd is not None)
    if given == 1 or (given == 2) == bool(args.paths):
        raise UserError("plan needs either pilot runs (PATH...) or both --mean and --sd")
    mean, sd, n, minutes, notes = args.mean, args.sd, None, args.minutes, []
    if args.paths:
        group = gather(args.paths)
        t_test(group.losses, args.target)  # a pilot without spread has no plan
        pilot = describe(group.losses)
        mean, sd, n, notes = pilot["mean"], pilot["sd"], pilot["n"], group.notes
        if minutes is None and group.times:
            minutes = sum(group.times) / len(group.times) / 6e4
    if args.price is not None and minutes is None:
        raise UserError("--price needs --minutes, the machine time of one run")
    plan = make_plan(mean, sd, n, None if minutes is None else minutes + args.overhead, args)
    if args.format == "json":
        emit_json({**plan, "notes": notes})
    else:
        emit(plan_text(plan) + [f"note: {printable(note)}" for note in notes])


# ---------------------------------------------------------------------------------------------------------
# compare


def reach(curve: Curve, loss: float) -> tuple[float, float | None] | None:
    """(step, ms) at which a curve first comes down to `loss`, linear between validations; None if never."""
    for i, (step, value, time_ms) in enumerate(curve):
        if value > loss:
            continue
        if i == 0:
            return float(step), time_ms
        before_step, before, before_ms = curve[i - 1]
        part = (before - loss) / (before - value)
        time_ms = None if time_ms is None or before_ms is None else before_ms + part * (time_ms - before_ms)
        return before_step + part * (step - before_step), time_ms
    return None


def compare(a: tuple[Group, Curve], b: tuple[Group, Curve], loss: float | None,
            target: float) -> dict[str, Any]:
    """Welch's tests, the curves at common steps, and the step and time at which each reaches `loss`.

    Without a `loss` it is the target where both reach it, else the higher of the two lowest losses.
    """
    tests, refusals = {}, {}
    for what, x, y in (("val_loss", a[0].losses, b[0].losses), ("train_time_ms", a[0].times, b[0].times)):
        try:
            tests[what] = welch(x, y, what)
        except Degenerate as refusal:
            refusals[what] = str(refusal)
    in_a = {step: (value, time_ms) for step, value, time_ms in a[1]}
    curves = [{"step": step, "a": in_a[step][0], "b": value, "difference": value - in_a[step][0],
               "a_ms": in_a[step][1], "b_ms": time_ms} for step, value, time_ms in b[1] if step in in_a]
    reached = None
    if a[1] and b[1]:
        if loss is None:
            loss = max(target, *(min(value for _, value, _ in curve) for curve in (a[1], b[1])))
        found = {side: reach(curve, loss) for side, curve in (("a", a[1]), ("b", b[1]))}
        reached = {"loss": loss, **{side: f and {"step": f[0], "ms": f[1]} for side, f in found.items()}}
    return {"tests": tests, "refusals": refusals, "curves": curves, "reach": reached}


def sooner(a: float | None, b: float | None) -> str:
    """How much sooner B is there than A, in per cent of A."""
    if not a or b is None:
        return "unknown"
    return f"B {abs(1 - b / a) * 100:.2f} % {'sooner' if b <= a else 'later'}"


def compare_text(c: dict[str, Any], names: tuple[str, str]) -> list[str]:
    lines = [f"A = {names[0]}", f"B = {names[1]}", ""]
    for what, digits in (("val_loss", 6), ("train_time_ms", 2)):
        if what in c["refusals"]:
            lines.append(f"{what}: {c['refusals'][what]}")
            continue
        w, d, signed = c["tests"][what], f".{digits}f", f"+.{digits}f"
        lines += [f"{what}: A {w['mean_a']:{d}} (n {w['n_a']})  B {w['mean_b']:{d}} (n {w['n_b']})  B - A "
                  f"{w['difference']:{signed}}, 95 % interval {w['low']:{signed}} to {w['high']:{signed}}",
                  f"  Welch's two-sided t-test: t {w['t']:.4f}, {w['df']:.2f} degrees of freedom, "
                  f"p {w['p']:.5g}"]
    lines.append("")
    if c["curves"]:
        rows = [("step", "A", "B", "B - A", "A ms", "B ms")]
        rows += [(str(r["step"]), f"{r['a']:.6f}", f"{r['b']:.6f}", f"{r['difference']:+.6f}",
                  shown(r["a_ms"], 0), shown(r["b_ms"], 0)) for r in c["curves"]]
        lines += ["curves at common steps", *columns(rows), ""]
    else:
        lines.append("curves: no common steps to compare (a curve comes from logs or from a curve.csv)")
    if c["reach"]:
        loss, a, b = c["reach"]["loss"], c["reach"]["a"], c["reach"]["b"]
        for side, f in (("A", a), ("B", b)):
            when = "never" if f is None else f"at step {f['step']:.1f}, " + (
                "time unknown" if f["ms"] is None else f"{f['ms'] / 1000:.1f} s")
            lines.append(f"{side} reaches {loss:.7g} {when}")
        if a and b:
            steps, time = sooner(a["step"], b["step"]), sooner(a["ms"], b["ms"])
            lines.append(f"same loss: {steps} in steps, {time} in train time")
    return lines


def command_compare(args: argparse.Namespace) -> None:
    a, b = side_of(args.a), side_of(args.b)
    result = compare(a, b, args.loss, args.target)
    notes = [f"{side}: {note}" for side, (group, _) in (("A", a), ("B", b))
             for note in [*group.notes, *(f"refused {name}: {reason}" for name, reason in group.refused)]]
    if args.format == "json":
        emit_json({**result, "notes": notes})
    else:
        lines = compare_text(result, (printable(str(args.a)), printable(str(args.b))))
        emit(lines + [f"note: {printable(note)}" for note in notes])


# ---------------------------------------------------------------------------------------------------------
# plot


def published_curves() -> list[tuple[str, Curve]]:
    """The curve.csv of every folder of records/track_2_medium, in order of their names."""
    found = sorted((RECORDS / "track_2_medium").glob("*/curve.csv"))
    try:
        return [(path.parent.name, read_curve_csv(path)) for path in found]
    except LogError as error:
        raise UserError(f"a published curve is damaged: {error}") from error


def command_plot(args: argparse.Namespace) -> None:
    kind = args.output.suffix[1:].lower()
    if kind not in ("png", "svg", "pdf"):
        raise UserError(f"{args.output}: the plot's name must end in .png, .svg or .pdf")
    samples = []
    for path in args.paths:
        group, curve = side_of(path)
        samples.append((printable(path.resolve().name), group, curve))
        for name, reason in group.refused:
            warn(f"refused: {name}: {reason}")
    from figure import draw  # matplotlib takes a second to import, and only this command needs it

    stream = io.BytesIO()
    draw(samples, published_curves() if args.published else [], args.target).savefig(stream, format=kind)
    write_file(args.output, stream.getvalue(), force=True)
    emit([f"wrote {printable(str(args.output))}"])


# ---------------------------------------------------------------------------------------------------------
# source, rerun, diff. What they print comes from a log, so control characters are escaped; nothing is run.


def parts_of(path: Path) -> runlog.Parts:
    """The parts of a log, of an unfinished run too. Raises UserError."""
    try:
        return runlog.read_parts(path)
    except LogError as error:
        raise UserError(f"{path}: {error}") from error


def command_source(args: argparse.Namespace) -> None:
    source = parts_of(args.log).source
    if source is None:
        raise UserError(f"{args.log}: no embedded script in this log")
    if args.output is None:
        sys.stdout.buffer.write(source)
        return
    write_file(args.output, source, args.force)
    emit([f"wrote {printable(str(args.output))}: {len(source)} bytes, sha256 "
          f"{hashlib.sha256(source).hexdigest()}"])


def option_words(name: str, value: object) -> list[str]:
    """A field's JSON value as train_gpt_medium.py takes it on its command line."""
    text = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def rerun_command(facts: dict[str, str]) -> str:
    """The command that repeats a run, quoted for a shell, from its header. Raises UserError."""
    needed = ("recipe", "scale", "world_size", "overrides", "hyperparameter seed")
    missing = [key for key in needed if key not in facts]
    if missing:
        raise UserError(f"its header does not state {', '.join(missing)}: not a log of train_gpt_medium.py")
    overrides, seed = (runlog.header_json(facts, key) for key in needed[3:])
    names_ok = isinstance(overrides, dict) and all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in overrides)
    if not names_ok or type(seed) is not int or not re.fullmatch(r"[1-9]\d{0,3}", facts["world_size"]):
        raise UserError("its header is damaged: overrides, seed or world_size cannot be read")
    words = ["python", "-m", "torch.distributed.run", "--standalone",
             f"--nproc_per_node={facts['world_size']}", "train_gpt_medium.py", "--recipe", facts["recipe"],
             "--scale", facts["scale"]]
    for name, value in overrides.items():
        if name not in ("seed", "resume", "resume_anyway"):  # the seed follows; a rerun starts at step 0
            words += option_words(name, value)
    if facts.get("device") == "cpu" and facts.get("threads", "").isdecimal():
        words.insert(0, f"OMP_NUM_THREADS={facts['threads']}")  # sums round as they did
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
        warn("note: train_gpt_medium.py here is not the script of this log; to rerun that one, cut it out "
             f"first: python records/stats.py source {shlex.quote(str(args.log))} -o FILE")
    if "parent" in facts:
        warn(f"note: this log continues {facts['parent']}; the command repeats the whole run from step 0 with "
             f"this log's seed and options, whatever those of the first part were")


def diff_lines(a: Path, b: Path) -> list[str]:
    """A unified diff of the embedded scripts, then the header's facts that differ."""
    left, right = parts_of(a), parts_of(b)
    old, new = (runlog.text_of(p.source or b"").split("\n") for p in (left, right))
    lines = list(difflib.unified_diff(old, new, f"{a} (script)", f"{b} (script)", lineterm=""))
    if not lines:
        lines = ["script: in neither log" if left.source is None else "script: the same"]
    facts = [runlog.read_header(p.header) for p in (left, right)]
    own = ("run", "command", "source_sha256", "started")  # differ between any two runs
    changed = [f"{key}: {facts[0].get(key, '-')} -> {facts[1].get(key, '-')}"
               for key in dict.fromkeys([*facts[0], *facts[1]])
               if key not in own and facts[0].get(key) != facts[1].get(key)]
    return [printable(line) for line in [*lines, "", *(changed or ["header: nothing differs"])]]


def command_diff(args: argparse.Namespace) -> None:
    emit(diff_lines(args.log1, args.log2))


# ---------------------------------------------------------------------------------------------------------
# table

TABLE_HEAD = ("rank", "minutes", "recipe", "date", "n", "mean loss", "sd", "p", "mean of n, minutes", "log")


def read_quoted(path: Path) -> dict[str, tuple[float, str]]:
    """record -> (minutes, date) of quoted.csv: times as modded-nanogpt's maintainers list them."""
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            return {row["record"]: (float(row["minutes"]), row["date"]) for row in csv.DictReader(stream)}
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def record_rows(records: Path) -> list[list[str]]:
    """The table's rows, fastest first: the folders with a runs.csv, and quoted times without a folder.

    A folder that quoted.csv does not name is ranked by the mean train time of its runs.
    """
    quoted = read_quoted(records / "quoted.csv")
    rows: list[tuple[float, list[str]]] = []
    folders = {path.parent.name: path for path in sorted((records / "track_2_medium").glob("*/runs.csv"))}
    for name, path in folders.items():
        s = summarise(gather([path]), TARGET)
        own = s["train_time_ms"] and s["train_time_ms"]["mean"] / 6e4
        minutes = quoted[name][0] if name in quoted else own
        if minutes is None:
            raise UserError(f"{path}: no train times, and quoted.csv has none for {name}")
        date = re.match(r"\d{4}-\d\d-\d\d", name)
        link = f"track_2_medium/{name}/"
        logs = [f"[{kind}]({link}{kind})" for kind in ("runs.csv", "curve.csv", "log.txt.gz")
                if (path.parent / kind).is_file()]
        p = f"{s['test']['p']:.2g}" if s["test"] else "-"
        rows.append((minutes, [
            f"{minutes:.2f}", f"[{name}]({link})", date[0] if date else "-", str(s["loss"]["n"]),
            f"{s['loss']['mean']:.6f}", shown(s["loss"]["sd"], 6), p, shown(own, 2), ", ".join(logs)]))
    for name in quoted.keys() - folders.keys():
        minutes, date = quoted[name]
        rows.append((minutes, [f"{minutes:.2f}", f"{name} (quoted)", date or "-", *["-"] * 6]))
    rows.sort(key=lambda row: (row[0], row[1]))
    return [[str(rank), *cells] for rank, (_, cells) in enumerate(rows, 1)]


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
        raise UserError(f"{readme}: it must have one line {BEGIN} and, below it, one line {END}")
    new = old[:old.index(BEGIN)] + BEGIN + "\n" + "\n".join(lines) + "\n" + old[old.index(END):]
    if args.check and new != old:
        raise UserError(f"{readme}: the table is not what `python records/stats.py table --write` makes")
    if args.write:
        write_file(readme, new.encode("utf-8"), force=True)
    emit([f"{readme}: the table is {'up to date' if new == old else 'written'}"])


# ---------------------------------------------------------------------------------------------------------
# Options


def number(low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """An argparse type: a number with low <= x <= high, which NaN is not."""
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
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    whole, nats = partial(number, kind=int), number(0.01, 100)

    def add(name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text.split(":")[0], description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    def sample(command: argparse.ArgumentParser, nargs: str = "+") -> None:
        command.add_argument("paths", metavar="PATH", nargs=nargs, type=Path,
                             help="a log (gzip too), a folder of logs (or its runs.csv), or a runs.csv")
        target(command)

    def target(command: argparse.ArgumentParser) -> None:
        command.add_argument("--target", type=nats, default=TARGET, metavar="NATS",
                             help="validation loss to be below, in nats a token (default %(default)s)")

    def output(command: argparse.ArgumentParser, *choices: str, seed: bool = False) -> None:
        command.add_argument("--format", choices=choices, default="text", help="of the output (default text)")
        if seed:
            command.add_argument("--seed", type=whole(0, 2**63), default=0, help="of the draws (default 0)")

    c = add("summary", command_summary,
            "figures of all the runs: n, mean, sd (ddof 1), min, max, median, 99 % interval, one-sided "
            "t-test of mean < target, train time in ms and minutes; each run counted "
            "once; refused logs with the reasons")
    sample(c)
    output(c, "text", "markdown", "json")
    c.add_argument("--brief", action="store_true", help="leave out the line for each run")
    c.add_argument("--csv", type=Path, metavar="FILE",
                   help="also write the counted runs as a runs.csv (val_loss in nats, train_time_ms in ms)")
    c.add_argument("--force", action="store_true", help="let --csv overwrite a file")

    c = add("bootstrap", command_bootstrap,
            "how p would spread: draw --size runs with replacement, --resamples times, and test each draw; "
            "mean, max and variance of p, and the share of draws with p < 0.01")
    sample(c)
    output(c, "text", "json", seed=True)
    c.add_argument("--size", type=whole(2, 1_000_000), default=40, help="runs a draw (default %(default)s)")
    c.add_argument("--resamples", type=whole(2, 10_000_000), default=1000, help="draws (default %(default)s)")

    c = add("plan", command_plan,
            "how many runs a claim needs: those that give p < 0.01 with probability 50, 80 and 95 %, from "
            "pilot runs or from --mean and --sd, and what they cost. Fix the number before the first run: "
            "stopping at the first p < 0.01 is not a test at 0.01; plan simulates "
            "how often that passes a worthless change")
    sample(c, "*")
    output(c, "text", "json", seed=True)
    c.add_argument("--mean", type=nats, metavar="NATS", help="expected final loss, in nats a token")
    c.add_argument("--sd", type=number(1e-9, 100), metavar="NATS", help="its sd between runs, in nats")
    c.add_argument("--minutes", type=number(0, 1e6), help="minutes of machine time a run takes (default: the "
                   "pilot's mean train time, which leaves out compilation and validation)")
    c.add_argument("--overhead", type=number(0, 1e6), default=0.0, metavar="MINUTES",
                   help="minutes added to each run for compilation, warm-up and validation (default 0)")
    c.add_argument("--price", type=number(0, 1e9),
                   help="price of an hour of the WHOLE machine (all its GPUs), in any currency")
    c.add_argument("--looks", type=whole(2, 2000), help="runs after which the simulated peeker gives up "
                   "(default: the runs for 80 %%, at most 200)")
    c.add_argument("--simulations", type=whole(100, 1_000_000), default=20_000,
                   help="simulated series of runs (default %(default)s)")

    c = add("compare", command_compare,
            "B against A: Welch's t-test on final loss and train time with a 95 % interval of the "
            "difference, the mean curves at common steps, and the step and second at which each reaches "
            "a loss")
    for side in "ab":
        c.add_argument(side, metavar=side.upper(), type=Path, help="a log, a folder of logs, a runs.csv "
                       "(with the curve.csv beside it) or a curve.csv")
    c.add_argument("--loss", type=nats, metavar="NATS", help="loss to reach, in nats a token (default: the "
                   "target where both reach it, else the higher of the two lowest losses)")
    target(c)
    output(c, "text", "json")

    c = add("plot", command_plot,
            "curves and final losses: loss by step and by train time (minutes), the tail enlarged so that "
            "0.001 nats are visible, a histogram; 1600 x 1200 pixels")
    sample(c)
    c.add_argument("--published", action="store_true", help="add the curves of records/track_2_medium")
    c.add_argument("-o", "--output", type=Path, default=Path("curves.png"), metavar="FILE",
                   help=".png, .svg or .pdf; overwritten if it exists (default %(default)s)")

    c = add("source", command_source, "the script embedded in a log: to stdout or FILE, byte for byte")
    c.add_argument("log", metavar="LOG", type=Path)
    c.add_argument("-o", "--output", type=Path, metavar="FILE", help="where to write it")
    c.add_argument("--force", action="store_true", help="overwrite FILE")

    c = add("rerun", command_rerun, "the command that repeats a run: recipe, scale, overrides, seed and "
            "world size, from a log of train_gpt_medium.py; it is printed, never run")
    c.add_argument("log", metavar="LOG", type=Path)

    c = add("diff", command_diff, "what changed from LOG1 to LOG2: a unified diff of the embedded scripts, "
            "then the recipe, versions and hyperparameters that differ")
    c.add_argument("log1", metavar="LOG1", type=Path)
    c.add_argument("log2", metavar="LOG2", type=Path)

    c = add("table", command_table, "the table of records/README.md: from the folders of "
            "records/track_2_medium that have a runs.csv and from quoted.csv; train time in minutes, "
            "losses in nats a token")
    action = c.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="rewrite the table between README.md's markers")
    action.add_argument("--check", action="store_true", help="exit with 1 if the table in README.md differs")
    c.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER",
                   help="the records folder (default: the one this script is in)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, or 1 after a user's mistake (argparse exits with 2)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for file names that the terminal cannot show
    args = parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except (UserError, Degenerate) as error:
        warn(f"stats.py: {error}")
        return 1
    except BrokenPipeError:  # `| head` has read enough: nothing more may be flushed into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # what is left: stdout cannot be written, the disk is full
        warn(f"stats.py: {error.strerror or error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
