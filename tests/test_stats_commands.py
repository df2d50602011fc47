"""Every command of records/stats.py from the command line: what it prints, writes and refuses."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from stats_helpers import (RECORDS, SMOOTHED, SNOO, TRICKY_PUBLISHED_SOURCE, TRICKY_SOURCE, body, own_log,
                           published_log,
                           write_logs)

import stats
from figure import DPI, SIZE_INCHES, draw
from samples import BOOKKEEPING, side_of

STATS = RECORDS / "stats.py"


def run(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, STATS, *map(str, words)], capture_output=True, timeout=60,
                          check=False,
                          env={**os.environ, **(env or {})})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_logs(tmp_path / "runs", 6)
    return tmp_path / "runs"


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """stdout of a command that must end with `code`; stderr must be empty after success."""
    assert stats.main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    assert (err == "") == (code == 0), err
    return out if code == 0 else err


# ---------------------------------------------------------------------------------------------------------
# summary


def test_summary_of_a_folder_in_which_one_run_failed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = runs / "006_failed.txt"
    failed.write_bytes(own_log(6, text=b"step:1/200 train_time:250ms step_avg:250.00ms\n"))
    lines = printed(capsys, "summary", runs).splitlines()
    names = sorted(path.name for path in runs.glob("*.txt") if path != failed)
    assert [line.split()[0] for line in lines[1:7]] == names
    assert lines[-1] == f"refused: {failed}: no final validation: it ends at step 1 of 200, never validated"
    assert any(line.startswith("val loss") and "n 6 " in line for line in lines)


def test_summary_with_nothing_to_count_is_an_error_that_names_the_reasons(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefg":
        (tmp_path / f"{name}.txt").write_bytes(b"")
    err = printed(capsys, "summary", tmp_path, code=1)
    reasons = "; ".join(f"{tmp_path}/{name}.txt: empty file" for name in "abcde")
    assert err == f"stats.py: no run can be counted: {reasons}; and 2 more\n"


def test_the_three_formats_state_the_same_figures(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "a|b.txt").write_bytes(b"")
    text, markdown = printed(capsys, "summary", runs), printed(capsys, "summary", runs, "--format",
                                                               "markdown")
    s = json.loads(printed(capsys, "summary", runs, "--format", "json"))
    for shown in (text, markdown):
        for figure in (f"mean {s['loss']['mean']:.6f}", f"p {s['test']['p']:.5g}", f"n {s['loss']['n']}",
                       f"time {s['train_time_ms']['mean']:.2f} +- {s['train_time_ms']['sd']:.2f} ms",
                       f"{s['ms_per_step']:.2f} ms a step", f"{s['runs'][0]['val_loss']:.6f}", "empty file"):
            assert figure in shown, figure
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    tables = {line.replace("\\|", "").count("|") for line in rows}
    assert tables == {3, 7}, "a name with | stays in its cell"
    assert s["refused"] == [{"name": str(runs / "a|b.txt"), "reason": "empty file"}]


def test_summary_writes_a_runs_csv_that_gives_the_same_figures(runs: Path, tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "runs.csv"
    first = json.loads(printed(capsys, "summary", runs, "--csv", listed, "--format", "json"))
    again = json.loads(printed(capsys, "summary", listed, "--format", "json"))
    assert listed.read_bytes().startswith(b"val_loss,train_time_ms\n2.9")
    for key in ("loss", "test", "train_time_ms", "claim"):
        assert again[key] == first[key]
    assert "exists already; --force" in printed(capsys, "summary", runs, "--csv", listed, code=1)
    printed(capsys, "summary", runs, "--csv", listed, "--force")
    (runs / "old.txt").write_bytes(b"s:0 tel:10.9857\ns:2 tel:2.9212\n")
    assert "needs the train time of every run" in printed(capsys, "summary", runs, "--csv", tmp_path / "n",
                                                          code=1)


def test_summary_names_the_track_that_a_loss_belongs_to(tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    write_logs(tmp_path, 3, make=published_log, loss=3.279)
    assert "is far from the target 2.92" in printed(capsys, "summary", tmp_path)
    assert "far from" not in printed(capsys, "summary", tmp_path, "--target", "3.28")


# ---------------------------------------------------------------------------------------------------------
# plan and compare


def test_plan_from_a_pilot_and_from_mean_and_sd(capsys: pytest.CaptureFixture[str]) -> None:
    pilot = json.loads(printed(capsys, "plan", SNOO, "--price", "24", "--overhead", "6.6", "--format",
                               "json"))
    assert [row["runs"] for row in pilot["plan"]] == [22, 38, 58]
    assert all(row["cautious"]["runs"] > row["runs"] for row in pilot["plan"])
    first = pilot["plan"][0]
    assert first["minutes"] == pytest.approx(22 * (1404029.93 / 6e4 + 6.6))
    assert first["money"] == pytest.approx(first["minutes"] / 60 * 24), "the price is an hour's"
    given = json.loads(printed(capsys, "plan", "--mean", "2.919616", "--sd", "0.0007156", "--format", "json"))
    assert [row["runs"] for row in given["plan"]] == [22, 38, 58]
    assert given["plan"][0]["minutes"] is None
    assert given["peeking"]["false_positive_rate"] > 0.05


def test_plan_warns_of_peeking_and_of_what_cannot_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "--mean", "2.921", "--sd", "0.0007", "--looks", "10")
    assert "no number of runs will show that it is" in text and text.count("never") == 3
    assert "Stopping at the first p < 0.01 is not a test at 0.01:" in text
    assert "with a look after each of runs 2 to 10, a change worth nothing passes in " in text
    assert "is not that\ntest" in stats.__doc__
    assert "over 10^6" in printed(capsys, "plan", "--mean", "2.9199999", "--sd", "0.0007")


@pytest.mark.parametrize("words, reason", [
    ([], "either pilot runs"), (["--mean", "2.9"], "either pilot runs"),
    ([SNOO, "--mean", "2.9"], "either pilot runs"),
    ([SNOO, "--mean", "2.9", "--sd", "0.1"], "either pilot runs"),
    (["--mean", "2.9", "--sd", "0.1", "--price", "20"], "--price needs --minutes")])
def test_plan_refuses_what_makes_no_plan(words: list[object], reason: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    assert reason in printed(capsys, "plan", *words, code=1)


def test_compare_the_published_records(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "compare", RECORDS / "track_2_medium" / "2025-09-11_SecondInputEmbed", SNOO)
    assert "B - A +0.000204, 95 % interval -0.000189 to +0.000597" in text
    assert "A reaches 2.92 at step 5686.8, 1406.7 s\nB reaches 2.92 at step 5590.7, 1392.2 s\n" in text
    assert "same loss: B 1.69 % sooner in steps, B 1.03 % sooner in train time" in text
    assert ["125", "4.290908", "4.287957", "-0.002951", "28446",
            "28496"] in [x.split() for x in text.splitlines()]
    result = json.loads(printed(capsys, "compare", SNOO / "runs.csv", SMOOTHED, "--format", "json", "--loss",
                                "3"))
    assert result["tests"]["val_loss"]["n_b"] == 160
    assert result["reach"]["loss"] == 3.0
    assert len(result["curves"]) == 45, "steps 0 to 5500; the last step differs"


def test_compare_takes_logs_curves_and_folders(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = next(runs.glob("*.txt"))
    text = printed(capsys, "compare", log, runs, "--loss", "5")
    assert "val_loss: No test: a spread takes at least 2 runs; runs here: 1." in text
    assert "\n200" in text and "A reaches 5 at step" in text
    assert "A reaches 2.92 at step 5590.7" in printed(capsys, "compare", SNOO / "curve.csv", SNOO)
    other = runs.parent / "alone" / "runs.csv"
    other.parent.mkdir()
    shutil.copy(SNOO / "runs.csv", other)
    assert "no common steps" in printed(capsys, "compare", other, runs)
    broken = runs / "curve.csv"
    broken.write_text("step,val_loss,train_time_ms\n5,3,1\n5,3,1\n")
    assert "line 3: step 5 after step 5" in printed(capsys, "compare", broken, runs, code=1)


# ---------------------------------------------------------------------------------------------------------
# source, rerun, diff


@pytest.mark.parametrize("source", [TRICKY_SOURCE, TRICKY_SOURCE.rstrip(b"\n"), b"caf\xe9\r\n", b"x"])
def test_source_is_byte_identical_on_stdout_and_in_a_file(source: bytes, tmp_path: Path,
                                                          capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    log, out = str(tmp_path / "log.txt"), tmp_path / "cut.py"
    Path(log).write_bytes(own_log(1, source=source, text=b"interrupted at step 0\n"))
    assert stats.main(["source", log]) == 0
    assert capfdbinary.readouterr().out == source
    assert stats.main(["source", log, "-o", str(out)]) == 0
    assert hashlib.sha256(source).hexdigest() in capfdbinary.readouterr().out.decode()
    assert out.read_bytes() == source
    out.write_bytes(b"mine")
    assert stats.main(["source", log, "-o", str(out)]) == 1
    assert b"exists already" in capfdbinary.readouterr().err
    assert out.read_bytes() == b"mine"
    assert stats.main(["source", log, "-o", str(out), "--force"]) == 0
    assert out.read_bytes() == source


def test_source_of_a_published_log_and_of_none(tmp_path: Path,
                                               capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    (tmp_path / "a.txt").write_bytes(published_log(1))
    (tmp_path / "b.txt").write_bytes(body(1))
    assert stats.main(["source", str(tmp_path / "a.txt")]) == 0
    assert capfdbinary.readouterr().out == TRICKY_PUBLISHED_SOURCE
    assert stats.main(["source", str(tmp_path / "b.txt")]) == 1
    assert b"no embedded script" in capfdbinary.readouterr().err


OVERRIDES = {"snoo_k": 14, "muon_lr": 0.03, "snoo": False, "run_name": "a b'c; $(touch x)", "seed": 5,
             "update_smoothing_start": None, "compare_with": "--odd", "resume": "auto", "resume_anyway": True,
             "adam_eps": 1e-10, "train_files": "data/x_*.bin"}


def test_rerun_prints_the_command_that_repeats_the_run(tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(own_log(7, overrides=OVERRIDES, world_size=4, recipe="2025-11-02-Smear-MTP",
                            scale="rehearsal",
                            parent="records/a.txt"))
    assert stats.main(["rerun", str(log)]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert shlex.split(out) == [
        "python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4", "train_gpt_medium.py",
        "--recipe", "2025-11-02-Smear-MTP", "--scale", "rehearsal", "--snoo_k", "14", "--muon_lr", "0.03",
        "--snoo", "false", "--run_name", "a b'c; $(touch x)", "--update_smoothing_start", "none",
        "--compare_with=--odd", "--adam_eps", "1e-10", "--train_files", "data/x_*.bin", "--seed", "1007"]
    assert "train_gpt_medium.py here is not the script of this log" in err
    assert "continues records/a.txt; the command repeats the whole run from step 0" in err
    assert not Path("x").exists()


def test_the_printed_words_are_what_the_training_script_resolves() -> None:
    """The command of `rerun` goes through the training script's own parser and gives the log's overrides."""
    sys.path.insert(0, str(RECORDS.parent))
    import train_gpt_medium as script

    overrides = {"snoo_k": 14, "muon_lr": 0.03, "snoo": False, "update_smoothing_start": None,
                 "run_name": "a b", "log_dir": "-d", "adam_eps": 1e-10}
    facts = {"recipe": "2025-09-16_Snoo", "scale": "rehearsal", "world_size": "1",
             "overrides": json.dumps(overrides), "hyperparameter seed": "12"}
    words = shlex.split(stats.rerun_command(facts))
    command = script.parse_command(words[words.index("train_gpt_medium.py") + 1:])
    assert command.overrides == {**overrides, "seed": 12}
    assert (command.recipe, command.scale) == ("2025-09-16_Snoo", "rehearsal")
    assert not words[0].startswith("OMP")
    assert shlex.split(stats.rerun_command(facts | {"device": "cpu", "threads": "3"})) == ["OMP_NUM_THREADS=3", *words]
    assert set(BOOKKEEPING) == set(script.BOOKKEEPING), "both files list the fields that compute nothing"


@pytest.mark.parametrize("data, reason", [
    (published_log(1), "its header does not state recipe, scale, overrides, hyperparameter seed"),
    (own_log(1).replace(b"overrides: {}", b"overrides: [1"), "header is damaged"),
    (own_log(1).replace(b"overrides: {}", b"overrides: " + b"[" * 100_000), "header is damaged"),
    (own_log(1).replace(b"overrides: {}", b'overrides: {"a;b": 1}'), "header is damaged"),
    (own_log(1).replace(b"seed: 1001", b"seed: null"), "header is damaged"),
    (own_log(1).replace(b"seed: 1001", b"seed: true"), "header is damaged"),
    (own_log(1).replace(b"world_size: 8", b"world_size: 0"), "header is damaged"),
    (own_log(1).replace(b"world_size: 8", b"world_size: `ls`"), "header is damaged"),
    (b"", "empty file")])
def test_rerun_refuses_a_log_that_does_not_say_how(data: bytes, reason: str, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").write_bytes(data)
    assert reason in printed(capsys, "rerun", tmp_path / "log.txt", code=1)


def test_diff_shows_source_and_hyperparameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a.txt", tmp_path / "b.txt"
    a.write_bytes(own_log(1, source=b"x = 1\ny = 2\n"))
    b.write_bytes(own_log(2, source=b"x = 1\ny = 3\x1b[2J\n", overrides={"snoo_k": 14}).replace(
        b"muon_lr: 0.027", b"muon_lr: 0.03").replace(b"b.bin 100", b"b.bin 101"))
    text = printed(capsys, "diff", a, b)
    assert text == (f"--- {a} (script)\n+++ {b} (script)\n@@ -1,3 +1,3 @@\n x = 1\n-y = 2\n"
                    "+y = 3\\x1b[2J\n \n\n"
                    'overrides: {} -> {"snoo_k": 14}\nhyperparameter muon_lr: 0.027 -> 0.03\n'
                    "hyperparameter seed: 1001 -> 1002\n"
                    "data: a.bin 100 tokens; b.bin 100 tokens -> a.bin 100 tokens; b.bin 101 tokens\n")
    assert printed(capsys, "diff", a, a) == "script: the same\n\nheader: nothing differs\n"
    b.write_bytes(body(1))
    assert "-y = 2" in printed(capsys, "diff", a, b)
    assert printed(capsys, "diff", b, b).startswith("script: in neither log\n")


# ---------------------------------------------------------------------------------------------------------
# plot


def png_size(data: bytes) -> tuple[int, int]:
    assert data[:16] == b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_plot_is_a_png_of_the_stated_size(runs: Path, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.png"
    printed(capsys, "plot", runs, SNOO, "--published", "-o", out)
    assert png_size(out.read_bytes()) == (1600, 1200) == tuple(int(x * DPI) for x in SIZE_INCHES)
    assert len(out.read_bytes()) > 50_000


def test_plot_has_the_expected_lines(runs: Path) -> None:
    published = stats.published_curves()
    assert [name for name, _ in published] == sorted(p.name for p in (RECORDS / "track_2_medium").iterdir())
    samples = [(path.name, *side_of(path)) for path in (runs, SNOO)]
    figure = draw(samples, published, 2.92)
    panels = figure.axes
    assert len(panels) == 4
    for axes in panels[:3]:
        assert len(axes.lines) == 6 + 1 + 6 + 1, "six logs, a curve.csv, six published curves, the target"
        assert list(axes.lines[-1].get_ydata()) == [2.92, 2.92]
    assert len(panels[3].lines) == 1, "the target"
    bars = [patch for patch in panels[3].patches if hasattr(patch, "get_height")]
    assert sum(bar.get_height() for bar in bars) == 6 + 30
    own = panels[0].lines[6]
    assert own.get_ydata()[-1] == samples[0][1].runs[0].loss
    assert panels[1].lines[6].get_xdata()[-1] == samples[0][1].runs[0].time_ms / 6e4
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == 6 + 2 + 1, "the six logs of a folder share a label"
    colours = {(line.get_color(), line.get_linestyle()) for line in panels[0].lines[:6]}
    assert len(colours) == 6, "published curves differ"


def test_the_tail_shows_a_thousandth() -> None:
    tail = draw([("Snoo", *side_of(SNOO))], stats.published_curves(), 2.92).axes[2]
    low, high = tail.get_ylim()
    assert high - low < 0.02, "0.001 is more than a twentieth of the panel"
    ticks = sorted([*tail.yaxis.get_minorticklocs(), *tail.get_yticks()])
    assert max(b - a for a, b in zip(ticks, ticks[1:])) == pytest.approx(0.001)


@pytest.mark.parametrize("kind, start", [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plot_of_other_kinds_and_of_runs_without_a_curve(kind: str, start: bytes, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "runs.csv"
    listed.write_text("val_loss\n2.9196\n")
    printed(capsys, "plot", listed, "-o", tmp_path / f"p.{kind}")
    assert (tmp_path / f"p.{kind}").read_bytes().startswith(start)


def test_plot_refuses_a_kind_it_cannot_write(runs: Path, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    assert "must end in .png, .svg or .pdf" in printed(capsys, "plot", runs, "-o", tmp_path / "x.doc", code=1)
    assert "cannot be written" in printed(capsys, "plot", runs, "-o", tmp_path / "no" / "x.png", code=1)


# ---------------------------------------------------------------------------------------------------------
# table


def test_the_committed_table_is_what_table_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the table is up to date" in printed(capsys, "table", "--check")


def test_table_rows_are_ranked_by_time_and_quoted_rows_marked(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "table").splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == [str(i) for i in range(1, 11)]
    minutes = [float(row[1]) for row in rows]
    assert minutes == sorted(minutes)
    assert minutes == [17.35, 22.98, 22.99, 23.03, 23.08, 23.14, 23.28, 23.45, 24.07, 348.0]
    assert ["(quoted)" in row[2] for row in rows] == [True, True, False, False, False, False, False, True,
                                                      False, True]
    snoo = rows[6]
    assert snoo[2:] == ["[2025-09-16_Snoo](track_2_medium/2025-09-16_Snoo/)", "2025-09-16", "30", "2.919616",
                        "0.000716", "0.0032", "23.40",
                        "[runs.csv](track_2_medium/2025-09-16_Snoo/runs.csv), "
                        "[curve.csv](track_2_medium/2025-09-16_Snoo/curve.csv)"]
    for row in rows:
        for link in [part.split(")")[0] for part in "|".join(row).split("](")[1:]]:
            assert (RECORDS / link).exists(), link


def test_a_new_record_folder_enters_the_table_and_a_stale_table_is_found(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records"
    shutil.copytree(RECORDS, records, ignore=shutil.ignore_patterns("__pycache__", "*.txt"))
    printed(capsys, "table", "--check", "--records", records)
    new = records / "track_2_medium" / "2026-01-02_Mine"
    write_logs(new, 4, loss=2.915)
    printed(capsys, "table", "--check", "--records", records)  # logs alone, ignored by git, change nothing
    printed(capsys, "summary", new, "--csv", new / "runs.csv")
    (new / "log.txt.gz").write_bytes(gzip.compress(own_log(1)))
    before = (records / "README.md").read_text()
    assert "the table is not what" in printed(capsys, "table", "--check", "--records", records, code=1)
    assert "is written" in printed(capsys, "table", "--write", "--records", records)
    after = (records / "README.md").read_text()
    mine = [line for line in after.splitlines() if "2026-01-02_Mine" in line]
    assert len(mine) == 1
    link = "[2026-01-02_Mine](track_2_medium/2026-01-02_Mine/)"
    assert mine[0].startswith(f"| 1 | 0.83 | {link} | 2026-01-02 | 4 | 2.91")
    assert mine[0].endswith("log.txt.gz) |")
    outside = [text.split(stats.BEGIN)[0] + text.split(stats.END)[1] for text in (before, after)]
    assert outside[0] == outside[1], "only what is between the markers changes"
    printed(capsys, "table", "--check", "--records", records)
    for text, reason in ((after.replace(stats.END, ""), "must have one line"),
                         (stats.END + stats.BEGIN, "must have")):
        (records / "README.md").write_text(text)
        assert reason in printed(capsys, "table", "--write", "--records", records, code=1)
    (records / "quoted.csv").write_text("date,record,minutes\n,x,fast\n")
    assert "quoted.csv: cannot be read" in printed(capsys, "table", "--records", records, code=1)


def test_the_copies_of_the_published_figures_have_not_changed() -> None:
    """One digest over the twelve files as they were published."""
    digest = hashlib.sha256()
    for path in sorted((RECORDS / "track_2_medium").glob("2025-*/*.csv")):
        digest.update(f"{path.parent.name}/{path.name}\n".encode() + path.read_bytes())
    assert digest.hexdigest() == "6c0f71711e1b72576dc73a2109ea2943091449fcfe9f0258fb259f8e20ef7e11"


# ---------------------------------------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize("command", ["summary", "bootstrap", "plan", "compare", "plot", "source", "rerun",
                                     "diff",
                                     "table"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stats.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "usage: stats.py " + command in text and "%%" not in text
    units = {"source": "byte", "rerun": "world size", "diff": "hyperparameters", "table": "minutes"}
    assert units.get(command, "nats") in text


@pytest.mark.parametrize("words", [["summary"], ["summary", ".", "--target", "nan"],
                                   ["summary", ".", "--target", "x"],
                                   ["bootstrap", ".", "--size", "1"],
                                   ["bootstrap", ".", "--resamples", "1e3"],
                                   ["bootstrap", ".", "--seed", "-1"], ["plan", "--sd", "0", "--mean", "2.9"],
                                   ["plan", "--sd", "inf", "--mean", "2.9"], ["plan", ".", "--price", "-1"],
                                   ["compare", "."], ["nothing"], [], ["table", "--write", "--check"],
                                   ["summary", ".", "--format", "xml"]])
def test_a_wrong_option_ends_with_2_and_a_message(words: list[str],
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        stats.main(words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["summary"], ["bootstrap"], ["plan"], ["plot"], ["compare", SNOO],
                                     ["source"],
                                     ["rerun"], ["diff", SNOO / "curve.csv"]])
@pytest.mark.parametrize("path, reason", [("nowhere.txt", "no such file"), ("x" * 5000, ""), (".", "")])
def test_a_wrong_path_ends_with_1_and_one_line(command: list[object], path: str, reason: str, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    err = printed(capsys, *command, tmp_path / path, code=1)
    assert err.startswith("stats.py: ") and err.count("\n") == 1
    assert reason in err.lower()


@pytest.mark.parametrize("settings", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
                                      {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C.UTF-8"}])
def test_odd_names_and_terminals_give_no_traceback(settings: dict[str, str], tmp_path: Path) -> None:
    for name in (b"caf\xc3\xa9.txt", b"\xff\xfe.txt", b"esc\x1b[2J.txt", b"new\nline.txt"):
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    (tmp_path / "good.txt").write_bytes(own_log(1, recipe="réc\x1bipe"))
    (tmp_path / "g2.txt").write_bytes(own_log(2))
    result = run("summary", tmp_path, env=settings)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.count(b"\nrefused: ") == 4
    assert b"\x1b" not in result.stdout
    assert b"recipes differ" in result.stdout


def test_a_closed_pipe_ends_quietly(runs: Path) -> None:
    process = subprocess.Popen([sys.executable, STATS, "summary", runs, SMOOTHED], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait(60)


def test_a_full_disk_ends_with_a_sentence(runs: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run([sys.executable, STATS, "summary", runs], stdout=full, stderr=subprocess.PIPE,
                                check=False)
    assert (result.returncode, result.stderr) == (1, b"stats.py: No space left on device\n")


def test_stats_starts_without_scipy_stats_and_matplotlib() -> None:
    code = f"import sys; sys.path.insert(0, {str(RECORDS)!r}); import stats; print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "'scipy.special'" in result.stdout
    assert "'scipy.stats'" not in result.stdout and "'matplotlib'" not in result.stdout
