"""03_extract as a process: killed, its server killed, its files broken, its disk filled, two and more of it at once.

Most against the HTTP server of states_server.py, which answers at once; the chaos against a real SGLang on the CPU.
"""
import json
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from running import ROOT, script, tokens
from test_capture import start_server

import states

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tiny, tmp_path_factory):
    """02_prepare's directory: 40 rows, 5 to 44 ids."""
    return tokens(tmp_path_factory.mktemp("prepared"), tiny, [*range(5, 45)])


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    """The environment that names a running server."""
    staging = tmp_path_factory.mktemp("server") / "staging"
    process, url = start_server(tiny, staging)
    yield {"SERVERS": url, "STAGING": str(staging)}
    process.kill()
    process.wait()


def flags(prepared, tiny, out, *more):
    return ["--tokens", prepared, "--model", tiny, "--out", out, "--extract-dtype", "float32", *more]


def start(*flags, **env):
    return subprocess.Popen([sys.executable, ROOT / "scripts" / "03_extract.py", *map(str, flags)], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, **env})


def published(out):
    return sorted(int(p.name[3:-12]) for p in out.glob("hs_*.safetensors"))


def wait_for(process, ready, seconds=600):
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def contents(out):
    return {p.name: p.read_bytes() for p in out.glob("hs_*.safetensors")}


# --- against a server that answers at once ----------------------------------------------------------------------------

def test_a_store_that_lacks_rows_gets_exactly_those(prepared, tiny, server, tmp_path):
    out = tmp_path / "out"
    script("03_extract", *flags(prepared, tiny, out), **server)
    whole, times = contents(out), {p.name: p.stat().st_mtime_ns for p in out.glob("hs_*")}
    assert published(out) == list(range(40))
    assert script("03_extract", *flags(prepared, tiny, out), **server).count("is done already") == 1
    assert "40 of 40 files are whole" in script("verify", "--states", out, "--tokens", prepared)

    (out / "done.json").unlink()
    for row in (0, 1, 2, 3, 17):  # the first ones too: no empty batch is asked for
        states.file_of(out, row).unlink()
    states.file_of(out, 9).write_bytes(b"")
    flipped = bytearray(whole["hs_30.safetensors"])
    flipped[-1] ^= 1
    states.file_of(out, 30).write_bytes(flipped)
    told = script("verify", "--states", out, "--tokens", prepared, code=2)
    assert "33 of 40 files are whole; broken 2: 9, 30; missing 5: 0, 1, 2, 3, 17" in told and "VERIFY=1" in told
    told = script("03_extract", *flags(prepared, tiny, out), VERIFY="1", **server)
    assert "2 broken, 5 missing, 33 whole" in told
    assert contents(out) == whole and (out / "broken" / "hs_30.safetensors").read_bytes() == flipped
    assert {n for n, t in times.items() if (out / n).stat().st_mtime_ns != t} == {f"hs_{r}.safetensors" for r in (0, 1, 2, 3, 9, 17, 30)}

    (out / "done.json").unlink()
    states.file_of(out, 5).unlink()
    contract = json.loads((out / "contract.json").read_text())
    (out / "contract.json").write_text(json.dumps({**contract, "engine": "sglang 0.5.0"}))
    told = script("03_extract", *flags(prepared, tiny, out), code=2, **server)
    assert "sglang 0.5.0" in told and f"{contract['engine']}" in told and not (out / "done.json").exists()


@pytest.mark.parametrize("more", [["--layer-ids", "1,2,3"], ["--dtype", "fp8"], ["--extract-dtype", "bfloat16"]], ids=" ".join)
def test_a_store_holds_one_kind_of_states(prepared, tiny, tmp_path, more):
    out = tmp_path / "out"
    process = start(*flags(prepared, tiny, out), SERVERS="http://127.0.0.1:9", STAGING=str(tmp_path))
    wait_for(process, (out / "args").exists)
    process.kill()
    process.wait()
    told = script("03_extract", *flags(prepared, tiny, out, *more), code=2)
    assert "was made by another command" in told and more[1].split(",")[0] in told


@pytest.mark.parametrize("name, value, wanted", [("CONCURRENCY", "0", "a number, 1 or more"), ("FSYNC", "rows", "row or end")])
def test_a_machine_setting_that_means_nothing_is_refused(prepared, tiny, server, tmp_path, name, value, wanted):
    """Requests none at a time are waited for without end."""
    told = script("03_extract", *flags(prepared, tiny, tmp_path / "out"), code=2, **{**server, name: value})
    assert f"refused: {name}={value}: wanted {wanted}" in told


def test_servers_with_other_layers_are_refused_before_the_first_row(prepared, tiny, server, tmp_path):
    told = script("03_extract", *flags(prepared, tiny, tmp_path / "out", "--layer-ids", "1,2,3"), code=2, **server)
    assert "[2, 4, 5]" in told and "[1, 2, 3]" in told and published(tmp_path / "out") == []


def test_workers_share_a_directory_and_the_last_one_finishes_it(prepared, tiny, server, tmp_path):
    out = tmp_path / "out"
    workers = [start(*flags(prepared, tiny, out), WORKER=f"{i}/3", **server) for i in (1, 2, 3)]
    wait_for(workers[0], lambda: all((out / f".lock-{i}").exists() for i in (1, 2, 3)))
    assert "another process is working in" in script("03_extract", *flags(prepared, tiny, out), code=2, WORKER="2/3", **server)
    assert "another process is working in" in script("03_extract", *flags(prepared, tiny, out), code=2, **server)
    told = [worker.communicate(timeout=600)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], told
    assert 1 <= sum("done: 40 rows in, 40 out" in text for text in told)
    assert published(out) == list(range(40)) and json.loads((out / "done.json").read_text())["rows_out"] == 40
    for i in (1, 2, 3):
        rows = [json.loads(line)["row"] for line in (out / f"manifest-{i}.jsonl").read_text().splitlines()]
        assert sorted(rows) == list(range(i - 1, 40, 3))
    assert "40 of 40 files are whole" in script("verify", "--states", out, "--tokens", prepared)
    assert "wanted i/n" in script("03_extract", *flags(prepared, tiny, tmp_path / "other"), code=2, WORKER="4/3", **server)


@pytest.fixture
def tmpfs(tmp_path):
    """tmpfs(megabytes) mounts an empty one and returns its path."""
    mounted = []

    def mount(megabytes):
        path = tmp_path / f"tmpfs{len(mounted)}"
        path.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(megabytes * 1e6)}", "eaglet-test", path], capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_disk_that_is_too_small_is_refused_and_one_that_fills_up_stops_cleanly(prepared, tiny, tmpfs):
    disk = tmpfs(sum(range(5, 45)) * 520 / 1e6 + 0.9)
    staging = tmpfs(1)
    process, url = start_server(tiny, staging / "s")
    env = {"SERVERS": url, "STAGING": str(staging / "s")}
    try:
        told = script("03_extract", *flags(prepared, tiny, disk / "out"), code=2, **env)  # KEEP_FREE is 1 GB
        assert "GB free, the states need" in told and "KEEP_FREE 1.0 GB" in told and published(disk / "out") == []
        running = start(*flags(prepared, tiny, disk / "out"), KEEP_FREE="0.0002", CONCURRENCY="1", **env)
        wait_for(running, lambda: len(published(disk / "out")) >= 12)  # of whose rest none fits into 8,192 bytes
        with open(disk / "filler", "wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, max(1, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 150_000))
        told = running.communicate(timeout=600)[0]
        assert running.returncode == 2 and "KEEP_FREE" in told and "the same command goes on" in told, told
        assert not (disk / "out" / "done.json").exists() and 12 <= len(published(disk / "out")) < 40
        kept = contents(disk / "out")
        os.posix_fallocate(os.open(disk / "more", os.O_CREAT | os.O_WRONLY), 0, os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 8192)
        told = script("03_extract", *flags(prepared, tiny, disk / "out"), code=2, KEEP_FREE="-1", **env)  # and truly full
        assert "No space left" in told, told
        assert kept.items() <= contents(disk / "out").items()  # a short row may still have fitted
        (disk / "filler").unlink()
        (disk / "more").unlink()
        script("03_extract", *flags(prepared, tiny, disk / "out"), KEEP_FREE="0", **env)
        assert published(disk / "out") == list(range(40)) and kept.items() <= contents(disk / "out").items()
    finally:
        process.kill()
        process.wait()


def test_a_staging_that_holds_no_two_rows_is_refused_and_a_small_one_is_enough_for_many(tiny, server, tmpfs, tmp_path):
    prepared = tokens(tmp_path, tiny, [100] * 60)  # 52 kB each, 3 MB in all
    staging = tmpfs(1.2)
    told = script("03_extract", *flags(prepared, tiny, tmp_path / "a"), code=2, SERVERS=server["SERVERS"], STAGING=str(tmpfs(0.08)))
    assert "the longest row takes" in told and published(tmp_path / "a") == []
    process, url = start_server(tiny, staging / "s")
    try:
        script("03_extract", *flags(prepared, tiny, tmp_path / "b"), SERVERS=url, STAGING=str(staging / "s"), CONCURRENCY="32")
        assert len(published(tmp_path / "b")) == 60 and not any((staging / "s").iterdir())
    finally:
        process.kill()
        process.wait()


def test_the_clients_memory_does_not_grow_with_the_rows(tiny, server, tmp_path):
    peak = {}
    for rows in (2_000, 10_000):
        root = tmp_path / str(rows)
        prepared = tokens(root, tiny, [[3 + (i * 7 + k) % 240 for k in range(8)] for i in range(500)] * (rows // 500))
        pid = os.posix_spawn(sys.executable, [sys.executable, ROOT / "scripts" / "03_extract.py",
                                              *map(str, flags(prepared, tiny, root / "out"))], {**os.environ, **server, "FSYNC": "end"})
        _, status, usage = os.wait4(pid, 0)
        assert status == 0 and len(published(root / "out")) == rows
        peak[rows] = usage.ru_maxrss / 1024
    print(peak)
    assert peak[10_000] < peak[2_000] + 30  # MB; 8,000 rows of 4 kB would be 32


# --- chaos, against SGLang --------------------------------------------------------------------------------------------

SETTINGS = {"SGLANG_ARGS": "--chunked-prefill-size 256", "CONCURRENCY": "1"}


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """(02_prepare's directory, 03's when nothing happened): twins, rows of one beginning, a long row, short ones."""
    root = tmp_path_factory.mktemp("chaos")
    draw = random.Random(3)
    twin = [draw.randrange(3, 250) for _ in range(60)]
    cousins = [twin[:54] + [draw.randrange(3, 250) for _ in range(6)] for _ in range(2)]
    prepared = tokens(root, tiny, [twin, twin, *cousins, 900, 5, 50, *(draw.randrange(5, 200) for _ in range(33))])
    script("03_extract", *flags(prepared, tiny, root / "03_extract"), **SETTINGS)
    return prepared, root / "03_extract"


def test_every_row_has_the_states_of_transformers_whatever_stood_beside_or_before_it(undisturbed, tiny):
    import torch
    from datasets import load_from_disk

    prepared, out = undisturbed
    layers, target = json.loads((out / "contract.json").read_text())["layer_ids"], states.reference(tiny, torch.float32)
    for row, ids in enumerate(load_from_disk(prepared / "dataset").with_format(None)["input_ids"][:]):
        found = states.check(states.file_of(out, row), ids, 64)["hidden_states"]
        assert states.token_errors(found, target(ids, layers)).max() < 0.004  # bf16 storage alone: 0.0029 at most
    assert states.file_of(out, 0).read_bytes() == states.file_of(out, 1).read_bytes()


def test_kills_of_client_and_server_and_broken_files_leave_the_store_as_if_nothing_had_been(undisturbed, tiny, tmp_path):
    prepared, whole = undisturbed
    wanted, out, seed = contents(whole), tmp_path / "out", time.time_ns()
    print("seed", seed)
    draw = random.Random(seed)
    client = start(*flags(prepared, tiny, out), **SETTINGS)
    log = (tmp_path / "log").open("w")
    wait_for(client, lambda: len(published(out)) > draw.randrange(2, 8))
    server = next(p for p in psutil.Process(client.pid).children(recursive=True) if "sglang.launch_server" in p.cmdline())
    server.kill()
    time.sleep(1)
    seen = len(published(out))
    wait_for(client, lambda: len(published(out)) > seen + draw.randrange(1, 6))  # by another server, which the client started
    time.sleep(draw.random() * 0.3)
    children = psutil.Process(client.pid).children(recursive=True)
    client.kill()  # and by that its server
    assert not psutil.wait_procs(children, timeout=60)[1]
    told = client.communicate()[0]
    log.write(told)
    assert "the SGLang server died (SIGKILL)" in told and "starting another" in told
    rows = published(out)
    assert 4 <= len(rows) < 40 and all(contents(out)[name] == wanted[name] for name in contents(out))  # nothing wrong, ever

    cut, empty, flip = draw.sample(rows, 3)
    for row, data in ((cut, lambda d: d[:-7]), (empty, lambda d: b""), (flip, lambda d: d[:-50] + bytes([d[-50] ^ 4]) + d[-49:])):
        states.file_of(out, row).write_bytes(data(states.file_of(out, row).read_bytes()))
    (out / ".hs_39.tmp").write_bytes(b"half")
    with open(out / "manifest-1.jsonl", "ab") as file:
        file.write(b'{"row": 39, "si')
    again = start(*flags(prepared, tiny, out), VERIFY="1", **SETTINGS)
    wait_for(again, lambda: (out / "broken").exists())
    assert "another process is working in" in script("03_extract", *flags(prepared, tiny, out), code=2, **SETTINGS)
    told = again.communicate(timeout=900)[0]
    assert again.returncode == 0 and f"3 broken, {40 - len(rows)} missing, {len(rows) - 3} whole" in told, told
    assert contents(out) == wanted
    assert sorted(p.name for p in (out / "broken").iterdir()) == sorted(f"hs_{row}.safetensors" for row in (cut, empty, flip))
    assert {p.name for p in out.iterdir() if p.name.startswith(".")} == {".lock"}
