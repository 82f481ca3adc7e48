"""What make would run, asked with `make -n` and `make plan` in a copy of the checkout; no stage is run.

Example
    python -m pytest tests/test_makefile.py
"""
import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stage
from conftest import ROOT, STAGES

ALL = ["01", "02", "03", "04", "05"]
FINISH = 'case "$*" in *--out*) while [ "$1" != --out ]; do shift; done; mkdir -p "$2"; touch "$2/done.json";; esac\n'
TARGETS = sorted(p for p in (ROOT / "env").glob("*.env") if p.name != "local.env")


class Checkout:
    """A copy of what make reads, on a machine that is set up; PYTHON is a program that notes its call and ends well, but for
    plan.py, which it runs."""

    def __init__(self, root, environment):
        self.root, self.environment, self.runs, self.called = root, environment, root / "tmp" / "runs", root / "called"
        for name in ("Makefile", "env", "scripts", "patches"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        (root / "env" / "local.env").unlink(missing_ok=True)  # the user's own machine
        for name in (".venv/cpu", ".venv/cuda", "models/smollm2-135m/config.json", "models/humaneval.jsonl"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        for tool in ("python", "python3", "pip", "nohup", "setsid"):  # whatever a recipe would start
            program = root / "bin" / tool
            program.parent.mkdir(exist_ok=True)
            program.write_text(f'#!/bin/sh\n[ "$1" != scripts/plan.py ] || exec {sys.executable} -B "$@"\n'
                               f'echo "$0 $*" >> "{self.called}"\nenv >> "{self.called}"\n')
            program.chmod(0o755)

    def make(self, *words, **environment):
        path = f"{self.root}/bin:{os.environ['PATH']}"
        return subprocess.run(["make", f"PYTHON={self.root}/bin/python", f"RUNS={self.runs}", *words], cwd=self.root, text=True,
                              capture_output=True, env=self.environment | {"PATH": path} | environment, timeout=60)

    def commands(self, *words, **environment):
        """The numbered stages that `make all` would run: {number: its words, the script first}."""
        result = self.make("-n", "all", *words, **environment)
        assert result.returncode == 0, result.stderr
        lines = [shlex.split(line)[1:] for line in result.stdout.splitlines() if re.search(r"scripts/\d\d_", line)]
        numbers = [Path(words[0]).name[:2] for words in lines]
        assert len(set(numbers)) == len(numbers)
        return dict(zip(numbers, lines))

    def plan(self, *words, **environment):
        return list(self.commands(*words, **environment))

    def files(self):
        return {p: p.is_file() and (p.read_bytes(), p.stat().st_mtime_ns) for p in self.root.rglob("*")}


@pytest.fixture
def checkout(tmp_path, environment):
    return Checkout(tmp_path, environment)


@pytest.fixture
def finished(checkout, parsed):
    """A checkout whose every stage is done with the defaults: args as stage.py writes its first line, and done.json."""
    for script, *words in checkout.commands().values():
        values = parsed(ROOT / script, words)
        values["out"].mkdir(parents=True)
        (values["out"] / "args").write_text(f"<{stage.typed(words, values)}>\n--rest of the record\n")
        (values["out"] / "done.json").write_text("{}")
    return checkout


# --- what is run ------------------------------------------------------------------------------------------------------

def test_a_fresh_tree_runs_every_stage_in_order(checkout):
    assert checkout.plan() == ALL


def test_a_finished_tree_runs_nothing(finished):
    assert finished.plan() == []
    assert finished.make("plan").stdout == "nothing to do\n"


@pytest.mark.parametrize("setting, stages", [
    ("LR=7e-3", ["04", "05"]),
    ("DRAFT_VOCAB=77", ["04", "05"]),
    ("NAME=other", ["04", "05"]),
    ("EVAL_ROWS=7", ["05"]),
    ("EXTRACT_DTYPE=float16", ["03", "04", "05"]),
    ("DTYPE=fp8", ["03", "04", "05"]),
    ("MAX_SEQ_LEN=77", ["02", "03", "04", "05"]),
    ("LONG_ROWS=split", ["02", "03", "04", "05"]),
    ("DRAFT_COVERAGE=0.995", ["04", "05"]),
    ("ANSWER_TOKENS=77", ALL),
    ("PROMPTS=self:7", ALL),
    ("TEMPERATURE=", ALL),
    ("DATA=other", ALL),
])
def test_a_setting_reruns_its_stage_and_what_follows(finished, setting, stages):
    assert finished.plan(setting) == stages


def test_a_setting_that_only_starts_alike_is_another_setting(finished):
    """`1024` stands within `10240`: what was made with one must not pass for the other."""
    args, = finished.runs.glob("*/*/*/04_train/args")
    args.write_text(args.read_text().replace("--batch-tokens 1024", "--batch-tokens 10240"))
    assert finished.plan() == ["04", "05"]


@pytest.mark.parametrize("number", ALL)
def test_a_stage_that_was_done_again_reruns_what_follows(finished, number):
    done, = finished.runs.glob(f"**/{number}_*/done.json")
    newest = max(p.stat().st_mtime_ns for p in finished.runs.rglob("done.json"))
    os.utime(done, ns=(newest + 1, newest + 1))
    assert finished.plan() == [n for n in ALL if n > number]
    done.unlink()
    assert finished.plan() == [n for n in ALL if n >= number]


def test_a_file_of_prompts_is_an_input_and_no_setting(finished):
    prompts, (args,) = finished.root / "prompts.jsonl", finished.runs.rglob("01_generate/args")
    prompts.write_text("{}\n")
    os.utime(prompts, ns=(0, 0))
    words = finished.commands(f"PROMPTS={prompts}")["01"]
    assert words[words.index("--prompts") + 1] == str(prompts) and words.count("--prompts") == 1
    args.write_text(re.sub(r"--prompts self:\d+ ", "", args.read_text()))
    os.utime(args.parent / "done.json", ns=(1, 1))
    assert finished.plan(f"PROMPTS={prompts}") == []
    os.utime(prompts)
    assert finished.plan(f"PROMPTS={prompts}") == ALL


def test_code_and_machine_rerun_nothing(finished):
    for path in [*finished.root.glob("scripts/*.py"), finished.root / "Makefile", *finished.root.glob("env/*.env")]:
        os.utime(path)
    assert finished.plan("NPROC=4", "PORT=31000", "CONCURRENCY=9", "CUDA_VISIBLE_DEVICES=1") == []


def test_a_tree_that_was_moved_is_still_finished(finished):
    finished.runs = finished.runs.rename(finished.root / "elsewhere")
    assert finished.plan() == []


def test_planning_changes_nothing_on_disk(finished):
    before = finished.files()
    for words in ([], ["LR=7"], ["DATA=other"], ["TARGET=smollm2-135m", "NAME=other"]):
        finished.plan(*words)
        assert finished.make("plan", *words).returncode == 0
    assert finished.files() == before and not finished.called.exists()


def test_a_sample_is_shown_by_its_number(checkout):
    result = checkout.make("show", "ROW=7")
    assert result.returncode == 0, result.stderr
    assert re.search(r"scripts/show.py --tokens \S+/02_prepare --model models/smollm2-135m --row 7\n", checkout.called.read_text())


def test_plan_shows_the_commands_of_its_goal_only(checkout):
    result = checkout.make("plan", "GOAL=prepare", "LR=7e-3")
    assert re.findall(r"scripts/(\d\d)", result.stdout) == ["01", "02"] and "make" not in result.stdout
    assert "--lr 7e-3" in checkout.make("plan", "LR=7e-3").stdout


@pytest.mark.parametrize("words", [["GOAL=nonsense"], ["PROMPTS=missing.jsonl"]])
def test_a_plan_that_cannot_be_made_does_not_say_nothing_to_do(checkout, words):
    result = checkout.make("plan", *words)
    assert "No rule to make target" in result.stderr
    assert result.returncode != 0 and "nothing to do" not in result.stdout


def test_a_failed_stage_fails_make_and_stops_what_follows(checkout):
    program = checkout.root / "bin" / "python"
    program.write_text(program.read_text() + 'case "$*" in *02_prepare.py*) exit 3;; esac\n' + FINISH)
    result = checkout.make("all")
    assert result.returncode != 0
    assert re.findall(r"/python scripts/(\d\d)", checkout.called.read_text()) == ["01", "02"]
    assert not list(checkout.runs.rglob("02_prepare/done.json"))


def test_parallel_make_runs_each_stage_once_and_in_order(checkout):
    program = checkout.root / "bin" / "python"
    program.write_text(program.read_text() + FINISH)
    result = checkout.make("-j4", "all", "train", "eval", "prepare")
    assert result.returncode == 0, result.stderr
    assert re.findall(r"/python scripts/(\d\d)", checkout.called.read_text()) == ALL


def test_the_doctor_is_asked_before_the_first_stage_of_all_alone(checkout):
    program = checkout.root / "bin" / "python"
    program.write_text(program.read_text() + 'case "$*" in *doctor.py*) cat > "$0.asked"; exit 2;; esac\n' + FINISH)
    called = lambda: re.findall(r"/python scripts/(\d\d|doctor)", checkout.called.read_text())
    assert checkout.make("all").returncode != 0 and called() == ["doctor"] and not checkout.runs.exists()
    assert re.findall(r"scripts/(\d\d)_", (checkout.root / "bin" / "python.asked").read_text()) == ALL
    assert "doctor.py --keep" in checkout.called.read_text()
    checkout.called.unlink()
    checkout.make("doctor")
    assert called() == ["doctor"] and "--keep" not in checkout.called.read_text()
    checkout.called.unlink()
    assert checkout.make("prepare").returncode == 0 and called() == ["01", "02"]
    program.write_text(program.read_text().replace("exit 2", '[ "$FORCE" = 1 ]; exit'))
    checkout.called.unlink()
    assert checkout.make("-j4", "all", "FORCE=1").returncode == 0 and called() == ["doctor", *ALL]


# --- settings ---------------------------------------------------------------------------------------------------------

def flags(parsed, commands):
    """{script: (flags that say what, flags that say where)}, by the kind of their values."""
    found = {}
    for script, *words in commands.values():
        values = parsed(ROOT / script, words)
        where = {k for k, v in values.items() if isinstance(v[0] if isinstance(v, list) and v else v, Path)}
        found[script] = (set(values) - where, where)
    return found


def test_every_flag_that_says_what_is_passed_on_from_its_make_variable(checkout, parsed):
    kinds = flags(parsed, checkout.commands())
    names = sorted(set().union(*(what for what, _ in kinds.values())))
    assert len(names) > 15
    values = {name: f"value-{k}" for k, name in enumerate(names)} | {"prompts": "self:77"}
    commands = checkout.commands(*[f"{name.upper()}={value}" for name, value in values.items()])
    for script, *words in commands.values():
        for name in kinds[script][0]:
            flag = "--" + name.replace("_", "-")
            assert words.count(flag) == 1, f"make passes no {flag} to {script}"
            assert words[words.index(flag) + 1] == values[name], f"{flag} of {script}"


def test_no_flag_is_passed_that_nobody_set(checkout):
    (checkout.root / "env" / "bare.env").write_text("MODEL=models/smollm2-135m\nPROMPTS=self:3\n")
    passed = [word for words in checkout.commands("TARGET=bare").values() for word in words if word.startswith("--")]
    assert sorted(set(passed)) == ["--answers", "--draft", "--eval-prompts", "--model", "--out", "--prompts", "--states", "--tokens"]


def test_flags_that_say_what_have_names_of_their_own(checkout, parsed):
    kinds = list(flags(parsed, checkout.commands()).values())
    what = [name for names, _ in kinds for name in names]
    where = set().union(*(names for _, names in kinds))
    assert sorted(what) == sorted(set(what)) and not where & set(what)
    assert all({"model", "out"} <= names for _, names in kinds)


def test_the_process_environment_sets_nothing(finished, parsed):
    names = set().union(*(what for what, _ in flags(parsed, finished.commands("NAME=x", "DATA=x")).values()))
    environment = {name.upper(): "7" for name in names} | {"TARGET": "x", "DATA": "x", "NAME": "x", "MODEL": "x"}
    assert finished.plan(**environment) == []
    assert "7e-7" not in str(finished.commands("DATA=other", LR="7e-7"))


def test_the_command_line_overrides_the_target_s_file(checkout):
    words = checkout.commands("EPOCHS=77")["04"]
    assert words[words.index("--epochs") + 1] == "77"
    assert "--epochs" not in checkout.commands("EPOCHS=")["04"]


def test_an_unknown_target_is_named(checkout):
    result = checkout.make("-n", "all", "TARGET=nonesuch")
    assert result.returncode != 0 and "env/nonesuch.env" in result.stderr


def test_a_misspelt_setting_is_named(checkout):
    result = checkout.make("-n", "all", "LRR=3e-4")
    assert result.returncode != 0 and "LRR" in result.stderr


def test_the_example_of_local_env_reaches_the_scripts_through_make_and_through_bash(checkout):
    text = (ROOT / "env" / "local.env.example").read_text()
    (checkout.root / "env" / "local.env").write_text(re.sub(r"^#(?=export |[A-Z_]+=)", "", text, flags=re.M))
    settings = re.findall(r"^#export (\w+)=(.*)$", text, re.M)
    assert "NPROC" in dict(settings) and "API_KEY=" not in text
    result = checkout.make("generate")
    assert result.returncode == 0, result.stderr
    sourced = subprocess.run(["bash", "-c", ". env/local.env; env"], cwd=checkout.root, text=True, capture_output=True, check=True)
    for name, value in settings:
        assert re.search(rf"^{name}={re.escape(value)}$", checkout.called.read_text(), re.M), f"{name} does not reach the scripts"
        assert f"{name}={value}\n" in sourced.stdout
        assert re.match("CUDA_|HF_|OMP_", name) or any(f'"{name}"' in script.read_text() for script in ROOT.glob("scripts/*.py")), name


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: p.stem)
def test_a_target_file_is_short_and_plain(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 15
    for line in lines:
        assert re.fullmatch(r"(#.*)?|[A-Z][A-Z0-9_]*=[\w./,:+-]*", line), line
    names = [line.split("=")[0] for line in lines if line and not line.startswith("#")]
    assert sorted(names) == sorted(set(names)) and {"MODEL", "PROMPTS"} <= set(names)


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: p.stem)
def test_every_name_in_a_target_file_is_read_by_someone(path, checkout):
    readers = (ROOT / "Makefile").read_text()
    for script in (ROOT / "scripts").glob("*.py"):  # names that a script takes from its environment
        readers += " ".join(node.value for node in ast.walk(ast.parse(script.read_text()))
                            if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z_]+", str(node.value)))
    for name in re.findall(r"^(\w+)=", path.read_text(), re.M):
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", readers), f"{name} is read by nobody"
    assert checkout.plan(f"TARGET={path.stem}", "MODEL=models/smollm2-135m", "PROMPTS=self:3") == ALL


# --- secrets, help, dry runs ------------------------------------------------------------------------------------------

def test_a_key_on_the_command_line_is_refused_and_not_repeated(checkout):
    for goal in ("all", "plan", "help"):
        result = checkout.make(goal, "API_KEY=canary-7f3a")
        assert result.returncode != 0 and "export" in result.stderr
        assert "canary" not in result.stdout + result.stderr
    assert not checkout.called.exists() and not checkout.runs.exists()


def test_a_key_in_the_environment_is_shown_by_nobody(checkout):
    for words in (["plan"], ["-n", "all"], ["help"], ["plan", "API=https://example.org/v1", "API_MODEL=m"]):
        result = checkout.make(*words, API_KEY="canary-7f3a")
        assert result.returncode == 0 and "canary" not in result.stdout + result.stderr
    checkout.make("generate", API_KEY="canary-7f3a")
    call, *rest = checkout.called.read_text().splitlines()
    assert "01_generate.py" in call and "canary" not in call and "API_KEY=canary-7f3a" in rest  # it does arrive


def test_make_alone_prints_help(checkout):
    result = checkout.make()
    assert result.returncode == 0 and result.stdout == checkout.make("help").stdout
    for goal in re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M):
        assert re.search(rf"^  make {goal} +\S", result.stdout, re.M), f"help is silent about {goal}"
    for target in TARGETS:
        assert target.stem in result.stdout
    assert re.search(r"--draft-vocab \d+", result.stdout) and "TARGET=smollm2-135m" in result.stdout
    assert "--lr 7e-3" in checkout.make("LR=7e-3").stdout
    assert not checkout.called.exists()


def test_every_goal_is_phony():
    text = (ROOT / "Makefile").read_text()
    phony = set(" ".join(re.findall(r"^\.PHONY:(.*)", text, re.M)).split())
    assert set(re.findall(r"^([a-z-]+):.*## ", text, re.M)) <= phony


def test_a_dry_run_of_any_goal_starts_nothing(checkout):
    """A recipe that holds $(MAKE) is run by `make -n` too: what stands beside it must be as dry."""
    shutil.rmtree(checkout.root / ".venv")
    before = checkout.files()
    for goal in re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M):
        checkout.make("-n", goal)
        assert not checkout.called.exists(), f"make -n {goal} ran {checkout.called.read_text()[:200]}"
        assert checkout.files() == before, f"make -n {goal} changed files"


def test_the_makefile_keeps_to_its_size():
    assert len((ROOT / "Makefile").read_text().splitlines()) <= 150
    assert [p.name[:2] for p in STAGES] == ALL


def test_a_misspelt_setting_in_a_target_file_is_named(checkout):
    target = checkout.root / "env" / "mine.env"
    target.write_text("MODEL=models/mine\nPROMPTS=self:5\nEPOCH=3\n")
    result = checkout.make("plan", "TARGET=mine")
    assert result.returncode == 2 and "no such setting: EPOCH." in result.stderr
