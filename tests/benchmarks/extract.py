"""What extraction costs: memory of the client over many rows (any machine), speed against plain prefill (a GPU).

Example
    python tests/benchmarks/extract.py memory --out DIR --rows 100000     # 10 minutes on 2 cores
    python tests/benchmarks/extract.py check --out DIR                    # about 5 minutes on one H200, no checkpoint needed
    python tests/benchmarks/extract.py speed --out DIR                    # about 6 minutes on one H200, no checkpoint needed
    ... speed --out DIR --target models/smollm2-135m --tokens 256         # of another target's shape
    ... speed --out DIR --hidden 256 --depth 4 --prompts 32 --tokens 64   # the same on a CPU: says nothing of speed

Prints one JSON line a figure, and appends it to DIR/results.jsonl; figures that are there are not measured again.

memory   03_extract as it is, against a small HTTP server that writes states with the hook's own writer; RSS every second.
check    03_extract as it is on a small random Llama with true weights, long and short rows, chunked prefill, bf16 and fp8:
         its own parity checks must pass, and both must hold the same states.
speed    a Llama-8B shape with dummy weights, prompts of --tokens ids; plain prefill, then extraction by the same client code
         as 03's, into /dev/shm and onto the disk of --disk, in turns within one server; ratios are to the mean of the plain
         runs before and after.  And the disk's own speed, by the files' size.
"""
import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("scripts", "tests", "patches")]
# Kernels that need no compiler: SGLang's defaults want sources that an offline machine may lack.
GPU_ARGS = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"


def report(out, name, **figures):
    line = json.dumps({"name": name, **figures})
    print(line, flush=True)
    with open(out / "results.jsonl", "a") as file:
        file.write(line + "\n")
    return figures


def known(out):
    path = out / "results.jsonl"
    return {r["name"]: r for r in map(json.loads, path.read_text().splitlines())} if path.exists() else {}


def rounded(x):
    return float(f"{x:.3g}")


# --- memory -----------------------------------------------------------------------------------------------------------

def memory(args):
    import psutil
    import running
    import tiny

    if "memory" in known(args.out):
        return
    model = tiny.make(args.out / "tiny")
    if not (args.out / "02_prepare").exists():
        running.tokens(args.out, model, [16] * args.rows)
    staging = Path(tempfile.mkdtemp(prefix="eaglet-", dir="/dev/shm"))
    server = subprocess.Popen([sys.executable, ROOT / "tests" / "states_server.py", model, staging], stdout=subprocess.PIPE, text=True)
    client = None
    try:
        client = psutil.Popen([sys.executable, ROOT / "scripts" / "03_extract.py", "--tokens", args.out / "02_prepare", "--model", model,
                               "--out", args.out / "03_extract", "--extract-dtype", "float32"],
                              env={**os.environ, "SERVERS": server.stdout.readline().strip(), "STAGING": str(staging), "FSYNC": "end"})
        seen, started = {}, None
        while client.poll() is None:
            try:
                done = sum(1 for _ in open(args.out / "03_extract" / "manifest-1.jsonl", "rb"))
                started = started or (done and time.monotonic())
                seen[done] = client.memory_info().rss
            except (OSError, psutil.Error):
                pass
            time.sleep(1)
        seconds = time.monotonic() - started
        at = {share: next((rss for n, rss in sorted(seen.items()) if n >= share * args.rows), 0) for share in (0.1, 0.5, 0.98)}
        report(args.out, "memory", exit=client.returncode, rows=args.rows, rows_per_s=rounded(args.rows / seconds),
               **{f"rss_mb_at_{share:.0%}": round(rss / 1e6) for share, rss in at.items()}, rss_mb_max=round(max(seen.values()) / 1e6))
    finally:
        for process in (server, client):
            if process and process.poll() is None:
                process.kill()
        shutil.rmtree(staging)


# --- a GPU -----------------------------------------------------------------------------------------------------------

def engine():
    """SGLang's flags on this machine, patched."""
    from sglang_server import device

    subprocess.run([sys.executable, ROOT / "patches" / "apply.py"], check=True)
    return GPU_ARGS if device() == "cuda" else ""


def check(args):
    """03_extract on real weights, on a GPU through the CUDA path: batches, chunks, fp8."""
    import running
    import tiny
    import torch
    from safetensors.torch import load_file

    import states

    out, work, flags = args.out, args.out / "check", engine()
    work.mkdir(exist_ok=True)
    model = tiny.make(work / "model", hidden=1024, positions=8192, intermediate_size=2048, num_attention_heads=8,
                      num_key_value_heads=2, head_dim=128, initializer_range=0.05)
    draw = random.Random(0)
    lengths = [3000 if i in (10, 20) else draw.randrange(10, 300) for i in range(180)] + [draw.randrange(1000, 5000) for _ in range(12)]
    if not (work / "02_prepare").exists():
        running.tokens(work, model, lengths)
    for dtype in ("bf16", "fp8"):
        if f"check {dtype}" in known(out):
            continue
        started = time.monotonic()
        done = subprocess.run([sys.executable, ROOT / "scripts" / "03_extract.py", "--tokens", work / "02_prepare", "--model", model,
                               "--out", work / dtype, "--dtype", dtype], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              env={**os.environ, "STAGING": "/dev/shm", "KEEP_FREE": "0",
                                   "SGLANG_ARGS": f"{flags} --chunked-prefill-size 1024 --mem-fraction-static 0.3"})
        print(done.stdout, flush=True)
        if done.returncode:
            print((work / dtype / "sglang.log").read_text()[-6000:], flush=True)
            sys.exit(f"check {dtype}: exit code {done.returncode}")
        report(out, f"check {dtype}", seconds=round(time.monotonic() - started), rows=len(lengths),
               parity=json.loads((work / dtype / "parity.json").read_text()))
    errors = []
    for row in range(len(lengths)):
        a, b = (states.decoded(load_file(states.file_of(work / dtype, row))) for dtype in ("bf16", "fp8"))
        errors.append(states.token_errors(b, a).flatten())
    errors = torch.cat(errors)
    report(out, "fp8 against bf16", median=rounded(errors.median().item()), max=rounded(errors.max().item()))


def llama(path, hidden, depth):
    """A directory that SGLang serves with --load-format dummy: config and tokenizer, in the proportions of Llama-3.1-8B."""
    import tiny
    from transformers import LlamaConfig

    tiny.tokenizer(path)
    LlamaConfig(vocab_size=128256, hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=depth,
                num_attention_heads=hidden // 128, num_key_value_heads=max(1, hidden // 512), head_dim=128, max_position_embeddings=8192,
                bos_token_id=0, eos_token_id=2, rms_norm_eps=1e-5, tie_word_embeddings=False, dtype="bfloat16",
                architectures=["LlamaForCausalLM"]).save_pretrained(path)
    return path


def speed(args):
    import hidden_states_hook
    import torch

    from sglang_server import serve

    until = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(1)
    model = args.target or llama(args.out / "llama", args.hidden, args.depth)
    shape = json.loads((model / "config.json").read_text())
    layers = [1, shape["num_hidden_layers"] // 2, shape["num_hidden_layers"] - 1]
    args.disk.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix="eaglet-", dir="/dev/shm"))
    os.environ["SGLANG_ARGS"] = f"--load-format dummy {engine()} {args.sglang_args}"
    try:
        with serve(model, args.out / "sglang.log", capture=hidden_states_hook.forward_hooks(str(staging), layers), cache_prefixes=False,
                   max_requests=128) as url:
            measures(args, url, staging, until, shape["hidden_size"], shape["vocab_size"])
    except BaseException:
        print((args.out / "sglang.log").read_text()[-6000:], flush=True)
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def measures(args, url, staging, until, hidden, vocabulary):
    from api import Api, each
    from capture import Client
    from states import Store

    draw, serial = random.Random(1), iter(range(10 ** 9))
    api = Api(url)

    def prompts(n):
        return [[draw.randrange(3, vocabulary) for _ in range(args.tokens)] for _ in range(n)]

    def plain(ids):
        api.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}})

    def rate(work, items, limit):
        started = time.monotonic()
        for _ in each(work, items, limit):
            pass
        return len(items) * args.tokens / (time.monotonic() - started)

    def extraction(where, fp8, fsync, limit):
        folder = Path(tempfile.mkdtemp(prefix="store-", dir=where))
        try:
            store = Store(folder, hidden, fp8, fsync=fsync)
            client = Client([url], staging, store, window=args.window << 30)

            def keep(ids):
                row = next(serial)
                with client.states(row, ids) as (path, _, _):
                    store.publish(path, row)

            items = prompts(args.prompts)
            before = os.times()
            found = rate(keep, items, limit)
            used = os.times()
            if not fsync and where != "/dev/shm":
                started = time.monotonic()
                os.sync()
                found = (found, time.monotonic() - started)
            return found, (used.user + used.system - before.user - before.system), store.bytes_of(args.tokens)
        finally:
            shutil.rmtree(folder)

    for limit in (64, 128):  # kernels are compiled, memory is pinned
        rate(plain, prompts(limit), limit)
    done = known(args.out)
    after = None
    for place, dtype, policy, limit in [("shm", "bf16", "none", 128), ("disk", "bf16", "end", 128), ("shm", "fp8", "none", 128), ("disk", "fp8", "end", 128),
                                        ("disk", "bf16", "row", 128), ("disk", "fp8", "row", 128)]:
        name = f"{place} {dtype} fsync={policy} in flight {limit}"
        if name in done:
            continue
        if time.monotonic() > until - 60:
            print(f"out of time before: {name}", flush=True)
            break
        before = after or rate(plain, prompts(args.prompts), limit)
        where = "/dev/shm" if place == "shm" else args.disk
        (found, cpu, size) = extraction(where, dtype == "fp8", policy == "row", limit)
        seconds_to_sync = 0
        if isinstance(found, tuple):
            found, seconds_to_sync = found
        after = rate(plain, prompts(args.prompts), limit)
        whole = args.prompts * args.tokens / (args.prompts * args.tokens / found + seconds_to_sync)
        report(args.out, name, tok_per_s=round(found), plain_tok_per_s=[round(before), round(after)],
               ratio=rounded(2 * found / (before + after)), gb_per_s=rounded(found / args.tokens * size / 1e9), client_cpu_s=round(cpu, 1),
               tok_per_s_with_final_sync=round(whole), prompts=args.prompts, tokens=args.tokens)
    for sync in (True, False):
        for size, name in ((args.tokens * (8 * hidden + 8), "bf16"), (args.tokens * (4 * hidden + 12), "fp8")):
            label = f"disk alone {name} fsync={'row' if sync else 'end'}"
            if label not in done and time.monotonic() < until - 30:
                report(args.out, label, gb_per_s=rounded(disk_speed(args.disk, size, args.prompts // 2, sync)))
    label = "shm alone, one thread"
    if label not in done and time.monotonic() < until - 10:
        report(args.out, label, gb_per_s=rounded(disk_speed("/dev/shm", args.tokens * (8 * hidden + 8), 128, False, threads=1)))


def disk_speed(where, size, files, sync, threads=16):
    """GB/s of writing `files` files, whole and at the end on the disk."""
    folder, data = Path(tempfile.mkdtemp(dir=where)), os.urandom(1 << 10) * (size >> 10)

    def write(k):
        with open(folder / str(k), "wb") as file:
            file.write(data)
            if sync:
                os.fsync(file.fileno())

    try:
        started = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(files)))
        if where != "/dev/shm":
            os.sync()
        return len(data) * files / (time.monotonic() - started) / 1e9
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["memory", "check", "speed"])
    p.add_argument("--out", type=Path, required=True, help="directory of results.jsonl and of what is needed on the way")
    p.add_argument("--rows", type=int, default=100_000, help="memory: rows (default 100000)")
    p.add_argument("--prompts", type=int, default=768, help="speed: prompts a measurement (default 768: 19 s at 42,000 tok/s; the first and the last second are not like the others)")
    p.add_argument("--tokens", type=int, default=1024, help="speed: ids a prompt (default 1024)")
    p.add_argument("--target", type=Path, default=None, help="speed: a directory whose shape is served with dummy weights (default a Llama of --hidden)")
    p.add_argument("--hidden", type=int, default=4096, help="speed: hidden size of the dummy target (default 4096)")
    p.add_argument("--depth", type=int, default=32, help="speed: its layers (default 32)")
    p.add_argument("--window", type=int, default=4, help="speed: GiB of states in flight (default 4)")
    p.add_argument("--disk", type=Path, default=None, help="speed: a directory on the disk (default OUT/disk)")
    p.add_argument("--minutes", type=float, default=8, help="speed: no measurement begins after these (default 8)")
    p.add_argument("--sglang-args", default="", help="speed: further flags of the speed server")
    args = p.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    args.disk = args.disk or args.out / "disk"
    {"memory": memory, "check": check, "speed": speed}[args.what](args)
