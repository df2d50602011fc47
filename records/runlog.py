"""Read the log of one training run, strictly.

A log counts only if everything a claim rests on is in it and consistent; otherwise `LogError` says in one
sentence why it does not. Nothing that stands in a log is executed or imported.

What a log looks like (ours, and modded-nanogpt's, whose logs embed the script that wrote them):

    the script's own bytes
    a line of 100 '='
    header: versions, GPU table; in our logs `key: value` lines, among them the sha256 of the script
    a line of 100 '='
    body: step:N/M val_loss:X train_time:Yms step_avg:Zms     a validation
          step:N/M train_time:Yms step_avg:Zms                a training step
          peak memory allocated: N MiB reserved: N MiB
          any other line                                      a remark, ignored

An embedded script may itself hold lines of 100 '=' or text that looks like a log. Where the body begins is
therefore decided like this:

1. Our logs: the separator that ends the script is the one before which the bytes have the sha256 that the
   header behind it states. A stated hash that fits nowhere means an altered log, which is refused.
2. Other logs: the header is the last stretch between two separators that begins with `Running Python` or
   `Running PyTorch`; the body follows it. Step lines between two such headers mean several runs in one file.
3. Logs without such a header: the body follows the last separator; a finished run before it means several.

Standard library only, so that a worker process starts at once.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import math
import os
import re
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path

MAX_LOSS = 100.0  # nats a token; a model that knows nothing of 50304 tokens has 10.83
MAX_BYTES = 64 * 2**20  # a run's log is about 0.4 MB; anything this big is not one, and memory stays bounded
SUFFIXES = (".txt", ".log", ".txt.gz", ".log.gz")  # what a folder's logs are called

BAR = b"=" * 100
SOURCE_SHA = re.compile(rb"source_sha256: ([0-9a-f]{64})\r?(?:\n|\Z)")
PUBLISHED_HEADER = re.compile(rb"\s*Running py(?:thon|torch) ", re.I)
PYTHON_SOURCE = re.compile(rb"^(?:import \w|from \w[\w.]* import )", re.M)
UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.I)
# Lengths are bounded so that no line of digits, however long, reaches int() or float().
# A step line has at least one field, and no field in a shape that the groups did not take.
STEP_LINE = re.compile(rb"\nstep:(\d{1,9})/(\d{1,9})(?= (?:train_loss|val_loss|train_time):)"
                       rb"(?: train_loss:\S{1,40})?(?: val_loss:(\S{1,40}))?"
                       rb"(?: train_time:(\S{1,40}?)ms)?(?: step_avg:\S{1,40}?ms)?"
                       rb"(?=\n|[ \t])(?!.*(?:val_loss|train_time|step_avg):)")
FINISHED = re.compile(rb"^step:(\d{1,9})/\1 val_loss:", re.M)
PEAK_LINE = re.compile(rb"peak memory (?:allocated|consumption): (\d{1,9}) MiB")
INTERRUPTED = re.compile(rb"^interrupted at step (\d{1,9})", re.M)
NUMBER = re.compile(rb"[+-]?\d{1,20}(?:\.\d{0,20})?(?:e[+-]?\d{1,4})?", re.I)
NOT_FINITE = re.compile(rb"[+-]?(?:nan|inf|infinity)", re.I)
# Older: `s:N tel:X` (llm.c), `step N: train loss X, val loss Y` (nanoGPT), `val loss X` after `step N/M`.
OLD_LINES = re.compile(rb"^(?:s:(\d{1,9}) (?:tel:(\S{1,40})|trl:\S+)"
                       rb"|step (\d{1,9})(?:/(\d{1,9}))?:?(?:.*\bval loss (\S{1,40}))?"
                       rb"|val loss (\S{1,40}))", re.M)
KEPT_FACTS = ("recipe", "scale", "overrides", "world_size", "pytorch", "gpu", "parent",
              "hyperparameter seed")
GPU_ROW = re.compile(r"^\|\s+\d+\s+(NVIDIA [^|]*?)\s{2,}", re.M)


class LogError(Exception):
    """Why a file is not counted as a run: one sentence for its owner."""


Curve = list[tuple[int, float, float | None]]  # (step, val loss, train time in ms or None), in order of steps


@dataclass(frozen=True)
class Parts:
    """A log cut in three. `source` is the embedded script's bytes, None where the log has none."""
    source: bytes | None
    header: bytes
    body: bytes


@dataclass
class Run:
    """One counted run: losses in nats a token, times in ms on the training clock."""
    name: str
    loss: float
    time_ms: float | None = None
    steps: int | None = None
    peak_mib: int | None = None
    uuid: str | None = None
    body_sha: str | None = None
    losses_sha: str | None = None  # of (step, loss) at every validation: equal only in copies and equal seeds
    source_sha: str | None = None
    facts: dict[str, str] = field(default_factory=dict)  # those of the header that KEPT_FACTS names
    curve: Curve = field(default_factory=list)  # kept only when asked for


# ---------------------------------------------------------------------------------------------------------
# Bytes


def read_bytes(path: Path) -> bytes:
    """The file's bytes, gunzipped if it is gzip whatever its name. Raises LogError; never reads a pipe."""
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise LogError("a folder, not a log")
        if not stat.S_ISREG(info.st_mode):
            raise LogError("not a regular file")
        if info.st_size > MAX_BYTES:
            raise LogError(f"too large for a run's log ({info.st_size >> 20} MiB, at most {MAX_BYTES >> 20})")
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"cannot be read: {error.strerror or error}") from error
    if data[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as stream:
                data = stream.read(MAX_BYTES + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise LogError(f"damaged gzip: {error}") from error
        if len(data) > MAX_BYTES:
            raise LogError(f"unpacks to more than {MAX_BYTES >> 20} MiB: too large for a run's log")
    if not data or data.isspace():
        raise LogError("empty file")
    if b"\0" in data:
        raise LogError("binary, not a text log (it has NUL bytes)")
    return data


def split_log(data: bytes) -> Parts:
    """Cut a log into script, header and body by the rules on top of this file. Raises LogError."""
    separators = find_separators(data)
    if any(_stated_sha(data, end, _start(separators, i + 1, data)) for i, (_, end) in enumerate(separators)):
        # A whole log that went through a CRLF conversion is read as the log it was before.
        candidates = [data] if b"\r\n" not in data else [data, data.replace(b"\r\n", b"\n")]
        for candidate in candidates:
            parts = _split_by_hash(candidate)
            if parts is not None:
                return parts
        raise LogError("altered or damaged: the embedded source has another sha256 than the header states")
    if not separators:
        if PYTHON_SOURCE.search(data):
            raise LogError("cut off within the embedded source, or a script rather than a log")
        return Parts(None, b"", data)
    return _split_published(data, separators)


def find_separators(data: bytes) -> list[tuple[int, int]]:
    """(start, end) of every line of exactly 100 '='; `end` is where the next line starts.

    bytes.find, here and below, because a regular expression with ^ is ten times as slow on logs of 0.4 MB.
    """
    found, at = [], data.find(BAR)
    while at >= 0:
        newline = data.find(b"\n", at)
        end = len(data) if newline < 0 else newline
        if data[at - 1:at] in (b"\n", b"") and data[at:end].rstrip(b"\r") == BAR:
            found.append((at, end + 1))
        at = data.find(BAR, end)
    return found


def _stated_sha(data: bytes, begin: int, end: int) -> str | None:
    """The sha256 that a `source_sha256:` line between two positions states; `begin` starts a line."""
    at = begin
    while at < end:
        if match := SOURCE_SHA.match(data, at, end):
            return match[1].decode()
        at = data.find(b"\nsource_sha256: ", at, end) + 1 or end
    return None


def _start(separators: list[tuple[int, int]], index: int, data: bytes) -> int:
    """Where separator `index` starts; the end of the data after the last one."""
    return separators[index][0] if index < len(separators) else len(data)


def _split_by_hash(data: bytes) -> Parts | None:
    """Our logs: script, a newline if it ends without one, separator; the header's hash says which it was."""
    separators = find_separators(data)
    digest, hashed, parts = hashlib.sha256(), 0, None
    for i, (start, end) in enumerate(separators):
        header_end = _start(separators, i + 1, data)
        digest.update(data[hashed:max(start - 1, hashed)])  # all but the newline before the separator
        without_newline = digest.hexdigest()
        digest.update(data[max(start - 1, hashed):start])
        hashed = start
        sha = _stated_sha(data, end, header_end)
        if sha not in (without_newline, digest.hexdigest()):
            continue
        if i + 1 == len(separators):
            raise LogError("cut off within the header")
        # No break: a script may embed a whole log of ours, which fits its own hash further up.
        source = data[:start] if sha == digest.hexdigest() else data[:start - 1]
        parts = Parts(source, data[end:header_end], data[separators[i + 1][1]:])
    if parts is not None and _stated_sha(parts.body, 0, len(parts.body)):
        raise LogError("several runs in one file (a second header after the first body)")
    return parts


def _split_published(data: bytes, separators: list[tuple[int, int]]) -> Parts:
    """Logs without our hash. Some of 2024 open with a separator: then the script begins after it."""
    first = separators[0][1] if separators[0][0] == 0 and len(separators) > 1 else 0
    headers = [i for i in range(len(separators) - 1)
               if PUBLISHED_HEADER.match(data, separators[i][1], separators[i + 1][0])]
    if headers:
        last = headers[-1]
        if data.find(b"\nstep:", separators[headers[0] + 1][1] - 1, separators[last][0]) >= 0:
            raise LogError("several runs in one file (step lines between two headers)")
    else:
        last = len(separators) - (2 if len(separators) - bool(first) > 1 else 1)
        if FINISHED.search(data, 0, separators[-1][0]):
            raise LogError("several runs in one file (a finished run before the last line of 100 '=')")
    source = data[first:separators[last][0]]
    # modded-nanogpt prints the script and then a newline: an empty line before the separator is that newline.
    if source.endswith((b"\n\n", b"\r\n\r\n")):
        source = source[:-2] if source.endswith(b"\r\n") else source[:-1]
    header, body = b"", data[separators[-1][1]:]
    if last + 1 < len(separators):
        header, body = data[separators[last][1]:separators[last + 1][0]], data[separators[last + 1][1]:]
    return Parts(source if source.strip() else None, header, body)


# ---------------------------------------------------------------------------------------------------------
# Header


def text_of(data: bytes) -> str:
    """Text with unix line ends; what is not utf-8 stays visible as \\xNN."""
    return data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")


def printable(text: str) -> str:
    """Text from a log made safe for a terminal: control characters (escape sequences, \\r) as \\xNN."""
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in text)


def read_header(header: bytes) -> dict[str, str]:
    """The `key: value` lines of our header; of others' Python and PyTorch lines and the GPU table.

    Hyperparameters have keys `hyperparameter NAME` and JSON text as values. A repeated key (`data`) has its
    values joined by "; ". Lines of other kinds are ignored.
    """
    text, facts = text_of(header), {}
    for line in text.split("\n"):
        if match := re.fullmatch(r"((?:hyperparameter )?\w+): (.*)", line):
            value = match[2].strip()
            facts[match[1]] = f"{facts[match[1]]}; {value}" if match[1] in facts else value
        elif match := re.match(r"Running (python|pytorch) (\S+)", line, re.I):
            facts.setdefault(match[1].lower(), match[2])
    gpus = GPU_ROW.findall(text)
    if gpus:
        facts.setdefault("gpu", gpus[0].strip())
        facts.setdefault("world_size", str(len(gpus)))  # modded-nanogpt's runs use every GPU of the table
    return facts


def header_json(facts: dict[str, str], key: str) -> object:
    """The JSON value of a header line; None where it is missing or damaged."""
    try:
        return json.loads(facts[key])
    except (KeyError, ValueError, RecursionError):
        return None


# ---------------------------------------------------------------------------------------------------------
# Body


def parse_log(data: bytes, name: str, with_curve: bool = False) -> Run:
    """The run that a log's bytes describe; `name` is its file name. Raises LogError with the reason."""
    parts = split_log(data)
    body = parts.body.replace(b"\r\n", b"\n")
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LogError(f"binary, not a text log ({error.reason} in the body)") from error
    _check_end(body)
    lines = b"\n" + body + b"\n"  # so that every line has a newline on both sides
    validations = _modern_validations(lines) if b"\nstep:" in lines else _old_validations(body)
    step, loss, time_ms = validations[-1]
    peak = PEAK_LINE.match(lines, lines.rfind(b"\npeak memory ") + 1)
    facts = read_header(parts.header)
    uuid = UUID.search(facts.get("run", "")) or UUID.search(name)
    losses = "".join(f"{s} {x!r}\n" for s, x, _ in validations)
    return Run(name=name, loss=loss, time_ms=time_ms, steps=step, peak_mib=int(peak[1]) if peak else None,
               uuid=uuid[0].lower() if uuid else None, body_sha=hashlib.sha256(body).hexdigest(),
               losses_sha=hashlib.sha256(losses.encode()).hexdigest() if len(validations) > 2 else None,
               source_sha=None if parts.source is None else hashlib.sha256(parts.source).hexdigest(),
               facts={k: v for k, v in facts.items() if k in KEPT_FACTS},
               curve=validations if with_curve else [])



def _check_end(body: bytes) -> None:
    """A last line without its newline is whole only if it ends in a unit: a number could lack digits."""
    last = body[body.rfind(b"\n") + 1:]
    if last.strip() and not (re.fullmatch(rb"step:\d+/\d+ .*\d(?:\.\d+)?ms", last) and b"train_time:" in last
                             or re.fullmatch(rb"peak memory .*\d MiB", last)):
        raise LogError(f"cut off mid-line: it ends with {printable(text_of(last[-60:]))!r} and no newline")


def _number(text: bytes, what: str, step: int) -> float:
    """A printed number as a float; LogError if it is not a finite one."""
    value = float(text) if NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        shown = printable(text_of(text))
        raise LogError(f"{what} {shown} at step {step}"
                       if NOT_FINITE.fullmatch(text) or NUMBER.fullmatch(text) else
                       f"damaged: {what} {shown!r} at step {step} is not a number")
    return value


def _step_lines(body: bytes) -> tuple[list[int], list[tuple[int, bytes, bytes]], int]:
    """The steps trained, (step, loss, ms) of those validated, and the number of steps the lines announce."""
    first, count = STEP_LINE.search(body), body.count(b"\nstep:")
    if first is not None:
        # Nearly every log has plain training lines only: one search finds them, the rest are validations.
        trained = _plain_training(first[2]).findall(body)
        validated, at = [], body.find(b" val_loss:")
        while at >= 0:
            if match := STEP_LINE.match(body, body.rfind(b"\n", 0, at)):
                validated.append(match.groups())
            at = body.find(b" val_loss:", at + 1)
        if len(trained) + len(validated) == count and all(of == first[2] for _, of, _, _ in validated):
            found = [(int(n), loss, ms) for n, _, loss, ms in validated]
            return list(map(int, trained)), found, int(first[2])
    lines = STEP_LINE.findall(body)
    if len(lines) != count:
        bad = next(line for line in body.split(b"\n")
                   if line.startswith(b"step:") and not STEP_LINE.match(b"\n" + line + b"\n"))
        raise LogError(f"damaged: {printable(text_of(bad[:80]))!r} is not a step line")
    totals = list(dict.fromkeys(int(of) for _, of, _, _ in lines))
    if len(totals) > 1:
        raise LogError(f"several runs in one file (of {' and '.join(map(str, totals[:3]))} steps)")
    return ([int(n) for n, _, loss, _ in lines if not loss],
            [(int(n), loss, ms) for n, _, loss, ms in lines if loss], totals[0])


@functools.lru_cache(maxsize=8)
def _plain_training(total: bytes) -> re.Pattern[bytes]:
    """The usual training line of a run of `total` steps; its group is the step."""
    return re.compile(rb"\nstep:(\d{1,9})/" + total + rb" train_time:\d{1,12}ms step_avg:[\d.]{1,20}ms(?=\n)")


def _modern_validations(body: bytes) -> Curve:
    """(step, loss, ms) of every `step:N/M val_loss:X ...` line, after checking all step lines."""
    trained, validated, last = _step_lines(body)
    for steps in (trained, [step for step, _, _ in validated]):
        if steps != sorted(set(steps)):
            back = next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])
            raise LogError(f"several runs in one file (step {steps[back]} after step {steps[back - 1]})")
    seen = max([*trained[-1:], *(step for step, _, _ in validated[-1:])])
    if seen > last:
        raise LogError(f"damaged: step {seen} of {last}")
    validations = [(step, _number(loss, "val_loss", step), _number(ms, "train_time", step) if ms else None)
                   for step, loss, ms in validated]
    if not validations or validations[-1][0] != last:
        stopped = INTERRUPTED.search(body)
        raise LogError("no final validation: "
                       + (f"interrupted at step {int(stopped[1])}" if stopped else f"it ends at step {seen}")
                       + f" of {last}"
                       + (f", last validation at step {validations[-1][0]}" if validations
                          else ", never validated"))
    return _checked(validations)


def _old_validations(body: bytes) -> Curve:
    """The same for OLD_LINES, which have no time; the last step is the one the log ends on or announces."""
    validations: Curve = []
    step = last = total = 0
    for s_step, s_loss, number, of, loss, bare_loss in OLD_LINES.findall(body):
        step, total = int(s_step or number or step), int(of or total)
        if step < last:
            raise LogError(f"several runs in one file (step {step} after step {last})")
        last = step
        if text := (s_loss or loss or bare_loss).rstrip(b","):
            if validations and validations[-1][0] == step:
                raise LogError(f"several runs in one file, or no steps (two val losses at step {step})")
            validations.append((step, _number(text, "val loss", step), None))
    if not validations:
        stopped = INTERRUPTED.search(body)
        raise LogError(f"no final validation: interrupted at step {int(stopped[1])}" if stopped else
                       "no validation in it: no line of the form step:N/M val_loss:X")
    last = max(last, total)
    if last == 0:
        raise LogError("a val loss without steps: whether it is the final one cannot be told")
    if validations[-1][0] != last:
        raise LogError(f"no final validation: last validation at step {validations[-1][0]} of {last}")
    return _checked(validations)


def _checked(validations: Curve) -> Curve:
    """Refuse losses that no cross-entropy of a vocabulary has, and a clock that goes back."""
    previous = 0.0
    for step, loss, time_ms in validations:
        if not 0 < loss < MAX_LOSS:
            raise LogError(f"val_loss {loss:g} at step {step} is not a loss in nats")
        if time_ms is not None and time_ms < previous:
            raise LogError(f"train_time goes back at step {step} ({previous:.0f} ms, then {time_ms:.0f} ms)")
        previous = time_ms if time_ms is not None else previous
    return validations


def read_run(path: Path, with_curve: bool = False) -> Run:
    """The run in the log at `path`. Raises LogError."""
    return parse_log(read_bytes(path), path.name, with_curve)


def read_parts(path: Path) -> Parts:
    """The three parts of the log at `path`, of an unfinished run too. Raises LogError."""
    return split_log(read_bytes(path))
