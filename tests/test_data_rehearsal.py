"""data/rehearsal.py: real English, bytes numbered as GPT-2 numbers them, the same files on every run."""

from __future__ import annotations

import ast
import pydoc_data.topics
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_helpers import assert_user_error, plain_encoding, run, shards_in

import rehearsal

NAMES = ["rehearsal_train_000001.bin", "rehearsal_train_000002.bin", "rehearsal_val_000000.bin"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that one run of the script has written."""
    folder = tmp_path_factory.mktemp("rehearsal") / "new" / "folder"
    result = run("rehearsal.py", "--out", folder)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout.count("\n") == 1 and str(folder) in result.stdout
    return folder


def tokens_of(content: bytes) -> list[int]:
    """Header checked by struct, tokens by struct."""
    magic, version, count = struct.unpack_from("<3i", content)
    assert (magic, version) == (20240520, 1)
    return list(struct.unpack_from(f"<{count}H", content, 1024))


def documents_of(tokens: list[int]) -> Iterator[bytes]:
    """The bytes of each document: GPT-2's own ids of single bytes, read backwards."""
    gpt2 = plain_encoding()
    byte_of = {token: gpt2.decode_single_token_bytes(token) for token in range(256)}
    document: list[bytes] = []
    for token in tokens[1:] + [256]:
        if token == 256:
            yield b"".join(document)
            document = []
        else:
            document.append(byte_of[token])


def test_files_sizes_and_tokens(made: Path) -> None:
    files = shards_in(made)
    assert list(files) == NAMES
    counts = {}
    for name, content in files.items():
        tokens = tokens_of(content)
        assert len(content) == 1024 + 2 * len(tokens)
        assert min(tokens) >= 0 and max(tokens) == 256
        assert tokens.count(256) > 10
        counts[name] = len(tokens)
    assert tokens_of(files[NAMES[0]])[0] == tokens_of(files[NAMES[2]])[0] == 256
    assert counts[NAMES[0]] + counts[NAMES[1]] > 1_000_000
    assert counts[NAMES[2]] > 100_000


def test_the_text_is_the_librarys_and_validation_is_not_trained_on(made: Path) -> None:
    files = shards_in(made)
    train = list(documents_of(tokens_of(files[NAMES[0]]) + tokens_of(files[NAMES[1]])))
    val = list(documents_of(tokens_of(files[NAMES[2]])))
    assert len(set(train + val)) == len(train) + len(val)  # no document twice, none on both sides
    topics = {text.encode() for text in pydoc_data.topics.topics.values()}
    assert topics <= set(train + val)
    assert topics & set(train) and topics & set(val)
    # a document of the other kind: the docstrings of this very module of the library
    source = Path(ast.__file__).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring is not None
    assert sum(document.decode().startswith(docstring) for document in train + val) == 1
    for document in train + val:
        assert document.decode("utf-8").strip()


def test_silent_and_idle_when_all_is_there(made: Path) -> None:
    times = [path.stat().st_mtime_ns for path in sorted(made.iterdir())]
    result = run("rehearsal.py", "--out", made)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [path.stat().st_mtime_ns for path in sorted(made.iterdir())] == times


def test_whatever_is_wrong_is_put_right_with_the_same_bytes(made: Path) -> None:
    whole = shards_in(made)
    flipped = bytearray(whole[NAMES[0]])
    flipped[5000] ^= 1
    (made / NAMES[0]).write_bytes(flipped)
    (made / NAMES[1]).unlink()
    (made / "rehearsal_train_000003.bin").write_bytes(b"of an older version")
    (made / "notes.txt").write_text("the user's")
    assert run("rehearsal.py", "--out", made).stdout != ""
    assert shards_in(made) == whole
    assert (made / "notes.txt").read_text() == "the user's"
    assert run("rehearsal.py", "--out", made).stdout == ""


@pytest.mark.parametrize("change", [
    lambda made: (made / NAMES[2]).write_bytes(b""),
    lambda made: (made / NAMES[2]).unlink(),
    lambda made: (made / "rehearsal_val_000009.bin").write_bytes(b""),
    lambda made: (made / "rehearsal.json").write_text("[1]"),
    lambda made: (made / "rehearsal.json").write_text("{"),
    lambda made: (made / "rehearsal.json").unlink(),
    lambda made: (made / "rehearsal.json").write_text(
        (made / "rehearsal.json").read_text().replace("Python ", "Python 2")),
], ids=["cut", "gone", "one more", "stamp of another kind", "cut stamp", "no stamp", "another Python"])
def test_every_change_is_noticed(change: Callable[[Path], object], tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "documents",
                        lambda: ["Some text. "] * 5 + [f"Text {i}." for i in range(95)])
    folder = tmp_path / "small"
    assert rehearsal.write_rehearsal(folder)
    assert rehearsal.write_rehearsal(folder) is None
    whole = shards_in(folder)
    change(folder)
    assert rehearsal.write_rehearsal(folder)
    assert shards_in(folder) == whole
    assert rehearsal.write_rehearsal(folder) is None


def test_an_output_that_is_a_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert_user_error(run("rehearsal.py", "--out", tmp_path / "file"), tmp_path / "file", "--out")
    assert_user_error(run("rehearsal.py", "--nonsense"), "--nonsense", code=2)
