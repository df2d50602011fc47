"""data/fineweb.py with GPT-2's real ranks.

Its shards equal a plain loop's byte for byte, from every kind of input, with any number of workers,
interrupted or not; then the vocabulary, verify, decode and every message for a mistake.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
from hypothesis import given, settings, strategies

from data_helpers import (DATA, EOT, StandInHub, assert_user_error, oracle_shards, plain_encoding, run, shard,
                          shards_in, vocabulary)

import fineweb
import shards

SCRIPT = "fineweb.py"
SHARD_SIZE = 3000

SENTENCES = {  # known ids
    "Hello world": [15496, 995],
    "Hello, world!": [15496, 11, 995, 0],
    "The quick brown fox jumps over the lazy dog": [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290],
    "": [],
    " ": [220],
    "\n\n": [628],
}
ODD_TEXTS = [
    "", " ", "\n", "\r\n", "a\r\nb\r\n", "tabs\t\tand  spaces   ", "\x00NUL\x00", "I'll don't WE'VE",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈", "日本語と中文，한국어", "naïve café — “quotes”", "1234567890 3.14159",
    "a\u00a0b\u2028c\u3000d\x1c\x1fe",
    "<|endoftext|>", "x<|endoftext|>y <|endoftext|>", "\ufeffBOM", "a" * 3000, " " * 3000 + "x", "\n" * 3000,
]


def corpus() -> list[str]:
    """400 documents of one to a few hundred words, odd ones among them; about 30 000 tokens."""
    generator = np.random.default_rng(0)
    words = "the of and model token Snoo run-time 23.28 ’tis naïve Ünïcode don't 😀 \n\n \t (x) 日本".split(" ")
    sizes = generator.integers(1, 120, size=400 - len(ODD_TEXTS))
    texts = [" ".join(generator.choice(words, size=size)) for size in sizes]
    for i, text in enumerate(ODD_TEXTS):
        texts.insert(i * 17, text)
    return texts


@pytest.fixture(scope="module")
def gpt2() -> fineweb.Gpt2:
    return fineweb.Gpt2(fineweb.read_ranks(vocabulary()))


@pytest.fixture(scope="module")
def oracle() -> tiktoken.Encoding:
    return plain_encoding()


@pytest.fixture(scope="module")
def expected(oracle: tiktoken.Encoding) -> dict[str, bytes]:
    """The shards of corpus(), by a plain loop."""
    files = oracle_shards(corpus(), SHARD_SIZE, oracle)
    assert len(files) > 8
    return files


def encode(gpt2: fineweb.Gpt2, text: str, limit: int = fineweb.SEGMENT) -> list[int]:
    return np.concatenate(gpt2.encode(text, limit)).tolist()


def build(*arguments: object, **keywords: object) -> subprocess.CompletedProcess[str]:
    """One worker, unless `arguments` say otherwise: starting more takes longer than these small inputs."""
    return run(SCRIPT, "--vocabulary", vocabulary(), "--workers", 1, *arguments, **keywords)


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_bytes("".join(json.dumps({"id": i, "text": text}, ensure_ascii=bool(i % 2)) + "\n"
                             for i, text in enumerate(texts)).encode())


# ------------------------------------------------------------------------------------------------------------
# encoding


@pytest.mark.parametrize("text, ids", SENTENCES.items())
def test_known_ids(gpt2: fineweb.Gpt2, text: str, ids: list[int]) -> None:
    assert encode(gpt2, text) == ids
    assert gpt2.decode(ids) == text


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_encode_like_tiktoken_and_come_back(gpt2: fineweb.Gpt2, oracle: tiktoken.Encoding,
                                                      text: str) -> None:
    tokens = encode(gpt2, text)
    assert tokens == oracle.encode_ordinary(text)
    assert gpt2.decode(tokens) == text
    assert EOT not in tokens


CHARACTERS = strategies.sampled_from(list(" \n\t\r\u00a0\u2028\x1cab1'é😀.<|>") + ["'ll", "  ", "\r\n",
                                                                                  "the "])


@given(strategies.lists(CHARACTERS, max_size=60).map("".join), strategies.integers(1, 12))
@settings(max_examples=800, deadline=None)
def test_segments_never_change_the_encoding(text: str, limit: int) -> None:
    pieces = list(fineweb.segments(text, limit))
    assert "".join(pieces) == text
    assert encode(_GPT2, text, limit) == _ORACLE.encode_ordinary(text)


_ORACLE = plain_encoding()  # hypothesis takes no fixtures of a wider scope
_GPT2 = fineweb.Gpt2(fineweb.read_ranks(vocabulary()))


@pytest.mark.parametrize("text", ["a" * 10**7, " " * 10**7 + "x", "\n" * 10**6, "word " * 10**5],
                         ids=["10 MB of a", "10 MB of spaces and x", "newlines", "words"])
def test_huge_documents_come_back(gpt2: fineweb.Gpt2, text: str) -> None:
    assert gpt2.decode(encode(gpt2, text)) == text


def test_long_documents_encode_like_tiktoken(gpt2: fineweb.Gpt2, oracle: tiktoken.Encoding) -> None:
    for text in (" " * 200_000 + "x", "x" + "\n" * 200_000,
                 "\n" * 150_000 + "a" * 150_000 + " " * 150_000 + "!",
                 " ".join(corpus()) * 10):
        assert encode(gpt2, text) == oracle.encode_ordinary(text)


# ------------------------------------------------------------------------------------------------------------
# build


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The corpus in every kind of input."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = corpus()
    column = pyarrow.array(texts, type=pyarrow.string())
    (folder / "parquet").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"id": range(150), "text": column[:150]}),
                                folder / "parquet/000.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": column[150:].cast(pyarrow.large_string())}),
                                folder / "parquet/001.parquet", row_group_size=37, compression="zstd")
    pyarrow.parquet.write_table(pyarrow.table({"text": column.dictionary_encode()}),
                                folder / "dictionary.parquet")
    write_jsonl(folder / "all.jsonl", texts)
    content = (folder / "all.jsonl").read_bytes()
    (folder / "crlf.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n\r\n").rstrip())
    with gzip.open(folder / "all.jsonl.gz", "wb") as file:
        file.write(content)
    (folder / "txt" / "deeper").mkdir(parents=True)
    for i, text in enumerate(texts):
        path = folder / "txt" / ("deeper" if 100 <= i < 200 else "") / f"{i:04d}.txt"
        path.write_bytes(text.encode())
    ordered = sorted((folder / "txt").rglob("*.txt"), key=lambda path: path.name)
    return {"parquet": [folder / "parquet"], "dictionary": [folder / "dictionary.parquet"],
            "jsonl": [folder / "all.jsonl"], "crlf": [folder / "crlf.jsonl"], "gz": [folder / "all.jsonl.gz"],
            "txt": ordered}


@pytest.mark.parametrize("kind", ["parquet", "dictionary", "jsonl", "crlf", "gz", "txt"])
def test_every_kind_of_input_gives_the_oracles_bytes(kind: str, inputs: dict[str, list[Path]], tmp_path: Path,
                                                     expected: dict[str, bytes],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "txt":  # whose text is the file's exactly, a byte order mark excepted
        monkeypatch.setattr(fineweb, "UNIT_BYTES", 5000)  # many units from a small corpus
    texts = corpus()
    report = fineweb.build(fineweb.local_sources(inputs[kind]), tmp_path / "o", field="text",
                           shard_size=SHARD_SIZE,
                           ranks=fineweb.read_ranks(vocabulary()), workers=1, strict=True)
    if kind == "txt":
        expected = oracle_shards([text.removeprefix("\ufeff") for text in texts], SHARD_SIZE, _ORACLE)
    assert shards_in(tmp_path / "o") == expected
    tokens = sum((len(content) - 1024) // 2 for content in expected.values())
    size = sum(len(text.removeprefix("\ufeff" if kind == "txt" else "").encode()) for text in texts)
    assert f"{len(expected)} shards, {tokens} tokens, 400 documents" in report
    assert f", {size / tokens:.3f} bytes a token" in report
    assert "bad rows" not in report


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(workers: int, inputs: dict[str, list[Path]], tmp_path: Path,
                                               expected: dict[str, bytes],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fineweb, "UNIT_BYTES", 700)
    units = fineweb.encode_units(fineweb.units(fineweb.local_sources(inputs["jsonl"]), "text"),
                                 fineweb.read_ranks(vocabulary()), "text", workers)
    stream = b"".join(encoded.tokens.astype("<u2").tobytes() for _, encoded in units)
    assert stream == b"".join(expected[name][1024:] for name in sorted(expected, key=lambda name: name[-10:]))


def test_the_command_on_two_workers(inputs: dict[str, list[Path]], tmp_path: Path,
                                    expected: dict[str, bytes]) -> None:
    arguments = (*inputs["parquet"], "--out", tmp_path / "o", "--shard_size", SHARD_SIZE, "--workers", 2)
    result = build(*arguments)
    assert result.returncode == 0, result.stderr
    assert shards_in(tmp_path / "o") == expected
    assert f"{len(expected)} shards" in result.stdout and "tokens/s with 2 workers" in result.stdout
    assert f"{tmp_path / 'o' / 'fineweb_val_000000.bin'}: {SHARD_SIZE} tokens" in result.stderr
    again = build(*arguments)
    assert again.returncode == 0 and "built before" in again.stdout and again.stderr == ""
    names = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert names == sorted([*expected, "fineweb_build.json"])


def test_a_total_of_whole_shards_ends_without_an_empty_one(tmp_path: Path, oracle: tiktoken.Encoding) -> None:
    (tmp_path / "a.txt").write_text("Hello world" * 100)
    length = 1 + len(oracle.encode_ordinary("Hello world" * 100))
    assert length % 3 == 0
    assert build(tmp_path / "a.txt", "--out", tmp_path / "o", "--shard_size", length // 3).returncode == 0
    assert shards_in(tmp_path / "o") == oracle_shards(["Hello world" * 100], length // 3, oracle)
    result = build(tmp_path / "a.txt", "--out", tmp_path / "one")
    assert result.returncode == 0 and "all of it is the validation shard" in result.stdout


@pytest.mark.parametrize("text", ["a b\r\n日本 😀\n" * 400, "é" * 5000, " " * 5000, "x", "\ufeffx y " * 99])
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_a_long_txt_file_is_one_document(text: str, block: int, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    rows = list(fineweb.read_txt(path, block))
    assert [row.kind for row in rows] == ["text"] + ["more"] * (len(rows) - 1)
    encoded = fineweb.encode_rows(_GPT2, fineweb.without_place(rows), "text")
    assert encoded.tokens.tolist() == [EOT] + _ORACLE.encode_ordinary(text.removeprefix("\ufeff"))
    assert encoded.documents == 1 and not encoded.faults


def test_bad_rows_are_left_out_counted_and_named(tmp_path: Path, oracle: tiktoken.Encoding) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(
        b'{"text": "one"}\n\n{"text": null}\n{"other": "x"}\n{"text": 7}\n["text"]\n{"text": "two"\n'
        b'{"text": "\\ud83d"}\n{"text": "\xff"}\n{"text": "two"}\n' + b"[" * 100_000 + b"\n")
    (folder / "b.txt").write_bytes(b"caf\xe9")
    (folder / "c.txt").write_bytes(b"good words " * 400_000 + b"\xe9 bad end")
    column = pyarrow.array([b"three", None, b"\xff\xfe", b"four"], type=pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "d.parquet")
    result = build(folder, "--out", tmp_path / "o", "--shard_size", 4)
    assert result.returncode == 0, result.stderr
    assert shards_in(tmp_path / "o") == oracle_shards(["one", "two", "three", "four"], 4, oracle)
    for line in ("12 bad rows left out", "a.jsonl: line 3: null in 'text'", "a.jsonl: line 4: no 'text'",
                 "a.jsonl: line 5: 'text' is no text", "a.jsonl: line 6: no 'text'",
                 "a.jsonl: line 7: not JSON",
                 "a.jsonl: line 8: not UTF-8", "a.jsonl: line 9: not UTF-8 at byte 10",
                 "a.jsonl: line 11: not JSON",
                 "b.txt: not UTF-8 at byte 3", "c.txt: not UTF-8", "d.parquet: row 2: null",
                 "d.parquet: row 3: not UTF-8 at byte 0"):
        assert line in result.stdout, (line, result.stdout)
    strict = build(folder, "--out", tmp_path / "strict", "--shard_size", 4, "--strict")
    assert_user_error(strict, "a.jsonl: line 3: null in 'text'", "--strict")
    assert shards_in(tmp_path / "strict") == {}


def test_many_bad_rows_are_counted_but_not_all_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 50 + '{"text": "x"}\n')
    result = build(tmp_path / "a.jsonl", "--out", tmp_path / "o")
    assert "50 bad rows" in result.stdout and "line 20: no 'text'" in result.stdout
    assert "line 21" not in result.stdout and "and 30 more" in result.stdout


# ------------------------------------------------------------------------------------------------------------
# interrupted


def processes_below(parent: int) -> list[int]:
    """The worker processes of `parent`, by their command line."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,command="], capture_output=True, text=True,
                             check=True)
    rows = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    return [int(pid) for pid, ppid, command in rows if int(ppid) == parent and "spawn_main" in command]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state.strip().startswith("Z") and bool(state.strip())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A corpus that takes seconds, and its shards by the plain loop."""
    texts = corpus() * 30
    path = tmp_path_factory.mktemp("large") / "large.jsonl"
    write_jsonl(path, texts)
    return path, oracle_shards(texts, 40_000, plain_encoding())


@pytest.mark.parametrize("victim, how, code", [
    ("worker", signal.SIGKILL, 1), ("build", signal.SIGKILL, -9), ("build", signal.SIGTERM, 130),
    ("group", signal.SIGINT, 130)])
def test_killed_mid_way_it_leaves_no_half_shard_and_carries_on(victim: str, how: signal.Signals, code: int,
                                                               large: tuple[Path, dict[str, bytes]],
                                                               tmp_path: Path) -> None:
    source, expected = large
    out = tmp_path / "o"
    arguments = [str(source), "--out", str(out), "--shard_size", "40000", "--workers", "2",
                 "--vocabulary", str(vocabulary())]
    process = subprocess.Popen([sys.executable, str(DATA / SCRIPT), *arguments], stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, encoding="utf-8", start_new_session=True)
    deadline = time.monotonic() + 30
    while len(list(out.glob("*.bin"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    workers = processes_below(process.pid)
    assert len(workers) == 2
    if victim == "group":  # as Ctrl-C in a terminal does
        os.killpg(process.pid, how)
    else:
        os.kill(workers[0] if victim == "worker" else process.pid, how)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in stderr, stderr
    if victim == "worker":
        assert "worker process was killed" in stderr and "carries on" in stderr
    there = shards_in(out)
    assert 2 <= len(there) < len(expected)
    assert there == {name: expected[name] for name in there}
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)):  # none outlives the build
        assert time.monotonic() < deadline
        time.sleep(0.05)
    result = run(SCRIPT, *arguments)
    assert result.returncode == 0, result.stderr
    assert f"carrying on after {len(there)} finished shards" in result.stderr
    assert shards_in(out) == expected
    assert not list(out.glob("*.tmp"))


def test_carrying_on_gives_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                           expected: dict[str, bytes]) -> None:
    monkeypatch.setattr(fineweb, "UNIT_BYTES", 5000)
    path = tmp_path / "a.jsonl"
    write_jsonl(path, corpus())
    path.write_bytes(b"{}\n" + path.read_bytes() + b"{}\n")
    ranks = fineweb.read_ranks(vocabulary())

    def whole(out: Path) -> str:
        report = fineweb.build(fineweb.local_sources([path]), out, field="text", shard_size=SHARD_SIZE,
                               ranks=ranks,
                               workers=1, strict=False)
        return report.replace(str(out), "").split(";")[0] + report[report.index("\n"):]

    at_once = whole(tmp_path / "at once")
    assert "2 bad rows" in at_once
    commit = shards.ShardWriter.commit
    for stop in (0, 1, 2, len(expected) - 1):  # ends just before shard `stop` gets its name, again and again
        def failing(writer: shards.ShardWriter, stop: int = stop) -> None:
            if writer.path == fineweb.shard_path(tmp_path / "in parts", stop):
                raise KeyboardInterrupt
            commit(writer)
        monkeypatch.setattr(shards.ShardWriter, "commit", failing)
        with pytest.raises(KeyboardInterrupt):
            whole(tmp_path / "in parts")
        assert len(shards_in(tmp_path / "in parts")) == stop
    monkeypatch.setattr(shards.ShardWriter, "commit", commit)
    assert whole(tmp_path / "in parts") == at_once
    assert shards_in(tmp_path / "in parts") == expected


# ------------------------------------------------------------------------------------------------------------
# mistakes


def unreadable_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])


def cut_gzip(path: Path) -> None:
    content = gzip.compress(b'{"text": "x"}\n' * 1000)
    path.write_bytes(content[:len(content) // 2])


@pytest.mark.parametrize("name, make, parts", [
    ("no.txt", lambda path: None, ["no such file or folder"]),
    ("a.csv", lambda path: path.write_text("x"), ["not an input", ".parquet, .jsonl"]),
    ("folder", lambda path: path.mkdir(), ["no .parquet, .jsonl, .jsonl.gz, .txt file"]),
    ("a.parquet", lambda path: path.write_bytes(b""), ["not a whole parquet file"]),
    ("b.parquet", unreadable_parquet, ["not a whole parquet file"]),
    ("c.parquet", lambda path: pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), path),
     ["no column 'text', but body, n", "--field"]),
    ("d.parquet", lambda path: pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), path),
     ["holds int64, not text", "--field"]),
    ("e.parquet",
     lambda path: pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), path),
     []),
    ("f.jsonl", lambda path: path.write_text("\n\n"), []),
    ("g.jsonl", lambda path: path.write_text("{}\n"), ["g.jsonl: line 1: no 'text'"]),
    ("h.jsonl.gz", lambda path: path.write_bytes(b"plain"), ["not a whole gzip file"]),
    ("i.jsonl.gz", cut_gzip, ["not a whole gzip file"]),
])
def test_inputs_that_will_not_do(name: str, make: Callable[[Path], object], parts: list[str],
                                 tmp_path: Path) -> None:
    make(tmp_path / name)
    result = build(tmp_path / name, "--out", tmp_path / "o")
    assert_user_error(result, *(parts and [name]), *(parts or ["no document in the inputs"]))
    assert not list(tmp_path.glob("o/*"))


def test_output_folders_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words to make shards of"}\n' * 20)
    (tmp_path / "file").write_text("mine")
    common = (tmp_path / "a.jsonl", "--shard_size", 50)
    assert_user_error(build(*common, "--out", tmp_path / "file"), tmp_path / "file", "--out")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "others").mkdir()
    (tmp_path / "others/fineweb_train_000001.bin").write_bytes(shard([EOT]))
    assert_user_error(build(*common, "--out", tmp_path / "others"),
                      "fineweb_train_000001.bin is there already")
    assert shards_in(tmp_path / "others") == {"fineweb_train_000001.bin": shard([EOT])}
    out = tmp_path / "o"
    assert build(*common, "--out", out).returncode == 0
    before = shards_in(out)
    assert_user_error(build(*common, "--shard_size", 60, "--out", out), out, "different: shard_size")
    (tmp_path / "a.jsonl").write_text('{"text": "other words"}\n')
    assert_user_error(build(*common, "--out", out), out, "different: inputs")
    assert shards_in(out) == before
    (out / "fineweb_build.json").write_text("{")
    assert_user_error(build(*common, "--out", out), out / "fineweb_build.json", "not the state of a build")
    with shards.lock_folder(out):
        assert_user_error(build(*common, "--out", out), out, "another data script")


def test_a_shard_that_vanished_or_broke_is_not_built_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words to make shards of"}\n' * 20)
    arguments = (tmp_path / "a.jsonl", "--shard_size", 50, "--out", tmp_path / "o")
    assert build(*arguments).returncode == 0
    path = tmp_path / "o" / "fineweb_train_000001.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert_user_error(build(*arguments), path, "1123 bytes")
    path.unlink()
    assert_user_error(build(*arguments), path, "gone", "fineweb_build.json")


@pytest.mark.parametrize("arguments, part", [
    ([], "--version"), (["x.txt"], "--out DIR"), (["x.txt", "--version", "10B"], "--version"),
    (["--version", "11B"], "11B"), (["x.txt", "--out", "o", "--shard_size", "0"],
                                    "0 is not from 1 to 2147483647"),
    (["x.txt", "--out", "o", "--workers", "two"], "'two' is no whole number"), (["verify"], "PATTERN"),
    (["x.txt", "--out", ""], "an empty path"), (["decode"], "FILE"), (["decode", "x", "--at", "y"], "--at"),
    (["verify", "x", "--batch_tokens", "0"], "0 is not"),
])
def test_wrong_arguments(arguments: list[str], part: str) -> None:
    assert_user_error(run(SCRIPT, *arguments), part, code=2)


# ------------------------------------------------------------------------------------------------------------
# vocabulary


def cut_to(path: Path, lines: Callable[[list[bytes]], list[bytes]]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines(vocabulary().read_bytes().splitlines())))
    return path


def swapped(lines: list[bytes]) -> list[bytes]:
    """The ranks of two words exchanged."""
    one, two = lines[15496].split()[0], lines[995].split()[0]
    lines[15496], lines[995] = two + b" 15496", one + b" 995"
    return lines


@pytest.mark.parametrize("lines, parts", [
    (lambda lines: lines[:50000], ["50000 tokens, but GPT-2's vocabulary has 50256"]),
    (lambda lines: lines + [base64.b64encode(b"one more token") + b" 50256"], ["50257 tokens"]),
    (lambda lines: lines[:-1] + [lines[-1].split()[0] + b" 60000"], ["ranked 0 to 50255"]),
    (swapped, ["has rank", "another vocabulary"]),
    (lambda lines: [b"{"] + lines, ["line 1 is not `base64 rank`"]),
    (lambda lines: [b"!!! 0"] + lines[1:], ["line 1 is not `base64 rank`"]),
    (lambda lines: [], ["0 tokens"]),
])
def test_another_vocabulary_is_refused(lines: Callable[[list[bytes]], list[bytes]], parts: list[str],
                                       tmp_path: Path) -> None:
    path = cut_to(tmp_path / "other.tiktoken", lines)
    with pytest.raises(shards.DataError) as caught:
        fineweb.read_ranks(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_a_vocabulary_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path / "no.tiktoken", tmp_path):
        result = run(SCRIPT, tmp_path / "a.txt", "--out", tmp_path / "o", "--vocabulary", path)
        assert_user_error(result, path)
    assert not (tmp_path / "o").exists()


def test_without_network_or_file_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    dead = {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "HTTPS_PROXY": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9", "NO_PROXY": "", "no_proxy": ""}
    result = run(SCRIPT, tmp_path / "a.txt", "--out", tmp_path / "o", **dead)
    assert_user_error(result, "--vocabulary FILE", "TIKTOKEN_CACHE_DIR")
    assert not (tmp_path / "o").exists()


def test_tiktokens_cache_is_honoured(tmp_path: Path, oracle: tiktoken.Encoding) -> None:
    """The two files that tiktoken would download, rebuilt from the ranks; tiktoken checks their sha256."""
    ranks = {oracle.decode_single_token_bytes(rank): rank for rank in range(50256)}
    letter = {oracle.decode_single_token_bytes(rank)[0]: chr(code) for rank, code in enumerate(
        [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)])}

    def spelled(token: bytes) -> str:
        return "".join(letter[byte] for byte in token)

    def halves(token: bytes) -> list[bytes]:
        """The two tokens that a merge joins: what is left when only earlier merges are made."""
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            made = [ranks.get(parts[i] + parts[i + 1], 10**6) for i in range(len(parts) - 1)]
            i = made.index(min(made))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return parts

    encoder = json.dumps({**{spelled(token): rank for token, rank in ranks.items()}, "<|endoftext|>": EOT})
    merges = "".join(" ".join(map(spelled, halves(token))) + "\n" for token,
                     rank in ranks.items() if rank >= 256)
    root = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name, content in (("encoder.json", encoder), ("vocab.bpe", "#version: 0.2\n" + merges)):
        (tmp_path / hashlib.sha1((root + name).encode()).hexdigest()).write_bytes(content.encode())
    (tmp_path / "a.txt").write_text("Hello world")
    result = run(SCRIPT, tmp_path / "a.txt", "--out", tmp_path / "o", TIKTOKEN_CACHE_DIR=str(tmp_path),
                 HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert shards_in(tmp_path / "o") == {"fineweb_val_000000.bin": shard([EOT, 15496, 995])}


def test_only_data_imports_tiktoken() -> None:
    importers = set()
    for path in [*DATA.parent.glob("*.py"), *DATA.glob("*.py"), *(DATA.parent / "records").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "tiktoken" for name in names):
                importers.add(path.relative_to(DATA.parent).as_posix())
    assert importers == {"data/fineweb.py", "data/rehearsal.py"}


# ------------------------------------------------------------------------------------------------------------
# FineWeb from the hub


def test_a_version_is_fetched_from_the_hub(tmp_path: Path, oracle: tiktoken.Encoding) -> None:
    files = {}
    for i in (0, 1, 2):
        table = pyarrow.table({"text": [f"Document {i}.{j}" for j in range(50)], "url": ["x"] * 50})
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        files[f"sample/10BT/{i:03d}_00000.parquet"] = (tmp_path / "t.parquet").read_bytes()
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    arguments = ("--version", "10B", "--out", tmp_path / "o", "--shard_size", 100)
    with StandInHub("HuggingFaceFW/fineweb", files) as hub:
        result = build(*arguments, **environment, HF_ENDPOINT=hub.url)
        assert result.returncode == 0, result.stderr
        assert sorted(hub.gets) == sorted(files)
    texts = [f"Document {i}.{j}" for i in (0, 1, 2) for j in range(50)]
    assert shards_in(tmp_path / "o") == oracle_shards(texts, 100, oracle)
    result = build(*arguments, **environment, HF_ENDPOINT="http://127.0.0.1:9")
    assert_user_error(result, "http://127.0.0.1:9 could not serve sample/10BT", "HF_ENDPOINT", "INPUT")


# ------------------------------------------------------------------------------------------------------------
# verify and decode


def test_verify_reports_each_shard_and_the_sums(tmp_path: Path) -> None:
    (tmp_path / "fineweb_val_000000.bin").write_bytes(shard([EOT, 7, EOT, 50255]))
    (tmp_path / "fineweb_train_000001.bin").write_bytes(shard([EOT, *range(5, 25)]))
    (tmp_path / "fineweb_train_000002.bin").write_bytes(shard([3] * 20 + [EOT]))
    result = run(SCRIPT, "verify", tmp_path / "*.bin", "--batch_tokens", 5)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].endswith("fineweb_train_000001.bin: format version 1, 21 tokens, 1066 bytes, "
                             "ids 5 to 50256, 1 documents")
    assert "21 tokens, 1066 bytes, ids 3 to 50256, 1 documents" in lines[1]
    assert "4 tokens, 1032 bytes, ids 7 to 50256, 2 documents" in lines[2]
    assert lines[3] == "in all 3 good shards, 46 tokens, 4 documents"
    # in 21 tokens: batches at 0, 5 and 10; at 15, 15 + 5 + 1 reaches the end
    assert lines[4].startswith("2 train shards give 6 batches of 5 tokens and so feed 6 steps")
    assert run(SCRIPT, "verify", tmp_path, "--batch_tokens", 5).stdout == result.stdout


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 11, 12, 21, 22, 23])
def test_batches_are_counted_as_the_stream_takes_them(length: int) -> None:
    batches = position = 0
    while position + 5 + 1 < length:
        batches += 1
        position += 5
    assert fineweb.batches_in(length, 5) == batches


def test_the_record_needs_thirty_shards() -> None:
    assert fineweb.batches_in(10**8, fineweb.RECORD_BATCH) == 190
    assert -(-fineweb.RECORD_STEPS // 190) == 30


def test_verify_names_what_is_bad_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a_1.bin").write_bytes(shard([EOT, 7])[:-1])
    (tmp_path / "a_2.bin").write_bytes(shard([EOT, 50257]))
    (tmp_path / "a_3.bin").write_bytes(shard([EOT, 1, 2]))
    (tmp_path / "a_4.bin").mkdir()
    result = run(SCRIPT, "verify", tmp_path / "a_*.bin")
    assert_user_error(result, "3 of 4 shards are bad")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("BAD") and "a_1.bin: 1027 bytes" in lines[0]
    assert lines[1].startswith("BAD") and "ids 50256 to 50257" not in lines[0] and "to 50257" in lines[1]
    assert not lines[2].startswith("BAD") and "3 tokens" in lines[2] and lines[3].startswith("BAD")
    assert "in all 1 good shards, 3 tokens" in lines[4]
    assert_user_error(run(SCRIPT, "verify", tmp_path / "b_*.bin"), tmp_path / "b_*.bin", "no shard matches")


def test_decode_prints_text(tmp_path: Path, oracle: tiktoken.Encoding) -> None:
    tokens = [EOT, 15496, 995, EOT, *oracle.encode_ordinary("naïve 😀")]
    path = tmp_path / "x.bin"
    path.write_bytes(shard(tokens))

    def decoded(*arguments: object, **environment: str) -> str:
        result = run(SCRIPT, "decode", path, "--vocabulary", vocabulary(), *arguments, **environment)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert decoded() == "<|endoftext|>Hello world<|endoftext|>naïve 😀\n"
    assert decoded("--at", 1, "--length", 2) == "Hello world\n"
    assert decoded("--at", 2, "--length", 10**9).startswith(" world<|endoftext|>na")
    ascii_only = decoded(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert ascii_only == "<|endoftext|>Hello world<|endoftext|>na\\xefve \\U0001f600\n"


@pytest.mark.parametrize("arguments, part", [
    (["--at", "3"], "--at is 3, but the shard has tokens 0 to 2"), (["--at", "-1"], "--at is -1"),
    (["--length", "0"], "--length is 0"), ([], "token 60000 at 2, but ids end at 50256"),
])
def test_decode_says_what_is_wrong(arguments: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(shard([EOT, 1, 60000]))
    result = run(SCRIPT, "decode", tmp_path / "x.bin", "--vocabulary", vocabulary(), *arguments)
    assert_user_error(result, part)
    assert_user_error(run(SCRIPT, "decode", tmp_path / "no.bin"), tmp_path / "no.bin", "No such file")
