"""The shards of 02_prepare: 1,000 lines of rows.jsonl each, made by several processes, each shard whole or absent.

    samples/        arrow: input_ids, loss_mask, seq_len, id, split
    heldout.jsonl   id, messages: the prompts of the validation split
    tally.json      counts of rows, reasons and trained tokens
"""
import hashlib
import json
import multiprocessing
import os
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, takewhile

import chat
import progress
import settings
import stage
from api import each
from jsonl import read
from stage import Refused

LINES = 1000  # of a shard: 16 MB at 1,000 tokens a row, seconds to make


def make(args, masker):
    """Their directories, in order; what is missing is made, WORKERS at a time.  A shard is named by its place and its
    lines' hash, so that one made of other rows is never taken for it."""
    shards, offset, first = {}, 0, 1  # {directory: (byte of its first line, number of that line, lines)}
    with open(args.answers / "rows.jsonl", "rb") as file:
        while lines := list(islice(file, LINES)):
            data = b"".join(lines)
            shards[args.out / "shards" / f"{first:09d}-{hashlib.sha256(data).hexdigest()[:16]}"] = (offset, first, len(lines))
            offset, first = offset + len(data), first + len(lines)
    (args.out / "shards").mkdir(exist_ok=True)
    missing = [folder for folder in shards if not folder.exists()]
    workers, dropped = max(1, min(len(missing), settings.whole("WORKERS", len(os.sched_getaffinity(0))))), 0
    progress.plan(("tokenizing", first - 1), "joining", "counting", rows=first - 1)
    progress.phase("tokenizing", first - 1, "row", done=first - 1 - sum(shards[folder][2] for folder in missing),
                   flight=workers * LINES)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (args, masker)) as pool:
        pool.submit(int).result()  # forks all of them, from this thread
        for lines, more in each(lambda folder: pool.submit(_prepare, folder, *shards[folder]).result(), missing, workers):
            dropped += more
            progress.advance(lines, dropped=dropped)
    return list(shards)


def _begin(*shared):
    """In each process: what main has loaded."""
    global args, masker
    args, masker = shared
    stage.bind_to_parent()


def _prepare(folder, offset, first, lines):
    """Make one shard: samples, held-out prompts, tally.json; returns its (lines, rows dropped)."""
    import numpy
    from datasets import Dataset, Features, Sequence, Value

    rows = list(takewhile(lambda numbered: numbered[0] < first + lines, read(args.answers / "rows.jsonl", offset, first)))
    for number, row in rows:
        if not isinstance(row.get("id"), str):
            raise Refused(f"{args.answers}/rows.jsonl line {number}: id is {row.get('id')!r}, wanted a text")
    masker.turns, masker.retokenised, masker.example = Counter(), Counter(), ""
    tally, held, trained = defaultdict(Counter), [], defaultdict(list)
    columns = {"input_ids": [], "loss_mask": [], "seq_len": [], "id": [], "split": []}
    for (_, row), samples in zip(rows, masker([row for _, row in rows])):
        tally["rows"]["in"] += 1
        if isinstance(samples, str):
            tally["dropped"][samples] += 1
            continue
        split = "val" if _held_out(row) else "train"
        tally["rows"].update({"out": 1, split: len(samples)})
        for ids, mask in samples:
            ids, mask = numpy.array(ids), numpy.array(mask)
            for column, value in zip(columns.values(), (ids, mask, len(ids), row["id"], split)):
                column.append(value)
            trained["val" if split == "val" else f"train {row.get('source', 'no source')}"].append(ids[mask == 1])
            tally["rows"].update({"tokens": len(ids), "trained": int(mask.sum())})
        tally["modes"][json.dumps(row.get("chat_template_kwargs") or {}, sort_keys=True)] += 1
        asked = chat.conversation(row)[:-1]
        if split == "val" and asked and asked[-1]["content"].strip():
            held.append({"id": row["id"], "messages": asked, **{k: row[k] for k in chat.ASKED_WITH if k in row}})
    for name, ids in trained.items():
        tally[name] = {int(t): int(n) for t, n in zip(*numpy.unique(numpy.concatenate(ids), return_counts=True))}
    tally |= {"turns": masker.turns, "retokenised": masker.retokenised, "example": {masker.example: 1}}
    features = Features({"input_ids": Sequence(Value("int64")), "loss_mask": Sequence(Value("int64")),
                         "seq_len": Value("int64"), "id": Value("string"), "split": Value("string")})
    with stage.directory(folder) as temporary:
        Dataset.from_dict(columns, features=features).save_to_disk(temporary / "samples")
        stage.write(temporary / "heldout.jsonl", "".join(json.dumps(row) + "\n" for row in held))
        stage.write(temporary / "tally.json", json.dumps(tally))
        for path in (temporary / "samples").iterdir():  # on the disk before the shard's name is
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    return lines, tally["rows"]["in"] - tally["rows"]["out"]


def _held_out(row):
    """Whether a conversation belongs to the validation split, drawn by hash of how it opens: its messages up to the first
    user's, which its doubles and its other turns share.  A row of ids alone goes by its id."""
    messages = chat.turns_of(row) or [{"id": row["id"]}]
    opening = next((i for i, m in enumerate(messages) if m.get("role", m.get("from")) in ("user", "human")), 0)
    text = json.dumps(messages[:opening + 1], sort_keys=True)
    return int(hashlib.sha256(f"split:{args.split_seed}:{text}".encode()).hexdigest()[:8], 16) < args.val_share * 2 ** 32
