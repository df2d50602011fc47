"""Writes small token shards of real English for the rehearsal, with no network and no vocabulary file.

    python data/rehearsal.py [--out DIR]        default DIR: the folder `rehearsal` beside this file

The text is what every Python carries: the help topics of pydoc and the docstrings of the standard library.
Tokens are bytes, numbered as GPT-2 numbers its 256 single-byte tokens, and 256 starts each document. One
Python version always gives the same files. When they are all there and unchanged, the script does nothing and
says nothing.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiktoken

from shards import make_folder, path_argument, run_script, write_shard

DEFAULT_OUT = Path(__file__).resolve().parent / "rehearsal"
EOT_TOKEN = 256
TRAIN_SHARDS = 2  # two, so that a rehearsal crosses from one shard to the next
VAL_FRACTION = 0.1
NOT_THE_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
STAMP = "rehearsal.json"
SHARD_NAME = re.compile(r"rehearsal_(train|val)_\d{6}\.bin")


def byte_encoding() -> tiktoken.Encoding:
    """The 256 bytes as tokens in GPT-2's order, 0 to 255, and <|endoftext|> as 256.

    GPT-2 numbers the bytes that print in Latin-1 first, in ascending order, then all others, ascending.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printable + [byte for byte in range(256) if byte not in printable]
    ranks = {bytes([byte]): token for token, byte in enumerate(order)}
    return tiktoken.Encoding("bytes", pat_str=r"(?s).+", mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": EOT_TOKEN}, explicit_n_vocab=EOT_TOKEN + 1)


def docstrings(node: ast.AST) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, in the order of the source."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
        for child in node.body:
            yield from docstrings(child)


def documents() -> list[str]:
    """One document a help topic and one a library module, in an order that mixes both and depends on nothing
    else.

    No docstring is used twice, so that validation text has not been trained on.
    """
    from pydoc_data.topics import topics
    found = set(topics.values())
    seen: set[str] = set()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if NOT_THE_LIBRARY.intersection(path.relative_to(library).parts):
            continue
        source = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the library are not ours to report
                module = ast.parse(source)
        except (SyntaxError, ValueError):  # a template, not a module
            continue
        new = [text for text in dict.fromkeys(docstrings(module)) if text not in seen]
        seen.update(new)
        if new:
            found.add("\n\n".join(new))
    return sorted(found, key=lambda text: hashlib.sha256(_utf8(text)).digest())


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a docstring may hold half a surrogate pair


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_complete(folder: Path, made_by: str) -> bool:
    """Whether `folder` holds exactly the shards that its stamp lists, unchanged, and `made_by` made them."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        there = {path.name for path in folder.iterdir() if SHARD_NAME.fullmatch(path.name)}
        return (stamp["made_by"] == made_by and there == set(stamp["sha256"])
                and all(_digest(folder / name) == digest for name, digest in stamp["sha256"].items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no stamp, or not one of ours
        return False


def write_rehearsal(out_dir: str | os.PathLike[str] = DEFAULT_OUT) -> str | None:
    """Writes rehearsal_train_000001.bin, ... and rehearsal_val_000000.bin into `out_dir`.

    Returns one line on what was written, or None when all was there. Raises DataError for a folder that
    cannot be written, OSError for a full disk.
    """
    folder = make_folder(out_dir)
    # another Python has another library, another version of this file may cut the text differently
    made_by = f"Python {sys.version}, {_digest(Path(__file__))}"
    if _is_complete(folder, made_by):
        return None
    (folder / STAMP).unlink(missing_ok=True)
    encoding = byte_encoding()
    streams = [np.array([EOT_TOKEN, *encoding.encode_ordinary(_utf8(text).decode("utf-8"))], dtype=np.uint16)
               for text in documents()]
    ends = np.cumsum([len(stream) for stream in streams])
    num_val = int(np.searchsorted(ends, VAL_FRACTION * ends[-1])) + 1  # documents
    train = np.concatenate(streams[num_val:])
    pieces = {"rehearsal_val_000000.bin": np.concatenate(streams[:num_val])}
    for i, piece in enumerate(np.array_split(train, TRAIN_SHARDS), start=1):
        pieces[f"rehearsal_train_{i:06d}.bin"] = piece
    for path in sorted(folder.iterdir()):
        if SHARD_NAME.fullmatch(path.name) and path.name not in pieces:
            path.unlink()  # from another version of this script; the training pattern would read it
    for name, tokens in pieces.items():
        write_shard(folder / name, tokens)
    stamp = {"made_by": made_by, "sha256": {name: _digest(folder / name) for name in pieces}}
    temporary = folder / f"{STAMP}.tmp"
    temporary.write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, folder / STAMP)
    return (f"{folder}: {TRAIN_SHARDS} train shards of {len(streams) - num_val} documents, {len(train)} "
            f"tokens; 1 validation shard of {num_val} documents, {ends[num_val - 1]} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", type=path_argument, default=DEFAULT_OUT,
                        help="folder to write to (default: %(default)s)")
    message = write_rehearsal(parser.parse_args().out)
    if message:
        print(message)


if __name__ == "__main__":
    run_script(main)
