"""JSON Lines that survive a crash: read with the line that is wrong, append after repairing a torn tail.

Lines end with "\n" and nothing else: U+2028, U+0085 and their like are text (`str.splitlines` would split on them).
"""
import json
import os
import sqlite3

from stage import Refused


def read(path, offset=0, first=1):
    """Yield (line number, object) of a file, from the line number `first`, which begins at the byte `offset`; Refused
    names file and line where a line is no JSON object."""
    with open(path, "rb") as file:
        file.seek(offset)
        for number, line in enumerate(file, first):
            if line.strip():
                try:
                    row = json.loads(line.decode())
                except UnicodeDecodeError:
                    raise Refused(f"{path} line {number}: not UTF-8") from None
                except ValueError as error:
                    raise Refused(f"{path} line {number}: not JSON ({error})") from None
                if not isinstance(row, dict):
                    raise Refused(f"{path} line {number}: a {type(row).__name__}, wanted an object")
                yield number, row


class Appender:
    """Append rows, one line each, flushed at once.  A kill can tear only the last line, which the next opening
    removes; a whole last line that lacks only its newline is kept."""

    def __init__(self, path):
        if path.exists():
            _repair(path)
        self.file = open(path, "ab")

    def write(self, row):
        try:
            line = json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:  # half an emoji, which JSON can hold and UTF-8 can't
            line = json.dumps(row).encode()
        self.file.write(line + b"\n")
        self.file.flush()

    def close(self):
        os.fsync(self.file.fileno())
        self.file.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Known:
    """Texts, each with a number, on the disk: ten million in memory would be 1.3 GB."""

    def __init__(self):
        self.table = sqlite3.connect("", isolation_level=None)  # "": a temporary file that goes with the process
        self.table.executescript("CREATE TABLE known (text PRIMARY KEY, number) WITHOUT ROWID; BEGIN")

    def get(self, text):
        return next(self.table.execute("SELECT number FROM known WHERE text = ?", (ascii(text),)), [None])[0]

    def add(self, text, number=1):
        """The number of an earlier text like it; None if there is none, and this one is remembered."""
        earlier = self.get(text)
        if earlier is None:
            self.table.execute("INSERT INTO known VALUES (?, ?)", (ascii(text), number))
        return earlier


def _repair(path):
    with open(path, "rb+") as file:
        data = file.seek(0, os.SEEK_END)
        start = data
        tail = b""
        while start > 0 and b"\n" not in tail:  # step back to the newline before the last line
            step = min(1 << 16, start)
            start -= step
            file.seek(start)
            tail = file.read(step) + tail
        tail = tail[tail.rfind(b"\n") + 1:]
        if not tail:
            return
        try:
            json.loads(tail)
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        except ValueError:
            file.truncate(data - len(tail))
