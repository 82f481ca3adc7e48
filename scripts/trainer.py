"""Train an EAGLE-3 draft: speculators' model, losses, dataset and optimizers in a loop of our own.

T tokens of a pack, H hidden size, K draft vocabulary, S TTT steps (training-time test: the draft is unrolled on its own
states as a server does).  Source: EAGLE-3 (arXiv 2503.01840); speculators 0.9.0, models/eagle3/core.py.

A step is a list of packs, planned for all epochs from lengths and seed alone and dealt to the ranks that there are, which
run as many at a time as their memory takes.  Each rank sums its packs' gradients, weighted by their trained tokens; the ranks' sums are added and divided by the trained
tokens of the step.  So the number of ranks changes a step by rounding only, and may change at a resume.
"""
import json
import logging
import os
import time
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import torch
import torch.distributed as dist

import checkpoint
import progress
import settings
import stage
import vocab
import walk
from jsonl import Appender, read
from stage import Refused

METRICS_EVERY = 10    # steps between lines of metrics.jsonl
NOT_FINITE = 3        # steps in a row without a finite gradient that end a training
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")


def build_draft(model, layer_ids, d2t, t2d, ttt_steps, seed=0, attention="sdpa", norms="3.1", layers=1, lm_head="frozen"):
    """A fresh draft for the target `model`, in a recipe that SGLang serves: Llama layers with full attention, no norm before
    the residual; embedding the target's, frozen; head the target's rows.

    norms: 3.1 for EAGLE-3.1's fc_norm and norm_output, 3 for neither.  attention: simple_flex_attention compiles for a GPU
    and has no backward on a CPU; sdpa took 0.58 s a step there, eager 0.87."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    torch.manual_seed(seed)
    layer = create_transformer_layer_config(str(model), num_layers=layers, draft_arch="llama", hidden_act=None,
                                            sliding_window=2048, full_attention_indices=list(range(layers)))
    draft = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=d2t, draft_vocab_size=len(d2t), verifier_name_or_path=str(model), ttt_steps=ttt_steps,
        target_layer_ids=list(layer_ids), norm_before_residual=False, norm_before_fc=False, fc_norm=norms == "3.1",
        norm_output=norms == "3.1", draft_attn_impl=attention).float()
    draft.lm_head.weight.requires_grad_(lm_head == "trained")
    return draft


def trainable(draft):
    """{name: parameter} of what is trained."""
    return {name: p for name, p in draft.named_parameters() if p.requires_grad}


def start_from(draft, directory, d2t):
    """Give a fresh draft the weights of another one, in speculators' or SGLang's format, safetensors only; Refused unless it
    reads the same layers in the same way.  A frozen head has the target's rows, so only a trained one needs the same d2t."""
    from safetensors.torch import load_file

    config, weights = json.loads((directory / "config.json").read_text()), {}
    for path in sorted(directory.glob("*.safetensors")):
        weights |= {name.replace("midlayer.", "layers.0."): value for name, value in load_file(path).items()}
    served = "speculators_config" not in config  # SGLang's ids mean the output of a layer, speculators' what enters it
    ids = ((config.get("eagle_config") or {}) if served else config).get("eagle_aux_hidden_state_layer_ids")
    found = {"layer ids": [i + served for i in ids or []], "draft layers": (config if served else config["transformer_layer_config"])
             ["num_hidden_layers"], **{n: bool(config.get(n)) for n in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")}}
    own = draft.config
    wanted = {"layer ids": own.eagle_aux_hidden_state_layer_ids, "draft layers": own.transformer_layer_config.num_hidden_layers,
              "fc_norm": own.fc_norm, "norm_output": own.norm_output, "norm_before_fc": False, "norm_before_residual": False}
    if draft.lm_head.weight.requires_grad:
        found["vocabulary"], wanted["vocabulary"] = vocab.identity(weights.get("d2t", torch.zeros_like(d2t))), vocab.identity(d2t)
    wrong = [f"{name} {found[name]}, here {value}" for name, value in wanted.items() if found[name] != value]
    for name, parameter in trainable(draft).items():
        theirs = name.replace("input_layernorm", "hidden_norm") if served and not name.startswith("layers.0.") else name
        value = weights.get(theirs)
        if value is None or value.shape != parameter.shape or not value.isfinite().all():
            wrong.append(f"{theirs} {'is missing' if value is None else f'{list(value.shape)} or not finite'}, "
                         f"here {list(parameter.shape)}")
        elif not wrong:
            parameter.data.copy_(value)
    if wrong:
        raise Refused(f"--init {directory} is not a draft of this making: {'; '.join(wrong[:6])}")


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
    """The processes that train together: torchrun's environment, or this one alone.  SHARD=1 (environment): the draft is
    spread over them (FSDP2), for one that no GPU holds with its moments."""

    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.sharded = self.size > 1 and os.environ.get("SHARD") == "1"
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

    def union(self, own):
        """The dicts of all ranks as one."""
        found = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(found, own)
        return {key: value for part in found for key, value in part.items()}

    def place(self, draft):
        """The draft on this rank's device, as rank 0 has it."""
        draft = draft.to(self.device)
        if self.size > 1:
            for parameter in trainable(draft).values():
                dist.broadcast(parameter.data, 0)
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            for part in (*draft.layers, draft):
                fully_shard(part)
        return draft


class Clock:
    """Shares of the time in the parts of a step.  On a GPU by events in its stream, read only when asked for."""

    def __init__(self, device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self, part=None):
        """What was done since the mark before was `part`; None: it does not count."""
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        else:
            now = time.perf_counter()
        self.marks.append((part, now))

    def shares(self):
        """{part: share} since they were asked for last; synchronises with the GPU."""
        if self.cuda:
            torch.cuda.synchronize()
        spent, marks = Counter(), self.marks
        for (_, before), (part, now) in zip(marks, marks[1:]):
            if part:
                spent[part] += before.elapsed_time(now) if self.cuda else now - before
        self.marks = marks[-1:]
        return {part: round(value / max(1e-9, spent.total()), 3) for part, value in spent.items()}


class Trainer:
    """draft: speculators' model; data: Data; args: 04_train's flags; out: stage directory, which gets metrics.jsonl,
    validation.jsonl, quarantine.jsonl and checkpoints/."""

    def __init__(self, draft, data, args, out, ranks):
        from speculators.losses import resolve_loss_config
        from speculators.train.optimizers import build_optimizers
        from transformers import get_scheduler

        self.draft, self.data, self.args, self.out, self.ranks = ranks.place(draft), data, args, out, ranks
        self.trainable, self.total = trainable(self.draft), len(data.steps)
        self.warmup = int(self.total * args.warmup_ratio)
        self.optimizers = build_optimizers(self.draft, SimpleNamespace(
            optimizer=args.optimizer, lr=0.0, weight_decay=args.weight_decay, muon_lr=0.0, muon_momentum=0.95,
            muon_weight_decay=args.weight_decay, muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw"))
        for parameter in self.trainable.values():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()                                          # of nothing: makes the moments, which a checkpoint fills
            optimizer.zero_grad(set_to_none=True)
            for tensor in chain.from_iterable(state.values() for state in optimizer.state.values()):
                tensor.zero_()
            for group in optimizer.param_groups:
                group["lr"] = args.lr
        self.schedulers = [get_scheduler({"constant": "constant_with_warmup"}.get(args.schedule, args.schedule), optimizer,
                                         self.warmup, self.total) for optimizer in self.optimizers]
        self.loss = resolve_loss_config(args.loss, "eager")  # "fused" (Triton) fails inside torch.compile of torch 2.11
        self.save_every = settings.number("SAVE_EVERY", "20m", time="s")
        self.step, self.saved, self.compiled, self.clock = 0, time.monotonic(), set(), Clock(ranks.device)
        self.skipped, self.in_a_row = 0, []                           # steps without a finite gradient; the last ones
        self.best = {"step": -1, "acceptance": 0.0}
        self.sums, self.begun = self.no_sums(), (0, time.monotonic())  # since the last line of metrics
        self.logger = self.metric_logger(os.environ.get("LOGGER", ""))

    def no_sums(self):
        """Loss times trained tokens, trained tokens; correct and counted positions of each TTT step."""
        return torch.zeros(2 + 2 * self.args.ttt_steps, dtype=torch.float64, device=self.ranks.device)

    def metric_logger(self, names):
        """speculators' own loggers, if LOGGER (environment) names some: they get every line of metrics and validation."""
        if not names or self.ranks.rank:
            return None
        from speculators.train.logger import setup_metric_logger

        if set(names.split(",")) - set(LOGGERS):
            raise Refused(f"LOGGER={names}: there are {', '.join(LOGGERS)}")
        setup_metric_logger(names, self.out.parent.name, str(self.out))
        logger = logging.getLogger("speculators.metrics")
        try:
            logger.info({k: str(v) for k, v in vars(self.args).items()}, extra={"hparams": True})
        except RuntimeError as error:  # not installed
            raise Refused(f"LOGGER={names}: {' '.join(str(error).split())}") from None
        return logger

    def run(self):
        """Train from the newest checkpoint to the end; a checkpoint is written when asked to stop, then Stopped raised."""
        try:
            self.train()
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise Refused(f"out of memory at step {self.step}: lower MICRO_TOKENS or set SHARD=1 with more GPUs and go on, or lower "
                          "--pack-tokens, --ttt-steps or --draft-vocab (REDO=1, or another NAME)") from error

    def fit(self):
        """Find how many packs to run at a time: MICRO_TOKENS (environment; 16384 with a GPU, else one pack, which is as fast on a
        CPU) or the half of it, the quarter .., whatever passes with a batch of padding.  Sharded ranks wait for each other within
        a pass, which a rank without memory would never end, so they run one pack at a time."""
        most = settings.whole("MICRO_TOKENS", 16384 if self.ranks.device.type == "cuda" else 0)
        packs = min(-(-self.data.per_step // self.ranks.size), most // self.data.size)
        packs = min(self.ranks.union({self.ranks.rank: packs}).values())  # another machine's setting may be another
        while packs > 1 and not self.ranks.sharded:
            self.data.run_at_once(packs)
            try:
                for _ in range(2):                                     # the second beside the gradients of the first
                    with self.compiling("training"):
                        self.forward(self.data.on_device(self.data.collate([])), self.no_sums())[1].backward()
                short = False
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                short = True
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            if not self.ranks.agree(short):
                return
            progress.log(f"{packs} packs at a time are too many for the memory of a rank")
            packs = -(-packs // 2)
        self.data.run_at_once(1)

    def train(self):
        self.fit()
        progress.log(f"a rank runs {self.data.at_once} of a step's {self.data.per_step} packs of {self.data.size} tokens at a time")
        resumed = self.resume()
        progress.log(f"resuming at step {self.step}" if resumed else "starting from scratch")
        if not resumed:
            self.save()  # a disk that can't take a checkpoint is found out now, not after hours
        ends = {i + 1 for i, (epoch, _) in enumerate(self.data.steps) if i + 1 == self.total or self.data.steps[i + 1][0] != epoch}
        to_come = sum(end > self.step for end in ends)
        progress.phase("training", self.total, "step", done=self.step, asides={
            "validating": to_come if self.data.validation else 0, "writing checkpoint": to_come})
        self.begun, sums = (self.step, time.monotonic()), self.no_sums()
        self.clock.mark()
        for _, batch, complete in self.data.batches([step for _, step in self.data.steps[self.step:]]):
            self.clock.mark("data")
            if self.ranks.sharded:
                self.draft.set_requires_gradient_sync(complete)
            with self.compiling("training"):
                _, loss = self.forward(batch, sums)
                self.clock.mark("forward")
                loss.backward()
            self.clock.mark("backward")
            if not complete:
                continue
            self.update(self.ranks.total(sums))
            sums = self.no_sums()
            progress.advance()
            if self.step % METRICS_EVERY == 0 or self.step in ends:
                self.report()
            end = self.step in ends
            if not (end or self.ranks.size == 1 or self.step % METRICS_EVERY == 0):
                continue                                               # ranks ask each other, which costs a synchronisation
            stopping = self.ranks.agree(stage.stop_requested())
            if end:
                self.validate()
            if end or stopping or self.ranks.agree(time.monotonic() - self.saved > self.save_every):
                self.save()
            if stopping:
                raise stage.Stopped

    def compiling(self, what):
        """On a GPU speculators compiles its forward when it first runs, for training and for validation: a minute each."""
        if self.ranks.device.type == "cpu" or what in self.compiled:
            return nullcontext()
        self.compiled.add(what)
        return progress.aside(f"compiling for {what}")

    def forward(self, batch, sums):
        """(proposals of each TTT step [1, T], loss times trained tokens) of a batch; what it counts is added to `sums`."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.ranks.device.type == "cuda"):
            proposals, loss, metrics = self.draft(**batch, ttt_steps=self.args.ttt_steps, loss_config=self.loss,
                                                  ttt_step_loss_decay=self.args.ttt_decay)
        trained = batch["loss_mask"].sum()
        loss = loss * trained
        counts = [metrics[f"full_acc_{k}_{what}"] for k in range(self.args.ttt_steps) for what in ("sum", "total")]
        sums += torch.stack([loss.detach(), trained, *counts]).double()
        return proposals, loss

    def update(self, sums):
        """One step: the gradients' mean over the trained tokens of all ranks, clipped, applied; if it or the loss is not
        finite, no weight and no moment changes, and the schedule goes on."""
        grads = [p.grad.to_local() if self.ranks.sharded else p.grad for p in self.trainable.values()]
        divisor = sums[1].clamp(min=1).float()
        if self.ranks.sharded:
            divisor = divisor / self.ranks.size                        # FSDP has taken the mean over the ranks
        elif self.ranks.size > 1:  # as one vector in a fixed order, which DDP's buckets are not: a resume adds up the same way
            flat = self.ranks.total(torch.cat([g.flatten() for g in grads]))
            for grad, part in zip(grads, flat.split([g.numel() for g in grads])):
                grad.copy_(part.view_as(grad))
        torch._foreach_div_(grads, divisor)
        self.clock.mark("communication")
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), self.args.clip_norm)
        norm = norm.full_tensor() if self.ranks.sharded else norm
        if (norm + sums[0]).isfinite().item():                         # the one synchronisation of a step
            for optimizer in self.optimizers:
                optimizer.step()
            self.sums += sums
            self.in_a_row = []
        else:
            self.skip()
        for scheduler, optimizer in zip(self.schedulers, self.optimizers):
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.clock.mark("optimizer")

    def skip(self):
        self.skipped += 1
        self.in_a_row.append(self.step)
        rows = [self.data.table[row]["id"] for step in self.in_a_row for pack in self.data.steps[step][1] for row in pack]
        progress.log(f"step {self.step + 1} is skipped: its loss or gradient is not finite ({self.skipped} so far)")
        if len(self.in_a_row) == NOT_FINITE:
            raise Refused(f"losses or gradients of {NOT_FINITE} steps in a row are not finite, up to step {self.step + 1}; lower --lr, or "
                          f"look at their rows: {', '.join(map(str, rows[:50]))}")

    def read(self, sums):
        """(mean loss, [share of positions where the proposals up to TTT step k are all right])."""
        loss, trained, *counts = sums.tolist()
        return loss / max(1.0, trained), [round(right / max(1.0, n), 5) for right, n in zip(counts[::2], counts[1::2])]

    def report(self):
        """One line of metrics.jsonl: means since the line before."""
        loss, acc = self.read(self.sums)
        first, since = self.begun
        rate = sum(self.data.count(step) for _, step in self.data.steps[first:self.step]) / (time.monotonic() - since)
        shares = self.clock.shares()
        self.append("metrics", loss=round(loss, 6), acc=acc, lr=self.schedulers[0].get_last_lr()[0], skipped=self.skipped,
                    tokens_per_s=round(rate, 1), time_in=shares)
        progress.advance(0, loss=f"{loss:.3f}", acc="/".join(f"{a:.2f}" for a in acc), tok_per_s=f"{rate:.0f}",
                         data_wait=f"{shares.get('data', 0):.0%}")
        self.sums.zero_()
        self.begun = self.step, time.monotonic()

    @torch.no_grad()
    def validate(self):
        """Loss, accuracy and acceptance on the held-out rows: a line of validation.jsonl.

        Acceptance is walked as a server does, over the answers that the target gave: a token outside the draft's vocabulary
        is a miss.  The ceiling is that of a draft which is right wherever its vocabulary lets it."""
        if not self.data.validation:
            return
        sums, steps = self.no_sums(), self.args.ttt_steps
        d2t, t2d = self.draft.d2t, self.draft.t2d
        inside = (lambda token: True) if t2d is None else t2d.tolist().__getitem__
        accepted, possible = Counter(), Counter()
        with progress.aside("validating", -(-len(self.data.validation) // self.ranks.size // self.data.at_once), "batch"):
            for rows, batch, _ in self.data.batches([self.data.validation]):
                with self.compiling("validation"):
                    proposals, _ = self.forward(batch, sums)
                proposed, first = [(step if d2t is None else step + d2t[step])[0].tolist() for step in proposals], 0
                for row in rows:
                    ids, mask = self.data.table[row]["input_ids"], self.data.table[row]["loss_mask"]
                    last = first + self.data.lengths[row]
                    accepted += walk.answers([step[first:last] for step in proposed], ids, mask)
                    right = [token if inside(token) else -1 for token in ids]
                    possible += walk.answers([right[2 + k:] for k in range(steps)], ids, mask)
                    first = last
                progress.advance()
        loss, acc = self.read(self.ranks.total(sums))
        counts = torch.tensor([[c[a] for a in range(steps + 1)] for c in (accepted, possible)], device=self.ranks.device)
        acceptance, ceiling = (round(walk.acceptance_length(c), 4) for c in self.ranks.total(counts).tolist())
        if acceptance > self.best["acceptance"]:
            self.best = {"step": self.step, "acceptance": acceptance}
        self.append("validation", loss=round(loss, 6), acc=acc, acceptance=acceptance, ceiling=ceiling)
        progress.log(f"held out after step {self.step}: acceptance length {acceptance:.3f} (the vocabulary allows {ceiling:.3f})  "
                     f"loss {loss:.3f}  acc {'/'.join(f'{a:.3f}' for a in acc)}")
        self.clock.mark()

    def append(self, name, **row):
        if self.ranks.rank == 0:
            row = {"step": self.step, "time": round(time.time(), 2), "epoch": self.data.steps[self.step - 1][0], **row}
            with Appender(self.out / f"{name}.jsonl") as file:
                file.write(row)
            if self.logger:
                self.logger.info({name: {k: dict(enumerate(v)) if isinstance(v, list) else v for k, v in row.items()}}, extra={"step": self.step})

    def state(self):
        """{name: tensor} of all that the next step depends on; the tensors themselves, to be written or filled."""
        names = {p: name for name, p in self.trainable.items()}
        return {"weights": {name: p.data for name, p in self.trainable.items()}, "sums": self.sums,
                "moments": {names[p]: dict(state) for optimizer in self.optimizers for p, state in optimizer.state.items()}, "random": {
                    f"{self.ranks.rank}-{device.__name__}": device.get_rng_state() for device in self.generators()}}

    def generators(self):
        return [torch, torch.cuda] if self.ranks.device.type == "cuda" else [torch]

    def save(self):
        """Write a checkpoint: weights and moments in float32, schedule, step, random states, sums; a resumed run goes on as if
        it had never stopped.  What was found broken so far is counted first."""
        self.data.quarantine(self.out, self.args.max_broken)
        with progress.aside("writing checkpoint"):
            checkpoint.write(self.out / "checkpoints", self.step, self.state(), {
                "plan": self.data.plan, "schedule": [s.state_dict() for s in self.schedulers], "ranks": self.ranks.size,
                "skipped": self.skipped, "acceptance": self.best["acceptance"]}, self.best["step"], self.ranks)
        self.saved = time.monotonic()
        self.clock.mark()

    def resume(self):
        """Load the newest complete checkpoint, if any, and drop what the interrupted run logged after it."""
        path, record = checkpoint.newest(self.out / "checkpoints")
        if path:
            if record["plan"] != self.data.plan:
                raise Refused(f"{path} was made with other packs of rows; move {path.parent} away to begin anew, or take another NAME")
            state = self.state()
            if self.ranks.rank >= record["ranks"]:
                del state["random"]
            checkpoint.load(path, state, alone=self.ranks.size == 1)
            for device, numbers in zip(self.generators(), state.get("random", {}).values()):
                device.set_rng_state(numbers)
            for optimizer, scheduler, saved in zip(self.optimizers, self.schedulers, record["schedule"]):
                scheduler.load_state_dict(saved)
                for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr()):
                    group["lr"] = lr
            self.step, self.skipped = record["step"], record["skipped"]
            self.best = {"step": record["best"], "acceptance": record["acceptance"]}
        if self.ranks.rank == 0:
            for path in (self.out / "metrics.jsonl", self.out / "validation.jsonl"):
                if path.exists():
                    Appender(path).close()  # repairs a torn last line
                    kept = [row for _, row in read(path) if row["step"] <= self.step]
                    stage.write(path, "".join(json.dumps(row) + "\n" for row in kept))
        return bool(record)

    def load_best(self, draft):
        """A fresh draft with the weights of the best checkpoint, or of the newest where nothing is held out; one rank may ask."""
        folder = self.out / "checkpoints"
        path = checkpoint.name(folder, self.best["step"]) if self.best["step"] >= 0 else checkpoint.newest(folder)[0]
        checkpoint.load(path, {"weights": {name: p.data for name, p in trainable(draft).items()}})
        return draft


def out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)  # the latter a CPU's


def last_row(path):
    """The last row of a JSON Lines file, or None if there is none."""
    rows = [row for _, row in read(path)] if path.exists() else []
    return rows[-1] if rows else None
