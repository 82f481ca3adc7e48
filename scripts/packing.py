"""What is trained in which step: rows packed into batches of one size, dealt to the ranks, checked as they are read.

T tokens of a pack, H hidden size, V target vocabulary.
"""
import hashlib
import json
import os
import random
import shutil
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path

import torch

import progress
import settings
import stage
from stage import Refused


def packs(lengths, size, seed=None):
    """Pack rows, given as {row: length}, into lists of at most `size` tokens; every row once, shuffled by `seed`.

    Each row goes to the fullest of 32 open packs that still takes it.  The result depends on the lengths and the seed
    alone, so the ranks agree without a word.
    """
    rows = sorted(lengths)
    if seed is not None:
        random.Random(seed).shuffle(rows)
    closed, open_packs = [], []
    for row in rows:
        length = lengths[row]
        if length > size:
            raise Refused(f"row {row} has {length} tokens, a pack takes {size}: raise --batch-tokens (and --pack-tokens, if it is set) "
                          "or lower --max-seq-len")
        fitting = [p for p in open_packs if p[0] + length <= size]
        if fitting:
            best = max(fitting, key=lambda p: p[0])
        else:
            best = [0, []]
            open_packs.append(best)
            if len(open_packs) > 32:
                fullest = max(open_packs[:-1], key=lambda p: p[0])
                open_packs.remove(fullest)
                closed.append(fullest[1])
        best[0] += length
        best[1].append(row)
    return closed + [p[1] for p in open_packs]


def pack_size(lengths, step):
    """Tokens of a pack, for rows of {row: length}: those of a step or the half, quarter .. of them, the smallest that holds every
    row and stays at most 5 % empty; the smaller, the more ranks a step can be dealt to, and the less memory it needs."""
    some, least = dict(islice(lengths.items(), 20000)), max(1024, *lengths.values())
    sizes = [size for n in range(step.bit_length()) if (size := step >> n) >= least] or [step]
    full = {size: sum(some.values()) / (size * len(packs(some, size))) for size in sizes if size >= max(some.values())}
    return min((size for size in full if full[size] >= min(0.95, max(full.values()) - 0.01)), default=step)


class Samples(torch.utils.data.Dataset):
    """speculators' data set, each sample checked when it is read: item `row` is (row, sample) or (row, what is wrong).

    inside: the tokens in the draft's vocabulary, bool [V], if positions whose next token is not are to be left out."""

    def __init__(self, samples, hidden_size, inside=None):
        self.samples, self.hidden_size, self.inside = samples, hidden_size, inside

    def __getitem__(self, row):
        from safetensors import SafetensorError

        try:
            sample = self.samples[row]
        except (OSError, RuntimeError, KeyError, SafetensorError) as error:
            return row, f"can't be read: {error}"
        if not isinstance(sample, dict):
            return row, "holds states of other token ids"
        ids, (aux, last) = sample["input_ids"], (sample[k] for k in ("hidden_states", "verifier_last_hidden_states"))
        if aux.shape != (len(ids), 3 * self.hidden_size) or last.shape != (len(ids), self.hidden_size):
            return row, f"holds states {list(aux.shape)} for {len(ids)} tokens"
        if not (aux.sum(dtype=torch.float32) + last.sum(dtype=torch.float32)).isfinite():  # one pass, no copy
            return row, "holds values that are not finite"
        if self.inside is not None:
            sample["loss_mask"] = sample["loss_mask"].clone()
            sample["loss_mask"][:-1] *= self.inside[ids[1:]]
        return row, sample


class Data:
    """The samples, and the plan: which rows stand in which pack of which step, for all epochs.

    batch_tokens: of a step, over all ranks; pack_tokens: of a pack (None: see pack_size); train_rows: how many of the
    training rows, drawn by the seed, so that a larger number holds the smaller; inside: see Samples.  A rank runs `at_once`
    packs at a time, as one batch: that changes a step by rounding only, so it is no part of the plan."""

    def __init__(self, tokens, states, hidden_size, batch_tokens, epochs, seed, ranks, pack_tokens=None, train_rows=None, inside=None):
        from datasets import load_from_disk
        from hs_connectors import FP8Transfer
        from speculators.train.data import ArrowDataset

        self.table = load_from_disk(tokens / "dataset").with_format(None)
        self.lengths = [n - 1 for n in self.table["seq_len"]]          # the shift by one drops each row's first token
        self.rows = {split: [i for i, s in enumerate(self.table["split"]) if s == split] for split in ("train", "val")}
        random.Random(seed).shuffle(self.rows["train"])
        self.rows["train"] = sorted(self.rows["train"][:train_rows])
        if not self.rows["train"]:
            raise Refused(f"{tokens} holds no row of the training split")
        self.size = size = pack_tokens or pack_size(dict(enumerate(self.lengths)), batch_tokens)
        self.per_step = per_step = batch_tokens // size
        if not per_step:
            raise Refused(f"--batch-tokens {batch_tokens} is less than a pack of {size} tokens: raise it, or lower --pack-tokens")
        if per_step < ranks.size:  # changes no number, so it is not refused
            progress.log(f"warning: a step is {per_step} packs of {size} tokens, so {ranks.size - per_step} of {ranks.size} ranks have nothing "
                         "to do: raise --batch-tokens or lower --pack-tokens to use them")
        self.dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        self.samples = ArrowDataset(size, tokens / "dataset", FP8Transfer(Path(states)), on_missing="raise", hidden_states_dtype=self.dtype)
        self.ranks, self.begun, self.broken = ranks, False, {}         # broken: {row: what is wrong}
        self.steps = []                                                # (epoch, packs)
        for epoch in range(epochs):
            planned = packs({row: self.lengths[row] for row in self.rows["train"]}, size, f"{seed}-{epoch}")
            self.steps += [(epoch, planned[i:i + per_step]) for i in range(0, len(planned), per_step)]
        self.validation = packs({row: self.lengths[row] for row in self.rows["val"]}, size)
        self.plan = hashlib.sha256(json.dumps(self.steps).encode()).hexdigest()[:16]
        self.checked = Samples(self.samples, hidden_size, inside)
        self.run_at_once(1)

    def run_at_once(self, packs):
        """Let a rank run so many packs at a time."""
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        self.at_once, hidden_size = packs, self.checked.hidden_size
        self.filled = CollateFn(packs * self.size, hidden_size, dtype=self.dtype, preprocess=shift_batch)
        self.workers = workers(packs * self.size * 4 * hidden_size * self.dtype.itemsize, self.ranks.device)

    def count(self, step):
        return sum(self.lengths[row] for pack in step for row in pack)

    def collate(self, items):
        """The batch of some packs, without the rows that can't be used; without any it is all padding, and weighs nothing."""
        good = [(row, sample) for row, sample in items if isinstance(sample, dict)]
        return {**self.filled([sample for _, sample in good]), "rows": [row for row, _ in good],
                "broken": {row: wrong for row, wrong in items if isinstance(wrong, str)}}

    def batches(self, steps):
        """Yield (rows, batch, whether it ends the step) of this rank's packs; each rank has as many batches in a step."""
        n, mine, ends = self.ranks.size, [], []
        for step in steps:
            share = step[self.ranks.rank::n]
            for first in range(0, -(-len(step) // n), self.at_once):
                mine.append([row for pack in share[first:first + self.at_once] for row in pack])
                ends.append(first + self.at_once >= -(-len(step) // n))
        loader = torch.utils.data.DataLoader(self.checked, batch_sampler=mine,
                                             collate_fn=self.collate, num_workers=self.workers,
                                             multiprocessing_context="fork" if self.workers else None,  # spawned ones import
                                             worker_init_fn=stage.bind_to_parent,                       # torch: 10 to 20 s
                                             pin_memory=self.ranks.device.type == "cuda")
        batches = zip(ends, loader)
        with nullcontext() if self.begun else progress.aside("loading the first batch"):  # workers start, files are read
            self.begun = True
            first = list(islice(batches, 1))
        for end, batch in chain(first, batches):
            self.exclude(batch["broken"])
            yield batch["rows"], self.on_device(batch), end

    def on_device(self, batch):
        return {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items() if torch.is_tensor(v)}

    def exclude(self, broken):
        for row in broken.keys() - self.broken.keys():
            self.broken[row] = broken[row]
            if len(self.broken) <= 20:                                 # quarantine.jsonl names them all
                progress.log(f"row {row} ({self.table[row]['id']}) is left out: hs_{row}.safetensors {broken[row]}", every_rank=True)

    def quarantine(self, out, most):
        """Write what all ranks found broken to quarantine.jsonl; Refused if it is more than a share of `most`."""
        self.broken = dict(sorted(self.ranks.union(self.broken).items()))
        if self.ranks.rank == 0 and (self.broken or (out / "quarantine.jsonl").exists()):
            stage.write(out / "quarantine.jsonl", "".join(json.dumps({"row": row, "id": self.table[row]["id"], "reason": wrong}) + "\n"
                                                          for row, wrong in self.broken.items()))
        if len(self.broken) > most * len(self.lengths):
            raise Refused(f"{len(self.broken)} of {len(self.lengths)} rows have broken states, more than --max-broken {most}: " +
                          "; ".join(f"hs_{row}.safetensors {wrong}" for row, wrong in islice(self.broken.items(), 3)) +
                          "; delete them and run 03 again with REDO=1")


def workers(batch_bytes, device):
    """Loader processes of a rank: WORKERS (environment; 4 with a GPU, else none), or as many as /dev/shm holds batches of.

    Each prefetches two, for the training and for the validation; a full /dev/shm ends in a bus error without a word."""
    wanted = settings.whole("WORKERS", 4 if device.type == "cuda" else 0)
    free = shutil.disk_usage("/dev/shm").free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    held = min(wanted, free // (5 * batch_bytes))
    if held < wanted:
        progress.log(f"/dev/shm has room for {held} of {wanted} loader workers a rank: batches of {progress.size(batch_bytes)}, "
                     f"{progress.size(free)} free")
    return held
