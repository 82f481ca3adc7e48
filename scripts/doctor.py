"""Is this machine fit for what is to run?  One line a check: ok, warn or fail, what was found, and the mend.

Example
    make doctor TARGET=mine GOAL=train
    make all TARGET=mine               # asks the doctor before its first stage, and stops if a check fails; FORCE=1 goes on

Reads   stdin    the commands that make would run; the target they name; earlier runs, for the disk that is needed (plan.py)
Writes  a temporary file on the disk of the runs, to measure it; with --keep, if make goes on, the plan beside the stages

Exit 0: no check failed, or FORCE=1.  Exit 2: one did.
"""
import argparse
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import psutil

import chat
import contract
import plan
import settings
import show
import stage
import states
from api import Api, in_flight
from plan import EXTRACT, GENERATE, TRAIN
from progress import size
from sglang_server import PATCHES, device

CAPTURE = "set_eagle3_layers_to_capture"  # what the hidden-states hook asks of SGLang's class of the target
WRITE, PATIENCE = 128 << 20, 5.0          # bytes written to measure a disk, and seconds that it may take
SKEW = 2.0                                # seconds between the clocks of disk and machine that make bears


def programs(commands, model):
    check = subprocess.run([sys.executable, PATCHES / "apply.py", "--check"], capture_output=True, text=True)
    yield check.returncode == 0, (check.stdout + check.stderr).strip(), "make patch"
    pins = (stage.ROOT / f"env/requirements{'-cpu' * (device() == 'cpu')}.txt").read_text()
    pins = dict(re.findall(r"^(torch|sglang|speculators|transformers)==(\S+)", pins, re.MULTILINE))
    found = {name: metadata.version(name).partition("+")[0] for name in pins}
    yield found == pins or None, f"{found}, tested with {pins}", "make setup, in a new .venv"


def memory(commands, model):
    """The target's weights, and a fifth for cache and activations, on the GPUs of one server."""
    need = 1.2 * sum(f.stat().st_size for f in model.glob("*.safetensors"))
    have, where = psutil.virtual_memory().available, "free memory, no GPU"
    if device() == "cuda":
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = subprocess.check_output(["nvidia-smi", "--query-gpu=memory.total,driver_version", "--format=csv,noheader,nounits",
                                        *([f"--id={chosen}"] if chosen else [])], text=True).splitlines()
        ranks = re.search(r"--tp(?:-size)?[ =](\d+)", os.environ.get("SGLANG_ARGS", ""))
        used = [gpu.split(", ") for gpu in gpus[:int(ranks[1]) if ranks else 1]]
        have, where = sum(float(mib) * 2 ** 20 for mib, _ in used), f"{len(used)} of {len(gpus)} GPUs, driver {used[0][1]}"
    yield need < have, f"{size(have)} ({where}), the target takes {size(need)}", 'more GPUs: export SGLANG_ARGS="--tp-size N"'


def port(commands, model):
    wanted = settings.whole("PORT", 0)
    with socket.socket() as s:
        free = not wanted or s.connect_ex(("127.0.0.1", wanted))
    yield free, f"{wanted or 'any'}, which must be free", "stop what listens there (ss -ltnp), or another PORT"


def limits(commands, model):
    """NCCL and torch want 64 MB of shared memory; 04 runs fewer loader processes if there is no room for five batches of each."""
    workers = settings.whole("WORKERS", 4 if device() == "cuda" else 0) if TRAIN in commands else 0
    batch = workers and plan.bytes_of(min(int(commands[TRAIN].get("batch-tokens", 8192)), 16384), commands[TRAIN])
    free, least = shutil.disk_usage("/dev/shm").free, 64 << 20
    yield free > least + 5 * workers * batch or (None if free > least else False), \
        f"/dev/shm has {size(free)} free, the run takes {size(least + 5 * workers * batch)}", \
        "mount -o remount,size=50% /dev/shm, or docker's --shm-size"
    soft, files = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 512 + 2 * in_flight()
    yield soft >= files, f"{soft} open files allowed, wanted {files}", "ulimit -n 65536"


def disk(commands, model):
    data, extract = plan.data_of(commands), plan.estimate(commands).get(EXTRACT, {"bytes": 0, "seconds": None})
    folder, need = plan.standing(data), extract["bytes"]
    free, known = shutil.disk_usage(folder).free, need is not None
    take = f"the states take {size(need) if known else 'an unknown amount'} and KEEP_FREE {size(states.keep_free())}"
    yield need + states.keep_free() < free if known else None, f"{folder} has {size(free)} free, {take}", \
        "make room, another RUNS, fewer PROMPTS" if known else "make plan PROBE=1"
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
        skew = os.stat(file.name).st_mtime - time.time()
        began, block, wrote = time.monotonic(), os.urandom(1 << 22), 0
        while wrote < min(WRITE, free // 4) and time.monotonic() - began < PATIENCE:
            wrote += file.write(block)
            os.fsync(file.fileno())
        rate = wrote / (time.monotonic() - began)
    wanted = need / extract["seconds"] if need and extract["seconds"] else 0
    yield rate > wanted or None, f"it writes {size(rate)}/s, the run {size(wanted) if wanted else '?'}/s", "a faster disk"
    late = [str(p) for p in data.glob("**/done.json") if p.stat().st_mtime > time.time() + SKEW]
    yield abs(skew) < SKEW and not late, f"its clock is {abs(skew):.1f} s off; of the future: {' '.join(late) or 'nothing'}", \
        "NTP on both machines; touch what is of the future: make goes by the times of files"


def target(commands, model):
    from safetensors import SafetensorError, safe_open

    layers, index = commands.get(EXTRACT, {}).get("layer-ids"), model / "model.safetensors.index.json"
    layers = contract.layer_ids(model, layers and [int(i) for i in layers.split(",")])
    for name in set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["model.safetensors"]:
        try:
            safe_open(model / name, "pt")  # compares the length with what the header says
        except (OSError, SafetensorError) as error:
            yield False, f"{model / name}: {error}", "copy the checkpoint again"
    name = json.loads((model / "config.json").read_text())["architectures"][0]
    yield captures(name), f"SGLang's {name} must have {CAPTURE}, for layers {layers}", "another target"


def captures(name):
    """Whether SGLang's class, or one that it comes from, hands out the states of layers.  Read: an import takes half a minute."""
    for file in Path(metadata.distribution("sglang").locate_file("sglang/srt/models")).glob("*.py"):
        if found := re.search(rf"^class {name}\(([^)]*)\):\n((?:[ \t].*\n|\n)*)", file.read_text(), re.MULTILINE):
            return f"def {CAPTURE}(" in found[2] or any(captures(base) for base in re.findall(r"\w+", found[1]))
    return False


def template(commands, model):
    """What 02 makes of an answer."""
    tokenizer = chat.load_tokenizer(model)
    messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
    made, = chat.Masker(tokenizer, chat.end_of_turn_ids(tokenizer, model))([{"messages": messages}])
    wrong = made if isinstance(made, str) else ""
    yield not wrong, f"an answer can't be trained: {wrong}" if wrong else f"trained in brackets: {show.marked(tokenizer, *made[0])!r}", \
        f"a chat template in {model} that renders an assistant's turn and ends it by an eos_token_id of generation_config.json"


def key(commands, model):
    given, there = commands.get(GENERATE, {}), os.environ.get("API_KEY")
    if "api" in given:
        yield bool(there) or None, "API_KEY should be in the environment", "export API_KEY=..., if the server wants one"
        yield Api(given["api"], there).has("/models") or None, f"{given['api']} should list its models", "look at API and API_KEY"


def examine(check, commands):
    """[(ok, warn or fail; finding; mend)] of a check, which yields (true, None or false; finding; mend)."""
    lines = []
    try:
        lines += check(commands, Path(next(iter(commands.values()))["model"]))
    except Exception as error:  # whatever a check meets is its finding
        lines.append((False, " ".join(str(error).split()) or type(error).__name__, "what it names"))
    return [("warn" if fit is None else "ok" if fit else "fail", text, mend) for fit, text, mend in lines]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--keep", action="store_true", help="leave the plan beside the stages")
    args = p.parse_args()
    commands, failed = plan.read(sys.stdin), False
    if not commands:
        return
    for check in (programs, memory, port, limits, disk, target, template, key):
        for verdict, text, mend in examine(check, commands):
            failed |= verdict == "fail"
            print(f"{verdict:<5} {check.__name__:<9} {text}" + (f"; mend: {mend}" if verdict != "ok" else ""), flush=True)
    if failed and os.environ.get("FORCE") != "1":
        sys.exit(2)
    if args.keep:
        plan.keep(commands, plan.estimate(commands))


if __name__ == "__main__":
    stage.run(main)
