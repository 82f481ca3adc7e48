"""Run every sample through the target in SGLang once and keep the hidden states that the draft is trained on.

Example
    python scripts/03_extract.py --tokens runs/try/02_prepare --model models/smollm2-135m --out runs/try/03_extract

Reads   --tokens    02_prepare/dataset, contract.json
        --model     the target, served here by a SGLang with `make patch` applied, or by those that SERVERS names
Writes  hs_{row}.safetensors    hidden_states [T, 4, H] bfloat16, or fp8 and a scale a token; token_ids int64 [T]
                                (speculators' layout)
        manifest-{i}.jsonl      row, size and checksum of each file, by worker i
        broken/                 files that a resume found to be none of those, made again
        parity.json             how the states compare with the target's own answers and with transformers
        contract.json           completed by layers, their meaning, precision, engine
        done.json

Before the first row and on a random sample at the end the hand-over is checked (parity.py).  A file is checked (ids,
shape, finite, norms; of some rows the next token) before it gets its name; resuming compares every file's size with the
manifest.  The environment says where and how safely: CONCURRENCY (default 128 on a GPU, 16 on a CPU), STAGING, KEEP_FREE,
FSYNC, VERIFY, SERVERS, WORKER (env/local.env.example).
"""
import json
import os
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import contract
import parity
import progress
import stage
import states
from api import each, in_flight
from capture import Client
from sglang_server import PATCHES, Died, device, serve
from stage import Refused

RESTARTS = 3   # deaths of the server in a row without a row between them
SAMPLED = 64   # of so many rows one is checked against the server's next token
SAME = ("dtype", "quantization", "kv_cache_dtype")                          # settings of the server that a resume must keep,
TOLD = ("attention_backend", "tp_size", "dp_size", "chunked_prefill_size")  # and others that are only noted


def arguments():
    p = stage.arguments(__doc__)
    p.add_argument("--tokens", type=Path, required=True, help="02_prepare's directory")
    p.add_argument("--model", type=Path, required=True, help="directory of the target model")
    p.add_argument("--out", type=Path, required=True, help="stage directory")
    p.add_argument("--layer-ids", type=lambda t: [int(i) for i in t.split(",")], default=None,
                   help="three layers whose entering states the draft reads (default 2,n/2,n-3)")
    p.add_argument("--extract-dtype", default="bfloat16", help="the server's precision (default bfloat16)")
    p.add_argument("--dtype", choices=["bf16", "fp8"], default="bf16", help="the files' precision: fp8 takes half (default bf16)")
    return p.parse_args()


def main():
    args = arguments()
    out = stage.begin(args)
    progress.plan("loading libraries", "looking at", "starting SGLang", "checking parity", "extracting", "checking a random",
                  "stopping SGLang")
    progress.phase("loading libraries")
    from datasets import load_from_disk

    contract.check(args.tokens, target=stage.model_identity(args.model))
    config = contract.text_config(args.model)
    layers, head = contract.layer_ids(args.model, args.layer_ids), states.Head(args.model)
    data = load_from_disk(args.tokens / "dataset").with_format(None)
    if (fsync := os.environ.get("FSYNC") or "row") not in ("row", "end"):
        raise Refused(f"FSYNC={fsync}: wanted row or end")
    worker, workers = stage.worker()
    store = states.Store(out, config.hidden_size, args.dtype == "fp8", worker, fsync == "row")
    mine = range(worker - 1, len(data), workers)
    missing = dict.fromkeys(store.missing(mine, data, os.environ.get("VERIFY") == "1"))
    sizes = [store.bytes_of(n) for n in data["seq_len"][:]]
    room(out, sum(sizes[row] for row in missing))
    progress.plan("starting SGLang", "checking parity", ("extracting", len(mine)), "checking a random", "stopping SGLang", rows=len(data))
    again, deaths, client = f"again-{worker}", 0, None
    while missing or again not in reported(out):
        before = len(missing)
        try:
            with servers(args, out, layers) as (urls, staging):
                client = Client(urls, staging, store, window(staging, max(sizes)))
                seen, found = parity.before(client, data, head)  # of every server, also of one that resumes
                sign(out, args, config, layers, client.server_info())
                if not reported(out):
                    if states.reference_device(args.model, allowed=("cpu",)):  # the GPU is the server's
                        seen["transformers"] = parity.against_transformers(found, data, args.model, args.extract_dtype, layers)
                    reported(out, **seen)
                extract(client, store, data, missing, len(mine), head)
                reported(out, **{again: parity.after(client, data, mine, store)})
        except Died as error:
            deaths = 1 if len(missing) < before else deaths + 1
            if client is None or deaths > RESTARTS:  # it never served, or serves no more
                raise
            progress.log(f"{error}; starting another in {5 * 2 ** deaths} s")
            stage.pause(5 * 2 ** deaths)
    store.manifest.close()
    to_come = sum(what != "whole" for _, what in states.Store(out, worker=None).look(range(len(data)))) if workers > 1 else 0
    if to_come:
        progress.log(f"worker {worker} of {workers} is through; {to_come} rows of others are to come, the last one ends the stage")
    else:
        stage.finish(out, len(data), len(data), {}, tokens=sum(data["seq_len"][:]), parity=reported(out),
                     bytes=sum(f.stat().st_size for f in out.glob("hs_*.safetensors")))


def reported(out, **more):
    """parity.json, with what is to be added."""
    path = out / "parity.json"
    report = (json.loads(path.read_text()) if path.exists() else {}) | more
    if more:
        stage.write(path, json.dumps(report, indent=1) + "\n")
    return report


def room(out, needed):
    """Refuse before the first row what the disk can't hold."""
    free = shutil.disk_usage(out).free
    twice = [d.name for d in out.parent.glob(f"{out.name}.2*")]
    twice = f"; REDO=1 needs the space twice: {', '.join(twice)} beside it hold earlier results" if twice else ""
    progress.log(f"{needed / 1e9:.2f} GB of states to come, {free / 1e9:.0f} GB free{twice}")
    if needed + (floor := states.keep_free()) > free:
        raise Refused(f"{out} has {free / 1e9:.1f} GB free, the states need {needed / 1e9:.1f} GB and KEEP_FREE {floor / 1e9:.1f} GB{twice}")


def window(staging, largest):
    """Bytes that may wait in staging: what half of it can take, at most 4 GiB."""
    free = shutil.disk_usage(staging).free
    if 2 * largest > free:
        raise Refused(f"{staging} has {free / 1e6:.0f} MB free and the longest row takes {largest / 1e6:.0f} MB, of which two must "
                      "fit: make it larger or set STAGING to another directory")
    return min(4 << 30, free // 2)


@contextmanager
def servers(args, out, layers):
    """Yield (URLs, staging): of SERVERS, or of one started here that writes into a private directory (0700)."""
    if urls := os.environ.get("SERVERS"):
        if not os.environ.get("STAGING"):
            raise Refused("SERVERS needs STAGING: the directory that their --forward-hooks write into")
        yield urls.split(","), Path(os.environ["STAGING"])
        return
    sys.path.insert(0, str(PATCHES))
    from hidden_states_hook import forward_hooks

    name = f".staging-{out.stat().st_dev}-{out.stat().st_ino}-{stage.worker()[0]}-"  # by which remains of a kill are known
    where = Path(os.environ.get("STAGING") or out).resolve()
    for left in where.glob(name + "*"):
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=name, dir=where))
    try:
        with serve(args.model, stage.part_log(out, "sglang"), args.extract_dtype, capture=forward_hooks(str(staging), layers),
                   cache_prefixes=False, max_requests=concurrency()) as url:
            yield [url], staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def concurrency():
    return in_flight(128 if device() == "cuda" else 16)


def sign(out, args, config, layers, infos):
    """Complete contract.json before the first row; refuse servers that are not alike, or not as those that began."""
    engines = [{"engine": f"sglang {info['version']}", **{name: info.get(name) for name in SAME},
                "layer_ids": next((h["config"]["layer_ids"] for h in info["forward_hooks"] or () if "layer_ids" in h["config"]), None)}
               for info in infos]
    if any(engine != engines[0] | {"layer_ids": layers} for engine in engines):
        raise Refused(f"the servers are {engines}, wanted all alike and layer_ids {layers}")
    if (out / "contract.json").exists():
        contract.check(out, **engines[0])
    contract.write(out, args.tokens, **engines[0], layer_meaning=contract.STATE, last_state=contract.LAST, states=args.dtype,
                   rope=getattr(config, "rope_parameters", None), engine_settings={name: infos[0].get(name) for name in TOLD})


def extract(client, store, data, missing, total, head):
    """Fetch, check and publish the missing rows; each leaves `missing` once its file has its name."""
    import torch

    torch.set_num_threads(1)  # the rows are many; a team of threads for each would fight for the cores
    progress.phase("extracting", total, "row", done=total - len(missing), flight=concurrency())
    started, tokens, written, floor = time.monotonic(), 0, 0, states.keep_free()

    def keep(row):
        free = shutil.disk_usage(store.out).free
        if free < floor + client.used:
            raise Refused(f"{store.out} has {free / 1e9:.2f} GB free and KEEP_FREE keeps {floor / 1e9:.2f} GB: make room, then "
                          "the same command goes on")
        with client.states(row, data[row]["input_ids"]) as (path, found, reply):
            if row % SAMPLED == 0:
                parity.next_token(path, found, reply, head)
            store.publish(path, row)
        return row, len(found["token_ids"]), free

    for row, length, free in each(keep, list(missing), concurrency()):
        del missing[row]
        tokens, written, seconds = tokens + length, written + store.bytes_of(length), time.monotonic() - started
        progress.advance(tok_per_s=round(tokens / seconds), disk_full_in=progress.span((free - floor) * seconds / written))


if __name__ == "__main__":
    stage.run(main)
