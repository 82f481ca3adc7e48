"""Checkpoints of a training: folder/step-N/, complete or skipped by name; the newest two and the best are kept.

Written by torch.distributed.checkpoint: every rank its share, whatever the number of ranks that reads it.  A temporary
directory is filled and flushed, renamed, and only then marked by complete.json, which holds the size of each file and
what is no tensor.
"""
import errno
import json
import os
import shutil

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import stage
from progress import log

MARK = "complete.json"


def write(folder, step, tensors, record, best, ranks):
    """Write step-`step`; all ranks must call.  tensors: {name: tensor or dict}; record: JSON; best: the step to keep."""
    path, temporary = name(folder, step), folder / ".saving"
    if ranks.rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    ranks.agree(False)
    _plainly(dcp.save, tensors, temporary, ranks.size == 1)  # flushes its files
    if ranks.rank == 0:
        _flush(temporary)
        shutil.rmtree(path, ignore_errors=True)  # one that was never marked
        os.replace(temporary, path)
        _flush(folder)
        stage.write(path / MARK, json.dumps({**record, "step": step, "best": best, "files": {
            file.name: file.stat().st_size for file in path.iterdir()}}))
        _flush(path)
        for old in sorted(folder.glob("step-*"))[:-2]:
            if old != name(folder, best):
                shutil.rmtree(old)  # half of it is not complete: its record names every file
    ranks.agree(False)  # nobody leaves before it is written: torchrun ends the ranks once one has ended


def newest(folder):
    """(path, record) of the newest complete checkpoint, or (None, None); those that are not complete are named."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            record = json.loads((path / MARK).read_text())
            if all((path / file).stat().st_size == size for file, size in record["files"].items()):
                return path, record
        except (OSError, ValueError):
            pass
        log(f"checkpoint {path.name} is not complete: skipped")
    return None, None


def name(folder, step):
    return folder / f"step-{step:09d}"


def load(path, tensors, alone=True):
    """Fill `tensors`, which must have the names and shapes that were written; alone: without the other ranks."""
    _plainly(dcp.load, tensors, path, alone)


def _plainly(function, tensors, path, alone):
    """Save or load; what fails there comes out as an ordinary error, and a full disk as one: torch.save hides that."""
    try:
        function(tensors, checkpoint_id=path, no_dist=alone)
    except CheckpointException as error:  # no Exception, so nobody would report it
        cause, _ = next(iter(error.failures.values()))
        if function is dcp.save and shutil.disk_usage(path).free < 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from cause
        raise RuntimeError(f"checkpoint {path}: {cause}") from cause


def _flush(directory):
    """Put a directory's names on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
