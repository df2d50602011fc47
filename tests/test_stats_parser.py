"""The parser torture set: every log that must count does, every one that must not is refused with its reason,
alone and in a folder of good ones; what only looks like a run in an embedded script never counts."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from pathlib import Path

import pytest
from stats_helpers import (LINE, TRICKY_PUBLISHED_SOURCE, TRICKY_SOURCE, body, own_log, published_log,
                           uuid_of,
                           write_logs)

import runlog
from runlog import LogError
from samples import UserError, gather

FINAL = re.compile(rb"step:200/200 val_loss:(\S+) train_time:(\S+)ms")


def final(data: bytes) -> tuple[float, float]:
    loss, time_ms = FINAL.findall(data)[-1]
    return float(loss), float(time_ms)


# ---------------------------------------------------------------------------------------------------------
# What must count

OLD_HEADER = LINE + b"import torch\n" + LINE + b"Running pytorch 2.4.0 compiled for CUDA 12.1\n" + LINE
PLAIN = published_log(1)
GOOD = {
    "ours": (own_log(1), None),
    "published": (PLAIN, None),
    "crlf": (own_log(1).replace(b"\n", b"\r\n"), None),
    "published crlf": (PLAIN.replace(b"\n", b"\r\n"), None),
    "gzip": (gzip.compress(own_log(1)), None),
    "no memory line": (own_log(1, memory=False), None),
    "no last newline after the memory line": (PLAIN.rstrip(b"\n"), None),
    "no last newline after the last validation": (published_log(1, memory=False).rstrip(b"\n"), None),
    "another length": (own_log(1, steps=7, every=3), None),
    "one step": (own_log(1, steps=1), None),
    "a resumed run": (own_log(1, start=100), None),
    "remarks": (own_log(1, text=b"warm-up 10 steps\n" + body(1) + b"final val_loss 2.9 lies 0.1 sd below\n"),
                None),
    "comparison with a curve": (own_log(1, text=body(1).replace(
        b"step:200/200 val_loss:", b"step:200/200 val_loss:").replace(
        b"ms\npeak", b"ms published:2.919060 delta:-0.0012\npeak")), None),
    "a separator in the body": (own_log(1, text=LINE + body(1) + LINE), None),
    "a source without a last newline": (own_log(1, source=b"x = 1"), None),
    "a source with crlf": (own_log(1, source=TRICKY_SOURCE.replace(b"\n", b"\r\n")), None),
    "an empty source": (own_log(1, source=b""), None),
    "a source in latin-1": (own_log(1, source=b"# na\xefve\n"), None),
    "a bare body": (body(1), None),
    "a source and no header": (b"import torch\n" + LINE + body(1), None),
    "2024: leading separator": (OLD_HEADER + body(1), None),
    "2024: train_loss": (OLD_HEADER + b"step:0/2 val_loss:10.8 train_time:229ms step_avg:nanms\n"
                         b"step:1/2 train_loss:9.9 train_time:300ms step_avg:nanms\n"
                         b"step:2/2 val_loss:3.2790 train_time:400ms step_avg:200.00ms\n"
                         b"peak memory consumption: 33815 MiB\n", (3.279, 400.0, 2)),
    "2024: no time": (OLD_HEADER + b"step:0/2 val_loss:10.8\nstep:2/2 val_loss:3.2790\n", (3.279, None, 2)),
    "llm.c main.log": (b"s:0 tel:10.9857\ns:0 trl:10.98\ns:1 trl:9.1\ns:2 tel:2.9212\n", (2.9212, None, 2)),
    "llm.c console": (b"val loss 10.98\nstep 1/2 | train loss 9.1 | 50 ms\n"
                      b"step 2/2 | train loss 8.1 | 50 ms\nval loss 2.921234\n", (2.921234, None, 2)),
    "nanoGPT console": (b"step 0: train loss 10.9, val loss 10.98\niter 0: loss 10.9\n"
                        b"step 2000: train loss 2.95, val loss 2.9612\n", (2.9612, None, 2000)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_log_counts_with_its_final_loss_time_and_steps(name: str, tmp_path: Path) -> None:
    data, expected = GOOD[name]
    path = tmp_path / "000.txt"
    path.write_bytes(data)
    run = runlog.read_run(path, with_curve=True)
    if expected is None:
        plain = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        matches = re.findall(rb"step:(\d+)/(\d+) val_loss:(\S+) train_time:(\d+)ms", plain)
        expected = (float(matches[-1][2]), float(matches[-1][3]), int(matches[-1][0]))
    assert (run.loss, run.time_ms, run.steps) == expected
    assert run.curve[-1] == (run.steps, run.loss, run.time_ms)
    assert run.curve == sorted(run.curve)


def test_our_header_is_read() -> None:
    run = runlog.parse_log(own_log(3, overrides={"snoo_k": 14}, world_size=4), "003.txt")
    assert run.facts == {"recipe": "2025-09-16_Snoo", "scale": "record", "overrides": '{"snoo_k": 14}',
                         "world_size": "4", "pytorch": "2.9.0+cu126", "gpu": "NVIDIA H100 80GB HBM3",
                         "hyperparameter seed": "1003"}
    assert run.uuid == uuid_of(3)
    assert run.source_sha == hashlib.sha256(TRICKY_SOURCE).hexdigest()
    assert run.peak_mib == 56505
    assert not run.curve, "a curve is kept only when asked for"


def test_a_published_header_gives_the_versions_and_the_number_of_gpus() -> None:
    run = runlog.parse_log(published_log(3), f"{uuid_of(3)}.txt")
    assert run.facts == {"pytorch": "2.9.0.dev20250823+cu126", "gpu": "NVIDIA H100 80GB HBM3",
                         "world_size": "8"}
    assert run.uuid == uuid_of(3)


@pytest.mark.parametrize("source", [b"", b"\n", b"\n\n", b"x", b"x\n", b"x\n\n", b"x\r\n", b"x\r\ny", LINE,
                                    LINE * 2,
                                    LINE[:-1], b"x\n" + LINE[:-1], TRICKY_SOURCE, TRICKY_SOURCE[:-1],
                                    own_log(5), own_log(5)[:-1], b"caf\xe9\n", "café ⇒\n".encode()])
def test_the_source_of_our_log_is_cut_out_byte_for_byte(source: bytes) -> None:
    assert runlog.split_log(own_log(1, source=source)).source == source
    assert runlog.parse_log(own_log(1, source=source), "").loss == final(body(1))[0]


@pytest.mark.parametrize("source", [TRICKY_PUBLISHED_SOURCE, b"x = 1\n", b"x = 1\n\n", b"x = 1\r\n"])
def test_the_source_of_a_published_log_is_cut_out_byte_for_byte(source: bytes) -> None:
    assert runlog.split_log(published_log(1, source=source)).source == source


# ---------------------------------------------------------------------------------------------------------
# What must be refused

HEAD = own_log(1, text=b"")
NAN_LINE = b"step:200/200 val_loss:%s train_time:49830ms step_avg:249.15ms\n"
UNFINISHED = body(1)[:body(1).index(b"step:150/200 val_loss")]
BAD = {
    "no final validation": (HEAD + UNFINISHED, "no final validation: it ends at step 150 of 200"),
    "interrupted": (HEAD + UNFINISHED + b"interrupted at step 150: resume with --resume auto\n",
                    "no final validation: interrupted at step 150 of 200"),
    "interrupted before the first validation": (HEAD + b"interrupted at step 0: nothing was saved\n",
                                                "no final validation: interrupted at step 0"),
    "a val loss without steps": (b"val loss 2.9\n", "a val loss without steps"),
    "val losses without steps": (b"val loss 3.9\nval loss 2.9\n", "several runs in one file, or no steps"),
    "never validated": (HEAD + b"step:1/2 train_time:5ms step_avg:5.00ms\n", "never validated"),
    "no step line": (HEAD + b"warming up\n", "no validation in it"),
    "llm.c without its end": (b"s:0 tel:10.9\ns:1 trl:10.1\ns:2 trl:9.8\n", "last validation at step 0 of 2"),
    "cut in a step line": (HEAD + body(1)[:-1000].rstrip(b"\n")[:-4], "cut off mid-line"),
    "cut in the last loss": (HEAD + body(1)[:body(1).rindex(b"val_loss:") + 14], "cut off mid-line"),
    "cut in the last time": (HEAD + body(1)[:body(1).rindex(b"ms step_avg")], "cut off mid-line"),
    "cut in the memory line": (HEAD + body(1)[:-6], "cut off mid-line"),
    "cut in an old line": (b"s:0 tel:10.9\ns:2 tel:2.9", "cut off mid-line"),
    "cut in a remark": (HEAD + body(1) + b"final val_lo", "cut off mid-line"),
    "cut in the header": (HEAD[:HEAD.rindex(b"cuda: ")] + b"cuda: 12.6\n", "cut off within the header"),
    "cut in the source": (TRICKY_SOURCE[:60] + b"\n", "cut off within the embedded source"),
    "a script": (b"import os\nprint('step:1/1 val_loss:1')\n", "a script rather than a log"),
    "nan": (HEAD + UNFINISHED + NAN_LINE % b"nan", "val_loss nan at step 200"),
    "inf": (HEAD + UNFINISHED + NAN_LINE % b"inf", "val_loss inf at step 200"),
    "overflow": (HEAD + UNFINISHED + NAN_LINE % b"1e999", "val_loss 1e999 at step 200"),
    "nan on the way": (HEAD + re.sub(rb"(step:100/200 val_loss:)\S+", rb"\1nan", body(1)),
                       "val_loss nan at step 100"),
    "nan time": (HEAD + UNFINISHED + b"step:200/200 val_loss:2.9 train_time:nanms step_avg:1.00ms\n",
                 "train_time nan at step 200"),
    "not a number": (HEAD + UNFINISHED + NAN_LINE % b"2_9", "is not a number"),
    "negative loss": (HEAD + UNFINISHED + NAN_LINE % b"-2.9", "not a loss in nats"),
    "perplexity": (HEAD + UNFINISHED + NAN_LINE % b"1853.1", "not a loss in nats"),
    "two runs": (own_log(1) + own_log(2), "several runs in one file"),
    "twice the same run": (own_log(1) * 2, "several runs in one file"),
    "two published runs": (published_log(1) + published_log(2), "several runs in one file"),
    "two bodies": (HEAD + body(1) + body(2), "several runs in one file"),
    "two lengths": (HEAD + body(1, steps=100) + body(1, start=100), "several runs in one file"),
    "a killed run, then a whole one": (published_log(1)[:-9000] + b"\n" + published_log(2),
                                       "several runs in one file"),
    "ours without steps, then ours": (HEAD + own_log(2), "several runs in one file"),
    "ours without steps, then ours, plain": (own_log(1, source=b"x = 1\n", text=b"")
                                             + own_log(2, source=b"y = 1\n"), "several runs in one file"),
    "two runs without headers": (b"a = 1\n" + LINE + body(1) + b"b = 1\n" + LINE + body(2),
                                 "several runs in one file"),
    "a validation twice": (HEAD + body(1).replace(b"peak", FINAL.search(body(1))[0] + b"\npeak"),
                           "several runs in one file"),
    "past the end": (HEAD + b"step:9/8 val_loss:2.9 train_time:5ms step_avg:1.00ms\n",
                     "damaged: step 9 of 8"),
    "clock goes back": (HEAD + b"step:0/2 val_loss:9 train_time:50ms step_avg:1.00ms\n"
                        b"step:2/2 val_loss:3 train_time:40ms step_avg:1.00ms\n",
                        "train_time goes back at step 2"),
    "a field damaged": (HEAD + body(1).replace(b"step:100/200 val_loss:", b"step:100/200 val_lo:", 1)
                        .replace(b"train_time", b"train_tim", 40), "is not a step line"),
    "a loss missing": (HEAD + UNFINISHED + NAN_LINE % b"", "is not a step line"),
    "source altered": (own_log(1).replace(b"import torch", b"import torcH", 1), "altered or damaged"),
    "empty": (b"", "empty file"),
    "white space": (b" \n\r\n\t", "empty file"),
    "gzip of nothing": (gzip.compress(b""), "empty file"),
    "binary": (bytes(range(256)) * 40, "binary"),
    "utf-16": (own_log(1).decode().encode("utf-16"), "binary"),
    "zeroes after the last line": (HEAD + body(1) + bytes(64) + b"\n", "NUL bytes"),
    "binary in the body": (HEAD + body(1) + b"\xff\xfe\n", "binary"),
    "gzip cut off": (gzip.compress(own_log(1))[:-200], "damaged gzip"),
    "gzip with wrong bytes": (gzip.compress(own_log(1))[:300] + b"\0" * 60 + gzip.compress(own_log(1))[360:],
                              "damaged gzip"),
    "gzip by its first bytes only": (b"\x1f\x8b", "damaged gzip"),
    "prose": (b"Dear reader,\nthe val_loss was fine.\n", "no validation in it"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_log_is_refused_with_its_reason_alone_and_among_good_ones(name: str, tmp_path: Path) -> None:
    data, reason = BAD[name]
    good = write_logs(tmp_path / "runs", 3)
    bad = tmp_path / "runs" / "001a.txt"
    bad.write_bytes(data)
    with pytest.raises(LogError, match=re.escape(reason)):
        runlog.read_run(bad)
    with pytest.raises(UserError, match="no run can be counted.*" + re.escape(reason)):
        gather([bad])
    group = gather([tmp_path / "runs"])
    assert [run.name for run in group.runs] == [path.name for path in good]
    assert [name for name, _ in group.refused] == [str(bad)]
    assert reason in group.refused[0][1]


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    with open(tmp_path / "huge.txt", "wb") as stream:
        stream.truncate(runlog.MAX_BYTES + 1)
    (tmp_path / "bomb.txt").write_bytes(gzip.compress(b" " * (runlog.MAX_BYTES + 1), 1))
    for name, reason in (("pipe.txt", "not a regular file"), ("gone.txt", "cannot be read: No such file"),
                         ("huge.txt", "too large"), ("bomb.txt", "unpacks to more than"), ("", "a folder"),
                         ("loop.txt", "cannot be read")):
        with pytest.raises(LogError, match=reason):
            runlog.read_bytes(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------
# No run twice, and warnings


def test_a_run_is_counted_once_however_often_it_comes(tmp_path: Path) -> None:
    first, second, third = write_logs(tmp_path, 3)
    same_body = tmp_path / "9_copy.txt"
    same_body.write_bytes(published_log(0))  # another script around the body of run 0
    same_uuid = tmp_path / "9_uuid.txt"
    same_uuid.write_bytes(own_log(1, text=body(77)))
    same_end = tmp_path / "9_end.txt"
    same_end.write_bytes(own_log(55, text=body(2, every=10)))  # other lines, but run 2's loss and time
    packed = tmp_path / "9_packed.log.gz"
    packed.write_bytes(gzip.compress(first.read_bytes().replace(b"\n", b"\r\n")))
    group = gather([tmp_path, first])
    assert [run.name for run in group.runs] == [first.name, second.name, third.name]
    assert dict(group.refused) == {
        str(same_body): f"counted already: the same body as {first}",
        str(same_uuid): f"counted already: the same uuid as {second}",
        str(same_end): f"counted already: the same loss and train time as {third}",
        str(packed): f"counted already: the same body as {first}",
        str(first): f"counted already: the same body as {first}"}


def test_a_refused_log_does_not_hide_the_whole_one_of_the_same_run(tmp_path: Path) -> None:
    write_logs(tmp_path, 2)
    (tmp_path / "000_a.txt").write_bytes(own_log(5, text=UNFINISHED))
    (tmp_path / "000_b.txt").write_bytes(own_log(5))
    assert "000_b.txt" in [run.name for run in gather([tmp_path]).runs]


@pytest.mark.parametrize("odd, words", [
    (own_log(9, source=b"x = 2\n"), "embedded sources differ"),
    (own_log(9, recipe="2025-09-17_UpdateSmoothing"), "recipes differ"),
    (own_log(9, scale="rehearsal"), "scales differ"),
    (own_log(9, overrides={"snoo_k": 14}), "overrides differ"),
    (own_log(9, steps=100), "numbers of steps differ"),
    (own_log(9, loss=3.279),
     "targets differ within the group, so these runs are not one sample: 2.92 (3), 3.28 (1)"),
    (own_log(9, world_size=4), "world sizes differ"),
    (own_log(9).replace(b"pytorch: 2.9.0", b"pytorch: 2.8.0"), "PyTorch versions differ"),
    (own_log(9).replace(b"NVIDIA H100 80GB HBM3 ", b"NVIDIA A100 80GB PCIe "), "GPUs differ"),
    (own_log(9).replace(b"seed: 1009", b"seed: 1001"), "not independent: 2 runs have the same seed"),
    (own_log(9, text=re.sub(rb"train_time:(\d+)", rb"train_time:1\1", body(1))),
     "not independent: 2 runs have the same losses at every validation"),
])
def test_runs_that_are_no_one_sample_count_with_a_warning(odd: bytes, words: str, tmp_path: Path) -> None:
    write_logs(tmp_path, 3)
    assert gather([tmp_path]).notes == [], "like runs give no warning"
    (tmp_path / "odd.txt").write_bytes(odd)
    group = gather([tmp_path])
    assert len(group.runs) == 4
    assert [note for note in group.notes if words in note], group.notes


def test_bookkeeping_fields_may_differ_within_a_sample(tmp_path: Path) -> None:
    for seed in range(3):
        overrides = {"run_id": seed, "seed": seed + 1000, "snoo_k": 14}
        (tmp_path / f"{seed}.txt").write_bytes(own_log(seed, overrides=overrides))
    assert gather([tmp_path]).notes == []


def test_two_runs_that_continue_one_parent_are_not_independent(tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / f"{seed}.txt").write_bytes(own_log(seed, parent="records/a.txt", start=100))
    assert any("2 runs have the same parent log" in note for note in gather([tmp_path]).notes)


def test_many_logs_are_read_by_several_processes_with_the_same_result(tmp_path: Path) -> None:
    paths = write_logs(tmp_path, 60, steps=20)
    (tmp_path / "bad.txt").write_bytes(b"")
    together, alone = gather([tmp_path]), [gather([path]).runs[0] for path in paths]
    assert together.runs == alone
    assert together.refused == [(str(tmp_path / "bad.txt"), "empty file")]


# ---------------------------------------------------------------------------------------------------------
# csv files


@pytest.mark.parametrize("text, kept, reason", [
    ("val_loss,train_time_ms\n2.92,1400000\n2.91,nan\n", 1, "not the numbers"),
    ("val_loss,train_time_ms\n2.92,1400000\n2.91\n", 1, "not the numbers"),
    ("val_loss,train_time_ms\n2.92,1400000\n2.91,1,2\n", 1, "not the numbers"),
    ("val_loss,train_time_ms\n2.92,1400000\n1400000,2.91\n", 1, "the columns are swapped"),
    ("val_loss,train_time_ms\n2.92,1400000\n0,5\n", 1, "not a loss in nats"),
    ("val_loss,train_time_ms\n2.92,1400000\n2.9,-5\n", 1, "not a loss in nats"),
    ("val_loss,train_time_ms\n2.92,1400000\n2.92,1400000\n", 1,
     "counted already: the same loss and train time"),
    ("val_loss\n2.92\ninf\n", 1, "not the numbers"),
    ("val_loss\n2.92\n1e999\n", 1, "not the numbers"),
    ("\ufeffval_loss , train_time_ms\r\n2.92 , 1400000\r\n\r\n\"2.93\",5\r\n٣,1\r\n", 2, "not the numbers"),
])
def test_a_bad_row_of_a_runs_csv_is_refused_and_the_others_count(text: str, kept: int, reason: str,
                                                                tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text, encoding="utf-8", newline="")
    group = gather([tmp_path / "runs.csv"])
    assert len(group.runs) == kept
    assert len(group.refused) == 1
    assert reason in group.refused[0][1]


@pytest.mark.parametrize("text, reason", [
    ("", "empty file"), ("\n\n", "empty file"), ("2.92,1400000\n", "its first line must be"),
    ("train_time_ms,val_loss\n1400000,2.92\n", "its first line must be"),
    ("val_loss,train_time_ms\n", "no run"),
    ("step,val_loss,train_time_ms\n1,2,3\n", "its first line must be"),
    ("val_loss\n" + "9" * 200_000, "not a csv"),
])
def test_a_file_that_is_no_runs_csv_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text)
    with pytest.raises(UserError, match=reason):
        gather([tmp_path / "runs.csv"])


def test_a_folder_stands_for_its_logs_and_else_for_its_runs_csv(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("val_loss,train_time_ms\n2.92,1400000\n")
    (tmp_path / "curve.csv").write_text("step,val_loss,train_time_ms\n0,10.8,0\n560,2.92,1400000\n")
    [run] = gather([tmp_path]).runs
    assert (run.loss, run.time_ms, run.steps) == (2.92, 1400000.0, 560)
    [path] = write_logs(tmp_path, 1)
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "x.txt").write_bytes(own_log(4))
    group = gather([tmp_path])
    assert [run.name for run in group.runs] == [path.name]
    assert "runs.csv is not counted beside the folder's logs" in group.notes[0]
    assert len(gather([tmp_path, tmp_path / "runs.csv"]).runs) == 2
