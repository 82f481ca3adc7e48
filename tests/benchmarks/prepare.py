"""02_prepare against speculators' prepare-data on the same rows in one run: rows per second and peak memory.

Example
    pip install typer==0.29.2    # speculators' command line wants it, nothing else here does
    python tests/benchmarks/prepare.py --rows 100000 --folder /tmp/bench

Both get the same ids, already tokenized, each in the layout that it reads, and as many processes as there are cores.  A
third pass gives 02_prepare the messages too, which it renders, tokenizes and compares with the ids; speculators has no
such check.  The passes take turns, --repeats times; memory is the peak of all processes of a pass, files that they map not counted.
"""
import argparse
import json
import os
import random
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]
MODEL = ROOT / "models" / "smollm2-135m"
WORDS = (ROOT / "README.md").read_text().split()


def conversations(n, tokens):
    """n conversations of about `tokens` tokens as (messages, prompt ids, answer ids)."""
    import chat

    tokenizer, chance = chat.load_tokenizer(MODEL), random.Random(0)
    for _ in range(n):
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(k // 2, k * 3 // 2))) for k in (tokens // 10, tokens // 3)]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts)]
        prompt = chat.render(tokenizer, messages[:1], answer_next=True)
        yield messages, prompt, chat.render(tokenizer, messages, answer_next=False)[len(prompt):-1]


def write(folder, rows, tokens):
    """The same rows for each pass; 1,000 distinct ones, again and again under other ids."""
    distinct = list(conversations(min(rows, 1000), tokens))
    for name in ("speculators", "ids", "messages"):
        (folder / name).mkdir()
        with open(folder / name / "rows.jsonl", "w") as file:
            for k in range(rows):
                messages, prompt, answer = distinct[k % len(distinct)]
                ours = {"id": f"row-{k}", "prompt_ids": prompt, "answer_ids": answer}
                file.write(json.dumps({"speculators": {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)},
                                       "ids": ours, "messages": {**ours, "messages": messages}}[name]) + "\n")
        (folder / name / "done.json").write_text("{}")
    return statistics.mean(len(p) + len(a) for _, p, a in distinct)


def measured(command, out, folder):
    """(seconds, seconds of all its processes on a core, peak of their memory) of a command that writes `out`."""
    from running import memory

    shutil.rmtree(out, ignore_errors=True)
    began, peak, used = time.monotonic(), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(folder / "log", "a") as log:
        job = psutil.Popen([sys.executable, *map(str, command)], stdout=log, stderr=log, cwd=folder,
                           env={**os.environ, "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "WORKERS": str(os.cpu_count())})
    while job.poll() is None:
        try:
            peak = max(peak, memory(job.pid))
        except psutil.Error:
            pass
        time.sleep(0.2)
    seconds, now = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert job.returncode == 0, (folder / "log").read_text()[-2000:]
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return seconds, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, peak


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=100_000)
    p.add_argument("--tokens", type=int, default=1000, help="of a row, about")
    p.add_argument("--repeats", type=int, default=1)
    p.add_argument("--folder", type=Path, required=True, help="a folder to make and to remove again; 8 GB at 100,000 rows")
    args = p.parse_args()
    args.folder.mkdir(parents=True)
    mean = write(args.folder, args.rows, args.tokens)
    print(f"{args.rows} rows of {mean:.0f} tokens on {os.cpu_count()} cores", flush=True)
    out = args.folder / "out"
    ours = [ROOT / "scripts" / "02_prepare.py", "--model", MODEL, "--out", out, "--max-seq-len", 8000, "--answers"]
    commands = {"speculators": ["-m", "speculators", "prepare-data", "--model", MODEL, "--data", args.folder / "speculators" / "rows.jsonl",
                                "--output", out, "--no-skip-token-freq", "--num-preprocessing-workers", os.cpu_count()],
                "ids": [*ours, args.folder / "ids"], "messages": [*ours, args.folder / "messages"]}
    passes = {name: [] for name in commands}
    for _ in range(args.repeats):
        for name, command in commands.items():
            passes[name].append(measured(command, out, args.folder))
            seconds, cpu, peak = passes[name][-1]
            print(f"{name:<12} {args.rows / seconds:7.0f} rows/s  {seconds:6.1f} s  {cpu:6.1f} s of a core  peak {peak / 1e9:.2f} GB", flush=True)
    for name in ("ids", "messages"):
        time_, cpu, peak = (statistics.median(mine[k] / theirs[k] for theirs, mine in zip(passes["speculators"], passes[name])) for k in range(3))
        print(f"02_prepare ({name}) against speculators: {1 / time_:.2f} times its rows per second, {1 / cpu:.2f} times by the time on a "
              f"core, {peak:.2f} times its memory")
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
