"""One stage: resume, refuse, finish.  A toy stage of our own runs as a process, is killed, changed, moved and filled up.

Example
    python -m pytest tests/test_stage.py
"""
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import settings
import stage
from conftest import STAGES

ROOT = Path(__file__).resolve().parents[1]
ROWS = 12
TOY = '''
"""Write --rows files, PAUSE seconds and SIZE bytes each."""
import os, subprocess, sys, time
from pathlib import Path
import progress, stage

def main():
    p = stage.arguments(__doc__)
    p.add_argument("--source", type=Path, required=True)
    p.add_argument("--more", type=Path, nargs="+")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--rows", type=int, default=12)
    p.add_argument("--lr", type=float, default=0.001)
    p.add_argument("--layers", type=lambda t: [int(i) for i in t.split(",")], default=None)
    args = p.parse_args()
    out = stage.begin(args)
    if os.environ.get("CHILD"):
        subprocess.Popen(["sleep", "10"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wanted = [out / f"row-{row}" for row in range(args.rows)]
    missing = [file for file in wanted if not file.exists()]
    progress.phase("writing", args.rows, "row", done=args.rows - len(missing))
    for file in missing:
        stage.check_stop()
        with open(os.environ["COMPUTED"], "a") as computed:
            computed.write(f"{file.name}\\n")
        time.sleep(float(os.environ.get("PAUSE", 0)))
        stage.write(file, f"{file.name} {args.lr}".ljust(int(os.environ.get("SIZE", 20))))
        progress.advance(file=file.name)
    if os.environ.get("BREAK"):
        raise ValueError("a fault of our own")
    lost = int(os.environ.get("LOST", 0))
    stage.finish(out, args.rows + 2, args.rows - lost, {"too long": 2, "never": 0}, colour="blue")

if os.environ.get("DIE_AT"):  # at the N-th rename, every finished file's last step
    rename, left = os.replace, [int(os.environ["DIE_AT"])]
    def replace(*names):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), 9)
        rename(*names)
    os.replace = replace
stage.run(main)
'''


class Toy:
    """The toy script with a model directory to read and runs/toy to write."""

    def __init__(self, root, environment):
        self.root, self.environment, self.script = root, environment, root / "toy.py"
        self.script.write_text(TOY)
        self.model = root / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "weights.bin").write_bytes(b"w" * 10_000)
        self.out = root / "runs" / "toy"
        self.computed = root / "computed"

    def start(self, *flags, out=None, source=None, **settings):
        command = [sys.executable, self.script, "--source", source or self.model, "--out", out or self.out, *flags]
        env = self.environment | {"COMPUTED": str(self.computed)} | {k: str(v) for k, v in settings.items() if k != "preexec_fn"}
        return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                preexec_fn=settings.get("preexec_fn"))

    def run(self, *flags, **settings):
        """Run to the end: exit code, everything printed."""
        return self.end(self.start(*flags, **settings))

    def end(self, process):
        out, err = process.communicate(timeout=60)
        return process.returncode, out + err

    def rows(self, out=None):
        return {p.name: p.read_bytes() for p in (out or self.out).glob("row-*")}


@pytest.fixture
def toy(tmp_path, environment):
    return Toy(tmp_path, environment)


def until(condition, process=None):
    """Wait until the condition holds, the process has ended, or a minute has passed (a fault)."""
    deadline = time.monotonic() + 60
    while not condition() and (process is None or process.poll() is None):
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.002)


def contents(*folders):
    """Every file with its bytes and its time; the lock, which is no content, aside."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for folder in folders for p in sorted(folder.rglob("*"))
            if p.is_file() and p.name != ".lock"}


def assert_refused(result, *words):
    """Exit code 2 and one line, which holds the words."""
    code, text = result
    lines = text.splitlines()
    assert code == 2 and len(lines) == 1 and "refused: " in lines[0], text
    for word in words:
        assert word in lines[0], f"{word} is not in: {lines[0]}"


# --- resume -----------------------------------------------------------------------------------------------------------

def test_kills_at_random_moments_change_nothing_in_the_result(toy):
    code, _ = toy.run(out=toy.root / "uninterrupted", SIZE=100_000)
    assert code == 0
    toy.computed.unlink()
    kills = 0
    while not (toy.out / "done.json").exists():
        had = len(toy.rows())
        process = toy.start(SIZE=100_000, PAUSE=0.05)
        until(lambda: len(toy.rows()) > had, process)
        time.sleep(random.uniform(0, 0.15))
        kills += process.poll() is None
        process.kill()
        toy.end(process)
    assert kills >= 2
    assert toy.rows() == toy.rows(toy.root / "uninterrupted")
    computed = toy.computed.read_text().split()
    assert set(computed) == set(toy.rows()) and len(computed) <= ROWS + kills  # a kill costs the row in work, no other


@pytest.mark.parametrize("moment", [1, 2, 3, 5, 9])
def test_a_kill_just_before_a_file_gets_its_name_is_survived(toy, moment):
    code, _ = toy.run(DIE_AT=moment)
    assert code == -signal.SIGKILL and not (toy.out / "done.json").exists()
    code, text = toy.run()
    assert code == 0 and len(toy.rows()) == ROWS, text


def test_a_finished_stage_run_again_computes_nothing(toy):
    toy.run()
    done = (toy.out / "done.json").read_text().replace("blue", "as it was")
    (toy.out / "done.json").write_text(done)
    before, computed = contents(toy.out), toy.computed.read_text()
    code, text = toy.run()
    assert code == 0 and "done already" in text and text.count("\n") == 1
    assert (toy.out / "done.json").read_text() == done and toy.computed.read_text() == computed
    assert contents(toy.out).keys() == before.keys()
    assert (toy.out / "done.json").stat().st_mtime_ns > before[toy.out / "done.json"][1]  # so that make is content


def test_an_equivalent_spelling_is_the_same_command(toy):
    toy.run("--lr", "0.001", "--layers", "1,2")
    assert (toy.out / "args").read_text().split("\n")[0] == "<--lr 0.001 --layers 1,2>"
    before = (toy.out / "args").read_text().split("\n")[1:], (toy.out / "done.json").read_text(), toy.rows()
    code, text = toy.run("--layers=1,2", "--lr=1e-3")
    assert code == 0 and "done already" in text
    assert (toy.out / "args").read_text().split("\n")[0] == "<--layers=1,2 --lr=1e-3>"  # what make will compare next time
    assert before == ((toy.out / "args").read_text().split("\n")[1:], (toy.out / "done.json").read_text(), toy.rows())


def test_a_directory_that_was_moved_goes_on_and_is_still_finished(toy):
    process = toy.start(PAUSE=0.3)
    until(lambda: toy.rows(), process)
    process.kill()
    toy.end(process)
    elsewhere = toy.root / "another disk"
    shutil.move(toy.root / "runs", elsewhere)
    shutil.move(toy.model, elsewhere / "renamed model")
    code, text = toy.run(out=elsewhere / "toy", source=elsewhere / "renamed model")
    assert code == 0 and re.search(r"writing: [1-9]\d? of 12 rows done", text), text
    shutil.move(elsewhere, toy.root / "third")
    code, text = toy.run(out=toy.root / "third" / "toy", source=toy.root / "third" / "renamed model")
    assert code == 0 and "done already" in text
    for path, (data, _) in contents(toy.root / "third").items():
        assert str(toy.root).encode() not in data, f"{path} holds an absolute path"


# --- refuse -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("text, wanted", [("1200", 1200), ("90s", 90), ("20m", 1200), ("1.5h", 5400), ("0", 0), ("", 7)])
def test_a_machine_setting_that_is_a_time_has_units(monkeypatch, text, wanted):
    monkeypatch.setenv("SAVE_EVERY", text)
    assert settings.number("SAVE_EVERY", 7, time="s") == wanted


@pytest.mark.parametrize("machines, node, found", [("", "", (0, 1)), ("2", "1", (1, 2)), ("1", "1", (0, 1)), ("2", "2", None)])
def test_a_machine_is_one_of_those_that_there_are(monkeypatch, machines, node, found):
    monkeypatch.setenv("NNODES", machines)
    monkeypatch.setenv("NODE_RANK", node)
    if found:
        assert stage.nodes() == found
    else:
        with pytest.raises(stage.Refused, match="NODE_RANK=2: there are 2 nodes"):
            stage.nodes()


@pytest.mark.parametrize("text", ["2.5", "inf", "0"])
def test_of_what_is_counted_a_whole_number_is_wanted(monkeypatch, text):
    monkeypatch.setenv("CONCURRENCY", text)
    with pytest.raises(stage.Refused, match=f"CONCURRENCY={text}: wanted a"):
        settings.whole("CONCURRENCY", 7, least=1)
    monkeypatch.setenv("CONCURRENCY", "64")
    assert settings.whole("CONCURRENCY", 7, least=1) == 64


def test_a_time_in_minutes_may_name_another_unit(monkeypatch):
    for text in ("30", "30m", "1800s", "0.5h"):
        monkeypatch.setenv("STALL_EXIT", text)
        assert settings.number("STALL_EXIT", "inf", time="m") == 1800
    monkeypatch.delenv("STALL_EXIT")
    assert settings.number("STALL_EXIT", "inf", time="m") == float("inf")


@pytest.mark.parametrize("text", ["20 minutes", "m", "x", "nan", "-1", "0x10", "20m"])
def test_a_machine_setting_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("CONCURRENCY", text)
    with pytest.raises(stage.Refused, match=f"CONCURRENCY={text}: wanted a number, 0 or more"):
        settings.number("CONCURRENCY", 7)


@pytest.mark.parametrize("name", ["LOG_EVERY", "STALL_AFTER", "STALL_EXIT"])
def test_a_stage_refuses_a_machine_setting_that_is_none(toy, name):
    assert_refused(toy.run(**{name: "often"}), f"{name}=often: wanted a time")
    assert not toy.computed.exists()


@pytest.mark.parametrize("flag", ["--answer-tokens", "--max-seq-len", "--epochs", "--ttt-steps", "--eval-rows", "--eval-concurrency"])
def test_a_stage_wants_one_or_more_of_what_it_counts(flag, parsed, capsys):
    [script] = [path for path in STAGES if flag in path.read_text()]
    with pytest.raises(SystemExit) as end:
        parsed(script, [flag, 0])
    assert end.value.code == 2 and "0: wanted 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("flag, value", [("--lr", "-0.1"), ("--lr", "inf"), ("--lr", "nan"), ("--rows", "-3"), ("--layers", "2,-1")])
def test_a_number_below_zero_or_without_end_is_refused_before_anything_is_written(toy, flag, value):
    assert_refused(toy.run(f"{flag}={value}"), flag, "wanted a number, 0 or more")
    assert not toy.out.exists()


@pytest.mark.parametrize("state", ["unfinished", "finished"])
def test_a_changed_flag_is_refused_with_both_values(toy, state):
    toy.run("--lr", "0.25", BREAK=1 if state == "unfinished" else "")
    assert (toy.out / "done.json").exists() == (state == "finished")
    before = contents(toy.root)
    assert_refused(toy.run("--lr", "0.5"), str(toy.out), "then: --lr 0.25", "now: --lr 0.5", "REDO=1", "NAME")
    assert_refused(toy.run(), "then: --lr 0.25", "now: --lr 0.001")
    assert contents(toy.root) == before


def test_a_changed_default_is_a_changed_flag(toy):
    toy.run()
    before = contents(toy.out)
    toy.script.write_text(TOY.replace("default=0.001", "default=0.002"))
    assert_refused(toy.run(), "then: --lr 0.001", "now: --lr 0.002")
    toy.script.write_text(TOY.replace('"--lr"', '"--rate"'))
    assert_refused(toy.run(), "then: --lr 0.001", "now: --rate 0.001")
    assert contents(toy.out) == before


def test_redo_moves_the_old_result_aside_whole(toy):
    toy.run("--lr", "0.25")
    old = contents(toy.out)
    code, text = toy.run("--lr", "0.5", REDO=1)
    assert code == 0 and b"0.5" in toy.rows()["row-0"] and len(toy.rows()) == ROWS, text
    aside, = set(toy.out.parent.iterdir()) - {toy.out}
    assert str(aside) in text and contents(aside) == {aside / p.name: kept for p, kept in old.items()}
    code, text = toy.run("--lr", "0.5")
    assert code == 0 and "done already" in text


def test_two_redos_in_one_second_keep_both_results(toy):
    toy.run("--lr", "0.25")
    for second in range(60):  # as if an earlier REDO had happened in whichever second this one comes
        taken = toy.out.with_name(time.strftime("toy.%Y%m%d-%H%M%S", time.localtime(time.time() + second)))
        taken.mkdir()
        (taken / "row-0").write_text("older")
    code, text = toy.run("--lr", "0.5", REDO=1)
    assert code == 0 and "Traceback" not in text


def test_redo_without_a_change_keeps_a_finished_stage(toy):
    toy.run()
    computed = toy.computed.read_text()
    code, text = toy.run(REDO=1)
    assert code == 0 and "done already" in text and toy.computed.read_text() == computed
    assert [p.name for p in toy.out.parent.iterdir()] == ["toy"]


def test_an_upstream_that_was_rebuilt_is_refused(toy):
    upstream = toy.root / "runs" / "upstream"
    toy.run(out=upstream)
    toy.run(source=upstream)
    before = contents(toy.out)
    code, _ = toy.run("--rows", "3", out=upstream, REDO=1)
    assert code == 0
    assert_refused(toy.run(source=upstream), "then: source", "now: source")
    assert contents(toy.out) == before
    code, text = toy.run(source=upstream, REDO=1)
    assert code == 0, text


def test_every_file_of_a_list_of_inputs_counts(toy):
    one, two = toy.root / "one.jsonl", toy.root / "two.jsonl"
    one.write_text("1"), two.write_text("2")
    toy.run("--more", one, two)
    assert (toy.out / "args").read_text().split("\n")[0] == "<>"
    code, text = toy.run("--more", one, two)
    assert code == 0, text
    assert_refused(toy.run("--more", two, one), "then: more", "now: more")
    assert_refused(toy.run("--more", one), "then: more", "now: more")
    two.write_text("3")
    assert_refused(toy.run("--more", one, two), "then: more", "now: more")


def test_an_upstream_that_is_missing_or_unfinished_is_refused(toy):
    assert_refused(toy.run(source=toy.root / "nowhere"), str(toy.root / "nowhere"), "does not exist")
    assert not toy.out.parent.exists()
    upstream = toy.root / "runs" / "upstream"
    toy.run(out=upstream, BREAK=1)
    assert_refused(toy.run(source=upstream), str(upstream), "done.json")
    assert not toy.out.exists()


def test_files_of_unknown_origin_are_left_alone(toy):
    toy.out.mkdir(parents=True)
    (toy.out / "thesis.txt").write_text("years of work")
    assert_refused(toy.run(), str(toy.out), "no record")
    assert_refused(toy.run(REDO=1), str(toy.out), "no record")
    assert [p.name for p in toy.out.iterdir() if p.name != ".lock"] == ["thesis.txt"]
    assert (toy.out / "thesis.txt").read_text() == "years of work"


def test_a_second_process_on_the_same_directory_is_refused_until_the_first_is_dead(toy):
    first = toy.start(PAUSE=30, CHILD=1)  # its child outlives it and must not hold the directory
    try:
        until(toy.computed.exists, first)
        assert_refused(toy.run(), "another process", str(toy.out))
        assert_refused(toy.run("--lr", "0.5", REDO=1), "another process")
        assert first.poll() is None
    finally:
        first.kill()
        toy.end(first)
    code, text = toy.run()
    assert code == 0 and len(toy.rows()) == ROWS, text


def test_a_shortened_flag_leaves_no_path_in_the_record(toy):
    command = [sys.executable, toy.script, "--sour", toy.model, "--out", toy.out]
    subprocess.run(command, env=toy.environment | {"COMPUTED": str(toy.computed)}, capture_output=True)
    assert not toy.out.exists() or str(toy.model) not in (toy.out / "args").read_text()


# --- signals ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_at_the_safe_point_and_the_same_command_goes_on(toy, number, code):
    process = toy.start(PAUSE=0.4)
    until(lambda: toy.computed.exists(), process)  # inside the first row
    for _ in range(3):  # Ctrl-C reaches the whole group, a launcher repeats it: one wish
        process.send_signal(number)
        time.sleep(0.03)
    ended, text = toy.end(process)
    assert ended == code and "Traceback" not in text
    assert text.count("stopping at the next safe point") == 1
    assert re.search(rf"stopped by {number.name}; the same command goes on", text)
    started = toy.computed.read_text().split()
    assert started == sorted(toy.rows()), "a row was abandoned"
    assert not (toy.out / "done.json").exists()
    assert json.loads((toy.out / "progress.json").read_text())["done"] == len(started)
    ended, text = toy.run()
    assert ended == 0 and len(toy.computed.read_text().split()) == ROWS, text


@pytest.mark.slow
def test_a_signal_repeated_after_ten_seconds_stops_at_once(toy):
    process = toy.start(PAUSE=60)
    until(lambda: toy.computed.exists(), process)
    process.terminate()
    time.sleep(10.5)
    assert process.poll() is None
    process.terminate()
    code, text = toy.end(process)
    assert code == 143 and "stopping at once" in text


# --- finish -----------------------------------------------------------------------------------------------------------

def test_a_lost_row_fails_the_stage(toy):
    code, text = toy.run(LOST=1)
    assert code == 1 and "14 rows in, 11 out" in text and "unaccounted" in text
    assert not (toy.out / "done.json").exists()


def test_done_json_says_what_went_in_and_came_out(toy):
    code, text = toy.run()
    done = json.loads((toy.out / "done.json").read_text())
    assert (done["rows_in"], done["rows_out"], done["dropped"], done["colour"]) == (14, 12, {"too long": 2}, "blue")
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|unknown", done["commit"])
    assert (done["commit"] == "unknown") == (not (ROOT / ".git").exists())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", done["finished"])
    assert re.search(r"done: 14 rows in, 12 out, dropped 2 \(too long 2\); \d+s", text)


def test_done_json_counts_the_seconds_of_every_run(toy):
    process = toy.start(PAUSE=0.5)
    until(lambda: toy.rows(), process)
    process.terminate()
    toy.end(process)
    first = json.loads((toy.out / "progress.json").read_text())["seconds"]
    toy.run(PAUSE=0.05)
    assert json.loads((toy.out / "done.json").read_text())["seconds"] > first > 0


def test_outside_a_checkout_the_commit_is_unknown(toy):
    code = toy.root / "code" / "scripts"
    code.mkdir(parents=True)
    for name in ("stage.py", "progress.py", "settings.py", "eta.py", "waits.py"):
        shutil.copy(ROOT / "scripts" / name, code)
    toy.environment = toy.environment | {"PYTHONPATH": str(code), "GIT_CEILING_DIRECTORIES": str(toy.root)}
    ended, text = toy.run()
    assert ended == 0 and json.loads((toy.out / "done.json").read_text())["commit"] == "unknown", text


# --- a full disk ------------------------------------------------------------------------------------------------------

def assert_disk_full(toy, result, out):
    code, text = result
    refusals = [line for line in text.splitlines() if "refused: " in line]
    assert code == 2 and len(refusals) == 1 and "Traceback" not in text, text
    assert re.search("make room, then the same command goes on", refusals[0]), text
    assert not (out / "done.json").exists()
    assert all(len(data) == 200_000 for data in toy.rows(out).values()), "a half-written file has its final name"


def test_a_file_that_may_not_grow_ends_in_one_sentence(toy):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    assert_disk_full(toy, toy.run(SIZE=200_000, preexec_fn=limit), toy.out)
    code, text = toy.run(SIZE=200_000)
    assert code == 0 and len(toy.rows()) == ROWS, text


def test_a_full_disk_ends_in_one_sentence_and_room_lets_it_go_on(toy):
    disk = toy.root / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert_disk_full(toy, toy.run(SIZE=200_000, out=disk / "toy"), disk / "toy")
        assert toy.rows(disk / "toy")
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        code, text = toy.run(SIZE=200_000, out=disk / "toy")
        assert code == 0 and len(toy.rows(disk / "toy")) == ROWS, text
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_disk_that_was_full_from_the_start_lets_the_same_command_go_on(toy):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
    code, text = toy.run(preexec_fn=limit)
    assert code == 2 and "make room" in text
    code, text = toy.run()
    assert code == 0 and len(toy.rows()) == ROWS, text


# --- writing and identity ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size", [0, 1, 4096, 200_000, 299_999])
def test_write_leaves_the_old_content_whole_when_killed_in_its_midst(toy, size):
    path = toy.root / "file"
    path.write_text("old")
    script = ("import resource, signal, stage, pathlib\n"
              "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"  # the kernel kills at exactly this size
              f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
              f"stage.write(pathlib.Path({str(path)!r}), 'n' * 300_000)\n")
    killed = subprocess.run([sys.executable, "-c", script], env=toy.environment | {"PYTHONDONTWRITEBYTECODE": "1"})
    assert killed.returncode == -signal.SIGXFSZ
    assert path.read_text() == "old"
    stage.write(path, "new \u00e4")  # what the killed one left is in nobody's way
    assert path.read_bytes() == "new \u00e4".encode() and sorted(p.name for p in toy.root.glob("*file*")) == ["file"]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    with stage.directory(tmp_path / "data") as temporary:
        (temporary / "a").write_text("1")
        assert not (tmp_path / "data").exists()
    with pytest.raises(ValueError):
        with stage.directory(tmp_path / "data") as temporary:
            (temporary / "a").write_text("2")
            raise ValueError
    assert (tmp_path / "data" / "a").read_text() == "1"
    with stage.directory(tmp_path / "data") as temporary:
        (temporary / "b").write_text("3")
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["b"]


def test_a_directory_that_is_replaced_is_never_half_there(toy):
    script = toy.root / "replacer.py"
    script.write_text('''
import os, sys, pathlib, stage
unlink, deleted = os.unlink, []
def dying(*names, **options):
    if deleted:
        os.kill(os.getpid(), 9)
    deleted.append(names)
    unlink(*names, **options)
os.unlink = dying
for content in "old", "new":
    with stage.directory(pathlib.Path(sys.argv[1])) as temporary:
        for name in "abc":
            (temporary / name).write_text(content)
''')
    path = toy.root / "data"
    assert subprocess.run([sys.executable, script, path], env=toy.environment).returncode == -signal.SIGKILL
    found = {p.name: p.read_text() for p in path.iterdir()} if path.exists() else {}
    assert found in ({}, dict.fromkeys("abc", "old"), dict.fromkeys("abc", "new"))


def test_one_byte_in_the_middle_of_a_small_weight_file_changes_the_model(toy):
    before = stage.identity(toy.model)
    data = bytearray((toy.model / "weights.bin").read_bytes())
    data[5_000] ^= 1
    (toy.model / "weights.bin").write_bytes(data)
    changed = stage.identity(toy.model)
    assert changed != before
    (toy.model / ".cache").write_text("no part of the model")
    assert stage.identity(shutil.copytree(toy.model, toy.root / "copy")) == changed
    (toy.model / "weights.bin").rename(toy.model / "other.bin")
    assert stage.identity(toy.model) != changed


@pytest.mark.parametrize("place", [0, (17 << 20) - 1, "longer"])
def test_a_change_at_either_end_of_a_large_weight_file_changes_the_model(toy, place):
    size = 17 << 20  # beyond what is read whole
    with open(toy.model / "weights.bin", "wb") as file:
        file.truncate(size)
    before = stage.identity(toy.model)
    with open(toy.model / "weights.bin", "rb+") as file:
        file.seek(size if place == "longer" else place)
        file.write(b"\1")
    assert stage.identity(toy.model) != before


# --- secrets ----------------------------------------------------------------------------------------------------------

def test_the_api_key_is_in_no_file_and_no_line(toy):
    toy.environment = toy.environment | {"API_KEY": "canary-7f3a"}
    printed = ""
    for flags, settings in ((), {"BREAK": 1}), ((), {}), ((), {}), (("--lr", "3"), {}), (("--lr", "3"), {"REDO": 1}):
        code, text = toy.run(*flags, **settings)
        printed += text
    assert "a fault of our own" in printed and "done already" in printed and "refused" in printed
    assert "canary" not in printed
    assert not [path for path, (data, _) in contents(toy.root).items() if b"canary" in data]


def test_a_password_in_the_api_url_is_in_no_file_and_no_line(toy):
    (toy.root / "prompts.jsonl").write_text('{"prompt": "2 + 2?"}\n')
    process = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "01_generate.py", "--prompts", toy.root / "prompts.jsonl", "--model", toy.model,
         "--out", toy.out, "--api", "http://user:canary-7f3a@127.0.0.1:9/v1", "--api-model", "m"],
        env=toy.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: (toy.out / "args").exists(), process)
    process.kill()
    text = process.communicate()[0]
    assert "canary" not in text
    assert not [path for path, (data, _) in contents(toy.root).items() if b"canary" in data]
