"""Prompts to evaluate on: rendered as the target was asked in training, and whether the draft was trained on them."""
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
        asked_with = {"chat_template_kwargs": mode, **{k: row[k] for k in chat.ASKED_WITH if k in row}}
        try:
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
    """Numbers of the prompts all of whose 13-grams stand in the training rows of 02's directory, and of others half of whose
    own do: without those that all prompts share, which are the template's."""
    import numpy
    from datasets import load_from_disk

    weights = numpy.random.default_rng(0).integers(1, 1 << 63, GRAM, dtype=numpy.uint64)

    def grams(ids):
        ids = numpy.array([*ids, *[0] * (GRAM - len(ids))], dtype=numpy.uint64)
        return numpy.lib.stride_tricks.sliding_window_view(ids, GRAM) @ weights

    own, found = [set(grams(p["ids"]).tolist()) for p in prompts], set()
    wanted, shared = set.union(*own), set.intersection(*own) if len(own) > 1 else set()
    rows = load_from_disk(tokens / "dataset").with_format(None)
    progress.phase("comparing the prompts with the training rows", len(rows), "row")
    for row in rows:
        stage.check_stop()
        progress.advance()
        if row["split"] == "train":
            found.update(wanted.intersection(grams(row["input_ids"]).tolist()))
    same = [i for i, g in enumerate(own) if g <= found]
    return same, [i for i, g in enumerate(own) if i not in same and 2 * len((g - shared) & found) >= len(g - shared)]
