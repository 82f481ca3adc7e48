"""Turn answered conversations into token ids and a loss mask, and count the tokens that will be trained.

Example
    python scripts/02_prepare.py --answers runs/try/01_generate --model models/smollm2-135m --out runs/try/02_prepare

Reads   --answers    01_generate/rows.jsonl
        --model      tokenizer and chat template of the target
Writes  dataset/        arrow, one row a sample, in the order of rows.jsonl (speculators' layout)
                        input_ids int64 [T], loss_mask int64 [T] (1: an answer and its end of turn), seq_len, id, split
        token_freq.pt   {token id: how often it is trained}, training split; token_freq_held_out.pt: validation split
        coverage.png    share of trained tokens that a draft vocabulary of K tokens covers, in all, by the rows' `source`,
                        and of the validation split;  coverage.json: the points
        heldout.jsonl   id, messages: the prompts of the validation split, to evaluate with
        contract.json   target, tokenizer, template: what every later stage checks
        done.json

A row is a conversation; it gives several samples where the template rewrites history.  One that can't be trained is
dropped for a named reason and counted.  The split follows from how a conversation opens, so it does not move when the
data grow, and doubles stay together.  WORKERS processes (environment; default: one a core) finish shards of 1,000 lines
each; resuming goes on with the next shard.
"""
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, takewhile
from pathlib import Path

import charts
import chat
import contract
import progress
import show
import stage
import vocab
from api import each
from jsonl import read
from stage import Refused

LINES = 1000                # of a shard: 16 MB at 1,000 tokens a row, seconds to make
USUAL = (0.03, 0.97)        # share of tokens that are trained; outside it a mask is more often wrong than right


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--answers", type=Path, required=True, help="01_generate's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--max-seq-len", type=int, default=4096, help="most tokens of a sample (default 4096)")
    p.add_argument("--long-rows", choices=["drop", "cut", "split"], default="drop",
                   help="longer ones: drop them, cut them, or split them at turns (default drop)")
    p.add_argument("--trained-turns", choices=["all", "last"], default="all",
                   help="every answer of a conversation that the target gave, or the last one only (default all)")
    p.add_argument("--reasoning", choices=["train", "mask"], default="train", help="train it, or read it only (default train)")
    p.add_argument("--max-dropped", type=float, default=0.2, help="fail if a larger share of rows is dropped (default 0.2)")
    p.add_argument("--val-share", type=float, default=0.1, help="share of conversations held out from training (default 0.1)")
    p.add_argument("--split-seed", type=int, default=0, help="another one holds out others (default 0)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "tokenizing", "joining", "counting")
    progress.phase("loading libraries")
    from datasets import concatenate_datasets, load_from_disk

    tokenizer = chat.load_tokenizer(args.model)
    end_ids = chat.end_of_turn_ids(tokenizer, args.model)
    config = contract.text_config(args.model)
    masker = chat.Masker(tokenizer, end_ids, min(args.max_seq_len, config.max_position_embeddings - 1),  # 03 asks for one more
                         config.vocab_size, args.long_rows, args.trained_turns, args.reasoning)
    folders = make_shards(args, masker)

    progress.phase("joining the shards")
    tally = defaultdict(Counter)
    for folder in folders:
        for name, counts in json.loads((folder / "tally.json").read_text()).items():
            tally[name].update(counts)
    rows, dropped = tally["rows"], tally["dropped"]
    if not rows["train"]:
        raise Refused(f"no row of {args.answers}/rows.jsonl can be trained; dropped: {dict(dropped)}, held out: {rows['val']}")
    if dropped.total() > args.max_dropped * rows["in"]:
        raise Refused(f"{dropped.total()} of {rows['in']} rows of {args.answers}/rows.jsonl are dropped, more than --max-dropped "
                      f"{args.max_dropped:g} allows: {dict(dropped.most_common())}")
    data = concatenate_datasets([load_from_disk(folder / "samples") for folder in folders])
    data.set_format("torch")  # speculators compares rows with torch.equal; the format is stored with the dataset
    with stage.directory(out / "dataset") as temporary:
        data.save_to_disk(temporary)
    with open(out / "heldout.jsonl", "wb") as file:
        for folder in folders:
            file.write((folder / "heldout.jsonl").read_bytes())

    progress.phase("counting tokens")
    by_source = {name[6:]: {int(t): n for t, n in c.items()} for name, c in sorted(tally.items()) if name.startswith("train ")}
    counts, held = sum(map(Counter, by_source.values()), Counter()), {int(t): n for t, n in tally["val"].items()}
    vocab.save_counts(counts, out / "token_freq.pt")
    vocab.save_counts(held, out / "token_freq_held_out.pt")
    curves = {"all": counts, **(by_source if len(by_source) > 1 else {}), **({"held out": held} if held else {})}
    curves = {name: vocab.coverage(c, vocab.ranked(counts)) for name, c in curves.items()}
    stage.write(out / "coverage.json", json.dumps(curves, indent=1) + "\n")
    charts.draw(out / "coverage.png", ("share of trained tokens covered by the most frequent", {n: dict(c) for n, c in curves.items()}, "log"))
    special = {t for t, token in tokenizer.added_tokens_decoder.items() if token.special and (t in counts or t in held)}
    contract.write(out, target=stage.model_identity(args.model), tokenizer=contract.tokenizer_hash(args.model),
                   chat_template=chat.template_hash(tokenizer), chat_template_kwargs=json.loads(tally["modes"].most_common(1)[0][0]),
                   end_of_turn_ids=sorted(end_ids), special_ids=sorted(special | end_ids))
    report(args, tally, tokenizer, data)
    stage.finish(out, rows["in"], rows["out"], dropped, samples=len(data), train_samples=rows["train"], val_samples=rows["val"],
                 tokens=rows["tokens"], trained_tokens=rows["trained"], distinct_tokens=len(counts),
                 turns=dict(+tally["turns"]), retokenised=dict(tally["retokenised"]))
    shutil.rmtree(out / "shards")


def make_shards(args, masker):
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
    workers, dropped = max(1, min(len(missing), int(os.environ.get("WORKERS", len(os.sched_getaffinity(0)))))), 0
    progress.plan(("tokenizing", first - 1), "joining", "counting", rows=first - 1)
    progress.phase("tokenizing", first - 1, "row", done=first - 1 - sum(shards[folder][2] for folder in missing),
                   flight=workers * LINES)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), begin_worker, (args, masker)) as pool:
        pool.submit(int).result()  # forks all of them, from this thread
        for lines, more in each(lambda folder: pool.submit(prepare, folder, *shards[folder]).result(), missing, workers):
            dropped += more
            progress.advance(lines, dropped=dropped)
    return list(shards)


def begin_worker(*shared):
    """In each process: what main has loaded.  It dies with main, and leaves it to main to hear TERM and INT."""
    global args, masker
    args, masker = shared
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def prepare(folder, offset, first, lines):
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
        split = "val" if held_out(row) else "train"
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


def held_out(row):
    """Whether a conversation belongs to the validation split, drawn by hash of how it opens: its messages up to the first
    user's, which its doubles and its other turns share.  A row of ids alone goes by its id."""
    messages = chat.turns_of(row) or [{"id": row["id"]}]
    opening = next((i for i, m in enumerate(messages) if m.get("role", m.get("from")) in ("user", "human")), 0)
    text = json.dumps(messages[:opening + 1], sort_keys=True)
    return int(hashlib.sha256(f"split:{args.split_seed}:{text}".encode()).hexdigest()[:8], 16) < args.val_share * 2 ** 32


def report(args, tally, tokenizer, data):
    """Say what was made, one sample as it is trained, and what looks wrong."""
    rows, again = tally["rows"], Counter(tally["retokenised"])
    again.pop("no text", 0)  # rows of ids alone
    trained, held = rows["trained"] / rows["tokens"], rows["val"] / len(data)
    progress.log(f"{len(data)} samples of {rows['out']} rows, {rows['tokens']} tokens, {trained:.0%} of them trained; held out {rows['val']} samples")
    first = data.with_format(None)[0]
    progress.log(f"the first one, trained text in brackets: {show.marked(tokenizer, first['input_ids'], first['loss_mask'])[-300:]}")
    if again:
        example = next(("; e.g. " + text for text in tally["example"] if text), "")
        progress.log(f"the text of {again.total()} answers with the server's ids, rendered and tokenized again: {dict(again)}{example}")
    if not USUAL[0] <= trained <= USUAL[1]:
        progress.log(f"warning: {trained:.1%} of the tokens are trained, which is unusual: look at some samples with make show ROW=n")
    if again["prompt differs"] > 0.1 * again.total():
        progress.log("warning: the server's prompts are not what this template makes of the messages: was another template or "
                     "thinking mode served?  The server's ids are trained")
    if rows["out"] >= 20 and not args.val_share / 2 <= held <= args.val_share * 2:
        progress.log(f"warning: {held:.0%} of the samples are held out, not {args.val_share:.0%}: many conversations open alike")


if __name__ == "__main__":
    stage.run(main)
