"""The client and the store against a real HTTP server that writes states, and misbehaves: nothing wrong is published."""
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

import capture
import parity
import states
from api import each
from stage import Refused

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
H = 64


def start_server(model, staging, *flags):
    """A server process and its URL."""
    staging.mkdir(mode=0o700, exist_ok=True)
    process = subprocess.Popen([sys.executable, ROOT / "tests" / "states_server.py", model, staging, *flags], stdout=subprocess.PIPE,
                               text=True)
    return process, process.stdout.readline().strip()


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    staging = tmp_path_factory.mktemp("server") / "staging"
    process, url = start_server(tiny, staging)
    yield url, staging
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def rows():
    """What a dataset is to the client: rows with input_ids."""
    draw = random.Random(5)
    return [{"seq_len": n, "input_ids": [draw.randrange(3, 250) for _ in range(n)]} for n in [40, 17, 60, 25, *range(10, 46)]]


def fault(url, name, times=1):
    requests.post(url + "/fault", json={"fault": name, "times": times}, timeout=60)


@pytest.fixture
def client(server, tmp_path):
    """A client that has seen a sample, with an empty store."""
    url, staging = server
    fault(url, None, 0)
    store = states.Store(tmp_path, H)
    return capture.Client([url], staging, store)


@pytest.fixture(scope="module")
def head(tiny):
    return states.Head(tiny)


def keep(client, rows, row):
    with client.states(row, rows[row]["input_ids"]) as (path, _, _):
        client.store.publish(path, row)


def published(store):
    return {path.name for path in store.out.glob("hs_*")}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_are_published_with_a_record_each_and_nothing_stays_in_staging(client, rows, fp8):
    client.store.fp8 = fp8
    for _ in each(lambda row: keep(client, rows, row), range(len(rows)), 8):
        pass
    assert published(client.store) == {f"hs_{i}.safetensors" for i in range(len(rows))}
    assert not any(client.staging.iterdir()) and client.used == 0
    for row in range(len(rows)):
        found = states.check(states.file_of(client.store.out, row), rows[row]["input_ids"], H, fp8)
        size = states.file_of(client.store.out, row).stat().st_size
        assert states.decoded(found).shape == (rows[row]["seq_len"], 4, H)
        assert 0 <= client.store.bytes_of(rows[row]["seq_len"]) - size < 500  # what the disk is asked for before the start
    assert all(what == "whole" for _, what in states.Store(client.store.out, H).look(range(len(rows)), verify=True))


@pytest.mark.parametrize("name", ["nan", "zeros", "other ids", "too few", "cut", "empty", "header", "cached"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_wrong_file_is_refused_and_not_published(client, rows, head, name, fp8):
    client.store.fp8 = fp8
    parity.before(client, rows, head)
    fault(client.api.url, name)
    with pytest.raises(Refused) as refusal:
        keep(client, rows, 3)
    assert "\n" not in str(refusal.value) and ("hs" in str(refusal.value) or "row 3" in str(refusal.value))
    assert not published(client.store) and client.used == 0
    for left in client.staging.iterdir():  # the file of a row that was refused by its reply comes later
        left.unlink()
    keep(client, rows, 3)
    assert published(client.store) == {"hs_3.safetensors"}


def test_states_of_another_prompt_are_seen_by_the_next_token_and_by_the_sample_at_the_end(client, rows, head):
    parity.before(client, rows, head)
    with client.states(3, rows[3]["input_ids"]) as (path, data, reply):
        parity.next_token(path, data, reply, head)
    fault(client.api.url, "neighbour")
    with client.states(3, rows[3]["input_ids"]) as (path, data, reply), pytest.raises(Refused, match="next token"):
        parity.next_token(path, data, reply, head)
    for row in range(4):
        keep(client, rows, row)
    assert parity.after(client, rows, range(4), client.store)["error"] < 1e-6
    fault(client.api.url, "neighbour")
    keep(client, rows, 2)
    with pytest.raises(Refused, match="row 2"):
        parity.after(client, rows, range(4), client.store)


@pytest.mark.parametrize("name", ["neighbour", "too few"])
def test_a_server_whose_states_are_others_is_refused_before_the_first_row(client, rows, head, name):
    fault(client.api.url, name, times=4)
    with pytest.raises(Refused):
        parity.before(client, rows, head)


def test_what_fp8_costs_is_measured_on_the_sample(client, rows, head):
    client.store.fp8 = True
    report, found = parity.before(client, rows, head)
    assert 0 < report["fp8"]["kl"] < 0.05 and 0.85 < report["fp8"]["top1_agreement"] <= 1
    assert all(hidden.dtype.itemsize == 2 for hidden in found.values())  # the sample itself comes in bf16


def test_a_row_that_the_server_could_not_write_is_asked_for_again(client, rows):
    fault(client.api.url, "refuses", times=2)
    keep(client, rows, 0)
    assert published(client.store) == {"hs_0.safetensors"}


def test_a_row_that_the_server_never_can_write_is_refused_with_its_sentence(client, rows):
    fault(client.api.url, "refuses", times=99)
    with pytest.raises(Refused, match="row 0: the disk is on fire"):
        keep(client, rows, 0)
    assert not published(client.store) and not any(client.staging.iterdir())


def test_a_reply_without_states_is_given_up(client, rows, monkeypatch):
    monkeypatch.setattr(capture, "DEADLINE", 0.5)
    fault(client.api.url, "silent")
    with pytest.raises(Refused, match="wrote no states"):
        keep(client, rows, 0)


def size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:  # published meanwhile
        return 0


def test_what_is_in_flight_stays_within_the_window(client, rows):
    client.window = 3 * client.store.bytes_of(45)
    fault(client.api.url, "slow", times=99)
    seen = []

    def watched(row):
        with client.states(row, rows[row]["input_ids"]) as (path, _, _):
            seen.append((client.used, sum(map(size, client.staging.glob("hs*")))))
            client.store.publish(path, row)

    for _ in each(watched, range(4, 34), 12):
        pass
    assert max(used for used, _ in seen) > client.window / 2
    assert all(used <= client.window and there <= client.window + 3000 for used, there in seen)


def test_rows_of_a_server_that_dies_go_to_the_others(tiny, server, rows, tmp_path):
    url, staging = server
    other, other_url = start_server(tiny, staging)
    fault(url, None, 0)
    client = capture.Client([url, other_url], staging, states.Store(tmp_path, H))
    done = []
    for _ in each(lambda row: keep(client, rows, row), range(len(rows)), 6):
        done.append(1)
        if len(done) == 8:
            fault(other_url, "dies")
    other.wait(60)
    assert len(published(client.store)) == len(rows)


def test_a_server_that_dies_after_its_reply_is_not_waited_for(tiny, rows, tmp_path):
    process, url = start_server(tiny, tmp_path / "staging")
    client = capture.Client([url], tmp_path / "staging", states.Store(tmp_path, H))
    fault(url, "silent")
    with ThreadPoolExecutor(1) as pool:
        kept = pool.submit(keep, client, rows, 0)
        time.sleep(2)
        assert not kept.done()
        process.kill()
        process.wait()
        assert "failed 3 times in a row" in str(kept.exception(capture.DEADLINE / 5))


def test_the_last_server_that_dies_is_told(tiny, rows, tmp_path):
    process, url = start_server(tiny, tmp_path / "staging")
    client = capture.Client([url], tmp_path / "staging", states.Store(tmp_path, H))
    keep(client, rows, 0)
    process.kill()
    process.wait()
    with pytest.raises(Refused, match="failed .* times in a row"):
        keep(client, rows, 1)


# --- the store --------------------------------------------------------------------------------------------------------

def filled(client, rows, n=8):
    for row in range(n):
        keep(client, rows, row)
    return client.store.out


@pytest.mark.parametrize("change, sure", [(lambda data: b"", True), (lambda data: data[:20], True), (lambda data: data[:-5], True),
                                          (lambda data: data + b"\0" * 5, True),
                                          (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], False)],
                         ids=["empty", "cut in the header", "5 bytes short", "trailing bytes", "one bit flipped"])
def test_broken_files_are_put_aside_and_only_they_are_missing(client, rows, change, sure):
    out = filled(client, rows)
    before = {p.name: p.stat().st_mtime_ns for p in out.glob("hs_*")}
    path = states.file_of(out, 5)
    broken = change(path.read_bytes())
    path.write_bytes(broken)
    states.file_of(out, 2).unlink()
    if not sure:  # the size is right: only the checksum tells
        assert states.Store(out, H).missing(range(8), rows) == [2]
    assert states.Store(out, H).missing(range(8), rows, verify=True) == [2, 5]
    assert (out / "broken" / "hs_5.safetensors").read_bytes() == broken and not path.exists()
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("hs_*")} == {k: v for k, v in before.items() if k[3] not in "25"}
    for row in (2, 5):
        keep(client, rows, row)
    assert states.Store(out, H).missing(range(8), rows, verify=True) == []


def test_a_file_without_a_record_is_read_in_full_and_then_has_one(client, rows):
    out = filled(client, rows)
    (out / "manifest-1.jsonl").unlink()
    path = states.file_of(out, 3)
    path.write_bytes(path.read_bytes()[:-5])
    other = states.file_of(out, 4)
    shutil.copy(states.file_of(out, 7), other)  # whole, but another row's
    assert states.Store(out, H).missing(range(8), rows) == [3, 4]
    assert [what for _, what in states.Store(out, H).look(range(8), verify=True)].count("whole") == 6


@pytest.mark.parametrize("tail", [b'{"row": 3, "si', b"\xff\xfe\n", b"null\n", b"[1]\n", b'{"row": 3}\n'])
def test_a_torn_manifest_costs_a_look_and_no_row(client, rows, tail):
    out = filled(client, rows)
    with open(out / "manifest-1.jsonl", "ab") as file:
        file.write(tail)
    assert states.Store(out, H).missing(range(8), rows) == []


def test_workers_files_are_known_by_whoever_looks(client, rows):
    out = client.store.out
    for worker in (1, 2):
        client.store = states.Store(out, H, worker=worker)
        for row in range(worker - 1, 8, 2):
            keep(client, rows, row)
    assert len((out / "manifest-1.jsonl").read_text().splitlines()) == len((out / "manifest-2.jsonl").read_text().splitlines()) == 4
    assert states.Store(out, H).missing(range(8), rows, verify=True) == []


def test_a_resume_opens_no_file_that_its_manifest_knows(tmp_path):
    source = tmp_path / "one"
    source.write_bytes(os.urandom(600))
    store = states.Store(tmp_path, H)
    for row in range(20_000):
        store.record(row, source)
        os.link(source, states.file_of(tmp_path, row))
    opened, watching = [], True
    sys.addaudithook(lambda event, args: watching and event == "open" and opened.append(str(args[0])))
    found = [what for _, what in states.Store(tmp_path, H).look(range(20_000))]
    watching = False
    assert found == ["whole"] * 20_000 and any("manifest" in name for name in opened)
    assert not any("hs_" in name for name in opened)


WRITER = """
import os, sys, itertools
from pathlib import Path
import states

out, staging = map(Path, sys.argv[1:])
store = states.Store(out, 64, fsync=False)
data = os.urandom(1 << 22)
for row in itertools.count(len(list(out.glob("hs_*")))):
    source = staging / "fresh"
    source.write_bytes(row.to_bytes(8, "little") + data)
    store.publish(source, row)
    print(row, flush=True)
"""


@pytest.mark.parametrize("staging", ["same disk", "another"])
def test_a_kill_in_the_middle_of_publishing_leaves_whole_files_only(tmp_path, staging):
    out = tmp_path / "out"
    out.mkdir()
    where = tmp_path / "staging" if staging == "same disk" else Path("/dev/shm") / f"eaglet-test-{os.getpid()}"
    where.mkdir()
    if staging == "another" and where.stat().st_dev == out.stat().st_dev:
        pytest.skip("/dev/shm is the same file system")
    seed = time.time_ns()
    print("seed", seed)
    draw, told = random.Random(seed), set()
    try:
        for _ in range(8):
            process = subprocess.Popen([sys.executable, "-c", WRITER, out, where], stdout=subprocess.PIPE, text=True,
                                       env={**os.environ, "PYTHONPATH": str(ROOT / "scripts")})
            told.add(int(process.stdout.readline()))
            time.sleep(draw.random() * 0.2)
            process.send_signal(signal.SIGKILL)
            told |= {int(line) for line in process.stdout.read().split("\n")[:-1]}
            process.wait()
            rows = sorted(int(p.name[3:-12]) for p in out.glob("hs_*"))
            found = dict(states.Store(out, 64).look(range(max(rows) + 1), verify=True))
            assert set(found.values()) == {"whole"} and told <= set(rows)  # what was told is there, what is there is right
            assert len({p.stat().st_size for p in out.glob("hs_*")}) == 1
    finally:
        shutil.rmtree(where)
