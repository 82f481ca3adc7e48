"""Train an EAGLE-3 draft: speculators' model, losses, dataset and optimizers in a loop of our own.

T tokens of a pack, H hidden size, K draft vocabulary, S TTT steps (training-time test: the draft is unrolled on its own
states as a server does).  Source: EAGLE-3 (arXiv 2503.01840); speculators 0.9.0, models/eagle3/core.py.
"""
import ctypes
import hashlib
import json
import os
import random
import signal
import time
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import progress
import stage
from jsonl import Appender, read
from stage import Refused

METRICS_EVERY = 10                                               # steps between lines of metrics.jsonl
SAVE_EVERY = float(os.environ.get("SAVE_EVERY", 1200))           # seconds between checkpoints; epoch ends save too


def build_draft(model, layer_ids, d2t, t2d, ttt_steps, seed=0, attention="sdpa"):
    """A fresh draft for the target `model`, in the recipe that SGLang serves: one Llama layer with full attention, no
    norm before the residual, EAGLE-3.1 norms (fc_norm, norm_output: +7.2 % acceptance length on Qwen3-8B, speculators
    PR 610); embedding and head are the target's, frozen.

    attention: simple_flex_attention compiles for a GPU and has no backward on a CPU; sdpa took 0.58 s a step there, eager
    0.87."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    torch.manual_seed(seed)
    layer = create_transformer_layer_config(str(model), num_layers=1, draft_arch="llama", hidden_act=None,
                                            sliding_window=2048, full_attention_indices=[0])
    return Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=len(d2t), verifier_name_or_path=str(model), ttt_steps=ttt_steps,
        target_layer_ids=list(layer_ids), norm_before_residual=False, norm_before_fc=False, fc_norm=True, norm_output=True,
        draft_attn_impl=attention).float()


def load_draft(directory, model):
    """The trained draft of 04_train/draft as speculators runs it, in float32."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "sdpa"       # else flex, which a CPU can't run
    config.speculators_config.verifier.name_or_path = str(model)        # the run may have moved since it was written
    draft = Eagle3DraftModel.from_pretrained(directory, config=config).float().eval()
    if draft.d2t is None:  # a draft that knows the target's whole vocabulary
        draft.d2t, draft.t2d = torch.zeros(config.draft_vocab_size, dtype=torch.long), torch.ones(config.draft_vocab_size, dtype=torch.bool)
    return draft


def unroll(draft, ids, aux, steps):
    """Run a loaded draft over one row, fed with the true tokens as in training.

    ids int64 [T], aux [T, 3 H]; returns the proposals [steps][T - 1], in the draft's vocabulary: number j of step k is for
    token j + 2 + k.  Eagerly: speculators compiles its forward wherever a GPU is, which one row is not worth.
    """
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = draft(hidden_states=aux[None, :-1], input_ids=ids[None, 1:], ttt_steps=steps,
                      document_ids=torch.zeros(1, len(ids) - 1, dtype=torch.long, device=ids.device))
    return [step[0] for step in found]


class Ranks:
    """The processes that train together: torchrun's environment, or this one alone."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1:
            dist.init_process_group("nccl" if cuda else "gloo")

    def agree(self, flag):
        """Whether any rank says so; all ranks must ask."""
        if self.size == 1:
            return flag
        answer = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(answer, dist.ReduceOp.MAX)
        return bool(answer.item())

    def total(self, tensor):
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


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
            raise Refused(f"row {row} has {length} tokens, a pack of one rank takes {size}: raise --batch-tokens or lower "
                          "--max-seq-len")
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


class Data:
    """The samples, and the plan: which rows stand in which pack of which step, for all epochs."""

    def __init__(self, tokens, states, hidden_size, batch_tokens, epochs, seed, ranks):
        from hs_connectors import FP8Transfer
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import ArrowDataset, CollateFn

        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        size = batch_tokens // ranks.size
        self.samples = ArrowDataset(size, tokens / "dataset", FP8Transfer(Path(states)), on_missing="raise",
                                    hidden_states_dtype=dtype)
        table = self.samples.data.with_format(None)
        self.lengths = [n - 1 for n in table["seq_len"]]               # the shift by one drops each row's first token
        self.trained = [sum(mask[1:]) for mask in table["loss_mask"]]
        self.rows = {split: [i for i, s in enumerate(table["split"]) if s == split] for split in ("train", "val")}
        if not self.rows["train"]:
            raise Refused(f"{tokens} holds no row of the training split")
        self.ranks, self.steps = ranks, []                             # steps: (epoch, one pack a rank)
        self.begun = False
        for epoch in range(epochs):
            self.steps += [(epoch, group) for group in self._groups("train", size, f"{seed}-{epoch}")]
        self.validation = self._groups("val", size)
        self.plan = hashlib.sha256(json.dumps(self.steps).encode()).hexdigest()[:16]
        self.collate = CollateFn(size, hidden_size, dtype=dtype, preprocess=shift_batch)

    def _groups(self, split, size, seed=None):
        """Packs in groups of one a rank; the last group may hold empty ones, which weigh nothing."""
        n = self.ranks.size
        all_packs = packs({row: self.lengths[row] for row in self.rows[split]}, size, seed)
        return [(all_packs[i:i + n] + [[]] * n)[:n] for i in range(0, len(all_packs), n)]

    def ids(self):
        """The token ids of every row, in order."""
        return (row["input_ids"] for row in self.samples.data.with_format(None))

    def count(self, per_row, group):
        return sum(per_row[row] for pack in group for row in pack)

    def batches(self, groups):
        """Yield (this rank's batch, its share of the group's trained tokens) of each group."""
        workers = int(os.environ.get("WORKERS", 4 if self.ranks.device.type == "cuda" else 0))
        mine = [group[self.ranks.rank] for group in groups]
        loader = torch.utils.data.DataLoader(self.samples, batch_sampler=mine, collate_fn=self.collate, num_workers=workers,
                                             multiprocessing_context="fork" if workers else None,  # spawned ones import
                                             worker_init_fn=_bound_to_the_parent,                  # torch: 10 to 20 s
                                             pin_memory=self.ranks.device.type == "cuda")
        batches = iter(zip(groups, mine, loader))
        with nullcontext() if self.begun else progress.aside("loading the first batch"):  # workers start, files are read
            self.begun = True
            first = list(islice(batches, 1))
        for group, pack, batch in chain(first, batches):
            if batch["error_records"]:
                raise Refused(f"of the rows {pack} at least one has states of other token ids: extract again")
            share = self.count(self.trained, [pack]) / max(1, self.count(self.trained, group))
            yield {k: v.to(self.ranks.device, non_blocking=True) for k, v in batch.items() if torch.is_tensor(v)}, share


def _bound_to_the_parent(worker):
    """A loader's worker leaves signals to its parent, which stops at a safe point and needs batches until then; and ends
    with it, be that by kill -9: one asleep in a read would keep the lock on the stage, which a fork inherits."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Trainer:
    """draft: speculators' model; data: Data; args: epochs, lr, weight_decay, warmup_ratio, ttt_steps, seed; out: stage
    directory, which gets metrics.jsonl, validation.jsonl and checkpoints/."""

    def __init__(self, draft, data, args, out, ranks):
        from speculators.losses import resolve_loss_config
        from speculators.train.optimizers import build_optimizers
        from transformers import get_linear_schedule_with_warmup

        self.draft, self.data, self.args, self.out, self.ranks = draft.to(ranks.device), data, args, out, ranks
        self.model = torch.nn.parallel.DistributedDataParallel(self.draft) if ranks.size > 1 else self.draft
        self.trainable = {name: p for name, p in self.draft.named_parameters() if p.requires_grad}
        self.total = len(data.steps)
        self.warmup = int(self.total * args.warmup_ratio)
        self.optimizer, = build_optimizers(self.draft, SimpleNamespace(optimizer="adamw", lr=args.lr,
                                                                       weight_decay=args.weight_decay))
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, self.warmup, self.total)
        self.loss = resolve_loss_config("kl_div", "eager")  # "fused" (Triton) fails inside torch.compile of torch 2.11
        self.step, self.saved, self.compiled = 0, time.monotonic(), set()
        self.sums, self.reported, self.begun = self.no_sums(), 0, (0, time.monotonic())

    def no_sums(self):
        """Sums since the last line of metrics: loss, then correct and counted positions of each TTT step."""
        return torch.zeros(1 + 2 * self.args.ttt_steps, dtype=torch.float64, device=self.ranks.device)

    def run(self):
        """Train from the newest checkpoint to the end; a checkpoint is written when asked to stop, then Stopped raised."""
        resumed = self.resume()
        progress.log(f"resuming at step {self.step}" if resumed else "starting from scratch")
        ends = {i + 1 for i, (epoch, _) in enumerate(self.data.steps) if i + 1 == self.total or self.data.steps[i + 1][0] != epoch}
        groups = [group for _, group in self.data.steps[self.step:]]
        self.begun = (self.step, time.monotonic())
        to_come = sum(end > self.step for end in ends)
        progress.phase("training", self.total, "step", done=self.step, asides={
            "validating": to_come if self.data.validation else 0, "writing checkpoint": to_come})
        for batch, share in self.data.batches(groups):
            with self.compiling("training"):
                loss = self.forward(self.model, batch, share, self.sums)
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), 1.0)
            self.sums[0] += norm.detach() * 0  # nothing, unless a gradient is not finite
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            progress.advance()
            if self.step % METRICS_EVERY == 0 or self.step in ends:
                self.report()
            if self.step in ends:
                self.validate()
                self.save()
            elif self.ranks.size == 1 or self.step % METRICS_EVERY == 0:  # ranks ask each other, which costs a synchronisation
                stopping = self.ranks.agree(stage.stop_requested())
                if stopping or self.ranks.agree(time.monotonic() - self.saved > SAVE_EVERY):
                    self.save()
                if stopping:
                    raise stage.Stopped

    def compiling(self, what):
        """On a GPU speculators compiles its forward when it first runs, for training and for validation: a minute each."""
        if self.ranks.device.type == "cpu" or what in self.compiled:
            return nullcontext()
        self.compiled.add(what)
        return progress.aside(f"compiling for {what}")

    def forward(self, model, batch, share, sums):
        """Loss of this rank's pack, weighted so that the mean over ranks is the mean over the step's trained tokens."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.ranks.device.type == "cuda"):
            _, loss, metrics = model(**batch, ttt_steps=self.args.ttt_steps, loss_config=self.loss)
        sums[0] += loss.detach() * share
        for k in range(self.args.ttt_steps):
            sums[1 + 2 * k] += metrics[f"full_acc_{k}_sum"]
            sums[2 + 2 * k] += metrics[f"full_acc_{k}_total"]
        return loss * share * self.ranks.size

    def read(self, sums, steps):
        """(mean loss, [share of positions where the proposals up to TTT step k are all right]) of sums over `steps`."""
        loss, *counts = self.ranks.total(sums.clone()).tolist()
        return loss / max(1, steps), [round(right / max(1.0, n), 5) for right, n in zip(counts[::2], counts[1::2])]

    def report(self):
        """One line of metrics.jsonl: means since the line before."""
        loss, acc = self.read(self.sums, self.step - self.reported)
        first, since = self.begun
        tokens = sum(self.data.count(self.data.lengths, group) for _, group in self.data.steps[first:self.step])
        rate = tokens / (time.monotonic() - since)
        self.append("metrics", step=self.step, time=round(time.time(), 2), epoch=self.data.steps[self.step - 1][0],
                    loss=round(loss, 6), acc=acc, lr=self.scheduler.get_last_lr()[0], tokens_per_s=round(rate, 1))
        progress.advance(0, loss=f"{loss:.3f}", acc="/".join(f"{a:.2f}" for a in acc), tok_per_s=f"{rate:.0f}")
        self.must_be_finite(loss)
        self.sums.zero_()
        self.reported, self.begun = self.step, (self.step, time.monotonic())

    def must_be_finite(self, loss):
        if not abs(loss) < float("inf"):
            raise Refused(f"a loss or gradient before step {self.step} is not finite, so nothing after the last checkpoint can be "
                          "trusted; lower --lr, or look at the rows of its packs")

    @torch.no_grad()
    def validate(self):
        """Loss and accuracy on the held-out rows: a line of validation.jsonl."""
        if not self.data.validation:
            return
        sums, trained = self.no_sums(), [self.data.count(self.data.trained, g) for g in self.data.validation]
        with progress.aside("validating", len(trained), "pack"):
            for (batch, share), n in zip(self.data.batches(self.data.validation), trained):
                with self.compiling("validation"):
                    self.forward(self.draft, batch, share * n / max(1, sum(trained)), sums)
                progress.advance()
        loss, acc = self.read(sums, 1)
        self.append("validation", step=self.step, time=round(time.time(), 2), epoch=self.data.steps[self.step - 1][0],
                    loss=round(loss, 6), acc=acc)
        progress.log(f"held out after step {self.step}: loss {loss:.3f}  acc {'/'.join(f'{a:.3f}' for a in acc)}")

    def append(self, name, **row):
        if self.ranks.rank == 0:
            with Appender(self.out / f"{name}.jsonl") as file:
                file.write(row)

    def save(self):
        """Write checkpoints/step-N.pt, complete or not at all; the newest two are kept.

        Float32, in full: trainable weights, optimizer moments, schedule, step and the sums since the last metrics line,
        so that a resumed run goes on as if it had never stopped.
        """
        self.saved = time.monotonic()
        self.must_be_finite(self.ranks.total(self.sums.clone())[0].item())
        with progress.aside("writing checkpoint"):
            if self.ranks.rank == 0:
                self.write_checkpoint(self.out / "checkpoints")
            self.ranks.agree(False)  # nobody leaves before it is written: torchrun ends the ranks once one has ended

    def write_checkpoint(self, folder):
        folder.mkdir(exist_ok=True)
        temporary = folder / ".checkpoint.tmp"
        with open(temporary, "wb") as file:
            torch.save({"step": self.step, "weights": {n: p.detach() for n, p in self.trainable.items()},
                        "optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict(),
                        "sums": self.sums, "reported": self.reported, "plan": self.data.plan}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / f"step-{self.step:09d}.pt")
        for old in sorted(folder.glob("step-*.pt"))[:-2]:
            old.unlink()

    def resume(self):
        """Load the newest checkpoint, if any, and drop what the interrupted run logged after it."""
        found = sorted((self.out / "checkpoints").glob("step-*.pt"))
        if found:
            state = torch.load(found[-1], map_location=self.ranks.device, weights_only=True)
            if state["plan"] != self.data.plan:
                raise Refused(f"{found[-1]} was made with another NPROC, which packs the rows otherwise; go on with that one, or "
                              "begin anew with REDO=1 or another NAME")
            with torch.no_grad():
                for name, parameter in self.trainable.items():
                    parameter.copy_(state["weights"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.step, self.reported = state["step"], state["reported"]
            self.sums.copy_(state["sums"])
        if self.ranks.rank == 0:
            for path in (self.out / "metrics.jsonl", self.out / "validation.jsonl"):
                if path.exists():
                    Appender(path).close()  # repairs a torn last line
                    kept = [row for _, row in read(path) if row["step"] <= self.step]
                    stage.write(path, "".join(json.dumps(row) + "\n" for row in kept))
        return bool(found)


def last_row(path):
    """The last row of a JSON Lines file, or None if there is none."""
    rows = [row for _, row in read(path)] if path.exists() else []
    return rows[-1] if rows else None
