"""The reference run on one GPU, in pieces that each fit ten minutes: answers, states, drafts of several recipes, figures.

Example
    python tests/benchmarks/reference.py data --out DIR --rows 20000       # 01 and 02; leaves DIR/carry/*, to be kept
    python tests/benchmarks/reference.py data --out DIR                    # with DIR/carry/* there: 02 alone, from those answers
    python tests/benchmarks/reference.py states --out DIR                  # 03, in bf16 and fp8; greedy answers to the held-out sets
    python tests/benchmarks/reference.py train NAME --out DIR --epochs 5   # 04 as DIR/NAME, with whatever flags of its own
    python tests/benchmarks/reference.py sweep --out DIR --minutes 9       # 04 of every recipe of RECIPES, --at-once of them
    python tests/benchmarks/reference.py walk --out DIR                    # every draft of DIR on those answers
    python tests/benchmarks/reference.py eval NAME --out DIR --eval-rows 80    # 05 of DIR/NAME
    python tests/benchmarks/reference.py table --out DIR                   # the README's tables of DIR/results.jsonl

SmolLM2-135M-Instruct answers and is trained for.  One server is bound by its host at this size, so --servers of them share the
GPU in 01 and 03.  What is there is not made again.  Every piece appends {"piece", "name", "flags", "seconds", ...done.json, results} to DIR/results.jsonl;
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
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "patches")]
MODEL = ROOT / "models" / "smollm2-135m"
# Kernels that need no compiler; graphs of the sizes that are used; a share of the memory that several servers can each have.
ENGINE = ("--attention-backend triton --sampling-backend pytorch --grammar-backend none --cuda-graph-max-bs 160 "
          "--cuda-graph-backend-prefill disabled --mem-fraction-static 0.5 --max-total-tokens 300000")
# One change a draft; three differ by their seed alone.  SpecForge trains on the same rows (peer.py).  Those that compile the
# same come behind one that has done it: 115 s of 230 that a draft took alone.
EPOCHS = ("--epochs", 4)
RECIPES = {
    "seed-0": [], "peer-lr-1e-3": {"learning_rate": 1e-3, "ttt_length": 3}, "head-trained": ["--lm-head", "trained"],
    "ttt-5": ["--ttt-steps", 5], "norms-3": ["--norms", "3"], "seed-1": ["--seed", 1], "seed-2": ["--seed", 2], "peer-default": {},
    "fp8": [], "rows-5000": ["--train-rows", 5000], "decay-0.8": ["--ttt-decay", 0.8], "lk-hybrid": ["--loss", "lk_hybrid"],
    "vocab-8192": ["--draft-vocab", 8192], "vocab-8192-masked": ["--draft-vocab", 8192, "--out-of-vocab", "mask"],
    "lr-3e-3": ["--lr", 3e-3], "ttt-7": ["--ttt-steps", 7]}
CARRIED = ("args", "prompts.jsonl", "rows.jsonl", "rejected.jsonl", "done.json")


def script(name, *flags, log=None, **env):
    """Seconds of a numbered script; it prints into the file `log`, if one is named."""
    command = [sys.executable, str(next((ROOT / "scripts").glob(f"{name}*.py"))), *map(str, flags)]
    began = time.monotonic()
    with open(log, "a") if log else nullcontext() as file:
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, **{k: str(v) for k, v in env.items()}}, stdout=file, stderr=file).returncode
    if code:
        raise RuntimeError(f"{name}: exit code {code}")
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


def record(args, piece, seconds, directory=None, **more):
    line = {"piece": piece, "name": args.name, "flags": args.flags, "seconds": seconds,
            **(json.loads((directory / "done.json").read_text()) if directory else {}), **more}
    print(json.dumps(line)[:1000], flush=True)
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
    """03 in both precisions through servers that share a staging directory, and the greedy answers to what is held out.

    May be started beside `data`, whose 02 it waits for: the servers come up meanwhile.
    """
    import contract
    from hidden_states_hook import forward_hooks

    with tempfile.TemporaryDirectory(dir="/dev/shm") as staging:
        with servers(args.servers, args.out / "capture", forward_hooks(staging, contract.layer_ids(MODEL, None))) as urls:
            while not (args.out / "02_prepare/done.json").exists():
                time.sleep(1)
            greedy(args, urls)

            def extract(dtype):  # one process reads the servers' replies slower than they come
                out = args.out / f"03_extract-{dtype}"
                seconds = script("03", "--tokens", args.out / "02_prepare", "--model", MODEL, "--out", out, "--dtype", dtype,
                                 log=args.out / f"states-{dtype}.log", SERVERS=",".join(urls), STAGING=staging, FSYNC="end", KEEP_FREE=4,
                                 CONCURRENCY=64 * args.servers)
                record(args, "states", seconds, out, dtype=dtype)

            with ThreadPoolExecutor(2) as pool:
                list(pool.map(extract, ("bf16", "fp8")))


def greedy(args, urls):
    """DIR/greedy.jsonl: {set, id, ids, answer}, the target's greedy answers to all held-out prompts and HumanEval."""
    import chat
    import questions
    from api import Api, each
    from measure import ask

    if (args.out / "greedy.jsonl").exists():  # in another order the walks of before and after would be paired wrongly
        return
    api, tokenizer = Api(",".join(urls)), chat.load_tokenizer(MODEL)
    prompts = [prompt for path in sets(args) for prompt in questions.load(path, tokenizer, None, {})]
    rows = each(lambda prompt: {**prompt, "answer": ask(api, prompt["ids"], 256)["ids"]}, prompts, 128 * len(urls))
    (args.out / "greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sets(args):
    return [args.out / "02_prepare/heldout.jsonl", *filter(Path.exists, [ROOT / "models/humaneval.jsonl"])]


def train(args, name=None, flags=None):
    name, flags = name or args.name, args.flags if flags is None else flags
    out = args.out / name / "04_train"
    seconds = script("04", "--tokens", args.out / "02_prepare", "--states", args.out / f"03_extract-{'fp8' if name == 'fp8' else 'bf16'}",
                     "--model", MODEL, "--out", out, *flags, log=args.out / f"{name}.log")
    record(args, "train", seconds, out, name=name, flags=flags,
           validation=[json.loads(line) for line in (out / "validation.jsonl").read_text().splitlines()],
           time_in=[json.loads(line)["time_in"] for line in (out / "metrics.jsonl").read_text().splitlines()][-1])


def sweep(args):
    """The drafts of RECIPES that are not there, in their order, some at a time.  What is stopped goes on where it was, but SpecForge."""
    import peer

    ends = time.monotonic() + 60 * args.minutes

    def one(name):
        if time.monotonic() > ends or (args.out / name / "made").exists():
            return
        recipe = RECIPES[name]
        try:
            if isinstance(recipe, dict):
                record(args, "train", **peer.train(args.out, name, MODEL, recipe, ends - time.monotonic()), name=name, flags=recipe)
            else:
                train(args, name, [*EPOCHS, *recipe])
            (args.out / name / "made").touch()
        except Exception as error:
            print(f"{name}: {error!r}", flush=True)

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, args.names or RECIPES))


def walked(args):
    """Every draft of DIR on the target's greedy answers: verifications and accepted proposals of each prompt, with 3 and with 5."""
    import torch

    import contract
    import states as store
    import walk

    began, device = time.monotonic(), store.reference_device(MODEL)
    rows = list(map(json.loads, (args.out / "greedy.jsonl").read_text().splitlines()))
    layers, target = contract.layer_ids(MODEL, None), store.reference(MODEL, torch.float32, device)
    for row in rows:
        row["aux"] = target(row["ids"] + row["answer"], layers)[:-1, :3].flatten(1)
    for name in args.names or sorted(path.parents[2].name for path in args.out.glob("*/04_train/sglang/config.json")):
        draft, pairs = served(args.out / name / "04_train/sglang", layers).to(device).eval(), {}
        for pack in (rows[k:k + 12] for k in range(0, len(rows), 12)):
            ids = [torch.tensor(row["ids"] + row["answer"], device=device) for row in pack]
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                found = draft(hidden_states=torch.cat([row["aux"] for row in pack])[None], input_ids=torch.cat([i[1:] for i in ids])[None],
                              document_ids=torch.cat([torch.full_like(i[1:], k) for k, i in enumerate(ids)])[None], ttt_steps=5)
            proposals = [(step[0] + draft.d2t[step[0]]).cpu().split([len(i) - 1 for i in ids]) for step in found]
            for k, row in enumerate(pack):
                for steps in (3, 5):
                    accepted = walk.walk([step[k].tolist() for step in proposals[:steps]], ids[k].tolist(), len(row["ids"]))
                    own = pairs.setdefault(f"{row['set']} {steps}", [])
                    own.append([accepted.total(), sum(a * n for a, n in accepted.items())])
        record(args, "walk", round(time.monotonic() - began, 1), name=name, pairs=pairs)


def served(directory, layers):
    """The draft of a directory in SGLang's layout, as the trainer's model runs it."""
    import torch
    from safetensors.torch import load_file

    import trainer

    config, d2t = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")["d2t"]
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    draft = trainer.build_draft(MODEL, layers, d2t, t2d, 5, norms="3.1" if config.get("fc_norm") else "3", lm_head="trained")
    trainer.start_from(draft, directory, d2t)
    return draft


def evaluate(args):
    out = args.out / args.name / "05_eval"
    seconds = script("05", "--draft", args.out / args.name / "04_train", "--model", MODEL, "--tokens", args.out / "02_prepare", "--out", out,
                     "--eval-prompts", *sets(args), *args.flags)
    results = json.loads((out / "results.json").read_text())
    kept = ("sets", "speeds", "advice", "by_setting", "lossless", "temperature_1", "walked", "settings", "overlap")
    results["lossless"].pop("first_differences")
    record(args, "eval", seconds, out, interval=results["interval"], **{k: results[k] for k in kept})


def table(lines):
    """The README's rows of the evaluations, then of the walks, among the lines of a results.jsonl."""
    found = list(map(json.loads, lines))
    known = {"heldout": "held out, self-made", "humaneval": "HumanEval"}
    for r in (r for r in found if r["piece"] == "eval"):
        for name, own in r["sets"].items():
            walked = " | ".join(f"{r['walked'][draft][name]:.2f}" for draft in ("trained", "untrained", "most_frequent_token"))
            low, high = own["interval"]
            yield f"| {known[name]} ({own['prompts']}) | **{own['acceptance_length']:.2f}** ({low:.2f} to {high:.2f}) | {walked} |"
    flags = {r["name"]: r["flags"] for r in found if r["piece"] == "train"}
    yield from compared({r["name"]: r["pairs"] for r in found if r["piece"] == "walk"}, flags)


def compared(walks, flags):
    """A row of the seeds, pooled, with the least and the most of one; then one of each other draft: its acceptance length less
    theirs, with the 95 % interval over draws of the same prompts for both."""
    import numpy

    seeds = [walks.pop(name) for name in list(walks) if name.startswith("seed-")]
    if not seeds:
        return

    def lengths(pairs, draws=None):
        pairs = numpy.array(pairs, float)
        verified, accepted = (pairs[draws].sum(1) if draws is not None else pairs.sum(0)).T
        return 1 + accepted / verified

    pooled, cells = {key: numpy.sum([own[key] for own in seeds], 0) for key in seeds[0]}, []
    for key, pairs in pooled.items():
        alone = [lengths(own[key]) for own in seeds]
        cells.append(f"**{lengths(pairs):.2f}** ({min(alone):.2f} to {max(alone):.2f})")
    yield f"| the defaults ({len(seeds)} seeds) | " + " | ".join(cells) + " |"
    for name, walk in walks.items():
        own, cells = flags[name], []
        own = own if isinstance(own, dict) else own[2:] if own[:1] == ["--epochs"] else own
        label = (f"SpecForge 0.2.0, {', '.join(f'{k} {v:g}' for k, v in own.items()) or 'its defaults'}" if isinstance(own, dict) else
                 f"`{' '.join(map(str, own))}`" if own else f"states in {name}")
        for key, pairs in pooled.items():
            draws = numpy.random.default_rng(0).integers(len(pairs), size=(2000, len(pairs)))
            low, high = numpy.quantile(lengths(walk[key], draws) - lengths(pairs, draws), [0.025, 0.975])
            cells.append(f"{lengths(walk[key]) - lengths(pairs):+.2f} ({low:+.2f} to {high:+.2f})")
        yield f"| {label} | " + " | ".join(cells) + " |"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("piece", choices=["data", "states", "train", "sweep", "walk", "eval", "table"])
    p.add_argument("names", nargs="*", help="of the draft (default base), of sweep and walk several (default all)")
    p.add_argument("--out", type=Path, required=True, help="directory of the run")
    p.add_argument("--rows", type=int, default=20000, help="data: questions (default 20000)")
    p.add_argument("--servers", type=int, default=3, help="on the one GPU (default 3)")
    p.add_argument("--minutes", type=float, default=9, help="sweep: as long as drafts begin (default 9)")
    p.add_argument("--at-once", type=int, default=4, help="sweep: drafts that train side by side (default 4)")
    args, args.flags = p.parse_known_args()
    args.name = args.names[0] if args.names else "base"
    if args.flags and args.piece not in ("train", "eval"):
        p.error(f"{args.piece} takes no {' '.join(args.flags)}; names stand before the flags")
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SGLANG_ARGS", ENGINE)
    if args.piece == "table":
        print(*table((args.out / "results.jsonl").read_text().splitlines()), sep="\n")
    else:
        {"data": data, "states": states, "train": train, "sweep": sweep, "walk": walked, "eval": evaluate}[args.piece](args)


if __name__ == "__main__":
    main()
