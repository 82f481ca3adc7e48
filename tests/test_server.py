"""The server as a context manager: it comes up, dies with its parent, and its death is told.  Real SGLang on the CPU."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import requests

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[1] / "scripts"

PARENT = """
import sys, time
from pathlib import Path
import stage
from sglang_server import serve

def main():
    with serve(sys.argv[1], Path(sys.argv[2]), "float32", max_requests=2) as url:
        print("url", url, flush=True)
        end = time.time() + 600
        while time.time() < end:
            stage.check_stop()
            time.sleep(0.2)

stage.run(main)
"""


def start(model, log, **env):
    return subprocess.Popen([sys.executable, "-c", PARENT, str(model), str(log)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(SCRIPTS), **env})


def url_of(parent):
    for line in parent.stdout:
        if line.startswith("url"):
            return line.split()[1]
    raise AssertionError("the server did not come up")


def family(parent):
    return psutil.Process(parent.pid).children(recursive=True)


def gone(processes, within=60):
    return not psutil.wait_procs([p for p in processes if p.is_running()], timeout=within)[1]


def test_a_server_answers_and_is_stopped_whole_by_term(tiny, tmp_path):
    parent = start(tiny, tmp_path / "log")
    url = url_of(parent)
    reply = requests.post(url + "/generate", json={"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}}, timeout=120)
    assert len(reply.json()["output_ids"]) == 3
    children = family(parent)
    assert len(children) >= 2
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 143
    assert gone(children)


def test_no_process_is_left_when_the_parent_is_killed(tiny, tmp_path):
    parent = start(tiny, tmp_path / "log")
    url_of(parent)
    children = family(parent)
    parent.kill()
    assert gone(children)


def test_a_server_that_dies_at_its_start_is_told_at_once_with_its_last_lines(tiny, tmp_path):
    parent = start(tiny, tmp_path / "log", SGLANG_ARGS="--no-such-flag")
    output, _ = parent.communicate(timeout=300)
    assert parent.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in output
    assert "refused: the SGLang server died (exit code 2); its log is" in output


def test_a_server_that_is_killed_in_use_is_told(tiny, tmp_path):
    script = PARENT.replace("stage.check_stop()", "Api(url).post('/generate', {'input_ids': [5], 'sampling_params': "
                            "{'max_new_tokens': 1}})").replace("import stage", "import stage\nfrom api import Api")
    parent = subprocess.Popen([sys.executable, "-c", script, str(tiny), str(tmp_path / "log")], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(SCRIPTS)})
    url_of(parent)
    time.sleep(1)
    server = next(p for p in family(parent) if "sglang.launch_server" in " ".join(p.cmdline()))
    server.kill()
    children = family(parent)
    output, _ = parent.communicate(timeout=300)
    assert parent.returncode == 2
    assert "the SGLang server died (SIGKILL)" in output
    assert gone(children)


def test_a_server_that_never_answers_is_given_up(tiny, tmp_path):
    parent = start(tiny, tmp_path / "log", SERVER_WAIT="3")
    output, _ = parent.communicate(timeout=120)
    assert parent.returncode == 2
    assert "gave no answer within SERVER_WAIT seconds" in output
