"""The reference run on one GPU, in pieces that each fit ten minutes: answers, states, drafts of several recipes, figures.

Example
    python tests/benchmarks/reference.py data --out DIR --rows 20000       # 01 and 02; leaves DIR/carry/*, to be kept
    python tests/benchmarks/reference.py data --out DIR                    # with DIR/carry/* there: 02 alone, from those answers
    python tests/benchmarks/reference.py states --out DIR                  # 03
    python tests/benchmarks/reference.py train NAME --out DIR --epochs 5   # 04 as DIR/NAME, with whatever flags of its own
    python tests/benchmarks/reference.py eval NAME --out DIR --eval-rows 80    # 05 of DIR/NAME
    python tests/benchmarks/reference.py table --out DIR                   # the README's table of DIR/results.jsonl

SmolLM2-135M-Instruct answers and is trained for.  One server is bound by its host at this size, so --servers of them share the
GPU in 01 and 03.  Every piece appends {"piece", "name", "flags", "seconds", ...done.json, results} to DIR/results.jsonl;
results/reference-h200.jsonl is such a file.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "patches")]
MODEL = ROOT / "models" / "smollm2-135m"
# Kernels that need no compiler; graphs of the sizes that are used; a share of the memory that several servers can each have.
ENGINE = ("--attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs 160 "
          "--cuda-graph-backend-prefill disabled --mem-fraction-static 0.5 --max-total-tokens 300000")
CARRIED = ("args", "prompts.jsonl", "rows.jsonl", "rejected.jsonl", "done.json")


def script(name, *flags, **env):
    """Run a numbered script to its end; its last words if it fails."""
    command = [sys.executable, str(next((ROOT / "scripts").glob(f"{name}*.py"))), *map(str, flags)]
    began = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **{k: str(v) for k, v in env.items()}}).returncode
    if code:
        sys.exit(f"{name}: exit code {code}")
    return round(time.monotonic() - began, 1)


@contextmanager
def servers(count, log, capture=None, max_requests=128):
    """URLs of `count` servers of the target on this GPU, started side by side."""
    from sglang_server import serve

    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        def start(number):
            time.sleep(4 * number)
            entered = serve(MODEL, Path(f"{log}-{number}.log"), capture=capture, cache_prefixes=False, max_requests=max_requests)
            return entered, entered.__enter__()

        found = list(pool.map(start, range(count)))
        for entered, _ in found:
            stack.push(entered)
        yield [url for _, url in found]


def record(args, piece, seconds, directory, **more):
    line = {"piece": piece, "name": args.name, "flags": args.flags, "seconds": seconds,
            **json.loads((directory / "done.json").read_text()), **more}
    print(json.dumps(line), flush=True)
    with open(args.out / "results.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def data(args):
    """01 through several servers, or its result out of carry/; then 02."""
    answers, carry = args.out / "01_generate", args.out / "carry"
    if carry.exists():
        answers.mkdir(exist_ok=True)
        unpack = subprocess.run(f"cat {carry}/part-* | tar xJ -C {answers}", shell=True)
        assert unpack.returncode == 0
    else:
        with servers(args.servers, args.out / "server") as urls:
            seconds = script("01", "--prompts", f"self:{args.rows}", "--model", MODEL, "--out", answers, "--temperature", "0,0.7",
                             "--answer-tokens", 256, "--api", ",".join(f"{url}/v1" for url in urls), "--api-model", MODEL.name,
                             CONCURRENCY=128 * args.servers)
        record(args, "generate", seconds, answers)
        carry.mkdir()
        subprocess.run(f"tar c -C {answers} {' '.join(CARRIED)} | xz -T0 -6 | split -b 15M - {carry}/part-", shell=True, check=True)
    record(args, "prepare", script("02", "--answers", answers, "--model", MODEL, "--out", args.out / "02_prepare", "--val-share", 0.02),
           args.out / "02_prepare")


def states(args):
    """03 through several servers that share a staging directory."""
    import contract
    from hidden_states_hook import forward_hooks

    with tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        with servers(args.servers, args.out / "capture", forward_hooks(staging, contract.layer_ids(MODEL, None))) as urls:
            seconds = script("03", "--tokens", args.out / "02_prepare", "--model", MODEL, "--out", args.out / "03_extract", *args.flags,
                             SERVERS=",".join(urls), STAGING=staging, FSYNC="end", KEEP_FREE=4, CONCURRENCY=128 * args.servers)
    record(args, "states", seconds, args.out / "03_extract")


def train(args):
    out = args.out / args.name / "04_train"
    seconds = script("04", "--tokens", args.out / "02_prepare", "--states", args.out / "03_extract", "--model", MODEL, "--out", out, *args.flags)
    record(args, "train", seconds, out, validation=[json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()],
           time_in=[json.loads(line)["time_in"] for line in (out / "metrics.jsonl").read_text().splitlines()][-1])


def evaluate(args):
    out = args.out / args.name / "05_eval"
    sets = [args.out / "02_prepare/heldout.jsonl", *filter(Path.exists, [ROOT / "models/humaneval.jsonl"])]
    seconds = script("05", "--draft", args.out / args.name / "04_train", "--model", MODEL, "--tokens", args.out / "02_prepare", "--out", out,
                     "--eval-prompts", *sets, *args.flags)
    results = json.loads((out / "results.json").read_text())
    kept = ("sets", "speeds", "advice", "by_setting", "lossless", "temperature_1", "walked", "settings", "overlap")
    results["lossless"].pop("first_differences")
    record(args, "eval", seconds, out, interval=results["interval"], **{k: results[k] for k in kept})


def table(lines):
    """The README's rows of each evaluation among the lines of a results.jsonl."""
    known = {"heldout": "held out, self-made", "humaneval": "HumanEval"}
    for r in (r for r in map(json.loads, lines) if r["piece"] == "eval"):
        for name, found in r["sets"].items():
            walked = " | ".join(f"{r['walked'][draft][name]:.2f}" for draft in ("trained", "untrained", "most_frequent_token"))
            low, high = found["interval"]
            yield f"| {known[name]} ({found['prompts']}) | **{found['acceptance_length']:.2f}** ({low:.2f} to {high:.2f}) | {walked} |"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("piece", choices=["data", "states", "train", "eval", "table"])
    p.add_argument("name", nargs="?", default="base", help="of the draft (default base)")
    p.add_argument("--out", type=Path, required=True, help="directory of the run")
    p.add_argument("--rows", type=int, default=20000, help="data: questions (default 20000)")
    p.add_argument("--servers", type=int, default=3, help="on the one GPU (default 3)")
    args, args.flags = p.parse_known_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SGLANG_ARGS", ENGINE)
    if args.piece == "table":
        print(*table((args.out / "results.jsonl").read_text().splitlines()), sep="\n")
    else:
        {"data": data, "states": states, "train": train, "eval": evaluate}[args.piece](args)


if __name__ == "__main__":
    main()
