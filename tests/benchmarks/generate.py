"""01_generate's throughput through a real SGLang against that of a bare load generator, in alternated passes of one run.

Example
    python tests/benchmarks/generate.py --model models/smollm2-135m --rows 96 --level 16 --tokens 64 --passes 3

One server answers all passes.  The bare generator is threads that take prompts from a queue and POST them, nothing else; 01 is
the script itself, with its ledger, rows and checks, timed between its first and its last request as the server's clients see
it: its start-up is not throughput.  Prints answer tokens a second of each pass and the ratio of the sums, 01 over bare; every pass
asks for the same tokens (ignore_eos).  Offline, on a CPU or a GPU.
"""
import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from sglang_server import serve  # noqa: E402


def bare(url, model, prompts, level, tokens):
    """Answer tokens a second of plain requests."""
    work, done = queue.SimpleQueue(), []
    for prompt in prompts:
        work.put(prompt)

    def take():
        session = requests.Session()
        while not work.empty():
            try:
                prompt = work.get_nowait()
            except queue.Empty:
                return
            reply = session.post(f"{url}/v1/chat/completions", json={
                "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0.7, "top_p": 1.0,
                "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "return_prompt_token_ids": True}).json()
            done.append(reply["usage"]["completion_tokens"])

    threads = [threading.Thread(target=take) for _ in range(level)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.monotonic() - began)


def ours(url, model, path, prompts, level, tokens, out):
    """Answer tokens a second of 01_generate, from the ledger's first line to its last."""
    path.write_text("".join(json.dumps({"id": f"p{k}", "prompt": p}) + "\n" for k, p in enumerate(prompts)))
    command = [sys.executable, ROOT / "scripts/01_generate.py", "--prompts", path, "--model", model, "--out", out, "--api", f"{url}/v1",
               "--api-model", model.name, "--answer-tokens", str(tokens), "--extra-body", "ignore_eos=true"]
    process = subprocess.Popen(list(map(str, command)), env={**os.environ, "CONCURRENCY": str(level)}, stdout=subprocess.PIPE, text=True)
    ledger = out / "ledger.jsonl"
    while process.poll() is None and not (ledger.exists() and ledger.stat().st_size):
        time.sleep(0.001)
    began = time.monotonic()
    printed = process.communicate()[0]
    ended = time.monotonic() - (time.time() - ledger.stat().st_mtime)
    assert process.returncode == 0, printed
    return json.loads((out / "done.json").read_text())["completion_tokens"] / (ended - began)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, default=ROOT / "models/smollm2-135m")
    p.add_argument("--rows", type=int, default=96, help="of a pass (default 96)")
    p.add_argument("--level", type=int, default=16, help="requests in flight (default 16)")
    p.add_argument("--tokens", type=int, default=64, help="of an answer (default 64)")
    p.add_argument("--passes", type=int, default=3, help="of each (default 3)")
    args = p.parse_args()
    rates = {"bare": [], "01": []}
    with tempfile.TemporaryDirectory() as folder, serve(args.model, Path(folder) / "sglang.log", max_requests=args.level) as url:
        bare(url, args.model.name, [f"warm {k}" for k in range(args.level)], args.level, 8)
        for number in range(args.passes):
            for name in ("bare", "01") if number % 2 == 0 else ("01", "bare"):
                prompts = [f"Pass {name} {number}, question {k}: name {k + 3} things." for k in range(args.rows)]  # none cached
                rate = bare(url, args.model.name, prompts, args.level, args.tokens) if name == "bare" else ours(
                    url, args.model.absolute(), Path(folder) / f"{number}.jsonl", prompts, args.level, args.tokens, Path(folder) / f"out{number}")
                rates[name].append(rate)
                print(f"pass {number} {name:>4}: {rate:.1f} answer tokens/s", flush=True)
    inverse = {name: len(found) / sum(1 / r for r in found) for name, found in rates.items()}  # equal work: harmonic mean
    print(f"01 {inverse['01']:.1f}, bare {inverse['bare']:.1f} answer tokens/s at {args.level} in flight: ratio {inverse['01'] / inverse['bare']:.3f}")


if __name__ == "__main__":
    main()
