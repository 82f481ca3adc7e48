"""Prompts to evaluate on: files of questions, rendered as the target was asked in training, and whether it was trained on them."""
import json
from os.path import commonprefix

import chat
import progress
import stage
from jsonl import read
from stage import Refused

GRAM = 13  # tokens; what public decontaminations use


def load(path, tokenizer, limit, mode):
    """[{set, id, ids}] of the first `limit` questions of a file; mode: the chat_template_kwargs of those that bring none."""
    found = []
    for number, row in read(path):
        try:
            asked_with = {"chat_template_kwargs": mode, **{k: row[k] for k in chat.ASKED_WITH if k in row}}
            ids = chat.render(tokenizer, chat.question(row, f"{path} line {number}"), answer_next=True, **asked_with)
        except chat.Dropped as reason:
            raise Refused(f"{path} line {number}: {reason}") from None
        found.append({"set": path.stem, "id": str(row.get("id", number)), "ids": ids})
        if len(found) == limit:
            break
    if not found:
        raise Refused(f"{path} holds no prompt")
    return found


def seen(prompts, tokens):
    """(numbers of the prompts that a training row of 02's directory `tokens` begins with, numbers of others of whose 13-grams
    half or more stand in training rows).  The template's own words, which all prompts share, count for nothing."""
    import numpy
    from datasets import load_from_disk

    weights = numpy.random.default_rng(0).integers(1, 1 << 63, GRAM, dtype=numpy.uint64)

    def grams(ids):
        ids = numpy.asarray(ids, dtype=numpy.uint64)
        return numpy.lib.stride_tricks.sliding_window_view(ids, GRAM) @ weights if len(ids) >= GRAM else weights[:0]

    head, tail = (len(commonprefix([p["ids"][::way] for p in prompts])) for way in (1, -1))
    own = [numpy.unique(grams(p["ids"][head:len(p["ids"]) - tail])) for p in prompts]
    wanted, found, same = numpy.concatenate(own), [], set()
    begins = {len(p["ids"]): {} for p in prompts}
    for i, p in enumerate(prompts):
        begins[len(p["ids"])].setdefault(json.dumps(p["ids"]), []).append(i)
    rows = load_from_disk(tokens / "dataset").with_format(None)
    progress.phase("comparing the prompts with the training rows", len(rows), "row")
    for row in rows:
        stage.check_stop()
        progress.advance()
        if row["split"] == "train":
            ids = row["input_ids"]
            for length, known in begins.items():
                same.update(known.get(json.dumps(ids[:length]), ()) if length < len(ids) else ())
            found.append(numpy.intersect1d(grams(ids), wanted))
    found = numpy.unique(numpy.concatenate([*found, weights[:0]]))
    near = {i for i, g in enumerate(own) if len(g) and numpy.isin(g, found).mean() >= 0.5}
    return sorted(same), sorted(near - same)
