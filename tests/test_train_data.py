"""Shards and the global stream: every token where the rules put it, on any number of ranks, and every bad file named."""
from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import train_gpt_medium as t
from train_helpers import shard


def write(folder: Path, *lengths: int, name: str = "train") -> str:
    """Shards of consecutive numbers, counted on from one to the next (mod 65536), and the glob that finds them."""
    first = 0
    for i, length in enumerate(lengths):
        (folder / f"{name}_{i:06d}.bin").write_bytes(shard([n % 65536 for n in range(first, first + length)]))
        first += length
    return f"{folder}/{name}_*.bin"


def stream_oracle(lengths: list[int], size: int) -> list[list[int]]:
    """Each global batch with its one token more, from the rule: look, take [pos, pos + B + 1), move by B."""
    shards, first = [], 0
    for length in lengths:
        shards.append([n % 65536 for n in range(first, first + length)])
        first += length
    batches: list[list[int]] = []
    for tokens in shards:
        pos = 0
        while not pos + size + 1 >= len(tokens):
            batches.append(tokens[pos: pos + size + 1])
            pos += size
    return batches


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("lengths, size", [([1000], 64), ([401, 402, 403], 80), ([650, 70, 650], 64), ([66_000, 3000], 1024)])
def test_ranks_tile_each_global_batch(lengths, size, world, tmp_path):
    pattern, expected = write(tmp_path, *lengths), stream_oracle(lengths, size)
    per_rank = [list(t.token_batches(pattern, size, rank, world)) for rank in range(world)]
    assert {len(batches) for batches in per_rank} == {len(expected)}
    for n, tokens in enumerate(expected):
        inputs, targets = [], []
        for batches in per_rank:
            assert batches[n][0].dtype == torch.int32 and batches[n][1].dtype == torch.int64
            assert batches[n][0].shape == batches[n][1].shape == (size // world,)
            inputs += batches[n][0].tolist()
            targets += batches[n][1].tolist()
        assert inputs == tokens[:-1] and targets == tokens[1:], n


def test_end_of_shard_rule_on_either_side_of_it(tmp_path):
    """With B = 10 a shard of 21 tokens gives one batch (10 + 10 + 1 >= 21), one of 22 two, of 11 none, of 12 one."""
    for length, count in ((1, 0), (10, 0), (11, 0), (12, 1), (21, 1), (22, 2), (31, 2), (32, 3)):
        folder = tmp_path / str(length)
        folder.mkdir()
        assert len(list(t.token_batches(write(folder, length), 10))) == count == len(stream_oracle([length], 10)), length
        assert t.batches_in_shard(length, 10) == count
    assert t.batches_in_shard(100_000_000, 8 * 65536) == 190


def test_skip_continues_where_a_run_stopped(tmp_path):
    lengths = [401, 90, 402, 403]
    pattern, expected = write(tmp_path, *lengths), stream_oracle(lengths, 80)
    for skip in range(len(expected) + 2):
        rest = list(t.token_batches(pattern, 80, 1, 2, skip))
        assert [b[0].tolist() for b in rest] == [e[40:80] for e in expected[skip:]], skip


def test_shards_are_taken_in_name_order_and_globs_are_relative_to_the_script(tmp_path, monkeypatch):
    for i, name in enumerate(("b_2.bin", "a_9.bin", "a_10.bin")):
        (tmp_path / name).write_bytes(shard(range(100 * i, 100 * i + 12)))
    firsts = [int(inputs[0]) for inputs, _ in t.token_batches(f"{tmp_path}/*.bin", 10)]
    assert firsts == [200, 100, 0]  # a_10, a_9, b_2
    monkeypatch.chdir("/")
    relative = os.path.relpath(tmp_path, Path(t.__file__).parent)
    assert [int(i[0]) for i, _ in t.token_batches(f"{relative}/*.bin", 10)] == firsts


def test_load_shard_gives_the_tokens(tmp_path):
    path = tmp_path / "x.bin"
    tokens = [0, 1, 255, 256, 32767, 32768, 50256, 65535]
    path.write_bytes(shard(tokens))
    loaded = t.load_shard(path)
    assert loaded.dtype == torch.uint16 and loaded.ndim == 1 and loaded.tolist() == tokens
    assert t.load_shard(str(path)).tolist() == tokens
    assert path.read_bytes() == shard(tokens)  # mapped privately: reading changes nothing


GOOD = shard(range(50))
BAD = {
    "wrong magic": (shard(range(50), magic=20240521), "magic number 20240521, not 20240520"),
    "magic of the older float format": (shard(range(50), magic=20240801), "not 20240520"),
    "wrong version": (shard(range(50), version=2), "shard version 2"),
    "0 bytes": (b"", "0 bytes"),
    "half a header": (GOOD[:512], "512 bytes, but a shard's header alone has 1024"),
    "one token short": (GOOD[:-2], "promises 50 tokens, 1124 bytes, but the file has 1122"),
    "one token long": (GOOD + b"\0\0", "promises 50 tokens, 1124 bytes, but the file has 1126"),
    "odd byte count": (GOOD + b"\0", "but the file has 1125"),
    "odd and short": (GOOD[:-1], "but the file has 1123"),
    "negative count": (shard(range(50), count=-1), "the header counts -1 tokens"),
    "no token": (shard([]), "the header counts 0 tokens"),
    "text": (b"a page saying 404 not found\n" * 100, "magic number"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_shards_are_named_with_value_and_rule(what, tmp_path):
    data, message = BAD[what]
    path = tmp_path / "bad shard.bin"
    path.write_bytes(data)
    for read in (t.load_shard, t.check_shard, lambda p: list(t.token_batches(str(p), 10))):
        with pytest.raises(ValueError) as e:
            read(path)
        assert str(path) in str(e.value) and message in str(e.value)


def test_a_missing_file_a_folder_and_an_empty_match_are_named(tmp_path):
    for path in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            t.load_shard(path)
    with pytest.raises(ValueError, match="no shard matches.*cached_fineweb10B.py.*rehearsal.py"):
        list(t.token_batches(f"{tmp_path}/*.bin", 10))


def test_a_token_past_the_vocabulary_is_named_with_its_place(tmp_path):
    (tmp_path / "a.bin").write_bytes(shard([5] * 30 + [300] + [5] * 20))
    batches = t.token_batches(f"{tmp_path}/a.bin", 10, vocab_size=300)
    assert len([next(batches) for _ in range(2)]) == 2
    with pytest.raises(ValueError, match="token id 300 .*vocab_size is 300"):
        for _ in batches:
            pass
    assert len(list(t.token_batches(f"{tmp_path}/a.bin", 10, vocab_size=301))) == 4


def test_enough_batches_exactly_is_enough_and_one_less_says_what_is_needed(tmp_path):
    pattern = write(tmp_path, 402, 402)  # 5 batches of 80 each by the rule (4 * 80 + 81 < 402)
    shards = t.find_shards(pattern)
    available = len(stream_oracle([402, 402], 80))
    t.check_enough(shards, 80, available, "training", pattern)
    with pytest.raises(ValueError) as e:
        t.check_enough(shards, 80, available + 1, "training", pattern)
    text = str(e.value)
    assert f"{available + 1} batches" in text and "2 shards" in text and f"give {available}" in text
    assert "needs 3 shards" in text and "python data/cached_fineweb10B.py 3" in text
