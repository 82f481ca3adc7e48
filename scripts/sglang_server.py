"""A real SGLang server for as long as a `with` lasts: the one place that knows its flags, on a GPU and on a CPU.

    with serve(model, log=out / "sglang.log", dtype="bfloat16") as url:
        requests.post(url + "/generate", ...)

The server binds to loopback, dies with this process (also by kill -9), and is stopped whole on exit.  Settings that
change no number come from the environment: PORT, SERVER_WAIT (seconds, default 1800), SGLANG_ARGS (further flags, such
as "--tp-size 8"), CUDA_VISIBLE_DEVICES, OMP_NUM_THREADS.

Flags: sglang 0.5.16 on a GPU, 0.5.23 on a CPU, where kernels come from env/cpu.  Source: sglang/srt/server_args.py.
"""
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import psutil
import requests

import progress
import settings
import stage
from api import Api
from stage import CHILD, ROOT, Refused

PATCHES = ROOT / "patches"
EXACT = ["--enable-deterministic-inference"]  # on a GPU; its kernels take float32, the usual ones of norms do not


class Died(Refused):
    """A server of ours is gone; another start may help."""


def device():
    """`cuda` where an NVIDIA GPU answers, else `cpu`; DEVICE=cpu|cuda overrides."""
    return os.environ.get("DEVICE") or ("cuda" if shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists() else "cpu")


@contextmanager
def serve(model, log, dtype="bfloat16", draft=None, capture=None, cache_prefixes=True, max_requests=64,
          wait_for="starting SGLang", setting="3-1-4"):
    """Start a server of `model`, yield its URL, stop it.

    draft           directory of an EAGLE-3 draft: serve with speculation
    setting         of it: steps, top-k, draft tokens; 3-1-4 is a chain of 3 proposals
    capture         list of --forward-hooks specs (patches/hidden_states_hook.py): a server to extract from
    cache_prefixes  keep the radix cache; off where rows must be computed in full or timed alike
    max_requests    how many requests run at once

    Refused if the server dies or does not answer a one-token request in time; the log's end is shown.
    """
    port = settings.whole("PORT", 0) or _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*CHILD, sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--served-model-name",
               Path(model).name, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
               "--max-running-requests", str(max_requests), "--skip-server-warmup",
               *([] if cache_prefixes else ["--disable-radix-cache"]),
               *(_capture_flags(capture) if capture else []), *(draft_flags(draft, setting) if draft else []),
               *(_cpu_flags(max_requests) if device() == "cpu" else EXACT if dtype == "float32" else []),
               *shlex.split(os.environ.get("SGLANG_ARGS", ""))]
    paths = [str(PATCHES), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
           **({"SGLANG_USE_CPU_ENGINE": "1"} if device() == "cpu" else {})}
    progress.phase(wait_for, tail=log)
    with open(log, "ab") as file:  # appended: the log of a server that crashed is what one wants to read
        file.write(f"\n== {time.strftime('%F %T')} {shlex.join(command[len(CHILD):])}\n".encode())
        file.flush()
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env,
                                  start_new_session=True)  # Ctrl-C is ours to pass on, in order
    try:
        _await(server, url, log)
        try:
            yield url
        except stage.Stopped:
            raise
        except Exception as error:
            time.sleep(0.5)  # a server that died took its connections along a moment before it could be waited for
            if server.poll() is not None or not Api(url).has("/model_info"):
                raise _died(server, log) from error
            raise
    finally:
        progress.phase("stopping SGLang")
        _stop(server)


def _await(server, url, log):
    """Wait for a one-token reply: /health answers before requests are served (a public fault)."""
    deadline = time.monotonic() + settings.number("SERVER_WAIT", 1800, time="s")
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    while True:
        stage.check_stop()
        if server.poll() is not None:
            raise _died(server, log)
        try:
            if requests.get(url + "/health", timeout=5).ok and requests.post(url + "/generate", json=body, timeout=120).ok:
                return
        except requests.RequestException:
            pass
        if time.monotonic() > deadline:
            _show_end(log)
            raise Refused(f"the SGLang server gave no answer within SERVER_WAIT seconds; see {log}")
        time.sleep(0.5)


def _died(server, log):
    _show_end(log)
    code = server.poll()
    how = "answers no more" if code is None else signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Died(f"the SGLang server died ({how}); its log is {log}")


def _show_end(log):
    for line in progress.last_lines(log):
        progress.log(f"sglang: {line}")


def _stop(server):
    """TERM, then KILL for every descendant that is left after 3 s: it has answered all, and has nothing to save."""
    try:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    if server.poll() is None:
        server.terminate()
    _, alive = psutil.wait_procs(family, timeout=3)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    server.wait()


def _capture_flags(hooks):
    """Eager prefill, since captured graphs skip the hooks (facts of 0.5.12: they also drop the request ids), and no
    all-reduce that waits for the next norm: the states between the two would be partial sums."""
    gpu = ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled",
           "--enforce-disable-flashinfer-allreduce-fusion"]
    return ["--forward-hooks", json.dumps(hooks), *(gpu if device() == "cuda" else [])]


def draft_flags(draft, setting):
    return ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft), *chain.from_iterable(zip(
        ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"), setting.split("-")))]


def _cpu_flags(max_requests):
    # intel_amx named twice, not as --attention-backend: without AMX that flag is silently turned back to torch_native,
    # with which SGLang refuses EAGLE.  --sleep-on-idle: the idle scheduler burned a core (100 % -> 1 %).
    return ["--device", "cpu", "--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx",
            "--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle", "--mem-fraction-static", "0.3",
            "--max-total-tokens", str(max(8192, 1024 * max_requests))]


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
