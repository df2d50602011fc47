"""Whatever bytes stand in a file, a command ends with a result or one sentence, never with a traceback."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stats_helpers import LINE, body, own_log, published_log

import runlog
import stats
from runlog import LogError, Run
from samples import UserError, read_curve_csv, read_runs_csv

PIECES = st.sampled_from([
    LINE, LINE[:-1], b"=" * 99 + b"\n", b"Running Python 3.10\n", b"Running PyTorch 2.9 compiled\n", b"\r\n",
    b"\n",
    b"source_sha256: " + b"0" * 64 + b"\n", b"step:", b"step:0/10",
    b"step:10/10 val_loss:2.9 train_time:5ms\n", b"|",
    b"step:5/10 val_loss:nan train_time:5ms step_avg:1ms\n", b"step:1/10 train_time:1ms step_avg:1.00ms\n",
    b"s:3 tel:2.9\n",
    b"s:2 trl:3\n", b"val loss 3.1\n", b"step 3/4 | train loss 5\n",
    b"peak memory allocated: 5 MiB reserved: 6 MiB\n",
    b"interrupted at step 17: resume\n", b"\x1f\x8b", b"\0", b"\xff", b"val_loss,train_time_ms\n2.9,5\n",
    b'"', b",",
    b"step,val_loss,train_time_ms\n", b"overrides: {", b"import torch\n", b"9" * 5000, own_log(1, steps=3),
    published_log(2, steps=3), body(3, steps=2)])
FILES = st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=12).map(b"".join),
                  st.lists(st.one_of(PIECES, st.binary(max_size=8)), max_size=20).map(b"".join))


def damaged(data: bytes, at: int, with_bytes: bytes, cut: int) -> bytes:
    at %= len(data)
    return (data[:at] + with_bytes + data[at + cut:])


@settings(max_examples=400, deadline=None)
@given(FILES)
@example(b"step:999999999/999999999 val_loss:2.9\n")
@example(b"\x1f\x8b\x08")
def test_any_bytes_give_a_run_or_a_reason(data: bytes) -> None:
    try:
        run = runlog.parse_log(data, "x.txt", with_curve=True)
    except LogError as error:
        assert str(error).isprintable()
    else:
        assert isinstance(run, Run) and 0 < run.loss < runlog.MAX_LOSS and run.curve[-1][0] == run.steps


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([own_log(1, steps=4), published_log(1, steps=4), gzip.compress(own_log(1, steps=4))]),
       st.integers(0, 10**6), st.binary(max_size=4), st.integers(0, 40))
def test_a_damaged_log_gives_a_run_or_a_reason(data: bytes, at: int, with_bytes: bytes, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.txt"
        path.write_bytes(damaged(data, at, with_bytes, cut))
        try:
            run = runlog.read_run(path)
        except LogError as error:
            assert str(error)
        else:
            assert run.steps is not None and 0 < run.loss < runlog.MAX_LOSS


@settings(max_examples=200, deadline=None)
@given(FILES)
def test_any_bytes_as_a_csv_give_rows_or_a_reason(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.csv"
        path.write_bytes(data)
        for read in (read_runs_csv, read_curve_csv):
            try:
                assert read(path)
            except LogError as error:
                assert str(error)


@settings(max_examples=60, deadline=None)
@given(FILES, FILES)
def test_any_bytes_through_the_commands(a: bytes, b: bytes) -> None:
    """Through main: 0, or 1 with a sentence. What main does not catch fails the test."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats, "emit", lambda lines: [line.encode() for line in lines])
        patch.setattr(stats, "warn", lambda text: None)
        one, two, listed = (str(Path(folder) / name) for name in ("a.txt", "b.txt", "runs.csv"))
        for name, data in ((one, a), (two, b), (listed, b)):
            Path(name).write_bytes(data)
        for words in (["summary", one, two, listed], ["summary", folder, "--format", "json"],
                      ["diff", one, two],
                      ["compare", one, listed], ["rerun", one], ["bootstrap", folder, "--resamples", "5"],
                      ["source", one, "-o", str(Path(folder) / "x.py")],
                      ["plan", folder, "--simulations", "100"]):
            assert stats.main(words) in (0, 1), words


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=60), st.text(st.characters(codec="utf-8"), max_size=20))
def test_any_header_text_gives_a_command_or_a_reason(text: str, value: str) -> None:
    facts = runlog.read_header(f"recipe: {value}\nscale: x\nworld_size: 8\noverrides: {text}\n"
                               f"hyperparameter seed: 1\n{text}".encode())
    try:
        assert stats.rerun_command(facts).startswith("python -m torch.distributed.run ")
    except UserError as error:
        assert str(error)
