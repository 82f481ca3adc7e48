"""The store of hidden states: hs_{row}.safetensors in speculators' layout, checked before they get their names.

    hidden_states         bfloat16 [T, 4, H]      states entering three layers, then the last state before the final norm;
                          float8_e4m3fn for fp8   in hs-connectors' layout, with
    hidden_states_scales  float32 [T, 1, 1]       a scale a token (fp8 only)
    token_ids             int64 [T]               equal to the dataset's input_ids of that row

manifest-{worker}.jsonl holds {"row", "size", "xxh3"} of each published file, appended before the file gets its name: a
file that fits no record of its row is broken.
"""
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import jsonl
import progress
import settings
import stage
from stage import Refused

QUARANTINE = "broken"  # files that were not what their record or their row says: kept for a look, made again


def keep_free():
    """Bytes of the states' disk that stay free: KEEP_FREE (environment, GB)."""
    return 1e9 * settings.number("KEEP_FREE", 1, -1)


def file_of(directory, row):
    return Path(directory) / f"hs_{row}.safetensors"


def bytes_of(num_tokens, hidden_size, fp8):
    """The size of a file, to a few bytes."""
    return num_tokens * (8 + (4 + 4 * hidden_size if fp8 else 8 * hidden_size)) + 500


def intact(path, ids, hidden_size):
    """Whether a published file is whole and holds these ids.  Reads the header (whose offsets must add up to the file's
    size) and the ids, not the states: what was published has been checked in full."""
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            shape = file.get_slice("hidden_states").get_shape()
            return shape == [len(ids), 4, hidden_size] and torch.equal(file.get_tensor("token_ids"), torch.tensor(ids))
    except (OSError, SafetensorError):
        return False


def check(path, ids, hidden_size, fp8=False, limits=None):
    """Load a freshly written file; return {"hidden_states", "token_ids"} (and scales), and "norms" float32 [T, 4], or
    raise Refused with what is wrong.  limits: (least, largest) norm of each slot, [4] each."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        data = load_file(path)
    except SafetensorError as error:
        raise Refused(f"{path.name} can't be read ({error})") from None
    wanted = {"hidden_states", "token_ids"} | ({"hidden_states_scales"} if fp8 else set())
    if not wanted <= data.keys():
        raise Refused(f"{path.name} holds {sorted(data)}, wanted {sorted(wanted)}")
    states, found = data["hidden_states"], data["token_ids"]
    if not torch.equal(found, torch.tensor(ids)):
        raise Refused(f"{path.name} holds other token ids than those sent: {found[:8].tolist()}... for {ids[:8]}...")
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    if tuple(states.shape) != (len(ids), 4, hidden_size) or states.dtype != dtype:
        raise Refused(f"{path.name} holds {states.dtype} {list(states.shape)}, wanted {str(dtype)[6:]} {[len(ids), 4, hidden_size]}")
    norms = norms_of(data)  # finite if, and only if, the states are
    if not torch.isfinite(norms).all():
        raise Refused(f"{path.name} holds values that are not finite")
    for bad, k in () if limits is None else ((norms < limits[0]) | (norms > limits[1])).nonzero()[:1].tolist():
        raise Refused(f"{path.name} token {bad}: state {k} has norm {norms[bad, k]:.3g}, the sample had {limits[0][k]:.3g} to "
                      f"{limits[1][k]:.3g} with a margin of 100")
    return {**data, "norms": norms}


def norms_of(data):
    """Norm of each token's states, float32 [T, 4].  Every row passes here, many threads at a time, so in blocks that stay in a
    core's cache and are few: 1,024 tokens of 4 x 4,096 in fp8 take 27 ms of a core by a table of the 256 values' squares (112
    by torch's conversion); token by token, 16 threads on 2 cores took 94 ms a row, waiting for each other's locks, now 18."""
    import numpy as np
    import torch

    states = data["hidden_states"]
    if states.dtype == torch.bfloat16:
        return torch.cat([torch.linalg.vector_norm(block, dim=-1, dtype=torch.float32) for block in states.split(64)])
    squares = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float().square().numpy()
    sums = [np.take(squares, block.numpy(), mode="clip").sum(-1) for block in states.view(torch.uint8).split(32)]
    return torch.from_numpy(np.concatenate(sums)).sqrt() * data["hidden_states_scales"][:, 0]


def decoded(data):
    """The states of a loaded file as bfloat16 [T, 4, H], by the arithmetic of speculators' reader."""
    from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor

    return dequantize_fp8_tensor(data["hidden_states"], data[SCALES_KEY]) if SCALES_KEY in data else data["hidden_states"]


def checksum(path):
    """xxh3 of a file's bytes."""
    from xxhash import xxh3_64

    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxh3_64).hexdigest()


class Store:
    """The published files of a stage directory, and their manifests.

    hidden_size, fp8   what the files hold
    worker             whose manifest this process appends to; None: it only looks
    fsync              whether a file is on the disk before its name is
    """

    def __init__(self, out, hidden_size=None, fp8=False, worker=1, fsync=True):
        self.out, self.hidden_size, self.fp8, self.fsync, self.lock = Path(out), hidden_size, fp8, fsync, threading.Lock()
        self.records = {}  # row -> {(size, xxh3), ...}: a row made twice has two
        self.manifest = jsonl.Appender(self.out / f"manifest-{worker}.jsonl") if worker else None
        for path in self.out.glob("manifest-*.jsonl"):
            for line in path.read_bytes().split(b"\n"):
                try:
                    self._note(json.loads(line))
                except (ValueError, TypeError, KeyError):  # torn, or being written: a row without a record is read in full
                    pass

    def bytes_of(self, num_tokens, fp8=None):
        return bytes_of(num_tokens, self.hidden_size, self.fp8 if fp8 is None else fp8)

    def _note(self, record):
        self.records.setdefault(record["row"], set()).add((record["size"], record["xxh3"]))

    def look(self, rows, verify=False):
        """Yield (row, "whole" or "missing" or "broken" or "unrecorded"): the size against the manifest, to verify also the
        checksum."""
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.out)}
        for row in rows:
            path, records = file_of(self.out, row), self.records.get(row)
            size = sizes.get(path.name)
            if size is None:
                yield row, "missing"
            elif records is None:
                yield row, "unrecorded"
            elif (size, checksum(path)) in records if verify else size in {n for n, _ in records}:
                yield row, "whole"
            else:
                yield row, "broken"

    def missing(self, rows, data, verify=False):
        """The rows that have to be made, in order.  Files without a record (an earlier version's, or a power cut took it) are
        checked in full; broken ones are put into broken/."""
        progress.phase("verifying what is there" if verify else "looking at what is there", len(rows), "row")
        missing, found = [], Counter()
        for row, what in self.look(rows, verify):
            stage.check_stop()
            path = file_of(self.out, row)
            if what == "unrecorded":
                try:
                    check(path, data[row]["input_ids"], self.hidden_size, self.fp8)
                    self.record(row, path)
                except Refused as error:
                    progress.log(error)
                    what = "broken"
            if what == "broken":
                progress.log(f"{path.name} is broken: put into {QUARANTINE}/ and made again")
                (self.out / QUARANTINE).mkdir(exist_ok=True)
                os.replace(path, self.out / QUARANTINE / path.name)
            if what in ("broken", "missing"):
                missing.append(row)
                (self.out / f".hs_{row}.tmp").unlink(missing_ok=True)  # of a run that was killed between two disks
            found[what] += 1
            progress.advance()
        progress.log(", ".join(f"{n} {what}" for what, n in sorted(found.items())))
        self.records.clear()  # 0.5 GB for a million rows
        return missing

    def record(self, row, path):
        record = {"row": row, "size": path.stat().st_size, "xxh3": checksum(path)}
        with self.lock:
            self.manifest.write(record)

    def publish(self, source, row):
        """Move a checked file into its place, over another file system if need be; by fsync it is on the disk before its
        name is."""
        self.record(row, source)
        if source.stat().st_dev != self.out.stat().st_dev:
            there = self.out / f".hs_{row}.tmp"
            shutil.copyfile(source, there)
            source.unlink()
            source = there
        if self.fsync:
            with open(source, "rb") as file:
                os.fsync(file.fileno())
        os.replace(source, file_of(self.out, row))


class Head:
    """The target's final norm and language-model head: states before the norm [T, H] to logits [T, V].

    The layers come from the checkpoint alone (speculators' loader knows tied, sharded and nested ones), so a target
    of any size can be asked.  Computed in float32.
    """

    def __init__(self, model):
        import torch
        from speculators.utils.loading import load_model_layers

        import contract

        weights = load_model_layers(["embed_tokens.weight", "lm_head.weight", "model.norm.weight"], str(model))
        self.norm = weights["model.norm.weight"].float()
        self.head = weights.get("lm_head.weight", weights.get("embed_tokens.weight")).float()
        self.eps = contract.text_config(model).rms_norm_eps
        self.torch = torch

    def logits(self, states):
        states = states.float()
        scale = self.torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.eps)
        return (states * scale * self.norm) @ self.head.T


def reference_device(model, allowed=("cuda", "cpu")):
    """Where transformers can hold the target in float32 within half of the free memory: "cuda", "cpu" or None."""
    import psutil
    import torch

    size = 2 * sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    if "cuda" in allowed and torch.cuda.is_available() and size < torch.cuda.mem_get_info()[0] / 2:
        return "cuda"
    return "cpu" if size < psutil.virtual_memory().available / 2 else None


def reference(model, dtype, device="cpu"):
    """A function (ids [T], layer ids) -> states [T, 4, H] (float32, on `device`) computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval().to(device)
    last = []
    target.get_decoder().norm.register_forward_pre_hook(lambda module, inputs: last.append(inputs[0]))

    @torch.no_grad()
    def states(ids, layer_ids):
        last.clear()
        hidden = target(torch.tensor([ids], device=device), output_hidden_states=True).hidden_states
        return torch.stack([hidden[i][0] for i in layer_ids] + [last[0][0]], dim=1).float()

    return states


def token_errors(states, wanted):
    """Relative error of each token and slot [T, 4]: |a - b| / |b| over H."""
    return (states.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)
