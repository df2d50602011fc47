"""The shard format: one table of good and bad files for both readers, and the writer against struct.

The readers are data/shards.py and load_shard of train_gpt_medium.py, which must stand alone; here they are
held to the same answers. Every file is put together by data_helpers.shard, field by field.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_helpers import DATA, EOT, ROOT, shard

import shards


def read_by_data(path: Path) -> list[int]:
    tokens = shards.read_shard(path)
    assert tokens.dtype == np.uint16 and tokens.ndim == 1
    return tokens.tolist()


def read_by_training(path: Path) -> list[int]:
    sys.path.insert(0, str(ROOT))
    try:
        import train_gpt_medium
    finally:
        sys.path.remove(str(ROOT))
    tokens = train_gpt_medium.load_shard(path)
    assert str(tokens.dtype) == "torch.uint16" and tokens.dim() == 1
    return tokens.tolist()


READERS = pytest.mark.parametrize("read", [read_by_data, read_by_training])

GOOD = {
    "one token": [EOT],
    "a document": [EOT, 15496, 995],
    "ends of uint16": [0, 65535, 1, 65534],
    "many": [(7919 * i) % 50257 for i in range(100_003)],
}

WHOLE = shard([EOT, 1, 2, 3, 4])
BAD = {
    "empty": b"",
    "three bytes": WHOLE[:3],
    "cut in the header": WHOLE[:1023],
    "header alone": WHOLE[:1024],
    "one token short": WHOLE[:-2],
    "one byte short": WHOLE[:-1],
    "one byte long": WHOLE + b"\0",
    "one token long": WHOLE + b"\0\0",
    "count too large": shard([EOT, 1, 2], count=4),
    "count too small": shard([EOT, 1, 2], count=2),
    "no tokens": shard([]),
    "negative count": shard([], count=-1),
    "count of all ones": shard([EOT], count=-(2**31)),
    "wrong magic": shard([EOT, 1], magic=20240801),
    "magic of zeros": shard([EOT, 1], magic=0),
    "version 0": shard([EOT, 1], version=0),
    "version 2": shard([EOT, 1], version=2),
    "big-endian": struct.pack(">256i", 20240520, 1, 1, *[0] * 253) + struct.pack(">H", EOT),
    "tokens without a header": struct.pack("<2000H", *range(2000)),
    "text": b"<!DOCTYPE html>\n" * 100,
}


@READERS
@pytest.mark.parametrize("tokens", GOOD.values(), ids=GOOD)
def test_good_shards_are_read_exactly(read: Callable[[Path], list[int]], tokens: list[int],
                                      tmp_path: Path) -> None:
    path = tmp_path / "good.bin"
    path.write_bytes(shard(tokens))
    assert read(path) == tokens


@READERS
@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_bad_shards_are_refused_by_name(read: Callable[[Path], list[int]], content: bytes,
                                        tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="bad.bin"):
        read(path)


@READERS
def test_what_is_no_file_is_refused_by_name(read: Callable[[Path], list[int]], tmp_path: Path) -> None:
    (tmp_path / "folder.bin").mkdir()
    for name in ("missing.bin", "folder.bin"):
        with pytest.raises((ValueError, OSError)) as caught:
            read(tmp_path / name)
        assert name in str(caught.value)


def test_header_integers_after_the_third_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "later.bin"
    path.write_bytes(struct.pack("<256i", 20240520, 1, 2, *range(253)) + struct.pack("<2H", EOT, 9))
    assert read_by_data(path) == read_by_training(path) == [EOT, 9]


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.bin")
    with pytest.raises(ValueError, match="pipe.bin"):
        shards.check_shard(tmp_path / "pipe.bin")


@pytest.mark.parametrize("damage, part", [
    (b"", "0 bytes"),
    (WHOLE[:-1], "1033 bytes, but the header counts 5 tokens and so 1034 bytes"),
    (shard([1], magic=7), "magic number 7, but a token shard has 20240520"),
    (shard([1], version=3), "format version 3, but only version 1"),
    (shard([]), "counts 0 tokens"),
])
def test_the_message_gives_value_and_rule(damage: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(damage)
    with pytest.raises(shards.DataError) as caught:
        shards.check_shard(path)
    assert str(path) in str(caught.value) and part in str(caught.value)


@pytest.mark.parametrize("tokens", GOOD.values(), ids=GOOD)
def test_the_writer_writes_the_same_bytes_as_struct(tokens: list[int], tmp_path: Path) -> None:
    shards.write_shard(tmp_path / "whole.bin", np.array(tokens, dtype=np.uint16))
    with shards.ShardWriter(tmp_path / "pieces.bin") as writer:
        for start in range(0, len(tokens), 1000):
            writer.append(np.array(tokens[start:start + 1000], dtype=np.uint16))
        writer.commit()
    assert (tmp_path / "whole.bin").read_bytes() == (tmp_path / "pieces.bin").read_bytes() == shard(tokens)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pieces.bin", "whole.bin"]


def test_an_abandoned_shard_leaves_nothing_and_spares_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "kept.bin"
    path.write_bytes(WHOLE)
    with pytest.raises(RuntimeError), shards.ShardWriter(path) as writer:
        writer.append(np.arange(10, dtype=np.uint16))
        raise RuntimeError
    assert [file.name for file in tmp_path.iterdir()] == ["kept.bin"]
    assert path.read_bytes() == WHOLE


def test_a_killed_writer_leaves_nothing_that_reads_as_a_shard(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, time
        import numpy as np, shards
        writer = shards.ShardWriter(sys.argv[1])
        writer.append(np.zeros(10**6, dtype=np.uint16))
        print("writing", flush=True)
        time.sleep(60)
    """)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "killed.bin")], cwd=DATA,
                               stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"writing\n"
    process.kill()
    process.wait()
    process.stdout.close()
    left = list(tmp_path.iterdir())
    assert len(left) == 1 and left[0].suffix == ".tmp"
    with pytest.raises(ValueError):
        shards.check_shard(left[0])


class FullDisk(io.RawIOBase):
    """A file on a disk with no room left."""

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, content: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, shards.ShardWriter(tmp_path / "full.bin") as writer:
        real = writer._file
        writer._file = io.BufferedWriter(FullDisk())
        writer.append(np.zeros(10, dtype=np.uint16))
        writer.commit()
    real.close()
    assert caught.value.filename == str(tmp_path / "full.bin") and "No space" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    with shards.lock_folder(tmp_path):
        with pytest.raises(shards.DataError, match="another data script"), shards.lock_folder(tmp_path):
            pass
    with shards.lock_folder(tmp_path):
        pass


def test_what_is_no_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, part in ((tmp_path / "file", "a file stands where"),
                       (tmp_path / "file" / "below", "a file stands where"),
                       (tmp_path / ("x" * 300), "cannot be made")):
        with pytest.raises(shards.DataError, match=part) as caught:
            shards.make_folder(path)
        assert str(path) in str(caught.value) and "--out" in str(caught.value)


def test_reading_costs_no_memory_for_the_whole_shard(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(shard([EOT], count=10**8))
    with open(path, "r+b") as file:
        file.truncate(1024 + 2 * 10**8)  # sparse
    began = time.perf_counter()
    tokens = shards.read_shard(path)
    assert len(tokens) == 10**8 and tokens[0] == EOT and tokens[-1] == 0
    assert time.perf_counter() - began < 0.5
